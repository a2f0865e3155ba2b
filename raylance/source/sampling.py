"""Makes samples of several rows, or of ranges of their values, from stored rows that were read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.columns import ROW_OFFSET
from raylance.memory.arrow import ends_of, fixed_lists, one_array, take_ranges, take_rows
from raylance.memory.lending import Lend, fresh_memory
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.samples.table import IS_PAD, Described, Located, Ranges, SampleTable


def gather_samples(
    table: pa.Table,
    stored: Int64Array,
    located: Located,
    samples: SampleTable,
    lend: Lend = fresh_memory,
    by_index: Sequence[str] = (),
) -> pa.Table:
    """Returns n samples in the given order, in new memory.

    Args:
        table: Rows that were read.
        stored: Their offsets, int64, strictly ascending; all rows of the samples are among them.
        located: The anchors of the samples among these rows.
        samples: Of which rows samples are made.
        lend: Gives the memory of large values.
        by_index: Columns that are not in `table`.

    Returns:
        The columns of `table`; those of several rows as lists of one length. Those in `by_index` have the index of
        their row, or lists of the indices of their rows, int64. Then, for each of several rows, a column that says
        which of its rows are padding, if the table of samples tells. Samples of ranges have a list of one length in
        each column, and what `SampleTable.describe` makes of the ranges.
    """
    if located.ranges is not None:
        return _join(table, stored, located.anchors, located.ranges, samples)
    found, names = samples.find(stored, located), table.column_names
    windows = {name: found.windows[name] for name in names if name in found.windows}
    single = [name for name in names if name not in windows]
    columns = dict(zip(single, take_rows(table.select(single), located.at, lend).columns, strict=True))
    for name, indices in windows.items():
        values = one_array(take_rows(table.select([name]), indices.ravel(), lend).column(0))
        columns[name] = pa.FixedSizeListArray.from_arrays(values, indices.shape[1])
    named = {name: found.windows.get(name, located.at) for name in by_index}
    numbers = {
        name: pa.array(at) if at.ndim == 1 else pa.FixedSizeListArray.from_arrays(at.ravel(), at.shape[1])
        for name, at in named.items()
    }
    pads = {f"{name}{IS_PAD}": _flags(found.pads[name]) for name in (*names, *by_index) if name in found.pads}
    return pa.table({name: columns[name] for name in names} | numbers | pads)


def _join(table: pa.Table, stored: Int64Array, anchors: Int64Array, ranges: Ranges, samples: SampleTable) -> pa.Table:
    """Joins ranges of the lists of rows."""
    names = [name for name in table.column_names if name != ROW_OFFSET]
    padding, columns = ranges.length - ranges.values, dict[str, pa.Array]()
    is_last = np.zeros(len(ranges.at), dtype=np.bool_)
    is_last[ranges.firsts[1:][np.diff(ranges.firsts) > 0] - 1] = True
    for name in names:
        lists = one_array(table[name])
        ends = ends_of(lists).astype(np.int64)
        values: npt.NDArray[Any] = lists.values.to_numpy(zero_copy_only=False)
        begins, after = ends[ranges.at] + ranges.start, ranges.after if name == names[0] else None
        own = np.minimum(ranges.size, ends[ranges.at + 1] - begins)
        fills = ranges.size - own
        fills[is_last] += padding[np.diff(ranges.firsts) > 0]
        columns[name] = fixed_lists(_joined(values, begins, own, fills, ranges, after).reshape(-1, ranges.length))
    described = {name: _to_arrow(each) for name, each in samples.describe(stored, ranges).items()}
    return pa.table(columns | described | {ROW_OFFSET: pa.array(anchors)})


def _to_arrow(column: Described) -> pa.Array:
    if isinstance(column, tuple):
        values, firsts = column
        return pa.ListArray.from_arrays(firsts.astype(np.int32), values)
    return fixed_lists(column) if column.ndim == 2 else pa.array(column)


def _joined(
    values: npt.NDArray[Any],
    begins: Int64Array,
    own: Int64Array,
    fills: Int64Array,
    ranges: Ranges,
    after: Int64Array | None,
) -> npt.NDArray[Any]:
    """Joins the `own` values of each range, and fills in those that the rows do not have: `after` a row, else its last
    value once more, or 0 after an empty one; and padding.
    """
    count = ranges.samples * ranges.length
    joined = take_ranges(values, begins, own, fills) if len(values) else np.zeros(count, values.dtype)
    sample, place = ranges.sample, ranges.place
    short = np.flatnonzero(ranges.values < ranges.length)
    counts = ranges.length - ranges.values[short]
    begins_at = short * ranges.length + ranges.values[short] - (np.cumsum(counts) - counts)
    padded = np.repeat(begins_at, counts) + np.arange(int(counts.sum()))
    joined[padded] = 0 if after is None else np.repeat(ranges.padding[short], counts)
    ended = np.flatnonzero(own < ranges.size)
    places = sample[ended] * ranges.length + place[ended] + own[ended]
    if after is not None:
        joined[places] = after[sample[ended]]
    elif len(ended):
        last = begins[ended] + own[ended] - 1
        is_empty = ranges.start[ended] + own[ended] == 0
        joined[places] = np.where(is_empty, 0, values[np.maximum(last, 0)] if len(values) else 0)
    return joined


def _flags(values: BoolArray) -> pa.Array:
    bits = pa.py_buffer(np.packbits(values.ravel(), bitorder="little"))
    return pa.FixedSizeListArray.from_arrays(
        pa.Array.from_buffers(pa.bool_(), values.size, [None, bits]), values.shape[1]
    )
