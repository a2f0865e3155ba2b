"""The size of a step, a number of rows or a cost, and what follows the last whole step of an epoch."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from raylance.arguments import (
    check_batch_size,
    check_flag,
    check_integer,
    check_word,
    refuse_unknown,
    warn_replaced,
)
from raylance.descriptions import Setting
from raylance.errors import ConfigError
from raylance.orders.order import COST, costs_in_words
from raylance.orders.permutation import BoolArray, Int64Array

Remainder = Literal["drop", "pad", "ragged"]
REMAINDERS: tuple[Remainder, ...] = ("drop", "pad", "ragged")
Ending = Literal["drop", "pad", "ragged", "ragged_or_empty"]
ENDINGS: tuple[Ending, ...] = (*REMAINDERS, "ragged_or_empty")
UNLIMITED = 1 << 62
"""The limit of a cost that a budget does not limit."""
OLDER = "global_batch_cost", "max_rows", "padded", "micro_batch_cost"
"""Arguments of 0.12 that `budget` has replaced."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostLimit:
    """What a step, or a micro-batch, may cost in place of a number of rows.

    Attributes:
        cost: Most cost, over all ranks for a step; of several costs, by name. A row that costs more is a step by
            itself.
        max_rows: Most rows; None for any number.
        padded: Whether rows cost their number times the costliest of them, because each is padded to it; if not, the
            sum of their costs. Of several costs, the names of those that are padded. Steps of the order `Buckets` are
            always counted as if they were padded, in the cost by which rows come together.
    """

    cost: int | Mapping[str, int]
    max_rows: int | None = None
    padded: bool | Sequence[str] = True

    def __post_init__(self) -> None:
        _check_fields(self, "cost", "max_rows")

    @property
    def most(self) -> Mapping[str, int]:
        """Most cost by name; see `COST`."""
        return self.cost if isinstance(self.cost, Mapping) else {COST: self.cost}

    @property
    def text(self) -> str:
        """The cost in words."""
        return f"{'' if isinstance(self.cost, Mapping) else 'cost '}{costs_in_words(self.most)}"

    def pads(self, name: str) -> bool:
        """Whether rows cost their number times the costliest of them, by the cost of this name."""
        return self.padded if isinstance(self.padded, bool) else name in self.padded

    def of(self, names: Sequence[str], *, padded: str | None = None) -> "Limits":
        """Returns the limits of the costs of these names, of which one is `padded` at any rate."""
        most = [self.most.get(name, UNLIMITED) for name in names]
        pads = [name == padded or self.pads(name) for name in names]
        return Limits(np.array(most, dtype=np.int64), np.array(pads, dtype=np.bool_), self.max_rows)


class Limits(NamedTuple):
    """A `CostLimit` for rows that have certain costs.

    Attributes:
        most: Most of each cost, int64, (costs,).
        padded: Whether it is counted as if rows were padded, bool, (costs,).
        max_rows: Most rows; None for any number.
    """

    most: Int64Array
    padded: BoolArray
    max_rows: int | None

    def rows_of(self, costs: Int64Array) -> int:
        """Returns how many rows of these costs, int64, (costs,), a step may have, at least one."""
        fitting = max(1, int((self.most // np.maximum(1, costs)).min()))
        return fitting if self.max_rows is None else min(fitting, self.max_rows)

    def holds(self, costs: Int64Array) -> bool:
        """Whether rows of these costs, int64, (n, costs), n >= 1, may be a step, by their costs."""
        paid = np.where(self.padded, len(costs) * costs.max(axis=0), costs.sum(axis=0))
        return bool((paid <= self.most).all())

    def without(self, number: int) -> Self:
        """Returns the limits of all costs but one."""
        return self._replace(most=np.delete(self.most, number), padded=np.delete(self.padded, number))


Size = int | CostLimit
"""The size of a step over all ranks: a number of rows, or a cost."""


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Budget(Setting):
    """The size of a step by what its rows cost, and that of micro-batches: `budget=` of the iterators. It needs `cost=`
    of `raylance.dataset`.

    Steps have about this cost, and never more, unless a row alone costs more. With the order "bucket", the rows of a
    step have similar costs. The number of steps may differ from epoch to epoch, but not from rank to rank. Batches that
    are dicts have `_step_cost`, an integer: the sum of the costs of the step's rows over all ranks, without padding, by
    which to divide sums of losses, because ranks get unequal shares of it. At the end of an epoch, remainder="drop"
    leaves out a step of fewer rows than the order has lanes, and no other.

    If `cost=` of the dataset is a dict, so is the cost here: `Budget({"tokens": 65_536, "patches": 16_384})`. No step
    exceeds any of them, and `_step_cost` is a dict, too. Costs that are left out are not limited.

    Attributes:
        cost: Most cost of a step over all ranks. None for steps of `max_rows` rows each, which `micro` cuts.
        max_rows: Most rows of a step over all ranks; None for any number.
        padded: Whether a step, or a micro-batch, costs its rows times the cost of its costliest row, because rows
            are padded to the longest one. False adds up the costs, for batches that are packed or jagged. None is True
            for one cost. Of several costs, it is the names of those whose values are padded, as `["tokens"]`, and None
            is none of them. With the order "bucket", steps are always counted as if they were padded, in the cost by
            which rows come together.
        micro: Most cost of a micro-batch on one rank, for accumulating gradients. Each step is then a list of batches,
            as many on every rank, of this cost at most, unless a row alone costs more. Each has the `_step_cost` of the
            whole step. A rank with too few rows gets batches without rows. None for whole steps.

    Raises:
        ConfigError: If a value is not of its type or range, or if neither `cost` nor `max_rows` is given.
    """

    _hints: ClassVar = dict.fromkeys(
        ("tokens", "max_tokens"),
        'one cost has no name, as in Budget(4096): cost=raylance.TokensOf("…") of the dataset says what it counts; '
        'several have, as in Budget({"tokens": 4096, "patches": 1024})',
    )
    cost: int | Mapping[str, int] | None = None
    _: dataclasses.KW_ONLY
    max_rows: int | None = None
    padded: bool | Sequence[str] | None = None
    micro: int | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        _check_fields(self, "cost", "max_rows", "micro")
        if self.cost is None and self.max_rows is None:
            raise ConfigError(
                "Budget() without a cost: how large a step is would not be known. Give the most cost of a step, as "
                "Budget(65_536), or the number of its rows, as Budget(max_rows=256, micro=8_192)."
            )

    def __hash__(self) -> int:
        parts = (self.cost, self.max_rows, self.padded, self.micro)
        return hash(tuple(frozenset(each.items()) if isinstance(each, Mapping) else str(each) for each in parts))

    def __repr__(self) -> str:
        given = [] if self.cost is None else [str(self.cost)]
        given += [f"max_rows={self.max_rows}"] if self.max_rows is not None else []
        default: bool | list[str] = [] if isinstance(self.cost or self.micro, Mapping) else True
        given += [f"padded={self.padded}"] if self.padded != default else []
        given += [f"micro={self.micro}"] if self.micro is not None else []
        return f"Budget({', '.join(given)})"


def _check_fields(value: CostLimit | Budget, *integers: str) -> None:
    """Replaces numbers and `padded` by Python's own. Raises ConfigError if one is not of its type or range."""
    named: list[str] = []
    for field in integers:
        given, where = getattr(value, field), f"Budget(): {field}"
        if isinstance(given, Mapping) and field != "max_rows":
            if not given or not all(isinstance(name, str) for name in given):
                raise ConfigError(
                    f"{where}={given}: give the most of each cost by its name, as in cost= of the dataset."
                )
            given = {name: check_integer(f"{where}[{name!r}]", most, 1) for name, most in given.items()}
            named += given
        elif given is not None:
            given = check_integer(where, given, 1)
        object.__setattr__(value, field, given)
    sizes = [each for each in (value.cost, getattr(value, "micro", None)) if each is not None]
    if named and not all(isinstance(each, Mapping) for each in sizes):
        raise ConfigError(f"Budget(): cost={sizes[0]}, micro={sizes[-1]}: give a number for both, or dicts by name.")
    padded = value.padded
    if padded is None:
        padded = [] if named else True
    elif named and isinstance(padded, bool):
        padded = list(dict.fromkeys(named)) if padded else []
    elif named and isinstance(padded, list | tuple):
        padded = list(dict.fromkeys(padded))
        if not all(name in named for name in padded):
            raise ConfigError(f"Budget(): padded={padded}: the costs are {', '.join(named)}. Name some of them.")
    else:
        padded = check_flag("Budget(): padded", padded)
    object.__setattr__(value, "padded", padded)


def read_ending(call: str, remainder: Ending, others: dict[str, Any]) -> tuple[Remainder, bool]:
    """Returns how the rows after the last whole step are handled, and whether ranks may get batches without rows.
    Removes the argument that a value of `remainder` has replaced from `others`, with a warning.

    Raises:
        ConfigError: If an argument cannot be honoured.
    """
    check_word("remainder", remainder, ENDINGS)
    may_be_empty = check_flag("empty_batches", others.pop("empty_batches", False))
    if may_be_empty:
        warn_replaced(call, ["empty_batches"], 'remainder="ragged_or_empty"')
    return ("ragged", True) if remainder == "ragged_or_empty" else (remainder, may_be_empty)


class StepSize(NamedTuple):
    """How large steps are, and micro-batches.

    Attributes:
        size: The size of a step over all ranks.
        micro: What a micro-batch may cost on one rank; None for whole steps.
    """

    size: Size
    micro: CostLimit | None = None


def budget_of(size: Size) -> dict[str, Any]:
    """Returns the argument of an iterator that gives this size; see `read_size`."""
    if isinstance(size, CostLimit):
        return {"budget": Budget(size.cost, max_rows=size.max_rows, padded=size.padded)}
    return {"global_batch_size": size}


def read_size(
    call: str,
    dp_size: int,
    *,
    global_batch_size: int | None,
    batch_size: int | None = None,
    budget: Budget | None = None,
    others: Mapping[str, Any] | None = None,
    known: Iterable[str] = (),
) -> StepSize | None:
    """Returns the size of a step from the arguments of a call, of which exactly one is given; None if none is.

    Args:
        call: The call, for errors, as "plan()".
        dp_size: Number of data-parallel ranks.
        global_batch_size: Rows of a step over all ranks.
        batch_size: Rows of a step on each data-parallel rank.
        budget: The cost of a step.
        others: Any other arguments of the call: those that `budget` has replaced are taken with a warning.
        known: Names of the call's arguments, for the error of an unknown one.

    Raises:
        ConfigError: If more than one of the sizes is given, or an argument cannot be honoured, or is not known.
    """
    others = others or {}
    older = {name: value for name, value in others.items() if name in OLDER}
    refuse_unknown(call, {name: value for name, value in others.items() if name not in OLDER}, known)
    if older:
        budget = _read_older(call, budget, older, lambda: check_batch_size(global_batch_size, batch_size, dp_size))
        if budget is not None and budget.cost is None:  # it has the number of rows, too
            global_batch_size = batch_size = None
    if budget is None:
        if global_batch_size is None and batch_size is None:
            return None
        return StepSize(check_batch_size(global_batch_size, batch_size, dp_size))
    if not isinstance(budget, Budget):
        raise ConfigError(f"{call}: budget={budget!r}: give a raylance.Budget, such as raylance.Budget(65_536).")
    if global_batch_size is not None or batch_size is not None:
        raise ConfigError(
            f"{call}: budget={budget}, global_batch_size={global_batch_size}, batch_size={batch_size}: a step has a "
            "cost or a number of rows. Give one of them; max_rows= of the budget limits the rows of a step of a cost."
        )
    micro = None
    if budget.micro is not None:
        micro = CostLimit(cost=budget.micro, padded=_padded(budget, budget.micro))
    if budget.cost is None:
        return StepSize(check_batch_size(budget.max_rows, None, dp_size), micro)
    size = CostLimit(cost=budget.cost, max_rows=budget.max_rows, padded=_padded(budget, budget.cost))
    return StepSize(size, micro)


def _padded(budget: Budget, limited: int | Mapping[str, int]) -> bool | list[str]:
    """Returns `padded` of a budget for one of its limits, which may name fewer costs."""
    if isinstance(budget.padded, Sequence):
        return [name for name in budget.padded if isinstance(limited, Mapping) and name in limited]
    return bool(budget.padded)


def require_size(found: StepSize | None) -> StepSize:
    """Returns the size of a step that was found. Raises ConfigError if none was given."""
    return StepSize(check_batch_size(None, None, 1)) if found is None else found


def _read_older(call: str, budget: Any, given: Mapping[str, Any], rows: Callable[[], int]) -> Budget | None:
    """Returns the budget that arguments of 0.12 mean, None if they say nothing. `rows` returns the number of rows of a
    step, which micro-batches may have been given beside.
    """
    cost, most, micro = (given.get(name) for name in ("global_batch_cost", "max_rows", "micro_batch_cost"))
    padded = given.get("padded", True)
    if budget is not None:
        raise ConfigError(f"{call}: budget={budget!r} has taken the place of {', '.join(given)}: leave these out.")
    if cost is None and (most is not None or (padded is not True and micro is None)):
        raise ConfigError(
            f"{call}: max_rows={most}, padded={padded}: these belong to a cost, which is missing. Write "
            "budget=raylance.Budget(…, max_rows=…, padded=…), or leave them out."
        )
    if cost is None and micro is None:
        return None
    meant = Budget(cost, max_rows=rows() if cost is None else most, padded=padded, micro=micro)
    warn_replaced(call, given, f"budget=raylance.{meant}", depth=2)
    return meant
