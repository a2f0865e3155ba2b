"""Orders that draw rows with replacement, by weight or by class.

A random number keyed by (seed, epoch, position) selects the row at a position from a table. So a run can resume at any
position, and the draws are the same for every world size. The tables are made when the dataset is opened. Checkpoints
store a fingerprint of the tables.
"""

import dataclasses
import hashlib
import numbers
from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from raylance.arguments import MOST_LISTED, check_name
from raylance.errors import ConfigError, filter_of_nulls
from raylance.orders.order import Auto, Column, Epoch, Facts, Order, Resolved, Rows, Tables, check_count
from raylance.orders.permutation import Int64Array, subkeys, uniform

Float64Array = npt.NDArray[np.float64]

_MAX_NUMBERS = 1 << 18  # random numbers that are drawn together: 2 MiB, which fits a CPU cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sampled(Order):
    """The base class of the orders below. `bind` sets the number of draws of an epoch, and the tables' fingerprint."""

    repeats: ClassVar[bool] = True
    scatters: ClassVar[bool] = True
    rows_per_epoch: int | Auto = "auto"
    fingerprint: str = "auto"

    def __post_init__(self) -> None:
        check_count(self, "shard_rows", "auto")
        check_count(self, "rows_per_epoch", "auto")

    def bind(self, rows: Rows) -> tuple[Self, Tables]:
        tables = self.look_up(rows)
        count = rows.count if self.rows_per_epoch == "auto" else self.rows_per_epoch
        return dataclasses.replace(self, rows_per_epoch=count, fingerprint=_digest(*tables.values())), tables

    def resolve(self, facts: Facts) -> Resolved:
        filled = self.adopt({"shard_rows": 1, "rows_per_epoch": facts.rows, "batch_rows": facts.global_batch_size})
        return dataclasses.replace(Order.resolve(filled, facts), epoch_rows=int(filled.rows_per_epoch))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weighted(_Sampled):
    """Draws rows with probability proportional to their weight, as PyTorch's `WeightedRandomSampler` does.

    Attributes:
        weights: Name of a column of weights, or one weight for each selected row, float, shape (n,).
        rows_per_epoch: Number of draws of an epoch; "auto" is n, the number of selected rows.
    """

    name: ClassVar[str] = "weighted"
    weights: str | Float64Array = dataclasses.field(compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.weights, str):
            check_name("Weighted: weights", self.weights)
        elif not _are_numbers(self.weights):
            raise ConfigError(
                f"Weighted(weights={self.weights!r}): give the name of a column of weights, or one number for each "
                "selected row."
            )

    def bind(self, rows: Rows) -> tuple[Self, Tables]:
        """See `Order.bind`. If `weights` is an array, the returned order has an empty array in its place, because the
        returned tables hold the weights.
        """
        settings, tables = super().bind(rows)
        if not isinstance(self.weights, str):
            settings = dataclasses.replace(settings, weights=np.zeros(0))
        return settings, tables

    def look_up(self, rows: Rows) -> Tables:
        """Returns the cumulative weights of the selected rows.

        Raises:
            ConfigError: If there is not one finite number for each selected row; if a weight is negative or all are 0.
        """
        if isinstance(self.weights, str):
            what, weights = f"column {self.weights!r}", _numbers(rows.column(self.weights), self.weights)
        else:
            what, weights = "the array", np.asarray(self.weights, dtype=np.float64)
        if weights.shape != (rows.count,):
            raise ConfigError(
                f"Weighted: {what} has shape {weights.shape}; the selection has {rows.count} rows. No row was drawn. "
                "Give one weight for each selected row."
            )
        bad = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
        if len(bad):
            raise ConfigError(
                f"Weighted: {what} has the weight {weights[bad[0]]} at selected row {bad[0]} ({len(bad)} such rows). "
                "It gives no probability. Use finite weights that are not negative; a row of weight 0 is never drawn."
            )
        cumulative = np.cumsum(_finite_sum(weights))
        if not cumulative[-1] > 0:
            raise ConfigError(
                f"Weighted: all weights of {what} are 0. No row could be drawn. Give some rows a positive weight."
            )
        return {"cumulative": cumulative}

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        """See `Order.rows_of`."""
        numbers = uniform(subkeys(epoch.key("weighted"), positions), 1)[:, 0]
        return _draw(epoch.order.tables["cumulative"], numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassBalanced(_Sampled):
    """Draws a class first, then one of its rows. So how often a class comes depends on its weight, not on its number of
    rows.

    Attributes:
        column: Column of class labels, integers or strings.
        classes_per_batch: Number of distinct classes in each block of `batch_rows` draws. These classes take turns.
            None draws the class of each row independently.
        batch_rows: Number of draws in a block; "auto" is the global batch size of the first iteration.
        class_weights: Weight by class label; None gives all classes the same weight. A class that is left out is never
            drawn.
        rows_per_epoch: Number of draws of an epoch; "auto" is n, the number of selected rows.
    """

    name: ClassVar[str] = "class_balanced"
    column: str
    classes_per_batch: int | None = None
    batch_rows: int | Auto = "auto"
    class_weights: Mapping[Any, float] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("ClassBalanced: column", self.column)
        weights = self.class_weights
        if weights is not None and not (
            isinstance(weights, Mapping) and all(isinstance(each, numbers.Real) for each in weights.values())
        ):
            raise ConfigError(f"ClassBalanced(class_weights={weights!r}): give a dict of label to weight, a number.")
        check_count(self, "batch_rows", "auto")
        if self.classes_per_batch is not None:
            check_count(self, "classes_per_batch")

    def look_up(self, rows: Rows) -> Tables:
        """Returns the rows sorted by class, the index at which each class ends, and the weights of the classes.

        Raises:
            ConfigError: If the column has nulls; if `class_weights` names a class without rows, or its weights are
                negative, not finite or all zero; or if fewer than `classes_per_batch` classes can be drawn.
        """
        labels = rows.column(self.column)
        if labels.nulls:
            raise ConfigError(
                f"ClassBalanced: column {self.column!r} has {labels.nulls} nulls, which belong to no class. They could "
                f"not be drawn. Leave them out: {filter_of_nulls(self.column)}."
            )
        codes, classes = labels.codes()
        weights = self._weights(classes)
        drawable = int((weights > 0).sum())
        if self.classes_per_batch is not None and self.classes_per_batch > drawable:
            raise ConfigError(
                f"ClassBalanced(classes_per_batch={self.classes_per_batch}): only {drawable} classes of "
                f"{self.column!r} can be drawn. A block could not be filled. Use classes_per_batch={drawable} or less."
            )
        # Classes are sorted by label, not by first appearance, so that the storage order does not change their draws.
        by_label = np.argsort(np.argsort(np.array([str(label) for label in classes])))
        codes, weights = by_label[codes], weights[np.argsort(by_label)]
        members = np.argsort(codes, kind="stable").astype(np.int64)
        ends = np.cumsum(np.bincount(codes), dtype=np.int64)
        return {"members": members, "member_ends": ends, "weights": weights}

    def _weights(self, classes: list[Any]) -> Float64Array:
        """Checks `class_weights`, and returns the weight of each class."""
        if self.class_weights is None:
            return np.ones(len(classes))
        empty = list(self.class_weights.keys() - set(classes))
        if empty:
            raise ConfigError(
                f"ClassBalanced: class_weights names {_some(empty)}, of which the selection has no row. They could not "
                f"be drawn. The classes of {self.column!r} are {_some(classes)}: use these, or check the filter."
            )
        weights = np.array([float(self.class_weights.get(label, 0)) for label in classes])
        wrong = {
            label: weight for label, weight in zip(classes, weights.tolist(), strict=True) if not 0 <= weight < np.inf
        }
        if wrong or not weights.any():
            raise ConfigError(
                f"ClassBalanced: class_weights gives {_some(wrong) if wrong else 'all classes the weight 0'}: this "
                "gives no probabilities. Use weights that are finite, not negative, and one of them positive."
            )
        return _finite_sum(weights)

    def rows_of(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        """See `Order.rows_of`."""
        members, member_ends = epoch.order.tables["members"], epoch.order.tables["member_ends"]
        numbers = uniform(subkeys(epoch.key("class_balanced"), positions), 2)  # (k, 2)
        classes = self._classes(epoch, positions, numbers[:, 0])
        counts = np.diff(member_ends, prepend=0)[classes]
        within = (numbers[:, 1] * counts).astype(np.int64)  # less than the count: numbers are at most 1 - 2**-53
        return np.asarray(members[member_ends[classes] - counts + within], dtype=np.int64)

    def _classes(self, epoch: Epoch, positions: Int64Array, numbers: Float64Array) -> Int64Array:
        weights, some = epoch.order.tables["weights"], self.classes_per_batch
        if some is None:
            return _draw(np.cumsum(weights), numbers)
        block, place = np.divmod(positions, int(self.batch_rows))
        blocks, where = np.unique(block, return_inverse=True)
        drawable = np.flatnonzero(weights > 0)
        keys = subkeys(epoch.key("classes"), blocks)
        together = max(1, _MAX_NUMBERS // len(weights))
        chosen = np.empty((len(blocks), some), dtype=np.int64)
        for low in range(0, len(keys), together):
            numbers = uniform(keys[low : low + together], len(weights))  # (blocks together, classes)
            chosen[low : low + together] = drawable[_first(numbers, weights, some)]
        return np.asarray(chosen[where, place % some])


def _first(numbers: Float64Array, weights: Float64Array, count: int) -> Int64Array:
    """Draws `count` classes by weight, without replacement, for each row of `numbers`.

    `numbers` are uniform in [0, 1), shape (samples, classes). They become exponential numbers whose rates are the
    weights. The classes with the smallest numbers are the sample (Efraimidis, Spirakis: "Weighted random sampling with
    a reservoir", 2006). Returns indices among the classes of positive weight, as drawn; shape (samples, count).
    """
    drawable = weights > 0
    times = -np.log1p(-numbers[:, drawable]) / weights[drawable]
    # Only the first `count` classes are sorted, because sorting many classes would take most of the time.
    first = np.argpartition(times, count - 1, axis=1)[:, :count]
    by_time = np.argsort(np.take_along_axis(times, first, axis=1), axis=1)
    return np.take_along_axis(first, by_time, axis=1)


def _draw(cumulative: Float64Array, numbers: Float64Array) -> Int64Array:
    """Returns for each number in [0, 1) the index that it draws from cumulative weights; never one of weight 0."""
    drawn = np.searchsorted(cumulative, numbers * cumulative[-1], side="right")
    return np.asarray(np.minimum(drawn, np.searchsorted(cumulative, cumulative[-1])), dtype=np.int64)


def _numbers(column: Column, name: str) -> Float64Array:
    values = column.values()
    if values.dtype.kind not in "iuf":
        raise ConfigError(
            f"Weighted: column {name!r} is {column.kind}, not a number. No row was drawn. Name a column of weights."
        )
    if column.nulls:
        raise ConfigError(
            f"Weighted: column {name!r} has {column.nulls} nulls instead of weights. These rows could not be drawn. "
            f"Leave them out ({filter_of_nulls(name)}), or give them a weight."
        )
    return values.astype(np.float64)


def _finite_sum(weights: Float64Array) -> Float64Array:
    """Returns weights in the same proportions whose sum is finite."""
    with np.errstate(over="ignore"):
        fits = np.isfinite(np.cumsum(weights)[-1])
    return weights if fits else weights / weights.max()


def _some(things: Collection[Any]) -> str:
    """Formats the first things in sorted order, and the number of the others, for an error message."""
    more = f" and {len(things) - MOST_LISTED:,} more" if len(things) > MOST_LISTED else ""
    return f"{sorted(things, key=str)[:MOST_LISTED]}{more}"


def _digest(*arrays: npt.NDArray[Any]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _are_numbers(given: object) -> bool:
    """Whether something can be converted to an array of numbers, (n,)."""
    try:
        return np.asarray(given, dtype=np.float64).ndim == 1
    except (TypeError, ValueError):
        return False
