"""What else must hold where nothing is lost: that no fault costs more than it has to. Knows a dispatcher by its
events and outputs alone. What can be broken, besides what `watch` says:

    again     a decoder that dies costs no read of the items that waited for it
    pause     work that failed by a fault of the machines is not tried again at once, nor is a helper placed
    pool      a helper that can never start is not placed again; an error for one that did not start in time only where
              the pool cannot continue without it
    turns     a decode goes to the decoder with the fewest calls
    left      the results of a pass that is given up are dropped at once, and not when its last batch is taken
"""

from collections import Counter
from typing import Any

from raylance.dispatch.load_ahead import PAUSES_S
from raylance.dispatch.messages import Decode, Event, Faulted, Gather, GiveUp, GiveUpPlacing, Lost, NotPlaced, Place
from tests.simulation.schedule import Scenario
from tests.simulation.watch import PAUSE_S, Broken, Watch

_EPSILON_S = 1e-6


class StrictWatch(Watch):
    """A watch that also looks at what faults cost."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._event: Event | None = None
        self._refusals: dict[str, list[float]] = {"reader": [], "decoder": []}
        self._hopeless: Counter[str] = Counter()

    def begin(self, *planned: Any, **more: Any) -> None:
        super().begin(*planned, **more)
        self._not_before: dict[tuple[int, int, int], float] = {}  # by epoch, step and row
        self._kept: list[int] = []  # reads whose results must outlive this event
        self._is_given_up = False

    def told(self, event: Event | None) -> None:
        self._event, self._kept = event, []
        if isinstance(event, Faulted):
            seen = self._open.get(event.call)
            if seen is not None and self._is_its_own(seen.command):
                until = float(self._clock_s()) + PAUSES_S[0]
                self._not_before.update(dict.fromkeys(seen.keys, until))
        elif isinstance(event, NotPlaced):
            helper = self._helpers[event.helper]
            if not helper.ended_by:
                self._refusals[helper.kind].append(self._clock_s())
                self._hopeless[helper.kind] += event.permanent
        elif isinstance(event, Lost) and self.scenario.needs_decoder and not self._helpers[event.helper].ended_by:
            waiting = list(self._helpers[event.helper].calls)[1:]  # it was working on the first
            sources = [self._calls[call].command.source for call in waiting if self._is_decode(call)]
            self._kept = [source for source in sources if self._calls[source].has_result]
        super().told(event)

    def commanded(self, command: Any, now: float) -> None:
        match command:
            case Place(_, kind):
                self._check_place(kind, now)
            case Gather(_, _, item):
                if any(self._not_before.get(key, 0.0) > now + _EPSILON_S for key in self._keys(item)):
                    raise Broken("pause", f"{item} is read again at {now:.2f} s, at once after a fault of its own")
            case Decode(_, number, source):
                self._check_fewest(number, source)
            case GiveUpPlacing(kind):
                runs = any(h.kind == kind and h.is_running and not h.ended_by for h in self._helpers.values())
                if runs or (kind == "decoder" and not self.scenario.needs_decoder):
                    raise Broken("pool", f"a {kind} did not start in time, and the others could do its work")
        super().commanded(command, now)
        self._is_given_up = self._is_given_up or isinstance(command, GiveUp | GiveUpPlacing)

    def settled(self, event: Event | None, deadline: float | None, now: float) -> None:
        super().settled(event, deadline, now)
        if self._is_given_up:
            if kept := [call for call, seen in self._calls.items() if seen.has_result] or list(self._open):
                raise Broken("left", f"the pass is given up, and calls {kept} are kept")
        elif dropped := [call for call in self._kept if not self._calls[call].has_result]:
            raise Broken("again", f"what calls {dropped} have read is read again, because a decoder is gone")

    def _clock_s(self) -> float:
        now = self.world.now
        return float(now() if callable(now) else now)

    def _is_decode(self, call: int) -> bool:
        seen = self._calls.get(call)
        return seen is not None and isinstance(seen.command, Decode) and not seen.is_forgotten

    def _check_place(self, kind: str, now: float) -> None:
        if self.scenario.scales:
            return  # what is wanted changes by itself
        is_refused = isinstance(self._event, NotPlaced) and self._helpers[self._event.helper].kind == kind
        if is_refused and not any(at <= now - PAUSE_S + _EPSILON_S for at in self._refusals[kind]):
            raise Broken("pause", f"a {kind} is placed at {now:.2f} s, at once after another one was refused")
        begin = self.scenario.readers if kind == "reader" else self.scenario.decoders
        held = sum(helper.kind == kind and not helper.ended_by for helper in self._helpers.values())
        if held + 1 > max(1, begin - self._hopeless[kind]):
            raise Broken("pool", f"a {kind} is placed at {now:.2f} s, where {self._hopeless[kind]} can never start")

    def _check_fewest(self, number: int, source: int) -> None:
        item = self._calls[source].item if source in self._calls else None
        if item is None or any(key in self._hits for key in self._keys(item)):
            return  # work that is done again goes to those that have answered since
        calls = {n: len(h.calls) for n, h in self._helpers.items() if h.kind == "decoder" and h.is_running}
        running = [count for n, count in calls.items() if not self._helpers[n].ended_by]
        if calls.get(number, 0) > min(running, default=0):
            raise Broken("turns", f"decoder {number} has {calls[number]} calls, and another one has {min(running)}")
