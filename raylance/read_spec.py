"""Owns what a loader reads and what it makes of that; never opens it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raylance.decode.rows import Decoding
from raylance.environment.shared import Shared, SharedTables
from raylance.orders.mixture import MixOrder
from raylance.orders.order import Tables
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.state import describe
from raylance.source.rows import RowSource


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpec:
    """What a loader reads and what it makes of it; picklable.

    Attributes:
        source: The rows.
        delivers: Columns of the batches: those that are read, unless a transform changes them.
        schema: Of the delivered rows; None if it is not known before some are made.
        decoding: The decoders, those of the device included, and the transform; None without both.
        list_lengths: Of delivered columns of lists of numbers: the length where all sampled rows have one, else None.
        list_dtypes: Of those that can be padded: the dtype of the numbers.
    """

    source: RowSource
    delivers: Sequence[str]
    schema: pa.Schema | None = None
    decoding: Decoding | None = None
    list_lengths: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    list_dtypes: Mapping[str, "np.dtype[Any]"] = dataclasses.field(default_factory=dict)

    @property
    def in_helpers(self) -> Decoding | None:
        """What decode actors do of `decoding`; None where that is nothing."""
        return self.decoding and self.decoding.in_helpers

    @property
    def on_device(self) -> Decoding | None:
        """What the trainer does on its device; None where that is nothing."""
        return self.decoding and self.decoding.on_device

    @property
    def carries(self) -> Sequence[str]:
        """Columns of the rows that reach the trainer: where it decodes, the encoded ones."""
        encoded = {each.output_name: each.column for each in self.on_device.decoders} if self.on_device else {}
        return list(dict.fromkeys(encoded.get(name, name) for name in self.delivers))

    @property
    def origin(self) -> dict[str, Any]:
        """What a checkpoint holds of it: fields of `State`."""
        return {
            "uri": self.source.uri,
            "branch": self.source.branch,
            "version": self.source.version,
            "identity": self.source.identity,
            "columns": list(self.delivers),
            "decode": [describe(decoder) for decoder in self.decoding.decoders] if self.decoding else [],
            "transform": describe(self.decoding.transform) if self.decoding else None,
            "codecs": {d.output_name: d.codec for d in self.decoding.decoders if d.codec} if self.decoding else {},
        }


def map_shared(
    read_spec: ReadSpec, delivery_spec: DeliverySpec, change: Callable[[Shared[Any]], Shared[Any]]
) -> tuple[ReadSpec, DeliverySpec]:
    """Has `change`, such as `Shared.of_run`, replace each large value: selections, and the tables of orders."""

    def tables_of(tables: Tables) -> Tables:
        return SharedTables(change(tables.shared)) if isinstance(tables, SharedTables) else tables

    order = delivery_spec.order
    if isinstance(order, MixOrder):
        parts = tuple(dataclasses.replace(part, tables=tables_of(part.tables)) for part in order.components)
        order = dataclasses.replace(order, components=parts)
    read_spec = dataclasses.replace(read_spec, source=read_spec.source.map_shared(change))
    return read_spec, dataclasses.replace(delivery_spec, order=order, tables=tables_of(delivery_spec.tables))
