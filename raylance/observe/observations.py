"""Owns the interface between the components that work and their observer: the observations and the `Observer`; never
counts or interprets an observation.
"""

import dataclasses
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
    """The measurements of one piece of work by its helper; small, so that Ray sends them inline.

    Attributes:
        nbytes: Bytes of the table that the helper made.
        read_bytes: Bytes that the call read from storage.
        storage_s: Seconds in which the helper read storage since the last receipt; reads at the same time count once.
        read_s: Seconds of the call until its rows were gathered; with storage only if they were read by themselves.
        decode_s: Seconds of decoding by the wall clock of the call, not summed over its threads.
        device_decode_s: Part of `decode_s` that the device of the trainer's process took, if it decodes.
        raw_bytes: Bytes of the raw rows.
        held_bytes: Peak of `window_bytes` so far.
        window_bytes: Bytes of raw rows that the shard actor, which reads, holds now.
        fallback_rows: Rows that the fast codec left to the slow one.
        unturned_rows: Images whose orientation could not be read.
        bad_rows: Some of the masked rows: row offset (in a mixture, see `reason_of`), column and reason.
        too_large_bytes: Approximate bytes of rows that were not sent because they exceed the limit; else 0.
    """

    nbytes: int = 0
    read_bytes: int = 0
    storage_s: float = 0.0
    read_s: float = 0.0
    decode_s: float = 0.0
    device_decode_s: float = 0.0
    raw_bytes: int = 0
    held_bytes: int = 0
    window_bytes: int = 0
    fallback_rows: int = 0
    unturned_rows: int = 0
    bad_rows: tuple[tuple[int, str, str], ...] = ()
    too_large_bytes: int = 0


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


Observation = FaultSeen | WorkDone | Status | WaitsFor | BatchGathered | BatchesReady | BatchHandedOut


class Observer(Protocol):
    """Takes observations, and keeps why rows are bad. Components that hold one know no statistics or records."""

    def observe(self, observation: Observation, now: float) -> None:
        """Takes an observation, made at time `now` of the runtime's clock."""

    def timed(self, field: str) -> AbstractContextManager[None]:
        """Adds the seconds that the body takes to a field of `Stats`."""

    def reason_of(self, offset: int) -> tuple[str, str] | None:
        """Returns column and reason of a bad row by its row offset; None if they were not kept. In a mixture, the high
        bits of the row offset hold the number of the component.
        """
