"""The counting before a row is copied: how many rows are selected where, and of which group.

It reads the columns of the filter and the group alone, from start to end, and keeps no row: what it holds grows with
chunks and groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import raylance
from raylance.orders.permutation import derive_key, permute, subkeys

SCAN_ROWS = 1 << 16
SAMPLE = 64  # rows by which the bytes of a row are estimated
WORD = (1 << 64) - 1
TALLIES = 64  # that are kept before they are added up


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The k groups that occur in one chunk; arrays are of shape (k,)."""

    values: pa.Array  # distinct; one may be null
    keys: np.ndarray  # of each group's permutation, uint64
    sizes: np.ndarray  # selected rows of the group in the whole dataset, int64
    starts: np.ndarray  # places before the group's first, int64
    before: np.ndarray  # selected rows of the group before this chunk, int64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive selected rows, which are read together."""

    fragments: list[int]  # IDs of those that hold them, in storage order
    start: int  # selected rows of the first fragment before the chunk
    rows: int  # selected rows of the chunk
    first: int  # selected rows of the dataset before the chunk
    groups: Groups | None = None  # where rows are grouped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found."""

    rows: int  # selected ones
    of_rows: int  # of the dataset
    chunks: list[Chunk]  # every selected row once, in storage order
    groups: int  # how many there are; 0 where rows are not grouped
    checksum: int  # of the selected row offsets, see `checksum`
    sample: np.ndarray  # row offsets of up to 64 selected rows, spread evenly; int64


def checksum(offsets: np.ndarray, seed: int) -> int:
    """A keyed sum over row offsets in any order: a row that is missing, foreign or there twice changes it."""
    return int(subkeys(derive_key(seed, "materialize", "checksum"), offsets).sum(dtype=np.uint64))


def group_values(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """The values by which rows are grouped, in one array, dictionaries resolved."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return whole.dictionary_decode() if pa.types.is_dictionary(whole.type) else whole


class Places:
    """Where the rows of a chunk go, asked for in the order in which they are read.

    A place is a row's position in the new dataset: an image under a keyed bijection of all rows, or of the rows of its
    group. It depends on the seed and the selection, and not on chunks, buckets or machines.
    """

    def __init__(self, chunk: Chunk, rows: int, seed: int) -> None:
        """`rows` are those of the whole selection."""
        self.chunk, self.rows, self.key = chunk, rows, derive_key(seed, "materialize", "place")
        self.done, self.seen = 0, None if chunk.groups is None else chunk.groups.before.copy()

    def next(self, count: int, group: pa.Array | None) -> np.ndarray:
        """Places of the next `count` rows, int64 (count,); `group` holds the values of their groups."""
        if self.chunk.groups is None:
            first = self.chunk.first + self.done
            self.done += count
            return permute(np.arange(first, first + count), self.rows, self.key)
        groups = self.chunk.groups
        codes = pc.index_in(group, value_set=groups.values).to_numpy(zero_copy_only=False).astype(np.int64)
        order = np.argsort(codes, kind="stable")
        counts = np.bincount(codes, minlength=len(groups.values))
        rank = np.empty(count, np.int64)  # of each row in its group, in storage order
        rank[order] = np.arange(count) - np.repeat(np.cumsum(counts) - counts, counts)
        rank += self.seen[codes]
        self.seen += counts
        return groups.starts[codes] + permute(rank, groups.sizes[codes], groups.keys[codes])


def survey(
    dataset: lance.LanceDataset,
    *,
    rows: int,
    filter: str | None,
    group_by: str | None,
    chunk_rows: int,
    seed: int,
    progress: Callable[[int], Any] = lambda rows: None,
) -> Survey:
    """Counts the selected rows of a dataset, which raylance found to be `rows`, and cuts them into chunks.

    `progress` is called with the selected rows that were seen.
    """
    fragments = dataset.get_fragments()
    ends = np.cumsum([fragment.count_rows() for fragment in fragments])
    wanted = np.unique(np.linspace(0, rows - 1, SAMPLE).astype(np.int64))
    counts = np.zeros(len(fragments), np.int64)
    counted, total, seen, sample = [], 0, 0, []
    for offsets, values in read_offsets(dataset, int(ends[-1]), filter, group_by):
        counts += np.bincount(np.searchsorted(ends, offsets, side="right"), minlength=len(fragments))
        if values is not None:
            chunk, ones = np.arange(seen, seen + len(offsets)) // chunk_rows, np.ones(len(offsets), np.int64)
            counted.append(tally(pa.table({"chunk": chunk, "value": values, "rows": ones})))
            if len(counted) > TALLIES:
                counted = [tally(pa.concat_tables(counted))]
        sample.append(offsets[wanted[(wanted >= seen) & (wanted < seen + len(offsets))] - seen])
        total = (total + checksum(offsets, seed)) & WORD
        seen += len(offsets)
        progress(len(offsets))
    if seen != rows:
        raise raylance.errors.CoverageError(
            f"{dataset.uri!r} at version {dataset.version} gave {seen:,} rows of {rows:,} that are selected. Nothing "
            "was written. Files of this version have changed: tag what is read, and make it again."
        )
    chunks = cut(counts, [fragment.fragment_id for fragment in fragments], chunk_rows)
    groups = 0
    if group_by is not None:
        chunks, groups = assign_groups(chunks, tally(pa.concat_tables(counted)), seed)
    return Survey(
        rows=rows,
        of_rows=int(ends[-1]),
        chunks=chunks,
        groups=groups,
        checksum=total,
        sample=np.concatenate(sample),
    )


def cut(counts: np.ndarray, ids: list[int], chunk_rows: int) -> list[Chunk]:
    """Cuts the selection into chunks; `counts` are the selected rows of each fragment, int64 (fragments,)."""
    ends = np.cumsum(counts)
    chunks = []
    for first in range(0, int(ends[-1]), chunk_rows):
        last = min(first + chunk_rows, int(ends[-1])) - 1
        here, there = np.searchsorted(ends, [first, last], side="right").tolist()
        start = first - int(ends[here] - counts[here])
        chunks.append(Chunk(fragments=ids[here : there + 1], start=start, rows=last - first + 1, first=first))
    return chunks


def read_offsets(
    dataset: lance.LanceDataset, rows: int, filter: str | None, group_by: str | None
) -> Iterator[tuple[np.ndarray, pa.Array | None]]:
    """The selected row offsets in storage order, and the values of their groups; reads nothing where all are wanted."""
    if filter is None and group_by is None:
        for start in range(0, rows, SCAN_ROWS):
            yield np.arange(start, min(start + SCAN_ROWS, rows)), None
        return
    columns = ["_rowoffset"] if group_by is None else ["_rowoffset", group_by]
    for batch in dataset.scanner(columns=columns, filter=filter, batch_size=SCAN_ROWS).to_batches():
        if len(batch):
            offsets = batch["_rowoffset"].to_numpy(zero_copy_only=False).astype(np.int64)
            yield offsets, None if group_by is None else group_values(batch[group_by])


def tally(rows: pa.Table) -> pa.Table:
    """Adds up the rows of each chunk and value."""
    found = rows.group_by(["chunk", "value"]).aggregate([("rows", "sum")])
    return pa.table({"chunk": found["chunk"], "value": found["value"], "rows": found["rows_sum"]})


def assign_groups(chunks: list[Chunk], counted: pa.Table, seed: int) -> tuple[list[Chunk], int]:
    """The chunks with their groups, which lie in the order of their values, null last; and how many groups there are.

    `counted` is a tally of all rows.
    """
    values = pc.unique(counted["value"])
    values = values.take(pc.array_sort_indices(values))  # null last
    group = pc.index_in(counted["value"], value_set=values).to_numpy()
    order = np.lexsort((counted["chunk"].to_numpy(), group))
    group, chunk, rows = group[order], counted["chunk"].to_numpy()[order], counted["rows"].to_numpy()[order]
    sizes = np.bincount(group, rows).astype(np.int64)
    starts = np.cumsum(sizes) - sizes
    keys = subkeys(derive_key(seed, "materialize", "group"), np.arange(len(values)))
    before = np.cumsum(rows) - rows - starts[group]
    of_chunks = np.split(np.argsort(chunk, kind="stable"), np.cumsum(np.bincount(chunk))[:-1])
    assigned = []
    for one, here in zip(chunks, of_chunks, strict=True):
        codes = group[here]
        groups = Groups(
            values=values.take(pa.array(codes)),
            keys=keys[codes],
            sizes=sizes[codes],
            starts=starts[codes],
            before=before[here],
        )
        assigned.append(dataclasses.replace(one, groups=groups))
    return assigned, len(values)
