"""Datasets of which each value that processes share is worth a reference into the object store."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

import raylance

ROWS = 400_000  # enough for each table to be sent as a reference

LARGE: dict[str, Callable[[], dict[str, Any]]] = {
    "selection": lambda: {"filter": "id % 2 = 1"},
    "weights of a column": lambda: {"order": raylance.Weighted(weights="weight")},
    "weights of an array": lambda: {"order": raylance.Weighted(weights=1.0 + np.arange(ROWS) % 3)},
    "class members": lambda: {"order": raylance.ClassBalanced(column="label")},
}


def large_table() -> pa.Table:
    """The rows that the settings of `LARGE` select and draw."""
    rows = np.arange(ROWS)
    return pa.table({"id": rows, "label": rows % 7, "weight": 1.0 + rows % 3})


def first_ids(loader: raylance.RankLoader) -> list[int]:
    return next(iter(loader.batches(global_batch_size=64)))["id"].tolist()
