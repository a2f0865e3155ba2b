"""The facts about a loader's process and cluster that records hold."""

import functools
import importlib
import os
import uuid

from raylance.environment.connection import current_session, long_call, ray_session

_POLL_S = 2.0  # the default of Ray Train


def cluster_cpus() -> float | None:
    """Returns the cluster's CPUs as Ray counts them; None if Ray does not run, or does not answer."""
    session = ray_session()
    if not session:
        return None
    try:
        resources: dict[str, float] = long_call(session, importlib.import_module("ray").cluster_resources)
    except Exception:  # the head may be away for a moment, which must not end a run
        return None
    return resources.get("CPU")


def worker_cpus() -> float:
    """Returns the CPUs that Ray assigned to this worker; 0 for a driver, or if Ray does not run."""
    with current_session() as session:
        if not session:
            return 0.0
        try:
            assigned = importlib.import_module("ray").get_runtime_context().get_assigned_resources()
        except (AssertionError, AttributeError):  # Ray raises these in a driver, or in a client of one
            return 0.0
    return float(assigned.get("CPU", 0.0))


def node_cpus() -> int:
    """Returns the number of CPUs of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def poll_s() -> float:
    """Returns the seconds between two questions of Ray Train to its workers, which take their reports."""
    try:
        return float(os.environ.get("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", _POLL_S))
    except ValueError:
        return _POLL_S


def placement_group() -> str:
    """Returns an ID that all workers of one start of a Ray Train run share, and no others; "" outside of a run."""
    with current_session() as session:
        group = importlib.import_module("ray").get_runtime_context().get_placement_group_id() if session else None
    return str(group or "")


def process_id() -> str:
    """Returns a unique name of this process. Restarted containers may have the same host name and process ID."""
    return _id_of(os.getpid())


@functools.cache
def _id_of(pid: int) -> str:
    return f"{uuid.uuid4().hex}-{pid}"
