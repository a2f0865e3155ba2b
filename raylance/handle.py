"""Owns `dataset()` and the handle that it returns, where every input is checked; never starts an actor by itself."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lance
import numpy as np
import pyarrow as pa

from raylance import collate
from raylance.catalog import make_order
from raylance.columns import COMPONENT, COMPONENT_SHIFT, DRAW, ROW_OFFSET, SEED, VALID
from raylance.decoding import Decoding, Transform
from raylance.errors import BadRowError, ConfigError, DatasetError
from raylance.images import Image, image_size
from raylance.loader import RankLoader
from raylance.order import Order
from raylance.packing import PackFeed, PackTokens, count_tokens
from raylance.permutation import Int64Array
from raylance.plan import REMAINDERS, Plan, Remainder
from raylance.reader import READ_MODES, Reader, ReadMode, is_blob, stored_row_bytes
from raylance.selection import Selection, pin, select
from raylance.spec import Feed, Options, Selected, Spec, TableFeed, make_plan
from raylance.split import Split
from raylance.summary import PlanSummary, summarise

_PROBE_ROWS = 16
_LARGEST_TRIAL = 1 << 21  # rows to plan for telling how they are read


def dataset(
    uri: str | os.PathLike[str],
    *,
    version: int | str | None = None,
    columns: Sequence[str] | None = None,
    filter: str | None = None,
    split: Split | None = None,
    decode: Image | Sequence[Image] | None = None,
    transform: Transform | None = None,
    pack: PackTokens | None = None,
    order: str | Order = "window",
    seed: int = 0,
    remainder: Remainder = "drop",
    on_bad_row: Literal["raise", "mask"] = "raise",
    read: ReadMode = "auto",
    storage_options: Mapping[str, str] | None = None,
) -> "Dataset":
    """Opens a Lance dataset for training: pins the version, builds the selection, checks every argument.

    Args:
        uri: Path or URI of the dataset, readable from every node.
        version: Version number or tag; None for the newest, resolved now and recorded in checkpoints.
        columns: Columns to deliver; None for all.
        filter: SQL expression that selects rows.
        split: A part of them: `FractionSplit`, `RangeSplit` or `ValueSplit`.
        decode: How image columns become pixels.
        transform: A function run by the decode actors on dicts of arrays, after decoding; see `Decoding.transform`.
        pack: Packs documents of tokens into sequences, which are then the rows; batches hold `input_ids` and `doc_ids`
            (n, length), the row offset of each token's document, and `first_row`, `first_token` where it begins.
        order: "window", "shard", "sequential" or "row", or an order with its parameters.
        seed: The one seed of everything random: order, augmentation.
        remainder: What becomes of the rows behind the last whole step: "drop", "pad" or "ragged".
        on_bad_row: "raise" stops at a row that cannot be decoded; "mask" delivers zeros with `_valid` False.
        read: "range" or "take" reads so; "auto" chooses for each chunk by the density of its rows and their size. The
            plan tells which.
        storage_options: Options of the object store.

    Returns:
        A handle for `TorchTrainer(datasets=…)`, which can be iterated in place as rank 0 of 1.

    Raises:
        DatasetError: A missing dataset, version, tag or column; a filter that does not parse or selects nothing; a
            column to decode that holds no images.
        ConfigError: An argument that cannot be honoured.
    """
    if remainder not in REMAINDERS:
        raise ConfigError(f"remainder={remainder!r}: must be one of {', '.join(map(repr, REMAINDERS))}.")
    if on_bad_row not in ("raise", "mask"):
        raise ConfigError(f"on_bad_row={on_bad_row!r}: must be 'raise' or 'mask'.")
    if read not in READ_MODES:
        raise ConfigError(f"read={read!r}: must be one of {', '.join(map(repr, READ_MODES))}.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ConfigError(f"seed={seed!r}: must be an integer.")
    made_order = make_order(order)
    if pack is not None:
        if columns is not None or decode is not None or transform is not None:
            raise ConfigError("pack= delivers the packed tokens alone: leave columns=, decode= and transform= out.")
        columns = [pack.column]
    images = [decode] if isinstance(decode, Image) else list(decode or ())
    if not all(isinstance(image, Image) for image in images):
        raise ConfigError(f"decode={decode!r}: give raylance.Image(column, size=…), or a list of them.")
    if split is not None and not isinstance(split, Split):
        raise ConfigError(f"split={split!r}: give a FractionSplit, a RangeSplit or a ValueSplit.")
    source = pin(uri, version, storage_options)
    opened = source.open()
    names = _check_columns(opened, columns, images)
    selection = select(source, filter, split)
    probe = _probe(opened, names, selection)
    decoding, delivers = None, names
    if images or transform is not None:
        settled = [_settle_size(image, probe) for image in images]
        decoding = Decoding(images=settled, seed=seed, mask_bad_rows=on_bad_row == "mask", transform=transform)
        made, _ = dataclasses.replace(decoding, mask_bad_rows=True, _buffers={}).apply(probe, 0)
        made = made.drop_columns([VALID])
        delivers = made.column_names
        if transform is not None:
            decoding = dataclasses.replace(decoding, transformed=made.schema)
    feed: Feed = TableFeed(
        source=source,
        selection=selection,
        columns=names,
        delivers=delivers,
        row_bytes=max(1.0, probe.nbytes / probe.num_rows),
        decoding=decoding,
        read=read,
        stored_bytes=stored_row_bytes(opened, names),
    )
    rows: Selected = selection
    if pack is not None:
        rows = count_tokens(feed.open_reader(), selection, pack)
        feed = PackFeed(documents=feed, table=rows, pack=pack)
    spec = Spec(
        filter=filter,
        split=None if split is None else repr(split),
        rows=rows.rows,
        fingerprint=rows.fingerprint,
        order=made_order.bind(_Lookup(opened, rows)),
        seed=seed,
        remainder=remainder,
        masks_bad_rows=on_bad_row == "mask",
    )
    return Dataset(feed, spec, Options())


class Dataset(RankLoader):
    """A pinned, filtered, ordered Lance dataset; also its own loader, as rank 0 of 1, for use without a trainer."""

    def __len__(self) -> int:
        """Selected rows."""
        return self._spec.rows

    def __repr__(self) -> str:
        return (
            f"raylance.dataset({self._feed.uri!r}, version={self._feed.version}, filter={self._spec.filter!r}): "
            f"{len(self):,} rows of {', '.join(self._feed.columns)}"
        )

    @property
    def version(self) -> Any:
        """The pinned version; of a mixture, versions by component."""
        return self._feed.version

    @property
    def schema(self) -> pa.Schema:
        """What is delivered, with the dataset's metadata; decoded images are fixed-shape tensors of uint8 (H, W, 3)."""
        fields = self._head(1, mask_bad_rows=True).drop_columns([ROW_OFFSET]).schema
        kept = self._feed.source.open().schema.metadata if isinstance(self._feed, TableFeed) else None
        return fields.with_metadata(kept)

    def _head(self, rows: int, *, mask_bad_rows: bool) -> pa.Table:
        feed = self._feed
        offsets = feed.load_selection().offsets(np.arange(rows))
        table = feed.open_reader().read(offsets)
        offsets = offsets & ((1 << COMPONENT_SHIFT) - 1)
        table = table.set_column(table.column_names.index(ROW_OFFSET), ROW_OFFSET, pa.array(offsets))
        if feed.decoding is not None:
            fresh = dataclasses.replace(feed.decoding, mask_bad_rows=mask_bad_rows, _buffers={})
            decoded, _ = fresh.apply(table, 0)
            table = decoded.append_column(ROW_OFFSET, table[ROW_OFFSET])
        return table.select([*feed.delivers, ROW_OFFSET])

    def head(self, rows: int = 5) -> collate.NumpyBatch:
        """Reads the first selected rows in storage order, in this process; consumes nothing and needs no Ray.

        Args:
            rows: How many.

        Returns:
            By column what `iter_batches` gives, and `_rowoffset`. Images are those of epoch 0.
        """
        return collate.to_numpy(self._head(min(rows, len(self)), mask_bad_rows=self._spec.masks_bad_rows), {})

    def plan(self, global_batch_size: int = 256, world_size: int = 1) -> PlanSummary:
        """Plans an epoch without reading anything.

        Args:
            global_batch_size: Rows of one step over all ranks.
            world_size: Ranks.

        Returns:
            A summary whose repr tells rows, shards, lanes, steps, the rows dropped or repeated, and bytes of a window.
        """
        plan = make_plan(self._feed, self._spec, self._options, global_batch_size, world_size, self._spec.remainder)
        feed, limit = self._feed, self._options.max_window_bytes
        return summarise(plan, feed.read_bytes, self._reads(plan), limit, feed.measure)

    def _reads(self, plan: Plan) -> str:
        """How the first chunk of rank 0 is read, and why."""
        feed, chunk = self._feed, plan.chunk_at(0, 0)
        if not isinstance(feed, TableFeed) or chunk is None:
            return "by its parts' own choice"
        if chunk.steps * plan.global_batch_size > _LARGEST_TRIAL * plan.world_size:
            return f"{feed.read}, decided a chunk at a time"
        offsets = feed.load_selection().offsets(np.unique(plan.chunk_rows(chunk, 0)))
        if not len(offsets):
            return "nothing"
        dense = len(offsets) / (offsets[-1] + 1 - offsets[0])
        return (
            f"{feed.open_reader().choose(offsets)} ({dense:.0%} of the rows between, {feed.row_bytes:,.0f} bytes each)"
        )

    def loader(self, *, rank: int = 0, world_size: int = 1, **options: Any) -> RankLoader:
        """Makes a loader outside of Ray Train.

        Args:
            rank: The rank it serves.
            world_size: Ranks that share the epoch.
            **options: Fields of `raylance.spec.Options`, such as `num_decoders=2`.

        Raises:
            ConfigError: For a rank outside the world, or an unknown or impossible option.
        """
        known = {field.name for field in dataclasses.fields(Options)}
        if set(options) - known:
            unknown = ", ".join(sorted(set(options) - known))
            raise ConfigError(f"loader() knows no {unknown}; options are {', '.join(sorted(known))}.")
        return self.shard(rank, world_size, Options(**options))

    def shard(self, rank: int, world_size: int, options: Options, kind: type[RankLoader] = RankLoader) -> RankLoader:
        """Makes the loader of one rank, at the start of epoch 0."""
        return kind(self._feed, self._spec, options, rank, world_size)

    def share(self) -> None:
        """Puts a large selection into the object store, so that all ranks read one copy of it."""
        self._feed = self._feed.shared()

    def __getstate__(self) -> dict[str, Any]:
        self.share()
        return super().__getstate__()


def _check_columns(opened: lance.LanceDataset, columns: Sequence[str] | None, images: Sequence[Image]) -> list[str]:
    schema = opened.schema
    if isinstance(columns, str):
        raise ConfigError(f"columns={columns!r}: give a list of names, here [{columns!r}].")
    names = list(schema.names if columns is None else columns)
    decoded = [image.column for image in images]
    missing = sorted({*names, *decoded} - set(schema.names))
    if missing:
        raise DatasetError(
            f"{opened.uri!r} at version {opened.version} has no column {', '.join(map(repr, missing))}; nothing was "
            f"started. Its columns are {', '.join(schema.names)}."
        )
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"columns={names}: name at least one column, and each once.")
    reserved = sorted(set(names) & {COMPONENT, DRAW, ROW_OFFSET, SEED, VALID})
    if reserved:
        raise ConfigError(
            f"{opened.uri!r} has columns named {', '.join(reserved)}, the names of columns that raylance adds. "
            "Leave them out of columns=, or rename them in the dataset."
        )
    for name in decoded:
        if name not in names or decoded.count(name) > 1:
            raise ConfigError(f"decode names {name!r}: it must be one of columns={names}, and be decoded once.")
        kind = schema.field(name).type
        if not (is_blob(schema.field(name)) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
            raise DatasetError(
                f"column {name!r} is {kind}, not binary, so it holds no encoded images; nothing was started. Decode a "
                "binary column of JPEG, PNG or WebP, or leave decode= out."
            )
    return names


@dataclasses.dataclass(frozen=True, slots=True)
class _Lookup:
    """What orders look up in a selection; see `raylance.order.Rows`."""

    dataset: lance.LanceDataset
    selection: Selected

    @property
    def count(self) -> int:
        return self.selection.rows

    def column(self, name: str) -> pa.ChunkedArray:
        if name not in self.dataset.schema.names:
            raise DatasetError(
                f"the order needs the column {name!r}, which {self.dataset.uri!r} does not have; nothing was started. "
                f"Its columns are {', '.join(self.dataset.schema.names)}."
            )
        offsets = self._rows("a column").offsets(np.arange(self.count))
        return Reader(dataset=self.dataset, columns=[name], row_bytes=8).read(offsets)[name]

    def fragment_ends(self) -> Int64Array:
        ends = np.cumsum([fragment.count_rows() for fragment in self.dataset.get_fragments()], dtype=np.int64)
        counted = np.unique(self._rows("fragments").count_before(ends))
        return counted[counted > 0]

    def _rows(self, what: str) -> Selection:
        if not isinstance(self.selection, Selection):
            raise ConfigError(
                f"the order needs {what} of each row, but with pack= the rows are sequences of many documents. Use an "
                "order that needs none: window, shard, sequential or row."
            )
        return self.selection


def _probe(opened: lance.LanceDataset, columns: Sequence[str], selection: Selection) -> pa.Table:
    """Reads a few rows, spread over the selection: the measure of row sizes, and of what decodes."""
    rows = np.unique(np.linspace(0, selection.rows - 1, _PROBE_ROWS).astype(np.int64))
    return Reader(dataset=opened, columns=columns, row_bytes=1).read(selection.offsets(rows))


def _settle_size(image: Image, probe: pa.Table) -> Image:
    """Checks that a column holds images, and takes the size from them where none is given.

    A damaged row among good ones is left to `on_bad_row`; a column of which no sampled row decodes is refused.
    """
    failures: list[Exception] = []
    for row in range(probe.num_rows):
        try:
            encoded = probe[image.column][row].as_py()
            if encoded is None:
                raise ValueError("is null")
            settled = image
            if image.size is None:
                size = image_size(encoded) if image.decode_fn is None else image.decode_fn(encoded).shape[:2]
                settled = dataclasses.replace(image, size=(int(size[0]), int(size[1])), keeps_size=True)
            Decoding(images=[settled], seed=0, mask_bad_rows=False).apply(probe.slice(row, 1), 0)
            return settled
        except (BadRowError, OSError, ValueError) as error:
            failures.append(error)
    raise DatasetError(
        f"column {image.column!r} holds no images: of {len(failures)} rows sampled none decodes (the first says: "
        f"{failures[0]}); nothing was started. Name a column of encoded images in decode=."
    ) from failures[0]
