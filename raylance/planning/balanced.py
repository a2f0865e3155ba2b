"""The rows of each rank in the steps of a plan with a balance: which ones, how many, and how they are numbered."""

import bisect
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raylance.orders.permutation import Int64Array
from raylance.planning.balance import Balance

if TYPE_CHECKING:
    from raylance.planning.plan import Plan

_STEPS_KEPT = 512  # steps whose arrangement is kept
_TOGETHER = 32  # steps that are balanced together
_RUNS_KEPT = 8  # chunks whose numbers of rows are kept


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


class BalancedSlices:
    """The slices of the ranks, as a balance makes them of those by lane."""

    def __init__(self, by_lane: "Plan", balance: Balance) -> None:
        """Takes the plan without its balance, and the balance."""
        self._plan, self._balance = by_lane, balance
        # The last arrangements, by epoch and position. Several threads may add the same ones.
        self._kept: dict[tuple[int, int], Arrangement] = {}

    def arrangement(self, epoch: int, position: int) -> Arrangement:
        """Returns the rows of the step at a position."""
        found = self._kept.get((epoch, position))
        if found is None:
            plan = self._plan
            # Finding the rows of several steps takes little longer than finding those of one.
            starts = [at for at in plan.starts(epoch, position, _TOGETHER) if not plan.is_over(epoch, at)]
            steps = [plan.positions(epoch, at, 0, plan.step_size(epoch, at)) for at in starts]
            costs = plan.order.costs(plan.select(epoch, np.concatenate(steps))).astype(np.int64)
            parts = np.split(costs, np.cumsum([len(step) for step in steps])[:-1])
            for at, step, part in zip(starts, steps, parts, strict=True):
                of_ranks = self._balance.arrange(part, plan.dp_size)
                ends = np.cumsum([len(own) for own in of_ranks]).tolist()
                self._kept[epoch, at] = Arrangement(step[np.concatenate(of_ranks)], ends)
            found = self._kept[epoch, position]
            for key in list(self._kept)[:-_STEPS_KEPT]:
                self._kept.pop(key, None)
        return found

    def slice_of(self, epoch: int, position: int, dp_rank: int) -> tuple[int, int]:
        """Returns a rank's half-open slice of the rows of the step at a position."""
        if self._plan.is_over(epoch, position):
            return 0, 0
        ends = self.arrangement(epoch, position).ends
        return ends[dp_rank - 1] if dp_rank else 0, ends[dp_rank]

    def line(self, epoch: int, position: int, dp_rank: int) -> int:
        """Returns a number for the first row of a rank's slice of a step; see `Steps.line`."""
        run = self._run_of(epoch, position)
        at = bisect.bisect_left(run.starts, position)
        line = run.starts[0] + int(run.rows[at, dp_rank])
        if at < len(run.starts) and run.starts[at] == position:
            return line
        low, high = self.slice_of(epoch, position, dp_rank)
        return line - (high - low)  # a step that was cut by a resume: its rows end where those of the whole step end

    def rows(self, epoch: int, position: int, steps: int, dp_rank: int) -> int:
        """Returns the number of a rank's rows in consecutive steps of a chunk."""
        low, high = self.slice_of(epoch, position, dp_rank)
        run = self._run_of(epoch, position)
        first = bisect.bisect_right(run.starts, position)  # the first step may be a part of one
        more = run.rows[first + steps - 1, dp_rank] - run.rows[first, dp_rank] if steps > 1 else 0
        return high - low + int(more)

    def _run_of(self, epoch: int, position: int) -> _Run:
        return self._runs(epoch, self._plan.first_of_chunk(epoch, position))

    @functools.cached_property
    def _runs(self) -> Callable[[int, int], _Run]:
        """Returns the steps of the chunk that begins with the step at a position."""

        def count(epoch: int, first: int) -> _Run:
            chunk, dp_size = self._plan.chunk_at(epoch, first), self._plan.dp_size
            starts = [] if chunk is None else [*self._plan.starts(epoch, first, chunk.steps)]
            each = [np.diff(self.arrangement(epoch, at).ends, prepend=0) for at in starts]
            return _Run(starts or [first], np.cumsum([np.zeros(dp_size, dtype=np.int64), *each], axis=0))

        return functools.lru_cache(maxsize=_RUNS_KEPT)(count)
