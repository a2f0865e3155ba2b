"""The number of helpers of a kind that a loader wants, decided by how long the trainer waited for them.

Steps with a long pause, as for validation or saving, do not count, because they say nothing about helpers. More helpers
are wanted if the trainer waits while all of them work: the number that would end the waits if each helper keeps its
pace. Fewer are wanted only if the remaining helpers would still be idle at times. A number that proved too small is not
tried again, so the number does not oscillate.
"""

import logging
import math

from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.messages import Kind, Log, Output

_STEPS = 16  # fewest steps for a decision
_LEAST_S = 1.0  # fewest seconds for a decision
_PAUSE = 8  # a step that takes more than this multiple of the usual time is a pause
_WAITS = 0.05  # fraction of the time; shorter waits are not worth a helper
_BUSY = 0.9  # fraction of their time; only if helpers work longer, the trainer waits for them
_SPARE = 1.4  # this multiple of the busy helpers is kept
_LOOKS = 3  # decisions in a row that must find too many helpers before some are dismissed
_GROWTH = 2.0  # largest factor of one change
_WORK: dict[Kind, str] = {"reader": "reading", "decoder": "decoding"}


class Scaler:
    """Decides how many helpers of one kind a loader wants, over all its passes.

    Attributes:
        wanted: Number of helpers to have.
    """

    def __init__(self, least: int, most: int, wanted: int, kind: Kind = "decoder") -> None:
        """Begins with `wanted` helpers of a kind; the number stays in [least, most]."""
        self.kind: Kind = kind
        self._asked = wanted
        self._floor, self._most, self.wanted = least, most, wanted
        self._since: float | None = None  # when the last situation began
        self._waits, self._busy, self._running = False, 0, 0
        self._step = [0.0, 0.0, 0.0, 0.0]  # current step: seconds, seconds waited, and helper seconds busy and running
        self._sum, self._steps, self._idle_looks = [0.0, 0.0, 0.0, 0.0], 0, 0

    def look(self, pool: HelperPool, now: float, *, is_awaited: bool, is_read: bool) -> None:
        """Observes a pool; `is_awaited` says that the trainer waits, `is_read` that its next rows are being read."""
        if self.kind == "decoder":
            self.observe(now, waits=is_awaited, busy=pool.decoders_busy, running=len(pool.running("decoder")))
        else:  # readers read ahead, so if the trainer waits for one of them, all are at work and needed
            running = pool.readers_at_work
            self.observe(now, waits=is_awaited and is_read, busy=running, running=running)

    def observe(self, now: float, *, waits: bool, busy: int, running: int) -> None:
        """Records a situation, which lasts until the next call; `waits`: the trainer waits for these helpers."""
        self._until(now)
        self._waits, self._busy, self._running = waits, busy, running

    def _until(self, now: float) -> None:
        past_s = 0.0 if self._since is None else now - self._since
        spent = (past_s, past_s * self._waits, past_s * self._busy, past_s * self._running)
        self._step = [old + new for old, new in zip(self._step, spent, strict=True)]
        self._since = now

    def stepped(self, now: float) -> list[Output]:
        """Records that the trainer has taken a batch, and decides if it can; returns lines for the log."""
        self._until(now)
        step, self._step = self._step, [0.0, 0.0, 0.0, 0.0]
        own_s = step[0] - step[1]  # without waits, because one wait may be for several steps
        if self._steps and own_s > max(_LEAST_S, _PAUSE * (self._sum[0] - self._sum[1]) / self._steps):
            return []
        self._sum = [old + new for old, new in zip(self._sum, step, strict=True)]
        self._steps += 1
        if self._steps < _STEPS or self._sum[0] < _LEAST_S:
            return []
        seconds, waited_s, busy_s, running_s = self._sum
        self._sum, self._steps = [0.0, 0.0, 0.0, 0.0], 0
        before = self.wanted
        why = self._decide(waited_s / seconds, busy_s / seconds, running_s / seconds)
        if self.wanted == before:
            return []
        return [Log(logging.INFO, f"{self.kind}s: {self.wanted} wanted instead of {before}, because {why}")]

    def begin(self) -> None:
        """Records that a pass begins; the wait for its first batch does not count."""
        self._since, self._step = None, [0.0, 0.0, 0.0, 0.0]

    def resize(self, pool: HelperPool, now: float) -> list[Output]:
        """Sets the wanted number in a pool; if fewer helpers found a place before, wants only these."""
        if pool.wanted[self.kind] < self._asked:
            self.refused(pool.wanted[self.kind])
        self._asked = self.wanted
        return pool.resize(self.kind, self.wanted, now)

    def refused(self, placed: int) -> None:
        """Records that only `placed` helpers found a place, or may still find one. If none did, one is asked for
        again: CPUs may be free by then.
        """
        self.wanted = self._most = max(placed, 1)
        self._floor = min(self._floor, self._most)

    def _decide(self, waits: float, busy: float, running: float) -> str:
        """Sets `wanted`; returns the reason if the number changes, else ""."""
        before = self.wanted
        if waits > _WAITS and busy >= _BUSY * running and running >= self.wanted:
            needed = min(running / max(1 - waits, 1 / _GROWTH), self._most)
            self.wanted = max(self.wanted, math.ceil(needed))
            self._floor = max(self._floor, min(before + 1, self._most))
            self._idle_looks = 0
            return f"the trainer waited {waits:.0%} of the time for {_WORK[self.kind]}"
        if waits <= _WAITS and (enough := max(self._floor, math.ceil(busy * _SPARE))) < self.wanted:
            self._idle_looks += 1
            if self._idle_looks >= _LOOKS:
                self.wanted, self._idle_looks = enough, 0
                return f"of {running:.1f} {self.kind}s {busy:.1f} had work, and the trainer did not wait"
        else:
            self._idle_looks = 0
        return ""
