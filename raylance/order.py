"""Owns the orders, pure functions from an epoch position to a selected row; never reads data and knows no ranks.

An order is frozen and keyword-only. Fields left at "auto" are filled by `resolve` on the first iteration and recorded
in the checkpoint, so that a resumed run keeps them. `rows` is O(len(positions)) whatever the size of the dataset and
whatever the position: that is what makes a resume as cheap at 99 % of an epoch as at 1 %.
"""

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np

from raylance.errors import ConfigError
from raylance.permutation import BoolArray, Int64Array, derive_key, permute, subkeys, unpermute

Auto = Literal["auto"]

_SHARD_BYTES = 4 << 20
_MAX_AUTO_LANES = 32
_MAX_AUTO_WINDOW_SHARDS = 16
_MAX_TABLE = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What "auto" is settled from.

    Attributes:
        rows: Rows of the selection.
        row_bytes: Bytes of one row as it is read.
        global_batch_size: Rows of one step over all ranks.
        world_size: Ranks.
        max_window_bytes: Bytes that one rank may hold in windows, the draining and the arriving one together.
    """

    rows: int
    row_bytes: float
    global_batch_size: int
    world_size: int
    max_window_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order(ABC):
    """A total order of an epoch: position 0 … n-1 to selected row 0 … n-1, seekable in O(1).

    Attributes:
        shard_rows: Rows of one shard, the unit that checkpoints name as complete. "auto" takes several MiB.
    """

    name: ClassVar[str]
    shard_rows: int | Auto = "auto"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != "auto" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f'{type(self).__name__}({field.name}={value!r}): must be "auto" or an integer of at least 1.'
                )

    @property
    def lane_count(self) -> int:
        """Lanes L that the order is dealt into; a step is arranged by lane, so that ranks own contiguous lanes."""
        return 1

    @abstractmethod
    def resolve(self, facts: Facts) -> Self:
        """Returns the same order with every "auto" filled from the facts; explicit values stay."""

    @abstractmethod
    def rows(self, positions: Int64Array, n: int, seed: int, epoch: int) -> Int64Array:
        """Maps epoch positions to selected rows.

        Args:
            positions: int64 in [0, n), any order, shape (k,).
            n: Rows of the selection.
            seed: Seed of the run.
            epoch: Epoch, from 0.

        Returns:
            int64 selected rows in [0, n), shape (k,); over all positions each row comes exactly once.
        """

    def read_positions(self, n: int) -> int | None:
        """Positions after which all lanes start another window: the natural unit of reading. None without windows."""
        return None

    def completed_shards(self, position: int, n: int, seed: int, epoch: int) -> BoolArray:
        """Tells which shards lie wholly in the consumed prefix [0, position).

        Rows that are still to come are enumerated only until every shard has shown one, never the whole epoch.

        Returns:
            bool, shape (ceil(n / shard_rows),), indexed by shard ID.
        """
        shard_rows = self._int("shard_rows")
        done = np.ones(-(-n // shard_rows), dtype=np.bool_)
        for block in _blocks(position, n):
            done[self.rows(block, n, seed, epoch) // shard_rows] = False
            if not done.any():
                break
        return done

    def params(self) -> dict[str, int | str]:
        """The order as JSON-able fields, its name under "name"."""
        return {"name": self.name, **dataclasses.asdict(self)}

    def _int(self, field: str) -> int:
        value = getattr(self, field)
        if isinstance(value, str):
            raise ConfigError(
                f'{type(self).__name__}.{field} is still "auto": resolve() the order, or give a number, before rows '
                "are asked of it."
            )
        return int(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Laned(Order):
    """Shards laid end to end, cut into lanes, windows inside the lanes: the mechanism behind the named orders."""

    shuffles_shards: ClassVar[bool]
    shuffles_windows: ClassVar[bool]
    window_shards: int | Auto = "auto"
    lanes: int | Auto = "auto"

    @property
    def lane_count(self) -> int:
        return self._int("lanes")

    def resolve(self, facts: Facts) -> Self:
        lanes = _or_else(self.lanes, lambda: auto_lanes(facts.global_batch_size, facts.world_size))
        # Bytes of one lane's window; half of the limit, because the next window arrives while this one drains.
        lane_bytes = facts.max_window_bytes / 2 * facts.world_size / lanes
        lane_rows = max(1, facts.rows // lanes)

        def some_mebibytes() -> int:
            wanted = min(_SHARD_BYTES, lane_bytes) / max(facts.row_bytes, 1)
            # Small datasets still get several shards a lane, or a checkpoint could name none as complete.
            rows = max(1, min(int(wanted), -(-lane_rows // 4)))
            per_step = max(1, facts.global_batch_size // lanes)
            # Whole steps in a window: no step then straddles two.
            return max(rows // per_step * per_step, 1)

        shard_rows = _or_else(self.shard_rows, some_mebibytes)
        fitting = int(lane_bytes / max(shard_rows * facts.row_bytes, 1))
        window_shards = _or_else(
            self.window_shards, lambda: max(1, min(fitting, _MAX_AUTO_WINDOW_SHARDS, -(-lane_rows // shard_rows)))
        )
        return dataclasses.replace(self, shard_rows=shard_rows, window_shards=window_shards, lanes=lanes)

    def read_positions(self, n: int) -> int | None:
        return self._int("window_shards") * self._int("shard_rows") * self.lane_count

    def rows(self, positions: Int64Array, n: int, seed: int, epoch: int) -> Int64Array:
        lanes = self.lane_count
        within, lane = np.divmod(np.asarray(positions, dtype=np.int64), lanes)  # (k,), (k,)
        base, extra = divmod(n, lanes)
        lane_start = lane * base + np.minimum(lane, extra)
        if self.shuffles_windows:
            window_rows = self._int("window_shards") * self._int("shard_rows")
            window = within // window_rows
            start = window * window_rows
            size = np.minimum(window_rows, base + (lane < extra) - start)
            keys = subkeys(derive_key(seed, epoch, "window"), window * lanes + lane)
            within = start + permute(within - start, size, keys)
        return self._unlay(lane_start + within, n, seed, epoch)

    def completed_shards(self, position: int, n: int, seed: int, epoch: int) -> BoolArray:
        """Interval arithmetic over the lanes; only windows that are half consumed are looked into."""
        shard_rows, lanes = self._int("shard_rows"), self.lane_count
        shards = -(-n // shard_rows)
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
                window_rows = self._int("window_shards") * shard_rows
                untouched = min(-(-consumed // window_rows) * window_rows, lane_rows)
                touched = np.arange(untouched - min(window_rows, untouched), untouched, dtype=np.int64)
                expected = len(np.unique(self._slots(lane_start + touched, n, seed, epoch)))
                seen: set[int] = set()
                for block in _blocks(consumed, untouched):
                    ids = self.rows(lane + block * lanes, n, seed, epoch) // shard_rows
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
        shards, key = -(-n // self._int("shard_rows")), derive_key(seed, epoch, "shards")
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
        shard_rows = self._int("shard_rows")
        short_slot, short_rows = self._short_shard(n, seed, epoch)
        behind = sequence >= short_slot * shard_rows + short_rows
        return np.where(behind, (sequence - short_rows) // shard_rows + 1, sequence // shard_rows)

    def _unlay(self, sequence: Int64Array, n: int, seed: int, epoch: int) -> Int64Array:
        """Index in the laid-out sequence to selected row."""
        if not self.shuffles_shards:
            return sequence
        shard_rows = self._int("shard_rows")
        short_slot, short_rows = self._short_shard(n, seed, epoch)
        slots = self._slots(sequence, n, seed, epoch)
        starts = slots * shard_rows - np.where(slots > short_slot, shard_rows - short_rows, 0)
        return self._shard_ids(slots, n, seed, epoch) * shard_rows + (sequence - starts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowShuffle(_Laned):
    """Shards in random order, dealt into lanes, rows shuffled in windows inside each lane. The default.

    Reads are contiguous (a shard at a time), and each batch mixes rows of `lanes` windows.

    Attributes:
        shard_rows: Rows of one shard. "auto": several MiB.
        window_shards: Shards of one window. "auto": as many as `max_window_bytes` allows.
        lanes: Parallel streams. "auto": the largest divisor of the global batch size up to 32 that the world size
            divides, or failing that, up to the world size.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShuffle(Order):
    """One permutation of all rows: the ideal shuffle, at the price of random reads.

    Attributes:
        shard_rows: Rows of one shard, for the bookkeeping in checkpoints alone.
    """

    name: ClassVar[str] = "row"

    def resolve(self, facts: Facts) -> Self:
        if self.shard_rows != "auto":
            return self
        rows = int(_SHARD_BYTES / max(facts.row_bytes, 1))
        return dataclasses.replace(self, shard_rows=max(1, min(rows, -(-facts.rows // 4))))

    def rows(self, positions: Int64Array, n: int, seed: int, epoch: int) -> Int64Array:
        return permute(positions, n, derive_key(seed, epoch, "rows"))


ORDERS: dict[str, type[Order]] = {kind.name: kind for kind in (WindowShuffle, ShardShuffle, Sequential, RowShuffle)}


def make_order(order: str | Order) -> Order:
    """Returns the order itself, or the named one with its defaults.

    Raises:
        ConfigError: If the name is none of "window", "shard", "sequential", "row".
    """
    if isinstance(order, Order):
        return order
    if order not in ORDERS:
        known = ", ".join(repr(name) for name in ORDERS)
        raise ConfigError(f"order={order!r} is unknown: use one of {known}, or an order such as WindowShuffle(…).")
    return ORDERS[order]()


def order_from_params(params: Mapping[str, Any]) -> Order:
    """Inverts `Order.params`.

    Raises:
        ConfigError: If the name or a field is unknown.
    """
    fields = dict(params)
    kind = ORDERS.get(str(fields.pop("name", None)))
    if kind is None or set(fields) - {field.name for field in dataclasses.fields(kind)}:
        raise ConfigError(f"{dict(params)!r} describes no order that this raylance knows: {sorted(ORDERS)}.")
    return kind(**fields)


def auto_lanes(global_batch_size: int, world_size: int) -> int:
    """The largest divisor of the global batch size up to 32 that the world size divides, or failing that, up to it."""
    divisors = [d for d in range(1, max(_MAX_AUTO_LANES, world_size) + 1) if global_batch_size % d == 0]
    whole = [d for d in divisors if d <= _MAX_AUTO_LANES and d % world_size == 0]
    return max(whole or [d for d in divisors if d <= world_size])


@functools.lru_cache(maxsize=4)
def _permutation_table(n: int, key: int) -> Int64Array:
    return permute(np.arange(n), n, key)


def _or_else(value: int | Auto, settle: Callable[[], int]) -> int:
    return settle() if isinstance(value, str) else value


def _blocks(start: int, stop: int) -> Iterator[Int64Array]:
    """Yields [start, stop) as index blocks that double in size: a search that ends early costs little."""
    size = 1024
    while start < stop:
        yield np.arange(start, min(start + size, stop), dtype=np.int64)
        start, size = start + size, size * 2
