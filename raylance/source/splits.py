"""Divides a selection into parts, such as training and validation.

Whether a row is in a part follows from its offset or from a value of the row, and from settings. So it is the same in
every process, and appended rows do not change it.
"""

import dataclasses
import datetime
import functools
import hashlib
import math
import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raylance.arguments import check_integer, check_name, is_between, is_pair
from raylance.descriptions import ORDERED, Setting
from raylance.errors import ConfigError, DatasetError, filter_of_nulls
from raylance.orders.permutation import BoolArray, Int64Array, derive_key, subkeys, uniform


@dataclasses.dataclass(frozen=True)
class FractionSplit(Setting):
    """A random part of the rows. Each row's value in `by` is hashed to [0, 1), and each part has an interval of hashes.

    Attributes:
        fractions: Size of each part by name; the sizes add up to 1. The intervals follow each other in the order of
            this dict.
        part: The selected part.
        by: Column of integers, strings or bytes whose values are hashed. Rows with equal values are in one part, and
            deletions and rewrites do not change the split. Each value is hashed by itself, so few values make uneven
            parts, which a warning names; `values` makes them exact. Rows without a value are an error, because they
            would all be in one part. None hashes row offsets: then appended rows do not change the split, but deletions
            and rewrites do.
        seed: Seed of the split, independent of the order's seed.
        values: All values of `by`, such as `range(20)` for 20 episodes. Then the parts have exactly their fractions of
            these values, rounded; with another list, values change their part. Rows with another value are an error.
    """

    fractions: Mapping[str, float] = dataclasses.field(metadata=ORDERED)
    part: str
    _: dataclasses.KW_ONLY
    by: str | None = None
    seed: int = 0
    values: Collection[int | str | bytes] | None = None

    def __post_init__(self) -> None:
        sizes = list(self.fractions.values()) if isinstance(self.fractions, Mapping) else [None]
        if not all(is_between(size, -math.inf, math.inf) for size in sizes):
            raise ConfigError(f"FractionSplit(fractions={self.fractions!r}): give the size of each part by its name.")
        check_integer("FractionSplit: seed", self.seed, None)
        if self.by is not None:
            check_name("FractionSplit: by", self.by)
        if not sizes or min(sizes) < 0 or abs(sum(sizes) - 1) > 1e-9:
            raise ConfigError(
                f"FractionSplit(fractions={dict(self.fractions)}): they add up to {sum(sizes):g}. They must not be "
                "negative and must add up to 1, or some rows would be in no part."
            )
        if not isinstance(self.part, str) or self.part not in self.fractions:
            raise ConfigError(
                f"FractionSplit(part={self.part!r}): the parts are {', '.join(map(repr, self.fractions))}."
            )
        if self.values is not None:
            object.__setattr__(self, "values", self._checked_values(self.values))

    def __repr__(self) -> str:
        fields = (field.name for field in dataclasses.fields(self) if field.name != "values" or self.values is not None)
        return f"FractionSplit({', '.join(f'{name}={getattr(self, name)!r}' for name in fields)})"

    def _checked_values(self, values: Any) -> tuple[int | str | bytes, ...]:
        if self.by is None:
            raise ConfigError(f"FractionSplit(values={values!r}): they are those of by=; name the column.")
        if isinstance(values, str | bytes) or not isinstance(values, Collection):
            raise ConfigError(f"FractionSplit(values={values!r}): give a list of all values of {self.by!r}.")
        if other := [value for value in values if not isinstance(value, int | np.integer | str | bytes)]:
            raise ConfigError(f"FractionSplit(values=…): {other[0]!r} is not an integer, a string or bytes.")
        if len(values) != len({*values}):
            raise ConfigError(f"FractionSplit(values=…): {len(values) - len({*values})} come twice; name each once.")
        return tuple(sorted(map(_plain, values), key=lambda value: (type(value).__name__, value)))

    @property
    def columns(self) -> list[str]:
        """Columns that `keep` needs: `by`, or none."""
        return [] if self.by is None else [self.by]

    @functools.cached_property
    def _is_kept(self) -> dict[object, bool]:
        """Whether each of `values` is in the part."""
        values = list(self.values or ())
        ranks = np.argsort(np.argsort(self._place(_hashes(values)), kind="stable"), kind="stable")
        low, high = (round(edge * len(values), 6) for edge in self._edges)
        return dict(zip(values, ((ranks >= round(low)) & (ranks < round(high))).tolist(), strict=True))

    @property
    def _edges(self) -> tuple[float, float]:
        """The interval of the part in [0, 1)."""
        edges = np.cumsum([0.0, *self.fractions.values()]).tolist()
        edges[-1] = 1.0
        index = list(self.fractions).index(self.part)
        return edges[index], edges[index + 1]

    def _place(self, ids: Int64Array) -> npt.NDArray[np.float64]:
        return uniform(subkeys(derive_key(self.seed, "split"), ids), 1)[:, 0]

    def keep(self, offsets: Int64Array, values: Sequence[object] | None) -> BoolArray:
        """Returns which rows are in the part.

        Args:
            offsets: Row offsets, int64, shape (k,).
            values: The values of these rows in the column that `columns` names, k of them. None if `columns` is empty.

        Returns:
            bool, shape (k,).

        Raises:
            DatasetError: If a value is null, or is not one of `values`.
        """
        nulls = sum(value is None for value in values or ())
        if nulls:
            raise DatasetError(
                f"FractionSplit(by={self.by!r}): {nulls} of the rows with offsets between {offsets[0]} and "
                f"{offsets[-1]} have no value there, and would all be in one part; nothing was started. Leave them "
                f"out ({filter_of_nulls(str(self.by))}), split by another column, or give them a value."
            )
        if self.values is not None:
            if other := [value for value in values or () if value not in self._is_kept]:
                raise DatasetError(
                    f"FractionSplit(by={self.by!r}, values=…): a row has {other[0]!r}, which is none of the "
                    f"{len(self.values)} values, and would be in no part; nothing was started. Give all values, or "
                    "leave such rows out by filter=."
                )
            return np.array([self._is_kept[value] for value in values or ()], dtype=np.bool_)
        place = self._place(offsets if values is None else _hashes(values))
        low, high = self._edges
        return np.asarray((place >= low) & (place < high))


@dataclasses.dataclass(frozen=True)
class RangeSplit(Setting):
    """The rows whose offsets lie in given ranges, like the masks of the library annbatch.

    Attributes:
        ranges: Half-open ranges [start, stop) of row offsets.
    """

    ranges: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        given = self.ranges if isinstance(self.ranges, Sequence) else ()
        if not given or not all(is_pair(each) and 0 <= each[0] < each[1] for each in given):
            raise ConfigError(
                f"RangeSplit({self.ranges!r}): give half-open ranges (start, stop) with 0 <= start < stop."
            )
        object.__setattr__(self, "ranges", tuple(tuple(map(_plain, each)) for each in given))

    @property
    def columns(self) -> list[str]:
        """Columns that `keep` needs: none."""
        return []

    def keep(self, offsets: Int64Array, values: Sequence[object] | None) -> BoolArray:
        """See `FractionSplit.keep`."""
        kept = np.zeros(len(offsets), dtype=np.bool_)
        for start, stop in self.ranges:
            kept |= (offsets >= start) & (offsets < stop)
        return kept


@dataclasses.dataclass(frozen=True)
class ValueSplit(Setting):
    """The rows that have a given value in a column, for datasets with a column that says to which split a row belongs.

    Attributes:
        column: The column.
        value: Value of the rows to keep, a string or an integer.
    """

    column: str
    value: str | int

    def __post_init__(self) -> None:
        check_name("ValueSplit: column", self.column)
        if not isinstance(self.value, str | bytes | numbers.Number | np.generic | datetime.date | None):
            raise ConfigError(f"ValueSplit({self.column!r}, value={self.value!r}): give a string or an integer.")

    @property
    def columns(self) -> list[str]:
        """Columns that `keep` needs: `column`."""
        return [self.column]

    def keep(self, offsets: Int64Array, values: Sequence[object] | None) -> BoolArray:
        """See `FractionSplit.keep`."""
        return np.array([value == self.value for value in values or ()], dtype=np.bool_)


def _plain(value: Any) -> Any:
    """Returns Python's own number for one of NumPy's."""
    return value.item() if isinstance(value, np.generic) else value


Split = FractionSplit | RangeSplit | ValueSplit


def _hashes(values: Sequence[object]) -> Int64Array:
    return np.array([_hash(value) for value in values], dtype=np.int64)


def _hash(value: object) -> int:
    """Returns a 63-bit hash of a key value that is the same in every process, unlike Python's own hash."""
    data = b"b" + value if isinstance(value, bytes) else f"{type(value).__name__[0]}{value}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
