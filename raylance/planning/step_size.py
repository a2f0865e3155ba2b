"""The size of a step, a number of rows or a cost, and what follows the last whole step of an epoch."""

import dataclasses
from typing import Any, Literal

from raylance.arguments import check_batch_size, check_flag, check_integer
from raylance.errors import ConfigError

Remainder = Literal["drop", "pad", "ragged"]
REMAINDERS: tuple[Remainder, ...] = ("drop", "pad", "ragged")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a step may cost, in place of a number of rows.

    Attributes:
        cost: Most cost of a step over all ranks. A row that costs more is a step by itself.
        max_rows: Most rows of a step over all ranks; None for any number.
        padded: Whether a step costs its rows times its dearest row, because each row is padded to it; if not, the sum
            of its rows' costs. Steps of the order `Buckets` are always counted as if they were padded.
    """

    cost: int
    max_rows: int | None = None
    padded: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "cost", check_integer("global_batch_cost", self.cost, 1))
        object.__setattr__(self, "padded", check_flag("padded", self.padded))
        if self.max_rows is not None:
            object.__setattr__(self, "max_rows", check_integer("max_rows", self.max_rows, 1))

    def rows_of(self, cost: int) -> int:
        """Returns how many rows of this cost a step may have, at least one."""
        fitting = max(1, self.cost // max(1, cost))
        return fitting if self.max_rows is None else min(fitting, self.max_rows)


Size = int | Budget
"""The size of a step over all ranks: a number of rows, or a budget."""


def size_arguments(size: Size) -> dict[str, Any]:
    """Returns the arguments of an iterator that give this size; see `check_size`."""
    if isinstance(size, Budget):
        return {"global_batch_cost": size.cost, "max_rows": size.max_rows, "padded": size.padded}
    return {"global_batch_size": size}


def check_size(
    dp_size: int,
    global_batch_size: int | None,
    batch_size: int | None = None,
    global_batch_cost: int | None = None,
    max_rows: int | None = None,
    *,
    padded: bool = True,
) -> Size:
    """Returns the size of a step, from the arguments of an iterator; see `RankLoader.iter_torch_batches`.

    Raises:
        ConfigError: If not exactly one of the sizes is given, or an argument cannot be honoured.
    """
    if global_batch_cost is None:
        if max_rows is not None or padded is not True:
            raise ConfigError(
                f"max_rows={max_rows}, padded={padded}: these belong to global_batch_cost=, which is missing. Give it, "
                "or leave them out."
            )
        return check_batch_size(global_batch_size, batch_size, dp_size)
    if global_batch_size is not None or batch_size is not None:
        raise ConfigError(
            f"global_batch_cost={global_batch_cost}, global_batch_size={global_batch_size}, batch_size={batch_size}: "
            "a step has a cost or a number of rows. Give one of them; max_rows= limits the rows of a step of a cost."
        )
    return Budget(cost=global_batch_cost, max_rows=max_rows, padded=padded)
