"""Owns the memory that the values of one column are copied into, by its type; never sees other columns."""

import abc
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.orders.permutation import Int64Array

_GROWTH = 1.5
_SPARE = 1.05  # of the bytes that the first rows predict


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """How much memory to allocate, in multiples of the chunk that is being appended.

    Attributes:
        expected: For all rows that are still expected, the chunk included.
        fitting: At most.
    """

    expected: float
    fitting: float


class Column(abc.ABC):
    """One column.

    Attributes:
        lines: The line of each row, see `RowMemory.begin`; None for rows that are stored one after the other.
    """

    lines: Int64Array | None = None
    _memory: "tuple[_Bytes, ...]" = ()

    @property
    def capacity_bytes(self) -> int:
        """Allocated bytes, in use or not."""
        return sum(len(part.memory) for part in self._memory)

    @property
    def used_bytes(self) -> int:
        """Bytes in use."""
        return sum(part.used for part in self._memory)

    def begin(self, lines: Int64Array | None) -> None:
        """Drops all rows; `lines` is that of the next ones."""
        self.cut(0)

    def by_line(self, low: int, high: int) -> pa.Array:
        """Returns lines [low, high), if `lines` is not None."""
        raise NotImplementedError

    @abc.abstractmethod
    def append(self, chunk: pa.Array, room: Room) -> bool:
        """Copies a chunk; returns False if this column cannot hold it."""

    @abc.abstractmethod
    def cut(self, rows: int) -> None:
        """Keeps the first rows only."""

    @abc.abstractmethod
    def arrays(self, rows: int) -> list[pa.Array]:
        """Returns all rows, as they were appended."""


class _Fixed(Column):
    """Values of one size."""

    def __init__(self, kind: pa.DataType, width: int) -> None:
        self._kind, self._width, self._data = kind, width, _Bytes()
        self._memory = (self._data,)

    def begin(self, lines: Int64Array | None) -> None:
        self.lines = lines
        self.cut(0)

    def append(self, chunk: pa.Array, room: Room) -> bool:
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


class _Variable(Column):
    """Bytes, strings, and lists of values of one size."""

    def __init__(self, kind: pa.DataType, offset: Any, width: int) -> None:
        self._kind, self._width, self._data, self._ends = kind, width, _Bytes(), _Bytes()
        self._memory = (self._data, self._ends)
        self._offset = np.dtype(offset)
        self._ends.append(np.zeros(1, self._offset).view(np.uint8), Room(1, 1))

    def append(self, chunk: pa.Array, room: Room) -> bool:
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


class Chunks(Column):
    """Values of other types, or with nulls."""

    def __init__(self, arrays: list[pa.Array]) -> None:
        self._arrays = arrays

    def append(self, chunk: pa.Array, room: Room) -> bool:
        """See `Column.append`."""
        self._arrays.append(chunk)
        return True

    def cut(self, rows: int) -> None:
        """See `Column.cut`."""
        kept, self._arrays = self._arrays, []
        for array in kept:
            if rows > 0:
                self._arrays.append(array[:rows])
                rows -= len(array)

    def arrays(self, rows: int) -> list[pa.Array]:
        """See `Column.arrays`."""
        # A gather from one chunk is about ten times as fast. Columns too large for one chunk keep several.
        if len(self._arrays) > 1:
            self._arrays = pa.table({"": pa.chunked_array(self._arrays)}).combine_chunks()[""].chunks
        return self._arrays


class _Bytes:
    """Bytes that grow."""

    def __init__(self) -> None:
        self.memory: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self.used = 0

    def append(self, data: npt.NDArray[np.uint8], room: Room) -> None:
        """Copies bytes."""
        end = self.used + len(data)
        if end > len(self.memory):
            wanted = max(self.used * _GROWTH, self.used + len(data) * room.expected * _SPARE)
            size = max(end, int(min(wanted, self.used + len(data) * room.fitting)))
            before, self.memory = self.memory, np.empty(size, dtype=np.uint8)
            self.memory[: self.used] = before[: self.used]
        self.memory[self.used : end] = data
        self.used = end

    def reserve(self, nbytes: int, data: npt.NDArray[np.uint8], room: Room) -> bool:
        """Allocates so many bytes before any are used; returns False if they do not fit."""
        if nbytes > len(self.memory):
            if nbytes > len(data) * room.fitting:
                return False
            self.memory = np.empty(nbytes, dtype=np.uint8)
        return True


def make_column(kind: pa.DataType) -> Column:
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
    return Chunks([])


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
