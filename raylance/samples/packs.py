"""How documents of tokens are packed into sequences of one length: which pieces of which documents each sequence has.

Documents are packed in blocks of consecutive documents. In each epoch, the documents of a block are shuffled before
they are packed, so that a document has other neighbours. A block has the same number of sequences in every epoch, and
the pieces of a sequence follow from those of its block alone. So sequences are like rows: any order shuffles them, and
a run may resume at any of them.
"""

import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from raylance.arguments import check_flag, check_integer, check_word
from raylance.descriptions import OMIT_DEFAULT, Setting
from raylance.errors import ConfigError, DatasetError
from raylance.orders.order import PicklesFields
from raylance.orders.permutation import Int32Array, Int64Array, derive_key, permute, subkeys
from raylance.samples.table import Described, Located, Ranges, ResolvingTable, range_numbers

_MOST_LENGTH = 1 << 24
_LEAST_ROWS, _MOST_ROWS, _BLOCK_TOKENS = 16, 8192, 3 << 18  # sizes of a block
INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS = "input_ids", "labels", "position_ids", "segment_ids"
# Readers give these in place of labels, positions and segments: lists of the places at which pieces of documents begin,
# int32; and the number of tokens without padding, int32.
BEGINS, TOKENS = "_begins", "_tokens"
PIECE_IMAGES = "_images"
"""Readers give the number of images of each piece of a document, too: lists of int32."""
_MADE = (INPUT_IDS, LABELS, POSITION_IDS, SEGMENT_IDS, BEGINS, TOKENS, PIECE_IMAGES)


@dataclasses.dataclass(frozen=True, slots=True)
class Pack(Setting):
    """Packs documents, which are lists of tokens, into sequences of one length. Pass it to `raylance.dataset` as
    `samples`.

    A batch holds, for n sequences, arrays of shape (n, length): `input_ids`, int32; the other columns, of their stored
    type; `labels`, int32, for `torch.nn.functional.cross_entropy` with `dtypes={"labels": torch.int64}` of the
    iterator; `position_ids`, int32, which count from 0 in each piece of a document; and `segment_ids`,
    int32, which number the pieces of a sequence from 0, and are -1 for padding. `raylance.text.cu_seqlens` makes the
    arguments of attention over lengths ("varlen") from `segment_ids`.

    Attributes:
        columns: The column of tokens; or it and other columns of lists, which have one value for each token.
        length: Number of tokens of a sequence.
        policy: "stream" puts documents one after the other, and cuts the string of all tokens: only the last sequence
            has padding, and documents may be cut. "whole" cuts no document: each block is packed by best fit in
            descending order of lengths, which fits at least as well as first fit does in most cases.
        eos_id: Token to put after each document; None for no token. Other columns repeat their last value there.
        pad_id: Token of padding. Other columns have 0 there.
        labels: "shifted": the label of a token is the next token of the same piece; "same": the token itself, for
            models that shift labels themselves; None for no labels.
        label_mask: One of `columns`. Tokens that have 0 there are no labels, as those of a prompt: with "shifted",
            position i has the label `ignore_index` if token i + 1 has 0. A sequence may then
            have no label at all, as a piece of a long prompt that `too_long` cuts; a warning says so once.
        ignore_index: Label of tokens that are not learnt: at the end of a piece (with "same", at its beginning), in
            padding, and where `label_mask` is 0.
        too_long: With "whole", what happens to documents of more than `length` tokens: "split" cuts them into pieces,
            "truncate" leaves out their ends, "drop" leaves them out, "raise" is an error. The number of tokens that are
            left out is logged. With "stream", which cuts any document, others than "split" have no effect.
        block_rows: Number of documents that are shuffled and packed together. "auto": up to 8,192 documents, and up to
            three quarters of a million tokens, but 16 documents at least.
        shuffle: Whether documents are shuffled in their blocks, in each epoch in another way.
        media: A `raylance.Patches` of a column of images, or of lists of them, with policy="whole": batches have the
            patches of all images, in the order of their documents, as the `Patches` says. A document comes with all of
            its images, so `too_long` is "drop" or "raise".
        placeholder: With `media`, the token that stands for a part of an image. Documents have as many of them as their
            images have tokens, which are patches divided by the square of `merge`; the iterator raises a DatasetError
            if they do not, as where the header of an image cannot be read. They are no labels.
        expand: Whether documents have one placeholder for each of their images, which becomes as many as the image has
            tokens; other columns repeat their value there. The sizes of all images are then found when the dataset is
            opened, and kept, as for the cost that a `Patches` is.
        mrope: Whether `position_ids` are (n, 3, length), by time, height and width, as the Qwen2-VL family counts them
            (Wang et al., 2024, section 2.1), whose models take `position_ids.transpose(0, 1)`: a word has one position
            on all axes, the tokens of an image have those of its grid after the last position before it.
    """

    _hints: ClassVar = {
        **dict.fromkeys(("mask", "loss_mask"), 'label_mask="…" names the column of the mask, which columns= has, too'),
        **dict.fromkeys(("seq_len", "max_length", "block_size"), "length= is the number of tokens of a sequence"),
    }
    columns: str | Sequence[str]
    length: int
    policy: Literal["stream", "whole"] = "stream"
    eos_id: int | None = None
    pad_id: int = 0
    labels: Literal["shifted", "same"] | None = "shifted"
    label_mask: str | None = None
    ignore_index: int = -100
    too_long: Literal["split", "truncate", "drop", "raise"] = "split"
    block_rows: int | Literal["auto"] = "auto"
    shuffle: bool = True
    media: Any = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    placeholder: int | None = dataclasses.field(default=None, metadata=OMIT_DEFAULT)
    mrope: bool = dataclasses.field(default=False, metadata=OMIT_DEFAULT)
    expand: bool = dataclasses.field(default=False, metadata=OMIT_DEFAULT)

    def __repr__(self) -> str:
        """Returns the call, without fields of later versions that have their defaults: fingerprints stay the same."""
        fields = dataclasses.fields(self)
        shown = [each for each in fields if not each.metadata or getattr(self, each.name) != each.default]
        return f"Pack({', '.join(f'{each.name}={getattr(self, each.name)!r}' for each in shown)})"

    def __post_init__(self) -> None:
        given = self.columns
        columns = [given] if isinstance(given, str) else list(given) if isinstance(given, list | tuple) else []
        if (
            len(set(columns)) != len(columns)
            or not columns
            or not all(isinstance(name, str) and name for name in columns)
        ):
            raise ConfigError(f"Pack(columns={self.columns!r}): give the column of tokens first, then any others.")
        if len({*columns[1:], *_MADE}) != len(columns) - 1 + len(_MADE):
            raise ConfigError(
                f"Pack(columns={columns!r}): the first column holds the tokens, and becomes input_ids; the others keep "
                f"their names, which must differ from one another and from {', '.join(_MADE)}. Put the tokens first."
            )
        object.__setattr__(self, "columns", tuple(columns))
        object.__setattr__(self, "length", check_integer("Pack: length", self.length, 1))
        if self.length > _MOST_LENGTH:
            raise ConfigError(f"Pack(length={self.length:,}): give at most {_MOST_LENGTH:,}.")
        check_word("Pack: policy", self.policy, ("stream", "whole"))
        check_word("Pack: labels", self.labels, ("shifted", "same", None))  # type: ignore[arg-type]
        check_flag("Pack: shuffle", self.shuffle)
        check_word("Pack: too_long", self.too_long, ("split", "truncate", "drop", "raise"))
        if self.block_rows != "auto":
            check_integer("Pack: block_rows", self.block_rows, 1)
        numbers = {"pad_id": self.pad_id, "ignore_index": self.ignore_index}
        for name, number in (numbers | ({} if self.eos_id is None else {"eos_id": self.eos_id})).items():
            if not -(2**31) <= check_integer(f"Pack: {name}", number, None) < 2**31:
                raise ConfigError(f"Pack({name}={number}): sequences are of int32, which cannot hold it.")
        if self.label_mask is not None and self.label_mask not in columns[1:]:
            raise ConfigError(
                f"Pack(label_mask={self.label_mask!r}): it is read like the tokens, so name it after them: "
                f"Pack({[columns[0], self.label_mask]!r}, …)."
            )
        check_flag("Pack: mrope", self.mrope)
        check_flag("Pack: expand", self.expand)
        if self.media is not None or self.placeholder is not None or self.mrope or self.expand:
            self._check_media()
        if self.too_long != "split" and self.policy == "stream":
            warnings.warn(
                f'Pack(too_long={self.too_long!r}) has no effect without policy="whole": "stream" cuts documents '
                "wherever a sequence ends. It is an error from 0.14 on. Give policy=, or leave too_long= out.",
                FutureWarning,
                stacklevel=3,
            )

    def _check_media(self) -> None:
        if not hasattr(type(self.media), "measure"):
            raise ConfigError(
                f"Pack(media={self.media!r}, placeholder={self.placeholder!r}, mrope={self.mrope}, "
                f"expand={self.expand}): give a raylance.Patches of a column of images as media."
            )
        made = [each.output_name for each in (self.media, *self.media.companions)]
        if taken := {*made, self.media.column} & {*_MADE, *self.names}:
            raise ConfigError(
                f"Pack(media={self.media!r}): {min(taken)!r} is the name of another column of a pack. Give the Patches "
                "a column of images, and another name=."
            )
        placeholder = check_integer("Pack: placeholder", self.placeholder, 0)
        object.__setattr__(self, "placeholder", placeholder)
        if placeholder >= 2**31 or placeholder in (self.pad_id, self.eos_id):
            raise ConfigError(
                f"Pack(placeholder={placeholder}, pad_id={self.pad_id}, eos_id={self.eos_id}): it must differ from the "
                "others, and be an int32."
            )
        if self.policy != "whole" or self.too_long not in ("drop", "raise"):
            raise ConfigError(
                f"Pack(media=…, policy={self.policy!r}, too_long={self.too_long!r}): an image would be cut from its "
                'tokens. Give policy="whole", and too_long="drop" or "raise".'
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns to read, the column of tokens first."""
        return tuple(self.columns)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the columns of a batch."""
        labels = () if self.labels is None else (LABELS,)
        return (INPUT_IDS, *self.names[1:], *labels, POSITION_IDS, SEGMENT_IDS)


class Pieces(NamedTuple):
    """Pieces of documents, in the order of their places in sequences; each field is int64, (pieces,).

    Attributes:
        sequence: Index of the sequence, among those asked for.
        document: Number of the document, counted from 0 in storage order.
        start: First token of the piece in the document.
        size: Number of its tokens; the last one may be the end-of-sequence token.
    """

    sequence: Int64Array
    document: Int64Array
    start: Int64Array
    size: Int64Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackTable(PicklesFields):
    """The sequences as selected rows.

    Attributes:
        pack: The setting.
        seed: Seed of the shuffles.
        block_rows: Number of documents of a block; the last one may have fewer.
        lengths: Number of tokens of each document, int32, (documents,).
        ends: Up to the end of each block: the number of tokens, with those after documents, if the policy is "stream";
            else the number of sequences. int64, (blocks,).
        identity: Hash of the documents.
        bins: With the policy "whole", the sequence of each piece, counted from 0 in each block; the pieces of a block
            are in descending order of their sizes. uint16 or uint32, (pieces,).
        piece_ends: With the policy "whole", the number of pieces up to the end of each block, int64, (blocks,).
    """

    pack: Pack
    seed: int
    block_rows: int
    lengths: Int32Array
    ends: Int64Array
    identity: str
    bins: npt.NDArray[Any]
    piece_ends: Int64Array

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(each.nbytes for each in (self.lengths, self.ends, self.bins, self.piece_ends))

    @property
    def rows(self) -> int:
        """Number of sequences."""
        last = int(self.ends[-1])
        return -(-last // self.pack.length) if self.pack.policy == "stream" else last

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences, with those after documents, without padding."""
        return int(_kept_sizes(_sizes(self.lengths, self.pack), self.pack).sum())

    @property
    def tokens_left_out(self) -> int:
        """Number of tokens that no sequence has, because their documents are too long."""
        return int(_sizes(self.lengths, self.pack).sum()) - self.tokens

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of the documents, the setting and the seed."""
        # These move no document, but by the lengths that images give them.
        pack = dataclasses.replace(self.pack, media=None, placeholder=None, mrope=False, expand=False)
        parts: tuple[Any, ...] = (self.identity, pack, self.block_rows, self.seed if self.pack.shuffle else None)
        if self.pack.expand:
            parts += (hashlib.blake2b(self.lengths.tobytes(), digest_size=16).hexdigest(),)
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Returns `selected`: the offset of a sequence is its number."""
        return selected

    def samples(self, documents: Callable[[Int64Array], Int64Array]) -> "PackedSamples":
        """Returns the samples; `documents` converts numbers of documents into row offsets."""
        return PackedSamples(self, documents)

    def pieces(self, sequences: Int64Array, epoch: int) -> Pieces:
        """Returns the pieces of sequences, ascending numbers, int64, (n,), in an epoch."""
        # Each part has the pieces of a block, in order. Blocks follow one another as their sequences do.
        parts = (self._of_stream if self.pack.policy == "stream" else self._of_whole)(sequences, epoch)
        if not parts:
            return Pieces(*[np.empty(0, dtype=np.int64)] * 4)
        return Pieces(*map(np.concatenate, zip(*parts, strict=True)))

    def _of_stream(self, sequences: Int64Array, epoch: int) -> list[Pieces]:
        length, parts = self.pack.length, []
        begins = sequences * length
        ends = np.minimum(begins + length, self.ends[-1])
        first = np.searchsorted(self.ends, begins, side="right")
        last = np.searchsorted(self.ends, ends, side="left")
        blocks = first if (last - first <= 1).all() else np.arange(first.min(), last.max() + 1)
        for block in np.unique(np.append(blocks, last)).tolist():
            here = np.flatnonzero((first <= block) & (block <= last))
            if not len(here):
                continue
            opening, closing = int(self.ends[block - 1]) if block else 0, int(self.ends[block])
            documents, text_ends = self._make_stream(block, epoch)
            low = np.maximum(begins[here], opening) - opening
            high = np.minimum(ends[here], closing) - opening
            from_, to = np.searchsorted(text_ends, low, side="right"), np.searchsorted(text_ends, high, side="left")
            counts = np.maximum(to - from_ + 1, 0)
            index = np.repeat(np.arange(len(here)), counts)
            at = range_numbers(from_, counts)
            text_begins = np.append(0, text_ends[:-1])[at]
            start, end = np.maximum(low[index], text_begins), np.minimum(high[index], text_ends[at])
            kept = np.flatnonzero(end > start)
            made = (here[index], documents[at], start - text_begins, end - start)
            parts.append(Pieces(*(each[kept] for each in made)))
        return parts

    def _of_whole(self, sequences: Int64Array, epoch: int) -> list[Pieces]:
        parts = []
        which = np.searchsorted(self.ends, sequences, side="right")
        for block in np.unique(which).tolist():
            here = np.flatnonzero(which == block)
            opening = int(self.ends[block - 1]) if block else 0
            packed, firsts = self._make_whole(block, epoch)
            number = sequences[here] - opening
            counts = firsts[number + 1] - firsts[number]
            index = np.repeat(np.arange(len(here)), counts)
            at = range_numbers(firsts[number], counts)
            parts.append(Pieces(here[index], *(field[at] for field in packed[1:])))
        return parts

    @property
    def block_ends(self) -> Int64Array:
        """The number of sequences up to the end of each block that ends one or more, int64, ascending."""
        ends = -(-self.ends // self.pack.length) if self.pack.policy == "stream" else self.ends
        return np.unique(ends[ends > 0])

    def documents(self, block: int) -> Int64Array:
        """Returns the numbers of the documents of a block."""
        first = block * self.block_rows
        return np.arange(first, min(first + self.block_rows, len(self.lengths)), dtype=np.int64)

    def _make_stream(self, block: int, epoch: int) -> tuple[Int64Array, Int64Array]:
        """Returns the documents of a block in the order of an epoch, and the ends of their texts in the block's."""
        documents = self.documents(block)
        if self.pack.shuffle:
            key = derive_key(self.seed, epoch, "pack", block)
            documents = documents[permute(np.arange(len(documents)), len(documents), key)]
        return documents, np.cumsum(_sizes(self.lengths[documents], self.pack), dtype=np.int64)

    def _make_whole(self, block: int, epoch: int) -> tuple[Pieces, Int64Array]:
        """Returns the pieces of a block's sequences in an epoch, and the index of the first piece of each sequence."""
        documents = self.documents(block)
        owner, start, size = cut_documents(_sizes(self.lengths[documents], self.pack), self.pack)
        key = derive_key(self.seed, epoch if self.pack.shuffle else 0, "pack", block)
        salt = subkeys(key, np.arange(len(size))) >> np.uint64(1)
        by_size = np.lexsort((salt, -size))  # documents of one length come at random
        bins = self.bins[self.piece_ends[block] - len(size) : self.piece_ends[block]].astype(np.int64)
        count = int(bins.max(initial=-1)) + 1
        order = by_size[np.lexsort((salt[by_size], bins))]  # and so do the pieces of a sequence
        of_bin = np.sort(bins)
        firsts = np.searchsorted(of_bin, np.arange(count + 1))
        return Pieces(of_bin, documents[owner[order]], start[order], size[order]), firsts


class Sequences(Protocol):
    """A table of sequences, by number."""

    @property
    def pack(self) -> Any:
        """The setting: `Pack` or `PackTokens`."""

    @property
    def fingerprint(self) -> str:
        """Hash of the documents and the setting."""

    def pieces(self, sequences: Int64Array, epoch: int) -> Pieces:
        """Returns the pieces of sequences, ascending numbers, int64, (n,), in an epoch."""


class PackedSamples(ResolvingTable):
    """The sequences of an epoch, by number, as samples of ranges of the selected documents."""

    columns: ClassVar[Mapping[str, int]] = {}

    def __init__(self, table: Sequences, documents: Callable[[Int64Array], Int64Array], epoch: int = 0) -> None:
        """See `PackTable.samples`."""
        self._table, self._documents, self._epoch = table, documents, epoch

    @property
    def fingerprint(self) -> str:
        """See `SampleTable.fingerprint`."""
        return self._table.fingerprint

    def of_epoch(self, epoch: int) -> "PackedSamples":
        """See `SampleTable.of_epoch`."""
        return type(self)(self._table, self._documents, epoch)

    def rows(self, anchors: Int64Array) -> Mapping[str, Int64Array]:
        """See `SampleTable.rows`."""
        return {}

    def resolve(self, anchors: Int64Array) -> tuple[Int64Array, Located]:
        """See `SampleTable.resolve`."""
        pack = self._table.pack
        asked, which = np.unique(anchors, return_inverse=True)
        pieces = self._table.pieces(asked, self._epoch)
        by_sequence = np.argsort(pieces.sequence, kind="stable")
        sequence, document, start, size = (each[by_sequence] for each in pieces)
        documents, at = np.unique(document, return_inverse=True)
        ranges = Ranges(
            length=pack.length,
            firsts=np.searchsorted(sequence, np.arange(len(asked) + 1)),
            at=at,
            start=start,
            size=size,
            after=np.full(len(asked), pack.eos_id or 0),
            padding=np.full(len(asked), pack.pad_id),
        )
        located = Located(anchors, np.zeros_like(anchors), np.empty((len(anchors), 0), np.int64), ranges.take(which))
        return self._documents(documents), located

    def describe(self, stored: Int64Array, ranges: Ranges) -> dict[str, Described]:
        """See `SampleTable.describe`."""
        begins = ranges.place.astype(np.int32), ranges.firsts
        return {BEGINS: begins, TOKENS: ranges.values.astype(np.int32)}


def make_table(
    pack: Pack, lengths: Int32Array, seed: int, identity: str, bins: npt.NDArray[Any] | None = None
) -> PackTable:
    """Makes the table of sequences of documents with these lengths; `bins` is the result of `find_bins`, if it is known
    already.

    Raises:
        DatasetError: If the documents have no token. See also `find_bins`.
    """
    block_rows = _block_rows(pack, lengths)
    blocks = _blocks_of(len(lengths), block_rows)
    found, counts = np.zeros(len(blocks), dtype=np.int64), np.zeros(len(blocks), dtype=np.int64)
    if bins is None:
        bins = find_bins(pack, lengths)
    begin = 0
    for number, block in enumerate(blocks):
        sizes = _sizes(lengths[block], pack)
        if pack.policy == "stream":
            found[number] = sizes.sum()
            continue
        counts[number] = int((-(-_kept_sizes(sizes, pack) // pack.length)).sum())
        if counts[number]:
            found[number] = int(bins[begin : begin + counts[number]].max()) + 1
        begin += counts[number]
    ends = np.cumsum(found)
    if not len(ends) or not ends[-1]:
        raise DatasetError(
            f"Pack: the selected documents have no token in column {pack.names[0]!r}; nothing was started. Select "
            "others by filter=."
        )
    return PackTable(
        pack=pack,
        seed=seed,
        block_rows=block_rows,
        lengths=lengths,
        ends=ends,
        identity=identity,
        bins=bins,
        piece_ends=np.cumsum(counts),
    )


def find_bins(pack: Pack, lengths: Int32Array) -> npt.NDArray[Any]:
    """Packs the documents of each block, if the policy is "whole". Returns `PackTable.bins`, which takes four
    nanoseconds a token to find, and depends on lengths and setting alone.

    Raises:
        DatasetError: If too_long="raise" and a document is too long.
    """
    bins = [np.empty(0, dtype=np.uint16)]
    for block in _blocks_of(len(lengths), _block_rows(pack, lengths)) if pack.policy == "whole" else ():
        sizes = _sizes(lengths[block], pack)
        if pack.too_long == "raise" and len(sizes) and sizes.max() > pack.length:
            raise DatasetError(
                f"{pack}: document {block.start + int(sizes.argmax())} has {sizes.max():,} tokens, and a sequence "
                f"{pack.length:,}; nothing was started. Give a larger length=, leave such documents out by filter=, "
                'or give too_long="split", "truncate" or "drop".'
            )
        of_pieces, count = best_fit(np.sort(cut_documents(sizes, pack)[2])[::-1], pack.length)
        bins.append(of_pieces.astype(np.uint16 if count <= 1 << 16 else np.uint32))
    return np.concatenate(bins)


def _blocks_of(documents: int, block_rows: int) -> list[slice]:
    return [slice(begin, begin + block_rows) for begin in range(0, documents, block_rows)]


def _block_rows(pack: Pack, lengths: Int32Array) -> int:
    if not isinstance(pack.block_rows, str):
        return pack.block_rows
    mean = max(1.0, float(lengths.mean())) if len(lengths) else 1.0
    return max(_LEAST_ROWS, min(_MOST_ROWS, int(_BLOCK_TOKENS / mean)))


def cut_documents(sizes: Int64Array, pack: Pack) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cuts documents that are too long, as the setting says; leaves out empty ones. Returns, for each piece, the index
    of its document, its first token and its number of tokens, each int64.
    """
    length, sizes = pack.length, _kept_sizes(sizes, pack)
    counts = -(-sizes // length)
    owner = np.repeat(np.arange(len(sizes)), counts)
    start = range_numbers(np.zeros_like(counts), counts) * length
    return owner, start, np.minimum(sizes[owner] - start, length)


def _kept_sizes(sizes: Int64Array, pack: Pack) -> Int64Array:
    """Returns how many tokens of each document sequences have."""
    if pack.policy == "whole" and pack.too_long == "drop":
        return np.where(sizes > pack.length, 0, sizes)
    if pack.policy == "whole" and pack.too_long == "truncate":
        return np.minimum(sizes, pack.length)
    return sizes


def best_fit(sizes: Int64Array, length: int) -> tuple[Int64Array, int]:
    """Puts pieces, in descending order of their sizes, each into the fullest bin that has room for it.

    This is best fit decreasing (Johnson: "Near-optimal bin packing algorithms", 1973); bins are kept by their room.
    The number of bins depends on the sizes alone.

    Args:
        sizes: Sizes from 1 to `length`, descending, int64, (n,).
        length: Size of a bin.

    Returns:
        The bin of each piece, int64, (n,), and the number of bins.
    """
    by_room: dict[int, list[int]] = {}
    rooms, bins, found = 0, 0, list[int]()  # bit r of `rooms` says that there is a bin with room for r tokens
    values, counts = np.unique(-sizes, return_counts=True)
    for size, left in zip((-values).tolist(), counts.tolist(), strict=True):
        while left:
            fitting = rooms >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                chosen = by_room[room].pop()
                if not by_room[room]:
                    rooms ^= 1 << room
            else:
                room, chosen, bins = length, bins, bins + 1
            together = min(left, room // size)
            found += [chosen] * together
            left -= together
            if rest := room - together * size:
                by_room.setdefault(rest, []).append(chosen)
                rooms |= 1 << rest
    return np.array(found, dtype=np.int64), bins


def _sizes(lengths: Int32Array, pack: Pack) -> Int64Array:
    return lengths.astype(np.int64) + (pack.eos_id is not None)
