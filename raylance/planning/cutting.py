"""Cuts rows with costs into steps that exceed none of the limits."""

import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from raylance.orders.permutation import Int64Array
from raylance.planning.step_size import Limits

_TRIED = 16  # numbers of equal steps that are tried for a unit


def cut_buckets(
    starts: Int64Array, highest: Int64Array, lanes: int, most_cost: int, max_rows: int | None
) -> Int64Array:
    """Cuts buckets into steps whose rows, times the highest cost of the bucket, are at most a cost. Steps have whole
    lines, unless a line alone costs more.

    Returns:
        The first positions of the steps, and the end: int64, (steps + 1,).
    """
    fitting = np.maximum(1, most_cost // np.maximum(1, highest))
    if max_rows is not None:
        fitting = np.minimum(fitting, max_rows)
    fitting = np.where(fitting >= lanes, fitting // lanes * lanes, fitting)
    sizes = np.diff(starts)
    if (sizes <= fitting).all():  # as for the budget that made the buckets
        return starts
    cut = [
        first + _even(int(size), int(most), lanes)
        for first, size, most in zip(starts[:-1].tolist(), sizes.tolist(), fitting.tolist(), strict=True)
    ]
    return np.append(np.concatenate(cut), starts[-1:])


def _even(rows: int, most: int, lanes: int) -> Int64Array:
    """Returns the firsts of as few parts as can be, of at most `most` rows and about equal sizes, of whole lines."""
    line = lanes if most >= lanes else 1
    lines, parts = -(-rows // line), -(-rows // most)
    return np.arange(parts, dtype=np.int64) * lines // parts * line


def cut_further(starts: Int64Array, costs: Int64Array, limits: Limits) -> Int64Array:
    """Cuts those steps again that exceed limits of other costs.

    Args:
        starts: The indices of the steps' first rows, and n: int64, (steps + 1,).
        costs: Costs of the rows, int64, (n, costs).
        limits: The limits.

    Returns:
        As `starts`.
    """
    cut = [
        np.array([begin]) if limits.holds(costs[begin:end]) else begin + cut_costs(costs[begin:end], limits)[:-1]
        for begin, end in itertools.pairwise(starts.tolist())
    ]
    return np.append(np.concatenate(cut), starts[-1:])


def cut_costs(costs: Int64Array, limits: Limits) -> Int64Array:
    """Cuts consecutive rows into steps that exceed none of the limits, but for a row that exceeds one alone.

    If costs are added up, steps have about equal costs: there is one step more than the cost of all rows needs if
    that makes the steps fit, and so on. Of several costs, their sum is about equal, each as a share of its limit. If
    rows are padded, each step has as many rows as fit.

    Args:
        costs: Costs of the rows in the order of delivery, int64, (n, costs), n >= 1.
        limits: The limits of these costs.

    Returns:
        The indices of the steps' first rows, and n: int64, (steps + 1,).
    """
    if not limits.padded.any() and limits.max_rows is None:
        found = _cut_evenly(costs, limits.most)
        if found is not None:
            return found
    starts = [*_cut_greedily(costs, limits), len(costs)]
    if len(starts) > 2 and 3 * (starts[-1] - starts[-2]) < starts[-1] - starts[-3]:  # a small rest
        half = costs[(starts[-3] + starts[-1]) // 2 :]
        if limits.holds(half):
            starts[-2] = len(costs) - len(half)
    return np.array(starts, dtype=np.int64)


def _cut_evenly(costs: Int64Array, most: Int64Array) -> Int64Array | None:
    if (costs.max(axis=0) > most).any():
        return None
    ends = np.cumsum(costs, axis=0)
    # In units of the first cost, whose weight is 1. Not a matrix product: its rounding depends on the processor, and
    # ranks would not agree.
    joint = functools.reduce(np.add, [each * (most[0] / limit) for each, limit in zip(ends.T, most, strict=True)])
    least = max(1, int((-(-ends[-1] // most)).max()))
    for parts in range(least, min(least + 2 + least // 8, least + _TRIED)):
        bounds = np.searchsorted(joint, np.arange(1, parts) * joint[-1] / parts, side="left") + 1
        starts = np.unique(np.concatenate([[0], bounds, [len(costs)]])).astype(np.int64)
        if (np.diff(np.concatenate([ends[:1] * 0, ends])[starts], axis=0) <= most).all():
            return starts
    return None


def _cut_greedily(costs: Int64Array, limits: Limits) -> Iterator[int]:
    """Yields the indices of the first rows of steps that have as many rows as fit."""
    fitting = [_fit_padded if is_padded else _fit_summed for is_padded in limits.padded.tolist()]
    rows_from = [fit(each, most) for fit, each, most in zip(fitting, costs.T, limits.most.tolist(), strict=True)]
    at, most_rows = 0, limits.max_rows or len(costs)
    while at < len(costs):
        yield at
        at += max(1, min(most_rows, *(rows(at, most_rows) for rows in rows_from)))


def _fit_summed(costs: Int64Array, most: int) -> Callable[[int, int], int]:
    """Returns a function of an index, and of a number of rows, that says how many rows from it on cost `most`."""
    ends = np.append(0, np.cumsum(costs))
    return lambda at, _: int(np.searchsorted(ends, ends[at] + most, side="right")) - 1 - at


def _fit_padded(costs: Int64Array, most: int) -> Callable[[int, int], int]:
    """Returns a function as `_fit_summed`, for rows that are padded, of no more rows than its second argument."""
    paying = np.append(np.flatnonzero(costs), len(costs))

    def fit(at: int, most_rows: int) -> int:
        first = int(paying[np.searchsorted(paying, at)])  # rows before it cost nothing, however many they are
        fitting = max(1, most // max(1, int(costs[first]))) if first < len(costs) else 0
        few = costs[at : at + min(most_rows, max(fitting, first - at))]
        paid = np.maximum.accumulate(few) * np.arange(1, len(few) + 1)
        return int(np.searchsorted(paid, most, side="right"))

    return fit
