"""FSDP2 with sharded checkpoints: each rank writes the part of the weights that it holds, and raylance adds the
position.

`torch.distributed.checkpoint` writes and reads the parts, also on another number of ranks; `report(checkpoint=…)`
takes a directory of each rank, and `restore(load=…)` calls back while the checkpoint lies on this machine.

    python -m jobs.examples.fsdp2 --data digits.lance
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import raylance
from jobs.examples import common


def train_fn(config: dict[str, Any]) -> None:
    """Trains a network whose weights are spread over all ranks."""
    loader = ray.train.get_dataset_shard("train")
    device = ray.train.torch.get_device()
    mesh = init_device_mesh(device.type, (loader.world_size,))
    model = common.build_model(config["image_size"]).to(device)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(config, loader, model)


def train(config: dict[str, Any], loader: raylance.RankLoader, model: torch.nn.Module) -> None:
    """Trains a network that is spread over ranks, from the newest checkpoint on; each rank saves its part."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def load(directory: Path) -> None:
        weights, moments = get_state_dict(model, optimizer)
        parts = {"model": weights, "optimizer": moments}
        dcp.load(parts, checkpoint_id=directory)
        set_state_dict(model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])

    raylance.restore(loader, load=load)
    for epoch in range(loader.epoch, config["epochs"]):
        for step, batch in enumerate(loader.iter_torch_batches(global_batch_size=config["global_batch_size"]), 1):
            loss = common.train_step(model, optimizer, batch)
            if step % config["checkpoint_every_steps"] == 0 or loader.epoch > epoch:
                weights, moments = get_state_dict(model, optimizer)
                with tempfile.TemporaryDirectory() as directory:
                    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory)
                    raylance.report({"loss": loss.item(), "epoch": loader.epoch}, loader, checkpoint=directory)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    return common.fit(common.parser(__file__, __doc__).parse_args(argv), train_fn)


if __name__ == "__main__":
    sys.exit(main())
