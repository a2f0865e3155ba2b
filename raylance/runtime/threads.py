"""Owns the runtime that works by threads of this process, for use without Ray; never decides.

The batches are those of the Ray runtime: only who does the work differs.
"""

import dataclasses
import os
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from raylance.decode.rows import OpenDecoding
from raylance.planning.plan import Plan
from raylance.runtime.crew import Crew
from raylance.runtime.inbox import Inbox
from raylance.runtime.messages import (
    Alive,
    Ask,
    Command,
    Decode,
    Dismiss,
    Done,
    Failed,
    Fetch,
    Fetched,
    Forget,
    Kind,
    Place,
    Placed,
    Read,
)
from raylance.runtime.work import RankReader, own_memory
from raylance.settings import Feed, Options
from raylance.telemetry import Receipt

_MAX_AUTO_DECODERS = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Helper:
    """A thread and what it works with."""

    thread: ThreadPoolExecutor
    reader: RankReader | None = None
    decoding: OpenDecoding | None = None

    def end(self) -> None:
        self.thread.shutdown(wait=False, cancel_futures=True)
        if self.reader is not None:
            self.reader.close()


class ThreadRuntime(Inbox):
    """Does the work of one loader in threads; see `raylance.runtime.runtime.Runtime`."""

    def __init__(self, feed: Feed, options: Options) -> None:
        """Starts nothing.

        Args:
            feed: What is read and decoded.
            options: Decoding threads ("auto": one for each CPU of the process), and limits.
        """
        super().__init__()
        self._feed, self._options = feed, options
        self._helpers: dict[int, _Helper] = {}
        self._results: dict[int, tuple[pa.Table, ...] | None] = {}  # of calls that somebody waits for
        self._lock = threading.Lock()
        self._plan: tuple[str, Plan] | None = None
        self.crew = self._new_crew()
        self._end = weakref.finalize(self, _end_all, self._helpers)
        self._end.atexit = False  # a feeder that still goes on is closed first

    def _new_crew(self) -> Crew:
        wanted = self._options.num_decoders
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        cpus = min(cpus, _MAX_AUTO_DECODERS)
        return Crew(
            decoders=0 if self._feed.decoding is None else cpus if wanted == "auto" else wanted,
            insists=True,
            placement_timeout_s=self._options.placement_timeout_s,
            work_timeout_s=self._options.work_timeout_s,
            explain=lambda pending, asked, kind: f"{pending} of {asked} {kind} threads did not start.",
        )

    @property
    def is_usable(self) -> bool:
        """Whether helpers of an earlier pass can still work; threads can."""
        return self.crew.failure is None

    def begin(self, plan: Plan, plan_key: str) -> None:
        """See `Runtime.begin`."""
        self._plan = (plan_key, plan)

    def do(self, command: Command) -> None:
        """See `Runtime.do`."""
        match command:
            case Place(helper, kind):
                self._helpers[helper] = self._start(helper, kind)
                self.post(Placed(helper))
            case Read(call, helper):
                plan = self._plan  # the next pass may have another one
                self._submit(call, helper, lambda: self._read(command, plan))
            case Decode(call, helper):
                self._submit(call, helper, lambda: self._decode(command))
            case Fetch():
                self._fetch(command)
            case Forget(calls):
                with self._lock:
                    for call in calls:
                        self._results.pop(call, None)
            case Ask(helper) if helper in self._helpers:
                self._helpers[helper].thread.submit(self._inbox.put, Alive(helper))
            case Dismiss(helper) if helper in self._helpers:
                self._helpers.pop(helper).end()  # a thread that hangs is left alone

    def _start(self, number: int, kind: Kind) -> _Helper:
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"raylance-{kind}-{number}")
        if kind == "reader":
            return _Helper(thread=thread, reader=RankReader(self._feed, self._options, own_memory=True))
        return _Helper(thread=thread, decoding=self._feed.decoding.open() if self._feed.decoding else None)

    def _submit(self, call: int, helper: int, work: Callable[[], tuple[tuple[pa.Table, ...], Receipt]]) -> None:
        inbox, results, lock = self._inbox, self._results, self._lock  # those of now: `close` makes others
        results[call] = None

        def run() -> None:
            try:
                tables, receipt = work()
            except BaseException as error:  # a panic in Lance's Rust code is no Exception
                inbox.put(Failed(call, error))
                return
            with lock:
                if call in results:  # else nobody waits for it any more
                    results[call] = tables
            inbox.put(Done(call, receipt))

        self._helpers[helper].thread.submit(run)

    def _fetch(self, command: Fetch) -> None:
        plain, decoded = self._of(command.read)
        if command.decode is not None:
            decoded = self._of(command.decode)[0]
        self.post(Fetched(command.call, plain, None if self._feed.decoding is None else decoded))

    def _of(self, call: int) -> tuple[pa.Table, ...]:
        tables = self._results[call]
        if tables is None:
            raise KeyError(f"call {call} has no result")
        return tables

    def _read(self, command: Read, plan: tuple[str, Plan] | None) -> tuple[tuple[pa.Table, ...], Receipt]:
        reader = self._helpers[command.helper].reader
        if plan is None or reader is None:
            raise KeyError(f"helper {command.helper} reads nothing")
        reader.install(*plan)
        plain, second, receipt = reader.read(plan[0], command.item, command.decodes, command.allowed_bytes)
        return (plain, second), receipt

    def _decode(self, command: Decode) -> tuple[tuple[pa.Table, ...], Receipt]:
        decoding, setting = self._helpers[command.helper].decoding, self._feed.decoding
        if decoding is None or setting is None:
            raise KeyError(f"helper {command.helper} decodes nothing")
        encoded = self._of(command.source)[1]
        if setting.transform is not None:
            encoded = own_memory(encoded)  # it may change them in place, and they may be held by the reader
        decoded, receipt = decoding.apply(encoded, command.epoch, own_memory=True)
        return (decoded,), receipt

    def close(self) -> None:
        """See `Runtime.close`."""
        _end_all(self._helpers)
        # What helpers of before still say is about numbers that others will have.
        self._inbox, self._results = queue.SimpleQueue(), {}
        self.crew = self._new_crew()


def _end_all(helpers: dict[int, _Helper]) -> None:
    for helper in helpers.values():
        helper.end()
    helpers.clear()
