"""Owns the raw rows that a reader helper holds: the portion in use and the next one, read in blocks and bounded by the
bytes that were really read; never decides which rows are delivered, knows no Ray.

A portion is as many rows of a chunk, in the order of delivery, as the limit allows: a whole window where it fits, else
a part of it, at least one row. Cutting changes how rows are read, never which rows come, or in which order. The memory
of a finished portion serves another one.
"""

import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pyarrow as pa

from raylance.columns import OFFSET_MASK
from raylance.errors import DatasetError
from raylance.observe import clock
from raylance.orders.permutation import Int64Array
from raylance.planning.plan import Chunk, Plan, WorkItem, portion_rows
from raylance.source.memory import RowMemory
from raylance.source.portion import Portion, Track
from raylance.source.reader import Pace, RowReader
from raylance.source.rows import RowSource

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 32 << 20  # most bytes to read at a time; large enough for Lance to read and decode in parallel
_BLOCKS = 16  # blocks in the limit: what a block exceeds its estimate by stays small beside the limit
_FIRST_SHARE = 0.125  # share of a portion that is read as soon as the portion before it is in use,
_FASTER = 2.0  # and how much faster the rest is read than the portion before it is handed out


class TooLargeError(Exception):
    """Rows of one item that have more bytes together than allowed: `nbytes`, an estimate."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    """An item that is being gathered; its rows are lines up to `end` of the track."""

    plan: Plan
    track: Track
    item: WorkItem
    end: int
    allowed_bytes: float
    following: Chunk | None


class ReadAhead:
    """Holds the rows of one rank: gathers items from the portion in use, while a thread reads the next portion.

    `gather` and `begin` are for one thread, `close` for any. Items are read in the calling thread where nothing was
    read ahead, so the reader, and what is counted, serve both threads.
    """

    def __init__(
        self, source: RowSource, limit_bytes: int, read_timeout_s: float = 0.0, *, own_memory: bool = False
    ) -> None:
        """Opens nothing yet: the first `gather` raises what the first read does.

        Args:
            source: What to read.
            limit_bytes: Most bytes of both portions together; the block being read comes on top.
            read_timeout_s: As `RowSource.open_reader` takes it.
            own_memory: Whether tables of `gather` have memory of their own; else the next call may overwrite them.
        """
        self._source, self._limit, self._read_timeout_s = source, limit_bytes, read_timeout_s
        self._own_memory = own_memory
        self._selection = source.load_selection()
        self._row_bytes = source.likely_row_bytes  # of the last portion
        self._block_bytes = max(1, min(_BLOCK_BYTES, limit_bytes // _BLOCKS))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._used: Portion | None = None
        self._next: Portion | None = None
        self._alone: tuple[Track, int] | None = None  # where the last rows ended that were read on request
        self._lock = threading.Lock()  # guards all below, which both threads use
        self._reader: RowReader | None = None
        self._spare: list[RowMemory] = []
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

        `following` is the chunk to read after the item's chunk; None for the next one of the plan.

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
            # The memory of a portion may serve another one when the next line is asked for.
            tables.append(portion.gather(at, high, own=self._own_memory or high < request.end))
            nbytes += tables[-1].nbytes
            at = high
            self._read_more(portion)
            if nbytes > allowed_bytes:
                raise TooLargeError(nbytes * item.rows // (at - begin))
        if not tables:
            return self.empty_table()
        return pa.concat_tables(tables).combine_chunks()

    def begin(self, plan_key: str, plan: Plan, rank: int, chunk: Chunk) -> None:
        """Starts to read a chunk that will be asked for, unless it is held; drops the portions that are held."""
        track, line = (plan_key, rank, chunk.epoch, chunk.position % plan.stride), plan.line(chunk.position, rank)
        if not any(portion.has(track, line) for portion in self._held):
            self._release(*self._held)
            self._used, self._next = None, self._start(plan, track, chunk, line)

    def close(self) -> None:
        """Stops reading ahead after the current block. Takes no lock; see `ThreadRuntime`."""
        for portion in self._held:
            portion.is_dropped = True

    def read_since(self) -> tuple[int, float]:
        """Bytes read from storage since the last call, and the seconds of reading."""
        with self._lock:
            since = self._read_bytes, self._read_s
            self._read_bytes, self._read_s = 0, 0.0
        return since

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that are held now."""
        return sum(portion.nbytes for portion in self._held)

    @property
    def _held(self) -> list[Portion]:
        return [portion for portion in (self._used, self._next) if portion is not None]

    def empty_table(self) -> pa.Table:
        """A table of no row, with all columns."""
        tables: list[pa.Table] = []
        self._read_into(np.empty(0, dtype=np.int64), tables.append)
        return tables[0]

    def _find_portion(self, request: _Request, at: int) -> Portion:
        """Returns a portion that is whole and has line `at`, and has the one after it read."""
        used, track = self._advance(request, at), request.track
        if used is None:
            return self._read_item(request, at)
        is_early = used.is_cold and 2 * (at - used.begin) < used.chunk_end - used.begin
        if is_early and not used.filling.done() and (request.end - at) * self._row_bytes < self._limit / 8:
            # These rows were not read ahead. The first items are read by themselves, so that a start, or a resume,
            # waits for a batch and not for a window; not all of them, or the next portion would never be read ahead.
            return self._read_item(request, at)
        wait([used.filling])
        if not used.is_whole:  # there was no room for all of it before, or an error that may be over
            try:
                self._fill(used)
            except Exception as error:
                # The error may concern other rows of the portion: those of this item are read by themselves. The next
                # request for the portion reads it again.
                logger.warning("rows could not be read together (%r). One item is read by itself.", error)
                self._release(used)
                self._used = None
                return self._read_item(request, at)
        if self._next is None:
            self._next = self._start_next(used, request.following)
        # The portion may have been cut before this line; then the next one begins there.
        return used if used.has(track, at) else self._find_portion(request, at)

    def _advance(self, request: _Request, at: int) -> Portion | None:
        """Makes the portion with line `at` the one in use: the current one, the next one, or a new one.

        Returns None for a line that should be read by itself.
        """
        used, following, track = self._used, self._next, request.track
        if used is not None and used.has(track, at):
            return used
        if following is not None and following.has(track, at):
            if used is not None:
                self._release(used)
            self._used, self._next = following, None
            return following
        if used is not None and used.track == track and at < used.begin and self._alone != (track, at):
            return None  # work of a lost helper that is done again: what is held now is still needed
        self._release(*self._held)
        self._next = None
        self._used = started = self._start(request.plan, track, request.item.chunk, at)
        started.is_cold = True
        return started

    def _start(
        self, plan: Plan, track: Track, chunk: Chunk, begin: int, room: float = math.inf, share: float = 1.0
    ) -> Portion:
        """Starts to read a chunk from a line on; for now at most `room` bytes and this share of the rows."""
        rank = track[1]
        portion = Portion(plan, track, chunk, begin, plan.line(chunk.position, rank) + plan.chunk_size(chunk, rank))
        portion.filling = self._thread.submit(self._fill, portion, room, share)
        return portion

    def _start_next(self, used: Portion, following: Chunk | None) -> Portion | None:
        """Starts to read what comes after a portion: the rest of its chunk, or else the following chunk."""
        plan_key, rank, _, _ = used.track
        chunk, begin = used.chunk, used.end
        if begin == used.chunk_end:
            after = following or used.plan.likely_next_chunk(chunk, rank)
            if after is None:
                return None
            chunk, begin = after, used.plan.line(after.position, rank)
        track = (plan_key, rank, chunk.epoch, chunk.position % used.plan.stride)
        return self._start(used.plan, track, chunk, begin, self._limit - used.nbytes, _share_of_next(used))

    def _read_more(self, used: Portion) -> None:
        """Reads more of the next portion as the one in use is handed out: reading all at once would take the cores
        from decoding just when a window ends.
        """
        following, share = self._next, _share_of_next(used)
        if used is not self._used or following is None or following.is_whole or following.is_stuck:
            return
        if following.filling.done() and following.filling.exception() is None and following.share_read < share:
            following.filling = self._thread.submit(self._fill, following, self._limit - used.nbytes, share)

    def _read_item(self, request: _Request, at: int) -> Portion:
        """Reads the rows of an item from line `at` on into a portion of their own; the held portions stay."""
        plan, item = request.plan, request.item
        alone = Portion(plan, request.track, item.chunk, at, request.end)
        alone.is_held = False  # its rows count as in flight
        rows = plan.select(item.epoch, plan.item_positions(item))
        alone.open(rows[at - request.end :], RowMemory(self._limit))
        self._fill(alone, most_bytes=request.allowed_bytes)
        self._alone = (request.track, alone.end)
        return alone

    def _release(self, *portions: Portion) -> None:
        """Drops portions; their memory serves others as soon as nothing is being read into it."""
        for portion in portions:
            portion.is_dropped = True
            portion.filling.add_done_callback(functools.partial(self._give_back, portion))

    def _give_back(self, portion: Portion, _: object) -> None:
        if len(portion.rows) and portion.memory.capacity_bytes <= self._limit / 2:
            with self._lock:
                self._spare.append(portion.memory)

    def _fill(self, portion: Portion, room: float = math.inf, share: float = 1.0, most_bytes: float = math.inf) -> None:
        """Reads the rest of a portion, for now up to `room` bytes and a share of its rows.

        Rows that do not fit into the limit, or into `most_bytes`, are dropped.
        """
        if not len(portion.rows):
            first = portion.begin - portion.plan.line(portion.chunk.position, portion.track[1])
            rows = portion.plan.chunk_rows(portion.chunk, portion.track[1])[first:]
            with self._lock:
                memory = self._spare.pop() if self._spare else RowMemory(self._limit // 2)  # two of them fit
            portion.open(rows[: portion_rows(len(rows), self._row_bytes, self._limit)], memory)
        least = self._source.likely_row_bytes
        pace = Pace(self._block_bytes, max(self._row_bytes, least), least_bytes=least)
        while len(wanted := portion.unread(pace.next_rows())) and not portion.is_dropped:
            portion.is_stuck = portion.nbytes + len(wanted) * pace.row_bytes > room
            if portion.is_stuck or portion.share_read >= share:
                return
            pace.record(*portion.add(functools.partial(self._read_into, wanted)))
            with self._lock:
                held = {*self._held, *([portion] if portion.is_held else [])}
                self.peak_bytes = max(self.peak_bytes, sum(each.nbytes for each in held))
            if portion.nbytes > room:
                portion.drop_last()
                portion.is_stuck = True
                return
            while portion.nbytes > min(self._limit, most_bytes) and len(portion.rows) > 1:
                portion.halve()
            if portion.nbytes > self._limit:
                raise self._too_large_row(portion)
        portion.is_whole = not len(wanted)
        if portion.is_whole and portion.is_held:
            # Up at once, down slowly: too small a portion costs some speed, too large a one is read in vain.
            self._row_bytes = max(self._row_bytes / 2, portion.nbytes / len(portion.rows))

    def _too_large_row(self, portion: Portion) -> DatasetError:
        """Drops the one row of a portion, and returns the error that names it."""
        offset = int(self._selection.offsets(portion.rows)[0]) & OFFSET_MASK
        nbytes = portion.nbytes
        portion.drop_last()  # or it would count as read
        return DatasetError(
            f"the row at offset {offset} of {self._source.uri!r}, version {self._source.version}, has {nbytes:,} bytes "
            f"by itself, max_window_bytes allows {self._limit:,}; the epoch stops here, because the memory of a shard "
            "actor is bounded. Raise max_window_bytes, or leave the row out with filter=."
        )

    def _read_into(self, rows: Int64Array, keep: Callable[[pa.Table], None]) -> None:
        """Reads selected rows, ascending."""

        def count(table: pa.Table) -> None:
            with self._lock:
                self._read_bytes += table.nbytes
            keep(table)

        begin = clock.now()
        with self._lock:
            reader = self._reader = self._reader or self._source.open_reader(self._read_timeout_s)
        reader.read_into(self._selection.offsets(rows), count)
        with self._lock:
            self._read_s += clock.now() - begin


def _share_of_next(used: Portion) -> float:
    """How much of the next portion should be read by now."""
    return _FIRST_SHARE + _FASTER * used.share_handed_out
