"""Owns memory that rows are copied into as they are read, and that is used again for others: fresh memory costs more
than the copy. Never reads, and never decides when memory may be used again.
"""

import abc
import ctypes
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_KEPT_BYTES = 64 << 20  # of freed memory
_KEPT_PIECE_BYTES = 32 << 20  # the most that glibc lets be set
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h

_GROWTH = 1.5
_SPARE = 1.05  # of what the first rows let expect


class RowMemory:
    """Rows by column, each column in one piece where it is of numbers, bytes, or lists of numbers, without nulls.

    Other columns are kept as they come, and put together when they are asked for.
    """

    def __init__(self, most_bytes: int) -> None:
        """Holds nothing; for rows that are not there yet, it takes so many bytes at the most."""
        self._most_bytes = most_bytes
        self._columns: dict[str, _Column] = {}
        self._schema: pa.Schema | None = None
        self._expected = 0
        self._table: pa.Table | None = None
        self.rows = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes that it takes, in use or not."""
        return sum(column.capacity_bytes for column in self._columns.values())

    @property
    def _used_bytes(self) -> int:
        return sum(column.used_bytes for column in self._columns.values())

    def begin(self, rows: int) -> None:
        """Forgets all rows, and expects so many others; what `table` has returned must not be read any more."""
        self._expected, self.rows, self._table = rows, 0, None
        for column in self._columns.values():
            column.cut(0)

    def append(self, table: pa.Table) -> None:
        """Copies rows, all of one schema."""
        self._schema, self._table = table.schema, None
        fitting = (self._most_bytes - self._used_bytes) * table.num_rows / max(1, table.nbytes)
        for name in table.column_names:
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _column(table.schema.field(name).type)
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
        self.rows, self._table = rows, None
        for column in self._columns.values():
            column.cut(rows)

    def table(self) -> pa.Table:
        """The rows; views, which are good until `begin` or `append`."""
        if self._table is None and self._schema is not None:
            arrays = [
                pa.chunked_array(self._columns[name].arrays(self.rows), self._schema.field(name).type)
                for name in self._schema.names
            ]
            self._table = pa.Table.from_arrays(arrays, schema=self._schema)
        return self._table


def keep_freed_memory() -> bool:
    """Has this process keep some of what it frees, for what it takes next; False where its C library is not glibc.

    Lance frees what it read piece by piece, glibc gives that back to the system, and each page of the next piece costs
    a fault: half of the CPU of reading. Both are set, since setting one stops glibc from adjusting the other, which
    costs more than it saves.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEPT_PIECE_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Room:
    """What memory to take, in multiples of what is appended: for what is expected, itself included, if it fits."""

    expected: float
    fitting: float


class _Column(abc.ABC):
    """One column."""

    _memory: "tuple[_Bytes, ...]" = ()

    @property
    def capacity_bytes(self) -> int:
        return sum(len(part.memory) for part in self._memory)

    @property
    def used_bytes(self) -> int:
        return sum(part.used for part in self._memory)

    @abc.abstractmethod
    def append(self, chunk: pa.Array, room: _Room) -> bool:
        """Copies a chunk; False where it cannot hold it."""

    @abc.abstractmethod
    def cut(self, rows: int) -> None:
        """Keeps the first rows only."""

    @abc.abstractmethod
    def arrays(self, rows: int) -> list[pa.Array]:
        """All rows."""


class _Fixed(_Column):
    """Values of one size."""

    def __init__(self, kind: pa.DataType, width: int) -> None:
        self._kind, self._width, self._data = kind, width, _Bytes()
        self._memory = (self._data,)

    def append(self, chunk: pa.Array, room: _Room) -> bool:
        raw = _raw(chunk)
        if raw is not None:
            self._data.append(raw, room)
        return raw is not None

    def cut(self, rows: int) -> None:
        self._data.used = rows * self._width

    def arrays(self, rows: int) -> list[pa.Array]:
        return [_dense(self._kind, rows, pa.py_buffer(self._data.memory))]


class _Variable(_Column):
    """Bytes, strings, and lists of values of one size."""

    def __init__(self, kind: pa.DataType, offset: Any, width: int) -> None:
        self._kind, self._width, self._data, self._ends = kind, width, _Bytes(), _Bytes()
        self._memory = (self._data, self._ends)
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
    """Whatever else there is."""

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
        # A gather from one chunk is about ten times as fast as from many. More than one is left where it cannot be one.
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


def _column(kind: pa.DataType) -> _Column:
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
    """Bytes of a value, 0 where they differ or are none."""
    if isinstance(kind, pa.BaseExtensionType):
        return _width(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _width(kind.value_type)
    is_fixed = pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind)
    return kind.bit_width // 8 if is_fixed and kind.bit_width % 8 == 0 else 0


def _bytes(buffer: pa.Buffer | None) -> npt.NDArray[np.uint8]:
    return np.frombuffer(buffer if buffer is not None else b"", dtype=np.uint8)


def _raw(array: pa.Array) -> npt.NDArray[np.uint8] | None:
    """The bytes of values of one size; None where one of them is null."""
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
