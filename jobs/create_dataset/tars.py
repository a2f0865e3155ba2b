"""Owns WebDataset tars: files that share a name up to its first dot are one row; never decodes an image.

The convention is that of the webdataset library (https://github.com/webdataset/webdataset): `0001.jpg`, `0001.cls`
and `0001.json` are the image, the class and the rest of row 0001, and lie one behind the other.
"""

import io
import itertools
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from jobs.create_dataset.images import IMAGES
from jobs.create_dataset.sources import (
    BLOCK_BYTES,
    Left,
    Piece,
    Source,
    cut,
    from_file,
    list_files,
    name_splits,
    with_split,
)

TEXTS = ("txt", "text", "caption", "transcript", "json")
CLASS = ("cls", "cls2", "index", "inx", "id")


class Tars(Source):
    """Tars, each a piece; those whose names begin with the name of a split are of that split."""

    def __init__(self, location: str, options: dict[str, str]) -> None:
        """Lists them; the first rows of the first tar say which columns there are."""
        self.listing = list_files(location, (".tar", ".tar.gz", ".tgz"), options)
        self.left_out, self.facts = self.listing.left_out, self.listing.facts
        splits = name_splits(location, self.listing.files)
        self.has_splits = not set(splits) <= {None, "train"}
        self.splits = dict(zip(self.listing.files, splits, strict=True))
        self.columns: tuple[str, ...] = ()
        self.columns = tuple(name for name in self.first().column_names if name != "split")

    def pieces(self, rows: int) -> list[Piece]:
        """A tar each: it says how many rows it has only at its end."""
        return cut([(file, None) for file in self.listing.files], rows, "tar")

    def read(self, piece: Piece, left_out: list[Left]) -> Iterator[pa.Table]:
        """Bytes as they are; text as strings, classes as integers, `.npy` as lists."""
        for file, _, _ in piece.parts:
            rows: list[dict[str, Any]] = []
            nbytes = 0
            for key, row in self._rows(file, left_out):
                columns = self.columns or tuple(row)
                if missing := [name for name in columns if name not in row]:
                    left_out.append(Left(f"{file}: {key}", f"has no {', '.join(missing)}"))
                    continue
                rows.append({name: row[name] for name in columns})
                nbytes += sum(len(value) if isinstance(value, bytes) else 8 for value in row.values())
                if nbytes > BLOCK_BYTES or (not self.columns and len(rows) == 64):
                    yield self._table(rows, file)
                    rows, nbytes = [], 0
            if rows:
                yield self._table(rows, file)

    def _table(self, rows: list[dict[str, Any]], file: str) -> pa.Table:
        table = from_file(pa.Table.from_pylist(rows), file)
        return with_split(table, self.splits[file] if self.has_splits else None)

    def _rows(self, file: str, left_out: list[Left]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Rows by column, with their keys."""
        try:
            with (
                self.listing.filesystem.open_input_stream(self.listing.path(file), compression="detect") as opened,
                tarfile.open(fileobj=opened, mode="r|") as tar,
            ):
                members = ((*split_name(member.name), member) for member in tar if member.isfile())
                for key, group in itertools.groupby(members, key=lambda found: found[0]):
                    row: dict[str, Any] = {}
                    for _, ending, member in group:
                        content = tar.extractfile(member)
                        name, value = take(ending, b"" if content is None else content.read())
                        row[name] = value
                    yield key, row
        except (OSError, ValueError, tarfile.TarError, EOFError) as error:
            raise ValueError(f"{file} is damaged: {error}") from None


def split_name(path: str) -> tuple[str, str]:
    """The key of a row, which is the path up to the first dot of the file's name, and what follows that dot."""
    folder, slash, name = path.rpartition("/")
    key, _, ending = name.partition(".")
    return f"{folder}{slash}{key}", ending.lower()


def take(ending: str, content: bytes) -> tuple[str, Any]:
    """The column that a file becomes, and its value."""
    if f".{ending}" in IMAGES:
        return "image", content
    if ending in TEXTS:
        return ("json" if ending == "json" else "text"), content.decode()
    if ending in CLASS:
        text = content.decode().strip()
        return "label", int(text) if text.lstrip("-").isdigit() else text
    if ending == "npy":
        return "npy", np.load(io.BytesIO(content), allow_pickle=False).ravel().tolist()
    return ending.replace(".", "_") or "bytes", content
