"""The memory of a chunk's rows by column: each row is copied once, if possible to its place in the order of delivery.

A line is a row's number in the order of delivery of the chunk, from 0.
"""

import abc
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.memory.arrow import (
    buffer_bytes,
    dense_array,
    ends_of,
    layout_of,
    raw_bytes,
    variable_array,
    wanted_rows,
    width_of,
)
from raylance.memory.lending import Bytes, Lend, fresh_memory
from raylance.orders.permutation import Int64Array

_GROWTH = 1.5
_NUMBERS = 1, 2, 4, 8  # bytes that NumPy copies as one number
_SPARE = 1.05  # reserved memory, relative to the bytes that the first rows predict


class Placed(NamedTuple):
    """Rows that `RowMemory.place` has copied as far as possible: the arguments of `append`.

    Attributes:
        table: The rows; None if all their columns were copied, so that the memory of the rows is free again.
        copied: Names of the columns that were copied.
        rows: Number of rows.
    """

    table: pa.Table | None
    copied: frozenset[str]
    rows: int


class RowMemory:
    """Holds rows by column. A column of numbers, bytes or lists of numbers, without nulls, is copied into one piece.

    Other columns are kept as they come, and joined when they are read. With `lines`, columns whose values have one size
    are stored line by line (in the order of delivery) if all rows fit. So an item's rows need not be gathered later.

    Attributes:
        rows: Number of rows that are here.
        schema: Schema of the rows, known with the first of them.
    """

    def __init__(
        self, most_bytes: int, expected: int = 0, lines: Int64Array | None = None, lend: Lend = fresh_memory
    ) -> None:
        """Creates an empty memory.

        Args:
            most_bytes: Most bytes to reserve for rows that are still to come.
            expected: Number of rows to expect.
            lines: The line of each row, in the order in which rows are appended: int64, shape (expected,), a
                permutation of 0 … expected-1. None stores rows as they come.
            lend: Returns memory, which must last as long as the arrays that this object returns: they are views of it.
        """
        self._most_bytes, self._expected, self._lines, self._lend = most_bytes, expected, lines, lend
        self._columns: dict[str, _Column] = {}
        self.schema = pa.schema([])
        self._stored: pa.Table | None = None
        self._by_line: pa.Table | None = None
        self._making = threading.Lock()
        self.rows = 0

    @property
    def capacity_bytes(self) -> int:
        """Allocated bytes, in use or not, of the columns that are copied; others do not count."""
        return sum(len(part.memory) for part in self._parts())

    @property
    def is_even(self) -> bool:
        """Whether all columns have a fixed width, so that all rows have the same size; False without columns."""
        return len(self._columns) > 0 and all(isinstance(column, _Fixed) for column in self._columns.values())

    def size_of(self, table: pa.Table, places: Int64Array | None = None) -> int:
        """Returns the bytes of a table of these columns. If rows have one size, it avoids `nbytes`, which releases the
        GIL for each array, and takes only the rows at the indices `places`.
        """
        widths = [column.width for column in list(self._columns.values()) if isinstance(column, _Fixed)]
        rows = table.num_rows if places is None else len(places)
        return rows * sum(widths) if len(widths) == table.num_columns else int(table.nbytes)

    def _parts(self) -> "Iterator[_Bytes]":
        for column in list(self._columns.values()):
            yield from column.parts

    def place(self, at: int, table: pa.Table, places: Int64Array | None = None) -> Placed:
        """Copies rows to their lines before they are appended; `at` is the number of rows to append before them.

        Several threads may call this at once, in any order, and again with the same rows.

        Args:
            at: See above.
            table: The rows, and possibly unwanted rows between them.
            places: The indices of the rows in the table, int64, shape (k,), strictly ascending from 0; None for all.

        Returns:
            See `Placed`.
        """
        rows = table.num_rows if places is None else len(places)
        if self._lines is None:
            return Placed(wanted_rows(table, places), frozenset(), rows)
        if places is not None and any(column.num_chunks != 1 for column in table.columns):
            table, places = wanted_rows(table, places), None
        lines, columns = self._lines[at : at + rows], self._columns_of(table)
        placed = {name for name, column in columns.items() if column.place(lines, table[name].chunks, places)}
        if len(placed) == table.num_columns:
            return Placed(None, frozenset(placed), rows)
        return Placed(wanted_rows(table, places), frozenset(placed), rows)

    def append(self, table: pa.Table | None, copied: frozenset[str] = frozenset(), rows: int = 0) -> None:
        """Adds rows, all of one schema; copies the columns that `place` did not copy. For None, see `Placed`."""
        self._stored, self._by_line = None, None
        if table is None:
            for column in self._columns.values():
                if isinstance(column, _Chunks) and column.was is not None:
                    # Since the rows were copied, a null has come before them, so the column is kept as it comes.
                    column.append(column.was.copied(self.rows, rows), _Room(1, 1))
                else:
                    column.cut(self.rows + rows)
            self.rows += rows
            return
        columns = self._columns_of(table)
        fitting_rows = self._fitting_rows(table) if len(copied) < table.num_columns else 0.0
        for name in table.column_names:
            column, at = columns[name], self.rows
            if name in copied and column.lines is not None:
                column.cut(at + table.num_rows)
                continue
            for chunk in table[name].chunks:
                room = _Room((self._expected - at) / max(1, len(chunk)), fitting_rows / max(1, len(chunk)))
                if not column.append(chunk, room):
                    was = column if isinstance(column, _Fixed) and column.lines is not None else None
                    column = self._columns[name] = _Chunks(column.arrays(at), was)
                    column.append(chunk, room)
                at += len(chunk)
        self.rows += table.num_rows

    def _columns_of(self, table: pa.Table) -> "dict[str, _Column]":
        """Returns the columns by name; the first table creates them."""
        with self._making:
            if not self._columns:
                columns = {field.name: _make_column(field.type, self._lend) for field in table.schema}
                if self._lines is not None and self._expected <= self._fitting_rows(table):
                    for column in columns.values():
                        if isinstance(column, _Fixed):
                            column.store_by(self._lines)
                self.schema = table.schema
                self._columns = columns  # set last, because other threads use it from now on
            return self._columns

    def _fitting_rows(self, table: pa.Table) -> float:
        """Returns how many more rows of this table's mean size fit."""
        used = sum(part.used for part in self._parts())
        return float((self._most_bytes - used) * table.num_rows / max(1, table.nbytes))

    def cut(self, rows: int) -> None:
        """Keeps only the first `rows` rows."""
        self.rows, self._stored, self._by_line = rows, None, None
        for column in self._columns.values():
            column.cut(rows)

    def table(self) -> pa.Table:
        """Returns the rows as they were appended, as views if possible."""
        return self._table(self._columns)

    def stored(self) -> pa.Table:
        """Returns the rows like `table`, without the columns that are stored line by line."""
        if self._stored is None:
            self._stored = self._table([name for name, column in self._columns.items() if column.lines is None])
        return self._stored

    def _table(self, names: Iterable[str]) -> pa.Table:
        """Returns columns in the order of the schema."""
        fields = [field for field in self.schema if field.name in names]
        arrays = [pa.chunked_array(self._columns[field.name].arrays(self.rows), field.type) for field in fields]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields, self.schema.metadata))

    def by_line(self, low: int, high: int) -> pa.Table:
        """Returns views of lines [low, high) of the columns that are stored line by line.

        Raises:
            IndexError: If there are such columns, and not all rows are here.
        """
        if self._by_line is None:
            fields = [field for field in self.schema if self._columns[field.name].lines is not None]
            if fields and self.rows < self._expected:
                raise IndexError(f"{self.rows} of {self._expected} rows are here")
            arrays = [self._columns[field.name].by_line() for field in fields]
            self._by_line = pa.Table.from_arrays(arrays, schema=pa.schema(fields, self.schema.metadata))
        return self._by_line.slice(low, high - low)


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """Limits of the memory to allocate, in multiples of the chunk that is being appended."""

    expected: float  # for all rows that are still expected, including the chunk
    fitting: float  # for as many rows as fit


class _Column(abc.ABC):
    """One column. If `lines` is not None, its rows are stored line by line, see `RowMemory`."""

    lines: Int64Array | None = None
    parts: "tuple[_Bytes, ...]" = ()

    def place(self, lines: Int64Array, chunks: list[pa.Array], places: Int64Array | None = None) -> bool:
        """Copies rows to these lines; returns False if the column cannot hold them, or stores rows as they come. With
        `places`, these are their indices in the only chunk.
        """
        return False

    def by_line(self) -> pa.Array:
        """Returns all lines; only if `lines` is not None."""
        raise NotImplementedError

    @abc.abstractmethod
    def append(self, chunk: pa.Array, room: _Room) -> bool:
        """Adds a chunk, as a copy if the column has memory of its own; returns False if this column cannot hold it."""

    @abc.abstractmethod
    def cut(self, rows: int) -> None:
        """Keeps only the first `rows` rows."""

    @abc.abstractmethod
    def arrays(self, rows: int) -> list[pa.Array]:
        """Returns all rows, as they were appended."""


class _Fixed(_Column):
    """A column whose values have one size."""

    def __init__(self, kind: pa.DataType, width: int, lend: Lend) -> None:
        self._kind, self.width, self._data = kind, width, _Bytes(lend)
        # A number if one has this width, else a row of bytes: NumPy releases the GIL several times to assign `np.void`.
        self._value = f"u{width}" if width in _NUMBERS else "u1"
        self._shape: tuple[int, ...] = (-1,) if self._value != "u1" or width == 1 else (-1, width)
        self.parts = (self._data,)

    def store_by(self, lines: Int64Array) -> None:
        """Stores rows line by line from now on."""
        self.lines = lines
        self._data.reserve(len(lines) * self.width)

    def place(self, lines: Int64Array, chunks: list[pa.Array], places: Int64Array | None = None) -> bool:
        if self.lines is None:
            return False
        by_line, at = self._by_line, 0
        for chunk in chunks:
            raw = raw_bytes(chunk)
            if raw is None:
                return False
            values = self._as_values(raw)
            wanted = values if places is None else values.take(places, axis=0)
            by_line[_index(lines[at : at + len(wanted)])] = wanted
            at += len(wanted)
        return True

    def append(self, chunk: pa.Array, room: _Room) -> bool:
        if self.lines is not None:
            rows = self._data.used // self.width
            if not self.place(self.lines[rows : rows + len(chunk)], [chunk]):
                return False
            self.cut(rows + len(chunk))
            return True
        raw = raw_bytes(chunk)
        if raw is not None:
            self._data.append(raw, room)
        return raw is not None

    @property
    def _by_line(self) -> npt.NDArray[Any]:
        """All lines, shape (n,) or (n, bytes of a value)."""
        lines = 0 if self.lines is None else len(self.lines)
        return self._as_values(self._data.memory[: lines * self.width])

    def _as_values(self, raw: Bytes) -> npt.NDArray[Any]:
        return raw.view(self._value).reshape(self._shape)

    def by_line(self) -> pa.Array:
        lines = 0 if self.lines is None else len(self.lines)
        return dense_array(self._kind, lines, pa.py_buffer(self._data.memory[: lines * self.width]))

    def copied(self, first: int, rows: int) -> pa.Array:
        """Returns rows that were copied to their lines, from number `first` on."""
        if self.lines is None:
            raise IndexError("the column stores rows as they come")
        data = self._by_line[self.lines[first : first + rows]]
        return dense_array(self._kind, rows, pa.py_buffer(data))

    def cut(self, rows: int) -> None:
        self._data.used = rows * self.width

    def arrays(self, rows: int) -> list[pa.Array]:
        data = self._data.memory if self.lines is None else self._by_line[self.lines[:rows]]
        return [dense_array(self._kind, rows, pa.py_buffer(data))]


class _Variable(_Column):
    """A column of bytes, of strings, or of lists of any length whose elements have a fixed width."""

    def __init__(self, kind: pa.DataType, offset: Any, width: int, lend: Lend) -> None:
        self._kind, self._width, self._data, self._ends = kind, width, _Bytes(lend), _Bytes(lend)
        self.parts = (self._data, self._ends)
        self._offset = np.dtype(offset)
        self._ends.append(np.zeros(1, self._offset).view(np.uint8), _Room(1, 1))

    def append(self, chunk: pa.Array, room: _Room) -> bool:
        if chunk.null_count or not len(chunk):
            return not chunk.null_count
        ends = ends_of(chunk)
        first, last = int(ends[0]), int(ends[-1])
        raw = raw_bytes(chunk.values[first:last]) if self._width else buffer_bytes(chunk.buffers()[2])[first:last]
        before = self._data.used // max(1, self._width)
        if raw is None or before + last - first > np.iinfo(self._offset).max:
            return False
        self._data.append(raw, room)
        self._ends.append((ends[1:] - ends[0] + self._offset.type(before)).view(np.uint8), room)
        return True

    def cut(self, rows: int) -> None:
        self._ends.used = (rows + 1) * self._offset.itemsize
        last = int(self._ends.memory[: self._ends.used].view(self._offset)[-1])
        self._data.used = last * max(1, self._width)

    def arrays(self, rows: int) -> list[pa.Array]:
        return [variable_array(self._kind, rows, self._ends.memory, self._data.memory)]


class _Chunks(_Column):
    """A column of another type, or with nulls, kept as Arrow arrays."""

    def __init__(self, arrays: list[pa.Array], was: _Fixed | None = None) -> None:
        """Begins with arrays; `was` is the column that had copied them, and later rows, to their lines."""
        self._arrays, self.was = arrays, was

    def append(self, chunk: pa.Array, room: _Room) -> bool:
        self._arrays.append(chunk)
        return True

    def cut(self, rows: int) -> None:
        kept, self._arrays = self._arrays, []
        for array in kept:
            if rows > 0:
                self._arrays.append(array[:rows])
                rows -= len(array)

    def arrays(self, rows: int) -> list[pa.Array]:
        # Gathering from one chunk is about ten times as fast. Columns that are too large for one chunk keep several.
        if len(self._arrays) > 1:
            self._arrays = pa.table({"": pa.chunked_array(self._arrays)}).combine_chunks()[""].chunks
        return self._arrays


class _Bytes:
    """Memory that grows as bytes are appended."""

    def __init__(self, lend: Lend) -> None:
        self.memory, self._lend = fresh_memory(0), lend
        self.used = 0

    def reserve(self, size: int) -> None:
        """Takes memory of `size` bytes in place of that which it has."""
        self.memory = self._lend(size)

    def append(self, data: Bytes, room: _Room) -> None:
        """Copies bytes to the end of the used memory."""
        end = self.used + len(data)
        if end > len(self.memory):
            wanted = max(self.used * _GROWTH, self.used + len(data) * room.expected * _SPARE)
            size = max(end, int(min(wanted, self.used + len(data) * room.fitting)))
            before, self.memory = self.memory, self._lend(size)
            self.memory[: self.used] = before[: self.used]
        self.memory[self.used : end] = data
        self.used = end


def _index(lines: Int64Array) -> Int64Array | slice:
    """Returns the index for NumPy: a slice if the lines are consecutive, which is faster."""
    is_run = len(lines) > 0 and lines[-1] - lines[0] + 1 == len(lines) and bool((np.diff(lines) == 1).all())
    return slice(lines[0], lines[0] + len(lines)) if is_run else lines


def _make_column(kind: pa.DataType, lend: Lend) -> _Column:
    """Creates the memory for a column of this type."""
    if width := width_of(kind):
        return _Fixed(kind, width, lend)
    layout = layout_of(kind)
    return _Chunks([]) if layout is None else _Variable(kind, *layout, lend)
