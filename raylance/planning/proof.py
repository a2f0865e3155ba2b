"""Owns the proof of a run: its line of history from what all its ranks were handed, and the comparison with the rows
that are selected; never reads a record, never opens a dataset.

It proves which rows were handed out, not in which step, nor with which bytes.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from raylance.orders.checking import select_rows
from raylance.orders.order import Resolved
from raylance.orders.permutation import Int64Array
from raylance.planning.digest import Digest, Interval, Place

_BLOCK_ROWS = 1 << 20
_CHEAPER = 50  # a row of the selection is than one of the plan: 0.02 µs, and 1 µs
_NAMED = 3  # gaps that are named

Status = Literal["proven", "fault", "unproven", "counted"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What one loader of one rank was handed.

    Attributes:
        start: What all ranks of one start of the run have in common; "" where nothing says it.
        ledger: The loader; two accounts of one hold the same, the later one more of it.
        rank: Its rank.
        world_size: Ranks that share the epoch.
        intervals: What it was handed, as it came.
        restored: Places of states that it loaded, by the jump after them. Other jumps rolled nothing back.
        forgotten: Place that all before is forgotten; None where nothing is.
        process: Its process; "" where nothing says it.
        begun_s: When it was made.
        ended_s: When it was handed its last row, by the same clock.
        selection: Which rows are selected: intervals of two selections add up to nothing.
        plan: What they are compared with.
    """

    start: str
    ledger: str
    rank: int
    world_size: int
    intervals: Sequence[Interval]
    restored: Mapping[int, Place] = dataclasses.field(default_factory=dict)
    forgotten: Place | None = None
    process: str = ""
    begun_s: float = 0.0
    ended_s: float = 0.0
    selection: str = ""
    plan: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """What a loader was handed without a jump.

    Attributes:
        account: The loader's.
        restored: Place of the state that it loaded before.
        forgotten: Place that all before is forgotten, of this piece or of earlier ones of the loader.
        intervals: What it was handed.
        cuts: Where it was cut.
        is_by_hand: Whether it begins after a jump to where no state was loaded.
    """

    account: Account
    restored: Place | None
    forgotten: Place | None
    intervals: tuple[Interval, ...]
    cuts: frozenset[Place]
    is_by_hand: bool

    @property
    def begin(self) -> Place:
        """Where it begins."""
        return self.intervals[0].begin

    @property
    def reach(self) -> Place:
        """How far it came."""
        return self.intervals[-1].end


@dataclasses.dataclass(slots=True)
class _Start:
    """What was handed out by processes that ran together.

    Attributes:
        accounts: Of their loaders.
        ranks: Pieces by rank, as they came.
        previous: An earlier start that one of the processes was in: then it is no new one.
        doubt: Why nothing of it is proven.
    """

    accounts: list[Account]
    ranks: dict[int, list[_Piece]]
    previous: int | None = None
    doubt: str = ""

    @property
    def world_size(self) -> int:
        """Ranks that share the epoch."""
        return self.accounts[0].world_size

    @property
    def pieces(self) -> list[_Piece]:
        """Of all ranks."""
        return [piece for pieces in self.ranks.values() for piece in pieces]


@dataclasses.dataclass(slots=True)
class _Walk:
    """What one rank of a start was handed before a place, that was not rolled back.

    Attributes:
        runs: What counts of each piece, later ones first.
        origin: The place that the start was resumed at, as far as this rank knows; None where that is forgotten.
        is_new: Whether no state was restored there.
        forgotten: Place that all before is forgotten.
    """

    runs: list[tuple[_Piece, list[Interval]]]
    origin: Place | None = None
    is_new: bool = False
    forgotten: Place | None = None


@dataclasses.dataclass(slots=True)
class _Part:
    """What the ranks of one start were handed of one epoch.

    Attributes:
        start: The start.
        ranks: By rank, what each piece was handed.
    """

    start: _Start
    ranks: dict[int, list[list[Interval]]]
    accounts: list[Account]

    @property
    def every(self) -> list[Interval]:
        """All intervals of all ranks."""
        return [interval for runs in self.ranks.values() for run in runs for interval in run]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochLine:
    """What is known of one epoch of the line of history, or that nothing is of several.

    Attributes:
        epoch: The epoch, or the first one.
        epochs: How many.
        spans: What all ranks together were handed, ascending.
        reach: Position up to which there ought to be something; the epoch's end where that is None.
        besides: Rows that are known to have been handed out besides them, and were not rolled back.
        came_again: Whether there were any.
        doubt: Why nothing is proven, whatever is known.
        plan: What it is compared with.
    """

    epoch: int
    epochs: int = 1
    spans: tuple[Interval, ...] = ()
    reach: int | None = None
    besides: int = 0
    came_again: bool = False
    doubt: str = ""
    plan: str = ""

    @property
    def digest(self) -> Digest:
        """All rows that are known."""
        return sum((span.digest for span in self.spans), Digest())

    @property
    def end(self) -> int:
        """Position after the last row that is known."""
        return self.spans[-1].high if self.spans else 0

    @property
    def has_ended(self) -> bool:
        """Whether the epoch was gone through to its end."""
        return bool(self.spans) and self.spans[-1].is_last

    @property
    def gaps(self) -> list[tuple[int, int | None]]:
        """Positions of which nothing is known: from, to; None for the end of the epoch."""
        found: list[tuple[int, int | None]] = []
        at = 0
        for span in self.spans:
            if span.low > at:
                found.append((at, span.low))
            at = span.high
        if not self.has_ended and (self.reach is None or self.reach > at):
            found.append((at, self.reach))
        return found

    @property
    def only_lacks_the_end(self) -> bool:
        """Whether some ranks are known to have come further than all are."""
        return bool(self.spans) and self.reach is not None and self.gaps == [(self.end, self.reach)]


def line_of_history(accounts: Sequence[Account]) -> list[EpochLine]:
    """What the run that stands now was trained on, by epoch: from each start what was delivered before the place that
    the next one resumed at. What was delivered after it was rolled back, and came again.

    A start resumed where one before it had been cut: at a report, or at an epoch's end. Where several had, at the
    latest of them. New processes that loaded no state count as resumed where they began: their model is new, or was
    restored by other means. Within a process only a loaded state rolls back: all that came before another jump counts.

    Args:
        accounts: Of all ranks and starts of one dataset, earlier ones first.
    """
    starts = _starts(accounts)
    epochs: dict[int, list[_Part]] = {}  # later starts first
    forgotten: Place = (0, 0)
    index: int | None = len(starts) - 1 if starts else None
    place: Place | None = None
    while index is not None:
        start = starts[index]
        walks = {rank: _walk(pieces, place, starts[:index]) for rank, pieces in start.ranks.items()}
        _collect(epochs, start, walks)
        forgotten = max([forgotten, *(walk.forgotten for walk in walks.values() if walk.forgotten)])
        origins = [walk.origin for walk in walks.values() if walk.origin is not None]
        if start.previous is not None and any(walk.is_new for walk in walks.values()):
            index, place = start.previous, None
        else:
            place = min(origins, default=None)
            place = None if place == (0, 0) and any(walk.is_new for walk in walks.values()) else place
            index = _latest(starts[:index], place)
    ends = [interval.end for parts in epochs.values() for part in parts for interval in part.every]
    lines = [_epoch_line(epoch, epochs[epoch], max(ends), forgotten) for epoch in sorted(epochs)]
    return _without_holes(lines, forgotten[0] + (forgotten[1] > 0))


def _collect(epochs: dict[int, list[_Part]], start: _Start, walks: Mapping[int, _Walk]) -> None:
    """Sorts what the ranks of a start were handed by epoch."""
    found: dict[int, _Part] = {}
    for rank, walk in walks.items():
        for piece, intervals in walk.runs:
            handed = [each for each in intervals if each.high > each.low or each.is_last]
            for epoch, run in itertools.groupby(handed, key=lambda interval: interval.epoch):
                part = found.setdefault(epoch, _Part(start, {}, []))
                part.ranks.setdefault(rank, []).append(list(run))
                part.accounts.append(piece.account)
    for epoch, part in found.items():
        epochs.setdefault(epoch, []).append(part)


def _without_holes(lines: Sequence[EpochLine], least: int) -> list[EpochLine]:
    """Adds the epochs of which nothing is known, of so many as there are at least."""
    found: list[EpochLine] = []
    at = 0
    for line in lines:
        if line.epoch > at:
            found.append(EpochLine(epoch=at, epochs=line.epoch - at))
        found.append(line)
        at = line.epoch + 1
    return [*found, EpochLine(epoch=at, epochs=least - at)] if least > at else found


def _latest(starts: Sequence[_Start], place: Place | None) -> int | None:
    """Which start a place was resumed at."""
    if place is None:
        return None
    pieces = [(index, piece) for index, start in enumerate(starts) for piece in start.pieces]
    found = _before([piece for _, piece in pieces], place)
    return None if found is None else pieces[found][0]


def _before(pieces: Sequence[_Piece], place: Place) -> int | None:
    """Of which piece a place was resumed at: the latest that was cut there, else the latest that came by it. A piece
    that a jump by hand has put there may have been saved before its first step.
    """
    earlier = [
        i for i, piece in enumerate(pieces) if piece.begin < place or (piece.is_by_hand and piece.begin == place)
    ]
    exact = [index for index in earlier if place in pieces[index].cuts]
    beyond = [index for index in earlier if pieces[index].reach > place]
    return max(exact or beyond or earlier, default=None)


def _is_cut(starts: Sequence[_Start], place: Place) -> bool:
    """Whether any of some starts was cut at a place."""
    return any(place in piece.cuts for start in starts for piece in start.pieces)


def _walk(pieces: Sequence[_Piece], place: Place | None, earlier: Sequence[_Start]) -> _Walk:
    """Goes back from a place, or from the last one, to where the first state came from.

    Args:
        pieces: Of one rank of a start.
        place: Where to begin.
        earlier: The starts before it.
    """
    walk = _Walk([])
    index = len(pieces) - 1 if place is None else _before(pieces, place)
    while index is not None:
        piece = pieces[index]
        walk.runs.append((piece, [each for each in piece.intervals if place is None or each.end <= place]))
        place = piece.restored
        if piece.forgotten is not None:
            walk.forgotten = piece.forgotten
            return walk
        if place is None and index == 0:
            walk.origin, walk.is_new = piece.begin, True
            return walk
        if place is None:
            index -= 1
            continue
        index = _before(pieces[:index], place)
        if index is not None and place not in pieces[index].cuts and _is_cut(earlier, place):
            index = None
    walk.origin = place if walk.runs else None
    return walk


def _starts(accounts: Sequence[Account]) -> list[_Start]:
    """Puts the loaders of processes that ran together into one start; earlier ones first."""
    newest: dict[str, Account] = {}
    for account in accounts:
        if account.intervals:
            begun_s = newest.get(account.ledger, account).begun_s
            newest[account.ledger] = dataclasses.replace(account, begun_s=begun_s)
    starts: list[_Start] = []
    for account in newest.values():
        start = _start_of(account, starts)
        shared = [other for other in start.accounts if other.rank == account.rank and _ran_beside(account, other)]
        if shared:
            start.doubt = (
                f"{len(shared) + 1} processes were rank {account.rank} of {account.world_size} at one time, and each "
                "was handed what is the share of one"
            )
        start.accounts.append(account)
        start.ranks.setdefault(account.rank, []).extend(_pieces(account))
    return starts


def _start_of(account: Account, starts: list[_Start]) -> _Start:
    """The start that a loader is of, which may be new."""
    previous = None
    for index, start in reversed(list(enumerate(starts))):
        is_here = bool(account.process) and any(account.process == other.process for other in start.accounts)
        is_alike = (start.world_size, start.accounts[0].start) == (account.world_size, account.start)
        if is_alike and (account.start or is_here or any(_ran_beside(account, other) for other in start.accounts)):
            for other in starts[index:] if start is not starts[-1] and not account.start else ():
                other.doubt = other.doubt or "processes took turns, of which none resumed what the other had done"
            return start
        if is_here:
            previous = index
            break
    starts.append(_Start([], {}, previous))
    return starts[-1]


def _ran_beside(one: Account, other: Account) -> bool:
    """Whether two processes were handed rows at one time."""
    return one.process != other.process and one.begun_s < other.ended_s and other.begun_s < one.ended_s


def _pieces(account: Account) -> list[_Piece]:
    """What a loader was handed, jump by jump."""
    found: list[_Piece] = []
    for jump, run in itertools.groupby(account.intervals, key=lambda interval: interval.jump):
        intervals = tuple(run)
        cuts = frozenset([intervals[0].begin, *(interval.end for interval in intervals)])
        forgotten = None if found else account.forgotten
        restored = account.restored.get(jump)
        is_by_hand = restored != intervals[0].begin if jump else restored not in (None, intervals[0].begin)
        found.append(_Piece(account, restored, forgotten, intervals, cuts, is_by_hand))
    return found


def _epoch_line(epoch: int, parts: Sequence[_Part], furthest: Place, forgotten: Place) -> EpochLine:
    """Adds up what the starts were handed of an epoch.

    Args:
        epoch: The epoch.
        parts: Of the starts, later ones first.
        furthest: How far any rank is known to have come.
        forgotten: Place that all before is forgotten.
    """
    added, besides, came_again = [], 0, False
    for part in parts:
        chains = {}
        for rank, runs in part.ranks.items():
            chains[rank], left = _disjoint(runs)
            besides += sum(interval.digest.rows for interval in left)
            came_again |= bool(left)
        added.append(_add_ranks(chains, part.start.world_size))
    spans, left = _disjoint(added)
    hulls = sorted((min(each.low for each in part.every), max(each.high for each in part.every)) for part in parts)
    accounts = [account for part in parts for account in part.accounts]
    return EpochLine(
        epoch=epoch,
        spans=tuple(spans),
        reach=furthest[1] if epoch == furthest[0] else None,
        besides=besides + sum(span.digest.rows for span in left),
        came_again=came_again or bool(left) or any(one[1] > other[0] for one, other in itertools.pairwise(hulls)),
        doubt=_doubt(parts, is_forgotten=(epoch, 0) < forgotten),
        plan=accounts[0].plan,
    )


def _doubt(parts: Sequence[_Part], *, is_forgotten: bool) -> str:
    if is_forgotten:
        return "the record of a loader holds no more than its last intervals, and what came before is forgotten"
    selections = {account.selection for part in parts for account in part.accounts}
    if len(selections) > 1:
        return f"they are of {len(selections)} selections of rows, between which the dataset was changed"
    return next((part.start.doubt for part in parts if part.start.doubt), "")


def _disjoint(runs: Sequence[Sequence[Interval]]) -> tuple[list[Interval], list[Interval]]:
    """Of runs through one epoch, intervals that do not overlap, by position, from the longest run first; and the
    others.
    """
    if len(runs) == 1:
        return list(runs[0]), []
    kept: list[Interval] = []
    left: list[Interval] = []
    ends = {interval.low: interval for run in runs for interval in run if interval.low == interval.high}
    for run in sorted(runs, key=lambda run: -sum(interval.high - interval.low for interval in run)):
        for interval in (each for each in run if each.low < each.high):
            at = bisect.bisect_left(kept, interval.low, key=lambda each: each.low)
            beside = kept[max(0, at - 1) : at + 1]
            if any(other.low < interval.high and interval.low < other.high for other in beside):
                left.append(interval)
            else:
                kept.insert(at, interval)
    kept += [end for at, end in ends.items() if not any(each.low < at < each.high for each in kept)]
    return sorted(kept, key=lambda interval: (interval.low, interval.high)), left


def _add_ranks(chains: Mapping[int, list[Interval]], world_size: int) -> list[Interval]:
    """Adds the ranks up, between the places that all of them were cut at."""
    if len(chains) < world_size:
        return []
    places = [{place for each in chain for place in (each.begin, each.end)} for chain in chains.values()]
    common = set.intersection(*places)
    spans: dict[Place, list[Interval]] = {}
    for chain in chains.values():
        joined: Interval | None = None
        for interval in chain:
            if interval.begin in common:
                joined = interval
            elif joined is not None:
                joined = joined.joined(interval) if joined.end == interval.begin else None
            if joined is not None and joined.end in common:
                spans.setdefault(joined.end, []).append(joined)
                joined = None
    whole = [parts for parts in spans.values() if len(parts) == world_size and len({each.low for each in parts}) == 1]
    return sorted((functools.reduce(_together, parts) for parts in whole), key=lambda span: (span.low, span.high))


def _together(one: Interval, other: Interval) -> Interval:
    """The same positions of another rank, added."""
    return dataclasses.replace(one, digest=one.digest + other.digest)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochProof:
    """What is proven of one epoch, or of several in a row of which the same is.

    Attributes:
        epoch: The epoch, or the first one.
        epochs: How many.
        end: Position after the last row that is known.
        rows: Rows that were handed out over all ranks, of each epoch.
        padding: Rows that filled the last step up, besides.
        left_out: Rows that the plan leaves out, or has not come to yet: as planned, not proven.
        status: "proven"; "fault", where other rows came than had to; "unproven", where it is not known of all positions
            what came; "counted", where there is nothing to compare with.
        text: It in words.
    """

    epoch: int
    epochs: int = 1
    end: int
    rows: int
    padding: int
    left_out: int
    status: Status
    text: str


class _TooManyError(Exception):
    """More rows would have to be computed than were allowed."""


@dataclasses.dataclass(kw_only=True)
class Expected:
    """What epochs are compared with; each is computed when it is asked for, and once for all ranks.

    Attributes:
        selection: The selected rows.
        order: The order, None where it is not known: then epochs are compared of which the plan leaves out no row.
        most_rows: Rows of the plan that may be computed, or 50 times as many of the selection; None for any number.
    """

    selection: "Selected"
    order: Resolved | None
    most_rows: int | None = None
    _known: dict[tuple[int, int, int], Digest] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def whole(self) -> Digest:
        """The digest of the selection; O(rows)."""
        self._spend(self.selection.rows // _CHEAPER)
        return selected_digest(self.selection)

    def planned(self, order: Resolved, epoch: int, low: int, high: int) -> Digest:
        """The digest of what an order has at positions [low, high) of an epoch."""
        key = (epoch, low, high)
        if key not in self._known:
            self._spend(max(0, high - low))
            self._known[key] = planned_digest(order, self.selection, epoch, low, high)
        return self._known[key]

    def _spend(self, rows: int) -> None:
        if self.most_rows is not None:
            if rows > self.most_rows:
                raise _TooManyError
            self.most_rows -= rows


def prove(lines: Sequence[EpochLine], expected_of: Callable[[str], Expected | str]) -> list[EpochProof]:
    """Compares a line of history with the selection, or where rows repeat, with the plan.

    Args:
        lines: The line, by epoch. Where not all may be compared, the last ones are.
        expected_of: Gives what a plan's epochs are compared with; or why there is nothing, and they are counted.
    """
    proofs: list[EpochProof] = []
    for line in reversed(lines):
        proof = _prove(line, expected_of)
        first = proofs[-1] if proofs else None
        if first is not None and _is_same(proof, first):
            proofs[-1] = dataclasses.replace(first, epoch=proof.epoch, epochs=first.epochs + proof.epochs)
        else:
            proofs.append(proof)
    return proofs[::-1]


def _prove(line: EpochLine, expected_of: Callable[[str], Expected | str]) -> EpochProof:
    if line.doubt:
        return _proof(line, "unproven", 0, f"are known; the epoch is not proven: {line.doubt}{_words_of_more(line)}")
    proof = _prove_line(line, expected_of)
    if not line.came_again or proof.status == "fault":
        return proof
    if proof.status == "proven":
        proof = _proof(line, "unproven", proof.left_out, "are as planned, but were not all that was handed out")
    return dataclasses.replace(proof, status="unproven", text=f"{proof.text}{_words_of_more(line)}")


def _prove_line(line: EpochLine, expected_of: Callable[[str], Expected | str]) -> EpochProof:
    if not line.spans:
        text = "not proven at all: no records of all its ranks say which rows were handed out"
        return dataclasses.replace(_proof(line, "unproven", 0, ""), text=text)
    if line.gaps and not line.only_lacks_the_end:
        return _proof(line, "unproven", 0, _words_of_gaps(line))
    expected = expected_of(line.plan)
    if isinstance(expected, str):
        return _proof(line, "counted", 0, f"were counted, not compared with the selection: {expected}")
    try:
        proof = _compare(line, expected)
    except _TooManyError:
        proof = _proof(
            line,
            "counted",
            0,
            "were counted, not compared with the selection: that takes its time, and prove_run does it",
        )
    if line.only_lacks_the_end and proof.status == "proven":
        text = f"{proof.text}; the epoch is not proven after position {line.end:,}"
        proof = dataclasses.replace(proof, status="unproven", text=text)
    return proof


def _is_same(one: EpochProof, after: EpochProof) -> bool:
    """Whether some epochs, and those that follow them, have the same proof."""
    return dataclasses.replace(one, epoch=one.epoch + one.epochs, epochs=after.epochs) == after


def _proof(line: EpochLine, status: Status, left_out: int, words: str) -> EpochProof:
    digest = line.digest
    return EpochProof(
        epoch=line.epoch,
        epochs=line.epochs,
        end=line.end,
        rows=digest.rows + line.besides,
        padding=digest.padding,
        left_out=left_out,
        status=status,
        text=f"{digest.rows:,} rows{f' up to position {line.end:,}' * (not line.has_ended)} {words}",
    )


def _words_of_more(line: EpochLine) -> str:
    if not line.came_again:
        return ""
    many = f"{line.besides:,} rows" if line.besides else "rows"
    return f"; {many} were handed out besides: by set_epoch or another loader, without a state that was restored"


def _words_of_gaps(line: EpochLine) -> str:
    words = []
    for low, high in line.gaps[:_NAMED]:
        if high is None or (low == line.end and high == line.reach):
            words.append(f"after position {low:,}" if low else "at all")
        else:
            words.append(f"before position {high:,}" if not low else f"between positions {low:,} and {high:,}")
    return f"are known; the epoch is not proven {', '.join(words)}{', …' * (len(line.gaps) > _NAMED)}"


def _compare(line: EpochLine, expected: Expected) -> EpochProof:
    if expected.order is not None and expected.order.repeats:
        return _compare_draws(line, expected.order, expected)
    order, rows = expected.order, expected.selection.rows
    left = rows - line.end
    if left > 0 and order is None:
        return _proof(
            line, "counted", left, "were counted, not compared with the selection: the plan leaves rows out, and its "
            "order is not all in the record"
        )  # fmt: skip
    handed = line.digest
    if order is not None and not order.is_custom and line.end < left:
        differs = handed.differs(expected.planned(order, line.epoch, 0, line.end))
    else:
        rest = Digest() if order is None else expected.planned(order, line.epoch, line.end, rows)
        differs = (handed + rest).differs(expected.whole)
    if differs:
        return _proof(line, "fault", left, _words_of_fault(handed.rows + left - rows, "selected"))
    if not line.has_ended:
        return _proof(line, "proven", left, "each came exactly once so far")
    out = f", but for {left:,} that the plan leaves out" * (left > 0)
    padded = f"; {handed.padding:,} came again as padding" * (handed.padding > 0)
    return _proof(line, "proven", left, f"were handed out: every selected row exactly once{out}{padded}")


def _compare_draws(line: EpochLine, order: Resolved, expected: Expected) -> EpochProof:
    """Of an order that draws rows, or of a mixture: with its plan."""
    planned = expected.planned(order, line.epoch, 0, min(line.end, order.epoch_rows))
    left = max(0, order.epoch_rows - line.end)
    if line.digest.differs(planned):
        return _proof(line, "fault", left, _words_of_fault(line.digest.rows - planned.rows, "planned"))
    out = f", but for {left:,} that it leaves out" * (left > 0) if line.has_ended else " so far"
    return _proof(line, "proven", left, f"were handed out: every draw of the plan exactly once{out}")


def _words_of_fault(more: int, what: str) -> str:
    many = f", {abs(more):,} too {'many' if more > 0 else 'few'}" * (more != 0)
    return (
        f"were handed out{many}, which are not the {what} ones each once: some came twice or were none of them, and "
        "others never came"
    )


class Selected(Protocol):
    """The selected rows, as `raylance.source` keeps them."""

    @property
    def rows(self) -> int:
        """How many."""

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Rows of the selection to row offsets as they travel."""


def selected_digest(selection: Selected) -> Digest:
    """The digest of a whole selection; O(rows)."""
    return _sum(selection.offsets, 0, selection.rows)


def planned_digest(order: Resolved, selection: Selected, epoch: int, low: int, high: int) -> Digest:
    """The digest of the rows that an order has at positions [low, high) of an epoch."""
    asked = order.epoch(epoch)
    return _sum(lambda positions: selection.offsets(select_rows(asked, positions)), low, high)


def _sum(rows_at: Callable[[Int64Array], Int64Array], low: int, high: int) -> Digest:
    blocks: Iterator[Int64Array] = (
        np.arange(at, min(at + _BLOCK_ROWS, high), dtype=np.int64) for at in range(low, high, _BLOCK_ROWS)
    )
    return sum((Digest.of(rows_at(block)) for block in blocks), Digest())
