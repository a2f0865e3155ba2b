"""Which dataset of a mixture each position belongs to, through all changes of the weights in the course of a run."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from raylance.errors import ConfigError
from raylance.orders.compact import packed, refusing, unpacked
from raylance.orders.dealing import ROW, Dealer, Quotas, dealer_of, shares_of
from raylance.orders.permutation import Int64Array

_MOST_POSITIONS = 2**63
_KEPT = 8  # epochs that a course keeps


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The rule of a mixture from a place of the run on, up to the next segment.

    Attributes:
        epoch: The epoch in which it begins.
        position: The position at which it begins.
        quotas: The quotas at its beginning, unless the schedule has others for that place.
        stop: When an epoch ends: "first_exhausted", "all_exhausted", or after a number of rows.
        spread: How positions are dealt: "tree", or "pattern" for checkpoints of raylance 0.10 and before.
        schedule: Later quotas: each from a number of rows of the run on, counted over all epochs, ascending.
        reason: Why it began; "" for the first segment, and for what a restart has changed.
        is_move: Whether its quotas are those of the training function, not of the arguments of `raylance.mix`.
        turn_rows: Number of positions in a row that one component gets.
        asked: If it is a move, the quotas of arguments that hold from the same place on, in whose place it is.
        own: The components whose rows change where it begins: for each its number; the rows of its own epochs before;
            and how many rows it would have had before in the epoch if its own epochs had always had the new rows.
    """

    epoch: int = 0
    position: int = 0
    quotas: Quotas
    stop: str | int
    spread: str = "tree"
    schedule: tuple[tuple[int, Quotas], ...] = ()
    reason: str = ""
    is_move: bool = False
    turn_rows: int = 1
    asked: Quotas = ()
    own: tuple[tuple[int, int, int], ...] = ()

    @property
    def place(self) -> tuple[int, int]:
        """The epoch and the position at which it begins."""
        return self.epoch, self.position

    @property
    def rule(self) -> tuple[Any, ...]:
        """What two segments have in common if positions are dealt alike."""
        return self.quotas, self.stop, self.schedule, self.turn_rows

    def widened(self, components: int) -> "Segment":
        """Returns the segment for more components, of which the new ones have no share."""
        more = (0,) * (components - len(self.quotas))
        schedule = tuple((rows, quotas + more) for rows, quotas in self.schedule)
        asked = self.asked + more if self.asked else ()
        return dataclasses.replace(self, quotas=self.quotas + more, schedule=schedule, asked=asked)

    def rows_before(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the rows of the components' own epochs before the segment, from those in it."""
        before = {number: count for number, count, _ in self.own}
        return tuple(before.get(number, count) for number, count in enumerate(rows))

    def quotas_at(self, rows: int) -> Quotas:
        """Returns the quotas after a number of rows of the run."""
        at = bisect.bisect_right(self.schedule, rows, key=lambda knot: knot[0])
        return self.schedule[at - 1][1] if at else self.quotas

    def next_change(self, rows: int) -> int | None:
        """Returns the number of rows of the run after which the quotas change next; None if they do not."""
        at = bisect.bisect_right(self.schedule, rows, key=lambda knot: knot[0])
        return self.schedule[at][0] if at < len(self.schedule) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Own:
    """Which rows of an epoch are those of each component's own epochs.

    Attributes:
        rows: The rows of an own epoch: int64, (components,), as the next ones.
        more: What is added to the number of rows that a component had before, if its own epochs had other rows.
        at: The own epoch, counted from 0, in which its rows have changed.
        shift: What is added to a position of this own epoch.
    """

    rows: Int64Array
    more: Int64Array
    at: Int64Array
    shift: Int64Array

    @classmethod
    def of(cls, rows: Sequence[int]) -> "Own":
        """Returns own epochs whose rows have not changed in the epoch."""
        none = np.zeros(len(rows), dtype=np.int64)
        return cls(np.array(rows, dtype=np.int64), none, none, none)

    def place(self, which: Any, index: Any) -> tuple[Int64Array, Int64Array]:
        """Returns the own epochs of rows of components that had `index` rows before, and the positions in these."""
        passes, within = np.divmod(index + self.more[which], self.rows[which])
        return passes, within + np.where(passes == self.at[which], self.shift[which], 0)

    def changed(self, segment: Segment, counts: Sequence[int], rows: Sequence[int]) -> "Own":
        """Returns the own epochs from a segment on, before which the components had `counts`; they have `rows` now."""
        if not segment.own:
            return self
        found = Own(np.array(rows, dtype=np.int64), self.more.copy(), self.at.copy(), self.shift.copy())
        for number, _, count in segment.own:
            passes, position = self.place(number, counts[number])
            found.more[number] = count - counts[number]
            found.at[number], begun = divmod(count, rows[number])
            found.shift[number] = position - begun if found.at[number] == passes else 0
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class DealtPart:
    """A part of an epoch, in which one dealer deals.

    Attributes:
        start: Its first position.
        dealer: The dealer, which counts positions from there.
        before: How many rows each component has before it: int64, (components,).
        quotas: The quotas.
        debts: What each component is owed of the parts before it, in parts of 2**32 of a row.
        own: The components' own epochs.
    """

    start: int
    dealer: Dealer
    before: Int64Array
    quotas: Quotas
    debts: tuple[int, ...]
    own: Own

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns the component of each position, and how many rows the component has before it in the epoch."""
        which, index = self.dealer.place(positions - self.start)
        return which, index + self.before[which]

    def counts(self, position: int) -> list[int]:
        """Returns how many rows each component has before a position."""
        own = self.dealer.counts(position - self.start)
        return [before + count for before, count in zip(self.before.tolist(), own, strict=True)]

    def owed(self, position: int) -> tuple[int, ...]:
        """Returns what each component is owed before a position, in parts of 2**32 of a row."""
        dealt, total = position - self.start, sum(self.quotas)
        shares = zip(self.debts, self.quotas, self.dealer.counts(dealt), strict=True)
        return tuple(debt + dealt * quota * ROW // total - count * ROW for debt, quota, count in shares)


@dataclasses.dataclass(frozen=True, slots=True)
class Dealt:
    """How the positions of one epoch are dealt to components.

    Attributes:
        parts: The parts of the epoch, ascending, the first one from 0 on.
        starts: Where they begin: int64.
        end: Number of positions of the epoch.
        first_own: The number of each component's first own epoch in it.
        rows_before: Number of positions of the epochs before it.
    """

    parts: tuple[DealtPart, ...]
    starts: Int64Array
    end: int
    first_own: tuple[int, ...]
    rows_before: int

    @property
    def known_from(self) -> int:
        """The first position after which no component's rows change in the epoch."""
        changes = [part.start for one, part in itertools.pairwise(self.parts) if one.own is not part.own]
        return max(changes, default=0)

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns the component of each position, and how many rows the component has before it in the epoch."""
        which, index = np.empty_like(positions), np.empty_like(positions)
        for part, mine in self._by_part(positions):
            which[mine], index[mine] = part.place(positions[mine])
        return which, index

    def own_places(self, positions: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Returns the component of each position, which of its own epochs in this epoch, and the position in that."""
        which, passes, within = np.empty((3, len(positions)), dtype=np.int64)
        for part, mine in self._by_part(positions):
            of, index = part.place(positions[mine])
            which[mine], (passes[mine], within[mine]) = of, part.own.place(of, index)
        return which, passes, within

    def own_place(self, component: int, position: int) -> tuple[int, int]:
        """Returns the own epoch, and the position in it, of a component's first row from a position on."""
        part = self._part(position)
        passes, within = part.own.place(component, part.counts(position)[component])
        return self.first_own[component] + int(passes), int(within)

    def counts(self, position: int) -> list[int]:
        """Returns how many of the first positions belong to each component."""
        return self._part(position).counts(position)

    def owed(self, position: int) -> tuple[int, ...]:
        """Returns what each component is owed of the first positions, in parts of 2**32 of a row."""
        return self._part(position).owed(position)

    def _part(self, position: int) -> DealtPart:
        return self.parts[bisect.bisect_right(self.starts, position) - 1]

    def _by_part(self, positions: Int64Array) -> Iterator[tuple[DealtPart, Any]]:
        """Yields each part that has some positions, and which."""
        if len(self.parts) == 1:
            yield self.parts[0], slice(None)
            return
        part = np.searchsorted(self.starts, positions, side="right") - 1
        for number in np.unique(part).tolist():
            yield self.parts[number], part == number


_Reached = tuple[int, int, tuple[int, ...]]
"""An epoch, the rows of the run before it, and the components' first own epochs in it."""


class Course:
    """How positions are dealt to components, in all epochs: by segments, each of which may have a schedule.

    What lies before a place does not depend on the segments that begin there or later.
    """

    def __init__(self, segments: tuple[Segment, ...], rows: tuple[int, ...]) -> None:
        """Takes the segments, ascending, the first one from (0, 0) on; and the rows of an own epoch by component, as
        they are in the last one.
        """
        self._segments = segments
        self._rows = [rows]  # in each segment
        for segment in segments[:0:-1]:
            self._rows.insert(0, segment.rows_before(self._rows[0]) if segment.own else self._rows[0])
        self._places = [segment.place for segment in segments]
        self._known: dict[int, Dealt] = {}
        # The furthest epoch that was found, with the rows before it and the components' first own epochs
        self._reached: _Reached = 0, 0, (0,) * len(rows)

    def extended(self, segment: Segment, rows: tuple[int, ...]) -> "Course":
        """Returns the course with one more segment, in which own epochs have `rows`. Takes a time that hardly grows
        with the number of segments.
        """
        found = Course((*self._segments, segment), rows)
        epoch, position = segment.place
        before = self.epoch(epoch)
        found._reached = epoch, before.rows_before, before.first_own
        if 0 < position < before.end:
            begun = before.parts[: bisect.bisect_left(before.starts, position)]
            at, counts = len(self._segments), before.counts(position)
            own = begun[-1].own.changed(segment, counts, rows)
            part = found._part(at, before.rows_before, position, counts, before.owed(position), own)
            found._known[epoch] = found._deal_from(at, found._reached, (*begun, part))
        return found

    def epoch(self, number: int) -> Dealt:
        """Returns how the positions of an epoch are dealt."""
        found = self._known.get(number)
        if found is None:
            found = self._find(number)
            self._keep(number, found)
        return found

    def _keep(self, number: int, dealt: Dealt) -> None:
        self._known[number] = dealt
        for key in list(self._known)[:-_KEPT]:
            self._known.pop(key, None)

    @property
    def last_change(self) -> int:
        """The first epoch from which on all have the same number of positions."""
        return next(epoch for epoch, _, _, more in self._walk(self._reached) if more is None)

    def _find(self, number: int) -> Dealt:
        at = self._reached
        for epoch, before, first_own, more in self._walk(at if at[0] <= number else None):
            if more is None or number < epoch + more:  # from this epoch to the asked one, all are alike
                dealt = self._deal(epoch, before, first_own)
                wraps = self._wraps(dealt)
                self._reached = epoch, before, first_own
                own = tuple(first + (number - epoch) * more for first, more in zip(first_own, wraps, strict=True))
                rows_before = before + (number - epoch) * dealt.end
                return dataclasses.replace(dealt, first_own=own, rows_before=rows_before)
        raise AssertionError("epochs have no end")

    def _walk(self, begin: _Reached | None = None) -> Iterator[tuple[int, int, tuple[int, ...], int | None]]:
        """Yields epochs, the rows of the run before them, the components' first own epochs, and how many epochs from
        there on are alike; None for all.
        """
        epoch, rows, first_own = begin or (0, 0, (0,) * len(self._rows[0]))
        while True:
            dealt = self._deal(epoch, rows, first_own)
            alike = self._alike(epoch, rows, dealt.end)
            yield epoch, rows, first_own, alike
            if alike is None:
                return
            wraps = self._wraps(dealt)
            first_own = tuple(first + alike * more for first, more in zip(first_own, wraps, strict=True))
            epoch, rows = epoch + alike, rows + alike * dealt.end

    def _alike(self, epoch: int, rows: int, end: int) -> int | None:
        """Returns how many epochs, from one that `rows` precede and that has `end` positions, are alike."""
        at = bisect.bisect_right(self._places, (epoch, 0)) - 1
        limits = [] if at + 1 == len(self._places) else [self._places[at + 1][0] - epoch]
        change = self._segments[at].next_change(rows)
        if change is not None:
            limits.append((change - rows) // max(1, end))
        return max(1, min(limits)) if limits else None

    def _wraps(self, dealt: Dealt) -> list[int]:
        """Returns how many own epochs of each component an epoch may begin."""
        if dealt.known_from:
            last = [dealt.own_place(number, dealt.end)[0] for number in range(len(dealt.first_own))]
            return [end + 1 - first for end, first in zip(last, dealt.first_own, strict=True)]
        return [-(-(dealt.end + 1) // rows) for rows in dealt.parts[0].own.rows.tolist()]

    def _deal(self, epoch: int, rows: int, first_own: tuple[int, ...]) -> Dealt:
        """Returns how the positions of an epoch are dealt that `rows` of the run precede."""
        known = self._known.get(epoch)
        if known is not None:
            return known
        at, none = bisect.bisect_right(self._places, (epoch, 0)) - 1, (0,) * len(first_own)
        part = self._part(at, rows, 0, none, none, Own.of(self._rows[at]))
        return self._deal_from(at, (epoch, rows, first_own), (part,))

    def _part(
        self, at: int, rows: int, start: int, before: Sequence[int], debts: tuple[int, ...], own: Own
    ) -> DealtPart:
        """Returns a part of an epoch that `rows` of the run precede; it lies in the segment with number `at`."""
        segment = self._segments[at]
        quotas = segment.quotas_at(rows + start)
        dealer = dealer_of(segment.spread, quotas, segment.turn_rows, debts if start else None)
        return DealtPart(start, dealer, np.array(before, dtype=np.int64), quotas, debts, own)

    def _deal_from(self, at: int, reached: _Reached, begun: tuple[DealtPart, ...]) -> Dealt:
        """Returns how the positions of an epoch are dealt, whose first parts have `begun`. The last one of them lies in
        the segment with number `at`.
        """
        (epoch, rows, first_own), parts = reached, [*begun]
        while True:
            part, segment = parts[-1], self._segments[at]
            end = part.start + self._left(segment, part)
            later = [place[1] for place in self._places[at + 1 : at + 2] if place[0] == epoch]
            change = segment.next_change(rows + part.start)
            start = min([end, *later, *([] if change is None else [change - rows])])
            if start >= end:
                break
            own, counts = part.own, part.counts(start)
            if start in later:
                at += 1
                own = own.changed(self._segments[at], counts, self._rows[at])
            parts.append(self._part(at, rows, start, counts, part.owed(start), own))
        starts = np.array([part.start for part in parts], dtype=np.int64)
        return Dealt(tuple(parts), starts, end, first_own, rows)

    def _left(self, segment: Segment, part: DealtPart) -> int:
        """Returns how many positions of an epoch are left from a part on, if its rule holds to the end."""
        start, dealer = part.start, part.dealer
        if isinstance(segment.stop, int):
            return max(0, segment.stop - start)
        own, counts = part.own.rows.tolist(), (part.before + part.own.more).tolist()
        shared = [(index, own[index], counts[index]) for index, quota in enumerate(part.quotas) if quota]
        if segment.stop == "first_exhausted":  # at the first row of a next own epoch
            ends = [dealer.position(index, -count % rows if count else rows) for index, rows, count in shared]
            found = min(ends)
        else:
            ends = [dealer.position(index, rows - count - 1) + 1 for index, rows, count in shared if count < rows]
            found = max(ends, default=0)
        if found + start >= _MOST_POSITIONS:
            raise ConfigError(
                f'mix(): with stop="{segment.stop}" an epoch has {found:.3g} rows, and positions have 63 bits. Raise '
                "the smallest weight, lower turn_rows, or give stop= as a number of rows."
            )
        return found


_courses: dict[tuple[tuple[Segment, ...], tuple[int, ...]], Course] = {}  # the last ones that were asked for


def course_of(segments: tuple[Segment, ...], rows: tuple[int, ...]) -> Course:
    """Returns the course of segments, for components of these rows each."""
    found = _courses.get((segments, rows))
    if found is None:
        before = _courses.get((segments[:-1], segments[-1].rows_before(rows)))
        found = Course(segments, rows) if before is None else before.extended(segments[-1], rows)
        _courses[segments, rows] = found
        for key in list(_courses)[:-_KEPT]:
            _courses.pop(key, None)
    return found


def stages_between(
    first: tuple[int, Sequence[Fraction]], last: tuple[int, Sequence[Fraction]], parts: int
) -> Iterator[tuple[int, Quotas]]:
    """Yields the quotas of equal parts between two places whose weights change along a line, each with its begin."""
    (begin, before), (end, after) = first, last
    bounds = [begin + (end - begin) * number // parts for number in range(parts + 1)]
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        if low < high:
            share = Fraction(2 * number + 1, 2 * parts)
            yield low, shares_of([old + (new - old) * share for old, new in zip(before, after, strict=True)])


def write_schedule(schedule: tuple[tuple[int, Quotas], ...]) -> Any:
    """Returns a schedule as JSON-able values, which `read_schedule` reads."""
    return packed([[rows, [*quotas]] for rows, quotas in schedule])


def read_schedule(value: Any, components: int) -> tuple[tuple[int, Quotas], ...]:
    """Reads what `write_schedule` has returned. Raises ConfigError if it is damaged."""
    with refusing("schedule", value):
        found = [(_count(rows), _quotas(quotas, components)) for rows, quotas in unpacked(value)]
        if [rows for rows, _ in found] != sorted({rows for rows, _ in found}):
            raise ValueError("not ascending")
        return tuple(found)


def write_segments(segments: Sequence[Segment]) -> Any:
    """Returns segments as JSON-able values, which `read_segments` reads: a list of those fields that have no default,
    or its compressed JSON if there are many.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(Segment)}
    found = []
    for segment in segments:
        fields = {name: getattr(segment, name) for name in defaults if getattr(segment, name) != defaults[name]}
        fields["quotas"] = [*segment.quotas]
        fields |= {"asked": [*segment.asked]} if segment.asked else {}
        fields |= {"own": [[*each] for each in segment.own]} if segment.own else {}
        found.append(fields | ({"schedule": write_schedule(segment.schedule)} if segment.schedule else {}))
    return packed(found)


def read_segments(value: Any, components: int) -> tuple[Segment, ...]:
    """Reads what `write_segments` has returned. Raises ConfigError if it is damaged."""
    with refusing("segments", value):
        found = []
        for fields in unpacked(value):
            known = {
                "quotas": _quotas(fields["quotas"], components),
                "schedule": read_schedule(fields.get("schedule", []), components),
                "epoch": _count(fields.get("epoch", 0)),
                "position": _count(fields.get("position", 0)),
                "turn_rows": max(1, _count(fields.get("turn_rows", 1))),
                "asked": _quotas(fields["asked"], components) if fields.get("asked") else (),
                "own": tuple(_own(each, components) for each in fields.get("own", ())),
            }
            found.append(Segment(**fields | known))
        places = [segment.place for segment in found]
        if places != sorted(set(places)):
            raise ValueError("not ascending")
        return tuple(found)


def _quotas(value: Any, components: int) -> Quotas:
    found = tuple(map(_count, value))
    if len(found) != components or not any(found):
        raise ValueError(f"{len(found)} quotas of {components} datasets")
    return found


def _own(value: Any, components: int) -> tuple[int, int, int]:
    number, rows, count = map(_count, value)
    if number >= components or not rows:
        raise ValueError(f"dataset {number} of {components} with {rows} rows")
    return number, rows, count


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_POSITIONS:
        raise ValueError(f"{value!r} is no count")
    return value
