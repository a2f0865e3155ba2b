"""Owns what a runtime is, and what all that work in this process have in common; never what any of them does."""

import abc
import functools
import queue
import weakref
from collections.abc import Iterable
from typing import Any

from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.messages import Ask, Command, Decode, Dismiss, Event, Fetch, Forget, Kind, Place, Prefetch, Read
from raylance.dispatch.scaling import Scaler
from raylance.observe import clock
from raylance.planning.plan import Plan
from raylance.settings import Options, ReadSpec


class Runtime(abc.ABC):
    """Does what it is commanded and says what happened; knows nothing of orders, batches, or what comes next.

    `do` never waits for a helper. `post` may be called from any thread, all else from one.
    """

    def __init__(self, feed: ReadSpec, options: Options, *, insists: bool) -> None:
        """Starts nothing; `insists` is the crew's."""
        self._feed, self._options, self._insists = feed, options, insists
        self._helpers: dict[int, Any] = {}
        self._plan: tuple[str, Any] = ("", None)  # its key, and how helpers are given it
        end = weakref.finalize(self, _end_all, self._helpers)
        end.atexit = False  # feeders that still go on are closed first; Ray ends the actors of an ending process itself
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._results: dict[int, Any] = {}  # by call: what a read or a decode has made
        least, begin, most = (0, 0, 0) if self._feed.decoding is None else self._count_decoders()
        readers, most_readers = self._options.reader_range
        self.scalers = [Scaler(least, most, begin)] if least < most else []
        self.scalers += [Scaler(readers, most_readers, readers, "reader")] if readers < most_readers else []
        self.crew = HelperPool(
            readers=readers,
            decoders=begin,
            insists=self._insists,
            placement_timeout_s=self._options.placement_timeout_s,
            work_timeout_s=self._options.work_timeout_s,
            explain=functools.partial(self._explain, self._options),
        )

    @property
    def is_usable(self) -> bool:
        """Whether it can serve another pass; else another one takes its place."""
        return self.crew.failure is None

    def begin(self, plan: Plan, plan_key: str) -> None:
        """Takes the plan that the following reads refer to; equal keys stand for equal plans."""
        if self._plan[0] != plan_key:
            self._plan = (plan_key, self._keep(plan))

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        return clock.now()

    def post(self, event: Event) -> None:
        """Adds an event."""
        self._inbox.put(event)

    def next_event(self, timeout_s: float | None) -> Event | None:
        """Waits for an event, for so long; None at the end of the time."""
        try:
            return self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def do(self, command: Command) -> None:
        """Carries a command out, or begins to."""
        match command:
            case Place(helper, kind):
                self._place(helper, kind)
            case Read():
                self._read(command)
            case Prefetch(helper) if helper in self._helpers:
                self._prefetch(command)
            case Decode():
                self._decode(command)
            case Fetch():
                self._fetch(command)
            case Forget(calls):
                self._forget(calls)
            case Ask(helper) if helper in self._helpers:
                self._ask(helper)
            case Dismiss(helper, is_lost) if helper in self._helpers:
                self._helpers.pop(helper).end(is_dead=is_lost)

    def close(self) -> None:
        """Ends all helpers, for good."""
        self._forget(tuple(self._results))
        _end_all(self._helpers)

    def _keep(self, plan: Plan) -> Any:
        return plan

    def _forget(self, calls: Iterable[int]) -> None:
        for call in calls:
            self._results.pop(call, None)

    @abc.abstractmethod
    def _count_decoders(self) -> tuple[int, int, int]:
        """Decoders to have at the least, at first, and at the most."""

    @staticmethod
    @abc.abstractmethod
    def _explain(options: Options, pending: int, asked: int, kind: Kind) -> str: ...

    @abc.abstractmethod
    def _place(self, number: int, kind: Kind) -> None: ...

    @abc.abstractmethod
    def _ask(self, number: int) -> None: ...

    @abc.abstractmethod
    def _read(self, command: Read) -> None: ...

    @abc.abstractmethod
    def _prefetch(self, command: Prefetch) -> None: ...

    @abc.abstractmethod
    def _decode(self, command: Decode) -> None: ...

    @abc.abstractmethod
    def _fetch(self, command: Fetch) -> None: ...


def _end_all(helpers: dict[int, Any]) -> None:
    for helper in helpers.values():
        helper.end(is_dead=False)
    helpers.clear()
