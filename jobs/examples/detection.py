"""Detection: boxes that follow the crop of their image, any number in each row.

`ImageCrop` gives the drawn crop as a column. A transform maps the boxes with it, in a decode actor, and leaves out
those of which less than a fifth is left. Batches have the boxes padded, with their number in `boxes_length`.

Cost: the head of each image is parsed once more for its size, and the transform is Python: some tens of microseconds a
row beside a millisecond of decoding. Points of keypoints go the same way, with `map_points`. Where several images make
one training row (mosaic), this does not fit: a row depends on others then.

    python -m jobs.examples.made_data scenes scenes.lance
    python -m jobs.examples.detection --data scenes.lance --image-size 32
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

import raylance
from jobs.common import locate
from jobs.examples import common

GRID = 8


def map_all(batch: dict[str, Any], size: int) -> dict[str, Any]:
    """Boxes of the whole image to boxes of its crop."""
    mapped = [
        raylance.images.map_boxes(boxes, crop, (size, size), least_visible=0.2)[0].astype(np.float32).tolist()
        for boxes, crop in zip(batch["boxes"], batch.pop("image_crop"), strict=True)
    ]
    return batch | {"boxes": pa.array(mapped, pa.list_(pa.list_(pa.float32(), 4)))}


def build_model(size: int) -> torch.nn.Module:
    """Says for each cell of a grid whether a box has its centre there; the same weights wherever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 5, padding=2), torch.nn.ReLU(), torch.nn.MaxPool2d(size // GRID),
            torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 1, 1),
        )  # fmt: skip


def loss_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Binary cross-entropy of the cells."""
    images, boxes = batch["image"].float() / 255, batch["boxes"]  # (n, 3, H, W), (n, most, 4)
    is_box = torch.arange(boxes.shape[1]) < batch["boxes_length"][:, None].cpu()
    row, place = is_box.nonzero(as_tuple=True)
    centres = (boxes[row, place, :2] + boxes[row, place, 2:]) / 2
    x, y = (centres * GRID / images.shape[2]).long().clamp(0, GRID - 1).unbind(1)
    target = torch.zeros(len(images), GRID, GRID, device=images.device)
    target[row, y, x] = 1
    return torch.nn.functional.binary_cross_entropy_with_logits(model(images)[:, 0], target)


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains; see `common.train`."""
    padding = {"boxes": raylance.Pad(0)}
    model = build_model(config["image_size"])
    return common.train(config, model=model, loss_fn=loss_of, batching={"pad_lists": padding})


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    crop = raylance.RandomResizedCrop(scale=(0.3, 1.0))
    data = raylance.dataset(
        locate(args.data),
        columns=[
            raylance.Image("image", size=args.image_size, augment=crop, hflip=0.5),
            raylance.images.ImageCrop("image"),
            "boxes",
        ],
        filter="split = 'train'",
        transform=functools.partial(map_all, size=args.image_size),
        remainder="ragged",
    )
    return common.fit(args, train_fn, train_data=data)


if __name__ == "__main__":
    sys.exit(main())
