"""Owns memory that rows are copied into as they are read, and that is used again for others: fresh memory costs more
than the copy. Never reads, and never decides when memory may be used again.
"""

import ctypes
import platform
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.orders.permutation import Int64Array
from raylance.source.column_memory import Chunks, Column, Room, make_column

_KEPT_BYTES = 64 << 20  # of freed memory
_KEPT_PIECE_BYTES = 32 << 20  # the most that glibc lets be set
_ARENAS = 4  # each keeps so much; more of them would only save waiting where many small pieces are taken
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


class RowMemory:
    """Rows by column, each column in one piece where it is of numbers, bytes, or lists of numbers, without nulls.

    Other columns are kept as they come, and put together when they are asked for.
    """

    def __init__(self, most_bytes: int) -> None:
        """Holds nothing; for rows that are not there yet, it takes so many bytes at the most."""
        self._most_bytes = most_bytes
        self._columns: dict[str, Column] = {}
        self._schema = pa.schema([])
        self._expected = 0
        self._lines: Int64Array | None = None
        self._stored: pa.Table | None = None
        self.rows = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes that it takes, in use or not."""
        return sum(column.capacity_bytes for column in self._columns.values())

    @property
    def schema(self) -> pa.Schema:
        """Of what was appended last."""
        return self._schema

    @property
    def _used_bytes(self) -> int:
        return sum(column.used_bytes for column in self._columns.values())

    def begin(self, rows: int, lines: Int64Array | None = None) -> None:
        """Forgets all rows, and expects so many others; what was returned must not be read any more.

        Args:
            rows: Rows to expect.
            lines: The line where each belongs, int64 (rows,), a permutation: columns of values of one size are then put
                together line by line, if there is room for all of them, which saves gathering them later.
        """
        self._expected, self.rows, self._lines, self._stored = rows, 0, lines, None
        for column in self._columns.values():
            column.begin(lines)

    def append(self, table: pa.Table) -> None:
        """Copies rows, all of one schema."""
        self._schema, self._stored = table.schema, None
        fitting = (self._most_bytes - self._used_bytes) * table.num_rows / max(1, table.nbytes)
        for name in table.column_names:
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = make_column(table.schema.field(name).type)
                column.begin(self._lines)
            rows = self.rows
            for chunk in table[name].chunks:
                room = Room((self._expected - rows) / max(1, len(chunk)), fitting / max(1, len(chunk)))
                if not column.append(chunk, room):
                    column = self._columns[name] = Chunks(column.arrays(rows))
                    column.append(chunk, room)
                rows += len(chunk)
        self.rows += table.num_rows

    def cut(self, rows: int) -> None:
        """Keeps the first rows only."""
        self.rows, self._stored = rows, None
        for column in self._columns.values():
            column.cut(rows)

    def table(self) -> pa.Table:
        """The rows as they were appended; views where they lie so, which are good until `begin` or `append`."""
        return self._table(self._columns)

    def stored(self) -> pa.Table:
        """The same, without the columns that lie line by line."""
        if self._stored is None:
            self._stored = self._table([name for name, column in self._columns.items() if column.lines is None])
        return self._stored

    def _table(self, names: Iterable[str]) -> pa.Table:
        """Columns in the order of the schema."""
        fields = [field for field in self._schema if field.name in names]
        arrays = [pa.chunked_array(self._columns[field.name].arrays(self.rows), field.type) for field in fields]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields, self._schema.metadata))

    def by_line(self, low: int, high: int) -> dict[str, pa.Array]:
        """Lines [low, high) of the columns that lie line by line; views, likewise.

        Raises:
            IndexError: If not all rows are there.
        """
        found = {name: column for name, column in self._columns.items() if column.lines is not None}
        if found and self.rows < self._expected:
            raise IndexError(f"{self.rows} of {self._expected} rows are there")
        return {name: column.by_line(low, high) for name, column in found.items()}


def keep_freed_memory() -> bool:
    """Has this process keep some of what it frees, for what it takes next; False where its C library is not glibc.

    Lance frees what it read piece by piece, glibc gives that back to the system, and each page of the next piece costs
    a fault: up to half of the CPU of reading. Both thresholds are set, since setting one stops glibc from adjusting the
    other, which costs more than it saves.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {_M_ARENA_MAX: _ARENAS, _M_MMAP_THRESHOLD: _KEPT_PIECE_BYTES, _M_TRIM_THRESHOLD: _KEPT_BYTES}
    return all(mallopt(key, value) for key, value in settings.items())


def own_memory(table: pa.Table) -> pa.Table:
    """A copy; Arrow makes one only where there is more than one chunk."""
    return pa.concat_tables([table, table.slice(0, 0)]).combine_chunks()


def take_rows(table: pa.Table, places: npt.NDArray[np.int64]) -> pa.Table:
    """Rows by their places, in memory of their own."""
    if any(_is_nested(kind) for kind in table.schema.types):
        table = own_memory(table)  # of a slice of such a column, Arrow 26 takes other values
    return table.take(pa.array(places))


def _is_nested(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _is_nested(kind.storage_type)
    return bool(pa.types.is_fixed_size_list(kind) and pa.types.is_fixed_size_list(kind.value_type))
