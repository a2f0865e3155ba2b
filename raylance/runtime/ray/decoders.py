"""The decode actors of this process, which all its loaders share.

A loader holds as many actors as it wants. It first takes actors that another loader holds, so that validation does not
need a second set of actors. An actor ends when the last loader that holds it lets it go.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray

from raylance.environment.connection import current_session, ray_session
from raylance.runtime.ray.decode_actor import DecodeActor
from raylance.runtime.ray.faults import is_helper_gone

# Work that is lost with a helper can be repeated from the plan, so Ray's own restarts are not used. One mechanism
# handles a killed process, a lost node and an explicit ray.kill, with a deadline for placing the new helper.
NO_RESTARTS = {"max_restarts": 0, "max_task_retries": 0}


class HeldActor:
    """A helper actor with the loaders that hold it. It ends when no loader holds it any more."""

    def __init__(self, handle: Any, place: tuple[str, float], holder: str) -> None:
        self.handle, self.place = handle, place  # place: the actor's Ray session and CPUs
        self.pulse = handle.actor_id.remote()  # resolves once the actor runs
        self.holders = {holder}  # keys of loaders, which are also the keys of their decodings
        self._calls: deque[tuple[str, Future[Any]]] = deque()  # calls of all holders, in the order of execution
        self._lock = threading.RLock()  # reentrant for the same reason as the module's lock

    def call(self, holder: str, send: Callable[[], tuple[Any, Any]]) -> tuple[Any, "Future[Any]"]:
        """Sends a holder's call; returns the reference of the result, and the future of the receipt."""
        with self._lock:
            while self._calls and _is_answered(self._calls[0][1]):
                self._calls.popleft()
            result, receipt = send()
            future: Future[Any] = receipt.future()
            self._calls.append((holder, future))
        return result, future

    def is_at_work_for(self, holder: str) -> bool:
        """Returns whether the first unanswered call is this holder's, or all calls are answered. A dead actor was
        executing the first unanswered call, because an actor executes calls in order.
        """
        with self._lock:
            return next((of == holder for of, future in self._calls if not _is_answered(future)), True)


def _is_answered(future: "Future[Any]") -> bool:
    error = future.exception() if future.done() else None
    return future.done() and (error is None or not is_helper_gone(error))


_actors: list[HeldActor] = []
_lock = threading.RLock()  # reentrant: a finaliser of the user's may close a loader during hold


def hold(holder: str, cpus: float) -> HeldActor:
    """Returns a decode actor that this holder does not hold yet; starts a new one if there is none."""
    with current_session() as session, _lock:  # the two locks are always taken in this order
        place = (session, cpus)
        _actors[:] = [actor for actor in _actors if actor.place[0] == place[0]]  # the others ended with their session
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
    """Records that a holder no longer needs an actor. Ends the actor if it is dead or has no other holder."""
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
    """Returns the number of decode actors with this number of CPUs that this process has."""
    return sum(actor.place == (ray_session(), cpus) for actor in _actors)
