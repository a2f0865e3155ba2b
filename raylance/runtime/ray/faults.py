"""Owns telling faults of the machines, which cost time, from those of rows and user code, which end the epoch; and that
an error of a helper reaches the worker. Never does anything about them.
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
    """What was raised, where Ray says that a task raised it."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error


def is_machine_fault(error: BaseException) -> bool:
    """Whether the same work may well succeed when it is done again: nothing is wrong with the rows."""
    return isinstance(cause_of(error), _MACHINE)


def is_helper_gone(error: BaseException) -> bool:
    """Whether the helper whose call gave this error is gone. One that raised it itself lives: its input was lost, or
    its output found no room.
    """
    return not isinstance(error, RayTaskError) and isinstance(error, _HELPER_GONE)


def _advice(cause: BaseException) -> str:
    """What to do about a fault that does not go away."""
    if isinstance(cause, OutOfMemoryError):
        return (
            "A node runs out of memory: lower max_window_bytes, max_inflight_bytes or num_decoders, or give the nodes "
            "of the helpers more of it."
        )
    if isinstance(cause, _STORE_FULL):
        return (
            "The object store of a node is full and cannot spill: keep fewer batches alive (on the CPU they are views "
            "of it), lower max_inflight_bytes, or give Ray more object_store_memory or disk."
        )
    if isinstance(cause, (ObjectLostError, NodeDiedError)):
        return "Nodes are lost faster than the work is done: look at what ends them."
    return "Look for a row that crashes the decoder, or for too little memory on the nodes of the helpers."


def fault_of(error: BaseException) -> Fault:
    """A fault of the machines as the dispatcher takes it: the kind of its cause and the first line of what it says."""
    cause = cause_of(error)
    lines = str(cause).strip().splitlines()
    what = f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
    # Ray has no other sign that tells a process that ended by itself from a lost node, `ray.kill` and its own monitor.
    has_ended = isinstance(cause, ActorDiedError) and _ENDED in str(cause) and _TERMINATED not in str(cause)
    return Fault(what=what, may_be_rows=has_ended, advice=_advice(cause), error=error)


def as_raised(error: BaseException) -> BaseException:
    """The error to raise in the worker for one that is no fault of the machines."""
    cause = cause_of(error)
    if isinstance(cause, UnserializableException):  # it can be loaded in the helper, and not here
        return HelperError(_said("a helper raised an error that this process cannot load", str(cause)))
    return cause if isinstance(cause, Exception) else error


@contextlib.contextmanager
def errors_travel() -> Iterator[None]:
    """Makes an error that cannot be sent to another process one that can, with its name, message and traceback.

    Raises:
        HelperError: In its place.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Lance's Rust code is no Exception
        if isinstance(error, Exception) and _survives(error):
            raise
        kind = f"{type(error).__module__}.{type(error).__qualname__}"
        trace = "".join(traceback.format_exception(error))
        what = f"a helper raised {kind}: {error}, which cannot be sent to another process"
        raise HelperError(_said(what, trace)) from None


def _survives(error: Exception) -> bool:
    try:
        return type(ray.cloudpickle.loads(ray.cloudpickle.dumps(error))) is type(error)  # type: ignore[no-untyped-call]
    except Exception:  # whatever its class does when it is pickled: this is the question
        return False


def _said(what: str, trace: str) -> str:
    return (
        f"{what}. The epoch stops here; the batches before it were delivered. Mend what raised it; an exception that "
        f"passes all its arguments on to super().__init__() arrives as it is. Where it was raised:\n{trace}"
    )
