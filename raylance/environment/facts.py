"""Owns the facts in records about a loader's process and cluster; never starts Ray."""

import functools
import importlib
import os
import uuid

from raylance.environment.connection import current_session, long_call, ray_session


def cluster_cpus() -> float | None:
    """CPUs of the cluster as Ray counts them; None if Ray does not run, or does not answer."""
    session = ray_session()
    if not session:
        return None
    try:
        resources: dict[str, float] = long_call(session, importlib.import_module("ray").cluster_resources)
    except Exception:  # the head may be away for a moment, which must not end a run
        return None
    return resources.get("CPU")


def worker_cpus() -> float:
    """CPUs that Ray counts as this worker's; 0 for a driver, or if Ray does not run."""
    with current_session() as session:
        if not session:
            return 0.0
        try:
            assigned = importlib.import_module("ray").get_runtime_context().get_assigned_resources()
        except (AssertionError, AttributeError):  # Ray raises these in a driver, or in a client of one
            return 0.0
    return float(assigned.get("CPU", 0.0))


def node_cpus() -> int:
    """CPUs of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def placement_group() -> str:
    """An ID that exactly the workers of one start of a Ray Train run share; "" outside of a run."""
    with current_session() as session:
        group = importlib.import_module("ray").get_runtime_context().get_placement_group_id() if session else None
    return str(group or "")


def process_id() -> str:
    """A unique name of this process, because restarted containers may have the same host name and process ID."""
    return _id_of(os.getpid())


@functools.cache
def _id_of(pid: int) -> str:
    return f"{uuid.uuid4().hex}-{pid}"
