"""Reads documents, and packs them into sequences as a table of sequences says."""

import dataclasses
import functools
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raylance.columns import ROW_OFFSET
from raylance.environment.shared import Shared
from raylance.errors import DatasetError
from raylance.orders.order import Order
from raylance.orders.permutation import Int64Array
from raylance.orders.shuffles import Laned
from raylance.samples.packs import (
    INPUT_IDS,
    LABELS,
    POSITION_IDS,
    SEGMENT_IDS,
    Pack,
    PackTable,
    Pieces,
    make_table,
    tokens_left_out,
)
from raylance.source.costs import TokensOf, check_costs, load_costs
from raylance.source.limits import Calls
from raylance.source.packing import PackedRows
from raylance.source.reader import PieceReader, Prepare, RowReader
from raylance.source.retrying import Wanted, always
from raylance.source.rows import RowSource, Selected
from raylance.source.selection import Selection
from raylance.source.version import Source

logger = logging.getLogger(__name__)

_KEPT_BYTES = 64 << 20  # bytes of documents that a reader keeps
_PIECE_BYTES = 2 << 20  # bytes of a column that are made at once, so that their memory is used again
_AT_ONCE = 2  # groups of sequences that are made at once
_WHOLE = 256  # one in this number of documents takes as long to read as all together
_INT32 = np.iinfo(np.int32)
_Column = npt.NDArray[Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _SequenceReader(PieceReader):
    """Reads sequences: reads the documents of which they have pieces, and joins these."""

    reader: RowReader
    documents: Selected
    table: PackTable
    uri: str
    kept: "_KeptBlocks"
    epoch: int = 0

    def of_epoch(self, epoch: int) -> "_SequenceReader":
        """See `RowReader.of_epoch`."""
        return dataclasses.replace(self, epoch=epoch)

    def read_pieces(
        self, offsets: Int64Array, prepare: Prepare[T], add: Callable[[T], bool], is_wanted: Wanted = always
    ) -> None:
        """See `RowReader.read_pieces`."""
        waiting, running = deque(self._groups(offsets)), deque[Future[T | None]]()

        def make(begin: int, group: Int64Array) -> T | None:
            table = self._make(group, is_wanted) if is_wanted() else None
            return None if table is None else prepare(begin, table, None)

        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                running.append(self.kept.calls.submit(make, *waiting.popleft()))
            made = running.popleft().result()
            if made is None or not is_wanted() or not add(made):
                return

    def _groups(self, offsets: Int64Array) -> Iterator[tuple[int, Int64Array]]:
        """Yields sequences to make together, of one block of documents if they are not few, and where they begin."""
        most = max(1, _PIECE_BYTES // (4 * self.table.pack.length))
        blocks = np.searchsorted(self.table.block_ends, offsets, side="right")
        bounds, begin = [*(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(offsets)], 0
        for end in bounds:
            while end - begin > most:
                yield begin, offsets[begin : begin + most]
                begin += most
            if 2 * (end - begin) >= most or end == len(offsets):
                yield begin, offsets[begin:end]
                begin = end

    def _make(self, offsets: Int64Array, is_wanted: Wanted) -> pa.Table | None:
        """Makes sequences, ascending; returns None if they are not wanted any more."""
        table, pack = self.table, self.table.pack
        pieces = table.pieces(offsets, self.epoch)
        of_piece, texts = self._texts_of(pieces.document, is_wanted)
        if texts is None:
            return None
        columns = _join(pack, len(offsets), pieces, texts, of_piece)
        columns_of = {name: _fixed(columns[name], pack.length) for name in pack.outputs}
        return pa.table({**columns_of, ROW_OFFSET: offsets})

    def _texts_of(self, documents: Int64Array, is_wanted: Wanted) -> tuple[Int64Array, "list[Texts] | None"]:
        """Returns which text has each of some documents, which may repeat; and the texts, None if they are not wanted
        any more. Blocks of which many documents are needed are read whole, and kept; the documents of others are read
        together.
        """
        blocks, of_document = np.unique(documents // self.table.block_rows, return_inverse=True)
        which, texts = np.zeros(len(blocks), dtype=np.int64), list[Texts]()
        for number, block in enumerate(blocks.tolist()):
            found, whole = self.kept.get(block), self.table.documents(block)
            if found is None and _WHOLE * len(np.unique(documents[of_document == number])) >= len(whole):
                found = self._read(whole, is_wanted)
                if found is None:
                    return which, None
                self.kept.add(block, found)
            which[number] = -1 if found is None else len(texts)
            texts += [] if found is None else [found]
        if (which < 0).any() or not texts:  # without documents, for the types of the columns
            found = self._read(np.unique(documents[which[of_document] < 0]), is_wanted)
            if found is None:
                return which, None
            which[which < 0] = len(texts)
            texts.append(found)
        return which[of_document], texts

    def _read(self, documents: Int64Array, is_wanted: Wanted = always) -> "Texts | None":
        """Reads documents with these numbers, ascending; None if they are not wanted any more."""
        rows = self.documents.offsets(documents)
        found = self.reader.read_wanted(rows, is_wanted)
        return None if found is None else Texts(documents, *self._columns_of(found, rows))

    def _columns_of(self, table: pa.Table, rows: Int64Array) -> tuple[Int64Array, dict[str, _Column]]:
        """Returns where each document begins and the last one ends, and the values of each column."""
        starts, values = np.zeros(1, dtype=np.int64), dict[str, _Column]()
        tokens = self.table.pack.names[0]
        for name in self.table.pack.names:
            chunks = table[name].chunks or [pa.array([], table[name].type)]
            column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
            kind = column.type
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not _is_number(kind.value_type):
                raise DatasetError(
                    f"Pack: column {name!r} of {self.uri!r} is {kind}, not lists of numbers. Nothing more is read. "
                    "Store one list a document, with one value for each token."
                )
            begins = column.offsets.to_numpy().astype(np.int64)
            inner = column.values[begins[0] : begins[-1]]
            if column.null_count or inner.null_count:
                raise DatasetError(
                    f"Pack: column {name!r} of {self.uri!r} has nulls among the rows {rows[0]} to {rows[-1]}. Nothing "
                    "more is read. Write the dataset without nulls in it."
                )
            begins -= begins[0]
            starts = begins if name == tokens else starts
            if not np.array_equal(begins, starts):
                at = int(np.argmax(np.diff(begins) != np.diff(starts)))
                raise DatasetError(
                    f"Pack: the row at offset {rows[at]} of {self.uri!r} has {np.diff(starts)[at]} values in "
                    f"{tokens!r} and {np.diff(begins)[at]} in {name!r}. Nothing more is read. Columns that are packed "
                    "together have one value for each token."
                )
            values[name] = inner.to_numpy(zero_copy_only=False)
        self._check_range(values[tokens])
        return starts, values

    def _check_range(self, tokens: _Column) -> None:
        if tokens.dtype == np.int32 or not len(tokens):
            return
        least, most = tokens.min(), tokens.max()
        if tokens.dtype.kind not in "iu" or least < _INT32.min or most > _INT32.max:
            raise DatasetError(
                f"Pack: column {self.table.pack.names[0]!r} of {self.uri!r} holds {tokens.dtype} from {least} to "
                f"{most}, and sequences are of int32, which cannot hold them. Nothing more is read. Write the "
                "dataset with token ids of less than 2**31."
            )

    def close(self) -> None:
        """See `RowReader.close`."""
        self.reader.close()


class Texts(NamedTuple):
    """Some documents: their numbers, ascending, (n,); where each begins and the last one ends, (n + 1,); and the values
    of each column.
    """

    documents: Int64Array
    starts: Int64Array
    values: dict[str, _Column]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(each.nbytes for each in self.values.values())


class _KeptBlocks:
    """The texts of the last blocks of documents, because the sequences of a block may be read by several calls; and the
    threads that make sequences.
    """

    def __init__(self) -> None:
        self.calls = Calls(_AT_ONCE, "raylance-pack")
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Texts] = OrderedDict()

    def get(self, block: int) -> Texts | None:
        """Returns the texts of a block, if they are kept."""
        with self._lock:
            if block in self._kept:
                self._kept.move_to_end(block)
            return self._kept.get(block)

    def add(self, block: int, texts: Texts) -> None:
        """Keeps the texts of a block, and drops the oldest ones of others."""
        with self._lock:
            self._kept[block] = texts
            while len(self._kept) > 1 and sum(each.nbytes for each in self._kept.values()) > _KEPT_BYTES:
                self._kept.popitem(last=False)


def _join(pack: Pack, count: int, pieces: Pieces, texts: Sequence[Texts], of_piece: Int64Array) -> dict[str, _Column]:
    """Joins pieces to sequences; `of_piece` says in which of the texts each piece is. Returns the columns of the batch,
    (n, length).
    """
    at, begins, lengths = (np.empty(len(of_piece), dtype=np.int64) for _ in range(3))
    for number, text in enumerate(texts):
        mine = of_piece == number
        at[mine] = np.searchsorted(text.documents, pieces.document[mine])
        begins[mine], lengths[mine] = text.starts[at[mine]], np.diff(text.starts)[at[mine]]
    own = np.minimum(pieces.size, lengths - pieces.start)  # without the end-of-sequence token
    begin = begins + pieces.start
    is_last = np.append(pieces.sequence[1:] != pieces.sequence[:-1], True)[: len(of_piece)]
    padding = np.where(is_last, pack.length - pieces.place - pieces.size, 0)
    places = list(zip(*(each.tolist() for each in (of_piece, begin, begin + own)), strict=True))
    extra = np.flatnonzero((own < pieces.size) | (padding > 0)).tolist()

    def fill(name: str, dtype: np.dtype[Any], end: Any, pad: int) -> _Column:
        values = [text.values[name] for text in texts]
        parts = [values[number][first:last] for number, first, last in places]
        for index in extra:
            more = [parts[index]]
            if own[index] < pieces.size[index]:
                more.append(np.array([end(index, values)], dtype=dtype))
            more.append(np.full(padding[index], pad, dtype=dtype))
            parts[index] = np.concatenate(more, dtype=dtype, casting="unsafe")
        if not parts:
            return np.empty((0, pack.length), dtype=dtype)
        return np.concatenate(parts, dtype=dtype, casting="unsafe").reshape(count, pack.length)

    def last_of(index: int, values: list[_Column]) -> Any:
        number, _, last = places[index]
        return values[number][last - 1] if lengths[index] else 0

    made = {INPUT_IDS: fill(pack.names[0], np.dtype(np.int32), lambda *_: pack.eos_id, pack.pad_id)}
    for name in pack.names[1:]:
        made[name] = fill(name, texts[0].values[name].dtype, last_of, 0)
    counting = np.arange(int(pieces.size.max(initial=0)), dtype=np.int32)
    zeros = np.zeros(pack.length, dtype=np.int32)
    parts = [counting[:size] for size in pieces.size.tolist()]
    for index in np.flatnonzero(padding).tolist():
        parts[index] = np.append(parts[index], zeros[: padding[index]])
    made[POSITION_IDS] = np.concatenate([zeros[:0], *parts]).reshape(count, pack.length)
    firsts = np.searchsorted(pieces.sequence, pieces.sequence)
    numbers = np.stack([np.arange(len(firsts)) - firsts, np.full(len(firsts), -1)], axis=1).astype(np.int32)
    repeats = np.stack([pieces.size, padding], axis=1)
    made[SEGMENT_IDS] = np.repeat(numbers.reshape(-1), repeats.reshape(-1)).reshape(count, pack.length)
    return made if pack.labels is None else made | {LABELS: _labels(pack, made)}


def _labels(pack: Pack, made: dict[str, _Column]) -> _Column:
    """Returns the label of each token, int32, (n, length)."""
    ids, segments = made[INPUT_IDS], made[SEGMENT_IDS]
    labels = np.full_like(ids, pack.ignore_index)
    if pack.labels == "same":
        is_label = (segments >= 0) & (made[POSITION_IDS] > 0)
        if pack.label_mask is not None:
            is_label &= made[pack.label_mask] != 0
        np.copyto(labels, ids, where=is_label)
        return labels
    is_label = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] >= 0)
    if pack.label_mask is not None:
        is_label &= made[pack.label_mask][:, 1:] != 0
    np.copyto(labels[:, :-1], ids[:, 1:], where=is_label)
    return labels


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _fixed(array: _Column, length: int) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), length)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences(PackedRows):
    """The sequences into which `Pack` packs documents."""

    def open_reader(self, retry_s: float | None = None) -> RowReader:
        """See `RowSource.open_reader`."""
        documents, reader = self.documents.load_selection(), self.documents.open_reader(retry_s)
        return _SequenceReader(
            reader=reader, documents=documents, table=self.table.get(), uri=str(self.uri), kept=_KeptBlocks()
        )


def pack_sequences(
    source: Source, opened: lance.LanceDataset, documents: RowSource, pack: Pack, seed: int, folder: Any
) -> PackedSequences:
    """Packs the documents of a dataset; reads their lengths now, unless a file has them. Raises DatasetError: see
    `make_table`, `check_costs` and `share_costs`.
    """
    costs = check_costs(opened, TokensOf(pack.names[0]), folder)
    make = functools.partial(_make_table, source, costs, documents, pack, seed)
    table = make(opened)
    if left_out := tokens_left_out(pack, table.lengths):
        logger.warning(
            '%s: too_long="%s" leaves out %s of %s tokens.',
            source.uri,
            pack.too_long,
            f"{left_out:,}",
            f"{int(table.lengths.sum(dtype=np.int64)):,}",
        )
    shared = Shared(f"lengths in {pack.names[0]}", table, table.nbytes, make)
    row_bytes = 4.0 * pack.length * len(pack.outputs)
    return PackedSequences.of(documents, shared, pack, pack.outputs, row_bytes, "of 4 bytes a token and column")


def by_block(order: Order) -> Order:
    """Returns the order with a block of documents as its shard, if it leaves the size of shards to raylance: then all
    sequences of a block are read together.
    """
    is_free = isinstance(order, Laned) and order.shard_rows == "auto"
    return dataclasses.replace(order, shard_rows="fragment") if is_free else order


def _make_table(
    source: Source,
    costs: Any,
    documents: RowSource,
    pack: Pack,
    seed: int,
    opened: lance.LanceDataset | None = None,
) -> PackTable:
    rows = documents.load_selection()
    if not isinstance(rows, Selection):
        raise TypeError(f"{type(rows).__name__} is not the selection of one table")
    lengths = load_costs(source, opened or source.open(), costs, rows)
    return make_table(pack, lengths, seed, rows.fingerprint)
