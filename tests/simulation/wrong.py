"""Owns what must be caught: dispatchers, pools and sizes with one fault each, and what each of them breaks."""

import inspect
import sys
from typing import Any

from raylance.dispatch.dispatcher import Dispatcher
from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.in_flight import InFlight, Stage
from raylance.dispatch.messages import Deliver, Event, Fault, Forget, GiveUp, Lost, Output, Taken
from raylance.dispatch.read_schedule import ReadSchedule
from raylance.dispatch.sizes import Sizes
from raylance.observe import Receipt
from raylance.planning.plan import Chunk, Plan, WorkItem
from tests.simulation.play import Wrong

Piece = Any


def changed(kind: type, old: str, new: str) -> Any:
    """A class with one place of its source changed."""
    source = inspect.getsource(kind)
    if source.count(old) != 1:
        raise ValueError(f"{kind.__name__} has {old!r} {source.count(old)} times, not once: change this mutant, too")
    names = dict(vars(sys.modules[kind.__module__]))
    exec(source.replace(old, new), names)
    return names[kind.__name__]


class ForgetsToSendAgain(Dispatcher):
    def _lost(self, helper: int, fault: Fault) -> None:
        waiting = Stage.WAITING
        before = {piece for piece in self._inflight.entries if piece.stage is waiting}
        super()._lost(helper, fault)
        for piece in self._inflight.entries:
            if piece.stage is waiting and piece not in before:
                piece.stage = Stage.READING


class DeliversTwice(Dispatcher):
    def handle(self, event: Event | None, now: float) -> list[Output]:
        return [
            again for command in super().handle(event, now) for again in [command] * (1 + (type(command) is Deliver))
        ]


class HasAlwaysRoom(InFlight):
    def has_room(self, piece: Piece) -> bool:
        return True


class IgnoresTheByteLimit(Dispatcher):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._inflight.__class__ = HasAlwaysRoom


class WaitsForTheDead(Dispatcher):
    def _take(self, event: Event | None) -> None:
        if not isinstance(event, Lost):
            super()._take(event)


class SendsToTheDead(HelperPool):
    def lost(self, helper: int, now: float) -> tuple[list[int], list[Output]]:
        found = self._helpers.get(helper)
        calls, commands = super().lost(helper, now)
        if found is not None:
            found.calls.clear()
            self._helpers[helper] = found
        return calls, commands


class BlamesTheInnocent(Dispatcher):
    def _lost(self, helper: int, fault: Fault) -> None:
        with_work = self._pool._helpers.get(helper)
        innocent = (
            [self._by_call[call] for call in list(with_work.calls)[1:] if call in self._by_call] if with_work else []
        )
        super()._lost(helper, fault)
        for piece in innocent:
            if piece in self._inflight.entries:
                self._blame(piece, fault)


class CountsOneCauseTwice(Dispatcher):
    def _blame(self, piece: Piece, fault: Fault) -> bool:
        piece.faults += 1
        return super()._blame(piece, fault)


class ForgetsToForget(Dispatcher):
    def _drop_results(self, piece: Piece) -> None:
        piece.drop_results()


class LeavesWhatIsOnItsWay(Dispatcher):
    def _close(self) -> None:
        before = len(self._out)
        super()._close()
        self._out[before:] = [Forget(output.calls[1:]) for output in self._out[before:] if isinstance(output, Forget)]


class StartsOneTooMany(HelperPool):
    def lost(self, helper: int, now: float) -> tuple[list[int], list[Output]]:
        found = self._helpers.get(helper)
        if found is not None:
            self._want(found.kind, now, now + self._placement_timeout_s)
        return super().lost(helper, now)


class LosesAStepAtASplit(Dispatcher):
    def _split(self, piece: Piece) -> None:
        if piece.item.steps > 1:
            place = self._inflight.entries.index(piece)
            super()._split(piece)
            del self._inflight.entries[place]


class LosesTheRestOfACut(Dispatcher):
    def _replace(self, piece: Piece, parts: int, allowed_bytes: float) -> None:
        place, count = self._inflight.entries.index(piece), len(self._inflight.entries)
        super()._replace(piece, parts, allowed_bytes)
        if len(self._inflight.entries) > count:
            del self._inflight.entries[place + 1]


class NeverTakesTimeForTheEnd(Dispatcher):
    def deadline(self) -> float | None:
        return None


class NeverLooksForTheHung(HelperPool):
    def hung(self, now: float) -> list[tuple[int, Fault]]:
        return []


class WaitsForASignOfLife(HelperPool):
    """As it was: one that was asked, and hangs, is awaited for ever."""

    def deadline(self, now: float) -> float | None:
        asks = {number: helper.pings for number, helper in self._helpers.items()}
        for helper in self._helpers.values():
            helper.pings = 0
        found = super().deadline(now)
        for number, helper in self._helpers.items():
            helper.pings = asks[number]
        return found


class TakesTimeBeforeEvents(Dispatcher):
    """As it was: what has answered, and was not told yet, is late."""

    def handle(self, event: Event | None, now: float) -> list[Output]:
        for helper, fault in self._pool.hung(now):
            self._lost(helper, fault)
        return super().handle(event, now)


class NeverSeesWhatIsTaken(Dispatcher):
    def _take(self, event: Event | None) -> None:
        if not isinstance(event, Taken):
            super()._take(event)


class DecodesNothing(Dispatcher):
    def _send_decodes(self) -> None:
        for piece in self._inflight.entries:
            if piece.stage is Stage.READ:
                piece.stage = Stage.DONE


class DeliversWhatIsDoneFirst(Dispatcher):
    def _advance(self) -> None:
        done = [piece for piece in self._inflight.entries if piece.stage is Stage.DONE]
        head = self._inflight.entries[0] if self._inflight.entries else None
        if done and head is not None and head.stage is Stage.READING:
            self._inflight.entries.remove(done[0])
            self._inflight.entries.appendleft(done[0])
        super()._advance()


class ThinksRowsAreSmall(Sizes):
    def reserved_bytes(self, rows: int) -> float:
        return super().reserved_bytes(rows) / 2


class ForgetsWhatItLearned(Dispatcher):
    def _done(self, piece: Piece, call: int, receipt: Receipt) -> None:
        if receipt.too_large_bytes:
            self._out.append(Forget((call,)))
            self._again(piece, Stage.WAITING)
            return
        super()._done(piece, call, receipt)


class RaisesTooEarly(Dispatcher):
    def _advance(self) -> None:
        failed = [piece.error for piece in self._inflight.entries if piece.error is not None]
        if failed and failed[0] is not None and not self._is_over:
            self._give_up(GiveUp(failed[0]))
        else:
            super()._advance()


class BeginsWithoutDecoders(HelperPool):
    def open(self, now: float) -> None:
        super().open(now)
        self.is_complete = True


class ReadsWhereverItIs(HelperPool):
    """Whoever has the fewest calls reads, as with decoders."""

    def reader(self, plan: Plan, item: WorkItem, *, responsive: bool) -> tuple[int | None, Chunk | None, list[Output]]:
        able = self.running("reader", responsive)
        return min(able, key=lambda number: len(self._helpers[number].calls), default=None), None, []


class IsImpatient(HelperPool):
    def late(self, now: float) -> list[Output]:
        return super().late(now + 15.0)


class FetchesForEver(Dispatcher):
    def _check_fetch(self) -> None:
        pass


class PausesForEver(changed(Dispatcher, "PAUSES_S[entry.faults - 1]", "1e9")):  # type: ignore[misc]
    pass


ForgetsFaults = changed(
    InFlight, "smaller.faults, smaller.not_before = entry.faults, entry", "smaller.not_before = entry"
)


class ForgetsFaultsAtASplit(Dispatcher):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._inflight.__class__ = ForgetsFaults


KeptTurns = changed(ReadSchedule, "if wanted.reader not in readers", "if wanted.reader == _NO_READER")


class LeavesItsTurnToTheDead(HelperPool):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.schedule = KeptTurns()


# What each of them breaks.
BROKEN: dict[str, tuple[Wrong, str]] = {
    kind.__name__: (Wrong(**{part: kind}), what)
    for part, kinds in {
        "dispatcher": {
            ForgetsToSendAgain: "deadlock",
            DeliversTwice: "order",
            IgnoresTheByteLimit: "bytes",
            WaitsForTheDead: "dead",
            BlamesTheInnocent: "cause",
            CountsOneCauseTwice: "cause",
            ForgetsToForget: "left",
            LeavesWhatIsOnItsWay: "left",
            LosesAStepAtASplit: "order",
            LosesTheRestOfACut: "order",
            NeverTakesTimeForTheEnd: "deadline",
            TakesTimeBeforeEvents: "pool",
            NeverSeesWhatIsTaken: "deadlock",
            DecodesNothing: "order",
            DeliversWhatIsDoneFirst: "order",
            ForgetsWhatItLearned: "liveness",
            RaisesTooEarly: "cause",
            FetchesForEver: "deadline",
            PausesForEver: "deadline",
            ForgetsFaultsAtASplit: "cause",
        },
        "pool": {
            SendsToTheDead: "dead",
            StartsOneTooMany: "pool",
            NeverLooksForTheHung: "deadline",
            WaitsForASignOfLife: "deadline",
            IsImpatient: "pool",
            BeginsWithoutDecoders: "cause",
            ReadsWhereverItIs: "turns",
            LeavesItsTurnToTheDead: "liveness",
        },
        "sizes": {ThinksRowsAreSmall: "bytes"},
    }.items()
    for kind, what in kinds.items()
}
