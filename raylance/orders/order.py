"""The classes of an order, a pure function from epoch position to selected row.

There are three. An `Order` holds the user's frozen settings, which may be "auto". A `Resolved` is this order for one
selection, and all its sizes are integers. Checkpoints record its settings, so that a resumed run keeps them. An `Epoch`
returns rows, at a cost that depends only on the number of requested positions: a resume costs the same at 99 % of an
epoch as at 1 %.
"""

import dataclasses
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from raylance.columns import COST as COST
from raylance.descriptions import Setting
from raylance.errors import ConfigError
from raylance.orders.permutation import BoolArray, Int32Array, Int64Array, derive_key

Auto = Literal["auto"]
Tables = Mapping[str, npt.NDArray[Any]]
"""The arrays that an order looked up in a selection, by name. An order keeps all its large data here."""

SHARD_BYTES = 4 << 20
WINDOW_BYTES = 512 << 20
"""The default of `window_bytes`, if neither the dataset nor the run sets it."""


class Column(Protocol):
    """A column of the selected rows, as an order sees it."""

    @property
    def kind(self) -> str:
        """Name of the column's type in the dataset."""

    @property
    def nulls(self) -> int:
        """Number of null values."""

    def values(self) -> npt.NDArray[Any]:
        """Returns the values of all selected rows in storage order, shape (n,)."""

    def codes(self) -> tuple[Int64Array, list[Any]]:
        """Returns the class number of each selected row, int64, shape (n,), and the label of each class that occurs."""


class Rows(Protocol):
    """A selection, as an order sees it when the dataset is opened."""

    @property
    def count(self) -> int:
        """Number of rows of the selection, n."""

    def column(self, name: str) -> Column:
        """Returns a column of the dataset, which batches need not have."""

    def fragment_ends(self) -> Int64Array:
        """Returns the number of rows up to the end of each fragment that has selected rows, int64, ascending."""

    @property
    def costs(self) -> Mapping[str, str]:
        """The costs of a row in words, by name; empty if rows have none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts that resolve an order. The last four only affect sizes that are "auto"."""

    rows: int  # number of rows of the selection, n
    seed: int  # seed of the run
    tables: Tables = dataclasses.field(default_factory=dict)  # what `Order.bind` looked up
    row_bytes: float = 1.0  # bytes of one row as it is read
    # Rows that cost less if they are read one after the other: some keyframe distances of a video.
    run_rows: int = 1
    global_batch_size: int = 1  # rows of one step over all ranks
    # cost of one step over all ranks, by name; empty if steps have a number of rows
    global_batch_cost: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Most bytes of the current and the next windows together, as if one rank held those of all ranks. A setting of the
    # dataset or the run, never of a rank, because all ranks must have the same order.
    window_bytes: int = WINDOW_BYTES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order(Setting):
    """The base class of all orders: frozen settings that determine the row at each position of an epoch.

    A custom order is a frozen, keyword-only dataclass with a `name` and `rows_of`. If it depends on values of the rows,
    it reads them in `look_up`. Checkpoints record its fields, which are numbers, strings, or lists of these. Check it
    with `raylance.testing.check_order`.

    Attributes:
        name: Name of the order in checkpoints.
        repeats: Whether an epoch may repeat some rows and leave out others.
        scatters: Whether rows that are stored together lie far apart in an epoch. Then samples of several rows that are
            loaded together have few rows in common, and what is decoded of a row is not kept for other samples.
        shard_rows: Number of rows of one shard, the unit that checkpoints list as complete. "auto" takes
            rows of up to 4 MiB together.
    """

    name: ClassVar[str]
    repeats: ClassVar[bool] = False
    scatters: ClassVar[bool] = False
    shard_rows: int | str = "auto"

    def __post_init__(self) -> None:
        check_count(self, "shard_rows", "auto")

    def rows_of(self, epoch: "Epoch", positions: Int64Array) -> Int64Array:
        """Maps positions of an epoch to selected rows: a pure function of its arguments and the settings.

        Args:
            epoch: The epoch. `epoch.number` counts from 0. `epoch.key(…)` makes a key for random numbers.
                `epoch.order.rows` is the number of selected rows, n. `epoch.order.epoch_rows` is the number of
                positions of an epoch: n, unless the order repeats rows. `epoch.order.tables` has the arrays of
                `look_up`.
            positions: int64 in [0, epoch.order.epoch_rows), in any order, shape (k,).

        Returns:
            int64 selected rows in [0, n), shape (k,). Unless the order repeats rows, each row belongs to exactly one
            position.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rows_of(), which gives the row at a position.")

    def look_up(self, rows: Rows) -> Tables:
        """Returns the data that the order needs from the selected rows, by default none. Called when the dataset is
        opened.

        Returns:
            Arrays by name, which `rows_of` finds in `epoch.order.tables`.

        Raises:
            ConfigError: If the selection lacks the data that the order needs.
        """
        return {}

    def bind(self, rows: Rows) -> tuple[Self, Tables]:
        """Returns this order, whose settings a subclass may fill from the tables, and the tables of `look_up`."""
        return self, self.look_up(rows)

    @property
    def is_resolved(self) -> bool:
        """Whether no field is "auto"."""
        return "auto" not in self.params().values()

    def resolve(self, facts: Facts) -> "Resolved":
        """Returns this order for one selection, with all sizes known. Fields that are "auto" get values that fit
        `facts`, such as the number of rows and the batch size. Other fields keep their values.
        """
        shard_rows = self.shard_rows
        if isinstance(shard_rows, str):
            shard_rows = max(1, min(int(SHARD_BYTES / max(facts.row_bytes, 1)), -(-facts.rows // 4)))
        return Resolved(
            settings=dataclasses.replace(self, shard_rows=shard_rows),
            rows=facts.rows,
            seed=facts.seed,
            tables=facts.tables,
            epoch_rows=facts.rows,
            shard_rows=shard_rows,
        )

    @property
    def known_from(self) -> tuple[int, int]:
        """See `Resolved.known_from`."""
        return 0, 0

    def renewed(self, given: "Order") -> "Order":
        """Returns the order without what has changed in its rows in the course of a run; they are those of `given`."""
        return self

    def standings(self, epoch: int, position: int) -> dict[str, Any]:
        """Returns how far each dataset of a mixture is at a position of an epoch; empty unless this is a mixture."""
        return {}

    def params(self) -> dict[str, Any]:
        """Returns the fields as JSON-able values, without those with `compare=False`, and the name under "name"."""
        fields = [field.name for field in dataclasses.fields(self) if field.compare]
        return {"name": self.name, **{name: getattr(self, name) for name in fields}}

    def dealt_as(self, params: Mapping[str, Any]) -> Self:
        """Returns this order with those settings of a checkpoint's `params` that a run may change in its course."""
        return self

    def after(self, params: Mapping[str, Any], epoch: int, position: int) -> tuple[Self, str]:
        """Returns the order of a run that a checkpoint's `params` describe up to a place, and this order from there on;
        and what changes there, in words. Orders that cannot change in the course of a run return themselves and "".
        """
        return self, ""

    def adopt(self, params: Mapping[str, Any]) -> Self:
        """Returns this order with the values of a checkpoint, `params`, for the fields that are "auto". Other fields
        keep their values, even if `params` has different ones.
        """
        saved = {key: value for key, value in params.items() if getattr(self, key, None) == "auto"}
        return dataclasses.replace(self, **saved)


class PicklesFields:
    """A dataclass that is pickled without its cached properties, which each process computes again."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """An order for one selection, with all sizes known."""

    settings: Order  # with every "auto" filled, as checkpoints record it
    rows: int  # number of rows of the selection, n
    seed: int  # seed of the run
    # What was looked up in the selection. No other field grows with n.
    tables: Tables = dataclasses.field(default_factory=dict, compare=False, repr=False)
    epoch_rows: int  # positions of an epoch; n, unless the order repeats rows. See `Epoch.epoch_rows`
    shard_rows: int  # the mean if shards differ in size
    lane_count: int = 1  # the rows of a step are arranged by lane, so that each rank gets contiguous lanes
    read_positions: int | None = None  # positions after which all lanes begin another window; None without windows
    needs_whole_windows: bool = False  # whether rows are shuffled inside windows, which are read whole then

    @property
    def name(self) -> str:
        """See `Order.name`."""
        return self.settings.name

    @property
    def repeats(self) -> bool:
        """See `Order.repeats`."""
        return self.settings.repeats

    @property
    def is_custom(self) -> bool:
        """Whether the order is not one of raylance's own, so that its rows must be checked."""
        return type(self.settings).__module__.partition(".")[0] != __name__.partition(".")[0]

    @property
    def alike_from(self) -> int:
        """The first epoch from which on all have `epoch_rows` positions."""
        return 0

    @property
    def known_from(self) -> tuple[int, int]:
        """The first epoch and position whose rows are selected now: (0, 0), unless rows have changed in the course of a
        run.
        """
        return self.settings.known_from

    def custom_parts(self) -> "list[Resolved]":
        """Returns the custom orders among this order and its components."""
        return [self] if self.is_custom else []

    @property
    def shard_count(self) -> int:
        """Number of shards; 0 for an order that repeats rows."""
        return 0 if self.repeats else -(-self.rows // self.shard_rows)

    def shards_of(self, rows: Int64Array) -> Int64Array:
        """Maps selected rows to shard IDs."""
        return rows // self.shard_rows

    @property
    def cost_names(self) -> tuple[str, ...]:
        """Names of the costs of a row, sorted: steps do not depend on the order of `cost=`. `COST` alone if that is not
        a dict; none without it.
        """
        return cost_names(self.tables)

    def costs(self, rows: Int64Array) -> Int32Array:
        """Returns the costs of selected rows, int32, of the shape of `rows` and one more axis: (…, costs)."""
        return np.stack([self.tables[cost_table(name)][rows] for name in self.cost_names], axis=-1)

    @property
    def buckets_by(self) -> str | None:
        """Name of the cost by which rows come together in buckets; None if they do not. Then rounds have
        `read_positions` positions, but for the last one, and `Epoch.round` says where their buckets begin.
        """
        return None

    def params(self) -> dict[str, Any]:
        """See `Order.params`."""
        return self.settings.params()

    def epoch(self, number: int) -> "Epoch":
        """Returns the epoch with this number, counted from 0."""
        return Epoch(self, number)


class Round(NamedTuple):
    """The buckets of a round, which are rows of similar cost, in the order of their positions.

    Attributes:
        starts: First position of each bucket, and the end of the round: int64, (buckets + 1,).
        lines: First line of each bucket: int64, (buckets,). Lines are numbered by ascending cost.
        highest: Highest cost in each bucket, of the costs that `Resolved.buckets_by` names: int64, (buckets,).
    """

    starts: Int64Array
    lines: Int64Array
    highest: Int64Array


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One epoch of a resolved order. Its `number` counts from 0."""

    order: Resolved
    number: int

    def key(self, *purpose: int | str) -> int:
        """Returns a 64-bit key for (seed, epoch, purpose), for use with `raylance.orders.permutation`."""
        return derive_key(self.order.seed, self.number, *purpose)

    def rows(self, positions: Int64Array) -> Int64Array:
        """Maps positions to selected rows; see `Order.rows_of`."""
        return self.order.settings.rows_of(self, positions)

    @property
    def epoch_rows(self) -> int:
        """Number of positions of this epoch: that of all epochs, unless the order changes in the course of a run."""
        return self.order.epoch_rows

    @property
    def known_from(self) -> int:
        """The first position whose row is selected now; see `Resolved.known_from`."""
        return 0

    def earlier(self, positions: Int64Array) -> "Iterator[tuple[Mapping[str, Any], BoolArray, Int64Array]]":
        """Yields, for each earlier segment of the run that has some positions before `known_from`: fields of a state
        that say which rows were selected in it, in a mixture with the number of the dataset under `COMPONENT`; which
        positions, bool, (n,); and the rows there, as they were numbered in it, int64.
        """
        yield from ()

    def round(self, number: int) -> Round:
        """Returns a round, counted from 0. Only orders with buckets have rounds."""
        raise NotImplementedError(f"{self.order.name} has no buckets")

    def completed_places(self, position: int) -> Int64Array | None:
        """Lists complete shards for a checkpoint, by their places in the epoch's sequence of shards.

        Returns:
            Half-open ranges [first, end) of places, ascending, int64, shape (k, 2). All listed shards are complete. If
            partly consumed windows have very many shards, some complete shards may be missing. None if the order does
            not complete shards in such a sequence. The cost does not grow with the number of rows.
        """
        return None

    def shard_ids(self, places: Int64Array) -> Int64Array:
        """Maps places in the epoch's sequence of shards to shard IDs."""
        return places

    def completed_shards(self, position: int) -> BoolArray:
        """Returns for each shard ID whether all its rows lie at positions [0, position); bool, shape (shard_count,).
        Goes through the rows from `position` on, until it has found one of every shard.
        """
        done = np.ones(self.order.shard_count, dtype=np.bool_)
        for block in blocks(position, self.epoch_rows):
            if not done.any():
                break
            done[self.order.shards_of(self.rows(block))] = False
        return done


def cost_table(name: str) -> str:
    """Returns the name of the table of a cost, which has an int32 for each selected row, (n,)."""
    return name if name == COST else f"{COST}.{name}"


def cost_names(tables: Tables) -> tuple[str, ...]:
    """Returns the names of the costs that have a table, sorted."""
    names = (name for name in tables if name == COST or name.startswith(f"{COST}."))
    return tuple(sorted(name.removeprefix(f"{COST}.") for name in names))


def costs_in_words(costs: Mapping[str, int | float]) -> str:
    """Returns numbers by the names of costs in words, as "65,536 tokens and 16,384 patches"; one cost has no name."""
    return " and ".join(f"{most:,.0f}{f' {name}' * (name != COST)}" for name, most in costs.items())


def join_tables(first: Tables, second: Tables) -> Tables:
    """Returns the arrays of both tables."""
    return ChainMap(first, second) if first and second else first or second  # type: ignore[arg-type]


def check_count(order: Order, field: str, *words: str, most: int = 1 << 40) -> None:
    """Raises ConfigError unless a field of an order is one of `words`, or an integer from 1 to `most`."""
    value = getattr(order, field)
    if value not in words and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
        allowed = " or ".join([*(f'"{word}"' for word in words), f"an integer of at least 1 and at most {most}"])
        raise ConfigError(f"{type(order).__name__}({field}={value!r}): must be {allowed}.")


def blocks(start: int, stop: int) -> Iterator[Int64Array]:
    """Yields [start, stop) as blocks of indices that double in size, so that a search that ends early costs little."""
    size = 1024
    while start < stop:
        yield np.arange(start, min(start + size, stop), dtype=np.int64)
        start, size = start + size, size * 2
