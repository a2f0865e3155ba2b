"""Checks that a table of samples keeps the promises that raylance relies on.

raylance.testing.check_samples(Neighbours(rows=1000), rows=1000)
"""

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from raylance.arguments import check_integer
from raylance.errors import ConfigError
from raylance.orders.permutation import Int64Array
from raylance.samples.table import SampleTable

_SAMPLES = 64


def check_samples(table: SampleTable, *, rows: int, seed: int = 0) -> None:
    """Checks a table of samples on a dataset of some rows.

    - The rows of a sample depend on its anchor alone: not on other samples, their order, or the process.
    - They are rows of the dataset, as many for each column as `columns` says; marks of padding have the same shape.
    - `stored`, `locate` and `find` agree with `rows` and `pads`, also for rows that were read for other samples.

    Args:
        table: The table.
        rows: Number of rows of the dataset, at least one.
        seed: Seed of the anchors to check.

    Raises:
        AssertionError: If a promise is broken; the message has the promise, the values, and the fix.
        ConfigError: If an argument has a wrong type.
    """
    if not isinstance(table, SampleTable):
        raise ConfigError(f"check_samples({table!r}): give an object of a subclass of raylance.SampleTable.")
    check_integer("check_samples(): rows", rows, 1)
    rng = np.random.default_rng(check_integer("check_samples(): seed", seed, 0))
    every = np.arange(rows)
    offsets = every[np.asarray(table.are_anchors(every), dtype=np.bool_)]
    assert len(offsets), f"are_anchors: none of {rows} rows is an anchor, so there is no sample. Return True for some."
    other = pickle.loads(pickle.dumps(table))
    assert other.fingerprint == table.fingerprint, (
        "fingerprint: another process has another one, so no run could resume. Compute it from the settings alone."
    )
    anchors = offsets[rng.integers(len(offsets), size=_SAMPLES)]
    by_one = [table.rows(np.array([anchor])) for anchor in anchors.tolist()]
    pads_by_one = [table.pads(np.array([anchor])) for anchor in anchors.tolist()]
    for which in (anchors, anchors[::-1], np.sort(anchors), anchors[:0]):
        _check_rows(other, which, rows)
    together, pads = other.rows(anchors), other.pads(anchors)
    for name in table.columns:
        for place, anchor in enumerate(anchors.tolist()):
            alone, among = by_one[place][name][0], together[name][place]
            assert np.array_equal(alone, among), (
                f"rows: the sample of row {anchor} has {alone.tolist()} in {name!r} by itself, and {among.tolist()} "
                "among others; batches would depend on the number of ranks. Compute rows from the anchor alone."
            )
    for name in pads:
        assert all(np.array_equal(pads_by_one[place][name][0], pads[name][place]) for place in range(_SAMPLES)), (
            f"pads: marks of padding in {name!r} depend on other samples. Compute them from the anchor alone."
        )
    _check_found(other, anchors, every)
    _check_found(other, anchors, np.asarray(other.stored(anchors)))


def _check_rows(table: SampleTable, anchors: Int64Array, rows: int) -> None:
    found, pads = table.rows(anchors), table.pads(anchors)
    assert list(found) == list(table.columns), f"rows: it has {list(found)}, columns has {list(table.columns)}."
    assert set(pads) <= set(found), f"pads: it has {list(pads)}, of which columns has only {list(table.columns)}."
    for name, count in table.columns.items():
        values = found[name]
        _check_array(f"rows: {name!r}", values, (len(anchors), count), np.int64)
        outside = values[(values < 0) | (values >= rows)]
        assert not len(outside), f"rows: {name!r} names row {outside[0]} of {rows}. Repeat a row that there is instead."
        if name in pads:
            _check_array(f"pads: {name!r}", pads[name], values.shape, np.bool_)


def _check_array(what: str, values: npt.NDArray[Any], shape: tuple[int, ...], dtype: type) -> None:
    assert (values.shape, values.dtype) == (shape, np.dtype(dtype)), (
        f"{what} is {values.dtype} {values.shape}; it must be {np.dtype(dtype)} {shape}, one row for each anchor."
    )


def _check_found(table: SampleTable, anchors: Int64Array, stored: Int64Array) -> None:
    assert (np.diff(stored) > 0).all(), f"stored: {stored[:9].tolist()}… is not strictly ascending. Use np.unique."
    located = table.locate(stored, anchors)
    found = table.find(stored, located)
    assert np.array_equal(stored[located.at], anchors), "locate: it finds other rows than the anchors."
    for name, wanted in table.rows(anchors).items():
        assert np.array_equal(stored[found.windows[name]], wanted), f"find: it gives other rows of {name!r} than rows."
    for name, is_pad in table.pads(anchors).items():
        assert np.array_equal(found.pads[name], is_pad), f"find: it marks other padding in {name!r} than pads."
