"""Owns how many helper actors there are and which gets work, and their replacement; never knows what they work on."""

import logging
import threading
import time
import uuid
import weakref
from typing import Any, ClassVar

import ray
from ray.exceptions import RayActorError, RayError

from raylance.errors import HelperError, PlacementError
from raylance.runtime.actors import DecodeActor
from raylance.runtime.faults import first_line
from raylance.runtime.placement import NO_RESTARTS, Helper, no_place, no_start, place_shard_actor
from raylance.settings import Feed, Options
from raylance.source.sharing import ray_session

logger = logging.getLogger(__name__)

_MAX_AUTO_DECODERS = 32
_LOOK_S = 0.5  # between looks at the clock while helpers are awaited


def auto_decoders(world_size: int, decoder_cpus: float, ours: int = 0) -> int:
    """Decode actors for each rank that fit the CPUs that are free in the cluster now, or taken by `ours` already."""
    free = float(ray.available_resources().get("CPU", 0))  # type: ignore[no-untyped-call]
    return min(int((free / max(decoder_cpus, 1e-9) + ours) / world_size), _MAX_AUTO_DECODERS)


def cpus_by_node() -> dict[str, float]:
    """CPUs of each node by its ID, as Ray counts them."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: float(node["Resources"].get("CPU", 1)) for node in nodes}


class DecoderPool:
    """The decode actors of one process, shared by all its loaders, so that validation needs no second set.

    Leases are counted; the last one to be returned ends the actors. An actor that dies is replaced beside the others:
    nobody waits for it while one of them is well.
    """

    _shared: ClassVar[dict[tuple[str, float], "DecoderPool"]] = {}  # by Ray session and CPUs of an actor
    # Reentrant: a lease may be returned by the garbage collector, in the middle of taking another.
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, cpus: float) -> None:
        """Makes an empty pool, which counts its `deaths`: of actors that ran.

        Args:
            cpus: CPUs that one decode actor takes from Ray's count.
        """
        self._cpus = cpus
        self._helpers: list[Helper] = []
        self._leases = 0
        self._timeout_s = 0.0
        self.deaths = 0
        self._failures: list[RayError] = []  # of actors that died as they started, since they are awaited

    @classmethod
    def here(cls, cpus: float) -> "DecoderPool | None":
        """This process's pool, where there is one."""
        return cls._shared.get((ray_session(), cpus))

    @classmethod
    def lease(cls, count: int, cpus: float, timeout_s: float, *, waits: bool) -> "DecoderPool":
        """Gives this process's pool, grown to at least `count` actors.

        Args:
            count: Actors.
            cpus: CPUs of each.
            timeout_s: Seconds that they may take to find their place.
            waits: Whether to wait until all of them run; otherwise those that find no place are done without.

        Raises:
            PlacementError: If they are waited for, and not running within the deadline.
            HelperError: If one dies as it starts.
        """
        with cls._lock:
            pool = cls._shared.setdefault((ray_session(), cpus), cls(cpus))
            pool._leases += 1
            pool._timeout_s = timeout_s
            started = [pool._start() for _ in range(count - len(pool._helpers))]
        try:
            if waits:
                pool._await(count)
        except BaseException:
            for helper in started:
                pool._drop(helper)
            pool.give_back()
            raise
        return pool

    def give_back(self, key: str | None = None) -> None:
        """Returns one lease.

        Args:
            key: What the decoders knew for the one who held it, which they forget.
        """
        with self._lock:
            self._leases -= 1
            for helper in self._helpers:
                if self._leases == 0:
                    helper.kill()
                elif key is not None:
                    helper.forget(key)
            if self._leases == 0:
                self._helpers.clear()
                for place in [place for place, pool in self._shared.items() if pool is self]:
                    del self._shared[place]

    def __len__(self) -> int:
        """Actors that run or are awaited."""
        return len(self._helpers)

    @property
    def running(self) -> int:
        """Actors that run."""
        return sum(helper.running for helper in self._helpers)

    def least_busy(self, *, proven: bool) -> Helper | None:
        """The running decoder with the fewest outstanding items, or None.

        Args:
            proven: Leave out those that have not answered since another one died: where several died at once, work
                that is done again must not go to the next dead one.
        """
        self._look()
        able = [helper for helper in self._helpers if helper.running and not (proven and helper.pulse is not None)]
        return min(able, key=lambda helper: helper.outstanding, default=None)

    def await_one(self) -> None:
        """Waits for an answer of any decoder that runs, or else for one to run.

        Raises:
            PlacementError: If none runs within the deadline.
            HelperError: If it dies as it starts.
        """
        if self.running:
            self._look(wait=True)
        else:
            self._await(1)

    def lost(self, helper: Helper) -> None:
        """Takes a dead decoder out, and starts another one, which may take its time."""
        if helper not in self._helpers:  # it was replaced already
            return
        self._replace(helper)
        for other in self._helpers:  # it seldom dies alone
            other.ask()

    def _replace(self, helper: Helper) -> None:
        self.deaths += 1
        self._drop(helper)
        self._start()

    def _start(self) -> Helper:
        remote = ray.remote(DecodeActor).options(num_cpus=self._cpus, scheduling_strategy="DEFAULT", **NO_RESTARTS)
        helper = Helper(handle=remote.remote(), late=time.monotonic() + self._timeout_s).ask()
        self._helpers.append(helper)
        return helper

    def _drop(self, helper: Helper) -> None:
        if helper in self._helpers:
            self._helpers.remove(helper)
            helper.kill()

    def _await(self, count: int) -> None:
        late = time.monotonic() + self._timeout_s
        self._failures.clear()
        while self.running < count:
            for error in self._failures:
                if (isinstance(error, RayActorError) and error.actor_init_failed) or time.monotonic() > late:
                    raise HelperError(no_start("decode actor", error)) from error
            if time.monotonic() > late:
                missing = count - self.running
                raise PlacementError(no_place(missing, count, "decode actor", self._cpus, self._timeout_s))
            if len(self) < count and time.monotonic() + _LOOK_S < late:  # one died as it started
                self._start()
            self._look(wait=True)

    def _look(self, *, wait: bool = False) -> None:
        """Notes which helpers have answered, died or are late; waits a moment for the first where that is asked."""
        asked = {helper.pulse: helper for helper in self._helpers if helper.pulse is not None}
        if wait and asked:
            ray.wait(list(asked), timeout=_LOOK_S)
        elif wait:
            time.sleep(_LOOK_S)
        answers = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for answer in answers:
            helper = asked[answer]
            try:
                ray.get(answer)
                helper.pulse, helper.running = None, True
            except RayError as error:
                if helper.running:  # its items tell the same to those who wait for them
                    self._replace(helper)
                else:
                    self._drop(helper)
                    self._failures.append(error)
                    logger.warning("a decode actor died as it started: %s", first_line(error))
        for helper in [helper for helper in self._helpers if not helper.running and time.monotonic() > helper.late]:
            self._drop(helper)
            logger.warning("a decode actor found no place in time; going on with %d", len(self._helpers))


class Helpers:
    """The helpers of one loader: its shard actor, and its lease of the process's decoders. Picklable until started.

    Attributes:
        key: Names the feed's decoding to the decoders.
        shard: The shard actor, once started.
        pool: The decoders, where decode actors decode.
    """

    def __init__(self, options: Options, world_size: int) -> None:
        """Starts nothing.

        Args:
            options: How many helpers, and how soon.
            world_size: Ranks that share the cluster.
        """
        self._options, self._world_size, self.key = options, world_size, uuid.uuid4().hex
        self.shard: Helper | None = None
        self.pool: DecoderPool | None = None
        self._give_back: weakref.finalize[..., Any] | None = None
        self._replaced = 0

    def start(self, feed: Feed) -> Helper:
        """Places the helpers, unless they are there already; returns the shard actor.

        Args:
            feed: What the shard actor serves.

        Raises:
            PlacementError: If they are not running within the deadline.
            HelperError: If one dies as it starts.
        """
        if self.shard is not None and self.shard.session == ray_session():
            return self.shard
        self.close()
        options = self._options
        count = self._decoders() if feed.decoding is not None else 0
        if count:
            waits = options.num_decoders != "auto"
            self.pool = DecoderPool.lease(count, options.decoder_cpus, options.placement_timeout_s, waits=waits)
            self._give_back = weakref.finalize(self, self.pool.give_back, self.key)
            self._give_back.atexit = False  # Ray ends the actors of an ending process itself
        return self.new_shard(feed)

    def _decoders(self) -> int:
        options = self._options
        if options.num_decoders != "auto":
            return options.num_decoders
        pool = DecoderPool.here(options.decoder_cpus)
        ours = 0 if pool is None else len(pool)
        fitting = options.auto_decoders
        if fitting is None:
            fitting = auto_decoders(self._world_size, options.decoder_cpus, ours)
        return max(ours, fitting)

    def new_shard(self, feed: Feed) -> Helper:
        """Places a shard actor, the first one or one for a dead one."""
        if self.shard is not None:
            self.shard.kill()
            self._replaced += 1
        self.shard = place_shard_actor(feed, self._options)
        return self.shard

    @property
    def decoders_wanted(self) -> int:
        """Decoders at work when all run, the shard actor where it decodes included."""
        return max(1, len(self.pool) if self.pool is not None else 1)

    @property
    def decoders_running(self) -> int:
        """Decoders at work now, likewise."""
        return max(1, self.pool.running if self.pool is not None else 1)

    def decoder(self, *, proven: bool) -> Helper | None:
        """The decoder to give work to; None where the shard actor decodes.

        Args:
            proven: Only one that has answered since the last one died.

        Raises:
            PlacementError: If the last one is lost and no other is running within the deadline.
        """
        while self.pool is not None:
            found = self.pool.least_busy(proven=proven)
            if found is not None:
                return found
            if self._options.num_decoders == "auto" and not self.pool.running:
                return None
            self.pool.await_one()
        return None

    def lost_decoder(self, helper: Helper) -> None:
        """Has a dead decoder replaced."""
        if self.pool is not None:
            self.pool.lost(helper)

    @property
    def replaced(self) -> int:
        """Helpers that died and were replaced."""
        return self._replaced + (self.pool.deaths if self.pool is not None else 0)

    def close(self) -> None:
        """Ends the shard actor and returns the lease."""
        if self.shard is not None:
            self.shard.kill()
            self.shard = None
        if self._give_back is not None:
            self._give_back()
            self._give_back = self.pool = None
