"""What readers load next, and where the rows of an item are: which reader loads a chunk, in which blocks, and when."""

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from raylance.dispatch.account import Account
from raylance.dispatch.chunk_order import ChunkOrder, HeldChunk
from raylance.dispatch.messages import Drop, Fault, Load, Loaded, Log, Output
from raylance.dispatch.states import ChunkState, change
from raylance.planning.plan import Chunk, Plan, WorkItem

MAX_FAULTS = 3  # machine faults of one chunk or item; a fourth is not a coincidence
PAUSES_S = (0.2, 1.0, 5.0)  # before work is repeated, if no helper died: a full object store takes time to drain
_LOADS = 3  # calls at a reader: two that are done and one that waits, so that nothing waits for an answer
_HELD = 2  # chunks of a reader: the one in use and the next one
_ALONE = 2  # items at once that a reader reads by themselves
# If decoders need the cores, the next chunk is loaded in step with the use of the chunk before it, so that loading does
# not take the cores just when a chunk ends: this share at once, and the rest at a multiple of the speed of its use.
_FIRST_SHARE, _FASTER = 0.125, 2.0
# If a chunk was not loaded ahead, its first items, up to this share of its rows, are read by themselves while it is
# loaded: half if items are decoded, because the decoders need that time anyway; else few, because reading items by
# themselves takes cores from the load: up to twenty times those of rows that are read together.
_HALF, _FEW = 0.5, 1 / 32


@dataclasses.dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where the rows of an item come from: the loaded chunk `number` of a reader; None to read them by themselves."""

    reader: int
    number: int | None


class ChunkTable:
    """The work of readers. It outlives passes, as their memory does: the next epoch is loaded ahead, too. Readers take
    turns: while items are gathered from the chunk of one reader, the others load theirs.
    """

    def __init__(
        self,
        account: Account,
        *,
        decodes: bool,
        gives_away: bool,
        until_fetched: bool = False,
        loads_next_epoch: bool = True,
    ) -> None:
        """Begins with no chunk.

        Args:
            account: Bytes of rows, and the limit of what a reader holds.
            decodes: Whether items are decoded, so that loading should leave cores to the decoders.
            gives_away: Whether the consumer may change gathered rows in the reader's own memory. Then a row can be
                gathered only once from a loaded chunk.
            until_fetched: Whether the memory of a chunk is kept until the items that were gathered from it are fetched.
            loads_next_epoch: Whether the next pass is likely over the next epoch, whose first chunk is loaded ahead.
        """
        self._account, self._gives_away, self._until_fetched = account, gives_away, until_fetched
        self._first_share, self._early_share = (_FIRST_SHARE, _HALF) if decodes else (1.0, _FEW)
        self._order = ChunkOrder(account, loads_next_epoch=loads_next_epoch)
        self._by_call: dict[int, HeldChunk] = {}
        self._alone: dict[int, int] = {}  # readers of items that are being read by themselves, by call
        self._used: list[HeldChunk] = []  # all their rows were gathered, and not all were fetched
        self._commands: list[Output] = []  # that were not taken
        self._drops: list[Drop] = []  # the same; a load takes them along, because each call through Ray costs time

    def take_commands(self) -> list[Output]:
        """Returns the commands that follow from the calls so far."""
        commands, self._commands, self._drops = [*self._drops, *self._commands], [], []
        return commands

    def begin(
        self, plan: Plan, dp_rank: int, epoch: int, position: int, *, spans_epochs: bool = False
    ) -> Iterator[Chunk]:
        """Begins a pass; drops the chunks that it does not need. Returns those that it has, as they come, also of later
        epochs with `spans_epochs`; how many rows a chunk has is decided at the latest then.
        """
        for held in self._order.begin(plan, dp_rank, epoch, position):
            self._let_go(held)
        return self._order.chunks(epoch, position, spans_epochs=spans_epochs)

    # What to load.

    def load(self, readers: Sequence[int], send: Callable[[int], int], now: float) -> None:
        """Gives the running `readers` the loads that they can begin; `send` returns the number of a reader's call."""
        if not readers:
            return
        self._assign(readers)
        for reader in readers:
            mine = [each for each in self._order.held if each.reader == reader]
            for held, before in zip(mine[:_HELD], [None, *mine], strict=False):
                while self._is_ready(held, now) and sum(len(each.calls) for each in mine) < _LOADS:
                    if before is None:
                        self._make_room(held, mine)
                    holding = (*mine, *(each for each in self._used if each.reader == reader))
                    block = self._next_block(held, before, sum(each.expected_bytes for each in holding))
                    if block is None:
                        break
                    self._send(held, reader, *block, send)

    def _is_ready(self, held: HeldChunk, now: float) -> bool:
        """Whether the next rows of a chunk may be asked for, as far as only this chunk matters."""
        if held.state not in (ChunkState.PLANNED, ChunkState.LOADING) or held.not_before > now:
            return False
        # Unless all rows have one size, that of the next ones is known when these are here.
        return not held.calls or (self._account.is_even and held.asked_rows < held.stored_rows)

    def _make_room(self, used: HeldChunk, mine: Sequence[HeldChunk]) -> None:
        """Drops what a reader has loaded of later chunks, if the chunk in use needs the room: it came from a reader
        that is gone.
        """
        left_bytes = (used.stored_rows - used.asked_rows) * used.pace.row_bytes
        wanted = max(min(used.pace.target_bytes, left_bytes), used.pace.row_bytes, used.needs_bytes)
        unfetched = [each for each in self._used if each.reader == used.reader and used.is_before(each)]
        for other in (*reversed(mine[1:]), *unfetched):
            room = self._account.window_bytes - sum(each.expected_bytes for each in (*mine, *unfetched))
            if room >= wanted or not other.expected_bytes or other.gathers:
                continue
            if other in unfetched:
                unfetched.remove(other)
                self._used.remove(other)
                self._let_go(other)
            else:
                self._free(other)
                self._begin_again(other)

    def _assign(self, readers: Sequence[int]) -> None:
        """Gives each reader a chunk to use and one to load ahead. Each chunk has one reader: it is loaded once."""
        given: dict[int, list[int]] = {reader: [] for reader in readers}
        for at, held in enumerate(self._order.all()):
            if held.reader not in given:
                if held.reader is not None:  # it was dismissed
                    self._begin_again(held)
                # The reader with the fewest chunks; if tied, the one whose last chunk comes first.
                held.reader = min(given, key=lambda reader: (len(given[reader]), given[reader][-1:]))
            given[held.reader].append(at)
            if all(len(places) >= _HELD for places in given.values()):
                return

    def _next_block(self, held: HeldChunk, before: HeldChunk | None, expected_bytes: float) -> tuple[int, float] | None:
        """Returns the number of rows of a ready chunk's next block, and the bytes that it may have; None if it has to
        wait. `before` is the chunk that the reader uses before this one, if any; the reader holds `expected_bytes`.
        """
        room, left = self._account.window_bytes - expected_bytes, held.stored_rows - held.asked_rows
        rows, fitting = min(left, held.pace.next_rows()), max(0, int(room / held.pace.row_bytes))
        if before is None:
            if not fitting and expected_bytes == held.nbytes:
                fitting, room = 1, max(1.0, room)  # it has all room that there is
            return (min(rows, fitting), room) if fitting else None
        is_even = self._account.is_even
        share = self._first_share + _FASTER * before.taken_rows / max(1, before.rows)
        is_asked = is_even and before.asked_rows >= before.stored_rows
        is_loading = before.state in (ChunkState.PLANNED, ChunkState.LOADING) and not is_asked
        if is_loading or held.asked_rows >= share * held.stored_rows:
            return None
        rows = min(rows, fitting) if is_even and fitting > rows // 2 else rows
        return (rows, room) if rows <= fitting and room >= held.needs_bytes else None

    def _send(self, held: HeldChunk, reader: int, rows: int, allowed: float, send: Callable[[int], int]) -> None:
        if held.state is ChunkState.PLANNED:
            held.state = change(held.state, ChunkState.LOADING)
            held.is_cold = held.is_cold or held is self._order.held[0]
        call, first = send(reader), held.asked_rows
        held.calls[call] = rows * held.pace.row_bytes if self._account.is_even else allowed
        held.asked_rows += rows
        self._by_call[call] = held
        _, dp_rank = self._order.planned
        drops = tuple(drop.number for drop in self._drops if drop.helper == reader)
        self._drops = [drop for drop in self._drops if drop.helper != reader]
        self._commands.append(Load(call, reader, held.number, dp_rank, held.chunk, first, rows, int(allowed), drops))

    # Answers.

    def loaded(self, event: Loaded) -> None:
        """Records the answer to a load."""
        held = self._by_call.pop(event.call, None)
        if held is None:
            return
        held.calls.pop(event.call, None)
        if held.state is not ChunkState.LOADING:
            return
        account = self._account
        if not held.loaded_rows:
            account.learn_rows(held.rows, event.stored_rows)
        # An answer may overtake another one, and the rows of a load may come before those of an earlier load.
        held.loaded_rows, held.nbytes = max(held.loaded_rows, event.rows), max(held.nbytes, event.nbytes)
        held.stored_rows = event.stored_rows
        if not held.calls:
            rows, nbytes = held.loaded_rows - held.paced[0], held.nbytes - held.paced[1]
            if rows:
                self._learn_whether_even(event.is_even, nbytes / rows)
                held.pace.record(rows, nbytes)
            held.asked_rows, held.paced = held.loaded_rows, (held.loaded_rows, held.nbytes)
            held.needs_bytes = event.needs_bytes
        if held.loaded_rows == held.stored_rows:
            if held.calls:
                return  # a read that was repeated may still copy rows to places of its load, until this is answered
            account.learn_chunk(held.stored_rows, held.nbytes)
            held.state = change(held.state, ChunkState.LOADED)
        elif held.nbytes + held.needs_bytes > account.window_bytes and held.rows == 1:
            self._free(held)
            held.state = change(held.state, ChunkState.FAILED)  # its item is read by itself, and refused
        elif held.nbytes + held.needs_bytes > account.window_bytes:
            self._order.halve(held)
            self._let_go(held)

    def _learn_whether_even(self, is_even: bool, row_bytes: float) -> None:
        """Learns whether all rows have one size. Once it is known, chunks are loaded in large blocks, the first one
        too.
        """
        was_even, self._account.is_even = self._account.is_even, is_even
        if is_even and not was_even:
            self._account.learn_even(row_bytes)
            for held in self._order.held:
                held.pace = self._account.pace()

    def failed(self, call: int, error: BaseException) -> None:
        """Records that a load has failed because of its rows. The error may concern few of them, so the items of the
        chunk are read by themselves until one of them succeeds.
        """
        held = self._by_call.pop(call, None)
        if held is not None and held.state is ChunkState.LOADING:
            self._free(held)
            held.state = change(held.state, ChunkState.FAILED)
            self._reset(held)
            line = f"rows could not be read together ({error!r}). Their items are read by themselves."
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
        for held in self._order.held:
            if held.reader == reader:
                held.reader = None
                if held.state is not ChunkState.FAILED:
                    self._begin_again(held)
        if at_work is not None and at_work.state is ChunkState.PLANNED and is_at_load and not fault.is_of_others:
            self._blame(at_work)
        for call in calls:
            self._by_call.pop(call, None)
            self._alone.pop(call, None)
        self._used = [held for held in self._used if held.reader != reader]

    def _begin_again(self, held: HeldChunk) -> None:
        """Makes a chunk one of which nothing is loaded."""
        if held.state is not ChunkState.PLANNED:
            held.state = change(held.state, ChunkState.PLANNED)
        self._reset(held)

    def _forget_loads(self, held: HeldChunk) -> None:
        for call in held.calls:
            self._by_call.pop(call, None)

    def _reset(self, held: HeldChunk) -> None:
        self._forget_loads(held)
        held.number, held.calls, held.gathers, held.unfetched = self._order.number(), {}, set(), set()
        held.pace = self._account.pace()
        held.asked_rows = held.loaded_rows = held.nbytes = held.needs_bytes = held.given_rows = 0
        held.stored_rows, held.paced = held.rows, (0, 0)

    # Items.

    def place_of(self, item: WorkItem, readers: Sequence[int], *, at_once: bool = False) -> ItemPlace | None:
        """Returns where the rows of an item come from; None if they have to wait for their chunk, or for a reader that
        is able to take the item. `readers` are those that are able. With `at_once`, the item does not wait for its
        chunk, because no chunk before it will be dropped.
        """
        if not readers:
            return None
        held = self._find(item) if item.rows else None
        if held is None:
            return ItemPlace(readers[0], None)
        if held.reader is None and held.state is not ChunkState.FAILED and not at_once:
            return None
        reader = readers[0] if held.reader is None else held.reader
        if reader not in readers:
            return None
        at = self._line(item) - held.first
        if held.state is ChunkState.LOADED and at >= held.given_rows:
            return ItemPlace(reader, held.number)
        if held.state in (ChunkState.LOADED, ChunkState.FAILED):
            return ItemPlace(reader, None)
        is_early = held.is_cold and at < self._early_share * held.rows and self._account.is_small(item.rows)
        is_free = Counter(self._alone.values())[reader] < _ALONE
        return ItemPlace(reader, None) if at_once or (is_early and is_free) else None

    def _line(self, item: WorkItem) -> int:
        plan, _ = self._order.planned
        return plan.item_line(item)

    def _find(self, item: WorkItem) -> HeldChunk | None:
        """Returns the chunk that has all rows of an item, if any: chunks that were used are gone, and a chunk may have
        been halved in the middle of an item.
        """
        line = self._line(item)
        return next(
            (
                each
                for each in self._order.held
                if each.has(item.epoch, line) and each.has(item.epoch, line + item.rows - 1)
            ),
            None,
        )

    def gathers(self, call: int, place: ItemPlace) -> None:
        """Records that a reader gathers an item from a place."""
        if place.number is None:
            self._alone[call] = place.reader
        for held in self._order.held:
            if held.number == place.number:
                held.gathers.add(call)

    def answered(self, call: int, *, has_result: bool = False) -> None:
        """Records that a call is answered, by whatever; `has_result` says that an item was gathered, whose rows will be
        fetched.
        """
        self._alone.pop(call, None)
        for held in [each for each in self._order.held if call in each.gathers]:
            held.gathers.remove(call)
            if has_result and self._until_fetched:
                held.unfetched.add(call)
            self._drop_if_used(held)

    def forgotten(self, calls: Sequence[int]) -> None:
        """Records that the results of calls are not needed any more."""
        for held in (*self._order.held, *self._used):
            held.unfetched.difference_update(calls)
        for held in [each for each in self._used if not each.unfetched]:
            self._used.remove(held)
            self._let_go(held)

    def gathered(self, item: WorkItem) -> None:
        """Records that an item was gathered. A chunk whose rows were all gathered is dropped."""
        line = self._line(item)
        end = line + item.rows
        for held in list(self._order.held):
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
        self._order.held.remove(held)
        if held.unfetched:
            self._used.append(held)
        else:
            self._let_go(held)

    def _let_go(self, held: HeldChunk) -> None:
        self._forget_loads(held)
        self._free(held)
        held.state = change(held.state, ChunkState.DROPPED)

    def _free(self, held: HeldChunk) -> None:
        if held.reader is not None and held.state in (ChunkState.LOADING, ChunkState.LOADED):
            # Running loads of the chunk should end at once, so that others begin.
            (self._commands if held.calls else self._drops).append(Drop(held.reader, held.number))

    # Queries.

    def knows(self, call: int) -> bool:
        """Whether a call is an unanswered load of a chunk in the table."""
        return call in self._by_call

    def deadline(self, now: float) -> float:
        """Returns the time at which a pause before a load ends; infinity if there is none."""
        return min((each.not_before for each in self._order.held if each.not_before > now), default=math.inf)
