"""Converts Arrow columns to NumPy arrays and back. Arrays of numbers are views of the Arrow memory if possible."""

import contextlib
import dataclasses
import importlib
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raylance.arguments import check_flag, check_integer
from raylance.errors import ConfigError, DatasetError, filter_of_nulls
from raylance.memory.arrow import values_of

NumpyBatch = dict[str, npt.NDArray[Any]]
BFLOAT16 = np.dtype(np.uint16, metadata={"bfloat16": True})
"""The dtype of bfloat16 as bits: NumPy itself has no such number."""

Join = Callable[[list[npt.NDArray[Any]]], npt.NDArray[Any]]  # joins arrays (n, …) along their first axis


@dataclasses.dataclass(frozen=True, slots=True)
class Pad:
    """Pads the lists of a column to one length. A column `…_length`, int64 (n,), says how many values of each row are
    not padding.

    If `length` is given, the padded arrays are the same for every number of ranks; otherwise they depend on the rows of
    a rank's batch.

    Attributes:
        value: The number to pad with; the dtype of the lists must hold it.
        length: The padded length; None for the longest list of the rank's batch.
        multiple: Without `length`, the longest length is rounded up to a multiple of this number, so that compilers and
            allocators see few shapes.
        truncate: Whether lists longer than `length` are cut off to this length. If False, such a list is an error.
        lengths: Whether batches have the column `…_length`. A number in place of a `Pad`, `pad_lists={"tokens": 0}`, is
            short for `Pad(0, lengths=False)`.
    """

    value: float | npt.NDArray[Any] = 0
    _: dataclasses.KW_ONLY
    length: int | None = None
    multiple: int = 1
    truncate: bool = False
    lengths: bool = True

    def __post_init__(self) -> None:
        if self.length is not None:
            check_integer("Pad(length=…)", self.length, 1)
        check_integer("Pad(multiple=…)", self.multiple, 1)
        if not is_one_number(self.value):
            raise ConfigError(f"Pad(value={self.value!r}): give the number to pad with.")
        check_flag("Pad(truncate=…)", self.truncate)
        check_flag("Pad(lengths=…)", self.lengths)
        if self.length is not None and self.multiple != 1:
            raise ConfigError(f"{self!r}: length= is the padded length already. Leave multiple= out.")
        if self.truncate and self.length is None:
            raise ConfigError(f"{self!r}: without length=, no list is too long. Leave truncate= out, or give length=.")


def is_one_number(value: Any) -> bool:
    """Whether a value can be converted to a number, as arrays and tensors of shape () can."""
    return hasattr(value, "__float__") and not isinstance(value, type)


Jagged = Literal["jagged"]
Flat = Literal["flat"]
Paddings = Mapping[str, Pad | int | float | Jagged | Flat | None]
Shape = tuple[int, ...]
# How the lists of a column are converted. Pad: they are padded with a value of shape () in their dtype. int: all have
# this length and become one array. Shape: so do lists of lists, whose lengths these are from the outermost to the
# innermost. "jagged": they become values and offsets; "flat": values and lengths; "values": values alone. None: they
# stay lists.
ListForm = Pad | int | Shape | Jagged | Flat | Literal["values"] | None
Lists = Mapping[str, ListForm]

AS_LISTS: Lists = {}
LENGTH, OFFSETS = "_length", "_offsets"
"""Suffixes of the columns that hold the lengths and the offsets of another column's lists."""

_LISTS = pa.ListType, pa.LargeListType
_INSIDE = " inside its lists"


def to_numpy(
    table: pa.Table, lists: Lists = AS_LISTS, join: Join = np.concatenate, *, as_bits: bool = False
) -> NumpyBatch:
    """Converts a table of n rows to arrays by column.

    Numbers become (n,). Fixed-size lists and lists of one length become (n, k), lists of lists of one shape (n, k, m).
    Fixed-shape tensors become (n, …) with their axes in logical order; in lists of them, the axis of the list comes
    first. Strings, binary, other lists and structs become object arrays (n,). Padded lists become (n, length, …),
    followed by a column `…_length`, int64 (n,), if `Pad.lengths` is True. Jagged lists become the values of all rows
    (sum, …), and a column `…_offsets`, int64 (n + 1,); flat ones the same values, and a column `…_length`, int64 (n,).

    Columns of bfloat16 become arrays of `ml_dtypes.bfloat16`, or uint16 with `as_bits`. All arrays are writable. Arrays
    of numbers are views of the table's memory if the column is in one piece, so nothing else may read the table; `join`
    joins the chunks of other columns.

    Raises DatasetError if there are nulls among numbers, or a list does not have the length of its column, or is too
    long; ConfigError if a column is bfloat16, and ml_dtypes is not installed.
    """
    batch: NumpyBatch = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        batch |= _numpy_columns(name, column, lists.get(name), join, as_bits)
    return batch


def to_sliceable(table: pa.Table, lists: Lists = AS_LISTS, *, as_bits: bool = False) -> NumpyBatch:
    """Converts like `to_numpy`, but only columns whose rows can be converted by themselves, and which are in one piece:
    numbers, tensors, and lists of one length. Columns for which `to_numpy` raises an error are left out.
    """
    batch: NumpyBatch = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        how = lists.get(name)
        if column.num_chunks == 1 and (is_dense(column.type) or isinstance(how, int | tuple)):
            with contextlib.suppress(DatasetError):
                batch |= _numpy_columns(name, column, how, np.concatenate, as_bits)
    return batch


def _numpy_columns(name: str, column: pa.ChunkedArray, how: ListForm, join: Join, as_bits: bool) -> NumpyBatch:
    if pa.types.is_dictionary(column.type):
        return _numpy_columns(name, column.cast(column.type.value_type), how, join, as_bits)
    if isinstance(how, tuple):
        batch = {name: _nested_lists(name, column.combine_chunks(), how, join)}
    elif is_dense_list(column.type):
        batch = _dense_lists(name, column.combine_chunks(), how, join)
    else:
        batch = {name: _numpy_column(name, column, join)}
    if not as_bits and holds_bfloat16(column.type):
        dtype, array = numpy_bfloat16(name), batch[name]
        if array.dtype == object:
            batch[name] = np.fromiter((each if each is None else each.view(dtype) for each in array), dtype=object)
        else:
            batch[name] = array.view(dtype)
    return batch


def holds_bfloat16(kind: pa.DataType) -> bool:
    """Whether values of a type are Lance's bfloat16, or lists of it."""
    while isinstance(kind, (*_LISTS, pa.FixedSizeListType)):
        kind = kind.value_type
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "lance.bfloat16"


def with_bfloat16(table: pa.Table) -> pa.Table:
    """Gives columns of bfloat16 their type. In a helper without Lance, they come as bytes, with the type's name."""
    if not any(map(_is_unknown_bfloat16, table.schema)):
        return table
    importlib.import_module("lance.arrow")  # registers the type; other helpers do without Lance
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def _is_unknown_bfloat16(field: pa.Field) -> bool:
    kind, about = field.type, field.metadata or {}
    if isinstance(kind, pa.BaseExtensionType):
        return False
    inside = (kind.field(place) for place in range(kind.num_fields))
    return about.get(b"ARROW:extension:name") == b"lance.bfloat16" or any(map(_is_unknown_bfloat16, inside))


def numpy_bfloat16(name: str) -> np.dtype[Any]:
    """Returns NumPy's dtype of bfloat16 for a column of this name. Raises ConfigError if ml_dtypes is not installed."""
    try:
        dtype: np.dtype[Any] = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError as error:
        raise ConfigError(
            f"column {name!r} is bfloat16, for which NumPy has no type by itself. No batch is made of it. pip install "
            "ml_dtypes, iterate with iter_torch_batches, or leave the column out of columns=."
        ) from error
    return dtype


def _numpy_column(name: str, column: pa.ChunkedArray, join: Join, where: str = "") -> npt.NDArray[Any]:
    shape, axes, leaf = _layout(column.type)
    if leaf is None:
        return np.fromiter(column.to_pylist(), dtype=object)
    arrays = [] if column.num_chunks else [_writable(pa.array([], leaf)).reshape(0, *shape)]
    for chunk in column.chunks:
        flat: pa.Array = chunk
        _refuse_nulls(name, flat, where)
        while not pa.types.is_primitive(flat.type):
            flat = _inner(flat)
            _refuse_nulls(name, flat, _INSIDE)
        arrays.append(_writable(flat).reshape(len(chunk), *shape))  # (rows of the chunk, *shape)
    stored = arrays[0] if len(arrays) == 1 else join(arrays)
    return stored.transpose(0, *(axis + 1 for axis in axes))


def _inner(array: pa.Array) -> pa.Array:
    if not isinstance(array.type, pa.BaseExtensionType):
        return values_of(array)
    storage = array.storage
    if not holds_bfloat16(array.type):
        return storage
    return pa.Array.from_buffers(pa.uint16(), len(storage), storage.buffers(), storage.null_count, storage.offset)


def _dense_lists(name: str, lists: pa.Array, how: ListForm, join: Join) -> NumpyBatch:
    """Converts a column of lists to arrays by column name; `how` as in `Lists`."""
    if how is not None:
        _refuse_nulls(name, lists)
    flat = lists.flatten()
    if is_dense(flat.type):
        values = _numpy_column(name, pa.chunked_array([flat]), join, _INSIDE)
    else:  # decimals and times of day are objects
        _refuse_nulls(name, flat, _INSIDE)
        values = _writable(flat)
    lengths = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    if how is None:
        valid = lists.is_valid().to_numpy(zero_copy_only=False)
        lengths = lengths * valid  # a null may have a length, but its numbers are not in `values`
        ends = lengths.cumsum()
        rows = zip((ends - lengths).tolist(), ends.tolist(), valid.tolist(), strict=True)
        return {name: np.fromiter((values[start:end] if given else None for start, end, given in rows), dtype=object)}
    if how in ("flat", "values"):
        return {name: values} | ({name + LENGTH: lengths} if how == "flat" else {})
    if how == "jagged":
        return {name: values, name + OFFSETS: np.concatenate([[0], lengths.cumsum()])}
    if isinstance(how, Pad):
        padded = {name: _padded(name, values, lengths, how)}
        return padded | {name + LENGTH: lengths.clip(max=padded[name].shape[1])} if how.lengths else padded
    other = np.flatnonzero(lengths != how)
    if len(other):
        raise DatasetError(
            f"column {name!r} has a list of {lengths[other[0]]} numbers, while all rows sampled at the opening "
            f"have {how}: a batch of both is not a tensor. Pad them, pad_lists={{{name!r}: 0}}, or take them as "
            f"lists, pad_lists={{{name!r}: None}}."
        )
    return {name: values.reshape(len(lists), cast("int", how), *values.shape[1:])}


def _nested_lists(name: str, lists: pa.Array, shape: Shape, join: Join) -> npt.NDArray[Any]:
    """Converts lists of lists whose lengths are those of a shape."""
    levels, flat = _levels(name, lists)
    for lengths, size in zip(levels, shape, strict=True):
        other = np.flatnonzero(lengths != size)
        if len(other):
            raise DatasetError(
                f"column {name!r} has a list of {lengths[other[0]]} values inside its lists, while all rows sampled at "
                f"the opening have the shape {shape}: a batch of both is not a tensor. Take them as lists, "
                f"pad_lists={{{name!r}: None}}, or leave such rows out with filter=."
            )
    values = _numpy_column(name, pa.chunked_array([flat]), join, _INSIDE)
    return values.reshape(len(lists), *shape, *values.shape[1:])


def _levels(name: str, lists: pa.Array) -> tuple[list[npt.NDArray[np.int64]], pa.Array]:
    """Returns the lengths of lists of lists, for each level from the outermost to the innermost, and the values in the
    innermost ones. Raises DatasetError if there are nulls.
    """
    levels: list[npt.NDArray[np.int64]] = []
    while not is_dense(lists.type):
        _refuse_nulls(name, lists, _INSIDE if levels else "")
        if pa.types.is_fixed_size_list(lists.type):
            levels.append(np.full(len(lists), lists.type.list_size))
            lists = values_of(lists)
        else:
            levels.append(np.diff(lists.offsets.to_numpy()).astype(np.int64))
            lists = lists.flatten()
    return levels, lists


def _padded(name: str, values: npt.NDArray[Any], lengths: npt.NDArray[np.int64], pad: Pad) -> npt.NDArray[Any]:
    longest = int(lengths.max(initial=0))
    if pad.length is None:
        length = -(-longest // pad.multiple) * pad.multiple
    else:
        length = pad.length
        if longest > length and not pad.truncate:
            raise DatasetError(
                f"column {name!r} has a list of {longest:,} values, and pad_lists= pads to {length:,}: nothing may be "
                f"cut off unasked, so the epoch stops here. Pad to {longest:,} or more, cut longer lists off with "
                f"Pad(…, length={length}, truncate=True), or leave such rows out with filter=."
            )
    out = np.full((len(lengths), length, *values.shape[1:]), pad.value, dtype=values.dtype)
    places = np.arange(length)[None, :]
    kept = values
    if longest > length:
        starts = lengths.cumsum() - lengths
        kept = values[np.arange(len(values)) - np.repeat(starts, lengths) < length]
    out[places < lengths[:, None]] = kept
    return out


def is_dense_list(kind: pa.DataType) -> bool:
    """Whether values of a type are lists of any length, of numbers or of tensors."""
    return isinstance(kind, _LISTS) and (pa.types.is_primitive(kind.value_type) or is_dense(kind.value_type))


def is_nested_list(kind: pa.DataType) -> bool:
    """Whether values of a type are lists of lists of any length, of numbers or of tensors."""
    leaf = kind
    while isinstance(leaf, (*_LISTS, pa.FixedSizeListType)) and not is_dense(leaf):
        leaf = leaf.value_type
    return is_dense(leaf) and not is_dense(kind) and not is_dense_list(kind)


def shape_of(kind: pa.DataType) -> tuple[int, ...]:
    """Returns the stored shape of one value of a type; () for a number, or for a type that is not a tensor."""
    return _layout(kind)[0]


def _layout(kind: pa.DataType) -> tuple[tuple[int, ...], tuple[int, ...], pa.DataType | None]:
    """Returns the stored shape of one value, its axes in logical order, and its number type, None if it has none."""
    if isinstance(kind, pa.FixedShapeTensorType):
        axes = range(len(kind.shape)) if kind.permutation is None else kind.permutation
        return tuple(kind.shape), tuple(axes), kind.value_type
    if isinstance(kind, pa.BaseExtensionType):
        return ((), (), pa.uint16()) if holds_bfloat16(kind) else _layout(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        shape, inner, leaf = _layout(kind.value_type)
        return (kind.list_size, *shape), (0, *(axis + 1 for axis in inner)), leaf
    dense = pa.types.is_primitive(kind) and not pa.types.is_decimal(kind)
    return (), (), kind if dense else None


def _writable(flat: pa.Array) -> npt.NDArray[Any]:
    """Returns Arrow numbers as a writable array, without a copy if Arrow's layout allows it."""
    data = flat.buffers()[1]
    if data is not None and data.is_mutable and (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
        dtype = np.dtype(flat.type.to_pandas_dtype())  # unlike `to_numpy`, this does not release the GIL
        return np.frombuffer(data, dtype, len(flat), flat.offset * dtype.itemsize)
    array: npt.NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    if array.flags.writeable or array.dtype == object:
        return array
    # Arrow gives read-only views. DLPack gives the same memory as writable, but does not know dates.
    import torch.utils.dlpack  # imported here, because some helpers do not need torch

    plain = array.view(np.int64) if array.dtype.kind in "mM" else array
    return torch.utils.dlpack.from_dlpack(plain).numpy().view(array.dtype)


def _refuse_nulls(name: str, array: pa.Array, where: str = "") -> None:
    if array.null_count:
        fix = f"Filter them out ({filter_of_nulls(name)}), or fill them in the dataset."
        if where:
            fix = (
                "No filter on the column finds nulls in stored lists: fill them in the dataset, or leave their rows "
                f"out of it. With Windows, {filter_of_nulls(name)} and neighbours='selected' end windows there."
            )
        raise DatasetError(
            f"column {name!r} has {array.null_count} nulls{where} in this batch, which an array of {array.type} cannot "
            f"hold; the epoch stops here, because no value may be invented. {fix}"
        )


def list_lengths(table: pa.Table, ragged: Collection[str] = ()) -> dict[str, int | Shape | None]:
    """Returns the one length of each column's lists, or the shape of its lists of lists; None if lengths differ or are
    0, or for columns in `ragged`.
    """
    found: dict[str, int | Shape | None] = {}
    for field in table.schema:
        if is_nested_list(field.type):
            found[field.name] = None if field.name in ragged else _one_shape(field.name, table[field.name])
        if is_dense_list(field.type):
            lengths = pc.unique(pc.list_value_length(table[field.name])).to_pylist()  # None for a null
            found[field.name] = (lengths[0] or None) if len(lengths) == 1 and field.name not in ragged else None
    return found


def _one_shape(name: str, column: pa.ChunkedArray) -> Shape | None:
    try:
        levels = [np.unique(lengths) for lengths in _levels(name, column.combine_chunks())[0]]
    except DatasetError:  # nulls
        return None
    return tuple(int(each[0]) for each in levels) if all(len(each) == 1 and each[0] for each in levels) else None


def list_dtypes(schema: pa.Schema) -> dict[str, np.dtype[Any]]:
    """Returns the dtype of the values, for each column of lists that can be padded."""
    lists = {field.name: field.type.value_type for field in schema if is_dense_list(field.type)}
    found = {
        name: BFLOAT16 if holds_bfloat16(kind) else _writable(pa.array([], _layout(kind)[2] or kind)).dtype
        for name, kind in lists.items()
    }
    return {name: dtype for name, dtype in found.items() if not dtype.hasobject}  # times of day are objects


def as_padding(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any] | None:
    """Converts a number to a value of a dtype, shape (); None if the dtype cannot hold it. Fractions may be rounded. A
    whole number must not change, nor a bool become a number, nor anything else NaN, infinite or zero.
    """
    if dtype.metadata == BFLOAT16.metadata:
        import torch  # imported here, because some helpers do not need torch

        number = as_padding(value, np.dtype(np.float32))
        bits = None if number is None else torch.from_numpy(number).to(torch.bfloat16).view(torch.int16)
        kept = bits is not None and is_kept(np.asarray(value).item(), bits.view(torch.bfloat16).item())
        return np.asarray(bits.numpy().view(np.uint16)) if bits is not None and kept else None
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
    """Returns whether `held` is `given` in another dtype: the same number, or, for a fraction, a rounded float."""
    number = given if isinstance(given, int) else float(given)
    # A float beyond 2**53, such as -1e30, has no fraction, but is not a count either, so it may be rounded.
    is_whole = isinstance(number, int) or (abs(number) < 2**53 and number.is_integer())
    if isinstance(held, float) and not is_whole:
        return all(test(number) == test(held) for test in (math.isnan, math.isinf, bool))
    return bool(held == given)


def is_dense(kind: pa.DataType) -> bool:
    """Whether values of a type are numbers, or arrays of numbers of one shape."""
    return _layout(kind)[2] is not None


def blank_row(table: pa.Table) -> pa.Table:
    """Returns one row of zeros, empty strings and None, with lists of numbers as long as the table's first ones."""
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
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _zeros(kind.storage_type, rows))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(_zeros(kind.value_type, rows * kind.list_size), type=kind)
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(bytes(-(-rows * kind.bit_width // 8)))])


def holds_files(kind: pa.DataType) -> bool:
    """Whether values of a type are lists of any length of encoded values: of bytes, or of structs that have `bytes`, as
    the datasets library stores images.
    """
    if not isinstance(kind, _LISTS):
        return False
    inside = kind.value_type
    if pa.types.is_struct(inside) and (at := inside.get_field_index("bytes")) >= 0:
        inside = inside.field(at).type
    return inside in (pa.binary(), pa.large_binary())


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values of a type become Python bytes or strings."""
    return kind in (pa.binary(), pa.large_binary(), pa.string(), pa.large_string())


def to_arrow(array: npt.NDArray[Any]) -> pa.Array:
    """Converts an array (n, …) to a column of n numbers or fixed-shape tensors, without a copy if possible."""
    if array.dtype.name == "bfloat16":  # an extension type, of which Arrow makes no tensors
        bits = np.ascontiguousarray(array).reshape(-1).view(np.uint16)
        kind: pa.DataType = importlib.import_module("lance.arrow").BFloat16Type()  # helpers do without Lance otherwise
        storage = pa.Array.from_buffers(kind.storage_type, len(bits), [None, pa.py_buffer(bits)])
        made: pa.Array = pa.ExtensionArray.from_storage(kind, storage)
        for size in array.shape[:0:-1]:
            made = pa.FixedSizeListArray.from_arrays(made, size)
        return made
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    if array.ndim == 1:
        return flat
    lists = pa.FixedSizeListArray.from_arrays(flat, math.prod(array.shape[1:]))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(flat.type, array.shape[1:]), lists)
