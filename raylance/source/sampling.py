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
from raylance.samples.packs import PIECE_IMAGES
from raylance.samples.table import IS_PAD, Described, Located, Ranges, SampleTable, range_numbers


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
    """Joins ranges of the lists of rows, which are of one length in all columns. The first column has the values that
    `Ranges` says after rows, and as padding; others have a row's last value once more, 0 after an empty one, and 0.
    """
    ids, *others = (name for name in table.column_names if name != ROW_OFFSET)
    read = {name: one_array(table[name]) for name in (ids, *others)}
    lists = {name: column for name, column in read.items() if pa.types.is_primitive(column.type.value_type)}
    own = np.minimum(ranges.size, np.diff(ends_of(lists[ids]).astype(np.int64))[ranges.at] - ranges.start)
    fills, padding = ranges.size - own, ranges.length - ranges.values
    ended, short = np.flatnonzero(fills), np.flatnonzero(padding)
    fills[ranges.firsts[1:][short] - 1] += padding[short]
    sample, padded = ranges.sample[ended], range_numbers((short + 1) * ranges.length - padding[short], padding[short])
    after = sample * ranges.length + (ranges.place + own)[ended]
    columns = dict[str, pa.Array]()
    for name, column in lists.items():
        values: npt.NDArray[Any] = column.values.to_numpy(zero_copy_only=False)
        begins = ends_of(column).astype(np.int64)[ranges.at] + ranges.start
        made = np.zeros(ranges.samples * ranges.length, values.dtype)
        if len(values):
            made = take_ranges(values, begins, own, fills)
        if name == ids:
            made[padded], made[after] = np.repeat(ranges.padding[short], padding[short]), ranges.after[sample]
        else:
            is_empty = (ranges.start + own)[ended] == 0
            lasts = np.maximum(begins + own - 1, 0)[ended]
            made[padded], made[after] = 0, np.where(is_empty, 0, values[lasts]) if len(values) else 0
        columns[name] = fixed_lists(made.reshape(-1, ranges.length))
    for name in read.keys() - lists.keys():
        columns |= {name: _join_whole(read[name], ranges), PIECE_IMAGES: _count_whole(read[name], ranges)}
    described = {name: _to_arrow(each) for name, each in samples.describe(stored, ranges).items()}
    return pa.table(columns | described | {ROW_OFFSET: pa.array(anchors)})


def _join_whole(column: pa.Array, ranges: Ranges) -> pa.Array:
    """Joins lists of any length, each of which comes with the first range of its row."""
    ends, sizes = column.offsets.to_numpy().astype(np.int64), _sizes_whole(column, ranges)
    values = take_rows(pa.table({"": column.values}), range_numbers(ends[:-1][ranges.at], sizes)).column(0)
    firsts = np.append(0, np.cumsum(sizes))[ranges.firsts]
    return pa.ListArray.from_arrays(firsts.astype(np.int32), one_array(values))


def _count_whole(column: pa.Array, ranges: Ranges) -> pa.Array:
    """Returns for each sample the number of values that `_join_whole` gives to each of its ranges, lists of int32."""
    return pa.ListArray.from_arrays(ranges.firsts.astype(np.int32), _sizes_whole(column, ranges).astype(np.int32))


def _sizes_whole(column: pa.Array, ranges: Ranges) -> Int64Array:
    sizes = np.diff(column.offsets.to_numpy().astype(np.int64))[ranges.at]
    return np.where(ranges.start == 0, sizes, 0)


def _to_arrow(column: Described) -> pa.Array:
    if isinstance(column, tuple):
        values, firsts = column
        return pa.ListArray.from_arrays(firsts.astype(np.int32), values)
    return fixed_lists(column) if column.ndim == 2 else pa.array(column)


def _flags(values: BoolArray) -> pa.Array:
    bits = pa.py_buffer(np.packbits(values.ravel(), bitorder="little"))
    return pa.FixedSizeListArray.from_arrays(
        pa.Array.from_buffers(pa.bool_(), values.size, [None, bits]), values.shape[1]
    )
