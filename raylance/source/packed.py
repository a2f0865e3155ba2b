"""Reads documents, and packs them into sequences as a table of sequences says."""

import dataclasses
import functools
import hashlib
import itertools
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
from raylance.memory.arrow import one_array, take_ranges, values_of
from raylance.memory.lending import Lend, fresh_memory
from raylance.orders.order import Order
from raylance.orders.permutation import BoolArray, Int32Array, Int64Array
from raylance.orders.shuffles import Laned
from raylance.samples.pack_columns import TOKENS_AT_ONCE, fill_columns, mark_begins
from raylance.samples.packs import BEGINS, INPUT_IDS, LABELS, TOKENS, Pack, PackTable, Pieces, find_bins, make_table
from raylance.source.costs import FEW_ROWS, TokensOf, check_costs, load_costs
from raylance.source.fields import find_field
from raylance.source.limits import Calls
from raylance.source.packing import PackedRows, fixed_lists
from raylance.source.reader import OpenedRows, PieceReader, Prepare, RowReader
from raylance.source.retrying import Wanted, always
from raylance.source.rows import Completion, RowSource, Selected
from raylance.source.selection import Selection
from raylance.source.version import Source

logger = logging.getLogger(__name__)

_KEPT_BYTES = 128 << 20  # bytes of documents that a reader keeps: each lane has a block that is used in part
_PIECE_BYTES = 8 << 20  # bytes of a column that are made at once: a whole block, as threads wait for the GIL in each
_AT_ONCE, _AHEAD = 2, 2  # groups of sequences that are made at once, and blocks that are read meanwhile
_WHOLE = 96  # one in this number of documents takes as long to read as all together
_MANY = 8  # a block of which one in this number of sequences is wanted is read whole, whatever their documents are
_warned: set[Pack] = set()  # settings whose sequences without a label were named
_PACKING = 1  # the number of the way in which bins are found; another way needs another number
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
    epoch: int

    def read_pieces(
        self, offsets: Int64Array, prepare: Prepare[T], add: Callable[[T], bool], is_wanted: Wanted = always
    ) -> None:
        """See `RowReader.read_pieces`."""
        waiting, running = deque(self._groups(offsets)), deque[Future[T | None]]()
        blocks, ahead = self._whole_blocks(offsets), 0

        def make(begin: int, group: Int64Array) -> T | None:
            table = self._make(group, is_wanted) if is_wanted() else None
            return None if table is None else prepare(begin, table, None)

        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                begin, group = waiting.popleft()
                running.append(self.kept.calls.submit(make, begin, group))
                reached = int(np.searchsorted(blocks, self.table.blocks_of(group[-1:]), side="right").max(initial=0))
                for block in blocks[max(ahead, reached) : reached + _AHEAD].tolist():  # read meanwhile
                    self.kept.calls.submit(self._whole, block, is_wanted)
                ahead = reached + _AHEAD
            made = running.popleft().result()
            if made is None or not is_wanted() or not add(made):
                return

    def _groups(self, offsets: Int64Array) -> Iterator[tuple[int, Int64Array]]:
        """Yields sequences to make together, of one block of documents if they are not few, and where they begin."""
        most = max(1, _PIECE_BYTES // (4 * self.table.pack.length))
        blocks = self.table.blocks_of(offsets)
        bounds, begin = [*(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(offsets)], 0
        for end in bounds:
            while end - begin > most:
                yield begin, offsets[begin : begin + most]
                begin += most
            if 2 * (end - begin) >= most or end == len(offsets):
                yield begin, offsets[begin:end]
                begin = end

    def _whole_blocks(self, offsets: Int64Array) -> Int64Array:
        """Returns the blocks that are read whole, because many of their sequences are among these; int64, ascending."""
        blocks, counts = np.unique(self.table.blocks_of(offsets), return_counts=True)
        return np.asarray(blocks[_MANY * counts >= self.table.count_sequences(blocks)])

    def _whole(self, block: int, is_wanted: Wanted) -> "Texts | None":
        """Returns the text of a block, which is kept then; None if it is not wanted any more."""
        return self.kept.get(block, lambda: self._read(self.table.documents(block), is_wanted))

    def _make(self, offsets: Int64Array, is_wanted: Wanted) -> pa.Table | None:
        """Makes sequences, ascending; returns None if they are not wanted any more."""
        table, pack = self.table, self.table.pack
        pieces = table.pieces(offsets, self.epoch)
        of_piece, texts = self._texts_of(pieces.document, is_wanted)
        if texts is None:
            return None
        begins, tokens = mark_begins(pieces, len(offsets), pack.length)
        joined = _join(pack, tokens, pieces, texts, of_piece)
        self.kept.drop_used(*table.count_by_block(pieces))
        columns = {name: fixed_lists(column) for name, column in joined.items()}
        return pa.table({**columns, BEGINS: fixed_lists(begins), TOKENS: tokens, ROW_OFFSET: offsets})

    def _texts_of(self, documents: Int64Array, is_wanted: Wanted) -> tuple[Int64Array, "list[Texts] | None"]:
        """Returns which text has each of some documents, which may repeat; and the texts, None if they are not wanted
        any more. Blocks of which many documents are needed are read whole, and kept; the documents of others are read
        together.
        """
        blocks, of_document = np.unique(documents // self.table.block_rows, return_inverse=True)
        which, texts = np.full(len(blocks), -1), list[Texts]()
        needed = np.bincount(np.unique(documents) // self.table.block_rows - (blocks[0] if len(blocks) else 0))
        for number, block in enumerate(blocks.tolist()):
            is_dense = _WHOLE * needed[block - blocks[0]] >= len(self.table.documents(block))
            found = self._whole(block, is_wanted) if is_dense else self.kept.get(block, None)
            if found is not None:
                which[number] = len(texts)
                texts.append(found)
            elif not is_wanted():
                return which, None
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
        return None if found is None else self._text_of(found, documents, rows)

    def _text_of(self, table: pa.Table, documents: Int64Array, rows: Int64Array) -> "Texts":
        """Returns the text of documents that were read."""
        starts, values, pack = np.zeros(1, dtype=np.int64), dict[str, _Column](), self.table.pack
        for name in pack.names:
            is_ids = name == pack.names[0]
            chunks = table[name].chunks or [pa.array([], table[name].type)]
            column = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
            begins = column.offsets.to_numpy().astype(np.int64)
            inner = column.values[begins[0] : begins[-1]]
            if column.null_count or inner.null_count:
                raise DatasetError(
                    f"Pack: column {name!r} of {self.uri!r} has nulls among the rows {rows[0]} to {rows[-1]}. Nothing "
                    "more is read. Write the dataset without nulls in it."
                )
            begins -= begins[0]
            starts = begins if is_ids else starts
            if not np.array_equal(begins, starts):
                at = int(np.argmax(np.diff(begins) != np.diff(starts)))
                raise DatasetError(
                    f"Pack: the row at offset {rows[at]} of {self.uri!r} has {np.diff(starts)[at]} values in "
                    f"{pack.names[0]!r} and {np.diff(begins)[at]} in {name!r}. Nothing more is read. Columns that are "
                    "packed together have one value for each token."
                )
            values[name] = inner.to_numpy(zero_copy_only=False)
            if is_ids:
                self._check_range(values[name])
                values[name] = values[name].astype(np.int32, copy=False)
        values = {name: _with_extra(each, starts, pack, name) for name, each in values.items()}
        return Texts(documents, starts + (pack.eos_id is not None) * np.arange(len(starts)), values)

    def _check_range(self, tokens: _Column) -> None:
        if tokens.dtype == np.int32 or not len(tokens):
            return
        least, most = tokens.min(), tokens.max()
        if least < _INT32.min or most > _INT32.max:
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
    of each column, with the tokens after documents, if there are any, and with the value of padding at the end.
    """

    documents: Int64Array
    starts: Int64Array
    values: dict[str, _Column]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(each.nbytes for each in self.values.values())


class _KeptBlocks:
    """The texts of blocks of documents that are used in part, because the sequences of a block may be read by several
    calls; and the threads that make sequences.
    """

    def __init__(self) -> None:
        self.calls = Calls(_AT_ONCE + _AHEAD, "raylance-pack")
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Future[Texts | None]] = OrderedDict()
        self._used: dict[int, int] = {}  # sequences that were made of each of these blocks

    def get(self, block: int, read: Callable[[], Texts | None] | None) -> Texts | None:
        """Returns the text of a block, which one thread reads with `read`, and others wait for. Returns None if it is
        not kept and `read` is None, or if `read` returns None.
        """
        reading = Future[Texts | None]()
        with self._lock:
            kept = self._kept.get(block)
            if kept is not None:
                self._kept.move_to_end(block)
            elif read is not None:
                self._kept[block] = reading
        if kept is not None:
            return kept.result()
        if read is None:
            return None
        text = None
        try:
            text = read()
        finally:
            reading.set_result(text)  # after a failure, who waits reads by itself
            with self._lock:
                if text is None:
                    self._drop(block)
                self._drop_oldest()
        return text

    def drop_used(self, blocks: Int64Array, made: Int64Array, most: Int64Array) -> None:
        """Records that sequences were made of blocks, and drops the blocks of which an epoch makes no more."""
        with self._lock:
            for block, more, count in zip(blocks.tolist(), made.tolist(), most.tolist(), strict=True):
                used = self._used.get(block, 0) + more
                if block in self._kept:
                    self._used[block] = used
                    if used >= count:
                        self._drop(block)

    def _drop_oldest(self) -> None:
        """Drops the texts that were used longest ago, if all together have too many bytes."""
        texts = {block: kept.result() for block, kept in self._kept.items() if kept.done()}
        nbytes = {block: text.nbytes for block, text in texts.items() if text is not None}
        kept = sum(nbytes.values())
        for block in list(nbytes)[:-1]:
            if kept > _KEPT_BYTES:
                self._drop(block)
                kept -= nbytes[block]

    def _drop(self, block: int) -> None:
        self._kept.pop(block, None)
        self._used.pop(block, None)


def _with_extra(values: _Column, starts: Int64Array, pack: Pack, name: str) -> _Column:
    """Returns the values of documents, and one of padding at the end. After each document comes the end-of-sequence
    token, if there is one; in other columns, the document's last value once more, or 0 after an empty one.
    """
    is_ids = name == pack.names[0]
    padding = pack.pad_id if is_ids else 0
    if pack.eos_id is None:
        return np.append(values, np.array(padding, dtype=values.dtype))
    zero = np.array(0, dtype=values.dtype)
    last = np.where(np.diff(starts) > 0, np.append(values, zero)[starts[1:] - 1], zero)
    after = np.full(len(last), pack.eos_id) if is_ids else last
    return np.insert(values, np.append(starts[1:], len(values)), np.append(after, padding).astype(values.dtype))


def _join(
    pack: Pack, tokens: Int32Array, pieces: Pieces, texts: Sequence[Texts], of_piece: Int64Array
) -> dict[str, _Column]:
    """Joins pieces to sequences. `tokens` has the number of tokens of each sequence, `of_piece` the index of the text
    of each piece. Returns the columns that are read, (n, length).
    """
    begins = np.empty(len(of_piece), dtype=np.int64)
    for number, text in enumerate(texts):
        mine = of_piece == number
        begins[mine] = text.starts[np.searchsorted(text.documents, pieces.document[mine])] + pieces.start[mine]
    is_last = np.diff(pieces.sequence, append=len(tokens)) > 0
    padding = np.where(is_last, pack.length - tokens[pieces.sequence], 0)
    runs = np.append(np.flatnonzero(np.diff(of_piece, prepend=-1)), len(of_piece))  # consecutive pieces of one text

    def join(column: str) -> _Column:
        parts = [texts[0].values[column][:0]]
        for low, high in itertools.pairwise(runs.tolist()):
            run, values = slice(low, high), texts[of_piece[low]].values[column]
            parts.append(take_ranges(values, begins[run], pieces.size[run], padding[run]))
        return (parts[-1] if len(parts) <= 2 else np.concatenate(parts)).reshape(-1, pack.length)

    return {INPUT_IDS: join(pack.names[0])} | {name: join(name) for name in pack.names[1:]}


@dataclasses.dataclass(frozen=True, slots=True)
class _Completion(Completion):
    """Adds positions, segments and labels to sequences, in place of what says where pieces begin."""

    pack: Pack

    @property
    def rows(self) -> int:
        """See `Completion.rows`."""
        return max(1, TOKENS_AT_ONCE // self.pack.length)

    @property
    def added_bytes(self) -> int:
        """See `Completion.added_bytes`."""
        return 4 * self.pack.length * (len(self.pack.outputs) - len(self.pack.names))

    def __call__(self, table: pa.Table, lend: Lend = fresh_memory) -> pa.Table:
        """See `Completion`."""
        pack, count = self.pack, table.num_rows
        columns = dict(zip(table.column_names, table.columns, strict=True))
        begins, tokens = columns.pop(BEGINS), columns.pop(TOKENS)
        names = [name for name in pack.outputs if name not in columns]
        made = {name: lend(4 * count * pack.length).view(np.int32).reshape(count, pack.length) for name in names}
        if count:
            read = {name: _array_of(columns[name]) for name in (INPUT_IDS, *pack.names[1:])}
            fill_columns(pack, _array_of(begins), tokens.to_numpy(), read, made)
            if pack.label_mask is not None and LABELS in made and pack not in _warned:
                _warn_of_no_labels(pack, (made[LABELS] == pack.ignore_index).all(axis=1))
        return pa.table({name: fixed_lists(made[name]) for name in names} | columns).select(
            [*pack.outputs, *(name for name in columns if name not in pack.outputs)]
        )


def _warn_of_no_labels(pack: Pack, has_none: BoolArray) -> None:
    """Warns, once a process and setting, if sequences have no label."""
    if has_none.any():
        _warned.add(pack)
        logger.warning(
            "%s: %d of %d sequences that were made together have no label: the mask leaves nothing to learn in them. A "
            "mean loss over such a sequence alone is not a number: add up losses, and divide by the step's labels. "
            'With policy="whole", too_long="drop" cuts no document into such pieces.',
            pack,
            has_none.sum(),
            len(has_none),
        )


def _array_of(column: pa.ChunkedArray) -> _Column:
    """Returns lists of one length as an array (n, length)."""
    lists = one_array(column)
    values: _Column = values_of(lists).to_numpy()
    return values.reshape(len(lists), -1)


def _check_columns(opened: lance.LanceDataset, pack: Pack) -> None:
    """Raises DatasetError if the columns are not lists of numbers, or the first one's are not integers."""
    for name in pack.names:
        field = find_field(opened.schema, name)
        kind: Any = None if field is None else field.type
        is_ids, is_list = name == pack.names[0], isinstance(kind, pa.ListType | pa.LargeListType)
        is_whole = is_list and pa.types.is_integer(kind.value_type)
        if not is_whole and (is_ids or not is_list or not pa.types.is_floating(kind.value_type)):
            wanted = "integers" if is_ids else "numbers"
            raise DatasetError(
                f"Pack: column {name!r} of {opened.uri!r} is {kind}, not lists of {wanted}; nothing was started. Store "
                "one list a document, with one value for each token."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequences(PackedRows):
    """The sequences into which `Pack` packs documents."""

    def _reader(self, opened: OpenedRows) -> Callable[[int], RowReader]:
        """See `PackedRows._reader`."""
        documents, table, kept = self.documents.load_selection(), self.table.get(), _KeptBlocks()

        def of_epoch(epoch: int) -> RowReader:
            reader = opened.of_epoch(epoch)
            return _SequenceReader(
                reader=reader, documents=documents, table=table, uri=str(self.uri), kept=kept, epoch=epoch
            )

        return of_epoch

    @property
    def completion(self) -> Completion:
        """See `RowSource.completion`."""
        return _Completion(self.pack)


def pack_sequences(
    source: Source, opened: lance.LanceDataset, documents: RowSource, pack: Pack, seed: int, folder: Any
) -> PackedSequences:
    """Packs the documents of a dataset; reads their lengths now, unless a file has them.

    Raises:
        DatasetError: If a column has another type; also as `make_table`, `check_costs` and `share_costs`.
    """
    _check_columns(opened, pack)
    column = pack.names[0]
    costs = check_costs(opened, TokensOf(column), folder, f"Pack: the length of {column!r}")
    make = functools.partial(_make_table, source, costs, documents, pack, seed)
    table = make(opened)
    if left_out := table.tokens_left_out:
        logger.warning(
            '%s: too_long="%s" leaves out %s of %s tokens.',
            source.uri,
            pack.too_long,
            f"{left_out:,}",
            f"{int(table.lengths.sum(dtype=np.int64)):,}",
        )
    shared = Shared(f"lengths in {pack.names[0]}", table, table.nbytes, make)
    row_bytes = pack.length * (4.0 * len(pack.names) + 0.125)
    measure = "of 4 bytes a token and column that is read, and one bit"
    return PackedSequences.of(documents, shared, pack, pack.outputs, row_bytes, measure)


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
    bins = None
    if rows.rows > FEW_ROWS and pack.policy == "whole":
        # Bins depend on fewer settings, but these are all that there are in most cases.
        name = hashlib.blake2b(f"{costs.name(source, rows)} {pack} {_PACKING}".encode(), digest_size=16).hexdigest()
        bins = costs.files.keep(f"{name}.bins.npy", functools.partial(find_bins, pack, lengths))
    return make_table(pack, lengths, seed, rows.fingerprint, bins)
