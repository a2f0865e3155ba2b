"""Where the steps of an epoch begin and end: after a number of rows, or after a cost."""

import abc
import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np

from raylance.arguments import check_batch_size, check_flag, check_integer
from raylance.errors import ConfigError
from raylance.orders.checking import select_rows
from raylance.orders.order import PicklesFields, Resolved
from raylance.orders.permutation import Int64Array

Remainder = Literal["drop", "pad", "ragged"]
REMAINDERS: tuple[Remainder, ...] = ("drop", "pad", "ragged")
_UNIT = 1 << 15  # positions that are cut into steps together, if the order has no windows
_TRIED = 16  # numbers of equal steps that are tried for a unit
_THREADS = 8  # that count the steps of an epoch
_KEPT = 8  # units whose steps a process keeps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a step may cost, in place of a number of rows.

    Attributes:
        cost: Most cost of a step over all ranks. A row that costs more is a step by itself.
        max_rows: Most rows of a step over all ranks; None for any number.
        padded: Whether a step costs its rows times its dearest row, because each row is padded to it; if not, the sum
            of its rows' costs. Steps of the order `Buckets` are always counted as if they were padded.
    """

    cost: int
    max_rows: int | None = None
    padded: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", check_integer("global_batch_cost", self.cost, 1))
        object.__setattr__(self, "padded", check_flag("padded", self.padded))
        if self.max_rows is not None:
            object.__setattr__(self, "max_rows", check_integer("max_rows", self.max_rows, 1))

    def rows_of(self, cost: int) -> int:
        """Returns how many rows of this cost a step may have, at least one."""
        fitting = max(1, self.cost // max(1, cost))
        return fitting if self.max_rows is None else min(fitting, self.max_rows)


Size = int | Budget
"""The size of a step over all ranks: a number of rows, or a budget."""


def size_arguments(size: Size) -> dict[str, Any]:
    """Returns the arguments of an iterator that give this size; see `check_size`."""
    if isinstance(size, Budget):
        return {"global_batch_cost": size.cost, "max_rows": size.max_rows, "padded": size.padded}
    return {"global_batch_size": size}


def check_size(
    dp_size: int,
    global_batch_size: int | None,
    batch_size: int | None = None,
    global_batch_cost: int | None = None,
    max_rows: int | None = None,
    *,
    padded: bool = True,
) -> Size:
    """Returns the size of a step, from the arguments of an iterator; see `RankLoader.iter_torch_batches`.

    Raises:
        ConfigError: If not exactly one of the sizes is given, or an argument cannot be honoured.
    """
    if global_batch_cost is None:
        if max_rows is not None or padded is not True:
            raise ConfigError(
                f"max_rows={max_rows}, padded={padded}: these belong to global_batch_cost=, which is missing. Give it, "
                "or leave them out."
            )
        return check_batch_size(global_batch_size, batch_size, dp_size)
    if global_batch_size is not None or batch_size is not None:
        raise ConfigError(
            f"global_batch_cost={global_batch_cost}, global_batch_size={global_batch_size}, batch_size={batch_size}: "
            "a step has a cost or a number of rows. Give one of them; max_rows= limits the rows of a step of a cost."
        )
    return Budget(cost=global_batch_cost, max_rows=max_rows, padded=padded)


class Steps(abc.ABC):
    """Where the steps of an epoch begin and end. A step may begin at any position, as after a resume."""

    @abc.abstractmethod
    def size(self, epoch: int, position: int) -> int:
        """Returns the number of rows of the step at a position, over all ranks, padding included. Steps of a cost have
        no row at the end of the epoch.
        """

    @abc.abstractmethod
    def after(self, epoch: int, position: int, steps: int = 1) -> int:
        """Returns the position of a later step of this plan, at most the end of the epoch."""

    def starts(self, epoch: int, position: int, steps: int) -> Iterator[int]:
        """Yields the positions of consecutive steps of this plan."""
        for _ in range(steps):
            yield position
            position = self.after(epoch, position)

    @abc.abstractmethod
    def count(self, epoch: int, position: int) -> int:
        """Returns the number of steps of this plan from a position to the end of the epoch."""

    @abc.abstractmethod
    def is_over(self, epoch: int, position: int) -> bool:
        """Whether no step begins at a position or after it."""

    @abc.abstractmethod
    def start_of(self, epoch: int, position: int) -> int:
        """Returns the first position of the step that has a position, if the first step begins with the epoch."""

    @abc.abstractmethod
    def between(self, epoch: int, first: int, last: int) -> int:
        """Returns the number of steps from one that begins at `first` to position `last`, rounded up."""

    @abc.abstractmethod
    def leads_to(self, epoch: int, first: int, position: int) -> bool:
        """Whether a step of a plan that has one at `first` begins at a position."""

    @abc.abstractmethod
    def within(self, epoch: int, position: int, chunk_positions: int) -> int:
        """Returns the number of steps from one on that begin in the same chunk."""

    @abc.abstractmethod
    def first_within(self, epoch: int, position: int, chunk_positions: int) -> int:
        """Returns the first position of a step, at most `position`, that begins in the same chunk."""

    @abc.abstractmethod
    def line(self, epoch: int, position: int, dp_rank: int, dp_size: int) -> int:
        """Returns a number for the first row of a rank's slice of a step. Numbers ascend in the order of delivery, and
        rows of a chunk have consecutive ones.
        """

    @abc.abstractmethod
    def rows(self, epoch: int, position: int, steps: int, dp_rank: int, dp_size: int) -> int:
        """Returns the number of a rank's rows in consecutive steps of a chunk."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvenSteps(Steps):
    """Steps of one number of rows, but for the last one. `every` is the distance between two steps; see `Plan`."""

    epoch_rows: int
    rows_each: int
    remainder: Remainder
    every: int

    @property
    def stride(self) -> int:
        """Number of positions from one step of this plan to the next."""
        return self.every * self.rows_each

    def size(self, epoch: int, position: int) -> int:
        """See `Steps.size`."""
        left = self.epoch_rows - position
        return min(left, self.rows_each) if self.remainder == "ragged" else self.rows_each

    def after(self, epoch: int, position: int, steps: int = 1) -> int:
        """See `Steps.after`."""
        return min(position + steps * self.stride, self.epoch_rows)

    def count(self, epoch: int, position: int) -> int:
        """See `Steps.count`."""
        left = max(0, self.epoch_rows - position)
        whole = left // self.rows_each if self.remainder == "drop" else -(-left // self.rows_each)
        return -(-whole // self.every)

    def is_over(self, epoch: int, position: int) -> bool:
        """See `Steps.is_over`."""
        return self.count(epoch, position) <= 0

    def start_of(self, epoch: int, position: int) -> int:
        """See `Steps.start_of`."""
        return position // self.rows_each * self.rows_each

    def between(self, epoch: int, first: int, last: int) -> int:
        """See `Steps.between`."""
        return -(-(last - first) // self.stride)

    def leads_to(self, epoch: int, first: int, position: int) -> bool:
        """See `Steps.leads_to`."""
        return first % self.stride == position % self.stride

    def within(self, epoch: int, position: int, chunk_positions: int) -> int:
        """See `Steps.within`."""
        end = (position // chunk_positions + 1) * chunk_positions
        return min(self.count(epoch, position), -(-(end - position) // self.stride))

    def first_within(self, epoch: int, position: int, chunk_positions: int) -> int:
        """See `Steps.first_within`."""
        begin = position // chunk_positions * chunk_positions
        return begin + (position - begin) % self.stride

    def line(self, epoch: int, position: int, dp_rank: int, dp_size: int) -> int:
        """See `Steps.line`."""
        return position // self.stride * slice_rows(self.rows_each, dp_rank, dp_size)

    def rows(self, epoch: int, position: int, steps: int, dp_rank: int, dp_size: int) -> int:
        """See `Steps.rows`."""
        last = self.size(epoch, position + (steps - 1) * self.stride)
        each = slice_rows(self.rows_each, dp_rank, dp_size)
        return (steps - 1) * each + slice_rows(last, dp_rank, dp_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostSteps(PicklesFields, Steps):
    """Steps of about one cost.

    An epoch is cut into units, the rounds of `Buckets` or the windows of other orders, and each unit into steps. So a
    step is known without those of other units. A unit has as few steps as can be, or a little more, and its steps
    have about equal costs.
    """

    order: Resolved
    budget: Budget
    remainder: Remainder

    @property
    def epoch_rows(self) -> int:
        """Number of positions of an epoch."""
        return self.order.epoch_rows

    @functools.cached_property
    def unit_positions(self) -> int:
        """Number of positions of a unit; the last one may have fewer."""
        return self.order.read_positions or _UNIT

    @functools.cached_property
    def _units(self) -> int:
        """Number of units. A short rest of the epoch belongs to the last one, unless that is a round of `Buckets`."""
        units, rest = divmod(self.epoch_rows, self.unit_positions)
        is_unit = rest and (self.order.has_buckets or 2 * rest >= self.unit_positions)
        return max(1, units + bool(is_unit))

    @functools.cached_property
    def _starts(self) -> Callable[[int, int], list[int]]:
        """Returns the first positions of the steps of a unit, and the end of the last one."""
        return functools.lru_cache(maxsize=_KEPT)(lambda epoch, unit: self._cut(epoch, unit).tolist())

    @functools.cached_property
    def _lines(self) -> Callable[[int, int, int, int], list[int]]:
        """Returns the number of a rank's rows before each step of a unit, and in all: (steps + 1,)."""

        def count(epoch: int, unit: int, dp_rank: int, dp_size: int) -> list[int]:
            steps = itertools.pairwise(self._starts(epoch, unit))
            return [0, *itertools.accumulate(slice_rows(end - begin, dp_rank, dp_size) for begin, end in steps)]

        return functools.lru_cache(maxsize=_KEPT)(count)

    @functools.cached_property
    def _counts(self) -> Callable[[int], Int64Array]:
        """Returns the number of steps of each unit of an epoch: int64, (units,)."""
        return functools.lru_cache(maxsize=2)(self._count_all)

    def _cut(self, epoch: int, unit: int) -> Int64Array:
        found, first = self.order.epoch(epoch), unit * self.unit_positions
        end = self.epoch_rows if unit == self._units - 1 else first + self.unit_positions
        if self.order.has_buckets:
            made = found.round(unit)
            starts = cut_buckets(made.starts, made.highest, self.order.lane_count, self.budget)
        else:
            costs = self.order.costs(select_rows(found, np.arange(first, end, dtype=np.int64)))
            starts = first + cut_costs(costs.astype(np.int64), self.budget)
        is_short = end == self.epoch_rows and starts[-1] - starts[-2] < self.order.lane_count
        return starts[:-1] if is_short and self.remainder == "drop" and len(starts) - 2 + unit else starts

    def _count_all(self, epoch: int) -> Int64Array:
        with ThreadPoolExecutor(_THREADS, "raylance-steps") as threads:  # NumPy sorts without the GIL
            counts = threads.map(lambda unit: len(self._cut(epoch, unit)) - 1, range(self._units))
            return np.fromiter(counts, dtype=np.int64, count=self._units)

    def _find(self, epoch: int, position: int) -> tuple[int, list[int], int]:
        """Returns the unit of a position, its steps, and the index of the step that has the position."""
        unit = min(position // self.unit_positions, self._units - 1)
        starts = self._starts(epoch, unit)
        return unit, starts, bisect.bisect_right(starts, position) - 1

    def size(self, epoch: int, position: int) -> int:
        """See `Steps.size`."""
        _, starts, at = self._find(epoch, position)
        return starts[at + 1] - position if at + 1 < len(starts) else 0

    def after(self, epoch: int, position: int, steps: int = 1) -> int:
        """See `Steps.after`."""
        while steps > 0:
            _, starts, at = self._find(epoch, position)
            taken = min(steps, len(starts) - 1 - at)
            if not taken:  # the epoch is over
                break
            position, steps = starts[at + taken], steps - taken
        return position

    def count(self, epoch: int, position: int) -> int:
        """See `Steps.count`."""
        unit, starts, at = self._find(epoch, position)
        return len(starts) - 1 - at + int(self._counts(epoch)[unit + 1 :].sum())

    def is_over(self, epoch: int, position: int) -> bool:
        """See `Steps.is_over`."""
        _, starts, at = self._find(epoch, position)
        return at + 1 >= len(starts)

    def start_of(self, epoch: int, position: int) -> int:
        """See `Steps.start_of`."""
        _, starts, at = self._find(epoch, position)
        return starts[at]

    def between(self, epoch: int, first: int, last: int) -> int:
        """See `Steps.between`."""
        steps = 0
        while first < last:
            _, starts, at = self._find(epoch, first)
            end = min(bisect.bisect_left(starts, last), len(starts) - 1)
            if end <= at:
                break
            first, steps = starts[end], steps + end - at
        return steps

    def leads_to(self, epoch: int, first: int, position: int) -> bool:
        """See `Steps.leads_to`."""
        _, starts, at = self._find(epoch, position)
        return position in (first, starts[at])

    def within(self, epoch: int, position: int, chunk_positions: int) -> int:
        """See `Steps.within`."""
        _, starts, at = self._find(epoch, position)  # a step that was cut by a resume belongs where it began
        end = starts[0] + ((starts[at] - starts[0]) // chunk_positions + 1) * chunk_positions
        return min(bisect.bisect_left(starts, end), len(starts) - 1) - at

    def first_within(self, epoch: int, position: int, chunk_positions: int) -> int:
        """See `Steps.first_within`."""
        _, starts, at = self._find(epoch, position)
        begin = starts[0] + (starts[at] - starts[0]) // chunk_positions * chunk_positions
        return starts[bisect.bisect_left(starts, begin)]

    def line(self, epoch: int, position: int, dp_rank: int, dp_size: int) -> int:
        """See `Steps.line`."""
        unit, starts, at = self._find(epoch, position)
        lines = self._lines(epoch, unit, dp_rank, dp_size)
        if position == starts[at]:
            return starts[0] + lines[at]
        # A step that was cut by a resume: its rows end where those of the whole step end.
        left = slice_rows(starts[at + 1] - position, dp_rank, dp_size) if at + 1 < len(starts) else 0
        return starts[0] + lines[min(at + 1, len(lines) - 1)] - left

    def rows(self, epoch: int, position: int, steps: int, dp_rank: int, dp_size: int) -> int:
        """See `Steps.rows`."""
        unit, starts, at = self._find(epoch, position)
        lines = self._lines(epoch, unit, dp_rank, dp_size)
        return slice_rows(starts[at + 1] - position, dp_rank, dp_size) + lines[at + steps] - lines[at + 1]


def slice_of(size: int, dp_rank: int, dp_size: int) -> tuple[int, int]:
    """Returns a rank's half-open slice of a step of `size` rows."""
    return dp_rank * size // dp_size, (dp_rank + 1) * size // dp_size


def slice_rows(size: int, dp_rank: int, dp_size: int) -> int:
    """Returns the number of a rank's rows in a step of `size` rows."""
    low, high = slice_of(size, dp_rank, dp_size)
    return high - low


def cut_buckets(starts: Int64Array, highest: Int64Array, lanes: int, budget: Budget) -> Int64Array:
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


def cut_costs(costs: Int64Array, budget: Budget) -> Int64Array:
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


def _cut_greedily(costs: Int64Array, budget: Budget) -> Iterator[int]:
    at, most_rows = 0, budget.max_rows or len(costs)
    ends = np.append(0, np.cumsum(costs))
    while at < len(costs):
        yield at
        if budget.padded:
            few = costs[at : at + max(1, min(most_rows, budget.rows_of(int(costs[at]))))]
            paid = np.maximum.accumulate(few) * np.arange(1, len(few) + 1)
            rows = int(np.searchsorted(paid, budget.cost, side="right"))
        else:
            rows = int(np.searchsorted(ends, ends[at] + budget.cost, side="right")) - 1 - at
        at += max(1, min(rows, most_rows))
