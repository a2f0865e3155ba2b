"""Which rank gets which rows of a global batch, so that all ranks have about the same work."""

import dataclasses
from typing import Literal

import numpy as np
import numpy.typing as npt

from raylance.arguments import check_flag, check_word
from raylance.descriptions import Setting
from raylance.errors import ConfigError
from raylance.orders.permutation import Int64Array
from raylance.planning.steps import slice_of

Floats = npt.NDArray[np.float64]

_ENOUGH = 0.002  # ranks are not balanced further once the costliest is this close to the mean


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Balance(Setting):
    """Gives all ranks about the same work in each step, by moving rows between ranks. Pass it to `raylance.dataset` as
    `balance`; it needs `cost`.

    The rows of the global batch stay the same. The costliest rank swaps a row with the cheapest rank until their costs
    are about equal. Each rank computes the swaps by itself.

    Attributes:
        by: What is balanced: the sum of the "cost" of a rank's rows, or of their "squared" costs, as for attention.
        most_moved: Largest share of a step's rows that may move to another rank. A rank that gets a row from another
            rank's lanes reads it by itself, and the other one reads past it. So about this share more is read.
        equal_rows: Whether each rank keeps its number of rows. If not, a rank may also give a row and get none, as long
            as it has another one. That helps if ranks have few rows, or costs differ much. Batches then differ in their
            number of rows: do not average a loss over the ranks, but add it up, and divide by what the step has.
    """

    by: Literal["cost", "squared"] = "cost"
    most_moved: float = 0.1
    equal_rows: bool = True

    def __post_init__(self) -> None:
        check_word("Balance: by", self.by, ("cost", "squared"))
        object.__setattr__(self, "equal_rows", check_flag("Balance: equal_rows", self.equal_rows))
        moved = self.most_moved
        if isinstance(moved, bool) or not isinstance(moved, int | float | np.floating) or not 0 <= moved <= 1:
            raise ConfigError(f"Balance(most_moved={moved!r}): give a share of the rows, from 0 to 1.")
        object.__setattr__(self, "most_moved", float(moved))

    def arrange(self, costs: Int64Array, dp_size: int) -> list[Int64Array]:
        """Divides the rows of a step among the ranks, so that they have about the same cost.

        Args:
            costs: Costs of the rows in the order of the ranks' slices without a balance, int64, (n,).
            dp_size: Number of data-parallel ranks.

        Returns:
            The indices of the rows of each rank, int64.
        """
        weights = costs.astype(np.float64) ** (2 if self.by == "squared" else 1)
        rows = np.arange(len(costs), dtype=np.int64)
        of_ranks = [rows[low:high].copy() for low, high in slice_bounds(len(costs), dp_size)]
        loads = np.array([weights[own].sum() for own in of_ranks])
        enough, movable = (1 + _ENOUGH) * loads.mean(), int(self.most_moved * len(costs))
        while movable > 1 - (not self.equal_rows):
            most, least = int(loads.argmax()), int(loads.argmin())
            gap = (loads[most] - loads[least]) / 2
            if loads[most] <= enough:
                break
            found = self._find(of_ranks[most], of_ranks[least], weights, gap, movable)
            if found is None:
                break
            give, get = found
            given = of_ranks[most][give]
            change = float(weights[given])
            if get is None:
                of_ranks[most], of_ranks[least] = np.delete(of_ranks[most], give), np.append(of_ranks[least], given)
            else:
                change -= float(weights[of_ranks[least][get]])
                of_ranks[most][give], of_ranks[least][get] = of_ranks[least][get], given
            loads[most] -= change
            loads[least] += change
            movable -= 1 + (get is not None)
        return of_ranks

    def _find(
        self, dear: Int64Array, cheap: Int64Array, weights: Floats, gap: float, movable: int
    ) -> tuple[int, int | None] | None:
        """Returns the place of the row to give, and that of the row to get for it, or None for no row, that make two
        ranks most alike; None if nothing makes them more alike. `gap` is half of the difference of their costs.
        """
        given, got = weights[dear], weights[cheap] if movable > 1 else weights[:0]
        if not self.equal_rows and len(dear) > 1:
            got = np.append(got, 0.0)  # nothing for it
        if not len(given) or not len(got):
            return None
        ascending = got.argsort(kind="stable")
        wanted = given - gap  # the cost of the row to get for each row to give
        at = got[ascending].searchsorted(wanted)
        bounded = np.concatenate([[-np.inf], got[ascending], [np.inf]])
        below, above = wanted - bounded[at], bounded[at + 1] - wanted
        is_below = below < above
        give = int(np.where(is_below, below, above).argmin())
        get = int(ascending[at[give] - bool(is_below[give])])
        if not 0 < given[give] - got[get] < 2 * gap:
            return None
        return give, None if get == len(cheap) or movable == 1 else get


def check_balance(balance: object, *, has_costs: bool) -> None:
    """Raises ConfigError if a balance has another type, or rows have no costs."""
    if balance is None:
        return
    if not isinstance(balance, Balance):
        raise ConfigError(f"balance={balance!r}: give raylance.Balance(…), or None.")
    if not has_costs:
        raise ConfigError(
            f"{balance}: the rows have no costs to balance; nothing was started. Give cost= to raylance.dataset; in a "
            "mixture, to all datasets."
        )


def slice_bounds(rows: int, dp_size: int) -> list[tuple[int, int]]:
    """Returns the half-open slices of the ranks of a step."""
    return [slice_of(rows, rank, dp_size) for rank in range(dp_size)]
