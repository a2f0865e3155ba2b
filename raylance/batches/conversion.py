"""The conversion of tables to batches, and the checked arguments of iterators."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from raylance.arguments import check_flag, check_integer
from raylance.batches.assembly import StepRows
from raylance.batches.device import JaggedParts
from raylance.batches.joining import Joiner
from raylance.batches.list_padding import adds_lengths, cannot_pad, list_conversion, warn_of_encoded
from raylance.columns import COMPONENT, ROW_OFFSET, VALID
from raylance.decode.arrays import (
    AS_LISTS,
    LENGTH,
    OFFSETS,
    Lists,
    NumpyBatch,
    Pad,
    Paddings,
    holds_bfloat16,
    is_dense,
    is_dense_list,
    is_kept,
    to_arrow,
)
from raylance.errors import ConfigError, DatasetError
from raylance.orders.mixture import MixOrder
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.step_size import CostLimit, Remainder, Size, StepSize

if TYPE_CHECKING:
    from raylance.opened import ReadSpec  # loads Lance

BatchFormat = Literal["numpy", "pyarrow", "pandas"]
Dtypes = torch.dtype | Mapping[str, torch.dtype] | None
# From the rows of a step, the columns to convert, and the columns that were decoded on the device.
Convert = Callable[[StepRows, Sequence[str], Mapping[str, torch.Tensor]], Any]
_ADDED = (ROW_OFFSET, COMPONENT, VALID)
_COLLATED: Mapping[str, BatchFormat] = {"ArrowBatchCollateFn": "pyarrow", "PandasBatchCollateFn": "pandas"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Checked arguments of an iterator.

    Attributes:
        size: Size of a step over all ranks.
        hidden: Columns that batches leave out.
        convert: Makes a batch.
        device: The device of the tensors; None for batches without tensors.
        pin_memory: Whether tensors that stay on the CPU are in pinned memory.
        whole: Whether each pass begins at the start of an epoch.
        micro: What a micro-batch may cost on one rank; a step is a list of these then. None for whole steps.
    """

    size: Size
    remainder: Remainder
    prefetch_batches: int
    hidden: tuple[str, ...]
    convert: Convert
    device: torch.device | None = None
    pin_memory: bool = False
    whole: bool = False
    micro: CostLimit | None = None


def hidden_columns(delivery_spec: DeliverySpec, remainder: Remainder, with_row_offset: bool) -> tuple[str, ...]:
    """Returns the columns that raylance adds between reader and batch, and that batches leave out.

    Raises:
        ConfigError: If `with_row_offset` is not a bool.
    """
    hidden = [] if check_flag("with_row_offset", with_row_offset) else [ROW_OFFSET]
    if not (isinstance(delivery_spec.order, MixOrder) and with_row_offset):
        hidden.append(COMPONENT)
    if remainder != "pad" and not delivery_spec.masks_bad_rows:
        hidden.append(VALID)
    return tuple(hidden)


def make_batch_spec(
    delivery_spec: DeliverySpec,
    *,
    step: StepSize,
    prefetch_batches: int,
    drop_last: bool | None,
    with_row_offset: bool,
    convert: Convert,
    device: torch.device | None = None,
    pin_memory: bool = False,
    whole: bool = False,
) -> BatchSpec:
    """Checks the arguments that all iterators have; see `RankLoader.iter_torch_batches`, and `BatchSpec` for the rest.

    Raises:
        ConfigError: If an argument cannot be honoured.
    """
    remainder = delivery_spec.remainder
    if drop_last is not None:
        remainder = "drop" if check_flag("drop_last", drop_last) else "ragged"
    return BatchSpec(
        size=step.size,
        remainder=remainder,
        prefetch_batches=check_integer("prefetch_batches", prefetch_batches, 0),
        hidden=hidden_columns(delivery_spec, remainder, with_row_offset),
        convert=convert,
        device=device,
        pin_memory=pin_memory,
        whole=check_flag("whole", whole),
        micro=step.micro,
    )


def collate_format(collate_fn: Any) -> BatchFormat:
    """Returns the format in which a `collate_fn` takes a batch: that of a class of Ray Data, such as
    `ArrowBatchCollateFn`, or "numpy" for any other function.
    """
    of_ray = [kind.__name__ for kind in type(collate_fn).__mro__ if kind.__module__.partition(".")[0] == "ray"]
    return next((_COLLATED[name] for name in of_ray if name in _COLLATED), "numpy")


def torch_converter(
    read_spec: "ReadSpec",
    dtypes: Dtypes,
    collate_fn: Callable[[Any], Any] | None,
    pad_lists: Paddings | None,
    pins: bool = False,
    batch_format: BatchFormat = "numpy",
) -> Convert:
    """Checks arguments of `iter_torch_batches`, and returns the function that makes batches.

    With `pins`, batches that are joined from pieces lie in pinned memory. `batch_format` is that which `collate_fn`
    takes.

    Raises:
        ConfigError: If an argument cannot be honoured.
    """
    lists, join = list_conversion(read_spec, pad_lists, tensors=collate_fn is None), Joiner(pins=pins)
    if collate_fn is None:
        warn_of_encoded(read_spec)
    else:
        if not callable(collate_fn):
            raise ConfigError(f"collate_fn={collate_fn!r}: give a function that makes the batch of a dict of arrays.")
        if dtypes is not None:
            raise ConfigError("dtypes= and collate_fn= exclude each other: collate_fn makes the batch, so cast there.")
        if batch_format != "numpy":
            if read_spec.on_device is not None:
                raise ConfigError(
                    f"collate_fn= takes {batch_format} batches, and columns that are decoded on the trainer's device "
                    "are tensors. Decode them in helpers, by raylance.Image; or give a function that takes a dict."
                )
            host = host_converter(read_spec, batch_format, pad_lists)
            return lambda rows, names, decoded: collate_fn(host(rows, names, decoded))
        return lambda rows, names, decoded: collate_fn(in_order(read_spec, rows.to_numpy(names, lists, join), decoded))
    by_column = _dtypes(read_spec, dtypes, lists)
    for name, how in lists.items():
        if name in by_column and isinstance(how, Pad) and (value := np.asarray(how.value)).dtype.kind not in "mM":
            given = _tensor(value, of_bits=read_spec.list_dtypes[name].metadata is not None)
            made = given.to(by_column[name])  # a tensor cannot hold dates
            if not is_kept(given.item(), made.item()) or _is_cut_off(given.item(), made):
                raise cannot_pad(name, given.item(), f"dtypes= converts them to {by_column[name]}")
    channels_last = read_spec.channels_last

    def convert(rows: StepRows, names: Sequence[str], decoded: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        arrays, schema = rows.to_numpy(names, lists, join, as_bits=True), rows.item.schema
        batch = to_torch(arrays, schema, lists=lists, dtypes=by_column, channels_last=channels_last)
        shaped = {name: _shaped(name, tensor, by_column, channels_last) for name, tensor in decoded.items()}
        return in_order(read_spec, batch, shaped)

    return convert


def _is_cut_off(given: Any, held: torch.Tensor) -> bool:
    """Returns whether a number was clipped to the largest number of its dtype, as in dtypes without infinity."""
    if not held.is_floating_point() or math.isinf(given):
        return False
    limits = torch.finfo(held.dtype)
    return bool(abs(given) > limits.max * (1 + limits.eps / 2))  # a smaller number was only rounded


def host_converter(read_spec: "ReadSpec", batch_format: str, pad_lists: Paddings | None) -> Convert:
    """Checks arguments of `iter_batches`, and returns the function that makes batches.

    Raises:
        ConfigError: If an argument cannot be honoured.
    """
    if batch_format == "numpy":
        lists, join = list_conversion(read_spec, pad_lists, tensors=False), Joiner()
        warn_of_encoded(read_spec)
        return lambda rows, names, decoded: in_order(
            read_spec, rows.to_numpy(names, lists, join), {name: tensor.numpy() for name, tensor in decoded.items()}
        )
    if batch_format not in ("pyarrow", "pandas"):
        raise ConfigError(f"batch_format={batch_format!r}: must be one of 'numpy', 'pyarrow', 'pandas'.")
    if pad_lists:
        raise ConfigError(f'batch_format={batch_format!r} has lists of its own: pad_lists= is for "numpy" and torch.')

    def convert(rows: StepRows, names: Sequence[str], decoded: Mapping[str, torch.Tensor]) -> Any:
        arrays = {name: to_arrow(tensor.numpy()) for name, tensor in decoded.items()}
        columns = dict(zip(names, rows.table(names).columns, strict=True))
        whole = pa.table(in_order(read_spec, columns, arrays))
        return whole if batch_format == "pyarrow" else whole.to_pandas()

    return convert


def cut_batch(
    convert: Convert, rows: StepRows, names: Sequence[str], decoded: Mapping[str, torch.Tensor], bounds: Sequence[int]
) -> list[Any]:
    """Returns the micro-batches of a step, whose rows lie between the bounds."""
    return [
        convert(
            StepRows(rows.item, rows.begin + low, high - low),
            names,
            {name: tensor[low:high] for name, tensor in decoded.items()},
        )
        for low, high in itertools.pairwise(bounds)
    ]


def in_order(read_spec: "ReadSpec", batch: dict[str, Any], decoded: Mapping[str, Any]) -> dict[str, Any]:
    """Puts the columns that were decoded on the device into a batch. Returns it with its columns in the order of
    `read_spec.delivers`, added ones last.
    """
    if not decoded:
        return batch
    added = [name for name in batch if name not in read_spec.delivers]
    return {name: decoded[name] if name in decoded else batch[name] for name in (*read_spec.delivers, *added)}


def _dtypes(read_spec: "ReadSpec", dtypes: Any, lists: Lists) -> Mapping[str, torch.dtype]:
    """Returns dtypes by column. A single dtype does not apply to columns that raylance adds, such as offsets, nor to
    columns without tensors, such as text.
    """
    if dtypes is None:
        return {}
    by_column = dtypes if isinstance(dtypes, Mapping) else dict.fromkeys(read_spec.delivers, dtypes)
    columns = [*read_spec.delivers, *(name + LENGTH for name, how in lists.items() if adds_lengths(how))]
    for name, dtype in by_column.items():
        if name not in (*columns, *_ADDED):
            raise ConfigError(f"dtypes names {name!r}, which no batch has; its columns are {', '.join(columns)}.")
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"dtypes={dtypes!r}: {dtype!r} is not a torch dtype; write e.g. torch.float32.")
        try:
            torch.zeros(1).to(dtype)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"dtypes={dtypes!r}: torch cannot convert numbers to {dtype} ({error}). Nothing was started. Choose "
                "another dtype, and convert in the training loop."
            ) from error
    kinds = {} if read_spec.schema is None else {field.name: field.type for field in read_spec.schema}
    of_shape = {name for name, how in lists.items() if isinstance(how, tuple)}
    others = [name for name in by_column if name in kinds and name not in of_shape and not _makes_tensors(kinds[name])]
    if others and isinstance(dtypes, Mapping):
        raise ConfigError(
            f"dtypes names {others[0]!r}, which is {kinds[others[0]]}, and batches hold no tensor of that, so that it "
            f"has no dtype. Nothing was started. Leave {others[0]!r} out of dtypes=, or make numbers of it in "
            "collate_fn= or transform=."
        )
    return {name: dtype for name, dtype in by_column.items() if name not in others}


def _makes_tensors(kind: pa.DataType) -> bool:
    """Returns whether a batch's column of this type is a tensor, or a list of tensors."""
    if pa.types.is_dictionary(kind):
        return _makes_tensors(kind.value_type)
    leaf = kind
    while pa.types.is_list(leaf) or pa.types.is_large_list(leaf) or pa.types.is_fixed_size_list(leaf):
        leaf = leaf.value_type
    return (is_dense(kind) or is_dense_list(kind)) and is_dense(leaf) and not pa.types.is_temporal(leaf)


def to_torch(
    arrays: NumpyBatch,
    schema: pa.Schema,
    *,
    lists: Lists = AS_LISTS,
    dtypes: Mapping[str, torch.dtype],
    channels_last: frozenset[str],
) -> dict[str, Any]:
    """Converts the arrays of n rows, which `to_numpy` made of a table with this schema, with these `lists` and
    `as_bits`, to tensors of the same shapes. Strings, bytes and unpadded lists become Python lists, and jagged lists
    become `JaggedParts`. Columns in `channels_last`, (n, …, H, W, C), become (n, …, C, H, W) views in channels-last
    memory; so do the arrays in lists of such columns.

    Raises:
        DatasetError: If a column holds dates.
    """
    batch: dict[str, Any] = {}
    offsets = {name: arrays.pop(name + OFFSETS) for name, how in lists.items() if how == "jagged" and name in arrays}
    for name, array in arrays.items():
        of_bits = array.dtype in (np.uint16, object) and holds_bfloat16(schema.field(name).type)
        if array.dtype == object:
            for value in array:
                _refuse_dates(name, schema, value)
            batch[name] = [
                _shaped(name, _tensor(value.copy(), of_bits), dtypes, channels_last)
                if isinstance(value, np.ndarray)
                else value
                for value in array
            ]
            continue
        _refuse_dates(name, schema, array)
        tensor = _shaped(name, _tensor(array, of_bits), dtypes, channels_last)
        batch[name] = JaggedParts.of(tensor, offsets[name]) if name in offsets else tensor
    return batch


def _tensor(array: npt.NDArray[Any], of_bits: bool) -> torch.Tensor:
    """Returns a tensor with the memory of an array, which holds numbers, or the bits of bfloat16."""
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) if of_bits else torch.from_numpy(array)


def _shaped(
    name: str, tensor: torch.Tensor, dtypes: Mapping[str, torch.dtype], channels_last: frozenset[str]
) -> torch.Tensor:
    if name in channels_last and tensor.ndim >= 4:
        tensor = tensor.movedim(-1, -3)
    return tensor.to(dtypes[name]) if name in dtypes else tensor


def _refuse_dates(name: str, schema: pa.Schema, value: Any) -> None:
    if isinstance(value, np.ndarray) and value.dtype.kind in "mMO":
        raise DatasetError(
            f"column {name!r} is {schema.field(name).type}, for which torch has no type; the epoch stops here. Leave "
            'it out of columns=, or iterate with iter_batches(batch_format="numpy").'
        )
