"""Owns rows that are read and held together, from the first block to the items that are gathered from them; reads none,
never decides how many they are.
"""

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pyarrow as pa

from raylance.orders.permutation import Int64Array
from raylance.planning.plan import Chunk, Plan
from raylance.source.memory import RowMemory, own_memory

_LONG_RUN = 4  # mean length of runs of adjacent rows from which on rows are not stored line by line
_RUN_BYTES = 8 << 10  # runs of this many bytes are copied as slices; smaller ones are taken by index

Track = tuple[str, int, int, int]  # plan key, rank, epoch, and the first position modulo the global batch


class Portion:
    """Rows that are read and held together: those of a track from line `begin` on, in the order of delivery.

    Until it is known how many rows fit, the portion may reach to line `chunk_end`.

    Attributes:
        filling: The latest task that reads rows ahead. A portion of one item that is read on request has none.
        memory: Where the rows are; set by `open`.
        rows: Selected rows in the order of delivery, int64, shape (n,); empty until `open`.
        nbytes: Bytes of the rows that are here.
        is_held: Whether it counts as held; the rows of one item that is read on request count as in flight.
        is_cold: Whether its reading began with the first item that needs it, and not ahead.
        is_whole: Whether all rows are here.
        is_stuck: Whether there is no room for the rest as long as the portion before is held.
        is_dropped: Whether no more of it is to be read.
    """

    filling: Future[None]
    memory: RowMemory

    def __init__(self, plan: Plan, track: Track, chunk: Chunk, begin: int, chunk_end: int) -> None:
        self.plan, self.track, self.chunk = plan, track, chunk
        self.begin, self.chunk_end = begin, chunk_end
        self.is_held, self.is_cold, self.is_whole, self.is_dropped, self.is_stuck = True, False, False, False, False
        self._handed_out = 0  # lines, up to the last one that was gathered
        self.rows = np.empty(0, dtype=np.int64)
        self.nbytes, self._blocks = 0, list[tuple[int, int]]()  # rows and bytes of each

    def open(self, rows: Int64Array, memory: RowMemory) -> None:
        """Takes at least one selected row, in the order of delivery, and memory for all of them."""
        self._stored, self._places = np.unique(rows, return_inverse=True)
        is_scattered = len(self._stored) == len(rows) and len(_run_starts(self._places)) * _LONG_RUN > len(rows)
        memory.begin(len(self._stored), np.argsort(self._places) if is_scattered else None)
        self.memory, self.rows, self.nbytes, self._blocks = memory, rows, 0, []

    @property
    def end(self) -> int:
        """The line after the last row, once all rows are read; until then the highest that it can be."""
        return self.begin + len(self.rows) if self.is_whole else self.chunk_end

    def has(self, track: Track, line: int) -> bool:
        """Whether a line belongs here, as far as is known yet."""
        return self.track == track and self.begin <= line < self.end

    @property
    def share_read(self) -> float:
        """Share of its rows that are here."""
        return self.memory.rows / len(self._stored) if len(self.rows) else 0.0

    @property
    def share_handed_out(self) -> float:
        """Share of its rows up to the last one that was gathered."""
        return self._handed_out / max(1, len(self.rows))

    def unread(self, rows: int) -> Int64Array:
        """The next selected rows to read, ascending, at most `rows` of them."""
        return self._stored[self.memory.rows : self.memory.rows + rows]

    def add(self, read_into: Callable[[Callable[[pa.Table], None]], None]) -> tuple[int, int]:
        """Calls `read_into`, and keeps the tables that it passes on as one block; returns its rows and bytes."""
        rows, nbytes = self.memory.rows, self.nbytes

        def keep(table: pa.Table) -> None:
            self.memory.append(table)
            self.nbytes += table.nbytes

        try:
            read_into(keep)
        except BaseException:
            self.memory.cut(rows)
            self.nbytes = nbytes
            raise
        self._blocks.append((self.memory.rows - rows, self.nbytes - nbytes))
        return self._blocks[-1]

    def drop_last(self) -> None:
        """Drops the last block, so that it is read again later."""
        rows, nbytes = self._blocks.pop()
        self.memory.cut(self.memory.rows - rows)
        self.nbytes -= nbytes

    def halve(self) -> None:
        """Drops the second half of the rows, in the order of delivery: another portion will have them."""
        stored, rows = self._stored, self.rows[: len(self.rows) // 2]
        kept = self.memory.table().take(pa.array(np.flatnonzero(np.isin(stored[: self.memory.rows], rows))))
        self.open(rows, self.memory)
        self.add(lambda keep: keep(kept))

    def gather(self, low: int, high: int, *, own: bool) -> pa.Table:
        """Returns the rows of lines [low, high), in memory of their own with `own`; else maybe a view."""
        first, last = low - self.begin, high - self.begin
        self._handed_out = max(self._handed_out, last)
        by_line, table = self.memory.by_line(first, last), self.memory.stored()
        if table.num_columns:
            table = self._take(table, self._places[first:last], own)
        if not by_line:
            return table
        columns, schema = by_line | {name: table[name] for name in table.column_names}, self.memory.schema
        whole = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
        return own_memory(whole) if own else whole

    def _take(self, table: pa.Table, places: Int64Array, own: bool) -> pa.Table:
        """Takes rows by their places: long runs as slices, short ones by index."""
        starts = _run_starts(places)
        if len(places) * self.nbytes < len(self.rows) * len(starts) * _RUN_BYTES:
            return table.take(pa.array(places))
        lengths = np.diff(starts, append=len(places))
        slices = [table.slice(at, rows) for at, rows in zip(places[starts], lengths, strict=True)]
        return own_memory(slices[0]) if own and len(slices) == 1 else pa.concat_tables(slices).combine_chunks()


def _run_starts(places: Int64Array) -> Int64Array:
    """Indices where runs of consecutive places begin."""
    return np.flatnonzero(np.diff(places, prepend=-2) != 1)
