"""Owns mutants of the feeder and of the session, made by a reader who wrote neither: each has one place of its source
changed, and what it breaks. Those that break nothing are named at the end, with the reason.
"""

from raylance.runtime.feeder import Feeder
from raylance.runtime.session import Session
from tests.simulation.play import Wrong
from tests.simulation.wrong import changed


def _mutant(kind: type, old: str, new: str) -> Wrong:
    other = changed(kind, old, new)
    methods = [(kind, name, made) for name, made in vars(other).items() if callable(made) or isinstance(made, property)]
    return Wrong(methods=methods)


def _feeder(old: str, new: str) -> Wrong:
    return _mutant(Feeder, old, new)


def _session(old: str, new: str) -> Wrong:
    return _mutant(Session, old, new)


BROKEN: dict[str, tuple[Wrong, str]] = {
    "hands out the newest batch first": (_feeder("self._finished.popleft()", "self._finished.pop()"), "order"),
    "never reports what was taken": (_feeder("self._say(Taken(found[1].after))", ""), "deadlock"),
    "reports one step less than was taken": (_feeder("Taken(found[1].after)", "Taken(found[1].before)"), "?"),
    "does not say that it waits": (_feeder("            self._say(Awaited())\n", ""), "?"),
    "does not say that it is wanted": (_feeder("            self._say(Wanted())\n", "            ...\n"), "deadlock"),
    "does not begin": (_feeder("deque([Begin()])", "deque()"), "deadlock"),
    "does not wake its thread": (_feeder("        self._said.append(event)\n        self._runtime.post(Wake())", "        self._said.append(event)"), "deadlock"),
    "does not wake its thread at the end": (_feeder("            self._changed.notify_all()\n        self._runtime.post(Wake())", "            self._changed.notify_all()"), "deadlock"),
    "keeps its batches when it is stopped": (_feeder("            self._finished.clear()\n", ""), "left"),
    "begins work for a pass that is closed": (_feeder("if self._is_closed:  # no more", "if False:  # no more"), "left"),
    "ends before what was delivered is a batch": (_feeder("(self._is_over and not self._assembly)", "self._is_over"), "liveness"),
    "makes more batches than it has room for": (_feeder("            return len(self._finished) < self._room and not self._is_closed", "            return not self._is_closed"), "bytes"),
    "makes one batch more than it has room for": (_feeder("else max(1, self._spec.prefetch_batches)", "else 1 + max(1, self._spec.prefetch_batches)"), "bytes"),
    "makes a batch after another while the consumer has none to take": (_feeder("self._is_over and len(self._finished) >= self._room", "self._is_over and len(self._finished) > self._room"), "?"),
    "looks at no deadline": (_feeder("deadline = self._dispatcher.deadline()", "deadline = None"), "deadlock"),
    "looks a second after the deadline": (_feeder("max(0.0, deadline - self._runtime.now())", "1.0 + max(0.0, deadline - self._runtime.now())"), "deadline"),
    "carries outputs out backward": (_feeder("outputs.pop(0)", "outputs.pop()"), "?"),
    "carries out the first output alone": (_feeder("while outputs:", "if outputs:"), "?"),
    "goes on after an error": (_feeder("self._error, self._is_over = error, True", "self._error = error"), "deadlock"),
    "goes on after a late helper": (_feeder("asked))\n                    self._is_over = True", "asked))"), "deadlock"),
    "goes on after the end": (_feeder("case Complete():\n                    self._is_over = True", "case Complete():\n                    pass"), "deadlock"),
    "loses the error": (_feeder("self._error, self._is_over = error, True", "self._is_over = True"), "liveness"),
    "leaves the pass open": (_feeder("        now = self._runtime.now()\n        self._do(self._dispatcher.handle(Close(), now), now)\n        with self._changed:\n            self._has_ended", "        with self._changed:\n            self._has_ended"), "left"),
    "does not say that it has ended": (_feeder("self._has_ended = True\n            self._changed.notify_all()", "self._has_ended = True"), "deadlock"),
    "adds a batch when it is closed": (_feeder("            if not self._is_closed:\n                self._finished", "            if True:\n                self._finished"), "?"),
    "gives the error before the last good batch": (_feeder("            if self._finished:\n                found", "            if self._finished and self._error is None:\n                found"), "?"),
    "gives the dispatcher the events of the runtime first": (_feeder("        with self._changed:\n            if self._said:\n                return self._said.popleft()\n        deadline", "        deadline"), "deadlock"),
    "gives the newest word first": (_feeder("self._said.popleft()", "self._said.pop()"), "?"),
    "drops an event when it is closed": (_feeder("if not isinstance(event, Wake):", "if not (isinstance(event, Wake) or self._is_closed):"), "?"),
    "takes any pass that was prepared": (_session("prepared.wanted == wanted and self._is_usable", "self._is_usable"), "order"),
    "takes a prepared pass of a failed pool": (_session("prepared.wanted == wanted and self._is_usable", "prepared.wanted == wanted"), "?"),
    "leaves a prepared pass that nobody asks for open": (_session("        self._close(prepared.feeder)\n        return None", "        return None"), "?"),
    "keeps what was prepared after it was taken": (_session("prepared, self._prepared = self._prepared, None", "prepared = self._prepared"), "?"),
    "begins a pass during another one": (_session("            self.end_pass()  # of", "            # of"), "?"),
    "prepares a pass during another one": (_session("if self._feeder is None or self._feeder.has_ended:", "if True:"), "?"),
    "never prepares after a pass": (_session("if self._feeder is None or self._feeder.has_ended:", "if self._feeder is None:"), "equal"),
    "goes on with a pool that has failed": (_session("and runtime.is_usable and pool.failure is None", "and runtime.is_usable"), "?"),
    "goes on with a runtime that cannot serve": (_session("and runtime.is_usable and pool.failure is None", "and pool.failure is None"), "?"),
    "leaves the helpers of a failed pool": (_session("            self.runtime.close()\n            self.runtime = None\n        if self.runtime is None or self.pool", "            self.runtime = None\n        if self.runtime is None or self.pool"), "left"),
    "keeps the pool of the runtime before": (_session("            self.pool = self._make_pool(self.runtime)", "            self.pool = self.pool or self._make_pool(self.runtime)"), "?"),
    "names each pass's plan anew": (_session("if self._named is None or self._named[0] != plan:", "if True:"), "?"),
    "has one name for all plans": (_session("if self._named is None or self._named[0] != plan:", "if self._named is None:"), "equal"),
    "wants all rows of its first step in one item": (_session("first_rows = -(-(high - low) // decoders)", "first_rows = high - low"), "equal"),
    "reads from the start of the epoch": (_session("wanted.epoch, position, sizes", "wanted.epoch, 0, sizes"), "order"),
    "reads another epoch": (_session("items=plan.items(rank, wanted.epoch", "items=plan.items(rank, wanted.epoch + 1"), "order"),
    "reads the rows of rank 0": (_session("items=plan.items(rank, wanted", "items=plan.items(0, wanted"), "order"),
    "decodes nothing": (_session("decodes=decoding is not None", "decodes=False"), "order"),
    "prefetches nothing": (_session("prefetch_batches=wanted.prefetch_batches,\n            work", "prefetch_batches=0,\n            work"), "?"),
    "prefetches a batch more": (_session("prefetch_batches=wanted.prefetch_batches,\n            work", "prefetch_batches=wanted.prefetch_batches + 1,\n            work"), "early"),
    "has twice the bytes in flight": (_session("limit_bytes=self._options.max_inflight_bytes", "limit_bytes=2 * self._options.max_inflight_bytes"), "bytes"),
    "keeps the prepared pass when it is closed": (_session("        self._take_prepared(None)\n        if self.runtime", "        if self.runtime"), "?"),
    "keeps the helpers when it is closed": (_session("        if self.runtime is not None:\n            self.runtime.close()\n            self.runtime = None\n\n\n", "\n\n") if False else _session("self._take_prepared(None)\n        if self.runtime is not None:\n            self.runtime.close()", "self._take_prepared(None)\n        if self.runtime is not None:\n            pass"), "left"),
    "keeps the pass when it is closed": (_session("        self.end_pass()\n        self._take_prepared(None)", "        self._take_prepared(None)"), "?"),
    "scales nothing": (_session("if each[1] < each[2]]", "if False]"), "equal"),
}
