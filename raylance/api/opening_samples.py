"""What the samples of a dataset are, and how a few of them are tried: the third and the fourth step of opening it."""

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raylance.api.asked import Asked, Samples, Stored, check_decoders
from raylance.api.opening_columns import Columns
from raylance.arguments import warn_replaced
from raylance.columns import ROW_OFFSET, VALID, dataset_names
from raylance.decode.arrays import blank_row, holds_files, is_dense, list_dtypes, list_lengths
from raylance.decode.block_decoding import BlockDecoding
from raylance.decode.column import encoded_values, window_of
from raylance.decode.decoder import Decoder
from raylance.decode.decoding import Decoding, VideoFrames
from raylance.decode.open_decoding import OpenDecoding, resolve_decoder
from raylance.decode.pixels import holds_images
from raylance.decode.sample_reading import read_samples
from raylance.descriptions import describe, written
from raylance.environment.shared import Shared
from raylance.errors import ConfigError
from raylance.opened import ReadSpec
from raylance.orders.buckets import Buckets
from raylance.samples.pack_tokens import PackTokens
from raylance.samples.packs import Pack
from raylance.samples.table import SampleTable
from raylance.samples.windows import Windows
from raylance.source.episodes import check_windows, share_windows
from raylance.source.fields import find_field
from raylance.source.packed import PackedRows
from raylance.source.packing import pack_rows, pack_sequences
from raylance.source.reader import Reader, RowReader, stored_row_bytes
from raylance.source.retrying import OPENING_S
from raylance.source.rows import RowSource, table_rows
from raylance.source.selection import Selection
from raylance.source.video_rows import add_columns

_PROBE_ROWS = 16
_PROBE_FRAMES = 4  # rows whose frames of videos are decoded: each may lie in another file


class Kind:
    """What is particular to a kind of samples, a class that `samples=` takes. Here: samples are rows."""

    has_columns = True
    """Whether batches have the columns that are read."""

    def check(self, asked: Asked) -> Asked:
        """Returns the arguments with the columns to read. Raises ConfigError if others do not fit the samples."""
        return asked

    def of_several(self, samples: Any) -> Collection[str]:
        """Returns the columns that have values of several rows in a sample."""
        return ()

    def select(
        self, asked: Asked, stored: Stored, columns: Columns, selection: Shared[Selection]
    ) -> tuple[Shared[SampleTable] | None, Shared[Selection]]:
        """Returns the table of samples, and the selected rows by which they are named. Raises ConfigError and
        DatasetError if columns do not fit.
        """
        return None, selection

    def deliver(self, asked: Asked, stored: Stored, rows: ReadSpec) -> ReadSpec:
        """Returns what is delivered, for the rows that are read."""
        return rows


class _RowsAround(Kind):
    """Samples of a selected row and of rows around it."""

    def of_several(self, samples: Any) -> Collection[str]:
        return list(samples.columns)

    def select(
        self, asked: Asked, stored: Stored, columns: Columns, selection: Shared[Selection]
    ) -> tuple[Shared[SampleTable] | None, Shared[Selection]]:
        samples: Any = asked.samples
        decoded = [each.output_name for each in asked.decoding.decoders]
        made = [*columns.derived, *columns.single]
        check_windows(stored.opened, samples, columns.plain, made, decoded)
        return share_windows(stored.source, stored.opened, samples, selection)


class _Packed(Kind):
    """Sequences of documents of tokens."""

    has_columns = False

    def check(self, asked: Asked) -> Asked:
        pack: Any = asked.samples
        makes = asked.derived or asked.decoding.decoders or asked.decoding.transform is not None
        if asked.columns is not None or makes:
            given = "columns= or decode=" if asked.decoding.transform is None else "transform="
            raise ConfigError(
                f"{type(pack).__name__} names the columns that it reads, and makes those of batches: leave {given} out."
            )
        if asked.cost is not None or asked.balance is not None or isinstance(asked.order, Buckets):
            raise ConfigError(
                f"{type(pack).__name__} makes samples of one length, so all cost the same. Leave out cost=, balance= "
                'and the order "bucket"; and give the iterator global_batch_size=, the samples of a step, not budget=.'
            )
        media = [] if getattr(pack, "media", None) is None else [pack.media]
        decoding = dataclasses.replace(asked.decoding, decoders=check_decoders(media, None))
        columns = [*self._columns(pack), *(each.column for each in media)]
        return dataclasses.replace(asked, columns=columns, decoding=decoding)

    def _columns(self, pack: Any) -> Sequence[str]:
        return list(pack.names)

    def deliver(self, asked: Asked, stored: Stored, rows: ReadSpec) -> ReadSpec:
        packed, decoding = self._pack(asked, stored, rows.source), rows.decoding
        if decoding is None:
            return ReadSpec(source=packed, delivers=packed.columns, filter=rows.filter, split=rows.split)
        # Of each sequence, which has lists of the images of its documents.
        ragged_bytes = decoding.ragged_bytes * packed.rows_each
        names = dataset_names(f"the sequences of {packed.uri}")  # errors count sequences, not documents
        decoding = dataclasses.replace(
            decoding, lists=tuple(decoding.columns), ragged_bytes=ragged_bytes, datasets=names
        )
        nothing = {name: pa.array([], pa.list_(pa.binary())) for name in decoding.columns}
        made, _ = OpenDecoding(decoding).apply(pa.table(nothing | {ROW_OFFSET: np.empty(0, dtype=np.int64)}), 0)
        schema = made.drop_columns([VALID]).schema
        return ReadSpec(
            source=packed,
            delivers=[*packed.columns, *schema.names],
            decoding=decoding,
            list_lengths=dict.fromkeys(schema.names),
            list_dtypes=list_dtypes(schema),
            filter=rows.filter,
            split=rows.split,
        )

    def _pack(self, asked: Asked, stored: Stored, documents: RowSource) -> PackedRows:
        pack: Any = asked.samples
        return pack_sequences(stored.source, stored.opened, documents, pack, asked.seed, asked.cost_folder)


class _Cut(_Packed):
    """Sequences that are cut from one string of tokens."""

    def _columns(self, pack: Any) -> Sequence[str]:
        return [pack.column]

    def _pack(self, asked: Asked, stored: Stored, documents: RowSource) -> PackedRows:
        pack: Any = asked.samples
        return pack_rows(documents, pack)


_ROWS = Kind()
_KINDS: dict[type, Kind] = {Windows: _RowsAround(), SampleTable: _RowsAround(), Pack: _Packed(), PackTokens: _Cut()}


def kind_of(samples: Samples | None) -> Kind:
    """Returns what is particular to the samples that `samples=` describes."""
    return next((_KINDS[each] for each in type(samples).__mro__ if each in _KINDS), _ROWS)


def take_samples(call: str, samples: Any, others: dict[str, Any]) -> Samples | None:
    """Returns what makes samples. Removes the arguments that `samples` has replaced from `others`, with a warning.

    Raises:
        ConfigError: If it is none of what makes samples, or several are given.
    """
    older = {name: others.pop(name) for name in ("pack", "windows") if name in others}
    given = [name for name, value in older.items() if value is not None]
    if given:
        warn_replaced(call, given, "samples=…, which takes the same object")
    found = [*([] if samples is None else [samples]), *(older[name] for name in given)]
    if len(found) > 1:
        raise ConfigError(f"{call}: {' and '.join(map(repr, found))} each say what a sample is: give one of them.")
    if not all(kind_of(each) is not _ROWS for each in found):
        raise ConfigError(
            f'samples={found[0]!r}: give raylance.Windows(episode=…, offsets={{…}}), raylance.Pack("input_ids", '
            "length=…), or an object of a subclass of raylance.SampleTable. Leave it out for rows."
        )
    return found[0] if found else None


def try_rows(
    asked: Asked,
    stored: Stored,
    columns: Columns,
    selection: Shared[Selection],
    samples: Shared[SampleTable] | None,
) -> ReadSpec:
    """Reads and decodes a few samples; returns what follows: sizes, the delivered schema, lengths of lists.

    Raises:
        ConfigError, DatasetError: As `raylance.dataset`.
    """
    source, opened, (names, added, *_) = stored.source, stored.opened, columns
    plain = Reader(pinned=source, dataset=opened, columns=names, row_bytes=1)
    reader = add_columns(plain, added, source.uri, retry_s=OPENING_S, missing=False)
    frames = tuple(VideoFrames(each.setting.column, each.shape, each.dtype) for each in added.videos)
    trial = dataclasses.replace(asked.decoding, frames=frames, datasets=dataset_names(source.uri))
    rows = probe = _probe(plain, selection.get())
    if samples is not None or reader is not plain:
        few = rows[ROW_OFFSET].to_numpy()[: _PROBE_FRAMES if added.videos else None]
        # Frames may be bad, because nobody uses the pixels.
        tried = dataclasses.replace(trial, mask_bad_rows=True).of_frames
        blocks = None if tried is None else BlockDecoding(tried)
        probe, _ = read_samples(reader, None if samples is None else samples.get(), few, blocks)
        probe = probe.drop_columns([VALID]) if blocks is not None else probe
    delivered = [name for name in probe.column_names if name != ROW_OFFSET]
    as_stored = {*delivered} - {each.column for each in trial.decoders}
    encoded = _encoded_images(rows, as_stored) if trial.transform is None else ()
    decoding, made = _resolve_decoding(trial, probe, delivered)
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
        read=asked.read,
        samples=samples,
        windows=_in_a_state(asked.samples) if samples is not None else None,
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
        filter=asked.filter,
        split=written(asked.split),
        cost=describe(asked.cost),
    )


def _in_a_state(samples: Any) -> Any:
    """Returns what a state holds of the samples: a table of the user's names itself."""
    return str(samples) if isinstance(samples, SampleTable) else written(samples)


def _probe(reader: RowReader, selection: Selection) -> pa.Table:
    """Reads a few rows, spread over the selection, to measure row sizes and to try the decoders."""
    rows = np.unique(np.linspace(0, selection.rows - 1, _PROBE_ROWS).astype(np.int64))
    return reader.read(selection.offsets(rows))


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
        elif holds_files(values.type):
            values = encoded_values(values)
        if holds_images(values):
            found.append(name)
    return tuple(found)


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
    lists = tuple(name for name in widths if holds_files(probe.schema.field(name).type))
    decoding = dataclasses.replace(
        decoding, decoders=ordered, windows=windows, lists=lists, marks=decoding.mask_bad_rows
    )
    marks = {f"{each.output_name}{VALID}" for each in ordered if each.column in lists and decoding.marks}
    if twice := sorted(marks & {*names, *decoders}):
        raise ConfigError(
            f"batches would have two columns {twice[0]!r}: one that has this name, and one that says which values of a "
            "list are good; nothing was started. Choose another name= for one of the columns."
        )
    if decoding.ragged:
        plain = dataclasses.replace(decoding, mask_bad_rows=True, transform=None, frames=())
        untransformed, _ = OpenDecoding(plain).apply(probe, 0)
        good = max(1, int(untransformed[VALID].to_numpy().sum()))
        decoding = dataclasses.replace(decoding, ragged_bytes=untransformed.select(decoding.ragged).nbytes / good)
    made, _ = OpenDecoding(dataclasses.replace(decoding, mask_bad_rows=True, frames=())).apply(probe, 0)
    made = made.drop_columns([VALID])
    return (decoding if decoding.transform is None else dataclasses.replace(decoding, blank=blank_row(made))), made


def _resolve(decoder: Decoder, probe: pa.Table, leader: Decoder | None = None) -> Decoder:
    if decoder.of_frames:
        return decoder.of_type(probe.schema.field(decoder.column).type, leader)
    return resolve_decoder(decoder, probe, leader)
