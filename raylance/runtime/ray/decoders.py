"""Owns the decode actors of this process, shared by all its loaders, and what the cluster has room for; never knows
what they work on.

A loader holds actors, as many as it wants; those that another loader holds already are taken first, so that validation
needs no second set. The last holder to let go of an actor ends it.
"""

import dataclasses
import importlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray

from raylance.environment.connection import current_session, ray_session
from raylance.runtime.ray.decode_actor import DecodeActor
from raylance.runtime.ray.faults import is_helper_gone
from raylance.settings import Options

# A helper that dies takes nothing with it that the plan cannot tell again, so Ray's own restarts are not used: one
# mechanism for a killed process, a lost node and an explicit ray.kill, with a deadline for the new place.
NO_RESTARTS = {"max_restarts": 0, "max_task_retries": 0}
_MAX_AUTO_DECODERS = 32


class HeldActor:
    """A helper actor, which ends when nobody holds it."""

    def __init__(self, handle: Any, place: tuple[str, float], holder: str) -> None:
        self.handle, self.place = handle, place  # Ray session, and the CPUs that it takes
        self.pulse = handle.actor_id.remote()  # resolves once it runs
        self.holders = {holder}  # keys of loaders, which name their decoding by them
        self._calls: deque[tuple[str, Future[Any]]] = deque()  # of all holders, in the order of its work
        self._lock = threading.RLock()  # reentrant, as that of the module

    def call(self, holder: str, send: Callable[[], tuple[Any, Any]]) -> tuple[Any, "Future[Any]"]:
        """Sends a call of a holder; returns its result's reference, and the future of its receipt."""
        with self._lock:
            while self._calls and _is_answered(self._calls[0][1]):
                self._calls.popleft()
            result, receipt = send()
            future: Future[Any] = receipt.future()
            self._calls.append((holder, future))
        return result, future

    def is_at_work_for(self, holder: str) -> bool:
        """Whether the first call that was not answered, if there is one, is this holder's. Once it is dead, that is
        the call that it was at, as an actor takes one after the other.
        """
        with self._lock:
            return next((of == holder for of, future in self._calls if not _is_answered(future)), True)


def _is_answered(future: "Future[Any]") -> bool:
    error = future.exception() if future.done() else None
    return future.done() and (error is None or not is_helper_gone(error))


logger = logging.getLogger(__name__)

_actors: list[HeldActor] = []
_lock = threading.RLock()  # reentrant: the garbage collector may let go of one in the middle of taking another


def hold(holder: str, cpus: float) -> HeldActor:
    """Gives a decode actor that this holder does not hold yet, a new one where there is none."""
    with current_session() as session, _lock:  # in this order everywhere
        place = (session, cpus)
        _actors[:] = [actor for actor in _actors if actor.place[0] == place[0]]  # the others went with their session
        for actor in _actors:
            if actor.place == place and holder not in actor.holders:
                break
        else:
            remote = ray.remote(DecodeActor).options(num_cpus=cpus, scheduling_strategy="DEFAULT", **NO_RESTARTS)
            actor = HeldActor(remote.remote(), place, holder)
            _actors.append(actor)
        actor.holders.add(holder)
        return actor


def let_go(holder: str, actor: HeldActor, *, is_dead: bool) -> None:
    """Gives an actor back; a dead one is not given out again."""
    with current_session() as session, _lock:
        actor.holders.discard(holder)
        ends = is_dead or not actor.holders
        if ends and actor in _actors:
            _actors.remove(actor)
        if actor.place[0] != session:
            return
        if ends:
            ray.kill(actor.handle)
        else:
            actor.handle.forget.remote(holder)


def count_here(cpus: float) -> int:
    """Decode actors that this process has."""
    return sum(actor.place == (ray_session(), cpus) for actor in _actors)


def auto_decoders(world_size: int, decoder_cpus: float, ours: int = 0) -> int:
    """Decode actors for each rank that fit the CPUs that are free in the cluster now, or taken by `ours` already."""
    free = float(ray.available_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    return min(int((free / max(decoder_cpus, 1e-9) + ours) / world_size), _MAX_AUTO_DECODERS)


def supply(cpus: float) -> tuple[float, float, int | None]:
    """CPUs of the cluster, those that are free, and how many actors and tasks, anybody's, wait for a node that has so
    many of them; None where Ray does not say. An actor that neither waits nor runs has its CPUs, and its process is
    starting.
    """
    total = float(ray.cluster_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    free = float(ray.available_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    if not cpus:
        return total, free, 0
    try:
        # What `ray status` prints. Ray's public ways to ask need a dashboard, which not every cluster has.
        sdk: Any = importlib.import_module("ray.autoscaler.v2.sdk")
        with current_session():
            address = ray.get_runtime_context().gcs_address
        demands = sdk.get_cluster_status(address).resource_demands.ray_task_actor_demand
        found = [bundle for demand in demands for bundle in demand.bundles_by_count]
        return total, free, sum(int(each.count) for each in found if each.bundle.get("CPU") == cpus)
    except Exception:  # whatever it raises: it is asked in order to say why something else failed
        logger.debug("Ray does not say what waits for CPUs", exc_info=True)
        return total, free, None


def options_of_ranks(options: Options, world_size: int, node_ids: Sequence[str] | None) -> list[Options]:
    """The options of each rank, with what depends on the cluster resolved; the cluster is asked once. `node_ids` are
    the nodes of the ranks, where they are known.
    """
    if options.num_decoders == "auto":  # counted at each start: a restarted run may find other CPUs free
        options = dataclasses.replace(options, auto_decoders=auto_decoders(world_size, options.decoder_cpus))
    if not node_ids or options.decode_threads != "auto":
        return [options] * world_size
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    ranks, cpus = Counter(node_ids), {node["NodeID"]: float(node["Resources"].get("CPU", 1)) for node in nodes}
    threads = [max(1, int(cpus.get(node, 1) / ranks[node])) for node in node_ids]
    return [dataclasses.replace(options, decode_threads=count) for count in threads]
