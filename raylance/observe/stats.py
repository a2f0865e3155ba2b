"""Owns the timings, counters and events of one loader, in memory; never interprets them, and never sends them."""

import dataclasses
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from raylance.observe import clock
from raylance.observe.events import Event, EventLog
from raylance.observe.observations import (
    BatchesReady,
    BatchGathered,
    BatchHandedOut,
    Cause,
    FaultSeen,
    Observation,
    Receipt,
    Status,
    WaitsFor,
    WorkDone,
)

WAITS = {
    "starting": "wait_start_s",
    "reading": "wait_read_s",
    "decoding": "wait_decode_s",
    "finishing": "wait_finish_s",
}
"""Causes of waiting as verdicts and metrics name them, and the fields of `Stats` that count them."""

_BAD_ROWS = 100  # at most that are kept with their reasons
_FIRST_ROWS = 16  # of the first batch that are kept for display
_FIRST_BYTES = 16 << 20  # at most, all first rows together
_IT = "it"
_numbers = itertools.count(1)


@dataclasses.dataclass(slots=True, kw_only=True)
class Stats:
    """Counters of one loader since it was made; an `Observer`.

    Timings that are still running count up to now. How to read the counters: if `wait_s` is near 0, the trainer is the
    bottleneck. If it is large, the loader is, and its largest part shows why: `wait_start_s`, `wait_read_s`,
    `wait_decode_s` or `wait_finish_s`. `RankLoader.explain` says it in words.

    Attributes:
        batches: Batches handed out on this rank.
        rows: Rows handed out on this rank, padding included.
        masked_rows: Rows handed out as zeros with `_valid` False because they could not be decoded.
        nbytes: Bytes handed out, decoded.
        fallback_rows: Rows that a slow decoder had to decode in place of a fast one: JPEGs that the fast codec left to
            Pillow, such as CMYK or damaged ones (other formats, which Pillow always decodes, do not count); images that
            `DeviceImage` left to `Image`; rows on which a batch decoder failed together.
        read_bytes: Bytes of rows read from storage, including rows read ahead.
        decoded_rows: Rows that were decoded, including rows decoded ahead.
        wait_s: Seconds that the trainer waited for the next batch, or for the end of a pass.
        first_batch_s: Part of `wait_s` before the first batch of each pass.
        reshard_s: Part of `wait_s` before the first batch after ranks came or went and the rank's share changed.
        wait_start_s: Part of `wait_s` before the loader's first batch, or while helpers were starting.
        wait_read_s: Part of `wait_s` in which the awaited rows were being read.
        wait_decode_s: Part of `wait_s` in which the awaited rows were being decoded, or waited for a decoder.
        wait_finish_s: Part of `wait_s` in which the awaited rows were brought to this process and made a batch.
        storage_s: Seconds in which storage was being read, all shard actors together, ahead of time or not.
        read_s: Seconds that shard actors waited for storage (reading ahead hides the rest).
        decode_s: Seconds of decoding, all decoders together.
        device_decode_s: Part of `decode_s` in which this process decoded on the device of its batches. On CUDA, work
            that the device finishes later is not counted.
        collate_s: Seconds in which this process turned tables into batches.
        collate_fn_s: Part of `collate_s` in the user's `collate_fn=`.
        transfer_s: Seconds of pinning batches and sending them to the device; if sending is asynchronous, of beginning
            it.
        user_s: Seconds between handing out a batch and being asked for the next one, and seconds of `raylance.report`
            after the last batch of a pass.
        save_s: Part of `user_s` in `raylance.report`: collecting the state, writing it, and waiting for other ranks.
        other_s: Part of `user_s` in which another loader was iterated, such as a validation pass between two batches.
        helpers_replaced: Helper actors that died and were replaced.
        readers: Shard actors that run now, or threads that read.
        readers_wanted: Shard actors that there should be.
        decoders: Decoders that run now.
        decoders_wanted: Decoders that there should be.
        decoders_busy: Decoders that have work now.
        inflight_items: Pieces of work on their way now.
        inflight_bytes: Bytes on their way now, or delivered but not taken yet, as far as known.
        ready_batches: Batches that wait for the trainer now.
        window_bytes: Bytes of raw rows in the shard actor that answered last.
        held_bytes: Most bytes of raw rows that one shard actor held at one time, including the block being read.
        epoch_certificate: Count and hash of the rows that this rank was handed in the last pass that reached the end of
            an epoch, all of which are in its own plan; None before such a pass. `raylance.prove_run` proves whether the
            ranks together delivered every selected row once.
    """

    batches: int = 0
    rows: int = 0
    masked_rows: int = 0
    fallback_rows: int = 0
    nbytes: int = 0
    read_bytes: int = 0
    decoded_rows: int = 0
    wait_s: float = 0.0
    first_batch_s: float = 0.0
    reshard_s: float = 0.0
    wait_start_s: float = 0.0
    wait_read_s: float = 0.0
    wait_decode_s: float = 0.0
    wait_finish_s: float = 0.0
    storage_s: float = 0.0
    read_s: float = 0.0
    decode_s: float = 0.0
    device_decode_s: float = 0.0
    collate_s: float = 0.0
    collate_fn_s: float = 0.0
    transfer_s: float = 0.0
    user_s: float = 0.0
    save_s: float = 0.0
    other_s: float = 0.0
    helpers_replaced: int = 0
    readers: int = 0
    readers_wanted: int = 0
    decoders: int = 0
    decoders_wanted: int = 0
    decoders_busy: int = 0
    inflight_items: int = 0
    inflight_bytes: int = 0
    ready_batches: int = 0
    window_bytes: int = 0
    held_bytes: int = 0
    epoch_certificate: dict[str, Any] | None = None
    # The loader's name in its record; without a record, a unique number.
    called: str = dataclasses.field(default_factory=lambda: f"#{next(_numbers)}", repr=False)
    shared_s: dict[str, float] = dataclasses.field(default_factory=dict, repr=False)  # by name; see _count_shared
    _going: dict[str, float] = dataclasses.field(default_factory=dict, repr=False)  # field: when its timing began
    _awaited: dict[str, tuple[float, Cause]] = dataclasses.field(default_factory=dict, repr=False)  # at most one, _IT
    _here: str = dataclasses.field(default="wait_start_s", repr=False)  # the field for waits without a cause
    _saved_s: float = dataclasses.field(default=0.0, repr=False)  # save_s when the step began
    _there_s: float = dataclasses.field(default=0.0, repr=False)  # waited for rows that one helper reads and decodes
    _events: EventLog = dataclasses.field(default_factory=EventLog, repr=False)
    _bad_rows: dict[tuple[int, str], str] = dataclasses.field(default_factory=dict, repr=False)
    first_rows: pa.Table | None = dataclasses.field(default=None, repr=False)  # for display

    def observe(self, observation: Observation, now: float) -> None:
        """See `Observer.observe`."""
        self._TAKE[type(observation)](self, observation, now)

    def _take_status(self, status: Status, now: float) -> None:
        self.readers, self.readers_wanted = status.readers, status.readers_wanted
        self.decoders, self.decoders_wanted = status.decoders, status.decoders_wanted
        self.decoders_busy = status.decoders_busy
        self.inflight_items, self.inflight_bytes = status.inflight_items, status.inflight_bytes
        self._take_wait(status, now)

    def _take_work(self, work: WorkDone, now: float) -> None:
        self.lap(now)
        self.add(work.receipt)
        self.decoded_rows += work.decoded_rows

    def _take_fault(self, fault: FaultSeen, _: float) -> None:
        self.helpers_replaced += fault.replaces_helper
        self.record_event("fault", fault.line)

    def _take_wait(self, wait: WaitsFor | Status, now: float) -> None:
        is_first = wait.cause is not None and not self.batches  # every wait before the first batch is the start
        self.awaits("start" if is_first else wait.cause, now)

    def _take_ready(self, ready: BatchesReady, _: float) -> None:
        self.ready_batches = ready.batches

    def _take_handed_out(self, batch: BatchHandedOut, _: float) -> None:
        self.batches += 1
        self.rows += batch.rows
        self.nbytes += batch.nbytes
        self.masked_rows += batch.masked_rows

    def _take_rows(self, batch: BatchGathered, _: float) -> None:
        """Keeps a copy of the first rows of the first batch."""
        if self.first_rows is None:
            rows = batch.rows
            row_bytes = max(1, rows.nbytes // max(1, rows.num_rows))
            self.first_rows = rows.take(np.arange(min(_FIRST_ROWS, rows.num_rows, _FIRST_BYTES // row_bytes)))

    _TAKE: ClassVar[dict[type, Callable[["Stats", Any, float], None]]] = {
        Status: _take_status,
        WorkDone: _take_work,
        FaultSeen: _take_fault,
        WaitsFor: _take_wait,
        BatchGathered: _take_rows,
        BatchesReady: _take_ready,
        BatchHandedOut: _take_handed_out,
    }  # by type: a match over all of them takes three times as long, on the training thread

    def begin(self, field: str) -> float:
        """Begins to time a field; returns the `begun` that `end` takes."""
        now = self._going[field] = clock.now()
        if field == "user_s":
            self._saved_s = self.save_s
            # Stats that another thread closed are still listed: the garbage collector runs in any thread.
            _in_step()[:] = [*(stats for stats in _in_step() if stats is not self and stats.is_timed("user_s")), self]
        elif field == "wait_s":
            self._here = "wait_finish_s" if self.batches else "wait_start_s"
            self.end("user_s")  # if the last pass was abandoned with a batch in hand
            for around in self._around():
                around.interrupt(now)
        return now

    def end(self, field: str, begun: float | None = None) -> float:
        """Adds the seconds since `begin` to a field; returns them, or 0 if its timing was not begun. `begun` is the
        value that `begin` returned: if the field was begun again since then, its new timing continues.
        """
        if begun is not None and self._going.get(field) != begun:
            return 0.0
        begun = self._going.pop(field, None)
        now = clock.now()
        seconds = 0.0 if begun is None else now - begun
        setattr(self, field, getattr(self, field) + seconds)
        if field == "wait_s":
            self._explain_wait(now)
        if field in ("wait_s", "user_s") and begun is not None:
            for around in self._around():
                # Saving during this step counts for both loaders.
                around.resume(seconds - (self.save_s - self._saved_s if field == "user_s" else 0.0))
        if field == "user_s":
            if begun is not None:
                self._count_shared(begun, now)
            _in_step()[:] = [stats for stats in _in_step() if stats is not self]
        return seconds

    def _explain_wait(self, now: float) -> None:
        """Adds the seconds without a cause to the field `_here`, so that each second has a cause."""
        self.awaits(None, now)
        rest = self.wait_s - self._there_s - sum(getattr(self, name) for name in WAITS.values())
        if rest > 0:
            setattr(self, self._here, getattr(self, self._here) + rest)

    @property
    def step_begun(self) -> float:
        """When the consumer got the batch that it has in hand; infinite if it has none."""
        return self._going.get("user_s", math.inf)

    def interrupt(self, now: float) -> None:
        """Begins to count another loader's time: the consumer waits for that one's batch during a step of this one."""
        self._going["other_s"] = now

    def resume(self, seconds: float) -> None:
        """Counts these seconds of the running step as another loader's."""
        self._going.pop("other_s", None)
        self.other_s += seconds

    def _around(self) -> "list[Stats]":
        """Stats of the loader whose step encloses this loader's (training around validation), and of the loaders that
        are iterated alongside the enclosing one.

        A step that began later than this loader's does not enclose it: those two loaders are iterated side by side.
        """
        earlier = itertools.takewhile(lambda stats: stats is not self, _in_step())
        found = [stats for stats in earlier if stats.is_timed("user_s")]
        return [stats for stats in found if stats is found[-1] or stats.called in found[-1].shared_s]

    def _count_shared(self, begun: float, now: float) -> None:
        """As a step of this loader ends, counts for both the seconds shared with each step that began later and has not
        ended: neither step encloses the other, so the two loaders are iterated side by side.
        """
        later = list(itertools.dropwhile(lambda stats: stats is not self, _in_step()))[1:]
        for other in later:
            if other.is_timed("user_s"):
                seconds = now - max(begun, other.step_begun)
                for one, name in ((self, other.called), (other, self.called)):
                    one.shared_s[name] = one.shared_s.get(name, 0.0) + seconds

    def lap(self, now: float) -> None:
        """Counts the current wait up to now, in seconds of the runtime's clock."""
        awaited = self._awaited.get(_IT)
        if awaited is not None:
            self.awaits(awaited[1], now)

    def is_timed(self, field: str) -> bool:
        """Whether a field is being timed now."""
        return field in self._going

    @contextmanager
    def timed(self, field: str) -> Iterator[None]:
        """Adds the seconds that the body takes to a field."""
        begun = self.begin(field)
        try:
            yield
        finally:
            self.end(field, begun)

    def awaits(self, cause: Cause | None, now: float) -> None:
        """Sets the cause of the trainer's wait from now on; None if it does not wait. Has no effect if the trainer has
        its batch already.
        """
        awaited = self._awaited.pop(_IT, None)  # one operation, which no other thread interrupts
        if cause is not None and self.is_timed("wait_s"):
            self._awaited[_IT] = now, cause
            if not self.is_timed("wait_s"):  # the training thread has ended the wait meanwhile
                self._awaited.pop(_IT, None)
        if awaited is not None:  # consumer and feeder may both end a wait: only the first counts it
            since, before = awaited
            if before == "there":
                self._there_s += now - since
            else:
                name = f"wait_{before}_s"
                setattr(self, name, getattr(self, name) + now - since)

    def add(self, receipt: Receipt) -> None:
        """Adds the measurements of a helper."""
        self.read_bytes += receipt.read_bytes
        self.storage_s += receipt.storage_s
        self.read_s += receipt.read_s
        self.decode_s += receipt.decode_s
        self.device_decode_s += receipt.device_decode_s
        self.fallback_rows += receipt.fallback_rows
        self.held_bytes = max(self.held_bytes, receipt.held_bytes)
        self.window_bytes = receipt.window_bytes or self.window_bytes
        if self._there_s and receipt.read_s + receipt.decode_s > 0 and not receipt.device_decode_s:
            reading_s = self._there_s * receipt.read_s / (receipt.read_s + receipt.decode_s)
            self.wait_read_s += reading_s
            self.wait_decode_s += self._there_s - reading_s
            self._there_s = 0.0
        for offset, column, why in receipt.bad_rows:
            if len(self._bad_rows) < _BAD_ROWS:
                self._bad_rows.setdefault((offset, column), why)

    def record_event(self, kind: str, what: Any) -> None:
        """Keeps an event with the present time and its kind; `what` happened is JSON-able."""
        self._events.add(kind, what)

    @property
    def events(self) -> list[Event]:
        """The last events of each kind, and some of all reports, oldest first."""
        return self._events.all()

    def reason_of(self, offset: int) -> tuple[str, str] | None:
        """See `Observer.reason_of`."""
        return next(((column, why) for row, column, why in self.bad_rows if row == offset), None)

    @property
    def bad_rows(self) -> list[tuple[int, str, str]]:
        """The first masked rows: row offset (with a mixture's component), column, reason."""
        return [(offset, column, why) for (offset, column), why in list(self._bad_rows.items())]

    def timed_s(self, field: str) -> float:
        """Seconds since the field's timing began; 0 if it is not being timed."""
        begun = self._going.get(field)
        return 0.0 if begun is None else clock.now() - begun

    def sample(self, *, up_to_now: bool = True) -> dict[str, float]:
        """All numbers, and `train_s`, which is `user_s` without `other_s`. If `up_to_now`, running timings count up to
        now.
        """
        figures, now = {name: float(getattr(self, name)) for name in NUMBERS}, clock.now()
        if up_to_now:
            for name, begun in list(self._going.items()):
                figures[name] += now - begun
            awaited = self._awaited.get(_IT)
            if awaited is not None and awaited[1] != "there":
                figures[f"wait_{awaited[1]}_s"] += max(0.0, now - awaited[0])
        figures["train_s"] = figures["user_s"] - figures["other_s"]
        return figures

    def as_dict(self) -> dict[str, Any]:
        """The counters by name, with their present values."""
        now = {name: type(getattr(self, name))(value) for name, value in self.sample().items() if name in NUMBERS}
        return now | {"epoch_certificate": self.epoch_certificate}


@contextmanager
def saving(reported: Iterable[Stats]) -> Iterator[None]:
    """Counts the seconds of the body as saving, for the reported loaders and for all loaders of which this thread has a
    batch in hand. A loader that has handed out no batch yet is left out. After the last batch of a pass, no step is
    running; then the seconds are also added to `user_s`.
    """
    found = {id(stats): stats for stats in (*reported, *_in_step()) if stats.batches and not stats.is_timed("save_s")}
    with ExitStack() as stack:
        for stats in found.values():
            if not stats.is_timed("user_s"):
                stack.enter_context(stats.timed("user_s"))
            stack.enter_context(stats.timed("save_s"))
        yield


_threads = threading.local()


def _in_step() -> list[Stats]:
    """The statistics of the loaders whose batches this thread has in hand, in the order of their steps."""
    if not hasattr(_threads, "in_step"):
        _threads.in_step = []
    found: list[Stats] = _threads.in_step
    return found


NUMBERS = tuple(
    field.name for field in dataclasses.fields(Stats) if field.type in (int, float) and field.name[0] != "_"
)

GAUGES = frozenset(
    [
        "readers", "readers_wanted", "decoders", "decoders_wanted", "decoders_busy", "inflight_items",
        "inflight_bytes", "ready_batches", "window_bytes", "held_bytes",
    ]
)  # fmt: skip
"""Numbers that show the present state; the others only grow."""
