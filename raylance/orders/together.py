"""Owns the rows of many epochs of shuffles in one calculation, for mixtures; never gives other rows than each epoch
alone.

A step of a mixture of 300 datasets has a few rows of each. One after the other, each epoch would cost a hundred
microseconds for any number of rows. Here an epoch is a column of numbers, and each position has its column.
"""

import abc
from collections.abc import Sequence

import numpy as np

from raylance.orders.order import Epoch, Order, Resolved
from raylance.orders.permutation import Int64Array, UInt64Array, permute, unpermute
from raylance.orders.shuffles import (
    RowShuffle,
    Sequential,
    ShardShuffle,
    WindowShuffle,
    to_places,
    to_rows,
    to_sequence,
)


class Formula(abc.ABC):
    """Computes rows of epochs of one kind of order from a few numbers of each epoch."""

    @abc.abstractmethod
    def stack(self, epochs: Sequence[Epoch]) -> UInt64Array:
        """The numbers of some epochs, uint64, shape (numbers, epochs)."""

    @abc.abstractmethod
    def rows(self, numbers: UInt64Array, positions: Int64Array) -> Int64Array:
        """The rows at positions, int64, shape (k,). Each position has a column of `numbers`, shape (m, k)."""


class _Permuted(Formula):
    def stack(self, epochs: Sequence[Epoch]) -> UInt64Array:
        return np.array([(epoch.order.rows, epoch.key("rows")) for epoch in epochs], dtype=np.uint64).T

    def rows(self, numbers: UInt64Array, positions: Int64Array) -> Int64Array:
        return permute(positions, *numbers)


class _Laid(Formula):
    def __init__(self, shuffles_shards: bool, shuffles_windows: bool) -> None:
        self._shuffles_shards, self._shuffles_windows = shuffles_shards, shuffles_windows

    def stack(self, epochs: Sequence[Epoch]) -> UInt64Array:
        numbers = np.array([_numbers(epoch) for epoch in epochs], dtype=np.uint64).T
        if self._shuffles_shards:
            shards, key = numbers[4], numbers[8]
            numbers[5] = unpermute(shards - np.uint64(1), shards, key)
        return numbers

    def rows(self, numbers: UInt64Array, positions: Int64Array) -> Int64Array:
        rows, lanes, window_rows, shard_rows, shards, short_place, short_rows = numbers[:7].view(np.int64)
        window_key, shard_key = numbers[7:]
        key = window_key if self._shuffles_windows else None
        sequence = to_sequence(positions, rows, lanes, window_rows, key)
        if not self._shuffles_shards:
            return sequence
        places = to_places(sequence, shard_rows, short_place, short_rows)
        return to_rows(sequence, places, permute(places, shards, shard_key), shard_rows, short_place, short_rows)


def _numbers(epoch: Epoch) -> tuple[int, ...]:
    """The numbers of an epoch of a laned order, with 0 for the place of its short shard."""
    order = epoch.order
    window_rows = (order.read_positions or 1) // order.lane_count
    short_rows = order.rows - (order.shard_count - 1) * order.shard_rows
    sizes = (order.rows, order.lane_count, window_rows, order.shard_rows, order.shard_count, 0, short_rows)
    return (*sizes, epoch.key("window"), epoch.key("shards"))


_FORMULAS: dict[type[Order], Formula] = {
    RowShuffle: _Permuted(),
    WindowShuffle: _Laid(shuffles_shards=True, shuffles_windows=True),
    ShardShuffle: _Laid(shuffles_shards=True, shuffles_windows=False),
    Sequential: _Laid(shuffles_shards=False, shuffles_windows=False),
}


def formula_of(order: Resolved) -> Formula | None:
    """The formula of an order; None if each of its epochs is asked alone."""
    return None if order.tables else _FORMULAS.get(type(order.settings))  # shards of a table have sizes of their own
