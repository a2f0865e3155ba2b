"""Owns which helpers a loader has, wants and waits for, as a state machine; never starts one, and has no clock."""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable

from raylance.dispatch.messages import Ask, Command, Dismiss, Fault, Kind, Place, Prefetch
from raylance.dispatch.read_schedule import ReadSchedule
from raylance.errors import HelperError, PlacementError
from raylance.planning.plan import Chunk, Plan, WorkItem

logger = logging.getLogger(__name__)

_QUEUED = 2  # calls at a decoder: one in work, and one that waits, so that it never does
_PATIENCE_S = 5.0  # that decoders have to start, which takes two or three, before readers decode in their place
_PAUSE_S = 1.0  # before another helper is placed for one that died as it started


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Helper:
    """What is known of a helper."""

    kind: Kind
    place_at: float | None  # when it is to be placed; None once that was asked for
    late: float  # when it is given up, unless it runs by then
    running: bool = False
    has_worked: bool = False
    heard: float = 0.0  # when it answered last
    asks: int = 0  # signs of life that it owes, each because of a fault
    asked: float = 0.0  # since when it owes them
    calls: dict[int, float] = dataclasses.field(default_factory=dict)  # not answered, in order, with the time

    def silent_since(self) -> float | None:
        """Since when it owes an answer."""
        if not self.calls and not self.asks:
            return None
        first = next(iter(self.calls.values()), math.inf)
        return max(self.heard, min(first, self.asked) if self.asks else first)


class HelperPool:
    """Some readers, at least one, and some decoders. It outlives passes, as helpers do.

    Attributes:
        wanted: Helpers to have, by kind.
        is_complete: Whether all that were insisted upon have run.
        replaced: Helpers that ran and are gone.
        failure: Why there is no going on.
    """

    def __init__(
        self,
        *,
        readers: int,
        decoders: int,
        insists: bool,
        placement_timeout_s: float,
        work_timeout_s: float,
        explain: Callable[[int, int, Kind], str],
    ) -> None:
        """Wants helpers; `open` asks for them.

        Args:
            readers: Readers to have; those that find no place are done without, unless it is all of them.
            decoders: Decoders to have; 0 where the readers decode.
            insists: Whether nothing is delivered before all decoders run, and none left is an error. Otherwise those
                that find no place are done without, and where none runs, the readers decode.
            placement_timeout_s: Seconds that a helper may take to run.
            work_timeout_s: Seconds that a helper may owe an answer before it is taken for hung.
            explain: Says why helpers of a kind have not started: how many of how many.
        """
        self.wanted: dict[Kind, int] = {"reader": readers, "decoder": decoders}
        self._asked = dict(self.wanted)  # before any was done without
        self.insists = insists
        self._placement_timeout_s, self._work_timeout_s, self._explain = placement_timeout_s, work_timeout_s, explain
        self._helpers: dict[int, Helper] = {}
        self._numbers, self._calls = itertools.count(), itertools.count()
        self._has_call: dict[int, int] = {}  # the helper of each call that is not answered
        self._turns = ReadSchedule()
        self.is_complete = False
        self.replaced = 0
        self.failure: Exception | None = None

    def open(self, now: float) -> None:
        """A pass begins: wants the helpers, unless there are some. Those that do not run yet have their time anew, as
        nobody has looked for them in between.
        """
        if not self._helpers:
            self._want("reader", now, now)  # the others when it runs: the first batch waits for it alone
            for _ in range(self.wanted["decoder"]):
                self._want("decoder", now, now)
        for helper in self._helpers.values():
            helper.place_at = None if helper.place_at is None else now
            helper.late = now + self._placement_timeout_s

    def _want_missing(self, kind: Kind, now: float) -> None:
        there = sum(helper.kind == kind for helper in self._helpers.values())
        for _ in range(self.wanted[kind] - there):
            self._want(kind, now, now + self._placement_timeout_s)

    def _want(self, kind: Kind, place_at: float, late: float) -> None:
        self._helpers[next(self._numbers)] = Helper(kind=kind, place_at=place_at, late=late)

    # What the dispatcher asks.

    def begin_at(self, plan: Plan, chunk: Chunk) -> None:
        """Notes that no chunk before this one will be read any more."""
        self._turns.begin_at(plan, chunk)

    def reader(self, plan: Plan, item: WorkItem, *, proven: bool) -> tuple[int | None, Chunk | None, list[Command]]:
        """The reader whose turn an item's chunk is, and what it reads next.

        Args:
            plan: The plan of the item.
            item: The item; where it has no rows, anybody's.
            proven: As of `decoder`.

        Returns:
            The reader, or None while it is not able; the chunk that it reads behind the item's; and what else to do.
        """
        running, able = self._running("reader"), self._running("reader", proven)
        if not running or not item.rows:
            return next(iter(able), None), None, []
        reader, following, begin = self._turns.take(plan, item.rank, item.chunk, running)
        return reader if reader in able else None, following, [Prefetch(n, item.rank, chunk) for n, chunk in begin]

    def decoder(self, *, proven: bool) -> int | None:
        """The running decoder with the fewest calls and room for one, or None.

        Args:
            proven: Leave out those that have not answered since the last fault: where several died at once, work that
                is done again must not go to the next dead one.
        """
        able = [number for number in self._running("decoder", proven) if len(self._helpers[number].calls) < _QUEUED]
        return min(able, key=lambda number: len(self._helpers[number].calls), default=None)

    def _running(self, kind: Kind, proven: bool = False) -> list[int]:
        return [
            number
            for number, helper in self._helpers.items()
            if helper.kind == kind and helper.running and not (proven and helper.asks)
        ]

    @property
    def readers_running(self) -> int:
        """Readers that run."""
        return len(self._running("reader"))

    @property
    def readers_at_work(self) -> int:
        """Readers that have had a turn: the others are no help yet."""
        return sum(self._helpers[number].has_worked for number in self._running("reader"))

    @property
    def decoders_running(self) -> int:
        """Decoders that run."""
        return len(self._running("decoder"))

    @property
    def decoders_busy(self) -> int:
        """Decoders that have work."""
        return sum(bool(self._helpers[number].calls) for number in self._running("decoder"))

    def resize(self, kind: Kind, wanted: int, now: float) -> list[Command]:
        """Wants another number of helpers: more are placed, and of those that have no work, some go.

        Returns:
            What to do. There may be more to do later: those that have work stay.
        """
        self.wanted[kind] = self._asked[kind] = wanted
        self._want_missing(kind, now)
        there = [number for number, helper in self._helpers.items() if helper.kind == kind]
        idle = [number for number in there if self._helpers[number].running and not self._helpers[number].calls]
        gone = idle[: max(0, len(there) - wanted)]
        for number in gone:
            del self._helpers[number]
        return [Dismiss(number, is_lost=False) for number in gone]

    def reader_decodes(self, now: float) -> bool:
        """Whether who reads has to decode it now."""
        if not self.wanted["decoder"]:
            return True
        until = self._patient_until()
        return until is not None and now >= until

    def _patient_until(self) -> float | None:
        """Until when a decoder that starts is waited for, where readers decode then: one that does has to load all that
        decoders load. None where they do not.
        """
        if self.insists or self.decoders_running:
            return None
        asked = [h.late - self._placement_timeout_s for h in self._helpers.values() if h.kind == "decoder"]
        return max(asked, default=-math.inf) + min(_PATIENCE_S, self._placement_timeout_s)

    def deadline(self, now: float) -> float | None:
        """When time alone has something happen."""
        until = self._patient_until()
        times = [until] if until is not None and until > now else []
        for helper in self._helpers.values():
            if helper.place_at is not None:
                times.append(helper.place_at)
            if not helper.running:
                times.append(helper.late)
            elif (since := helper.silent_since()) is not None:
                times.append(since + self._work_timeout_s)
        return min(times, default=None)

    # What happens.

    def send(self, helper: int, now: float) -> int:
        """Notes that a helper is given a call; returns the number of the call."""
        call = next(self._calls)
        self._helpers[helper].calls[call] = now
        self._has_call[call] = helper
        return call

    def new_call(self) -> int:
        """The number of a call that no helper answers."""
        return next(self._calls)

    def answered(self, call: int, now: float) -> None:
        """Notes the answer to a call."""
        number = self._has_call.pop(call, -1)
        helper = self._helpers.get(number)
        if helper is not None:
            del helper.calls[call]
            helper.has_worked = True
            self.heard(number, now)

    def heard(self, helper: int, now: float) -> None:
        """Notes a sign of life."""
        found = self._helpers.get(helper)
        if found is not None:
            found.running, found.heard = True, now
            if found.kind == "reader":
                self._want_missing("reader", now)
        if not self.is_complete and self._running("reader"):
            self.is_complete = not self.insists or self.decoders_running == self.wanted["decoder"]

    def not_placed(self, helper: int, fault: Fault, hopeless: bool, now: float) -> list[Command]:
        """Has another one placed for a helper that died as it started, where there is hope and time."""
        found = self._helpers.pop(helper, None)
        if found is None:
            return []
        logger.warning("a %s died as it started: %s", found.kind, fault.told)
        if not hopeless and now + _PAUSE_S < found.late:
            self._want(found.kind, now + _PAUSE_S, found.late)
        elif self._is_missed(found.kind):
            self.failure = HelperError(
                f"a {found.kind} could not start; what was delivered before is good, nothing follows. Its constructor "
                f"or its process said: {fault.error or fault.told}"
            )
        else:
            self._go_without(found.kind)
        return [Dismiss(helper)]

    def lost(self, helper: int, now: float) -> tuple[list[int], list[Command]]:
        """Has a helper replaced that ran and is gone.

        Returns:
            The calls that it has not answered, in the order in which it was given them: it was working on the first, if
            on any. And what to do.
        """
        found = self._helpers.pop(helper, None)
        if found is None:
            return [], []
        self.replaced += 1
        for call in found.calls:
            del self._has_call[call]
        self._want(found.kind, now, now + self._placement_timeout_s)
        return list(found.calls), [Dismiss(helper), *self.ask(now, again=True)]  # it seldom dies alone

    def alive(self, helper: int, now: float) -> None:
        """Notes that a helper that was asked answers."""
        found = self._helpers.get(helper)
        if found is not None:
            found.asks = max(0, found.asks - 1)
        self.heard(helper, now)

    def ask(self, now: float, *, again: bool = False) -> list[Command]:
        """Asks all that run for a sign of life, after a fault; `again` also those that owe one, which may be on its way
        already and say nothing of what has happened since.
        """
        asked = [number for number, helper in self._helpers.items() if helper.running and (again or not helper.asks)]
        for number in asked:
            helper = self._helpers[number]
            helper.asked = helper.asked if helper.asks else now
            helper.asks += 1
        return [Ask(number) for number in asked]

    def hung(self, now: float) -> list[tuple[int, Fault]]:
        """Running helpers that have owed an answer for too long."""
        found = []
        for number, helper in self._helpers.items():
            since = helper.silent_since()
            if helper.running and since is not None and now >= since + self._work_timeout_s:
                told = f"{helper.kind} {number} has not answered for {now - since:.0f} s, which work_timeout_s allows"
                advice = "Look for what hangs in it (storage, a decoder, a transform), or raise work_timeout_s."
                found.append((number, Fault(told=told, advice=advice)))
        return found

    def due(self, now: float) -> list[Command]:
        """Has helpers placed that are to be placed by now."""
        commands: list[Command] = []
        for number, helper in self._helpers.items():
            if helper.place_at is not None and now >= helper.place_at:
                helper.late += now - helper.place_at  # while nobody looked, it had no chance
                helper.place_at = None
                commands.append(Place(number, helper.kind))
        return commands

    def late(self, now: float) -> list[Command]:
        """Gives helpers up that have not started in time."""
        commands: list[Command] = []
        for number, helper in list(self._helpers.items()):
            if not helper.running and now >= helper.late:
                commands += self._give_up(number, helper)
        return commands

    def _give_up(self, number: int, helper: Helper) -> list[Command]:
        """Works without a helper that has not started in time, where that is possible."""
        del self._helpers[number]
        if self._is_missed(helper.kind):
            asked = self._asked[helper.kind]
            pending = asked - len(self._running(helper.kind))
            self.failure = PlacementError(self._explain(pending, asked, helper.kind))
        else:
            logger.warning("a %s did not start within placement_timeout_s; the loader works without it", helper.kind)
            self._go_without(helper.kind)
        return [Dismiss(number)]

    def _go_without(self, kind: Kind) -> None:
        there = sum(helper.kind == kind for helper in self._helpers.values())
        self.wanted[kind] = min(self.wanted[kind], there)  # it may have been one more than is wanted by now

    def _is_missed(self, kind: Kind) -> bool:
        """Whether there is no going on without one more of a kind."""
        has_others = any(other.kind == kind for other in self._helpers.values())
        if kind == "reader":
            return not has_others  # the same rows come from fewer
        return self.insists and not (self.is_complete and has_others)
