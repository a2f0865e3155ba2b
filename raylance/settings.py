"""Owns the settings of a loader: what is read, what is delivered in which order, and how the machine is used; starts
nothing.
"""

import dataclasses
import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from raylance.arguments import check_integer, refuse_unknown
from raylance.decode.rows import Decoding
from raylance.environment.shared import Shared, SharedTables
from raylance.errors import ConfigError
from raylance.orders.mixture import MixOrder
from raylance.orders.order import WINDOW_BYTES, Auto, Tables
from raylance.planning.plan import Plan, Remainder
from raylance.planning.resume import DeliverySpec as DeliverySpec
from raylance.planning.state import describe
from raylance.source.rows import RowSource

logger = logging.getLogger(__name__)

_LONGEST_S = 1_000_000_000  # 30 years; no clock of the system waits for ever
_MAX_AUTO_READERS = 4  # each holds max_window_bytes
_CHUNK_BYTES = 32 << 20  # of one rank, for orders that have no windows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpec:
    """What a loader reads and what it makes of it; picklable.

    Attributes:
        source: The rows.
        delivers: Columns of the batches: those that are read, unless a transform changes them.
        decoding: What to do with encoded columns, and the transform; None where there is neither.
        list_lengths: Of delivered columns of lists of numbers: the length where all sampled rows have one, else None.
        list_dtypes: Of those that can be padded: the dtype of the numbers.
    """

    source: RowSource
    delivers: Sequence[str]
    decoding: Decoding | None = None
    list_lengths: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    list_dtypes: Mapping[str, "np.dtype[Any]"] = dataclasses.field(default_factory=dict)

    @property
    def origin(self) -> dict[str, Any]:
        """What a checkpoint says of it: fields of `State`."""
        return {
            "uri": self.source.uri,
            "branch": self.source.branch,
            "version": self.source.version,
            "identity": self.source.identity,
            "columns": list(self.delivers),
            "decode": [describe(decoder) for decoder in self.decoding.decoders] if self.decoding else [],
            "transform": describe(self.decoding.transform) if self.decoding else None,
            "codecs": {d.column: d.codec for d in self.decoding.decoders if d.codec} if self.decoding else {},
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a loader uses the machine. Nothing here changes what is delivered: ranks may have unlike options.

    Attributes:
        num_decoders: Decode actors of each rank, shared by its loaders. 0 decodes in threads of the shard actor.
            "auto" takes those that find a place among the CPUs that are free; where none runs within 5 s, the shard
            actor decodes until one does; those that have nothing to do are given back, and asked for again when they
            are missed. (min, max) begins with min, and asks for more while the trainer waits for decoding, also where
            no CPU is free yet: that is what has an autoscaler add nodes.
        num_readers: Shard actors of each rank and loader; more than one where reading is what the trainer waits for:
            they take windows in turn, and each holds up to `max_window_bytes` of its own: two at the default have
            1 GiB. (min, max) begins with min and asks for more while the trainer waits for reading; "auto" is (1, 4).
        decoder_cpus: CPUs that a decode actor takes from Ray's count.
        decode_threads: Threads of a shard actor that decodes by itself. "auto" is one; under Ray Train, the CPUs of the
            rank's node, divided among the ranks there.
        max_window_bytes: Most bytes of raw rows that a shard actor holds, the next window included, by what was read. A
            window or a step that does not fit is read in parts, in the same order, which takes longer; a row that is
            larger by itself is an error. The block that is just being read, about a sixteenth of it and 32 MiB at the
            most, comes on top: more only where rows suddenly grow. How large windows are follows from `window_bytes` of
            `raylance.dataset`, which is the same for all ranks.
        max_inflight_bytes: Most bytes of raw and decoded tables on their way to a rank, or one row that is larger. The
            step that is being put together comes on top.
        placement_timeout_s: Seconds that helpers may take to find their place and to start.
        read_timeout_s: Seconds that a read is tried again when the storage fails, before that is an error.
        work_timeout_s: Seconds that a helper may take over one piece of work before it is taken for hung and replaced.
        record: Whether the loader's figures are published as metrics and, under Ray Train, recorded beside the run's
            checkpoints, for `report_run`, `watch` and `python -m raylance.top`; or the folder of a run, where no
            trainer tells it. A thread does both once a second.
        name: What records and metrics call the dataset, where no trainer gives it a name: where one process trains on
            one part of it, and validates on another. None for the last part of its URI.
        runtime: Who does the work: "ray" actors, or "threads" of this process. "auto" is Ray where one is running.
        auto_decoders: What "auto" asks for, where it was resolved for all ranks at once; None for the free CPUs' share.
            For raylance's own use.
    """

    num_decoders: int | tuple[int, int] | Auto = "auto"
    num_readers: int | tuple[int, int] | Auto = 1
    decoder_cpus: float = 1.0
    decode_threads: int | Auto = "auto"
    max_window_bytes: int = 512 << 20
    max_inflight_bytes: int = 256 << 20
    placement_timeout_s: float = 120.0
    read_timeout_s: float = 60.0
    work_timeout_s: float = 600.0
    record: bool | str = True
    name: str | None = None
    runtime: Literal["auto", "ray", "threads"] = "auto"
    auto_decoders: int | None = None

    def __post_init__(self) -> None:
        least, most = self.decoder_range
        if not (type(least) is type(most) is int and (0 <= least == most or 1 <= least < most)):
            raise ConfigError(
                f'num_decoders={self.num_decoders!r}: must be "auto", 0, a positive integer, or (min, max) with '
                "1 <= min < max."
            )
        least, most = self.reader_range
        if not (type(least) is type(most) is int and 1 <= least <= most):
            raise ConfigError(
                f'num_readers={self.num_readers!r}: must be "auto", a positive integer, or (min, max) with '
                "1 <= min < max."
            )
        if not isinstance(self.record, bool | str) or self.record == "":
            raise ConfigError(f"record={self.record!r}: must be True, False, or the folder of a run.")
        if not (self.name is None or (isinstance(self.name, str) and self.name)):
            raise ConfigError(f"name={self.name!r}: must be what to call the dataset, or None.")
        if self.runtime not in ("auto", "ray", "threads"):
            raise ConfigError(f'runtime={self.runtime!r}: must be "auto", "ray" or "threads".')
        self._check_numbers()

    def _check_numbers(self) -> None:
        if self.decode_threads != "auto":
            check_integer("decode_threads", self.decode_threads, 1)
        for name in ("max_window_bytes", "max_inflight_bytes"):
            value = getattr(self, name)
            if isinstance(value, float | np.floating) and float(value).is_integer():  # 1e9
                value = int(value)
            object.__setattr__(self, name, check_integer(name, value, 1))
        for name in ("placement_timeout_s", "work_timeout_s"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 < value <= _LONGEST_S):
                raise ConfigError(f"{name}={value!r}: must be a positive number of seconds, of up to {_LONGEST_S:,}.")
        if not (_is_number(self.decoder_cpus) and 0 <= self.decoder_cpus < math.inf):
            raise ConfigError(f"decoder_cpus={self.decoder_cpus!r}: must be a finite number that is not negative.")
        if not (_is_number(self.read_timeout_s) and self.read_timeout_s >= 0):
            raise ConfigError(f"read_timeout_s={self.read_timeout_s!r}: must be a number that is not negative.")

    @property
    def decoder_range(self) -> tuple[int, int]:
        """Least and most decoders that are asked for; "auto" is resolved where it is known what there is."""
        return _as_range(0 if self.num_decoders == "auto" else self.num_decoders)

    @property
    def reader_range(self) -> tuple[int, int]:
        """Least and most readers that are asked for."""
        return _as_range((1, _MAX_AUTO_READERS) if self.num_readers == "auto" else self.num_readers)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


_PUBLIC_OPTIONS = tuple(field for field in dataclasses.fields(Options) if field.name != "auto_decoders")
Function = TypeVar("Function", bound=Callable[..., Any])


def takes_options(call: Function) -> Function:
    """Has a call that takes `**options` show each field of `Options`, for `help` and for editors."""
    signature = inspect.signature(call)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
        for field in _PUBLIC_OPTIONS
    ]
    call.__dict__["__signature__"] = signature.replace(parameters=[*own, *options])
    return call


def make_options(call: str, options: Mapping[str, Any], own: Sequence[str]) -> Options:
    """The options that a call was given as `**options`.

    Args:
        call: The call, for the message.
        options: What it was given.
        own: Names of its other arguments, for the message.

    Raises:
        ConfigError: For a name or a value that cannot be honoured.
    """
    known = [field.name for field in _PUBLIC_OPTIONS]
    refuse_unknown(call, {name: value for name, value in options.items() if name not in known}, (*own, *known))
    return Options(**options)


def _as_range(given: Any) -> tuple[int, int]:
    """Least and most, of one number or of both."""
    return tuple(given) if isinstance(given, tuple | list) and len(given) == 2 else (given, given)


def check_batch_size(global_batch_size: int | None, batch_size: int | None, world_size: int) -> int:
    """Rows of one step over all ranks, from the one that is given.

    Raises:
        ConfigError: Unless exactly one is given, an integer of at least 1.
    """
    if (global_batch_size is None) == (batch_size is None):
        raise ConfigError(
            f"global_batch_size={global_batch_size}, batch_size={batch_size}: give exactly one of them; rows of a step "
            "over all ranks, or of each rank."
        )
    if global_batch_size is not None:
        return check_integer("global_batch_size", global_batch_size, 1)
    return check_integer("batch_size", batch_size, 1) * world_size


def make_plan(
    feed: ReadSpec,
    delivery: DeliverySpec,
    options: Options,
    global_batch_size: int,
    world_size: int,
    remainder: Remainder,
) -> Plan:
    """Makes the plan of an epoch. What the order leaves to "auto" follows from the dataset and this batch alone, never
    from the world size or the options, so that all ranks have one order.

    Args:
        feed: What is read.
        delivery: What is delivered.
        options: How the machine is used.
        global_batch_size: Rows of one step over all ranks.
        world_size: Ranks.
        remainder: What becomes of the rows behind the last whole step.

    Raises:
        ConfigError: If there would be no step, or ranks without a row in any.
    """
    if global_batch_size < world_size and remainder != "ragged":
        raise ConfigError(
            f"a global batch of {global_batch_size} rows on {world_size} ranks: some ranks would have no row in any "
            f"step, and their loss no value. Use global_batch_size={world_size} or more, or fewer ranks."
        )
    facts = dataclasses.replace(
        delivery.facts,
        row_bytes=feed.source.row_bytes,
        global_batch_size=global_batch_size,
        window_bytes=delivery.window_bytes or WINDOW_BYTES,
    )
    order = delivery.order.resolve(facts)
    chunk_positions = order.read_positions
    if chunk_positions is None:
        chunk_positions = max(1, int(_CHUNK_BYTES / max(feed.source.row_bytes, 1))) * world_size
    # Two chunks are held. What does not fit is read in parts, in the same order.
    fitting = max(order.lane_count, int(options.max_window_bytes / 2 * world_size / max(feed.source.row_bytes, 1)))
    if chunk_positions > fitting:
        if order.needs_whole_windows:
            window_bytes = int(chunk_positions / world_size * feed.source.row_bytes)
            _warn_of_parts(str(feed.source.uri), str(order.settings), window_bytes, options.max_window_bytes)
        chunk_positions = -(-chunk_positions // -(-chunk_positions // fitting))
    return Plan(
        order=order,
        global_batch_size=global_batch_size,
        world_size=world_size,
        remainder=remainder,
        chunk_positions=chunk_positions,
    )


@functools.cache
def _warn_of_parts(uri: str, order: str, window_bytes: int, max_window_bytes: int) -> None:
    """Warns once a process: every pass comes by here."""
    logger.warning(
        "%s: a window of %s has %s MiB of raw rows on each rank, and max_window_bytes=%d has room for two of %s MiB. "
        "Each window is read in parts, whose rows lie scattered over it: the same batches, more slowly. Raise "
        "max_window_bytes, or start the run with a smaller window_bytes= of raylance.dataset, or smaller sizes of the "
        "order.",
        uri,
        order,
        f"{window_bytes / 2**20:,.1f}",
        max_window_bytes,
        f"{max_window_bytes / 2**21:,.1f}",
    )


def map_shared(
    feed: ReadSpec, delivery: DeliverySpec, change: Callable[[Shared[Any]], Shared[Any]]
) -> tuple[ReadSpec, DeliverySpec]:
    """Does something to each large value: selections, and the tables of orders.

    Args:
        feed: What is read.
        delivery: What is delivered.
        change: What to do, such as `Shared.of_run`.
    """

    def tables_of(tables: Tables) -> Tables:
        return SharedTables(change(tables.shared)) if isinstance(tables, SharedTables) else tables

    order = delivery.order
    if isinstance(order, MixOrder):
        parts = tuple(dataclasses.replace(part, tables=tables_of(part.tables)) for part in order.components)
        order = dataclasses.replace(order, components=parts)
    feed = dataclasses.replace(feed, source=feed.source.map_shared(change))
    return feed, dataclasses.replace(delivery, order=order, tables=tables_of(delivery.tables))
