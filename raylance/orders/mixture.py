"""Mixtures combine several datasets in one order by fixed shares.

A mixture is one order over the concatenated selections of its components. So everything else (steps, ranks, resume,
lost helpers) works as with one dataset. Which component a position belongs to, and which of its rows, in the
component's own order, is computed by arithmetic: see `course`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from raylance.columns import COMPONENT
from raylance.errors import ConfigError
from raylance.orders.changed import Changed, ChangedResolved, unchanged
from raylance.orders.checking import select_rows
from raylance.orders.course import (
    Course,
    Dealt,
    Segment,
    course_of,
    read_schedule,
    read_segments,
    write_schedule,
    write_segments,
)
from raylance.orders.dealing import Quotas, shares_of
from raylance.orders.order import Auto, Epoch, Facts, Order, PicklesFields, Resolved, Tables, join_tables
from raylance.orders.permutation import BoolArray, Int32Array, Int64Array, UInt64Array
from raylance.orders.schedule import check_weights, shares
from raylance.orders.shuffles import stack, stacked_kind, stacked_rows

Floats = npt.NDArray[np.float64]

_SAMPLED = 1 << 16  # drawn rows whose costs give the mean
_AS_WEIGHTS = 0.011  # of a share: how far the quotas of raylance 0.10 are from the weights, 1 % or half a thousandth
_MOST_TOGETHER, _MOST_ALONE = 4096, 512  # most own epochs of components that an epoch of the mixture keeps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One dataset of a mixture, with its own order and seed."""

    name: str
    order: Order
    seed: int
    rows: int
    quota: int  # share of the positions, in parts of the sum of all quotas
    epoch_rows: int | Auto = "auto"  # positions of its own epoch; "auto" takes those of its order
    on_new_version: str = dataclasses.field(default="refuse", compare=False, repr=False)  # see `DeliverySpec`
    tables: Tables = dataclasses.field(default_factory=dict, compare=False, repr=False)
    costs: Tables = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def params(self) -> dict[str, Any]:
        """Returns the component's values for checkpoints, without `epoch_rows` if that is known to be `rows`."""
        params = {"quota": self.quota, "rows": self.rows, "seed": self.seed, "order": self.order.params()}
        if self.epoch_rows == self.rows or (self.epoch_rows == "auto" and not self.order.repeats):
            return params
        return params | {"epoch_rows": self.epoch_rows}

    def adopt(self, params: Mapping[str, Any]) -> "Component":
        """Returns the component with the values of `params` for the fields that are "auto"."""
        order = params["order"]
        if order["name"] == Changed.name and not isinstance(self.order, Changed):
            order = order["of"]
        adopted = dataclasses.replace(self, order=self.order.adopt(order))
        if self.epoch_rows != "auto":
            return adopted
        return dataclasses.replace(adopted, epoch_rows=params.get("epoch_rows", self.rows))

    def resolve(self, facts: Facts) -> Resolved:
        """Resolves the component's order from the facts of the mixture, with its own rows, seed and tables."""
        tables = join_tables(self.tables, self.costs)
        resolved = self.order.resolve(dataclasses.replace(facts, rows=self.rows, seed=self.seed, tables=tables))
        if isinstance(self.epoch_rows, str):
            return resolved
        return dataclasses.replace(resolved, epoch_rows=self.epoch_rows)


def quotas(weights: Sequence[float], row_costs: Sequence[Fraction] | None = None) -> list[int]:
    """Returns the components' shares of the rows, see `shares_of`. Weights are taken as they are written: 0.7 and 0.3
    are 7 and 3. With `row_costs`, the mean cost of a row of each component, weights are shares of the cost.
    """
    return list(shares_of(shares(dict(enumerate(weights)), row_costs)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixOrder(Order):
    """Gives each position to a component, which begins its next epoch, in that epoch's order, after its last row."""

    name: ClassVar[str] = "mix"
    repeats: ClassVar[bool] = True
    components: tuple[Component, ...]
    # "first_exhausted" ends the epoch before any component begins its next epoch; "all_exhausted" when each was
    # delivered whole; a number is the epoch's number of rows.
    stop: str | int
    # Positions to read together. "auto": one window of each component or more, within half of `window_bytes`
    chunk_positions: int | Auto = "auto"
    spread: str = "pattern"  # "tree", or "pattern" for checkpoints of raylance 0.10 and before
    schedule: tuple[tuple[int, Quotas], ...] = ()  # see `Segment.schedule`
    turn_rows: int = 1  # see `Segment.turn_rows`
    # Mean cost of a row of each component, if weights are shares of a cost
    row_costs: tuple[Fraction, ...] | None = dataclasses.field(default=None, compare=False, repr=False)
    segments: tuple[Segment, ...] = ()  # what has changed in the course of the run; the other fields say how it began

    def __post_init__(self) -> None:
        words = ("first_exhausted", "all_exhausted")
        is_count = isinstance(self.stop, int) and not isinstance(self.stop, bool) and 1 <= self.stop < 2**63
        if self.stop not in words and not is_count:
            raise ConfigError(
                f'stop={self.stop!r}: must be "first_exhausted", "all_exhausted", or a number of rows, less than '
                "2**63. No mixture was made."
            )

    @property
    def quotas(self) -> Quotas:
        """The quota of each component, as the run began."""
        return tuple(part.quota for part in self.components)

    @property
    def course(self) -> Course:
        """How positions are dealt to the components in all epochs."""
        return course_of(self.history, self.own_rows)

    @property
    def known_from(self) -> tuple[int, int]:
        """See `Resolved.known_from`."""
        return max((each.place for each in self.segments if each.own), default=(0, 0))

    @property
    def own_rows(self) -> tuple[int, ...]:
        """The rows of each component's own epochs."""
        # The first iteration resolves "auto". Before it no row is consumed, so any number is right.
        rows = (part.rows if isinstance(part.epoch_rows, str) else part.epoch_rows for part in self.components)
        return tuple(rows)

    @property
    def history(self) -> tuple[Segment, ...]:
        """All segments of the run; the first one is how it began."""
        first = Segment(
            quotas=self.quotas,
            stop=self.stop,
            spread=self.spread,
            schedule=self.schedule,
            turn_rows=self.turn_rows,
        )
        return (first, *self.segments)

    def params(self) -> dict[str, Any]:
        """See `Order.params`. Components are listed by name, with their quotas and orders."""
        components = {part.name: part.params() for part in self.components}
        params = {
            "name": self.name,
            "stop": self.stop,
            "chunk_positions": self.chunk_positions,
            "components": components,
        }
        params |= {} if self.spread == "pattern" else {"spread": self.spread}
        params |= {"schedule": write_schedule(self.schedule)} if self.schedule else {}
        params |= {"turn_rows": self.turn_rows} if self.turn_rows > 1 else {}
        return params | ({"segments": write_segments(self.segments)} if self.segments else {})

    def dealt_as(self, params: Mapping[str, Any]) -> Self:
        """See `Order.dealt_as`."""
        return self.recorded(params) or self

    def recorded(self, params: Mapping[str, Any]) -> Self | None:
        """Returns the mixture of the datasets that `params` has, with its quotas and its course; None if they are not
        the first ones of this mixture.
        """
        saved = params.get("components")
        if not isinstance(saved, Mapping) or [*saved] != [part.name for part in self.components[: len(saved)]]:
            return None
        quotas = [part.get("quota") for part in saved.values()]
        if not all(isinstance(quota, int) and quota >= 0 for quota in quotas) or not any(quotas):
            return None
        parts = [dataclasses.replace(part, quota=quota) for part, quota in zip(self.components, quotas, strict=False)]
        return dataclasses.replace(
            self,
            components=tuple(parts),
            stop=params.get("stop", self.stop),
            spread=params.get("spread", "pattern"),
            schedule=read_schedule(params.get("schedule", []), len(parts)),
            turn_rows=params.get("turn_rows", 1),
            segments=read_segments(params.get("segments", []), len(parts)),
        )

    def after(self, params: Mapping[str, Any], epoch: int, position: int) -> tuple[Self, str]:
        """See `Order.after`. New datasets have no share before the place."""
        saved, count = self.recorded(params), len(self.components)
        if saved is None:
            return self, ""
        first, *later = [segment.widened(count) for segment in saved.history]
        parts = (
            dataclasses.replace(part, quota=quota) for part, quota in zip(self.components, first.quotas, strict=True)
        )
        found = dataclasses.replace(saved, components=tuple(parts), schedule=first.schedule, segments=tuple(later))
        given, wanted = _given([first, *later]), _given(self.history)
        if wanted.rule == given.rule or (given.spread == "pattern" and _are_close(wanted, given)):
            return found, ""
        here = dataclasses.replace(wanted, epoch=epoch, position=position, spread="tree", reason="")
        return found.changed(here), f"  before: {self._in_words(given)}\n  from here on: {self._in_words(here)}"

    def _in_words(self, segment: Segment) -> str:
        schedule = f", a schedule of {len(segment.schedule)} changes" if segment.schedule else ""
        turns = f", turn_rows={segment.turn_rows:,}" if segment.turn_rows > 1 else ""
        return f"shares {self.shares_in(segment)}, stop={segment.stop!r}{schedule}{turns}"

    def shares_in(self, segment: Segment) -> dict[str, float]:
        """Returns the share of the rows of each dataset at the begin of a segment, by name."""
        total = sum(segment.quotas)
        return {part.name: round(quota / total, 6) for part, quota in zip(self.components, segment.quotas, strict=True)}

    def moved(self, epoch: int, position: int, weights: Mapping[str, Any], reason: str) -> Self:
        """Returns the mixture with other weights from a place on; nothing is left of the schedule. Raises ConfigError
        if they are not the weights of its datasets.
        """
        named = check_weights("reweight()", weights, [part.name for part in self.components])
        quotas = shares_of(shares(named, self.row_costs))
        last = self.rule_at(epoch, position)
        asked = last.asked if last.is_move else last.quotas
        return self.changed(
            Segment(
                epoch=epoch,
                position=position,
                quotas=quotas,
                stop=last.stop,
                turn_rows=last.turn_rows,
                reason=reason,
                is_move=True,
                asked=asked if last.place == (epoch, position) else (),
            )
        )

    def changed(self, segment: Segment) -> Self:
        """Returns the mixture with another rule from the segment's place on. If own epochs have changed there before,
        their rows before the place are those before the first change.
        """
        kept = [each for each in self.segments if each.place < segment.place]
        own = {each[0]: each for same in self.segments if same.place == segment.place for each in same.own}
        own |= {number: (number, own.get(number, (0, rows))[1], count) for number, rows, count in segment.own}
        segment = dataclasses.replace(segment, own=tuple(own[number] for number in sorted(own)))
        return dataclasses.replace(self, segments=(*kept, segment))

    def with_rows(self, epoch: int, position: int, changed: Mapping[int, Component]) -> Self:
        """Returns the mixture with other rows of some components from a place on, by their numbers. The last change of
        a component's order says how many are left of its own epoch; without changes, it begins one there.
        """
        dealt, own = self.course.epoch(epoch), []
        for number, part in changed.items():
            passes = dealt.own_place(number, position)[0] - dealt.first_own[number]
            begun = part.rows - part.order.changes[-1].left if position and isinstance(part.order, Changed) else 0
            own.append((number, self.own_rows[number], passes * part.rows + begun))
        last = self.rule_at(epoch, position)
        here = dataclasses.replace(
            last,
            epoch=epoch,
            position=position,
            spread="tree",
            reason=last.reason if last.place == (epoch, position) else "",
            asked=last.asked if last.place == (epoch, position) else (),
            own=tuple(own),
        )
        parts = tuple(changed.get(number, part) for number, part in enumerate(self.components))
        return dataclasses.replace(self, components=parts).changed(here)

    def renewed(self, given: Order) -> "MixOrder":
        """See `Order.renewed`."""
        assert isinstance(given, MixOrder)
        parts = tuple(
            dataclasses.replace(part, order=unchanged(part.order), tables=one.tables)
            for part, one in zip(self.components, given.components, strict=True)
        )
        segments = tuple(dataclasses.replace(each, own=()) for each in self.segments)
        return dataclasses.replace(self, components=parts, segments=segments)

    def rule_at(self, epoch: int, position: int) -> Segment:
        """Returns the segment of a place."""
        return [segment for segment in self.history if segment.place <= (epoch, position)][-1]

    def adopt(self, params: Any) -> Self:
        """See `Order.adopt`."""
        saved = params["components"]
        parts = tuple(part.adopt(saved[part.name]) if part.name in saved else part for part in self.components)
        chunk = params["chunk_positions"] if self.chunk_positions == "auto" else self.chunk_positions
        return dataclasses.replace(self, components=parts, chunk_positions=chunk)

    def resolve(self, facts: Facts) -> Resolved:
        """See `Order.resolve`. Each component gets a part of `window_bytes` in proportion to its largest share."""
        shares = self._largest_shares()
        parts = []
        for part, share in zip(self.components, shares, strict=True):
            window_bytes = max(1, int(facts.window_bytes * share))
            parts.append(part.resolve(dataclasses.replace(facts, window_bytes=window_bytes)))
        windows = [int((part.read_positions or 1) / of) for part, of in zip(parts, shares, strict=True) if of]
        limit = int(facts.window_bytes / 2 / max(facts.row_bytes, 1))
        auto = max(1, min(max(windows), limit))
        chunk = auto if isinstance(self.chunk_positions, str) else self.chunk_positions
        components = tuple(
            dataclasses.replace(part, order=resolved.settings, epoch_rows=resolved.epoch_rows)
            for part, resolved in zip(self.components, parts, strict=True)
        )
        settings = dataclasses.replace(self, components=components, chunk_positions=chunk)
        course = settings.course
        return _MixResolved(
            settings=settings,
            rows=facts.rows,
            seed=facts.seed,
            epoch_rows=course.epoch(course.last_change).end,
            shard_rows=1,
            read_positions=chunk,
            parts=tuple(parts),
        )

    def _largest_shares(self) -> list[Fraction]:
        """Returns the largest share that each component ever has."""
        rules = [
            quotas
            for segment in self.history
            for quotas in (segment.quotas, *(quotas for _, quotas in segment.schedule))
        ]
        return [max(Fraction(quotas[index], sum(quotas)) for quotas in rules) for index in range(len(self.components))]

    def standings(self, epoch: int, position: int) -> dict[str, dict[str, int]]:
        """Returns the progress of each component in an epoch, by name: the number of consumed rows, of its own epochs
        that ended ("passes"), and the position in its current own epoch.
        """
        standings, dealt = {}, self.course.epoch(epoch)
        for number, (part, rows) in enumerate(zip(self.components, dealt.counts(position), strict=True)):
            own_epoch, own = dealt.own_place(number, position)
            passes = own_epoch - dealt.first_own[number]
            standings[part.name] = {"rows": rows, "passes": passes, "position": own}
        return standings


def _given(history: Sequence[Segment]) -> Segment:
    """Returns the last segment that arguments of `raylance.mix` have made, also if a move has taken its place."""
    last = next(segment for segment in reversed(history) if segment.asked or not segment.is_move)
    return dataclasses.replace(last, quotas=last.asked) if last.is_move else last


def _are_close(one: Segment, other: Segment) -> bool:
    """Whether two rules are of the same weights: raylance 0.10 has rounded them."""
    shares, wanted = (np.array(each) / sum(each) for each in (other.quotas, one.quotas))
    is_close = np.abs(shares - wanted) <= np.maximum(_AS_WEIGHTS * wanted, 0.0005)
    return bool(is_close.all()) and one.rule[1:] == other.rule[1:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MixResolved(PicklesFields, Resolved):
    """A resolved mixture. Its `parts` are the resolved orders of the components."""

    settings: MixOrder
    parts: tuple[Resolved, ...]

    def epoch(self, number: int) -> "_MixEpoch":
        return self._epoch(number)

    @functools.cached_property
    def _epoch(self) -> "Callable[[int], _MixEpoch]":
        """A function that returns an epoch by number. It keeps the last two, because each step and chunk asks again."""
        return functools.lru_cache(maxsize=2)(functools.partial(_MixEpoch, self))

    @property
    def alike_from(self) -> int:
        """See `Resolved.alike_from`."""
        return self.settings.course.last_change

    def custom_parts(self) -> list[Resolved]:
        return [own for part in self.parts for own in part.custom_parts()]

    @property
    def cost_names(self) -> tuple[str, ...]:
        names = [part.cost_names for part in self.parts]
        return names[0] if len(set(names)) == 1 else ()

    def costs(self, rows: Int64Array) -> Int32Array:
        starts = self.starts
        found = np.empty((*rows.shape, len(self.cost_names)), dtype=np.int32)
        which = np.searchsorted(starts, rows, side="right") - 1
        for index in np.unique(which).tolist():
            mine = which == index
            found[mine] = self.parts[index].costs(rows[mine] - starts[index])
        return found

    @functools.cached_property
    def starts(self) -> Int64Array:
        """The rows of all components before each component."""
        rows = np.array([part.rows for part in self.parts], dtype=np.int64)
        return np.cumsum(rows) - rows

    @functools.cached_property
    def kinds(self) -> tuple[list[type[Order] | None], Int64Array]:
        """The kinds of the components' orders, None for those computed alone; and each component's index in them."""
        by_part = [stacked_kind(part.of if isinstance(part, ChangedResolved) else part) for part in self.parts]
        found = list(dict.fromkeys(by_part))
        return found, np.array([found.index(kind) for kind in by_part], dtype=np.int64)


def mean_costs(order: Resolved) -> list[Floats]:
    """Returns the mean costs of a row that each component of a resolved mixture delivers, float64, (costs,) each; none
    if rows have no costs.
    """
    if not isinstance(order, _MixResolved) or not order.cost_names:
        return []
    means = []
    for part in order.parts:
        rows = np.arange(part.rows)
        if part.settings.repeats:  # drawn rows are sampled
            rows = part.epoch(0).rows(np.linspace(0, part.epoch_rows - 1, _SAMPLED).astype(np.int64))
        means.append(part.costs(rows).mean(axis=0, dtype=np.float64))
    return means


class _MixEpoch(Epoch):
    """One epoch of a mixture. Its rows are numbered through the concatenated selections of the components.

    A step has few rows of each of many components, so components with the same kind of order are computed together. Own
    epochs of components are numbered: with C components, own epoch n of component c within this epoch of the mixture
    has the number n·C + c; n and c count from 0.
    """

    order: _MixResolved

    def rows(self, positions: Int64Array) -> Int64Array:
        starts, (kinds, kind_of_part) = self.order.starts, self.order.kinds
        which, passes, within = self._dealt.own_places(positions)
        own_epochs, out = passes * len(starts) + which, starts[which]
        kind_of = np.where(passes < self._changed[which], len(kinds), kind_of_part[which])
        for index, kind in enumerate((*kinds, None)):
            mine = np.flatnonzero(kind_of == index)
            if not len(mine):
                continue
            asked, of = np.unique(own_epochs[mine], return_inverse=True)
            if kind is not None:
                out[mine] += stacked_rows(kind, self._numbers(kind, asked)[:, of], within[mine])
                continue
            by_epoch = np.split(mine[np.argsort(of, kind="stable")], np.cumsum(np.bincount(of))[:-1])
            for number, those in zip(asked.tolist(), by_epoch, strict=True):
                out[those] += select_rows(self._alone(number), within[those])
        return out

    @functools.cached_property
    def _changed(self) -> Int64Array:
        """How many own epochs of each component have other rows than its later ones, int64, (components,)."""
        until = [part.alike_from if isinstance(part, ChangedResolved) else 0 for part in self.order.parts]
        return np.array(until, dtype=np.int64) - self._dealt.first_own

    @property
    def known_from(self) -> int:
        """See `Epoch.known_from`."""
        return self._dealt.known_from

    def earlier(self, positions: Int64Array) -> Iterator[tuple[Mapping[str, Any], BoolArray, Int64Array]]:
        """See `Epoch.earlier`."""
        which, passes, within = self._dealt.own_places(positions)
        own_epochs = np.where(passes < self._changed[which], passes * len(self.order.parts) + which, -1)
        for own_epoch in np.unique(own_epochs[own_epochs >= 0]).tolist():
            mine = np.flatnonzero(own_epochs == own_epoch)
            for before, some, rows in self._alone(own_epoch).earlier(within[mine]):
                is_there = np.zeros(len(positions), dtype=np.bool_)
                is_there[mine[some]] = True
                yield {**before, COMPONENT: own_epoch % len(self.order.parts)}, is_there, rows

    def _own_epoch(self, own_epoch: int) -> Epoch:
        passes, index = divmod(own_epoch, len(self.order.parts))
        return self.order.parts[index].epoch(self._dealt.first_own[index] + passes)

    @functools.cached_property
    def _dealt(self) -> Dealt:
        return self.order.settings.course.epoch(self.number)

    @property
    def epoch_rows(self) -> int:
        """See `Epoch.epoch_rows`."""
        return self._dealt.end

    @functools.cached_property
    def _alone(self) -> "Callable[[int], Epoch]":
        return functools.lru_cache(maxsize=_MOST_ALONE)(self._own_epoch)

    @functools.cached_property
    def _known(self) -> dict[type[Order], tuple[Int64Array, UInt64Array]]:
        """By kind of order: its own epochs, ascending, and the column that `stack` made for each. An entry is only
        replaced as a whole, because several threads may read it.
        """
        return {}

    def _numbers(self, kind: type[Order], asked: Int64Array) -> UInt64Array:
        """Returns the numbers that `stacked_rows` takes: one column, kept for later, for each of `asked`, ascending."""
        epochs, numbers = self._known.get(kind) or (asked, self._stack(kind, asked))
        new = asked[~np.isin(asked, epochs)]
        if len(new):
            kept = np.isin(epochs, asked) | (len(epochs) + len(new) <= _MOST_TOGETHER)
            epochs = np.concatenate([epochs[kept], new])
            numbers = np.concatenate([numbers[:, kept], self._stack(kind, new)], axis=1)
            ascending = np.argsort(epochs)
            epochs, numbers = epochs[ascending], numbers[:, ascending]
        self._known[kind] = epochs, numbers
        return numbers[:, np.searchsorted(epochs, asked)]

    def _stack(self, kind: type[Order], epochs: Int64Array) -> UInt64Array:
        return stack(kind, [self._own_epoch(own_epoch) for own_epoch in epochs.tolist()])
