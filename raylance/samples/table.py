"""The table of samples: the stored rows that make up each sample."""

import abc
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from raylance.orders.permutation import BoolArray, Int64Array

IS_PAD = "_is_pad"
"""Suffix of the columns that say which rows of a sample stand in place of rows that there are not."""


class Located(NamedTuple):
    """Where the anchors of n samples are among stored rows that were read.

    Attributes:
        anchors: Their row offsets, int64, (n,).
        at: Their indices among the stored rows, int64, (n,).
        facts: The result of `SampleTable.look_up` for them, int64, (n, `SampleTable.facts`).
    """

    anchors: Int64Array
    at: Int64Array
    facts: Int64Array

    def part(self, which: Any) -> "Located":
        """Returns some of them, by any index of NumPy."""
        return Located(*(each[which] for each in self))


class Found(NamedTuple):
    """The rows of n samples among stored rows that were read.

    Attributes:
        windows: For each column of several rows, the indices of these rows, int64, (n, k).
        pads: For some of these columns, which rows are padding, bool, (n, k).
    """

    windows: dict[str, Int64Array]
    pads: dict[str, BoolArray]


class SampleTable(abc.ABC):
    """Says of which stored rows each sample is made. Pass an object of a subclass to `raylance.dataset` as `windows`.

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

    def are_anchors(self, offsets: Int64Array) -> BoolArray:
        """Returns which of these rows, strictly ascending, may be anchors: bool, (n,)."""
        return np.ones(len(offsets), dtype=np.bool_)

    @property
    def are_all_anchors(self) -> bool:
        """Whether it is known that each row may be an anchor, so that `are_anchors` need not be asked."""
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
