"""Where the steps of an epoch begin and end: after a number of rows, or after a cost."""

import abc
import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from raylance.orders.checking import select_rows
from raylance.orders.order import Epoch
from raylance.orders.permutation import Int64Array
from raylance.planning.cutting import cut_buckets, cut_costs, cut_further
from raylance.planning.step_size import UNLIMITED, CostLimit, Remainder

_UNIT = 1 << 15  # positions that are cut into steps together, if the order has no windows
_THREADS = 8  # that count the steps of an epoch
_KEPT = 8  # units whose steps are kept


class Steps(abc.ABC):
    """Where the steps of one epoch begin and end. A step may begin at any position, as after a resume."""

    @abc.abstractmethod
    def size(self, position: int) -> int:
        """Returns the number of rows of the step at a position, over all ranks, padding included. Steps of a cost have
        no row at the end of the epoch.
        """

    @abc.abstractmethod
    def after(self, position: int, steps: int = 1) -> int:
        """Returns the position of a later step of this plan, at most the end of the epoch."""

    def starts(self, position: int, steps: int) -> Iterator[int]:
        """Yields the positions of consecutive steps of this plan."""
        for _ in range(steps):
            yield position
            position = self.after(position)

    @abc.abstractmethod
    def count(self, position: int) -> int:
        """Returns the number of steps of this plan from a position to the end of the epoch."""

    @abc.abstractmethod
    def is_over(self, position: int) -> bool:
        """Whether no step begins at a position or after it."""

    @abc.abstractmethod
    def start_of(self, position: int) -> int:
        """Returns the first position of the step that has a position, if the first step begins with the epoch."""

    @abc.abstractmethod
    def between(self, first: int, last: int) -> int:
        """Returns the number of steps from one that begins at `first` to position `last`, rounded up."""

    @abc.abstractmethod
    def leads_to(self, first: int, position: int) -> bool:
        """Whether a step of a plan that has one at `first` begins at a position."""

    @abc.abstractmethod
    def within(self, position: int, chunk_positions: int) -> int:
        """Returns the number of steps from one on that begin in the same chunk."""

    @abc.abstractmethod
    def first_within(self, position: int, chunk_positions: int) -> int:
        """Returns the first position of a step, at most `position`, that begins in the same chunk."""

    @abc.abstractmethod
    def line(self, position: int, dp_rank: int, dp_size: int) -> int:
        """Returns a number for the first row of a rank's slice of a step. Numbers ascend in the order of delivery, and
        rows of a chunk have consecutive ones.
        """

    @abc.abstractmethod
    def rows(self, position: int, steps: int, dp_rank: int, dp_size: int) -> int:
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

    def size(self, position: int) -> int:
        """See `Steps.size`."""
        left = self.epoch_rows - position
        return min(left, self.rows_each) if self.remainder == "ragged" else self.rows_each

    def after(self, position: int, steps: int = 1) -> int:
        """See `Steps.after`."""
        return min(position + steps * self.stride, self.epoch_rows)

    def count(self, position: int) -> int:
        """See `Steps.count`."""
        left = max(0, self.epoch_rows - position)
        whole = left // self.rows_each if self.remainder == "drop" else -(-left // self.rows_each)
        return -(-whole // self.every)

    def is_over(self, position: int) -> bool:
        """See `Steps.is_over`."""
        return self.count(position) <= 0

    def start_of(self, position: int) -> int:
        """See `Steps.start_of`."""
        return position // self.rows_each * self.rows_each

    def between(self, first: int, last: int) -> int:
        """See `Steps.between`."""
        return -(-(last - first) // self.stride)

    def leads_to(self, first: int, position: int) -> bool:
        """See `Steps.leads_to`."""
        return first % self.stride == position % self.stride

    def within(self, position: int, chunk_positions: int) -> int:
        """See `Steps.within`."""
        end = (position // chunk_positions + 1) * chunk_positions
        return min(self.count(position), -(-(end - position) // self.stride))

    def first_within(self, position: int, chunk_positions: int) -> int:
        """See `Steps.first_within`."""
        begin = position // chunk_positions * chunk_positions
        return begin + (position - begin) % self.stride

    def line(self, position: int, dp_rank: int, dp_size: int) -> int:
        """See `Steps.line`."""
        return position // self.stride * slice_rows(self.rows_each, dp_rank, dp_size)

    def rows(self, position: int, steps: int, dp_rank: int, dp_size: int) -> int:
        """See `Steps.rows`."""
        last = self.size(position + (steps - 1) * self.stride)
        each = slice_rows(self.rows_each, dp_rank, dp_size)
        return (steps - 1) * each + slice_rows(last, dp_rank, dp_size)


class CostSteps(Steps):
    """Steps of about one cost.

    An epoch is cut into units, the rounds of `Buckets` or the windows of other orders, and each unit into steps. So a
    step is known without those of other units. A unit has as few steps as can be, or a little more, and its steps
    have about equal costs.
    """

    def __init__(self, rows: Epoch, budget: CostLimit, remainder: Remainder) -> None:
        """Takes the rows of the epoch, and fields of a plan."""
        self._rows, self._remainder = rows, remainder
        self._limits = budget.of(rows.order.cost_names, padded=rows.order.buckets_by)
        self._epoch_rows = rows.epoch_rows
        self._unit_positions = rows.order.read_positions or _UNIT  # the last unit may have fewer
        # A short rest of the epoch belongs to the last unit, unless that is a round of `Buckets`.
        units, rest = divmod(self._epoch_rows, self._unit_positions)
        is_unit = rest and (rows.order.buckets_by is not None or 2 * rest >= self._unit_positions)
        self._units = max(1, units + bool(is_unit))
        self._starts = functools.lru_cache(maxsize=_KEPT)(self._starts_of)
        self._lines = functools.lru_cache(maxsize=_KEPT)(self._lines_of)

    def _starts_of(self, unit: int) -> list[int]:
        """Returns the first positions of the steps of a unit, and the end of the last one."""
        starts: list[int] = self._cut(unit).tolist()
        return starts

    def _lines_of(self, unit: int, dp_rank: int, dp_size: int) -> list[int]:
        """Returns the number of a rank's rows before each step of a unit, and in all: (steps + 1,)."""
        steps = itertools.pairwise(self._starts(unit))
        return [0, *itertools.accumulate(slice_rows(end - begin, dp_rank, dp_size) for begin, end in steps)]

    @functools.cached_property
    def _counts(self) -> Int64Array:
        """The number of steps of each unit: int64, (units,)."""
        with ThreadPoolExecutor(_THREADS, "raylance-steps") as threads:  # NumPy sorts without the GIL
            counts = threads.map(lambda unit: len(self._cut(unit)) - 1, range(self._units))
            return np.fromiter(counts, dtype=np.int64, count=self._units)

    def _cut(self, unit: int) -> Int64Array:
        order, first = self._rows.order, unit * self._unit_positions
        end = self._epoch_rows if unit == self._units - 1 else first + self._unit_positions
        if order.buckets_by is not None:
            made, number = self._rows.round(unit), order.cost_names.index(order.buckets_by)
            most, max_rows = int(self._limits.most[number]), self._limits.max_rows
            starts = cut_buckets(made.starts, made.highest, order.lane_count, most, max_rows)
            others = self._limits.without(number)
            if (others.most < UNLIMITED).any():
                costs = np.delete(self._costs(first, end), number, axis=1)
                starts = first + cut_further(starts - first, costs, others)
        else:
            starts = first + cut_costs(self._costs(first, end), self._limits)
        is_short = end == self._epoch_rows and starts[-1] - starts[-2] < order.lane_count
        return starts[:-1] if is_short and self._remainder == "drop" and len(starts) - 2 + unit else starts

    def _costs(self, first: int, end: int) -> Int64Array:
        """Returns the costs of the rows at positions [first, end), int64, (n, costs)."""
        rows = select_rows(self._rows, np.arange(first, end, dtype=np.int64))
        return self._rows.order.costs(rows).astype(np.int64)

    def _find(self, position: int) -> tuple[int, list[int], int]:
        """Returns the unit of a position, its steps, and the index of the step that has the position."""
        unit = min(position // self._unit_positions, self._units - 1)
        starts = self._starts(unit)
        return unit, starts, bisect.bisect_right(starts, position) - 1

    def size(self, position: int) -> int:
        """See `Steps.size`."""
        _, starts, at = self._find(position)
        return starts[at + 1] - position if at + 1 < len(starts) else 0

    def after(self, position: int, steps: int = 1) -> int:
        """See `Steps.after`."""
        while steps > 0:
            _, starts, at = self._find(position)
            taken = min(steps, len(starts) - 1 - at)
            if not taken:  # the epoch is over
                break
            position, steps = starts[at + taken], steps - taken
        return position

    def count(self, position: int) -> int:
        """See `Steps.count`."""
        unit, starts, at = self._find(position)
        return len(starts) - 1 - at + int(self._counts[unit + 1 :].sum())

    def is_over(self, position: int) -> bool:
        """See `Steps.is_over`."""
        _, starts, at = self._find(position)
        return at + 1 >= len(starts)

    def start_of(self, position: int) -> int:
        """See `Steps.start_of`."""
        _, starts, at = self._find(position)
        return starts[at]

    def between(self, first: int, last: int) -> int:
        """See `Steps.between`."""
        steps = 0
        while first < last:
            _, starts, at = self._find(first)
            end = min(bisect.bisect_left(starts, last), len(starts) - 1)
            if end <= at:
                break
            first, steps = starts[end], steps + end - at
        return steps

    def leads_to(self, first: int, position: int) -> bool:
        """See `Steps.leads_to`."""
        _, starts, at = self._find(position)
        return position in (first, starts[at])

    def within(self, position: int, chunk_positions: int) -> int:
        """See `Steps.within`."""
        _, starts, at = self._find(position)  # a step that was cut by a resume belongs where it began
        end = starts[0] + ((starts[at] - starts[0]) // chunk_positions + 1) * chunk_positions
        return min(bisect.bisect_left(starts, end), len(starts) - 1) - at

    def first_within(self, position: int, chunk_positions: int) -> int:
        """See `Steps.first_within`."""
        _, starts, at = self._find(position)
        begin = starts[0] + (starts[at] - starts[0]) // chunk_positions * chunk_positions
        return starts[bisect.bisect_left(starts, begin)]

    def line(self, position: int, dp_rank: int, dp_size: int) -> int:
        """See `Steps.line`."""
        unit, starts, at = self._find(position)
        lines = self._lines(unit, dp_rank, dp_size)
        if position == starts[at]:
            return starts[0] + lines[at]
        # A step that was cut by a resume: its rows end where those of the whole step end.
        left = slice_rows(starts[at + 1] - position, dp_rank, dp_size) if at + 1 < len(starts) else 0
        return starts[0] + lines[min(at + 1, len(lines) - 1)] - left

    def rows(self, position: int, steps: int, dp_rank: int, dp_size: int) -> int:
        """See `Steps.rows`."""
        unit, starts, at = self._find(position)
        lines = self._lines(unit, dp_rank, dp_size)
        return slice_rows(starts[at + 1] - position, dp_rank, dp_size) + lines[at + steps] - lines[at + 1]


def slice_of(size: int, dp_rank: int, dp_size: int) -> tuple[int, int]:
    """Returns a rank's half-open slice of a step of `size` rows."""
    return dp_rank * size // dp_size, (dp_rank + 1) * size // dp_size


def slice_rows(size: int, dp_rank: int, dp_size: int) -> int:
    """Returns the number of a rank's rows in a step of `size` rows."""
    low, high = slice_of(size, dp_rank, dp_size)
    return high - low
