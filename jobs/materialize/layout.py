"""The arithmetic of places: where fragments, slots and buckets begin, and where their rows lie.

A slot is what the first pass counts and weighs: some whole fragments, or a part of one. A bucket is what one task of
the second pass makes, by the bytes that were found, so that what it holds at a time fits.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
from lance.fragment import FragmentMetadata


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A sorted run that the first pass has written."""

    first: int  # place of its chunk among the selected rows: runs are ordered by it
    part: int  # place of the run in its chunk
    fragment: FragmentMetadata
    slot_rows: np.ndarray  # rows of it in each slot, int64 (slots,)
    slot_bytes: np.ndarray  # bytes of these, int64 (slots,)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Places [start, stop) that are held in memory together, and where their rows lie in the scratch dataset."""

    start: int
    stop: int
    offsets: np.ndarray  # first row offset in each run, int64 (runs,)
    lengths: np.ndarray  # rows in each run, int64 (runs,)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What one task of the second pass makes: several fragments of one stretch, or one fragment of several."""

    fragments: list[tuple[int, int]]
    stretches: list[Stretch]


def fragment_bounds(rows: int, rows_per_fragment: int) -> np.ndarray:
    """Places where equal fragments begin, and the end; sizes differ by one row at the most."""
    count = max(1, -(-rows // rows_per_fragment))
    return np.asarray([number * rows // count for number in range(count + 1)])


def slot_bounds(fragments: np.ndarray, slot_rows: int) -> np.ndarray:
    """Places where slots begin, and the end: each of whole fragments, or a part of one."""
    rows_each = int(np.diff(fragments).max())
    if rows_each <= slot_rows:
        step = slot_rows // rows_each
        return np.unique(np.r_[fragments[::step], fragments[-1]])
    parts = -(-rows_each // slot_rows)
    starts, sizes = fragments[:-1], np.diff(fragments)
    inner = starts[:, None] + sizes[:, None] * np.arange(parts) // parts  # (fragments, parts)
    return np.unique(np.r_[inner.ravel(), fragments[-1]])


def plan_buckets(fragments: np.ndarray, bounds: np.ndarray, runs: list[Run], bucket_bytes: int) -> list[Bucket]:
    """Shares the fragments out to tasks, by the bytes that the first pass has found."""
    slot_bytes = np.sum([run.slot_bytes for run in runs], axis=0)
    counts = np.stack([run.slot_rows for run in runs])  # (runs, slots)
    before = np.cumsum(counts.sum(axis=1)) - counts.sum(axis=1)
    begins = before[:, None] + np.cumsum(counts, axis=1) - counts  # (runs, slots): row offsets in the scratch dataset

    def stretch(first: int, last: int) -> Stretch:
        lengths = counts[:, first:last].sum(axis=1)
        there = lengths > 0
        return Stretch(
            start=int(bounds[first]), stop=int(bounds[last]), offsets=begins[there, first], lengths=lengths[there]
        )

    # A unit is a slot of whole fragments, or all slots of one fragment.
    edges = np.searchsorted(bounds, np.intersect1d(fragments, bounds))
    unit_bytes = np.add.reduceat(slot_bytes, edges[:-1])
    buckets = []
    for first, last in greedy(unit_bytes, bucket_bytes):
        slots = int(edges[first]), int(edges[last])
        inside = (fragments >= bounds[slots[0]]) & (fragments <= bounds[slots[1]])
        places = fragments[inside].tolist()
        parts = (
            greedy(slot_bytes[slots[0] : slots[1]], bucket_bytes) if len(places) == 2 else [(0, slots[1] - slots[0])]
        )
        stretches = [stretch(slots[0] + a, slots[0] + b) for a, b in parts]
        buckets.append(Bucket(fragments=list(itertools.pairwise(places)), stretches=stretches))
    return buckets


def greedy(sizes: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Half-open ranges of neighbours whose sizes add up to the limit at the most; one that is larger is alone."""
    ranges, start, held = [], 0, 0
    for number, size in enumerate(sizes.tolist()):
        if number > start and held + size > limit:
            ranges.append((start, number))
            start, held = number, 0
        held += size
    return [*ranges, (start, len(sizes))]
