"""The interface of runtimes, which carry out the dispatcher's commands, and the code that all of them share."""

import abc
import dataclasses
import queue
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from raylance.dispatch.messages import (
    Command,
    Decode,
    DecodeBlock,
    Dismiss,
    Drop,
    Event,
    Fetch,
    Fetched,
    Forget,
    Gather,
    Kind,
    Load,
    Ping,
    Place,
    Wake,
)
from raylance.observe import clock
from raylance.planning.planned_rows import PlannedRows
from raylance.runtime import notes
from raylance.settings import Options

if TYPE_CHECKING:
    from raylance.opened import ReadSpec  # loads Lance


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """The results of a fetch, or its failures, are in this process. Never leaves the runtime, which keeps them, so that
    `Forget` drops them although nobody takes events.
    """

    call: int


class Runtime(abc.ABC):
    """Carries out the dispatcher's commands with helpers, and reports events; knows neither orders nor batches.

    `do` never waits for a helper. Any thread may call `post`, `now` and `is_usable`; calls of other methods must not
    overlap.

    Attributes:
        has_failed: Whether a command was not carried out. The dispatcher would await its answer, so the runtime cannot
            serve another pass. Set by the feeder.
    """

    def __init__(self, read_spec: "ReadSpec", options: Options) -> None:
        self._read_spec, self._options = read_spec, options
        self._helpers: dict[int, Any] = {}
        self._plan: tuple[str, Any] = ("", None)  # the plan's key, and the plan in the form in which helpers get it
        notes.start_thread()  # all passes begin with a runtime
        end = weakref.finalize(self, notes.leave, _end_all, self._helpers)
        end.atexit = False  # running feeders must close first; at exit, Ray itself ends the actors of the process
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # By call: the results of gathering, a decode, or a fetch; of a load, what is to be decoded by block.
        self._results: dict[int, Any] = {}
        self.has_failed = False

    @property
    def is_usable(self) -> bool:
        """Whether the runtime can serve another pass; if not, a new one replaces it."""
        return not self.has_failed

    @property
    @abc.abstractmethod
    def needs_decoder(self) -> bool:
        """Whether only decoders decode, so that having none is an error; see `HelperPool`."""

    @property
    @abc.abstractmethod
    def gives_away(self) -> bool:
        """Whether the consumer gets the readers' own memory, so that it may change rows there; see `ChunkTable`."""

    @property
    @abc.abstractmethod
    def fetches_from_chunks(self) -> bool:
        """Whether fetched items take rows from loaded chunks, which must then be kept until that; see `ChunkTable`."""

    @abc.abstractmethod
    def count_decoders(self) -> tuple[int, int, int]:
        """Returns three numbers of decoders: the least, the number to begin with, and the most."""

    @abc.abstractmethod
    def explain_placing(self, kind: Kind, pending: int, asked: int) -> str:
        """Returns a text that says why `pending` of `asked` helpers have not started: cause, consequence and fix."""

    def begin(self, planned: PlannedRows, plan_key: str) -> None:
        """Takes the plan that the next commands refer to; equal keys mean equal plans."""
        if self._plan[0] != plan_key:
            self._plan = (plan_key, self._keep(planned))

    def now(self) -> float:
        """Returns the seconds of a clock that never goes back."""
        return clock.now()

    def post(self, event: Event | Wake) -> None:
        """Adds an event, which `next_event` will return."""
        self._inbox.put(event)

    def next_event(self, timeout_s: float | None) -> Event | Wake | None:
        """Waits at most `timeout_s` for an event, without limit if None; returns None if no event came."""
        try:
            found = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, Arrived):
            results = self._results.pop(found.call, None)
            return Wake() if results is None else self._fetched(found.call, results)
        event: Event | Wake = found
        return event

    def _fetched(self, call: int, results: Any) -> Event:
        """Returns the event for a fetch whose results are all here."""
        plain, *decoded = results
        return Fetched(call, plain, *(decoded or [None]))

    def do(self, command: Command) -> None:
        """Carries out a command, or begins to."""
        match command:
            case Place(helper, kind):
                self._place(helper, kind)
            case Load():
                self._load(command)
            case Drop(helper) if helper in self._helpers:
                self._drop(command)
            case Gather():
                self._gather(command)
            case Decode() | DecodeBlock():
                self._decode(command)
            case Fetch():
                self._fetch(command)
            case Forget(calls):
                self._forget(calls)
            case Ping(helper) if helper in self._helpers:
                self._ping(helper)
            case Dismiss(helper, is_lost) if helper in self._helpers:
                self._helpers.pop(helper).end(is_dead=is_lost)

    def close(self) -> None:
        """Drops all results and ends all helpers."""
        self._forget(tuple(self._results))
        _end_all(self._helpers)

    def _keep(self, planned: PlannedRows) -> Any:
        return planned

    def _forget(self, calls: Iterable[int]) -> None:
        for call in calls:
            self._results.pop(call, None)

    @abc.abstractmethod
    def _place(self, number: int, kind: Kind) -> None: ...

    @abc.abstractmethod
    def _ping(self, number: int) -> None: ...

    @abc.abstractmethod
    def _load(self, command: Load) -> None: ...

    @abc.abstractmethod
    def _drop(self, command: Drop) -> None: ...

    @abc.abstractmethod
    def _gather(self, command: Gather) -> None: ...

    @abc.abstractmethod
    def _decode(self, command: Decode | DecodeBlock) -> None: ...

    @abc.abstractmethod
    def _fetch(self, command: Fetch) -> None: ...


def _end_all(helpers: dict[int, Any]) -> None:
    while helpers:  # if one cannot be ended, the others are left, so that another call ends them
        helpers.popitem()[1].end(is_dead=False)
