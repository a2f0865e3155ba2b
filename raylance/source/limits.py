"""Time limits of calls into Lance, which cannot be interrupted, and the threads in which they run.

There are two limits. Lance applies the first one to each request. The caller applies the second one: it stops waiting
for a call that does not return. The thread of this call ends when the call ends. Until then, the thread delays no later
calls, and it delays the end of the process by a few seconds at most.

A thread that returns from Lance while the interpreter ends aborts the process, which had done all its work. So at the
end of the process no call begins any more, and those that run are awaited.
"""

import atexit
import contextvars
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import lance

P = ParamSpec("P")
T = TypeVar("T")

# URI schemes of stores that take the options below. Other stores may refuse unknown options.
_SCHEMES = ("s3", "s3+ddb", "gs", "az", "abfss")
_OPTIONS = {"timeout", "connect_timeout", "client_max_retries", "client_retry_timeout", "download_retry_count"}
_PREFIXES = ("aws_", "google_", "azure_", "object_store_")
_REQUEST_S = 30.0  # longest request, by Lance's default
_CONNECT_S = 5.0  # longest time of connecting, by Lance's default
_EXIT_S = 5.0  # most seconds that the end of the process waits for running calls
_SOON_S = 0.5
_running: set[Future[Any]] = set()
_ends = threading.Event()  # whether the process ends


def with_limits(uri: str, options: Mapping[str, str] | None, limit_s: float) -> dict[str, str] | None:
    """Returns the options with time limits for requests, so that two requests fit into a `limit_s` of 2 s or more. Adds
    none if the user has set one, as an option or in the environment, or if the store may not know them.

    Lance's own defaults let one call take minutes: 30 s for a request, four attempts by its client, and four calls of
    the client.
    """
    given = dict(options) if options else None
    scheme, found, _ = uri.partition("://")
    if not found or scheme not in _SCHEMES or _OPTIONS & {_bare(name) for name in (*(given or {}), *os.environ)}:
        return given
    request_s = min(_REQUEST_S, max(1.0, limit_s / 2))
    return {
        **(given or {}),
        "timeout": f"{int(request_s * 1000)}ms",
        "connect_timeout": f"{int(min(_CONNECT_S, request_s) * 1000)}ms",
        "client_retry_timeout": f"{int(request_s)}",
    }


def _bare(name: str) -> str:
    """Returns the name of an option, or of an environment variable that Lance reads as an option, without prefix."""
    name = name.lower()
    return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)


class Calls(Executor):
    """Runs calls in up to `at_once` daemon threads, which end when this object is deleted. A process would wait at its
    end for the threads of a `ThreadPoolExecutor`, even if a call hangs.
    """

    def __init__(self, at_once: int, name: str) -> None:
        self._at_once, self._name = at_once, name
        self._started, self._starting = 0, threading.Lock()
        self._waiting: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def __del__(self) -> None:  # weakref.finalize has a registry, which must not change at the end of the process
        for _ in range(self._at_once):
            self._waiting.put(None)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs a call as soon as a thread is free, in the present context; returns its future result.

        Raises:
            RuntimeError: If no thread runs, and the process cannot start one.
        """
        if self._started < self._at_once:  # once all threads run, no lock is taken
            self._start_thread()
        future: Future[T] = Future()
        self._waiting.put((future, functools.partial(contextvars.copy_context().run, fn, *args, **kwargs)))
        return future

    def _start_thread(self) -> None:
        with self._starting:
            if self._started < self._at_once:
                name = f"{self._name}_{self._started}"
                try:
                    threading.Thread(target=_work, args=(self._waiting,), name=name, daemon=True).start()
                    self._started += 1
                except RuntimeError:  # too many threads in this process now: those that run do the call
                    if not self._started:
                        raise


def _work(waiting: "SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]") -> None:
    while (found := waiting.get()) is not None:
        future, call = found
        _running.add(future)  # before the look at `_ends`: a call that `_end` does not find here does not begin
        if _ends.is_set():
            future.cancel()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        _running.discard(future)
        del found, future, call  # else they would stay in memory until the next call


def result_of(future: Future[T], limit_s: float, progress: Callable[[], object] = lambda: None) -> T:
    """Returns the result of a call. Waits as long as `progress` changes at least once in `limit_s`.

    Raises:
        TimeoutError: If `progress` has not changed for that long. A call that has begun continues, but nobody waits for
            it; a call that has not begun is cancelled.
    """
    before, wait_s = None, min(limit_s, _SOON_S)  # most results come before `progress`, which costs time, is called
    while True:
        try:
            return future.result(min(wait_s, threading.TIMEOUT_MAX))
        except TimeoutError:
            if future.done():  # the call itself raised this error, or it has just ended
                return future.result()
            now = (progress(),)
            if now == before:
                future.cancel()
                raise TimeoutError(f"the storage has not answered for {limit_s:g} s") from None
            before, wait_s = now, limit_s


def requests_of(dataset: "lance.LanceDataset") -> int:
    """Returns how many requests of an open dataset its storage has answered: the progress of a long call."""
    return int(dataset.io_stats_snapshot().read_iops)


def within(limit_s: float, call: Callable[..., T], *args: Any, progress: Callable[[], object] = lambda: None) -> T:
    """Runs a call in another thread with a time limit, and returns its result; see `result_of`.

    Raises:
        TimeoutError: If `progress` has not changed for `limit_s`.
    """
    try:
        calls = _spare.pop()
    except IndexError:
        calls = Calls(1, "lance")
    result = result_of(calls.submit(call, *args), limit_s, progress)
    _spare.append(calls)  # its thread is free again; a thread whose call failed or hangs is not kept
    return result


# Free threads for `within`: starting one takes longer than opening a dataset. A forked child has none of them.
_spare: deque[Calls] = deque(maxlen=4)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_spare.clear)
    os.register_at_fork(after_in_child=_running.clear)  # else the child would wait at its end for its parent's calls


@atexit.register
def _end() -> None:
    """Waits for the calls that run, and lets no other begin. Most calls end soon; a call that hangs is not awaited."""
    _ends.set()
    wait(list(_running), _EXIT_S)
