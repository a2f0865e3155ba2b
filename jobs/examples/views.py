"""Self-supervised learning from views: two crops of each image (SimCLR), or crops of two sizes (multi-crop).

`views=2` crops the decoded image twice, by draws of its own each. With a name for each size, one column gives large and
small crops, and a row is still decoded once.

Cost: a view costs its crop and resize, not a decode; its pixels travel. SimCLR's loss compares with all rows of the
batch: of the rank's here, as each rank has rows of its own; a larger batch or gathered features compare with more. The
two views of a row are neighbours in one batch, on one rank, whatever the number of ranks.

    python -m jobs.examples.made_data scenes scenes.lance
    python -m jobs.examples.views --data scenes.lance --image-size 32
    python -m jobs.examples.views --data scenes.lance --image-size 32 --multi-crop --run-name multi-crop
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

import raylance
from jobs.common import locate
from jobs.examples import common


class Encoder(torch.nn.Module):
    """Images of any size to vectors of length 1; the same weights wherever it is made."""

    def __init__(self) -> None:
        """Draws the weights."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = torch.nn.Sequential(
                torch.nn.Conv2d(3, 16, 5, 2, 2), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3, 2, 1), torch.nn.ReLU(),
                torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 32),
            )  # fmt: skip

    def forward(self, *views: torch.Tensor) -> torch.Tensor:
        """Takes uint8 tensors (n, views, 3, H, W), each of a size; returns (n, all views, 32)."""
        made = [self.layers(each.flatten(0, 1).float() / 255).unflatten(0, each.shape[:2]) for each in views]
        return torch.nn.functional.normalize(torch.cat(made, dim=1), dim=2)


def simclr(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss of Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020."""
    vectors = model(batch["image"]).transpose(0, 1).flatten(0, 1)  # (2 n, 32): first views, then second ones
    scores = (vectors @ vectors.T / 0.1).fill_diagonal_(float("-inf"))
    n = len(vectors) // 2
    return torch.nn.functional.cross_entropy(scores, torch.arange(2 * n, device=scores.device).roll(n))


def agreement(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Each crop predicts the large ones of its row among those of the rank's rows."""
    vectors = model(batch["large"], batch["small"])  # (n, 2 + 4, 32)
    targets, losses = torch.arange(len(vectors), device=vectors.device), []
    for large in range(2):
        for view in range(vectors.shape[1]):
            if view != large:
                scores = vectors[:, view] @ vectors[:, large].detach().T / 0.1
                losses.append(torch.nn.functional.cross_entropy(scores, targets))
    return torch.stack(losses).mean()


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains; see `common.train`."""
    return common.train(config, model=Encoder(), loss_fn=agreement if config["multi_crop"] else simclr)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = common.parser(__file__, __doc__)
    parser.add_argument(
        "--multi-crop", action="store_true", help="two large and four small crops in place of two views"
    )
    args = parser.parse_args(argv)
    crop, part = raylance.RandomResizedCrop(scale=(0.3, 1.0)), raylance.RandomResizedCrop(scale=(0.05, 0.3))
    size, half = args.image_size, args.image_size // 2
    views = [raylance.Image("image", size=size, views=2, augment=crop, hflip=0.5)]
    if args.multi_crop:
        views = [
            raylance.Image("image", name="large", size=size, views=2, augment=crop, hflip=0.5),
            raylance.Image("image", name="small", size=half, views=4, augment=part, hflip=0.5),
        ]
    data = raylance.dataset(locate(args.data), columns=views, filter="split = 'train'", remainder="ragged")
    return common.fit(args, train_fn, train_data=data)


if __name__ == "__main__":
    sys.exit(main())
