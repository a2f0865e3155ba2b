"""Owns how many helpers of a kind there should be, decided by how the trainer has waited for them; never starts one,
and has no clock.

Only the steps of a trainer that takes batches count: while it validates or saves, nothing can be learned. It wants more
where the trainer waits although all of them work: as many as would end that at the same pace. It wants fewer only where
the rest would still be idle at times. A number that has proved too small is not tried again, so it never swings.
"""

import logging
import math

from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.messages import Kind, Log, Output

_STEPS = 16  # that a decision looks at,
_LEAST_S = 1.0  # and seconds, where steps are short
_PAUSE = 8  # times what the trainer usually takes for a step: a longer one is a pause
_WAITS = 0.05  # of the time: less is not worth a helper
_BUSY = 0.9  # of the helpers' time: from here on the trainer waits for them
_SPARE = 1.4  # times the number that would be just enough is kept
_LOOKS = 3  # in a row must find helpers idle before they are dismissed
_GROWTH = 2.0  # at the most, at a time
_WORK: dict[Kind, str] = {"reader": "reading", "decoder": "decoding"}


class Scaler:
    """Watches one loader, pass after pass.

    Attributes:
        wanted: Helpers that there should be.
    """

    def __init__(self, least: int, most: int, wanted: int, kind: Kind = "decoder") -> None:
        """Begins with `wanted` helpers of a kind; it will stay in [least, most]."""
        self.kind: Kind = kind
        self._asked = wanted
        self._floor, self._most, self.wanted = least, most, wanted
        self._since: float | None = None  # when the last situation began
        self._waits, self._busy, self._running = False, 0, 0
        self._step = [0.0, 0.0, 0.0, 0.0]  # of the current step: seconds, waited, helpers at work, and running
        self._sum, self._steps, self._idle_looks = [0.0, 0.0, 0.0, 0.0], 0, 0

    def look(self, pool: HelperPool, now: float, *, is_awaited: bool, is_read: bool) -> None:
        """Observes a pool: whether the trainer has nothing to take, and its next rows are still being read."""
        if self.kind == "decoder":
            self.observe(now, waits=is_awaited, busy=pool.decoders_busy, running=len(pool.running("decoder")))
        else:  # readers read ahead: a wait for one of them shows that all of them are at work, and none can be spared
            running = pool.readers_at_work
            self.observe(now, waits=is_awaited and is_read, busy=running, running=running)

    def observe(self, now: float, *, waits: bool, busy: int, running: int) -> None:
        """Records a situation, which holds until the next one is recorded; `waits`: the trainer has nothing to take,
        which these helpers can change.
        """
        self._until(now)
        self._waits, self._busy, self._running = waits, busy, running

    def _until(self, now: float) -> None:
        past_s = 0.0 if self._since is None else now - self._since
        spent = (past_s, past_s * self._waits, past_s * self._busy, past_s * self._running)
        self._step = [old + new for old, new in zip(self._step, spent, strict=True)]
        self._since = now

    def stepped(self, now: float) -> list[Output]:
        """Records that the trainer has taken a batch, and decides; returns what to log."""
        self._until(now)
        step, self._step = self._step, [0.0, 0.0, 0.0, 0.0]
        own_s = step[0] - step[1]  # several steps may come at once, and then be waited for at once
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
        """A pass begins: the wait for its first batch does not count."""
        self._since, self._step = None, [0.0, 0.0, 0.0, 0.0]

    def resize(self, pool: HelperPool, now: float) -> list[Output]:
        """Has a pool have as many as are wanted, or wants as many as found a place."""
        if pool.wanted[self.kind] < self._asked:
            self.refused(pool.wanted[self.kind])
        self._asked = self.wanted
        return pool.resize(self.kind, self.wanted, now)

    def refused(self, running: int) -> None:
        """Records that more than these found no place."""
        self.wanted = self._most = max(running, 1)
        self._floor = min(self._floor, self._most)

    def _decide(self, waits: float, busy: float, running: float) -> str:
        """Sets `wanted`; returns why, where it changes."""
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
