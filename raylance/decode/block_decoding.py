"""Decodes values that several samples share, so that each is decoded once for all of them."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from raylance.columns import ROW_OFFSET, UNNEEDED
from raylance.decode.decoding import DecodeClock, DecodedRows, Decoding
from raylance.decode.open_decoding import OpenDecoding, open_columns, open_here
from raylance.decode.video_frames import FrameColumn
from raylance.errors import HelperError
from raylance.memory.arrow import with_nulls
from raylance.memory.lending import LendFor
from raylance.observe import Receipt
from raylance.orders.permutation import BoolArray

Decoded = tuple[pa.Table, Receipt]


class BlockDecoding:
    """Decodes blocks of stored rows; keeps output memory between calls, and the open decoders of each thread."""

    def __init__(self, decoding: Decoding) -> None:
        """Takes `Decoding.of_blocks`."""
        self._decoding, self._columns = decoding, open_columns(decoding.decoders)
        self._frames = [FrameColumn(each) for each in decoding.frames]

    @property
    def names_by_column(self) -> Mapping[str, Sequence[str]]:
        """See `Decoding.names_by_column`."""
        return self._decoding.names_by_column

    def apply(
        self,
        block: pa.Table,
        executor: Executor | None = None,
        *,
        low: int = 0,
        high: int | None = None,
        lend: LendFor | None = None,
        given_up: str = "",
        known_bad: Mapping[int, str] = MappingProxyType({}),
    ) -> Decoded:
        """Decodes stored rows [low, high) of a block, in the threads of `executor`, or in this one.

        Args:
            block: The rows: encoded columns, `_rowoffset`, and for some of the columns which rows no sample needs, see
                `UNNEEDED`.
            executor: See above.
            low: See above.
            high: See above; None for all rows from `low` on.
            lend: Gives the memory of decoded columns. Without it, the next call overwrites the result, so copy it
                before (sending it through Ray copies it).
            given_up: If it gives a reason, the rows count as bad and are not decoded, because an attempt to decode them
                has ended a process.
            known_bad: The same for some rows, by their offsets, with the reasons.

        Returns:
            The decoded columns. A value is null if it is bad, or if no sample needs it.

        Raises:
            BadRowError: If a row is bad, unless bad rows are masked.
            ConfigError: If a good row does not fit the settings.
            MissingBytesError: If the block has less bytes of a video than its frames need.
        """
        part = block.slice(low, None if high is None else high - low)
        if executor is None and part.num_rows:
            open_here(self._columns)
        watch, made, done = DecodeClock(executor), dict[str, pa.Array](), list[DecodedRows]()
        for column in self._columns:
            rows = self._rows(part, column.column, given_up, known_bad)
            for name, values in column.decode(rows, executor, lend).items():
                made[name] = with_nulls(values, rows.valid)
            done.append(rows)
        if given_up:
            known_bad = {**known_bad, **dict.fromkeys(part[ROW_OFFSET].to_pylist(), given_up)}
        for video in self._frames:
            rows = self._rows(part, video.column, "", {})
            values = video.decode(rows, executor, block, known_bad, lend)
            made[video.column] = with_nulls(values, rows.valid)
            done.append(rows)
        table = pa.table({each.output_name: made[each.output_name] for each in self._decoding.made})
        return table, watch.receipt(done)

    def _rows(self, part: pa.Table, column: str, given_up: str, known_bad: Mapping[int, str]) -> DecodedRows:
        """Returns the rows of one column, of which those not to be decoded are not valid."""
        rows = DecodedRows(self._decoding, part, 0)
        if given_up:
            rows.give_up(given_up)
        if (unneeded := f"{UNNEEDED}{column}") in part.column_names:
            rows.skips_bad = True
            rows.valid &= ~part[unneeded].to_numpy()
        for row in np.flatnonzero(rows.valid & np.isin(part[ROW_OFFSET].to_numpy(), [*known_bad])).tolist():
            rows.skips_bad = True
            rows.add_bad(row, column, HelperError(known_bad[part[ROW_OFFSET][row].as_py()]))
        return rows


def with_unneeded(block: pa.Table, masks: Mapping[str, BoolArray]) -> pa.Table:
    """Returns a block with the columns that say which of its rows no sample needs in some columns, see `UNNEEDED`."""
    for name, mask in masks.items():
        if mask.any():
            block = block.append_column(f"{UNNEEDED}{name}", pa.array(mask))
    return block


class HelperDecoding:
    """What one helper decodes: samples of items, and blocks."""

    def __init__(self, decoding: Decoding) -> None:
        """Opens what helpers do of a loader's decoding."""
        items, blocks = decoding.of_items, decoding.of_blocks
        self.names_by_column = {} if blocks is None else blocks.names_by_column  # of the columns that come by block
        self._items = None if items is None else OpenDecoding(items)
        self._blocks = None if blocks is None else BlockDecoding(blocks)

    def decode(self, table: pa.Table, epoch: int, executor: Executor | None = None, **how: Any) -> Decoded:
        """See `OpenDecoding.apply`."""
        if self._items is None:
            raise _nothing_to_decode("item")
        return self._items.apply(table, epoch, executor, **how)

    def decode_block(self, block: pa.Table, executor: Executor | None = None, **how: Any) -> Decoded:
        """See `BlockDecoding.apply`."""
        if self._blocks is None:
            raise _nothing_to_decode("block")
        return self._blocks.apply(block, executor, **how)


def _nothing_to_decode(what: str) -> HelperError:
    return HelperError(f"no decoder is for this {what}. This is a defect of raylance: please report it.")
