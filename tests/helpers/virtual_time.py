"""Virtual time for real threads: a loader's own threads run as they are, and only their waits and sleeps are of a
clock that moves when all of them wait. Never measures anything, and never knows what a loader counts.
"""

import concurrent.futures
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

_LIMIT_S = 1e5  # of virtual time: who waits longer waits for nothing


class VirtualTime:
    """A clock that moves on when every thread that takes part waits."""

    def __init__(self) -> None:
        self._now, self._running, self._is_over = 1024.0, 0, False
        self._turn = threading.Condition()
        self._waiting: list[tuple[Callable[[], bool], float | None]] = []

    def now(self) -> float:
        return self._now

    def enter(self) -> None:
        with self._turn:
            self._running += 1

    def leave(self) -> None:
        with self._turn:
            self._running -= 1
            self._turn.notify_all()

    def end(self) -> None:
        with self._turn:
            self._is_over = True
            self._turn.notify_all()

    def sleep(self, seconds: float) -> None:
        self.block(lambda: False, seconds)

    def block(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until something is so, for so long at the most; returns whether it is."""
        with self._turn:
            until = None if timeout_s is None else self._now + timeout_s
            mine = (lambda: self._is_over or is_ready()), until
            self._waiting.append(mine)
            self._running -= 1
            self._turn.notify_all()
            try:
                while not mine[0]():
                    if until is not None and self._now >= until:
                        return False
                    if self._running == 0 and not any(self._is_due(*other) for other in self._waiting):
                        self._move_on()
                    else:
                        self._turn.wait(0.002)  # what is waited for may come from a thread that is running
            finally:
                self._waiting.remove(mine)
                self._running += 1
        return not self._is_over

    def _is_due(self, is_ready: Callable[[], bool], until: float | None) -> bool:
        return is_ready() or (until is not None and until <= self._now)

    def _move_on(self) -> None:
        times = [until for _, until in self._waiting if until is not None]
        if not times or min(times) > _LIMIT_S:
            self._is_over = True
            raise RuntimeError(f"{len(self._waiting)} threads wait for ever")
        self._now = min(times)
        self._turn.notify_all()

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        """Has raylance measure and wait by it, in threads."""
        threads = SimpleNamespace(
            Condition=functools.partial(_Condition, self),
            Thread=functools.partial(_Thread, self),
            current_thread=threading.current_thread,
        )
        queues = SimpleNamespace(SimpleQueue=functools.partial(_Queue, self), Empty=queue.Empty)
        patch.setattr("raylance.observe.clock.now", self.now)
        patch.setattr("raylance.runtime.feeder.threading", threads)
        patch.setattr("raylance.runtime.runtime.queue", queues)
        for module in ("work.read_work", "runtime.threads"):
            patch.setattr(f"raylance.{module}.Calls", functools.partial(_Executor, self))


class _Condition:
    def __init__(self, time: VirtualTime) -> None:
        self._time, self._lock, self._rounds = time, threading.RLock(), 0

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        seen = self._rounds
        self._lock.release()
        try:
            return self._time.block(lambda: self._rounds != seen, timeout_s)
        finally:
            self._lock.acquire()

    def notify_all(self) -> None:
        self._rounds += 1


class _Thread(threading.Thread):
    def __init__(self, time: VirtualTime, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._time, self._is_done = time, False

    def start(self) -> None:
        self._time.enter()
        super().start()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._is_done = True
            self._time.leave()

    def is_alive(self) -> bool:
        return not self._is_done and super().is_alive()

    def join(self, timeout: float | None = None) -> None:
        self._time.block(lambda: not self.is_alive(), timeout)


class _Executor(concurrent.futures.Executor):
    def __init__(self, time: VirtualTime, workers: int = 1, *_: Any, **__: Any) -> None:
        self._time, self._todo = time, deque[tuple[concurrent.futures.Future[Any], Callable[[], Any]]]()
        self._lock = threading.Lock()
        for _ in range(workers):
            _Thread(time, target=self._work, daemon=True).start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._todo.append((future, lambda: function(*args, **kwargs)))
        return future

    def map(self, function: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        futures = [self.submit(function, *args) for args in zip(*iterables, strict=False)]
        for future in futures:
            self._time.block(future.done)
            yield future.result()

    def _work(self) -> None:
        while self._time.block(lambda: bool(self._todo)):
            with self._lock:
                if not self._todo:
                    continue
                future, work = self._todo.popleft()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


class _Queue:
    def __init__(self, time: VirtualTime) -> None:
        self._time, self._items = time, deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float | None = None) -> Any:
        if not self._time.block(lambda: bool(self._items), timeout):
            raise queue.Empty
        return self._items.popleft()
