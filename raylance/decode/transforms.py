"""Owns the call of the user's transform: what it is given, and that what it returns becomes a table of the types of the
opening; never decodes, and never decides what comes of a row that it fails on.
"""

import re
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.columns import COMPONENT, DRAW, OFFSET_MASK, ROW_OFFSET, SEED, VALID, describe_rows
from raylance.decode.arrays import NumpyBatch, to_arrow, to_numpy
from raylance.errors import ConfigError, HelperError, RaylanceError
from raylance.orders.permutation import UInt64Array

_OBJECT = re.compile(r"<[\w.]+ object at 0x[0-9a-f]+>")  # which Pillow names, and nobody knows

Transform = Callable[[NumpyBatch], dict[str, Any]]


class TransformError(Exception):
    """What the transform raised, which may be of a kind that ends loops."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Transformer:
    """Calls a transform."""

    def __init__(self, transform: Transform | None, blank: pa.Table | None, datasets: tuple[str, ...]) -> None:
        """See `Decoding`."""
        self._transform, self._blank, self._datasets = transform, blank, datasets

    def __call__(self, table: pa.Table, seeds: UInt64Array) -> pa.Table:
        """What the transform makes of rows, which it may change in place.

        Args:
            table: The rows, decoded.
            seeds: One for each.

        Raises:
            TransformError: If it fails, unless by an error of Ray's, which the runtime tells from those of rows.
            ConfigError: If it returns what is no batch, or says itself that a row is beyond its settings.
        """
        arrays = to_numpy(table)
        arrays.pop(DRAW, None)
        arrays[ROW_OFFSET] = table[ROW_OFFSET].to_numpy() & OFFSET_MASK  # the row's own, and memory of its own
        arrays[SEED] = seeds
        try:
            made = self._transform(arrays) if self._transform is not None else arrays
        except ConfigError as error:
            raise ConfigError(f"transform refuses {self.describe(table)}: {error}") from error
        except (ImportError, MemoryError) as error:
            raise no_fault_of_rows("transform cannot run", error) from error
        except Exception as error:  # whatever user code raises; StopIteration, too
            if type(error).__module__.startswith("ray."):
                raise  # of a transform that asks Ray: a fault of the machines, for example, for which no row is bad
            raise TransformError(error) from error
        return self._to_table(made, table)

    def _to_table(self, made: Any, given: pa.Table) -> pa.Table:
        """What the transform made of a table; its columns are those of the opening, and of their types, but there."""
        schema = None if self._blank is None else self._blank.schema
        if not isinstance(made, dict) or not made:
            raise ConfigError(
                f"transform returned {type(made).__name__} for {self.describe(given)}: it must return a dict of "
                "arrays by column."
            )
        if other := [name for name in made if not isinstance(name, str)]:
            raise ConfigError(
                f"transform returned a column named {other[0]!r} for {self.describe(given)}: names of columns are "
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
                "Return the same columns always."
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
            if kind is None and _is_untold(array.type):
                kind = given[name].type if name in given.column_names else None
                if kind is None or _is_untold(kind):
                    raise ConfigError(
                        f"transform returned only None or empty lists in {name!r} for the {rows} rows tried at the "
                        f"opening, which does not tell its type ({found}), and later pieces could be of any; nothing "
                        "was started. Return a pyarrow array, which says it: pa.array(values, pa.string())."
                    )
            return array if kind is None else _cast(array, kind)
        except (pa.ArrowException, TypeError) as error:
            raise ConfigError(
                f"transform returned {found} in column {name!r} for {self.describe(given)}, which cannot become "
                f"{'one Arrow type' if kind is None else f'{kind}, as at the opening'} ({error}); it stops here, "
                "because pieces of a step must be of one type. Return the same type always: values.astype(…), or a "
                "pyarrow array such as pa.array(values, pa.string())."
            ) from error

    def describe(self, table: pa.Table) -> str:
        """Names the rows of a table, for an error."""
        return describe_rows(table[ROW_OFFSET].to_numpy(), self._datasets)


def describe_exception(error: Exception) -> str:
    """What an error says, on the whole."""
    try:
        text = _OBJECT.sub("", str(error))
    except Exception as failure:  # whatever the error's own __str__ raises
        text = f"its text cannot be had, {type(failure).__name__}"
    return f"{type(error).__name__}: {text}".strip().removesuffix(":")


def no_fault_of_rows(what: str, error: ImportError | MemoryError) -> RaylanceError:
    """The error for one that says nothing of a row: here none can be decoded, good or bad."""
    told = f"{what} on {socket.gethostname()} ({describe_exception(error)}): no row is bad for that."
    if isinstance(error, ImportError):
        return ConfigError(f"{told} Install it wherever helpers run.")
    return HelperError(
        f"{told} The epoch stops here rather than take good rows for bad ones. Have fewer helpers there "
        "(num_decoders=…), lower max_inflight_bytes or max_window_bytes, or give them more memory."
    )


def _length(values: Any) -> int | None:
    """Rows of a column, or None for what is no column."""
    try:
        return None if isinstance(values, str | bytes) else len(values)
    except TypeError:
        return None


def _is_untold(kind: pa.DataType) -> bool:
    """Whether a type was inferred from nothing but None or empty lists, in it or somewhere inside."""
    return pa.types.is_null(kind) or any(_is_untold(kind.field(index).type) for index in range(kind.num_fields))


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array as another type, where no value is lost; tensors of one shape by their numbers."""
    if array.type == kind:
        return array
    tensors = isinstance(kind, pa.FixedShapeTensorType) and isinstance(array.type, pa.FixedShapeTensorType)
    if tensors and (array.type.shape, array.type.permutation) == (kind.shape, kind.permutation):
        return pa.ExtensionArray.from_storage(kind, array.storage.cast(kind.storage_type))
    return array.cast(kind)


def _arrow(values: Any) -> pa.Array:
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    array: npt.NDArray[Any] = np.asarray(values) if not isinstance(values, list) else np.array(values, dtype=object)
    if array.dtype == object or array.dtype.kind in "US":
        return pa.array(array.tolist())
    return to_arrow(array)
