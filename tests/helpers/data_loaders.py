"""Loaders of torch over raylance's datasets, in both styles."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.torch_data import IterableDataset, Loader, MapDataset, RowSampler
from tests.helpers.scripts import FORKED

STYLES = ["iterable", "map"]


def numbered_texts() -> pa.Table:
    """1,003 rows, numbered by their offset."""
    numbers = np.arange(1003)
    return pa.table({"id": numbers, "text": [f"row {i}" for i in numbers]})


def open_dataset(uri: str, **options: Any) -> raylance.Dataset:
    return raylance.dataset(uri, **({"columns": ["id"], "remainder": "ragged"} | options))


def shorten_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the 5 s for which torch waits for a worker that is left in mid-pass."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)


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
