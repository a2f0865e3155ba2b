"""Owns the counting before a row is copied: how many rows are selected where, and of which group.

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups that occur in one chunk.

    Attributes:
        values: Their values, distinct, (k,); one may be null.
        keys: Key of each group's permutation, uint64 (k,).
        sizes: Selected rows of the group in the whole dataset, int64 (k,).
        starts: Places before the group's first, int64 (k,).
        before: Selected rows of the group before this chunk, int64 (k,).
    """

    values: pa.Array
    keys: np.ndarray
    sizes: np.ndarray
    starts: np.ndarray
    before: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive selected rows, which are read together.

    Attributes:
        fragments: IDs of the fragments that hold them, in storage order.
        start: Selected rows of the first of these before the chunk.
        rows: Selected rows of the chunk.
        first: Selected rows of the dataset before the chunk.
        groups: Its groups; None where rows are not grouped.
    """

    fragments: list[int]
    start: int
    rows: int
    first: int
    groups: Groups | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found.

    Attributes:
        rows: Selected rows.
        of_rows: Rows of the dataset.
        chunks: They hold every selected row once, in storage order.
        groups: How many there are; 0 where rows are not grouped.
        checksum: Sum of the keyed hashes of the selected row offsets, see `checksum`.
        sample: Row offsets of up to 64 selected rows, spread evenly; int64.
    """

    rows: int
    of_rows: int
    chunks: list[Chunk]
    groups: int
    checksum: int
    sample: np.ndarray


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
        """Starts at the chunk's first row; `rows` are those of the whole selection."""
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
    """Counts the selected rows of a dataset, and cuts them into chunks.

    Args:
        dataset: The pinned source.
        rows: Selected rows, as raylance has counted them.
        filter: SQL expression, or None.
        group_by: Column of the groups, or None.
        chunk_rows: Rows of every chunk but the last.
        seed: Of the checksum.
        progress: Is called with the selected rows that were seen.
    """
    fragments = dataset.get_fragments()
    ends = np.cumsum([fragment.count_rows() for fragment in fragments])
    wanted = np.unique(np.linspace(0, rows - 1, SAMPLE).astype(np.int64))
    counts = np.zeros(len(fragments), np.int64)
    tally, total, seen, sample = Tally(), 0, 0, []
    for offsets, values in read_offsets(dataset, int(ends[-1]), filter, group_by):
        counts += np.bincount(np.searchsorted(ends, offsets, side="right"), minlength=len(fragments))
        if values is not None:
            tally.add(np.arange(seen, seen + len(offsets)) // chunk_rows, values)
        sample.append(offsets[wanted[(wanted >= seen) & (wanted < seen + len(offsets))] - seen])
        total = (total + checksum(offsets, seed)) & WORD
        seen += len(offsets)
        progress(len(offsets))
    if seen != rows:
        raise raylance.CoverageError(
            f"{dataset.uri!r} at version {dataset.version} gave {seen:,} rows of {rows:,} that are selected. Nothing "
            "was written. Files of this version have changed: tag what is read, and make it again."
        )
    chunks = cut(counts, [fragment.fragment_id for fragment in fragments], chunk_rows)
    if group_by is not None:
        chunks = tally.assign(chunks, seed)
    return Survey(
        rows=rows,
        of_rows=int(ends[-1]),
        chunks=chunks,
        groups=len(tally.codes),
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


class Tally:
    """How many rows each chunk has of each group."""

    def __init__(self) -> None:
        """Nothing was counted yet."""
        self.codes: dict[Any, int] = {}  # by value, in the order in which they were met
        self.type = pa.null()
        self.counts: dict[int, dict[int, int]] = {}  # by chunk, then by code

    def add(self, chunks: np.ndarray, values: pa.Array) -> None:
        """Counts rows of storage order: the chunk of each, ascending, and the value of its group."""
        self.type = values.type
        encoded = values.dictionary_encode(null_encoding="encode")
        met = [self.codes.setdefault(value, len(self.codes)) for value in encoded.dictionary.to_pylist()]
        codes = np.asarray(met)[encoded.indices.to_numpy(zero_copy_only=False)]
        pairs, counts = np.unique(chunks * len(self.codes) + codes, return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            chunk, code = divmod(pair, len(self.codes))
            of = self.counts.setdefault(chunk, {})
            of[code] = of.get(code, 0) + count

    def assign(self, chunks: list[Chunk], seed: int) -> list[Chunk]:
        """The chunks with their groups, which lie in the order of their values, null last."""
        values = pa.array(self.codes, self.type)
        order = pc.array_sort_indices(values).to_numpy()  # null last
        sizes = np.zeros(len(values), np.int64)
        for of in self.counts.values():
            sizes[list(of)] += list(of.values())
        starts = np.empty_like(sizes)
        starts[order] = np.cumsum(sizes[order]) - sizes[order]
        place = np.empty_like(sizes)
        place[order] = np.arange(len(order))
        keys, seen, assigned = subkeys(derive_key(seed, "materialize", "group"), place), np.zeros_like(sizes), []
        for number, chunk in enumerate(chunks):
            of = self.counts[number]
            codes = np.asarray(sorted(of))
            here = Groups(
                values=values.take(pa.array(codes)),
                keys=keys[codes],
                sizes=sizes[codes],
                starts=starts[codes],
                before=seen[codes],
            )
            seen[codes] += [of[code] for code in codes.tolist()]
            assigned.append(dataclasses.replace(chunk, groups=here))
        return assigned
