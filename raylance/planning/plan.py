"""The steps of an epoch: the positions and rows of each rank in each step.

Training consumes a prefix of the order, so (epoch, position) alone says how far a run is. Loaders, actors, audits and
tests use this one planner. All intervals are half-open.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from raylance.arguments import check_word
from raylance.errors import ConfigError
from raylance.orders.checking import check_sample, select_rows
from raylance.orders.order import Resolved
from raylance.orders.permutation import BoolArray, Int64Array

Remainder = Literal["drop", "pad", "ragged"]
REMAINDERS: tuple[Remainder, ...] = ("drop", "pad", "ragged")
_MOST_KEPT = 1 << 16  # most rows of a slice whose arrangement is kept
_GROWTH = 1.25  # factor by which the rows of an item grow from one round to the next
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
    """Rows [low, high) of one rank's slice of each of `steps` consecutive steps, sent as one object. From the plan and
    the item, each actor produces the same rows in the same order.
    """

    dp_rank: int
    epoch: int
    position: int  # the position of the first step
    steps: int  # more than one only if [low, high) is the whole slice
    low: int
    high: int
    chunk: Chunk  # from which the item was cut

    @property
    def rows(self) -> int:
        """Number of rows of the item."""
        return (self.high - self.low) * self.steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
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

    def __post_init__(self) -> None:
        for name in ("rows", "global_batch_size", "dp_size", "chunk_positions", "every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1.")
        check_word("remainder", self.remainder, REMAINDERS)
        if self.remainder == "drop" and self.epoch_rows < self.global_batch_size:
            raise ConfigError(
                f"an epoch has {self.epoch_rows} rows and the global batch {self.global_batch_size}. With "
                'remainder="drop" an epoch would have no step at all. Use a smaller batch, or remainder="pad" or '
                '"ragged".'
            )

    @property
    def epoch_rows(self) -> int:
        """Number of positions of an epoch; n, unless the order repeats rows."""
        return self.order.epoch_rows

    @property
    def rows(self) -> int:
        """Number of rows of the selection, n."""
        return self.order.rows

    @property
    def stride(self) -> int:
        """Number of positions from one step to the next."""
        return self.every * self.global_batch_size

    def steps(self, position: int = 0) -> int:
        """Returns the number of steps from a position to the end of the epoch, the same on every rank."""
        left, size = max(0, self.epoch_rows - position), self.global_batch_size
        whole = left // size if self.remainder == "drop" else -(-left // size)
        return -(-whole // self.every)

    def step_size(self, position: int) -> int:
        """Returns the number of rows of the step at a position, over all ranks, padding included."""
        left = self.epoch_rows - position
        return min(left, self.global_batch_size) if self.remainder == "ragged" else self.global_batch_size

    def after(self, position: int) -> int:
        """Returns the position of this plan's next step after the one at a position; at most `epoch_rows`."""
        return min(position + self.stride, self.epoch_rows)

    @property
    def empty_ranks(self) -> int:
        """Number of data-parallel ranks that get no row in the last step of an epoch."""
        rows = self.epoch_rows % self.global_batch_size if self.remainder == "ragged" else 0
        return max(0, self.dp_size - rows) if rows else 0

    def rank_slice(self, position: int, dp_rank: int) -> tuple[int, int]:
        """Returns a rank's half-open slice of the rows of the step at a position. The rows are in lane-major order."""
        size = self.step_size(position)
        return dp_rank * size // self.dp_size, (dp_rank + 1) * size // self.dp_size

    def positions(self, position: int, low: int, high: int) -> Int64Array:
        """Returns the epoch positions of rows [low, high) of a step, sorted by (position mod lanes, position div
        lanes). Those of padding are at least `epoch_rows`.
        """
        lanes, size = self.order.lane_count, self.step_size(position)
        arrange = _arranged if high - low <= _MOST_KEPT else _arranged.__wrapped__
        return position + arrange(lanes, position % lanes, size, low, high)

    def item_positions(self, item: WorkItem) -> Int64Array:
        """Returns the epoch positions of an item's rows in the order of delivery, int64, shape (item.rows,)."""
        low = self.rank_slice(item.position, item.dp_rank)[0]
        starts = self._starts(item)
        return np.concatenate([self.positions(start, low + item.low, low + item.high) for start in starts])

    def select(self, epoch: int, positions: Int64Array) -> Int64Array:
        """Returns the selected rows at epoch positions. Padding gets the epoch's first rows. Raises ConfigError if a
        custom order returns a row that is not in the selection.
        """
        return select_rows(self.order.epoch(epoch), positions % self.epoch_rows)

    def check_order(self, epoch: int) -> None:
        """Checks a custom order on a sample of an epoch's positions, before anything is started. Raises ConfigError if
        the order returns a row twice without `repeats`, or a row that is not in the selection.
        """
        check_sample(self.order, epoch)

    def chunk_rows(self, chunk: Chunk, dp_rank: int) -> Int64Array:
        """Returns the selected rows of a rank's chunk in the order of delivery, int64. `PlannedRows` keeps them."""
        parts = [self.positions(position, *self._part(chunk, position, dp_rank)) for position in self._starts(chunk)]
        return self.select(chunk.epoch, np.concatenate(parts))

    def item_rows(self, item: WorkItem) -> Int64Array:
        """Returns an item's selected rows in the order of delivery, int64."""
        return self.select(item.epoch, self.item_positions(item))

    def is_real(self, item: WorkItem) -> BoolArray:
        """Returns for each row of an item whether it is not padding, bool, shape (item.rows,)."""
        last = self._starts(item)[-1]
        if last + self.step_size(last) <= self.epoch_rows:
            return np.ones(item.rows, dtype=np.bool_)
        return self.item_positions(item) < self.epoch_rows

    def line(self, position: int, dp_rank: int) -> int:
        """Returns the line of the first row of a rank's slice of a step. Lines number, from 0, the rank's rows in the
        order of delivery: all of an epoch, or with `every` only those of steps that lie whole strides apart.
        """
        return position // self.stride * self._slice_rows(dp_rank)

    def item_line(self, item: WorkItem) -> int:
        """Returns the line of an item's first row; see `line`."""
        return self.line(item.position, item.dp_rank) + item.low

    def _slice_rows(self, dp_rank: int) -> int:
        size = self.global_batch_size
        return (dp_rank + 1) * size // self.dp_size - dp_rank * size // self.dp_size

    def first_line(self, chunk: Chunk, dp_rank: int) -> int:
        """Returns the line of a chunk's first row; see `line`."""
        return self.line(chunk.position, dp_rank) + chunk.low

    def chunk_size(self, chunk: Chunk, dp_rank: int) -> int:
        """Returns the number of rows of a rank's chunk."""
        low, high = self.rank_slice(self._starts(chunk)[-1], dp_rank)
        of_last = high - low if chunk.high is None else chunk.high
        return (chunk.steps - 1) * self._slice_rows(dp_rank) + of_last - chunk.low

    def _starts(self, part: Chunk | WorkItem) -> range:
        """Returns the positions of the steps of a chunk or an item."""
        return range(part.position, part.position + part.steps * self.stride, self.stride)

    def _part(self, chunk: Chunk, position: int, dp_rank: int) -> tuple[int, int]:
        """Returns the rows of one of a chunk's steps that belong to the chunk, half-open."""
        low, high = self.rank_slice(position, dp_rank)
        end = high if chunk.high is None or position != self._starts(chunk)[-1] else low + chunk.high
        return low + chunk.low * (position == chunk.position), end

    def head(self, chunk: Chunk, dp_rank: int, rows: int) -> Chunk:
        """Returns the first rows of a chunk: about `rows`, at least one; whole steps if they have room for one."""
        if rows >= self.chunk_size(chunk, dp_rank):
            return chunk
        low, high = self._part(chunk, chunk.position, dp_rank)
        if rows < high - low:
            return dataclasses.replace(chunk, steps=1, high=chunk.low + max(1, rows))
        more = (rows - (high - low)) // max(1, self._slice_rows(dp_rank))
        return dataclasses.replace(chunk, steps=1 + more, high=None)

    def cut(self, item: WorkItem, parts: int) -> list[WorkItem]:
        """Cuts an item into up to `parts` items of whole steps, or of parts of its only step, in the same order."""
        whole = item.steps if item.steps > 1 else item.rows
        parts = max(1, min(parts, whole))
        bounds = list(itertools.pairwise(part * whole // parts for part in range(parts + 1)))
        if item.steps == 1:
            return [dataclasses.replace(item, low=item.low + low, high=item.low + high) for low, high in bounds]
        return [
            dataclasses.replace(item, position=item.position + low * self.stride, steps=high - low)
            for low, high in bounds
        ]

    def chunk_at(self, epoch: int, position: int, low: int = 0) -> Chunk | None:
        """Returns the chunk that begins with the step at a position, or with its row `low`; None at the epoch's end."""
        steps = self.steps(position)
        if steps <= 0:
            return None
        unit_end = (position // self.chunk_positions + 1) * self.chunk_positions
        within = -(-(unit_end - position) // self.stride)
        return Chunk(epoch=epoch, position=position, steps=min(steps, within), low=low)

    def next_chunk(self, chunk: Chunk) -> Chunk | None:
        """Returns the chunk after a chunk; None at the end of the epoch."""
        if chunk.high is not None:
            return self.chunk_at(chunk.epoch, self._starts(chunk)[-1], chunk.high)
        return self.chunk_at(chunk.epoch, chunk.position + chunk.steps * self.stride)

    def likely_next_chunk(self, chunk: Chunk, dp_rank: int) -> Chunk | None:
        """Returns the chunk that a rank likely reads next; without rows in the next one, the next epoch's first."""
        after = self.next_chunk(chunk)
        if after is not None and self.chunk_size(after, dp_rank):
            return after
        first = chunk.position % self.stride // self.global_batch_size * self.global_batch_size
        return self.chunk_at(chunk.epoch + 1, first)

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
        item_rows: int,
        first_rows: int = 0,
        max_steps: int = 64,
        chunks: Iterable[Chunk] | None = None,
    ) -> Iterator[WorkItem]:
        """Cuts a rank's rows from a position to the end of the epoch into work items, in the order of delivery.

        An item should have about `item_rows` rows: up to `max_steps` smaller slices are joined, larger slices are cut.
        An item's rows belong to one chunk of `chunks`; None for the plan's own.

        With `first_rows`, items of the first step have about this number of rows, so that each helper gets one, and the
        first batch comes early. Each further round of as many items has a quarter more rows in each, so that its rows
        last while helpers make the next one. Near the end of the epoch, an item has half of a helper's share of the
        remaining rows (Polychronopoulos, Kuck: "Guided self-scheduling", 1987), so that no helper works when the others
        are done.
        """
        low, high = self.rank_slice(position, dp_rank)
        aim, made = float(first_rows or item_rows), 0
        alike = max(1, -(-(high - low) // int(aim)))
        for chunk in self.chunks(epoch, position) if chunks is None else chunks:
            done = 0
            while done < chunk.steps:
                at = chunk.position + done * self.stride
                begin, (low, high) = self.rank_slice(at, dp_rank)[0], self._part(chunk, at, dp_rank)
                size, rows = high - low, max(1, min(int(aim), item_rows))
                if first_rows:
                    rows = min(rows, max(first_rows, self.steps(at) * size // (2 * alike)))
                parts = max(1, -(-size // rows))
                joined = 1 if parts > 1 else max(1, min(self._alike_steps(chunk, at), rows // max(size, 1), max_steps))
                where = {"position": at, "steps": joined, "low": low - begin, "high": high - begin}
                yield from self.cut(WorkItem(dp_rank=dp_rank, epoch=epoch, chunk=chunk, **where), parts)
                done, made = done + joined, made + parts
                if made >= alike:
                    aim, made = min(aim * _GROWTH, float(item_rows)), 0

    def _alike_steps(self, chunk: Chunk, position: int) -> int:
        """Returns how many of a chunk's steps, from one on, have slices of one size that wholly belong to the chunk."""
        last = self._starts(chunk)[-1]
        if (chunk.low and position == chunk.position) or (chunk.high is not None and position == last):
            return 1
        whole = -(-((self.epoch_rows - position) // self.global_batch_size) // self.every)
        return min(whole, (last - position) // self.stride + (chunk.high is None))


@functools.lru_cache(maxsize=8)
def _arranged(lanes: int, first: int, size: int, low: int, high: int) -> Int64Array:
    """Returns the positions of rows [low, high) of a step of `size` rows that begins in lane `first`, relative to the
    step's. If the number of lanes divides the global batch, the result is the same for all whole steps.
    """
    offset = (np.arange(lanes, dtype=np.int64) - first) % lanes  # position of each lane's first row in the step
    count = np.maximum(0, -(-(size - offset) // lanes))
    ends = np.cumsum(count)
    wanted = np.arange(low, high, dtype=np.int64)
    lane = np.searchsorted(ends, wanted, side="right")
    within = wanted - (ends - count)[lane]
    return np.asarray(offset[lane] + within * lanes, dtype=np.int64)


def no_step_left(plan: Plan, epoch: int, position: int) -> str:
    """Returns the warning for an empty pass: after its position, no whole step fits into the epoch."""
    return (
        f"no step is left of epoch {epoch}: {position} of {plan.epoch_rows} rows were consumed, and the rest is less "
        f"than a global batch of {plan.global_batch_size} (remainder={plan.remainder!r}). This pass is empty; the next "
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
