"""Owns rows that are read and held together, from the first block to the items that are gathered from them; reads none,
never decides how many they are.
"""

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pyarrow as pa

from raylance.orders.permutation import Int64Array
from raylance.planning.plan import Chunk
from raylance.source.memory import RowMemory, own_memory

_LONG_RUN = 4  # rows that lie together, from which on they are not put one by one where they belong
_RUN_BYTES = 8 << 10  # rows that lie together and have so much are copied as they are, smaller ones are taken by index

Track = tuple[str, int, int, int]  # plan, rank, epoch, and the first position modulo the global batch


class Portion:
    """Rows that are read and held together, in the order of delivery from line `begin` of a track on.

    Until it is known how many fit, they may be those up to line `chunk_end`.
    """

    filling: Future[None]  # reads it ahead; rows that are read by themselves have none
    memory: RowMemory

    def __init__(self, track: Track, chunk: Chunk, begin: int, chunk_end: int) -> None:
        self.track, self.chunk, self.begin, self.chunk_end = track, chunk, begin, chunk_end
        self.is_held, self.is_cold, self.is_whole, self.is_dropped = True, False, False, False
        self.is_stuck = False  # there is no room for the rest of it now
        self._handed_out = 0  # lines, up to the last one
        self.rows = np.empty(0, dtype=np.int64)  # selected rows in the order of delivery
        self.nbytes, self._blocks = 0, list[tuple[int, int]]()  # rows and bytes of each

    def open(self, rows: Int64Array, memory: RowMemory) -> None:
        """Takes the selected rows, in the order of delivery, at least one; and memory for them."""
        self.rows = rows
        self._stored, self._places = np.unique(rows, return_inverse=True)
        is_scattered = len(self._stored) == len(rows) and len(_runs(self._places)) * _LONG_RUN > len(rows)
        self.memory = memory
        self.memory.begin(len(self._stored), np.argsort(self._places) if is_scattered else None)
        self.nbytes, self._blocks = 0, []

    @property
    def end(self) -> int:
        """Line behind the last row, once all is read; until then, what it can be at the most."""
        return self.begin + len(self.rows) if self.is_whole else self.chunk_end

    def has(self, track: Track, line: int) -> bool:
        """Whether a line is here, as far as is known yet."""
        return self.track == track and self.begin <= line < self.end

    @property
    def share_read(self) -> float:
        """Of its rows, how many are here."""
        return self.memory.rows / len(self._stored) if len(self.rows) else 0.0

    @property
    def share_handed_out(self) -> float:
        """Of its rows, up to where they were gathered."""
        return self._handed_out / max(1, len(self.rows))

    def unread(self, rows: int) -> Int64Array:
        """The next selected rows to read, ascending."""
        return self._stored[self.memory.rows : self.memory.rows + rows]

    def add(self, read_into: Callable[[Callable[[pa.Table], None]], None]) -> tuple[int, int]:
        """Keeps a block of rows that is read now; tells how many rows and bytes it has."""
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
        """Gives the last block up: it will be read again."""
        rows, nbytes = self._blocks.pop()
        self.memory.cut(self.memory.rows - rows)
        self.nbytes -= nbytes

    def halve(self) -> None:
        """Leaves the second half of the rows, in the order of delivery, to another portion."""
        stored, rows = self._stored, self.rows[: len(self.rows) // 2]
        kept = self.memory.table().take(pa.array(np.flatnonzero(np.isin(stored[: self.memory.rows], rows))))
        self.open(rows, self.memory)
        self.add(lambda keep: keep(kept))

    def gather(self, low: int, high: int, *, own: bool) -> pa.Table:
        """The rows of lines [low, high); where they are one run, and need no memory of their own, a view."""
        first, last = low - self.begin, high - self.begin
        self._handed_out = max(self._handed_out, last)
        by_line, table = self.memory.by_line(first, last), self.memory.stored()
        if table.num_columns:
            table = self._take(table, self._places[first:last], own)
        if not by_line:
            return table
        columns, schema = by_line | dict(zip(table.column_names, table.columns, strict=True)), self.memory.schema
        whole = pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)
        return own_memory(whole) if own else whole

    def _take(self, table: pa.Table, places: Int64Array, own: bool) -> pa.Table:
        """Rows by their places, as few copies as that takes."""
        runs = _runs(places)
        if len(places) * self.nbytes < len(self.rows) * len(runs) * _RUN_BYTES:
            return table.take(pa.array(places))
        lengths = np.diff(runs, append=len(places))
        slices = [table.slice(at, rows) for at, rows in zip(places[runs], lengths, strict=True)]
        return own_memory(slices[0]) if own and len(slices) == 1 else pa.concat_tables(slices).combine_chunks()


def _runs(places: Int64Array) -> Int64Array:
    """Where runs of consecutive places begin."""
    return np.flatnonzero(np.diff(places, prepend=-2) != 1)
