"""The names of columns that raylance adds to batches, and of rows in error texts."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

ROW_OFFSET = "_rowoffset"
"""Offset of the row in the pinned dataset version, int64; `dataset.take([offset])` reads the row."""

VALID = "_valid"
"""False if the row is padding, or could not be decoded and was masked; bool."""

DRAW = "_draw"
"""Epoch position of a row that may come more than once, int64; used only between reader and decoder."""

SEED = "_seed"
"""Seed for the random numbers of a transform, derived from the row, the epoch and the dataset's seed; uint64."""

COMPONENT = "_component"
"""Index of the row's dataset in a mixture, int64."""

STEP_COST = "_step_cost"
"""Cost of all rows of a step over all ranks, in each micro-batch: an integer; of several costs, a dict by name."""

COST = "cost"
"""Name of the cost of a dataset whose `cost` is not a dict of several, and of the table that holds it."""

UNNEEDED = "_unneeded:"
"""Prefix, with the name of an encoded column, of the column that says which rows of a block no sample needs in it,
bool; used only between reader and decoder.
"""

TRANSFORM = "transform()"
"""Used instead of a column name in the notes on a row on which the transform fails."""

_SHIFT = 48  # between reader and batch, bits 48 and up of a row offset hold the component of a mixture
_OWN = (1 << _SHIFT) - 1

Offsets = TypeVar("Offsets", int, npt.NDArray[np.int64])


def split_offsets(offsets: Offsets) -> tuple[Offsets, Offsets]:
    """Splits the joined offsets of `join_offsets`: returns the index of each row's dataset, and its offset there."""
    return offsets >> _SHIFT, offsets & _OWN


def join_offsets(components: int | npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Joins row offsets with the index of each row's dataset in a mixture, or with one index for all, in bits 48 and
    up. So one integer, a joined offset, names a row of a mixture. Without a mixture, the index is 0.
    """
    return components << _SHIFT | offsets


def dataset_of(offset: int, datasets: Sequence[str]) -> str | None:
    """Returns the name of the dataset of a joined offset, see `join_offsets`; None if `datasets` does not have it."""
    component, _ = split_offsets(offset)
    return datasets[component] if component < len(datasets) else None


def dataset_names(uri: Any) -> tuple[str, ...]:
    """Returns the names of the datasets for error texts, from one URI, or from a mapping of URIs by component."""
    return tuple(f"{name} ({at})" for name, at in uri.items()) if isinstance(uri, Mapping) else (str(uri),)


def dataset_stem(uri: Any) -> str:
    """Returns a short name of a dataset: the last part of its URI, without ".lance"; "data" for a mixture."""
    return str(uri).rstrip("/").rpartition("/")[2].removesuffix(".lance") if isinstance(uri, str) else "data"


def describe_rows(offsets: npt.NDArray[np.int64], datasets: tuple[str, ...]) -> str:
    """Names rows in an error text: the range in each dataset. `offsets` are joined, see `join_offsets`."""
    which, own_offsets = split_offsets(offsets)
    ranges = []
    for component in np.unique(which):
        own = own_offsets[which == component]
        low, high = own.min(), own.max()
        rows = f"row offset {low}" if low == high else f"row offsets between {low} and {high}"
        ranges.append(rows + "".join(f" of {name}" for name in datasets[component:][:1]))
    return ", ".join(ranges)
