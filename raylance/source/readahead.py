"""Owns the raw rows that a shard actor holds: the portion in use and the next one, read in blocks and bounded by the
bytes that were really read; never decides which rows are delivered, knows no Ray.

A portion is as many rows of a chunk, in the order of delivery, as the limit allows: a whole window where it fits, else
a part of it, and at the least one row. Cutting changes how rows are read, never which come, or in which order. The
memory of a portion that is done with serves another one.
"""

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
from raylance.source.reader import Pace
from raylance.source.rows import RowReader, RowSource

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 32 << 20  # to read at a time, at the most; large enough for Lance to read and decode in parallel
_BLOCKS = 16  # of the limit: what a block may hold beyond its guess stays small beside it
_FIRST_SHARE = 0.125  # of a portion is read when the one before begins,
_FASTER = 2.0  # and the rest so much faster than that one is handed out


class TooLargeError(Exception):
    """Rows that were to be sent together have more bytes than allowed."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes  # of all of them, about


class ReadAhead:
    """The rows of one rank: gathers items from the portion in use, while the one behind it is being read."""

    def __init__(
        self, feed: RowSource, limit_bytes: int, read_timeout_s: float = 0.0, *, own_memory: bool = False
    ) -> None:
        """Opens nothing yet: errors of the first read reach the worker as they are.

        Both portions together hold at most `limit_bytes`; the block being read comes on top. With `own_memory`, what is
        gathered has memory of its own; otherwise it is good until the next call.
        """
        self._own_memory = own_memory
        self._spare: list[RowMemory] = []
        self._feed, self._limit, self._read_timeout_s = feed, limit_bytes, read_timeout_s
        self._read_bytes, self._read_s, self._lock = 0, 0.0, threading.Lock()
        self._selection = feed.load_selection()
        self._reader: RowReader | None = None
        self._row_bytes = feed.likely_row_bytes  # of the last portion
        self._block_bytes = max(1, min(_BLOCK_BYTES, limit_bytes // _BLOCKS))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._used: Portion | None = None
        self._next: Portion | None = None
        self._alone: tuple[Track, int] | None = None  # where rows that were read by themselves ended
        self.peak_bytes = 0

    def gather(
        self,
        plan_key: str,
        plan: Plan,
        item: WorkItem,
        allowed_bytes: float = math.inf,
        following: Chunk | None = None,
    ) -> pa.Table:
        """The rows of an item, in the order of delivery.

        Args:
            plan_key: Names the plan.
            plan: The plan.
            item: Which rows.
            allowed_bytes: Bytes that they may have together.
            following: The chunk to read when the item's is here; None for what lies behind it.

        Raises:
            TooLargeError: If they have more bytes together than allowed.
            DatasetError: If a row has more bytes than the limit by itself, or rows cannot be read.
        """
        track = (plan_key, item.rank, item.epoch, item.position % plan.stride)
        at = begin = plan.line(item.position, item.rank) + item.low
        stop = at + item.rows
        tables: list[pa.Table] = []
        nbytes = 0
        while at < stop:
            portion = self._portion(plan, track, item, at, allowed_bytes, following)
            high = min(stop, portion.end)
            # The memory of a portion may go to another one when the next line is asked for.
            tables.append(portion.gather(at, high, own=self._own_memory or high < stop))
            nbytes += tables[-1].nbytes
            at = high
            self._read_on(plan, portion)
            if nbytes > allowed_bytes:
                raise TooLargeError(nbytes * item.rows // (at - begin))
        if not tables:
            return self.nothing()
        return pa.concat_tables(tables).combine_chunks()

    def begin(self, plan_key: str, plan: Plan, rank: int, chunk: Chunk) -> None:
        """Starts reading a chunk that will be asked for, instead of all that is held, unless it is."""
        track, line = (plan_key, rank, chunk.epoch, chunk.position % plan.stride), plan.line(chunk.position, rank)
        if not any(portion is not None and portion.has(track, line) for portion in (self._used, self._next)):
            self._release(self._used)
            self._release(self._next)
            self._used, self._next = None, self._start(plan, track, chunk, line, None)

    def close(self) -> None:
        """Ends reading ahead: the block that is being read now is the last. Takes no lock; see `ThreadRuntime`."""
        for portion in (self._used, self._next):
            if portion is not None:
                portion.is_dropped = True

    def read_since(self) -> tuple[int, float]:
        """Bytes read from storage since this was asked last, and the seconds of reading."""
        with self._lock:
            since = self._read_bytes, self._read_s
            self._read_bytes, self._read_s = 0, 0.0
        return since

    @property
    def held_bytes(self) -> int:
        """Bytes of the rows that are held now."""
        return sum(portion.nbytes for portion in (self._used, self._next) if portion is not None)

    def nothing(self) -> pa.Table:
        """A table of no row, with all columns."""
        none: list[pa.Table] = []
        self._read_into(np.empty(0, dtype=np.int64), none.append)
        return none[0]

    def _portion(
        self, plan: Plan, track: Track, item: WorkItem, at: int, allowed_bytes: float, following_chunk: Chunk | None
    ) -> Portion:
        """A portion that is whole and has line `at`; what follows it is then being read."""
        used, following = self._used, self._next
        stop = plan.line(item.position, item.rank) + item.low + item.rows
        if following is not None and following.has(track, at) and not (used is not None and used.has(track, at)):
            self._release(used)
            self._used, self._next = used, following = following, None
        if used is None or not used.has(track, at):
            if used is not None and used.track == track and at < used.begin and self._alone != (track, at):
                # Work of a lost helper that is done again: what is held now is still wanted.
                return self._by_itself(plan, track, item, at, allowed_bytes)
            self._release(used)
            self._release(following)
            self._used = self._next = None
            self._used = used = self._start(plan, track, item.chunk, at, None)
            used.is_cold = True
        is_early = used.is_cold and 2 * (at - used.begin) < used.chunk_end - used.begin
        if is_early and not used.filling.done() and (stop - at) * self._row_bytes < self._limit / 8:
            # Nobody read these rows ahead. The first items are read by themselves, so that a start, or a resume, waits
            # for a batch and not for a window; not all of them, or what follows would never be read ahead.
            return self._by_itself(plan, track, item, at, allowed_bytes)
        wait([used.filling])
        if not used.is_whole:  # there was no room for all of it before, or an error that may be over
            try:
                self._fill(plan, used, None)
            except Exception as error:
                # The fault may lie in other rows of the portion: those of this item are read by themselves, and whoever
                # asks for the portion next has it read again.
                logger.warning("rows could not be read together (%r); an item is read by itself", error)
                self._release(used)
                self._used = None
                return self._by_itself(plan, track, item, at, allowed_bytes)
        if self._next is None:
            self._next = self._start_next(plan, used, following_chunk)
        # It may have been cut before this line; then the next one begins there.
        return used if used.has(track, at) else self._portion(plan, track, item, at, allowed_bytes, following_chunk)

    def _start(
        self, plan: Plan, track: Track, chunk: Chunk, begin: int, room: int | None, share: float = 1.0
    ) -> Portion:
        """Starts reading a chunk from a line on; with `room`, for now only as much as has that many bytes, and only
        this share of it.
        """
        rank = track[1]
        portion = Portion(track, chunk, begin, plan.line(chunk.position, rank) + plan.chunk_size(chunk, rank))
        portion.filling = self._thread.submit(self._fill, plan, portion, room, share=share)
        return portion

    def _read_on(self, plan: Plan, used: Portion) -> None:
        """Has more read of what follows a portion, as that one is handed out: all at once would take the cores from
        decoding just when a window has turned over.
        """
        following, share = self._next, _share_behind(used)
        if used is not self._used or following is None or following.is_whole or following.is_stuck:
            return
        if following.filling.done() and following.filling.exception() is None and following.share_read < share:
            room = self._limit - used.nbytes
            following.filling = self._thread.submit(self._fill, plan, following, room, share=share)

    def _release(self, portion: Portion | None) -> None:
        """Gives a portion up: its memory serves another one, once nothing is read into it any more."""
        if portion is not None:
            portion.is_dropped = True
            portion.filling.add_done_callback(lambda _: self._keep(portion))

    def _take_memory(self) -> RowMemory:
        with self._lock:
            return self._spare.pop() if self._spare else RowMemory(self._limit // 2)  # two of them have room

    def _keep(self, portion: Portion) -> None:
        if len(portion.rows) and portion.memory.capacity_bytes <= self._limit / 2:
            self._spare.append(portion.memory)

    def _start_next(self, plan: Plan, used: Portion, following: Chunk | None) -> Portion | None:
        """Starts reading what follows a portion: the rest of its chunk, or the chunk to read when that is here."""
        plan_key, rank, _, _ = used.track
        chunk, begin = used.chunk, used.end
        if begin == used.chunk_end:
            after = following or plan.chunk_behind(chunk, rank)
            if after is None:
                return None
            chunk, begin = after, plan.line(after.position, rank)
        track = (plan_key, rank, chunk.epoch, chunk.position % plan.stride)
        return self._start(plan, track, chunk, begin, self._limit - used.nbytes, _share_behind(used))

    def _by_itself(self, plan: Plan, track: Track, item: WorkItem, at: int, allowed_bytes: float) -> Portion:
        """Rows of an item that belong to no portion that is there; what is there stays."""
        stop = plan.line(item.position, item.rank) + item.low + item.rows
        alone = Portion(track, item.chunk, at, stop)
        alone.is_held = False  # it is on its way out, and counts as in flight
        alone.open(plan.select(item.epoch, plan.item_positions(item))[at - stop :], RowMemory(self._limit))
        self._fill(plan, alone, None, allowed_bytes)
        self._alone = (track, alone.end)
        return alone

    def _fill(
        self, plan: Plan, portion: Portion, room: int | None, most_bytes: float = math.inf, share: float = 1.0
    ) -> None:
        """Reads the rest of a portion: fewer rows than planned where all together have more bytes than the limit, or
        than `most_bytes`; with `room` and `share`, for now only as much as has that many bytes, and as that part of it.
        """
        if not len(portion.rows):
            first = portion.begin - plan.line(portion.chunk.position, portion.track[1])
            rows = plan.chunk_rows(portion.chunk, portion.track[1])[first:]
            portion.open(rows[: portion_rows(len(rows), self._row_bytes, self._limit)], self._take_memory())
        least = self._feed.likely_row_bytes
        pace = Pace(self._block_bytes, max(self._row_bytes, least), least_bytes=least)
        while len(wanted := portion.unread(pace.rows())) and not portion.is_dropped:
            portion.is_stuck = room is not None and portion.nbytes + len(wanted) * pace.row_bytes > room
            if portion.is_stuck or portion.share_read >= share:
                return
            pace.saw(*portion.add(functools.partial(self._read_into, wanted)))
            held = {portion, self._used, self._next} if portion.is_held else {self._used, self._next}
            self.peak_bytes = max(self.peak_bytes, sum(other.nbytes for other in held if other is not None))
            if room is not None and portion.nbytes > room:
                portion.drop_last()
                portion.is_stuck = True
                return
            while portion.nbytes > min(self._limit, most_bytes) and len(portion.rows) > 1:
                portion.halve()
            if portion.nbytes > self._limit:
                self._refuse(portion)
        portion.is_whole = not len(wanted)
        if portion.is_whole and portion.is_held:
            # Up at once, down slowly: too small a portion costs some speed, too large a one is read in vain.
            self._row_bytes = max(self._row_bytes / 2, portion.nbytes / len(portion.rows))

    def _refuse(self, portion: Portion) -> None:
        offset = int(self._selection.offsets(portion.rows)[0]) & OFFSET_MASK
        nbytes = portion.nbytes
        portion.drop_last()  # or it would count as read
        raise DatasetError(
            f"the row at offset {offset} of {self._feed.uri!r}, version {self._feed.version}, has {nbytes:,} bytes by "
            f"itself, max_window_bytes allows {self._limit:,}; the epoch stops here, "
            "because the memory of a shard actor is bounded. Raise max_window_bytes, or leave the row out with filter=."
        )

    def _read_into(self, rows: Int64Array, keep: Callable[[pa.Table], None]) -> None:
        """Reads selected rows, ascending."""

        def count(table: pa.Table) -> None:
            with self._lock:
                self._read_bytes += table.nbytes
            keep(table)

        begin = clock.now()
        self._reader = self._reader or self._feed.open_reader(self._read_timeout_s)
        self._reader.read_into(self._selection.offsets(rows), count)
        with self._lock:
            self._read_s += clock.now() - begin


def _share_behind(used: Portion) -> float:
    """What should be read of a portion as the one before it is handed out."""
    return _FIRST_SHARE + _FASTER * used.share_handed_out
