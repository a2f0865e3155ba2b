"""The interface between the components that work and their observer."""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

import pyarrow as pa

Cause = Literal["start", "read", "decode", "finish", "there"]
"""The state of the awaited rows. "start": their helpers start. "read": they are being read. "decode": they are being
decoded, or wait for a decoder. "finish": they are brought here and made a batch. "there": one helper reads and decodes
them, so that only its receipt separates the times of reading and decoding.
"""


@dataclasses.dataclass(slots=True, kw_only=True)
class Receipt:
    """The measurements of one piece of work by its helper; small, so that Ray sends them inline."""

    nbytes: int = 0  # bytes of the table that the helper made
    read_bytes: int = 0  # bytes that the call read from storage
    storage_s: float = 0.0  # time in which the helper read since the last receipt; reads at once count once
    read_s: float = 0.0  # time until the rows were gathered from the chunk
    decode_s: float = 0.0  # by the wall clock of the call, not summed over its threads
    decode_cpu_s: float = 0.0  # CPU seconds of the thread that decodes, in `decode_s`; of its process if several do
    transform_s: float = 0.0  # part of `decode_s` in the user's transform
    device_decode_s: float = 0.0  # part of `decode_s` on the device of the trainer's process
    raw_bytes: int = 0  # bytes of the raw rows
    held_bytes: int = 0  # peak of `reader_bytes` so far
    reader_bytes: int = 0  # bytes of raw rows that the shard actor holds now
    fallback_rows: int = 0  # rows that the fast codec left to the slow one
    unturned_rows: int = 0  # images whose orientation could not be read
    bad_rows: tuple[tuple[int, str, str], ...] = ()  # some masked rows: offset (see `reason_of`), column, reason
    too_large_bytes: int = 0  # bytes of the rows if they exceed the limit and were not sent; else 0


class FaultSeen(NamedTuple):
    """A machine fault has happened. It costs time but no row."""

    line: str
    replaces_helper: bool = False


class WorkDone(NamedTuple):
    """A helper has finished a call, or the trainer's device has decoded a batch."""

    receipt: Receipt
    decoded_rows: int


class Status(NamedTuple):
    """The state of the pass. `cause` is the cause of the trainer's wait, None while the trainer does not wait."""

    readers: int
    readers_wanted: int
    decoders: int
    decoders_wanted: int
    decoders_busy: int
    inflight_items: int
    inflight_bytes: int
    cause: Cause | None


class WaitsFor(NamedTuple):
    """The cause of the trainer's wait from now on; None if it does not wait."""

    cause: Cause | None


class BatchGathered(NamedTuple):
    """The rows of the first batch of a pass are here, but not converted yet."""

    rows: pa.Table


class BatchesReady(NamedTuple):
    """This number of finished batches waits for the trainer."""

    batches: int


class BatchHandedOut(NamedTuple):
    """The trainer has got a batch."""

    rows: int
    nbytes: int
    masked_rows: int
    costs: Mapping[str, tuple[int, int, int]] | None = None  # `StepCosts` by name, if rows have costs


Observation = FaultSeen | WorkDone | Status | WaitsFor | BatchGathered | BatchesReady | BatchHandedOut


class Observer(Protocol):
    """Takes observations, and keeps why rows are bad. Components that hold one know no statistics or records."""

    def observe(self, observation: Observation, now: float) -> None:
        """Takes an observation, made at time `now` of the runtime's clock."""

    def timed(self, field: str) -> AbstractContextManager[None]:
        """Adds the seconds that the body takes to a field of `Stats`."""

    def in_step(self) -> AbstractContextManager[None]:
        """Makes spans that the body opens, also in calls that it begins, children of the consumer's present step."""

    def reason_of(self, offset: int) -> tuple[str, str] | None:
        """Returns column and reason of a bad row by its row offset; None if they were not kept. In a mixture, the high
        bits of the row offset hold the number of the component.
        """
