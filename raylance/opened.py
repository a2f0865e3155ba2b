"""What a handle has opened: which rows, how they are read and decoded, and in which order they are delivered."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raylance.columns import COMPONENT
from raylance.decode.arrays import Shape, shape_of
from raylance.decode.decoding import Decoding
from raylance.decode.open_video import codec_name
from raylance.descriptions import describe
from raylance.environment.shared import Shared, SharedTables
from raylance.orders.mixture import MixOrder
from raylance.orders.order import Tables
from raylance.planning.delivery_spec import DeliverySpec
from raylance.source.rows import RowSource


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpec:
    """Describes the rows that a loader reads, and how they are decoded; picklable.

    Attributes:
        source: Gives access to the stored rows.
        delivers: Names of the columns in the batches, after decoding and the transform.
        schema: Schema of the delivered rows; None if it must be found by reading them, as for packed rows.
        decoding: The decoders, including those of the device, and the transform; None if there are neither.
        list_lengths: For each delivered column of lists of numbers, the length of the lists if all sampled rows have
            the same length, else None; for lists of lists, the shape.
        list_dtypes: For each column that can be padded, the dtype of the numbers.
        encoded: Columns that are delivered as they are stored, and hold encoded images.
        filter: The filter of the rows; None without one. In a mixture, it is a dict by component, like `split` and
            `cost`.
        split: The description of the split, or None.
        cost: That of what a row costs, or None.
    """

    source: RowSource
    delivers: Sequence[str]
    schema: pa.Schema | None = None
    decoding: Decoding | None = None
    list_lengths: Mapping[str, int | Shape | None] = dataclasses.field(default_factory=dict)
    list_dtypes: Mapping[str, "np.dtype[Any]"] = dataclasses.field(default_factory=dict)
    encoded: tuple[str, ...] = ()
    filter: Any = None
    split: Any = None
    cost: Any = None

    @property
    def in_helpers(self) -> Decoding | None:
        """The part of `decoding` that decode actors do; None if they do nothing."""
        return self.decoding and self.decoding.in_helpers

    @property
    def on_device(self) -> Decoding | None:
        """The part of `decoding` that the trainer does on its device; None if it does nothing."""
        return self.decoding and self.decoding.on_device

    @property
    def of_lists(self) -> Sequence[str]:
        """See `Decoding.of_lists`."""
        return self.decoding.of_lists if self.decoding else ()

    @property
    def carries(self) -> Sequence[str]:
        """Names of the columns that are sent to the trainer. A column that the trainer decodes is sent encoded."""
        encoded = {each.output_name: each.column for each in self.on_device.decoders} if self.on_device else {}
        return list(dict.fromkeys(encoded.get(name, name) for name in self.delivers))

    @property
    def channels_last(self) -> frozenset[str]:
        """Names of the columns whose channels come before height and width in torch. What a transform returns keeps its
        axes if the last one cannot be that of the channels.
        """
        channels = {each.column: each.channels for _, each in self.source.derived if each.channels}
        channels |= self.decoding.channels_last if self.decoding else {}
        if self.decoding is None or self.decoding.transform is None or self.schema is None:
            return frozenset(channels)
        return frozenset(each.name for each in self.schema if channels.get(each.name) in shape_of(each.type)[-1:])

    @property
    def origin(self) -> dict[str, Any]:
        """The fields of a checkpoint's `State` that describe the rows and their decoding."""
        decoders, derived = self.decoding.decoders if self.decoding else (), self.source.derived
        return {
            "uri": self.source.uri,
            "branch": self.source.branch,
            "version": self.source.version,
            "identity": self.source.identity,
            "filter": self.filter,
            "split": self.split,
            "cost": self.cost,
            "windows": self.source.windows,
            "columns": list(self.delivers),
            "decode": [
                *(describe(each) | ({COMPONENT: name} if name else {}) for name, each in derived),
                *(describe(each) for each in decoders if not each.is_companion),
            ],
            "transform": describe(self.decoding.transform) if self.decoding else None,
            "codecs": {each.column: codec_name() for _, each in derived if each.channels}
            | {each.output_name: each.codec for each in decoders if each.codec},
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Describes how the rows of a handle are read and decoded, and in which order they are delivered; picklable."""

    read: ReadSpec
    delivery: DeliverySpec

    @classmethod
    def of(cls, read: ReadSpec, **delivery: Any) -> "Opened":
        """Returns the spec of some rows. `delivery` has those fields of `DeliverySpec` that the rows do not give."""
        source, selection = read.source, read.source.load_selection()
        rows, fingerprint = selection.rows, selection.fingerprint
        of_rows = DeliverySpec(
            uri=source.uri,
            rows=rows,
            fingerprint=fingerprint,
            row_bytes=source.row_bytes,
            run_rows=source.run_rows,
            **delivery,
        )
        return cls(read=read, delivery=of_rows)

    def with_delivery(self, **changes: Any) -> "Opened":
        """Returns a copy with these fields of `delivery` changed."""
        return dataclasses.replace(self, delivery=dataclasses.replace(self.delivery, **changes))

    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> "Opened":
        """Returns a copy in which `change`, such as `Shared.of_run`, replaced each selection and table of an order."""

        def tables_of(tables: Tables) -> Tables:
            return SharedTables(change(tables.shared)) if isinstance(tables, SharedTables) else tables

        order = self.delivery.order
        if isinstance(order, MixOrder):
            parts = tuple(
                dataclasses.replace(part, tables=tables_of(part.tables), costs=tables_of(part.costs))
                for part in order.components
            )
            order = dataclasses.replace(order, components=parts)
        costs = tables_of(self.delivery.costs)
        read = dataclasses.replace(self.read, source=self.read.source.map_shared(change))
        return Opened(read=read, delivery=self.delivery).with_delivery(
            order=order, tables=tables_of(self.delivery.tables), costs=costs
        )
