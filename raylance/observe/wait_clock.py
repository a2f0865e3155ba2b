"""The seconds of one loader: how long its consumer waited, by cause, and how long it kept each batch."""

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from raylance.observe import clock
from raylance.observe.observations import Cause

WAITS = {
    "starting": "wait_start_s",
    "reading": "wait_read_s",
    "decoding": "wait_decode_s",
    "finishing": "wait_finish_s",
}
"""Causes of waiting as verdicts and metrics name them, and the fields of `WaitClock` that count them."""

_IT = "it"
_numbers = itertools.count(1)


@dataclasses.dataclass(slots=True, kw_only=True)
class WaitClock:
    """A state machine that takes events and their times, and counts seconds. A timing counts when it ends.

    The consumer of a loader waits for a batch ("wait_s"), keeps it ("user_s"), and waits again. Each second of waiting
    has one cause. If the consumer iterates another loader while it keeps a batch of this one, as in a validation pass,
    the seconds in which it waits for or keeps batches of that other loader count here as `user_s` and `other_s`.

    Attributes:
        has_begun: Whether the loader has handed out a batch.
        called: The loader's name in its record; without a record, a unique number.
        shared_s: By another loader's name: seconds in which both were iterated side by side.
        on_waited: Called with each part of a wait: its cause, and when it began and ended.
        in_step: See `Observer.in_step`.
    """

    wait_s: float = 0.0
    wait_start_s: float = 0.0
    wait_read_s: float = 0.0
    wait_decode_s: float = 0.0
    wait_finish_s: float = 0.0
    user_s: float = 0.0
    save_s: float = 0.0
    other_s: float = 0.0
    has_begun: bool = dataclasses.field(default=False, repr=False)
    called: str = dataclasses.field(default_factory=lambda: f"#{next(_numbers)}", repr=False)
    shared_s: dict[str, float] = dataclasses.field(default_factory=dict, repr=False)
    on_waited: Callable[[Cause, float, float], None] | None = dataclasses.field(default=None, repr=False)
    in_step: Callable[[], AbstractContextManager[None]] = dataclasses.field(default=nullcontext, repr=False)
    _going: dict[str, float] = dataclasses.field(default_factory=dict, repr=False)  # by field: when its timing began
    _awaited: dict[str, tuple[float, Cause]] = dataclasses.field(default_factory=dict, repr=False)  # at most one, _IT
    _here: str = dataclasses.field(default="wait_start_s", repr=False)  # the field for waits without a cause
    _saved_s: float = dataclasses.field(default=0.0, repr=False)  # save_s when the step began
    _there_s: float = dataclasses.field(default=0.0, repr=False)  # waits for rows that one helper reads and decodes

    def begin(self, field: str) -> float:
        """Begins to time a field; returns the time, which `end` takes as `begun`."""
        now = self._going[field] = clock.now()
        if field == "user_s":
            self._saved_s = self.save_s
            if steps := _thread.in_step:
                # Clocks that another thread closed are still listed: the garbage collector runs in any thread.
                steps[:] = [other for other in steps if other is not self and other.is_timed("user_s")]
            steps.append(self)
        elif field == "wait_s":
            self._here = "wait_finish_s" if self.has_begun else "wait_start_s"
            if _thread.in_step or self.is_timed("user_s"):
                self.end("user_s")  # if the last pass was abandoned with a batch in hand
            for around in self._around():
                around.interrupt(now)
        return now

    def end(self, field: str, begun: float | None = None) -> float:
        """Adds the seconds since `begin` to a field; returns them, or 0 if the field was not timed, or was begun again
        since `begin` returned `begun`.
        """
        if begun is not None and self._going.get(field) != begun:
            return 0.0
        begun = self._going.pop(field, None)
        now = clock.now()
        seconds = 0.0 if begun is None else now - begun
        setattr(self, field, getattr(self, field) + seconds)
        if field == "wait_s":
            self._explain_wait(now)
        if field in ("wait_s", "user_s") and begun is not None:
            for around in self._around():
                # Saving during this step counts for both loaders.
                around.resume(seconds - (self.save_s - self._saved_s if field == "user_s" else 0.0))
        if field == "user_s":
            if begun is not None:
                self._count_shared(begun, now)
            _thread.in_step[:] = [other for other in _thread.in_step if other is not self]
        return seconds

    def _explain_wait(self, now: float) -> None:
        """Adds the seconds of waiting without a reported cause to the field `_here`, so that all seconds have one."""
        self.awaits(None, now)
        rest = self.wait_s - self._there_s - sum(getattr(self, name) for name in WAITS.values())
        if rest > 0:
            setattr(self, self._here, getattr(self, self._here) + rest)

    @property
    def step_begun(self) -> float:
        """When the consumer got the batch that it keeps now; infinite if it keeps none."""
        return self._going.get("user_s", math.inf)

    def interrupt(self, now: float) -> None:
        """Begins to time `other_s`: during a step of this loader, the consumer waits for another loader's batch."""
        self._going["other_s"] = now

    def resume(self, seconds: float) -> None:
        """Ends the timing of `other_s`, and adds `seconds`: the other loader's wait or step, less its saving."""
        self._going.pop("other_s", None)
        self.other_s += seconds

    def _around(self) -> "list[WaitClock]":
        """Returns the clock of the loader whose step encloses this loader's, as training around validation, and the
        clocks of the loaders iterated side by side with that one. A step that began later does not enclose this one.
        """
        if not _thread.in_step:  # most often
            return []
        earlier = itertools.takewhile(lambda other: other is not self, _thread.in_step)
        found = [other for other in earlier if other.is_timed("user_s")]
        return [other for other in found if other is found[-1] or other.called in found[-1].shared_s]

    def _count_shared(self, begun: float, now: float) -> None:
        """Counts the seconds that this ending step shares with each step that began later and has not ended."""
        later = list(itertools.dropwhile(lambda other: other is not self, _thread.in_step))[1:]
        for other in later:
            if other.is_timed("user_s"):
                seconds = now - max(begun, other.step_begun)
                for one, name in ((self, other.called), (other, self.called)):
                    one.shared_s[name] = one.shared_s.get(name, 0.0) + seconds

    def lap(self, now: float) -> None:
        """Counts the current wait up to `now`, in seconds of the runtime's clock, and lets the wait continue."""
        awaited = self._awaited.get(_IT)
        if awaited is not None:
            self.awaits(awaited[1], now)

    def is_timed(self, field: str) -> bool:
        """Returns whether a field is being timed now."""
        return field in self._going

    @contextmanager
    def timed(self, field: str) -> Iterator[None]:
        """Adds the seconds that the body takes to a field."""
        begun = self.begin(field)
        try:
            yield
        finally:
            self.end(field, begun)

    def awaits(self, cause: Cause | None, now: float) -> None:
        """Sets the cause of the trainer's wait from now on; None if it does not wait. Ignored if it has its batch."""
        awaited = self._awaited.pop(_IT, None)  # one operation, which no other thread interrupts
        begun = self._going.get("wait_s")
        if cause is not None and begun is not None:
            self._awaited[_IT] = max(now, begun), cause  # the event that names the cause may come before the wait
            if not self.is_timed("wait_s"):  # the training thread has ended the wait meanwhile
                self._awaited.pop(_IT, None)
        if awaited is not None:  # consumer and feeder may both end a wait: the first one counts it
            since, before = awaited
            since = min(since, now)  # the feeder may have named the cause after the consumer looked at the clock
            if self.on_waited is not None:
                self.on_waited(before, since, now)
            if before == "there":
                self._there_s += now - since
            else:
                name = f"wait_{before}_s"
                setattr(self, name, getattr(self, name) + now - since)

    def split_there(self, read_s: float, decode_s: float) -> None:
        """Splits the waits with the cause "there" into reading and decoding, in the ratio of the helper's two times."""
        if self._there_s and read_s + decode_s > 0:
            reading_s = self._there_s * read_s / (read_s + decode_s)
            self.wait_read_s += reading_s
            self.wait_decode_s += self._there_s - reading_s
            self._there_s = 0.0

    def timed_s(self, field: str) -> float:
        """Returns the seconds since the field's timing began; 0 if the field is not being timed."""
        begun = self._going.get(field)
        return 0.0 if begun is None else clock.now() - begun

    def running(self) -> dict[str, float]:
        """Returns the seconds up to now of the timings that are running, by field."""
        now = clock.now()
        found = {name: now - begun for name, begun in list(self._going.items())}
        awaited = self._awaited.get(_IT)
        if awaited is not None and awaited[1] != "there":
            found[f"wait_{awaited[1]}_s"] = max(0.0, now - awaited[0])
        return found


@contextmanager
def saving(reported: Iterable[WaitClock]) -> Iterator[None]:
    """Counts the seconds of the body as saving, for the reported loaders and for those whose batch this thread has in
    hand, after their first batch. After the last batch of a pass, when no step is running, also as `user_s`.
    """
    found = {id(each): each for each in (*reported, *_thread.in_step) if each.has_begun and not each.is_timed("save_s")}
    with ExitStack() as stack:
        for each in found.values():
            if not each.is_timed("user_s"):
                stack.enter_context(each.timed("user_s"))
            stack.enter_context(each.timed("save_s"))
        yield


class _Thread(threading.local):
    """The clocks of the loaders whose batches the current thread has in hand, in the order of their steps."""

    def __init__(self) -> None:
        self.in_step: list[WaitClock] = []


_thread = _Thread()
