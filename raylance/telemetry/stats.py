"""Owns the timings, counters and events of one loader, in memory; never says what they mean, or sends them anywhere."""

import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

Cause = Literal["start", "read", "decode", "finish", "there"]
"""What the awaited rows are doing: their helpers start; they are read; decoded, or wait for a decoder; are brought here
and made a batch; "there": read and decoded in one place, which only its receipt tells apart.
"""

WAITS = {
    "starting": "wait_start_s",
    "reading": "wait_read_s",
    "decoding": "wait_decode_s",
    "finishing": "wait_finish_s",
}
"""Causes of waiting as they are told, and the fields of `Stats` that count them."""

_EVENTS = 500  # of a kind that are kept
_OLD_REPORTS = 250  # besides, spread over all of the run: what is reported makes a curve
_BEGUN = time.time() - time.monotonic()
_BAD_ROWS = 100  # that are named
_IT = "it"


def now_s() -> float:
    """Seconds since 1970, by a clock that does not jump while the process lives."""
    return _BEGUN + time.monotonic()


@dataclasses.dataclass(slots=True, kw_only=True)
class Receipt:
    """What a helper actor says of one piece of work; small, so that it travels inline.

    Attributes:
        nbytes: Bytes of the table that it made.
        read_bytes: Bytes read from storage since the last receipt, reading ahead included.
        storage_s: Seconds in which storage was being read since the last receipt, reading ahead included.
        read_s: Seconds that the call waited for data from storage.
        decode_s: Seconds of decoding, of all threads together as the wall clock of the call.
        raw_bytes: Bytes of the raw rows.
        held_bytes: Most bytes of raw rows that the shard actor has held.
        window_bytes: Bytes of raw rows that it holds now.
        fallback_rows: Rows that the fast codec left to the slow one.
        bad_rows: Some of the rows that were masked: row offset, with a mixture's component, column and why.
        too_large_bytes: Bytes, about, of rows that were not sent because they have more than allowed; else 0.
    """

    nbytes: int = 0
    read_bytes: int = 0
    storage_s: float = 0.0
    read_s: float = 0.0
    decode_s: float = 0.0
    raw_bytes: int = 0
    held_bytes: int = 0
    window_bytes: int = 0
    fallback_rows: int = 0
    bad_rows: tuple[tuple[int, str, str], ...] = ()
    too_large_bytes: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class Stats:
    """Counters of one loader since it was made.

    How to read them: `wait_s` near 0 means that the trainer is the bottleneck; a large one means that the loader is,
    and then the largest of `wait_start_s`, `wait_read_s`, `wait_decode_s` and `wait_finish_s`, its parts, tells why.
    `RankLoader.explain` says it in words.

    Attributes:
        batches: Batches handed out on this rank.
        rows: Rows handed out on this rank, padding included.
        masked_rows: Rows handed out as zeros with `_valid` False because they could not be decoded.
        nbytes: Bytes handed out, decoded.
        fallback_rows: JPEGs that the fast codec left to Pillow, because they are CMYK or damaged, say. Other formats,
            all of which are Pillow's, do not count.
        read_bytes: Bytes of rows read from storage, what was read ahead included.
        decoded_rows: Rows that were decoded, what was decoded ahead included.
        wait_s: Seconds that the trainer waited for the next batch.
        first_batch_s: Of these, seconds before the first batches of iterations.
        wait_start_s: Of these, seconds before the loader's first batch, or in which helpers were starting.
        wait_read_s: Of these, seconds in which the awaited rows were being read.
        wait_decode_s: Of these, seconds in which they were being decoded, or waited for a decoder.
        wait_finish_s: Of these, seconds in which they were brought to this process and made a batch.
        storage_s: Seconds in which storage was being read, all shard actors together, ahead of time or not.
        read_s: Seconds that shard actors waited for storage (reading ahead hides the rest).
        decode_s: Seconds spent in decoding, all decoders together.
        collate_s: Seconds spent in this process on turning tables into batches.
        transfer_s: Seconds spent on pinning batches and sending them to the device, or on beginning to.
        user_s: Seconds between handing out a batch and being asked for the next one.
        save_s: Of these, seconds in `raylance.report`.
        other_s: Of these, seconds in which another loader was iterated: a validation pass between two batches, say.
        helpers_replaced: Helper actors that died and were replaced.
        readers: Shard actors that run now, or threads that read.
        readers_wanted: Shard actors that there should be.
        decoders: Decoders that run now.
        decoders_wanted: Decoders that there should be.
        decoders_busy: Decoders that have work now.
        inflight_items: Pieces of work on their way now.
        inflight_bytes: Bytes on their way now, or delivered and not taken yet, as far as they are known.
        ready_batches: Batches that wait for the trainer now.
        window_bytes: Bytes of raw rows that the shard actor that answered last holds.
        held_bytes: Most bytes of raw rows that one shard actor held at one time, the block being read included.
        epoch_certificate: What the last iteration that reached the end of an epoch proved, or None; see `certificate`.
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
    wait_start_s: float = 0.0
    wait_read_s: float = 0.0
    wait_decode_s: float = 0.0
    wait_finish_s: float = 0.0
    storage_s: float = 0.0
    read_s: float = 0.0
    decode_s: float = 0.0
    collate_s: float = 0.0
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
    _going: dict[str, float] = dataclasses.field(default_factory=dict, repr=False)  # field: since when it is timed
    _awaited: dict[str, tuple[float, Cause]] = dataclasses.field(default_factory=dict, repr=False)  # at most one, _IT
    _there_s: float = dataclasses.field(default=0.0, repr=False)  # waited for what is read and decoded in one place
    _events: dict[str, list[tuple[float, str, Any]]] = dataclasses.field(default_factory=dict, repr=False)  # by kind
    _skipped: int = dataclasses.field(default=0, repr=False)  # old reports since one was kept
    _every: int = dataclasses.field(default=1, repr=False)  # so many is
    _bad_rows: dict[tuple[int, str], str] = dataclasses.field(default_factory=dict, repr=False)
    first_rows: Any = dataclasses.field(default=None, repr=False)  # a table of rows of the first batch, to be looked at

    def begin(self, field: str) -> float:
        """Begins to time a field; returns what `end` knows it by."""
        now = self._going[field] = time.perf_counter()
        if field == "user_s":
            # One that was closed by another thread is still there; the garbage collector runs in any.
            _in_step()[:] = [*(stats for stats in _in_step() if stats is not self and stats.is_timed("user_s")), self]
        elif field == "wait_s" and (around := self._around(now)) is not None:
            around.interrupt(now)
        return now

    def end(self, field: str, begun: float | None = None) -> float:
        """Adds the seconds since `begin` to a field; returns them, 0 where nothing was begun.

        Args:
            field: Its name.
            begun: What `begin` returned: where the field was begun again since, that one goes on. None for the last.
        """
        if begun is not None and self._going.get(field) != begun:
            return 0.0
        begun = self._going.pop(field, None)
        seconds = 0.0 if begun is None else time.perf_counter() - begun
        setattr(self, field, getattr(self, field) + seconds)
        if field == "user_s":
            _in_step()[:] = [stats for stats in _in_step() if stats is not self]
        if field in ("wait_s", "user_s") and begun is not None and (around := self._around(begun)) is not None:
            around.resume(seconds)
        return seconds

    @property
    def step_begun(self) -> float:
        """When its consumer got the batch that it has in hand."""
        return self._going.get("user_s", math.inf)

    def interrupt(self, now: float) -> None:
        """Says that the consumer waits for a batch of another loader, in the midst of a step."""
        self._going["other_s"] = now

    def resume(self, seconds: float) -> None:
        """Says that so many seconds of the step were another loader's."""
        self._going.pop("other_s", None)
        self.other_s += seconds

    def _around(self, begun: float) -> "Stats | None":
        """Of the loader in the midst of whose step this one was asked for a batch, or had one in hand, from a time on.

        A step that began later is none: batches of both are in hand then, as where two are iterated side by side.
        """
        found = [stats for stats in _in_step() if stats is not self and stats.step_begun < begun]
        return found[-1] if found else None

    def lap(self, now: float) -> None:
        """Counts the wait that goes on up to now, in seconds of the runtime's clock."""
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
        """Says what the rows that the trainer waits for are doing from now on; None where it does not wait.

        Args:
            cause: What they are doing.
            now: Seconds of the runtime's clock.
        """
        awaited = self._awaited.pop(_IT, None)  # in one go, which no other thread comes between
        if cause is not None:
            self._awaited[_IT] = now, cause
        if awaited is not None:  # consumer and feeder may both end a wait: who comes first counts it
            since, before = awaited
            if before == "there":
                self._there_s += now - since
            else:
                name = f"wait_{before}_s"
                setattr(self, name, getattr(self, name) + now - since)

    def add(self, receipt: Receipt) -> None:
        """Adds what a helper said."""
        self.read_bytes += receipt.read_bytes
        self.storage_s += receipt.storage_s
        self.read_s += receipt.read_s
        self.decode_s += receipt.decode_s
        self.fallback_rows += receipt.fallback_rows
        self.held_bytes = max(self.held_bytes, receipt.held_bytes)
        self.window_bytes = receipt.window_bytes or self.window_bytes
        if self._there_s and receipt.read_s + receipt.decode_s > 0:
            reading_s = self._there_s * receipt.read_s / (receipt.read_s + receipt.decode_s)
            self.wait_read_s += reading_s
            self.wait_decode_s += self._there_s - reading_s
            self._there_s = 0.0
        for offset, column, why in receipt.bad_rows:
            if len(self._bad_rows) < _BAD_ROWS:
                self._bad_rows.setdefault((offset, column), why)

    def tell(self, kind: str, what: Any) -> None:
        """Keeps an event: when, of which kind, and what it was, JSON-able."""
        # Each kind has a room of its own: reports of a long run must not push out the faults that it survived.
        kept = self._events.setdefault(kind, [])
        kept.append((now_s(), kind, what))
        if len(kept) <= _EVENTS:
            return
        oldest = kept.pop(0)
        if kind == "report":
            old, self._skipped = self._events.setdefault("", []), self._skipped + 1
            if self._skipped == self._every:
                old.append(oldest)
                self._skipped = 0
            if len(old) > _OLD_REPORTS:
                self._events[""], self._every = old[::2], 2 * self._every

    @property
    def events(self) -> list[tuple[float, str, Any]]:
        """The last events of each kind, and some of all reports, oldest first: seconds since 1970, kind, what."""
        return sorted(
            (event for kept in list(self._events.values()) for event in list(kept)), key=lambda event: event[0]
        )

    @property
    def bad_rows(self) -> list[tuple[int, str, str]]:
        """The first rows that were masked: row offset, with a mixture's component; column; why."""
        return [(offset, column, why) for (offset, column), why in list(self._bad_rows.items())]

    def sample(self) -> dict[str, float]:
        """All numbers as they are now, with what has passed of those that are being timed; and `train_s`, which is
        `user_s` without `other_s`.
        """
        figures = {name: float(getattr(self, name)) for name in NUMBERS}
        now = time.perf_counter()
        for name, begun in list(self._going.items()):
            figures[name] += now - begun
        awaited = self._awaited.get(_IT)
        if awaited is not None and awaited[1] != "there":
            figures[f"wait_{awaited[1]}_s"] += max(0.0, time.monotonic() - awaited[0])
        figures["train_s"] = figures["user_s"] - figures["other_s"]
        return figures

    def as_dict(self) -> dict[str, Any]:
        """The counters by name."""
        return {name: getattr(self, name) for name in (*NUMBERS, "epoch_certificate")}


_threads = threading.local()


def _in_step() -> list[Stats]:
    """Of the loaders whose batches this thread has in hand, the first one's first."""
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
"""Those of them that say how things stand; the others only grow."""
