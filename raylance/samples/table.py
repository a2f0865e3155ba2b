"""The table of samples: the stored rows, or the ranges of values in them, that make up each sample."""

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from raylance.orders.permutation import BoolArray, Int64Array

IS_PAD = "_is_pad"
"""Suffix of the columns that say which rows of a sample stand in place of rows that there are not."""


def range_numbers(starts: Int64Array, sizes: Int64Array) -> Int64Array:
    """Returns the numbers of all ranges [start, start + size), one range after another."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))


class Ranges(NamedTuple):
    """Ranges of values of stored rows, each row a list. Samples are made of them, one range after another.

    Attributes:
        length: Number of values of each sample. After its ranges comes padding.
        firsts: The first range of each of n samples, and the number of ranges, int64, (n + 1,).
        at: Index of the stored row of each range, int64, (ranges,).
        start: Its first value in that row, int64, (ranges,).
        size: Number of its values, int64, (ranges,): one more than the row has left if `after` follows the row.
        after: For each sample, the value after a row in the first of its columns, int64, (n,).
        padding: The same for padding.
    """

    length: int
    firsts: Int64Array
    at: Int64Array
    start: Int64Array
    size: Int64Array
    after: Int64Array
    padding: Int64Array

    @classmethod
    def of(cls, parts: Sequence["Ranges"]) -> "Ranges":
        """Joins the ranges of samples of one length."""
        ends = np.cumsum([0, *(len(part.at) for part in parts)])
        firsts = [part.firsts[:-1] + end for part, end in zip(parts, ends.tolist(), strict=False)]
        joined = (np.concatenate(each) for each in zip(*(part[2:] for part in parts), strict=True))
        return cls(parts[0].length, np.append(np.concatenate(firsts), ends[-1]), *joined)

    def part(self, low: int, high: int) -> "Ranges":
        """Returns the ranges of samples [low, high)."""
        firsts, samples = self.firsts[low : high + 1], slice(low, high)
        own = slice(int(firsts[0]), int(firsts[-1]))
        return self._replace(
            firsts=firsts - firsts[0],
            at=self.at[own],
            start=self.start[own],
            size=self.size[own],
            after=self.after[samples],
            padding=self.padding[samples],
        )

    def take(self, samples: Int64Array) -> "Ranges":
        """Returns the ranges of samples in any order, which may repeat."""
        counts = np.diff(self.firsts)[samples]
        own = range_numbers(self.firsts[samples], counts)
        return self._replace(
            firsts=np.append(0, np.cumsum(counts)),
            at=self.at[own],
            start=self.start[own],
            size=self.size[own],
            after=self.after[samples],
            padding=self.padding[samples],
        )

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.firsts) - 1

    @property
    def sample(self) -> Int64Array:
        """The number of the sample of each range, int64, (ranges,)."""
        return np.repeat(np.arange(self.samples), np.diff(self.firsts))

    @property
    def ends(self) -> Int64Array:
        """Number of values up to the end of each range, int64, (ranges,)."""
        ends: Int64Array = np.cumsum(self.size, dtype=np.int64)
        return ends

    @property
    def values(self) -> Int64Array:
        """Number of values of each sample without padding, int64, (n,)."""
        ends: Int64Array = np.append(0, self.ends)[self.firsts]
        return ends[1:] - ends[:-1]

    @property
    def place(self) -> Int64Array:
        """The place of the first value of each range in its sample, int64, (ranges,)."""
        begins: Int64Array = np.append(0, self.ends)
        return begins[:-1] - np.repeat(begins[self.firsts[:-1]], np.diff(self.firsts))


Described = npt.NDArray[Any] | tuple[npt.NDArray[Any], Int64Array]
"""A column of n samples: (n,) or (n, k); or the values of lists, and the first of each list and their number, (n + 1,).
"""


class Located(NamedTuple):
    """Where the anchors of n samples are among stored rows that were read.

    Attributes:
        anchors: Their row offsets, int64, (n,).
        at: Their indices among the stored rows, int64, (n,).
        facts: The result of `SampleTable.look_up` for them, int64, (n, `SampleTable.facts`).
        ranges: The ranges of which the samples are made; None if they are made of whole rows.
    """

    anchors: Int64Array
    at: Int64Array
    facts: Int64Array
    ranges: Ranges | None = None

    def part(self, low: int, high: int) -> "Located":
        """Returns those with the numbers [low, high)."""
        ranges, own = self.ranges, slice(low, high)
        return Located(
            self.anchors[own], self.at[own], self.facts[own], None if ranges is None else ranges.part(low, high)
        )


class Found(NamedTuple):
    """The rows of n samples among stored rows that were read.

    Attributes:
        windows: For each column of several rows, the indices of these rows, int64, (n, k).
        pads: For some of these columns, which rows are padding, bool, (n, k).
    """

    windows: dict[str, Int64Array]
    pads: dict[str, BoolArray]


class SampleTable(abc.ABC):
    """Says of which stored rows each sample is made. Pass an object of a subclass to `raylance.dataset` as `samples`.

    A sample is named by its anchor, a selected row. Columns in `columns` come from k rows, and have k values in each
    sample, (n, k, …) in batches; all others come from the anchor. Rows are named by their row offsets in the pinned
    version, as batches carry them under `_rowoffset`.

    An object must be picklable, and answer the same in each process; it uses NumPy alone. `raylance.testing`
    checks it. A subclass has at least `columns`, `fingerprint` and `rows`.
    """

    facts: ClassVar[int] = 0
    """Number of integers that `look_up` gives for each anchor."""

    def __str__(self) -> str:
        """The text by which checkpoints name the samples."""
        return type(self).__qualname__

    @property
    @abc.abstractmethod
    def columns(self) -> Mapping[str, int]:
        """For each column of several rows, the number of these rows, k."""

    @property
    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Hash of all that decides which rows samples have; a run that resumes compares it."""

    @abc.abstractmethod
    def rows(self, anchors: Int64Array) -> Mapping[str, Int64Array]:
        """Returns the rows of samples.

        Args:
            anchors: Row offsets, int64, (n,), in any order; they may repeat.

        Returns:
            For each column in `columns`, the offsets of its rows, int64, (n, k).
        """

    def pads(self, anchors: Int64Array) -> Mapping[str, BoolArray]:
        """Returns which rows of samples are padding, for some or all columns: bool, (n, k). Batches have them as
        `<column>_is_pad`. The columns are the same for all anchors, also for none.
        """
        return {}

    def of_epoch(self, epoch: int) -> "SampleTable":
        """Returns the samples of an epoch, if they are other ones in each."""
        return self

    def resolve(self, anchors: Int64Array) -> tuple[Int64Array, Located]:
        """Returns `stored` of anchors in any order, and where these are among them."""
        stored = self.stored(anchors)
        return stored, self.locate(stored, anchors)

    def describe(self, stored: Int64Array, ranges: Ranges) -> dict[str, Described]:
        """Returns the columns that follow from the ranges of n samples."""
        return {}

    def are_anchors(self, offsets: Int64Array) -> BoolArray:
        """Returns which of these rows, strictly ascending, may be anchors: bool, (n,)."""
        return np.ones(len(offsets), dtype=np.bool_)

    @property
    def are_all_anchors(self) -> bool:
        """Whether it is known that each row may be an anchor, so that `are_anchors` need not be asked."""
        return False

    @property
    def knows_selected_alone(self) -> bool:
        """Whether other rows than the selected anchors must not be asked for."""
        return False

    def anchor_runs(self, selected: int) -> tuple[Int64Array, Int64Array] | None:
        """Returns the first offset and the length of each run of anchors, int64, (runs,), if the `selected` rows are
        all of the dataset and the runs are known; else None.
        """
        return None

    def stored(self, anchors: Int64Array) -> Int64Array:
        """Returns the offsets of all rows of which samples are made, their anchors included: int64, strictly ascending.

        Raises:
            IndexError: If an anchor is negative.
        """
        return np.unique(np.concatenate([anchors, *(each.ravel() for each in self.rows(anchors).values())]))

    def look_up(self, anchors: Int64Array) -> Int64Array:
        """Returns the facts of anchors, ascending, that `find` needs: int64, (n, `facts`). They are looked up once."""
        return np.empty((len(anchors), self.facts), dtype=np.int64)

    def locate(self, stored: Int64Array, anchors: Int64Array) -> Located:
        """Finds anchors, in any order, among rows with the offsets `stored`, int64, strictly ascending."""
        order = np.argsort(anchors)  # searching for ascending numbers is several times as fast
        at, facts = np.empty_like(anchors), np.empty((len(anchors), self.facts), dtype=np.int64)
        at[order], facts[order] = np.searchsorted(stored, anchors[order]), self.look_up(anchors[order])
        return Located(anchors, at, facts)

    def find(self, stored: Int64Array, located: Located) -> Found:
        """Finds the rows of samples among rows with the offsets `stored`, which have them all."""
        rows = self.rows(located.anchors)
        windows = {name: np.searchsorted(stored, each) for name, each in rows.items()}
        return Found(windows, dict(self.pads(located.anchors)))


def unneeded_rows(
    samples: SampleTable, stored: Int64Array, located: Located, columns: Iterable[str]
) -> dict[str, BoolArray]:
    """Returns which of the rows with the offsets `stored` no sample needs in some columns: bool, (rows,). Columns of
    which all rows are needed are left out.
    """
    windows, found = samples.find(stored, located).windows, dict[str, BoolArray]()
    for name in columns:
        is_unneeded = np.ones(len(stored), dtype=np.bool_)
        is_unneeded[windows[name].ravel() if name in windows else located.at] = False
        if is_unneeded.any():
            found[name] = is_unneeded
    return found


class ResolvingTable(SampleTable):
    """A table whose `stored` and `locate` follow from `resolve`."""

    @abc.abstractmethod
    def resolve(self, anchors: Int64Array) -> tuple[Int64Array, Located]:
        """See `SampleTable.resolve`."""

    def stored(self, anchors: Int64Array) -> Int64Array:
        """See `SampleTable.stored`."""
        return self.resolve(anchors)[0]

    def locate(self, stored: Int64Array, anchors: Int64Array) -> Located:
        """See `SampleTable.locate`."""
        own, located = self.resolve(anchors)
        index, ranges = np.searchsorted(stored, own), located.ranges
        if ranges is not None:
            return located._replace(ranges=ranges._replace(at=index[ranges.at]))
        return located._replace(at=index[located.at])


class FindingTable(SampleTable):
    """A table whose `stored` and `find` are faster than by `rows`, so that `rows` and `pads` follow from them."""

    def rows(self, anchors: Int64Array) -> dict[str, Int64Array]:
        """See `SampleTable.rows`."""
        stored = self.stored(anchors)
        return {name: stored[at] for name, at in self.find(stored, self.locate(stored, anchors)).windows.items()}

    def pads(self, anchors: Int64Array) -> dict[str, BoolArray]:
        """See `SampleTable.pads`."""
        stored = self.stored(anchors)
        return self.find(stored, self.locate(stored, anchors)).pads
