"""The order of a dataset that has got more rows in the course of a run."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from raylance.errors import ConfigError
from raylance.orders.buckets import Buckets
from raylance.orders.course import Dealer, Dealt, deal_whole
from raylance.orders.mixture import MixOrder
from raylance.orders.order import Epoch, Facts, Order, PicklesFields, Resolved
from raylance.orders.permutation import Int64Array, derive_key


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A place from which on a run has more rows: those that were appended to its dataset.

    Attributes:
        epoch: The epoch of the place.
        position: Its position. At 0, the epoch begins with all rows; later, new rows come among those that are left.
        rows: Number of selected rows before the place.
        fingerprint: That of these rows.
        version: The version of the dataset before the place.
        identity: That of this version.
    """

    epoch: int
    position: int
    rows: int
    fingerprint: str
    version: Any
    identity: Any

    @property
    def place(self) -> tuple[int, int]:
        """The epoch and the position."""
        return self.epoch, self.position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grown(Order):
    """An order of all rows of an epoch, and how the rows became more. Old rows stay where they were up to the place at
    which new ones came; from there on, both come as evenly as their numbers allow, each in an order of its own.
    """

    name: ClassVar[str] = "grown"
    of: Order
    growths: tuple[Growth, ...]  # ascending

    @property
    def is_resolved(self) -> bool:
        """See `Order.is_resolved`."""
        return self.of.is_resolved

    def params(self) -> dict[str, Any]:
        """See `Order.params`."""
        return {"name": self.name, "of": self.of.params(), "growths": [*map(dataclasses.asdict, self.growths)]}

    def adopt(self, params: Mapping[str, Any]) -> Self:
        """See `Order.adopt`."""
        return dataclasses.replace(self, of=self.of.adopt(params["of"]))

    def resolve(self, facts: Facts) -> Resolved:
        """See `Order.resolve`."""
        of = self.of.resolve(facts)
        fields = {field.name: getattr(of, field.name) for field in dataclasses.fields(Resolved)}
        settings = dataclasses.replace(self, of=of.settings, shard_rows=of.settings.shard_rows)
        return _GrownResolved(**fields | {"settings": settings}, of=of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _GrownResolved(PicklesFields, Resolved):
    """`Grown` for the rows that there are now."""

    settings: Grown
    of: Resolved

    @property
    def alike_from(self) -> int:
        """See `Resolved.alike_from`."""
        last = self.settings.growths[-1]
        return last.epoch + (last.position > 0)

    def epoch(self, number: int) -> Epoch:
        """See `Resolved.epoch`."""
        return self.of.epoch(number) if number >= self.alike_from else _GrownEpoch(self, number)

    def sizes(self) -> list[int]:
        """Returns the number of rows before each growth, and now."""
        return [*(each.rows for each in self.settings.growths), self.rows]

    def part(self, low: int, high: int) -> Resolved:
        """Returns the order of the rows [low, high) alone."""
        seed = self.seed if not low else derive_key(self.seed, 0, "growth", low)
        return self.settings.of.resolve(Facts(rows=high - low, seed=seed))


class _GrownEpoch(Epoch):
    """An epoch before the last growth, or with it."""

    order: _GrownResolved

    @functools.cached_property
    def _made(self) -> tuple[Dealt, list[tuple[int, Epoch]]]:
        """How its positions are dealt to the rows that came together; and their first rows and orders."""
        growths, sizes = self.order.settings.growths, self.order.sizes()
        first = bisect.bisect_right([each.place for each in growths], (self.number, 0))
        later = [each for each in growths[first:] if each.epoch == self.number]
        bounds = [0, *sizes[first : first + len(later) + 1]]
        ranges = [(low, high) for low, high in itertools.pairwise(bounds) if high > low or not low]
        parts = [(low, self.order.part(low, high).epoch(self.number)) for low, high in ranges]
        rows = [high - low for low, high in ranges]
        starts = [0, *(each.position for each, new in zip(later, np.diff(bounds)[1:], strict=True) if new)]
        return deal_parts(rows, starts), parts

    @property
    def epoch_rows(self) -> int:
        """See `Epoch.epoch_rows`."""
        return self._made[0].end

    def rows(self, positions: Int64Array) -> Int64Array:
        """See `Epoch.rows`."""
        dealt, parts = self._made
        which, index = dealt.place(np.asarray(positions, dtype=np.int64).reshape(-1))
        out = np.empty(which.shape, dtype=np.int64)
        for number in np.unique(which).tolist():
            mine, (first, epoch) = which == number, parts[number]
            out[mine] = first + epoch.rows(index[mine])
        return out.reshape(np.shape(positions))


def deal_parts(rows: Sequence[int], starts: Sequence[int]) -> Dealt:
    """Deals the positions of an epoch to parts of its rows, each of which comes from its start on among what is left of
    those before it, so that all end together.
    """
    counts, dealers, before = [0] * len(rows), list[Dealer](), list[list[int]]()
    for number, start in enumerate(starts):
        if number:
            here = start - starts[number - 1]
            counts = [count + more for count, more in zip(counts, dealers[-1].counts(here), strict=True)]
        left = [each - count for each, count in zip(rows, counts, strict=True)]
        left[number + 1 :] = [0] * (len(rows) - number - 1)
        dealers.append(deal_whole(tuple(left)))
        before.append(counts)
    return Dealt(np.array(starts), tuple(dealers), np.array(before), sum(rows))


def can_grow(order: Order, *, has_tables: bool) -> bool:
    """Whether new rows can come in the course of an epoch of an order."""
    return not (has_tables or order.repeats or isinstance(order, MixOrder | Buckets))


def as_recorded(order: Order, params: Mapping[str, Any]) -> Order:
    """Returns an order with those settings of a checkpoint's `params` that a run may change in its course.

    Raises:
        ConfigError: If these are damaged.
    """
    order = ungrown(order)
    if params.get("name") != Grown.name:
        return order.dealt_as(params)
    try:
        growths = tuple(Growth(**each) for each in params["growths"])
        if not growths or [each.place for each in growths] != sorted(each.place for each in growths):
            raise ValueError("not ascending")
        return Grown(of=order.dealt_as(params["of"]), growths=growths, shard_rows=order.shard_rows)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"its growths are {str(params.get('growths'))[:200]!r}: {error}") from error


def ungrown(order: Order) -> Order:
    """Returns the order of all rows."""
    return order.of if isinstance(order, Grown) else order


def grow(order: Order, growth: Growth) -> Order:
    """Returns an order with more rows from a place on. Those that were to come later come there, too."""
    known = order.growths if isinstance(order, Grown) else ()
    kept = (
        dataclasses.replace(each, epoch=growth.epoch, position=growth.position) if each.place > growth.place else each
        for each in known
    )
    return Grown(of=ungrown(order), growths=(*kept, growth), shard_rows=order.shard_rows)
