"""The thread that ends what the garbage collector found.

The garbage collector runs in any thread, at any line: also while a lock is held, or in the thread of Ray's callbacks,
in which a call of Ray would wait for itself. So finalisers and the ends of generators only leave a note, which waits
for no lock.
"""

import contextlib
import functools
import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from raylance.source.limits import Calls

logger = logging.getLogger(__name__)

_thread: Calls | None = None


class _Collecting(threading.local):
    """Whether the garbage collector runs in this thread."""

    now = False


_collecting = _Collecting()


def _see_collector(phase: str, _: object) -> None:
    _collecting.now = phase == "start"


def start_thread() -> None:
    """Starts the thread, once in each process. `leave` cannot do it, because starting a thread takes locks."""
    global _thread
    if _thread is None:
        thread = Calls(1, "raylance-notes")
        thread.submit(int)  # the first call starts the thread
        if _see_collector not in gc.callbacks:
            gc.callbacks.append(_see_collector)
        _thread = thread


def leave(end: Callable[..., object], *args: object) -> None:
    """Leaves a note that the thread soon calls `end` with `args`. Does nothing in a fork, because what a fork collects
    belongs to its parent. At the end of the process, notes are dropped.
    """
    if _thread is not None:
        _thread.submit(_call, end, *args)


@contextlib.contextmanager
def at_end(end: Callable[[], object]) -> Iterator[None]:
    """Calls `end` after the body, which is part of a generator. If the garbage collector or another thread than the
    first one leaves the generator in mid-body, leaves a note instead. A loop's `break` does neither.
    """
    call, thread = end, threading.get_ident()
    try:
        yield
    except GeneratorExit:
        if _is_elsewhere(thread):
            call = functools.partial(leave, end)
        raise
    finally:
        call()


class Ending:
    """Calls a function once: when `end` is called, when the owner is collected, or at the end of the process. If the
    garbage collector or another thread than the first one collects the owner, it leaves a note instead. A loop's
    `break` does neither.
    """

    def __init__(self, owner: object, end: Callable[[], object]) -> None:
        self._finalize = weakref.finalize(owner, _end, end, threading.get_ident())

    def end(self) -> None:
        """Calls the function, or leaves a note, unless that was done."""
        self._finalize()

    def forget(self) -> None:
        """Makes sure that the function is not called any more."""
        self._finalize.detach()


def _end(end: Callable[[], object], thread: int) -> None:
    if _is_elsewhere(thread):
        leave(end)
    else:
        end()


def _is_elsewhere(thread: int) -> bool:
    """Whether another thread than this one runs now, or the garbage collector."""
    return threading.get_ident() != thread or _collecting.now


def _call(end: Callable[..., object], *args: object) -> None:
    try:
        end(*args)
    except Exception:  # nobody waits for it, and later notes must still be read
        logger.warning("something that was no longer used could not be ended", exc_info=True)


def _forget() -> None:
    global _thread
    _thread = None


os.register_at_fork(after_in_child=_forget)
