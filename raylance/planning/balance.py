"""Which rank gets which rows of a global batch, so that all ranks have about the same work."""

import dataclasses
import functools
import math
from typing import Literal, Self

import numpy as np
import numpy.typing as npt

from raylance.arguments import check_flag, check_word
from raylance.descriptions import Setting
from raylance.errors import ConfigError
from raylance.orders.permutation import Int64Array
from raylance.planning.steps import slice_of

Floats = npt.NDArray[np.float64]

_ENOUGH = 0.006  # ranks are not balanced further once the costliest is this close to the mean
_LEAST = 1e-9  # a swap that gains less, as a share of the mean load, is none
# One of 16 ranks, but at least one, swaps a row in each round, and chooses among as many others: 1 of 8 takes half of
# the time for 64 ranks, and 90 % of the steps are within 2.5 % of the mean, not 1.5 %, if 0.3 of the rows may move.
_RANKS = 16
_PAIRS = 1 << 15  # pairs of rows that are tried in a round
_LEAST_TRIED = 16  # rows of each rank among them; with 8, steps of 512 ranks are 4 % less equal
_VIEWS = 4  # rounds that find nothing, if they try other rows each time
_SQUARED_BITS = 16  # of costs that are squared, so that the sums of two million squares are below 2⁵³


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Balance(Setting):
    """Gives all ranks about the same work in each step, by moving rows between ranks. Pass it to `raylance.dataset` as
    `balance`; it needs `cost`.

    The rows of the global batch stay the same. The costliest rank swaps a row with another one, so that the larger of
    their costs is least, until all are about equal. If rows have several costs, the cost of a rank is the largest of
    them, each in units of the mean of the ranks, or of the costliest row if that is more: patches of few images cannot
    be equal, and tokens are. Each rank computes the swaps by itself.

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
        """Divides the rows of a step among the ranks, so that the largest load of a rank, in any cost, is least.

        Args:
            costs: Costs of the rows in the order of the ranks' slices without a balance, int64, (n,) or (n, costs).
            dp_size: Number of data-parallel ranks.

        Returns:
            The indices of the rows of each rank, int64.
        """
        dealt, movable = _Dealt.of(costs.reshape(len(costs), -1), dp_size, self), int(self.most_moved * len(costs))
        at_once, failures = max(1, dp_size // _RANKS), 0
        while movable > 1 and failures < dealt.views:
            peaks = dealt.peaks()
            ranks = np.argsort(-peaks, kind="stable")
            if peaks[ranks[0]] <= 1 + _ENOUGH:
                break
            moved = dealt.swap(ranks, peaks, min(at_once, movable // 2))
            movable -= moved
            if not moved and at_once > 1:  # each rank has tried a part of the others
                at_once = 1
            else:
                failures = 0 if moved else failures + 1
        return dealt.rows_of_ranks()


@dataclasses.dataclass(slots=True)
class _Dealt:
    """The rows of a step as they are divided among ranks.

    All sums are of integers below 2⁵³: sums of fractions could differ between the processors of two ranks, which would
    then not agree on their rows.
    """

    slots: Int64Array  # the rows of each rank, (ranks, slots); n is an empty slot
    twice: Floats  # two times their costs, (costs, ranks, slots)
    loads: Floats  # the sums of the costs, (costs, ranks)
    scales: Floats  # 1 / two times the least load that the costliest rank can have, (costs, 1, 1, 1, 1)
    rows: int  # n
    equal_rows: bool
    tried: int  # slots of a rank whose rows are tried at once
    first: int = 0  # the first one of them

    @classmethod
    def of(cls, costs: Int64Array, dp_size: int, balance: Balance) -> Self:
        """Deals the rows in equal slices. `costs` are int64, (n, costs)."""
        rows = len(costs)
        if balance.by == "squared":
            bits = [int(each).bit_length() for each in costs.max(axis=0, initial=0)]
            costs = (costs >> np.maximum(0, np.array(bits, dtype=np.int64) - _SQUARED_BITS)) ** 2
        bounds = slice_bounds(rows, dp_size)
        most = max(high - low for low, high in bounds)
        slots = np.full((dp_size, most if balance.equal_rows else most + most // 2 + 1), rows, dtype=np.int64)
        for own, (low, high) in zip(slots, bounds, strict=True):
            own[: high - low] = np.arange(low, high)
        held = np.zeros((costs.shape[1], rows + 1))
        held[:, :rows] = costs.T
        # No rank has less than the largest row: with few images in a step, patches cannot be equal, but tokens can.
        least = np.maximum(held.sum(axis=1) / dp_size, held.max(axis=1))
        scales = (0.5 / np.maximum(1, least))[:, None, None, None, None]
        twice = 2 * held[:, slots]
        tried = min(slots.shape[1], max(_LEAST_TRIED, math.isqrt(_PAIRS // dp_size)))
        return cls(slots, twice, twice.sum(axis=2) / 2, scales, rows, balance.equal_rows, tried)

    @property
    def views(self) -> int:
        """Number of times that `swap` may fail until nothing is left: it tries other slots each time."""
        return min(_VIEWS, -(-int(self.slots.shape[1]) // self.tried))

    def peaks(self) -> Floats:
        """Returns the largest load of each rank, in units of the least that is possible, (ranks,)."""
        return np.asarray((self.loads * (2 * self.scales[:, :, 0, 0, 0])).max(axis=0))

    def swap(self, ranks: Int64Array, peaks: Floats, most: int) -> int:
        """Swaps a row of each of the `most` first ranks with one of another rank, so that the larger load of these two
        is least. Each tries its own part of the other ranks.

        Args:
            ranks: The ranks, the one with the largest load first.
            peaks: Their loads; see `peaks`.
            most: Number of ranks.

        Returns:
            The number of rows that were moved.
        """
        each = (len(ranks) - most) // most
        heavy, light = ranks[:most, None], ranks[len(ranks) - each * most :][::-1].reshape(each, most).T
        columns = self._columns()
        one, other = self.loads.take(heavy, axis=1), self.loads.take(light, axis=1)  # (costs, most, 1), (…, each)
        give, get = self.twice.take(heavy, axis=1)[..., columns], self.twice.take(light, axis=1)[..., columns]
        larger = get[..., None, :] - (give - (one - other)[..., None])[..., None]
        np.abs(larger, out=larger)  # how far two ranks are apart after each swap, (costs, most, each, tried, tried)
        larger += (one + other)[..., None, None]
        larger *= self.scales
        found = functools.reduce(np.maximum, larger)
        if not (self.equal_rows and self.slots.size == self.rows):
            self._forbid(found, heavy, light, columns)
        best = found.reshape(most, -1)
        where = best.argmin(axis=1)
        rank, give_at, get_at = np.unravel_index(where, found.shape[1:])
        chosen = np.arange(most)
        is_better = (best[chosen, where] < peaks[heavy[:, 0]] - _LEAST) & (peaks[heavy[:, 0]] > 1 + _ENOUGH)
        chosen = chosen[is_better]
        giving, getting = heavy[chosen, 0], light[chosen, rank[is_better]]
        slot = np.arange(self.slots.shape[1])[columns]
        one, other = slot[give_at[is_better]], slot[get_at[is_better]]
        change = self.twice[:, getting, other] - self.twice[:, giving, one]
        self.twice[:, giving, one] += change
        self.twice[:, getting, other] -= change
        self.loads[:, giving] += change / 2
        self.loads[:, getting] -= change / 2
        given, got = self.slots[giving, one], self.slots[getting, other]
        self.slots[giving, one], self.slots[getting, other] = got, given
        return int(np.count_nonzero(given < self.rows) + np.count_nonzero(got < self.rows))

    def _columns(self) -> Int64Array | slice:
        """Returns the slots whose rows are tried: all, or others each time."""
        width = self.slots.shape[1]
        self.first += 1
        if self.tried == width:
            return slice(None)
        return np.asarray((self.first + np.arange(self.tried) * width // self.tried) % width)

    def _forbid(self, found: Floats, heavy: Int64Array, light: Int64Array, columns: Int64Array | slice) -> None:
        """Makes swaps infinite that change numbers of rows if these must stay, or leave a rank without rows."""
        gives = (self.slots[heavy][..., columns] < self.rows)[..., None]
        gets = (self.slots[light][..., columns] < self.rows)[:, :, None, :]
        is_move = gives != gets
        if not self.equal_rows:
            rows = (self.slots < self.rows).sum(axis=1)
            only = np.where(gives, (rows[heavy] == 1)[:, :, None, None], (rows[light] == 1)[:, :, None, None])
            is_move &= only
        found[np.broadcast_to(is_move, found.shape)] = np.inf

    def rows_of_ranks(self) -> list[Int64Array]:
        """Returns the rows of each rank, int64."""
        return [own[own < self.rows] for own in self.slots]


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
