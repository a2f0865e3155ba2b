"""Owns Arrow columns becoming NumPy arrays, for transforms and for batches, and arrays becoming columns; never decodes,
never reorders.

Numbers come out as views of the received memory wherever the data lies in one piece.
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
Join = Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]]  # arrays (n, …), one behind another


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lists:
    """What becomes of columns of lists of numbers: one array where they are padded, or else are all of one length; with
    None, and where they are not named, they stay lists.
    """

    paddings: Paddings = dataclasses.field(default_factory=dict)
    lengths: Mapping[str, int | None] = dataclasses.field(default_factory=dict)


AS_LISTS = Lists()


def to_numpy(table: pa.Table, lists: Lists = AS_LISTS, join: Join = np.concatenate) -> NumpyBatch:
    """Turns a table of n rows into arrays by column.

    Numbers are (n,), fixed-size lists and lists of one length (n, k), fixed-shape tensors (n, …) with their axes in
    logical order, padded lists (n, longest); strings, binary, other lists and structs object arrays (n,). All of them
    can be changed in place: numbers are views of the table's memory where it lies in one piece, so that the table must
    have no other reader, and else put together by `join`. Nulls among numbers are refused.
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
        _refuse_nulls(name, joined)
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
            _refuse_nulls(name, flat)
        arrays.append(_writable(flat).reshape(len(chunk), *shape))  # (rows of the chunk, *shape)
    stored = arrays[0] if len(arrays) == 1 else join(arrays)
    return stored.transpose(0, *(axis + 1 for axis in axes))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _layout(kind: pa.DataType) -> tuple[tuple[int, ...], tuple[int, ...], pa.DataType | None]:
    """Shape of one value as it is stored, its axes in logical order, and the type of its numbers: None where a value is
    not dense numbers.
    """
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
    """Numbers as an array that may be changed in place, without a copy where Arrow needs none."""
    array: npt.NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    if array.flags.writeable or array.dtype == object:
        return array
    # Arrow lends read-only views only. DLPack passes the same memory on without that mark; it knows no dates.
    import torch.utils.dlpack  # here, for helpers that have no use for it

    plain = array.view(np.int64) if array.dtype.kind in "mM" else array
    return torch.utils.dlpack.from_dlpack(plain).numpy().view(array.dtype)


def _refuse_nulls(name: str, array: pa.Array) -> None:
    if array.null_count:
        raise DatasetError(
            f"column {name!r} has {array.null_count} nulls in this batch, which an array of {array.type} cannot carry; "
            f"the batch stops here rather than invent values. Filter them out (filter={f'`{name}` IS NOT NULL'!r}), or "
            "fill them in the dataset."
        )


def _padded(name: str, column: pa.ChunkedArray, value: int | float | None, length: int | None) -> npt.NDArray[Any]:
    lists = column.combine_chunks()
    _refuse_nulls(name, lists)
    flat = lists.flatten()
    _refuse_nulls(name, flat)
    if not pa.types.is_primitive(flat.type):
        raise DatasetError(f"column {name!r} holds lists of {flat.type}, which cannot be padded: pad lists of numbers.")
    lengths = np.diff(lists.offsets.to_numpy())
    if length is not None:
        other = np.flatnonzero(lengths != length)
        if len(other):
            raise DatasetError(
                f"column {name!r} has a list of {lengths[other[0]]} numbers, where the rows looked at on opening all "
                f"have {length}: a batch of both is no tensor. Pad them, pad_lists={{{name!r}: 0}}, or take them as "
                f"lists, pad_lists={{{name!r}: None}}."
            )
        return _writable(flat).reshape(len(lists), length)
    out = np.full((len(lists), lengths.max(initial=0)), value, dtype=flat.type.to_pandas_dtype())
    out[np.arange(out.shape[1])[None, :] < lengths[:, None]] = flat.to_numpy(zero_copy_only=False)
    return out


def list_lengths(table: pa.Table) -> dict[str, int | None]:
    """Columns of lists of numbers, and the length that all their lists have; None where they differ, or are empty."""
    found: dict[str, int | None] = {}
    for name in table.column_names:
        kind = table.schema.field(name).type
        if _is_list(kind) and pa.types.is_primitive(kind.value_type):
            lengths = pc.unique(pc.list_value_length(table[name])).to_pylist()  # None for a null
            found[name] = lengths[0] or None if len(lengths) == 1 else None
    return found


def is_dense(kind: pa.DataType) -> bool:
    """Whether all values are of one size."""
    return _layout(kind)[2] is not None


def to_arrow(array: npt.NDArray[Any]) -> pa.Array:
    """A column of n numbers or fixed-shape tensors from an array (n, …), in its memory where Arrow can have it so."""
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if array.ndim == 1:
        return flat
    lists = pa.FixedSizeListArray.from_arrays(flat, math.prod(array.shape[1:]))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, array.shape[1:]), lists)
