"""Owns what later rows must be like: the columns and types of the first ones; never decides what these are."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.create_dataset.labels import is_text


def check_schema(found: pa.Schema, first: pa.Schema, where: str) -> None:
    """Refuses other columns than the first rows have, and types that theirs can't hold.

    Raises:
        ValueError: If nothing but a loss would make rows of the one schema rows of the other.
    """
    if missing := [name for name in first.names if name not in found.names]:
        raise ValueError(
            f"{where} lacks the column {', '.join(missing)}, which the first rows have. Its rows would have no value "
            "there. Write it again with the columns of the others."
        )
    if extra := [name for name in found.names if name not in first.names]:
        raise ValueError(
            f"{where} has the column {', '.join(extra)}, which the first rows do not have. It would be dropped. Write "
            "all with the same columns, or leave it out (of tables and Lance datasets by --columns)."
        )
    for field in first:
        kind = found.field(field.name).type
        if not _holds(field.type, kind):
            raise ValueError(
                f"column {field.name} is {kind} in {where}, and {field.type} in the first rows. Its values would be "
                "changed or lost. Write all with the same type."
            )


def fit(table: pa.Table, first: pa.Schema, where: str) -> pa.Table:
    """Returns the rows with the columns and types of the first ones, in their order.

    Raises:
        ValueError: If a value would not be the same there.
    """
    check_schema(table.schema, first, where)
    columns = [_cast(table[field.name], field, where) for field in first]
    return pa.table(columns, schema=first)


def _cast(column: pa.ChunkedArray, field: pa.Field, where: str) -> pa.ChunkedArray:
    if column.type == field.type:
        return column
    try:
        cast = column.cast(field.type)  # safe: integers, decimals and times that do not fit are errors
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(_unfit(column, field, where, str(error).splitlines()[0])) from None
    before, after = _leaves(column), _leaves(cast)
    if pa.types.is_floating(after.type) and not np.array_equal(_numbers(before), _numbers(after), equal_nan=True):
        raise ValueError(_unfit(column, field, where, "it holds values that differ there"))
    return cast


def _unfit(column: pa.ChunkedArray, field: pa.Field, where: str, why: str) -> str:
    return (
        f"column {field.name} is {column.type} in {where}, and {field.type} in the first rows ({why}). Its values "
        "would be changed or lost. Write all with the same type."
    )


def _leaves(column: pa.ChunkedArray) -> pa.ChunkedArray:
    while _is_list(column.type):
        column = pc.list_flatten(column)
    return column


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(column.to_numpy(), dtype=np.float64)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _holds(kind: pa.DataType, found: pa.DataType) -> bool:
    """Whether a column of one type can hold values of another as they are; a cast shows which ones it does."""
    if pa.types.is_dictionary(found):
        found = found.value_type
    types = pa.types
    if found == kind or types.is_null(found) or (is_text(found) and is_text(kind)):
        return True
    if _is_list(kind) and _is_list(found):
        return _holds(kind.value_type, found.value_type)
    if types.is_struct(kind) and types.is_struct(found):
        return [(field.name, field.type) for field in kind] == [(field.name, field.type) for field in found]
    if types.is_timestamp(kind) and types.is_timestamp(found):
        return bool(kind.tz == found.tz)
    return any(all(group(each) for each in (kind, found)) for group in _GROUPS) or bool(
        types.is_floating(kind) and types.is_integer(found)
    )


def is_binary(kind: pa.DataType) -> bool:
    """Whether values are bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


# Types among which a safe cast changes no value, or fails; floats are compared.
_GROUPS = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_duration,
    pa.types.is_date,
    is_binary,
)
