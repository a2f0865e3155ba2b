"""Owns the decisions of one rank's pass: which item goes to which helper, which work is repeated, and which item must
wait; never does the work. It is a state machine without Ray, threads, log or clock: it takes events and times, and
returns outputs.

Each chunk is assigned to a reader, which reads the items of the chunk. A free decoder decodes each item. Then the item
is fetched, and delivered in the order of the plan. Helpers may finish in any order, die, hang, or answer calls of an
earlier pass.
"""

from collections.abc import Callable, Iterable, Sequence

from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.in_flight import SUSPECT_DEATHS, InFlight, InFlightItem, Stage
from raylance.dispatch.messages import (
    Alive,
    Awaited,
    Begin,
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
    GiveUp,
    GiveUpPlacing,
    Lost,
    NotPlaced,
    Observation,
    Output,
    Read,
    Taken,
    Wanted,
)
from raylance.dispatch.scaling import Scaler
from raylance.dispatch.sizes import Sizes
from raylance.errors import HelperError
from raylance.observe import Receipt
from raylance.observe.observations import Cause, FaultSeen, Status, WorkDone
from raylance.planning.plan import Plan, WorkItem

MAX_FAULTS = 3  # machine faults that one item may have; a fourth is not a coincidence
PAUSES_S = (0.2, 1.0, 5.0)  # before work is repeated, if no helper died: a full object store takes time to drain


class Dispatcher:
    """Makes the decisions for one pass of one rank: call `handle` for each event, and at `deadline` if no event came.

    Bytes in flight: An item is sent only if there is room: the item, all items in progress and all whole steps not yet
    taken may together reserve at most `Sizes.limit_bytes`. While no whole step waits to be taken, the next
    item to deliver may always be sent, because otherwise nothing would be delivered.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        dp_rank: int,
        items: Iterable[WorkItem],
        position: int,
        pool: HelperPool,
        sizes: Sizes,
        decodes: bool,
        prefetch_batches: int,
        work_timeout_s: float,
        describe: Callable[[WorkItem], str],
        scalers: Sequence[Scaler] = (),
    ) -> None:
        """Takes the items of the pass in the order of delivery, from the step at `position` on.

        Items of at least `prefetch_batches` steps are in flight if they have room, more if the decoders need them.
        `describe` returns a text that names the rows of an item, for error messages.
        """
        self._inflight = InFlight(plan, dp_rank, items, position, sizes, prefetch_batches)
        self._plan, self._pool, self._sizes, self._scalers = plan, pool, sizes, scalers
        self._decodes, self._work_timeout_s, self._describe = decodes, work_timeout_s, describe
        self._by_call: dict[int, InFlightItem] = {}
        self._out: list[Output] = []
        self._now = 0.0
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
            self._decide()
        out, self._out = self._out, []
        return sorted(out, key=lambda output: not isinstance(output, Observation))

    def deadline(self) -> float | None:
        """Returns the time at which to hand in None if no event comes first; None if only an event changes anything."""
        entries = self._inflight.entries
        times = [entry.not_before for entry in entries if entry.not_before > self._now]
        times += [entry.since + self._work_timeout_s for entry in entries if entry.stage is Stage.FETCHING]
        of_pool = self._pool.deadline(self._now)
        return min([*times, *([] if of_pool is None else [of_pool])], default=None)

    # Events.

    def _take(self, event: Event | None) -> None:
        match event:
            case None:
                self._time_passed()
            case Begin() | Wanted() | Awaited() | Taken():
                self._take_of_consumer(event)
            case Done(call) | Fetched(call) | Failed(call) | Faulted(call):
                self._pool.answered(call, self._now)
                entry = self._by_call.pop(call, None)
                if entry is not None:  # else the answer is late, a second one, or of an earlier pass
                    entry.call = None
                    self._answered(entry, event)
            case Alive(helper):
                self._pool.alive(helper, self._now)
            case NotPlaced(helper, fault, permanent):
                self._out += self._pool.not_placed(helper, fault, permanent, self._now)
            case Lost(helper, fault):
                self._lost(helper, fault)

    def _take_of_consumer(self, event: Begin | Wanted | Awaited | Taken) -> None:
        match event:
            case Begin():
                self._pool.open(self._now)
                for scaler in self._scalers:
                    scaler.begin()
            case Wanted():
                self._is_wanted = True
            case Awaited():
                self._is_awaited = True
            case Taken(position):
                self._is_awaited = False
                self._inflight.taken(position)
                for scaler in self._scalers:
                    self._out += scaler.stepped(self._now)

    def _time_passed(self) -> None:
        for helper, fault in self._pool.hung(self._now):
            self._lost(helper, fault)
        self._check_fetch()
        self._out += self._pool.due(self._now)  # before `late`: a helper that was not requested yet is not late
        self._out += self._pool.late(self._now)

    def _answered(self, entry: InFlightItem, event: Done | Fetched | Failed | Faulted) -> None:
        match event:
            case Done(call, receipt):
                self._done(entry, call, receipt)
            case Fetched(_, plain, decoded):
                self._out.append(Deliver(entry.item, plain, decoded))
                self._inflight.deliver()
                self._drop_results(entry)
            case Failed(call, error):
                self._out.append(Forget((call,)))
                if entry.item.steps > 1:
                    self._split(entry)  # steps before the failing one must still be delivered
                else:
                    entry.error = error
                    self._again(entry, Stage.FAILED)
            case Faulted(call, fault):
                self._faulted(entry, call, fault)

    def _done(self, entry: InFlightItem, call: int, receipt: Receipt) -> None:
        is_decoded = entry.stage is Stage.DECODING or entry.decodes_there
        is_there = not receipt.too_large_bytes
        self._out.append(WorkDone(receipt, entry.item.rows if is_there and is_decoded else 0))
        if not is_there:
            self._out.append(Forget((call,)))
            parts = self._sizes.too_large(entry.item, receipt.too_large_bytes)
            self._replace(entry, parts, receipt.too_large_bytes)
            return
        entry.receipts.append(receipt)
        if is_decoded and entry.item.rows and not self._pool.has_decoded:
            self._pool.decoded()
            for other in self._inflight.entries:
                other.waits = False
        if entry.stage is Stage.READING:
            entry.read, entry.replaced = call, self._pool.replaced
            entry.stage = Stage.READ if self._decodes and not entry.decodes_there else Stage.DONE
        else:
            entry.decode, entry.stage = call, Stage.DONE
        if entry.stage is Stage.DONE:
            self._sizes.learn(entry.item, entry.receipts)

    def _faulted(self, entry: InFlightItem, call: int, fault: Fault) -> None:
        self._out.append(Forget((call,)))
        self._out.append(FaultSeen(f"work is done again after a fault of the machines ({fault.what})"))
        # If a helper was replaced after the read, the results were lost with it, and that fault is counted already.
        is_known = entry.read is not None and self._pool.replaced > entry.replaced
        self._again(entry, Stage.WAITING)
        if not is_known:
            self._out += self._pool.ping(self._now)
            if self._blame(entry, fault):
                entry.not_before = self._now + PAUSES_S[entry.faults - 1]
                self._split(entry)

    def _lost(self, helper: int, fault: Fault) -> None:
        """Replaces a helper that died or hangs, and repeats its work with other helpers."""
        calls, commands = self._pool.lost(helper, self._now)
        self._out += commands
        entries = [(call, self._by_call.pop(call)) for call in calls if call in self._by_call]
        if commands:
            line = f"a helper is replaced, its work is done again ({fault.what})"
            self._out.append(FaultSeen(line, replaces_helper=True))
        decoded = {call for call, entry in entries if entry.stage is Stage.DECODING or entry.decodes_there}
        for call, entry in entries:
            self._out.append(Forget((call,)))
            self._again(entry, Stage.READ if entry.stage is Stage.DECODING else Stage.WAITING)
        # The helper worked only on its first call, which may belong to an earlier pass, or to another loader.
        for call, entry in entries[:1]:
            if call != calls[0] or fault.is_of_others:
                continue
            if call in decoded and fault.may_be_rows:
                self._suspect(entry, fault)
            elif self._blame(entry, fault):
                self._split(entry)

    def _suspect(self, entry: InFlightItem, fault: Fault) -> None:
        """Searches an item for a row that ends its decoder's process: splits the item until one row is left, and has
        fresh decoders try this row. The row is bad after more than `MAX_FAULTS` deaths, two of them of fresh decoders.
        If no row at all has been decoded by then, other rows are tried first.
        """
        was_suspect = entry.is_suspect
        entry.deaths += 1
        if entry.deaths < SUSPECT_DEATHS or entry.item.steps > 1:
            self._split(entry)
        elif entry.item.rows > 1:
            self._replace(entry, 2, entry.allowed_bytes)
        elif was_suspect and entry.deaths > MAX_FAULTS:
            why = f"ended the process of its decoder {entry.deaths} times ({fault.what})"
            entry.waits = not self._pool.has_decoded
            if not entry.waits:
                entry.given_up = f"it {why}"
            elif sum(other.waits for other in self._inflight.entries) > MAX_FAULTS or not self._has_others():
                self._fail(entry, fault, f"{why}, and no other row was decoded so far")
                self._end_now(entry.error)
            else:
                self._again(entry, Stage.WAITING)

    def _end_now(self, error: BaseException | None) -> None:
        """Marks the next item to deliver as failed with `error`, even if its work might still succeed, so that the pass
        ends now, before this item is delivered.
        """
        head = self._inflight.head
        if head is not None:
            head.error = error
            if head.call is not None:  # its answer is not needed any more
                del self._by_call[head.call]
                self._out.append(Forget((head.call,)))
            self._again(head, Stage.FAILED)

    def _has_others(self) -> bool:
        """Returns whether rows are left with which decoders may show that they work; failed rows do not come again."""
        return any(
            entry.item.rows and not entry.waits and entry.stage is not Stage.FAILED for entry in self._inflight.entries
        )

    def _check_fetch(self) -> None:
        """Repeats work whose results take too long to arrive."""
        head = self._inflight.head
        if head is None or head.call is None or head.stage is not Stage.FETCHING:
            return
        if self._now >= head.since + self._work_timeout_s:
            call = head.call
            del self._by_call[call]
            what = f"the results of {self._describe(head.item)} have not arrived for {self._now - head.since:.0f} s"
            self._faulted(head, call, Fault(what=what, advice="Look at the network and the object stores."))

    def _close(self) -> None:
        """Ends the pass; helpers finish their work, and the results are dropped."""
        self._is_over = True
        kept = [call for entry in self._inflight.entries for call in (entry.call, entry.read, entry.decode)]
        calls = tuple(call for call in kept if call is not None)
        self._inflight.entries.clear()
        self._by_call.clear()
        if calls:
            self._out.append(Forget(calls))

    # Consequences for one item.

    def _again(self, entry: InFlightItem, stage: Stage) -> None:
        """Moves an item to WAITING, READ or FAILED; it awaits no call then. Only READ keeps the rows that were read."""
        entry.call, entry.stage = None, stage
        if stage is not Stage.READ:
            self._drop_results(entry)

    def _drop_results(self, entry: InFlightItem) -> None:
        calls = entry.drop_results()
        if calls:
            self._out.append(Forget(calls))

    def _blame(self, entry: InFlightItem, fault: Fault) -> bool:
        """Counts a machine fault against an item; returns whether the item may be tried again."""
        entry.faults += 1
        if entry.faults <= MAX_FAULTS:
            return True
        self._fail(entry, fault, f"was lost {entry.faults} times ({fault.what})")
        return False

    def _fail(self, entry: InFlightItem, fault: Fault, why: str) -> None:
        """Gives an item an error, which ends the pass after the items before it."""
        entry.error = HelperError(
            f"the work on the same {entry.item.rows} rows, {self._describe(entry.item)}, {why}. The epoch stops here. "
            f"{fault.advice} The runtime says: {fault.error or fault.what}"
        )
        entry.error.__cause__ = fault.error
        self._again(entry, Stage.FAILED)

    def _split(self, entry: InFlightItem) -> None:
        """Replaces an item by its single steps, so that a fault affects the rows of one step only."""
        if entry.item.steps > 1:
            self._replace(entry, entry.item.steps, entry.allowed_bytes)

    def _replace(self, entry: InFlightItem, parts: int, allowed_bytes: float) -> None:
        self._again(entry, Stage.WAITING)
        self._inflight.replace(entry, parts, allowed_bytes)

    # Decisions.

    def _decide(self) -> None:
        """Has helpers placed, and sends and delivers all items that can be sent and delivered now."""
        for scaler in self._scalers:
            self._out += scaler.resize(self._pool, self._now)
        self._out += self._pool.due(self._now)
        if not self._is_over:
            self._advance()
        is_awaited = self._is_wanted and self._is_awaited
        self._out.append(_status(self._pool, self._inflight, is_awaited=is_awaited))
        head = self._inflight.head
        is_read = head is not None and head.stage is Stage.READING and not head.decodes_there
        for scaler in self._scalers if self._is_wanted else ():
            scaler.look(self._pool, self._now, is_awaited=is_awaited, is_read=is_read)

    def _advance(self) -> None:
        if self._pool.failure is not None:
            self._give_up(self._pool.failure)
            return
        self._inflight.take_on(len(self._pool.running("decoder")) if self._is_wanted else None)
        self._send_reads()
        self._send_decodes()
        head = self._inflight.head
        if head is None:
            if self._inflight.is_over:
                self._is_over = True
                self._out.append(Complete())
        elif head.stage is Stage.FAILED and head.error is not None:
            self._give_up(GiveUp(head.error))
        elif head.stage is Stage.DONE and head.read is not None:
            head.stage = Stage.FETCHING
            self._out.append(Fetch(self._await(head, self._pool.new_call()), head.read, head.decode))

    def _give_up(self, output: GiveUp | GiveUpPlacing) -> None:
        self._close()
        self._out.append(output)

    def _send_reads(self) -> None:
        head = self._inflight.head
        if head is not None and head.item.rows:
            self._pool.schedule.begin_at(self._plan, head.item.chunk)
        for entry in self._inflight.entries:
            if entry.stage is not Stage.WAITING or entry.not_before > self._now or self._has_to_wait(entry):
                continue
            if not self._inflight.has_room(entry):
                return
            reader, following, prefetches = self._pool.reader(self._plan, entry.item, responsive=entry.is_hit)
            self._out += prefetches
            if reader is None:
                return
            entry.stage, entry.not_before = Stage.READING, 0.0
            entry.decodes_there = self._decodes and self._pool.reader_decodes(self._now)
            call = self._await(entry, self._pool.send(reader, self._now))
            allowed_bytes = max(1, int(entry.allowed_bytes))
            read = Read(call, reader, entry.item, entry.decodes_there, allowed_bytes, following, entry.given_up)
            self._out.append(read)

    def _has_to_wait(self, entry: InFlightItem) -> bool:
        return entry.waits and self._has_others()

    def _send_decodes(self) -> None:
        # A row that needs a fresh decoder comes first: other items would use the fresh decoder up.
        read = [entry for entry in self._inflight.entries if entry.stage is Stage.READ]
        reads_again = False
        for entry in sorted(read, key=lambda entry: not entry.is_suspect):
            if entry.read is None or self._has_to_wait(entry):
                continue
            if self._pool.reader_decodes(self._now):  # no decoders: the item is read again, and its reader decodes
                reads_again = True
                self._again(entry, Stage.WAITING)
                continue
            decoder = self._pool.decoder(responsive=entry.is_hit, fresh=entry.is_suspect)
            if decoder is not None:
                entry.stage = Stage.DECODING
                call = self._await(entry, self._pool.send(decoder, self._now))
                self._out.append(Decode(call, decoder, entry.read, entry.item.epoch, entry.given_up))
        if reads_again:
            self._send_reads()

    def _await(self, entry: InFlightItem, call: int) -> int:
        entry.call, entry.since = call, self._now
        self._by_call[call] = entry
        return call


def _status(pool: HelperPool, inflight: InFlight, *, is_awaited: bool) -> Status:
    return Status(
        readers=len(pool.running("reader")),
        readers_wanted=pool.wanted["reader"],
        decoders=len(pool.running("decoder")),
        decoders_wanted=pool.wanted["decoder"],
        decoders_busy=pool.decoders_busy,
        inflight_items=len(inflight.entries),
        inflight_bytes=int(inflight.used_bytes),
        cause=_cause(pool, inflight) if is_awaited else None,
    )


def _cause(pool: HelperPool, inflight: InFlight) -> Cause:
    """Returns the cause of the trainer's wait for the next item to deliver."""
    head = inflight.head
    if not pool.running("reader"):
        return "start"
    if inflight.has_ready or head is None or head.stage in (Stage.DONE, Stage.FETCHING, Stage.FAILED):
        return "finish"
    if head.stage in (Stage.READ, Stage.DECODING):
        return "decode" if pool.running("decoder") else "start"
    return "there" if head.decodes_there else "read"
