"""What works around Arrow: copies that are slow, hold too much memory, wait for the GIL, or give wrong values."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.memory.lending import Bytes, Lend, fresh_memory

Int64Array = npt.NDArray[np.int64]

_LONG_RUN = 4  # runs of adjacent rows with at least this mean length are taken as slices
# Wanted rows are slices of the rows that were read, not copies, from this share on, if runs of them have these bytes.
_SLICED, _SLICE_BYTES = 0.9, 128 << 10
_LARGE_VALUE_BYTES = 2 << 10  # from this mean size on, a Python loop copies values as fast as Arrow takes them
_CHUNK_BYTES = 1 << 30  # of values: a chunk of text, bytes or lists counts no more than 2 GiB


def own_memory(table: pa.Table) -> pa.Table:
    """Returns a copy of a table. `combine_chunks` alone would copy only columns of several chunks."""
    return pa.concat_tables([table, table.slice(0, 0)]).combine_chunks()


def slice_runs(table: pa.Table, places: Int64Array) -> list[pa.Table] | None:
    """Returns the rows at the indices `places`, int64, shape (k,), as slices of a table; None if runs are too short."""
    starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
    if len(places) < len(starts) * _LONG_RUN:
        return None
    lengths = np.diff(starts, append=len(places))
    return [table.slice(at, rows) for at, rows in zip(places[starts].tolist(), lengths.tolist(), strict=True)]


def wanted_rows(table: pa.Table, places: Int64Array | None) -> pa.Table:
    """Returns the rows at the indices `places`, int64, shape (k,), strictly ascending; all rows if that is None.

    Slices keep the other rows in memory, and each costs as much as a copy of 100 KiB.
    """
    if places is None:
        return table
    runs = slice_runs(table, places) if len(places) >= _SLICED * table.num_rows else None
    is_sliced = runs is not None and table.nbytes >= len(runs) * _SLICE_BYTES
    return pa.concat_tables(runs) if is_sliced else take_rows(table, places)


def take_rows(table: pa.Table, places: Int64Array, lend: Lend = fresh_memory) -> pa.Table:
    """Copies the rows at the indices `places`, int64, shape (k,); `lend` gives the memory of large values."""
    return pa.Table.from_arrays([_take(column, places, lend) for column in table.columns], schema=table.schema)


def _take(column: pa.ChunkedArray, places: Int64Array, lend: Lend) -> pa.Array | pa.ChunkedArray:
    if column.num_chunks == 1 and (taken := _take_as_bytes(column.chunk(0), places, lend)) is not None:
        return taken
    if not width_of(column.type) and len(places) and column.nbytes * np.bincount(places).max() > _CHUNK_BYTES:
        return _take_in_chunks(column, places)  # one chunk may not hold all values, and Arrow would wrap its offsets
    if _is_nested(column.type):
        column = own_memory(pa.table([column], [""]))[0]  # Arrow 26 takes wrong values from a slice of such a column
    return column.take(pa.array(places))


def _take_in_chunks(column: pa.ChunkedArray, places: Int64Array) -> pa.ChunkedArray:
    """Copies values one by one, into as many chunks as their bytes need."""
    values = [column.slice(place, 1).chunk(0) for place in places.tolist()]
    chunk_of = np.cumsum([value.nbytes for value in values]) // _CHUNK_BYTES
    groups = np.split(np.arange(len(values)), np.flatnonzero(np.diff(chunk_of)) + 1)
    chunks = [pa.concat_arrays([values[number] for number in group.tolist()]) for group in groups if len(group)]
    return pa.chunked_array(chunks, column.type)


def _take_as_bytes(array: pa.Array, places: Int64Array, lend: Lend) -> pa.Array | None:
    """Copies the values at the indices `places` as bytes, which is faster: Arrow copies lists element by element, and
    bytes into memory that grows. Returns None for arrays of other types, and if a value is null.
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        taken = _take_as_bytes(array.storage, places, lend)
        return taken if taken is None else pa.ExtensionArray.from_storage(kind, taken)
    if pa.types.is_fixed_size_list(kind) and (width := width_of(kind)):
        if (raw := raw_bytes(array)) is None:
            return None
        data = lend(len(places) * width)[: len(places) * width]
        copy_values(raw, width, places, data)
        return dense_array(kind, len(places), pa.py_buffer(data))
    return None if layout_of(kind) is None else _take_variable(array, places, lend)


def copy_values(raw: Bytes, width: int, places: Int64Array, into: Bytes) -> None:
    """Copies the values of `width` bytes at the indices `places`, int64, shape (k,), one after another."""
    # Without `mode`, NumPy would copy all once more before it writes to `out`.
    np.take(raw.reshape(-1, width), places, axis=0, out=into.reshape(-1, width), mode="clip")


def take_ranges(values: npt.NDArray[Any], begins: Int64Array, sizes: Int64Array, fills: Int64Array) -> npt.NDArray[Any]:
    """Copies ranges of numbers one after another; after each, any value comes as often as `fills` says.

    Arrow's take of bytes does this twice as fast as a join of slices, in one call without the GIL.
    """
    by_begin = np.argsort(begins)
    # The ranges, what lies between them, and the last value. If ranges overlap, nothing of negative size is taken.
    cuts = np.empty(2 * len(begins) + 2, dtype=np.int64)
    cuts[:-2:2] = begins[by_begin]
    cuts[1:-2:2] = cuts[:-2:2] + sizes[by_begin]
    cuts[-2:] = len(values) - 1, len(values)
    wanted = np.full(len(begins) + int(fills.sum()), 2 * len(begins), dtype=np.int64)
    wanted[(np.arange(len(begins)) + np.cumsum(fills) - fills)[by_begin]] = 2 * np.arange(len(begins))
    buffers = [None, pa.py_buffer(cuts * values.itemsize), pa.py_buffer(values)]
    taken = pa.Array.from_buffers(pa.large_binary(), len(cuts) - 1, buffers).take(pa.array(wanted))
    return buffer_bytes(taken.buffers()[2]).view(values.dtype)


def sum_lists(values: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Int64Array:
    """Returns the sum of each of n lists, which may be empty, int64 (n,).

    Args:
        values: The integers of all lists, one list after another.
        lengths: Their numbers of values, integers, (n,).
    """
    ends = np.append(0, np.cumsum(values, dtype=np.int64))
    return np.asarray(np.diff(ends[np.append(0, np.cumsum(lengths, dtype=np.int64))]), dtype=np.int64)


def fixed_lists(array: npt.NDArray[Any]) -> pa.Array:
    """Returns an array (n, length) as n lists of one length, without a copy."""
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Returns a column in one piece, without a copy if it is one."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _take_variable(array: pa.Array, places: Int64Array, lend: Lend) -> pa.Array | None:
    """Copies bytes, strings, or lists of any length. None if the array is empty or has a null, or if the rows have more
    bytes or elements than the offsets of this type can count.
    """
    layout = layout_of(array.type)
    if layout is None or array.null_count or not len(array):
        return None
    (offset, width), ends = layout, ends_of(array)
    raw = raw_bytes(array.values) if width else buffer_bytes(array.buffers()[2])
    if raw is None:
        return None
    size = max(1, width)
    starts, stops = ends[places].astype(np.int64) * size, ends[places + 1].astype(np.int64) * size
    bounds = np.concatenate([[0], np.cumsum(stops - starts)])
    if bounds[-1] // size > np.iinfo(offset).max:
        return None
    if bounds[-1] < len(places) * _LARGE_VALUE_BYTES:
        cuts = [None, pa.py_buffer(ends.astype(np.int64) * size), pa.py_buffer(raw)]
        taken = pa.Array.from_buffers(pa.large_binary(), len(array), cuts).take(pa.array(places))
        data = buffer_bytes(taken.buffers()[2])
    else:
        data = lend(int(bounds[-1]))[: int(bounds[-1])]
        into, source = data.data, raw.data
        for at, start, stop in zip(bounds[:-1].tolist(), starts.tolist(), stops.tolist(), strict=True):
            into[at : at + stop - start] = source[start:stop]
    return variable_array(array.type, len(places), (bounds // size).astype(offset).view(np.uint8), data)


def _is_nested(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _is_nested(kind.storage_type)
    return bool(pa.types.is_fixed_size_list(kind) and pa.types.is_fixed_size_list(kind.value_type))


class TableSize:
    """Computes the bytes of tables of one schema, without the bits that mark nulls. If all rows have one size, it does
    without `nbytes`, which releases the GIL for each array, and waits for it each time.
    """

    def __init__(self) -> None:
        self._row_bits: int | None = None  # 0 if rows differ in size; None before the first table

    def of(self, table: pa.Table) -> int:
        """Returns the bytes of a table."""
        if self._row_bits is None:
            widths = [_bits(kind) for kind in table.schema.types]
            self._row_bits = sum(widths) if all(widths) else 0
        return table.num_rows * self._row_bits // 8 if self._row_bits else int(table.nbytes)


def width_of(kind: pa.DataType) -> int:
    """Returns the bytes of a value; 0 if values differ in size, or do not have whole bytes, as lists of bools."""
    inner = kind
    while isinstance(inner, pa.BaseExtensionType) or pa.types.is_fixed_size_list(inner):
        inner = inner.storage_type if isinstance(inner, pa.BaseExtensionType) else inner.value_type
    return _bits(kind) // 8 if _bits(inner) % 8 == 0 else 0


def _bits(kind: pa.DataType) -> int:
    """Returns the bits of a value; 0 if values differ in size."""
    if isinstance(kind, pa.BaseExtensionType):
        return _bits(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _bits(kind.value_type)
    return int(kind.bit_width) if pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind) else 0


def buffer_bytes(buffer: pa.Buffer | None) -> Bytes:
    """Returns the bytes of a buffer."""
    return np.frombuffer(buffer if buffer is not None else b"", dtype=np.uint8)


def raw_bytes(array: pa.Array) -> Bytes | None:
    """Returns the bytes of an array whose values have one size; None if a value is null."""
    if array.null_count:
        return None
    if isinstance(array.type, pa.BaseExtensionType):
        return raw_bytes(array.storage)
    if pa.types.is_fixed_size_list(array.type):
        return raw_bytes(values_of(array))
    width = array.type.bit_width // 8
    return buffer_bytes(array.buffers()[1])[array.offset * width : (array.offset + len(array)) * width]


def values_of(lists: pa.FixedSizeListArray) -> pa.Array:
    """Returns the values of lists without nulls. Unlike `flatten`, this need not release the GIL and wait for it."""
    size = lists.type.list_size
    return lists.values.slice(lists.offset * size, len(lists) * size)


def dense_array(kind: pa.DataType, rows: int, data: pa.Buffer) -> pa.Array:
    """Returns an array of values of one size whose memory is `data`."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, dense_array(kind.storage_type, rows, data))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(dense_array(kind.value_type, rows * kind.list_size, data), type=kind)
    return pa.Array.from_buffers(kind, rows, [None, data])


def with_nulls(array: pa.Array, valid: npt.NDArray[np.bool_]) -> pa.Array:
    """Returns values of one size without nulls, but null where `valid`, bool (n,), is False; copies no value."""
    if valid.all():
        return array
    if isinstance(array.type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(array.type, with_nulls(array.storage, valid))
    before = np.zeros(array.offset, dtype=np.bool_)
    bits = pa.py_buffer(np.packbits(np.concatenate([before, valid]), bitorder="little"))
    if pa.types.is_fixed_size_list(array.type):
        return pa.Array.from_buffers(array.type, len(array), [bits], offset=array.offset, children=[array.values])
    return pa.Array.from_buffers(array.type, len(array), [bits, array.buffers()[1]], offset=array.offset)


def without_nulls(array: pa.Array) -> pa.Array:
    """Returns values of one size, those that are null as what lies in the memory in their place; copies no value."""
    if isinstance(array.type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(array.type, without_nulls(array.storage))
    if pa.types.is_fixed_size_list(array.type):
        values, size = array.values, array.type.list_size
        values = values.slice(array.offset * size, len(array) * size)
        return pa.FixedSizeListArray.from_arrays(values, type=array.type)
    return pa.Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], offset=array.offset)


def layout_of(kind: pa.DataType) -> tuple[np.dtype[Any], int] | None:
    """Returns how values of any length are laid out: the dtype of their offsets; and the bytes of an element, 0 for
    bytes and strings. None for other types.
    """
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return np.dtype(np.int32), 0
    if pa.types.is_large_binary(kind) or pa.types.is_large_string(kind):
        return np.dtype(np.int64), 0
    is_list, is_large = pa.types.is_list(kind), pa.types.is_large_list(kind)
    width = width_of(kind.value_type) if is_list or is_large else 0
    return (np.dtype(np.int64 if is_large else np.int32), width) if width else None


def ends_of(array: pa.Array) -> npt.NDArray[Any]:
    """Returns the offsets at which the values of k rows begin, and the end of the last value, shape (k + 1,)."""
    layout = layout_of(array.type)
    offset = np.dtype(np.int32) if layout is None else layout[0]
    return np.frombuffer(array.buffers()[1], offset, len(array) + 1, array.offset * offset.itemsize)


def variable_array(kind: pa.DataType, rows: int, ends: Bytes, data: Bytes) -> pa.Array:
    """Returns an array of `rows` values of any length whose memory is `ends` and `data`."""
    offset, width = layout_of(kind) or (np.dtype(np.int32), 0)
    if not width:
        return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(ends), pa.py_buffer(data)])
    count = int(np.frombuffer(ends, offset, rows + 1)[-1])
    values = dense_array(kind.value_type, count, pa.py_buffer(data))
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(ends)], children=[values])
