"""Owns mutants made by a reader of the machine who did not write it: each has one place of its source changed, and what
it breaks. Those that break nothing are named at the end, with the reason.
"""

from typing import Any

from raylance.dispatch.dispatcher import Dispatcher
from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.in_flight import InFlight
from tests.simulation.play import Wrong
from tests.simulation.wrong import changed


def _dispatcher(old: str, new: str) -> Wrong:
    return Wrong(dispatcher=changed(Dispatcher, old, new))


def _pool(old: str, new: str) -> Wrong:
    return Wrong(pool=changed(HelperPool, old, new))


def _in_flight(old: str, new: str) -> Wrong:
    kind = changed(InFlight, old, new)

    class WithOtherItems(Dispatcher):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self._inflight.__class__ = kind

    return Wrong(dispatcher=WithOtherItems)


# What each of them breaks. The last eight passed until `strict` was written.
BROKEN: dict[str, tuple[Wrong, str]] = {
    "keeps what an item has read when it is read again": (
        _dispatcher("if stage is not Stage.READ:", "if stage is Stage.FAILED:"),
        "left",
    ),
    "never reads again what no decoder is left for": (
        _dispatcher(
            "                self._again(entry, Stage.WAITING)\n                continue", "                continue"
        ),
        "deadlock",
    ),
    "sends work that is done again to a decoder that may be dead": (
        _dispatcher("self._pool.decoder(responsive=entry.faults > 0)", "self._pool.decoder(responsive=False)"),
        "cause",
    ),
    "takes every lost result for one that went with a known death": (
        _dispatcher("entry.read is not None and self._pool.replaced > entry.replaced", "True"),
        "pause",
    ),
    "looks for a late result a moment after its deadline": (
        _dispatcher("if self._now >= head.since", "if self._now > head.since"),
        "deadline",
    ),
    "gives up a whole item for one bad step": (
        _dispatcher("                if entry.item.steps > 1:\n", "                if False:\n"),
        "cause",
    ),
    "keeps the deadlines of starts that no pass has watched": (
        _pool("            helper.deadline = now + self._placement_timeout_s\n", ""),
        "pool",
    ),
    "dismisses a helper that has work": (
        _pool(
            "idle = [number for number in self.running(kind) if not self._helpers[number].calls]",
            "idle = self.running(kind)",
        ),
        "pool",
    ),
    "does not ping those that owe an answer": (_pool("*self.ping(now, again=True)", "*self.ping(now)"), "cause"),
    "counts a step's bytes without those of its first items": (
        _in_flight("(self._open[0] + entry.reserved_bytes, self._open[1] + 1)", "(0.0, self._open[1] + 1)"),
        "bytes",
    ),
    "puts the parts of an item back in the wrong order": (
        _in_flight("for item in reversed(self._plan.cut(", "for item in (self._plan.cut("),
        "order",
    ),
    "reads again what only waited for a decoder": (
        _dispatcher("Stage.READ if entry.stage is Stage.DECODING else Stage.WAITING", "Stage.WAITING"),
        "again",
    ),
    "tries again at once": (
        _dispatcher(
            "if entry.stage is not Stage.WAITING or entry.not_before > self._now:",
            "if entry.stage is not Stage.WAITING:",
        ),
        "pause",
    ),
    "forgets the pause of an item that is split": (
        _in_flight("smaller.faults, smaller.not_before = entry.faults, entry", "smaller.faults = entry.faults; entry"),
        "pause",
    ),
    "keeps the results of a pass that is given up": (
        _dispatcher(
            "        self._close()\n        self._out.append(output)",
            "        self._is_over = True\n        self._out.append(output)",
        ),
        "left",
    ),
    "places again what can never start": (
        _pool("if not permanent and now + _PAUSE_S < found.deadline:", "if now + _PAUSE_S < found.deadline:"),
        "pool",
    ),
    "cannot do with fewer readers": (
        _pool("return not self._count(kind)  # fewer readers deliver the same rows", "return True"),
        "pool",
    ),
    "gives the busiest decoder more": (
        _pool(
            "return min(able, key=lambda number: len(self._helpers[number].calls), default=None)\n\n    def running",
            "return max(able, key=lambda number: len(self._helpers[number].calls), default=None)\n\n    def running",
        ),
        "turns",
    ),
    "places again at once": (
        _pool("self._want(found.kind, now + _PAUSE_S, found.deadline)", "self._want(found.kind, now, found.deadline)"),
        "pause",
    ),
}

# Mutants that hardly a schedule catches. Eight of the pool (its deadlines, pauses, pings, dismissals) need two rare
# events at once, or cost time alone: `tests/unit/dispatch/test_helper_pool.py` catches each. The others change nothing
# that is seen:
#     Dispatcher._close keeps `_by_call`: one event at most follows, because the feeder ends.
#     Sizes.parts cuts nothing: items that turn out larger are cut when they are read, and reserve what they need.
#     InFlight.take_on takes items on after one that failed: they are dropped when the pass is given up.
