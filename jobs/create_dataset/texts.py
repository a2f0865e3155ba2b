"""Owns which columns of text files become numbers, those whose values survive it; never reads a file."""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

_NULLS = pa.array(pyarrow.csv.ConvertOptions().null_values, pa.string())
_INTEGER = r"^-?(0|[1-9][0-9]*)$"
_CODE = r"^\+[0-9]{7,}$|^-?0[0-9]"  # such as a telephone number, or a postal code
_LONG_INTEGER = r"^-?[0-9]{16,}$"  # that a double may round
_NOT_ZERO = r"^-?[0-9.]*[1-9]"


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
