"""How the lists of a column become arrays: the checked argument `pad_lists`."""

import dataclasses
import functools
import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from raylance.arguments import MOST_LISTED, listed
from raylance.columns import VALID
from raylance.decode.arrays import (
    LENGTH,
    OFFSETS,
    Flat,
    Jagged,
    ListForm,
    Lists,
    Pad,
    as_padding,
    holds_bfloat16,
    is_nested_list,
    is_one_number,
    numpy_bfloat16,
)
from raylance.errors import ConfigError

if TYPE_CHECKING:
    from raylance.opened import ReadSpec  # loads Lance

logger = logging.getLogger(__name__)

_SIZED = "pyarrow.list_(pyarrow.list_(…, size))"


def adds_lengths(how: object) -> bool:
    """Returns whether a column comes with a column of its lengths."""
    return how == "flat" or (isinstance(how, Pad) and how.lengths)


def list_conversion(read_spec: "ReadSpec", pad_lists: Any, tensors: bool) -> Lists:
    """Returns how lists are converted. `tensors` is whether batches are tensors, which cannot hold dates.

    Raises:
        ConfigError: If `pad_lists` cannot be honoured.
    """
    lists_of = read_spec.list_dtypes
    if not isinstance(pad_lists, Mapping | None):
        raise ConfigError(f"pad_lists={pad_lists!r}: say which column to pad with what, as {{'tokens': 0}}.")
    if not tensors:
        for field in read_spec.schema or ():
            if holds_bfloat16(field.type):
                numpy_bfloat16(field.name)
    decoded = [name for name in read_spec.of_lists if name in lists_of]
    given: dict[str, Any] = dict.fromkeys(decoded, "flat") | dict(pad_lists or {})
    chosen: dict[str, ListForm] = {name: _how(read_spec, name, how) for name, how in given.items()}
    chosen |= {name + VALID: _as_marks(chosen[name]) for name in decoded if name + VALID in lists_of}
    for name, how in chosen.items():
        added = name + (OFFSETS if how == "jagged" else LENGTH)
        if added in read_spec.delivers and (how == "jagged" or adds_lengths(how)):
            raise ConfigError(
                f"pad_lists={{{name!r}: …}} adds a column {added!r}, and batches have another one of this name. Leave "
                "that out of columns=, or use Pad(…, lengths=False)."
            )
    ragged = [
        name
        for name, dtype in read_spec.list_dtypes.items()
        if read_spec.list_lengths[name] is None and name not in chosen and not (tensors and dtype.kind in "mM")
    ]
    if ragged:
        _warn_of_ragged(str(read_spec.source.uri), tuple(ragged))
    nested = [field.name for field in read_spec.schema or () if is_nested_list(field.type) and field.name not in chosen]
    if uneven := [name for name in nested if read_spec.list_lengths[name] is None]:
        _warn_of_nested(str(read_spec.source.uri), tuple(uneven))
    return {**read_spec.list_lengths, **chosen}


def _as_marks(how: ListForm) -> ListForm:
    """Returns the form of the marks of a column's values, for the form of the values."""
    if isinstance(how, Pad):
        return dataclasses.replace(how, value=np.asarray(False), lengths=False)
    return "values" if how == "flat" else how


def _how(read_spec: "ReadSpec", name: str, how: Any) -> Pad | Jagged | Flat | None:
    """Returns how to convert a column's lists; the value of a `Pad` has the dtype of the lists, and shape ()."""
    if name not in read_spec.delivers:
        raise ConfigError(
            f"pad_lists names {name!r}, which no batch has; its columns are {', '.join(read_spec.delivers)}."
        )
    dtype = read_spec.list_dtypes.get(name)
    if how is not None and read_spec.schema is not None and is_nested_list(read_spec.schema.field(name).type):
        raise ConfigError(
            f"pad_lists names {name!r}, which holds lists of lists, and these are not padded. Nothing was started. If "
            f"the inner lists have one size, write them as {_SIZED}, and the outer ones are padded. Or leave {name!r} "
            "out: it is one array if all have one shape, else Python lists."
        )
    if name not in read_spec.list_lengths or (dtype is None and how is not None):
        raise ConfigError(f"pad_lists names {name!r}, which holds no lists of numbers: leave it out.")
    if how is None or dtype is None:
        return None
    if isinstance(how, str) and how in ("jagged", "flat"):
        return how  # type: ignore[return-value]
    value: Any = how.value if isinstance(how, Pad) else how
    if not is_one_number(value):
        raise ConfigError(
            f"pad_lists={{{name!r}: {how!r}}}: pad {name!r} with a number or a raylance.Pad, take values and offsets "
            'with "jagged", values and lengths with "flat", or None to leave lists as they are.'
        )
    if (held := as_padding(value, dtype)) is None:
        raise cannot_pad(name, value, f"the lists hold {dtype}")
    return dataclasses.replace(how if isinstance(how, Pad) else Pad(lengths=False), value=held)


def check_counted(read_spec: "ReadSpec", pad_lists: Any, padded: Mapping[str, int]) -> None:
    """Raises ConfigError if a column is padded to more than the costs count that a budget of padded rows limits, whose
    names and limits `padded` has. A cost that is not `TokensOf` counts what its writer says.
    """
    from raylance.source.costs import TokensOf, costs_of_saved  # loads Lance

    is_mixture = isinstance(read_spec.source.uri, dict) and read_spec.cost is not None
    costs = [costs_of_saved(each) for each in (read_spec.cost.values() if is_mixture else [read_spec.cost])]
    for each, (name, pad), (counts, most) in itertools.product(costs, (pad_lists or {}).items(), padded.items()):
        cost = each.get(counts)
        if not (isinstance(pad, Pad) and isinstance(cost, TokensOf) and cost.column == name):
            continue
        fix = ""
        if pad.length is not None:
            fix = f"All rows cost the same then: give global_batch_size={max(1, most // pad.length)} in its place"
        elif cost.multiple % pad.multiple:
            fix = f"Open the dataset with cost=raylance.TokensOf({name!r}, multiple={pad.multiple})"
        if fix:
            raise ConfigError(
                f"pad_lists={{{name!r}: {pad!r}}}: rows are padded to more tokens than {cost} counts, so steps would "
                f"cost more than their budget of {most:,}; nothing was started. {fix}; or leave length= and "
                "multiple= of Pad out."
            )


def cannot_pad(name: str, value: Any, why: str) -> ConfigError:
    """Returns the error for a column whose batches would hold another value than the one to pad with."""
    return ConfigError(
        f"pad_lists={{{name!r}: {value!r}}}: {why}, which cannot hold {value!r}, so batches would hold another value. "
        f"Pad with a number that it holds, or take the lists as they are, pad_lists={{{name!r}: None}}, and pad them "
        "yourself."
    )


def warn_of_encoded(read_spec: "ReadSpec") -> None:
    """Warns that batches hold encoded images; once per process."""
    for name in read_spec.encoded:
        _warn_of_image(str(read_spec.source.uri), name)


@functools.cache
def _warn_of_image(uri: str, name: str) -> None:
    logger.warning(
        "%s of %s: encoded images, and batches have their bytes, because nothing decodes the column. For pixels, put "
        "raylance.Image(%r, size=224) into columns= of raylance.dataset; if the column is not needed, name the "
        "others in columns=.",
        name,
        uri,
        name,
    )


@functools.cache
def _warn_of_nested(uri: str, names: tuple[str, ...]) -> None:
    """Warns that batches hold Python lists of lists; once per process."""
    logger.warning(
        "%s of %s: the lists of lists have no one shape, or nulls, so batches hold Python lists of Python lists, which "
        "are slow. If the inner lists have one size, write them as %s, and pad_lists= pads the outer ones; else make "
        "arrays in a transform=. pad_lists=%s keeps the lists, without this warning.",
        listed(names),
        uri,
        _SIZED,
        dict.fromkeys(names) if len(names) <= MOST_LISTED else "dict.fromkeys(names)",
    )


@functools.cache
def _warn_of_ragged(uri: str, names: tuple[str, ...]) -> None:
    """Warns that batches hold Python lists; because of the cache, once per process and not once per pass."""
    logger.warning(
        "%s of %s: the lists have different lengths, so batches hold Python lists. For tensors, pad them: "
        "pad_lists=%s; None in place of the number keeps lists, without this warning.",
        listed(names),
        uri,
        dict.fromkeys(names, 0) if len(names) <= MOST_LISTED else "dict.fromkeys(names, 0)",
    )
