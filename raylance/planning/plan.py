"""The steps of an epoch: the positions and rows of each rank in each step.

Training consumes a prefix of the order, so (epoch, position) alone says how far a run is. Loaders, actors, audits and
tests use this one planner. All intervals are half-open.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from raylance.arguments import check_word
from raylance.errors import ConfigError
from raylance.orders.checking import check_sample, select_rows
from raylance.orders.order import COST, Epoch, PicklesFields, Resolved
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.balance import Balance
from raylance.planning.item_sizes import ItemSizes
from raylance.planning.slices import BalancedSlices, LaneSlices, UnevenSlices, keep_last
from raylance.planning.step_size import REMAINDERS, CostLimit, Remainder
from raylance.planning.steps import CostSteps, EvenSteps, Steps

_EPOCHS_KEPT = 4  # epochs whose steps are kept: more than one pass asks for
_WHOLE = 0.75  # a window of up to this share of the limit is not cut, so that one a little above half stays whole


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Rows of one rank that are read and held together: those of its slices of consecutive steps, in this order."""

    epoch: int
    position: int  # the position of the first step
    steps: int
    low: int = 0  # rows of the first step's slice that do not belong to the chunk
    high: int | None = None  # where the chunk ends in the last step's slice; None for the end of the slice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """Rows of one rank's slices of `steps` consecutive steps, sent as one object: rows [low, high) of these slices, one
    after the other. From the plan and the item, each actor produces the same rows in the same order.
    """

    dp_rank: int
    epoch: int
    position: int  # the position of the first step
    steps: int  # more than one only if all their slices are whole; then `low` is 0
    low: int
    high: int
    chunk: Chunk  # from which the item was cut

    @property
    def rows(self) -> int:
        """Number of rows of the item."""
        return self.high - self.low


class PlannedEpoch(NamedTuple):
    """One epoch of a plan: the rows at its positions, its steps, and which rows of a step each rank gets."""

    rows: Epoch
    steps: Steps
    slices: LaneSlices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(PicklesFields):
    """The steps of every epoch, for all ranks."""

    order: Resolved
    global_batch_size: int  # rows of one step over all ranks, G
    dp_size: int
    # "drop" leaves out the rows after the last whole step, "pad" fills the step with the epoch's first rows, "ragged"
    # makes a smaller last step, in which a rank may get no row.
    remainder: Remainder
    chunk_positions: int  # an epoch is cut into ranges of this size; the steps that begin in one form a chunk
    # Distance in steps between two steps of this plan. If k workers share a rank, each has k here, and worker w begins
    # w steps after the first one.
    every: int = 1
    # What a step may cost, in place of `global_batch_size`, which is then the mean number of rows of a step
    budget: CostLimit | None = None
    balance: Balance | None = None  # changes which rank gets which rows of a step

    def __post_init__(self) -> None:
        for name in ("rows", "global_batch_size", "dp_size", "chunk_positions", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1.")
        check_word("remainder", self.remainder, REMAINDERS)
        if self.remainder == "drop" and self.budget is None and self.epoch_rows < self.global_batch_size:
            raise ConfigError(
                f"an epoch has {self.epoch_rows} rows and the global batch {self.global_batch_size}. With "
                'remainder="drop" an epoch would have no step at all. Use a smaller batch, or remainder="pad" or '
                '"ragged".'
            )

    @property
    def epoch_rows(self) -> int:
        """Number of positions of an epoch; n, unless the order repeats rows. See `rows_of`."""
        return self.order.epoch_rows

    def rows_of(self, epoch: int) -> int:
        """Returns the number of positions of one epoch; another one if the order changes in the course of the run."""
        return self.epoch(epoch).rows.epoch_rows

    @property
    def rows(self) -> int:
        """Number of rows of the selection, n."""
        return self.order.rows

    def epoch(self, number: int) -> PlannedEpoch:
        """Returns an epoch, with what it knows of its steps."""
        found = self._epochs.get(number)
        if found is None:
            found = self._epochs.setdefault(number, self._make_epoch(number))
            keep_last(self._epochs, _EPOCHS_KEPT)
        return found

    @functools.cached_property
    def _epochs(self) -> dict[int, PlannedEpoch]:
        """The last ones, by number. Several threads may add the same one."""
        return {}

    def _make_epoch(self, number: int) -> PlannedEpoch:
        rows, dp_size = self.order.epoch(number), self.dp_size
        steps: Steps
        if self.budget is not None:
            steps = CostSteps(rows, self.budget, self.remainder)
        else:
            steps = EvenSteps(
                epoch_rows=rows.epoch_rows, rows_each=self.global_batch_size, remainder=self.remainder, every=self.every
            )
        if self.balance is None or dp_size == 1:  # nothing is to be balanced
            return PlannedEpoch(rows, steps, LaneSlices(rows, steps, dp_size))
        if self.balance.equal_rows:
            return PlannedEpoch(rows, steps, BalancedSlices(rows, steps, dp_size, self.balance))
        return PlannedEpoch(rows, steps, UnevenSlices(rows, steps, dp_size, self.balance, self.chunk_positions))

    def steps(self, epoch: int, position: int = 0) -> int:
        """Returns the number of steps from a position to the end of an epoch, the same on every rank."""
        return self.epoch(epoch).steps.count(position)

    def is_over(self, epoch: int, position: int) -> bool:
        """Whether an epoch has no step at a position or after it."""
        return self.epoch(epoch).steps.is_over(position)

    def step_size(self, epoch: int, position: int) -> int:
        """Returns the number of rows of the step at a position, over all ranks, padding included."""
        return self.epoch(epoch).steps.size(position)

    def after(self, epoch: int, position: int, steps: int = 1) -> int:
        """Returns the position of a later step of this plan, the next one by default; at most the epoch's end."""
        return self.epoch(epoch).steps.after(position, steps)

    def pads(self, cost: str) -> bool:
        """Whether the cost of this name is counted as if rows were padded. One without a name is always shown so."""
        is_asked = self.budget is not None and self.budget.pads(cost)
        return is_asked or cost in (COST, self.order.buckets_by)

    @property
    def step_text(self) -> str:
        """The size of a step in words, for messages."""
        if self.budget is None:
            return f"a global batch of {self.global_batch_size:,}"
        return f"a global batch of {self.budget.text}"

    def starts(self, epoch: int, position: int, steps: int) -> Iterator[int]:
        """Returns the positions of consecutive steps of this plan."""
        return self.epoch(epoch).steps.starts(position, steps)

    def start_of(self, epoch: int, position: int) -> int:
        """Returns the first position of the step that has a position, if the first step begins with the epoch."""
        return self.epoch(epoch).steps.start_of(position)

    def steps_between(self, epoch: int, first: int, last: int) -> int:
        """Returns the number of steps of this plan from one that begins at `first` to position `last`, rounded up."""
        return self.epoch(epoch).steps.between(first, last)

    def leads_to(self, epoch: int, first: int, position: int) -> bool:
        """Whether a plan that has a step at `first` also has one at a position."""
        return self.epoch(epoch).steps.leads_to(first, position)

    def empty_ranks(self, epoch: int, position: int) -> int:
        """Returns the number of data-parallel ranks that get no row in the step at a position."""
        return max(0, self.dp_size - self.step_size(epoch, position))

    def rank_slice(self, epoch: int, position: int, dp_rank: int) -> tuple[int, int]:
        """Returns a rank's half-open slice of the rows of the step at a position. The rows are in lane-major order."""
        return self.epoch(epoch).slices.slice_of(position, dp_rank)

    def rank_rows(self, epoch: int, position: int, steps: int, dp_rank: int) -> int:
        """Returns the number of a rank's rows in consecutive steps of a chunk."""
        return self.epoch(epoch).slices.rows(position, steps, dp_rank)

    def positions(self, epoch: int, position: int, low: int, high: int) -> Int64Array:
        """Returns the epoch positions of rows [low, high) of a step, sorted by (position mod lanes, position div
        lanes), and then swapped by the balance, if there is one. Those of padding are at least `rows_of(epoch)`.
        """
        return self.epoch(epoch).slices.positions(position, low, high)

    @functools.cached_property
    def by_lane(self) -> "Plan":
        """The same plan without its balance."""
        return dataclasses.replace(self, balance=None)

    def item_positions(self, item: WorkItem) -> Int64Array:
        """Returns the epoch positions of an item's rows in the order of delivery, int64, shape (item.rows,)."""
        epoch, rank = item.epoch, item.dp_rank
        if item.steps > 1:
            slices = [(at, *self.rank_slice(epoch, at, rank)) for at in self._starts(item)]
            return np.concatenate([self.positions(epoch, *each) for each in slices])
        low = self.rank_slice(epoch, item.position, rank)[0]
        return self.positions(epoch, item.position, low + item.low, low + item.high)

    def rows_by_step(self, item: WorkItem) -> list[int]:
        """Returns the number of an item's rows in each of its steps."""
        if item.steps == 1:
            return [item.rows]
        return [operator.sub(*self.rank_slice(item.epoch, at, item.dp_rank)[::-1]) for at in self._starts(item)]

    def ends_step(self, item: WorkItem) -> bool:
        """Whether an item has the last row of its rank's slice of its last step."""
        low, high = self.rank_slice(item.epoch, item.position, item.dp_rank)
        return item.steps > 1 or item.high == high - low

    def select(self, epoch: int, positions: Int64Array) -> Int64Array:
        """Returns the selected rows at epoch positions. Padding gets the epoch's first rows. Raises ConfigError if a
        custom order returns a row that is not in the selection.
        """
        rows = self.epoch(epoch).rows
        return select_rows(rows, positions % rows.epoch_rows)

    def check_order(self, epoch: int) -> None:
        """Checks a custom order on a sample of an epoch's positions, before anything is started. Raises ConfigError if
        the order returns a row twice without `repeats`, or a row that is not in the selection.
        """
        check_sample(self.order, epoch)

    def chunk_rows(self, chunk: Chunk, dp_rank: int) -> Int64Array:
        """Returns the selected rows of a rank's chunk in the order of delivery, int64. `PlannedRows` keeps them."""
        parts = [self.positions(chunk.epoch, at, *self._part(chunk, at, dp_rank)) for at in self._starts(chunk)]
        return self.select(chunk.epoch, np.concatenate(parts))

    def item_rows(self, item: WorkItem) -> Int64Array:
        """Returns an item's selected rows in the order of delivery, int64."""
        return self.select(item.epoch, self.item_positions(item))

    def is_real(self, item: WorkItem) -> BoolArray:
        """Returns for each row of an item whether it is not padding, bool, shape (item.rows,)."""
        last, end = self._last(item), self.rows_of(item.epoch)
        if last + self.step_size(item.epoch, last) <= end:
            return np.ones(item.rows, dtype=np.bool_)
        return self.item_positions(item) < end

    def line(self, epoch: int, position: int, dp_rank: int) -> int:
        """Returns the line of the first row of a rank's slice of a step. Lines number the rank's rows in the order of
        delivery, with `every` only those of steps that lie whole strides apart. Those of a chunk are consecutive.
        """
        return self.epoch(epoch).slices.line(position, dp_rank)

    def item_line(self, item: WorkItem) -> int:
        """Returns the line of an item's first row; see `line`."""
        return self.line(item.epoch, item.position, item.dp_rank) + item.low

    def first_line(self, chunk: Chunk, dp_rank: int) -> int:
        """Returns the line of a chunk's first row; see `line`."""
        return self.line(chunk.epoch, chunk.position, dp_rank) + chunk.low

    def chunk_size(self, chunk: Chunk, dp_rank: int) -> int:
        """Returns the number of rows of a rank's chunk."""
        if chunk.high is None:
            return self.rank_rows(chunk.epoch, chunk.position, chunk.steps, dp_rank) - chunk.low
        before = chunk.steps - 1
        whole = self.rank_rows(chunk.epoch, chunk.position, before, dp_rank) if before else 0
        return whole + chunk.high - chunk.low

    def _starts(self, part: Chunk | WorkItem) -> Iterator[int]:
        """Returns the positions of the steps of a chunk or an item."""
        return self.starts(part.epoch, part.position, part.steps)

    def _last(self, part: Chunk | WorkItem) -> int:
        """Returns the position of the last step of a chunk or an item."""
        return self.after(part.epoch, part.position, part.steps - 1)

    def _part(self, chunk: Chunk, position: int, dp_rank: int) -> tuple[int, int]:
        """Returns the rows of one of a chunk's steps that belong to the chunk, half-open."""
        low, high = self.rank_slice(chunk.epoch, position, dp_rank)
        end = high if chunk.high is None or position != self._last(chunk) else low + chunk.high
        return low + chunk.low * (position == chunk.position), end

    def head(self, chunk: Chunk, dp_rank: int, rows: int) -> Chunk:
        """Returns the first rows of a chunk: about `rows`, at least one; whole steps if they have room for one."""
        if rows >= self.chunk_size(chunk, dp_rank):
            return chunk
        low, high = self._part(chunk, chunk.position, dp_rank)
        if rows < high - low:
            return dataclasses.replace(chunk, steps=1, high=chunk.low + max(1, rows))
        most = chunk.steps - (chunk.high is not None)
        steps = self._fitting(chunk.epoch, chunk.position, most, dp_rank, rows + chunk.low)
        found = dataclasses.replace(chunk, steps=steps, high=None)
        if self.chunk_size(found, dp_rank):
            return found
        # Steps of a cost may have no row of this rank. The first ones that have some follow, or a part of the first.
        while not self.chunk_size(found, dp_rank):
            found = dataclasses.replace(found, steps=found.steps + 1)
        return dataclasses.replace(found, high=max(1, rows)) if self.chunk_size(found, dp_rank) > rows else found

    def _fitting(self, epoch: int, position: int, most: int, dp_rank: int, rows: int) -> int:
        """Returns how many steps from a position on, from 1 to `most`, have together at most `rows` of a rank's."""
        few = 1
        while few < most:
            middle = (few + most + 1) // 2
            if self.rank_rows(epoch, position, middle, dp_rank) <= rows:
                few = middle
            else:
                most = middle - 1
        return few

    def cut(self, item: WorkItem, parts: int) -> list[WorkItem]:
        """Cuts an item into up to `parts` items of whole steps, or of parts of its only step, in the same order."""
        whole = item.steps if item.steps > 1 else item.rows
        parts = max(1, min(parts, whole))
        bounds = list(itertools.pairwise(part * whole // parts for part in range(parts + 1)))
        if item.steps == 1:
            return [dataclasses.replace(item, low=item.low + low, high=item.low + high) for low, high in bounds]
        found, at = [], item.position
        for low, high in bounds:
            rows = self.rank_rows(item.epoch, at, high - low, item.dp_rank)
            found.append(dataclasses.replace(item, position=at, steps=high - low, high=rows))
            at = self.after(item.epoch, at, high - low)
        return found

    def cut_at(self, item: WorkItem, rows: int) -> list[WorkItem]:
        """Cuts an item into up to four: one of them ends after its first `rows` rows, which are fewer than it has."""
        if item.steps == 1:
            middle = item.low + rows
            return [dataclasses.replace(item, high=middle), dataclasses.replace(item, low=middle)]
        steps = self._fitting(item.epoch, item.position, item.steps, item.dp_rank, rows)
        size = self.rank_rows(item.epoch, item.position, steps, item.dp_rank)
        after = self.after(item.epoch, item.position, steps)
        head = dataclasses.replace(item, steps=steps, high=size)
        rest = dataclasses.replace(item, position=after, steps=item.steps - steps, high=item.rows - size)
        if size > rows:  # the first step alone has more
            return [*self.cut_at(head, rows), rest]
        return [head, rest] if size == rows else [head, *self.cut_at(rest, rows - size)]

    def chunk_at(self, epoch: int, position: int, low: int = 0) -> Chunk | None:
        """Returns the chunk that begins with the step at a position, or with its row `low`; None at the epoch's end."""
        if self.is_over(epoch, position):
            return None
        steps = self.epoch(epoch).steps.within(position, self.chunk_positions)
        return Chunk(epoch=epoch, position=position, steps=steps, low=low)

    def first_of_chunk(self, epoch: int, position: int) -> int:
        """Returns the first position of a step, at most `position`, that begins in the same chunk."""
        return self.epoch(epoch).steps.first_within(position, self.chunk_positions)

    def next_chunk(self, chunk: Chunk) -> Chunk | None:
        """Returns the chunk after a chunk; None at the end of the epoch."""
        if chunk.high is not None:
            return self.chunk_at(chunk.epoch, self._last(chunk), chunk.high)
        return self.chunk_at(chunk.epoch, self.after(chunk.epoch, chunk.position, chunk.steps))

    def next_chunk_with_rows(self, chunk: Chunk, dp_rank: int) -> Chunk | None:
        """Returns the chunk after a chunk in which a rank has rows; None if none is left of the epoch."""
        after = self.next_chunk(chunk)
        while after is not None and not self.chunk_size(after, dp_rank):
            after = self.next_chunk(after)
        return after

    def next_epochs_chunk(self, chunk: Chunk) -> Chunk | None:
        """Returns the first chunk of the epoch after that of a chunk; None if no step fits into it."""
        first = chunk.position // self.global_batch_size % self.every if self.every > 1 else 0
        return self.chunk_at(chunk.epoch + 1, first * self.global_batch_size)

    def chunks(self, epoch: int, position: int) -> Iterator[Chunk]:
        """Yields the chunks from a position to the end of the epoch."""
        chunk = self.chunk_at(epoch, position)
        while chunk is not None:
            yield chunk
            chunk = self.next_chunk(chunk)

    def items(
        self,
        dp_rank: int,
        epoch: int,
        position: int,
        item_rows: int | Callable[[], int],
        first_rows: int = 0,
        max_steps: int = 64,
        chunks: Iterable[Chunk] | None = None,
        *,
        spans_epochs: bool = False,
    ) -> Iterator[WorkItem]:
        """Cuts a rank's rows from a position to the end of the epoch into work items, in the order of delivery.

        An item should have about `item_rows` rows, or as many as this returns when a chunk begins: up to `max_steps`
        smaller slices are joined, larger slices are cut. An item's rows belong to one chunk of `chunks`, which may have
        several epochs; None for the plan's own of this epoch. With `first_rows`, items of the first step have about
        this number of rows, and later ones more; see `ItemSizes`. They are small again near the end of the epoch,
        unless they span epochs.
        """
        low, high = self.rank_slice(epoch, position, dp_rank)
        sizes = ItemSizes((lambda: item_rows) if isinstance(item_rows, int) else item_rows, first_rows, high - low)
        for chunk in self.chunks(epoch, position) if chunks is None else chunks:
            done, at, epoch = 0, chunk.position, chunk.epoch
            low, high = self.rank_slice(epoch, at, dp_rank)
            sizes.begin_chunk(high - low)
            while done < chunk.steps:
                begin, (low, high) = self.rank_slice(epoch, at, dp_rank)[0], self._part(chunk, at, dp_rank)
                left = None if spans_epochs or not first_rows else self._rank_rows_left(epoch, at)
                rows = sizes.next(high - low, left)
                parts = max(1, -(-(high - low) // rows))
                joined = 1 if parts > 1 else self._fitting(epoch, at, self._whole(chunk, at, max_steps), dp_rank, rows)
                if joined > 1:
                    low, high = begin, begin + self.rank_rows(epoch, at, joined, dp_rank)
                where = {"position": at, "steps": joined, "low": low - begin, "high": high - begin}
                yield from self.cut(WorkItem(dp_rank=dp_rank, epoch=epoch, chunk=chunk, **where), parts)
                done, at = done + joined, self.after(epoch, at, joined)
                sizes.count(parts)

    def _rank_rows_left(self, epoch: int, position: int) -> int:
        """Returns about how many rows a rank gets from a position to the end of the epoch."""
        return (self.rows_of(epoch) - position) // (self.dp_size * self.every)

    def _whole(self, chunk: Chunk, position: int, most: int) -> int:
        """Returns how many of a chunk's steps, from one on, at least 1 and at most `most`, wholly belong to it."""
        if chunk.low and position == chunk.position:
            return 1
        left = self.epoch(chunk.epoch).steps.between(position, self._last(chunk)) + (chunk.high is None)
        return max(1, min(left, most))


def no_step_left(plan: Plan, epoch: int, position: int) -> str:
    """Returns the warning for an empty pass: after its position, no whole step fits into the epoch."""
    return (
        f"no step is left of epoch {epoch}: {position} of {plan.rows_of(epoch)} rows were consumed, and the rest is "
        f"less than {plan.step_text} (remainder={plan.remainder!r}). This pass is empty; the next "
        f"one is epoch {epoch + 1}."
    )


def fitting_rows(rows: int, row_bytes: float, limit_bytes: int) -> int:
    """Returns how many of a chunk's rows to read and hold together: all if `limit_bytes` leaves room for the next
    chunk; else one of several equal parts, of which there is room for two. Fewer and larger reads are faster.
    """
    nbytes = rows * row_bytes
    if nbytes <= _WHOLE * limit_bytes:
        return rows
    return max(1, rows // -(-int(nbytes) // max(1, limit_bytes // 2)))
