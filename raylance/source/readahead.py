"""Owns the raw rows that a reader helper holds: the portion in use and the next one, read in blocks and bounded by the
bytes that were really read; never decides which rows are delivered, and never uses Ray.

A portion has as many rows of a chunk, in the order of delivery, as the limit allows: the whole chunk if it fits, else a
part of it, at least one row. Portions change how rows are read, never which rows are delivered or in which order. The
memory of a finished portion is used for a later one. For "track" and "line", see `portion.py`.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from typing import TypeVar

import numpy as np
import pyarrow as pa

from raylance.columns import split_offsets
from raylance.errors import DatasetError
from raylance.observe import clock
from raylance.orders.permutation import Int64Array
from raylance.planning.plan import Chunk, Plan, WorkItem, portion_rows
from raylance.source.lending import Lender
from raylance.source.limits import Calls
from raylance.source.memory import Placed, RowMemory
from raylance.source.portion import Portion, Track
from raylance.source.reader import Pace, Prepare, RowReader
from raylance.source.rows import RowSource

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BLOCK_BYTES = 32 << 20  # most bytes of a block; enough for Lance to read and decode in parallel
_BLOCKS = 16  # least number of blocks in the limit, so that a block larger than estimated exceeds it only a little
_FIRST_SHARE = 0.125  # share of a portion that is read as soon as the portion before it is in use
# If a portion was not read ahead, its first items, up to this share of the portion, are read one by one while the
# portion is read: half if items are decoded, because the decoders need that time anyway; else few, because reading one
# by one costs several times as much.
_HALF, _FEW = 0.5, 1 / 16
_PLANNED_ROWS = 1 << 16  # rows to plan at once: the rows of several small windows
_FASTER = 2.0  # the rest of a portion is read this many times as fast as the portion before it is handed out


class TooLargeError(Exception):
    """Raised if the rows of one item together have more bytes than allowed; `nbytes` is an estimate of their bytes."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """An item that is being gathered. Its last row is the one before line `end` of the track."""

    plan: Plan
    track: Track
    item: WorkItem
    end: int
    allowed_bytes: float
    following: Chunk | None


class _Gate:
    """Keeps a read that timed out, but still runs, from writing into memory whose rows were handed out meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._is_open = 0, True

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """Yields whether the gate is open. If it is, `close` waits until the body of the `with` statement has ended."""
        with self._changed:
            is_open = self._is_open
            self._inside += is_open
        try:
            yield is_open
        finally:
            with self._changed:
                self._inside -= is_open
                self._changed.notify_all()

    def close(self) -> None:
        """Lets no more threads in, and waits for those inside, which copy a few MiB."""
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: not self._inside)


class ReadAhead:
    """Holds the rows of one rank: gathers items from the portion in use, while a thread reads the next portion.

    Only one thread may call `gather` and `begin`; any thread may call `close`. If the rows of an item were not read
    ahead, the calling thread reads them itself. So both threads use the reader and the counters.
    """

    def __init__(
        self,
        source: RowSource,
        limit_bytes: int,
        read_timeout_s: float = 0.0,
        *,
        lends: bool = False,
        at_once: bool = False,
    ) -> None:
        """Opens nothing yet. The first `gather` raises the errors of the first read.

        Args:
            source: The rows to read.
            limit_bytes: Most bytes of both portions together; the block being read comes on top.
            read_timeout_s: See `retry_s` of `RowSource.open_reader`.
            lends: Whether the caller keeps tables of `gather` and may write to them. The tables may be views of a
                portion. So a portion hands out each of its rows once, and tables that are kept for long hold up to
                `limit_bytes` more memory.
            at_once: Whether the next portion is read as soon as it has room, or in steps as the used one is handed out.
        """
        self._source, self._limit, self._read_timeout_s = source, limit_bytes, read_timeout_s
        self._lends = lends
        self._first_share, self._early_share = (1.0, _FEW) if at_once else (_FIRST_SHARE, _HALF)
        portions = 3 if lends else 2  # a caller that gets views may still hold the previous portion
        self._lender = Lender(portions * limit_bytes * 9 // 16)  # a portion has half of the limit, rounded up
        self._items = Lender(limit_bytes // 2 if lends else limit_bytes // 8)  # for gathered rows
        self._selection = source.load_selection()
        self._row_bytes = source.likely_row_bytes  # measured on the last portion
        self._block_bytes = max(1, min(_BLOCK_BYTES, limit_bytes // _BLOCKS))
        self._is_even = False  # whether all known rows have one size
        self._thread = Calls(1, "read-ahead")
        self._planner = Calls(1, "plan-ahead")
        # At most one entry; one thread at a time uses it.
        self._planned: dict[tuple[str, int, Chunk], Future[tuple[Int64Array, Int64Array]]] = {}
        self._used: Portion | None = None
        self._next: Portion | None = None
        self._alone: tuple[Track, int] | None = None  # the line after the last rows that were read on request
        self._lock = threading.Lock()  # guards the attributes below, which both threads use
        self._reader: RowReader | None = None
        self._read_bytes, self._read_s = 0, 0.0
        self.peak_bytes = 0

    def gather(
        self,
        plan_key: str,
        plan: Plan,
        item: WorkItem,
        allowed_bytes: float = math.inf,
        following: Chunk | None = None,
    ) -> pa.Table:
        """Returns the rows of an item, in the order of delivery.

        `plan_key` identifies the plan. `following` is the chunk to read after the item's chunk; None for the chunk that
        follows in the plan.

        Raises:
            TooLargeError: If the rows have more bytes together than allowed.
            DatasetError: If one row has more bytes than the limit, or rows cannot be read.
        """
        track = (plan_key, item.dp_rank, item.epoch, item.position % plan.stride)
        at = begin = plan.line(item.position, item.dp_rank) + item.low
        request = _Request(plan, track, item, begin + item.rows, allowed_bytes, following)
        tables: list[pa.Table] = []
        nbytes = 0
        while at < request.end:
            portion = self._find_portion(request, at)
            high = min(request.end, portion.end)
            tables.append(portion.gather(at, high, self._items.lend, own=self._lends and self._is_kept_long()))
            nbytes += portion.memory.size_of(tables[-1])
            at = high
            if nbytes > allowed_bytes:
                raise TooLargeError(nbytes * item.rows // (at - begin))
            portion.hand_out(high)
            self._read_more(portion)
        if not tables:
            return self.empty_table()
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()

    def begin(self, plan_key: str, plan: Plan, rank: int, chunk: Chunk) -> None:
        """Drops the held portions and starts to read a chunk that will be needed. Does nothing if a held portion has
        the first row of the chunk.
        """
        track, line = (plan_key, rank, chunk.epoch, chunk.position % plan.stride), plan.line(chunk.position, rank)
        if not any(portion.has(track, line) for portion in self._held):
            self._release(*self._held)
            self._used, self._next = None, self._start(plan, track, chunk, line)

    def close(self) -> None:
        """Stops reading ahead after the current block, and waits for no storage that fails."""
        for portion in self._held:
            portion.is_dropped = True
        if self._reader is not None:
            self._reader.close()

    def read_since(self) -> tuple[int, float]:
        """Returns the bytes that were read from storage since the last call, and the seconds that this took."""
        with self._lock:
            since = self._read_bytes, self._read_s
            self._read_bytes, self._read_s = 0, 0.0
        return since

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows held now."""
        return sum(portion.nbytes for portion in self._held)

    @property
    def _held(self) -> list[Portion]:
        return [portion for portion in (self._used, self._next) if portion is not None]

    def empty_table(self) -> pa.Table:
        """Returns an empty table with all columns."""
        tables: list[pa.Table] = []
        self._read([np.empty(0, dtype=np.int64)], lambda _, table, places: table, tables.append)
        return tables[0]

    def _is_kept_long(self) -> bool:
        """Whether the caller still holds more memory of earlier portions than one portion may use. If so, `gather`
        returns copies instead of views, so that the caller does not hold even more of it.
        """
        held = sum(portion.capacity_bytes for portion in self._held)
        return self._lender.lent_bytes - held > self._limit // 2

    def _find_portion(self, request: _Request, at: int) -> Portion:
        """Returns a portion that is read completely and has line `at`; starts to read the portion after it."""
        used, track = self._advance(request, at), request.track
        if used is None:
            return self._read_item(request, at)
        is_early = used.is_cold and at - used.begin < self._early_share * (used.chunk_end - used.begin)
        if is_early and not used.filling.done() and (request.end - at) * self._row_bytes < self._limit / 8:
            # These rows were not read ahead. The first items are read one by one, so that a start or a resume waits for
            # a batch and not for a window. If all items were, the next portion would never be read ahead.
            return self._read_item(request, at)
        wait([used.filling])
        if not used.is_whole:  # before, not all rows had room, or there was an error that may have passed
            try:
                self._fill(used)
            except CancelledError:  # the process ends
                raise
            except Exception as error:
                # The error may concern other rows of the portion, so the rows of this item are read alone. The next
                # request for the portion reads it again.
                logger.warning("rows could not be read together (%r). One item is read by itself.", error)
                self._release(used)
                self._used = None
                return self._read_item(request, at)
        if self._next is None:
            self._next = self._start_next(used, request.following)
        # If the portion was cut before this line, a later portion has the line.
        return used if used.has(track, at) else self._find_portion(request, at)

    def _advance(self, request: _Request, at: int) -> Portion | None:
        """Makes the portion with line `at` the portion in use, and returns it. If neither portion that is held has the
        line, a new one is started. Returns None if the rows of the item should be read by themselves instead.
        """
        used, following, track = self._used, self._next, request.track
        if used is not None and used.has(track, at):
            return used
        if following is not None and following.has(track, at):
            if used is not None:
                self._release(used)
            self._used, self._next = following, None
            return following
        if used is not None and used.track == track and used.was_handed_out_lately(at):
            return None  # a new pass begins with rows that the previous pass did not take
        if used is not None and used.track == track and at < used.begin and self._alone != (track, at):
            return None  # a lost helper's work is repeated: the held portions are still needed
        self._release(*self._held)
        self._next = None
        self._used = started = self._start(request.plan, track, request.item.chunk, at)
        started.is_cold = True
        return started

    def _start(
        self, plan: Plan, track: Track, chunk: Chunk, begin: int, room: float = math.inf, share: float = 1.0
    ) -> Portion:
        """Starts to read a chunk from line `begin` on: for now, at most `room` bytes and this `share` of the rows."""
        rank = track[1]
        end = plan.line(chunk.position, rank) + plan.chunk_size(chunk, rank)
        portion = Portion(plan, track, chunk, begin, end, once=self._lends)
        portion.filling = self._thread.start(self._fill, portion, room, share)
        return portion

    def _start_next(self, used: Portion, following: Chunk | None) -> Portion | None:
        """Starts to read the rows after a portion: the rest of its chunk, or else the following chunk."""
        plan_key, rank, _, _ = used.track
        chunk, begin = used.chunk, used.end
        if begin == used.chunk_end:
            after = following or used.plan.likely_next_chunk(chunk, rank)
            if after is None:
                return None
            chunk, begin = after, used.plan.line(after.position, rank)
        track = (plan_key, rank, chunk.epoch, chunk.position % used.plan.stride)
        return self._start(used.plan, track, chunk, begin, self._limit - used.nbytes, self._share_of_next(used))

    def _read_more(self, used: Portion) -> None:
        """Starts to read more of the next portion as the portion in use is handed out. Reading all of it at once would
        take the CPU cores from decoding just when a window ends.
        """
        following, share = self._next, self._share_of_next(used)
        if used is not self._used or following is None or following.is_whole or following.is_stuck:
            return
        if following.filling.done() and following.filling.exception() is None and following.share_read < share:
            following.filling = self._thread.start(self._fill, following, self._limit - used.nbytes, share)

    def _read_item(self, request: _Request, at: int) -> Portion:
        """Reads the rows of an item from line `at` on into a separate portion; the held portions stay."""
        plan, item = request.plan, request.item
        alone = Portion(plan, request.track, item.chunk, at, request.end, once=self._lends)
        alone.is_held = False  # its rows count as in flight
        rows = plan.item_rows(item)
        alone.open(rows[at - request.end :], functools.partial(RowMemory, self._limit))
        self._fill(alone, most_bytes=request.allowed_bytes)
        self._alone = (request.track, alone.end)
        return alone

    def _release(self, *portions: Portion) -> None:
        """Drops portions. Their memory is used again when its last views are gone."""
        for portion in portions:
            portion.is_dropped = True

    def _chunk_rows(self, portion: Portion) -> tuple[Int64Array, Int64Array]:
        """Returns `_sorted_rows` of a portion's chunk; starts to compute those of the next chunk in another thread."""
        (plan_key, rank, *_), plan, chunk = portion.track, portion.plan, portion.chunk
        planned = self._planned.pop((plan_key, rank, chunk), None)
        found = _sorted_rows(plan, chunk, rank) if planned is None else planned.result()
        self._planned.clear()
        if (after := plan.likely_next_chunk(chunk, rank)) is not None:
            self._planned[plan_key, rank, after] = self._planner.start(_sorted_rows, plan, after, rank, _PLANNED_ROWS)
        return found

    def _remember(self, rows: int, lines: Int64Array | None) -> RowMemory:
        return RowMemory(self._limit // 2, rows, lines, self._lender.lend)  # so that two portions fit

    def _fill(self, portion: Portion, room: float = math.inf, share: float = 1.0, most_bytes: float = math.inf) -> None:
        """Reads the rest of a portion: for now, this `share` of its rows, up to `room` bytes.

        If the rows have more bytes than the limit or `most_bytes`, the portion is halved until they fit, or to one row.
        """
        if not portion.stored_rows:
            first = portion.begin - portion.plan.line(portion.chunk.position, portion.track[1])
            rows, lines = self._chunk_rows(portion)
            count = portion_rows(len(rows) - first, self._row_bytes, self._limit)
            is_whole = count == len(rows)
            portion.open(rows[first : first + count], self._remember, lines if is_whole else None)
        most = min(self._limit, most_bytes)
        self._read_portion(portion, room, share, most)
        while portion.nbytes > most and len(portion.rows) > 1:
            while portion.nbytes > most and len(portion.rows) > 1:
                portion.halve(self._remember)
            self._read_portion(portion, room, share, most)
        if portion.nbytes > self._limit:
            raise self._too_large_row(portion)
        portion.is_whole = portion.memory.rows == portion.stored_rows
        if portion.is_whole and portion.is_held:
            # Raised at once, lowered slowly: a portion that is too small costs some speed, and half of one that is too
            # large is read in vain.
            self._row_bytes = max(self._row_bytes / 2, portion.nbytes / len(portion.rows))

    def _read_portion(self, portion: Portion, room: float, share: float, most_bytes: float) -> None:
        """Reads until all rows are here, or this `share` of them, or until they have more bytes than fit."""
        least = self._source.likely_row_bytes
        pace = Pace(self._block_bytes, max(self._row_bytes, least), least_bytes=least)
        while self._read_blocks(portion, pace, room, share, most_bytes):
            pass

    def _read_blocks(self, portion: Portion, pace: Pace, room: float, share: float, most_bytes: float) -> bool:
        """Reads one block, or several in parallel if all rows have one size; returns whether more may follow."""
        if self._is_even:  # so no block exceeds its estimate
            pace.target_bytes, pace.limit_rows = _BLOCK_BYTES, portion.stored_rows
        memory, first = portion.memory, portion.memory.rows
        is_over, gate, asked = False, _Gate(), memory.rows

        def blocks() -> Iterator[Int64Array]:
            nonlocal asked
            while asked < min(share, 1.0) * portion.stored_rows and not (is_over or portion.is_dropped):
                fitting = (room - portion.nbytes) / pace.row_bytes - (asked - memory.rows)
                rows = pace.next_rows()
                wanted = portion.unread(asked, int(max(1, min(rows, fitting))) if self._is_even else rows)
                portion.is_stuck = len(wanted) > fitting
                if portion.is_stuck:
                    return
                asked += len(wanted)
                yield self._selection.offsets(wanted)
                if not self._is_even:  # the next rows' size is only known when these are here
                    return

        def prepare(number: int, table: pa.Table, places: Int64Array | None) -> tuple[int, Placed]:
            with gate.enter() as is_open:
                placed = memory.place(first + number, table, places) if is_open else (table, frozenset[str](), places)
                return memory.size_of(placed[0], placed[2]), placed

        def add(made: tuple[int, Placed]) -> None:
            nonlocal is_over
            with self._lock:
                self._read_bytes += made[0]
            if is_over:
                return  # the rows are read again when there is room
            pace.record(*portion.add(*made))
            self._is_even = memory.is_even
            with self._lock:
                held = {*self._held, *([portion] if portion.is_held else [])}
                self.peak_bytes = max(self.peak_bytes, sum(each.nbytes for each in held))
            is_over = portion.nbytes > min(room, most_bytes)
            if portion.nbytes > room:
                portion.drop_last()
                portion.is_stuck = True

        try:
            self._read(blocks(), prepare, add)
        finally:
            gate.close()
        return asked > first and not is_over

    def _too_large_row(self, portion: Portion) -> DatasetError:
        """Drops the one row of a portion, and returns the error that names it."""
        _, offset = split_offsets(int(self._selection.offsets(portion.rows)[0]))
        nbytes = portion.nbytes
        portion.drop_last()  # else it would count as read
        return DatasetError(
            f"the row at offset {offset} of {self._source.uri!r}, version {self._source.version}, has {nbytes:,} bytes "
            f"by itself, max_window_bytes allows {self._limit:,}; the epoch stops here, because the memory of a shard "
            "actor is bounded. Raise max_window_bytes, or leave the row out with filter=."
        )

    def _read(self, blocks: Iterable[Int64Array], prepare: Prepare[T], add: Callable[[T], None]) -> None:
        """Reads blocks of ascending row offsets; see `RowReader.read_blocks`."""
        begin = clock.now()
        with self._lock:
            reader = self._reader = self._reader or self._source.open_reader(self._read_timeout_s)
        reader.read_blocks(blocks, prepare, add)
        with self._lock:
            self._read_s += clock.now() - begin

    def _share_of_next(self, used: Portion) -> float:
        """Returns the share of the next portion that should be read by now."""
        return self._first_share + _FASTER * used.share_handed_out


def _sorted_rows(plan: Plan, chunk: Chunk, rank: int, ahead_rows: int = 0) -> tuple[Int64Array, Int64Array]:
    """Returns the rows of a chunk in the order of delivery, and the indices that sort them into storage order: int64,
    shape (n,). See `Plan.chunk_rows` for `ahead_rows`.
    """
    rows = plan.chunk_rows(chunk, rank, ahead_rows)
    return rows, np.argsort(rows)
