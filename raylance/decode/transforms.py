"""Calls the user's transform, and checks that its result has the schema found at the opening of the dataset."""

import os
import re
import socket
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.columns import COMPONENT, DRAW, ROW_OFFSET, SEED, VALID, describe_rows, split_offsets
from raylance.decode.arrays import NumpyBatch, to_arrow, to_numpy, with_bfloat16
from raylance.errors import ConfigError, HelperError, RaylanceError
from raylance.orders.permutation import UInt64Array

_OBJECT = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>")  # Pillow names such objects in its errors

Transform = Callable[[NumpyBatch], dict[str, Any]]


class TransformError(Exception):
    """Wraps the `error` that a transform raised, because a bare StopIteration would end a loop silently."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Transformer:
    """Calls a transform, and checks its result."""

    def __init__(self, transform: Transform | None, blank: pa.Table | None, datasets: tuple[str, ...]) -> None:
        self._transform, self._datasets = transform, datasets
        self._blank = None if blank is None else with_bfloat16(blank)

    def __call__(self, table: pa.Table, seeds: UInt64Array) -> pa.Table:
        """Transforms decoded rows; returns the same number of rows, with the schema found at the opening. The transform
        may change the memory of `table` in place. `seeds` has one number for each row, uint64.

        Raises:
            TransformError: If the transform fails; an error of Ray is raised as it is.
            ConfigError: If the transform returns no batch that fits, or raises a `ConfigError` or an `ImportError`.
            HelperError: If this machine has too little memory for the transform.
        """
        table = with_bfloat16(table)
        arrays = to_numpy(table)
        arrays.pop(DRAW, None)
        _, arrays[ROW_OFFSET] = split_offsets(table[ROW_OFFSET].to_numpy())  # a copy
        arrays[SEED] = seeds
        try:
            made = self._transform(arrays) if self._transform is not None else arrays
        except ConfigError as error:
            raise ConfigError(f"transform refuses {self.describe(table)}: {error}") from error
        except (ImportError, MemoryError) as error:
            raise error_of_no_row("transform cannot run", error) from error
        except Exception as error:  # user code may raise anything, even StopIteration
            if type(error).__module__.startswith("ray."):
                raise  # the transform calls Ray: a lost machine does not make a row bad
            raise TransformError(error) from error
        return self._to_table(made, table)

    def _to_table(self, made: Any, given: pa.Table) -> pa.Table:
        """Checks and converts the transform's result. When the dataset is opened, any columns and types are allowed."""
        schema = None if self._blank is None else self._blank.schema
        if not isinstance(made, dict) or not made:
            raise ConfigError(
                f"transform returned {type(made).__name__} for {self.describe(given)}: it must return a dict of "
                "arrays by column."
            )
        if other := [name for name in made if not isinstance(name, str)]:
            raise ConfigError(
                f"transform returned a column named {other[0]!r} for {self.describe(given)}: column names must be "
                "strings."
            )
        made = {name: values for name, values in made.items() if name not in (ROW_OFFSET, SEED)}
        added = sorted({COMPONENT, DRAW, VALID} & set(made))
        if added or not made:
            raise ConfigError(
                f"transform returned {', '.join(added) or 'no column of its own'}: {VALID}, {COMPONENT} and {DRAW} are "
                f"columns that raylance adds, {ROW_OFFSET} and {SEED} are left out of what it returns. Return columns "
                "under names of their own."
            )
        names = list(made) if schema is None else schema.names
        if set(names) != set(made):
            raise ConfigError(
                f"transform returned the columns {', '.join(made)} for {self.describe(given)}, at the opening it "
                f"returned {', '.join(names)}; the epoch stops here, because pieces of a step would not fit together. "
                "Return the same columns for all rows."
            )
        return pa.table({name: self._to_column(name, made[name], given) for name in names})

    def _to_column(self, name: str, values: Any, given: pa.Table) -> pa.Array:
        rows, blank = _length(values), self._blank
        if rows != len(given):
            what = type(values).__name__ if rows is None else f"{rows} rows"
            raise ConfigError(
                f"transform returned {what} in {name!r} for {len(given)} rows, {self.describe(given)}: rows lost or "
                "added here would make ranks uneven. Return one for each; filter rows with filter= instead."
            )
        kind = None if blank is None else blank.schema.field(name).type
        found = type(values).__name__
        try:
            array = _arrow(values)
            found = str(array.type)
            if kind is None and _is_open_type(array.type):
                kind = given[name].type if name in given.column_names else None
                if kind is None or _is_open_type(kind):
                    raise ConfigError(
                        f"transform returned only None or empty lists in {name!r} for the {rows} rows sampled at the "
                        f"opening, which leaves its type open ({found}): later pieces could have any type. Nothing was "
                        "started. Return a pyarrow array, which has a type: pa.array(values, pa.string())."
                    )
            return array if kind is None else _cast(array, kind)
        except (pa.ArrowException, TypeError) as error:
            raise ConfigError(
                f"transform returned {found} in column {name!r} for {self.describe(given)}, which cannot become "
                f"{'one Arrow type' if kind is None else f'{kind}, as at the opening'} ({error}); it stops here, "
                "because pieces of a step must have one type. Return the same type for all rows: values.astype(…), or "
                "a pyarrow array such as pa.array(values, pa.string())."
            ) from error

    def describe(self, table: pa.Table) -> str:
        """Names the rows of a table in an error text."""
        return describe_rows(table[ROW_OFFSET].to_numpy(), self._datasets)


def describe_exception(error: BaseException) -> str:
    """Returns the class and the text of an error."""
    try:
        text = _OBJECT.sub("", str(error))
    except Exception as failure:  # an error's own __str__ may raise anything
        text = f"its text raises {type(failure).__name__}"
    return f"{type(error).__name__}: {text}".strip().removesuffix(":")


def place_of(error: BaseException) -> str:
    """Returns the place where an error was raised, to add to its description; "" if no Python code raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    return f", in {frames[-1].name} of {os.path.basename(frames[-1].filename)}, line {frames[-1].lineno}"


def error_of_no_row(what: str, error: ImportError | MemoryError) -> RaylanceError:
    """Returns the error to raise if this machine cannot decode any row, good or bad."""
    cause = f"{what} on {socket.gethostname()} ({describe_exception(error)}). The epoch stops here: no row is bad."
    if isinstance(error, ImportError):
        return ConfigError(f"{cause} Install the module on all nodes with helpers.")
    return HelperError(
        f"{cause} Use fewer helpers there (num_decoders=…), lower inflight_bytes or reader_bytes, or give them "
        "more memory."
    )


def _length(values: Any) -> int | None:
    """Returns the number of rows of a column; None if `values` is not a column."""
    try:
        return None if isinstance(values, str | bytes) else len(values)
    except TypeError:
        return None


def _is_open_type(kind: pa.DataType) -> bool:
    """Returns whether a type, or a type nested in it, was inferred only from None or empty lists."""
    return pa.types.is_null(kind) or any(_is_open_type(kind.field(index).type) for index in range(kind.num_fields))


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Casts an array; raises if a value would change. Between tensors of the same shape, the numbers are cast."""
    if array.type == kind:
        return array
    tensors = isinstance(kind, pa.FixedShapeTensorType) and isinstance(array.type, pa.FixedShapeTensorType)
    if tensors and (array.type.shape, array.type.permutation) == (kind.shape, kind.permutation):
        return pa.ExtensionArray.from_storage(kind, array.storage.cast(kind.storage_type))
    return array.cast(kind)


def _is_tensor(value: Any) -> bool:
    """Whether a value is an array of which Arrow itself makes no list."""
    return isinstance(value, np.ndarray) and (value.ndim > 1 or str(value.dtype) == "bfloat16")


def _arrow(values: Any) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    array: npt.NDArray[Any] = np.asarray(values) if not isinstance(values, list) else np.fromiter(values, dtype=object)
    if array.dtype == object and any(map(_is_tensor, array)):
        ends = np.cumsum([0, *(0 if value is None else len(value) for value in array)])
        starts = [None if value is None else end for value, end in zip(array, ends.tolist(), strict=False)]
        flat = to_arrow(np.concatenate([value for value in array if value is not None]))
        return pa.ListArray.from_arrays(pa.array([*starts, ends[-1]], pa.int32()), flat)
    if array.dtype == object or array.dtype.kind in "US":
        return pa.array(array.tolist())
    return to_arrow(array)
