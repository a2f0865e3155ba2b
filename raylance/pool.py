"""Owns where helper actors run, within a deadline, and their replacement; never knows what they work on.

Helpers live outside the trainer's placement group and die with the worker that made them.
"""

import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Self

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylance.actors import DecodeActor, ShardActor
from raylance.decoding import Decoding
from raylance.errors import HelperError, PlacementError
from raylance.spec import Feed, Options

logger = logging.getLogger(__name__)

# A helper that dies takes nothing with it that the plan cannot tell again, so Ray's own restarts are not used: one
# mechanism for a killed process, a lost node and an explicit ray.kill, with a deadline for the new place.
_MAX_AUTO_DECODERS = 32
_NO_RESTARTS = {"max_restarts": 0, "max_task_retries": 0}


def ray_session() -> str:
    """Names the Ray session of this process, "" where there is none: a notebook may end one and begin another."""
    return str(ray.get_runtime_context().gcs_address) if ray.is_initialized() else ""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Helper:
    """A placed helper actor.

    Attributes:
        handle: Its handle.
        actor_id: Its ID, hex, as Ray's actor errors name it.
        outstanding: Items it was given that have not been collected.
        installed: Keys of the plans or decodings it knows.
        session: The Ray session it belongs to.
    """

    handle: Any
    actor_id: str
    outstanding: int = 0
    installed: set[str] = dataclasses.field(default_factory=set)
    session: str = dataclasses.field(default_factory=lambda: ray_session())

    def knows(self, key: str, value: Any) -> "Helper":
        """This helper, told what a key stands for unless it knows."""
        if key not in self.installed:
            self.handle.install.remote(key, value)
            self.installed.add(key)
        return self

    def kill(self) -> None:
        """Ends the actor now, unless it went with its Ray session."""
        if self.session == ray_session():
            ray.kill(self.handle)


def auto_decoders(world_size: int, decoder_cpus: float) -> int:
    """Decode actors for each rank that fit the CPUs that are free in the cluster now."""
    free = float(ray.available_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    return min(int(free / max(decoder_cpus, 1e-9) / world_size), _MAX_AUTO_DECODERS)


def place_shard_actor(feed: Feed, decode_threads: int, max_window_bytes: int, timeout_s: float) -> Helper:
    """Places a shard actor, on this worker's node where that is possible. It takes no CPU from Ray's count.

    Raises:
        PlacementError: If it is not running within the deadline.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    remote = ray.remote(ShardActor).options(num_cpus=0, scheduling_strategy=here, **_NO_RESTARTS)
    return _place([lambda: remote.remote(feed, decode_threads, max_window_bytes)], "shard actor", 0, timeout_s)[0]


def _place(starts: list[Callable[[], Any]], what: str, cpus: float, timeout_s: float) -> list[Helper]:
    handles = [start() for start in starts]
    ids = [handle.actor_id.remote() for handle in handles]
    _, pending = ray.wait(ids, num_returns=len(ids), timeout=timeout_s)
    if pending:
        for handle in handles:
            ray.kill(handle)
        total = ray.cluster_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
        free = ray.available_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
        raise PlacementError(
            f"{len(pending)} of {len(ids)} {what}s ({cpus:g} CPU each, {cpus * len(ids):g} together) found no place in "
            f"{timeout_s:g} s: the cluster counts {total:g} CPUs, of which {free:g} are free now. Training stops here "
            "rather than hang. Ask for fewer (num_decoders=…; 0 decodes in threads of the shard actors, which always "
            "find a place), add nodes, or raise placement_timeout_s if the cluster is still scaling up."
        )
    try:
        return [Helper(handle=handle, actor_id=ray.get(ref)) for handle, ref in zip(handles, ids, strict=True)]
    except RayActorError as error:
        for handle in handles:
            ray.kill(handle)
        raise HelperError(
            f"a {what} could not start; nothing was delivered. Its constructor or its process said: {error}"
        ) from error


class DecoderPool:
    """The decode actors of one process, shared by all its loaders, so that validation needs no second set.

    Leases are counted; the last one to be returned ends the actors.
    """

    _shared: ClassVar[dict[tuple[str, float], "DecoderPool"]] = {}  # by Ray session and CPUs of an actor
    # Reentrant: a lease may be returned by the garbage collector, in the middle of taking another.
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, cpus: float) -> None:
        """Makes an empty pool.

        Args:
            cpus: CPUs that one decode actor takes from Ray's count.
        """
        self._cpus = cpus
        self._helpers: list[Helper] = []
        self._leases = 0

    @classmethod
    def lease(cls, count: int, cpus: float, timeout_s: float) -> Self:
        """Gives this process's pool, grown to at least `count` actors.

        Raises:
            PlacementError: If they are not running within the deadline.
        """
        with cls._lock:
            pool = cls._shared.setdefault((ray_session(), cpus), cls(cpus))
            pool._leases += 1
            try:
                pool._grow(count - len(pool._helpers), timeout_s)
            except BaseException:
                pool.give_back()
                raise
            return pool  # type: ignore[return-value]

    def give_back(self) -> None:
        """Returns one lease."""
        with self._lock:
            self._leases -= 1
            if self._leases == 0:
                for helper in self._helpers:
                    helper.kill()
                self._helpers.clear()

    def _grow(self, count: int, timeout_s: float) -> None:
        if count > 0:
            remote = ray.remote(DecodeActor).options(num_cpus=self._cpus, scheduling_strategy="DEFAULT", **_NO_RESTARTS)
            self._helpers += _place([remote.remote] * count, "decode actor", self._cpus, timeout_s)

    def __len__(self) -> int:
        return len(self._helpers)

    def least_busy(self, key: str, decoding: Decoding) -> Helper:
        """The decoder with the fewest outstanding items, told how to decode for `key`."""
        # The newest of equals: where several died at once, what is done again must not go to the next dead one.
        return min(reversed(self._helpers), key=lambda candidate: candidate.outstanding).knows(key, decoding)

    def replace(self, actor_id: str, timeout_s: float) -> bool:
        """Replaces a dead decoder; goes on with fewer when there is no place for a new one.

        Returns:
            Whether the actor was one of this pool (it is not, when it was replaced already).

        Raises:
            PlacementError: If it was the last one and no other could be placed.
        """
        dead = [helper for helper in self._helpers if helper.actor_id == actor_id]
        for helper in dead:
            self._helpers.remove(helper)
            try:
                self._grow(1, timeout_s)
            except PlacementError as error:
                if not self._helpers:
                    raise
                logger.warning("going on with %d decode actors: %s", len(self._helpers), error)
        return bool(dead)


class Helpers:
    """The helpers of one loader: its shard actor, and its lease of the process's decoders. Picklable until started.

    Attributes:
        shard: The shard actor, once started.
        pool: The decoders, where decode actors decode.
    """

    def __init__(self, options: Options, world_size: int) -> None:
        """Starts nothing.

        Args:
            options: How many helpers, and how soon.
            world_size: Ranks that share the cluster.
        """
        self._options, self._world_size = options, world_size
        self.shard: Helper | None = None
        self.pool: DecoderPool | None = None
        self._give_back: weakref.finalize[..., Any] | None = None

    def start(self, feed: Feed) -> Helper:
        """Places the helpers, unless they are there already; returns the shard actor.

        Args:
            feed: What the shard actor serves.

        Raises:
            PlacementError: If they are not running within the deadline.
        """
        if self.shard is not None and self.shard.session == ray_session():
            return self.shard
        self.close()
        options = self._options
        decoders = options.num_decoders if feed.decoding is not None else 0
        if decoders == "auto":
            decoders = auto_decoders(self._world_size, options.decoder_cpus)
        if decoders:
            self.pool = DecoderPool.lease(decoders, options.decoder_cpus, options.placement_timeout_s)
            self._give_back = weakref.finalize(self, self.pool.give_back)
            self._give_back.atexit = False  # Ray ends the actors of an ending process itself
        return self.new_shard(feed)

    def new_shard(self, feed: Feed) -> Helper:
        """Places a shard actor, the first one or one for a dead one."""
        options = self._options
        threads = options.decode_threads if self.pool is None else 0
        self.shard = place_shard_actor(feed, threads, options.max_window_bytes, options.placement_timeout_s)
        return self.shard

    def close(self) -> None:
        """Ends the shard actor and returns the lease."""
        if self.shard is not None:
            self.shard.kill()
            self.shard = None
        if self._give_back is not None:
            self._give_back()
            self._give_back = self.pool = None
