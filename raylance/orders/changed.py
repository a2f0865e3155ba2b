"""Orders of a run whose rows or order have changed in its course, also in the middle of an epoch."""

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from raylance.errors import ConfigError
from raylance.orders.buckets import Buckets
from raylance.orders.checking import select_rows
from raylance.orders.compact import packed, refusing, unpacked
from raylance.orders.order import Epoch, Facts, Order, PicklesFields, Resolved
from raylance.orders.permutation import BoolArray, Int64Array, derive_key
from raylance.orders.registry import ORDERS

PLACE = "place"
"""Field of `Change.before` for a dataset of a mixture: the epoch and the position of the mixture."""

Carry = Callable[[int, Int64Array, Int64Array], tuple[Int64Array, Int64Array]]
"""Carries rows over a change: takes its number, names of rows, and others by their numbers among the selected rows
before it; returns the names of all of them that are still there, and the numbers of those that are selected after it.
All are int64, in any order.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A place from which on a run has other rows, or another order.

    Attributes:
        epoch: The epoch of the place.
        position: Its position. At 0, the epoch begins with the new rows; later, it has those that are left of it.
        left: Number of rows that are left of the epoch; all at position 0.
        takes_new: Whether rows are among them that were not selected before.
        keeps: Whether the selected rows have kept their numbers, because rows were appended at most.
        before: What was delivered before the place: fields of the state.
    """

    epoch: int
    position: int
    left: int
    takes_new: bool
    keeps: bool
    before: Mapping[str, Any]

    @property
    def place(self) -> tuple[int, int]:
        """The epoch and the position."""
        return self.epoch, self.position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changed(Order):
    """An order, and what has changed before it was the order of the run.

    The rest of an epoch is ordered as an epoch of its own: by the order that holds there, applied to those rows that
    are left. What lies before a place does not depend on what has changed there or later.
    """

    name: ClassVar[str] = "changed"
    of: Order
    changes: tuple[Change, ...]  # ascending
    # The first epoch whose rows are asked for, but for padding; earlier ones are known only if all rows were kept
    asked_from: int = dataclasses.field(default=0, compare=False)

    @property
    def is_resolved(self) -> bool:
        """See `Order.is_resolved`."""
        return self.of.is_resolved

    @property
    def known_from(self) -> tuple[int, int]:
        """See `Resolved.known_from`."""
        return max((each.place for each in self.changes if not each.keeps), default=(0, 0))

    def renewed(self, given: Order) -> Order:
        """See `Order.renewed`."""
        return self.of

    def params(self) -> dict[str, Any]:
        """See `Order.params`."""
        changes = packed([*map(dataclasses.asdict, self.changes)])
        return {"name": self.name, "of": self.of.params(), "changes": changes}

    def adopt(self, params: Mapping[str, Any]) -> Self:
        """See `Order.adopt`."""
        return dataclasses.replace(self, of=self.of.adopt(params["of"]))

    def resolve(self, facts: Facts) -> "ChangedResolved":
        """See `Order.resolve`."""
        of = self.of.resolve(facts)
        fields = {field.name: getattr(of, field.name) for field in dataclasses.fields(Resolved)}
        settings = dataclasses.replace(self, of=of.settings, shard_rows=of.settings.shard_rows)
        return ChangedResolved(**fields | {"settings": settings}, of=of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangedResolved(PicklesFields, Resolved):
    """`Changed` for the rows that there are now."""

    settings: Changed
    of: Resolved

    @property
    def alike_from(self) -> int:
        """See `Resolved.alike_from`."""
        last = self.settings.changes[-1]
        return last.epoch + (last.position > 0)

    def custom_parts(self) -> list[Resolved]:
        """See `Resolved.custom_parts`."""
        return self.of.custom_parts()

    def epoch(self, number: int) -> Epoch:
        """See `Resolved.epoch`."""
        return self.of.epoch(number) if number >= self.alike_from else self._epoch(number)

    @functools.cached_property
    def _epoch(self) -> "Callable[[int], _ChangedEpoch]":
        """A function that returns an epoch by number. It keeps the last ones, because they know their rows."""
        return functools.lru_cache(maxsize=4)(functools.partial(_ChangedEpoch, self))

    def segment(self, number: int, rows: int | None = None, key: tuple[int | str, ...] = ()) -> Resolved:
        """Returns the order before the change with this number, or after the last one: of all rows that were selected
        there, or of a number of them, with a key for random numbers.
        """
        changes = self.settings.changes
        if number == len(changes):
            order, count, seed = self.settings.of, self.rows, self.seed
        else:
            before = changes[number].before
            order, count, seed = _order_of(before["order"], self.settings.of), before["rows"], before["seed"]
        seed = derive_key(seed, *key) if key else seed
        return order.resolve(Facts(rows=count if rows is None else max(1, rows), seed=seed))


class _ChangedEpoch(Epoch):
    """An epoch up to that of the last change. Its parts are what lies between two changes."""

    order: ChangedResolved

    @functools.cached_property
    def first(self) -> int:
        """The number of the segment with which the epoch begins."""
        return bisect.bisect_right([each.place for each in self.order.settings.changes], (self.number, 0))

    @functools.cached_property
    def changes(self) -> list[Change]:
        """What changes in it: at the begin of each part but the first."""
        return [each for each in self.order.settings.changes[self.first :] if each.epoch == self.number]

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first position of each part."""
        return [0, *(each.position for each in self.changes)]

    def end(self, part: int) -> int:
        """Returns the number of positions of the epoch, if nothing changes after a part."""
        if part:
            return self.changes[part - 1].position + self.changes[part - 1].left
        return self._parts[0].order.epoch_rows

    @property
    def epoch_rows(self) -> int:
        """See `Epoch.epoch_rows`."""
        return self.end(len(self.changes))

    @functools.cached_property
    def _parts(self) -> list[Epoch]:
        """The orders of the parts, whose positions count from their first ones."""
        segments = [self.order.segment(self.first)]
        for part, change in enumerate(self.changes, 1):
            key = (self.number, "rest", change.position)
            segments.append(self.order.segment(self.first + part, change.left, key))
        return [segment.epoch(self.number) for segment in segments]

    def part_rows(self, part: int, positions: Int64Array) -> Int64Array:
        """Returns the rows at positions of a part, as they were numbered there."""
        found = select_rows(self._parts[part], positions - self.starts[part])
        if not part:
            return found
        name = table_of(self.first + part - 1)
        left = self.order.tables[name] if name in self.order.tables else self._kept[name]
        return left[found].astype(np.int64)

    @functools.cached_property
    def _kept(self) -> dict[str, npt.NDArray[Any]]:
        """The tables of the rows that are left, if rows were appended only: then they follow from the numbers."""
        if not all(each.keeps for each in self.changes):
            raise ConfigError(
                f"the rows of epoch {self.number} are not known any more, because the data have changed since. Give a "
                "checkpoint of this epoch."
            )
        return left_rows(self.order, self.number, carry_kept)

    @property
    def known_from(self) -> int:
        """The first position whose row is selected now. Earlier ones, for which only padding asks, give rows that are
        left; any rows if none is left.
        """
        epoch, position = self.order.known_from
        if self.number < epoch or ((epoch, position) > (0, 0) and self.number < self.order.settings.asked_from):
            return self.epoch_rows
        return position if epoch == self.number else 0

    def _by_part(self, positions: Int64Array) -> Iterator[tuple[int, BoolArray]]:
        """Yields each part that has some positions, and which, bool, (n,)."""
        parts = np.searchsorted(self.starts, positions, side="right") - 1
        for part in np.unique(parts).tolist():
            yield part, parts == part

    def earlier(self, positions: Int64Array) -> Iterator[tuple[Mapping[str, Any], BoolArray, Int64Array]]:
        """See `Epoch.earlier`."""
        for part, mine in self._by_part(positions):
            if self.starts[part] < self.known_from:
                before = self.order.settings.changes[self.first + part].before
                yield before, mine, self.part_rows(part, positions[mine])

    def rows(self, positions: Int64Array) -> Int64Array:
        """See `Epoch.rows`."""
        asked = np.asarray(positions, dtype=np.int64).reshape(-1)
        low, left = self.known_from, self.epoch_rows - self.known_from
        if not left:
            return np.asarray(positions, dtype=np.int64) % self.order.rows
        asked = np.where(asked < low, low + asked % left, asked)
        out = np.empty_like(asked)
        for part, mine in self._by_part(asked):
            out[mine] = self.part_rows(part, asked[mine])
        return out.reshape(np.shape(positions))


def table_of(change: int) -> str:
    """Returns the name of the table of the rows that are left at a change, by its number: ascending, (left,)."""
    return f"left at change {change}"


def carry_kept(change: int, names: Int64Array, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Carries rows over a change that keeps them, by their numbers; see `Carry`."""
    joined = np.concatenate([names, rows])
    return joined, joined


def left_rows(order: ChangedResolved, epoch: int, carry: Carry) -> dict[str, npt.NDArray[Any]]:
    """Returns the rows that are left at each change of an epoch, by the names of their tables: those that are selected
    there, less those that the epoch has had before.
    """
    found: dict[str, npt.NDArray[Any]] = {}
    handed = none = np.empty(0, dtype=np.int64)  # names of the rows that the epoch has had
    at = _ChangedEpoch(dataclasses.replace(order, tables=found), epoch)  # it finds the tables that are made below
    for number, change in enumerate(at.changes):
        segment, begin, end = at.first + number, at.starts[number], change.position
        handed, here = carry(segment, handed, at.part_rows(number, np.arange(begin, end)))
        is_left = np.full(order.segment(segment + 1).rows, change.takes_new)
        if not change.takes_new:
            _, here = carry(segment, none, at.part_rows(number, np.arange(end, at.end(number))))
        is_left[here] = not change.takes_new
        rows = np.flatnonzero(is_left)
        found[table_of(segment)] = rows.astype(np.uint32 if len(is_left) <= 1 << 32 else np.int64)
    return found


def placed(order: Order, epoch: int, position: int) -> Order:
    """Returns the order of a dataset of a mixture, of which the last change is that at a place of the mixture."""
    if not isinstance(order, Changed):
        return order
    *others, last = order.changes
    last = dataclasses.replace(last, before={**last.before, PLACE: [epoch, position]})
    return dataclasses.replace(order, changes=(*others, last))


def can_change(order: Order, *, has_tables: bool) -> bool:
    """Whether the rows or the order of a run can change in the middle of an epoch of an order."""
    is_known = not (has_tables or order.repeats or isinstance(order, Buckets))
    return is_known and order.shard_rows != "fragment"


def could_change(params: Mapping[str, Any], like: Order) -> bool:
    """Whether a checkpoint's `params` are of an order that can change; it may be of the class of another order."""
    try:
        return bool(_order_of(params.get("of", params), like))
    except (ConfigError, TypeError):
        return False


def as_recorded(order: Order, params: Mapping[str, Any]) -> Order:
    """Returns an order with those settings of a checkpoint's `params` that a run may change in its course.

    Raises:
        ConfigError: If these are damaged.
    """
    order = unchanged(order)
    if params.get("name") != Changed.name:
        return order.dealt_as(params)
    with refusing("changes", params.get("changes")):
        changes = tuple(Change(**each) for each in unpacked(params["changes"]))
        if not changes or [each.place for each in changes] != sorted(each.place for each in changes):
            raise ValueError("not ascending")
        for each in changes:
            _ = each.left + each.before["rows"] + each.before["seed"], _order_of(each.before["order"], order)
        return Changed(of=order.dealt_as(params["of"]), changes=changes, shard_rows=order.shard_rows)


def since(params: Mapping[str, Any], epoch: int) -> Mapping[str, Any]:
    """Returns a checkpoint's `params` of an order without what has changed in epochs before `epoch`."""
    if params.get("name") != Changed.name:
        return params
    kept = [each for each in unpacked(params["changes"]) if each["epoch"] >= epoch]
    return {**params, "changes": packed(kept)} if kept else params["of"]


def unchanged(order: Order) -> Order:
    """Returns the order of the present rows."""
    return order.of if isinstance(order, Changed) else order


def _order_of(params: Mapping[str, Any], like: Order) -> Order:
    """Returns the order that a checkpoint describes; one of raylance's own, or of the class of another order.

    Raises:
        ConfigError: If it is neither, or cannot change.
    """
    name = params.get("name")
    kind = ORDERS.get(str(name)) or (type(like) if like.name == name else None)
    if kind is None:
        raise ConfigError(f"the order {name!r} is not known here.")
    found = kind(**{field: value for field, value in params.items() if field != "name"})
    if not can_change(found, has_tables=False):
        raise ConfigError(f"rows of the order {name!r} cannot change in the middle of an epoch.")
    return found
