"""Owns the raw rows that a shard actor holds: the portion in use and the next one, read in blocks and bounded by the
bytes that were really read; never decides which rows are delivered, knows no Ray.

A portion is as many rows of a chunk, in the order of delivery, as the limit allows: a whole window where it fits, else
a part of it, and at the least one row. Cutting changes how rows are read, never which come, or in which order.
"""

import logging
import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import pyarrow as pa

from raylance.columns import OFFSET_MASK
from raylance.errors import DatasetError
from raylance.orders.permutation import Int64Array
from raylance.planning.plan import Chunk, Plan, WorkItem, portion_rows
from raylance.source.reader import Pace
from raylance.source.rows import RowReader, RowSource

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 32 << 20  # to read at a time, at the most; large enough for Lance to read and decode in parallel
_BLOCKS = 16  # of the limit: what a block may hold beyond its guess stays small beside it
_RUN_BYTES = 8 << 10  # rows that lie together and have so much are copied as they are, smaller ones are taken by index

Track = tuple[str, int, int, int]  # plan, rank, epoch, and the first position modulo the global batch


class TooLargeError(Exception):
    """Rows that were to be sent together have more bytes than allowed."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes  # of all of them, about


class _Portion:
    """Rows that are read and held together, in the order of delivery from line `begin` of a track on.

    Until it is known how many fit, they may be those up to line `chunk_end`.
    """

    filling: Future[None]  # reads it ahead; rows that are read by themselves have none

    def __init__(self, track: Track, chunk: Chunk, begin: int, chunk_end: int) -> None:
        self.track, self.chunk, self.begin, self.chunk_end = track, chunk, begin, chunk_end
        self.is_held, self.is_cold, self.is_whole, self.is_dropped = True, False, False, False
        self.rows = np.empty(0, dtype=np.int64)  # selected rows in the order of delivery
        self.blocks: list[pa.Table] = []
        self.nbytes = self._read_rows = 0

    def open(self, rows: Int64Array) -> None:
        """Takes the selected rows, in the order of delivery, at least one."""
        self.rows = rows
        self._stored, self._places = np.unique(rows, return_inverse=True)

    @property
    def end(self) -> int:
        """Line behind the last row, once all is read; until then, what it can be at the most."""
        return self.begin + len(self.rows) if self.is_whole else self.chunk_end

    def has(self, track: Track, line: int) -> bool:
        """Whether a line is here, as far as is known yet."""
        return self.track == track and self.begin <= line < self.end

    def unread(self, rows: int) -> Int64Array:
        """The next selected rows to read, ascending."""
        return self._stored[self._read_rows : self._read_rows + rows]

    def add(self, block: pa.Table) -> None:
        """Keeps rows that were read."""
        self.blocks.append(block)
        self._read_rows += block.num_rows
        self.nbytes += block.nbytes

    def drop_last(self) -> None:
        """Gives the last block up: it will be read again."""
        block = self.blocks.pop()
        self._read_rows -= block.num_rows
        self.nbytes -= block.nbytes

    def halve(self) -> None:
        """Leaves the second half of the rows, in the order of delivery, to another portion."""
        stored, blocks, low = self._stored, self.blocks[::-1], 0
        self.open(self.rows[: len(self.rows) // 2])
        self.blocks, self.nbytes, self._read_rows = [], 0, 0
        while blocks:
            block = blocks.pop()
            kept = np.flatnonzero(np.isin(stored[low : low + block.num_rows], self._stored))
            low += block.num_rows
            if len(kept):
                self.add(block.take(pa.array(kept)))

    def parts(self, low: int, high: int) -> Iterator[tuple[pa.Table, Int64Array]]:
        """Gives the rows of lines [low, high) in tables, each with the places of its rows among them."""
        places = self._places[low - self.begin : high - self.begin]
        starts = np.cumsum([0, *(block.num_rows for block in self.blocks)])
        which = np.searchsorted(starts[1:], places, side="right")
        within = places - starts[which]
        runs = np.flatnonzero((np.diff(which, prepend=-1) != 0) | (np.diff(within, prepend=-2) != 1))
        if len(places) * self.nbytes >= len(self.rows) * len(runs) * _RUN_BYTES:
            lengths = np.diff(runs, append=len(places))
            found = zip(which[runs], within[runs], lengths, strict=True)
            yield pa.concat_tables(self.blocks[b].slice(at, rows) for b, at, rows in found), np.arange(len(places))
            return
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(len(self.blocks) + 1))
        for block, first, last in zip(self.blocks, bounds[:-1], bounds[1:], strict=True):
            if first < last:
                yield block.take(pa.array(within[order[first:last]])), order[first:last]


class ReadAhead:
    """The rows of one rank: gathers items from the portion in use, while the one behind it is being read."""

    def __init__(self, feed: RowSource, limit_bytes: int, read_timeout_s: float = 0.0) -> None:
        """Opens nothing yet: errors of the first read reach the worker as they are.

        Both portions together hold at most `limit_bytes`; the block being read comes on top.
        """
        self._feed, self._limit, self._read_timeout_s = feed, limit_bytes, read_timeout_s
        self._read_bytes, self._counting = 0, threading.Lock()
        self._selection = feed.load_selection()
        self._reader: RowReader | None = None
        self._row_bytes = feed.likely_row_bytes  # of the last portion
        self._block_bytes = max(1, min(_BLOCK_BYTES, limit_bytes // _BLOCKS))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._used: _Portion | None = None
        self._next: _Portion | None = None
        self._alone: tuple[Track, int] | None = None  # where rows that were read by themselves ended
        self.peak_bytes = 0

    def gather(self, plan_key: str, plan: Plan, item: WorkItem, allowed_bytes: float = math.inf) -> pa.Table:
        """The rows of an item, in the order of delivery.

        Raises:
            TooLargeError: If they have more bytes together than allowed.
            DatasetError: If a row has more bytes than the limit by itself, or rows cannot be read.
        """
        track = (plan_key, item.rank, item.epoch, item.position % plan.stride)
        at = begin = plan.line(item.position, item.rank) + item.low
        stop = at + item.rows
        tables, places, nbytes = [], [], 0
        while at < stop:
            portion = self._portion(plan, track, item, at, allowed_bytes)
            high = min(stop, portion.end)
            for table, mine in portion.parts(at, high):
                nbytes += table.nbytes
                if nbytes <= allowed_bytes:
                    tables.append(table)
                    places.append(mine + (at - begin))
            at = high
            if nbytes > allowed_bytes:
                raise TooLargeError(nbytes * item.rows // (at - begin))
        if not tables:
            return self.nothing()
        table, order = pa.concat_tables(tables).combine_chunks(), np.concatenate(places)
        if np.array_equal(order, np.arange(item.rows)):
            return table
        inverse = np.empty(item.rows, dtype=np.int64)
        inverse[order] = np.arange(item.rows)
        return table.take(pa.array(inverse))

    def close(self) -> None:
        """Ends reading ahead: the block that is being read now is the last. Takes no lock; see `ThreadRuntime`."""
        for portion in (self._used, self._next):
            if portion is not None:
                portion.is_dropped = True

    def read_bytes_since(self) -> int:
        """Bytes read from storage since this was asked last."""
        with self._counting:
            since, self._read_bytes = self._read_bytes, 0
        return since

    def nothing(self) -> pa.Table:
        """A table of no row, with all columns."""
        return self._read(np.empty(0, dtype=np.int64))

    def _portion(self, plan: Plan, track: Track, item: WorkItem, at: int, allowed_bytes: float) -> _Portion:
        """A portion that is whole and has line `at`; what follows it is then being read."""
        used, following = self._used, self._next
        stop = plan.line(item.position, item.rank) + item.low + item.rows
        if following is not None and following.has(track, at) and not (used is not None and used.has(track, at)):
            self._used, self._next = used, following = following, None
        if used is None or not used.has(track, at):
            if used is not None and used.track == track and at < used.begin and self._alone != (track, at):
                # Work of a lost helper that is done again: what is held now is still wanted.
                return self._by_itself(plan, track, item, at, allowed_bytes)
            for portion in (used, following):
                if portion is not None:
                    portion.is_dropped = True
            self._used = self._next = None
            self._used = used = self._start(plan, track, item.chunk, at, None)
            used.is_cold = True
        if used.is_cold and not used.filling.done() and (stop - at) * self._row_bytes < self._limit / 8:
            # Nobody read these rows ahead. The first items are read by themselves, so that a start, or a resume, waits
            # for a batch and not for a window.
            return self._by_itself(plan, track, item, at, allowed_bytes)
        wait([used.filling])
        if not used.is_whole:  # there was no room for all of it before, or an error that may be over
            try:
                self._fill(plan, used, None)
            except Exception as error:
                # The fault may lie in other rows of the portion: those of this item are read by themselves, and whoever
                # asks for the portion next has it read again.
                logger.warning("rows could not be read together (%r); an item is read by itself", error)
                used.is_dropped, self._used = True, None
                return self._by_itself(plan, track, item, at, allowed_bytes)
        if self._next is None:
            self._next = self._start_next(plan, used)
        # It may have been cut before this line; then the next one begins there.
        return used if used.has(track, at) else self._portion(plan, track, item, at, allowed_bytes)

    def _start(self, plan: Plan, track: Track, chunk: Chunk, begin: int, room: int | None) -> _Portion:
        """Starts reading a chunk from a line on; with `room`, for now only as much as has that many bytes."""
        rank = track[1]
        portion = _Portion(track, chunk, begin, plan.line(chunk.position, rank) + plan.chunk_size(chunk, rank))
        portion.filling = self._thread.submit(self._fill, plan, portion, room)
        return portion

    def _start_next(self, plan: Plan, used: _Portion) -> _Portion | None:
        """Starts reading what follows a portion; the epoch behind this one most likely comes next."""
        plan_key, rank, _, _ = used.track
        chunk, begin = used.chunk, used.end
        if begin == used.chunk_end:
            after = plan.next_chunk(chunk)
            if after is None or not plan.chunk_size(after, rank):
                first = chunk.position % plan.stride // plan.global_batch_size * plan.global_batch_size
                after = plan.chunk_at(chunk.epoch + 1, first)
            if after is None:
                return None
            chunk, begin = after, plan.line(after.position, rank)
        track = (plan_key, rank, chunk.epoch, chunk.position % plan.stride)
        return self._start(plan, track, chunk, begin, self._limit - used.nbytes)

    def _by_itself(self, plan: Plan, track: Track, item: WorkItem, at: int, allowed_bytes: float) -> _Portion:
        """Rows of an item that belong to no portion that is there; what is there stays."""
        stop = plan.line(item.position, item.rank) + item.low + item.rows
        alone = _Portion(track, item.chunk, at, stop)
        alone.is_held = False  # it is on its way out, and counts as in flight
        alone.open(plan.select(item.epoch, plan.item_positions(item))[at - stop :])
        self._fill(plan, alone, None, allowed_bytes)
        self._alone = (track, alone.end)
        return alone

    def _fill(self, plan: Plan, portion: _Portion, room: int | None, most_bytes: float = math.inf) -> None:
        """Reads the rest of a portion: fewer rows than planned where all together have more bytes than the limit, or
        than `most_bytes`; with `room`, for now only as much as has that many bytes.
        """
        if not len(portion.rows):
            first = portion.begin - plan.line(portion.chunk.position, portion.track[1])
            rows = plan.chunk_rows(portion.chunk, portion.track[1])[first:]
            portion.open(rows[: portion_rows(len(rows), self._row_bytes, self._limit)])
        least = self._feed.likely_row_bytes
        pace = Pace(self._block_bytes, max(self._row_bytes, least), least_bytes=least)
        while len(wanted := portion.unread(pace.rows())) and not portion.is_dropped:
            if room is not None and portion.nbytes + len(wanted) * pace.row_bytes > room:
                return
            block = self._read(wanted)
            pace.saw(block.num_rows, block.nbytes)
            portion.add(block)
            held = {portion, self._used, self._next} if portion.is_held else {self._used, self._next}
            self.peak_bytes = max(self.peak_bytes, sum(other.nbytes for other in held if other is not None))
            if room is not None and portion.nbytes > room:
                portion.drop_last()
                return
            while portion.nbytes > min(self._limit, most_bytes) and len(portion.rows) > 1:
                portion.halve()
            if portion.nbytes > self._limit:
                self._refuse(portion)
        portion.is_whole = not len(wanted)
        if portion.is_whole and portion.is_held:
            # Up at once, down slowly: too small a portion costs some speed, too large a one is read in vain.
            self._row_bytes = max(self._row_bytes / 2, portion.nbytes / len(portion.rows))

    def _refuse(self, portion: _Portion) -> None:
        offset = int(self._selection.offsets(portion.rows)[0]) & OFFSET_MASK
        nbytes = portion.nbytes
        portion.drop_last()  # or it would count as read
        raise DatasetError(
            f"the row at offset {offset} of {self._feed.uri!r}, version {self._feed.version}, has {nbytes:,} bytes by "
            f"itself, max_window_bytes allows {self._limit:,}; the epoch stops here, "
            "because the memory of a shard actor is bounded. Raise max_window_bytes, or leave the row out with filter=."
        )

    def _read(self, rows: Int64Array) -> pa.Table:
        """Reads selected rows, ascending."""
        self._reader = self._reader or self._feed.open_reader(self._read_timeout_s)
        table = self._reader.read(self._selection.offsets(rows))
        with self._counting:
            self._read_bytes += table.nbytes
        return table
