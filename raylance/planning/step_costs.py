"""What the steps of a plan cost, and what padding and what imbalance follow from it."""

import dataclasses
import itertools
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from raylance.orders.order import COST, costs_in_words
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.cutting import cut_costs
from raylance.planning.plan import Plan
from raylance.planning.step_size import CostLimit

Floats = npt.NDArray[np.float64]

_SAMPLED = 128  # steps of which a summary is made


class RowCosts(NamedTuple):
    """The names of the costs; which of them are counted as if rows were padded, bool, (costs,); the costs of the rows
    of a step, rank by rank, int64, (n, costs); which rows are not fill, bool, (n,); and the ranks' half-open slices.
    """

    names: tuple[str, ...]
    is_padded: BoolArray
    costs: Int64Array
    is_real: BoolArray
    slices: list[tuple[int, int]]

    @property
    def by_rank(self) -> list[Int64Array]:
        """The costs of each rank's rows, (rows, costs) each."""
        return [self.costs[low:high] for low, high in self.slices]

    @property
    def total(self) -> int | dict[str, int]:
        """The cost of the step over all ranks, without the rows that only fill it; of several costs, by name."""
        found: dict[str, int] = dict(zip(self.names, self.costs[self.is_real].sum(axis=0).tolist(), strict=True))
        return found.get(COST, found)


def row_costs(plan: Plan, epoch: int, position: int) -> RowCosts:
    """Returns the costs of the rows of a step."""
    positions = plan.positions(epoch, position, 0, plan.step_size(epoch, position))
    costs = plan.order.costs(plan.select(epoch, positions)).astype(np.int64)
    slices = [plan.rank_slice(epoch, position, rank) for rank in range(plan.dp_size)]
    names = plan.order.cost_names
    is_padded = np.array([plan.pads(name) for name in names])
    return RowCosts(names, is_padded, costs, positions < plan.rows_of(epoch), slices)


class StepCosts(NamedTuple):
    """What a step costs, in one of the costs.

    Attributes:
        own: Sum of the costs of a rank's rows.
        padded: The rank's rows times the highest cost of them; of a cost whose rows are not padded, `own`.
        costliest: The largest `padded` of all ranks.
    """

    own: int
    padded: int
    costliest: int

    @classmethod
    def of(cls, rows: RowCosts, dp_rank: int) -> dict[str, Self]:
        """Returns the costs of a step, seen from one rank, by name."""
        slices = rows.by_rank
        sums = np.array([own.sum(axis=0) for own in slices])
        padded = np.array([len(own) * own.max(axis=0, initial=0) for own in slices])
        paid = np.where(rows.is_padded, padded, sums)
        numbers = (sums[dp_rank], paid[dp_rank], paid.max(axis=0))
        return {name: cls(*each) for name, each in zip(rows.names, np.transpose(numbers).tolist(), strict=True)}


def cut_step(rows: RowCosts, dp_rank: int, micro: CostLimit) -> tuple[list[int], int | dict[str, int]]:
    """Cuts a rank's rows of a step into micro-batches of at most the cost of a budget, as many on each rank.

    A rank that needs fewer than another one cuts its largest ones further. If it has too few rows for that, its last
    micro-batches have no row.

    Returns:
        The bounds of the micro-batches in the rank's rows, ascending from 0, (micro-batches + 1,); and the cost of the
        whole step; see `RowCosts.total`.
    """
    limits = micro.of(rows.names)
    cut = [cut_costs(own, limits).tolist() if len(own) else [0] for own in rows.by_rank]
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostFigures:
    """What the costs of rows mean for the ranks, from a sample of the steps of an epoch.

    Attributes:
        rows: Mean number of rows of a step over all ranks.
        cost: Mean of the sums of the costs of a step over all ranks.
        padding: Share of padding, if each rank pads its rows to the highest cost of them.
        padded: The ratio of the highest cost of a rank to the mean of the ranks, where a rank's rows cost their number
            times the highest cost of them: the median of the steps, and the value that 90 % of the steps do not exceed.
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
        return self.in_words(COST)

    def in_words(self, name: str, *, is_padded: bool = True) -> str:
        """Returns the figures of the cost of this name in words, without those of padding if there is none."""
        ratios = {"padded": self.padded} if is_padded else {}
        ratios |= {"not padded": self.summed, "squared": self.squared}
        words = ", ".join(f"{name} {half:.2f} and {most:.2f}" for name, (half, most) in ratios.items())
        moved = f"; {self.moved:.1%} of the rows change the rank" if self.moved else ""
        uneven = (
            f"; cost of the costliest rank / of the mean rank, in the median step and the worst tenth: {words}{moved}"
        )
        is_even = all(most == 1 for _, most in ratios.values())  # as with one rank
        cost = f"{'cost ' * (name == COST)}{costs_in_words({name: self.cost})}"
        step = f"{self.rows:,.0f} rows and {cost} a step{f'; {self.padding:.1%} padding' * is_padded}"
        return step if is_even else step + uneven


def cost_figures(
    plan: Plan, epoch: int = 0, sample_steps: int = _SAMPLED
) -> CostFigures | dict[str, CostFigures] | None:
    """Computes what the costs mean for the ranks, from steps at equal distances; by name if rows have several costs;
    None if they have none.
    """
    wanted = (np.arange(sample_steps) * (plan.rows_of(0) / sample_steps)).astype(np.int64).tolist()
    starts = dict.fromkeys(plan.start_of(epoch, position) for position in wanted) if plan.order.cost_names else {}
    steps = [_look_at(plan, epoch, start) for start in starts if not plan.is_over(epoch, start)]
    if not steps:
        return None
    rows = sum(step.rows for step in steps)
    cost, paid, padded, summed, squared = (
        np.array([getattr(step, name) for step in steps]) for name in ("cost", "paid", "padded", "summed", "squared")
    )
    found = {
        name: CostFigures(
            rows=rows / len(steps),
            cost=float(cost[:, k].mean()),
            padding=float(1 - cost[:, k].sum() / paid[:, k].sum()) if paid[:, k].any() else 0.0,
            padded=_quantiles(padded[:, k]),
            summed=_quantiles(summed[:, k]),
            squared=_quantiles(squared[:, k]),
            moved=sum(step.moved for step in steps) / max(1, rows),
        )
        for k, name in enumerate(plan.order.cost_names)
    }
    return found.get(COST, found)


class _Step(NamedTuple):
    """A sampled step. All arrays are of shape (costs,)."""

    rows: int
    moved: int
    cost: Floats
    paid: Floats
    padded: Floats
    summed: Floats
    squared: Floats


def _look_at(plan: Plan, epoch: int, start: int) -> _Step:
    rows = row_costs(plan, epoch, start)
    slices = rows._replace(costs=np.where(rows.is_real[:, None], rows.costs, 0)).by_rank
    paid = np.array([len(own) * own.max(axis=0, initial=0) for own in slices], dtype=np.float64)
    sums = np.array([own.sum(axis=0) for own in slices], dtype=np.float64)
    squares = np.array([(own.astype(np.float64) ** 2).sum(axis=0) for own in slices])
    moved = 0
    if plan.balance is not None:
        moved = int((_ranks_of(plan, epoch, start) != _ranks_of(plan.by_lane, epoch, start)).sum())
    ratios = (_ratio(paid), _ratio(sums), _ratio(squares))
    return _Step(len(rows.costs), moved, sums.sum(axis=0), paid.sum(axis=0), *ratios)


def _ranks_of(plan: Plan, epoch: int, start: int) -> Int64Array:
    """Returns the rank of each row of a step, by position."""
    positions = plan.positions(epoch, start, 0, plan.step_size(epoch, start))
    sizes = [high - low for low, high in (plan.rank_slice(epoch, start, rank) for rank in range(plan.dp_size))]
    return np.repeat(np.arange(plan.dp_size, dtype=np.int64), sizes)[positions.argsort()]


def _ratio(of_ranks: Floats) -> Floats:
    """Returns the largest of the ranks' numbers over their mean, of (ranks, costs); 1 if all are 0."""
    mean = of_ranks.mean(axis=0)
    return np.where(mean > 0, of_ranks.max(axis=0) / np.where(mean > 0, mean, 1), 1.0)


def _quantiles(values: Floats) -> tuple[float, float]:
    half, most = np.quantile(values, [0.5, 0.9]).tolist()
    return half, most
