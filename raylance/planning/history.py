"""The line of history of a run: the delivered rows on which its present model was trained."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set

from raylance.planning.digest import Digest, Interval, Place
from raylance.planning.shard_context import RankAndSize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderHistory:
    """The rows that one loader handed out on its rank."""

    start: str  # a value that all ranks of one start of the run share; "" if unknown
    # Name of the loader's ledger. Of two histories with the same one, the later contains all rows of the earlier.
    ledger: str
    rank: int  # the world rank
    world_size: int
    intervals: Sequence[Interval]  # in the order of time
    data_parallel: RankAndSize | None = None  # rank and size for intervals without a `share`; None: rows of its own
    is_elastic: bool = False  # whether ranks may join and leave; then some may have no history
    restored: Mapping[int, Place] = dataclasses.field(default_factory=dict)  # see `Ledger.restored`
    forgotten: Place | None = None  # see `Ledger.forgotten`
    process: str = ""  # a key of the loader's process; "" if unknown
    begun_s: float = 0.0  # when the loader was made
    ended_s: float = 0.0  # when it handed out its last row, by the same clock
    # Keys of the selected rows of each dataset, see `selection_of`; and, by epoch, those of the rows that it had before
    # these changed in its middle. Intervals of different selections are not added up; others may follow.
    selection: tuple[str, ...] = ()
    earlier: Mapping[int, Sequence[tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    plan: str = ""  # a key of the plan that the rows are compared with

    def selections_in(self, epoch: int) -> tuple[tuple[str, ...], ...]:
        """Returns, for each dataset, the keys of its selected rows, in the order in which an epoch has had them."""
        earlier = self.earlier.get(epoch, [()] * len(self.selection))
        return tuple((*before, key) for before, key in zip(earlier, self.selection, strict=True))

    def share_of(self, interval: Interval) -> RankAndSize:
        """Returns the data-parallel rank and size that the rows of an interval belong to."""
        return interval.share or self.data_parallel or (self.rank, self.world_size)

    def ran_beside(self, other: "LoaderHistory") -> bool:
        """Whether the loaders of both histories ran at the same time, in different processes."""
        return self.process != other.process and self.begun_s < other.ended_s and other.begun_s < self.ended_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochLine:
    """One epoch of the line of history, or several unknown epochs."""

    epoch: int  # the epoch, or the first of several
    epochs: int = 1  # number of epochs
    spans: tuple[Interval, ...] = ()  # what all ranks together were handed, or skipped, ascending
    reach: int | None = None  # the furthest position of any rank if the run is in this epoch
    besides: int = 0  # number of rows that were delivered in addition to the spans and not rolled back
    came_again: bool = False  # whether positions were delivered once more; `besides` lacks rows without a record
    doubt: str = ""  # a reason, other than gaps, why the epoch cannot be proven; "" if there is none
    plan: str = ""  # names the plan that the rows are compared with
    # Positions that no rank was handed because all passed over them by `seek`, as half-open ranges, ascending; None
    # stands for the end of the epoch
    passed_over: tuple[tuple[int, int | None], ...] = ()

    @property
    def digest(self) -> Digest:
        """The rows of all spans."""
        return sum((span.digest for span in self.spans), Digest())

    @property
    def end(self) -> int:
        """Position after the last span."""
        return self.spans[-1].high if self.spans else 0

    @property
    def has_ended(self) -> bool:
        """Whether the spans reach the end of the epoch."""
        return bool(self.spans) and self.spans[-1].is_last

    @property
    def gaps(self) -> list[tuple[int, int | None]]:
        """Positions that are not known to be handed out, as half-open ranges; None stands for the end of the epoch."""
        return [gap for gap in _outside(self.spans, self.reach) if gap not in self.passed_over]

    @property
    def only_lacks_the_end(self) -> bool:
        """Whether the only gap lies after the spans, because some ranks are ahead of others."""
        return bool(self.spans) and self.reach is not None and self.gaps == [(self.end, self.reach)]


def _outside(spans: Sequence[Interval], reach: int | None) -> list[tuple[int, int | None]]:
    """Returns the positions outside of an epoch's spans, up to `reach`; None stands for the end of the epoch."""
    found: list[tuple[int, int | None]] = []
    at = 0
    for span in spans:
        if span.low > at:
            found.append((at, span.low))
        at = span.high
    if not (spans and spans[-1].is_last) and (reach is None or reach > at):
        found.append((at, reach))
    return found


@dataclasses.dataclass(frozen=True)
class _Stretch:
    """Consecutive intervals that one loader handed out: no jump lies between them."""

    start: "_Start"
    history: LoaderHistory
    intervals: tuple[Interval, ...]
    is_first: bool  # whether it is its loader's first piece

    @property
    def begin(self) -> Place:
        return self.intervals[0].begin

    @property
    def reach(self) -> Place:
        return self.intervals[-1].end

    @functools.cached_property
    def cuts(self) -> frozenset[Place]:
        """Places at which the loader may have saved a state."""
        return frozenset([self.begin, *(interval.end for interval in self.intervals)])

    @property
    def restored(self) -> Place | None:
        """Place of the state that was loaded before this piece."""
        return self.history.restored.get(self.intervals[0].jump)

    @property
    def forgotten(self) -> Place | None:
        """The place before which the loader's intervals are forgotten, if this is its first piece; else None."""
        return self.history.forgotten if self.is_first else None

    @property
    def may_be_saved_at_begin(self) -> bool:
        """Whether a state may be saved at this piece's begin: the loader jumped there without a state of that place."""
        return self.restored != self.begin and (self.restored is not None or self.intervals[0].jump > 0)


@dataclasses.dataclass(slots=True, eq=False)
class _Start:
    """One start of the run: the pieces that processes which ran together handed out, by time within a rank."""

    pieces: list[_Stretch] = dataclasses.field(default_factory=list)
    previous: int | None = None  # index of an earlier start with a process of this start: the model is not new
    doubt: str = ""  # why no row of this start is proven

    @property
    def histories(self) -> list[LoaderHistory]:
        return [piece.history for piece in self.pieces if piece.is_first]

    def is_like(self, history: LoaderHistory) -> bool:
        own = self.pieces[0].history
        return (own.world_size, own.start) == (history.world_size, history.start)

    def add(self, history: LoaderHistory) -> None:
        beside = [other for other in self.histories if other.rank == history.rank and history.ran_beside(other)]
        if beside:
            self.doubt = (
                f"{len(beside) + 1} processes were rank {history.rank} of {history.world_size} at one time, and each "
                "was handed what is the share of one"
            )
        runs = itertools.groupby(history.intervals, key=lambda interval: interval.jump)
        self.pieces += [_Stretch(self, history, tuple(run), number == 0) for number, (_, run) in enumerate(runs)]


@dataclasses.dataclass(slots=True)
class _Walk:
    """The pieces that one rank of a start was handed before a place and that were not rolled back."""

    handed: list[_Stretch] = dataclasses.field(default_factory=list)  # later ones first
    origin: Place | None = None  # the place at which the start resumed, as far as this rank shows
    is_new: bool = False  # whether no state was loaded there
    forgotten: Place = (0, 0)  # the records may lack intervals before this place


def line_of_history(histories: Sequence[LoaderHistory]) -> list[EpochLine]:
    """Finds the rows that the present model was trained on, by epoch.

    - For each start, only the rows before the place at which the next start resumed count. The others were rolled back.
    - A start that resumed at a place continues the latest earlier start with a cut there: a report or an epoch's end.
    - New processes that loaded no state resumed at their first place: their model is new, or was restored otherwise.
    - Within a process, only loading a state rolls rows back. The rows before any other jump count.

    `histories` holds all ranks and starts of one dataset, earlier ones first.
    """
    starts = _starts(histories)
    epochs: dict[int, list[_Stretch]] = {}  # later starts first
    forgotten: Place = (0, 0)
    index: int | None = len(starts) - 1 if starts else None
    place: Place | None = None
    while index is not None:
        start, earlier = starts[index], starts[:index]
        ranks: dict[int, list[_Stretch]] = {}
        for piece in start.pieces:
            ranks.setdefault(piece.history.rank, []).append(piece)
        walks = [_walk_back(pieces, place, earlier) for pieces in ranks.values()]
        for piece in itertools.chain.from_iterable(walk.handed for walk in walks):
            handed = (each for each in piece.intervals if each.high > each.low or each.is_last)
            for epoch, run in itertools.groupby(handed, key=lambda interval: interval.epoch):
                epochs.setdefault(epoch, []).append(dataclasses.replace(piece, intervals=tuple(run)))
        forgotten = max(forgotten, *(walk.forgotten for walk in walks))
        is_new = any(walk.is_new for walk in walks)
        if is_new and start.previous is not None:
            index, place = start.previous, None
            continue
        place = min((walk.origin for walk in walks if walk.origin is not None), default=None)
        if is_new and place == (0, 0):
            place = None
        index = None if place is None else _resumed_start(earlier, place)
    furthest = max((each.end for runs in epochs.values() for run in runs for each in run.intervals), default=(0, 0))
    lines = [_epoch_line(epoch, epochs[epoch], furthest, forgotten) for epoch in sorted(epochs)]
    return list(_with_unknown_epochs(lines, forgotten[0] + (forgotten[1] > 0)))


def _with_unknown_epochs(lines: Sequence[EpochLine], least: int) -> Iterator[EpochLine]:
    """Yields the lines and, for the epochs that lack one before the last line or before `least`, unknown epochs."""
    at = 0
    for line in lines:
        if line.epoch > at:
            yield EpochLine(epoch=at, epochs=line.epoch - at)
        yield line
        at = line.epoch + 1
    if least > at:
        yield EpochLine(epoch=at, epochs=least - at)


def _starts(histories: Sequence[LoaderHistory]) -> list[_Start]:
    """Groups the loaders of processes that ran together into starts, earlier ones first."""
    newest: dict[str, LoaderHistory] = {}
    for history in histories:
        if history.intervals:
            begun_s = newest.get(history.ledger, history).begun_s
            newest[history.ledger] = dataclasses.replace(history, begun_s=begun_s)
    starts: list[_Start] = []
    for history in newest.values():
        _start_of(history, starts).add(history)
    return starts


def _start_of(history: LoaderHistory, starts: list[_Start]) -> _Start:
    """Finds the start that a loader belongs to; adds a new one if none fits."""
    previous = None
    for index, start in reversed(list(enumerate(starts))):
        others = start.histories
        is_here = bool(history.process) and any(history.process == other.process for other in others)
        if start.is_like(history) and (history.start or is_here or any(history.ran_beside(other) for other in others)):
            if not history.start and start is not starts[-1]:
                turns = "processes took turns, of which none resumed what the other had done"
                for later in starts[index:]:
                    later.doubt = later.doubt or turns
            return start
        if is_here:
            previous = index
            break
    starts.append(_Start(previous=previous))
    return starts[-1]


def _walk_back(pieces: Sequence[_Stretch], place: Place | None, earlier: Sequence[_Start]) -> _Walk:
    """Follows one rank of a start back in time: from `place` or else its last place, to the place where it resumed."""
    walk = _Walk()
    index = len(pieces) - 1 if place is None else _resumed_piece(pieces, place)
    while index is not None:
        piece = pieces[index]
        kept = tuple(each for each in piece.intervals if place is None or each.end <= place)
        walk.handed.append(dataclasses.replace(piece, intervals=kept))
        place = piece.restored
        if piece.forgotten is not None:  # so is whether it continued an earlier loader of its process
            walk.forgotten = max([piece.forgotten, *(each.reach for each in pieces[:index])])
            return walk
        if place is not None:
            index = _resumed_piece(pieces[:index], place)
            if (
                index is not None
                and place not in pieces[index].cuts
                and any(place in other.cuts for start in earlier for other in start.pieces)
            ):
                index = None  # an earlier start saved that state
        elif index > 0:
            index -= 1
        else:
            walk.origin, walk.is_new = piece.begin, True
            return walk
    walk.origin = place if walk.handed else None
    return walk


def _resumed_piece(pieces: Sequence[_Stretch], place: Place) -> int | None:
    """Returns the index of the piece that a state of a place continues: the latest cut there, else the latest that
    passed the place, else the latest that began before it.
    """
    earlier = [
        index
        for index, piece in enumerate(pieces)
        if piece.begin < place or (piece.begin == place and piece.may_be_saved_at_begin)
    ]
    exact = [index for index in earlier if place in pieces[index].cuts]
    beyond = [index for index in earlier if pieces[index].reach > place]
    return max(exact or beyond or earlier, default=None)


def _resumed_start(starts: Sequence[_Start], place: Place) -> int | None:
    """Returns the index of the start that a state of a place continues; None if there is none."""
    pieces = [piece for start in starts for piece in start.pieces]
    found = _resumed_piece(pieces, place)
    return None if found is None else starts.index(pieces[found].start)


def _epoch_line(epoch: int, runs: Sequence[_Stretch], furthest: Place, forgotten: Place) -> EpochLine:
    """Adds up the rows of an epoch. `runs` are its pieces, grouped by start, later starts first; `furthest` is the
    furthest place of any rank; before `forgotten`, records keep no intervals.
    """
    spans_of_starts, besides, hulls, doubt = [], list[Interval](), [], ""
    for start, of_start in itertools.groupby(runs, key=lambda run: run.start):
        ranks: dict[tuple[RankAndSize, int, str], list[Sequence[Interval]]] = {}
        for run in of_start:
            history = run.history
            # A process that replaced another one may repeat the last step of that process.
            process = history.ledger if history.is_elastic else ""
            for share, part in itertools.groupby(run.intervals, key=history.share_of):
                ranks.setdefault((share, history.rank, process), []).append(list(part))
        chains: dict[RankAndSize, list[list[Interval]]] = {}
        for (share, *_), of_rank in ranks.items():
            chain, left = _disjoint(of_rank)
            besides += left if share not in chains else []
            chains.setdefault(share, []).append(chain)
        if any(piece.history.is_elastic for piece in start.pieces):
            spans, mismatch, left = _add_shares(chains)
            besides += left
        else:
            peers = {share[0]: chains_of for share, chains_of in chains.items()}
            spans, mismatch = _add_ranks(peers, start.pieces[0].history.world_size)
        spans_of_starts.append(spans)
        doubt = doubt or mismatch
        every = [interval for of_rank in ranks.values() for run in of_rank for interval in run]
        hulls.append((min(each.low for each in every), max(each.high for each in every)))
    spans, left = _disjoint(spans_of_starts)
    besides += left
    overlap = any(one[1] > other[0] for one, other in itertools.pairwise(sorted(hulls)))
    reach = furthest[1] if epoch == furthest[0] else None
    jumps = [_jumps(history) for start in {run.start for run in runs} for history in start.histories]
    return EpochLine(
        epoch=epoch,
        spans=tuple(spans),
        reach=reach,
        passed_over=tuple(gap for gap in _outside(spans, reach) if _is_passed_over(epoch, gap, jumps)),
        besides=sum(interval.digest.rows for interval in besides),
        came_again=bool(besides) or overlap,
        doubt=_doubt(runs, epoch, is_forgotten=(epoch, 0) < forgotten) or doubt,
        plan=runs[0].history.plan,
    )


def _jumps(history: LoaderHistory) -> list[tuple[Place, Place]]:
    """Returns the places before and after each move of a loader that rolled no row back."""
    pairs = itertools.pairwise(history.intervals)
    return [(one.end, two.begin) for one, two in pairs if one.jump != two.jump and two.jump not in history.restored]


def _is_passed_over(epoch: int, gap: tuple[int, int | None], jumps: Sequence[Sequence[tuple[Place, Place]]]) -> bool:
    """Whether each loader moved over a gap. A gap up to the end of the epoch is one if it moved to a later epoch."""
    low, high = (epoch, gap[0]), (epoch + 1, 0) if gap[1] is None else (epoch, gap[1])
    return all(any(before <= low and high <= after for before, after in of_loader) for of_loader in jumps)


def _doubt(runs: Sequence[_Stretch], epoch: int, *, is_forgotten: bool) -> str:
    if is_forgotten:
        return "the record of a loader holds no more than its last intervals, and what came before is forgotten"
    selections = {run.history.selections_in(epoch) for run in runs}
    for of_dataset in itertools.zip_longest(*selections, fillvalue=()):
        largest = max(of_dataset, key=len)
        if any(largest[: len(each)] != each for each in of_dataset):
            return f"they are of {len(selections)} selections of rows, between which the dataset was changed"
    return next((run.start.doubt for run in runs if run.start.doubt), "")


def _disjoint(runs: Sequence[Sequence[Interval]]) -> tuple[list[Interval], list[Interval]]:
    """Chooses intervals that do not overlap, of the longest of `runs` first; returns them by position, and the rest."""
    if len(runs) == 1:
        return list(runs[0]), []
    kept: list[Interval] = []
    left: list[Interval] = []
    for run in sorted(runs, key=lambda run: -sum(interval.high - interval.low for interval in run)):
        for interval in (each for each in run if each.low < each.high):
            at = bisect.bisect_left(kept, interval.low, key=lambda each: each.low)
            neighbours = kept[max(0, at - 1) : at + 1]
            if any(other.low < interval.high and interval.low < other.high for other in neighbours):
                left.append(interval)
            else:
                kept.insert(at, interval)
    ends = {each.low: each for run in runs for each in run if each.low == each.high}  # an epoch's end without a step
    kept += [end for at, end in ends.items() if not any(each.low < at < each.high for each in kept)]
    return sorted(kept, key=lambda interval: (interval.low, interval.high)), left


def _add_shares(
    chains: Mapping[RankAndSize, Sequence[Sequence[Interval]]],
) -> tuple[list[Interval], str, list[Interval]]:
    """Adds up the rows of a start whose ranks came and went: one rank of each share is enough at each position. Returns
    the sums as intervals; why the shares cannot be added, or ""; and the intervals that overlap with the sums.
    """
    worlds: dict[int, dict[int, list[list[Interval]]]] = {}
    for (dp_rank, dp_size), of_share in chains.items():
        every = list(itertools.chain.from_iterable(of_share))
        if len({(each.low, each.high, each.digest) for each in every}) > len({(each.low, each.high) for each in every}):
            return (
                [],
                f"ranks that had share {dp_rank} of {dp_size} were handed different rows at the same positions",
                [],
            )
        worlds.setdefault(dp_size, {})[dp_rank] = [_furthest(every)]
    spans, left = _disjoint([_add_ranks(of_world, dp_size)[0] for dp_size, of_world in worlds.items()])
    return spans, "", left


def _furthest(intervals: Sequence[Interval]) -> list[Interval]:
    """Chooses intervals of one epoch that do not overlap and reach as far as possible."""
    reach: dict[int, int] = {}  # how far a chain from this position reaches
    for each in sorted(intervals, key=lambda each: (each.low, each.high), reverse=True):
        reach[each.low] = max(reach.get(each.low, each.low), reach.get(each.high, each.high))
    chosen: list[Interval] = []
    for each in sorted(intervals, key=lambda each: (each.low, -reach.get(each.high, each.high), -each.high)):
        if not chosen or each.low >= chosen[-1].high:
            chosen.append(each)
    return chosen


def _add_ranks(chains: Mapping[int, Sequence[Sequence[Interval]]], world_size: int) -> tuple[list[Interval], str]:
    """Adds up the rows between consecutive places at which all ranks were cut. `chains` has each rank's intervals, by
    data-parallel rank; one of several peers counts. Returns the sums as intervals; and why they cannot be added, or "".
    """
    every = [chain for peers in chains.values() for chain in peers]
    if len(every) < world_size:
        return [], ""
    if len({len(peers) for peers in chains.values()}) > 1:
        return [], "data-parallel ranks had different numbers of peers, so that rows of some counted more"
    common = set.intersection(*({place for each in chain for place in (each.begin, each.end)} for chain in every))
    found: dict[tuple[Place, Place], list[tuple[int, Interval]]] = {}
    for dp_rank, peers in chains.items():
        for joined in (joined for chain in peers for joined in _between(chain, common)):
            found.setdefault((joined.begin, joined.end), []).append((dp_rank, joined))
    spans = []
    for parts in found.values():
        if len(parts) < world_size or len({part.is_skipped for _, part in parts}) > 1:
            continue
        digests: dict[int, Digest] = {}
        for dp_rank, part in parts:
            digests.setdefault(dp_rank, part.digest)
        unlike = next((dp_rank for dp_rank, part in parts if part.digest != digests[dp_rank]), None)
        if unlike is not None:
            return [], f"the peers of data-parallel rank {unlike} were handed different rows"
        spans.append(dataclasses.replace(parts[0][1], digest=sum(digests.values(), Digest())))
    return sorted(spans, key=lambda span: (span.low, span.high)), ""


def _between(chain: Sequence[Interval], common: Set[Place]) -> Iterator[Interval]:
    """Yields a rank's intervals, joined from each common place to the next, if the rank was cut at both places."""
    joined: Interval | None = None
    for interval in chain:
        if interval.begin in common:
            joined = interval
        elif joined is not None:
            follows = joined.end == interval.begin and joined.is_skipped == interval.is_skipped
            joined = joined.joined(interval) if follows else None
        if joined is not None and joined.end in common:
            yield joined
            joined = None
