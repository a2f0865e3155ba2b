"""Owns the orders that read shard by shard and shuffle in windows, dealt into lanes; never reads, knows no ranks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, Self

import numpy as np

from raylance.orders.order import SHARD_BYTES, Auto, Facts, Order, Rows, blocks, check_count
from raylance.orders.permutation import BoolArray, Int64Array, derive_key, permute, subkeys, unpermute

_MAX_AUTO_LANES = 32
_MAX_AUTO_WINDOW_SHARDS = 16
_MAX_TABLE = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Laned(Order):
    """Shards laid end to end, cut into lanes, windows inside the lanes: the mechanism behind the named orders."""

    shuffles_shards: ClassVar[bool]
    shuffles_windows: ClassVar[bool]
    window_shards: int | Auto = "auto"
    lanes: int | Auto = "auto"
    shard_ends: Int64Array | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_count(self, "shard_rows", "auto", "fragment")
        check_count(self, "window_shards", "auto")
        check_count(self, "lanes", "auto")

    def bind(self, rows: Rows) -> Self:
        """Looks up where the fragments end, when shards follow them."""
        return dataclasses.replace(self, shard_ends=rows.fragment_ends()) if self.shard_rows == "fragment" else self

    @property
    def needs_whole_windows(self) -> bool:
        return self.shuffles_windows

    @property
    def lane_count(self) -> int:
        return self._int("lanes")

    def resolve(self, facts: Facts) -> Self:
        lanes = _or_else(self.lanes, lambda: auto_lanes(facts.global_batch_size))
        # Bytes of one lane's window; half of the limit, because the next window arrives while this one drains. As if
        # one rank held them all: an order that depended on the world size would give other batches for each.
        lane_bytes = facts.max_window_bytes / 2 / lanes
        lane_rows = max(1, facts.rows // lanes)

        def some_mebibytes() -> int:
            wanted = min(SHARD_BYTES, lane_bytes) / max(facts.row_bytes, 1)
            # Small datasets still get several shards a lane, or a checkpoint could name none as complete.
            rows = max(1, min(int(wanted), -(-lane_rows // 4)))
            per_step = max(1, facts.global_batch_size // lanes)
            # Whole steps in a window: no step then straddles two.
            return max(rows // per_step * per_step, 1)

        shard_rows = some_mebibytes() if self.shard_rows == "auto" else self.shard_rows
        rows_each = self._usual_rows(facts.rows) if self.shard_ends is not None else int(shard_rows)
        fitting = int(lane_bytes / max(rows_each * facts.row_bytes, 1))
        window_shards = _or_else(
            self.window_shards, lambda: max(1, min(fitting, _MAX_AUTO_WINDOW_SHARDS, -(-lane_rows // rows_each)))
        )
        return dataclasses.replace(self, shard_rows=shard_rows, window_shards=window_shards, lanes=lanes)

    def _usual_rows(self, n: int) -> int:
        """Rows of a shard; their mean where shards follow fragments."""
        return self._int("shard_rows") if self.shard_ends is None else -(-n // len(self.shard_ends))

    def _window_rows(self, n: int) -> int:
        return self._int("window_shards") * self._usual_rows(n)

    def _shard_count(self, n: int) -> int:
        return -(-n // self._int("shard_rows")) if self.shard_ends is None else len(self.shard_ends)

    def _shard_of(self, rows: Int64Array) -> Int64Array:
        """Selected row to shard ID."""
        if self.shard_ends is not None:
            return np.searchsorted(self.shard_ends, rows, side="right")
        return rows // self._int("shard_rows")

    def read_positions(self, n: int) -> int | None:
        return self._window_rows(n) * self.lane_count

    def rows(self, positions: Int64Array, n: int, seed: int, epoch: int) -> Int64Array:
        lanes = self.lane_count
        within, lane = np.divmod(np.asarray(positions, dtype=np.int64), lanes)  # (k,), (k,)
        base, extra = divmod(n, lanes)
        lane_start = lane * base + np.minimum(lane, extra)
        if self.shuffles_windows:
            window_rows = self._window_rows(n)
            window = within // window_rows
            start = window * window_rows
            size = np.minimum(window_rows, base + (lane < extra) - start)
            keys = subkeys(derive_key(seed, epoch, "window"), window * lanes + lane)
            within = start + permute(within - start, size, keys)
        return self._unlay(lane_start + within, n, seed, epoch)

    def completed_shards(self, position: int, n: int, seed: int, epoch: int) -> BoolArray:
        """Interval arithmetic over the lanes; only windows that are half consumed are looked into."""
        lanes, shards = self.lane_count, self._shard_count(n)
        slot_done = np.ones(shards, dtype=np.bool_)  # by place in the sequence
        done = np.ones(shards, dtype=np.bool_)  # by shard ID
        base, extra = divmod(n, lanes)
        for lane in range(min(lanes, n)):
            lane_start, lane_rows = lane * base + min(lane, extra), base + (lane < extra)
            consumed = max(0, -(-(position - lane) // lanes))
            if consumed >= lane_rows:
                continue
            untouched = consumed
            if self.shuffles_windows:
                window_rows = self._window_rows(n)
                untouched = min(-(-consumed // window_rows) * window_rows, lane_rows)
                touched = np.arange(untouched - min(window_rows, untouched), untouched, dtype=np.int64)
                expected = len(np.unique(self._slots(lane_start + touched, n, seed, epoch)))
                seen: set[int] = set()
                for block in blocks(consumed, untouched):
                    ids = self._shard_of(self.rows(lane + block * lanes, n, seed, epoch))
                    done[ids] = False
                    seen.update(np.unique(ids).tolist())
                    if len(seen) == expected:
                        break
            if untouched < lane_rows:
                ends = np.array([lane_start + untouched, lane_start + lane_rows - 1], dtype=np.int64)
                first, last = self._slots(ends, n, seed, epoch)
                slot_done[first : last + 1] = False
        done[self._shard_ids(np.flatnonzero(~slot_done), n, seed, epoch)] = False
        return done

    def _shard_ids(self, slots: Int64Array, n: int, seed: int, epoch: int) -> Int64Array:
        """Place in the sequence to shard ID."""
        if not self.shuffles_shards:
            return slots
        shards, key = self._shard_count(n), derive_key(seed, epoch, "shards")
        # Rows outnumber shards by far: a table of all of them, where it is small, saves a permutation for each row.
        return _permutation_table(shards, key)[slots] if shards <= _MAX_TABLE else permute(slots, shards, key)

    def _short_shard(self, n: int, seed: int, epoch: int) -> tuple[int, int]:
        """Place in the sequence and rows of the last shard in storage order, the only one that may be short."""
        shard_rows = self._int("shard_rows")
        last = -(-n // shard_rows) - 1
        slot = last
        if self.shuffles_shards:
            slot = int(unpermute(last, last + 1, derive_key(seed, epoch, "shards")))
        return slot, n - last * shard_rows

    def _slots(self, sequence: Int64Array, n: int, seed: int, epoch: int) -> Int64Array:
        """Index in the laid-out sequence to place of its shard there."""
        if self.shard_ends is not None:
            return np.searchsorted(self._laid_ends(n, seed, epoch), sequence, side="right")
        shard_rows = self._int("shard_rows")
        short_slot, short_rows = self._short_shard(n, seed, epoch)
        behind = sequence >= short_slot * shard_rows + short_rows
        return np.where(behind, (sequence - short_rows) // shard_rows + 1, sequence // shard_rows)

    def _laid_ends(self, n: int, seed: int, epoch: int) -> Int64Array:
        """Where the shard at each place of the sequence ends, when shards follow fragments; O(fragments)."""
        assert self.shard_ends is not None
        lengths = np.diff(self.shard_ends, prepend=0)
        return np.cumsum(lengths[self._shard_ids(np.arange(len(lengths)), n, seed, epoch)], dtype=np.int64)

    def _unlay(self, sequence: Int64Array, n: int, seed: int, epoch: int) -> Int64Array:
        """Index in the laid-out sequence to selected row."""
        if not self.shuffles_shards:
            return sequence
        slots = self._slots(sequence, n, seed, epoch)
        if self.shard_ends is not None:
            ids = self._shard_ids(slots, n, seed, epoch)
            return np.asarray(self.shard_ends[ids] - (self._laid_ends(n, seed, epoch)[slots] - sequence))
        shard_rows = self._int("shard_rows")
        short_slot, short_rows = self._short_shard(n, seed, epoch)
        starts = slots * shard_rows - np.where(slots > short_slot, shard_rows - short_rows, 0)
        return self._shard_ids(slots, n, seed, epoch) * shard_rows + (sequence - starts)


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
    shuffles_shards: ClassVar[bool] = True
    shuffles_windows: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardShuffle(_Laned):
    """Shards in random order, rows in storage order inside each. Fields as in `WindowShuffle`."""

    name: ClassVar[str] = "shard"
    shuffles_shards: ClassVar[bool] = True
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


@functools.lru_cache(maxsize=4)
def _permutation_table(n: int, key: int) -> Int64Array:
    return permute(np.arange(n), n, key)


def _or_else(value: int | Auto, settle: Callable[[], int]) -> int:
    return settle() if isinstance(value, str) else value
