"""Tensor parallelism beside FSDP2: the ranks of one model replica get the same rows, each replica other ones.

The training function builds a `DeviceMesh`, and `loader.reshard(mesh["dp"])` sets which ranks are peers. Peers that are
contiguous ranks, as here, need only `DataConfig(ranks_per_replica=2)`. HSDP alone has no peers and needs neither; with
tensor parallelism, it is `loader.reshard(mesh["replicate", "shard"])`.

A run may continue with other numbers of replicas and of peers: a checkpoint has one position for all ranks, and
`torch.distributed.checkpoint` deals out the weights again (the loop is that of `fsdp2.py`). Each peer reads and decodes
for itself. With images, that takes the CPUs of all ranks: `num_decoders=` counts for each of them.

    python -m jobs.examples.tensor_parallel --data digits.lance --num-workers 4 --tensor-parallel 2
"""

import sys
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from jobs.examples import common, fsdp2

WIDTH, HEAD, PATCH = 32, 8, 4
PLAN = {
    "query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(), "joined": RowwiseParallel(),
    "wide": ColwiseParallel(), "narrow": RowwiseParallel(),
}  # fmt: skip


class Block(nn.Module):
    """Attention and a small network, whose heads and inner columns are spread over peers."""

    def __init__(self) -> None:
        """Has as many heads as fit."""
        super().__init__()
        self.query, self.key, self.value, self.joined = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns (n, patches, WIDTH)."""
        heads = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.query, self.key, self.value))
        x = x + self.joined(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.relu(self.wide(x)))


class Transformer(nn.Module):
    """Two blocks over the patches of an image, for ten classes."""

    def __init__(self) -> None:
        """Has the same weights wherever it is made."""
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
            self.blocks = nn.Sequential(Block(), Block())
            self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Takes (n, 3, H, W), returns (n, 10)."""
        return self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


def train_fn(config: dict[str, Any]) -> None:
    """Trains a transformer whose blocks are spread over the peers of a replica, and whose weights over all ranks."""
    loader, device = ray.train.get_dataset_shard("train"), ray.train.torch.get_device()
    peers = config["tensor_parallel"]
    mesh = init_device_mesh(device.type, (loader.world_size // peers, peers), mesh_dim_names=("dp", "tp"))
    loader.reshard(mesh["dp"])
    model = Transformer().to(device)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    fsdp2.train(config, loader, model)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = common.parser(__file__, __doc__)
    parser.add_argument("--tensor-parallel", type=int, default=2, metavar="N", help="ranks of each replica")
    return common.fit(parser.parse_args(argv), train_fn)


if __name__ == "__main__":
    sys.exit(main())
