"""HSDP: weights are sharded inside of a group of ranks, and replicated over the groups.

Both dimensions of the mesh are data parallel: each rank gets rows of its own, so the loader needs no setting. With
tensor parallelism beside it, `loader.reshard(mesh["replicate", "shard"])` leaves the third dimension to peers; see
`tensor_parallel.py`. The loop, with sharded checkpoints, is that of `fsdp2.py`.

Cost: none for the loader. Use it where a group has a fast network (a node) and the groups a slower one; with one node,
FSDP2 alone does the same with fewer copies of the weights.

    python -m jobs.examples.hsdp --data digits.lance --num-workers 4 --shard 2
"""

import sys
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from jobs.examples import common, fsdp2


def train_fn(config: dict[str, Any]) -> None:
    """Trains a network whose weights are spread over the ranks of a group."""
    loader, device = ray.train.get_dataset_shard("train"), ray.train.torch.get_device()
    shape = loader.world_size // config["shard"], config["shard"]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    model = common.build_model(config["image_size"]).to(device)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fsdp2.train(config, loader, model)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = common.parser(__file__, __doc__)
    parser.add_argument("--shard", type=int, default=2, metavar="N", help="ranks that share one copy of the weights")
    return common.fit(parser.parse_args(argv), train_fn)


if __name__ == "__main__":
    sys.exit(main())
