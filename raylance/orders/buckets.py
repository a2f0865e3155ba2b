"""The order that brings rows of similar cost together, without reading more rows than a shuffle in windows reads.

Like `WindowShuffle`, it reads a window of each lane at a time; the windows that all lanes read at once are a round.
Each lane sorts the rows of its window by cost. The first rows of all lanes are a line, the second ones the next line,
and so on, so that a line has one row of each lane, at the same quantile. Consecutive lines are joined to buckets, and
the buckets come in random order. So a step that lies in one bucket has rows of similar cost from every lane.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np

from raylance.errors import ConfigError
from raylance.orders.order import (
    COST,
    Auto,
    Facts,
    PicklesFields,
    Resolved,
    Round,
    Rows,
    Tables,
    check_count,
    cost_names,
    cost_table,
)
from raylance.orders.permutation import Int32Array, Int64Array, permute, subkeys
from raylance.orders.shuffles import Laned, LanedEpoch, LanedResolved

_ROUNDS = 4  # rounds whose sorted rows a process keeps
_MOST = 1 << 62


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buckets(Laned):
    """Shuffles like `WindowShuffle`, and brings rows of similar cost together: length-grouped batches, exact, seekable.

    Needs `cost=` of `raylance.dataset`. Has the fields of `WindowShuffle`, and:

    Attributes:
        bucket_steps: Width of a bucket, in steps: among the rows of this number of steps, rows are at random. 1 has the
            least padding.
        bucket_rows: Rows of a bucket if batches have a number of rows; 0 if they have a cost. "auto" follows from
            `bucket_steps` and the first batches, and checkpoints record it.
        bucket_cost: Cost of a bucket if batches have a cost: its rows times the cost of its costliest row; 0 if they
            have a number of rows. "auto" as above.
        by: Name of the cost by which rows come together, if `cost=` is a dict of several; "" for the first one.
            A budget holds for the others, too: it cuts a bucket of few tokens that has too many patches for one step.
        cost: What this cost is, in words. `raylance.dataset` fills it in.
    """

    name: ClassVar[str] = "bucket"
    bucket_steps: int = 1
    bucket_rows: int | Auto = "auto"
    bucket_cost: int | Auto = "auto"
    by: str = ""
    cost: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "bucket_steps")
        if not isinstance(self.by, str):
            raise ConfigError(f"Buckets(by={self.by!r}): give the name of a cost, as cost= of raylance.dataset has it.")
        for field in ("bucket_rows", "bucket_cost"):
            if getattr(self, field) != 0:
                check_count(self, field, "auto", most=_MOST)
        if self.bucket_rows == 0 == self.bucket_cost:
            raise ConfigError("Buckets(bucket_rows=0, bucket_cost=0): a bucket has rows. Leave one of them out.")

    def bind(self, rows: Rows) -> tuple[Self, Tables]:
        """See `Order.bind`.

        Raises:
            ConfigError: If rows have no costs.
        """
        if not rows.costs:
            raise ConfigError(
                "Buckets needs the cost of each row; nothing was started. Give cost= to raylance.dataset, such as "
                'cost="length" or cost=raylance.TokensOf("input_ids").'
            )
        if self.by and self.by not in rows.costs:
            found = "one cost, without a name" if COST in rows.costs else f"the costs {', '.join(rows.costs)}"
            raise ConfigError(
                f"Buckets(by={self.by!r}): the rows have {found}; nothing was started. Name one of several, or leave "
                "by= out."
            )
        bound, tables = super().bind(rows)
        by = self.by or next(iter(rows.costs))
        return dataclasses.replace(bound, by=self.by if len(rows.costs) == 1 else by, cost=rows.costs[by]), tables

    def params(self) -> dict[str, Any]:
        """See `Order.params`. Earlier versions had no `by`, which one cost does not need."""
        found = super().params()
        return found if self.by else {name: value for name, value in found.items() if name != "by"}

    def resolve(self, facts: Facts) -> Resolved:
        """See `Order.resolve`."""
        by = self.by or next(iter(cost_names(facts.tables)), "")
        most = facts.global_batch_cost.get(by, 0)
        by_cost = most > 0
        rows, cost = self.bucket_rows, self.bucket_cost
        if isinstance(rows, str):
            rows = 0 if by_cost or not isinstance(cost, str) else self.bucket_steps * facts.global_batch_size
        if isinstance(cost, str):
            cost = self.bucket_steps * most if by_cost and not rows else 0
        found = super(Buckets, dataclasses.replace(self, bucket_rows=rows, bucket_cost=cost)).resolve(facts)
        lines = (found.read_positions or 1) // found.lane_count
        if rows:  # a whole number of buckets in each round, so that no step lies in two of them
            width = -(-rows // found.lane_count)
            lines = max(lines // width, 1) * width
        fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        fields |= {"read_positions": lines * found.lane_count, "bucket_rows": rows, "bucket_cost": cost, "by": by}
        return BucketsResolved(**fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketsResolved(PicklesFields, LanedResolved):
    """`Buckets` for one selection. Rounds have `read_positions` positions; the last one may have fewer."""

    settings: Buckets
    bucket_rows: int
    bucket_cost: int
    by: str  # name of a cost

    @property
    def buckets_by(self) -> str | None:
        """See `Resolved.buckets_by`."""
        return self.by

    def epoch(self, number: int) -> "BucketsEpoch":
        """See `Resolved.epoch`."""
        return self._epoch(number)

    @functools.cached_property
    def _epoch(self) -> "Callable[[int], BucketsEpoch]":
        """A function that returns an epoch by number. It keeps the last two, because each step and chunk asks again."""
        return functools.lru_cache(maxsize=2)(functools.partial(BucketsEpoch, self))


class BucketsEpoch(LanedEpoch):
    """One epoch. In the last round, the lanes may differ by one row: the cheapest rows of the longer lanes then come
    last, as a part of a line, after the cheapest bucket.
    """

    order: BucketsResolved

    def round(self, number: int) -> Round:
        """See `Epoch.round`."""
        return self._round(number)

    @functools.cached_property
    def _round(self) -> Callable[[int], Round]:
        return functools.lru_cache(maxsize=_ROUNDS)(self._make_round)

    @functools.cached_property
    def _sorted(self) -> Callable[[int, int], tuple[int, Int32Array]]:
        return functools.lru_cache(maxsize=_ROUNDS * self.order.lane_count)(self._sort)

    @property
    def round_positions(self) -> int:
        """Number of positions of a round."""
        return self.order.read_positions or 1

    def _sequence(self, positions: Int64Array) -> Int64Array:
        positions = np.asarray(positions, dtype=np.int64)
        found, asked = np.empty(positions.size, dtype=np.int64), positions.reshape(-1)
        numbers = asked // self.round_positions
        for number in np.unique(numbers).tolist():
            here = np.flatnonzero(numbers == number)
            lines, lane = self._lines(number, asked[here])
            for each in np.unique(lane).tolist():
                mine = np.flatnonzero(lane == each)
                start, order = self._sorted(number, each)
                found[here[mine]] = start + order[lines[mine]]
        return found.reshape(positions.shape)

    def _lines(self, number: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns line and lane of each of some positions of a round."""
        made, lanes, whole = self.round(number), self.order.lane_count, self._whole_lines(number)
        bucket = np.searchsorted(made.starts, positions, side="right") - 1
        within, lane = np.divmod(positions - made.starts[bucket], lanes)
        is_whole = positions < number * self.round_positions + whole * lanes
        if self.order.settings.bucket_steps > 1:
            sizes = np.minimum(np.diff(made.starts)[bucket] // lanes, whole)
            keys = subkeys(self.key("bucket", number), made.lines[bucket] * lanes + lane)
            within[is_whole] = permute(within[is_whole], sizes[is_whole], keys[is_whole])
        return np.where(is_whole, made.lines[bucket] + within, whole), lane

    def _lane_window(self, number: int, lane: int) -> tuple[int, int]:
        """Returns where a lane's window of a round begins in the sequence, and its rows."""
        base, extra = divmod(self.order.rows, self.order.lane_count)
        window_rows = self.round_positions // self.order.lane_count
        begin, end = number * window_rows, min((number + 1) * window_rows, base + (lane < extra))
        return lane * base + min(lane, extra) + begin, max(0, end - begin)

    def _whole_lines(self, number: int) -> int:
        """Returns the number of lines of a round in which each lane has a row."""
        return self._lane_window(number, self.order.lane_count - 1)[1]

    def _costs(self, number: int, lane: int) -> Int32Array:
        """Returns the costs of the rows of a lane's window."""
        start, rows = self._lane_window(number, lane)
        costs = self.order.tables[cost_table(self.order.by)]
        parts = [costs[first:end] for first, end in self._stretches(start, start + rows)]
        return np.concatenate([costs[:0], *parts])

    def _sort(self, number: int, lane: int) -> tuple[int, Int32Array]:
        """Returns where a lane's window begins, and the row of each line in it; equal costs come at random."""
        start, rows = self._lane_window(number, lane)
        salt = subkeys(self.key("bucket", number, lane), np.arange(rows)) >> np.uint64(32)
        order = np.argsort((self._costs(number, lane).astype(np.int64) << 32) | salt.astype(np.int64)).astype(np.int32)
        return start, np.roll(order, -1) if rows > self._whole_lines(number) else order

    def _make_round(self, number: int) -> Round:
        """Joins the lines of a round to buckets, and shuffles these."""
        order, lanes, whole = self.order, self.order.lane_count, self._whole_lines(number)
        first = number * self.round_positions
        end = min(first + self.round_positions, self.order.rows)
        costs = [np.sort(self._costs(number, lane)) for lane in range(lanes)]
        if not whole:
            highest = np.concatenate(costs).max(keepdims=True).astype(np.int64)
            return Round(np.array([first, end], dtype=np.int64), np.zeros(1, dtype=np.int64), highest)
        highest = functools.reduce(np.maximum, [each[len(each) - whole :] for each in costs]).astype(np.int64)
        if order.bucket_cost:
            ends = join_lines(highest, lanes, order.bucket_cost)
        else:
            width = -(-order.bucket_rows // lanes)
            ends = np.append(np.arange(whole, 0, -width, dtype=np.int64), 0)[::-1]
        visit = permute(np.arange(len(ends) - 1), len(ends) - 1, self.key("buckets", number))
        if end > first + whole * lanes:
            visit = np.append(visit[visit != 0], 0)
        starts = first + np.append(0, np.cumsum(np.diff(ends)[visit] * lanes))
        starts[-1] = end
        return Round(starts, ends[visit], highest[ends[visit + 1] - 1])


def join_lines(highest: Int64Array, lanes: int, most_cost: int) -> Int64Array:
    """Joins lines, ascending by their highest cost, to buckets as large as their cost allows: the rows of a bucket
    times its highest cost. A line that costs more is a bucket by itself.

    Returns:
        The first lines of the buckets, ascending, and the number of lines: int64, (buckets + 1,).
    """
    fitting = np.maximum(1, most_cost // np.maximum(1, lanes * highest)).tolist()
    ends, at = [len(highest)], len(highest)
    while at > 0:
        at = max(0, at - fitting[at - 1])
        ends.append(at)
    if len(ends) > 2 and 3 * ends[-2] < ends[-3]:  # a small rest shares the lines of the next bucket
        ends[-2] = ends[-3] // 2
    return np.array(ends[::-1], dtype=np.int64)
