"""The tables that orders look up in the columns of selected rows."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.environment.shared import Shared, SharedTables
from raylance.errors import ConfigError, DatasetError
from raylance.orders.order import Column, Order, Tables
from raylance.orders.permutation import Int64Array
from raylance.orders.shuffles import Laned
from raylance.source.fields import find_field
from raylance.source.reader import Reader
from raylance.source.rows import Selected
from raylance.source.selection import Selection
from raylance.source.version import Source


@dataclasses.dataclass(frozen=True, slots=True)
class _Column:
    """A column for orders; see `raylance.orders.order.Column`."""

    name: str
    data: pa.ChunkedArray

    @property
    def kind(self) -> str:
        return str(self.data.type)

    @property
    def nulls(self) -> int:
        return int(self.data.null_count)

    def values(self) -> npt.NDArray[Any]:
        return np.asarray(self.data.to_numpy())

    def codes(self) -> tuple[Int64Array, list[Any]]:
        data = self.data
        if pa.types.is_dictionary(data.type):  # the dictionary may hold classes that no selected row has
            data = data.cast(data.type.value_type)
        try:
            encoded = data.combine_chunks().dictionary_encode()
        except pa.ArrowNotImplementedError as error:
            raise ConfigError(
                f"the order takes values of column {self.name!r} for classes, and {data.type} has no classes. "
                "Nothing was started. Name a column of integers or strings."
            ) from error
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.unify_dictionaries().combine_chunks()
        return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


@dataclasses.dataclass(frozen=True, slots=True)
class SelectionRows:
    """A selection for orders; see `raylance.orders.order.Rows`."""

    source: Source
    dataset: lance.LanceDataset
    selection: Selected
    costs: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        """See `Rows.count`."""
        return self.selection.rows

    def column(self, name: str) -> Column:
        """See `Rows.column`."""
        if find_field(self.dataset.schema, name) is None:
            raise DatasetError(
                f"the order needs the column {name!r}, which {self.dataset.uri!r} does not have. Nothing was started. "
                f"Name one of its columns: {', '.join(self.dataset.schema.names)}."
            )
        offsets = self._rows("a column").offsets(np.arange(self.count))
        reader = Reader(pinned=self.source, dataset=self.dataset, columns=[name], row_bytes=8)
        return _Column(name, reader.read(offsets)[name])

    def fragment_ends(self) -> Int64Array:
        """See `Rows.fragment_ends`. Blocks of rows take the place of fragments, if there are any."""
        if (blocks := self.selection.block_ends) is not None:
            return blocks
        ends = np.cumsum([fragment.count_rows() for fragment in self.dataset.get_fragments()], dtype=np.int64)
        counted = np.unique(self._rows("fragments").count_before(ends))
        return counted[counted > 0]

    def _rows(self, what: str) -> Selection:
        if not isinstance(self.selection, Selection):
            raise ConfigError(
                f"the order needs {what} of each row, but the rows of packs are sequences of many documents. Nothing "
                "was started. Use window, shard, sequential or row, which need none."
            )
        return self.selection


def by_block(order: Order, selection: Selected) -> Order:
    """Returns the order with a block of rows as its shard, if there are blocks, and the order leaves the size of shards
    to raylance.
    """
    is_free = selection.block_ends is not None and isinstance(order, Laned) and order.shard_rows == "auto"
    return dataclasses.replace(order, shard_rows="fragment") if is_free else order


def share_tables(order: Order, tables: Tables, source: Source, selection: Shared[Selection]) -> Tables:
    """Returns an order's tables as one shared value. `order`, before `bind`, can look the tables up again."""
    if not tables:
        return tables
    make = functools.partial(_look_up_again, order, source, selection)
    # If the order's fields hold arrays, there is no `make`, because it would be as large as the tables.
    is_large = any(isinstance(getattr(order, field.name), np.ndarray) for field in dataclasses.fields(order))
    nbytes = sum(array.nbytes for array in tables.values())
    return SharedTables(Shared(f"tables of {order.name}", dict(tables), nbytes, None if is_large else make))


def _look_up_again(order: Order, source: Source, selection: Shared[Selection]) -> dict[str, npt.NDArray[Any]]:
    return dict(order.look_up(SelectionRows(source, source.open(), selection.get())))
