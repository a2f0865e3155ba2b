"""`raylance.dataset()`: checks every argument, opens a version, selects rows, tries a few, and binds the order."""

import dataclasses
import itertools
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raylance.api.dataset import Dataset
from raylance.api.opening_videos import open_video
from raylance.arguments import check_integer, check_word, listed, refuse_unknown, warn_replaced
from raylance.columns import COMPONENT, DRAW, ROW_OFFSET, SEED, VALID, dataset_names
from raylance.decode.arrays import blank_row, is_dense, list_dtypes, list_lengths
from raylance.decode.block_decoding import BlockDecoding
from raylance.decode.column import window_of
from raylance.decode.decoder import BatchDecoder, Decoder, RaggedDecoder, is_on_device
from raylance.decode.decoding import Decoding, VideoFrames
from raylance.decode.frames import FrameCrop
from raylance.decode.open_decoding import OpenDecoding, resolve_decoder
from raylance.decode.pixels import holds_images
from raylance.decode.sample_reading import read_samples
from raylance.decode.transforms import Transform
from raylance.descriptions import describe
from raylance.environment.shared import Shared
from raylance.errors import ConfigError, DatasetError
from raylance.orders.buckets import Buckets
from raylance.orders.order import Order
from raylance.orders.registry import make_order
from raylance.planning.balance import Balance, check_balance
from raylance.planning.step_size import Ending, read_ending
from raylance.read_spec import DatasetSpec, ReadSpec
from raylance.samples.pack_tokens import PackTokens
from raylance.samples.packs import Pack
from raylance.samples.table import SampleTable
from raylance.samples.windows import Windows
from raylance.source.costs import TokensOf, check_costs, share_costs
from raylance.source.derived import Derived, Made, Renamed
from raylance.source.episodes import check_windows, share_windows
from raylance.source.fields import blobs_inside, find_field, is_bytes, leaf_names
from raylance.source.filters import check_filter
from raylance.source.namespace import NamespaceTable
from raylance.source.packing import pack_rows, pack_sequences
from raylance.source.pickled import refuse_pickled
from raylance.source.provenance import STALE, Stale, check_fresh
from raylance.source.reader import READ_MODES, Reader, ReadMode, RowReader, stored_row_bytes
from raylance.source.retrying import OPENING_S
from raylance.source.rows import table_rows
from raylance.source.selection import Selection, share_selection
from raylance.source.splits import Split
from raylance.source.storage_options import StorageOptions
from raylance.source.tables import SelectionRows, by_block, share_tables
from raylance.source.version import Source, Version, pin
from raylance.source.video_rows import add_columns
from raylance.source.videos import AddedColumns, Video

logger = logging.getLogger(__name__)

Samples = Windows | Pack | PackTokens | SampleTable
_PROBE_ROWS = 16
_PROBE_FRAMES = 4  # rows whose frames of videos are decoded: each may lie in another file


def dataset(
    uri: str | os.PathLike[str] | NamespaceTable,
    *,
    version: Version | None = None,
    columns: Sequence[str | Decoder | Derived] | None = None,
    filter: str | None = None,
    split: Split | None = None,
    decode: Decoder | Derived | Sequence[Decoder | Derived] | None = None,
    transform: Transform | None = None,
    samples: Samples | None = None,
    cost: str | TokensOf | None = None,
    cost_folder: str | os.PathLike[str] | None = None,
    balance: Balance | None = None,
    order: str | Order = "window",
    seed: int = 0,
    window_bytes: int | None = None,
    remainder: Ending = "drop",
    on_bad_row: Literal["raise", "mask"] = "raise",
    max_bad_rows: int | float | None = 0.01,
    read: ReadMode = "auto",
    stale: Stale = "warn",
    storage_options: StorageOptions | None = None,
    **others: Any,
) -> Dataset:
    """Opens a Lance dataset for training: pins the version, builds the selection, checks every argument.

    Args:
        uri: Path or URI of the dataset, or of a branch of it, readable from every node; or a
            `raylance.namespaces.NamespaceTable`.
        version: Version number, tag, or (branch, number). None takes the newest version, and (branch, None) the newest
            version of the branch. The version is resolved now, and recorded in checkpoints.
        columns: Columns to deliver; None for all. An element is a name, or what makes a column, such as
            `raylance.Image("image", size=224)` or `raylance.Video(…)`. "image.bytes" names the field `bytes` of the
            struct `image`, and the column in batches. With None, a struct that holds blobs or a field to decode comes
            as the fields inside it.
        filter: SQL expression that selects rows.
        split: A part of the filtered rows: `FractionSplit`, `RangeSplit` or `ValueSplit`.
        decode: What makes columns, one or a list, if it does not stand in `columns`. Without `columns`, all other
            columns come, too.
        transform: A function that the decode actors run after decoding. It gets a dict of arrays by column, with
            `_rowoffset` (int64) and `_seed` (uint64, from row, epoch and seed, for `numpy.random.default_rng`). It may
            change the arrays in place, and returns a dict of arrays with the same number of rows. It gets pieces of
            batches, so its result for a row must not depend on other rows. Pictures have their channels last; torch
            batches have them first, unless the last axis of what it returns under that name has another length.
        samples: What a sample is; None for a row. `raylance.Windows` makes a sample of each selected row and of rows
            around it in the same episode; `raylance.Pack` packs documents of tokens into sequences; an object of a
            subclass of `raylance.SampleTable` makes a sample of any rows.
        cost: What each row costs to train on, such as its number of tokens: the name of a column of numbers; an SQL
            expression over such columns, as "tokens + 256 * images"; or `raylance.TokensOf("input_ids")`. Fractions are
            rounded up: give seconds as "1000 * seconds". Count padding, too, that comes by `raylance.Pad(multiple=…)`:
            `TokensOf` has the same `multiple`. The costs are read now, once for a version and a selection.
            The order `raylance.Buckets` and batches of a `raylance.Budget` need them.
        cost_folder: Folder that keeps the costs of more than 65,536 rows, or the lengths of as many documents for
            `raylance.Pack`, 4 bytes a row, for later starts: a path, or a URI that pyarrow can open, which gets
            its keys from the environment. None for `raylance/costs` in the user's cache folder. If a process is
            killed while it reads the costs, the next one on the same machine continues. Nothing removes old files.
        balance: `raylance.Balance` divides the rows of each step among the ranks so that they cost about the same. It
            needs `cost`.
        order: "window", "shard", "sequential", "row" or "bucket", or an order with its parameters.
        seed: Seed of the order and of augmentation, on every rank. A `FractionSplit` has another seed.
        window_bytes: Bytes of memory for the windows of a shuffle, in total over all ranks: the current and the next
            window of each lane. The sizes that `order` leaves to "auto" follow from it. None takes `max_window_bytes`
            of the run's `DataConfig`; without one, 512 MiB. Checkpoints record it, and a resume keeps it.
        remainder: How the rows after the last whole step are handled: "drop" leaves them out, "pad" fills the step with
            repeated rows, whose `_valid` is False, and "ragged" makes a shorter step. If that has fewer rows than there
            are data-parallel ranks, some get a batch without rows, and a warning with the first one. With
            "ragged_or_empty", there is no warning, and a global batch may have fewer rows than there are ranks.
        on_bad_row: "raise" stops at a bad row: a row that cannot be decoded, or on which the transform fails even if it
            gets this row alone. "mask" delivers zeros with `_valid` False instead.
        max_bad_rows: With "mask", how many bad rows a rank may be handed before there is an error. An integer counts
            different rows. A float is a fraction of all rows that the rank was handed since its start, checked from
            1,000 rows on. None for no limit.
        read: Method of reading: "range" or "take"; "auto" chooses one for each chunk by the density and size of its
            rows. `plan()` shows the choice.
        stale: For a dataset that jobs/materialize made from a source: if files of the source have changed since, "warn"
            logs a warning once, and "refuse" raises an error; "ignore" does not check. It is not an error if the source
            cannot be reached.
        storage_options: Options of the object store, as Lance names them; or a picklable function that returns them,
            called in each process that opens the dataset. If the options have "expires_at_millis", a time in
            milliseconds since 1970, the function is called again before that time: "refresh_offset_millis" earlier if
            the options have this, too, else a minute earlier.
        **others: Arguments of 0.12 that others have replaced. Any other is refused, and the error names the right one.

    Returns:
        A handle for `TorchTrainer(datasets=…)`, which can also be iterated directly as rank 0 of 1.

    Raises:
        DatasetError: If the dataset, version, tag or a column is missing; if the filter does not parse or selects
            nothing; if a column to decode is not binary, or none of its sampled rows can be decoded; with
            stale="refuse", if the source has changed.
        ConfigError: If an argument cannot be honoured.
    """
    kind = take_samples("raylance.dataset()", samples, others)
    at_end, may_be_empty = read_ending("raylance.dataset()", remainder, others)
    refuse_unknown("raylance.dataset()", others, dataset.__kwdefaults__ or ())
    check_word("on_bad_row", on_bad_row, ("raise", "mask"))
    check_word("read", read, READ_MODES)
    check_word("stale", stale, STALE)
    if split is not None and not isinstance(split, Split):
        raise ConfigError(f"split={split!r}: give a FractionSplit, a RangeSplit or a ValueSplit.")
    seed, made_order = check_integer("seed", seed, None), make_order(order)
    window_bytes = None if window_bytes is None else check_integer("window_bytes", window_bytes, 1)
    check_filter(filter)
    masks_bad_rows, most = on_bad_row == "mask", _check_bad_rows(max_bad_rows, on_bad_row)
    named, derived, decoders = _split_columns(columns, decode)
    asked = Decoding(
        decoders=_check_decoders(decoders, transform),
        seed=seed,
        mask_bad_rows=masks_bad_rows,
        max_bad_rows=most,
        transform=transform,
        shares=not made_order.scatters,
    )
    if isinstance(kind, Pack | PackTokens):
        named = _check_pack(kind, named, asked)
        if cost is not None or balance is not None or isinstance(made_order, Buckets):
            raise ConfigError(
                f"{kind} makes samples of one length, so all cost the same. Leave out cost=, balance= and the order "
                '"bucket"; and give the iterator global_batch_size=, the samples of a step, not budget=.'
            )
    check_balance(balance, has_costs=cost is not None)

    if isinstance(uri, NamespaceTable):
        uri, storage_options = uri.locate(storage_options, newest=version is None)
    source, opened = _open_version(uri, version, storage_options, stale)
    derived_names = {each.column for each in derived}
    of_stored = [
        each for each in asked.decoders if each.column not in derived_names and not isinstance(each, FrameCrop)
    ]
    names = _check_columns(opened, named, of_stored, may_be_none=bool(derived))
    added = _open_derived(opened, derived, names, asked, storage_options)
    selection = share_selection(source, filter, split, opened)
    table = None
    if kind is not None and not isinstance(kind, Pack | PackTokens):
        apart = {*(each.column for each in asked.decoders), *added.drops, *added.video_drops}
        plain = [name for name in names if name not in apart]
        made = [*derived_names, *_decoded_one_by_one(asked.decoders)]
        check_windows(opened, kind, plain, made, [each.output_name for each in asked.decoders])
        table, selection = share_windows(source, opened, kind, selection)
    spec = _try_rows(source, opened, selection, table, added, names, asked, read)
    if isinstance(kind, Pack | PackTokens):
        if isinstance(kind, Pack):
            packed = pack_sequences(source, opened, spec.source, kind, seed, cost_folder)
        else:
            packed = pack_rows(spec.source, kind)
        spec = ReadSpec(source=packed, delivers=packed.columns)
    costs = None if cost is None else check_costs(opened, cost, cost_folder)
    text = None if costs is None else costs.text
    selected = spec.source.load_selection()
    made_order = by_block(made_order, selected)
    bound_order, tables = made_order.bind(SelectionRows(source, opened, selected, text))
    return Dataset(
        DatasetSpec.of(
            spec,
            filter=filter,
            split=describe(split),
            order=bound_order,
            tables=share_tables(made_order, tables, source, selection),
            costs={} if costs is None else share_costs(source, opened, costs, selection),
            cost=None if costs is None else describe(cost),
            balance=balance,
            seed=seed,
            remainder=at_end,
            empty_batches=may_be_empty,
            masks_bad_rows=masks_bad_rows,
            window_bytes=window_bytes,
        )
    )


def _open_version(
    uri: str | os.PathLike[str], version: Version | None, storage_options: StorageOptions | None, stale: Stale
) -> tuple[Source, lance.LanceDataset]:
    """Pins a version of a dataset, and opens it."""
    source = pin(uri, version, storage_options)
    opened = source.open()
    refuse_pickled(opened.schema, f"{source.uri!r}, version {source.version},")
    check_fresh(opened, stale, storage_options)
    return source, opened


def _try_rows(
    source: Source,
    opened: lance.LanceDataset,
    selection: Shared[Selection],
    samples: Shared[SampleTable] | None,
    added: AddedColumns,
    names: Sequence[str],
    asked: Decoding,
    mode: ReadMode,
) -> ReadSpec:
    """Reads and decodes a few samples; returns what follows: sizes, the delivered schema, lengths of lists."""
    stored = Reader(pinned=source, dataset=opened, columns=names, row_bytes=1)
    reader = add_columns(stored, added, source.uri, retry_s=OPENING_S, missing=False)
    frames = tuple(VideoFrames(each.setting.column, each.shape, each.dtype) for each in added.videos)
    asked = dataclasses.replace(asked, frames=frames, datasets=dataset_names(source.uri))
    rows = probe = _probe(stored, selection.get())
    if samples is not None or reader is not stored:
        few = rows[ROW_OFFSET].to_numpy()[: _PROBE_FRAMES if added.videos else None]
        # Frames may be bad, because nobody uses the pixels.
        tried = dataclasses.replace(asked, mask_bad_rows=True).of_frames
        blocks = None if tried is None else BlockDecoding(tried)
        probe, _ = read_samples(reader, None if samples is None else samples.get(), few, blocks)
        probe = probe.drop_columns([VALID]) if blocks is not None else probe
    delivered = [name for name in probe.column_names if name != ROW_OFFSET]
    as_stored = {*delivered} - {each.column for each in asked.decoders}
    encoded = _encoded_images(rows, as_stored) if asked.transform is None else ()
    decoding, made = _resolve_decoding(asked, probe, delivered)
    # Measuring stored bytes costs a read for each fragment, and is not needed if all rows have the same size.
    fields = [find_field(opened.schema, name) for name in names]
    varies = not all(field is not None and is_dense(field.type) for field in fields)
    shared = decoding.of_blocks if decoding else None
    made_bytes = sum(shared.value_bytes.values()) if shared else 0
    table = table_rows(
        source,
        selection,
        names,
        row_bytes=max(1.0, rows.nbytes / rows.num_rows) + made_bytes,
        made_bytes=made_bytes,
        read=mode,
        samples=samples,
        added=added,
        sample_bytes=None if samples is None else probe.nbytes / probe.num_rows,
        stored_bytes=stored_row_bytes(opened, names) + made_bytes if varies else 0.0,
        shared_rows=_shared_rows(samples.get(), shared, probe) if samples and shared and shared.decoders else 0,
    )
    return ReadSpec(
        source=table,
        delivers=made.column_names,
        schema=made.schema.with_metadata(opened.schema.metadata),
        decoding=decoding,
        list_lengths=list_lengths(made, ragged=decoding.ragged if decoding else ()),
        list_dtypes=list_dtypes(made.schema),
        encoded=encoded,
    )


def _shared_rows(samples: SampleTable, shared: Decoding, probe: pa.Table) -> int:
    """Returns over how many stored rows the values of a sample lie that neighbours share: the most of a few samples,
    because those at the end of an episode have fewer. Rows that lie further from the others than a sample has rows, as
    a goal far ahead, do not count.
    """
    longest, rows = 1, samples.rows(probe[ROW_OFFSET].to_numpy())
    for of_sample in itertools.chain.from_iterable(rows[each.column] for each in shared.decoders):
        ordered = np.sort(of_sample)
        cuts = np.flatnonzero(np.diff(ordered) > len(ordered)) + 1
        longest = max(longest, *(int(run[-1] - run[0]) + 1 for run in np.split(ordered, cuts)))
    return longest


def _encoded_images(rows: pa.Table, delivered: Collection[str]) -> tuple[str, ...]:
    """Returns the columns, or bytes inside structs, that are delivered as they are stored and hold encoded images."""
    found = []
    for name in (name for name in rows.column_names if name in delivered):
        values = rows[name]
        if pa.types.is_struct(values.type) and values.type.get_field_index("bytes") >= 0:
            name, values = f"{name}.bytes", pc.struct_field(values, "bytes")  # as the datasets library stores images
        if holds_images(values):
            found.append(name)
    return tuple(found)


def take_samples(call: str, samples: Any, others: dict[str, Any]) -> Samples | None:
    """Returns what makes samples. Removes the arguments that `samples` has replaced from `others`, with a warning.

    Raises:
        ConfigError: If it is none of what makes samples, or several are given.
    """
    older = {name: others.pop(name) for name in ("pack", "windows") if name in others}
    given = [name for name, value in older.items() if value is not None]
    if given:
        warn_replaced(call, given, "samples=, which takes what they took")
    found = [*([] if samples is None else [samples]), *(older[name] for name in given)]
    if len(found) > 1:
        raise ConfigError(f"{call}: {' and '.join(map(repr, found))} each say what a sample is: give one of them.")
    if not all(isinstance(each, Samples) for each in found):
        raise ConfigError(
            f'samples={found[0]!r}: give raylance.Windows(episode=…, offsets={{…}}), raylance.Pack("input_ids", '
            "length=…), or an object of a subclass of raylance.SampleTable. Leave it out for rows."
        )
    return found[0] if found else None


def _check_pack(pack: Pack | PackTokens, columns: Sequence[str] | None, asked: Decoding) -> Sequence[str]:
    """Returns the columns to read."""
    if columns is not None or asked.decoders or asked.transform is not None:
        raise ConfigError(f"{pack} delivers the packed tokens alone: leave columns=, decode= and transform= out.")
    return list(pack.names) if isinstance(pack, Pack) else [pack.column]


def _check_bad_rows(max_bad_rows: Any, on_bad_row: str) -> int | float | None:
    if max_bad_rows is None:
        return None
    if on_bad_row != "mask" and max_bad_rows != 0.01:  # the default
        logger.warning(
            'max_bad_rows=%r limits masked rows, and on_bad_row="raise" masks none: the first bad row is an error. '
            'Pass on_bad_row="mask", or leave max_bad_rows= out.',
            max_bad_rows,
        )
    if isinstance(max_bad_rows, float | np.floating):
        if 0 <= max_bad_rows <= 1:
            return float(max_bad_rows)
        raise ConfigError(f"max_bad_rows={max_bad_rows!r}: a fraction lies in [0, 1]; a count is an integer.")
    if isinstance(max_bad_rows, bool) or not isinstance(max_bad_rows, int | np.integer) or max_bad_rows < 0:
        raise ConfigError(
            f"max_bad_rows={max_bad_rows!r}: must be a count, an integer of at least 0; a fraction in [0, 1]; or None."
        )
    return int(max_bad_rows)


def _decoded_one_by_one(decoders: Sequence[Decoder]) -> list[str]:
    """Returns the columns whose values are decoded each by itself, so that a sample may have several."""
    together = {each.column for each in decoders if isinstance(each, RaggedDecoder | BatchDecoder)}
    return [each.column for each in decoders if each.column not in together]


def _check_decoders(decode: Sequence[Decoder], transform: Transform | None) -> tuple[Decoder, ...]:
    decoders = tuple(decode)
    if not all(isinstance(decoder, Decoder) for decoder in decoders):
        raise ConfigError(
            f"decode={decode!r}: give raylance.Image(column, size=…), an object of a subclass of raylance.Decoder, or "
            "a list of them."
        )
    names = [each.output_name for each in decoders]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"decode= has {twice[0]!r} {names.count(twice[0])} times: decode each column once, or give each decoder of "
            "it a name of its own, name=."
        )
    leaders = [each.output_name for each in decoders if each.like is None]
    for each in decoders:
        if each.like is not None and each.like not in leaders:
            raise ConfigError(
                f"{type(each).__name__}({each.column!r}, like={each.like!r}): must name a decoded column that does not "
                f"use like= itself: {', '.join(leaders) or 'there is none'}."
            )
    if transform is not None and (late := [each for each in decoders if is_on_device(each)]):
        raise ConfigError(
            f"transform= runs in decode actors, before {type(late[0]).__name__}({late[0].column!r}) decodes on the "
            "trainer's device: it would get encoded bytes. Change the decoded tensors in the training loop instead."
        )
    _warn_of_unlike_crops(decoders)
    return decoders


def _warn_of_unlike_crops(decoders: Sequence[Decoder]) -> None:
    names = list(dict.fromkeys(each.column for each in decoders if each.is_random))  # views of one column may differ
    if len(names) > 1:
        logger.warning(
            "%s are augmented at random, each by itself: those of a row get different crops and flips. If they belong "
            "together, as an image and its mask do, let one follow the other: "
            'Image(%r, like=%r, mode="L", interpolation="nearest"), without augment= and hflip=; or crop both in a '
            "transform=, seeded with _seed.",
            " and ".join(names),
            names[1],
            names[0],
        )


def _resolve_decoding(decoding: Decoding, probe: pa.Table, names: Sequence[str]) -> tuple[Decoding | None, pa.Table]:
    """Fills settings that decoders leave open, such as `size`, from a few rows; also returns the rows as delivered."""
    if not decoding.made and decoding.transform is None:
        return None, probe.select(names)
    decoders = {each.output_name: _resolve(each, probe) for each in decoding.decoders if each.like is None}
    for each in decoding.decoders:
        if each.like is not None:
            leader = decoders[each.like]
            decoders[each.output_name] = _resolve(each.follow(leader), probe, leader)
    ordered = tuple(decoders[each.output_name] for each in decoding.decoders)
    widths = {each.column: window_of(probe.schema.field(each.column).type) for each in ordered}
    windows = {column: width for column, width in widths.items() if width}
    decoding = dataclasses.replace(decoding, decoders=ordered, windows=windows)
    if decoding.ragged:
        plain = dataclasses.replace(decoding, mask_bad_rows=True, transform=None, frames=())
        untransformed, _ = OpenDecoding(plain).apply(probe, 0)
        good = max(1, int(untransformed[VALID].to_numpy().sum()))
        decoding = dataclasses.replace(decoding, ragged_bytes=untransformed.select(decoding.ragged).nbytes / good)
    made, _ = OpenDecoding(dataclasses.replace(decoding, mask_bad_rows=True, frames=())).apply(probe, 0)
    made = made.drop_columns([VALID])
    return (decoding if decoding.transform is None else dataclasses.replace(decoding, blank=blank_row(made))), made


def _resolve(decoder: Decoder, probe: pa.Table, leader: Decoder | None = None) -> Decoder:
    if isinstance(decoder, FrameCrop):
        return decoder.of_type(probe.schema.field(decoder.column).type, leader)
    return resolve_decoder(decoder, probe, leader)


def _default_columns(schema: pa.Schema, decoded: Sequence[str]) -> list[str]:
    """Returns all columns. A struct with blobs, or with a field to decode, is replaced by the fields inside it."""
    names: list[str] = []
    for field in schema:
        inside = leaf_names(field, field.name)
        is_split = field.name not in decoded and (blobs_inside(field, field.name) or {*inside} & {*decoded})
        names += inside if is_split else [field.name]
    return names


def _find_fields(opened: lance.LanceDataset, names: Sequence[str]) -> dict[str, pa.Field]:
    """Returns the fields of columns, by name.

    Raises:
        DatasetError: If there is no such field, or a field has blobs inside it, which Lance does not read with it.
    """
    schema = opened.schema
    found = {name: find_field(schema, name) if isinstance(name, str) else None for name in names}
    if missing := sorted({repr(name) for name, field in found.items() if field is None}):
        raise DatasetError(
            f"{opened.uri!r} at version {opened.version} has no column {listed(missing)}; nothing was started. Its "
            f"columns are {listed(schema.names)}."
        )
    fields = {name: field for name, field in found.items() if field is not None}
    for name, field in fields.items():
        if blobs := blobs_inside(field, name):
            raise DatasetError(
                f"column {name!r} of {opened.uri!r} holds the blobs {', '.join(blobs)}, and Lance gives only their "
                "places, not their bytes, if the column is read as a whole; nothing was started. Name what lies inside "
                f"structs by itself, columns={leaf_names(field, name)}. Blobs inside lists cannot be read: leave the "
                "column out, or store one blob a row."
            )
    return fields


def _check_columns(
    opened: lance.LanceDataset, columns: Sequence[str] | None, decoders: Sequence[Decoder], *, may_be_none: bool
) -> list[str]:
    if isinstance(columns, str) or not isinstance(columns, Iterable | None):
        name = columns if isinstance(columns, str) else opened.schema.names[0]
        raise ConfigError(f"columns={columns!r}: give a list of names, such as [{name!r}].")
    decoded = [decoder.column for decoder in decoders]
    names = _default_columns(opened.schema, decoded) if columns is None else list(columns)
    fields = _find_fields(opened, [*names, *decoded])
    if not (names or may_be_none) or len(set(names)) < len(names):
        raise ConfigError(f"columns={names}: name at least one column, and each once.")
    added = {COMPONENT, DRAW, ROW_OFFSET, SEED, VALID}
    in_helpers = {decoder.column for decoder in decoders if not is_on_device(decoder)}
    plain = set(names) - {decoder.column for decoder in decoders}
    if reserved := sorted(added & set(names)):
        raise ConfigError(
            f"{opened.uri!r} has columns named {', '.join(reserved)}, the names of columns that raylance adds. "
            "Leave them out of columns=, or rename them in the dataset."
        )
    for decoder in decoders:
        name = decoder.column
        if name not in names:
            raise ConfigError(f"decode names {name!r}: it must be one of columns={names}.")
        if not is_bytes(fields[name]):
            raise DatasetError(
                f"column {name!r} is {fields[name].type}, not binary, so it holds no {decoder.content}; nothing was "
                "started. Decode a binary column, or leave decode= out."
            )
        if is_on_device(decoder) and name in in_helpers:
            raise ConfigError(
                f"column {name!r} is decoded in decode actors and, by {type(decoder).__name__}, on the trainer's "
                "device: its rows would travel twice. Decode a column in one place."
            )
        if (made := decoder.output_name) in {*plain, *added}:
            raise ConfigError(
                f"{type(decoder).__name__}({name!r}, name={made!r}): batches have another column of this name. Choose "
                "another one, or leave that column out of columns=."
            )
    return names


def _probe(reader: RowReader, selection: Selection) -> pa.Table:
    """Reads a few rows, spread over the selection, to measure row sizes and to try the decoders."""
    rows = np.unique(np.linspace(0, selection.rows - 1, _PROBE_ROWS).astype(np.int64))
    return reader.read(selection.offsets(rows))


def _split_columns(columns: Any, decode: Any) -> tuple[Any, list[Derived], list[Any]]:
    """Returns the names of stored columns; and what makes columns, which stands among the names or in `decode`: for
    readers, and for decoders.

    Raises:
        ConfigError: If it stands in both.
    """
    given = list(columns) if isinstance(columns, list | tuple) else []
    settings = [each for each in given if isinstance(each, Decoder | Derived)]
    if settings and decode is not None:
        raise ConfigError(
            f"columns= has {settings[0]!r}, and decode= has {decode!r}: name what makes columns in one of them. "
            "Move what decode= has into columns=."
        )
    names = columns
    if settings:
        made = {each.column for each in settings if isinstance(each, Derived)}
        known, names = [each for each in given if isinstance(each, str)], list[Any]()
        for each in given:
            if isinstance(each, Decoder):  # its stored column need not be named again
                if not (isinstance(each, FrameCrop) or each.column in (*made, *known, *names)):
                    names.append(each.column)
            elif not isinstance(each, Derived):
                names.append(each)
    else:
        settings = list(decode) if isinstance(decode, list | tuple) else [] if decode is None else [decode]
    derived = [each for each in settings if isinstance(each, Derived)]
    return names, derived, [each for each in settings if not isinstance(each, Derived)]


def _check_decoder_of_derived(decoder: Decoder, derived: Derived | None, opened: lance.LanceDataset) -> None:
    """Raises ConfigError if a decoder cannot decode the column that a reader makes; None if its column is stored."""
    if isinstance(decoder, FrameCrop) and not isinstance(derived, Video):
        raise ConfigError(f"FrameCrop({decoder.column!r}): decode= has no Video of this name. Nothing was started.")
    field = find_field(opened.schema, derived.stored) if isinstance(derived, Renamed) else None
    if derived is not None and not isinstance(decoder, FrameCrop) and not (field is not None and is_bytes(field)):
        raise ConfigError(
            f"{type(decoder).__name__}({decoder.column!r}): that is a {type(derived).__name__}, whose values are not "
            f"encoded {decoder.content}. Nothing was started."
        )


def _open_derived(
    opened: lance.LanceDataset,
    derived: Sequence[Derived],
    names: list[str],
    asked: Decoding,
    storage_options: StorageOptions | None,
) -> AddedColumns:
    """Opens what columns that readers make need. Adds the stored columns of which they are made to `names`."""
    by_name = {each.column: each for each in derived}
    for decoder in asked.decoders:
        _check_decoder_of_derived(decoder, by_name.get(decoder.column), opened)
    of_derived = {each.output_name for each in asked.decoders if each.column in by_name}  # which may keep the name
    made = [name for name in asked.names if name not in of_derived & by_name.keys()]
    taken, given = [*names, *made], {*names}
    for each in derived:
        if each.column in taken:
            kind = type(each).__name__
            raise ConfigError(f"{kind}({each.column!r}): batches have another column of this name. Choose another one.")
        taken.append(each.column)
        each.check(opened.schema, opened.uri)
        names += [name for name in each.needs if name not in names]
    for_videos = {name for each in derived if isinstance(each, Video) for name in each.needs}
    videos = {each.column: open_video(each, storage_options) for each in derived if isinstance(each, Video)}
    return AddedColumns(
        settings=tuple(videos[each.column].setting if isinstance(each, Video) else each for each in derived),
        videos=tuple(videos.values()),
        makers={each.column: each.open(storage_options) for each in derived if isinstance(each, Made)},
        drops=tuple(name for name in names if name not in given | for_videos),
        video_drops=tuple(name for name in names if name in for_videos - given),
    )
