"""Datasets of Hugging Face: the hub's Parquet files, and what `datasets` saves to disk."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jobs.common import RefusedError
from jobs.create_dataset.labels import is_text, read_classes
from jobs.create_dataset.shaping import is_image, take_bytes
from jobs.create_dataset.sources import (
    Left,
    Piece,
    Source,
    cut,
    from_file,
    in_blocks,
    is_unsplit,
    list_files,
    read_stream,
    split_of,
    with_split,
)
from jobs.create_dataset.tables import Tables


class Hub(Tables):
    """Parquet files as the hub has them: encoded images, and labels whose classes the files may name."""

    def __init__(
        self, location: str, image: str, label: str, classes_file: str | None, options: dict[str, str]
    ) -> None:
        self.location, self.label = location, label
        self.as_strings: dict[bool, str] = {}  # whether labels are strings -> the first file of which that is so
        self.names: list[list[str] | None] = []  # of classes, as each file gives them
        self.labels = set[Any]()  # of the rows of files that give none
        super().__init__(location, [image, label], image, options, endings=(".parquet",))
        self.classes = self._decide_classes(classes_file)

    def _note(self, schema: pa.Schema, file: str, index: dict[str, None]) -> None:
        """Refuses files without encoded images or labels; notes the classes of others."""
        is_strings = check_columns(schema, file, self.image, self.label)
        self.as_strings.setdefault(is_strings, file)
        if len(self.as_strings) > 1:
            raise RefusedError(
                f"labels are strings in {self.as_strings[True]}, integers in {self.as_strings[False]} in --input "
                f"{self.location}. They may mean different classes. Give the files of one dataset at one revision."
            )
        self.names.append(class_names(schema, self.label))
        if is_strings or self.names[-1] is None:
            with self.listing.open(file) as opened:
                labels = pq.read_table(opened, columns=[self.label])[self.label]
            self.labels.update(labels.unique().drop_null().to_pylist())

    def _decide_classes(self, classes_file: str | None) -> list[str]:
        """The class names of files that agree on them, in the order of their labels."""
        if any(names != self.names[0] for names in self.names):
            raise RefusedError(
                f"the files in --input {self.location} name different classes for {self.label}. One label would mean "
                "two things. Give the files of one dataset at one revision."
            )
        if True in self.as_strings:
            return read_classes(classes_file, self.labels)
        if classes_file is not None:
            raise RefusedError(
                f"--classes {classes_file} orders labels that are strings, and {self.label} holds integers. These "
                "name their classes already. Leave --classes out."
            )
        return self.names[0] or [str(label) for label in range(max(self.labels, default=-1) + 1)]

    def _keep(self, table: pa.Table, file: str) -> pa.Table:
        """The bytes of images, and labels as they are."""
        encoded, labels = table[self.image], table[self.label]
        if pa.types.is_struct(encoded.type):
            encoded = pc.struct_field(encoded, "bytes")
        if encoded.null_count or labels.null_count:
            raise ValueError(f"{file} has rows without image bytes or without a label")
        return from_file(pa.table({"image": encoded.cast(pa.binary()), "label": labels}), file)


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
        self.left_out, self.facts = self.listing.left_out, self.listing.facts
        states = [file for file in self.listing.files if file.rpartition("/")[2] == "state.json"]
        if not states:
            raise RefusedError(
                f"--input {location} has no state.json, which `save_to_disk` of the datasets library writes. It is no "
                "dataset saved to disk. Give the directory that was saved, or use the source that it is (tables, "
                "huggingface)."
            )
        self.parts: list[tuple[tuple[str, str | None], None]] = []
        self.names_of: dict[str, list[str]] = {}  # of classes, by column
        self.images: set[str] | None = None  # columns of images; None where no file names types
        folders = [state.rpartition("/")[0] for state in states]
        called = [folder.rpartition("/")[2] for folder in folders]
        known = Counter(split_of(name) for name in called)  # where two stand for one split, each is one of its own
        splits = [
            None if len(folders) == 1 else (known[split_of(name)] == 1 and split_of(name)) or name for name in called
        ]
        splits = [None] * len(splits) if is_unsplit(splits) else splits
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
                found = {name for name, feature in features.items() if feature.get("_type") == "Image"}
                self.images = found | (self.images or set())
            for name, feature in features.items():
                if feature.get("_type") != "ClassLabel":
                    continue
                if self.names_of.setdefault(name, feature["names"]) != feature["names"]:
                    raise RefusedError(
                        f"the splits of --input {location} name different classes for {name}. One label would mean "
                        "two things. Save them again from one dataset."
                    )

    def _load(self, file: str) -> Any:
        with self.listing.open(file) as opened:
            return json.loads(opened.read())

    def pieces(self, rows: int) -> list[Piece]:
        """A file each: streams do not hold the number of their rows."""
        return cut(self.parts, rows, "file")

    def read(self, piece: Piece, left_out: list[Left]) -> Iterator[pa.Table]:
        """Columns as they are, of images the bytes."""
        for (file, split), _, _ in piece.parts:
            with self.listing.open(file) as opened:
                for batch in read_stream(opened, file):
                    table = from_file(batch, file)
                    for field in table.schema:
                        if is_image(field.type) and (self.images is None or field.name in self.images):
                            table = take_bytes(table, field.name)
                    yield from in_blocks(with_split(table, split))
