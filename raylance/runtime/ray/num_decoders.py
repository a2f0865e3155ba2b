"""How many decode actors and threads each rank gets by `num_decoders="auto"` and `decode_threads="auto"`."""

import dataclasses
import importlib
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray

from raylance.environment.connection import current_session
from raylance.settings import MAX_AUTO_DECODERS, Options

logger = logging.getLogger(__name__)


def auto_decoders(world_size: int, decoder_cpus: float, ours: int = 0) -> int:
    """Returns the number of decode actors for each rank that fit into the CPUs that are free now, or held by `ours`,
    the number of actors that this process already has; at most `MAX_AUTO_DECODERS`.
    """
    free = float(ray.available_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    return min(int((free / max(decoder_cpus, 1e-9) + ours) / world_size), MAX_AUTO_DECODERS)


def supply(cpus: float) -> tuple[float, float, int | None]:
    """Returns the CPUs of the cluster; the free CPUs; and the number of actors and tasks, of any owner, that ask for
    `cpus` CPUs and wait for a node that has them, None if Ray does not say, no less than all if no node counts as many.
    An actor that neither runs nor waits has its CPUs and is starting.
    """
    total = float(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    free = float(ray.available_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    if not cpus:
        return total, free, 0
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    if cpus > max((float(node["Resources"].get("CPU", 0)) for node in nodes if node["Alive"]), default=0.0):
        return total, free, sys.maxsize  # all of them wait, also those that Ray does not count yet
    try:
        # `ray status` prints this, too. Ray's public interfaces need a dashboard, which not every cluster has.
        sdk: Any = importlib.import_module("ray.autoscaler.v2.sdk")
        with current_session():
            address = ray.get_runtime_context().gcs_address
        demands = sdk.get_cluster_status(address).resource_demands.ray_task_actor_demand
        found = [bundle for demand in demands for bundle in demand.bundles_by_count]
        return total, free, sum(int(each.count) for each in found if each.bundle.get("CPU") == cpus)
    except Exception:  # any error: this only helps to explain another failure
        logger.debug("Ray does not say what waits for CPUs", exc_info=True)
        return total, free, None


def options_of_ranks(options: Options, world_size: int, node_ids: Sequence[str] | None) -> list[Options]:
    """Returns the options of each rank, with "auto" values resolved for the cluster, which is asked only once.
    `node_ids` are the nodes of the ranks, None if unknown.
    """
    if options.num_decoders == "auto":  # counted at each start: a restarted run may find other CPUs free
        options = dataclasses.replace(options, auto_decoders=auto_decoders(world_size, options.decoder_cpus))
    if not node_ids or options.decode_threads != "auto":
        return [options] * world_size
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    ranks, cpus = Counter(node_ids), {node["NodeID"]: float(node["Resources"].get("CPU", 1)) for node in nodes}
    threads = [max(1, int(cpus.get(node, 1) / ranks[node])) for node in node_ids]
    return [dataclasses.replace(options, decode_threads=count) for count in threads]
