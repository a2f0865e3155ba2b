"""Experiment tracking: rank 0 writes losses, and what the loader says of itself, to TensorBoard.

The step goes into the checkpoint, so that the curve of a run that was killed continues where its weights do.

    python -m jobs.examples.tracking --data digits.lance --log-dir curves; tensorboard --logdir curves
"""

import os
import sys
from typing import Any

import ray.train
import ray.train.torch
import torch

import raylance
from jobs.common import bringing
from jobs.examples import common

with bringing("raylance[examples]", __name__):
    from torch.utils.tensorboard import SummaryWriter


def train_fn(config: dict[str, Any]) -> None:
    """Trains; rank 0 writes curves."""
    loader = ray.train.get_dataset_shard("train")
    model = common.build_model(config["image_size"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved = raylance.restore(loader)
    step = 0
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    parallel = ray.train.torch.prepare_model(model)
    # Points after the checkpoint, from an attempt that died, are dropped when the curve is read: purge_step.
    writer = SummaryWriter(config["log_dir"], purge_step=step + 1) if loader.rank == 0 else None
    for epoch in range(loader.epoch, config["epochs"]):
        for batch in loader.iter_torch_batches(global_batch_size=config["global_batch_size"]):
            step += 1
            loss = common.train_step(parallel, optimizer, batch)
            if writer is not None:
                stats = loader.stats()
                writer.add_scalar("loss", loss.item(), step)
                writer.add_scalars("loader", {name: stats[name] for name in ("wait_s", "read_s", "decode_s")}, step)
            if step % config["checkpoint_every_steps"] == 0 or loader.epoch > epoch:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                raylance.report({"loss": loss.item(), "epoch": loader.epoch, "step": step}, loader, state=state)
    if writer is not None:
        writer.close()


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = common.parser(__file__, __doc__)
    parser.add_argument("--log-dir", type=os.path.abspath, required=True, metavar="DIR", help="of TensorBoard")
    return common.fit(parser.parse_args(argv), train_fn)


if __name__ == "__main__":
    sys.exit(main())
