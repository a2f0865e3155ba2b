"""Owns the names of the columns that raylance adds to batches, and of rows in errors; never reads columns or rows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

ROW_OFFSET = "_rowoffset"
"""Offset of the row in the pinned dataset version, int64; `dataset.take([offset])` reads the row."""

VALID = "_valid"
"""False if the row is padding, or could not be decoded and was masked; bool."""

DRAW = "_draw"
"""Epoch position of a row that may come more than once, int64; used only between reader and decoder."""

SEED = "_seed"
"""A seed for a transform's own randomness, from the row, the epoch and the dataset's seed, uint64."""

COMPONENT = "_component"
"""Index of the row's dataset in a mixture, int64."""

TRANSFORM = "transform()"
"""Takes the place of a column name if the transform fails on a row."""

COMPONENT_SHIFT = 48
"""Between reader and batch, offsets of a mixture hold the component in the bits from this one on."""

OFFSET_MASK = (1 << COMPONENT_SHIFT) - 1
"""The bits of such an offset that hold the row's offset in its own dataset."""


def dataset_names(uri: Any) -> tuple[str, ...]:
    """Names of the datasets for errors, from a URI, or from URIs by component."""
    return tuple(f"{name} ({at})" for name, at in uri.items()) if isinstance(uri, Mapping) else (str(uri),)


def dataset_stem(uri: Any) -> str:
    """A short name of a dataset: the last part of its URI, without ".lance"; "data" for several."""
    return str(uri).rstrip("/").rpartition("/")[2].removesuffix(".lance") if isinstance(uri, str) else "data"


def describe_rows(offsets: npt.NDArray[np.int64], datasets: tuple[str, ...]) -> str:
    """Names rows for an error: the range of the given offsets, which have component bits, in each dataset."""
    which = offsets >> COMPONENT_SHIFT
    ranges = []
    for component in np.unique(which):
        own = offsets[which == component] & OFFSET_MASK
        low, high = own.min(), own.max()
        rows = f"row offset {low}" if low == high else f"row offsets between {low} and {high}"
        ranges.append(rows + "".join(f" of {name}" for name in datasets[component:][:1]))
    return ", ".join(ranges)
