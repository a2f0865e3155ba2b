"""Checks of a custom order during a run: its rows lie in the selection, and a sample of them has no row twice."""

from typing import Any

import numpy as np
import numpy.typing as npt

from raylance.errors import ConfigError, RaylanceError
from raylance.orders.order import Epoch, Resolved
from raylance.orders.permutation import Int64Array, mix64

_WHOLE_ROWS = 1 << 16  # an epoch of at most this number of positions is compared whole
_BLOCK = 1024  # consecutive positions that are compared, at each of four places
_SPREAD = 4096  # positions that are compared at even distances; the same number is compared at random


def select_rows(epoch: Epoch, positions: Int64Array) -> Int64Array:
    """Returns the rows at positions of an epoch; checks them if the order is custom. Raises ConfigError if a custom
    order fails, or does not return one integer row of the selection for each position.
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
    """Checks on a sample of an epoch that a custom order has no row twice, unless it sets `repeats`.

    A small epoch is checked whole, a large one at some thousands of near and distant positions, at a small cost. Raises
    ConfigError if a row comes twice, if an epoch does not have one position for each row, or as `select_rows`.
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
    """Returns the positions to compare, ascending; all positions if the epoch is small."""
    if rows <= _WHOLE_ROWS:
        return np.arange(rows, dtype=np.int64)
    starts = np.array([0, rows // 3, rows // 2, rows - _BLOCK], dtype=np.int64)
    neighbours = (starts[:, None] + np.arange(_BLOCK, dtype=np.int64)).ravel()
    numbers = np.arange(_SPREAD, dtype=np.int64)
    spread = (numbers * (rows / _SPREAD)).astype(np.int64)
    random = (mix64(numbers.astype(np.uint64)) % np.uint64(rows)).astype(np.int64)
    return np.unique(np.concatenate([neighbours, spread, random]))
