"""Orders of one's own: two that keep what every order has to keep, and one for each promise that breaks it.

They lie apart from tests because processes that they are sent to import this file: it loads NumPy and orders alone.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from raylance.orders.order import Epoch, Facts, Order, Resolved, Rows, Tables
from raylance.orders.permutation import BoolArray, Int64Array, permute, subkeys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reversed(Order):
    """Storage order, from its end."""

    name: ClassVar[str] = "reversed"

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return epoch.order.rows - 1 - positions


class SlowToArrive(Reversed):
    """Reversed, and slow to unpickle."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        time.sleep(0.2)
        self.__dict__.update(state)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortFirst(Order):
    """Rows by length, shuffled in windows."""

    name: ClassVar[str] = "short_first"
    column: str
    window_rows: int = 16

    def look_up(self, rows: Rows) -> Tables:
        return {"by_length": np.argsort(rows.column(self.column).values(), kind="stable")}

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        start = positions // self.window_rows * self.window_rows
        size = np.minimum(self.window_rows, epoch.order.rows - start)
        keys = subkeys(epoch.key("short_first"), start)
        return epoch.order.tables["by_length"][start + permute(positions - start, size, keys)]


def with_rows(name: str, rows_of: Callable[[Epoch, Int64Array], Any]) -> type[Reversed]:
    """A kind of order that has these rows at positions."""
    return type(name, (Reversed,), {"rows_of": lambda _, epoch, positions: rows_of(epoch, positions)})


Halved = with_rows("Halved", lambda _, positions: positions // 2)
Beyond = with_rows("Beyond", lambda _, positions: positions + 1)
Floats = with_rows("Floats", lambda _, positions: positions / 1)
SortsWhatIsAsked = with_rows("SortsWhatIsAsked", lambda _, positions: np.sort(positions))
Generator = with_rows("Generator", lambda epoch, positions: np.random.permutation(epoch.order.rows)[positions])
DependsOnTheProcess = with_rows(
    "DependsOnTheProcess",
    lambda epoch, positions: permute(positions, epoch.order.rows, hash("salted by process") % 2**64),
)


class Overwrites(Reversed):
    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        rows = epoch.order.rows - 1 - positions
        positions[:] = 0
        return rows


class AllAtOnce(Reversed):
    """A permutation of the whole epoch for each row that is asked for."""

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        n = epoch.order.rows
        return permute(np.arange(n), n, epoch.key())[positions] if n < 1000 else np.arange(n)[positions]


class Forgetful(Reversed):
    """The first epoch that was asked for is kept for all."""

    kept: ClassVar[dict[int, int]] = {}

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        return permute(positions, epoch.order.rows, self.kept.setdefault(epoch.order.seed, epoch.key()))


class EagerEpoch(Epoch):
    def completed_shards(self, position: int) -> BoolArray:
        done = super().completed_shards(position)
        return np.ones_like(done) if position else done


class EagerResolved(Resolved):
    def epoch(self, number: int) -> Epoch:
        return EagerEpoch(self, number)


class Eager(Reversed):
    """Takes shards for complete at their first row."""

    def resolve(self, facts: Facts) -> Resolved:
        return EagerResolved(**vars(super().resolve(facts)))


class NeverResolved(Reversed):
    def resolve(self, facts: Facts) -> Resolved:
        return dataclasses.replace(super().resolve(facts), settings=self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuples(Reversed):
    stages: tuple[int, ...] = (1, 2)


class OtherSizes(Reversed):
    def resolve(self, facts: Facts) -> Resolved:
        resolved = super().resolve(facts)
        return dataclasses.replace(resolved, epoch_rows=resolved.epoch_rows + 1)
