"""Owns memory that rows are copied into as they are read, and that is reused: fresh memory costs more than the copy.
Never reads, and never decides when memory may be reused.
"""

import ctypes
import platform
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.orders.permutation import Int64Array
from raylance.source.column_memory import Chunks, Column, Room, make_column

_KEPT_BYTES = 64 << 20  # of freed memory, in each arena
# The largest piece that is kept: twice what is read at once. A larger one, such as one row, goes back to the system.
# Kept, it would pin the freed memory around it: a reader of 32 MiB of rows had 170 MiB of it.
_KEPT_PIECE_BYTES = 8 << 20
_ARENAS = 4  # more would only help threads that allocate many small pieces
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


class RowMemory:
    """Rows by column. Columns of numbers, bytes, or lists of numbers, without nulls, are each in one piece.

    Other columns are kept as they come, and joined when they are read.

    Attributes:
        rows: Rows that are here.
    """

    def __init__(self, most_bytes: int) -> None:
        """Holds nothing yet; it reserves at most so many bytes for rows that are still to come."""
        self._most_bytes = most_bytes
        self._columns: dict[str, Column] = {}
        self._schema = pa.schema([])
        self._expected = 0
        self._lines: Int64Array | None = None
        self._stored: pa.Table | None = None
        self.rows = 0

    @property
    def capacity_bytes(self) -> int:
        """Allocated bytes, in use or not."""
        return sum(column.capacity_bytes for column in self._columns.values())

    @property
    def schema(self) -> pa.Schema:
        """Schema of the last table that was appended."""
        return self._schema

    @property
    def _used_bytes(self) -> int:
        return sum(column.used_bytes for column in self._columns.values())

    def begin(self, rows: int, lines: Int64Array | None = None) -> None:
        """Drops all rows, and expects so many others; arrays that were returned become invalid.

        Args:
            rows: Rows to expect.
            lines: The line of each row, int64, shape (rows,), a permutation: columns of values of one size are then
                stored line by line, if all of them fit, which saves gathering them later.
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
        """Returns the rows as they were appended; views, where possible, which are valid until `begin` or `append`."""
        return self._table(self._columns)

    def stored(self) -> pa.Table:
        """Returns the rows as `table` does, without the columns that are stored line by line."""
        if self._stored is None:
            self._stored = self._table([name for name, column in self._columns.items() if column.lines is None])
        return self._stored

    def _table(self, names: Iterable[str]) -> pa.Table:
        """Returns columns in the order of the schema."""
        fields = [field for field in self._schema if field.name in names]
        arrays = [pa.chunked_array(self._columns[field.name].arrays(self.rows), field.type) for field in fields]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields, self._schema.metadata))

    def by_line(self, low: int, high: int) -> dict[str, pa.Array]:
        """Returns lines [low, high) of the columns that are stored line by line, as `table` does.

        Raises:
            IndexError: If rows are still to come.
        """
        found = {name: column for name, column in self._columns.items() if column.lines is not None}
        if found and self.rows < self._expected:
            raise IndexError(f"{self.rows} of {self._expected} rows are here")
        return {name: column.by_line(low, high) for name, column in found.items()}


def keep_freed_memory() -> bool:
    """Has this process keep some freed memory for later; returns False if its C library is not glibc.

    Lance frees pieces that it read, glibc returns them to the system, and each page of the next piece costs a fault: up
    to half of the CPU of reading. Both thresholds are set, because setting one stops glibc from adjusting the other,
    which costs more than it saves.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {_M_ARENA_MAX: _ARENAS, _M_MMAP_THRESHOLD: _KEPT_PIECE_BYTES, _M_TRIM_THRESHOLD: _KEPT_BYTES}
    return all(mallopt(key, value) for key, value in settings.items())


def own_memory(table: pa.Table) -> pa.Table:
    """Copies a table; `combine_chunks` alone copies only columns of several chunks."""
    return pa.concat_tables([table, table.slice(0, 0)]).combine_chunks()


def take_rows(table: pa.Table, places: npt.NDArray[np.int64]) -> pa.Table:
    """Takes rows by their places, int64, shape (k,), into memory of their own."""
    if any(_is_nested(kind) for kind in table.schema.types):
        table = own_memory(table)  # Arrow 26 takes wrong values from a slice of such a column
    return table.take(pa.array(places))


def _is_nested(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _is_nested(kind.storage_type)
    return bool(pa.types.is_fixed_size_list(kind) and pa.types.is_fixed_size_list(kind.value_type))
