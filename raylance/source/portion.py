"""Owns rows that are read and held together, from the first block to the items that are gathered from them; never reads
storage, and never decides how many rows are held.

A track is all rows of a rank in an epoch, in the order of delivery; with a stride, those of every n-th step. A line is
the number of a row in its track, from 0; see `Plan.line`.
"""

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pyarrow as pa

from raylance.orders.permutation import Int64Array
from raylance.planning.plan import Chunk, Plan
from raylance.source.memory import Lend, Placed, RowMemory, own_memory, slice_runs, take_rows

Track = tuple[str, int, int, int]  # plan key, rank, epoch, and the first position modulo the plan's stride


class Portion:
    """Rows that are read and held together: the rows of a track from line `begin` on, in the order of delivery.

    Until it is known how many rows fit, the portion may reach up to line `chunk_end`.

    Attributes:
        filling: The latest task that reads rows ahead. A portion of one item that is read on request has none.
        memory: The memory of the rows; set by `open`.
        rows: Selected rows in the order of delivery, int64, shape (n,); empty until `open`.
        nbytes: Bytes of the rows that are here.
        is_held: Whether its bytes count as held. The rows of an item that is read on request count as in flight.
        is_cold: Whether the reading of the portion began only when an item needed it.
        is_whole: Whether all rows are here.
        is_stuck: Whether the rest has no room while the previous portion is held.
        is_dropped: Whether the reading of the portion must stop.
    """

    filling: Future[None]
    memory: RowMemory

    def __init__(self, plan: Plan, track: Track, chunk: Chunk, begin: int, chunk_end: int, *, once: bool) -> None:
        """Creates a portion without rows. With `once`, it hands out each of its rows only once."""
        self.plan, self.track, self.chunk = plan, track, chunk
        self.begin, self.chunk_end = begin, chunk_end
        self.is_held, self.is_cold, self.is_whole, self.is_dropped, self.is_stuck = True, False, False, False, False
        self._once = once
        self._handed_out = 0  # number of lines up to the last one that was handed out
        self.rows = self._stored = np.empty(0, dtype=np.int64)
        self.nbytes, self._blocks = 0, list[tuple[int, int]]()  # rows and bytes of each table

    def open(
        self,
        rows: Int64Array,
        remember: Callable[[int, Int64Array | None], RowMemory],
        lines: Int64Array | None = None,
    ) -> None:
        """Sets the rows, at least one, in the order of delivery.

        `remember` makes the memory for a number of rows. If they are stored line by line, it also gets `lines`.
        `lines` are the indices that sort the rows into storage order; None computes them.
        """
        lines = np.argsort(rows) if lines is None else lines
        stored = rows[lines]
        self._places = np.empty(len(rows), dtype=np.int64)
        self._is_repeated = is_repeated = bool((stored[1:] == stored[:-1]).any())
        if is_repeated:
            stored, self._places = np.unique(rows, return_inverse=True)
        else:
            self._places[lines] = np.arange(len(rows))
        self.memory = remember(len(stored), None if is_repeated else lines)
        self.rows, self.nbytes, self._blocks = rows, 0, []
        self._stored = stored  # set last: it tells other threads that there is memory

    @property
    def end(self) -> int:
        """The line after the last row. Until all rows are read, it is `chunk_end`, and may still become lower."""
        return self.begin + len(self.rows) if self.is_whole else self.chunk_end

    def has(self, track: Track, line: int) -> bool:
        """Whether this portion can hand out a line of a track; while it is being read, it may be cut before."""
        first = self.begin + self._handed_out * self._once
        return self.track == track and first <= line < self.end

    def was_handed_out_lately(self, line: int) -> bool:
        """With `once`: whether a line was handed out, and from it on at most half of the portion's rows. Else False."""
        left = self.begin + self._handed_out - line
        return self._once and 0 < left <= min(self._handed_out, len(self.rows) // 2)

    @property
    def stored_rows(self) -> int:
        """Number of rows to read, each row that occurs several times counted once; 0 until `open`."""
        return len(self._stored)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of its memory, in use or not."""
        return self.memory.capacity_bytes if len(self._stored) else 0

    @property
    def share_read(self) -> float:
        """Share of its rows that are here."""
        return self.memory.rows / len(self._stored) if len(self._stored) else 0.0

    @property
    def share_handed_out(self) -> float:
        """Share of its rows up to the last row that was handed out."""
        return self._handed_out / max(1, len(self.rows))

    def hand_out(self, high: int) -> None:
        """Records that the rows before line `high` were handed out."""
        self._handed_out = max(self._handed_out, high - self.begin)

    def unread(self, first: int, rows: int) -> Int64Array:
        """Returns up to `rows` selected rows of this portion, sorted ascending, from index `first` on. A row that
        occurs several times in the portion counts once.
        """
        return self._stored[first : first + rows]

    def add(self, nbytes: int, placed: Placed) -> tuple[int, int]:
        """Keeps the next rows, which have `nbytes`, see `RowMemory.place`; returns their number and bytes."""
        rows = self.memory.rows
        try:
            self.memory.append(*placed)
        except BaseException:
            self.memory.cut(rows)
            raise
        self.nbytes += nbytes
        self._blocks.append((self.memory.rows - rows, nbytes))
        return self._blocks[-1]

    def drop_last(self) -> None:
        """Drops the last table, so that it is read again later."""
        rows, nbytes = self._blocks.pop()
        self.memory.cut(self.memory.rows - rows)
        self.nbytes -= nbytes

    def halve(self, remember: Callable[[int, Int64Array | None], RowMemory]) -> None:
        """Drops the second half of the rows in the order of delivery; a later portion will have them."""
        stored, rows = self._stored, self.rows[: len(self.rows) // 2]
        kept = take_rows(self.memory.table(), np.flatnonzero(np.isin(stored[: self.memory.rows], rows)))
        self.open(rows, remember)
        self.add(kept.nbytes, (kept, frozenset(), None))

    def gather(self, low: int, high: int, lend: Lend, *, own: bool) -> pa.Table:
        """Returns the rows of lines [low, high): as a copy if `own` or if rows repeat, because the caller may write to
        them; else as views if possible. `lend` gives memory for large values that are taken by index.
        """
        first, last = low - self.begin, high - self.begin
        by_line, table = self.memory.by_line(first, last), self.memory.stored()
        if table.num_columns:
            table = self._take(table, self._places[first:last], lend, own or self._is_repeated)
            if not by_line.num_columns:
                return table
            columns = dict(zip(by_line.column_names + table.column_names, by_line.columns + table.columns, strict=True))
            schema = self.memory.schema
            by_line = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
        return own_memory(by_line) if own else by_line

    def _take(self, table: pa.Table, places: Int64Array, lend: Lend, own: bool) -> pa.Table:
        """Returns the rows of a table at the indices `places`: long runs as slices, others taken by index."""
        runs = slice_runs(table, places)
        if runs is None:
            return take_rows(table, places, lend)
        return own_memory(runs[0]) if own and len(runs) == 1 else pa.concat_tables(runs).combine_chunks()
