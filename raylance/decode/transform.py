"""Owns what a transform returned becoming columns of the types that the opening found; never calls one."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.columns import COMPONENT, DRAW, ROW_OFFSET, SEED, VALID, tell_rows
from raylance.decode.arrays import to_arrow
from raylance.errors import ConfigError
from raylance.orders.permutation import Int64Array


def transformed_table(
    made: Any, offsets: Int64Array, given: pa.Schema, schema: pa.Schema | None, datasets: tuple[str, ...]
) -> pa.Table:
    """What a transform made of rows of the schema `given`, as a table of the schema of the opening; None there."""
    if not isinstance(made, dict) or not made:
        raise ConfigError(f"transform returned {type(made).__name__}: it must return a dict of arrays by column.")
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
            f"transform returned the columns {', '.join(made)} for {tell_rows(offsets, datasets)}, at "
            f"the opening it returned {', '.join(names)}; the epoch stops here, because pieces of a step would not "
            "fit together. Return the same columns always."
        )
    return pa.table({name: _column(name, made[name], offsets, given, schema, datasets) for name in names})


def _column(
    name: str, values: Any, offsets: Int64Array, given: pa.Schema, schema: pa.Schema | None, datasets: tuple[str, ...]
) -> pa.Array:
    rows = _length(values)
    if rows != len(offsets):
        what = type(values).__name__ if rows is None else f"{rows} rows"
        raise ConfigError(
            f"transform returned {what} in {name!r} for {len(offsets)} rows: rows lost or added here would make "
            "ranks uneven. Return one for each; filter rows with filter= instead."
        )
    kind = None if schema is None else schema.field(name).type
    found = type(values).__name__
    try:
        array = _arrow(values)
        found = str(array.type)
        if kind is None and _is_untold(array.type):
            kind = given.field(name).type if name in given.names else None
            if kind is None or _is_untold(kind):
                raise ConfigError(
                    f"transform returned only None or empty lists in {name!r} for the {rows} rows tried at the "
                    f"opening, which does not tell its type ({found}), and later pieces could be of any; nothing "
                    "was started. Return a pyarrow array, which says it: pa.array(values, pa.string()), say."
                )
        return array if kind is None else _cast(array, kind)
    except (pa.ArrowException, TypeError) as error:
        raise ConfigError(
            f"transform returned {found} in column {name!r} for {tell_rows(offsets, datasets)}, which "
            f"cannot become {'one Arrow type' if kind is None else f'{kind}, as at the opening'} ({error}); it "
            "stops here, because pieces of a step must be of one type. Return the same type always: "
            "values.astype(…), or a pyarrow array such as pa.array(values, pa.string())."
        ) from error


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
