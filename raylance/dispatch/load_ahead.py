"""What readers load next, and where the rows of an item are: which reader loads a chunk, in which blocks, and when."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence

from raylance.dispatch.account import Account
from raylance.dispatch.chunk_order import Block, ChunkOrder, HeldChunk
from raylance.dispatch.messages import Drop, Fault, Forget, Load, Loaded, Log, Output
from raylance.dispatch.states import ChunkState, change
from raylance.dispatch.suspects import Suspicion
from raylance.planning.pace import MARGINS
from raylance.planning.plan import Chunk, Plan, WorkItem

MAX_FAULTS = 3  # machine faults of one chunk or item; a fourth is not a coincidence
PAUSES_S = (0.2, 1.0, 5.0)  # before work is repeated, if no helper died: a full object store takes time to drain
_LOADS = 3  # calls at a reader: two that are done and one that waits, so that nothing waits for an answer
_HELD = 2  # chunks of a reader: the one in use and the next one
# If decoders need the cores, the next chunk is loaded in step with the use of the chunk before it, so that loading does
# not take the cores just when a chunk ends: this share at once, and the rest at a multiple of the speed of its use.
_FIRST_SHARE, _FASTER = 0.125, 2.0


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
        decodes_blocks: bool = False,
        until_fetched: bool = False,
        loads_next_epoch: bool = True,
    ) -> None:
        """Begins with no chunk.

        Args:
            account: Bytes of rows, and the limit of what a reader holds.
            decodes: Whether items are decoded, so that loading should leave cores to the decoders.
            gives_away: Whether the consumer may change gathered rows in the reader's own memory. Then a later pass
                loads them again.
            decodes_blocks: Whether what is loaded is decoded by block, before items are gathered.
            until_fetched: Whether the memory of a chunk is kept until the items that were gathered from it are fetched.
            loads_next_epoch: Whether the next pass is likely over the next epoch, whose first chunk is loaded ahead.
        """
        self._account, self._until_fetched, self._decodes_blocks = account, until_fetched, decodes_blocks
        of_items = decodes and not decodes_blocks
        self._first_share = _FIRST_SHARE if of_items else 1.0
        self._order = ChunkOrder(account, decodes=of_items, gives_away=gives_away, loads_next_epoch=loads_next_epoch)
        self._by_call: dict[int, HeldChunk] = {}
        self._used: list[HeldChunk] = []  # no item will be gathered from them; calls that are not done need them
        self._commands: list[Output] = []  # that were not taken
        self._drops: list[Drop] = []  # the same; a load takes them along, because each call through Ray costs time
        self._margin = MARGINS[0]  # of loads; larger once decoders have lacked bytes

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
        for held in self._order.held:
            held.trouble.begin()
            if held.state is ChunkState.FAILED:
                self._begin_again(held)
        return self._order.chunks(epoch, position, spans_epochs=spans_epochs)

    # What to load.

    def load(
        self, readers: Sequence[int], send: Callable[[int], int], now: float, responsive: Sequence[int] | None = None
    ) -> None:
        """Gives the running `readers` the loads that they can begin; `send` returns the number of a reader's call. A
        chunk that a fault has hit is loaded by the `responsive` ones only (None: all are): helpers seldom die alone.
        """
        if not readers:
            return
        self._assign(readers)
        for reader in readers:
            mine = [each for each in self._order.held if each.reader == reader]
            for held, before in zip(mine[:_HELD], [None, *mine], strict=False):
                if held.trouble.faults and responsive is not None and reader not in responsive:
                    continue
                while self._is_ready(held, now) and sum(len(each.loading.calls) for each in mine) < _LOADS:
                    if before is None:
                        self._make_room(held, mine)
                    holding = (*mine, *(each for each in self._used if each.reader == reader))
                    block = self._next_block(held, before, sum(each.loading.expected_bytes for each in holding))
                    if block is None:
                        break
                    self._send(held, reader, *block, send)

    def _is_ready(self, held: HeldChunk, now: float) -> bool:
        """Whether the next rows of a chunk may be asked for, as far as only this chunk matters."""
        is_open = held.state is ChunkState.PLANNED or (held.state is ChunkState.LOADING and not held.loading.is_whole)
        if not is_open or held.trouble.not_before > now:
            return False
        # Unless all rows have one size, that of the next ones is known when these are here.
        return not held.loading.calls or (self._account.is_even and held.loading.left_rows > 0)

    def _make_room(self, used: HeldChunk, mine: Sequence[HeldChunk]) -> None:
        """Drops what a reader holds of rows that come later, if the chunk in use needs the room."""
        loading, pace = used.loading, used.loading.pace
        left_bytes = loading.left_rows * pace.row_bytes
        wanted = max(min(pace.target_bytes, left_bytes), pace.row_bytes, loading.needs_bytes)
        unfetched = [each for each in self._used if each.reader == used.reader]
        for other in (*reversed(mine[1:]), *(each for each in unfetched if each.ends_after(used))):
            room = self._account.reader_bytes - sum(each.loading.expected_bytes for each in (*mine, *unfetched))
            if room >= wanted or not other.loading.expected_bytes or other.gathers:
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
        loading, is_even = held.loading, self._account.is_even
        room, pace = self._account.reader_bytes - expected_bytes, loading.pace
        rows, fitting = min(loading.left_rows, pace.next_rows()), max(0, int(room / pace.row_bytes))
        if before is None:
            if not fitting and expected_bytes == loading.nbytes:
                fitting, room = 1, max(1.0, room)  # it has all room that there is
            return (min(rows, fitting), room) if fitting else None
        share = self._first_share + _FASTER * before.taken_rows / max(1, before.rows)
        is_asked = is_even and not before.loading.left_rows
        is_loading = before.state in (ChunkState.PLANNED, ChunkState.LOADING) and not before.loading.is_whole
        if (is_loading and not is_asked) or loading.asked_rows >= share * loading.stored_rows:
            return None
        rows = min(rows, fitting) if is_even and fitting > rows // 2 else rows
        return (rows, room) if rows <= fitting and room >= loading.needs_bytes else None

    def _send(self, held: HeldChunk, reader: int, rows: int, allowed: float, send: Callable[[int], int]) -> None:
        if held.state is ChunkState.PLANNED:
            held.state = change(held.state, ChunkState.LOADING)
        loading = held.loading
        call, first = send(reader), loading.asked_rows
        loading.calls[call] = first, (rows * loading.pace.row_bytes if self._account.is_even else allowed)
        loading.asked_rows += rows
        loading.margin = self._margin
        self._by_call[call] = held
        _, dp_rank = self._order.planned
        drops = tuple(drop.number for drop in self._drops if drop.helper == reader)
        self._drops = [drop for drop in self._drops if drop.helper != reader]
        where = call, reader, held.number, dp_rank
        self._commands.append(Load(*where, held.chunk, first, rows, int(allowed), drops, self._margin))

    # Answers.

    def loaded(self, event: Loaded) -> None:
        """Records the answer to a load."""
        held = self._by_call.pop(event.call, None)
        if held is None:
            return
        account, loading = self._account, held.loading
        first, _ = loading.calls.pop(event.call, (0, 0.0))
        if held.state is not ChunkState.LOADING:
            return
        if not loading.rows:
            account.learn_rows(held.rows, event.stored_rows, self._order.whole_rows(held.chunk))
        # An answer may overtake another one, and the rows of a load may come before those of an earlier load.
        loading.rows, loading.nbytes = max(loading.rows, event.rows), max(loading.nbytes, event.nbytes)
        loading.stored_rows = event.stored_rows
        if self._decodes_blocks and event.added:
            loading.blocks.append(Block(held=held, source=event.call, first=first, low=0, high=event.added))
        elif self._decodes_blocks:
            self._commands.append(Forget((event.call,)))
        if not loading.calls:
            rows, nbytes = loading.rows - loading.paced[0], loading.nbytes - loading.paced[1]
            if rows:
                self._learn_whether_even(event.is_even, nbytes / rows)
                loading.pace.record(rows, nbytes)
            loading.asked_rows, loading.paced = loading.rows, (loading.rows, loading.nbytes)
            loading.needs_bytes = event.needs_bytes
        if loading.is_whole:
            self._settle(held)
        elif loading.nbytes + loading.needs_bytes > account.reader_bytes and held.rows > 1:
            self._halve(held)  # a sample that does not fit by itself is an error of its load

    def _settle(self, held: HeldChunk) -> None:
        """Notes that a chunk can be used, if all of it is loaded and decoded."""
        loading = held.loading
        # A read that was repeated may still copy rows to places of its load, until this is answered.
        if loading.is_whole and not loading.calls and not loading.blocks:
            self._account.learn_chunk(loading.stored_rows, loading.nbytes)
            held.state = change(held.state, ChunkState.LOADED)

    def _learn_whether_even(self, is_even: bool, row_bytes: float) -> None:
        """Learns whether all rows have one size. Once it is known, chunks are loaded in large blocks, the first one
        too.
        """
        was_even, self._account.is_even = self._account.is_even, is_even
        if is_even and not was_even:
            self._account.learn_even(row_bytes)
            for held in self._order.held:
                held.loading.pace = self._account.pace()

    def failed(self, call: int, error: BaseException) -> None:
        """Records that a load has failed. Unless the storage is the cause, the error may concern few rows, so the chunk
        is halved, down to the row.
        """
        held = self._by_call.pop(call, None)
        if held is None or held.state is not ChunkState.LOADING:
            return
        self._rows_failed(held, error)

    def _rows_failed(self, held: HeldChunk, error: BaseException) -> None:
        can_halve = held.rows > 1 and not getattr(error, "is_of_storage", False)
        if can_halve and held.trouble.error is None:
            what = f"rows could not be read or decoded together ({error!r})"
            line = f"{what}. They are loaded in halves, to find the one that fails."
            self._commands.append(Log(logging.WARNING, line))
        held.trouble.error = error
        self._halve_or_fail(held, can_halve=can_halve)

    def faulted(self, call: int, fault: Fault, now: float) -> None:
        """Records that a load has failed by a machine fault: it is done again, after a pause."""
        held = self._by_call.pop(call, None)
        if held is not None and held.state is ChunkState.LOADING:
            self._free(held)
            self._begin_again(held)
            self._pause(held, fault, now)

    def chunk_lost(self, number: int, fault: Fault, now: float) -> None:
        """Records that what a reader has sent of a chunk is gone. The reader lives, and may be gathering from it."""
        for held in [each for each in self._order.held if each.number == number]:
            again = self._order.replace(held)
            self._release(held)
            self._pause(again, fault, now)

    # Blocks.

    def blocks(self) -> list[Block]:
        """Returns the blocks that are not decoded, in the order of delivery."""
        return [block for held in self._order.held for block in held.loading.blocks]

    def is_decoding(self, item: WorkItem) -> bool:
        """Whether an item waits only for blocks to be decoded."""
        held = self._order.find(item.epoch, self._line(item))
        return held is not None and held.state is ChunkState.LOADING and held.loading.is_whole

    def block_done(self, block: Block) -> None:
        """Records that a block is decoded."""
        blocks = block.held.loading.blocks
        blocks[:] = [other for other in blocks if other is not block]
        if not any(other.source == block.source for other in blocks):
            self._commands.append(Forget((block.source,)))
        self._settle(block.held)

    def block_failed(self, block: Block, error: BaseException) -> None:
        """Records that a row of a block is bad, or the decoder is wrong: see `failed`. If the decoder has lacked bytes,
        the chunk is loaded again, and what is loaded from now on, too, with more.
        """
        held = block.held
        if getattr(error, "needs_bytes", False) and held.loading.margin < MARGINS[-1]:
            self._margin = max(self._margin, next(each for each in MARGINS if each > held.loading.margin))
            self._order.replace(held)
            self._release(held)
        else:
            self._rows_failed(held, error)

    def block_lost(self, block: Block, fault: Fault, now: float) -> None:
        """Records that what was loaded of a block, or decoded, is gone: its chunk is loaded again, after a pause."""
        held = block.held
        if not self.hit(held, held.trouble.suspicion, fault):
            again = self._order.replace(held)
            self._release(held)
            again.trouble.not_before = now + PAUSES_S[held.trouble.suspicion.faults - 1]

    def hit(self, held: HeldChunk, known: Suspicion, fault: Fault) -> bool:
        """Counts a machine fault that has hit a block of a chunk. After too many, halves the chunk, down to one sample,
        which fails; returns whether there were too many.
        """
        known.faults += 1
        if known.faults > MAX_FAULTS:
            held.trouble.error = fault
            if held.rows == 1:
                held.trouble.faults = known.faults
            self._halve_or_fail(held, can_halve=held.rows > 1)
        return known.faults > MAX_FAULTS

    def halve(self, held: HeldChunk) -> None:
        """Replaces a chunk by two halves."""
        self._halve(held)

    def _pause(self, held: HeldChunk, fault: Fault, now: float) -> None:
        """Has a chunk loaded again, after a pause."""
        held.trouble.not_before = now + PAUSES_S[min(held.trouble.faults + 1, MAX_FAULTS) - 1]
        self._blame(held, fault)

    def _blame(self, held: HeldChunk, fault: Fault) -> None:
        """Counts a machine fault against a chunk; after too many, it is halved, down to about the rows of an item."""
        held.trouble.faults += 1
        if held.trouble.faults > MAX_FAULTS:
            held.trouble.error = fault
            self._halve_or_fail(held, can_halve=held.rows > self._account.item_rows())

    def _halve_or_fail(self, held: HeldChunk, *, can_halve: bool) -> None:
        if can_halve:
            self._halve(held)
        else:
            self._free(held)
            held.state = change(held.state, ChunkState.FAILED)
            self._reset(held)

    def _halve(self, held: HeldChunk) -> None:
        self._order.halve(held)
        self._let_go(held)

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
            self._blame(at_work, fault)
        for call in calls:
            self._by_call.pop(call, None)
        self._used = [held for held in self._used if held.reader != reader]

    def _begin_again(self, held: HeldChunk) -> None:
        """Makes a chunk one of which nothing is loaded."""
        if held.state is not ChunkState.PLANNED:
            held.state = change(held.state, ChunkState.PLANNED)
        self._reset(held)

    def _forget_loads(self, held: HeldChunk) -> None:
        loading = held.loading
        for call in loading.calls:
            self._by_call.pop(call, None)
        if self._decodes_blocks and (sources := {*loading.calls, *(block.source for block in loading.blocks)}):
            self._commands.append(Forget(tuple(sorted(sources))))
        loading.blocks = []

    def _reset(self, held: HeldChunk) -> None:
        self._forget_loads(held)
        held.number, held.loading = self._order.number(), self._order.nothing(held.rows)
        held.gathers, held.unfetched = set(), set()

    # Items.

    @property
    def count(self) -> int:
        """Number of chunks that are held, or will be."""
        return len(self._order.held)

    def together(self, item: WorkItem) -> int:
        """Returns how many of an item's first rows come from one chunk: an item is gathered from one chunk only. If no
        chunk has them, they get one of their own.
        """
        return self._order.together(item, self._line(item))

    def try_again(self, held: HeldChunk) -> bool:
        """Loads a failed chunk once more now that an item waits for it; returns whether it was not tried so before. It
        may have failed long ago, when it was loaded ahead, and a storage may be back since.
        """
        if held.trouble.is_last_try or isinstance(held.trouble.error, Fault):
            return False
        held.trouble.is_last_try = True
        self._begin_again(held)
        return True

    def set_aside(self, waiting: Sequence[WorkItem], others: Sequence[WorkItem]) -> None:
        """Releases the chunks of items that wait for others, unless some of these are gathered from them, too."""
        for held in [each for each in self._order.held if any(self._shares(each, item) for item in waiting)]:
            if not any(self._shares(held, item) for item in others):
                self._order.held.remove(held)
                self._release(held)

    def _shares(self, held: HeldChunk, item: WorkItem) -> bool:
        """Whether a chunk has rows of an item."""
        line = self._line(item)
        return held.chunk.epoch == item.epoch and line < held.end and held.first < line + item.rows

    def place_of(self, item: WorkItem) -> HeldChunk | None:
        """Returns the chunk of an item, if it is loaded or cannot be; None if the item has to wait for it."""
        held = self._order.find(item.epoch, self._line(item))
        return held if held is not None and held.state in (ChunkState.LOADED, ChunkState.FAILED) else None

    def _line(self, item: WorkItem) -> int:
        plan, _ = self._order.planned
        return plan.item_line(item)

    def answered(self, call: int, *, has_result: bool = False) -> None:
        """Records that a call is answered, by whatever; `has_result` says that an item was gathered, whose rows will be
        fetched.
        """
        for held in [each for each in (*self._order.held, *self._used) if call in each.gathers]:
            held.gathers.remove(call)
            if has_result and self._until_fetched:
                held.unfetched.add(call)
            self._drop_if_used(held)

    def forgotten(self, calls: Sequence[int]) -> None:
        """Records that the results of calls are not needed any more."""
        for held in [*self._order.held, *self._used]:
            held.unfetched.difference_update(calls)
            if held in self._used:
                self._drop_if_used(held)

    def gathered(self, item: WorkItem) -> None:
        """Records that an item was gathered. A chunk whose rows were all gathered is dropped."""
        end = self._line(item) + item.rows
        for held in [each for each in self._order.held if self._shares(each, item)]:
            held.taken_rows = max(held.taken_rows, min(held.rows, end - held.first))
            self._drop_if_used(held)

    def _drop_if_used(self, held: HeldChunk) -> None:
        if held in self._used:
            self._used.remove(held)
            self._release(held)
        elif held.taken_rows == held.rows and not held.gathers:
            self._order.held.remove(held)
            self._release(held)

    def _release(self, held: HeldChunk) -> None:
        """Drops a chunk from which no item will be gathered any more, when no call needs it."""
        if held.gathers or held.unfetched:
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
            (self._commands if held.loading.calls else self._drops).append(Drop(held.reader, held.number))

    # Queries.

    def knows(self, call: int) -> bool:
        """Whether a call is an unanswered load of a chunk in the table."""
        return call in self._by_call

    def deadline(self, now: float) -> float:
        """Returns the time at which a pause before a load ends; infinity if there is none."""
        ends = [held.trouble.not_before for held in self._order.held]
        return min((end for end in ends if end > now), default=math.inf)
