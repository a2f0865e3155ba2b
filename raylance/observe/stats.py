"""The counters and events of one loader, in memory."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from raylance.columns import COST
from raylance.observe.events import Event, EventLog
from raylance.observe.observations import (
    BatchesReady,
    BatchGathered,
    BatchHandedOut,
    FaultSeen,
    Observation,
    Receipt,
    Status,
    WaitsFor,
    WorkDone,
)
from raylance.observe.wait_clock import WaitClock

_BAD_ROWS = 100  # most bad rows that are kept with their reasons
_FIRST_ROWS = 16  # rows of the first batch that are kept for display
_FIRST_BYTES = 16 << 20  # most bytes of the first rows together


@dataclasses.dataclass(slots=True, kw_only=True)
class Stats(WaitClock):
    """Counters of one loader since the loader was made. They are fed by observations: see `observe`.

    A timing that is still running counts in `sample` and `as_dict` up to now, and in the attributes once it has ended.
    How to read the counters: if `wait_s` is near 0, the trainer is the bottleneck. If `wait_s` is large, the loader is,
    and the largest part of `wait_s` shows why: `wait_start_s`, `wait_read_s`, `wait_decode_s` or `wait_finish_s`.
    `RankLoader.explain` says it in words.

    Attributes:
        batches: Batches handed out on this rank.
        rows: Rows handed out on this rank, padding included.
        masked_rows: Rows handed out as zeros with `_valid` False because they could not be decoded.
        nbytes: Bytes handed out, decoded.
        cost: Sum of the costs of the rows handed out, if the dataset has `cost=`; else 0.
        padded_cost: The same, if each batch is padded: its rows times the cost of its costliest row. So the share of
            padding is 1 - `cost` / `padded_cost`.
        dearest_cost: Sum over the steps of the largest `padded_cost` that a rank had in the step. Divided by the mean
            of `padded_cost` over the ranks, it is the imbalance. If `cost=` is a dict of several costs, `as_dict` has
            these three for each of them, as "cost.tokens", and what the budget does not pad is added up.
        fallback_rows: Rows that a slow decoder had to decode in place of a fast one: JPEGs that the fast codec left to
            Pillow, such as CMYK or damaged ones (other formats, which Pillow always decodes, do not count); images that
            `DeviceImage` left to `Image`; rows decoded one by one after a batch decoder failed on them together.
        unturned_rows: Images that were decoded as stored because their EXIF is damaged, so their orientation cannot
            be read.
        read_bytes: Bytes of rows read from storage, including rows read ahead.
        decoded_rows: Rows that were decoded, including rows decoded ahead.
        wait_s: Seconds that the trainer waited for the next batch, or for the end of a pass.
        first_batch_s: Part of `wait_s` before the first batch of each pass.
        reshard_s: Part of `wait_s` before the first batch after ranks came or went and the rank's share changed.
        wait_start_s: Part of `wait_s` before the loader's first batch, or while helpers were starting.
        wait_read_s: Part of `wait_s` in which the awaited rows were being read.
        wait_decode_s: Part of `wait_s` in which the awaited rows were being decoded, or waited for a decoder.
        wait_finish_s: Part of `wait_s` in which the awaited rows were brought to this process and made a batch.
        storage_s: Seconds in which storage was being read, reading ahead included, summed over all shard actors.
        read_s: Seconds that shard actors took to gather rows; with storage only for rows that were not loaded before.
        decode_s: Seconds of decoding, summed over all decoders.
        decode_cpu_s: CPU seconds of the threads that decode. Much less than `decode_s` if decoders wait, as for a
            service that a transform asks, or for CPUs that others take.
        transform_s: Part of `decode_s` in the user's `transform=`.
        device_decode_s: Part of `decode_s` in which this process decoded on the device of its batches. On CUDA, work
            that the device finishes later is not counted.
        collate_s: Seconds in which this process turned tables into batches.
        collate_fn_s: Part of `collate_s` in the user's `collate_fn=`.
        transfer_s: Seconds of pinning batches and sending them to the device. If sending is asynchronous, only its
            beginning counts.
        user_s: Seconds between handing out a batch and being asked for the next one, and seconds of `raylance.report`
            after the last batch of a pass.
        save_s: Part of `user_s` in `raylance.report`: collecting the state, writing it, and waiting for other ranks.
        other_s: Part of `user_s` in which another loader was iterated, such as a validation pass between two batches.
        helpers_replaced: Helper actors that died or hung and were replaced.
        readers: Shard actors that run now, or threads that read.
        readers_wanted: Shard actors that there should be.
        decoders: Decoders that run now.
        decoders_wanted: Decoders that there should be.
        decoders_busy: Decoders that have work now.
        inflight_items: Items of work that are in flight now.
        inflight_bytes: Estimated bytes in flight now: of the items whose work has begun, and of whole steps that the
            trainer has not taken yet.
        ready_batches: Batches that wait for the trainer now.
        reader_bytes: Bytes of raw rows in the shard actor that answered last.
        held_bytes: Most bytes of raw rows that one shard actor held at any time, including rows that were being read.
        epoch_certificate: Describes this rank's last pass that reached the end of an epoch: its positions, and the
            count and hash of the rows handed out, which are the rows that the plan gives to this rank, each once. None
            before such a pass. `raylance.prove_run` proves whether all ranks together were handed every selected row
            once.
    """

    batches: int = 0
    rows: int = 0
    masked_rows: int = 0
    fallback_rows: int = 0
    unturned_rows: int = 0
    nbytes: int = 0
    cost: int = 0
    padded_cost: int = 0
    dearest_cost: int = 0
    read_bytes: int = 0
    decoded_rows: int = 0
    first_batch_s: float = 0.0
    reshard_s: float = 0.0
    storage_s: float = 0.0
    read_s: float = 0.0
    decode_s: float = 0.0
    decode_cpu_s: float = 0.0
    transform_s: float = 0.0
    device_decode_s: float = 0.0
    collate_s: float = 0.0
    collate_fn_s: float = 0.0
    transfer_s: float = 0.0
    helpers_replaced: int = 0
    readers: int = 0
    readers_wanted: int = 0
    decoders: int = 0
    decoders_wanted: int = 0
    decoders_busy: int = 0
    inflight_items: int = 0
    inflight_bytes: int = 0
    ready_batches: int = 0
    reader_bytes: int = 0
    held_bytes: int = 0
    epoch_certificate: dict[str, Any] | None = None
    _costs: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)  # counters of costs that have names
    _events: EventLog = dataclasses.field(default_factory=EventLog, repr=False)
    _bad_rows: dict[tuple[int, str], str] = dataclasses.field(default_factory=dict, repr=False)
    first_rows: pa.Table | None = dataclasses.field(default=None, repr=False)  # for display

    def observe(self, observation: Observation, now: float) -> None:
        """Takes an observation of a component that works for the loader, and counts it. `now` is the time of the
        observation by the runtime's clock, in seconds.
        """
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
        is_first = wait.cause is not None and not self.has_begun  # every wait before the first batch counts as start
        self.awaits("start" if is_first else wait.cause, now)

    def _take_ready(self, ready: BatchesReady, _: float) -> None:
        self.ready_batches = ready.batches

    def _take_handed_out(self, batch: BatchHandedOut, _: float) -> None:
        self.has_begun = True
        self.batches += 1
        self.rows += batch.rows
        self.nbytes += batch.nbytes
        self.masked_rows += batch.masked_rows
        for name, costs in (batch.costs or {}).items():
            for counter, cost in zip(COST_COUNTERS, costs, strict=True):
                if name == COST:
                    setattr(self, counter, getattr(self, counter) + cost)
                else:
                    key = f"{counter}.{name}"
                    self._costs[key] = self._costs.get(key, 0) + cost

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

    def add(self, receipt: Receipt) -> None:
        """Adds the measurements of one piece of work."""
        self.read_bytes += receipt.read_bytes
        self.storage_s += receipt.storage_s
        self.read_s += receipt.read_s
        self.decode_s += receipt.decode_s
        self.decode_cpu_s += receipt.decode_cpu_s
        self.transform_s += receipt.transform_s
        self.device_decode_s += receipt.device_decode_s
        self.fallback_rows += receipt.fallback_rows
        self.unturned_rows += receipt.unturned_rows
        self.held_bytes = max(self.held_bytes, receipt.held_bytes)
        self.reader_bytes = receipt.reader_bytes or self.reader_bytes
        if not receipt.device_decode_s:
            self.split_there(receipt.read_s, receipt.decode_s)
        for offset, column, why in receipt.bad_rows:
            if len(self._bad_rows) < _BAD_ROWS:
                self._bad_rows.setdefault((offset, column), why)

    def record_event(self, kind: str, what: Any) -> None:
        """Keeps an event with the present time and its kind; `what` is its content, JSON-able."""
        self._events.add(kind, what)

    @property
    def events(self) -> list[Event]:
        """The latest events of each kind, such as faults and reports to Ray Train, and a sample of the older reports.
        Each event is its time in seconds since 1970, its kind, and its content; the earliest event is the first.
        """
        return self._events.all()

    def reason_of(self, offset: int) -> tuple[str, str] | None:
        """Returns column and reason of a bad row, by a row offset as in `bad_rows`; None if they are not known."""
        return next(((column, why) for row, column, why in self.bad_rows if row == offset), None)

    @property
    def bad_rows(self) -> list[tuple[int, str, str]]:
        """Up to 100 of the first masked rows, each with row offset, column and reason. In a mixture, bits 48 and up of
        the row offset hold the number of the dataset.
        """
        return [(offset, column, why) for (offset, column), why in list(self._bad_rows.items())]

    def sample(self, *, up_to_now: bool = True) -> dict[str, float]:
        """Returns all counters that are numbers, by name, and `train_s`, which is `user_s` without `other_s`. If
        `up_to_now`, timings that are still running count up to now.
        """
        figures = {name: float(getattr(self, name)) for name in NUMBERS}
        for name, seconds in self.running().items() if up_to_now else ():
            figures[name] += seconds
        figures["train_s"] = figures["user_s"] - figures["other_s"]
        return figures | {name: float(cost) for name, cost in list(self._costs.items())}

    def as_dict(self) -> dict[str, Any]:
        """Returns the counters and `epoch_certificate` by name, with their present values."""
        now = {name: type(getattr(self, name))(value) for name, value in self.sample().items() if name in NUMBERS}
        return _Figures(now | self._costs | {"epoch_certificate": self.epoch_certificate})


class _Figures(dict[str, Any]):
    """The dict of `stats()`, which knows a name of 0.12."""

    def get(self, name: str, default: Any = None) -> Any:
        """See `dict.get`."""
        return self[name] if name in self or name == "window_bytes" else default

    def __missing__(self, name: str) -> Any:
        if name != "window_bytes":
            raise KeyError(name)
        warnings.warn("stats()['window_bytes'] is stats()['reader_bytes'] from 0.14 on.", FutureWarning, stacklevel=2)
        return self["reader_bytes"]


COST_COUNTERS = ("cost", "padded_cost", "dearest_cost")
"""The counters of a cost. Those of a cost that has a name have it after a dot."""

NUMBERS = tuple(
    field.name for field in dataclasses.fields(Stats) if field.type in (int, float) and field.name[0] != "_"
)

GAUGES = frozenset(
    [
        "readers", "readers_wanted", "decoders", "decoders_wanted", "decoders_busy", "inflight_items",
        "inflight_bytes", "ready_batches", "reader_bytes", "held_bytes",
    ]
)  # fmt: skip
"""Names of the numbers that show a state; the other numbers only grow."""
