"""An audit's own view of a dataset: its selected rows, found by a scan of Lance, their stored values, and the tally of
delivered rows.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from raylance.api.dataset import Dataset, opened_of
from raylance.columns import ROW_OFFSET, join_offsets, split_offsets
from raylance.descriptions import read_setting
from raylance.errors import ConfigError, DatasetError
from raylance.orders.mixture import MixOrder
from raylance.orders.order import Order
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.samples.pack_tokens import PackTokens
from raylance.samples.packs import Pack
from raylance.samples.windows import WindowTable
from raylance.source.fields import is_blob
from raylance.source.live_rows import LiveRows
from raylance.source.mixed_rows import MixedRows
from raylance.source.packed import PackedRows
from raylance.source.rows import RowSource, TableRows
from raylance.source.splits import Split

_SCAN_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The rows of one rank in one step.

    Attributes:
        offsets: Row offsets, like the column `_rowoffset` of batches; int64, shape (k,).
        real: For each offset, whether it is a row of the step; False for padding. bool, shape (k,).
        components: In a mixture, the number of each row's dataset, like the column `_component`; int64, shape (k,).
            None if there is only one dataset.
        masked: Number of rows that could not be decoded and were masked.
    """

    offsets: Int64Array
    real: BoolArray
    components: Int64Array | None = None
    masked: int = 0

    @property
    def rows(self) -> Int64Array:
        """One integer for each row: its row offset. In a mixture, its bits 48 and up hold the number of the dataset."""
        return self.offsets if self.components is None else join_offsets(self.components, self.offsets)


class Tally:
    """Counts how often each row of each dataset was delivered."""

    def __init__(self, selected: Sequence[BoolArray]) -> None:
        self.selected = selected  # masks over the row offsets of each dataset
        self.times = [np.zeros(len(rows), dtype=np.uint32) for rows in selected]
        self.foreign = 0

    def add(self, rows: Int64Array) -> None:
        """Counts rows, given like `Step.rows`. Rows that are not selected count as foreign."""
        which, offsets = split_offsets(rows)
        for number in np.unique(which).tolist():
            mine = offsets[which == number]
            known = mine[mine < (len(self.times[number]) if 0 <= number < len(self.times) else 0)]
            self.foreign += len(mine) - len(known)
            if len(known):
                np.add.at(self.times[number], known, 1)
                self.foreign += int((~self.selected[number][known]).sum())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One audited dataset."""

    name: str  # in the mixture, or ""
    table: TableRows
    filter: str | None
    split: str | None
    pack: Pack | PackTokens | None  # None unless the dataset delivers sequences of packed documents
    order: Order
    rows: int  # number of selected rows in the plan

    def selected(self) -> BoolArray:
        """Returns the rows that Lance selects as a mask over row offsets; for packed documents, over sequences."""
        if self.pack is not None:
            if isinstance(self.pack, Pack) and self.pack.policy == "whole":
                return np.ones(self.rows, dtype=np.bool_)  # how many there are follows from the packing alone
            tokens, column = 0, self.pack.names[0] if isinstance(self.pack, Pack) else self.pack.column
            for batch in self.scan({"tokens": f"array_length(`{column}`)"}):
                tokens += (pc.sum(batch["tokens"]).as_py() or 0) + len(batch) * (self.pack.eos_id is not None)
            return np.ones(-(-tokens // self.pack.length), dtype=np.bool_)
        whole = self.filter is None and self.split is None
        mask = np.full(self.table.pinned.open().count_rows(), whole)
        for batch in () if whole else self.scan({}):
            mask[batch[ROW_OFFSET].to_numpy()] = True
        samples = self.table.load_samples()
        if isinstance(samples, WindowTable):
            mask &= self._anchors(mask, samples)
        elif samples is not None:
            mask[mask] = samples.are_anchors(np.flatnonzero(mask))
        return mask

    def _anchors(self, mask: BoolArray, samples: WindowTable) -> BoolArray:
        """Returns which rows may be anchors of windows, from a column of all rows; `mask` has the selected ones."""
        windows, offsets = samples.windows, [each for rows in samples.offsets.values() for each in rows]
        column = self.table.pinned.open().to_table(columns=[windows.episode])[windows.episode]
        frame = pd.DataFrame({"episode": pd.factorize(column.to_pandas())[0], "selected": mask})
        frame["piece"] = 0
        if windows.neighbours == "selected":  # an episode ends at a row that is not selected
            before = frame.groupby("episode")["selected"].shift()
            is_new = before.notna() & (before != frame["selected"])
            frame["piece"] = is_new.groupby(frame["episode"]).cumsum()
        grouped = frame.groupby(["episode", "piece"])["selected"]
        at, rows = grouped.cumcount(), grouped.transform("size")
        is_dropped = windows.at_ends == "drop"
        first, last = (max(0, -min(offsets)), max(0, *offsets)) if is_dropped else (0, 0)
        is_anchor = (at >= first) & (at < rows - last) & ((at - first) % windows.stride == 0)
        return np.asarray(is_anchor)

    def scan(self, columns: Mapping[str, str]) -> Iterator[pa.RecordBatch]:
        """Yields the selected rows in storage order, in batches of `columns` (SQL by name) and `_rowoffset`."""
        split: Split | None = None if self.split is None else read_setting(self.split)
        keys = {f"key {name}": f"`{name}`" for name in (split.columns if split else [])}
        wanted = {**columns, **keys, ROW_OFFSET: ROW_OFFSET}
        scanner = self.table.pinned.open().scanner(columns=wanted, filter=self.filter, batch_size=_SCAN_ROWS)
        for batch in scanner.to_batches():
            if split is None:
                yield batch
                continue
            values = [batch[name].to_pylist() for name in keys]
            kept = split.keep(batch[ROW_OFFSET].to_numpy().astype(np.int64), values[0] if values else None)
            yield batch.filter(pa.array(kept))

    def take(self, offsets: Int64Array, columns: Sequence[str]) -> dict[str, list[Any]]:
        """Returns the stored values of rows by column, in the given order. Sequences of packed documents have none, and
        are refused with a ConfigError.
        """
        opened = self.table.pinned.open()
        if self.pack is not None and columns:
            raise ConfigError(
                f"columns={list(columns)}: sequences are stored nowhere. They cannot be shown. Use take(row_offset)."
            )
        for name in columns:
            if name not in opened.schema.names:
                names = ", ".join(opened.schema.names)
                raise DatasetError(
                    f"{self.table.uri!r} has no column {name!r}; its columns are {names}. Nothing was read. Name one "
                    "of these."
                )
        ascending, places = np.unique(offsets, return_inverse=True)
        has_blobs = any(is_blob(opened.schema.field(name)) for name in columns)
        take = opened.take if has_blobs else LiveRows(opened).take
        found: dict[str, list[Any]] = take(ascending, [*columns]).take(places).to_pydict()
        return found


def parts_of(data: Dataset) -> list[Part]:
    """Returns the datasets of a mixture; for a handle of one dataset, a list of that one."""
    read_spec, delivery_spec = opened_of(data).read, opened_of(data).delivery
    order = delivery_spec.order
    if not (isinstance(read_spec.source, MixedRows) and isinstance(order, MixOrder)):
        return [_part("", read_spec.source, read_spec.filter, read_spec.split, order, delivery_spec.rows)]
    return [
        _part(of.name, source, read_spec.filter[of.name], read_spec.split[of.name], of.order, of.rows)
        for of, source in zip(order.components, read_spec.source.parts, strict=True)
    ]


def _part(name: str, source: RowSource, filter: str | None, split: str | None, order: Order, rows: int) -> Part:
    pack = source.pack if isinstance(source, PackedRows) else None
    table = source.documents if isinstance(source, PackedRows) else source
    if not isinstance(table, TableRows):
        raise ConfigError(f"{type(table).__name__} is not a Lance table. It cannot be audited. Audit such a table.")
    return Part(name=name, table=table, filter=filter, split=split, pack=pack, order=order, rows=rows)


def label_codes(data: Dataset, column: str) -> Int64Array:
    """Returns the class number of each selected row: the labels for `data.plan(…).shuffle_quality(labels)`.

    Args:
        data: A dataset or a mixture.
        column: Column of labels, which batches need not have. Null is a class, too.

    Returns:
        int64, shape (n,), in storage order.

    Raises:
        ConfigError: If the rows are sequences of packed documents.
        DatasetError: If there is no such column.
    """
    batches: list[pa.RecordBatch] = []
    for part in parts_of(data):
        part.take(np.empty(0, dtype=np.int64), [column])  # refuses a missing column
        batches += part.scan({"label": f"`{column}`"})
    found = [batch["label"] for batch in batches]
    plain = [each.cast(each.type.value_type) if pa.types.is_dictionary(each.type) else each for each in found]
    labels = pa.chunked_array(plain).combine_chunks()
    return np.asarray(labels.dictionary_encode(null_encoding="encode").indices, dtype=np.int64)
