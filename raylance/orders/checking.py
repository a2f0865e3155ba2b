"""Owns the checks of custom orders in use: their rows lie in the selection, and a sample of them does not repeat; never
chooses a row, and never checks an order of raylance.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from raylance.errors import ConfigError, RaylanceError
from raylance.orders.order import Epoch, Resolved
from raylance.orders.permutation import Int64Array, mix64

_WHOLE_ROWS = 1 << 16  # epochs of at most this size are compared whole
_BLOCK = 1024  # neighbours that are compared, at each of four places
_SPREAD = 4096  # positions that are compared, evenly spread; and as many at random


def select_rows(epoch: Epoch, positions: Int64Array) -> Int64Array:
    """Asks an epoch for the rows at some positions, and checks those of a custom order.

    Raises:
        ConfigError: If there is not one integer for each position, or one of them is not a row of the selection.
    """
    if not epoch.order.is_custom:
        return epoch.rows(positions)
    name, order = type(epoch.order.settings).__name__, epoch.order
    advice = f"raylance.testing.check_order({name}(…)) tries it on small selections."
    try:
        found: npt.NDArray[Any] = np.asarray(epoch.rows(positions))
    except RaylanceError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name}.rows_of() failed for {len(positions):,} positions of epoch {epoch.number} of {order.rows:,} rows "
            f"({type(error).__name__}: {error}). The epoch ends here. Return a row for each position in "
            f"[0, {order.epoch_rows}). {advice}"
        ) from error
    if found.dtype.kind not in "iu" or found.shape != positions.shape:
        raise ConfigError(
            f"{name}.rows_of() gave {found.dtype} of shape {found.shape} for positions of shape {positions.shape}. The "
            f"epoch ends here, since other rows would be read. Return integers, one for each position. {advice}"
        )
    outside = np.flatnonzero((found < 0) | (found >= order.rows))
    if len(outside):
        raise ConfigError(
            f"{name}.rows_of() gave row {found[outside[0]]:,} at position {positions[outside[0]]} of epoch "
            f"{epoch.number}; the selection has the rows 0 to {order.rows - 1}. The epoch ends here: this is not a row "
            f"of the dataset, or one that the filter excludes. Return rows of the selection, in [0, epoch.order.rows). "
            f"{advice}"
        )
    return found.astype(np.int64, copy=False)


def check_sample(order: Resolved, number: int) -> None:
    """Looks for a row that a custom order gives twice, although it does not set `repeats`.

    It compares some thousands of positions of an epoch, both neighbours and distant ones, at a small cost for any size.

    Raises:
        ConfigError: If there is such a row, or a row that is not in the selection; see `select_rows`.
    """
    for part in order.custom_parts():
        name, epoch = type(part.settings).__name__, part.epoch(number)
        fix = f"Make it a permutation for every epoch, or set repeats = True in {name} to allow this."
        if not part.repeats and part.epoch_rows != part.rows:
            raise ConfigError(
                f"{name} says that an epoch has {part.epoch_rows:,} positions, and the selection has {part.rows:,} "
                f"rows. Some would come twice or never. {fix}"
            )
        positions = _sample(part.epoch_rows)
        rows = select_rows(epoch, positions)
        by_row = np.argsort(rows, kind="stable")
        twice = np.flatnonzero(np.diff(rows[by_row]) == 0)
        if len(twice) and not part.repeats:
            first, second = positions[by_row[twice[0] : twice[0] + 2]]
            raise ConfigError(
                f"{name} gives row {rows[by_row[twice[0]]]} at positions {first} and {second} of epoch {number}. Rows "
                f"would come twice, and others never. {fix}"
            )


def _sample(rows: int) -> Int64Array:
    """Positions to compare, ascending; all positions of a small epoch."""
    if rows <= _WHOLE_ROWS:
        return np.arange(rows, dtype=np.int64)
    starts = np.array([0, rows // 3, rows // 2, rows - _BLOCK], dtype=np.int64)
    neighbours = (starts[:, None] + np.arange(_BLOCK, dtype=np.int64)).ravel()
    numbers = np.arange(_SPREAD, dtype=np.int64)
    spread = (numbers * (rows / _SPREAD)).astype(np.int64)
    random = (mix64(numbers.astype(np.uint64)) % np.uint64(rows)).astype(np.int64)
    return np.unique(np.concatenate([neighbours, spread, random]))
