"""Hugging Face Accelerate: `loader.batches(…)` is registered for checkpointing, like anything else that has a state.

Accelerate wraps DataLoaders to give each process its part; raylance's batches are a rank's part already, and are left
as they are. `save_state` and `load_state` carry the position along.

    python -m jobs.examples.accelerate_loop --data digits.lance
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch

import raylance
from jobs.common import bringing
from jobs.examples import common

with bringing("raylance[examples]", __name__):
    from accelerate import Accelerator


def train_fn(config: dict[str, Any]) -> None:
    """Trains with Accelerate's loop."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    loader = ray.train.get_dataset_shard("train")
    batches = loader.batches(global_batch_size=config["global_batch_size"])
    model = common.build_model(config["image_size"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    accelerator.register_for_checkpointing(batches)
    raylance.restore(batches, load=lambda directory: accelerator.load_state(str(directory / "accelerate")))
    for epoch in range(batches.epoch, config["epochs"]):
        for step, batch in enumerate(batches, 1):
            optimizer.zero_grad()
            loss = common.loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            if step % config["checkpoint_every_steps"] == 0 or batches.epoch > epoch:
                with tempfile.TemporaryDirectory() as directory:
                    accelerator.save_state(str(Path(directory, "accelerate")))
                    raylance.report({"loss": loss.item(), "epoch": batches.epoch}, batches, checkpoint=directory)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    return common.fit(common.parser(__file__, __doc__).parse_args(argv), train_fn)


if __name__ == "__main__":
    sys.exit(main())
