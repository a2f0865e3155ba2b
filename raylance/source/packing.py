"""Packs token documents into sequences of one length.

The selected documents, each with its end-of-sequence token, form one long string of tokens in storage order. A sequence
is a piece of it; a table of the documents' ends locates it. So sequences are the rows of the epoch: every order that
reads no column can shuffle them, every token comes exactly once, and a run may resume in the middle of a document.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raylance.arguments import check_integer
from raylance.columns import ROW_OFFSET
from raylance.environment.shared import Shared
from raylance.errors import ConfigError, DatasetError, filter_of_nulls
from raylance.orders.permutation import Int64Array
from raylance.planning.pace import Pace
from raylance.source.reader import OpenedRows, RowReader
from raylance.source.retrying import Wanted, always
from raylance.source.rows import RowSource, Selected

_BLOCK_BYTES = 16 << 20  # bytes of documents to read at once
_FIRST_ROWS = 4  # documents in the first read, because their size is unknown


@dataclasses.dataclass(frozen=True, slots=True)
class PackTokens:
    """Joins documents, which are lists of tokens, and cuts the tokens into sequences of one length. Pass it to
    `raylance.dataset` as `pack`.

    Attributes:
        column: Column of lists of integers, one document per row.
        length: Number of tokens of a sequence.
        eos_id: Token to put after each document; None for no token.
        pad_id: Token that fills up the last sequence.
    """

    column: str
    length: int
    eos_id: int | None = None
    pad_id: int = 0

    def __post_init__(self) -> None:
        if not (isinstance(self.column, str) and self.column):
            raise ConfigError(f"PackTokens(column={self.column!r}): give the name of the column of tokens.")
        object.__setattr__(self, "length", check_integer("PackTokens: length", self.length, 1))
        tokens = {"pad_id": self.pad_id} | ({} if self.eos_id is None else {"eos_id": self.eos_id})
        for name, token in tokens.items():  # only checked, because the fingerprint includes the repr
            if not -(2**63) <= check_integer(f"PackTokens: {name}", token, None) < 2**63:
                raise ConfigError(f"PackTokens: {name}={token}: sequences are of int64, which cannot hold it.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The sequences as selected rows, computed from the ends of the selected documents in the string of tokens."""

    ends: Int64Array  # tokens up to the end of each document, end-of-sequence tokens included; (documents,)
    pack: PackTokens

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return -(-int(self.ends[-1]) // self.pack.length)

    @property
    def fingerprint(self) -> str:
        """Hash of the ends and the settings."""
        digest = hashlib.blake2b(self.ends.tobytes(), digest_size=16)
        digest.update(repr(self.pack).encode())
        return digest.hexdigest()

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Returns `selected`: the offset of a sequence is its number."""
        return selected


def count_tokens(source: RowSource, pack: PackTokens) -> Documents:
    """Reads the lengths of all selected documents, some MiB at once. Raises DatasetError if the column holds other
    types than lists of integers, a null, a token beyond int64, or no token.
    """
    documents, reader = source.load_selection(), source.open_reader().of_epoch(0)  # lengths are alike in each epoch
    lengths = [np.empty(0, dtype=np.int64)]
    pace, start = Pace(target_bytes=_BLOCK_BYTES, row_bytes=1, limit_rows=_FIRST_ROWS), 0
    while start < documents.rows:
        rows = np.arange(start, min(start + pace.next_rows(), documents.rows), dtype=np.int64)
        column = reader.read(documents.offsets(rows))[pack.column]
        start += len(rows)
        pace.record(len(rows), column.nbytes)
        kind = column.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
            raise DatasetError(
                f"PackTokens: column {pack.column!r} is {kind}, not lists of integers; nothing was started. Tokenise "
                "first, and store one list of token ids a row."
            )
        if column.null_count:
            raise DatasetError(
                f"PackTokens: column {pack.column!r} has nulls instead of documents; nothing was started. Leave "
                f"them out: {filter_of_nulls(pack.column)}."
            )
        tokens = column.combine_chunks().flatten()
        if tokens.null_count:
            raise DatasetError(
                f"PackTokens: a document of column {pack.column!r} holds a null instead of a token; nothing was "
                "started. Write the dataset without null tokens."
            )
        if pa.types.is_uint64(kind.value_type) and (most := pc.max(tokens).as_py() or 0) >= 2**63:
            raise DatasetError(
                f"PackTokens: a document of column {pack.column!r} of {source.uri!r}, version {source.version}, holds "
                f"the token {most}, and sequences are of int64, which cannot hold it; nothing was started. Write the "
                "dataset with token ids of less than 2**63."
            )
        lengths.append(pc.list_value_length(column).to_numpy().astype(np.int64))
    ends = np.cumsum(np.concatenate(lengths) + (pack.eos_id is not None), dtype=np.int64)
    if not len(ends) or ends[-1] == 0:
        raise DatasetError(f"PackTokens: column {pack.column!r} holds no token, so there is no sequence to make.")
    return Documents(ends=ends, pack=pack)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PackReader(RowReader):
    """Reads sequences: reads the documents that overlap them, and cuts the documents at the ends of sequences."""

    reader: RowReader
    documents: Selected
    table: Documents

    def read_into(self, offsets: Int64Array, add: Callable[[pa.Table], None], is_wanted: Wanted = always) -> None:
        pack, ends = self.table.pack, self.table.ends
        length = pack.length
        begin = offsets * length
        end = np.minimum(begin + length, ends[-1])
        first = np.searchsorted(ends, begin, side="right")
        last = np.searchsorted(ends, end, side="left")  # the document that holds the sequence's last token
        needed = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(first, last, strict=True)] or [first]))
        rows = self.documents.offsets(needed.astype(np.int64))
        input_ids = np.full((len(offsets), length), pack.pad_id, dtype=np.int64)
        doc_ids = np.full((len(offsets), length), -1, dtype=np.int64)
        opens, closes = np.where(needed > 0, ends[needed - 1], 0), ends[needed]
        # Documents are read whole, even if a sequence needs little of them. So each read has few documents.
        filled = np.cumsum(8 * (closes - opens)) // _BLOCK_BYTES
        for group in np.split(np.arange(len(needed)), np.flatnonzero(np.diff(filled)) + 1) if len(needed) else []:
            table = self.reader.read_wanted(rows[group], is_wanted)
            if table is None:
                return
            found = table[pack.column].combine_chunks()
            for place, here in enumerate(group):
                text, opening = found[place].values.to_numpy(), int(opens[here])
                lowest = np.searchsorted(last, needed[here])
                highest = np.searchsorted(first, needed[here], side="right")
                for row in range(lowest, highest):
                    start, low = int(begin[row]), max(int(begin[row]), opening)
                    high = min(int(end[row]), int(closes[here]))
                    after = min(high, opening + len(text))  # after the document's own tokens
                    input_ids[row, low - start : after - start] = text[low - opening : after - opening]
                    if after < high and pack.eos_id is not None:
                        input_ids[row, after - start] = pack.eos_id
                    doc_ids[row, low - start : high - start] = rows[here]
        columns = {
            "input_ids": fixed_lists(input_ids),
            "doc_ids": fixed_lists(doc_ids),
            "first_row": self.documents.offsets(first),
            "first_token": begin - np.where(first > 0, ends[first - 1], 0),
            ROW_OFFSET: offsets,
        }
        add(pa.table(columns))

    def close(self) -> None:
        self.reader.close()


def fixed_lists(array: npt.NDArray[Any]) -> pa.Array:
    """Returns an array (n, length) as n lists of one length, without a copy."""
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows(RowSource):
    """The sequences into which documents are packed."""

    documents: RowSource
    table: Shared[Any]
    pack: Any  # `PackTokens`, or `Pack` in a subclass

    @classmethod
    def of(
        cls, documents: RowSource, table: Shared[Any], pack: Any, columns: Sequence[str], row_bytes: float, measure: str
    ) -> Self:
        """Returns the sequences of documents. For `columns`, `row_bytes` and `measure`, see `RowSource`."""
        return cls(
            uri=documents.uri,
            branch=documents.branch,
            version=documents.version,
            identity=documents.identity,
            windows=repr(pack),
            columns=columns,
            row_bytes=row_bytes,
            likely_row_bytes=row_bytes,
            measure=measure,
            sample_bytes=row_bytes,
            documents=documents,
            table=table,
            pack=pack,
        )

    def load_selection(self) -> Selected:
        """See `RowSource.load_selection`."""
        found: Selected = self.table.get()
        return found

    def has_rows_of(self, version: Any, identity: Any) -> bool:
        """See `RowSource.has_rows_of`."""
        return self.documents.has_rows_of(version, identity)

    def open_reader(self, retry_s: float | None = None) -> OpenedRows:
        """See `RowSource.open_reader`."""
        opened = self.documents.open_reader(retry_s)
        return OpenedRows(self._reader(opened), opened.close)

    def _reader(self, opened: OpenedRows) -> Callable[[int], RowReader]:
        """Returns what makes the reader of the sequences of an epoch."""
        documents, table = self.documents.load_selection(), self.table.get()
        return lambda epoch: _PackReader(reader=opened.of_epoch(epoch), documents=documents, table=table)

    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> Self:
        """See `RowSource.map_shared`."""
        return dataclasses.replace(self, documents=self.documents.map_shared(change), table=change(self.table))


def pack_rows(documents: RowSource, pack: PackTokens) -> PackedRows:
    """Packs the documents of a dataset; reads their lengths now. Raises DatasetError: see `count_tokens`."""
    make = functools.partial(count_tokens, documents, pack)
    table = make()
    shared = Shared(f"lengths in {pack.column}", table, table.ends.nbytes, make)
    columns = ("input_ids", "doc_ids", "first_row", "first_token")
    return PackedRows.of(documents, shared, pack, columns, 16.0 * pack.length, "of 16 bytes a token")
