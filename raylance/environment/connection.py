"""Owns the way to Ray: which session this process is connected to, and that a call reaches this one or none; never
begins or ends one.

Where no session is, most calls of Ray begin one by themselves, from any thread. So all calls that are made for a loader
are made in here, where Ray can neither end nor begin: the lock is the one that Ray itself holds while it connects and
shuts down. It has no public name. Where a version of Ray has none, a session may still end under a call.
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from raylance.errors import HelperError

T = TypeVar("T")

_MOST_S = 60.0  # to wait for the lock: what holds it for longer hangs, and a second hang would say nothing

_of_fork: Any = None  # a lock: Ray's may be held by a thread that the fork does not have


def _forked() -> None:
    global _of_fork
    _of_fork = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def ray_session() -> str:
    """Names this process's connection to Ray, "" where there is none.

    A notebook may end one and begin another, at the same address or as another job of the same cluster: actors and
    objects of the one before are gone then.
    """
    with current_session() as session:
        return session


@contextlib.contextmanager
def current_session() -> Iterator[str]:
    """The session that there is, as `ray_session` names it; it neither ends nor begins in here. For short calls only:
    `ray.shutdown` waits for their end.
    """
    if "ray" not in sys.modules:  # DataLoader workers take large values too, and have no Ray
        yield ""
        return
    import ray

    lock = _of_fork or getattr(sys.modules.get("ray._private.worker"), "_connect_or_shutdown_lock", None)
    is_held = lock is not None and lock.acquire(timeout=_MOST_S)
    try:
        if not ray.is_initialized():
            yield ""
            return
        context = ray.get_runtime_context()
        yield f"{context.get_session_name()}/{context.get_job_id()}"
    finally:
        if is_held and lock is not None:
            lock.release()


@contextlib.contextmanager
def in_session(session: str) -> Iterator[None]:
    """As `current_session`, of a session that must be this one.

    Raises:
        HelperError: If it has ended.
    """
    with current_session() as current:
        if not session or current != session:
            raise _ended(session, current)
        yield


def long_call(session: str, call: Callable[[], T]) -> T:
    """Makes a call that takes long, such as one that asks other machines, and that begins no session by itself. It does
    not keep others from ending the session: that ends the call.

    Raises:
        HelperError: If the session has ended.
        Exception: As the call does.
    """
    with in_session(session):
        pass
    try:
        return call()
    except BaseException as error:  # Ray ends threads that wait for it as it ends itself: by SystemExit
        with current_session() as current:
            if current != session:
                raise _ended(session, current) from error
        raise


def fetch(refs: Any, session: str, timeout_s: float) -> Any:
    """What `ray.get` gives, by `long_call`."""
    import ray

    get = getattr(ray.get, "__wrapped__", ray.get)  # the one that begins no session
    return long_call(session, functools.partial(get, refs, timeout=timeout_s))


def _ended(session: str, current: str) -> HelperError:
    now = f"it is connected to {current} now" if current else "it is connected to none now"
    return HelperError(
        f"the Ray session {session or '(none)'}, which has this loader's helpers and their results, has ended in this "
        f"process ({now}): ray.shutdown() was called before the pass was over. The pass ends here; the batches before "
        "were delivered, and the loader's position is after them. Iterate over the loader again: new helpers start in "
        "the session that there is then, or threads do the work where there is none. To end Ray between two passes, "
        "call loader.close() before ray.shutdown()."
    )
