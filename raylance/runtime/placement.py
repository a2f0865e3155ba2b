"""Owns one helper actor: what is known of it, where the shard actor runs, and what is said when there is no place;
never knows what helpers work on.

Helpers live outside the trainer's placement group and die with the worker that made them.
"""

import dataclasses
import logging
import time
from typing import Any, Self

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylance.errors import HelperError, PlacementError
from raylance.runtime.actors import ShardActor
from raylance.runtime.faults import first_line
from raylance.settings import Feed, Options
from raylance.source.sharing import ray_session

logger = logging.getLogger(__name__)

# A helper that dies takes nothing with it that the plan cannot tell again, so Ray's own restarts are not used: one
# mechanism for a killed process, a lost node and an explicit ray.kill, with a deadline for the new place.
NO_RESTARTS = {"max_restarts": 0, "max_task_retries": 0}
_PAUSE_S = 1.0  # before another shard actor is placed for one that died as it started


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Helper:
    """A helper actor.

    Attributes:
        handle: Its handle.
        pulse: What resolves once it answers; None where nothing is asked of it.
        late: When it is given up, by the monotonic clock, unless it runs by then.
        running: Whether it has answered once.
        outstanding: Items it was given that have not been collected.
        installed: Keys of the plans or decodings it knows.
        session: The Ray session it belongs to.
    """

    handle: Any
    pulse: Any = None
    late: float
    running: bool = False
    outstanding: int = 0
    installed: set[str] = dataclasses.field(default_factory=set)
    session: str = dataclasses.field(default_factory=ray_session)

    def ask(self) -> Self:
        """Asks for a sign of life, behind the work that it has."""
        self.pulse = self.pulse or self.handle.actor_id.remote()
        return self

    def knows(self, key: str, value: Any) -> Self:
        """This helper, told what a key stands for unless it knows."""
        if key not in self.installed:
            self.handle.install.remote(key, value)
            self.installed.add(key)
        return self

    def forget(self, key: str) -> None:
        """Takes back what a key stands for."""
        if key in self.installed and self.session == ray_session():
            self.handle.forget.remote(key)
        self.installed.discard(key)

    def kill(self) -> None:
        """Ends the actor now, unless it went with its Ray session."""
        if self.session == ray_session():
            ray.kill(self.handle)


def place_shard_actor(feed: Feed, options: Options) -> Helper:
    """Places a shard actor, on this worker's node where that is possible. It takes no CPU from Ray's count.

    Raises:
        PlacementError: If it is not running within the deadline.
        HelperError: If it dies as it starts.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    remote = ray.remote(ShardActor).options(num_cpus=0, scheduling_strategy=here, **NO_RESTARTS)
    late = time.monotonic() + options.placement_timeout_s
    while True:
        handle = remote.remote(feed, options)
        helper = Helper(handle=handle, late=late).ask()
        if not ray.wait([helper.pulse], timeout=max(0.0, late - time.monotonic()))[0]:
            helper.kill()
            raise PlacementError(no_place(1, 1, "shard actor", 0, options.placement_timeout_s))
        try:
            ray.get(helper.pulse)
            helper.pulse, helper.running = None, True
            return helper
        except RayError as error:
            if time.monotonic() > late or (isinstance(error, RayActorError) and error.actor_init_failed):
                raise HelperError(no_start("shard actor", error)) from error
            logger.warning("a shard actor died as it started (%s); another one is placed", first_line(error))
            time.sleep(_PAUSE_S)


def no_place(pending: int, asked: int, what: str, cpus: float, timeout_s: float) -> str:
    """What to say when helpers found no place, with the numbers."""
    total = ray.cluster_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
    free = ray.available_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
    return (
        f"{pending} of {asked} {what}s ({cpus:g} CPU each, {cpus * asked:g} together) found no place in "
        f"{timeout_s:g} s: the cluster counts {total:g} CPUs, of which {free:g} are free now. Training stops here "
        "rather than hang. Ask for fewer (num_decoders=…; 0 decodes in threads of the shard actors, which always "
        "find a place), add nodes, or raise placement_timeout_s if the cluster is still scaling up."
    )


def no_start(what: str, error: Exception) -> str:
    """What to say when a helper dies as it starts."""
    return f"a {what} could not start; nothing was delivered. Its constructor or its process said: {error}"
