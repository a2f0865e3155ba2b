"""What tests ask of the session's Ray: its actors, its free CPUs, its object store; and ports for another Ray."""

import re
import socket
import time
from typing import Any

CPUS = 4


def start_ray() -> None:
    """Starts a Ray of this process. Ray gives its own node 30 s to register, which a loaded machine may exceed."""
    import ray

    for attempts_left in (2, 1, 0):
        try:
            ray.init(address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
            return
        except Exception as error:
            if "timed out during startup" not in str(error) or not attempts_left:
                raise
            ray.shutdown()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def helpers_of(loader: Any, kind: str) -> list[Any]:
    """Handles of a loader's actors of a kind, "ShardActor" or "DecodeActor", in the order in which they came."""
    from raylance.api.loader import consumer_of

    runtime = consumer_of(loader).session.runtime
    handles = [] if runtime is None else [helper.handle for helper in runtime._helpers.values()]
    return [handle for handle in handles if kind in repr(handle)]


def actors_of(loader: Any) -> tuple[Any, list[Any]]:
    """Handles of a loader's shard actor, and of its decode actors."""
    return next(iter(helpers_of(loader, "ShardActor")), None), helpers_of(loader, "DecodeActor")


def wait_for_free_cpus(cpus: int) -> None:
    import ray

    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) != cpus and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources().get("CPU", 0) == cpus


def in_object_store() -> int:
    import ray

    name = "object_store_memory"
    return int(ray.cluster_resources()[name] - ray.available_resources().get(name, 0))


def held_mib() -> int:
    """MiB that objects take in Ray's object store, also those whose owner has freed them and whose views live on."""
    import ray
    from ray._private.internal_api import memory_summary  # no public call counts them

    said = memory_summary(ray.get_runtime_context().gcs_address, stats_only=True)
    return int(re.findall(r"Plasma memory usage (\d+) MiB", said)[0])
