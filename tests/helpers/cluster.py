"""Owns what tests ask of the session's Ray: its actors, its free CPUs, its object store."""

import re
import time
from typing import Any

CPUS = 4


def actors_of(loader: Any) -> tuple[Any, list[Any]]:
    """Handles of a loader's shard actor, and of its decode actors."""
    runtime = loader._session.runtime
    if runtime is None:
        return None, []
    by_kind: dict[str, list[Any]] = {"reader": [], "decoder": []}
    for number, helper in runtime._helpers.items():
        by_kind[loader._session.pool._helpers[number].kind].append(helper.handle)
    return next(iter(by_kind["reader"]), None), by_kind["decoder"]


def wait_for_free_cpus(cpus: int) -> None:
    """Waits until what earlier tests have ended gives its CPUs back; what they forgot to end is an error."""
    import ray

    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) != cpus and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources().get("CPU", 0) == cpus


def in_object_store() -> int:
    """Bytes of Ray's object store in use, of the node that holds this process."""
    import ray
    from ray._private.internal_api import memory_summary  # Ray has no public way to ask

    told = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    found = re.search(r"Plasma memory usage (\d+) MiB", told)
    assert found is not None
    return int(found[1]) << 20
