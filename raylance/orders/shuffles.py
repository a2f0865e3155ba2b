"""Orders that visit every row once: shards cut into lanes, with rows shuffled in windows, or one permutation of all."""

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from raylance.orders.order import SHARD_BYTES, Auto, Epoch, Facts, Order, Resolved, Rows, Tables, blocks, check_count
from raylance.orders.permutation import BoolArray, Int64Array, UInt64Array, permute, subkeys, unpermute

_MAX_AUTO_LANES = 32
_MIN_AUTO_LANES = 4  # a batch from fewer windows is hardly mixed
_LARGE_ROW_BYTES = SHARD_BYTES / 8
_MAX_LANES = 1 << 20  # each step enumerates all lanes
_MAX_AUTO_WINDOW_SHARDS = 16
_MAX_TABLE = 1 << 18  # entries of a table of shards: 2 MiB, and up to four tables are kept
_MOST_SEARCHED = 1 << 13  # positions and places that are searched to list a checkpoint's shards: a few milliseconds
_ENDS = "shard_ends"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShuffle(Order):
    """Shuffles all rows by one permutation: the ideal shuffle, but it reads rows from random places in storage.

    Attributes:
        shard_rows: Number of rows of one shard. Only the list of complete shards in checkpoints depends on it.
    """

    name: ClassVar[str] = "row"
    scatters: ClassVar[bool] = True

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        """See `Order.rows_of`."""
        return permute(positions, epoch.order.rows, epoch.key("rows"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Laned(Order):
    """The base class of orders that lay shards end to end, cut this sequence into lanes, and each lane into windows."""

    shuffles_shards: ClassVar[bool] = True
    shuffles_windows: ClassVar[bool] = True
    window_shards: int | Auto = "auto"
    lanes: int | Auto = "auto"

    def __post_init__(self) -> None:
        check_count(self, "shard_rows", "auto", "fragment")
        check_count(self, "window_shards", "auto")
        check_count(self, "lanes", "auto", most=_MAX_LANES)

    def look_up(self, rows: Rows) -> Tables:
        """Returns the ends of the fragments if shards are fragments; otherwise no table."""
        return {_ENDS: rows.fragment_ends()} if self.shard_rows == "fragment" else {}

    def resolve(self, facts: Facts) -> Resolved:
        """See `Order.resolve`. Sizes that are "auto" are chosen so that windows fit `facts.window_bytes`."""
        lanes = self.lanes
        if isinstance(lanes, str):
            lanes = auto_lanes(facts)
        # Bytes of one lane's window. The current windows get half of the limit, because the next ones are read while
        # these are consumed. Lanes of all ranks share it, because the order must not depend on the world size.
        lane_bytes = facts.window_bytes / 2 / lanes
        lane_rows, lane_step = max(1, facts.rows // lanes), max(1, facts.global_batch_size // lanes)
        shard_rows = self.shard_rows
        if shard_rows == "auto":
            shard_rows = _some_mebibytes(facts, lane_step, lane_bytes, lane_rows)
        rows_each = -(-facts.rows // len(facts.tables[_ENDS])) if isinstance(shard_rows, str) else shard_rows
        fitting = int(lane_bytes / max(rows_each * facts.row_bytes, 1))
        auto_shards = max(1, min(fitting, _MAX_AUTO_WINDOW_SHARDS, -(-lane_rows // rows_each)))
        if self.shard_rows == "auto":  # a window's rows: if possible, a multiple or divisor of `lane_step`
            together = lane_step // math.gcd(lane_step, rows_each)
            parts = (shards for shards in range(1, auto_shards + 1) if lane_step % (shards * rows_each) == 0)
            auto_shards = auto_shards // together * together or max(parts, default=auto_shards)
        window_shards = auto_shards if isinstance(self.window_shards, str) else self.window_shards
        return LanedResolved(
            settings=dataclasses.replace(self, shard_rows=shard_rows, window_shards=window_shards, lanes=lanes),
            rows=facts.rows,
            seed=facts.seed,
            tables=facts.tables,
            epoch_rows=facts.rows,
            shard_rows=rows_each,
            lane_count=lanes,
            read_positions=window_shards * rows_each * lanes,
            needs_whole_windows=self.shuffles_windows,
        )


def _some_mebibytes(facts: Facts, lane_step: int, lane_bytes: float, lane_rows: int) -> int:
    """Returns the "auto" number of rows of a shard, which one read gets: up to 4 MiB. A lane has `lane_rows` rows, a
    window of it may have `lane_bytes`, and a step takes `lane_step` rows of it.
    """
    wanted = min(_shard_bytes(facts), lane_bytes) / max(facts.row_bytes, 1)
    # Small datasets still get several shards a lane. Otherwise checkpoints could list no shard as complete.
    rows = max(1, min(int(wanted), -(-lane_rows // 4)))
    if lane_step <= rows:
        return rows // lane_step * lane_step  # a multiple, so that no step takes rows of two windows of a lane
    # A divisor of `lane_step` for the same reason, unless shards, and so reads, would be less than a quarter as large.
    part = max(divisor for divisor in range(1, rows + 1) if lane_step % divisor == 0)
    return part if 4 * part >= rows else rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanedResolved(Resolved):
    """A laned order for one selection."""

    settings: Laned

    @property
    def ends(self) -> Int64Array | None:
        """Number of rows up to the end of each shard if shards are fragments; otherwise None."""
        return self.tables.get(_ENDS)

    @property
    def shard_count(self) -> int:
        """See `Resolved.shard_count`."""
        return super().shard_count if self.ends is None else len(self.ends)

    def shards_of(self, rows: Int64Array) -> Int64Array:
        """See `Resolved.shards_of`."""
        return super().shards_of(rows) if self.ends is None else np.searchsorted(self.ends, rows, side="right")

    def epoch(self, number: int) -> "LanedEpoch":
        """See `Resolved.epoch`."""
        return LanedEpoch(self, number)


class LanedEpoch(Epoch):
    """One epoch of a laned order. The rows of the shards at places 0, 1, … form the sequence that is cut into lanes."""

    order: LanedResolved

    def rows(self, positions: Int64Array) -> Int64Array:
        """See `Epoch.rows`."""
        return self._unlay(self._sequence(positions))

    def _sequence(self, positions: Int64Array) -> Int64Array:
        """Maps positions to indices in the sequence."""
        key = self.key("window") if self.order.needs_whole_windows else None
        positions = np.asarray(positions, dtype=np.int64)
        return _to_sequence(self._sizes, positions, key)

    def completed_places(self, position: int) -> Int64Array | None:
        """See `Epoch.completed_places`. Returns None if there are too many lanes to look at each of them."""
        if self.order.lane_count > _MOST_SEARCHED:
            return None
        pending = self._pending_places(position, _MOST_SEARCHED)
        pending = pending[np.argsort(pending[:, 0])]
        firsts = np.append(pending[:, 0], self.order.shard_count)
        ends = np.maximum.accumulate(np.append(0, pending[:, 1]))
        ranges = np.stack([ends, firsts], axis=1)  # between the pending places
        return ranges[firsts > ends]

    def completed_shards(self, position: int) -> BoolArray:
        """See `Epoch.completed_shards`. Computes intervals of each lane, and searches only partly consumed windows."""
        shards, pending = self.order.shard_count, self._pending_places(position, sys.maxsize)
        edges = np.bincount(pending[:, 0], minlength=shards + 1) - np.bincount(pending[:, 1], minlength=shards + 1)
        done = np.ones(shards, dtype=np.bool_)
        done[self.shard_ids(np.flatnonzero(np.cumsum(edges)[:shards]))] = False
        return done

    def _pending_places(self, position: int, most: int) -> Int64Array:
        """Returns the places of shards that have rows at or after `position`: half-open ranges that may overlap, (k,
        2). All places of partly consumed windows count if searching these takes more than `most` steps.
        """
        lanes, window_rows = self.order.lane_count, self._sizes.window_rows
        base, extra = divmod(self.order.rows, lanes)
        lane = np.arange(min(lanes, self.order.rows), dtype=np.int64)
        start, size = lane * base + np.minimum(lane, extra), base + (lane < extra)
        consumed = np.clip(-(-(position - lane) // lanes), 0, size)
        untouched = consumed
        if self.order.needs_whole_windows:
            untouched = np.minimum(-(-consumed // window_rows) * window_rows, size)
        has_more, is_half = untouched < size, consumed < untouched
        pending = self._place_ranges((start + untouched)[has_more], (start + size)[has_more])
        if not is_half.any():
            return pending
        window_start = start + (consumed - 1) // window_rows * window_rows
        halves = self._place_ranges(window_start[is_half], (start + untouched)[is_half])
        stop = int(((untouched - 1) * lanes + lane)[is_half].max()) + 1
        found = self._places_from(position, stop, halves, most)
        return np.concatenate([pending, halves if found is None else np.stack([found, found + 1], axis=1)])

    def _places_from(self, position: int, stop: int, ranges: Int64Array, most: int) -> Int64Array | None:
        """Returns the places within `ranges` that have rows at positions [position, stop); None after `most` steps."""
        if int((ranges[:, 1] - ranges[:, 0]).sum()) > most:
            return None
        wanted = np.unique(np.concatenate([np.arange(first, end) for first, end in ranges.tolist()]))
        is_found = np.zeros(len(wanted), dtype=np.bool_)
        for block in blocks(position, stop):
            if is_found.all():
                break
            if block[0] - position > most:
                return None
            is_found |= np.isin(wanted, self._slots(self._sequence(block)))
        return wanted[is_found]

    def _place_ranges(self, firsts: Int64Array, ends: Int64Array) -> Int64Array:
        """Returns the places that each half-open, non-empty range of the sequence touches, as ranges; shape (k, 2)."""
        return np.stack([self._slots(firsts), self._slots(ends - 1) + 1], axis=1)

    def shard_ids(self, places: Int64Array) -> Int64Array:
        """See `Epoch.shard_ids`."""
        if not self.order.settings.shuffles_shards:
            return places
        shards, key = self.order.shard_count, self.key("shards")
        # There are many more rows than shards, so a small table of all shards is cheaper than permute() for each row.
        return _permutation_table(shards, key)[places] if shards <= _MAX_TABLE else permute(places, shards, key)

    @functools.cached_property
    def _sizes(self) -> "_Sizes":
        last = self.order.shard_count - 1
        shuffles = self.order.settings.shuffles_shards
        return _sizes_of(self.order, _slot_of(last, self.key("shards")) if shuffles else last)

    def _slots(self, sequence: Int64Array) -> Int64Array:
        """Maps indices in the sequence to the places of their shards."""
        if self.order.ends is not None:
            return np.searchsorted(self._laid_ends, sequence, side="right")
        return _to_places(self._sizes, sequence)

    @functools.cached_property
    def _laid_ends(self) -> Int64Array:
        """The index in the sequence at which the shard at each place ends, if shards are fragments; O(fragments)."""
        lengths = np.diff(self.order.tables[_ENDS], prepend=0)
        return np.cumsum(lengths[self.shard_ids(np.arange(len(lengths)))], dtype=np.int64)

    def _stretches(self, start: int, end: int) -> list[tuple[int, int]]:
        """Returns the selected rows of the sequence from one index to another, as half-open ranges in its order."""
        if start >= end:
            return []
        first, last = self._slots(np.array([start, end - 1], dtype=np.int64)).tolist()
        slots = np.arange(first + 1, last + 1, dtype=np.int64)
        if self.order.ends is not None:
            begins = self._laid_ends[slots - 1]
        else:
            missing = self.order.shard_rows - self._sizes.short_rows
            begins = slots * self.order.shard_rows - np.where(slots > self._sizes.short_place, missing, 0)
        edges = np.concatenate([[start], begins, [end]])
        rows = self._unlay(edges[:-1])
        return list(zip(rows.tolist(), (rows + np.diff(edges)).tolist(), strict=True))

    def _unlay(self, sequence: Int64Array) -> Int64Array:
        """Maps indices in the sequence to selected rows."""
        if not self.order.settings.shuffles_shards:
            return sequence
        slots, ends = self._slots(sequence), self.order.ends
        ids = self.shard_ids(slots)
        if ends is not None:
            return np.asarray(ends[ids] - (self._laid_ends[slots] - sequence))
        return _to_rows(self._sizes, sequence, slots, ids)


class _Sizes(NamedTuple):
    """The sizes that determine the rows of a laned epoch: integers, or arrays with those of each position's epoch."""

    rows: int | Int64Array
    lanes: int | Int64Array
    window_rows: int | Int64Array
    shard_rows: int | Int64Array
    short_place: int | Int64Array  # place of the last shard in storage order, the only one that may be short
    short_rows: int | Int64Array


def _sizes_of(order: Resolved, short_place: int) -> _Sizes:
    window_rows = min((order.read_positions or 1) // order.lane_count, max(1, order.rows))
    short_rows = order.rows - (order.shard_count - 1) * order.shard_rows
    return _Sizes(order.rows, order.lane_count, window_rows, order.shard_rows, short_place, short_rows)


def _to_sequence(sizes: _Sizes, positions: Int64Array, key: int | UInt64Array | None) -> Int64Array:
    """Maps positions to indices in the sequence that is cut into lanes. With a key, windows are shuffled."""
    within, lane = np.divmod(positions, sizes.lanes)  # (k,), (k,)
    base, extra = np.divmod(sizes.rows, sizes.lanes)
    lane_start = lane * base + np.minimum(lane, extra)
    if key is not None:
        window = within // sizes.window_rows
        start = window * sizes.window_rows
        size = np.minimum(sizes.window_rows, base + (lane < extra) - start)
        within = start + permute(within - start, size, subkeys(key, window * sizes.lanes + lane))
    return np.asarray(lane_start + within, dtype=np.int64)


def _to_places(sizes: _Sizes, sequence: Int64Array) -> Int64Array:
    """Maps indices in the sequence to the places of their shards. The shard at `sizes.short_place` may be short."""
    is_after = sequence >= sizes.short_place * sizes.shard_rows + sizes.short_rows
    return np.where(is_after, (sequence - sizes.short_rows) // sizes.shard_rows + 1, sequence // sizes.shard_rows)


def _to_rows(sizes: _Sizes, sequence: Int64Array, places: Int64Array, ids: Int64Array) -> Int64Array:
    """Maps indices in the sequence to selected rows, by the places and IDs of their shards."""
    missing = np.where(places > sizes.short_place, sizes.shard_rows - sizes.short_rows, 0)
    return np.asarray(ids * sizes.shard_rows + (sequence - places * sizes.shard_rows + missing), dtype=np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowShuffle(Laned):
    """Puts shards in random order, cuts this sequence into one part for each lane, and shuffles the rows of each window
    of a lane.

    This is the default order. A shard is read in one piece. Each global batch mixes rows of all lanes.

    Attributes:
        shard_rows: Number of rows of one shard. "auto": up to 4 MiB; "fragment": shards are the dataset's fragments.
        window_shards: Number of shards of one window. "auto": as many as `window_bytes` allows, up to 16.
        lanes: Number of lanes. "auto": the largest divisor of the global batch size up to 32. For rows of at
            most 512 KiB, the limit is lower if `window_bytes` is below 256 MiB: one lane for each 8 MiB, so that a
            window of a lane may have the 4 MiB of one efficient read. It is never below 4.
    """

    name: ClassVar[str] = "window"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardShuffle(Laned):
    """Puts shards in random order, and keeps storage order inside each shard. Has the fields of `WindowShuffle`."""

    name: ClassVar[str] = "shard"
    shuffles_windows: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequential(Laned):
    """Keeps storage order: with 1 lane, the default, and global batch size G, step t has the selected rows
    [t·G, (t+1)·G). Has the fields of `WindowShuffle`.
    """

    name: ClassVar[str] = "sequential"
    shuffles_shards: ClassVar[bool] = False
    shuffles_windows: ClassVar[bool] = False
    lanes: int | Auto = 1


def auto_lanes(facts: Facts) -> int:
    """Returns the largest divisor of the global batch size, up to 32, that leaves each lane enough bytes for one read.
    Up to some MiB, a read costs the same for any size. Large rows are read one by one, so they need no such limit,
    unless they cost less one after the other: then a lane of few rows has them, too.
    """
    is_read_alone = facts.row_bytes > _LARGE_ROW_BYTES and facts.run_rows == 1
    fitting = _MAX_AUTO_LANES if is_read_alone else int(facts.window_bytes / 2 / _shard_bytes(facts))
    if facts.run_rows > 1:
        fitting = min(fitting, facts.rows // (4 * facts.run_rows))
    most = min(max(fitting, _MIN_AUTO_LANES), _MAX_AUTO_LANES)
    return max(d for d in range(1, most + 1) if facts.global_batch_size % d == 0)


def _shard_bytes(facts: Facts) -> float:
    """Returns the bytes of rows that are read one after the other."""
    return max(SHARD_BYTES, facts.run_rows * facts.row_bytes) if facts.run_rows > 1 else SHARD_BYTES


@functools.lru_cache(maxsize=64)
def _slot_of(last: int, key: int) -> int:
    return int(unpermute(last, last + 1, key))


@functools.lru_cache(maxsize=4)
def _permutation_table(n: int, key: int) -> Int64Array:
    return permute(np.arange(n), n, key)


# For mixtures, the functions below compute rows of many epochs together: a step of 300 datasets has a few rows of each,
# and computing each epoch alone would take 100 µs for any number of rows. Each epoch is one column of an array.

_STACKED = (RowShuffle, WindowShuffle, ShardShuffle, Sequential)


def stacked_kind(order: Resolved) -> type[Order] | None:
    """Returns the kind of an order if `stack` can combine its epochs; None if each epoch must be computed alone."""
    kind = type(order.settings)
    return kind if kind in _STACKED and _ENDS not in order.tables else None  # fragments have different sizes


def stack(kind: type[Order], epochs: Sequence[Epoch]) -> UInt64Array:
    """Returns the numbers that determine the rows of epochs of one kind of order, shape (numbers, epochs)."""
    if not issubclass(kind, Laned):
        return np.array([(epoch.order.rows, epoch.key("rows")) for epoch in epochs], dtype=np.uint64).T
    columns = [
        (*_sizes_of(epoch.order, 0), epoch.order.shard_count, epoch.key("window"), epoch.key("shards"))
        for epoch in epochs
    ]
    numbers = np.array(columns, dtype=np.uint64).T
    shards, shard_key = numbers[-3], numbers[-1]
    short_place = shards - np.uint64(1)
    numbers[4] = unpermute(short_place, shards, shard_key) if kind.shuffles_shards else short_place
    return numbers


def stacked_rows(kind: type[Order], numbers: UInt64Array, positions: Int64Array) -> Int64Array:
    """Returns the rows at positions. Column i of `numbers`, shape (numbers, k), describes the epoch of position i."""
    if not issubclass(kind, Laned):
        return permute(positions, *numbers)
    sizes, (shards, window_key, shard_key) = _Sizes(*numbers[:-3].view(np.int64)), numbers[-3:]
    sequence = _to_sequence(sizes, positions, window_key if kind.shuffles_windows else None)
    if not kind.shuffles_shards:
        return sequence
    places = _to_places(sizes, sequence)
    return _to_rows(sizes, sequence, places, permute(places, shards, shard_key))
