"""The chunks that a rank holds or will hold, in the order of delivery: which rows each has, without who loads them."""

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator

from raylance.dispatch.account import Account
from raylance.dispatch.messages import Fault
from raylance.dispatch.states import ChunkState
from raylance.dispatch.suspects import Suspicion
from raylance.planning.pace import Pace
from raylance.planning.plan import Chunk, Plan, WorkItem

# A pass whose first chunk was not loaded ahead begins with a chunk of one step. The first number is the factor by which
# each further chunk is larger, the second one the largest share of a whole chunk that these have; the rest is loaded
# together. A row costs up to twenty times as much if few are loaded at once, which matters less if rows are decoded;
# but where samples share what is decoded, few of them share little.
_DECODED = 2.0, 0.5
_PLAIN = 8.0, 1 / 32


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """Rows of one load that wait for a decoder, or are being decoded.

    Attributes:
        held: The chunk.
        source: The load that has brought them.
        first: Number of the first stored row of that load in the chunk.
        low: Number of the first row of the block in that load, and `high` that of the row after the last.
        call: The call that decodes them, if one is unanswered.
        suspicion: What is known against its rows.
    """

    held: "HeldChunk"
    source: int
    first: int
    low: int
    high: int
    call: int | None = None
    suspicion: Suspicion = dataclasses.field(default_factory=Suspicion)

    @property
    def rows(self) -> int:
        """Number of its rows."""
        return self.high - self.low

    @property
    def is_kept(self) -> bool:
        """Whether its chunk still needs it."""
        return any(block is self for block in self.held.loading.blocks)

    def cut(self, parts: int) -> None:
        """Replaces it by up to `parts` parts."""
        bounds = [self.low + self.rows * part // parts for part in range(parts + 1)]
        made = [
            dataclasses.replace(self, low=low, high=high, suspicion=self.suspicion.of_part())
            for low, high in itertools.pairwise(bounds)
            if low < high
        ]
        for part in made:
            part.suspicion.faults = self.suspicion.faults
        at = next(number for number, block in enumerate(self.held.loading.blocks) if block is self)
        self.held.loading.blocks[at : at + 1] = made


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Loading:
    """How much of a chunk its reader has loaded, and what it was asked for.

    Attributes:
        pace: How many rows to ask for next.
        stored_rows: Number of the chunk's different rows; until the reader has said it, of its rows.
        asked_rows: Number of stored rows that were asked for.
        rows: Number of stored rows that are loaded.
        nbytes: Their bytes.
        needs_bytes: Bytes of the next row, if it did not fit; else 0.
        calls: Unanswered loads, each with the number of its first row, and the bytes that it may add.
        paced: Rows and bytes from which `pace` follows.
        blocks: What is loaded and has to be decoded by block, until that is done.
        margin: That of the last load.
    """

    pace: Pace
    stored_rows: int
    asked_rows: int = 0
    rows: int = 0
    nbytes: int = 0
    needs_bytes: int = 0
    calls: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
    paced: tuple[int, int] = (0, 0)
    blocks: list[Block] = dataclasses.field(default_factory=list)
    margin: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all rows are loaded; they may have to be decoded by block."""
        return self.rows == self.stored_rows

    @property
    def expected_bytes(self) -> float:
        """Bytes that are loaded, or may be when the unanswered loads are done."""
        return self.nbytes + sum(nbytes for _, nbytes in self.calls.values())

    @property
    def left_rows(self) -> int:
        """Number of stored rows that were not asked for."""
        return self.stored_rows - self.asked_rows


@dataclasses.dataclass(slots=True, kw_only=True)
class Trouble:
    """What has gone wrong with a chunk.

    Attributes:
        faults: Number of machine faults of its loads; `not_before` is when it may be loaded again.
        error: Why its rows cannot be loaded, if the chunk has failed or is a part of one that could not be loaded.
        is_last_try: Whether it is loaded again although it has failed, see `ChunkTable.try_again`.
        suspicion: What is known against its rows from blocks that were lost with it.
    """

    faults: int = 0
    not_before: float = 0.0
    error: BaseException | Fault | None = None
    is_last_try: bool = False
    suspicion: Suspicion = dataclasses.field(default_factory=Suspicion)

    def begin(self) -> None:
        """Forgets what a pass may try again."""
        self.faults, self.error, self.is_last_try, self.suspicion.faults = 0, None, False, 0

    def of_part(self, *, is_whole: bool) -> "Trouble":
        """Returns what is known of a part of the rows, or of all."""
        suspicion = self.suspicion if is_whole else self.suspicion.of_part()
        return dataclasses.replace(self, is_last_try=False, suspicion=suspicion)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class HeldChunk:
    """A chunk in the table.

    Attributes:
        number: Names the chunk for its reader; a new one for each attempt to load it.
        first: Line of the first row that items take from it, see `Plan.line`.
        rows: Number of rows that items take from it.
        loading: What is loaded of it.
        gathers: Unanswered calls that gather items from the chunk.
        unfetched: Answered ones whose results still need the chunk; see `ChunkTable`.
        taken_rows: Number of its rows up to the last one that was gathered in this pass, or is before it.
        trouble: What has gone wrong with it.
    """

    number: int
    chunk: Chunk
    first: int
    rows: int
    loading: Loading
    state: ChunkState = ChunkState.PLANNED
    reader: int | None = None
    gathers: set[int] = dataclasses.field(default_factory=set)
    unfetched: set[int] = dataclasses.field(default_factory=set)
    taken_rows: int = 0
    trouble: Trouble = dataclasses.field(default_factory=Trouble)

    @property
    def end(self) -> int:
        """Line after its last row."""
        return self.first + self.rows

    def ends_after(self, other: "HeldChunk") -> bool:
        """Whether some rows of the chunk are delivered after the first one of another chunk, or with it."""
        return (self.chunk.epoch, self.end) > (other.chunk.epoch, other.first)

    def has(self, epoch: int, line: int) -> bool:
        """Whether items take a line from the chunk."""
        return self.chunk.epoch == epoch and self.first <= line < self.end


class ChunkOrder:
    """Consecutive chunks without a gap, from the one in use to the last one that is loaded ahead; also of later epochs.

    The first chunks of a pass that nothing was loaded for are small, so that its first batch comes early, and each is
    larger than the one before it.

    Attributes:
        held: The chunks.
    """

    def __init__(self, account: Account, *, decodes: bool, gives_away: bool, loads_next_epoch: bool) -> None:
        """Begins with no chunk; `account` says how many rows one may have. For the rest, see `ChunkTable`."""
        self._account, self._gives_away, self._loads_next_epoch = account, gives_away, loads_next_epoch
        self._growth, self._early_share = _DECODED if decodes else _PLAIN
        # Most rows of the next chunk of a pass, 0 once its chunks are large; and rows of its first step.
        self._small_rows, self._step_rows = 0.0, 1
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
        low, high = plan.rank_slice(epoch, position, dp_rank)
        self._step_rows = max(1, high - low)
        self._small_rows = 0.0 if self.held else float(self._step_rows)
        if not self.held:
            return dropped
        for held in [*self.held]:
            before = max(0, line - held.first) if held is self.held[0] else 0
            if self._gives_away and held.taken_rows > before:
                self._read_again(held, before, held.taken_rows)
                if not held.rows or held.state is not ChunkState.LOADED:
                    dropped.append(held)  # for its reader, it has the rows before them, too
                    if held.rows:
                        self.replace(held)
                    else:
                        self.held.remove(held)
            else:
                held.taken_rows = before
        if not self.held[0].has(epoch, line):
            chunk = plan.chunk_at(epoch, position)
            if chunk is not None and not plan.chunk_size(chunk, dp_rank):  # steps of a cost may have no row of the rank
                chunk = plan.next_chunk_with_rows(chunk, dp_rank)
            if chunk is not None and plan.first_line(chunk, dp_rank) < self.held[0].first:
                self.held.appendleft(self._make(self._before(chunk, self.held[0].chunk)))
        self._fill_gaps()
        self._last = self.held[-1].chunk
        return dropped

    def _read_again(self, held: HeldChunk, low: int, high: int) -> None:
        """Adds chunks of rows [low, high) of a chunk, which the consumer may have changed, and leaves it those after
        them. For its reader, it still has all.
        """
        plan, dp_rank = self.planned
        rest: Chunk | None = held.chunk
        while rest is not None and high:
            head = plan.head(rest, dp_rank, low or high)
            rows, after = plan.chunk_size(head, dp_rank), plan.next_chunk(head)
            if not low:
                self.held.insert(self.held.index(held), self._make(head))
            low, high = max(0, low - rows), high - rows
            held.first, held.rows = held.first + rows, held.rows - rows
            rest = None if after is None or not held.rows else self._rest(held.chunk, after.position, after.low)
        held.taken_rows = 0
        if rest is not None:
            held.chunk = rest

    def _is_needed(self, held: HeldChunk, plan: Plan, epoch: int, position: int, line: int) -> bool:
        """Whether a pass from a position on needs a chunk: if it has the first row of the pass, or begins soon after
        it, because the items before it were gathered in a pass that did not take them.
        """
        is_on_track = held.chunk.epoch == epoch and plan.leads_to(epoch, held.chunk.position, position)
        return is_on_track and line < held.end and held.first - line <= held.rows // 2

    def _fill_gaps(self) -> None:
        """Adds the chunks that lie between others: they were used in a pass that was left before it had taken them."""
        plan, dp_rank = self.planned
        at = 0
        while at + 1 < len(self.held):
            after, found = self._likely_after(self.held[at].chunk), self.held[at + 1]
            at += 1
            if after is not None and not found.has(after.epoch, plan.first_line(after, dp_rank)):
                gap = self._before(after, found.chunk) if after.epoch == found.chunk.epoch else after
                self.held.insert(at, self._make(gap))

    def find(self, epoch: int, line: int) -> HeldChunk | None:
        """Returns the chunk from which items take a line; None if none has it."""
        return next((each for each in self.held if each.has(epoch, line)), None)

    def together(self, item: WorkItem, line: int) -> int:
        """Returns how many of an item's first rows, which begin at a line, one chunk has. Makes the chunk of an item
        whose rows none has: chunks are dropped when all their rows were gathered, and an item may be gathered again.
        """
        plan, _ = self.planned
        found = self.find(item.epoch, line)
        if found is not None:
            return min(item.rows, found.end - line)
        at = sum((each.chunk.epoch, each.first) < (item.epoch, line) for each in self.held)
        if at < len(self.held) and self.held[at].chunk.epoch == item.epoch:
            rows = self.held[at].first - line
            if rows < item.rows:
                return rows
        high = None if plan.ends_step(item) else item.high
        chunk = Chunk(epoch=item.epoch, position=item.position, steps=item.steps, low=item.low, high=high)
        self.held.insert(at, self._make(chunk))
        return item.rows

    def chunks(self, epoch: int, position: int, *, spans_epochs: bool = False) -> Iterator[Chunk]:
        """Yields the chunks of the pass, or what is left of them; with `spans_epochs`, also those of all later epochs.
        How many rows a chunk has is decided at the latest when it comes.
        """
        plan, dp_rank = self.planned
        chunk = plan.chunk_at(epoch, position)
        while chunk is not None:
            if plan.chunk_size(chunk, dp_rank):
                held = self.find(chunk.epoch, plan.first_line(chunk, dp_rank))
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
        rows = self._account.chunk_rows(plan.chunk_size(chunk, dp_rank), self.whole_rows(chunk))
        small, most = self._small_rows, self._early_share * rows
        self._small_rows = small * self._growth if small < most else 0.0
        # The last small chunk may grow by less, but is at least twice the one before it.
        if 0 < small < most or (small > self._step_rows and most >= 2 * small / self._growth):
            rows = int(min(small, most))
        added = plan.head(chunk, dp_rank, rows)
        self.held.append(self._make(added))
        self._last = added
        return added

    def whole_rows(self, chunk: Chunk) -> int:
        """Returns the number of rows of the chunk of the plan of which a chunk is a part."""
        plan, dp_rank = self.planned
        whole = plan.chunk_at(chunk.epoch, plan.first_of_chunk(chunk.epoch, chunk.position))
        return 0 if whole is None else plan.chunk_size(whole, dp_rank)

    def _make(self, chunk: Chunk) -> HeldChunk:
        plan, dp_rank = self.planned
        rows, first = plan.chunk_size(chunk, dp_rank), plan.first_line(chunk, dp_rank)
        return HeldChunk(number=self.number(), chunk=chunk, first=first, rows=rows, loading=self.nothing(rows))

    def nothing(self, rows: int) -> Loading:
        """Returns the `Loading` of a chunk with this number of rows, of which nothing is loaded."""
        return Loading(pace=self._account.pace(), stored_rows=rows)

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

    def replace(self, held: HeldChunk) -> HeldChunk:
        """Replaces a chunk by one of the same rows, of which nothing is loaded."""
        again = self._in_place_of(held, held.chunk)
        self.held[self.held.index(held)] = again
        return again

    def halve(self, held: HeldChunk) -> None:
        """Replaces a chunk of several rows by two; leaves out one whose rows were all gathered."""
        plan, dp_rank = self.planned
        at = self.held.index(held)
        self.held.remove(held)
        head = plan.head(held.chunk, dp_rank, held.rows // 2)
        after = plan.next_chunk(head)
        halves = [head] if after is None else [head, self._rest(held.chunk, after.position, after.low)]
        for part in reversed([self._in_place_of(held, chunk) for chunk in halves]):
            if part.taken_rows < part.rows:
                self.held.insert(at, part)

    def _in_place_of(self, held: HeldChunk, chunk: Chunk) -> HeldChunk:
        """Makes a chunk of some of the rows of one that is held, with what is known of these."""
        made = self._make(chunk)
        made.reader, made.trouble = held.reader, held.trouble.of_part(is_whole=made.rows == held.rows)
        made.taken_rows = max(0, held.first + held.taken_rows - made.first)
        return made
