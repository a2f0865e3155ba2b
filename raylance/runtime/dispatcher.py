"""Owns which item goes to which helper, what is done again and what must wait, for one pass of one rank, as a state
machine: events in, commands out; never does anything itself. It knows no Ray, no thread and no clock.

An item is a piece of work on its way: read by the reader, decoded by the decoder that is free first, fetched, and
delivered in the order of the plan. Helpers may finish in any order, die, hang, or answer for a pass that is over.
"""

import dataclasses
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto

from raylance.errors import HelperError
from raylance.planning.plan import Plan, WorkItem
from raylance.runtime.crew import Crew
from raylance.runtime.messages import (
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
from raylance.runtime.sizes import Sizes
from raylance.telemetry import Receipt, Stats

logger = logging.getLogger(__name__)

MAX_FAULTS = 3  # of the machines, that one item may see: a fourth is no accident
PAUSES_S = (0.2, 1.0, 5.0)  # before work is done again where nothing died: a store that is full takes time to drain


class _Stage(Enum):
    WAITING = auto()  # for room, for the reader, or for a pause to end
    READING = auto()
    READ = auto()  # and waiting for a decoder
    DECODING = auto()
    DONE = auto()
    FETCHING = auto()
    FAILED = auto()


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Piece:
    """An item on its way, and where it stands.

    Attributes:
        item: The item.
        nbytes: Bytes that it counts for.
        allowed_bytes: Bytes that its raw rows may have.
        faults: Faults of the machines that it has seen.
        not_before: When it may be sent again.
        call: The call that is awaited.
        since: Since when.
        read: The call that read it.
        replaced: Helpers that had been replaced until then.
        decode: The call that decoded it.
        receipts: What both said.
        decodes_there: Whether the reader decodes it.
        error: What it ends with.
    """

    item: WorkItem
    nbytes: float
    allowed_bytes: float
    faults: int = 0
    stage: _Stage = _Stage.WAITING
    not_before: float = 0.0
    call: int | None = None
    since: float = 0.0
    read: int | None = None
    replaced: int = 0
    decode: int | None = None
    receipts: list[Receipt] = dataclasses.field(default_factory=list)
    decodes_there: bool = False
    error: BaseException | None = None

    @property
    def is_sent(self) -> bool:
        """Whether it takes room."""
        return self.stage not in (_Stage.WAITING, _Stage.FAILED)


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
        crew: Crew,
        sizes: Sizes,
        stats: Stats,
        decodes: bool,
        prefetch_batches: int,
        work_timeout_s: float,
        tell: Callable[[WorkItem], str],
    ) -> None:
        """Decides nothing yet.

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
        """
        self._plan, self._rank, self._crew, self._sizes, self._stats = plan, rank, crew, sizes, stats
        self._decodes, self._prefetch, self._work_timeout_s = decodes, max(1, prefetch_batches), work_timeout_s
        self._tell = tell
        self._items: Iterator[WorkItem] = iter(items)
        self._upcoming: deque[WorkItem] = deque()
        self._pieces: deque[_Piece] = deque()
        self._by_call: dict[int, _Piece] = {}
        self._taken = position
        self._ready: deque[tuple[int, float, int]] = deque()  # delivered steps: position behind, bytes, items
        self._open = (0.0, 0)  # bytes and items of the step that is not whole yet; they come on top of the limit
        self._out: list[Command] = []
        self._now = 0.0
        self.is_over = False

    def begin(self, now: float) -> list[Command]:
        """Begins the pass; see `handle`."""
        self._crew.open(now)
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
        self._out += self._crew.due(now)
        if not self.is_over:
            self._advance()
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """When `handle` is to be called unless something happens before; None where only an event changes things."""
        times = [piece.not_before for piece in self._pieces if piece.not_before > self._now]
        times += [p.since + self._work_timeout_s for p in self._pieces if p.stage is _Stage.FETCHING]
        crew = self._crew.deadline()
        return min([*times, *([] if crew is None else [crew])], default=None)

    def close(self) -> list[Command]:
        """Ends the pass; helpers go on with what they have, for nobody."""
        self.is_over = True
        calls = [call for piece in self._pieces for call in (piece.call, piece.read, piece.decode) if call is not None]
        self._pieces.clear()
        self._by_call.clear()
        return [Forget(tuple(calls))] if calls else []

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
                self._taken = position
                while self._ready and self._ready[0][0] <= position:
                    self._ready.popleft()
            case Done(call) | Fetched(call) | Failed(call) | Faulted(call):
                crew.answered(call, now)
                piece = self._by_call.pop(call, None)
                if piece is not None:  # else it comes late, or twice, or for a pass that is over
                    piece.call = None
                    self._answered(piece, event)

    def _answered(self, piece: _Piece, event: Done | Fetched | Failed | Faulted) -> None:
        match event:
            case Done(call, receipt):
                self._done(piece, call, receipt)
            case Fetched(_, plain, decoded):
                self._deliver(piece, plain, decoded)
            case Failed(call, error):
                self._forget(piece, call)
                if piece.item.steps > 1:
                    self._split(piece)  # the steps before the one that fails are still to be delivered
                else:
                    piece.error = error
                    self._again(piece, _Stage.FAILED)
            case Faulted(call, fault):
                self._forget(piece, call)
                logger.warning("work is done again after a fault of the machines (%s)", fault.told)
                # What went with a helper that is known to be gone is that helper's fault, which was counted.
                is_known = piece.read is not None and self._crew.replaced > piece.replaced
                self._again(piece, _Stage.WAITING)
                if not is_known:
                    self._out += self._crew.ask(self._now)
                    if self._blame(piece, fault):
                        piece.not_before = self._now + PAUSES_S[piece.faults - 1]
                        self._split(piece)

    def _done(self, piece: _Piece, call: int, receipt: Receipt) -> None:
        self._stats.add(receipt)
        if receipt.too_large_bytes:
            self._forget(piece, call)
            self._replace(piece, self._sizes.too_large(piece.item, receipt.too_large_bytes), receipt.too_large_bytes)
            return
        piece.receipts.append(receipt)
        if piece.stage is _Stage.READING:
            piece.read, piece.replaced = call, self._crew.replaced
            piece.stage = _Stage.READ if self._decodes and not piece.decodes_there else _Stage.DONE
        else:
            piece.decode, piece.stage = call, _Stage.DONE
        if piece.stage is _Stage.DONE:
            self._sizes.learn(piece.item, piece.receipts)

    def _lost(self, helper: int, fault: Fault) -> None:
        """Has a dead helper replaced, and the work that it had done elsewhere."""
        calls, commands = self._crew.lost(helper, self._now)
        self._out += commands
        pieces = [(call, self._by_call.pop(call)) for call in calls if call in self._by_call]
        if commands:
            self._stats.helpers_replaced += 1
            logger.warning("a helper is replaced, its work is done again (%s)", fault.told)
        for call, piece in pieces:
            self._forget(piece, call)
            self._again(piece, _Stage.READ if piece.stage is _Stage.DECODING else _Stage.WAITING)
            # It was working on the first that it had, and on no other; that may be the work of a pass that is over.
            if call == calls[0] and self._blame(piece, fault):
                self._split(piece)

    def _check_fetch(self) -> None:
        """Has done again what takes too long to get here."""
        head = self._pieces[0] if self._pieces else None
        if head is None or head.call is None or head.stage is not _Stage.FETCHING:
            return
        if self._now >= head.since + self._work_timeout_s:
            call = head.call
            del self._by_call[call]
            head.call = None
            told = f"the results of {self._tell(head.item)} have not arrived for {self._now - head.since:.0f} s"
            self._answered(head, Faulted(call, Fault(told=told, advice="Look at the network and the object stores.")))

    def _again(self, piece: _Piece, stage: _Stage) -> None:
        """Puts a piece back, or out of work; only to be decoded again it keeps what was read."""
        piece.call, piece.stage = None, stage
        if stage is not _Stage.READ:
            self._drop_results(piece)

    def _drop_results(self, piece: _Piece) -> None:
        calls = [call for call in (piece.read, piece.decode) if call is not None]
        piece.read = piece.decode = None
        piece.receipts = []
        if calls:
            self._out.append(Forget(tuple(calls)))

    def _forget(self, piece: _Piece, call: int) -> None:
        piece.call = None
        self._out.append(Forget((call,)))

    def _blame(self, piece: _Piece, fault: Fault) -> bool:
        """Counts a fault of the machines against a piece; returns whether it may be tried once more."""
        piece.faults += 1
        if piece.faults <= MAX_FAULTS:
            return True
        piece.error = HelperError(
            f"the work on the same {piece.item.rows} rows, {self._tell(piece.item)}, was lost {piece.faults} times "
            f"({fault.told}). The epoch stops here. {fault.advice} The runtime says: {fault.error or fault.told}"
        )
        piece.error.__cause__ = fault.error
        self._again(piece, _Stage.FAILED)
        return False

    def _split(self, piece: _Piece) -> None:
        """Puts single steps in the place of a piece, so that a fault concerns the rows of one step."""
        if piece.item.steps > 1:
            self._replace(piece, piece.item.steps, piece.allowed_bytes)

    def _replace(self, piece: _Piece, parts: int, allowed_bytes: float) -> None:
        """Puts smaller pieces in the place of one that has to be read again."""
        self._again(piece, _Stage.WAITING)
        place = self._pieces.index(piece)
        del self._pieces[place]
        for item in reversed(self._plan.cut(piece.item, parts) if parts > 1 else [piece.item]):
            smaller = self._piece(item, allowed_bytes * item.rows / max(1, piece.item.rows))
            smaller.faults, smaller.not_before = piece.faults, piece.not_before
            self._pieces.insert(place, smaller)

    # Decisions.

    def _advance(self) -> None:
        """Takes on, sends and delivers what can be now."""
        if self._crew.failure is not None:
            self._give_up(self._crew.failure)
            return
        self._take_on()
        self._send_reads()
        self._send_decodes()
        head = self._pieces[0] if self._pieces else None
        if head is None:
            self.is_over = self._peek() is None
        elif head.stage is _Stage.FAILED and head.error is not None:
            self._give_up(head.error)
        elif head.stage is _Stage.DONE and head.read is not None and self._crew.is_complete:
            head.stage = _Stage.FETCHING
            self._await(head, self._crew.new_call())
            self._out.append(Fetch(head.call or 0, head.read, head.decode))

    def _give_up(self, error: BaseException) -> None:
        self._out += [*self.close(), GiveUp(error)]

    def _take_on(self) -> None:
        """Takes items on as long as they are wanted and have room."""
        if any(piece.stage is _Stage.FAILED for piece in self._pieces):
            return  # nothing behind it will be delivered
        while (item := self._peek()) is not None:
            reserved = sum(piece.nbytes for piece in self._pieces) + self._ready_bytes
            piece = self._piece(item)
            if (self._pieces or self._ready) and reserved + piece.nbytes > self._sizes.limit_bytes:
                return
            items = len(self._pieces) + sum(items for _, _, items in self._ready) + self._open[1]
            ahead = -(-(item.position - self._taken) // self._plan.global_batch_size)
            if items > 2 * max(1, self._crew.decoders_running) and ahead >= self._prefetch:
                return
            self._pieces.append(piece)
            self._upcoming.popleft()

    def _peek(self) -> WorkItem | None:
        """The next item, cut where its rows have turned out larger than they were thought to be."""
        if not self._upcoming:
            self._upcoming.extend(itertools.islice(self._items, 1))
        while self._upcoming and (parts := self._sizes.parts(self._upcoming[0])) > 1:
            self._upcoming.extendleft(reversed(self._plan.cut(self._upcoming.popleft(), parts)))
        return self._upcoming[0] if self._upcoming else None

    def _piece(self, item: WorkItem, allowed_bytes: float = 0.0) -> _Piece:
        """An item and what it may have: by what rows have had so far, or as much as it is known to have."""
        thought = self._sizes.allowed(item.rows)
        extra = max(0.0, allowed_bytes - thought)
        return _Piece(item=item, nbytes=self._sizes.worth(item.rows) + extra, allowed_bytes=thought + extra)

    @property
    def _ready_bytes(self) -> float:
        return sum(nbytes for _, nbytes, _ in self._ready)

    def _has_room(self, piece: _Piece) -> bool:
        used = sum(other.nbytes for other in self._pieces if other.is_sent) + self._ready_bytes
        # What is awaited first may always go, or nothing would ever be delivered.
        return used + piece.nbytes <= self._sizes.limit_bytes or (piece is self._pieces[0] and not self._ready)

    def _send_reads(self) -> None:
        for piece in self._pieces:
            if piece.stage is not _Stage.WAITING or piece.not_before > self._now:
                continue
            reader = self._crew.reader(proven=piece.faults > 0)
            if reader is None or not self._has_room(piece):
                return
            piece.stage, piece.not_before = _Stage.READING, 0.0
            piece.decodes_there = self._decodes and self._crew.reader_decodes
            call = self._await(piece, self._crew.send(reader, self._now))
            self._out.append(Read(call, reader, piece.item, piece.decodes_there, max(1, int(piece.allowed_bytes))))

    def _send_decodes(self) -> None:
        for piece in self._pieces:
            if piece.stage is not _Stage.READ or piece.read is None:
                continue
            if self._crew.reader_decodes:  # the last decoder is gone: what is read is read again, and decoded there
                self._again(piece, _Stage.WAITING)
                continue
            decoder = self._crew.decoder(proven=piece.faults > 0)
            if decoder is not None:
                piece.stage = _Stage.DECODING
                call = self._await(piece, self._crew.send(decoder, self._now))
                self._out.append(Decode(call, decoder, piece.read, piece.item.epoch))
        if self._crew.reader_decodes:
            self._send_reads()

    def _await(self, piece: _Piece, call: int) -> int:
        piece.call, piece.since = call, self._now
        self._by_call[call] = piece
        return call

    def _deliver(self, piece: _Piece, plain: object, decoded: object) -> None:
        """Hands the oldest piece on, and counts it until its last step is taken."""
        self._pieces.popleft()
        item = piece.item
        self._out.append(Deliver(item, plain, decoded))
        self._drop_results(piece)
        nbytes, items = self._open
        self._open = (nbytes + piece.nbytes, items + 1)
        low, high = self._plan.rank_slice(item.position, self._rank)
        if item.steps > 1 or item.high == high - low:
            last = item.position + (item.steps - 1) * self._plan.global_batch_size
            self._ready.append((self._plan.after(last), *self._open))
            self._open = (0.0, 0)
