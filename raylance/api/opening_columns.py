"""Which columns are read, decoded and made of others: the second step of opening a dataset."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, NoReturn

import lance
import pyarrow as pa

from raylance.api.asked import Asked, Stored
from raylance.api.opening_videos import open_video
from raylance.arguments import listed
from raylance.columns import COMPONENT, DRAW, ROW_OFFSET, SEED, VALID
from raylance.decode.arrays import holds_files
from raylance.decode.decoder import BatchDecoder, Decoder, RaggedDecoder, is_on_device
from raylance.errors import ConfigError, DatasetError
from raylance.source.derived import Derived, Made
from raylance.source.fields import blobs_inside, find_field, is_bytes, leaf_names
from raylance.source.videos import AddedColumns, Video


class Columns(NamedTuple):
    """The columns of a dataset that is opened.

    Attributes:
        names: The stored columns that are read.
        added: Those that readers add.
        derived: Names of the latter.
        plain: Stored columns that batches have as they are stored.
        single: Columns whose values are decoded each by itself, so that a sample may have several.
    """

    names: Sequence[str]
    added: AddedColumns
    derived: Collection[str]
    plain: Sequence[str]
    single: Collection[str]


def open_columns(asked: Asked, stored: Stored) -> Columns:
    """Finds the columns, and opens what those need that readers make.

    Raises:
        ConfigError: If a name or a setting cannot be honoured.
        DatasetError: If a column is missing, or has another type.
    """
    decoders, derived = asked.decoding.decoders, {each.column for each in asked.derived}
    of_stored = [each for each in decoders if each.column not in derived and not each.of_frames]
    names = _check_columns(stored.opened, asked.columns, of_stored, may_be_none=bool(derived))
    of_frames = [each for each in decoders if each.of_frames]
    replaced = {each.column for each in of_frames}
    for each in of_frames:
        if each.output_name in {*names, *derived} - replaced or (each.output_name in replaced - {each.column}):
            _refuse_taken(each)
    added = _open_derived(asked, stored, names)
    apart = {*(each.column for each in decoders), *added.drops, *added.video_drops}
    together = {each.column for each in decoders if isinstance(each, RaggedDecoder | BatchDecoder)}
    fields = {name: find_field(stored.opened.schema, name) for name in (each.column for each in decoders)}
    together |= {name for name, field in fields.items() if field is not None and holds_files(field.type)}
    return Columns(
        names=names,
        added=added,
        derived=derived,
        plain=[name for name in names if name not in apart],
        single=[each.column for each in decoders if each.column not in together],
    )


def _check_columns(
    opened: lance.LanceDataset, columns: Sequence[str] | None, decoders: Sequence[Decoder], *, may_be_none: bool
) -> list[str]:
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
            raise ConfigError(f"{type(decoder).__name__}({name!r}): it must decode one of columns={names}.")
        if not is_bytes(fields[name]) and not _may_be_list(decoder, fields[name]):
            raise DatasetError(
                f"column {name!r} is {fields[name].type}, not binary, so it holds no {decoder.content}; nothing was "
                f"started. Decode a binary column, or name {name!r} alone, to get it as it is stored."
            )
        if is_on_device(decoder) and name in in_helpers:
            raise ConfigError(
                f"column {name!r} is decoded in decode actors and, by {type(decoder).__name__}, on the trainer's "
                "device: its rows would travel twice. Decode a column in one place."
            )
        if decoder.output_name in {*plain, *added}:
            _refuse_taken(decoder)
    return names


def _refuse_taken(decoder: Decoder) -> NoReturn:
    """Raises ConfigError: batches have another column of the name that a decoder gives."""
    setting = getattr(decoder, "of", decoder)  # a companion is not what the user wrote
    raise ConfigError(
        f"{type(setting).__name__}({setting.column!r}, name={setting.output_name!r}): batches have another column "
        f"{decoder.output_name!r}. Choose another name, or leave that column out of columns=."
    )


def _may_be_list(decoder: Decoder, field: pa.Field) -> bool:
    """Returns whether a decoder can decode the values in a field of lists of encoded values. Raises ConfigError if the
    field has such lists, and the decoder takes one value a row.
    """
    if not holds_files(field.type):
        return False
    if isinstance(decoder, RaggedDecoder | BatchDecoder) and not decoder.takes_lists:
        raise ConfigError(
            f"{type(decoder).__name__}({decoder.column!r}): each row has a list of {decoder.content}, which only "
            "decoders of one value of one shape decode, such as raylance.Image. Nothing was started."
        )
    return True


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
        DatasetError: If a field is missing, or has blobs inside it, which Lance does not read with it.
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


def _check_decoder_of_derived(decoder: Decoder, derived: Derived | None, opened: lance.LanceDataset) -> None:
    """Raises ConfigError if a decoder cannot decode the column that a reader makes; None if its column is stored."""
    if decoder.of_frames:
        if derived is None or not derived.channels:
            raise ConfigError(
                f"{type(decoder).__name__}({decoder.column!r}): no Video has this name. Nothing was started."
            )
    elif derived is not None and not derived.gives_bytes(opened.schema):
        raise ConfigError(
            f"{type(decoder).__name__}({decoder.column!r}): that is a {type(derived).__name__}, whose values are not "
            f"encoded {decoder.content}. Nothing was started."
        )


def _open_derived(asked: Asked, stored: Stored, names: list[str]) -> AddedColumns:
    """Opens what columns that readers make need. Adds the stored columns of which they are made to `names`."""
    opened, derived, decoding = stored.opened, asked.derived, asked.decoding
    by_name = {each.column: each for each in derived}
    for decoder in decoding.decoders:
        _check_decoder_of_derived(decoder, by_name.get(decoder.column), opened)
    of_derived = {each.output_name for each in decoding.decoders if each.column in by_name}  # which may keep the name
    made = [name for name in decoding.names if name not in of_derived & by_name.keys()]
    taken, given = [*names, *made], {*names}
    for each in derived:
        if each.column in taken:
            kind = type(each).__name__
            raise ConfigError(f"{kind}({each.column!r}): batches have another column of this name. Choose another one.")
        if each.column in (COMPONENT, DRAW, ROW_OFFSET, SEED, VALID):
            raise ConfigError(f"{each.column!r} is a name of raylance's own columns. Choose another one.")
        taken.append(each.column)
        each.check(opened.schema, opened.uri)
        names += [name for name in each.needs if name not in names]
    if derived and not names:
        raise ConfigError(
            f"columns= has no stored column, but {', '.join(map(repr, by_name))} with one value in all rows. Name one "
            f"of {', '.join(opened.schema.names)}, too."
        )
    videos = {each.column: open_video(each, stored.storage_options) for each in derived if isinstance(each, Video)}
    for_videos = {name for each in derived if each.column in videos for name in each.needs}
    return AddedColumns(
        settings=tuple(videos[each.column].setting if each.column in videos else each for each in derived),
        videos=tuple(videos.values()),
        makers={each.column: each.open(stored.storage_options) for each in derived if isinstance(each, Made)},
        drops=tuple(name for name in names if name not in given | for_videos),
        video_drops=tuple(name for name in names if name in for_videos - given),
    )
