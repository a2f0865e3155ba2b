"""Reads a few samples on request, and decodes in the calling thread what lies in blocks."""

import numpy as np
import pyarrow as pa

from raylance.columns import ROW_OFFSET, UNNEEDED
from raylance.decode.block_decoding import BlockDecoding
from raylance.decode.block_rows import Block, BlockRows
from raylance.memory.lending import fresh_for, fresh_memory
from raylance.observe import Receipt
from raylance.orders.permutation import Int64Array
from raylance.samples.table import Located, SampleTable, unneeded_rows
from raylance.source.encoded_frames import MissingBytesError
from raylance.source.reader import RowReader
from raylance.source.sampling import gather_samples

_MARGINS = 0, 16, 1 << 40  # as the dispatcher has them


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
        table = reader.read(stored)
        return table if samples is None or located is None else gather_samples(
            table, stored, located, samples
        ), Receipt()
    names = list(blocks.names_by_column)
    for margin in _MARGINS:
        table = reader.widened(margin).read(stored)
        block = _with_unneeded(table.select([*names, ROW_OFFSET]), names, stored, samples, located)
        try:
            decoded, receipt = blocks.apply(block, lend=fresh_for)
            break
        except MissingBytesError:
            if margin == _MARGINS[-1]:
                raise
    table = table.drop_columns(names)
    if samples is not None and located is not None:
        table = gather_samples(table, stored, located, samples, by_index=names)
    else:
        for name in names:
            table = table.append_column(name, pa.array(np.arange(len(stored))))
    return BlockRows([Block(0, decoded)], blocks.names_by_column).fill_in(table, fresh_memory), receipt


def _with_unneeded(
    block: pa.Table, names: list[str], stored: Int64Array, samples: SampleTable | None, located: Located | None
) -> pa.Table:
    """Returns a block with the columns that say which rows no sample needs, see `UNNEEDED`."""
    if samples is not None and located is not None:
        for name, which in unneeded_rows(samples, stored, located, names).items():
            block = block.append_column(f"{UNNEEDED}{name}", pa.array(which))
    return block
