"""Cuts rows with costs into steps of at most one cost."""

from collections.abc import Iterator

import numpy as np

from raylance.orders.permutation import Int64Array
from raylance.planning.step_size import CostLimit

_TRIED = 16  # numbers of equal steps that are tried for a unit


def cut_buckets(starts: Int64Array, highest: Int64Array, lanes: int, budget: CostLimit) -> Int64Array:
    """Cuts buckets into steps whose rows, times the highest cost of the bucket, are at most the cost of the budget.
    Steps have whole lines, unless a line alone costs more.

    Returns:
        The first positions of the steps, and the end: int64, (steps + 1,).
    """
    fitting = np.maximum(1, budget.cost // np.maximum(1, highest))
    if budget.max_rows is not None:
        fitting = np.minimum(fitting, budget.max_rows)
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


def cut_costs(costs: Int64Array, budget: CostLimit) -> Int64Array:
    """Cuts consecutive rows into steps of at most the cost of a budget, but for a row that costs more alone.

    If costs are added up, steps have about equal costs: there is one step more than the cost of all rows needs if
    that makes the steps fit, and so on. If rows are padded, each step has as many rows as fit.

    Args:
        costs: Costs of the rows in the order of delivery, int64, (n,), n >= 1.
        budget: The budget.

    Returns:
        The indices of the steps' first rows, and n: int64, (steps + 1,).
    """
    if not budget.padded and budget.max_rows is None:
        found = _cut_evenly(costs, budget.cost)
        if found is not None:
            return found
    starts = [*_cut_greedily(costs, budget), len(costs)]
    if len(starts) > 2 and 3 * (starts[-1] - starts[-2]) < starts[-1] - starts[-3]:  # a small rest
        half = costs[(starts[-3] + starts[-1]) // 2 :]
        if (len(half) * int(half.max()) if budget.padded else int(half.sum())) <= budget.cost:
            starts[-2] = len(costs) - len(half)
    return np.array(starts, dtype=np.int64)


def _cut_evenly(costs: Int64Array, most: int) -> Int64Array | None:
    if int(costs.max()) > most:
        return None
    ends = np.cumsum(costs)
    total = int(ends[-1])
    least = max(1, -(-total // most))
    for parts in range(least, min(least + 2 + least // 8, least + _TRIED)):
        bounds = np.searchsorted(ends, np.arange(1, parts) * total / parts, side="left") + 1
        starts = np.unique(np.concatenate([[0], bounds, [len(costs)]])).astype(np.int64)
        if int(np.diff(np.append(0, ends)[starts]).max()) <= most:
            return starts
    return None


def _cut_greedily(costs: Int64Array, budget: CostLimit) -> Iterator[int]:
    at, most_rows = 0, budget.max_rows or len(costs)
    ends = np.append(0, np.cumsum(costs))
    paying = np.append(np.flatnonzero(costs), len(costs))
    while at < len(costs):
        yield at
        if budget.padded:
            first = int(paying[np.searchsorted(paying, at)])  # rows before it cost nothing, however many they are
            most = budget.rows_of(int(costs[first])) if first < len(costs) else 0
            few = costs[at : at + min(most_rows, max(most, first - at))]
            paid = np.maximum.accumulate(few) * np.arange(1, len(few) + 1)
            rows = int(np.searchsorted(paid, budget.cost, side="right"))
        else:
            rows = int(np.searchsorted(ends, ends[at] + budget.cost, side="right")) - 1 - at
        at += max(1, min(rows, most_rows))
