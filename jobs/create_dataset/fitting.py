"""Which types keep values as they are: columns of text that become numbers, later rows that have the types of the first
ones.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jobs.create_dataset.labels import is_text

_NULLS = pa.array(pyarrow.csv.ConvertOptions().null_values, pa.string())
_INTEGER = r"^-?(0|[1-9][0-9]*)$"
_CODE = r"^\+[0-9]{7,}$|^-?0[0-9]"  # such as a telephone number, or a postal code
_LONG_INTEGER = r"^-?[0-9]{16,}$"  # that a double may round
_NOT_ZERO = r"^-?[0-9.]*[1-9]"


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
            raise ValueError(_unfit(kind, field, where))


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
        raise ValueError(_unfit(column.type, field, where, f" ({str(error).splitlines()[0]})")) from None
    before, after = _leaves(column), _leaves(cast)
    if pa.types.is_floating(after.type) and not np.array_equal(_numbers(before), _numbers(after), equal_nan=True):
        raise ValueError(_unfit(column.type, field, where, " (it holds values that differ there)"))
    return cast


def _unfit(kind: pa.DataType, field: pa.Field, where: str, why: str = "") -> str:
    return (
        f"column {field.name} is {kind} in {where}, and {field.type} in the first rows{why}. Its values would be "
        "changed or lost. Write all with the same type."
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


def is_number(kind: pa.DataType) -> bool:
    """Whether values are integers or floats."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def to_numbers(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """The numbers that texts stand for; what pyarrow reads as missing is null.

    Raises:
        ValueError: If a text is no number of this type, or would be another one: it is named.
    """
    given = pc.if_else(pc.is_in(texts, value_set=_NULLS), pa.scalar(None, pa.string()), texts)
    trimmed = pc.ascii_trim(given, " \t")
    numbers = trimmed.cast(kind)
    changed = _is_changed(trimmed, numbers)
    for text, number in zip(trimmed.filter(changed).to_pylist(), numbers.filter(changed).to_pylist(), strict=True):
        raise ValueError(f"{text!r} would become {number!r}")
    if pa.types.is_floating(kind):
        for text in trimmed.filter(pc.match_substring_regex(trimmed, _LONG_INTEGER)).to_pylist():
            if int(text) != int(float(text)):
                raise ValueError(f"{text!r} would become {int(float(text))}")
    return numbers


def _is_changed(texts: pa.ChunkedArray, numbers: pa.ChunkedArray) -> pa.ChunkedArray:
    """Which texts would be changed as numbers."""
    if pa.types.is_integer(numbers.type):
        return pc.invert(pc.match_substring_regex(texts, _INTEGER))
    is_overflow = pc.and_(pc.is_inf(numbers), pc.match_substring_regex(texts, "[0-9]"))
    is_underflow = pc.and_(pc.equal(numbers, 0), pc.match_substring_regex(texts, _NOT_ZERO))
    return pc.or_(pc.match_substring_regex(texts, _CODE), pc.or_(is_overflow, is_underflow))


def kind_of(texts: pa.ChunkedArray, kind: pa.DataType) -> tuple[pa.DataType, str]:
    """The type that keeps the values of a column which pyarrow takes for numbers or nulls, and why it is another one.

    Args:
        texts: The first of them.
        kind: What pyarrow takes them for.
    """
    if pa.types.is_null(kind):
        given = texts.filter(pc.not_equal(texts, ""))
        return (pa.string(), f"{given[0].as_py()!r} would be null") if len(given) else (kind, "")
    if not is_number(kind):
        return kind, ""
    why = ""
    for tried in (kind, pa.uint64()):
        try:
            to_numbers(texts, tried)
        except ValueError as error:
            why = why or str(error)
        else:
            return tried, why
    return pa.string(), why


def as_read(kinds: dict[str, pa.DataType]) -> dict[str, pa.DataType]:
    """The types by which text is read: numbers as they are written."""
    return {name: pa.string() if is_number(kind) else kind for name, kind in kinds.items()}
