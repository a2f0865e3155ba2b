"""Owns memory that rows are copied into as they are read, and that is reused: fresh memory costs more than the copy.
Never reads, and never decides when memory may be reused.
"""

import abc
import ctypes
import dataclasses
import platform
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.orders.permutation import Int64Array

_GROWTH = 1.5
_SPARE = 1.05  # of the bytes that the first rows predict
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
        schema: Schema of the last table that was appended.
    """

    def __init__(self, most_bytes: int) -> None:
        """Holds nothing yet; it reserves at most so many bytes for rows that are still to come."""
        self._most_bytes = most_bytes
        self._columns: dict[str, _Column] = {}
        self.schema = pa.schema([])
        self._expected = 0
        self._lines: Int64Array | None = None
        self._stored: pa.Table | None = None
        self.rows = 0

    @property
    def capacity_bytes(self) -> int:
        """Allocated bytes, in use or not."""
        return sum(len(part.memory) for part in self._parts())

    def _parts(self) -> "Iterator[_Bytes]":
        for column in self._columns.values():
            yield from column.parts

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
        self.schema, self._stored = table.schema, None
        fitting = (self._most_bytes - sum(part.used for part in self._parts())) * table.num_rows / max(1, table.nbytes)
        for name in table.column_names:
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _make_column(table.schema.field(name).type)
                column.begin(self._lines)
            rows = self.rows
            for chunk in table[name].chunks:
                room = _Room((self._expected - rows) / max(1, len(chunk)), fitting / max(1, len(chunk)))
                if not column.append(chunk, room):
                    column = self._columns[name] = _Chunks(column.arrays(rows))
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
        fields = [field for field in self.schema if field.name in names]
        arrays = [pa.chunked_array(self._columns[field.name].arrays(self.rows), field.type) for field in fields]
        return pa.Table.from_arrays(arrays, schema=pa.schema(fields, self.schema.metadata))

    def by_line(self, low: int, high: int) -> dict[str, pa.Array]:
        """Returns lines [low, high) of the columns that are stored line by line, as `table` does.

        Raises:
            IndexError: If rows are still to come.
        """
        found = {name: column for name, column in self._columns.items() if column.lines is not None}
        if found and self.rows < self._expected:
            raise IndexError(f"{self.rows} of {self._expected} rows are here")
        return {name: column.by_line(low, high) for name, column in found.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """How much memory to allocate, in multiples of the chunk that is being appended."""

    expected: float  # for all rows that are still expected, the chunk included
    fitting: float  # at most


class _Column(abc.ABC):
    """One column; its rows are stored line by line if `lines` is not None, see `RowMemory.begin`."""

    lines: Int64Array | None = None
    parts: "tuple[_Bytes, ...]" = ()

    def begin(self, lines: Int64Array | None) -> None:
        """Drops all rows; `lines` is that of the next ones."""
        self.cut(0)

    def by_line(self, low: int, high: int) -> pa.Array:
        """Returns lines [low, high), if `lines` is not None."""
        raise NotImplementedError

    @abc.abstractmethod
    def append(self, chunk: pa.Array, room: _Room) -> bool:
        """Copies a chunk; returns False if this column cannot hold it."""

    @abc.abstractmethod
    def cut(self, rows: int) -> None:
        """Keeps the first rows only."""

    @abc.abstractmethod
    def arrays(self, rows: int) -> list[pa.Array]:
        """Returns all rows, as they were appended."""


class _Fixed(_Column):
    """Values of one size."""

    def __init__(self, kind: pa.DataType, width: int) -> None:
        self._kind, self._width, self._data = kind, width, _Bytes()
        self.parts = (self._data,)

    def begin(self, lines: Int64Array | None) -> None:
        self.lines = lines
        self.cut(0)

    def append(self, chunk: pa.Array, room: _Room) -> bool:
        raw = _raw(chunk)
        if raw is None or not len(chunk):
            return raw is not None
        at = self._data.used // self._width
        if self.lines is not None and not at and not self._data.reserve(len(self.lines) * self._width, raw, room):
            self.lines = None
        if self.lines is None:
            self._data.append(raw, room)
        else:
            self._by_line[self.lines[at : at + len(chunk)]] = raw.view(self._by_line.dtype)
            self._data.used += len(raw)
        return True

    @property
    def _by_line(self) -> npt.NDArray[Any]:
        """All lines, as one value each."""
        lines = 0 if self.lines is None else len(self.lines)
        return self._data.memory[: lines * self._width].view(np.dtype((np.void, self._width)))

    def by_line(self, low: int, high: int) -> pa.Array:
        return _dense(self._kind, high - low, pa.py_buffer(self._data.memory[low * self._width : high * self._width]))

    def cut(self, rows: int) -> None:
        self._data.used = rows * self._width

    def arrays(self, rows: int) -> list[pa.Array]:
        data = self._data.memory if self.lines is None else self._by_line[self.lines[:rows]]
        return [_dense(self._kind, rows, pa.py_buffer(data))]


class _Variable(_Column):
    """Bytes, strings, and lists of values of one size."""

    def __init__(self, kind: pa.DataType, offset: Any, width: int) -> None:
        self._kind, self._width, self._data, self._ends = kind, width, _Bytes(), _Bytes()
        self.parts = (self._data, self._ends)
        self._offset = np.dtype(offset)
        self._ends.append(np.zeros(1, self._offset).view(np.uint8), _Room(1, 1))

    def append(self, chunk: pa.Array, room: _Room) -> bool:
        if chunk.null_count or not len(chunk):
            return not chunk.null_count
        ends = np.frombuffer(chunk.buffers()[1], self._offset)[chunk.offset : chunk.offset + len(chunk) + 1]
        first, last = int(ends[0]), int(ends[-1])
        raw = _raw(chunk.values[first:last]) if self._width else _bytes(chunk.buffers()[2])[first:last]
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
        ends, data = pa.py_buffer(self._ends.memory), pa.py_buffer(self._data.memory)
        if not self._width:
            return [pa.Array.from_buffers(self._kind, rows, [None, ends, data])]
        values = _dense(self._kind.value_type, self._data.used // self._width, data)
        return [pa.Array.from_buffers(self._kind, rows, [None, ends], children=[values])]


class _Chunks(_Column):
    """Values of other types, or with nulls."""

    def __init__(self, arrays: list[pa.Array]) -> None:
        self._arrays = arrays

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
        # A gather from one chunk is about ten times as fast. Columns too large for one chunk keep several.
        if len(self._arrays) > 1:
            self._arrays = pa.table({"": pa.chunked_array(self._arrays)}).combine_chunks()[""].chunks
        return self._arrays


class _Bytes:
    """Bytes that grow."""

    def __init__(self) -> None:
        self.memory: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self.used = 0

    def append(self, data: npt.NDArray[np.uint8], room: _Room) -> None:
        """Copies bytes."""
        end = self.used + len(data)
        if end > len(self.memory):
            wanted = max(self.used * _GROWTH, self.used + len(data) * room.expected * _SPARE)
            size = max(end, int(min(wanted, self.used + len(data) * room.fitting)))
            before, self.memory = self.memory, np.empty(size, dtype=np.uint8)
            self.memory[: self.used] = before[: self.used]
        self.memory[self.used : end] = data
        self.used = end

    def reserve(self, nbytes: int, data: npt.NDArray[np.uint8], room: _Room) -> bool:
        """Allocates so many bytes before any are used; returns False if they do not fit."""
        if nbytes > len(self.memory):
            if nbytes > len(data) * room.fitting:
                return False
            self.memory = np.empty(nbytes, dtype=np.uint8)
        return True


def _make_column(kind: pa.DataType) -> _Column:
    """Makes memory for a column of this type."""
    if width := _width(kind):
        return _Fixed(kind, width)
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return _Variable(kind, np.int32, 0)
    if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
        return _Variable(kind, np.int64, 0)
    if pa.types.is_list(kind) and (width := _width(kind.value_type)):
        return _Variable(kind, np.int32, width)
    if pa.types.is_large_list(kind) and (width := _width(kind.value_type)):
        return _Variable(kind, np.int64, width)
    return _Chunks([])


def _width(kind: pa.DataType) -> int:
    """Bytes of a value; 0 if values differ in size, or are no whole bytes."""
    if isinstance(kind, pa.BaseExtensionType):
        return _width(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    is_fixed = pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind)
    return kind.bit_width // 8 if is_fixed and kind.bit_width % 8 == 0 else 0


def _bytes(buffer: pa.Buffer | None) -> npt.NDArray[np.uint8]:
    return np.frombuffer(buffer if buffer is not None else b"", dtype=np.uint8)


def _raw(array: pa.Array) -> npt.NDArray[np.uint8] | None:
    """The bytes of values of one size; None if one of them is null."""
    if array.null_count:
        return None
    if isinstance(array.type, pa.BaseExtensionType):
        return _raw(array.storage)
    if pa.types.is_fixed_size_list(array.type):
        return _raw(array.flatten())
    width = array.type.bit_width // 8
    return _bytes(array.buffers()[1])[array.offset * width : (array.offset + len(array)) * width]


def _dense(kind: pa.DataType, rows: int, data: pa.Buffer) -> pa.Array:
    """An array of values of one size in this memory."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _dense(kind.storage_type, rows, data))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(_dense(kind.value_type, rows * kind.list_size, data), type=kind)
    return pa.Array.from_buffers(kind, rows, [None, data])


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
