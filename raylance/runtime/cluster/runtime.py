"""Owns the runtime that works by Ray actors: a shard actor for each rank, and decode actors; never decides.

All references belong to this process; raw tables go from the shard actor to a decoder without passing here. Helpers
live outside the trainer's placement group and die with the worker that made them.
"""

import dataclasses
import functools
import queue
import uuid
import weakref
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylance.planning.plan import Plan
from raylance.runtime.cluster import decoders
from raylance.runtime.cluster.actors import ShardActor
from raylance.runtime.cluster.faults import as_raised, fault_of, is_helper_gone, is_machine_fault
from raylance.runtime.crew import Crew
from raylance.runtime.inbox import Inbox
from raylance.runtime.messages import (
    Alive,
    Ask,
    Command,
    Decode,
    Dismiss,
    Done,
    Event,
    Failed,
    Faulted,
    Fetch,
    Fetched,
    Forget,
    Kind,
    Lost,
    NotPlaced,
    Place,
    Placed,
    Read,
)
from raylance.settings import Feed, Options
from raylance.store import ray_session


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Helper:
    """A helper actor.

    Attributes:
        handle: Its handle.
        pooled: How this process shares it; None for a shard actor.
        installed: Keys of the plans or decodings that it knows.
    """

    handle: Any
    pooled: decoders.PooledActor | None = None
    installed: set[str] = dataclasses.field(default_factory=set)

    def knows(self, key: str, value: Any) -> Any:
        """Its handle, after it was told what a key stands for unless it knows."""
        if key not in self.installed:
            self.handle.install.remote(key, value)
            self.installed.add(key)
        return self.handle


class RayRuntime(Inbox):
    """Does the work of one loader by actors; see `raylance.runtime.runtime.Runtime`."""

    def __init__(self, feed: Feed, options: Options, world_size: int) -> None:
        """Starts nothing.

        Args:
            feed: What is read and decoded.
            options: How many decoders, and limits.
            world_size: Ranks that share the cluster.
        """
        super().__init__()
        self._feed, self._options, self._world_size = feed, options, world_size
        self._session, self._key = ray_session(), uuid.uuid4().hex
        self._helpers: dict[int, _Helper] = {}
        self._results: dict[int, tuple[Any, Any]] = {}  # by call: references of what a read or a decode has made
        self._plan: tuple[str, Any] | None = None
        self.crew = self._new_crew()
        self._end = weakref.finalize(self, _end_all, self._key, self._session, self._helpers)
        self._end.atexit = False  # Ray ends the actors of an ending process itself

    def _new_crew(self) -> Crew:
        options = self._options
        return Crew(
            decoders=self._count_decoders() if self._feed.decoding is not None else 0,
            insists=options.num_decoders != "auto",
            placement_timeout_s=options.placement_timeout_s,
            work_timeout_s=options.work_timeout_s,
            explain=functools.partial(_no_place, options),
        )

    def _count_decoders(self) -> int:
        options = self._options
        if options.num_decoders != "auto":
            return options.num_decoders
        ours, fitting = decoders.count_here(options.decoder_cpus), options.auto_decoders
        if fitting is None:
            fitting = decoders.auto_decoders(self._world_size, options.decoder_cpus, ours)
        return max(ours, fitting)

    @property
    def is_usable(self) -> bool:
        """Whether the Ray session of its helpers is still the one there is."""
        return self._session == ray_session() and self.crew.failure is None

    def begin(self, plan: Plan, plan_key: str) -> None:
        """See `Runtime.begin`."""
        if self._plan is None or self._plan[0] != plan_key:
            self._plan = (plan_key, ray.put(plan))

    def do(self, command: Command) -> None:
        """See `Runtime.do`."""
        match command:
            case Place(helper, kind):
                self._place(helper, kind)
            case Read():
                self._read(command)
            case Decode():
                self._decode(command)
            case Fetch():
                self._fetch(command)
            case Forget(calls):
                for call in calls:
                    self._results.pop(call, None)
            case Ask(helper) if helper in self._helpers:
                self._watch(self._helpers[helper].handle.actor_id.remote(), _told_alive, helper)
            case Dismiss(helper) if helper in self._helpers:
                _end(self._key, self._session, self._helpers.pop(helper), is_dead=True)

    def _watch(self, ref: Any, tell: Any, *about: Any) -> None:
        """Has an event posted when a call is answered, by Ray's own thread."""
        ref.future().add_done_callback(functools.partial(_report, self._inbox, tell, about))

    def _place(self, number: int, kind: Kind) -> None:
        if kind == "decoder":
            pooled = decoders.hold(self._key, self._options.decoder_cpus)
            helper, pulse = _Helper(handle=pooled.handle, pooled=pooled), pooled.pulse
        else:
            # On this worker's node where that is possible; it takes no CPU from Ray's count.
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
            remote = ray.remote(ShardActor).options(num_cpus=0, scheduling_strategy=here, **decoders.NO_RESTARTS)
            helper = _Helper(handle=remote.remote(self._feed, self._options))
            pulse = helper.handle.actor_id.remote()
        self._helpers[number] = helper
        self._watch(pulse, _told_placed, number)

    def _read(self, command: Read) -> None:
        if self._plan is None:
            raise KeyError("no pass has begun")
        actor = self._helpers[command.helper].knows(*self._plan)
        plain, second, receipt = actor.read.remote(self._plan[0], command.item, command.decodes, command.allowed_bytes)
        self._results[command.call] = (plain, second)
        self._watch(receipt, _told_done, command.helper, command.call)

    def _decode(self, command: Decode) -> None:
        actor = self._helpers[command.helper].knows(self._key, self._feed.decoding)
        decoded, receipt = actor.decode.remote(self._key, command.epoch, self._results[command.source][1])
        self._results[command.call] = (decoded, decoded)
        self._watch(receipt, _told_done, command.helper, command.call)

    def _fetch(self, command: Fetch) -> None:
        plain, second = self._results[command.read]
        refs = [plain] if self._feed.decoding is None else [plain, second]
        if command.decode is not None:
            refs[1] = self._results[command.decode][0]
        try:
            tables = ray.get(refs, timeout=self._options.work_timeout_s)
            self.post(Fetched(command.call, tables[0], tables[1] if len(tables) > 1 else None))
        except RayError as error:
            self.post(_failure(command.call, error))

    def close(self) -> None:
        """See `Runtime.close`."""
        _end_all(self._key, self._session, self._helpers)
        # What helpers of before still say is about numbers that others will have.
        self._inbox, self._results = queue.SimpleQueue(), {}
        self.crew = self._new_crew()


def _report(inbox: queue.SimpleQueue[Event], tell: Any, about: tuple[Any, ...], answer: "Future[Any]") -> None:
    error = answer.exception()
    inbox.put(tell(error, None if error is not None else answer.result(), *about))


def _told_placed(error: BaseException | None, _: Any, helper: int) -> Event:
    if error is None:
        return Placed(helper)
    return NotPlaced(helper, fault_of(error), isinstance(error, RayActorError) and bool(error.actor_init_failed))


def _told_alive(error: BaseException | None, _: Any, helper: int) -> Event:
    return Alive(helper) if error is None else Lost(helper, fault_of(error))


def _told_done(error: BaseException | None, receipt: Any, helper: int, call: int) -> Event:
    if error is None:
        return Done(call, receipt)
    return Lost(helper, fault_of(error)) if is_helper_gone(error) else _failure(call, error)


def _failure(call: int, error: BaseException) -> Event:
    if is_machine_fault(error) or isinstance(error, GetTimeoutError):
        return Faulted(call, fault_of(error))
    raised = as_raised(error)
    if raised is not error:
        raised.__cause__ = error
    return Failed(call, raised)


def _end(key: str, session: str, helper: _Helper, *, is_dead: bool) -> None:
    if helper.pooled is not None:
        decoders.let_go(key, helper.pooled, is_dead=is_dead)
    elif session == ray_session():  # else it went with its session
        ray.kill(helper.handle)


def _end_all(key: str, session: str, helpers: dict[int, _Helper]) -> None:
    for helper in helpers.values():
        _end(key, session, helper, is_dead=False)
    helpers.clear()


def _no_place(options: Options, pending: int, asked: int, kind: Kind) -> str:
    """What to say when helpers found no place, with the numbers."""
    total = ray.cluster_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
    free = ray.available_resources().get("CPU", 0)  # type: ignore[no-untyped-call]
    what, cpus = ("decode actor", options.decoder_cpus) if kind == "decoder" else ("shard actor", 0.0)
    return (
        f"{pending} of {asked} {what}s ({cpus:g} CPU each, {cpus * asked:g} together) found no place in "
        f"{options.placement_timeout_s:g} s: the cluster counts {total:g} CPUs, of which {free:g} are free now. "
        "Training stops here rather than hang. Ask for fewer (num_decoders=…; 0 decodes in threads of the shard "
        "actors, which always find a place), add nodes, or raise placement_timeout_s if the cluster still scales up."
    )
