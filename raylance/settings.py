"""Owns the settings of a loader: what is read, what is delivered in which order, and how the machine is used; starts
nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from raylance.arguments import check_integer
from raylance.decode.rows import Decoding
from raylance.errors import ConfigError
from raylance.orders.mixture import MixOrder
from raylance.orders.order import Auto, Tables
from raylance.planning.plan import Plan, Remainder
from raylance.planning.resume import Delivery as Delivery
from raylance.planning.state import describe
from raylance.source.rows import RowSource
from raylance.store import Shared, SharedTables

_MAX_AUTO_READERS = 4  # each holds max_window_bytes
_CHUNK_BYTES = 32 << 20  # of one rank, for orders that have no windows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What a loader reads and what it makes of it; picklable.

    Attributes:
        source: The rows.
        delivers: Columns of the batches: those that are read, unless a transform changes them.
        decoding: What to do with encoded columns, and the transform; None where there is neither.
        list_lengths: Of delivered columns of lists of numbers: the length where all sampled rows have one, else None.
    """

    source: RowSource
    delivers: Sequence[str]
    decoding: Decoding | None = None
    list_lengths: Mapping[str, int | None] = dataclasses.field(default_factory=dict)

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
    """How a loader uses the machine. Nothing here changes what is delivered, but for `max_window_bytes`.

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
        decode_threads: Threads of a shard actor that decodes by itself.
        max_window_bytes: Most bytes of raw rows that a shard actor holds, the next window included, by what was read;
            what an order leaves to "auto" is settled from it. A window or a step that does not fit is read in parts, in
            the same order; a row that is larger by itself is an error. The block that is just being read, about a
            sixteenth of it and 32 MiB at the most, comes on top: more only where rows suddenly grow.
        max_inflight_bytes: Most bytes of raw and decoded tables on their way to a rank, or one row that is larger. The
            step that is being put together comes on top.
        placement_timeout_s: Seconds that helpers may take to find their place.
        read_timeout_s: Seconds that a read is tried again when the storage fails, before that is an error.
        work_timeout_s: Seconds that a helper may take over one piece of work before it is taken for hung and replaced.
        record: Whether the loader's figures are published as metrics and, under Ray Train, recorded beside the run's
            checkpoints, for `report_run`, `watch` and `python -m raylance.top`; or the folder of a run, where no
            trainer tells it. A thread does both once a second.
        name: What records and metrics call the dataset, where no trainer gives it a name: where one process trains on
            one part of it, and validates on another. None for the last part of its URI.
        runtime: Who does the work: "ray" actors, or "threads" of this process. "auto" is Ray where one is running.
        auto_decoders: What "auto" asks for, where it was settled for all ranks at once; None for the free CPUs' share.
    """

    num_decoders: int | tuple[int, int] | Auto = "auto"
    num_readers: int | tuple[int, int] | Auto = 1
    decoder_cpus: float = 1.0
    decode_threads: int = 1
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
        if not isinstance(self.record, bool | str):
            raise ConfigError(f"record={self.record!r}: must be True, False, or the folder of a run.")
        if not (self.name is None or (isinstance(self.name, str) and self.name)):
            raise ConfigError(f"name={self.name!r}: must be what to call the dataset, or None.")
        if self.runtime not in ("auto", "ray", "threads"):
            raise ConfigError(f'runtime={self.runtime!r}: must be "auto", "ray" or "threads".')
        for name in (
            "decode_threads",
            "max_window_bytes",
            "max_inflight_bytes",
            "placement_timeout_s",
            "work_timeout_s",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be positive.")
        for name in ("decoder_cpus", "read_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must not be negative.")

    @property
    def decoder_range(self) -> tuple[int, int]:
        """Least and most decoders that are asked for; "auto" is settled where it is known what there is."""
        return _as_range(0 if self.num_decoders == "auto" else self.num_decoders)

    @property
    def reader_range(self) -> tuple[int, int]:
        """Least and most readers that are asked for."""
        return _as_range((1, _MAX_AUTO_READERS) if self.num_readers == "auto" else self.num_readers)


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
    feed: Feed, delivery: Delivery, options: Options, global_batch_size: int, world_size: int, remainder: Remainder
) -> Plan:
    """Makes the plan of an epoch; fields of the order at "auto" are settled for this batch, whatever the world size.

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
        max_window_bytes=options.max_window_bytes,
    )
    order = delivery.order.settle(facts)
    chunk_positions = order.read_positions
    if chunk_positions is None:
        chunk_positions = max(1, int(_CHUNK_BYTES / max(feed.source.row_bytes, 1))) * world_size
    # Two chunks are held. An order that shuffles inside of them needs them whole; any other may read less at a time.
    fitting = max(order.lane_count, int(options.max_window_bytes / 2 * world_size / max(feed.source.row_bytes, 1)))
    if chunk_positions > fitting:
        if order.needs_whole_windows:
            needed = 2 * chunk_positions / world_size * feed.source.row_bytes
            raise ConfigError(
                f"{order.settings} would hold {needed / 2**20:,.0f} MiB of raw rows on each of {world_size} ranks, "
                f"max_window_bytes allows {options.max_window_bytes / 2**20:,.0f} MiB. Use smaller shard_rows, "
                'window_shards or lanes (or "auto"), or raise max_window_bytes.'
            )
        chunk_positions = fitting
    return Plan(
        order=order,
        global_batch_size=global_batch_size,
        world_size=world_size,
        remainder=remainder,
        chunk_positions=chunk_positions,
    )


def map_shared(feed: Feed, delivery: Delivery, change: Callable[[Shared[Any]], Shared[Any]]) -> tuple[Feed, Delivery]:
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
