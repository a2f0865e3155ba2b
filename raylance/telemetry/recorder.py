"""Owns the thread that samples the loaders of this process once a second, writes their records and publishes their
metrics; never slows a trainer down, and never ends a run.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from raylance.telemetry.metrics import Publisher
from raylance.telemetry.record import Place, Record
from raylance.telemetry.stats import Stats

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_LOCAL_S, _REMOTE_S = 2.0, 15.0  # between two writings of a record, by where it lies

Position = Callable[[], tuple[int, int] | None]
Look = Callable[[Any], str]


class Recording:
    """What is recorded of one loader, until that is closed or gone."""

    def __init__(
        self,
        record: Record,
        stats: Stats,
        position: Position,
        place: Place | None,
        publisher: Publisher | None,
        look: Look,
    ) -> None:
        """Begins, in the recorder of this process.

        Args:
            record: What is written.
            stats: Whose figures are sampled.
            position: Gives (epoch, position), and None when the loader is gone.
            place: Where it is written; None for nowhere.
            publisher: Publishes metrics; None where nobody asks for any.
            look: Makes HTML of a table of the first rows.
        """
        self._record, self._stats, self._position, self._place = record, stats, position, place
        self._publisher, self._look = publisher, look
        self._lock, self._written, self._has_looked = threading.Lock(), -_REMOTE_S, False
        self._ended: float | None = None
        self._last_place = (0, 0)
        _recorder().add(self)

    def tick(self) -> bool:
        """Samples, publishes, and writes what is due; returns whether there is more to come."""
        with self._lock:
            is_gone = self._ended is not None or not self._sample()
            due_s = _LOCAL_S if self._place is None or self._place.is_local else _REMOTE_S
            if is_gone or time.monotonic() - self._written >= due_s:
                self._write()
            return not is_gone

    def flush(self, *, may_wait: bool = True) -> None:
        """Samples and writes now: the process may not live for long.

        Args:
            may_wait: Whether the caller may wait for a network; otherwise the recorder's thread writes there, at once.
        """
        with self._lock:
            self._sample()
            if may_wait or self._place is None or self._place.is_local:
                self._write()
                return
            self._written = -_REMOTE_S
        _recorder().wake()

    def end(self) -> None:
        """Ends the record; nothing comes behind it."""
        with self._lock:
            if self._ended is None:
                self._sample()
                self._ended = time.time()
                self._write()

    def _sample(self) -> bool:
        place = self._position()
        self._last_place = place or self._last_place
        epoch, position = self._last_place
        figures = self._stats.sample() | {"epoch": float(epoch), "position": float(position)}
        self._record.add(figures)
        if self._publisher is not None:
            self._publisher.publish(figures | self._record.facts["limits"])
        return place is not None

    def _write(self) -> None:
        self._written = time.monotonic()
        if self._place is None:
            return
        try:
            told = {"events": self._stats.events, "bad_rows": self._stats.bad_rows, "ended": self._ended}
            self._place.write(f"{self._record.name}.arrow", self._record.content(**told))
            if not self._has_looked and self._stats.first_rows is not None and self._stats.first_rows.num_rows:
                self._has_looked = True
                self._place.write(f"{self._record.name}.html", self._look(self._stats.first_rows).encode())
        except Exception as error:  # whatever a storage raises: a run does not end for a want of figures
            self._place = None
            logger.warning(
                "the record of %s cannot be written (%s: %s); the run goes on, and its report will lack what comes now",
                self._record.name,
                type(error).__name__,
                error,
            )


class _Recorder:
    """The thread of a process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._recordings: set[Recording] = set()
        self._lock = threading.Lock()
        self._has_some, self._woken = threading.Event(), threading.Event()
        threading.Thread(target=self._run, name="raylance-recorder", daemon=True).start()

    def add(self, recording: Recording) -> None:
        with self._lock:
            self._recordings.add(recording)
        self._has_some.set()

    def all(self) -> list[Recording]:
        with self._lock:
            return list(self._recordings)

    def _run(self) -> None:
        while True:
            self._has_some.wait()
            for recording in self.all():
                if not self._tick(recording):
                    with self._lock:
                        self._recordings.discard(recording)
                        if not self._recordings:
                            self._has_some.clear()
            self._woken.wait(_TICK_S)
            self._woken.clear()

    def wake(self) -> None:
        self._woken.set()

    @staticmethod
    def _tick(recording: Recording) -> bool:
        try:
            return recording.tick()
        except Exception:  # of metrics, say: nobody else would hear of it, and others are still to be recorded
            logger.warning("a loader is not recorded any more", exc_info=True)
            return False


_current: _Recorder | None = None
_making = threading.Lock()


def _recorder() -> _Recorder:
    global _current
    with _making:
        if _current is None or _current.pid != os.getpid():  # threads do not come along into a fork
            _current = _Recorder()
        return _current


def position_of(loader: Any) -> Position:
    """Asks a loader for its place, and does not keep it alive."""
    ref = weakref.ref(loader)

    def ask() -> tuple[int, int] | None:
        found = ref()
        return None if found is None else found.place

    return ask


@atexit.register
def _end_all() -> None:
    if _current is not None and _current.pid == os.getpid():
        for recording in _current.all():
            recording.end()
