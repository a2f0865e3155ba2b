"""The options of a loader, which say how it uses the machine."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np

from raylance.arguments import check_flag, check_integer, refuse_unknown, take_renamed, warn_replaced
from raylance.errors import ConfigError
from raylance.observe.spans import check_traces
from raylance.orders.order import Auto

RENAMED = {"max_window_bytes": "reader_bytes", "max_inflight_bytes": "inflight_bytes"}
"""Options of 0.12, and what has taken their place."""
_BYTES = 512 << 20  # default of a limit
_LONGEST_S = 1_000_000_000  # about 30 years; clocks of the system may not support a longer wait
MAX_AUTO_DECODERS = 32  # most decoders of a rank with num_decoders="auto"
_MAX_AUTO_READERS = 4  # each of them holds reader_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a loader uses the machine. Options never change the delivered rows, so ranks may have different options.

    Attributes:
        num_decoders: Number of decode actors of each rank. All loaders of the rank share them. Decoding begins when the
            first actor runs. If some actors cannot be placed, the run logs a warning and continues with the others, if
            there is at least one. If none runs within 5 s, the shard actor decodes until one runs. With 0, threads of
            the shard actor decode. "auto" takes the rank's share of the free CPUs; it ends idle actors, and requests
            them again when the trainer waits for decoding. A pair (min, max) begins with min actors, and requests more
            while the trainer waits for decoding, even if no CPU is free yet, so that an autoscaler adds nodes.
        num_readers: Number of shard actors, which read rows, of each rank and loader. Use more than one if the trainer
            waits for reading. They take turns: each reads one chunk, and then the next chunk that no other has. Each
            holds up to `reader_bytes`, so two hold up to 1 GiB by default. A pair (min, max) begins with min shard
            actors and requests more while the trainer waits for reading; "auto" is (1, 4).
        decoder_cpus: Number of CPUs that a decode actor reserves in Ray.
        decode_threads: Number of threads in which a shard actor decodes, if it decodes itself. "auto" is one; for the
            loaders that Ray Train makes, it is the CPUs of the rank's node divided by the number of ranks there.
        reader_bytes: Maximum bytes of raw rows that a shard actor holds, measured as they are read: the rows of the
            present chunk and those of the next chunk that it reads ahead. A chunk that takes more than about half of
            the limit is read in parts, in the same order, which takes longer. A single row that takes more than the
            limit is an error.
            Rows that are being read need memory on top of the limit: about an eighth of the limit, at most 32 MiB, or
            more if rows suddenly get larger. The size of the windows, which is the same for all ranks, follows from
            `window_bytes` of `raylance.dataset`; without it, from the `reader_bytes` given to `DataConfig`.
            Through Ray, values of 1 KiB and more that make samples of several rows, as frames of videos, lie in the
            object store instead, unless helpers decode or transform them.
            With the runtime "threads", there is one more need: in a batch, a column that needs no decoder is a view of
            the reader's memory. As long as the training loop refers to such a batch, all rows that were read with it
            stay in memory. If these rows take more than half of the limit, new batches are copies instead. So batches
            to which the training loop refers need at most `reader_bytes` on top of the limit.
        inflight_bytes: Maximum bytes of raw and decoded tables on their way to a rank. A single row may be larger.
            The tables of the step that is being assembled do not count for this limit.
        placement_timeout_s: Seconds that helpers may take to be placed and to start.
        read_timeout_s: Seconds for which a failed read is tried again before the failure is an error. The storage may
            take the same time to answer the first attempt (5 s if that is longer), and a quarter of it to answer a
            later one (3 s if that is longer). Each request to S3, Google Cloud Storage or Azure may take half the time
            of a first attempt, but at most 30 s. If `storage_options` or the environment sets one of Lance's own limits
            for requests, such as `timeout` or `client_max_retries`, raylance sets no limit for requests.
        work_timeout_s: Seconds that a helper may take for one piece of work before it counts as hung and is replaced.
        record: Whether the loader's figures are published as metrics and, under Ray Train, recorded next to the run's
            checkpoints, for `report_run`, `watch` and `python -m raylance.top`. Or the folder of a run in which to
            record the figures if no trainer sets the folder. A thread samples and publishes the figures once a second.
        name: Name of the dataset in records and metrics, if the trainer gives the dataset no name. Use it if one
            process trains on one part of a dataset and validates on another. None for the last part of the URI.
        runtime: "ray" actors or "threads" of this process do the work. "auto" is "ray" if Ray is running, else
            "threads".
        traces: Whether each step is a span of OpenTelemetry, with children for the wait and for what it was for: see
            docs/operations.md. It needs `pip install raylance[otel]`, and a provider of spans in the process of the
            training loop. Batches of torch's DataLoader have the wait alone.
        auto_decoders: Number of decoders that "auto" requests, if it was resolved for all ranks at once; None for a
            share of the free CPUs. For raylance's own use.
    """

    num_decoders: int | tuple[int, int] | Auto = "auto"
    num_readers: int | tuple[int, int] | Auto = 1
    decoder_cpus: float = 1.0
    decode_threads: int | Auto = "auto"
    reader_bytes: int = _BYTES
    inflight_bytes: int = _BYTES
    placement_timeout_s: float = 120.0
    read_timeout_s: float = 60.0
    work_timeout_s: float = 600.0
    record: bool | str = True
    name: str | None = None
    runtime: Literal["auto", "ray", "threads"] = "auto"
    traces: bool = False
    auto_decoders: int | None = None
    max_window_bytes: dataclasses.InitVar[int | None] = None
    max_inflight_bytes: dataclasses.InitVar[int | None] = None

    def __post_init__(self, max_window_bytes: int | None, max_inflight_bytes: int | None) -> None:
        for older, value in zip(RENAMED, (max_window_bytes, max_inflight_bytes), strict=True):
            if value is not None and getattr(self, RENAMED[older]) != _BYTES:
                raise ConfigError(f"Options(): {RENAMED[older]}= has taken the place of {older}=: leave {older}= out.")
            if value is not None:
                warn_replaced("raylance.Options()", [older], f"{RENAMED[older]}=")
                object.__setattr__(self, RENAMED[older], value)
        for name in ("reader_bytes", "inflight_bytes"):
            value = getattr(self, name)
            if isinstance(value, float | np.floating) and float(value).is_integer():  # 1e9
                value = int(value)
            object.__setattr__(self, name, check_integer(name, value, 1))
        if self.decode_threads != "auto":
            check_integer("decode_threads", self.decode_threads, 1)
        least, most = self.decoder_range
        is_range = type(least) is type(most) is int and (0 <= least == most or 1 <= least < most)
        self._check("num_decoders", is_range, '"auto", 0, a positive integer, or (min, max) with 1 <= min < max')
        least, most = self.reader_range
        is_range = type(least) is type(most) is int and 1 <= least <= most
        self._check("num_readers", is_range, '"auto", a positive integer, or (min, max) with 1 <= min < max')
        is_record = isinstance(self.record, bool | str) and self.record != ""
        self._check("record", is_record, "True, False, or the folder of a run")
        is_name = self.name is None or (isinstance(self.name, str) and self.name != "")
        self._check("name", is_name, "what to call the dataset, or None")
        object.__setattr__(self, "traces", check_flag("traces", self.traces))
        if self.traces:
            check_traces()
        self._check("runtime", self.runtime in ("auto", "ray", "threads"), '"auto", "ray" or "threads"')
        for name in ("placement_timeout_s", "work_timeout_s"):
            value = getattr(self, name)
            is_time = _is_number(value) and 0 < value <= _LONGEST_S
            self._check(name, is_time, f"a positive number of seconds, of up to {_LONGEST_S:,}")
        is_count = _is_number(self.decoder_cpus) and 0 <= self.decoder_cpus < math.inf
        self._check("decoder_cpus", is_count, "a finite number that is not negative")
        is_time = _is_number(self.read_timeout_s) and self.read_timeout_s >= 0
        self._check("read_timeout_s", is_time, "a number that is not negative")

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ConfigError(f"{name}={getattr(self, name)!r}: must be {wanted}.")

    @property
    def decoder_range(self) -> tuple[int, int]:
        """Least and most decoders to request; (0, 0) for "auto", which is resolved when the free CPUs are known."""
        return _as_range(0 if self.num_decoders == "auto" else self.num_decoders)

    @property
    def reader_range(self) -> tuple[int, int]:
        """Least and most readers to request."""
        return _as_range((1, _MAX_AUTO_READERS) if self.num_readers == "auto" else self.num_readers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


class OptionArguments(TypedDict, total=False):
    """The fields of `Options` that calls take as `**options`, so that type checkers and editors know them."""

    num_decoders: int | tuple[int, int] | Auto
    num_readers: int | tuple[int, int] | Auto
    decoder_cpus: float
    decode_threads: int | Auto
    reader_bytes: int
    inflight_bytes: int
    placement_timeout_s: float
    read_timeout_s: float
    work_timeout_s: float
    record: bool | str
    name: str | None
    runtime: Literal["auto", "ray", "threads"]
    traces: bool


def make_options(call: str, options: Mapping[str, Any], own: Sequence[str]) -> Options:
    """Returns the `Options` that a call got as `**options`; `own` names the call's other arguments, for the error text.

    Raises:
        ConfigError: If a name or a value cannot be honoured.
    """
    known, given = [*OptionArguments.__annotations__], dict(options)
    take_renamed(call, given, RENAMED, depth=1)
    refuse_unknown(call, {name: value for name, value in given.items() if name not in known}, (*own, *known))
    return Options(**given)


def _as_range(given: Any) -> tuple[int, int]:
    """Returns (least, most), from one number or from a pair."""
    return tuple(given) if isinstance(given, tuple | list) and len(given) == 2 else (given, given)
