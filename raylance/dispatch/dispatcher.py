"""Owns which item goes to which helper, what is done again and what must wait, for one pass of one rank, as a state
machine: events in, commands out; never does anything itself. It knows no Ray, no thread and no clock.

An item is a piece of work on its way: read by the reader whose turn it is, decoded by the decoder that is free first,
fetched, and delivered in the order of the plan. Helpers may finish in any order, die, hang, or answer for a pass that
is over.
"""

from collections.abc import Callable, Iterable, Sequence

from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.in_flight import InFlight, InFlightItem, Stage
from raylance.dispatch.messages import (
    Alive,
    Command,
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
    Lost,
    NotPlaced,
    Placed,
    Read,
    Taken,
)
from raylance.dispatch.scaling import Scaler
from raylance.dispatch.sizes import Sizes
from raylance.dispatch.wait_causes import note, warn
from raylance.errors import HelperError
from raylance.observe import Receipt, Stats
from raylance.planning.plan import Plan, WorkItem

MAX_FAULTS = 3  # of the machines, that one item may see: a fourth is no accident
PAUSES_S = (0.2, 1.0, 5.0)  # before work is done again where nothing died: a store that is full takes time to drain


class Dispatcher:
    """Decides for one pass of one rank; see the module.

    Bytes in flight: an item is sent where it has room, that is, where it and all that is on its way or delivered as a
    whole step and not taken yet count for `limit_bytes` at most. What is awaited first may always go while no whole
    step waits to be taken, or nothing would ever be delivered; so may the next parts of a step that is not whole.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        items: Iterable[WorkItem],
        position: int,
        crew: HelperPool,
        sizes: Sizes,
        stats: Stats,
        decodes: bool,
        prefetch_batches: int,
        work_timeout_s: float,
        tell: Callable[[WorkItem], str],
        scalers: Sequence[Scaler] = (),
    ) -> None:
        """Decides nothing yet.

        While `is_wanted` is False, nobody has asked for the pass: only its first steps are made. `is_awaited` says
        whether the consumer waits.

        Args:
            plan: The plan of the items.
            rank: Whose they are.
            items: The items of the pass, in the order of delivery.
            position: Position of the first step.
            crew: The loader's helpers.
            sizes: What items are thought to have.
            stats: Counters to add to.
            decodes: Whether rows are decoded at all.
            prefetch_batches: Steps to keep in flight at the least; more where the decoders need it.
            work_timeout_s: Seconds that results may take to get here.
            tell: Names the rows of an item, for an error.
            scalers: Say how many helpers of a kind there should be, where that may change.
        """
        self._inflight = InFlight(plan, rank, items, position, sizes, prefetch_batches)
        self._crew, self._sizes, self._stats = crew, sizes, stats
        self._decodes, self._work_timeout_s, self._tell, self._scalers = decodes, work_timeout_s, tell, scalers
        self._by_call: dict[int, InFlightItem] = {}
        self._out: list[Command] = []
        self._now = 0.0
        self._plan = plan
        self.is_over = False
        self.is_wanted, self.is_awaited = True, False

    def begin(self, now: float) -> list[Command]:
        """Begins the pass; see `handle`."""
        self._crew.open(now)
        for scaler in self._scalers:
            scaler.begin()
        return self._decide(now)

    def handle(self, event: Event | None, now: float) -> list[Command]:
        """Takes an event, or None where there is none and time has passed: what has an answer that is here and was not
        told yet is not late.

        Args:
            event: What happened.
            now: Seconds of the runtime's clock.

        Returns:
            What to do, in this order.
        """
        self._now = now
        if event is not None:
            self._take(event)
        else:
            for helper, fault in self._crew.hung(now):
                self._lost(helper, fault)
            self._check_fetch()
            self._out += self._crew.late(now)
        return self._decide(now)

    def _decide(self, now: float) -> list[Command]:
        self._now = now
        for scaler in self._scalers:
            self._out += scaler.ask(self._crew, now)
        self._out += self._crew.due(now)
        if not self.is_over:
            self._advance()
        is_awaited = self.is_wanted and self.is_awaited
        note(self._stats, self._crew, self._inflight, now, is_awaited=is_awaited)
        head = self._inflight.head
        is_read = head is not None and head.stage is Stage.READING and not head.decodes_there
        for scaler in self._scalers if self.is_wanted else ():
            scaler.look(self._crew, now, is_awaited=self.is_awaited, is_read=is_read)
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """When `handle` is to be called unless something happens before; None where only an event changes things."""
        times = [piece.not_before for piece in self._inflight.pieces if piece.not_before > self._now]
        times += [p.since + self._work_timeout_s for p in self._inflight.pieces if p.stage is Stage.FETCHING]
        crew = self._crew.deadline(self._now)
        return min([*times, *([] if crew is None else [crew])], default=None)

    def close(self) -> list[Command]:
        """Ends the pass; helpers go on with what they have, for nobody."""
        self.is_over = True
        kept = [call for piece in self._inflight.pieces for call in (piece.call, piece.read, piece.decode)]
        calls = tuple(call for call in kept if call is not None)
        self._inflight.pieces.clear()
        self._by_call.clear()
        return [Forget(calls)] if calls else []

    # Events.

    def _take(self, event: Event) -> None:
        crew, now = self._crew, self._now
        match event:
            case Placed(helper):
                crew.heard(helper, now)
            case Alive(helper):
                crew.alive(helper, now)
            case NotPlaced(helper, fault, hopeless):
                self._out += crew.not_placed(helper, fault, hopeless, now)
            case Lost(helper, fault):
                self._lost(helper, fault)
            case Taken(position):
                self._inflight.taken(position)
                for scaler in self._scalers:
                    scaler.stepped(now)
            case Done(call) | Fetched(call) | Failed(call) | Faulted(call):
                crew.answered(call, now)
                piece = self._by_call.pop(call, None)
                if piece is not None:  # else it comes late, or twice, or for a pass that is over
                    piece.call = None
                    self._answered(piece, event)

    def _answered(self, piece: InFlightItem, event: Done | Fetched | Failed | Faulted) -> None:
        match event:
            case Done(call, receipt):
                self._done(piece, call, receipt)
            case Fetched(_, plain, decoded):
                self._out.append(Deliver(piece.item, plain, decoded))
                self._inflight.deliver()
                self._drop_results(piece)
            case Failed(call, error):
                self._forget(piece, call)
                if piece.item.steps > 1:
                    self._split(piece)  # the steps before the one that fails are still to be delivered
                else:
                    piece.error = error
                    self._again(piece, Stage.FAILED)
            case Faulted(call, fault):
                self._forget(piece, call)
                warn(self._stats, "work is done again after a fault of the machines", fault)
                # What went with a helper that is known to be gone is that helper's fault, which was counted.
                is_known = piece.read is not None and self._crew.replaced > piece.replaced
                self._again(piece, Stage.WAITING)
                if not is_known:
                    self._out += self._crew.ask(self._now)
                    if self._blame(piece, fault):
                        piece.not_before = self._now + PAUSES_S[piece.faults - 1]
                        self._split(piece)

    def _done(self, piece: InFlightItem, call: int, receipt: Receipt) -> None:
        self._stats.lap(self._now)
        self._stats.add(receipt)
        if receipt.too_large_bytes:
            self._forget(piece, call)
            self._replace(piece, self._sizes.too_large(piece.item, receipt.too_large_bytes), receipt.too_large_bytes)
            return
        piece.receipts.append(receipt)
        if piece.stage is Stage.DECODING or piece.decodes_there:
            self._stats.decoded_rows += piece.item.rows
        if piece.stage is Stage.READING:
            piece.read, piece.replaced = call, self._crew.replaced
            piece.stage = Stage.READ if self._decodes and not piece.decodes_there else Stage.DONE
        else:
            piece.decode, piece.stage = call, Stage.DONE
        if piece.stage is Stage.DONE:
            self._sizes.learn(piece.item, piece.receipts)

    def _lost(self, helper: int, fault: Fault) -> None:
        """Has a dead helper replaced, and the work that it had done elsewhere."""
        calls, commands = self._crew.lost(helper, self._now)
        self._out += commands
        pieces = [(call, self._by_call.pop(call)) for call in calls if call in self._by_call]
        if commands:
            self._stats.helpers_replaced += 1
            warn(self._stats, "a helper is replaced, its work is done again", fault)
        for call, piece in pieces:
            self._forget(piece, call)
            self._again(piece, Stage.READ if piece.stage is Stage.DECODING else Stage.WAITING)
            # It was working on the first that it had, and on no other; that may be the work of a pass that is over.
            if call == calls[0] and self._blame(piece, fault):
                self._split(piece)

    def _check_fetch(self) -> None:
        """Has done again what takes too long to get here."""
        head = self._inflight.head
        if head is None or head.call is None or head.stage is not Stage.FETCHING:
            return
        if self._now >= head.since + self._work_timeout_s:
            call = head.call
            del self._by_call[call]
            head.call = None
            told = f"the results of {self._tell(head.item)} have not arrived for {self._now - head.since:.0f} s"
            self._answered(head, Faulted(call, Fault(told=told, advice="Look at the network and the object stores.")))

    def _again(self, piece: InFlightItem, stage: Stage) -> None:
        """Puts a piece back, or out of work; only to be decoded again it keeps what was read."""
        piece.call, piece.stage = None, stage
        if stage is not Stage.READ:
            self._drop_results(piece)

    def _drop_results(self, piece: InFlightItem) -> None:
        calls = piece.results()
        if calls:
            self._out.append(Forget(calls))

    def _forget(self, piece: InFlightItem, call: int) -> None:
        piece.call = None
        self._out.append(Forget((call,)))

    def _blame(self, piece: InFlightItem, fault: Fault) -> bool:
        """Counts a fault of the machines against a piece; returns whether it may be tried once more."""
        piece.faults += 1
        if piece.faults <= MAX_FAULTS:
            return True
        piece.error = HelperError(
            f"the work on the same {piece.item.rows} rows, {self._tell(piece.item)}, was lost {piece.faults} times "
            f"({fault.told}). The epoch stops here. {fault.advice} The runtime says: {fault.error or fault.told}"
        )
        piece.error.__cause__ = fault.error
        self._again(piece, Stage.FAILED)
        return False

    def _split(self, piece: InFlightItem) -> None:
        """Puts single steps in the place of a piece, so that a fault concerns the rows of one step."""
        if piece.item.steps > 1:
            self._replace(piece, piece.item.steps, piece.allowed_bytes)

    def _replace(self, piece: InFlightItem, parts: int, allowed_bytes: float) -> None:
        self._again(piece, Stage.WAITING)
        self._inflight.replace(piece, parts, allowed_bytes)

    # Decisions.

    def _advance(self) -> None:
        """Takes on, sends and delivers what can be now."""
        if self._crew.failure is not None:
            self._give_up(self._crew.failure)
            return
        self._inflight.take_on(self._crew.decoders_running if self.is_wanted else None)
        self._send_reads()
        self._send_decodes()
        head = self._inflight.head
        if head is None:
            self.is_over = self._inflight.is_over
        elif head.stage is Stage.FAILED and head.error is not None:
            self._give_up(head.error)
        elif head.stage is Stage.DONE and head.read is not None and self._crew.is_complete:
            head.stage = Stage.FETCHING
            self._await(head, self._crew.new_call())
            self._out.append(Fetch(head.call or 0, head.read, head.decode))

    def _give_up(self, error: BaseException) -> None:
        self._out += [*self.close(), GiveUp(error)]

    def _send_reads(self) -> None:
        head = self._inflight.head
        if head is not None and head.item.rows:
            self._crew.begin_at(self._plan, head.item.chunk)
        for piece in self._inflight.pieces:
            if piece.stage is not Stage.WAITING or piece.not_before > self._now:
                continue
            if not self._inflight.has_room(piece):
                return
            reader, following, prefetches = self._crew.reader(self._plan, piece.item, proven=piece.faults > 0)
            self._out += prefetches
            if reader is None:
                return
            piece.stage, piece.not_before = Stage.READING, 0.0
            piece.decodes_there = self._decodes and self._crew.reader_decodes(self._now)
            call = self._await(piece, self._crew.send(reader, self._now))
            allowed_bytes = max(1, int(piece.allowed_bytes))
            self._out.append(Read(call, reader, piece.item, piece.decodes_there, allowed_bytes, following))

    def _send_decodes(self) -> None:
        for piece in self._inflight.pieces:
            if piece.stage is not Stage.READ or piece.read is None:
                continue
            if self._crew.reader_decodes(self._now):  # none is left: what is read is read again, and decoded there
                self._again(piece, Stage.WAITING)
                continue
            decoder = self._crew.decoder(proven=piece.faults > 0)
            if decoder is not None:
                piece.stage = Stage.DECODING
                call = self._await(piece, self._crew.send(decoder, self._now))
                self._out.append(Decode(call, decoder, piece.read, piece.item.epoch))
        if self._crew.reader_decodes(self._now):
            self._send_reads()

    def _await(self, piece: InFlightItem, call: int) -> int:
        piece.call, piece.since = call, self._now
        self._by_call[call] = piece
        return call
