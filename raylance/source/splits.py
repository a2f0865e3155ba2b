"""Divides a selection into parts, such as training and validation.

Whether a row is in a part follows from its offset or from a value of the row, and from settings. So it is the same in
every process, and appended rows do not change it.
"""

import dataclasses
import datetime
import hashlib
import math
import numbers
from collections.abc import Mapping, Sequence

import numpy as np

from raylance.arguments import check_integer, check_name, is_between, is_pair
from raylance.errors import ConfigError, DatasetError, filter_of_nulls
from raylance.orders.permutation import BoolArray, Int64Array, derive_key, subkeys, uniform


@dataclasses.dataclass(frozen=True)
class FractionSplit:
    """A random part of the rows. Each row's value in `by` is hashed to [0, 1), and each part has an interval of hashes.

    Attributes:
        fractions: Size of each part by name; the sizes add up to 1. The intervals follow each other in the order of
            this dict.
        part: The selected part.
        by: Column of integers, strings or bytes whose values are hashed. Rows with equal values are in one part, and
            deletions and rewrites do not change the split. Each value is hashed by itself, so few values make uneven
            parts, which a warning names. Rows without a value are an error, because they would all be
            in one part. None hashes row offsets: then appended rows do not change the split, but deletions and rewrites
            do.
        seed: Seed of the split, independent of the order's seed.
    """

    fractions: Mapping[str, float]
    part: str
    _: dataclasses.KW_ONLY
    by: str | None = None
    seed: int = 0

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

    @property
    def columns(self) -> list[str]:
        """Columns that `keep` needs: `by`, or none."""
        return [] if self.by is None else [self.by]

    def keep(self, offsets: Int64Array, values: Sequence[object] | None) -> BoolArray:
        """Returns which rows are in the part.

        Args:
            offsets: Row offsets, int64, shape (k,).
            values: The values of these rows in the column that `columns` names, k of them. None if `columns` is empty.

        Returns:
            bool, shape (k,).

        Raises:
            DatasetError: If a value is null.
        """
        nulls = sum(value is None for value in values or ())
        if nulls:
            raise DatasetError(
                f"FractionSplit(by={self.by!r}): {nulls} of the rows with offsets between {offsets[0]} and "
                f"{offsets[-1]} have no value there, and would all be in one part; nothing was started. Leave them "
                f"out ({filter_of_nulls(str(self.by))}), split by another column, or give them a value."
            )
        ids = offsets if values is None else np.array([_hash(value) for value in values], dtype=np.int64)
        place = uniform(subkeys(derive_key(self.seed, "split"), ids), 1)[:, 0]
        names = list(self.fractions)
        edges = np.cumsum([0.0, *self.fractions.values()])
        edges[-1] = 1.0
        index = names.index(self.part)
        return np.asarray((place >= edges[index]) & (place < edges[index + 1]))


@dataclasses.dataclass(frozen=True)
class RangeSplit:
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
class ValueSplit:
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


Split = FractionSplit | RangeSplit | ValueSplit


def _hash(value: object) -> int:
    """Returns a 63-bit hash of a key value that is the same in every process, unlike Python's own hash."""
    data = b"b" + value if isinstance(value, bytes) else f"{type(value).__name__[0]}{value}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
