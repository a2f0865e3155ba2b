"""The chunks that a rank holds or will hold, in the order of delivery: which rows each has, without who loads them."""

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator

from raylance.dispatch.account import Account
from raylance.dispatch.states import ChunkState
from raylance.planning.pace import Pace
from raylance.planning.plan import Chunk, Plan


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class HeldChunk:
    """A chunk in the table.

    Attributes:
        number: Names the chunk for its reader; a new one for each attempt to load it.
        first: Line of its first row, see `Plan.line`.
        rows: Number of its rows.
        stored_rows: Number of its different rows; until the reader has said it, `rows`.
        asked_rows: Number of stored rows that were asked for.
        loaded_rows: Number of stored rows that are loaded, and their bytes.
        calls: Unanswered loads, with the bytes that each may add.
        gathers: Unanswered calls that gather items from the chunk.
        unfetched: Answered ones whose results still need the chunk; see `ChunkTable`.
        taken_rows: Number of its rows up to the last one that was gathered in this pass, or is before it.
        given_rows: Number of its loaded rows up to the last one that was given away; see `ChunkTable`.
        paced: Rows and bytes from which `pace` follows.
        needs_bytes: Bytes of the next row, if it did not fit; else 0.
        is_cold: Whether it was in use before any of it was asked for.
    """

    number: int
    chunk: Chunk
    first: int
    rows: int
    pace: Pace
    stored_rows: int
    state: ChunkState = ChunkState.PLANNED
    reader: int | None = None
    asked_rows: int = 0
    loaded_rows: int = 0
    nbytes: int = 0
    calls: dict[int, float] = dataclasses.field(default_factory=dict)
    gathers: set[int] = dataclasses.field(default_factory=set)
    unfetched: set[int] = dataclasses.field(default_factory=set)
    paced: tuple[int, int] = (0, 0)
    taken_rows: int = 0
    given_rows: int = 0
    needs_bytes: int = 0
    faults: int = 0
    not_before: float = 0.0
    is_cold: bool = False

    @property
    def expected_bytes(self) -> float:
        """Bytes that are loaded, or may be when the unanswered loads are done."""
        return self.nbytes + sum(self.calls.values())

    def is_before(self, other: "HeldChunk") -> bool:
        """Whether the rows of the chunk are delivered before those of another one."""
        return (self.chunk.epoch, self.first) < (other.chunk.epoch, other.first)

    def has(self, epoch: int, line: int) -> bool:
        """Whether a line belongs to the chunk."""
        return self.chunk.epoch == epoch and self.first <= line < self.first + self.rows


class ChunkOrder:
    """Consecutive chunks without a gap, from the one in use to the last one that is loaded ahead; also of later epochs.

    Attributes:
        held: The chunks.
    """

    def __init__(self, account: Account, *, loads_next_epoch: bool) -> None:
        """Begins with no chunk; `account` says how many rows one may have. For `loads_next_epoch`, see `ChunkTable`."""
        self._account, self._loads_next_epoch = account, loads_next_epoch
        self._of: tuple[Plan, int] | None = None  # the plan, and the data-parallel rank
        self.held: deque[HeldChunk] = deque()
        self._last: Chunk | None = None  # the last one that this pass has held or added: others follow it
        self._numbers = itertools.count()

    @property
    def planned(self) -> tuple[Plan, int]:
        """The plan, and the data-parallel rank."""
        if self._of is None:
            raise RuntimeError("no pass has begun")
        return self._of

    def number(self) -> int:
        """Returns a new number for a chunk."""
        return next(self._numbers)

    def begin(self, plan: Plan, dp_rank: int, epoch: int, position: int) -> list[HeldChunk]:
        """Begins a pass; returns the chunks that it does not need, which are held no longer."""
        line, is_same = plan.line(epoch, position, dp_rank), self._of in (None, (plan, dp_rank))
        dropped: list[HeldChunk] = []
        while self.held and not (is_same and self._is_needed(self.held[0], plan, epoch, position, line)):
            dropped.append(self.held.popleft())
        self._of, self._last = (plan, dp_rank), None
        if not self.held:
            return dropped
        first = self.held[0]
        if not first.has(epoch, line):
            chunk = plan.chunk_at(epoch, position)
            if chunk is not None and plan.chunk_size(chunk, dp_rank):
                self.held.appendleft(self._make(self._before(chunk, first.chunk)))
        elif first.first + first.given_rows - line > first.rows // 2:  # else few rows are read by themselves
            dropped.append(self.held.popleft())
            self.held.appendleft(self._make(self._rest(first.chunk, position)))
        self._fill_gaps()
        self._last = self.held[-1].chunk
        for held in self.held:
            held.taken_rows = max(0, line - held.first) if held is self.held[0] else 0
        return dropped

    def _is_needed(self, held: HeldChunk, plan: Plan, epoch: int, position: int, line: int) -> bool:
        """Whether a pass from a position on needs a chunk: if it has the first row of the pass, or begins soon after
        it, because the items before it were gathered in a pass that did not take them.
        """
        is_on_track = held.chunk.epoch == epoch and plan.leads_to(epoch, held.chunk.position, position)
        return is_on_track and line < held.first + held.rows and held.first - line <= held.rows // 2

    def _fill_gaps(self) -> None:
        """Adds the chunks that lie between others: they were used in a pass that was left before it had taken them."""
        at = 0
        while at + 1 < len(self.held):
            after, found = self._likely_after(self.held[at].chunk), self.held[at + 1].chunk
            at += 1
            if after is not None and (after.epoch, after.position, after.low) != (
                found.epoch,
                found.position,
                found.low,
            ):
                gap = self._before(after, found) if after.epoch == found.epoch else after
                self.held.insert(at, self._make(gap))

    def chunks(self, epoch: int, position: int, *, spans_epochs: bool = False) -> Iterator[Chunk]:
        """Yields the chunks of the pass, or what is left of them; with `spans_epochs`, also those of all later epochs.
        How many rows a chunk has is decided at the latest when it comes.
        """
        plan, dp_rank = self.planned
        chunk = plan.chunk_at(epoch, position)
        while chunk is not None:
            if plan.chunk_size(chunk, dp_rank):
                line = plan.first_line(chunk, dp_rank)
                held = next((each for each in self.held if each.has(chunk.epoch, line)), None)
                chunk = self._add(chunk) if held is None else self._rest(held.chunk, chunk.position, chunk.low)
            yield chunk
            after = plan.next_chunk(chunk)
            chunk = self._next_epochs(chunk) if after is None and spans_epochs else after

    def _next_epochs(self, chunk: Chunk) -> Chunk | None:
        """Returns the first chunk of the epoch after that of a chunk, whose order is checked; None if there is none."""
        plan, _ = self.planned
        if self._last is None or self._last.epoch <= chunk.epoch:  # else it was checked when its first chunk was added
            plan.check_order(chunk.epoch + 1)
        return plan.next_epochs_chunk(chunk)

    def _likely_after(self, chunk: Chunk) -> Chunk | None:
        """Returns the chunk with rows that is likely read after a chunk, maybe of the next epoch; None without one."""
        plan, dp_rank = self.planned
        found = plan.next_chunk_with_rows(chunk, dp_rank)
        if found is None and self._loads_next_epoch:
            found = self._next_epochs(chunk)
        return found if found is not None and plan.chunk_size(found, dp_rank) else None

    def _rest(self, chunk: Chunk, position: int, low: int = 0) -> Chunk:
        """Returns the part of a chunk from row `low` of the step at a position on; steps before the chunk, if there are
        any, have no row of the rank.
        """
        plan, _ = self.planned
        steps = chunk.steps - plan.steps_between(chunk.epoch, chunk.position, position)
        if position < chunk.position:
            steps = chunk.steps + plan.steps_between(chunk.epoch, position, chunk.position)
        return dataclasses.replace(chunk, position=position, steps=steps, low=low)

    def _before(self, chunk: Chunk, end: Chunk) -> Chunk:
        """Returns the part of a chunk before the begin of another one."""
        plan, _ = self.planned
        steps = plan.steps_between(chunk.epoch, chunk.position, end.position) + bool(end.low)
        return chunk if steps > chunk.steps else dataclasses.replace(chunk, steps=steps, high=end.low or None)

    def _add(self, chunk: Chunk) -> Chunk:
        """Adds a chunk at the end, or as much of it as a reader should hold together; returns what was added."""
        plan, dp_rank = self.planned
        added = plan.head(chunk, dp_rank, self._account.chunk_rows(plan.chunk_size(chunk, dp_rank)))
        self.held.append(self._make(added))
        self._last = added
        return added

    def _make(self, chunk: Chunk) -> HeldChunk:
        plan, dp_rank = self.planned
        rows, first = plan.chunk_size(chunk, dp_rank), plan.first_line(chunk, dp_rank)
        pace = self._account.pace()
        return HeldChunk(number=self.number(), chunk=chunk, first=first, rows=rows, stored_rows=rows, pace=pace)

    def all(self) -> Iterator[HeldChunk]:
        """Yields the chunks; adds those that are likely to follow."""
        at = 0
        while at < len(self.held) or self._add_likely():
            yield self.held[at]
            at += 1

    def _add_likely(self) -> bool:
        """Adds the chunk that likely follows the last one; returns whether there is one. An error of a custom order
        ends only this look-ahead, because nobody has asked for these rows: `chunks` raises it if somebody does.
        """
        # Unless a chunk is added here or by `chunks`, none follows: the order is not asked again at each decision.
        last, self._last = self._last, None
        if last is not None:
            with contextlib.suppress(Exception):
                chunk = self._likely_after(last)
                if chunk is not None:
                    self._add(chunk)
        return self._last is not None

    def halve(self, held: HeldChunk) -> None:
        """Replaces a chunk of several rows by two."""
        plan, dp_rank = self.planned
        at = self.held.index(held)
        self.held.remove(held)
        head = plan.head(held.chunk, dp_rank, held.rows // 2)
        after = plan.next_chunk(head)
        rest = after and self._rest(held.chunk, after.position, after.low)
        for chunk in (head, rest):
            part = None if chunk is None else self._make(chunk)
            taken = 0 if part is None else held.first + held.taken_rows - part.first
            if part is not None and taken < part.rows:
                part.reader, part.is_cold, part.taken_rows = held.reader, held.is_cold, max(0, taken)
                self.held.insert(at, part)
                at += 1
