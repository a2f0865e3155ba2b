"""Loaders of torch over raylance's datasets, in both styles."""

from typing import Any

import raylance
from raylance.torch_data import IterableDataset, Loader, MapDataset, RowSampler
from tests.helpers.scripts import FORKED

STYLES = ["iterable", "map"]


def make(
    kind: Any,
    handle: raylance.Dataset,
    style: str,
    size: int,
    workers: int = 0,
    *,
    kinds: tuple[Any, Any] = (IterableDataset, MapDataset),
    **options: Any,
) -> tuple[Any, Any]:
    """What has the steps, and a loader of a kind: DataLoader, StatefulDataLoader, `Loader`."""
    place = {name: options.pop(name) for name in ("dist_info", "ranks_per_replica") if name in options}
    shown = {"with_row_offset": options.pop("with_row_offset", False)}
    if workers:
        options = {"num_workers": workers, "multiprocessing_context": FORKED} | options
    iterable, by_index = kinds
    if style == "map":
        sampler = RowSampler(handle, global_batch_size=size, **place)
        return sampler, kind(by_index(handle, **shown), batch_sampler=sampler, **options)
    steps = iterable(handle, global_batch_size=size, **place, **shown)
    return steps, kind(steps, **({} if kind is Loader else {"batch_size": None}), **options)
