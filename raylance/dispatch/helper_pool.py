"""The state of a loader's helpers: which run, start or are wanted, and what each of them owes."""

import dataclasses
import itertools
import logging
import math

from raylance.dispatch.messages import (
    Dismiss,
    Fault,
    GiveUp,
    GiveUpPlacing,
    Kind,
    Log,
    Output,
    Ping,
    Place,
)
from raylance.dispatch.states import HelperState, change
from raylance.errors import HelperError

_QUEUED = 2  # calls at a decoder: one in progress and one that waits, so that the decoder is never idle
_PATIENCE_S = 5.0  # the time for decoders to start (most take 2 to 3 s) before readers decode instead
_PAUSE_S = 1.0  # before a helper that died during its start is replaced


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class OwedCalls:
    """What a helper owes of one kind of calls, which it begins in order: unanswered calls, with their times."""

    sent: dict[int, float] = dataclasses.field(default_factory=dict)
    heard_at: float = 0.0  # time of the last answer

    def owed_since(self, pinged_at: float = math.inf) -> float:
        """Returns the time since which an answer is owed; infinity if none is."""
        return max(self.heard_at, min(next(iter(self.sent.values()), math.inf), pinged_at))


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Helper:
    """The state of one helper, as far as the pool knows it.

    Attributes:
        place_at: When to request its place, if it is wanted.
        deadline: When the pool gives it up if it does not run yet.
        pings: Number of unanswered pings, each sent because of a fault.
        pinged_at: Time of the first unanswered ping.
        work: Its gathering calls or decodes.
        loads: Its loads, which go on beside other calls.
    """

    kind: Kind
    place_at: float
    deadline: float
    state: HelperState = HelperState.WANTED
    has_worked: bool = False
    pings: int = 0
    pinged_at: float = 0.0
    work: OwedCalls = dataclasses.field(default_factory=OwedCalls)
    loads: OwedCalls = dataclasses.field(default_factory=OwedCalls)

    @property
    def is_running(self) -> bool:
        """Whether the helper runs."""
        return self.state is HelperState.RUNNING

    def change(self, state: HelperState) -> None:
        """Changes the state, see `raylance.dispatch.states`."""
        self.state = change(self.state, state)

    def silent_since(self) -> float:
        """Returns the time since which the helper owes an answer; infinity if it owes none."""
        return min(self.work.owed_since(self.pinged_at if self.pings else math.inf), self.loads.owed_since())


class HelperPool:
    """The readers of one loader, at least one, and its decoders. The pool outlives passes, as its helpers do.

    Attributes:
        wanted: Number of helpers to have, by kind.
        replaced: Number of helpers that ran and were lost.
        failure: The output that ends the pass because the pool cannot continue; None while it can.
    """

    def __init__(
        self, *, readers: int, decoders: int, needs_decoder: bool, placement_timeout_s: float, work_timeout_s: float
    ) -> None:
        """Sets the numbers of helpers; `open` requests the helpers.

        If some helpers cannot be placed, the pool continues with a warning; if no reader can, it fails. If no decoder
        can be placed, the pool fails if `needs_decoder`; otherwise readers decode. A helper may take
        `placement_timeout_s` to run; a helper that owes an answer for `work_timeout_s` counts as hung.
        """
        self.wanted: dict[Kind, int] = {"reader": readers, "decoder": decoders}
        self._asked = dict(self.wanted)  # not reduced if some cannot be placed
        self.needs_decoder = needs_decoder
        self._placement_timeout_s, self._work_timeout_s = placement_timeout_s, work_timeout_s
        self._helpers: dict[int, Helper] = {}
        self._numbers, self._calls = itertools.count(), itertools.count()
        self.replaced = 0
        self._is_patient = True  # whether items wait for decoders that start: not after none has found a place
        self.failure: GiveUp | GiveUpPlacing | None = None

    def open(self, now: float) -> None:
        """Begins a pass; adds helpers if the pool has none. Helpers that do not run yet get their full time to start,
        because their deadlines were not watched between passes.
        """
        if not self._helpers:
            self._want("reader", now, now)  # other readers follow once it runs: the first batch needs only one
            self._want_missing("decoder", now)
        for helper in self._helpers.values():
            helper.place_at, helper.deadline = now, now + self._placement_timeout_s

    def _want_missing(self, kind: Kind, now: float) -> None:
        for _ in range(self.wanted[kind] - self._count(kind)):
            self._want(kind, now, now + self._placement_timeout_s)

    def _want(self, kind: Kind, place_at: float, deadline: float) -> None:
        self._helpers[next(self._numbers)] = Helper(kind=kind, place_at=place_at, deadline=deadline)

    # Queries of the dispatcher.

    def decoder(self, *, responsive: bool, fresh: bool = False) -> int | None:
        """Returns the running decoder with the fewest calls that has room for one more; None if there is none.

        `responsive` leaves out decoders that owe the answer to a ping: several may have died at once, and repeated work
        must not go to the next dead one. `fresh` asks for a decoder that has not worked yet or, if no decoder is about
        to start, for an idle one.
        """
        if fresh:
            idle = [number for number in self.running("decoder", responsive) if not self._helpers[number].work.sent]
            starts = len(self.running("decoder")) < self._count("decoder")
            new = [number for number in idle if not self._helpers[number].has_worked]
            return next(iter(new if starts else new + idle), None)
        able = [number for number in self.running("decoder", responsive) if self.has_room(number)]
        return min(able, key=lambda number: len(self._helpers[number].work.sent), default=None)

    def has_room(self, helper: int) -> bool:
        """Whether a running helper has few calls, so that one more does not wait for long."""
        return len(self._helpers[helper].work.sent) < _QUEUED

    def running(self, kind: Kind, responsive: bool = False) -> list[int]:
        """Returns the numbers of a kind's running helpers; `responsive` leaves out those that owe a ping's answer."""
        return [
            number
            for number, helper in self._helpers.items()
            if helper.kind == kind and helper.state is HelperState.RUNNING and not (responsive and helper.pings)
        ]

    def _count(self, kind: Kind) -> int:
        return sum(helper.kind == kind for helper in self._helpers.values())

    @property
    def readers_at_work(self) -> int:
        """Number of readers that have answered a call; the others do not help yet."""
        return sum(self._helpers[number].has_worked for number in self.running("reader"))

    @property
    def decoders_busy(self) -> int:
        """Number of decoders that have work."""
        return sum(bool(self._helpers[number].work.sent) for number in self.running("decoder"))

    def resize(self, kind: Kind, wanted: int, now: float) -> list[Output]:
        """Changes the number of helpers: adds missing ones; dismisses surplus ones, first those that do not run yet,
        then idle ones, others later.
        """
        self.wanted[kind] = self._asked[kind] = wanted
        self._want_missing(kind, now)
        surplus = self._count(kind) - wanted
        if surplus <= 0:
            return []
        coming = [n for n, helper in self._helpers.items() if helper.kind == kind and not helper.is_running]
        idle = [n for n in self.running(kind) if not self._helpers[n].work.sent and not self._helpers[n].loads.sent]
        commands: list[Output] = []
        for number in [*reversed(coming), *idle][:surplus]:
            helper = self._helpers.pop(number)
            if helper.state is not HelperState.WANTED:  # else the runtime does not know it
                commands.append(Dismiss(number, is_lost=False))
            helper.change(HelperState.GONE)
        return commands

    def reader_decodes(self, now: float) -> bool:
        """Returns whether a reader has to decode the item that it reads now."""
        if not self.wanted["decoder"]:
            return True
        until = self._patient_until()
        return until is not None and now >= until

    def _patient_until(self) -> float | None:
        """Returns the time until which items wait for a decoder that starts; None if readers do not decode. After that
        time readers decode, although they must load all the code of decoders for it.
        """
        if self.needs_decoder or self.running("decoder"):
            return None
        if not self._is_patient:
            return -math.inf
        asked = [h.deadline - self._placement_timeout_s for h in self._helpers.values() if h.kind == "decoder"]
        return max(asked, default=-math.inf) + min(_PATIENCE_S, self._placement_timeout_s)

    def deadline(self, now: float) -> float:
        """Returns the next time at which something changes without an event; infinity if nothing does."""
        until = self._patient_until() if self.wanted["decoder"] else None
        times = [until] if until is not None and until > now else []
        for helper in self._helpers.values():
            if helper.state is HelperState.WANTED:
                times.append(helper.place_at)
            times.append(helper.silent_since() + self._work_timeout_s if helper.is_running else helper.deadline)
        return min(times, default=math.inf)

    # Events and commands.

    def send(self, helper: int, now: float, *, loads: bool = False) -> int:
        """Gives a helper a call, which is a load if `loads`; returns the number of the call."""
        call, found = self.new_call(), self._helpers[helper]
        (found.loads if loads else found.work).sent[call] = now
        return call

    def new_call(self) -> int:
        """Returns a new number for a call, such as for a fetch, which no helper answers."""
        return next(self._calls)

    def answered(self, call: int, now: float) -> bool:
        """Records the answer to a call; returns whether a helper owed it."""
        for number, helper in self._helpers.items():
            for calls in (helper.work, helper.loads):
                if calls.sent.pop(call, None) is not None:
                    helper.has_worked, calls.heard_at = True, now
                    self._runs(number)
                    return True
        return False

    def alive(self, helper: int, now: float) -> None:
        """Records that a helper has started, or that it has answered a ping."""
        found = self._helpers.get(helper)
        if found is not None:
            found.pings, found.work.heard_at = max(0, found.pings - 1), now
            self._runs(helper)
            if found.kind == "reader":  # once a reader runs, the missing readers are added
                self._want_missing("reader", now)

    def _runs(self, number: int) -> None:
        helper = self._helpers[number]
        if not helper.is_running:
            helper.change(HelperState.RUNNING)
            self._is_patient = self._is_patient or helper.kind == "decoder"

    def not_placed(self, helper: int, fault: Fault, permanent: bool, now: float) -> list[Output]:
        """Replaces a helper that died during its start, unless another would die, too (`permanent`), or time is up."""
        found = self._helpers.pop(helper, None)
        if found is None:
            return []
        found.change(HelperState.GONE)
        line = f"a {found.kind} died as it started: {fault.what}"
        if not permanent and now + _PAUSE_S < found.deadline:
            self._want(found.kind, now + _PAUSE_S, found.deadline)
        elif self._is_missed(found.kind):
            error = HelperError(
                f"a {found.kind} could not start: {fault.error or fault.what}. The epoch stops here; the batches "
                "before it are good. Look at its constructor, and at the log of its process."
            )
            self.failure = GiveUp(error)
        else:
            line = self._work_without(found.kind, f"died as it started: {fault.what}")
        return [Log(logging.WARNING, line), Dismiss(helper)]

    def lost(self, helper: int, now: float) -> tuple[Helper | None, list[Output]]:
        """Replaces a helper that ran and is gone. Returns what was known of it, None if it was gone already, and
        commands. It was working on the first of its unanswered calls of each kind.
        """
        found = self._helpers.pop(helper, None)
        if found is None:
            return None, []
        found.change(HelperState.GONE)
        self.replaced += 1
        self._want(found.kind, now, now + self._placement_timeout_s)
        return found, [Dismiss(helper), *self.ping(now, again=True)]  # helpers seldom die alone

    def ping(self, now: float, *, again: bool = False) -> list[Output]:
        """Pings all running helpers after a fault. With `again`, also those that owe the answer to a ping, because that
        answer may be older than the fault.
        """
        pinged = [
            number for number, helper in self._helpers.items() if helper.is_running and (again or not helper.pings)
        ]
        for number in pinged:
            helper = self._helpers[number]
            helper.pinged_at = helper.pinged_at if helper.pings else now
            helper.pings += 1
        return [Ping(number) for number in pinged]

    def hung(self, now: float) -> list[tuple[int, Fault]]:
        """Returns the running helpers that have owed an answer for too long, each with its fault."""
        found = []
        for number, helper in self._helpers.items():
            since = helper.silent_since()
            if helper.is_running and now >= since + self._work_timeout_s:
                what = f"{helper.kind} {number} has not answered for {now - since:.0f} s, which work_timeout_s allows"
                advice = "Look for what hangs in it (storage, a decoder, a transform), or raise work_timeout_s."
                found.append((number, Fault(what=what, advice=advice)))
        return found

    def due(self, now: float) -> list[Output]:
        """Returns commands for the helpers that are to be placed by now."""
        commands: list[Output] = []
        for number, helper in self._helpers.items():
            if helper.state is HelperState.WANTED and now >= helper.place_at:
                helper.deadline += now - helper.place_at  # its time to start begins with the request
                helper.change(HelperState.STARTING)
                commands.append(Place(number, helper.kind))
        return commands

    def late(self, now: float) -> list[Output]:
        """Gives up helpers that have not started in time; continues without them if it can, else fails."""
        late = {n: helper for n, helper in self._helpers.items() if not helper.is_running and now >= helper.deadline}
        for number in late:
            self._helpers.pop(number).change(HelperState.GONE)
        logs: list[Output] = []
        for kind in dict.fromkeys(helper.kind for helper in late.values()):
            if self._is_missed(kind):
                asked = self._asked[kind]
                self.failure = GiveUpPlacing(kind, asked - len(self.running(kind)), asked)
            else:
                why = f"did not start in {self._placement_timeout_s:g} s, which placement_timeout_s allows"
                logs.append(Log(logging.WARNING, self._work_without(kind, why)))
        return [*logs, *map(Dismiss, late)]

    def _work_without(self, kind: Kind, why: str) -> str:
        """Reduces the wanted number to the helpers that are left; returns a line for the log."""
        self.wanted[kind] = min(self.wanted[kind], self._count(kind))  # fewer may be wanted by now
        if kind == "decoder" and not self.wanted[kind]:
            self._is_patient = False
        return (
            f"a {kind} {why}. The loader works with {self._count(kind)} of {self._asked[kind]} {kind}s, with the same "
            "batches, maybe later. Give the cluster CPUs, or ask for fewer."
        )

    def _is_missed(self, kind: Kind) -> bool:
        """Returns whether no helper of a kind is left although the pool cannot continue without one."""
        return not self._count(kind) and (kind == "reader" or self.needs_decoder)
