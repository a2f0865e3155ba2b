"""Makes samples of several rows from stored rows that were read."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from raylance.memory.arrow import one_array, take_rows
from raylance.memory.lending import Lend, fresh_memory
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.samples.table import IS_PAD, Located, SampleTable


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
        which of its rows are padding, if the table of samples tells.
    """
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


def _flags(values: BoolArray) -> pa.Array:
    bits = pa.py_buffer(np.packbits(values.ravel(), bitorder="little"))
    return pa.FixedSizeListArray.from_arrays(
        pa.Array.from_buffers(pa.bool_(), values.size, [None, bits]), values.shape[1]
    )
