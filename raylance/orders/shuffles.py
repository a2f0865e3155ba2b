"""Owns the orders that visit every row once: shard by shard, shuffled in windows and dealt into lanes, or one
permutation of all rows; never reads, knows no ranks.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import numpy as np

from raylance.orders.order import SHARD_BYTES, Auto, Epoch, Facts, Order, Rows, Settled, Tables, blocks, check_count
from raylance.orders.permutation import BoolArray, Int64Array, permute, subkeys, unpermute

_MAX_AUTO_LANES = 32
_MAX_AUTO_WINDOW_SHARDS = 16
_MAX_TABLE = 1 << 16
_ENDS = "shard_ends"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShuffle(Order):
    """One permutation of all rows: the ideal shuffle, at the price of random reads.

    Attributes:
        shard_rows: Rows of one shard, for the bookkeeping in checkpoints alone.
    """

    name: ClassVar[str] = "row"

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        """See `Order.rows_of`."""
        return permute(positions, epoch.order.rows, epoch.key("rows"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Laned(Order):
    """Shards laid end to end, cut into lanes, windows inside the lanes: the settings behind the named orders."""

    shuffles_shards: ClassVar[bool] = True
    shuffles_windows: ClassVar[bool] = True
    window_shards: int | Auto = "auto"
    lanes: int | Auto = "auto"

    def __post_init__(self) -> None:
        check_count(self, "shard_rows", "auto", "fragment")
        check_count(self, "window_shards", "auto")
        check_count(self, "lanes", "auto")

    def look_up(self, rows: Rows) -> Tables:
        """Looks up where the fragments end, when shards follow them."""
        return {_ENDS: rows.fragment_ends()} if self.shard_rows == "fragment" else {}

    def settle(self, facts: Facts) -> Settled:
        """See `Order.settle`; the sizes are those that fit the memory."""
        lanes = auto_lanes(facts.global_batch_size) if isinstance(self.lanes, str) else self.lanes
        # Bytes of one lane's window; half of the limit, because the next window arrives while this one drains. As if
        # one rank held them all: an order that depended on the world size would give other batches for each.
        lane_bytes = facts.max_window_bytes / 2 / lanes
        lane_rows, lane_step = max(1, facts.rows // lanes), max(1, facts.global_batch_size // lanes)
        shard_rows = self.shard_rows
        if shard_rows == "auto":
            shard_rows = _some_mebibytes(facts, lane_step, lane_bytes, lane_rows)
        rows_each = -(-facts.rows // len(facts.tables[_ENDS])) if isinstance(shard_rows, str) else shard_rows
        fitting = int(lane_bytes / max(rows_each * facts.row_bytes, 1))
        auto_shards = max(1, min(fitting, _MAX_AUTO_WINDOW_SHARDS, -(-lane_rows // rows_each)))
        if self.shard_rows == "auto":  # a window has whole steps of a lane or, where it has no room for one, a part
            together = lane_step // math.gcd(lane_step, rows_each)
            parts = (shards for shards in range(1, auto_shards + 1) if lane_step % (shards * rows_each) == 0)
            auto_shards = auto_shards // together * together or max(parts, default=auto_shards)
        window_shards = auto_shards if isinstance(self.window_shards, str) else self.window_shards
        return _LanedSettled(
            settings=dataclasses.replace(self, shard_rows=shard_rows, window_shards=window_shards, lanes=lanes),
            rows=facts.rows,
            seed=facts.seed,
            tables=facts.tables,
            epoch_rows=facts.rows,
            shard_rows=rows_each,
            lane_count=lanes,
            read_positions=window_shards * rows_each * lanes,
            needs_whole_windows=self.shuffles_windows,
            window_rows=window_shards * rows_each,
        )


def _some_mebibytes(facts: Facts, lane_step: int, lane_bytes: float, lane_rows: int) -> int:
    """Rows of a shard that is worth a read of its own; `lane_step` is what a step takes of a lane."""
    wanted = min(SHARD_BYTES, lane_bytes) / max(facts.row_bytes, 1)
    # Small datasets still get several shards a lane, or a checkpoint could name none as complete.
    rows = max(1, min(int(wanted), -(-lane_rows // 4)))
    if lane_step <= rows:
        return rows // lane_step * lane_step  # whole steps in a window: no step then straddles two
    # A part of a step likewise, unless that were so few rows that reading them one by one is what it comes to.
    part = max(divisor for divisor in range(1, rows + 1) if lane_step % divisor == 0)
    return part if 4 * part >= rows else rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LanedSettled(Settled):
    """A laned order of one selection; a window of a lane has `window_rows`."""

    settings: _Laned
    window_rows: int

    @property
    def ends(self) -> Int64Array | None:
        """Where the shards end, where they follow the fragments."""
        return self.tables.get(_ENDS)

    @property
    def shard_count(self) -> int:
        return super().shard_count if self.ends is None else len(self.ends)

    def shards_of(self, rows: Int64Array) -> Int64Array:
        return super().shards_of(rows) if self.ends is None else np.searchsorted(self.ends, rows, side="right")

    def epoch(self, number: int) -> "_LanedEpoch":
        return _LanedEpoch(self, number)


class _LanedEpoch(Epoch):
    """One epoch of a laned order. The sequence that lanes are cut from is the rows, laid end to end shard by shard."""

    order: _LanedSettled

    def rows(self, positions: Int64Array) -> Int64Array:
        lanes, window_rows = self.order.lane_count, self.order.window_rows
        within, lane = np.divmod(np.asarray(positions, dtype=np.int64), lanes)  # (k,), (k,)
        base, extra = divmod(self.order.rows, lanes)
        lane_start = lane * base + np.minimum(lane, extra)
        if self.order.needs_whole_windows:
            window = within // window_rows
            start = window * window_rows
            size = np.minimum(window_rows, base + (lane < extra) - start)
            keys = subkeys(self.key("window"), window * lanes + lane)
            within = start + permute(within - start, size, keys)
        return self._unlay(lane_start + within)

    def completed_shards(self, position: int) -> BoolArray:
        """See `Epoch.completed_shards`: interval arithmetic over the lanes, into half consumed windows alone."""
        lanes, window_rows, n = self.order.lane_count, self.order.window_rows, self.order.rows
        slot_done = np.ones(self.order.shard_count, dtype=np.bool_)  # by place in the sequence
        done = np.ones(self.order.shard_count, dtype=np.bool_)  # by shard ID
        base, extra = divmod(n, lanes)
        for lane in range(min(lanes, n)):
            lane_start, lane_rows = lane * base + min(lane, extra), base + (lane < extra)
            consumed = max(0, -(-(position - lane) // lanes))
            if consumed >= lane_rows:
                continue
            untouched = consumed
            if self.order.needs_whole_windows:
                untouched = min(-(-consumed // window_rows) * window_rows, lane_rows)
                touched = np.arange(untouched - min(window_rows, untouched), untouched, dtype=np.int64)
                done[self._still_to_come(lane, consumed, untouched, self._slots(lane_start + touched))] = False
            if untouched < lane_rows:
                ends = np.array([lane_start + untouched, lane_start + lane_rows - 1], dtype=np.int64)
                first, last = self._slots(ends)
                slot_done[first : last + 1] = False
        done[self._shard_ids(np.flatnonzero(~slot_done))] = False
        return done

    def _still_to_come(self, lane: int, consumed: int, untouched: int, slots: Int64Array) -> list[int]:
        """IDs of the shards of which a lane's rows [consumed, untouched) are; at most those at the slots."""
        expected, seen = len(np.unique(slots)), set[int]()
        for block in blocks(consumed, untouched):
            rows = self.rows(lane + block * self.order.lane_count)
            seen.update(np.unique(self.order.shards_of(rows)).tolist())
            if len(seen) == expected:
                break
        return list(seen)

    def _shard_ids(self, slots: Int64Array) -> Int64Array:
        """Place in the sequence to shard ID."""
        if not self.order.settings.shuffles_shards:
            return slots
        shards, key = self.order.shard_count, self.key("shards")
        # Rows outnumber shards by far: a table of all of them, where it is small, saves a permutation for each row.
        return _permutation_table(shards, key)[slots] if shards <= _MAX_TABLE else permute(slots, shards, key)

    @functools.cached_property
    def _short_shard(self) -> tuple[int, int]:
        """Place in the sequence and rows of the last shard in storage order, the only one that may be short."""
        last = slot = self.order.shard_count - 1
        if self.order.settings.shuffles_shards:
            slot = _slot_of(last, self.key("shards"))
        return slot, self.order.rows - last * self.order.shard_rows

    def _slots(self, sequence: Int64Array) -> Int64Array:
        """Index in the sequence to place of its shard there."""
        if self.order.ends is not None:
            return np.searchsorted(self._laid_ends, sequence, side="right")
        shard_rows = self.order.shard_rows
        short_slot, short_rows = self._short_shard
        behind = sequence >= short_slot * shard_rows + short_rows
        return np.where(behind, (sequence - short_rows) // shard_rows + 1, sequence // shard_rows)

    @functools.cached_property
    def _laid_ends(self) -> Int64Array:
        """Where the shard at each place of the sequence ends, when shards follow fragments; O(fragments)."""
        lengths = np.diff(self.order.tables[_ENDS], prepend=0)
        return np.cumsum(lengths[self._shard_ids(np.arange(len(lengths)))], dtype=np.int64)

    def _unlay(self, sequence: Int64Array) -> Int64Array:
        """Index in the sequence to selected row."""
        if not self.order.settings.shuffles_shards:
            return sequence
        slots, ends = self._slots(sequence), self.order.ends
        ids = self._shard_ids(slots)
        if ends is not None:
            return np.asarray(ends[ids] - (self._laid_ends[slots] - sequence))
        shard_rows = self.order.shard_rows
        short_slot, short_rows = self._short_shard
        starts = slots * shard_rows - np.where(slots > short_slot, shard_rows - short_rows, 0)
        return ids * shard_rows + (sequence - starts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowShuffle(_Laned):
    """Shards in random order, dealt into lanes, rows shuffled in windows inside each lane. The default.

    Reads are contiguous (a shard at a time), and each batch mixes rows of `lanes` windows.

    Attributes:
        shard_rows: Rows of one shard. "auto": several MiB; "fragment": shards are the dataset's fragments.
        window_shards: Shards of one window. "auto": as many as `max_window_bytes` allows.
        lanes: Parallel streams. "auto": the largest divisor of the global batch size up to 32.
    """

    name: ClassVar[str] = "window"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardShuffle(_Laned):
    """Shards in random order, rows in storage order inside each. Fields as in `WindowShuffle`."""

    name: ClassVar[str] = "shard"
    shuffles_windows: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequential(_Laned):
    """Storage order: the rows of step t are rows [t·G, (t+1)·G) of the selection. Fields as in `WindowShuffle`."""

    name: ClassVar[str] = "sequential"
    shuffles_shards: ClassVar[bool] = False
    shuffles_windows: ClassVar[bool] = False
    lanes: int | Auto = 1


def auto_lanes(global_batch_size: int) -> int:
    """The largest divisor of the global batch size up to 32."""
    return max(d for d in range(1, _MAX_AUTO_LANES + 1) if global_batch_size % d == 0)


@functools.lru_cache(maxsize=64)
def _slot_of(last: int, key: int) -> int:
    return int(unpermute(last, last + 1, key))


@functools.lru_cache(maxsize=4)
def _permutation_table(n: int, key: int) -> Int64Array:
    return permute(np.arange(n), n, key)
