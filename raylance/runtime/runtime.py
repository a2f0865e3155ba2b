"""Owns what a runtime is, and which one works where; never what any of them does."""

import importlib
from typing import Protocol

from raylance.planning.plan import Plan
from raylance.runtime.crew import Crew
from raylance.runtime.messages import Command, Event
from raylance.runtime.threads import ThreadRuntime
from raylance.settings import Feed, Options
from raylance.store import ray_session


class Runtime(Protocol):
    """Does what it is commanded and says what happened; knows nothing of orders, batches, or what comes next.

    `do` never waits for a helper. `post` may be called from any thread, all else from one.
    """

    @property
    def crew(self) -> Crew:
        """The helpers that it has."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether it can serve another pass; else another one takes its place."""
        ...

    def begin(self, plan: Plan, plan_key: str) -> None:
        """Takes the plan that the following reads refer to; equal keys stand for equal plans."""
        ...

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    def do(self, command: Command) -> None:
        """Carries a command out, or begins to."""
        ...

    def post(self, event: Event) -> None:
        """Adds an event."""
        ...

    def next_event(self, timeout_s: float | None) -> Event | None:
        """Waits for an event, for so long; None at the end of the time."""
        ...

    def close(self) -> None:
        """Ends all helpers."""
        ...


def make_runtime(feed: Feed, options: Options, world_size: int) -> Runtime:
    """The runtime that the options name; starts nothing.

    Args:
        feed: What is read and decoded.
        options: Which one, how many helpers, and limits.
        world_size: Ranks that share the machines.
    """
    if options.runtime == "threads" or (options.runtime == "auto" and not ray_session()):
        return ThreadRuntime(feed, options)
    cluster = importlib.import_module("raylance.runtime.cluster.runtime")  # loads Ray
    runtime: Runtime = cluster.RayRuntime(feed, options, world_size)
    return runtime
