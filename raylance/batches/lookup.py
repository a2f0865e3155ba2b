"""The reading of single rows on demand, decoded in the calling thread."""

import logging
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from raylance.columns import COMPONENT, DRAW, ROW_OFFSET, VALID, dataset_names, split_offsets
from raylance.decode.block_decoding import BlockDecoding
from raylance.decode.open_decoding import OpenDecoding
from raylance.decode.sample_reading import read_samples
from raylance.errors import BadRowError, DatasetError
from raylance.memory.arrow import take_rows
from raylance.opened import ReadSpec
from raylance.orders.permutation import Int64Array
from raylance.source.lance_errors import readable_text
from raylance.source.limits import within
from raylance.source.mixed_rows import MixedRows
from raylance.source.reader import Reader, RowReader
from raylance.source.rows import RowSource, TableRows

logger = logging.getLogger(__name__)

_FILE_S = 5.0  # most seconds that an error waits for the name of its file


def name_file(error: BaseException, source: RowSource) -> None:
    """Adds the row's `file` to a `BadRowError`, if the dataset has such a column and can be read soon."""
    if not isinstance(error, BadRowError) or error.file is not None:
        return
    parts = source.parts if isinstance(source, MixedRows) else (source,)
    for name, part in zip(dataset_names(source.uri), parts, strict=True):
        if not isinstance(part, TableRows) or name != error.dataset:
            continue
        try:
            error.file = within(_FILE_S, _file_of, part, error.row_offset)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic in Lance's Rust code is not an Exception, and must not hide the bad row
            logger.info("the file of a bad row could not be found", exc_info=True)
        return


def _file_of(rows: TableRows, row_offset: int) -> str | None:
    opened = rows.pinned.open_once(_FILE_S)
    if "file" not in opened.schema.names:
        return None
    reader = Reader(pinned=rows.pinned, dataset=opened, columns=["file"], row_bytes=100, retry_s=1.0)
    found = reader.read(np.array([row_offset]))["file"][0].as_py()
    return found if isinstance(found, str) else None


class Lookup:
    """Reads and decodes rows by their offsets; opens the dataset at the first read."""

    def __init__(self, read_spec: ReadSpec) -> None:
        self._read_spec = read_spec
        decoding = read_spec.decoding
        of_samples, of_frames = (decoding.of_samples, decoding.of_frames) if decoding else (None, None)
        self._decoding = OpenDecoding(of_samples) if of_samples else None
        self._blocks = BlockDecoding(of_frames) if of_frames else None
        self._reader: RowReader | None = None
        self.bad_rows: tuple[tuple[int, str, str], ...] = ()  # the last read's: offset, column, reason

    def read(self, offsets: Int64Array, epoch: int, draws: Int64Array | None = None) -> pa.Table:
        """Reads k rows of an epoch in any order. Rows may be requested more than once; each is read from storage once.
        Returns, in new memory, the delivered columns, `_component`, `_rowoffset` and `_valid`. `offsets` are joined,
        see `join_offsets`. If rows may repeat in an epoch, `draws` are their positions in the epoch.

        Raises:
            DatasetError: If the dataset cannot give these rows.
            BadRowError: If a row cannot be decoded, unless bad rows are masked.
        """
        [table] = self.read_in_parts(offsets, max(1, len(offsets)), epoch, draws)
        return table

    def read_in_parts(
        self, offsets: Int64Array, part_rows: int, epoch: int, draws: Int64Array | None = None
    ) -> Iterator[pa.Table]:
        """Reads rows together, and decodes some at a time; see `read`. Yields at least one table."""
        source = self._read_spec.source
        stored, places = np.unique(offsets, return_inverse=True)
        try:
            source.check_asked(stored)
            self._reader, samples = self._reader or source.open_reader(), source.load_samples()
            of_epoch = None if samples is None else samples.of_epoch(epoch)
            found, receipt = read_samples(self._reader, of_epoch, stored, self._blocks)
        except BadRowError as error:
            name_file(error, source)
            raise
        except (IndexError, OverflowError, DatasetError) as error:
            raise DatasetError(
                f"{source.uri!r}, version {source.version}, cannot give these rows: {readable_text(error)}"
            ) from error
        for begin in range(0, max(1, len(offsets)), part_rows):
            part = slice(begin, begin + part_rows)
            table = take_rows(found, places[part])
            self.bad_rows = receipt.bad_rows
            yield self._decode(table, offsets[part], epoch, None if draws is None else draws[part])

    def _decode(self, table: pa.Table, offsets: Int64Array, epoch: int, draws: Int64Array | None) -> pa.Table:
        source, (components, own) = self._read_spec.source, split_offsets(offsets)
        is_known = VALID in table.column_names
        valid = table[VALID] if is_known else pa.array(np.ones(len(offsets), dtype=np.bool_))
        if self._decoding is not None:
            drawn = table if draws is None else table.append_column(DRAW, pa.array(draws))
            try:
                table, receipt = self._decoding.apply(drawn, epoch, own_memory=True)
            except BadRowError as error:
                name_file(error, source)
                raise
            self.bad_rows += receipt.bad_rows
            valid = table[VALID]
        if source.completion is not None:
            table = source.completion(table.append_column(COMPONENT, pa.array(components)))
        added = {COMPONENT: components, ROW_OFFSET: own, VALID: valid}
        return pa.table({name: table[name] for name in self._read_spec.delivers} | added)
