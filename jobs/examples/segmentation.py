"""Segmentation: an image and its mask, with one crop and one flip.

`like="image"` gives the mask the draws of the image. `interpolation="nearest"` makes no class that is not there, and
`mode="L"` reads one channel.

Cost: the mask is decoded by Pillow, which takes longer than a JPEG of the same size; PNG masks of photographs are often
half of the decoding. Store them at the size that you train at (jobs/materialize) where that is the limit. For crops
that no box describes, such as rotations, decode both at full size and transform them together in `transform=`, seeded
with `_seed`.

    python -m jobs.examples.made_data scenes scenes.lance
    python -m jobs.examples.segmentation --data scenes.lance --image-size 32
"""

import sys
from collections.abc import Mapping
from typing import Any

import torch

import raylance
from jobs.common import locate
from jobs.examples import common


def build_model() -> torch.nn.Module:
    """Three convolutions, for two classes of each pixel; the same weights wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 5, padding=2), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 5, padding=2),
            torch.nn.ReLU(), torch.nn.Conv2d(16, 2, 1),
        )  # fmt: skip


def loss_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross-entropy over all pixels."""
    return torch.nn.functional.cross_entropy(model(batch["image"].float() / 255), batch["mask"][:, 0].long())


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains; see `common.train`."""
    return common.train(config, model=build_model(), loss_fn=loss_of)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    crop = raylance.RandomResizedCrop(scale=(0.3, 1.0))
    data = raylance.dataset(
        locate(args.data),
        columns=[
            raylance.Image("image", size=args.image_size, augment=crop, hflip=0.5),
            raylance.Image("mask", like="image", mode="L", interpolation="nearest"),
        ],
        filter="split = 'train'",
        remainder="ragged",
    )
    return common.fit(args, train_fn, train_data=data)


if __name__ == "__main__":
    sys.exit(main())
