"""WebDataset tars: files that share a name up to its first dot are one row.

The convention is that of the webdataset library (https://github.com/webdataset/webdataset): `0001.jpg`, `0001.cls`
and `0001.json` are the image, the class and the rest of row 0001, and lie one after the other.
"""

import io
import itertools
import re
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa

from jobs.common import RefusedError
from jobs.create_dataset.images import IMAGES
from jobs.create_dataset.sources import (
    BLOCK_BYTES,
    SPLIT,
    Files,
    Left,
    Piece,
    cut,
    from_file,
    with_split,
)

COLUMNS = {"cls": "label", "txt": "text", "": "bytes"}  # ending -> column; the others have the ending's name
TEXTS = ("txt", "text", "caption", "transcript", "json", "id", SPLIT)
NUMBERS = ("cls", "cls2", "index", "inx")  # or names; an id is no label, and may begin with zeros
LOOK = 64  # first rows, which decide the columns

Row = dict[str, tuple[str, Any]]  # by column, the name of the file in the tar, and its value


class Header(tarfile.TarInfo):
    """A header that is an error where it is damaged: `tarfile` takes such a one for the end."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Raises `tarfile.ReadError` but for a header, and for the block of zeros that ends a tar."""
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not any(buf):
                raise
            why = "it ends without the zeros that end a tar" if len(buf) < tarfile.BLOCKSIZE else error
            raise tarfile.ReadError(str(why)) from error


class Tars(Files):
    """Tars, each a piece."""

    def __init__(self, location: str, columns: Sequence[str] | None, options: dict[str, str]) -> None:
        """Lists them; the first row of the first tar says which columns there are, if they are not asked for."""
        super().__init__(location, (".tar", ".tar.gz", ".tgz"), options)
        found = itertools.chain.from_iterable(self._rows(file, []) for file in self.listing.files)
        first = [row for _, row in itertools.islice(found, LOOK)]
        self.asked = columns is not None
        self.columns = tuple(columns or next(iter(first), ()))
        numbers = {column_of(ending) for ending in NUMBERS}
        self.integers = {
            name for name in numbers if all(is_integer(row[name][1]) for row in first if name in row)
        }  # a class may be called 7 among others that are not numbers
        has = dict.fromkeys(itertools.chain.from_iterable(first))
        if missing := [name for name in columns or () if name not in has]:
            raise RefusedError(
                f"--columns {', '.join(missing)} is none of {', '.join(has)}, which the first rows of --input "
                f"{location} have. No row would be kept. Name some of these."
            )
        if self.splits and SPLIT in self.columns:
            raise RefusedError(
                f"--input {location} names splits by the names of tars and by files .{SPLIT} in them. A row would have "
                f"two. Name the columns to keep by --columns, without {SPLIT}, or give the tars names without splits."
            )

    def pieces(self, rows: int) -> list[Piece]:
        """A tar each: it says how many rows it has only at its end."""
        return cut([(file, None) for file in self.listing.files], rows, "tar")

    def read(self, piece: Piece, left_out: list[Left]) -> Iterator[pa.Table]:
        """Bytes as they are; text as strings, classes as integers, `.npy` as lists."""
        for file, _, _ in piece.parts:
            rows: list[dict[str, Any]] = []
            nbytes = 0
            for _, row in self._kept(file, left_out):
                rows.append(row)
                nbytes += sum(len(value) if isinstance(value, bytes) else 8 for value in row.values())
                if nbytes > BLOCK_BYTES:
                    yield self._table(rows, file)
                    rows, nbytes = [], 0
            if rows:
                yield self._table(rows, file)

    def where(self, piece: Piece, row: int) -> str:
        """Its tar and its key; it reads the tar again for them."""
        [(file, _, _)] = piece.parts
        key, _ = next(itertools.islice(self._kept(file, []), row, None))
        return f"{file}: {key}"

    def _table(self, rows: list[dict[str, Any]], file: str) -> pa.Table:
        table = from_file(pa.Table.from_pylist(rows), file)
        return with_split(table, self.splits.get(file))

    def _kept(self, file: str, left_out: list[Left]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Rows that have all columns, with their keys."""
        for key, row in self._rows(file, left_out):
            more = [name for column, (name, _) in row.items() if column not in self.columns]
            if more and not self.asked:
                raise ValueError(
                    f"{file}: {key} has {', '.join(more)} beside {', '.join(self.columns)}, which the first row has. "
                    "It would be lost. Name the columns to keep by --columns, rows that lack one are left out."
                )
            if missing := [name for name in self.columns if name not in row]:
                left_out.append(Left(f"{file}: {key}", f"has no {', '.join(missing)}"))
                continue
            yield key, {name: self._settled(name, *row[name], file) for name in self.columns}

    def _settled(self, column: str, name: str, value: Any, file: str) -> Any:
        """The value, an integer where the first rows have integers."""
        if column not in self.integers:
            return value
        if not is_integer(value):
            raise ValueError(
                f"{file}: {name} holds {value!r}, and the first rows have integers in column {column}. It would be no "
                "integer. Make all of them integers, or all of them names."
            )
        return int(value)

    def _rows(self, file: str, left_out: list[Left]) -> Iterator[tuple[str, Row]]:
        """Rows with their keys, whatever columns they have."""
        for key, group in itertools.groupby(self._files(file, left_out), key=lambda found: split_name(found[0])[0]):
            row: Row = {}
            for name, content in group:
                ending = split_name(name)[1]
                column = column_of(ending)
                if column in row:
                    raise ValueError(
                        f"{file}: {row[column][0]} and {name} are both the {column} of {key}. One would be lost. Give "
                        "a key one of them, or give one another ending."
                    )
                try:
                    row[column] = name, value_of(ending, content)
                except (ValueError, EOFError) as error:
                    raise ValueError(f"{file}: {name} is damaged: {error}") from None
            yield key, row

    def _files(self, file: str, left_out: list[Left]) -> Iterator[tuple[str, bytes]]:
        """Names and contents of the files in a tar, but for hidden ones."""
        compression = "gzip" if file.lower().endswith("gz") else None
        try:
            with (
                self.listing.filesystem.open_input_stream(self.listing.path(file), compression=compression) as opened,
                tarfile.open(fileobj=opened, mode="r|", tarinfo=Header) as tar,
            ):
                for member in tar:
                    if is_hidden(member.name):
                        left_out.append(Left(f"{file}: {member.name}", "hidden"))
                    elif member.isfile():
                        content: Any = tar.extractfile(member)
                        yield member.name, content.read()
                    elif not member.isdir():
                        left_out.append(Left(f"{file}: {member.name}", "is a link, or no file"))
                stream: Any = tar.fileobj
                while rest := stream.read(BLOCK_BYTES):
                    if any(rest):
                        raise tarfile.ReadError("it continues after its end: tars put together by cat are no tar")
        except (OSError, ValueError, tarfile.TarError, EOFError) as error:
            raise ValueError(f"{file} is damaged: {error}") from None


def is_hidden(path: str) -> bool:
    """Whether a file or a directory of it begins with a dot, as the `._` files of macOS do."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/"))


def split_name(path: str) -> tuple[str, str]:
    """The key of a row, which is the path up to the first dot of the file's name, and what follows that dot."""
    folder, slash, name = path.rpartition("/")
    key, _, ending = name.partition(".")
    return f"{folder}{slash}{key}", ending.lower()


def column_of(ending: str) -> str:
    """The column that a file with this ending becomes."""
    return "image" if f".{ending}" in IMAGES else COLUMNS.get(ending, ending.replace(".", "_"))


def is_integer(text: str) -> bool:
    """Whether it is one in decimal digits that stays what it is: 007 may be a code, and 64 bits hold 18 digits."""
    return re.fullmatch("-?(0|[1-9][0-9]{0,17})", text) is not None


def value_of(ending: str, content: bytes) -> Any:
    """Its value."""
    if ending in TEXTS:
        return content.decode()
    if ending in NUMBERS:
        return content.decode().strip()
    if ending == "npy":
        return np.load(io.BytesIO(content), allow_pickle=False).ravel().tolist()
    return content
