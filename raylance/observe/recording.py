"""Threads that sample the loaders of this process once a second, publish metrics and write records."""

import atexit
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from raylance.observe.clock import now_s
from raylance.observe.metrics import Publisher
from raylance.observe.record import Record, RecordFolder
from raylance.observe.stats import Stats

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_LOCAL_S, _REMOTE_S = 2.0, 15.0  # least seconds between two writes of a record
_SHARE = 0.02  # largest share of the time that writing takes
_CREDIT_S = 1.0  # seconds, plus _SHARE of the time, that training threads may wait for a local storage
_MOST_S = 600.0  # most seconds between two tries if the storage fails
_LAST_TRIES = 8  # tries to write the last samples after the loader is gone
_PATIENCE_S = 10.0  # seconds that a training thread waits for a storage; only once, because the storage may hang


class Recording:
    """Samples one loader until the loader is closed or gone."""

    def __init__(
        self,
        record: Record,
        stats: Stats,
        cursor: Any,
        folder: RecordFolder | None,
        publisher: Publisher | None,
        to_html: Callable[[Any], str],
        digest: Callable[[], Any] | None = None,
    ) -> None:
        """Starts to sample. `cursor` holds the loader's position and lives as long as the loader. `to_html` converts
        the first rows. `digest` returns the digest of the rows handed out, JSON-able.
        """
        self._record, self._stats, self._cursor, self._folder = record, stats, weakref.ref(cursor), folder
        self._publisher, self._to_html, self._digest = publisher, to_html, digest
        self._changed = threading.Condition()
        self._asked = self._answered = 0  # requests to write the samples
        self._pid, self._due, self._failures = os.getpid(), 0.0, 0
        self._begun, self._spent_s = time.monotonic(), 0.0
        self._ended: float | None = None
        self._last_position = (0, 0)
        self._is_gone = False
        _sampler().add(self)

    def update(self, **facts: Any) -> None:
        """Replaces facts of the record."""
        with self._changed:
            self._record.facts |= facts

    def tick(self) -> None:
        """Samples and publishes, unless the recording has ended."""
        with self._changed:
            if not self._is_gone and not self._sample():
                self._leave()

    def write(self) -> bool:
        """Writes the record if a write is due, which may hang; returns whether more writes will follow."""
        with self._changed:
            is_gone = self._is_gone
            is_due = time.monotonic() >= self._due
        if is_due:
            self._write()
        with self._changed:  # the recording may have ended meanwhile
            if not is_gone or self._folder is None:
                return not is_gone
            if self._failures > _LAST_TRIES:
                logger.warning("the record of %s lacks its last samples, because its storage fails", self._record.name)
            return self._answered < self._asked or 0 < self._failures <= _LAST_TRIES

    def flush(self, *, may_wait: bool = True) -> None:
        """Samples now and has the writing thread write, because the process may end soon. Waits for the write
        at most 10 s, or 1 s if the write before failed; does not wait if the storage hangs. Without `may_wait`, asks
        for the write only while such calls took little time so far, and waits only for a local storage.
        """
        if self._pid != os.getpid():  # a forked child: the record belongs to its parent
            return
        with self._changed:
            if self._ended is not None:
                return
            self._sample()
            begin = time.monotonic()
            has_credit = self._spent_s < _CREDIT_S + _SHARE * (begin - self._begun)
            if may_wait or has_credit:
                self._ask(may_wait=may_wait or (self._folder is not None and self._folder.is_local))
            if not may_wait:
                self._spent_s += time.monotonic() - begin

    def end(self) -> None:
        """Samples once more and ends the record; no sample follows."""
        if self._pid != os.getpid():
            return
        with self._changed:
            if self._ended is None:
                self._sample()
                self._leave()
                self._ended = now_s()
                self._ask(may_wait=True)

    def give_up(self) -> None:
        """Ends the recording without writing, and ends all waits for a write."""
        with self._changed:
            self._folder, self._is_gone, self._answered = None, True, self._asked
            self._changed.notify_all()

    def _ask(self, *, may_wait: bool) -> None:
        """Has the writing thread write: no other thread may hang in a storage for ever. The caller holds the lock."""
        sampler = _sampler()
        has_failed = self._failures > 0 and self._ended is None
        if self._folder is None or (has_failed and not may_wait):
            return
        self._due = 0.0
        self._asked += 1
        asked = self._asked
        sampler.woken.set()
        if may_wait and not sampler.is_stuck:
            sampler.is_stuck = not self._changed.wait_for(
                lambda: self._answered >= asked, _TICK_S if has_failed else _PATIENCE_S
            )

    def _leave(self) -> None:
        """Ends the metrics, and makes a write due at once. The caller holds the lock."""
        self._is_gone, self._due = True, 0.0
        self._asked += 1
        publisher, self._publisher = self._publisher, None
        with contextlib.suppress(Exception):  # Ray may be gone, and its metrics too
            if publisher is not None:
                publisher.end()

    def _sample(self) -> bool:
        """Samples and publishes; returns whether the loader is still there. The caller holds the lock."""
        cursor = self._cursor()
        if cursor is not None:
            self._last_position = cursor.epoch, cursor.position
        epoch, rows = self._last_position
        figures = self._stats.sample() | {"epoch": float(epoch), "position": float(rows)}
        self._record.add(figures)
        if self._publisher is not None:
            try:
                self._publisher.publish(figures | self._record.facts["limits"])
            except Exception:  # any error of Ray: the caller may be a training thread
                self._publisher = None
                logger.warning("%s no longer publishes metrics", self._record.name, exc_info=True)
        return cursor is not None

    def _write(self) -> None:
        with self._changed:
            asked, begin = self._asked, time.monotonic()
            if self._folder is None:
                return
            latest = {
                "events": self._stats.events,
                "bad_rows": self._stats.bad_rows,
                "ended": self._ended,
                "shared_s": dict(self._stats.shared_s),
            }
            if self._digest is not None:
                latest["digest"] = self._digest()
        least_s = _LOCAL_S if self._folder.is_local else _REMOTE_S
        try:
            name = f"{self._record.name}.arrow"
            with self._changed:
                content = self._record.content(**latest)
            self._folder.write(name, content)
            if "begun_s" not in self._record.facts:  # the next write stores it in the file
                self._record.facts["begun_s"] = self._folder.written_s(name)
            self._failures = 0
        except Exception as error:  # any error of a storage: no run may fail because its record fails
            self._failures += 1
            if self._failures == 1:
                logger.warning(
                    "the record of %s cannot be written (%s: %s). The run continues; reports lack its figures until "
                    "a later write succeeds.",
                    self._record.name,
                    type(error).__name__,
                    error,
                )
        else:
            self._show_first(self._folder)
        _sampler().is_stuck = False
        with self._changed:
            self._answered, now = asked, time.monotonic()
            if self._asked == asked:
                self._due = now + min(_MOST_S, max(least_s, (now - begin) / _SHARE) * 2.0 ** min(self._failures, 10))
            self._changed.notify_all()

    def _show_first(self, folder: RecordFolder) -> None:
        """Writes the first rows as HTML, once, and drops them."""
        rows = self._stats.first_rows
        if rows is None or not rows.num_rows:
            return
        self._stats.first_rows = rows.slice(0, 0)
        try:
            folder.write(f"{self._record.name}.html", self._to_html(rows).encode())
        except Exception as error:  # odd rows, or the storage: the figures are still written
            logger.warning("the first rows of %s cannot be shown (%s)", self._record.name, error)


class _Sampler:
    """The two threads of a process: one samples, the other only writes, because a storage may hang."""

    def __init__(self) -> None:
        self.pid, self.is_stuck = os.getpid(), False  # is_stuck: the writing thread may hang in a storage
        self._recordings: set[Recording] = set()
        self._lock = threading.Lock()
        self._has_some, self.woken = threading.Event(), threading.Event()
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
                _try(recording, recording.tick)
            time.sleep(_TICK_S)

    def _write(self) -> None:
        while True:
            self._has_some.wait()
            for recording in self.all():
                is_more = _try(recording, recording.write)
                with self._lock:
                    if not is_more:
                        self._recordings.discard(recording)
                    if not self._recordings:
                        self._has_some.clear()
            self.woken.wait(_TICK_S)
            self.woken.clear()


def _try(recording: Recording, work: Callable[[], bool | None]) -> bool | None:
    """Does some work of a recording. If it fails, gives the recording up; the thread continues with the others."""
    try:
        return work()
    except Exception:
        logger.warning("a loader is no longer recorded, because sampling it failed", exc_info=True)
        recording.give_up()
        return False


_current: _Sampler | None = None
_making = threading.Lock()


def _sampler() -> _Sampler:
    global _current
    with _making:
        if _current is None or _current.pid != os.getpid():  # a forked process has no threads
            _current = _Sampler()
        return _current


@atexit.register
def _end_all() -> None:
    if _current is not None and _current.pid == os.getpid():
        for recording in _current.all():
            with contextlib.suppress(Exception):  # the interpreter ends, and other records must still be written
                recording.end()
