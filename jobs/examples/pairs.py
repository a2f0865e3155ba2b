"""Contrastive pairs: an image and its caption, two columns of a row, compared with all pairs of the global batch.

The image is decoded; the caption's tokens are padded. Each rank encodes its rows, and the vectors of all ranks are
gathered, with gradients, so that the loss is that of the global batch (CLIP).

Cost: every step gathers the vectors; rows stay where they are. All ranks of a step must have as many rows: with
`remainder="drop"` (the default) and a global batch that the ranks divide, they have. Steps of unlike ranks would need
gathering of unlike shapes; do not use `"ragged"` here.

    python -m jobs.examples.made_data scenes scenes.lance
    python -m jobs.examples.pairs --data scenes.lance --image-size 32
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.nn.functional as collective

import raylance
from jobs.common import locate
from jobs.examples import common
from jobs.examples.made_data import WORDS

LONGEST = 8


class Pairs(torch.nn.Module):
    """Images and captions to vectors of length 1; the same weights wherever it is made."""

    def __init__(self) -> None:
        """Draws the weights."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = torch.nn.Embedding(WORDS, 32, padding_idx=0)
            self.picture = torch.nn.Sequential(
                torch.nn.Conv2d(3, 32, 5, 2, 2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
                torch.nn.Linear(512, 32),
            )  # fmt: skip

    def forward(self, images: torch.Tensor, captions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Takes uint8 (n, 3, H, W) and int32 (n, LONGEST); returns two tensors (n, 32)."""
        parts = self.picture(images.float() / 255), self.words(captions).sum(1)
        return tuple(torch.nn.functional.normalize(part, dim=1) for part in parts)


def loss_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss of Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021."""
    images, captions = (torch.cat(collective.all_gather(part)) for part in model(batch["image"], batch["caption"]))
    scores, targets = images @ captions.T / 0.1, torch.arange(len(images), device=images.device)
    one_way, other = (torch.nn.functional.cross_entropy(each, targets) for each in (scores, scores.T))
    return (one_way + other) / 2


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains; see `common.train`."""
    padding = {"caption": raylance.Pad(0, length=LONGEST, lengths=False)}
    return common.train(config, model=Pairs(), loss_fn=loss_of, batching={"pad_lists": padding})


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    image = raylance.Image("image", size=args.image_size)
    data = raylance.dataset(locate(args.data), columns=[image, "caption"], filter="split = 'train'")
    return common.fit(args, train_fn, train_data=data)


if __name__ == "__main__":
    sys.exit(main())
