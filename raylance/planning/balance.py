"""Which rank gets which rows of a global batch, so that all ranks have about the same work; and what padding and what
imbalance follow from a plan.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from raylance.arguments import check_flag, check_word
from raylance.errors import ConfigError
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.steps import Budget, cut_costs, slice_of

if TYPE_CHECKING:
    from raylance.planning.plan import Plan

Floats = npt.NDArray[np.float64]

_ENOUGH = 0.002  # ranks are not balanced further once the dearest is this close to the mean
_SAMPLED = 128  # steps of which a summary is made


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Gives all ranks about the same work in each step, by moving rows between ranks. Pass it to `raylance.dataset` as
    `balance`; it needs `cost`.

    The rows of the global batch stay the same. The dearest rank swaps a row with the cheapest rank until their costs
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


class RowCosts(NamedTuple):
    """The costs of the rows of a step, rank by rank, int64, (n,); which rows are not fill, bool, (n,); and the ranks'
    half-open slices.
    """

    costs: Int64Array
    is_real: BoolArray
    slices: list[tuple[int, int]]

    @property
    def by_rank(self) -> list[Int64Array]:
        """The costs of each rank's rows."""
        return [self.costs[low:high] for low, high in self.slices]

    @property
    def total(self) -> int:
        """The cost of the step over all ranks, without the rows that only fill it."""
        return int(self.costs[self.is_real].sum())


def row_costs(plan: "Plan", epoch: int, position: int) -> RowCosts:
    """Returns the costs of the rows of a step."""
    positions = plan.positions(epoch, position, 0, plan.step_size(epoch, position))
    costs = plan.order.costs(plan.select(epoch, positions)).astype(np.int64)
    slices = [plan.rank_slice(epoch, position, rank) for rank in range(plan.dp_size)]
    return RowCosts(costs, positions < plan.epoch_rows, slices)


class StepCosts(NamedTuple):
    """The costs of a step.

    Attributes:
        own: Sum of the costs of a rank's rows.
        padded: The rank's rows times the cost of the dearest of them.
        dearest: The largest `padded` of all ranks.
    """

    own: int
    padded: int
    dearest: int

    @classmethod
    def of(cls, rows: RowCosts, dp_rank: int) -> Self:
        """Returns the costs of a step, seen from one rank."""
        slices = rows.by_rank
        paid = [len(own) * int(own.max(initial=0)) for own in slices]
        return cls(int(slices[dp_rank].sum()), paid[dp_rank], max(paid))


def cut_step(rows: RowCosts, dp_rank: int, micro: Budget) -> tuple[list[int], int]:
    """Cuts a rank's rows of a step into micro-batches of at most the cost of a budget, as many on each rank.

    A rank that needs fewer than another one cuts its largest ones further. If it has too few rows for that, its last
    micro-batches have no row.

    Returns:
        The bounds of the micro-batches in the rank's rows, ascending from 0, (micro-batches + 1,); and the cost of the
        whole step over all ranks, without the rows that only fill it.
    """
    cut = [cut_costs(own, micro).tolist() if len(own) else [0] for own in rows.by_rank]
    most, bounds = max(1, *(len(each) - 1 for each in cut)), cut[dp_rank]
    while len(bounds) <= most:
        sizes = [end - begin for begin, end in itertools.pairwise(bounds)]
        largest = max(sizes, default=0)
        if largest < 2:
            bounds += [bounds[-1]] * (most + 1 - len(bounds))
            break
        at = sizes.index(largest)
        bounds.insert(at + 1, bounds[at] + largest // 2)
    return bounds, rows.total


def slice_bounds(rows: int, dp_size: int) -> list[tuple[int, int]]:
    """Returns the half-open slices of the ranks of a step."""
    return [slice_of(rows, rank, dp_size) for rank in range(dp_size)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostFigures:
    """What the costs of rows mean for the ranks, from a sample of the steps of an epoch.

    Attributes:
        rows: Mean number of rows of a step over all ranks.
        cost: Mean of the sums of the costs of a step over all ranks.
        padding: Share of padding, if each rank pads its rows to the dearest of them.
        padded: The ratio of the dearest rank to the mean of the ranks, where a rank's rows cost their number times the
            dearest: the median of the steps, and the value that 90 % of the steps do not exceed.
        summed: The same, where costs are added up, as without padding.
        squared: The same, where squared costs are added up, as for attention.
        moved: Share of the rows that a `Balance` moves to other ranks; about this share more is read.
    """

    rows: float
    cost: float
    padding: float
    padded: tuple[float, float]
    summed: tuple[float, float]
    squared: tuple[float, float]
    moved: float

    def __str__(self) -> str:
        """Returns the figures in words."""
        ratios = {"padded": self.padded, "not padded": self.summed, "squared": self.squared}
        words = ", ".join(f"{name} {half:.2f} and {most:.2f}" for name, (half, most) in ratios.items())
        moved = f"; {self.moved:.1%} of the rows change the rank" if self.moved else ""
        return (
            f"{self.rows:,.0f} rows and cost {self.cost:,.0f} a step; {self.padding:.1%} padding; the dearest rank "
            f"over the mean, median and 90 %: {words}{moved}"
        )


def cost_figures(plan: "Plan", epoch: int = 0, sample_steps: int = _SAMPLED) -> CostFigures | None:
    """Computes what the costs mean for the ranks, from steps at equal distances; None if rows have no costs."""
    if not plan.order.has_costs:
        return None
    wanted = (np.arange(sample_steps) * (plan.epoch_rows / sample_steps)).astype(np.int64).tolist()
    starts = dict.fromkeys(plan.start_of(epoch, position) for position in wanted)
    steps = [_look_at(plan, epoch, start) for start in starts if not plan.is_over(epoch, start)]
    if not steps:
        return None
    rows, cost, paid, moved = (sum(getattr(step, name) for step in steps) for name in ("rows", "cost", "paid", "moved"))
    return CostFigures(
        rows=rows / len(steps),
        cost=cost / len(steps),
        padding=1 - cost / paid if paid else 0.0,
        padded=_quantiles([step.padded for step in steps]),
        summed=_quantiles([step.summed for step in steps]),
        squared=_quantiles([step.squared for step in steps]),
        moved=moved / max(1, rows),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    rows: int
    cost: int
    paid: int
    moved: int
    padded: float
    summed: float
    squared: float


def _look_at(plan: "Plan", epoch: int, start: int) -> _Step:
    rows = row_costs(plan, epoch, start)
    slices = rows._replace(costs=np.where(rows.is_real, rows.costs, 0)).by_rank
    paid = [len(own) * int(own.max(initial=0)) for own in slices]
    sums = [int(own.sum()) for own in slices]
    squares = [float((own.astype(np.float64) ** 2).sum()) for own in slices]
    moved = 0
    if plan.balance is not None:
        moved = int((_ranks_of(plan, epoch, start) != _ranks_of(plan.by_lane, epoch, start)).sum())
    return _Step(len(rows.costs), sum(sums), sum(paid), moved, _ratio(paid), _ratio(sums), _ratio(squares))


def _ranks_of(plan: "Plan", epoch: int, start: int) -> Int64Array:
    """Returns the rank of each row of a step, by position."""
    positions = plan.positions(epoch, start, 0, plan.step_size(epoch, start))
    sizes = [high - low for low, high in (plan.rank_slice(epoch, start, rank) for rank in range(plan.dp_size))]
    return np.repeat(np.arange(plan.dp_size, dtype=np.int64), sizes)[positions.argsort()]


def _ratio(of_ranks: Sequence[float]) -> float:
    mean = sum(of_ranks) / len(of_ranks)
    return max(of_ranks) / mean if mean else 1.0


def _quantiles(values: list[float]) -> tuple[float, float]:
    half, most = np.quantile(values, [0.5, 0.9]).tolist()
    return half, most
