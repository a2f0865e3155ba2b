"""Owns the threads of this process that sample its loaders once a second, publish their metrics, and write their
records; never slows a trainer down, and never ends a run.
"""

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from raylance.observe.events import now_s
from raylance.observe.metrics import Publisher
from raylance.observe.record import Record, RecordFolder
from raylance.observe.stats import Stats

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_LOCAL_S, _REMOTE_S = 2.0, 15.0  # between two writings of a record, by where it lies,
_SHARE = 0.02  # which takes this share of the time at the most
_CREDIT_S = 1.0  # beside this share, that a training thread spends on a local storage though it need not wait
_MOST_S = 600.0  # between two tries where the storage fails
_LAST_TRIES = 8  # to write what came last, when the loader is gone
_PATIENCE_S = 10.0  # that a training thread waits for a storage, once: it may hang

Position = Callable[[], tuple[int, int] | None]
Look = Callable[[Any], str]
Handed = Callable[[], Any]


class Recording:
    """What is recorded of one loader, until that is closed or gone."""

    def __init__(
        self,
        record: Record,
        stats: Stats,
        position: Position,
        place: RecordFolder | None,
        publisher: Publisher | None,
        look: Look,
        handed: Handed | None = None,
    ) -> None:
        """Begins, in the recorder of this process.

        Args:
            record: What is written.
            stats: Whose figures are sampled.
            position: Gives (epoch, position), and None when the loader is gone.
            place: Where it is written; None for nowhere.
            publisher: Publishes metrics; None where nobody asks for any.
            look: Makes HTML of a table of the first rows.
            handed: Says which rows were handed out, JSON-able; None where nobody counts them.
        """
        self._handed = handed
        self._record, self._stats, self._position, self._place = record, stats, position, place
        self._publisher, self._look = publisher, look
        self._changed = threading.Condition()
        self._asked = self._answered = 0  # to write what has been sampled
        self._pid, self._due, self._failures = os.getpid(), 0.0, 0
        self._begun, self._spent_s = time.monotonic(), 0.0
        self._ended: float | None = None
        self._last_place = (0, 0)
        self._is_gone = False
        _recorder().add(self)

    def tick(self) -> None:
        """Samples and publishes, unless it has ended."""
        with self._changed:
            if not self._is_gone and not self._sample():
                self._leave()

    def write(self) -> bool:
        """Writes what is due, which may hang; returns whether there is more to come."""
        with self._changed:
            is_gone = self._is_gone
            is_due = time.monotonic() >= self._due
        if is_due:
            self._write()
        with self._changed:  # it may have ended meanwhile
            if not is_gone or self._place is None:
                return not is_gone
            if self._failures > _LAST_TRIES:
                logger.warning("what came last is missing in the record of %s: its storage fails", self._record.name)
            return self._answered < self._asked or 0 < self._failures <= _LAST_TRIES

    def flush(self, *, may_wait: bool = True) -> None:
        """Samples now, and has the recorder's thread write: the process may not live for long.

        Args:
            may_wait: Whether to wait until it is written, unless the storage fails or hangs; otherwise, where it is
                local, that is waited for as long as it takes next to nothing of the time.
        """
        if self._pid != os.getpid():  # the record is of the process that was forked
            return
        with self._changed:
            self._sample()
            begin = time.monotonic()
            has_credit = self._spent_s < _CREDIT_S + _SHARE * (begin - self._begun)
            if may_wait or has_credit:
                self._ask(may_wait=may_wait or (self._place is not None and self._place.is_local))
            if not may_wait:
                self._spent_s += time.monotonic() - begin

    def end(self) -> None:
        """Ends the record; nothing comes behind it."""
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._ended is None:
                self._sample()
                self._leave()
                self._ended = now_s()
                self._ask(may_wait=True)

    def give_up(self) -> None:
        """Has nobody wait for what will not be written."""
        with self._changed:
            self._place, self._is_gone, self._answered = None, True, self._asked
            self._changed.notify_all()

    def _ask(self, *, may_wait: bool) -> None:
        """Has the recorder's thread write, which may hang in a storage for ever: nobody else does. Needs the lock."""
        recorder = _recorder()
        if self._place is None or (self._failures and self._ended is None):
            return
        self._due = 0.0
        self._asked += 1
        asked = self._asked
        recorder.wake()
        if may_wait and not recorder.is_stuck:
            recorder.is_stuck = not self._changed.wait_for(lambda: self._answered >= asked, _PATIENCE_S)

    def _leave(self) -> None:
        """Ends: takes its helpers out of the metrics; what has been sampled is written at once. Needs the lock."""
        self._is_gone, self._due = True, 0.0
        self._asked += 1
        publisher, self._publisher = self._publisher, None
        with contextlib.suppress(Exception):  # Ray may be gone, and the metrics with it
            if publisher is not None:
                publisher.end()

    def _sample(self) -> bool:
        place = self._position()
        self._last_place = place or self._last_place
        epoch, position = self._last_place
        figures = self._stats.sample() | {"epoch": float(epoch), "position": float(position)}
        self._record.add(figures)
        if self._publisher is not None:
            try:
                self._publisher.publish(figures | self._record.facts["limits"])
            except Exception:  # whatever Ray raises: the caller may be a training thread
                self._publisher = None
                logger.warning("%s publishes no metrics any more", self._record.name, exc_info=True)
        return place is not None

    def _write(self) -> None:
        with self._changed:
            asked, begin = self._asked, time.monotonic()
            if self._place is None:
                return
            told: dict[str, Any] = {"events": self._stats.events, "bad_rows": self._stats.bad_rows}
            told |= {"ended": self._ended, "shared_s": dict(self._stats.shared_s)}
            if self._handed is not None:
                told["digest"] = self._handed()
        least_s = _LOCAL_S if self._place.is_local else _REMOTE_S
        try:
            name = f"{self._record.name}.arrow"
            self._place.write(name, self._content(told))
            if "begun_s" not in self._record.facts:  # comes into the file the next time
                self._record.facts["begun_s"] = self._place.written_s(name)
            self._failures = 0
        except Exception as error:  # whatever a storage raises: a run does not end for a want of figures
            self._failures += 1
            if self._failures == 1:
                logger.warning(
                    "the record of %s cannot be written (%s: %s); the run goes on, it is tried again now and then, and "
                    "until then reports lack what comes now",
                    self._record.name,
                    type(error).__name__,
                    error,
                )
        else:
            self._show_first(self._place)
        _recorder().is_stuck = False
        with self._changed:
            self._answered, now = asked, time.monotonic()
            if self._asked == asked:
                self._due = now + min(_MOST_S, max(least_s, (now - begin) / _SHARE) * 2.0 ** min(self._failures, 10))
            self._changed.notify_all()

    def _content(self, told: dict[str, Any]) -> bytes:
        with self._changed:
            return self._record.content(**told)

    def _show_first(self, place: RecordFolder) -> None:
        """Writes the look of the first rows, once, and lets go of them."""
        rows = self._stats.first_rows
        if rows is None or not rows.num_rows:
            return
        self._stats.first_rows = rows.schema.empty_table()
        try:
            place.write(f"{self._record.name}.html", self._look(rows).encode())
        except Exception as error:  # of odd rows, or the storage: the figures are still to be written
            logger.warning("the first rows of %s cannot be shown (%s)", self._record.name, error)


class _Recorder:
    """The threads of a process: a storage that hangs has one of them to itself."""

    def __init__(self) -> None:
        self.pid, self.is_stuck = os.getpid(), False  # in a storage that hangs, as far as is known
        self._recordings: set[Recording] = set()
        self._lock = threading.Lock()
        self._has_some, self._woken = threading.Event(), threading.Event()
        for run in (self._sample, self._write):
            threading.Thread(target=run, name=f"raylance-recorder{run.__name__}", daemon=True).start()

    def add(self, recording: Recording) -> None:
        with self._lock:
            self._recordings.add(recording)
        self._has_some.set()

    def all(self) -> list[Recording]:
        with self._lock:
            return list(self._recordings)

    def _sample(self) -> None:
        while True:
            self._has_some.wait()
            for recording in self.all():
                with _told(recording):
                    recording.tick()
            time.sleep(_TICK_S)

    def _write(self) -> None:
        while True:
            self._has_some.wait()
            for recording in self.all():
                is_more = False
                with _told(recording):
                    is_more = recording.write()
                with self._lock:
                    if not is_more:
                        self._recordings.discard(recording)
                    if not self._recordings:
                        self._has_some.clear()
            self._woken.wait(_TICK_S)
            self._woken.clear()

    def wake(self) -> None:
        self._woken.set()


@contextlib.contextmanager
def _told(recording: Recording) -> Iterator[None]:
    """Gives a recording up that fails: nobody else would hear of it, and others are still to be recorded."""
    try:
        yield
    except Exception:  # of metrics, say
        logger.warning("a loader is not recorded any more", exc_info=True)
        recording.give_up()


_current: _Recorder | None = None
_making = threading.Lock()


def _recorder() -> _Recorder:
    global _current
    with _making:
        if _current is None or _current.pid != os.getpid():  # threads do not come along into a fork
            _current = _Recorder()
        return _current


def position_of(cursor: Any) -> Position:
    """Asks a loader's cursor where it stands, and does not keep the loader alive."""
    ref = weakref.ref(cursor)

    def ask() -> tuple[int, int] | None:
        found = ref()
        return None if found is None else (found.epoch, found.position)

    return ask


@atexit.register
def _end_all() -> None:
    if _current is not None and _current.pid == os.getpid():
        for recording in _current.all():
            with contextlib.suppress(Exception):  # the interpreter ends, and others are still to be written
                recording.end()
