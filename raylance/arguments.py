"""Checks of arguments that many calls share, and hints on argument names of other libraries."""

import difflib
import math
import numbers
import operator
import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raylance.errors import ConfigError

MOST_LISTED = 20
"""Most names that a message lists."""
_ORDER = 'the dataset has an order, the same on all ranks: raylance.dataset(…, order="window"), "sequential" for none'
_STEP = "the size of a step is an argument of iter_torch_batches() and of the other iterators"
_HINTS = {
    "batch_format": 'iter_batches(batch_format=…) gives "numpy", "pyarrow" and "pandas"',
    "batch_sampler": _ORDER,
    "batch_size": _STEP,
    "global_batch_size": _STEP,
    "max_tokens": 'budget=raylance.Budget(4096) is a step of a cost: cost=raylance.TokensOf("…") of raylance.dataset',
    "finalize_fn": "collate_fn= makes the batch, device= moves it",
    "local_shuffle_buffer_size": _ORDER + "; raylance.WindowShuffle(…) sets how far rows are mixed",
    "local_shuffle_seed": "the seed is the dataset's: raylance.dataset(…, seed=…)",
    "num_workers": "raylance.DataConfig(num_decoders=…), or handle.loader(num_decoders=…), decodes in parallel",
    "pin_memory_device": "device= moves batches through pinned memory",
    "prefetch_factor": "prefetch_batches= counts the steps to keep in flight",
    "sampler": _ORDER,
    "shuffle": _ORDER,
    "worker_init_fn": "transform= gets a seed of each row",
}


def refuse_unknown(
    call: str, unknown: Mapping[str, Any], known: Iterable[str], hints: Mapping[str, str] | None = None
) -> None:
    """Raises if a call got unknown arguments; `known` names the arguments that the call has, and `hints` says what to
    write in place of others.

    Raises:
        ConfigError: If there is an unknown argument; the message names the right argument or setting.
    """
    known, hints = sorted(known), _HINTS | dict(hints or {})
    for name in unknown:
        if name in hints:
            hint = hints[name] + "."
        elif close := difflib.get_close_matches(name, known, n=1):
            hint = f"did you mean {close[0]}=?"
        else:
            hint = f"it has {', '.join(known)}."
        raise ConfigError(f"{call} has no argument {name}=: {hint}")


def warn_replaced(call: str, names: Iterable[str], new: str, depth: int = 1) -> None:
    """Warns the caller of a public function that arguments of 0.12 have a new spelling. `depth` is the number of calls
    between that function and this one.
    """
    warnings.warn(
        f"{call}: {', '.join(f'{name}=' for name in names)} is the spelling of raylance 0.12, and goes in 0.14. Write "
        f"{new}.",
        FutureWarning,
        stacklevel=3 + depth,
    )


def take_renamed(call: str, given: dict[str, Any], names: Mapping[str, str], depth: int = 0) -> None:
    """Replaces arguments of 0.12, the keys of `names`, by those that have taken their place, with a warning. `depth` is
    as in `warn_replaced`.
    """
    for old, new in names.items():
        if old in given and new in given:
            raise ConfigError(f"{call}: {new}= has taken the place of {old}=: leave {old}= out.")
        if old in given:
            warn_replaced(call, [old], f"{new}=", depth + 1)
            given[new] = given.pop(old)


def check_flag(what: str, value: Any) -> bool:
    """Returns a Python or NumPy bool as a bool. Refuses other values, because a string such as "no" would be true.

    Raises:
        ConfigError: If the value is not a bool.
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ConfigError(f"{what}={value!r}: must be True or False.")


def check_name(what: str, value: Any) -> None:
    """Raises if a value cannot be the name of a column.

    Raises:
        ConfigError: If it is not a string, or is empty.
    """
    if not (isinstance(value, str) and value):
        raise ConfigError(f"{what}={value!r}: give the name of a column.")


def check_path(what: str, value: Any) -> None:
    """Raises if a value is not a path or a URI.

    Raises:
        ConfigError: If it is not.
    """
    if not isinstance(value, str | os.PathLike) or isinstance(os.fspath(value), bytes):
        raise ConfigError(f"{what}={value!r}: give a path or a URI.")


def check_probability(call: str, value: Any) -> None:
    """Raises if a value is not a number in [0, 1]. `call` is the call up to the name of the argument, for errors.

    Raises:
        ConfigError: If it is not.
    """
    if not is_between(value, 0, 1):
        raise ConfigError(f"{call}={value!r}): a probability lies in [0, 1].")


def listed(names: Collection[str]) -> str:
    """Returns the first `MOST_LISTED` names, and how many others there are: a table may have thousands."""
    more = f" and {len(names) - MOST_LISTED:,} more" if len(names) > MOST_LISTED else ""
    return ", ".join(list(names)[:MOST_LISTED]) + more


def check_word(what: str, value: Any, allowed: Sequence[str]) -> None:
    """Raises if a value is not one of the allowed words.

    Raises:
        ConfigError: If the value is not in `allowed`.
    """
    if value not in allowed:
        raise ConfigError(f"{what}={value!r}: must be one of {', '.join(map(repr, allowed))}.")


def is_between(value: Any, least: float, most: float) -> bool:
    """Whether a value is a number in a closed range; False for NaN, and for what is not a number."""
    return isinstance(value, numbers.Real) and least <= float(value) <= most


def is_positive(value: Any) -> bool:
    """Whether a value is a finite number above 0; False for a bool, for NaN, and for what is not a number."""
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return bool(is_number and 0 < value < math.inf)


def is_pair(value: Any) -> bool:
    """Whether a value is a tuple or a list of two numbers."""
    return isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(one, numbers.Real) for one in value)


def check_integer(what: str, value: Any, least: int | None) -> int:
    """Returns a Python or NumPy integer as an int. It must be below 2⁶³, and at least `least` unless this is None.

    Raises:
        ConfigError: If the value is not an integer, or is out of range.
    """
    if not isinstance(value, bool):
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is not None and (least is None or least <= number < 1 << 63):
            return number
        if number is not None and number >= 1 << 63:
            raise ConfigError(f"{what}={value!r}: must be less than 2**63, the largest that positions can count.")
    raise ConfigError(f"{what}={value!r}: must be an integer{'' if least is None else f' of at least {least}'}.")


def check_batch_size(global_batch_size: int | None, batch_size: int | None, dp_size: int) -> int:
    """Returns the number of rows of one step over all ranks, from the size that is given.

    Raises:
        ConfigError: If not exactly one of the sizes is given, or if it is not an integer of at least 1.
    """
    if (global_batch_size is None) == (batch_size is None):
        raise ConfigError(
            f"global_batch_size={global_batch_size}, batch_size={batch_size}: give exactly one of them; rows of a step "
            "over all ranks, or of each data-parallel rank."
        )
    if global_batch_size is not None:
        return check_integer("global_batch_size", global_batch_size, 1)
    return check_integer("batch_size", batch_size, 1) * dp_size
