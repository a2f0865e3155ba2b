"""The Ray session of this process, and the guarantee that a call reaches that session or none.

Without a session, most calls of Ray start one by themselves, from any thread. So short calls for a loader hold the lock
that Ray itself holds while it connects or shuts down: no session can start or end meanwhile. The lock has no public
name. During a `long_call`, or with a version of Ray that has no such lock, a session may still end.
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

_MOST_S = 60.0  # longest wait for the lock; after it, the call is made without the lock, because its holder hangs

_of_fork: Any = None  # the lock of a forked process, because Ray's may be held by a thread that the fork does not have


def _forked() -> None:
    global _of_fork
    _of_fork = threading.RLock()


os.register_at_fork(after_in_child=_forked)


def ray_session() -> str:
    """Returns a name of this process's Ray session; "" if there is none. A notebook may end a session and start another
    one, at the same address or as another job of the same cluster: actors and objects of the first are then gone.
    """
    with current_session() as session:
        return session


@contextlib.contextmanager
def current_session() -> Iterator[str]:
    """Yields the name of the current session, as `ray_session`. No session starts or ends during the body, for which
    `ray.shutdown` waits: keep it short.
    """
    if "ray" not in sys.modules:  # DataLoader workers use shared values without Ray
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
    """Keeps `session` the current one during the body, as `current_session`. Raises HelperError if it has ended."""
    with current_session() as current:
        if not session or current != session:
            raise _ended(session, current)
        yield


def long_call(session: str, call: Callable[[], T]) -> T:
    """Returns the result of a long call that starts no session. Raises HelperError if the session has ended."""
    with in_session(session):
        pass
    try:
        return call()
    except BaseException as error:  # when Ray ends, it raises SystemExit in waiting threads
        with current_session() as current:
            if current != session:
                raise _ended(session, current) from error
        raise


def fetch(refs: Any, session: str, timeout_s: float) -> Any:
    """Returns the result of `ray.get`, which is called by `long_call`."""
    import ray

    get = getattr(ray.get, "__wrapped__", ray.get)  # without the wrapper that starts a session
    return long_call(session, functools.partial(get, refs, timeout=timeout_s))


def _ended(session: str, current: str) -> HelperError:
    now = f"it is connected to {current} now" if current else "it is connected to none now"
    return HelperError(
        f"the Ray session {session or '(none)'}, which has this loader's helpers and their results, has ended in this "
        f"process ({now}): ray.shutdown() was called during the pass. The pass ends here; the batches before were "
        "delivered, and the loader's position is after them. Iterate over the loader again: new helpers start in the "
        "current session, or threads do the work without one. To end Ray between two passes, call loader.close() "
        "before ray.shutdown()."
    )
