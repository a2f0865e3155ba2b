"""Owns mutants of the feeder and of the session, made by a reader who wrote neither: each has one place of its source
changed, and what it breaks. Those that break nothing here are named at the end, with the reason.
"""

import functools

from raylance.runtime.feeder import Feeder
from raylance.runtime.session import Session
from tests.simulation.play import Wrong
from tests.simulation.wrong import mutant

_feeder, _session = functools.partial(mutant, Feeder), functools.partial(mutant, Session)

# What each of them breaks. Sixteen passed at first, and led to new checks: of errors that come too early; of batches
# that a pass keeps when it is closed, or makes beyond its room; of deadlines that the feeder misses; of runtimes and
# prepared passes that a session keeps; of a plan's name; of a consumer that asks once more at the end, or prepares in
# mid-pass; of a feeder's thread that is slow while the consumer acts.
BROKEN: dict[str, tuple[Wrong, str]] = {
    "hands out the newest batch first": (_feeder("self._finished.popleft()", "self._finished.pop()"), "order"),
    "never reports what was taken": (_feeder("self._say(Taken(found[1].after))", ""), "deadlock"),
    "reports one step less than was taken": (_feeder("Taken(found[1].after)", "Taken(found[1].before)"), "deadlock"),
    "does not report that it is awaited": (_feeder("            self._say(Awaited())\n", ""), "cause"),
    "does not report that it is wanted": (_feeder("self._say(Wanted())", "..."), "cause"),
    "does not begin": (_feeder("deque([Begin()])", "deque()"), "deadlock"),
    "hands the newest event to the dispatcher first": (_feeder("self._said.popleft()", "self._said.pop()"), "deadlock"),
    "does not wake its thread for an event": (
        _feeder(
            "        self._said.append(event)\n        if self._sleeps:\n            self._runtime.post(Wake())",
            "        self._said.append(event)",
        ),
        "deadlock",
    ),
    "does not wake its thread when it is closed": (
        _feeder("self._changed.notify_all()\n        self._runtime.post(Wake())", "self._changed.notify_all()"),
        "deadlock",
    ),
    "waits for the runtime where the consumer has acted": (
        _feeder("            if self._said:\n                return self._said.popleft()\n", ""),
        "deadlock",
    ),
    "keeps its batches when it is closed": (_feeder("            self._finished.clear()\n", ""), "left"),
    "adds a batch after it was closed": (
        _feeder("if not self._is_closed:\n                self._finished", "if True:\n                self._finished"),
        "left",
    ),
    "begins work after it was closed": (_feeder("if self._is_closed:  # no more", "if False:  # no more"), "left"),
    "drops the last event when it is closed": (
        _feeder("if not isinstance(event, Wake):", "if not (isinstance(event, Wake) or self._is_closed):"),
        "cause",
    ),
    "makes more batches than it has room for": (
        _feeder("            return len(self._finished) < self._room and", "            return"),
        "bytes",
    ),
    "makes one batch more than it has room for": (
        _feeder("else max(1, self._spec.prefetch_batches)", "else 1 + max(1, self._spec.prefetch_batches)"),
        "bytes",
    ),
    "looks at no deadline": (_feeder("deadline = self._dispatcher.deadline()", "deadline = None"), "deadlock"),
    "looks a second after the deadline": (_feeder("max(0.0, deadline -", "1.0 + max(0.0, deadline -"), "deadline"),
    "carries outputs out from last to first": (_feeder("outputs.pop(0)", "outputs.pop()"), "left"),
    "carries out the first output alone": (_feeder("while outputs:", "if outputs:"), "deadlock"),
    "continues after an error": (
        _feeder("self._error, self._is_over = error, True", "self._error = error"),
        "deadlock",
    ),
    "continues after a helper that is late": (
        _feeder("asked))\n                    self._is_over = True", "asked))"),
        "deadlock",
    ),
    "continues after the end": (
        _feeder("Complete():\n                    self._is_over = True", "Complete(): ..."),
        "deadlock",
    ),
    "loses the error": (_feeder("self._error, self._is_over = error, True", "self._is_over = True"), "liveness"),
    "raises the error before the last good batch": (
        _feeder("            if self._finished:\n", "            if self._finished and self._error is None:\n"),
        "order",
    ),
    "does not close the dispatcher": (
        _feeder("        self._do(self._dispatcher.handle(Close(), now), now)\n        with", "        with"),
        "left",
    ),
    "does not notify of its end": (
        _feeder("self._has_ended = True\n            self._changed.notify_all()", "self._has_ended = True"),
        "deadlock",
    ),
    "takes any pass that was prepared": (_session("prepared.wanted == wanted and", ""), "liveness"),
    "prepares a pass during another one": (_session("self._feeder is None or self._feeder.has_ended", "True"), "order"),
    "keeps what was prepared after it was taken": (
        _session("prepared, self._prepared = self._prepared, None", "prepared = self._prepared"),
        "left",
    ),
    "continues with a pool that has failed": (_session(" and pool.failure is None", ""), "liveness"),
    "leaves the helpers of a pool that has failed": (
        _session(
            "            self.runtime.close()\n            self.runtime = None\n        if self.runtime is None or",
            "            self.runtime = None\n        if self.runtime is None or",
        ),
        "left",
    ),
    "keeps the pool of another runtime": (
        _session("self.pool = self._make_pool(self.runtime)", "self.pool = self.pool or self._make_pool(self.runtime)"),
        "cause",
    ),
    "gives the same plan another name": (_session("self._named is None or self._named[0] != plan", "True"), "turns"),
    "reads from the start of the epoch": (_session("wanted.epoch, position, sizes", "wanted.epoch, 0, sizes"), "order"),
    "reads another epoch": (
        _session("items=plan.items(dp_rank, wanted.epoch", "items=plan.items(dp_rank, 1 + wanted.epoch"),
        "order",
    ),
    "reads the rows of rank 0": (_session("items=plan.items(dp_rank,", "items=plan.items(0,"), "order"),
    "decodes nothing": (_session("decodes=decoding is not None", "decodes=False"), "order"),
    "prefetches a batch more": (
        _session("prefetch_batches=wanted.prefetch_batches,\n", "prefetch_batches=wanted.prefetch_batches + 1,\n"),
        "early",
    ),
    "has twice the bytes in flight": (_session("limit_bytes=self.", "limit_bytes=2 * self."), "bytes"),
    "keeps the helpers when it is closed": (
        _session(
            "self._take_prepared(None)\n        if self.runtime is not None:\n            self.runtime.close()",
            "self._take_prepared(None)\n        if self.runtime is not None:\n            ...",
        ),
        "left",
    ),
    "keeps the prepared pass when it is closed": (
        _session("        self._take_prepared(None)\n        if self.runtime", "        if self.runtime"),
        "left",
    ),
}

# Mutants that no schedule catches:
#     Feeder._has_room waits for the consumer one batch later: an event of the consumer wakes the thread all the same.
#     Session has one name for all plans: a session of a schedule has one plan.
#     Session never prepares after a pass, scales nothing, gives a first step to one decoder, prefetches nothing, takes
#     a prepared pass of a pool that has failed: all cost time alone, and tests of the loader see the first.
#     Session ends no pass before another one, nor when it is closed, nor a prepared one that nobody asks for: the
#     consumer of a schedule stops them itself, because one thread cannot wait for another. The tests of the feeder and
#     of the loader, which have threads, see these.
#     Session takes a runtime that is not usable: a simulated one always is. The test of a Ray that ends sees it.
