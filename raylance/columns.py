"""Owns the names of the columns that raylance adds to batches, and how errors name rows; nothing else."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

ROW_OFFSET = "_rowoffset"
"""Offset of the row in the pinned dataset version, int64: what `dataset.take([offset])` reads."""

VALID = "_valid"
"""False where the row is padding, or could not be decoded and was masked; bool."""

DRAW = "_draw"
"""Epoch position of a row that may come more than once, int64; only on the way to a decoder."""

SEED = "_seed"
"""What a transform may seed its own randomness with: of the row, the epoch and the seed, uint64."""

COMPONENT = "_component"
"""Which dataset of a mixture a row is from, by its place among the names, int64."""

TRANSFORM = "transform()"
"""Stands in place of a column where it is the transform that fails on a row."""

COMPONENT_SHIFT = 48
"""In a mixture, offsets on their way carry the component in the bits from this one on."""

OFFSET_MASK = (1 << COMPONENT_SHIFT) - 1
"""The bits of such an offset that are the row's own, in its dataset."""


def dataset_names(uri: Any) -> tuple[str, ...]:
    """What errors call the datasets of a feed, by component, from its URI, or from its URIs by component."""
    return tuple(f"{name} ({at})" for name, at in uri.items()) if isinstance(uri, Mapping) else (str(uri),)


def dataset_stem(uri: Any) -> str:
    """What a dataset is called for short: the last part of its URI, without its end; of several, "data"."""
    return str(uri).rstrip("/").rpartition("/")[2].removesuffix(".lance") if isinstance(uri, str) else "data"


def describe_rows(offsets: npt.NDArray[np.int64], datasets: tuple[str, ...]) -> str:
    """Says which rows these are, for an error: the range of offsets in each dataset that they are from.

    Args:
        offsets: Row offsets as they travel, component bits included; at least one.
        datasets: Names of the datasets, by component.
    """
    which = offsets >> COMPONENT_SHIFT
    told = []
    for component in np.unique(which):
        own = offsets[which == component] & OFFSET_MASK
        low, high = own.min(), own.max()
        rows = f"row offset {low}" if low == high else f"row offsets between {low} and {high}"
        told.append(rows + "".join(f" of {name}" for name in datasets[component:][:1]))
    return ", ".join(told)
