"""Owns what an order is, a pure function from an epoch position to a selected row; never reads data, knows no ranks.

An order is frozen and keyword-only. Fields left at "auto" are filled by `resolve` on the first iteration and recorded
in the checkpoint, so that a resumed run keeps them. `rows` is O(len(positions)) whatever the size of the dataset and
whatever the position: that is what makes a resume as cheap at 99 % of an epoch as at 1 %.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

import numpy as np

from raylance.errors import ConfigError
from raylance.orders.permutation import BoolArray, Int64Array, derive_key, permute

Auto = Literal["auto"]

SHARD_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What "auto" is settled from.

    Attributes:
        rows: Rows of the selection.
        row_bytes: Bytes of one row as it is read.
        global_batch_size: Rows of one step over all ranks.
        max_window_bytes: Bytes that one rank may hold in windows, the draining and the arriving one together.
    """

    rows: int
    row_bytes: float
    global_batch_size: int
    max_window_bytes: int


class Rows(Protocol):
    """What an order may look up in the selection, once, when the dataset is opened."""

    @property
    def count(self) -> int:
        """Rows of the selection, n."""
        ...

    def column(self, name: str) -> Any:
        """Values of a column for all selected rows in storage order, a pyarrow ChunkedArray."""
        ...

    def fragment_ends(self) -> Int64Array:
        """Selected rows up to the end of each fragment, int64, ascending, fragments without any left out."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order(ABC):
    """A total order of an epoch: epoch position to selected row 0 … n-1, seekable in O(1).

    Attributes:
        shard_rows: Rows of one shard, the unit that checkpoints name as complete. "auto" takes several MiB.
    """

    name: ClassVar[str]
    repeats: ClassVar[bool] = False  # whether a row may come more than once an epoch, or not at all
    shard_rows: int | str = "auto"

    def __post_init__(self) -> None:
        check_count(self, "shard_rows", "auto")

    def bind(self, rows: Rows) -> Self:
        """Looks up what the order needs of the selection; returns the order that knows it.

        Raises:
            ConfigError: If the selection has not what the order needs.
        """
        return self

    def epoch_rows(self, n: int) -> int:
        """Positions of an epoch over n selected rows."""
        return n

    @property
    def lane_count(self) -> int:
        """Lanes L that the order is dealt into; a step is arranged by lane, so that ranks own contiguous lanes."""
        return 1

    @property
    def is_resolved(self) -> bool:
        """Whether no field is left at "auto"."""
        return "auto" not in self.params().values()

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
            int64 selected rows in [0, n), shape (k,). Unless the order repeats rows, each comes exactly once over all
            positions.
        """

    @property
    def needs_whole_windows(self) -> bool:
        """Whether rows are shuffled inside of what `read_positions` names, so that it must be read at once."""
        return False

    def standings(self, position: int) -> dict[str, Any]:
        """Where each component stands at a position, for an order that has components."""
        return {}

    def read_positions(self, n: int) -> int | None:
        """Positions after which all lanes start another window: the natural unit of reading. None without windows."""
        return None

    def completed_shards(self, position: int, n: int, seed: int, epoch: int) -> BoolArray:
        """Tells which shards lie wholly in the consumed prefix [0, position); of none where rows repeat.

        Rows that are still to come are enumerated only until every shard has shown one, never the whole epoch.

        Returns:
            bool, shape (ceil(n / shard_rows),), indexed by shard ID.
        """
        if self.repeats:
            return np.zeros(0, dtype=np.bool_)
        shard_rows = self._int("shard_rows")
        done = np.ones(-(-n // shard_rows), dtype=np.bool_)
        for block in blocks(position, n):
            done[self.rows(block, n, seed, epoch) // shard_rows] = False
            if not done.any():
                break
        return done

    def params(self) -> dict[str, Any]:
        """The order as JSON-able values, its name under "name"; what `bind` looked up is left out."""
        fields = [field.name for field in dataclasses.fields(self) if field.compare]
        return {"name": self.name, **{name: getattr(self, name) for name in fields}}

    def adopt(self, params: Mapping[str, Any]) -> Self:
        """Takes over saved values for what is still "auto" here; the rest must be equal already."""
        settled = {key: value for key, value in params.items() if getattr(self, key, None) == "auto"}
        return dataclasses.replace(self, **settled)

    def _int(self, field: str) -> int:
        value = getattr(self, field)
        if isinstance(value, str):
            raise ConfigError(
                f"{type(self).__name__}.{field} is still {value!r}: bind() and resolve() the order, or give a number, "
                "before rows are asked of it."
            )
        return int(value)


def check_count(order: Order, field: str, *words: str) -> None:
    """Refuses a field that is neither one of the words nor an integer of at least 1.

    Raises:
        ConfigError: With the value and what is possible.
    """
    value = getattr(order, field)
    if value not in words and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        allowed = " or ".join([*(f'"{word}"' for word in words), "an integer of at least 1"])
        raise ConfigError(f"{type(order).__name__}({field}={value!r}): must be {allowed}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShuffle(Order):
    """One permutation of all rows: the ideal shuffle, at the price of random reads.

    Attributes:
        shard_rows: Rows of one shard, for the bookkeeping in checkpoints alone.
    """

    name: ClassVar[str] = "row"

    def resolve(self, facts: Facts) -> Self:
        """See `Order.resolve`."""
        if self.shard_rows != "auto":
            return self
        rows = int(SHARD_BYTES / max(facts.row_bytes, 1))
        return dataclasses.replace(self, shard_rows=max(1, min(rows, -(-facts.rows // 4))))

    def rows(self, positions: Int64Array, n: int, seed: int, epoch: int) -> Int64Array:
        """See `Order.rows`."""
        return permute(positions, n, derive_key(seed, epoch, "rows"))


def blocks(start: int, stop: int) -> Iterator[Int64Array]:
    """Yields [start, stop) as index blocks that double in size: a search that ends early costs little."""
    size = 1024
    while start < stop:
        yield np.arange(start, min(start + size, stop), dtype=np.int64)
        start, size = start + size, size * 2
