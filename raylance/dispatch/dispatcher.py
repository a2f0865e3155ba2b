"""The only scheduler of a loader's pass: a state machine without Ray, threads, log or clock. It takes events and times,
and returns outputs.

It decides which blocks of which chunks are loaded by which reader, which items are gathered from them, decoded and
fetched, when a chunk is dropped, which work is done again, and what must wait. Items are delivered in the order of the
plan. Helpers may finish in any order, die, hang, or answer calls of an earlier pass.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from raylance.dispatch.account import Account
from raylance.dispatch.block_work import BlockWork
from raylance.dispatch.chunk_order import HeldChunk
from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.in_flight import InFlight, InFlightItem
from raylance.dispatch.load_ahead import MAX_FAULTS, PAUSES_S, ChunkTable
from raylance.dispatch.messages import (
    Alive,
    Answer,
    Awaited,
    Begin,
    ChunkLost,
    Close,
    Complete,
    Decode,
    Deliver,
    Done,
    Event,
    Failed,
    Fault,
    Faulted,
    Fetch,
    Fetched,
    Forget,
    Gather,
    GiveUp,
    GiveUpPlacing,
    Loaded,
    Lost,
    NotPlaced,
    Observation,
    Output,
    Taken,
    Wanted,
)
from raylance.dispatch.scaling import Scaler
from raylance.dispatch.states import ChunkState, ItemState
from raylance.dispatch.suspects import Advice, Suspects
from raylance.errors import HelperError
from raylance.observe import Receipt
from raylance.observe.observations import Cause, FaultSeen, Status, WorkDone
from raylance.planning.plan import Plan, WorkItem


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What outlives the passes of a loader: its helpers, the chunks that they hold, and what is known of its rows."""

    pool: HelperPool
    chunks: ChunkTable
    account: Account
    suspects: Suspects
    blocks: BlockWork


class Dispatcher:
    """Makes the decisions for one pass of one rank: call `handle` for each event, and at `deadline` if no event came.

    Bytes in flight: An item is sent only if there is room: the item, all items in progress and all whole steps not yet
    taken may together reserve at most `Account.inflight_bytes`. While no whole step waits to be taken, the next item to
    deliver may always be sent, because otherwise nothing would be delivered.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        dp_rank: int,
        epoch: int,
        position: int,
        kept: Kept,
        decodes: bool,
        prefetch_batches: int,
        first_rows: int = 0,
        spans_epochs: bool = False,
        work_timeout_s: float,
        describe: Callable[[WorkItem], str],
        scalers: Sequence[Scaler] = (),
    ) -> None:
        """Takes the pass from the step at `position` to the end of the epoch. With `spans_epochs`, it has later
        epochs, too: their items are begun while the last ones of an epoch are made, so that helpers always have work.

        Items of at least `prefetch_batches` steps are in flight if they have room, more if the decoders need them. For
        `first_rows`, see `Plan.items`. `describe` returns a text that names the rows of an item, for error messages.
        """
        self._pool, self._chunks, self._account, self._suspects = kept.pool, kept.chunks, kept.account, kept.suspects
        self._blocks = kept.blocks
        self._out: list[Output] = []
        start, rows = (dp_rank, epoch, position), self._account.item_rows
        chunks = self._chunks.begin(plan, *start, spans_epochs=spans_epochs)
        items = plan.items(*start, rows, first_rows, chunks=chunks, spans_epochs=spans_epochs)
        self._inflight = InFlight(plan, items, (epoch, position), self._account, prefetch_batches)
        self._scalers, self._decodes, self._work_timeout_s, self._describe = scalers, decodes, work_timeout_s, describe
        self._by_call: dict[int, InFlightItem] = {}
        self._now = 0.0  # time of the last event
        self._loaded_at = 0.0  # time of the last event after which loads could begin
        self._is_over = self._is_wanted = self._is_awaited = False

    def handle(self, event: Event | None, now: float) -> list[Output]:
        """Takes an event and the time in seconds; returns outputs in the order to carry them out, observations first.

        The event is None if the deadline has passed and no event waits. Waiting events must be handed in first, because
        a helper whose answer already waits is not late.
        """
        self._now = now
        if isinstance(event, Close):
            self._close()
        else:
            self._take(event)
            # No load depends on what the consumer takes: the last decision about loads has given each reader all the
            # chunks that it may hold.
            self._decide(loads=not isinstance(event, Awaited | Taken))
        out, self._out = [*self._out, *self._chunks.take_commands()], []
        return sorted(out, key=lambda output: not isinstance(output, Observation))

    def deadline(self) -> float | None:
        """Returns the time at which to hand in None if no event comes first; None if only an event changes anything."""
        times = [self._pool.deadline(self._now), self._chunks.deadline(self._loaded_at)]
        times += [entry.not_before for entry in self._inflight.entries if entry.not_before > self._now]
        head = self._inflight.head
        if head is not None and head.state is ItemState.FETCHING:
            times.append(head.since + self._work_timeout_s)
        first = min(times)
        return None if first == math.inf else first

    # Events.

    def _take(self, event: Event | None) -> None:
        match event:
            case None:
                self._time_passed()
            case Begin() | Wanted() | Awaited() | Taken():
                self._take_of_consumer(event)
            case Loaded() | Done() | Fetched() | Failed() | Faulted():
                self._answered(event)
            case Alive(helper):
                self._pool.alive(helper, self._now)
            case NotPlaced(helper, fault, permanent):
                self._out += self._pool.not_placed(helper, fault, permanent, self._now)
            case Lost(helper, fault):
                self._lost(helper, fault)
            case ChunkLost(number, fault):
                self._out.append(FaultSeen(f"a part of a reader's memory is loaded again ({fault.what})"))
                self._chunks.chunk_lost(number, fault, self._now)

    def _take_of_consumer(self, event: Begin | Wanted | Awaited | Taken) -> None:
        match event:
            case Begin():
                self._pool.open(self._now)
            case Wanted():
                self._is_wanted = True
                for scaler in self._scalers:
                    scaler.begin()
            case Awaited():
                self._is_awaited = True
            case Taken(epoch, position):
                self._is_awaited = False
                self._is_wanted = self._inflight.taken((epoch, position))
                for scaler in self._scalers:
                    self._out += scaler.stepped(self._now)

    def _time_passed(self) -> None:
        for helper, fault in self._pool.hung(self._now):
            self._lost(helper, fault)
        self._check_fetch()
        self._out += self._pool.due(self._now)  # before `late`: a helper that was not requested yet is not late
        self._out += self._pool.late(self._now)

    def _answered(self, event: Answer) -> None:
        is_owed, call = self._pool.answered(event.call, self._now), event.call
        if isinstance(event, Done | Failed | Faulted):
            of_block = self._blocks.answered(event, self._now)
            if of_block is not None:
                self._out += of_block
                if isinstance(event, Done):
                    self._decoded()
                return
        entry = self._by_call.pop(call, None)
        match event:
            case Loaded(_, receipt):
                if is_owed:  # also if the chunk was dropped: else what was read for it would not be counted
                    self._out.append(WorkDone(receipt, 0))
                self._chunks.loaded(event)
            case Failed(_, error) if self._chunks.knows(call):
                self._chunks.failed(call, error)
            case Faulted() if self._chunks.knows(call):
                self._chunks.faulted(call, event.fault, self._now)
            case Done() | Fetched() | Failed() | Faulted() if entry is not None:
                entry.call = None
                self._answered_item(entry, event)
            case _:
                pass  # the answer is late, a second one, or of an earlier pass
        self._chunks.answered(call, has_result=entry is not None and entry.gathered == call)

    def _answered_item(self, entry: InFlightItem, event: Done | Fetched | Failed | Faulted) -> None:
        match event:
            case Done(call, receipt):
                self._done(entry, call, receipt)
            case Fetched(_, plain, decoded):
                self._out.append(Deliver(entry.item, plain, decoded))
                self._inflight.deliver()
                self._drop_results(entry)
            case Failed(call, error):
                self._forget((call,))
                if entry.item.steps > 1:
                    self._split(entry)  # steps before the failing one must still be delivered
                else:
                    self._fail_with(entry, error)
            case Faulted(call, fault):
                self._faulted(entry, call, fault)

    def _done(self, entry: InFlightItem, call: int, receipt: Receipt) -> None:
        is_decoded = entry.state is ItemState.DECODING or entry.decodes_there
        is_there = not receipt.too_large_bytes
        self._out.append(WorkDone(receipt, entry.item.rows if is_there and is_decoded else 0))
        if not is_there:
            self._forget((call,))
            parts = self._account.too_large(entry.item, receipt.too_large_bytes)
            self._replace(entry, parts, receipt.too_large_bytes)
            return
        entry.receipts.append(receipt)
        if is_decoded and entry.item.rows:
            self._decoded()
        if entry.state is ItemState.GATHERING:
            self._chunks.gathered(entry.item)
            entry.gathered, entry.replaced = call, self._pool.replaced
            is_done = not self._decodes or entry.decodes_there
            entry.change(ItemState.DONE if is_done else ItemState.GATHERED)
        else:
            entry.decode = call
            entry.change(ItemState.DONE)
        if entry.state is ItemState.DONE:
            self._account.learn(entry.item, entry.receipts)

    def _decoded(self) -> None:
        """Records that a helper has decoded rows, which items have waited for."""
        self._suspects.has_decoded = True
        for other in self._inflight.entries:
            other.suspicion.waits = False

    def _faulted(self, entry: InFlightItem, call: int, fault: Fault) -> None:
        self._forget((call,))
        self._out.append(FaultSeen(f"work is done again after a fault of the machines ({fault.what})"))
        # If a helper was replaced after the item was gathered, the results were lost with it: a fault counted already.
        is_known = entry.gathered is not None and self._pool.replaced > entry.replaced
        self._again(entry)
        if not is_known:
            self._out += self._pool.ping(self._now)
            if self._blame(entry, fault):
                entry.not_before = self._now + PAUSES_S[entry.faults - 1]
                self._split(entry)

    def _lost(self, helper: int, fault: Fault) -> None:
        """Replaces a helper that died or hangs, and repeats its work with other helpers."""
        found, commands = self._pool.lost(helper, self._now)
        self._out += commands
        if found is None:
            return
        line = f"a helper is replaced, its work is done again ({fault.what})"
        self._out.append(FaultSeen(line, replaces_helper=True))
        calls = list(found.work.sent)
        of_block = self._blocks.lost(helper, calls, fault)
        self._chunks.lost(helper, [*calls, *found.loads.sent], fault, is_at_load=not calls)
        entries = [(call, self._by_call.pop(call)) for call in calls if call in self._by_call]
        decoded = {call for call, entry in entries if entry.state is ItemState.DECODING or entry.decodes_there}
        for call, entry in entries:
            self._forget((call,))
            self._again(entry, ItemState.GATHERED if entry.state is ItemState.DECODING else ItemState.WAITING)
        # The helper worked only on its first call, which may belong to an earlier pass, or to another loader.
        for call, entry in entries[:1]:
            if call != calls[0] or fault.is_of_others:
                continue
            if call in decoded and fault.may_be_rows:
                self._search(entry, fault)
            elif self._blame(entry, fault):
                self._split(entry)
        why = self._blocks.search(of_block, fault) if of_block is not None else ""
        if why and (head := self._inflight.head) is not None:
            self._end_now(self._error_of(head, fault, why))

    def _search(self, entry: InFlightItem, fault: Fault) -> None:
        """Searches an item for a row that ends its decoder's process, see `Suspects`."""
        item, known = entry.item, entry.suspicion
        waiting = sum(other.suspicion.waits for other in self._inflight.entries)
        has_others = self._has_others(entry)
        advice = self._suspects.after_death(
            known, steps=item.steps, rows=item.rows, waiting=waiting, has_others=has_others
        )
        why = f"ended the process of its decoder {known.deaths} times ({fault.what})"
        match advice:
            case Advice.STEPS:
                self._split(entry)
            case Advice.HALVES:
                self._replace(entry, 2, entry.allowed_bytes)
            case Advice.BAD:
                known.given_up = f"it {why}"
            case Advice.WAIT:
                self._again(entry)
            case Advice.END:
                self._fail(entry, fault, f"{why}, and no other row was decoded so far")
                self._end_now(entry.error)

    def _end_now(self, error: BaseException | None) -> None:
        """Marks the next item to deliver as failed with `error`, even if its work might still succeed, so that the pass
        ends now, before this item is delivered.
        """
        head = self._inflight.head
        if head is not None and error is not None and head.state is not ItemState.FAILED:
            if head.call is not None:  # its answer is not needed any more
                del self._by_call[head.call]
                self._forget((head.call,))
            self._fail_with(head, error)

    def _has_others(self, than: InFlightItem | None = None) -> bool:
        """Returns whether rows are left with which decoders may show that they work; failed rows do not come again."""
        return any(_may_be_decoded(entry) for entry in self._inflight.entries if entry is not than)

    def _check_fetch(self) -> None:
        """Repeats work whose results take too long to arrive."""
        head = self._inflight.head
        if head is None or head.call is None or head.state is not ItemState.FETCHING:
            return
        if self._now >= head.since + self._work_timeout_s:
            call = head.call
            del self._by_call[call]
            what = f"the results of {self._describe(head.item)} have not arrived for {self._now - head.since:.0f} s"
            self._faulted(head, call, Fault(what=what, advice="Look at the network and the object stores."))

    def _close(self) -> None:
        """Ends the pass; helpers finish their work, and the results are dropped."""
        self._is_over = True
        kept = [call for entry in self._inflight.entries for call in (entry.call, entry.gathered, entry.decode)]
        calls = tuple(call for call in kept if call is not None)
        self._inflight.entries.clear()
        self._by_call.clear()
        if calls:
            self._forget(calls)

    # Consequences for one item.

    def _again(self, entry: InFlightItem, state: ItemState = ItemState.WAITING) -> None:
        """Moves an item to WAITING, GATHERED or FAILED, if it is not there; it awaits no call then. Only GATHERED keeps
        the rows that were gathered.
        """
        entry.call = None
        if entry.state is not state:
            entry.change(state)
        if state is not ItemState.GATHERED:
            self._drop_results(entry)

    def _fail_with(self, entry: InFlightItem, error: BaseException) -> None:
        """Ends the pass with an error, after the items before this one."""
        entry.error = error
        self._again(entry, ItemState.FAILED)

    def _drop_results(self, entry: InFlightItem) -> None:
        calls = entry.drop_results()
        if calls:
            self._forget(calls)

    def _forget(self, calls: tuple[int, ...]) -> None:
        self._out.append(Forget(calls))
        self._chunks.forgotten(calls)

    def _blame(self, entry: InFlightItem, fault: Fault) -> bool:
        """Counts a machine fault against an item; returns whether the item may be tried again."""
        entry.faults += 1
        if entry.faults <= MAX_FAULTS:
            return True
        self._fail(entry, fault, f"was lost {entry.faults} times ({fault.what})")
        return False

    def _fail(self, entry: InFlightItem, fault: Fault, why: str) -> None:
        """Gives an item an error, which ends the pass after the items before it."""
        self._fail_with(entry, self._error_of(entry, fault, why))

    def _error_of(self, entry: InFlightItem, fault: Fault, why: str) -> HelperError:
        error = HelperError(
            f"the work on the same {entry.item.rows} rows, {self._describe(entry.item)}, {why}. The epoch stops here. "
            f"{fault.advice} The runtime says: {fault.error or fault.what}"
        )
        error.__cause__ = fault.error
        return error

    def _split(self, entry: InFlightItem) -> None:
        """Replaces an item by its single steps, so that a fault affects the rows of one step only."""
        if entry.item.steps > 1:
            self._replace(entry, entry.item.steps, entry.allowed_bytes)

    def _replace(self, entry: InFlightItem, parts: int, allowed_bytes: float) -> None:
        self._again(entry)
        self._inflight.cut(entry, parts, allowed_bytes)

    # Decisions.

    def _decide(self, *, loads: bool) -> None:
        """Has helpers placed, and sends and delivers all items that can be sent and delivered now. Unless `loads`,
        begins loads only if helpers are dismissed, because others load their chunks, or if an item gets a chunk.
        """
        resized = [output for scaler in self._scalers for output in scaler.resize(self._pool, self._now)]
        self._out += resized
        self._out += self._pool.due(self._now)
        if not self._is_over:
            self._advance(loads=loads or bool(resized))
        is_awaited = self._is_wanted and self._is_awaited
        head = self._inflight.head
        is_decoding = head is not None and head.state is ItemState.WAITING and self._chunks.is_decoding(head.item)
        cause = _cause(self._pool, self._inflight, is_decoding=is_decoding) if is_awaited else None
        self._out.append(_status(self._pool, self._inflight, cause))
        is_read = head is not None and head.state in _READ and not head.decodes_there and not is_decoding
        for scaler in self._scalers if self._is_wanted else ():
            scaler.look(self._pool, self._now, is_awaited=is_awaited, is_read=is_read)

    def _advance(self, *, loads: bool) -> None:
        if self._pool.failure is not None:
            self._give_up(self._pool.failure)
            return
        self._inflight.take_on(len(self._pool.running("decoder")) if self._is_wanted else None)
        if self._cut_to_chunks() or loads:
            self._loaded_at = self._now
            self._load()
        self._gather()
        self._send_decodes()
        self._out += self._blocks.send(self._now)
        self._out += self._chunks.take_commands()  # items come first: they are awaited
        head = self._inflight.head
        if head is None:
            if self._inflight.is_over and self._inflight.error is not None:
                self._give_up(GiveUp(self._inflight.error))
            elif self._inflight.is_over:
                self._is_over = True
                self._out.append(Complete())
        elif head.state is ItemState.FAILED and head.error is not None:
            self._give_up(GiveUp(head.error))
        elif head.state is ItemState.DONE and head.gathered is not None:
            head.change(ItemState.FETCHING)
            self._out.append(Fetch(self._await(head, self._pool.new_call()), head.gathered, head.decode))

    def _give_up(self, output: GiveUp | GiveUpPlacing) -> None:
        self._close()
        self._out.append(output)

    def _load(self) -> None:
        readers, responsive = self._pool.running("reader"), self._pool.running("reader", responsive=True)
        self._chunks.load(readers, lambda reader: self._pool.send(reader, self._now, loads=True), self._now, responsive)

    def _cut_to_chunks(self) -> bool:
        """Cuts items that wait so that the rows of each come from one chunk: chunks may have been halved since. Items
        that wait for others to be decoded, or have failed, leave these the room of their chunks. Returns whether an
        item got a chunk of its own, which must be loaded.
        """
        entries, chunks = self._inflight.entries, self._chunks.count
        if any(self._has_to_wait(entry) for entry in entries):
            able = [entry for entry in entries if _may_be_decoded(entry)]
            others = [entry.item for entry in entries if entry.item.rows and entry not in able]
            self._chunks.set_aside(others, [entry.item for entry in able])
        at = 0
        while at < len(self._inflight.entries):
            entry = self._inflight.entries[at]
            at += 1
            if entry.state is ItemState.WAITING and entry.item.rows and not self._has_to_wait(entry):
                rows = self._chunks.together(entry.item)
                if rows < entry.item.rows:
                    self._inflight.cut_at(entry, rows)
                    at -= 1  # the first part is looked at again
        return self._chunks.count > chunks

    def _gather(self) -> None:
        for entry in [*self._inflight.entries]:
            if entry.state is not ItemState.WAITING or entry.not_before > self._now or self._has_to_wait(entry):
                continue
            if not self._inflight.has_room(entry):
                return
            held = self._chunks.place_of(entry.item) if entry.item.rows else None
            if held is not None and held.state is ChunkState.FAILED:
                if self._chunks.try_again(held):
                    self._load()
                elif entry.item.steps == 1:
                    self._fail_as(entry, held)
                else:
                    self._split(entry)  # steps before the failing one must still be delivered
                    self._gather()
                    return
            elif held is not None or not entry.item.rows:
                self._gather_from(held, entry)

    def _fail_as(self, entry: InFlightItem, held: HeldChunk) -> None:
        """Takes the error of a chunk, which cannot be loaded, for that of an item."""
        if isinstance(held.trouble.error, Fault):
            self._fail(entry, held.trouble.error, f"was lost {held.trouble.faults} times ({held.trouble.error.what})")
        elif held.trouble.error is not None:
            self._fail_with(entry, held.trouble.error)

    def _gather_from(self, held: HeldChunk | None, entry: InFlightItem) -> None:
        """Has an item gathered from a loaded chunk; an item without rows by any reader."""
        readers = self._pool.running("reader", responsive=entry.is_hit)
        reader = held.reader if held is not None else next(iter(readers), None)
        if reader is None or reader not in readers:
            return
        entry.change(ItemState.GATHERING)
        entry.not_before = 0.0
        entry.decodes_there = self._decodes and self._pool.reader_decodes(self._now)
        call = self._await(entry, self._pool.send(reader, self._now))
        number = None
        if held is not None:
            held.gathers.add(call)
            number = held.number
        allowed, given_up = max(1, int(entry.allowed_bytes)), entry.suspicion.given_up
        self._out.append(Gather(call, reader, entry.item, number, entry.decodes_there, allowed, given_up))

    def _has_to_wait(self, entry: InFlightItem) -> bool:
        return entry.suspicion.waits and self._has_others()

    def _send_decodes(self) -> None:
        # A row that needs a fresh decoder comes first: other items would use the fresh decoder up.
        gathered = [entry for entry in self._inflight.entries if entry.state is ItemState.GATHERED]
        gathers_again = False
        for entry in sorted(gathered, key=lambda entry: not entry.is_suspect):
            if entry.gathered is None or self._has_to_wait(entry):
                continue
            if self._pool.reader_decodes(self._now):  # no decoders: the item is gathered again, and its reader decodes
                gathers_again = True
                self._again(entry)
                continue
            decoder = self._pool.decoder(responsive=entry.is_hit, fresh=entry.is_suspect)
            if decoder is not None:
                entry.change(ItemState.DECODING)
                call = self._await(entry, self._pool.send(decoder, self._now))
                self._out.append(Decode(call, decoder, entry.gathered, entry.item.epoch, entry.suspicion.given_up))
        if gathers_again:
            self._cut_to_chunks()
            self._load()
            self._gather()

    def _await(self, entry: InFlightItem, call: int) -> int:
        entry.call, entry.since = call, self._now
        self._by_call[call] = entry
        return call


_READ = ItemState.WAITING, ItemState.GATHERING  # the item waits for its reader


def _may_be_decoded(entry: InFlightItem) -> bool:
    """Whether decoders may show by these rows that they work."""
    return entry.item.rows > 0 and not entry.suspicion.waits and entry.state is not ItemState.FAILED


def _status(pool: HelperPool, inflight: InFlight, cause: Cause | None) -> Status:
    return Status(
        readers=len(pool.running("reader")),
        readers_wanted=pool.wanted["reader"],
        decoders=len(pool.running("decoder")),
        decoders_wanted=pool.wanted["decoder"],
        decoders_busy=pool.decoders_busy,
        inflight_items=len(inflight.entries),
        inflight_bytes=int(inflight.used_bytes),
        cause=cause,
    )


def _cause(pool: HelperPool, inflight: InFlight, *, is_decoding: bool) -> Cause:
    """Returns the cause of the trainer's wait for the next item to deliver; `is_decoding` says that the item waits for
    blocks to be decoded.
    """
    head = inflight.head
    if not pool.running("reader"):
        return "start"
    if inflight.has_ready or head is None or head.state in (ItemState.DONE, ItemState.FETCHING, ItemState.FAILED):
        return "finish"
    if is_decoding or head.state in (ItemState.GATHERED, ItemState.DECODING):
        return "decode" if pool.running("decoder") else "start" if pool.wanted["decoder"] else "there"
    return "there" if head.decodes_there else "read"
