"""Asynchronous validation: each checkpoint is validated by a task of its own while training continues.

The task gets the handle of the validation rows and iterates over it; `restore(None, checkpoint)` gives it the
weights.

    python -m jobs.examples.async_validation --data digits.lance
"""

import functools
import sys
from typing import Any

import ray.train
import torch

import raylance
from jobs.examples import common


def validate(checkpoint: ray.train.Checkpoint, *, val: raylance.Dataset, image_size: int) -> dict[str, float]:
    """The accuracy of a checkpoint on all validation rows."""
    saved = raylance.restore(None, checkpoint)
    assert saved is not None
    model = common.build_model(image_size)
    model.load_state_dict(saved["model"])
    right = 0
    with torch.inference_mode(), val:
        for batch in val.iter_torch_batches(batch_size=256):
            right += int((model(batch["image"].float() / 255).argmax(1) == batch["label"]).sum())
    return {"val_accuracy": right / len(val)}


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains, and has each checkpoint validated."""
    return common.train(config, validation=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    fn = functools.partial(validate, val=common.open_data(args)["val"], image_size=args.image_size)
    return common.fit(args, train_fn, validation_config=ray.train.ValidationConfig(fn=fn))


if __name__ == "__main__":
    sys.exit(main())
