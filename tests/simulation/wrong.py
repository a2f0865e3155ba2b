"""Owns what must be caught: mutants of dispatcher, pool, sizes and their parts, each with one place of its source
changed, and what each of them breaks. Those that break nothing are named at the end, with the reason.
"""

import functools
import inspect
import sys
from typing import Any

from raylance.dispatch.dispatcher import Dispatcher
from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.in_flight import InFlight
from raylance.dispatch.read_schedule import ReadSchedule
from raylance.dispatch.sizes import Sizes
from tests.simulation.play import Wrong


def _changed(kind: type, old: str, new: str) -> Any:
    """A class with one place of its source changed."""
    source = inspect.getsource(kind)
    if source.count(old) != 1:
        raise ValueError(f"{kind.__name__} has {old!r} {source.count(old)} times, not once: change this mutant, too")
    names = dict(vars(sys.modules[kind.__module__]))
    exec(source.replace(old, new), names)
    return names[kind.__name__]


def mutant(kind: type, old: str, new: str) -> Wrong:
    """What has one place of a class changed."""
    made = vars(_changed(kind, old, new))
    return Wrong([(kind, name, each) for name, each in made.items() if callable(each) or type(each) is property])


_dispatcher, _pool = functools.partial(mutant, Dispatcher), functools.partial(mutant, HelperPool)
_in_flight, _schedule = functools.partial(mutant, InFlight), functools.partial(mutant, ReadSchedule)


# What each of them breaks. The last eight passed until `strict` was written.
BROKEN: dict[str, tuple[Wrong, str]] = {
    "forgets to send again": (
        _dispatcher(
            "if entry.stage is Stage.DECODING else Stage.WAITING", "if entry.stage is Stage.DECODING else Stage.READING"
        ),
        "deadlock",
    ),
    "delivers twice": (
        _dispatcher(
            "self._out.append(Deliver(entry.item, plain, decoded))",
            "self._out += [Deliver(entry.item, plain, decoded)] * 2",
        ),
        "order",
    ),
    "ignores the byte limit": (_in_flight("return is_next or", "return True or"), "bytes"),
    "waits for the dead": (
        _dispatcher(
            "case Lost(helper, fault):\n                self._lost(helper, fault)", "case Lost():\n                pass"
        ),
        "dead",
    ),
    "blames the innocent": (_dispatcher("if call != calls[0] or fault.is_of_others:", "if False:"), "cause"),
    "gives a row up too soon": (_dispatcher("entry.deaths > MAX_FAULTS", "entry.deaths >= 2"), "cause"),
    "blames a row for what its step did": (_in_flight("min(entry.deaths, SUSPECT_DEATHS)", "entry.deaths"), "cause"),
    "holds a row for ever": (
        _dispatcher("return entry.waits and self._has_others()", "return entry.waits"),
        "deadlock",
    ),
    "holds a row for one without room": (_in_flight("(head.waits and not used)", "False"), "deadlock"),
    "holds a row for one that has failed": (_dispatcher("and entry.stage is not Stage.FAILED", ""), "deadlock"),
    "waits for what nobody needs any more": (_dispatcher("if head.call is not None:", "if False:"), "left"),
    "never halves what ends its decoders": (_dispatcher("elif entry.item.rows > 1:", "elif False:"), "cause"),
    "never gives a row up": (_dispatcher('entry.given_up = f"it {why}"', "pass"), "cause"),
    "counts one cause twice": (_dispatcher("entry.faults += 1", "entry.faults += 2"), "cause"),
    "forgets to forget": (
        _dispatcher(
            "        if calls:\n            self._out.append(Forget(calls))\n\n    def _blame", "\n    def _blame"
        ),
        "left",
    ),
    "leaves what is on its way": (
        _dispatcher(
            "tuple(call for call in kept if call is not None)", "tuple(call for call in kept if call is not None)[1:]"
        ),
        "left",
    ),
    "loses a step at a split": (
        _dispatcher(
            "self._replace(entry, entry.item.steps, entry.allowed_bytes)",
            """
            at = self._inflight.entries.index(entry)
            self._replace(entry, entry.item.steps, entry.allowed_bytes)
            del self._inflight.entries[at]""",
        ),
        "order",
    ),
    "loses the rest of a cut": (
        _in_flight(
            "for item in reversed(self._plan.cut(entry.item, parts)):",
            "for item in self._plan.cut(entry.item, parts)[:1]:",
        ),
        "order",
    ),
    "never takes time for the end": (
        _dispatcher("return min([*times, *([] if of_pool is None else [of_pool])], default=None)", "return None"),
        "deadline",
    ),
    "takes time before events": (  # as it was: what has answered, and was not handed in yet, is late
        _dispatcher(
            "            self._take(event)\n", "            self._time_passed()\n            self._take(event)\n"
        ),
        "pool",
    ),
    "never sees what is taken": (_dispatcher("                self._inflight.taken(position)\n", ""), "deadlock"),
    "decodes nothing": (
        _dispatcher(
            "            if entry.read is None or self._has_to_wait(entry):\n",
            """
            entry.stage = Stage.DONE if entry.stage is Stage.READ else entry.stage
            if True:
""",
        ),
        "order",
    ),
    "delivers what is done first": (
        _dispatcher(
            "        self._send_decodes()\n        head",
            """
        self._send_decodes()
        entries = self._inflight.entries
        done = [entry for entry in entries if entry.stage is Stage.DONE]
        if done and entries[0].stage is Stage.READING:
            entries.remove(done[0])
            entries.appendleft(done[0])
        head""",
        ),
        "order",
    ),
    "forgets what it learned": (
        _dispatcher("self._replace(entry, parts, receipt.too_large_bytes)", "self._again(entry, Stage.WAITING)"),
        "liveness",
    ),
    "raises too early": (
        _dispatcher(
            "        self._send_decodes()\n        head = self._inflight.head",
            """
        self._send_decodes()
        failed = [entry for entry in self._inflight.entries if entry.error is not None]
        head = failed[0] if failed else self._inflight.head""",
        ),
        "cause",
    ),
    "fetches for ever": (_dispatcher("if self._now >= head.since + self._work_timeout_s:", "if False:"), "deadline"),
    "pauses for ever": (_dispatcher("PAUSES_S[entry.faults - 1]", "1e9"), "deadline"),
    "forgets faults at a split": (
        _in_flight(
            "smaller.faults, smaller.not_before = entry.faults, entry",
            "smaller.not_before = entry",
        ),
        "cause",
    ),
    "sends to the dead": (
        _pool(
            "found = self._helpers.pop(helper, None)\n        if found is None:\n            return [], []",
            """
        found = self._helpers.get(helper)
        if found is None:
            return [], []""",
        ),
        "dead",
    ),
    "starts one too many": (
        _pool(
            "self._want(found.kind, now, now + self._placement_timeout_s)\n        return",
            """
        for _ in range(2):
            self._want(found.kind, now, now + self._placement_timeout_s)
        return""",
        ),
        "pool",
    ),
    "never looks for the hung": (_pool("return found\n\n    def due", "return []\n\n    def due"), "deadline"),
    "waits for a sign of life": (  # as it was: one that was asked, and hangs, is awaited for ever
        _pool("elif (since := helper.silent_since())", "elif helper.calls and (since := helper.silent_since())"),
        "deadline",
    ),
    "is impatient": (_pool("now >= helper.deadline}", "now + 15.0 >= helper.deadline}"), "pool"),
    "insists on each decoder": (
        _pool("not self._count(kind) and (kind", "(kind == 'decoder' or not self._count(kind)) and (kind"),
        "pool",
    ),
    "reads wherever it is": (
        _pool(
            "if not running or not item.rows:\n            return next(iter(able), None)",
            """
        if True:  # the one with the fewest calls reads, as with decoders
            return min(able, key=lambda number: len(self._helpers[number].calls), default=None)""",
        ),
        "turns",
    ),
    "leaves its turn to the dead": (
        _schedule("if wanted.reader not in readers", "if wanted.reader == _NO_READER"),
        "liveness",
    ),
    "thinks rows are small": (
        mutant(Sizes, "_MARGIN + self._decoded_bytes)", "_MARGIN + self._decoded_bytes) / 2"),
        "bytes",
    ),
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
        _dispatcher(
            "self._pool.decoder(responsive=entry.is_hit, fresh=entry.is_suspect)",
            "self._pool.decoder(responsive=False, fresh=entry.is_suspect)",
        ),
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
            "if entry.stage is not Stage.WAITING or entry.not_before > self._now or",
            "if entry.stage is not Stage.WAITING or",
        ),
        "pause",
    ),
    "forgets the pause of an item that is split": (
        _in_flight(
            "smaller.faults, smaller.not_before = entry.faults, entry.not_before", "smaller.faults = entry.faults"
        ),
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
        _pool("not self._count(kind) and (kind", "(kind == 'reader' or not self._count(kind)) and (kind"),
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
# events at once, or cost time alone: `tests/unit/dispatch/test_dispatcher.py` catches each. The others change nothing
# that is seen:
#     Dispatcher._close keeps `_by_call`: one event at most follows, because the feeder ends.
#     Sizes.parts cuts nothing: items that turn out larger are cut when they are read, and reserve what they need.
#     InFlight.take_on takes items on after one that failed: they are dropped when the pass is given up.
