"""The rows of each rank in the steps of one epoch: which ones, how many, and how they are numbered."""

import bisect
import functools
from typing import Any, NamedTuple

import numpy as np

from raylance.orders.checking import select_rows
from raylance.orders.order import Epoch
from raylance.orders.permutation import Int64Array
from raylance.planning.balance import Balance
from raylance.planning.steps import Steps, slice_of

_MOST_KEPT = 1 << 16  # most rows of a slice whose arrangement is kept
_SLICES_KEPT = 8  # slices whose arrangement by lane is kept
_STEPS_KEPT = 512  # steps whose arrangement is kept
_TOGETHER = 32  # steps that are balanced together
_RUNS_KEPT = 8  # chunks whose numbers of rows are kept


class LaneSlices:
    """The slices of the ranks without a balance: about equal parts of the rows of a step, which are sorted by lane."""

    def __init__(self, rows: Epoch, steps: Steps, dp_size: int) -> None:
        """Takes the rows of the epoch, its steps, and the number of ranks."""
        self._rows, self._steps, self._dp_size = rows, steps, dp_size
        self._lanes = rows.order.lane_count
        self._arranged = functools.lru_cache(maxsize=_SLICES_KEPT)(self._arrange)

    def slice_of(self, position: int, dp_rank: int) -> tuple[int, int]:
        """Returns a rank's half-open slice of the rows of the step at a position."""
        return slice_of(self._steps.size(position), dp_rank, self._dp_size)

    def rows(self, position: int, steps: int, dp_rank: int) -> int:
        """Returns the number of a rank's rows in consecutive steps of a chunk."""
        return self._steps.rows(position, steps, dp_rank, self._dp_size)

    def line(self, position: int, dp_rank: int) -> int:
        """Returns a number for the first row of a rank's slice of a step; see `Steps.line`."""
        return self._steps.line(position, dp_rank, self._dp_size)

    def positions(self, position: int, low: int, high: int) -> Int64Array:
        """Returns the epoch positions of rows [low, high) of a step."""
        arrange = self._arranged if high - low <= _MOST_KEPT else self._arrange
        return position + arrange(position % self._lanes, self._steps.size(position), low, high)

    def _arrange(self, first: int, size: int, low: int, high: int) -> Int64Array:
        """Returns the positions of rows [low, high) of a step of `size` rows that begins in lane `first`, relative to
        the step's. If the number of lanes divides the global batch, the result is the same for all whole steps.
        """
        lanes = self._lanes
        offset = (np.arange(lanes, dtype=np.int64) - first) % lanes  # position of each lane's first row in the step
        count = np.maximum(0, -(-(size - offset) // lanes))
        ends = np.cumsum(count)
        wanted = np.arange(low, high, dtype=np.int64)
        lane = np.searchsorted(ends, wanted, side="right")
        within = wanted - (ends - count)[lane]
        return np.asarray(offset[lane] + within * lanes, dtype=np.int64)


class Arrangement(NamedTuple):
    """The rows of a step, rank by rank: their epoch positions, int64, (n,); and where the ranks' slices end."""

    positions: Int64Array
    ends: list[int]


class _Run(NamedTuple):
    """The steps that begin in one chunk: their positions, ascending; and the number of rows of each rank before each of
    them and in all of them, int64, (steps + 1, ranks).
    """

    starts: list[int]
    rows: Int64Array


class BalancedSlices(LaneSlices):
    """Slices of as many rows as those by lane, of which a balance has swapped some."""

    def __init__(self, rows: Epoch, steps: Steps, dp_size: int, balance: Balance) -> None:
        """See `LaneSlices`."""
        super().__init__(rows, steps, dp_size)
        self._balance = balance
        self._kept: dict[int, Arrangement] = {}  # the last ones, by position. Several threads may add the same ones.

    def arrangement(self, position: int) -> Arrangement:
        """Returns the rows of the step at a position."""
        found = self._kept.get(position)
        if found is None:
            # Finding the rows of several steps takes little longer than finding those of one.
            starts = [at for at in self._steps.starts(position, _TOGETHER) if not self._steps.is_over(at)]
            steps = [super(BalancedSlices, self).positions(at, 0, self._steps.size(at)) for at in starts]
            order = self._rows.order
            positions = np.concatenate(steps) % self._rows.epoch_rows
            costs = order.costs(select_rows(self._rows, positions)).astype(np.int64)  # (rows, costs)
            parts = np.split(costs, np.cumsum([len(step) for step in steps])[:-1])
            for at, step, part in zip(starts, steps, parts, strict=True):
                of_ranks = self._balance.arrange(part, self._dp_size)
                ends = np.cumsum([len(own) for own in of_ranks]).tolist()
                self._kept[at] = Arrangement(step[np.concatenate(of_ranks)], ends)
            found = self._kept[position]
            keep_last(self._kept, _STEPS_KEPT)
        return found

    def positions(self, position: int, low: int, high: int) -> Int64Array:
        """See `LaneSlices.positions`."""
        return self.arrangement(position).positions[low:high]


class UnevenSlices(BalancedSlices):
    """Slices of other numbers of rows than those by lane."""

    def __init__(self, rows: Epoch, steps: Steps, dp_size: int, balance: Balance, chunk_positions: int) -> None:
        """See `LaneSlices`; `chunk_positions` is that of the plan."""
        super().__init__(rows, steps, dp_size, balance)
        self._chunk_positions = chunk_positions
        self._run = functools.lru_cache(maxsize=_RUNS_KEPT)(self._run_from)

    def slice_of(self, position: int, dp_rank: int) -> tuple[int, int]:
        """See `LaneSlices.slice_of`."""
        if self._steps.is_over(position):
            return 0, 0
        ends = self.arrangement(position).ends
        return ends[dp_rank - 1] if dp_rank else 0, ends[dp_rank]

    def line(self, position: int, dp_rank: int) -> int:
        """See `LaneSlices.line`."""
        run = self._run_of(position)
        at = bisect.bisect_left(run.starts, position)
        line = run.starts[0] + int(run.rows[at, dp_rank])
        if at < len(run.starts) and run.starts[at] == position:
            return line
        low, high = self.slice_of(position, dp_rank)
        return line - (high - low)  # a step that was cut by a resume: its rows end where those of the whole step end

    def rows(self, position: int, steps: int, dp_rank: int) -> int:
        """See `LaneSlices.rows`."""
        low, high = self.slice_of(position, dp_rank)
        run = self._run_of(position)
        first = bisect.bisect_right(run.starts, position)  # the first step may be a part of one
        more = run.rows[first + steps - 1, dp_rank] - run.rows[first, dp_rank] if steps > 1 else 0
        return high - low + int(more)

    def _run_of(self, position: int) -> _Run:
        """Returns the steps of the chunk of a position."""
        return self._run(self._steps.first_within(position, self._chunk_positions))

    def _run_from(self, first: int) -> _Run:
        steps = 0 if self._steps.is_over(first) else self._steps.within(first, self._chunk_positions)
        starts = list(self._steps.starts(first, steps))
        each = [np.diff(self.arrangement(at).ends, prepend=0) for at in starts]
        return _Run(starts or [first], np.cumsum([np.zeros(self._dp_size, dtype=np.int64), *each], axis=0))


def keep_last(kept: dict[int, Any], most: int) -> None:
    """Removes all but the values that were added last. Other threads may add and remove some meanwhile."""
    for key in list(kept)[:-most]:
        kept.pop(key, None)
