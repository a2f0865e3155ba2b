"""Owns datasets of Hugging Face: the hub's Parquet files, and what `datasets` saves to disk; never decodes images."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.common import RefusedError, reason
from jobs.create_dataset.labels import is_text, read_classes, to_labels
from jobs.create_dataset.shaping import is_image, take_bytes
from jobs.create_dataset.sources import (
    ALIGNED,
    Left,
    Listing,
    Piece,
    Source,
    cut,
    from_file,
    in_blocks,
    list_files,
    name_splits,
    split_of,
    with_split,
)


class Parquet(NamedTuple):
    """What a Parquet file holds: rows of its row groups, whether labels are strings, and the classes.

    `names` are those that the file gives; where it gives none, `labels` are those of its rows.
    """

    groups: list[int]
    as_strings: bool
    names: list[str] | None
    labels: set[int | str]


class Hub(Source):
    """Parquet files whose names begin with their split, of encoded images and labels."""

    def __init__(
        self, location: str, image: str, label: str, classes_file: str | None, options: dict[str, str]
    ) -> None:
        """Looks into each file."""
        self.listing = list_files(location, (".parquet",), options)
        self.left_out, self.facts = self.listing.left_out, self.listing.facts
        files = self.listing.files
        splits, self.remarks = name_splits(location, files)
        self.has_splits = not set(splits) <= {None, "train"}  # nothing but train: it was never split
        self.splits = dict(zip(files, splits, strict=True))
        self.found = {file: look_into(self.listing, file, location, image, label) for file in files}
        self.image, self.label, self.as_strings = image, label, self.found[files[0]].as_strings
        self.classes = classes_of(self.found, location, label, classes_file)

    def pieces(self, rows: int) -> list[Piece]:
        """Spans of row groups."""
        groups = [
            ((file, group), count) for file, found in self.found.items() for group, count in enumerate(found.groups)
        ]
        return cut(groups, rows, "row groups, part")

    def read(self, piece: Piece, left_out: list[Left]) -> Iterator[pa.Table]:
        """Bytes as they are."""
        for (file, group), low, high in piece.parts:
            try:
                with self.listing.open(file) as opened:
                    read = pq.ParquetFile(opened).read_row_group(group, columns=[self.image, self.label])
            except (OSError, pa.ArrowInvalid) as error:
                raise ValueError(f"{file} is damaged: {error}") from None
            yield from in_blocks(with_split(self._shape(read.slice(low, high - low), file), self._split(file)))

    def _split(self, file: str) -> str | None:
        return self.splits[file] if self.has_splits else None

    def _shape(self, read: pa.Table, file: str) -> pa.Table:
        encoded = read[self.image]
        if pa.types.is_struct(encoded.type):
            encoded = pc.struct_field(encoded, "bytes")
        if encoded.null_count or read[self.label].null_count:
            raise ValueError(f"{file} has rows without image bytes or without a label")
        labels = to_labels(read[self.label], self.classes or []) if self.as_strings else read[self.label]
        return from_file(pa.table({"image": encoded.cast(pa.binary()), "label": labels.cast(pa.int64())}), file)


def look_into(listing: Listing, file: str, location: str, image: str, label: str) -> Parquet:
    """Reads the metadata of a Parquet file; its labels only where nothing names their classes."""
    try:
        with listing.open(file) as opened:
            parquet = pq.ParquetFile(opened)
            as_strings = check_columns(parquet.schema_arrow, file, image, label)
            names, labels = class_names(parquet.schema_arrow, label), set()
            if names is None:
                labels.update(parquet.read([label])[label].unique().drop_null().to_pylist())
            groups = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
            return Parquet(groups, as_strings, names, labels)
    except (OSError, pa.ArrowInvalid) as error:
        raise RefusedError(
            f"{file} in --input {location} can't be read as Parquet ({reason(error)}). Its rows would "
            "be missing. Download it again, or move it away."
        ) from error


def classes_of(found: dict[str, Parquet], location: str, label: str, classes_file: str | None) -> list[str]:
    """Returns the class names of files that agree on them, in the order of their labels."""
    names, labels = [file.names for file in found.values()], set().union(*(file.labels for file in found.values()))
    if any(listed != names[0] for listed in names):
        raise RefusedError(
            f"the files in --input {location} name different classes for {label}. One label would mean two "
            "things. Give the files of one dataset at one revision."
        )
    kinds = {file.as_strings: name for name, file in reversed(found.items())}  # the first file of each
    if len(kinds) > 1:
        raise RefusedError(
            f"labels are strings in {kinds[True]}, integers in {kinds[False]} in --input {location}. They may "
            "mean different classes. Give the files of one dataset at one revision."
        )
    if True in kinds:
        return read_classes(classes_file, {str(name) for name in labels})
    if classes_file is not None:
        raise RefusedError(
            f"--classes {classes_file} orders labels that are strings, and {label} holds integers. These "
            "name their classes already. Leave --classes out."
        )
    return names[0] or [str(value) for value in range(max((int(value) for value in labels), default=-1) + 1)]


def check_columns(schema: pa.Schema, file: str, image: str, label: str) -> bool:
    """Refuses a Parquet file without encoded images or labels; returns whether the labels are strings."""
    kinds = {field.name: field.type for field in schema}
    kind = kinds.get(image)
    if kind is not None and pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    labels = kinds.get(label, pa.null())
    if kind not in (pa.binary(), pa.large_binary()) or not (pa.types.is_integer(labels) or is_text(labels)):
        raise RefusedError(
            f"{file} lacks a column {image} of encoded images or a column {label} of integers or strings, it has "
            f"{', '.join(f'{name} ({kind})' for name, kind in kinds.items())}. There is nothing to train on. "
            "Name the columns by --image-column and --label-column."
        )
    return is_text(labels)


def class_names(schema: pa.Schema, label: str) -> list[str] | None:
    """Returns the class names that the `datasets` library leaves in the schema metadata, or None."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        names = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
        return [str(name) for name in names]
    return None


class Saved(Source):
    """What `Dataset.save_to_disk` and `DatasetDict.save_to_disk` wrote: Arrow streams, a directory for each split.

    Columns come as they are, but for images: their bytes.
    """

    def __init__(self, location: str, options: dict[str, str]) -> None:
        """Reads the files that describe the others."""
        self.listing = list_files(location, (".arrow", ".json"), options)
        self.left_out = self.listing.left_out
        self.facts = self.listing.facts
        states = [file for file in self.listing.files if file.rpartition("/")[2] == "state.json"]
        if not states:
            raise RefusedError(
                f"--input {location} has no state.json, which `save_to_disk` of the datasets library writes. It is no "
                "dataset saved to disk. Give the directory that was saved, or use the source that it is (tables, "
                "huggingface)."
            )
        self.parts: list[tuple[tuple[str, str | None], None]] = []
        names = {}
        self.images: set[str] | None = None
        folders = [state.rpartition("/")[0] for state in states]
        called = [folder.rpartition("/")[2] for folder in folders]
        known = Counter(split_of(name) for name in called)  # where two stand for one split, each is one of its own
        splits = [
            None if len(folders) == 1 else (known[split_of(name)] == 1 and split_of(name)) or name for name in called
        ]
        for state, folder, split in zip(states, folders, splits, strict=True):
            try:
                files = [data["filename"] for data in self._load(state)["_data_files"]]
            except (KeyError, TypeError, ValueError) as error:
                raise RefusedError(
                    f"{state} in --input {location} names no _data_files, which `save_to_disk` of the datasets library "
                    "writes. Its files are unknown. Save it again."
                ) from error
            self.parts += [((f"{folder}/{file}".lstrip("/"), split), None) for file in files]
            features = self._load(f"{folder}/dataset_info.json".lstrip("/")).get("features") or {}
            if features:
                self.images = self.images or set()
            for name, feature in features.items():
                if feature.get("_type") == "Image" and self.images is not None:
                    self.images.add(name)
                if feature.get("_type") == "ClassLabel":
                    names.setdefault(name, feature["names"])
                    if names[name] != feature["names"]:
                        raise RefusedError(
                            f"the splits of --input {location} name different classes for {name}. One label would mean "
                            "two things. Save them again from one dataset."
                        )
        self.names_of = names
        self.has_splits = not set(splits) <= {None, "train"}

    def _load(self, file: str) -> Any:
        with self.listing.open(file) as opened:
            return json.loads(opened.read())

    def pieces(self, rows: int) -> list[Piece]:
        """A file each: streams do not hold the number of their rows."""
        return cut(self.parts, rows, "file")

    def read(self, piece: Piece, left_out: list[Left]) -> Iterator[pa.Table]:
        """Columns as they are, of images the bytes."""
        for (file, split), _, _ in piece.parts:
            with self.listing.open(file) as opened, pa.ipc.open_stream(opened, options=ALIGNED) as stream:
                for batch in stream:
                    table = from_file(pa.Table.from_batches([batch]), file)
                    for field in table.schema:
                        if is_image(field.type) and (self.images is None or field.name in self.images):
                            table = take_bytes(table, field.name)
                    yield from in_blocks(with_split(table, split if self.has_splits else None))
