"""Reproducibility: two runs with the same seed have the same batches, to the byte, and so the same weights.

Rows, order and augmentation depend on the seed, the epoch and the row alone: not on how many decoders there are, nor
on which was faster. `enable_reproducibility` does for torch what raylance does for the data.

    python -m jobs.examples.reproducible --data digits.lance
"""

import hashlib
import sys
from typing import Any

import ray.train
import ray.train.torch
import torch

from jobs.examples import common


def train_fn(config: dict[str, Any]) -> dict[str, str]:
    """Trains; returns a digest of this rank's batches and of the weights at the end."""
    ray.train.torch.enable_reproducibility(seed=0)
    loader = ray.train.get_dataset_shard("train")
    model = common.build_model(config["image_size"])
    parallel = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    digest = hashlib.sha256()
    for _ in range(config["epochs"]):
        for batch in loader.iter_torch_batches(global_batch_size=config["global_batch_size"]):
            digest.update(batch["image"].contiguous().numpy().tobytes() + batch["label"].numpy().tobytes())
            common.train_step(parallel, optimizer, batch)
    for weights in model.state_dict().values():
        digest.update(weights.numpy().tobytes())
    return {"digest": digest.hexdigest()}


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    return common.fit(common.parser(__file__, __doc__).parse_args(argv), train_fn)


if __name__ == "__main__":
    sys.exit(main())
