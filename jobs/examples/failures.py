"""Failures and preemption: a run continues from its last checkpoint when a worker dies, and makes one before a node
goes.

`FailureConfig` starts all ranks again; `restore` puts the loader at the row after the checkpoint. Where the cloud
announces that it takes a node away, `get_preemption_info` reports it, and a checkpoint at that moment loses no step.

    python -m jobs.examples.failures --data digits.lance --rows seen --die-at-step 15
"""

import sys
from typing import Any

import ray.train
import ray.train.torch
import torch

import raylance
from jobs.examples import common


def train_fn(config: dict[str, Any]) -> None:
    """Trains, with a checkpoint every some steps and one when a node is about to go."""
    loader = ray.train.get_dataset_shard("train")
    model = common.build_model(config["image_size"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    saved = raylance.restore(loader)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    parallel = ray.train.torch.prepare_model(model)
    witness, announced = common.Witness(config, loader), False
    for epoch in range(loader.epoch, config["epochs"]):
        batches = loader.iter_torch_batches(global_batch_size=config["global_batch_size"], with_row_offset=True)
        for step, batch in enumerate(batches, 1):
            witness.saw(batch)
            optimizer.zero_grad()
            loss = common.loss_of(parallel, batch)
            loss.backward()
            optimizer.step()
            # All ranks ask at the same step: the answer is rank 0's.
            goes = step % 5 == 0 and not announced and ray.train.get_preemption_info() is not None
            announced |= goes
            if goes or step % config["checkpoint_every_steps"] == 0 or loader.epoch > epoch:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                raylance.report({"loss": loss.item(), "epoch": loader.epoch}, loader, state=state)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    return common.fit(args, train_fn, run_config=common.run_config(args, max_failures=3))


if __name__ == "__main__":
    sys.exit(main())
