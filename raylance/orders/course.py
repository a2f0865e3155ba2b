"""Which dataset of a mixture each position belongs to, through all changes of the weights in the course of a run."""

import base64
import bisect
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import numbers
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from raylance.errors import ConfigError
from raylance.orders.permutation import Int64Array

_MOST_SHARES = 2**31  # so that the product of two shares is an int64
_MOST_POSITIONS = 2**63
_KEPT = 8  # epochs that a course keeps
_ROW = 2**32  # a row in debts
_MOST_PLAIN = 16  # segments that a state holds in plain words; a thousand take 8 kB of compressed JSON

Quotas = tuple[int, ...]
"""For each component, its share of the positions, in parts of the sum of all; 0 for none."""


def exact(weight: Any) -> Fraction:
    """Returns a weight as it is written, also of 32 bits: 0.7, not the nearest float."""
    if isinstance(weight, numbers.Rational):
        return Fraction(int(weight.numerator), int(weight.denominator))
    return Fraction(str(weight if isinstance(weight, np.floating) else float(weight)))


def shares_of(weights: Sequence[Fraction]) -> Quotas:
    """Returns weights as whole numbers whose sum is at most 2**31: at least 1, or 0 for 0. If no such numbers are
    exact, each is off by one part of the sum at most.
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    divisor, total = math.gcd(*whole), sum(whole)
    if total // divisor <= _MOST_SHARES:
        return tuple(number // divisor for number in whole)
    return tuple(max(1, number * (_MOST_SHARES - len(whole)) // total) if number else 0 for number in whole)


class Dealer(Protocol):
    """Deals positions to components by their quotas, from position 0 on."""

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns the component of each position, and how many earlier positions belong to the same component."""

    def counts(self, position: int) -> list[int]:
        """Returns how many of the first positions belong to each component."""

    def position(self, component: int, index: int) -> int:
        """Returns the position of a component's row with this index."""


class _Tree:
    """Deals positions to components by a binary tree: of the first p positions of a node, its left half gets
    floor(p * left / total + 1/2), and its right half the others.

    Such a split is a Sturmian word, the most even sequence of two letters. So at any position each component has its
    share, give or take a few rows, and neither size nor cost depends on the weights. Where earlier positions were dealt
    otherwise, what the left half is owed of them is added to the 1/2.
    """

    def __init__(self, quotas: Quotas, debts: tuple[int, ...] | None = None, unit: int = 1) -> None:
        """Takes the quotas, and what each component is owed of earlier positions, in parts of a position's `unit`."""
        # By node, the root first: quota of the left half, quota of both, what is added to the left one, and the nodes
        # of the halves. A component is a node that goes to itself.
        nodes: list[tuple[int, int, int, int, int]] = []
        owners: list[int] = []
        self._paths: list[list[tuple[int, int, int, bool]]] = [[] for _ in quotas]  # (…, is left), the root last

        def add(low: int, high: int) -> int:
            number, total, middle = len(nodes), sum(quotas[low:high]), (low + high) // 2
            nodes.append((total, total, 0, number, number))
            owners.append(low)
            if high - low > 1:
                left = sum(quotas[low:middle])
                phase = total // 2
                if debts is not None:
                    of_left, of_both = sum(debts[low:middle]), sum(debts[low:high])
                    owed = Fraction(of_left * total - of_both * left, total * unit)
                    finer = _MOST_SHARES // total
                    left, total = left * finer, total * finer
                    phase = min(max(0, math.floor(total * (Fraction(1, 2) + owed))), total - 1)
                nodes[number] = left, total, phase, add(low, middle), add(middle, high)
                for index in range(low, high):
                    self._paths[index].append((left, total, phase, index < middle))
            return number

        add(0, len(quotas))
        self._nodes, self._owners = np.array(nodes, dtype=np.int64).T, np.array(owners, dtype=np.int64)
        self._depth = max(map(len, self._paths))

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Dealer.place`."""
        node, place = np.zeros(len(positions), dtype=np.int64), positions
        for _ in range(self._depth):
            left, total, phase, left_node, right_node = self._nodes[:, node]
            turn, rest = np.divmod(place, total)
            before, over = np.divmod(rest * left + phase, total)
            before += turn * left
            is_left = over + left >= total
            node, place = np.where(is_left, left_node, right_node), np.where(is_left, before, place - before)
        return self._owners[node], place

    def counts(self, position: int) -> list[int]:
        """See `Dealer.counts`."""
        found = []
        for path in self._paths:
            count = position
            for left, total, phase, is_left in reversed(path):
                first = (count * left + phase) // total
                count = first if is_left else count - first
            found.append(count)
        return found

    def position(self, component: int, index: int) -> int:
        """See `Dealer.position`."""
        for left, total, phase, is_left in self._paths[component]:
            if is_left:
                index = -((phase - (index + 1) * total) // left) - 1  # before its next one, the left half has index + 1
            else:
                index = (index * total + phase) // (total - left)
        return index


class _Pattern:
    """Deals positions by a repeated pattern, which has the quotas. Checkpoints of raylance 0.10 continue by it."""

    def __init__(self, quotas: Quotas) -> None:
        due = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
        owner = np.repeat(np.arange(len(quotas), dtype=np.int64), quotas)
        self._pattern = owner[np.lexsort((owner, due))]
        self._places = np.argsort(self._pattern, kind="stable")  # the places in a repetition, sorted by component
        self._rank = np.empty_like(self._pattern)
        self._rank[self._places] = np.concatenate([np.arange(quota) for quota in quotas])
        self._quotas, self._size = np.array(quotas, dtype=np.int64), len(owner)

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Dealer.place`."""
        turn, place = np.divmod(positions, self._size)
        which = self._pattern[place]
        return which, turn * self._quotas[which] + self._rank[place]

    def counts(self, position: int) -> list[int]:
        """See `Dealer.counts`."""
        turn, rest = divmod(position, self._size)
        part = np.bincount(self._pattern[:rest], minlength=len(self._quotas))
        return [turn * quota + count for quota, count in zip(self._quotas.tolist(), part.tolist(), strict=True)]

    def position(self, component: int, index: int) -> int:
        """See `Dealer.position`."""
        turn, place = divmod(index, int(self._quotas[component]))
        first = int(self._quotas[:component].sum())
        return turn * self._size + int(self._places[first + place])


class _Some:
    """Deals positions to those components that have a quota."""

    def __init__(self, quotas: Quotas, debts: tuple[int, ...] | None, unit: int) -> None:
        self._which = np.flatnonzero(np.array(quotas)).astype(np.int64)
        self._all, own = len(quotas), tuple(quota for quota in quotas if quota)
        owed = None if debts is None else tuple(debts[index] for index in self._which.tolist())
        self._dealer = _Tree(own, owed, unit)

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Dealer.place`."""
        which, index = self._dealer.place(positions)
        return self._which[which], index

    def counts(self, position: int) -> list[int]:
        """See `Dealer.counts`."""
        found = [0] * self._all
        for which, count in zip(self._which.tolist(), self._dealer.counts(position), strict=True):
            found[which] = count
        return found

    def position(self, component: int, index: int) -> int:
        """See `Dealer.position`."""
        return self._dealer.position(int(np.searchsorted(self._which, component)), index)


@dataclasses.dataclass(frozen=True, slots=True)
class _Turns:
    """Deals positions in turns of some rows of one component, as another dealer deals single ones."""

    dealer: Dealer
    rows: int  # of a turn

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Dealer.place`."""
        turn, within = np.divmod(positions, self.rows)
        which, earlier = self.dealer.place(turn)
        return which, earlier * self.rows + within

    def counts(self, position: int) -> list[int]:
        """See `Dealer.counts`."""
        turn, within = divmod(position, self.rows)
        found = [count * self.rows for count in self.dealer.counts(turn)]
        found[int(self.dealer.place(np.array([turn]))[0][0])] += within
        return found

    def position(self, component: int, index: int) -> int:
        """See `Dealer.position`."""
        turn, within = divmod(index, self.rows)
        return self.dealer.position(component, turn) * self.rows + within


@functools.lru_cache(maxsize=64)
def _dealer(spread: str, quotas: Quotas, turn_rows: int = 1, debts: tuple[int, ...] | None = None) -> Dealer:
    """Returns a dealer for components that are owed `debts` of earlier positions, in parts of 2**32 of a row."""
    unit = _ROW * turn_rows
    if not all(quotas):
        found: Dealer = _Some(quotas, debts, unit)
    else:
        found = _Tree(quotas, debts, unit) if spread == "tree" else _Pattern(quotas)
    return found if turn_rows == 1 else _Turns(found, turn_rows)


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
        is_move: Whether the training function has changed the quotas, not the arguments of `raylance.mix`.
        turn_rows: Number of positions in a row that one component gets.
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
        return dataclasses.replace(self, quotas=self.quotas + more, schedule=schedule)

    def quotas_at(self, rows: int) -> Quotas:
        """Returns the quotas after a number of rows of the run."""
        at = bisect.bisect_right(self.schedule, rows, key=lambda knot: knot[0])
        return self.schedule[at - 1][1] if at else self.quotas

    def next_change(self, rows: int) -> int | None:
        """Returns the number of rows of the run after which the quotas change next; None if they do not."""
        at = bisect.bisect_right(self.schedule, rows, key=lambda knot: knot[0])
        return self.schedule[at][0] if at < len(self.schedule) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Dealt:
    """How the positions of one epoch are dealt to components.

    Attributes:
        starts: Where each part begins in which one dealer deals: int64, ascending, the first one 0.
        dealers: The dealers of the parts.
        before: How many rows each component has before each part: int64, (parts, components).
        end: Number of positions of the epoch.
        first_own: The number of each component's first own epoch in it.
        rows_before: Number of positions of the epochs before it.
        quotas: The quotas of the parts.
        debts: What each component is owed of the parts before each part, in parts of 2**32 of a row.
    """

    starts: Int64Array
    dealers: tuple[Dealer, ...]
    before: Int64Array
    end: int
    first_own: tuple[int, ...]
    rows_before: int
    quotas: tuple[Quotas, ...]
    debts: tuple[tuple[int, ...], ...]

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns the component of each position, and how many rows the component has before it in the epoch."""
        if len(self.dealers) == 1:
            return self.dealers[0].place(positions)
        part = np.searchsorted(self.starts, positions, side="right") - 1
        which, index = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(part).tolist():
            mine = part == number
            found, own = self.dealers[number].place(positions[mine] - self.starts[number])
            which[mine], index[mine] = found, own + self.before[number][found]
        return which, index

    def counts(self, position: int) -> list[int]:
        """Returns how many of the first positions belong to each component."""
        part = bisect.bisect_right(self.starts, position) - 1
        own = self.dealers[part].counts(position - int(self.starts[part]))
        return [before + count for before, count in zip(self.before[part].tolist(), own, strict=True)]

    def owed(self, position: int) -> tuple[int, ...]:
        """Returns what each component is owed of the first positions, in parts of 2**32 of a row."""
        part = bisect.bisect_right(self.starts, position) - 1
        dealt = position - int(self.starts[part])
        return _owed(self.debts[part], self.quotas[part], self.dealers[part].counts(dealt), dealt)


def _owed(debts: tuple[int, ...], quotas: Quotas, counts: Sequence[int], dealt: int) -> tuple[int, ...]:
    """Returns what components are owed after a part of `dealt` positions, of which they got `counts`."""
    total = sum(quotas)
    shares = zip(debts, quotas, counts, strict=True)
    return tuple(debt + dealt * quota * _ROW // total - count * _ROW for debt, quota, count in shares)


_Reached = tuple[int, int, tuple[int, ...]]
"""An epoch, the rows of the run before it, and the components' first own epochs in it."""


class Course:
    """How positions are dealt to components, in all epochs: by segments, each of which may have a schedule.

    What lies before a place does not depend on the segments that begin there or later.
    """

    def __init__(self, segments: tuple[Segment, ...], rows: tuple[int, ...]) -> None:
        """Takes the segments, ascending, the first one from (0, 0) on; and the rows of an own epoch by component."""
        self._segments, self._rows = segments, rows
        self._places = [segment.place for segment in segments]
        self._known: dict[int, Dealt] = {}
        # The furthest epoch that was found, with the rows before it and the components' first own epochs
        self._reached: _Reached = 0, 0, (0,) * len(rows)

    def extended(self, segment: Segment) -> "Course":
        """Returns the course with one more segment, in a time that hardly grows with the number of segments."""
        found = Course((*self._segments, segment), self._rows)
        epoch, position = segment.place
        before = self.epoch(epoch)
        found._reached = epoch, before.rows_before, before.first_own
        if 0 < position < before.end:
            part = bisect.bisect_left(before.starts, position)
            names = ("starts", "dealers", "before", "quotas", "debts")
            begun = {name: getattr(before, name)[:part] for name in names}
            counts, debts = before.counts(position), before.owed(position)
            found._known[epoch] = found._deal_from(segment, [], found._reached, position, counts, debts, begun)
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
        epoch, rows, first_own = begin or (0, 0, (0,) * len(self._rows))
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
        return [-(-(dealt.end + 1) // rows) for rows in self._rows]

    def _deal(self, epoch: int, rows: int, first_own: tuple[int, ...]) -> Dealt:
        """Returns how the positions of an epoch are dealt that `rows` of the run precede."""
        known = self._known.get(epoch)
        if known is not None:
            return known
        at = bisect.bisect_right(self._places, (epoch, 0)) - 1
        later = [segment for segment in self._segments[at + 1 :] if segment.epoch == epoch]
        none, (segment, reached) = len(self._rows), (self._segments[at], (epoch, rows, first_own))
        return self._deal_from(segment, later, reached, 0, [0] * none, (0,) * none, {})

    def _deal_from(
        self,
        segment: Segment,
        later: list[Segment],
        reached: _Reached,
        start: int,
        counts: list[int],
        debts: tuple[int, ...],
        begun: Mapping[str, Any],
    ) -> Dealt:
        """Returns how the positions of an epoch are dealt, whose parts before `start` have `begun`; `later` are the
        segments in it after `segment`; of the positions before `start`, each component has `counts` and is owed
        `debts`.
        """
        _, rows, first_own = reached
        found: dict[str, list[Any]] = {"starts": [], "dealers": [], "before": [], "quotas": [], "debts": []}
        while True:
            quotas = segment.quotas_at(rows + start)
            dealer = _dealer(segment.spread, quotas, segment.turn_rows, debts if start else None)
            for name, value in zip(found, (start, dealer, counts, quotas, debts), strict=True):
                found[name].append(value)
            end = start + self._left(segment, quotas, dealer, counts, start)
            change = segment.next_change(rows + start)
            after = min([end, *(each.position for each in later[:1]), *([] if change is None else [change - rows])])
            if after >= end:
                break
            dealt = dealer.counts(after - start)
            debts = _owed(debts, quotas, dealt, after - start)
            counts = [count + more for count, more in zip(counts, dealt, strict=True)]
            start = after
            while later and later[0].position <= start:
                segment = later.pop(0)
        return Dealt(
            starts=np.array([*begun.get("starts", ()), *found["starts"]], dtype=np.int64),
            dealers=(*begun.get("dealers", ()), *found["dealers"]),
            before=np.array([*begun.get("before", ()), *found["before"]], dtype=np.int64),
            quotas=(*begun.get("quotas", ()), *found["quotas"]),
            debts=(*begun.get("debts", ()), *found["debts"]),
            end=end,
            first_own=first_own,
            rows_before=rows,
        )

    def _left(self, segment: Segment, quotas: Quotas, dealer: Dealer, counts: list[int], start: int) -> int:
        """Returns how many positions of an epoch are left from a part on, if its rule holds to the end."""
        if isinstance(segment.stop, int):
            return max(0, segment.stop - start)
        shared = [(index, self._rows[index], counts[index]) for index, quota in enumerate(quotas) if quota]
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
        before = _courses.get((segments[:-1], rows))
        found = Course(segments, rows) if before is None else before.extended(segments[-1])
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
            }
            found.append(Segment(**fields | known))
        places = [segment.place for segment in found]
        if places != sorted(set(places)):
            raise ValueError("not ascending")
        return tuple(found)


@contextlib.contextmanager
def refusing(name: str, value: Any) -> Iterator[None]:
    """Raises ConfigError if a value of a checkpoint is damaged."""
    try:
        yield
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise ConfigError(f"its {name} are {str(value)[:200]!r}: {error}") from error


def _quotas(value: Any, components: int) -> Quotas:
    found = tuple(map(_count, value))
    if len(found) != components or not any(found):
        raise ValueError(f"{len(found)} quotas of {components} datasets")
    return found


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_POSITIONS:
        raise ValueError(f"{value!r} is no count")
    return value


def packed(values: list[Any]) -> Any:
    """Returns a list for a checkpoint, as `unpacked` reads it: compressed if it is long."""
    if len(values) <= _MOST_PLAIN:
        return values
    return {"packed": base64.b85encode(zlib.compress(json.dumps(values).encode(), 9)).decode()}


def is_packed(value: Any) -> bool:
    """Whether a value of a checkpoint is compressed. The same values may be compressed otherwise elsewhere."""
    return isinstance(value, Mapping) and [*value] == ["packed"]


def unpacked(value: Any) -> list[Any]:
    """Returns a list of a checkpoint, which may be compressed. Raises ValueError, TypeError or zlib.error if it is
    damaged.
    """
    if is_packed(value):
        value = json.loads(zlib.decompress(base64.b85decode(value["packed"])))
    if not isinstance(value, list):
        raise TypeError("not a list")
    return value
