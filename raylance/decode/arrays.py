"""Owns the conversion of Arrow columns to NumPy arrays, for transforms and for batches, and back; never decodes, never
reorders.

Arrays of numbers are views of the received memory wherever the data is in one piece.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raylance.errors import DatasetError

NumpyBatch = dict[str, npt.NDArray[Any]]
Paddings = Mapping[str, int | float | None]
Padding = npt.NDArray[Any]  # a value in the dtype of the lists, shape ()
Join = Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]]  # joins arrays (n, …) along their first axis


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """How columns of lists of numbers are converted: padded, or of one length, to one array; else they stay lists.

    Attributes:
        paddings: The value to pad with, by column; None leaves lists.
        lengths: The one length of all lists, by column; None leaves lists.
    """

    paddings: Mapping[str, Padding | None] = dataclasses.field(default_factory=dict)
    lengths: Mapping[str, int | None] = dataclasses.field(default_factory=dict)


AS_LISTS = Lists()
_INSIDE = " inside its lists"


def to_numpy(table: pa.Table, lists: Lists = AS_LISTS, join: Join = np.concatenate) -> NumpyBatch:
    """Converts a table of n rows to arrays by column.

    Numbers become (n,), fixed-size lists and lists of one length (n, k), fixed-shape tensors (n, …) with their axes in
    logical order, padded lists (n, longest); strings, binary, other lists and structs object arrays (n,). All arrays
    are writable: numbers are views of the table's memory where that is in one piece, so the table must have no other
    reader; chunks are joined by `join`.

    Raises:
        DatasetError: For nulls among numbers, lists that cannot be padded, and a list of another length.
    """
    return {name: _numpy_column(name, table[name], lists, join) for name in table.column_names}


def _numpy_column(name: str, column: pa.ChunkedArray, lists: Lists, join: Join) -> npt.NDArray[Any]:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _numpy_column(name, column.cast(kind.value_type), lists, join)
    padding = lists.paddings.get(name)
    length = None if name in lists.paddings else lists.lengths.get(name)
    if _is_list(kind) and (padding is not None or length is not None):
        return _padded(name, column, padding, length)
    if _is_list(kind) and pa.types.is_primitive(kind.value_type):
        joined = column.combine_chunks().flatten()
        _refuse_nulls(name, joined, _INSIDE)
        values, lengths = _writable(joined), pc.list_value_length(column).fill_null(0).to_numpy()
        ends, valid = lengths.cumsum(), column.is_valid().to_pylist()
        rows = zip((ends - lengths).tolist(), ends.tolist(), valid, strict=True)
        return np.fromiter((values[start:end] if given else None for start, end, given in rows), dtype=object)
    shape, axes, leaf = _layout(kind)
    if leaf is None:
        return np.fromiter(column.to_pylist(), dtype=object)
    arrays = [] if column.num_chunks else [_writable(pa.array([], leaf)).reshape(0, *shape)]
    for chunk in column.chunks:
        flat: pa.Array = chunk
        _refuse_nulls(name, flat)
        while not pa.types.is_primitive(flat.type):
            flat = flat.storage if isinstance(flat.type, pa.BaseExtensionType) else flat.flatten()
            _refuse_nulls(name, flat, _INSIDE)
        arrays.append(_writable(flat).reshape(len(chunk), *shape))  # (rows of the chunk, *shape)
    stored = arrays[0] if len(arrays) == 1 else join(arrays)
    return stored.transpose(0, *(axis + 1 for axis in axes))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _layout(kind: pa.DataType) -> tuple[tuple[int, ...], tuple[int, ...], pa.DataType | None]:
    """Stored shape of one value, its axes in logical order, and the type of its numbers; None if it is no array."""
    if isinstance(kind, pa.FixedShapeTensorType):
        axes = range(len(kind.shape)) if kind.permutation is None else kind.permutation
        return tuple(kind.shape), tuple(axes), kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        return _layout(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        shape, inner, leaf = _layout(kind.value_type)
        return (kind.list_size, *shape), (0, *(axis + 1 for axis in inner)), leaf
    dense = pa.types.is_primitive(kind) and not pa.types.is_decimal(kind)
    return (), (), kind if dense else None


def _writable(flat: pa.Array) -> npt.NDArray[Any]:
    """Numbers as a writable array, without a copy where Arrow needs none."""
    array: npt.NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    if array.flags.writeable or array.dtype == object:
        return array
    # Arrow gives read-only views. DLPack gives the same memory without that mark; it has no dates.
    import torch.utils.dlpack  # imported here, because some helpers do not need torch

    plain = array.view(np.int64) if array.dtype.kind in "mM" else array
    return torch.utils.dlpack.from_dlpack(plain).numpy().view(array.dtype)


def _refuse_nulls(name: str, array: pa.Array, where: str = "") -> None:
    if array.null_count:
        fix = f"Filter them out (filter={f'`{name}` IS NOT NULL'!r}), or fill them in the dataset."
        if where:
            fix = "No filter on the column finds these: fill them in the dataset, or leave their rows out of it."
        raise DatasetError(
            f"column {name!r} has {array.null_count} nulls{where} in this batch, which an array of {array.type} cannot "
            f"hold; the epoch stops here, because no value may be invented. {fix}"
        )


def _padded(name: str, column: pa.ChunkedArray, value: Padding | None, length: int | None) -> npt.NDArray[Any]:
    lists = column.combine_chunks()
    _refuse_nulls(name, lists)
    flat = lists.flatten()
    _refuse_nulls(name, flat, _INSIDE)
    if not pa.types.is_primitive(flat.type):
        raise DatasetError(f"column {name!r} holds lists of {flat.type}, which cannot be padded: pad lists of numbers.")
    lengths = np.diff(lists.offsets.to_numpy())
    if length is not None:
        other = np.flatnonzero(lengths != length)
        if len(other):
            raise DatasetError(
                f"column {name!r} has a list of {lengths[other[0]]} numbers, while all rows sampled at the opening "
                f"have {length}: a batch of both is no tensor. Pad them, pad_lists={{{name!r}: 0}}, or take them as "
                f"lists, pad_lists={{{name!r}: None}}."
            )
        return _writable(flat).reshape(len(lists), length)
    out = np.full((len(lists), lengths.max(initial=0)), value, dtype=_writable(flat[:0]).dtype)
    out[np.arange(out.shape[1])[None, :] < lengths[:, None]] = flat.to_numpy(zero_copy_only=False)
    return out


def list_lengths(table: pa.Table) -> dict[str, int | None]:
    """The one length of all lists, by column of lists of numbers; None where lengths differ or are 0."""
    found: dict[str, int | None] = {}
    for name in table.column_names:
        kind = table.schema.field(name).type
        if _is_list(kind) and pa.types.is_primitive(kind.value_type):
            lengths = pc.unique(pc.list_value_length(table[name])).to_pylist()  # None for a null
            found[name] = lengths[0] or None if len(lengths) == 1 else None
    return found


def list_dtypes(schema: pa.Schema) -> dict[str, np.dtype[Any]]:
    """The dtype of the values, by column of lists that can be padded."""
    lists = [field for field in schema if _is_list(field.type) and pa.types.is_primitive(field.type.value_type)]
    found = {field.name: _writable(pa.array([], field.type.value_type)).dtype for field in lists}
    return {name: dtype for name, dtype in found.items() if not dtype.hasobject}  # times of a day are objects


def as_padding(value: Any, dtype: np.dtype[Any]) -> Padding | None:
    """Converts a number to a value of a dtype, shape (); None where the dtype cannot hold it.

    Fractions may be rounded. A whole number must not change, and nothing may become a bool, an infinity or a zero.
    """
    if isinstance(value, bool | np.bool_) and dtype.kind != "b":
        return None
    try:
        with np.errstate(all="ignore"):
            given = np.asarray(value)
            held = given.astype(dtype)
            if dtype.kind in "mM":  # a time, or a number in the column's unit
                whole = held if given.dtype.kind == dtype.kind else held.astype(np.int64)
                return held if given.dtype.kind in ("i", "u", dtype.kind) and _is_one(whole, given) else None
            kept = is_kept(given.item(), held.item())
    except (TypeError, ValueError, OverflowError):
        return None
    return held if given.ndim == 0 and kept else None


def is_kept(given: Any, held: Any) -> bool:
    """Whether another dtype holds a number: the same number, or for fractions the nearest float."""
    number = given if isinstance(given, int) else float(given)
    # A float beyond 2**53 has no fraction, but is no count either: -1e30, for example.
    is_whole = isinstance(number, int) or (abs(number) < 2**53 and number.is_integer())
    if isinstance(held, float) and not is_whole:
        return _size(number) == _size(held)
    return bool(held == given)


def _is_one(held: npt.NDArray[Any], given: npt.NDArray[Any]) -> bool:
    """Whether `given` is one value and equals `held`; NaT equals NaT."""
    return given.ndim == 0 and bool((held == given) | (given.dtype.kind in "mM" and np.isnat(given)))


def _size(number: float) -> tuple[bool, bool, bool]:
    return math.isnan(number), math.isinf(number), number == 0


def is_dense(kind: pa.DataType) -> bool:
    """Whether all values of a type have one size."""
    return _layout(kind)[2] is not None


def blank_row(table: pa.Table) -> pa.Table:
    """One row of zeros, empty strings and None, of the schema of a table that has a row; lists of numbers are as long
    as in its first row.
    """
    return pa.Table.from_arrays([_blank(column[:1]) for column in table.columns], schema=table.schema)


def _blank(first: pa.ChunkedArray) -> pa.Array:
    kind = first.type
    if is_dense(kind):
        return _zeros(kind, 1)
    if _is_list(kind) and is_dense(kind.value_type):
        length = pc.list_value_length(first)[0].as_py() or 0
        ends = pa.array([0, length], pa.int64() if pa.types.is_large_list(kind) else pa.int32())
        return pa.Array.from_buffers(kind, 1, [None, ends.buffers()[1]], children=[_zeros(kind.value_type, length)])
    return pa.array([b""]).cast(kind) if is_bytes(kind) else pa.nulls(1, kind)


def _zeros(kind: pa.DataType, rows: int) -> pa.Array:
    """Zeros of a dense type."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _zeros(kind.storage_type, rows))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(_zeros(kind.value_type, rows * kind.list_size), type=kind)
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(bytes(-(-rows * kind.bit_width // 8)))])


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values become Python bytes or strings."""
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
    return any(test(kind) for test in tests)


def to_arrow(array: npt.NDArray[Any]) -> pa.Array:
    """Converts an array (n, …) to a column of n numbers or fixed-shape tensors, in the same memory where possible."""
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if array.ndim == 1:
        return flat
    lists = pa.FixedSizeListArray.from_arrays(flat, math.prod(array.shape[1:]))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, array.shape[1:]), lists)
