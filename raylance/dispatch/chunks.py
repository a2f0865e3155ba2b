"""The chunks of a rank that are loaded or will be: by which reader, in which blocks, for how long. The dispatcher asks
this table what to load next, and where the rows of an item are.
"""

import dataclasses
import itertools
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

from raylance.dispatch.account import Account
from raylance.dispatch.messages import Drop, Fault, Load, Loaded, Log, Output
from raylance.dispatch.states import ChunkState, change
from raylance.planning.pace import Pace
from raylance.planning.plan import Chunk, Plan, WorkItem

MAX_FAULTS = 3  # machine faults of one chunk or item; a fourth is not a coincidence
PAUSES_S = (0.2, 1.0, 5.0)  # before work is repeated, if no helper died: a full object store takes time to drain
_LOADS = 2  # calls at a reader: while the last rows of one block are copied, the next block is read
_HELD = 2  # chunks of a reader: the one in use and the next one
_ALONE = 2  # items at once that a reader reads by themselves
# If decoders need the cores, the next chunk is loaded in step with the use of the chunk before it, so that loading does
# not take the cores just when a chunk ends: this share at once, and the rest so many times as fast as it is used.
_FIRST_SHARE, _FASTER = 0.125, 2.0
# If a chunk was not loaded ahead, its first items, up to this share of its rows, are read by themselves while it is
# loaded: half if items are decoded, because the decoders need that time anyway; else few, because reading items by
# themselves costs several times as much.
_HALF, _FEW = 0.5, 1 / 16


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
        taken_rows: Number of its rows up to the last one that was gathered in this pass, or is before it.
        given_rows: Number of its loaded rows up to the last one that was given away; see `ChunkTable`.
        paced: Rows and bytes from which `pace` follows.
        needs_bytes: Bytes of the next row, if it did not fit; else 0.
        is_known: Whether the reader has said which rows the chunk has.
        is_cold: Whether items needed it before it was loaded.
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
    paced: tuple[int, int] = (0, 0)
    taken_rows: int = 0
    given_rows: int = 0
    needs_bytes: int = 0
    faults: int = 0
    not_before: float = 0.0
    is_known: bool = False
    is_cold: bool = False

    @property
    def expected_bytes(self) -> float:
        """Bytes that are loaded, or may be when the unanswered loads are done."""
        return self.nbytes + sum(self.calls.values())

    def has(self, epoch: int, line: int) -> bool:
        """Whether a line belongs to the chunk."""
        return self.chunk.epoch == epoch and self.first <= line < self.first + self.rows


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of an item come from: the loaded chunk `number` of a reader; None to read them by themselves."""

    reader: int
    number: int | None


class ChunkTable:
    """The chunks of a rank in the order of delivery, from the one in use to the last one that is loaded ahead.

    The table outlives passes, as the readers' memory does: the next epoch is loaded ahead, too. Readers take turns:
    while items are gathered from the chunk of one reader, the others load theirs.
    """

    def __init__(self, account: Account, *, decodes: bool, gives_away: bool) -> None:
        """Begins with no chunk.

        Args:
            account: Bytes of rows, and the limit of what a reader holds.
            decodes: Whether items are decoded, so that loading should leave cores to the decoders.
            gives_away: Whether rows that were gathered may be changed by whoever got them. Then a row can be gathered
                once only from a loaded chunk.
        """
        self._account, self._gives_away = account, gives_away
        self._first_share, self._early_share = (_FIRST_SHARE, _HALF) if decodes else (1.0, _FEW)
        self._of: tuple[Plan, int] | None = None  # the plan, and the data-parallel rank
        self._held: deque[HeldChunk] = deque()
        self._last: Chunk | None = None  # the last one in the order of delivery that was ever added
        self._by_call: dict[int, HeldChunk] = {}
        self._alone: dict[int, int] = {}  # readers of items that are being read by themselves, by call
        self._numbers = itertools.count()
        self._commands: list[Output] = []  # that were not taken

    def take_commands(self) -> list[Output]:
        """Returns the commands that follow from the calls so far."""
        commands, self._commands = self._commands, []
        return commands

    # The order of chunks.

    def begin(self, plan: Plan, dp_rank: int, epoch: int, position: int) -> None:
        """Begins a pass: drops the chunks that it does not need."""
        line, is_same = plan.line(position, dp_rank), self._of in (None, (plan, dp_rank))
        while self._held and not (is_same and self._is_needed(self._held[0], plan, epoch, position, line)):
            self._drop(self._held[0])
        self._of = plan, dp_rank
        self._last = self._last if self._held else None
        if not self._held:
            return
        first = self._held[0]
        if not first.has(epoch, line):
            chunk = plan.chunk_at(epoch, position)
            if chunk is not None and plan.chunk_size(chunk, dp_rank):
                self._held.appendleft(self._make(self._before(chunk, first.chunk)))
        elif first.first + first.given_rows - line > first.rows // 2:  # else few rows are read by themselves
            self._drop(first)
            self._held.appendleft(self._make(self._rest(first.chunk, position)))
        self._fill_gaps()
        for held in self._held:
            held.taken_rows = max(0, line - held.first) if held is self._held[0] else 0

    def _fill_gaps(self) -> None:
        """Adds the chunks that lie between others: they were used in a pass that was left before it had taken them."""
        plan, dp_rank = self._planned
        at = 0
        while at + 1 < len(self._held):
            after, found = plan.likely_next_chunk(self._held[at].chunk, dp_rank), self._held[at + 1].chunk
            at += 1
            if after is not None and (after.epoch, after.position, after.low) != (
                found.epoch,
                found.position,
                found.low,
            ):
                gap = self._before(after, found) if after.epoch == found.epoch else after
                self._held.insert(at, self._make(gap))

    def _is_needed(self, held: HeldChunk, plan: Plan, epoch: int, position: int, line: int) -> bool:
        """Whether a pass from a position on needs a chunk: if it has the first row of the pass, or begins soon after
        it, because the items before it were gathered in a pass that did not take them.
        """
        is_on_track = held.chunk.epoch == epoch and held.chunk.position % plan.stride == position % plan.stride
        return is_on_track and line < held.first + held.rows and held.first - line <= held.rows // 2

    @property
    def _planned(self) -> tuple[Plan, int]:
        if self._of is None:
            raise RuntimeError("no pass has begun")
        return self._of

    def _rest(self, chunk: Chunk, position: int) -> Chunk:
        plan, _ = self._planned
        if position == chunk.position:
            return chunk
        steps = chunk.steps - (position - chunk.position) // plan.stride
        return dataclasses.replace(chunk, position=position, steps=steps, low=0)

    def chunks(self, epoch: int, position: int) -> Iterator[Chunk]:
        """Yields the chunks of the pass, or what is left of them. How many rows a chunk has is decided at the latest
        when it comes.
        """
        plan, dp_rank = self._planned
        chunk = plan.chunk_at(epoch, position)
        while chunk is not None:
            if plan.chunk_size(chunk, dp_rank):
                line = plan.first_line(chunk, dp_rank)
                held = next((each for each in self._held if each.has(epoch, line)), None)
                if held is None:
                    chunk = self._add(chunk)
                else:
                    chunk = held.chunk if line == held.first else self._rest(held.chunk, chunk.position)
            yield chunk
            chunk = plan.next_chunk(chunk)

    def _before(self, chunk: Chunk, end: Chunk) -> Chunk:
        """Returns the part of a chunk before the begin of another one."""
        plan, _ = self._planned
        steps = (end.position - chunk.position) // plan.stride + bool(end.low)
        return chunk if steps > chunk.steps else dataclasses.replace(chunk, steps=steps, high=end.low or None)

    def _add(self, chunk: Chunk) -> Chunk:
        """Adds a chunk at the end, or as much of it as a reader should hold together; returns what was added."""
        plan, dp_rank = self._planned
        self._last = plan.head(chunk, dp_rank, self._account.chunk_rows(plan.chunk_size(chunk, dp_rank)))
        self._held.append(self._make(self._last))
        return self._last

    def _make(self, chunk: Chunk) -> HeldChunk:
        plan, dp_rank = self._planned
        rows, first = plan.chunk_size(chunk, dp_rank), plan.first_line(chunk, dp_rank)
        pace = self._account.pace(rows)
        return HeldChunk(number=next(self._numbers), chunk=chunk, first=first, rows=rows, stored_rows=rows, pace=pace)

    def _all(self) -> Iterator[HeldChunk]:
        """Yields the chunks; adds those that are likely to follow."""
        plan, dp_rank = self._planned
        at = 0
        while True:
            if at == len(self._held):
                chunk = plan.likely_next_chunk(self._last, dp_rank) if self._last is not None else None
                if chunk is None or not plan.chunk_size(chunk, dp_rank):
                    return
                self._add(chunk)
            yield self._held[at]
            at += 1

    # What to load.

    def load(self, readers: Sequence[int], send: Callable[[int], int], now: float) -> None:
        """Gives the running `readers` the loads that they can begin; `send` returns the number of a reader's call."""
        if not readers:
            return
        self._assign(readers)
        for reader in readers:
            mine = [each for each in self._held if each.reader == reader]
            for held, before in zip(mine[:_HELD], [None, *mine], strict=False):
                while sum(len(each.calls) for each in mine) < _LOADS + (not held.is_known):
                    if before is None and self._is_ready(held, now):
                        self._make_room(held, mine)
                    block = self._next_block(held, before, sum(each.expected_bytes for each in mine), now)
                    if block is None:
                        break
                    self._send(held, reader, *block, send)

    def _is_ready(self, held: HeldChunk, now: float) -> bool:
        """Whether the next rows of a chunk may be asked for, as far as only this chunk matters."""
        if held.state not in (ChunkState.PLANNED, ChunkState.LOADING) or held.not_before > now:
            return False
        # The size of the next rows is known when these are here.
        return not held.calls or (held.is_known and self._account.is_even and held.asked_rows < held.stored_rows)

    def _make_room(self, used: HeldChunk, mine: Sequence[HeldChunk]) -> None:
        """Drops what a reader has loaded of later chunks, if the chunk in use needs the room: it came from a reader
        that is gone.
        """
        left_bytes = (used.stored_rows - used.asked_rows) * used.pace.row_bytes
        wanted = max(min(used.pace.target_bytes, left_bytes), used.pace.row_bytes, used.needs_bytes)
        for other in reversed(mine[1:]):
            room = self._account.window_bytes - sum(each.expected_bytes for each in mine)
            if room < wanted and other.expected_bytes and not other.gathers:
                self._free(other)
                self._begin_again(other)

    def _assign(self, readers: Sequence[int]) -> None:
        """Gives each reader a chunk to use and one to load ahead. Each chunk has one reader: it is loaded once."""
        given: dict[int, list[int]] = {reader: [] for reader in readers}
        for at, held in enumerate(self._all()):
            if held.reader not in given:
                if held.reader is not None:  # it was dismissed
                    self._begin_again(held)
                # The reader with the fewest chunks; if tied, the one whose last chunk comes first.
                held.reader = min(given, key=lambda reader: (len(given[reader]), given[reader][-1:]))
            given[held.reader].append(at)
            if all(len(places) >= _HELD for places in given.values()):
                return

    def _next_block(
        self, held: HeldChunk, before: HeldChunk | None, expected_bytes: float, now: float
    ) -> tuple[int, float] | None:
        """Returns the number of rows of the next block, and the bytes that it may have; None if it has to wait.
        `before` is the chunk that the reader uses before this one, if any; the reader holds `expected_bytes`.
        """
        if not self._is_ready(held, now):
            return None
        room, left = self._account.window_bytes - expected_bytes, held.stored_rows - held.asked_rows
        rows, fitting = min(left, held.pace.next_rows()), max(0, int(room / held.pace.row_bytes))
        if before is None and not fitting and expected_bytes == held.nbytes:
            fitting, room = 1, max(1.0, room)  # it has all room that there is
        is_asked = before is None or before.asked_rows >= before.stored_rows
        is_free = before is None or before.state is not ChunkState.LOADING or (self._account.is_even and is_asked)
        if not held.is_known:  # which rows it has is found while the chunk before it is loaded
            first = (min(rows, fitting), room) if before is None and fitting else (0, 0.0)
            return first if is_free or is_asked else None
        if not left or not is_free:
            return None
        if before is None:
            return (min(rows, fitting), room) if fitting else None
        share = self._first_share + _FASTER * before.taken_rows / max(1, before.rows)
        if held.asked_rows >= share * held.stored_rows:
            return None
        rows = min(rows, fitting) if self._account.is_even else rows
        return (rows, room) if 0 < rows <= fitting and room >= held.needs_bytes else None

    def _send(self, held: HeldChunk, reader: int, rows: int, allowed: float, send: Callable[[int], int]) -> None:
        if held.state is ChunkState.PLANNED:
            held.state = change(held.state, ChunkState.LOADING)
        call, first = send(reader), held.asked_rows
        held.calls[call] = rows * held.pace.row_bytes if self._account.is_even else allowed
        held.asked_rows += rows
        self._by_call[call] = held
        self._commands.append(Load(call, reader, held.number, self._planned[1], held.chunk, first, rows, int(allowed)))

    # Answers.

    def loaded(self, event: Loaded) -> None:
        """Records the answer to a load."""
        held = self._by_call.pop(event.call, None)
        if held is None or held.state is not ChunkState.LOADING:
            return
        del held.calls[event.call]
        account = self._account
        # An answer may overtake another one, and the rows of a load may come before those of an earlier load.
        held.loaded_rows, held.nbytes = max(held.loaded_rows, event.rows), max(held.nbytes, event.nbytes)
        if not held.is_known:
            held.is_known, held.stored_rows = True, event.stored_rows
        if not held.calls:
            rows, nbytes = held.loaded_rows - held.paced[0], held.nbytes - held.paced[1]
            if rows:
                account.is_even = event.is_even
                held.pace.record(rows, nbytes)
            held.asked_rows, held.paced = held.loaded_rows, (held.loaded_rows, held.nbytes)
            held.needs_bytes = event.needs_bytes
        if held.loaded_rows == held.stored_rows:
            account.learn_chunk(held.stored_rows, held.nbytes)
            held.state = change(held.state, ChunkState.LOADED)
        elif held.nbytes + held.needs_bytes > account.window_bytes:
            self._halve(held)

    def _halve(self, held: HeldChunk) -> None:
        """Replaces a chunk that has no room by two; a chunk of one row by one that is not loaded."""
        plan, dp_rank = self._planned
        if held.rows == 1:
            held.state = change(held.state, ChunkState.FAILED)
            return
        at = self._held.index(held)
        self._drop(held)
        head = plan.head(held.chunk, dp_rank, held.rows // 2)
        after = plan.next_chunk(head)
        rest = after and self._up_to(after, held.chunk)
        self._last = rest or head if self._last == held.chunk else self._last
        for chunk in (head, rest):
            part = None if chunk is None else self._make(chunk)
            taken = 0 if part is None else held.first + held.taken_rows - part.first
            if part is not None and taken < part.rows:
                part.reader, part.is_cold, part.taken_rows = held.reader, held.is_cold, max(0, taken)
                self._held.insert(at, part)
                at += 1

    def _up_to(self, chunk: Chunk, whole: Chunk) -> Chunk:
        """Returns the part of a chunk before the end of another one."""
        plan, _ = self._planned
        steps = whole.steps - (chunk.position - whole.position) // plan.stride
        return dataclasses.replace(chunk, steps=steps, high=whole.high)

    def failed(self, call: int, error: BaseException) -> None:
        """Records that a load has failed because of its rows. The error may concern few of them, so the items of the
        chunk are read by themselves until one of them succeeds.
        """
        held = self._by_call.pop(call, None)
        if held is not None and held.state is ChunkState.LOADING:
            self._free(held)
            held.state = change(held.state, ChunkState.FAILED)
            self._reset(held)
            line = f"rows could not be read together ({error!r}). An item is read by itself."
            self._commands.append(Log(logging.WARNING, line))

    def faulted(self, call: int, now: float) -> None:
        """Records that a load has failed by a machine fault: it is done again, after a pause."""
        held = self._by_call.pop(call, None)
        if held is not None and held.state is ChunkState.LOADING:
            self._free(held)
            self._begin_again(held)
            self._blame(held)
            held.not_before = now + PAUSES_S[min(held.faults, MAX_FAULTS) - 1]

    def _blame(self, held: HeldChunk) -> None:
        """Counts a machine fault against a chunk; after too many, its items are read by themselves."""
        held.faults += 1
        if held.faults > MAX_FAULTS:
            held.state = change(held.state, ChunkState.FAILED)

    def lost(self, reader: int, calls: Sequence[int], fault: Fault, *, is_at_load: bool) -> None:
        """Records that a reader is gone, and what it held. `calls` are those that it has not answered; `is_at_load`
        says that it was working on nothing else than a load.
        """
        at_work = next((self._by_call[call] for call in calls if call in self._by_call), None)
        for held in self._held:
            if held.reader == reader:
                held.reader = None
                if held.state is not ChunkState.FAILED:
                    self._begin_again(held)
        if at_work is not None and at_work.state is ChunkState.PLANNED and is_at_load and not fault.is_of_others:
            self._blame(at_work)
        for call in calls:
            self._by_call.pop(call, None)
            self._alone.pop(call, None)

    def _begin_again(self, held: HeldChunk) -> None:
        """Makes a chunk one of which nothing is loaded."""
        if held.state is not ChunkState.PLANNED:
            held.state = change(held.state, ChunkState.PLANNED)
        self._reset(held)

    def _reset(self, held: HeldChunk) -> None:
        for call in held.calls:
            self._by_call.pop(call, None)
        held.number, held.calls, held.gathers = next(self._numbers), {}, set()
        held.pace = self._account.pace(held.rows)
        held.asked_rows = held.loaded_rows = held.nbytes = held.needs_bytes = held.given_rows = 0
        held.is_known, held.stored_rows, held.paced = False, held.rows, (0, 0)

    # Items.

    def place_of(self, item: WorkItem, readers: Sequence[int], *, at_once: bool = False) -> Place | None:
        """Returns where the rows of an item come from; None if they have to wait for their chunk, or for a reader that
        is able to take the item. `readers` are those that are able. With `at_once`, the item does not wait for its
        chunk, because no chunk before it will be dropped.
        """
        if not readers:
            return None
        held = self._find(item) if item.rows else None
        if held is None:
            return Place(readers[0], None)
        if held.reader is None and held.state is not ChunkState.FAILED and not at_once:
            return None
        reader = readers[0] if held.reader is None else held.reader
        if reader not in readers:
            return None
        at = self._line(item) - held.first
        if held.state is ChunkState.LOADED and at >= held.given_rows:
            return Place(reader, held.number)
        if held.state in (ChunkState.LOADED, ChunkState.FAILED):
            return Place(reader, None)
        held.is_cold = held.is_cold or not held.is_known
        is_early = held.is_cold and at < self._early_share * held.rows and self._account.is_small(item.rows)
        is_free = Counter(self._alone.values())[reader] < _ALONE
        return Place(reader, None) if at_once or (is_early and is_free) else None

    def _line(self, item: WorkItem) -> int:
        plan, dp_rank = self._planned
        return plan.line(item.position, dp_rank) + item.low

    def _find(self, item: WorkItem) -> HeldChunk | None:
        """Returns the chunk that has all rows of an item, if any: chunks that were used are gone, and a chunk may have
        been halved in the middle of an item.
        """
        line = self._line(item)
        return next(
            (each for each in self._held if each.has(item.epoch, line) and each.has(item.epoch, line + item.rows - 1)),
            None,
        )

    def gathers(self, call: int, place: Place) -> None:
        """Records that a reader gathers an item from a place."""
        if place.number is None:
            self._alone[call] = place.reader
        for held in self._held:
            if held.number == place.number:
                held.gathers.add(call)

    def answered(self, call: int) -> None:
        """Records that a call is answered, by whatever."""
        self._alone.pop(call, None)
        for held in [each for each in self._held if call in each.gathers]:
            held.gathers.remove(call)
            self._drop_if_used(held)

    def gathered(self, item: WorkItem) -> None:
        """Records that an item was gathered. A chunk whose rows were all gathered is dropped."""
        line = self._line(item)
        end = line + item.rows
        for held in list(self._held):
            if held.chunk.epoch == item.epoch and held.first < end and line < held.first + held.rows:
                held.taken_rows = max(held.taken_rows, min(held.rows, end - held.first))
                if self._gives_away and held.state is ChunkState.LOADED:
                    held.given_rows = max(held.given_rows, held.taken_rows)
                self._drop_if_used(held)
                if held.state is ChunkState.FAILED:  # an item was read by itself: all may be read together now
                    self._begin_again(held)

    def _drop_if_used(self, held: HeldChunk) -> None:
        if held.taken_rows == held.rows and not held.gathers:
            self._drop(held)

    def _drop(self, held: HeldChunk) -> None:
        self._held.remove(held)
        for call in held.calls:
            self._by_call.pop(call, None)
        self._free(held)
        held.state = change(held.state, ChunkState.DROPPED)

    def _free(self, held: HeldChunk) -> None:
        if held.reader is not None and held.state in (ChunkState.LOADING, ChunkState.LOADED):
            self._commands.append(Drop(held.reader, held.number))

    # Queries.

    def knows(self, call: int) -> bool:
        """Whether a call is an unanswered load of a chunk in the table."""
        return call in self._by_call

    def deadline(self, now: float) -> float | None:
        """Returns the time at which a pause before a load ends; None if there is none."""
        return min((each.not_before for each in self._held if each.not_before > now), default=None)
