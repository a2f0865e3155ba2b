"""Reads a few samples on request, and decodes in the calling thread what lies in blocks."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from raylance.columns import ROW_OFFSET
from raylance.decode.block_decoding import BlockDecoding, Decoded, with_unneeded
from raylance.decode.block_rows import BlockRows, LoadedRows
from raylance.memory.lending import fresh_for, fresh_memory
from raylance.observe import Receipt
from raylance.orders.permutation import Int64Array
from raylance.samples.table import Located, SampleTable, unneeded_rows
from raylance.source.encoded_frames import with_more_bytes
from raylance.source.reader import RowReader
from raylance.source.sampling import gather_samples


def read_samples(
    reader: RowReader, samples: SampleTable | None, anchors: Int64Array, blocks: BlockDecoding | None = None
) -> tuple[pa.Table, Receipt]:
    """Reads samples by the row offsets of their anchors, strictly ascending; see `RowReader.read_into`. With None, each
    sample is its anchor. With `blocks`, decodes their columns; then the table has `_valid`, too. The receipt is that of
    decoding.

    Raises:
        DatasetError: If rows cannot be read.
        BadRowError: If a row is bad, unless bad rows are masked.
    """
    stored, located = (anchors, None) if samples is None else samples.resolve(anchors)
    if blocks is None:
        return _gather(reader.read(stored), stored, samples, located, ()), Receipt()
    names = list(blocks.names_by_column)
    unneeded = {} if samples is None or located is None else unneeded_rows(samples, stored, located, names)

    def decode(margin: int) -> tuple[pa.Table, Decoded]:
        table = reader.widened(margin).read(stored)
        block = with_unneeded(table.select([*names, ROW_OFFSET]), unneeded)
        return table.drop_columns(names), blocks.apply(block, lend=fresh_for)

    table, (decoded, receipt) = with_more_bytes(decode)
    found = _gather(table, stored, samples, located, names)
    return BlockRows([LoadedRows(0, decoded)], blocks.names_by_column).fill_in(found, fresh_memory), receipt


def _gather(
    table: pa.Table, stored: Int64Array, samples: SampleTable | None, located: Located | None, by_index: Sequence[str]
) -> pa.Table:
    """Returns samples of rows; in the columns `by_index`, the numbers of the rows."""
    if samples is not None and located is not None:
        return gather_samples(table, stored, located, samples, by_index=by_index)
    for name in by_index:
        table = table.append_column(name, pa.array(np.arange(len(stored))))
    return table
