"""Owns the conversion of Arrow columns to NumPy arrays, for transforms and for batches, and back; never decodes, never
reorders.

Arrays of numbers are views of the received memory wherever the data is in one piece.
"""

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
# How lists of numbers are converted, by column: padded with a value, of one length, or left as they are (None).
Lists = Mapping[str, Padding | int | None]
Join = Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]]  # joins arrays (n, …) along their first axis

AS_LISTS: Lists = {}
_LISTS = pa.ListType, pa.LargeListType
_INSIDE = " inside its lists"


def to_numpy(table: pa.Table, lists: Lists = AS_LISTS, join: Join = np.concatenate) -> NumpyBatch:
    """Converts a table of n rows to arrays by column.

    Numbers become (n,), fixed-size lists and lists of one length (n, k), fixed-shape tensors (n, …) with their axes in
    logical order, padded lists (n, longest); strings, binary, other lists and structs object arrays (n,). All arrays
    are writable: numbers are views of the table's memory where that is in one piece, so the table must have no other
    reader; chunks are joined by `join`.

    Raises:
        DatasetError: For nulls among numbers, and a list of another length than its column's one.
    """
    return {name: _numpy_column(name, table[name], lists.get(name), join) for name in table.column_names}


def _numpy_column(name: str, column: pa.ChunkedArray, padding: Padding | int | None, join: Join) -> npt.NDArray[Any]:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _numpy_column(name, column.cast(kind.value_type), padding, join)
    if _is_number_list(kind):
        return _number_lists(name, column.combine_chunks(), padding)
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


def _number_lists(name: str, lists: pa.Array, padding: Padding | int | None) -> npt.NDArray[Any]:
    if padding is not None:
        _refuse_nulls(name, lists)
    flat = lists.flatten()
    _refuse_nulls(name, flat, _INSIDE)
    values, lengths = _writable(flat), np.diff(lists.offsets.to_numpy())
    if padding is None:
        valid = lists.is_valid().to_numpy(zero_copy_only=False)
        lengths = lengths * valid  # a null may have numbers, which are not among the values
        ends = lengths.cumsum()
        rows = zip((ends - lengths).tolist(), ends.tolist(), valid.tolist(), strict=True)
        return np.fromiter((values[start:end] if given else None for start, end, given in rows), dtype=object)
    if isinstance(padding, int):
        other = np.flatnonzero(lengths != padding)
        if len(other):
            raise DatasetError(
                f"column {name!r} has a list of {lengths[other[0]]} numbers, while all rows sampled at the opening "
                f"have {padding}: a batch of both is no tensor. Pad them, pad_lists={{{name!r}: 0}}, or take them as "
                f"lists, pad_lists={{{name!r}: None}}."
            )
        return values.reshape(len(lists), padding)
    out = np.full((len(lists), lengths.max(initial=0)), padding, dtype=values.dtype)
    out[np.arange(out.shape[1])[None, :] < lengths[:, None]] = values
    return out


def _is_number_list(kind: pa.DataType) -> bool:
    return isinstance(kind, _LISTS) and pa.types.is_primitive(kind.value_type)


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


def list_lengths(table: pa.Table) -> dict[str, int | None]:
    """The one length of all lists, by column of lists of numbers; None where lengths differ or are 0."""
    found: dict[str, int | None] = {}
    for field in table.schema:
        if _is_number_list(field.type):
            lengths = pc.unique(pc.list_value_length(table[field.name])).to_pylist()  # None for a null
            found[field.name] = lengths[0] or None if len(lengths) == 1 else None
    return found


def list_dtypes(schema: pa.Schema) -> dict[str, np.dtype[Any]]:
    """The dtype of the values, by column of lists that can be padded."""
    lists = [field for field in schema if _is_number_list(field.type)]
    found = {field.name: _writable(pa.array([], field.type.value_type)).dtype for field in lists}
    return {name: dtype for name, dtype in found.items() if not dtype.hasobject}  # times of a day are objects


def as_padding(value: Any, dtype: np.dtype[Any]) -> Padding | None:
    """Converts a number to a value of a dtype, shape (); None where the dtype cannot hold it.

    Fractions may be rounded. A whole number must not change, and nothing may become a bool, an infinity or a zero.
    """
    try:
        with np.errstate(all="ignore"):
            given = np.asarray(value)
            held = given.astype(dtype)
            if given.ndim or (isinstance(value, bool | np.bool_) and dtype.kind != "b"):
                return None
            if dtype.kind not in "mM":
                kept = is_kept(given.item(), held.item())
            elif given.dtype.kind == dtype.kind:
                kept = bool(held == given) or bool(np.isnat(given))
            else:  # a number in the column's unit
                kept = given.dtype.kind in "iu" and bool(held.astype(np.int64) == given)
    except (TypeError, ValueError, OverflowError):
        return None
    return held if kept else None


def is_kept(given: Any, held: Any) -> bool:
    """Whether another dtype holds a number: the same number, or for fractions the nearest float."""
    number = given if isinstance(given, int) else float(given)
    # A float beyond 2**53 has no fraction, but is no count either: -1e30, for example.
    is_whole = isinstance(number, int) or (abs(number) < 2**53 and number.is_integer())
    if isinstance(held, float) and not is_whole:
        return all(test(number) == test(held) for test in (math.isnan, math.isinf, bool))
    return bool(held == given)


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
    if isinstance(kind, _LISTS) and is_dense(kind.value_type):
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
    return kind in (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())


def to_arrow(array: npt.NDArray[Any]) -> pa.Array:
    """Converts an array (n, …) to a column of n numbers or fixed-shape tensors, in the same memory where possible."""
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if array.ndim == 1:
        return flat
    lists = pa.FixedSizeListArray.from_arrays(flat, math.prod(array.shape[1:]))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, array.shape[1:]), lists)
