"""Epochs of the pictures of the session, by any loader, and their comparison."""

from typing import Any

import torch

import raylance
from raylance.api.loader import RankLoader


def open_images(uri: str, **changes: Any) -> raylance.Dataset:
    image = raylance.Image("image", size=(16, 20), augment=raylance.RandomResizedCrop(scale=(0.5, 1)), hflip=0.5)
    arguments = {"columns": ["image", "label"], "filter": "label != 3", "remainder": "ragged", "seed": 5}
    order = raylance.WindowShuffle(shard_rows=20, window_shards=2)
    return raylance.dataset(uri, **(arguments | {"decode": image, "order": order} | changes))


def batches_of(loader: RankLoader, batch: int, limit: int | None = None) -> list[dict[str, Any]]:
    """Batches with their row offsets; tensors are cloned, because views pin the object store."""
    iterator = loader.iter_torch_batches(global_batch_size=batch, with_row_offset=True)
    return [
        {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in found.items()}
        for _, found in zip(range(limit if limit is not None else 10**9), iterator, strict=False)
    ]


def join(ranks: list[list[dict[str, Any]]]) -> list[dict[str, torch.Tensor]]:
    assert len({len(batches) for batches in ranks}) == 1, "ranks make different numbers of steps"
    return [
        {name: torch.cat([found[name] for found in parts]) for name in parts[0]} for parts in zip(*ranks, strict=True)
    ]


def assert_same(left: list[dict[str, torch.Tensor]], right: list[dict[str, torch.Tensor]]) -> None:
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert torch.equal(ours[name], theirs[name]), name
