"""Which faults are of machines, which cost time, and which of rows and user code, which end the epoch; and how a
helper's error reaches the training process.
"""

import contextlib
import traceback
from collections.abc import Iterator

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RaySystemError,
    RayTaskError,
    RpcError,
    UnserializableException,
    WorkerCrashedError,
)

from raylance.dispatch.messages import Fault
from raylance.errors import HelperError

_HELPER_GONE = (
    RayActorError,
    OutOfMemoryError,
    NodeDiedError,
    WorkerCrashedError,
    LocalRayletDiedError,
    ActorUnschedulableError,
)
_ENDED, _TERMINATED = "Worker exit type: SYSTEM_ERROR", "SIGTERM"
_STORE_FULL = (ObjectStoreFullError, OutOfDiskError)
_MACHINE = (*_HELPER_GONE, *_STORE_FULL, ObjectLostError, RaySystemError, RpcError)


def cause_of(error: BaseException) -> BaseException:
    """Returns the error that a task raised, without Ray's wrappers."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error


def is_machine_fault(error: BaseException) -> bool:
    """Returns whether Ray reports a fault of the machines, so that the same work may succeed if it is repeated. A row
    may still be the cause; see `Fault.may_be_rows`.
    """
    return isinstance(cause_of(error), _MACHINE)


def is_helper_gone(error: BaseException) -> bool:
    """Returns whether an error of a helper's call means that the helper is gone.

    If the call itself raised the error (`RayTaskError`), the helper is alive, even if the cause is a lost input.
    """
    return not isinstance(error, RayTaskError) and isinstance(error, _HELPER_GONE)


def _advice(cause: BaseException) -> str:
    """Returns the advice for a fault that comes again and again."""
    if isinstance(cause, OutOfMemoryError):
        return (
            "A node runs out of memory: lower reader_bytes, inflight_bytes or num_decoders, or give the nodes "
            "of the helpers more of it."
        )
    if isinstance(cause, _STORE_FULL):
        return (
            "The object store of a node is full and cannot spill: keep fewer batches alive (on the CPU they are views "
            "of it), lower inflight_bytes, or give Ray more object_store_memory or disk."
        )
    if isinstance(cause, (ObjectLostError, NodeDiedError)):
        return "Nodes are lost faster than the work is done: look at what ends them."
    return "Look for a row that crashes the decoder, or for too little memory on the nodes of the helpers."


def fault_of(error: BaseException) -> Fault:
    """Describes a machine fault for the dispatcher by the class of its cause and the first line of its message."""
    cause = cause_of(error)
    lines = str(cause).strip().splitlines()
    what = f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
    # Only this text distinguishes a process that ended by itself from a lost node, `ray.kill` or Ray's memory monitor.
    has_ended = isinstance(cause, ActorDiedError) and _ENDED in str(cause) and _TERMINATED not in str(cause)
    return Fault(what=what, may_be_rows=has_ended, advice=_advice(cause), error=error)


def as_raised(error: BaseException) -> BaseException:
    """Returns the error to raise in the worker for an error that is not a machine fault."""
    cause = cause_of(error)
    if isinstance(cause, UnserializableException):  # only the helper can load the error
        return HelperError(_said("a helper raised an error that this process cannot load", str(cause)))
    return cause if isinstance(cause, Exception) else error


@contextlib.contextmanager
def errors_travel() -> Iterator[None]:
    """Replaces an error that cannot be sent to another process by one that can, with name, message and traceback.

    Raises:
        HelperError: Instead of such an error.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Lance's Rust code is not an Exception
        if isinstance(error, Exception) and _survives(error):
            raise
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        trace = "".join(traceback.format_exception(error))
        what = f"a helper raised {kind}: {error}, which cannot be sent to another process"
        raise HelperError(_said(what, trace)) from None


def _survives(error: Exception) -> bool:
    try:
        return type(ray.cloudpickle.loads(ray.cloudpickle.dumps(error))) is type(error)  # type: ignore[no-untyped-call]
    except Exception:  # its class may raise anything when it is pickled
        return False


def _said(what: str, trace: str) -> str:
    return (
        f"{what}. The epoch stops here; the batches before it were delivered. Fix the code that raised it; an "
        "exception that passes all its arguments on to super().__init__() arrives as it is. Where it was raised:\n"
        f"{trace}"
    )
