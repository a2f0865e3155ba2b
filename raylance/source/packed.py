"""Reads documents, of which sequences are made, and completes sequences."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raylance.columns import ROW_OFFSET
from raylance.environment.shared import Shared
from raylance.errors import DatasetError
from raylance.memory.arrow import fixed_lists, one_array, sum_lists, values_of, wanted_rows
from raylance.memory.lending import Lend, fresh_memory
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.samples.pack_columns import TOKENS_AT_ONCE, by_axis, fill_columns
from raylance.samples.pack_tokens import PackTokens
from raylance.samples.packs import (
    BEGINS,
    INPUT_IDS,
    LABELS,
    PIECE_IMAGES,
    POSITION_IDS,
    SEGMENT_IDS,
    TOKENS,
    Pack,
)
from raylance.samples.table import SampleTable
from raylance.source.reader import PieceReader, Prepare, RowReader
from raylance.source.retrying import Wanted, always
from raylance.source.rows import Completion, RowSource, Selected
from raylance.source.selection import Selection
from raylance.source.version import Source

logger = logging.getLogger(__name__)

_warned: set[Pack] = set()  # settings whose sequences without a label were named
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DocumentReader(PieceReader):
    """Reads documents as lists of numbers, in columns of the names that sequences have; checks them.

    Attributes:
        reader: Reads the stored columns.
        names: For each column to read its new name; the first one is that of the tokens.
        ids: Type of the tokens.
        media: The `Patches` of the column of images of documents; None for none.
        expand: Converts documents whose images are to become tokens; None if they are stored with these.
    """

    reader: RowReader
    names: Mapping[str, str]
    ids: "np.dtype[Any]"
    uri: str
    media: Any = None
    expand: "ExpandImages | None" = None

    def read_pieces(
        self, offsets: Int64Array, prepare: Prepare[T], add: Callable[[T], bool], is_wanted: Wanted = always
    ) -> None:
        """See `RowReader.read_pieces`."""

        def prepare_lists(first: int, table: pa.Table, places: Int64Array | None) -> T:
            return prepare(first, self._checked(wanted_rows(table, places)), None)

        self.reader.read_pieces(offsets, prepare_lists, add, is_wanted)

    def _checked(self, table: pa.Table) -> pa.Table:
        rows, lists = table[ROW_OFFSET].to_numpy(), dict[str, pa.Array]()
        (tokens, *_), ends = self.names, np.zeros(1, dtype=np.int64)
        for name, made in self.names.items():
            column = one_array(table[name])
            begins = column.offsets.to_numpy().astype(np.int64)
            inner = column.values[begins[0] : begins[-1]]
            if column.null_count or inner.null_count:
                raise DatasetError(
                    f"Pack: column {name!r} of {self.uri!r} has nulls among the rows {rows[0]} to {rows[-1]}. Nothing "
                    "more is read. Write the dataset without nulls in it."
                )
            begins -= begins[0]
            ends = begins if name == tokens else ends
            if not np.array_equal(begins, ends):
                at = int(np.argmax(np.diff(begins) != np.diff(ends)))
                raise DatasetError(
                    f"Pack: the row at offset {rows[at]} of {self.uri!r} has {np.diff(ends)[at]} values in "
                    f"{tokens!r} and {np.diff(begins)[at]} in {name!r}. Nothing more is read. Columns that are packed "
                    "together have one value for each token."
                )
            values = inner.to_numpy(zero_copy_only=False)
            if name == tokens:
                self._check_range(name, values)
                values = values.astype(self.ids, copy=False)
            lists[made] = pa.LargeListArray.from_arrays(begins, values)
        if self.media is not None:
            images = lists[self.media.column] = _as_lists(one_array(table[self.media.column]))
            if self.expand is not None:
                texts = {name: lists[name] for name in self.names.values()}
                lists |= self.expand(texts, images, table[ROW_OFFSET].to_numpy(), self.uri)
        return pa.table({**lists, ROW_OFFSET: table[ROW_OFFSET]})

    def _check_range(self, name: str, tokens: npt.NDArray[Any]) -> None:
        limits = np.iinfo(self.ids)
        if tokens.dtype == self.ids or not len(tokens):
            return
        least, most = tokens.min(), tokens.max()
        if least < limits.min or most > limits.max:
            raise DatasetError(
                f"Pack: column {name!r} of {self.uri!r} holds {tokens.dtype} from {least} to {most}, and sequences are "
                f"of {self.ids}, which cannot hold them. Nothing more is read. Write the dataset with token ids of "
                f"less than 2**{limits.bits - 1}."
            )

    def close(self) -> None:
        """See `RowReader.close`."""
        self.reader.close()


def _as_lists(images: pa.Array) -> pa.Array:
    """Returns images of documents as lists; those of a document without an image are empty."""
    if pa.types.is_list(images.type) or pa.types.is_large_list(images.type):
        return pc.fill_null(images, pa.scalar([], images.type)) if images.null_count else images
    ends = np.append(0, np.cumsum(images.is_valid().to_numpy(zero_copy_only=False), dtype=np.int32))
    return pa.ListArray.from_arrays(ends, images.drop_null())


def tokens_of(media: Any, patches: Int64Array) -> Int64Array:
    """Returns the number of tokens of images; one, its placeholder, of an image whose size is not known."""
    return np.asarray(np.maximum(patches // media.merge**2, 1), dtype=np.int64)


@dataclasses.dataclass(frozen=True, slots=True)
class ExpandImages:
    """Puts as many placeholders in the place of each one as its image has tokens.

    Attributes:
        media: See `Pack.media`; it measures images by themselves.
        placeholder: See `Pack.placeholder`.
        lengths: Returns for row offsets the lengths of documents by which they were packed, int64.
    """

    media: Any
    placeholder: int
    lengths: Callable[[Int64Array], Int64Array]

    def __call__(
        self, texts: Mapping[str, pa.Array], images: pa.Array, rows: Int64Array, uri: str
    ) -> dict[str, pa.Array]:
        """Returns the lists of documents, those of tokens first, with more values. Raises DatasetError if a document
        has another number of placeholders than of images, or of tokens than it was packed by.
        """
        patches, counts = self.media.measure_images(pa.table({self.media.column: images}))
        tokens, *_ = texts.values()
        ends, is_place = tokens.offsets.to_numpy(), tokens.values.to_numpy() == self.placeholder
        found = sum_lists(is_place, np.diff(ends))
        if len(other := np.flatnonzero(found != counts)):
            at = int(other[0])
            raise DatasetError(
                f"Pack(expand=True): the row at offset {rows[at]} of {uri!r} has {found[at]} tokens "
                f"{self.placeholder}, and {counts[at]} images; the epoch stops here. Write one for each image, or "
                "leave expand= out if the documents have one for each token of an image."
            )
        repeats = np.ones(len(is_place), dtype=np.int64)
        repeats[is_place] = tokens_of(self.media, patches)
        ends = np.append(0, np.cumsum(repeats))[ends]
        made, wanted = np.diff(ends), self.lengths(rows)
        if len(other := np.flatnonzero(made != wanted)):
            at = int(other[0])
            raise DatasetError(
                f"Pack(expand=True): the row at offset {rows[at]} of {uri!r} has {made[at]} tokens by the headers of "
                f"its images, and {wanted[at]} by the sizes that were found when the dataset was opened; the epoch "
                "stops here. Correct the columns of heights and widths, or the image, or leave the row out by filter=."
            )
        return {
            name: pa.LargeListArray.from_arrays(ends, np.repeat(column.values.to_numpy(), repeats))
            for name, column in texts.items()
        }


@dataclasses.dataclass(frozen=True, slots=True)
class PackCompletion(Completion):
    """Adds positions, segments and labels to sequences, in place of what says where pieces begin."""

    pack: Pack

    @property
    def rows(self) -> int:
        """See `Completion.rows`."""
        return max(1, TOKENS_AT_ONCE // self.pack.length)

    @property
    def added_bytes(self) -> int:
        """See `Completion.added_bytes`."""
        return 4 * self.pack.length * (len(self.pack.outputs) - len(self.pack.names) + 2 * self.pack.mrope)

    def __call__(self, table: pa.Table, lend: Lend = fresh_memory) -> pa.Table:
        """See `Completion`."""
        pack, count = self.pack, table.num_rows
        columns = dict(zip(table.column_names, table.columns, strict=True))
        begins, tokens, images = columns.pop(BEGINS), columns.pop(TOKENS), columns.pop(PIECE_IMAGES, None)
        names = [name for name in pack.outputs if name not in columns]
        made = {name: lend(4 * count * pack.length).view(np.int32).reshape(count, pack.length) for name in names}
        positions = np.empty((0, 3, pack.length), dtype=np.int32)
        if count:
            read = {name: _array_of(columns[name]) for name in (INPUT_IDS, *pack.names[1:])}
            places = one_array(begins)
            ends = places.offsets.to_numpy()
            fill_columns(pack, places.values.to_numpy(), ends, tokens.to_numpy(), read, made)
            if pack.placeholder is not None:
                grids = _grids(pack, read[INPUT_IDS], columns, places, images)
                if LABELS in made:
                    made[LABELS][made[LABELS] == pack.placeholder] = pack.ignore_index
                if pack.mrope:
                    ids, segments = read[INPUT_IDS], made[SEGMENT_IDS]
                    positions = by_axis(ids, segments, pack.placeholder, grids, pack.media.merge)
            if pack.label_mask is not None and LABELS in made and pack not in _warned:
                _warn_of_no_labels(pack, (made[LABELS] == pack.ignore_index).all(axis=1))
        lists = {name: fixed_lists(made[name]) for name in names}
        if pack.mrope:
            kind = pa.fixed_shape_tensor(pa.int32(), (3, pack.length))
            stored = fixed_lists(positions.reshape(count, 3 * pack.length))
            lists[POSITION_IDS] = pa.ExtensionArray.from_storage(kind, stored)
        return pa.table(lists | columns).select(
            [*pack.outputs, *(name for name in columns if name not in pack.outputs)]
        )


def _grids(
    pack: Pack,
    ids: npt.NDArray[Any],
    columns: Mapping[str, pa.ChunkedArray],
    places: pa.Array,
    images: pa.ChunkedArray,
) -> Int64Array:
    """Returns the grids of the images of sequences, int64, (m, 3). `places` are those at which pieces begin, and
    `images` the numbers of images of pieces. Raises DatasetError if a document has another number of placeholders than
    its images have tokens.
    """
    (grid,) = pack.media.companions
    made = one_array(columns[grid.output_name])
    grids: Int64Array = values_of(made.flatten().storage).to_numpy().reshape(-1, 3).astype(np.int64)
    wanted = sum_lists(grids.prod(axis=1) // pack.media.merge**2, one_array(images).flatten().to_numpy())
    offsets = places.offsets.to_numpy()
    firsts = places.flatten().to_numpy() + np.repeat(np.arange(len(ids)) * ids.shape[1], np.diff(offsets))
    found = np.add.reduceat(ids.reshape(-1) == pack.placeholder, firsts, dtype=np.int64)
    if len(other := np.flatnonzero(wanted != found)):
        begin, at = int(firsts[other[0]]), int(other[0])
        text = ", ".join(map(str, ids.reshape(-1)[begin : begin + 8].tolist()))
        raise DatasetError(
            f"Pack: a document that begins with the tokens {text} has {found[at]} tokens {pack.placeholder}, and its "
            f"images become {wanted[at]}, or the header of one cannot be read; the epoch stops here. Write documents "
            "with as many as grid() of the Patches says, the product of its numbers divided by the square of merge, or "
            "leave the document out with filter=."
        )
    return grids


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


def _array_of(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Returns lists of one length as an array (n, length)."""
    lists = one_array(column)
    values: npt.NDArray[Any] = values_of(lists).to_numpy()
    return values.reshape(len(lists), -1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows(RowSource):
    """The sequences into which documents are packed.

    Attributes:
        documents: The rows that are documents.
        table: The table of sequences, `PackTable` or `Documents`.
        pack: The setting.
        ids: Name of the type of tokens.
        completion: See `RowSource.completion`.
    """

    documents: RowSource
    table: Shared[Any]
    pack: Pack | PackTokens
    ids: str
    completion: Completion | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """See `RowSource.sources`."""
        return self.documents.sources

    @property
    def loaded_bytes(self) -> float:
        """See `RowSource.loaded_bytes`."""
        return self.row_bytes / self.rows_each

    @property
    def rows_each(self) -> float:
        """See `RowSource.rows_each`."""
        return self.documents.load_selection().rows / self.load_selection().rows

    def load_selection(self) -> Selected:
        """See `RowSource.load_selection`."""
        found: Selected = self.table.get()
        return found

    def load_samples(self) -> SampleTable:
        """See `RowSource.load_samples`."""
        samples: SampleTable = self.table.get().samples(self.documents.load_selection().offsets)
        return samples

    def check_asked(self, offsets: Int64Array) -> None:
        """See `RowSource.check_asked`."""
        rows = self.load_selection().rows
        if len(others := offsets[(offsets < 0) | (offsets >= rows)]):
            raise IndexError(f"sequences are numbered from 0 to {rows - 1}: {others.tolist()[:5]} are not there")

    def has_rows_of(self, version: Any, identity: Any) -> bool:
        """See `RowSource.has_rows_of`."""
        return self.documents.has_rows_of(version, identity)

    def open_reader(self, retry_s: float | None = None) -> RowReader:
        """See `RowSource.open_reader`."""
        tokens, *others = self.pack.names
        names = {tokens: INPUT_IDS} | {name: name for name in others}
        reader = self.documents.open_reader(retry_s)
        media: Any = getattr(self.pack, "media", None)
        expand = None
        if isinstance(self.pack, Pack) and self.pack.placeholder is not None and self.pack.expand:
            by_header = dataclasses.replace(media, height=None, width=None)
            expand = ExpandImages(by_header, self.pack.placeholder, self._lengths)
        return DocumentReader(
            reader=reader,
            names=names,
            ids=np.dtype(self.ids),
            uri=str(self.uri),
            media=media,
            expand=expand,
        )

    def _lengths(self, offsets: Int64Array) -> Int64Array:
        selection = cast("Selection", self.documents.load_selection())
        lengths: Int64Array = self.table.get().lengths[selection.count_before(offsets)]
        return lengths

    def map_shared(self, change: Callable[[Shared[Any]], Shared[Any]]) -> Self:
        """See `RowSource.map_shared`."""
        return dataclasses.replace(self, documents=self.documents.map_shared(change), table=change(self.table))
