"""Owns the loader's timings and counters; never exports them anywhere by itself."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@dataclasses.dataclass(slots=True, kw_only=True)
class Receipt:
    """What a helper actor says of one piece of work; small, so that it travels inline.

    Attributes:
        nbytes: Bytes of the table that it made.
        read_bytes: Bytes read from storage since the last receipt, reading ahead included.
        read_s: Seconds that the call waited for data from storage.
        decode_s: Seconds of decoding, of all threads together as the wall clock of the call.
        raw_bytes: Bytes of the raw rows.
        held_bytes: Most bytes of raw rows that the shard actor has held.
        fallback_rows: Rows that the fast codec left to the slow one.
        too_large_bytes: Bytes, about, of rows that were not sent because they have more than allowed; else 0.
    """

    nbytes: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    decode_s: float = 0.0
    raw_bytes: int = 0
    held_bytes: int = 0
    fallback_rows: int = 0
    too_large_bytes: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class Stats:
    """Counters of one loader since it was made.

    How to read them: `wait_s` near 0 means that the trainer is the bottleneck; a large one means that the loader is,
    and then the larger of `read_s` and `decode_s` / decoders tells which part.

    Attributes:
        batches: Batches handed out on this rank.
        rows: Rows handed out on this rank, padding included.
        masked_rows: Rows handed out as zeros with `_valid` False because they could not be decoded.
        nbytes: Bytes handed out, decoded.
        fallback_rows: JPEGs that the fast codec left to Pillow, because they are CMYK or damaged, say. Other formats,
            all of which are Pillow's, do not count.
        read_bytes: Bytes of rows read from storage, what was read ahead included.
        wait_s: Seconds that the trainer waited for the next batch.
        first_batch_s: Of these, seconds before the first batches of iterations.
        read_s: Seconds that shard actors waited for storage (reading ahead hides the rest).
        decode_s: Seconds spent in decoding, all decoders together.
        collate_s: Seconds spent in this process on turning tables into batches.
        user_s: Seconds between handing out a batch and being asked for the next one.
        helpers_replaced: Helper actors that died and were replaced.
        readers: Shard actors that run now, or threads that read.
        decoders: Decoders that run now.
        held_bytes: Most bytes of raw rows that one shard actor held at one time, the block being read included.
        epoch_certificate: What the last iteration that reached the end of an epoch proved, or None; see `certificate`.
    """

    batches: int = 0
    rows: int = 0
    masked_rows: int = 0
    fallback_rows: int = 0
    nbytes: int = 0
    read_bytes: int = 0
    wait_s: float = 0.0
    first_batch_s: float = 0.0
    read_s: float = 0.0
    decode_s: float = 0.0
    collate_s: float = 0.0
    user_s: float = 0.0
    helpers_replaced: int = 0
    readers: int = 0
    decoders: int = 0
    held_bytes: int = 0
    epoch_certificate: dict[str, Any] | None = None

    @contextmanager
    def timed(self, field: str) -> Iterator[None]:
        """Adds the seconds that the body takes to a field."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, field, getattr(self, field) + time.perf_counter() - begin)

    def add(self, receipt: Receipt) -> None:
        """Adds what a helper said."""
        self.read_bytes += receipt.read_bytes
        self.read_s += receipt.read_s
        self.decode_s += receipt.decode_s
        self.fallback_rows += receipt.fallback_rows
        self.held_bytes = max(self.held_bytes, receipt.held_bytes)

    def as_dict(self) -> dict[str, Any]:
        """The counters by name."""
        return dataclasses.asdict(self)
