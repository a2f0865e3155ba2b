"""What every source has in common: files, splits, pieces of equal size."""

import abc
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs as pafs

from jobs.common import RefusedError, open_filesystem, reason
from jobs.create_dataset.labels import is_text

# As found, in any case -> as stored; the names that the `datasets` library knows.
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# Those that hardly mean anything else. In a column the others stay as they are: it may have val and dev, and a task
# that sees some of the rows can't know.
PLAIN_SPLITS = ("train", "training", "val", "validation", "test")
SPLIT = "split"
_FILE = b"file"  # in the metadata of a table on its way: where its rows are from
BLOCK_BYTES = 64 << 20  # that a source reads at a time, about
# Arrow files are read as they lie in memory, and Lance panics at a decimal that lies there aligned to 8 bytes alone.
ALIGNED = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one task reads, and writes as a fragment, or as several where the number of rows was unknown."""

    name: str  # for messages
    parts: tuple[Any, ...]  # what to read, in order; only its source knows how to take it
    rows: int | None  # of all parts; None where they are not known before reading


class Left(NamedTuple):
    """Something that gives no row, or a row that holds no image; or so many of them, which are not named."""

    name: str
    why: str
    count: int = 1


class Source(abc.ABC):
    """Where rows come from. It is sent to every task."""

    classes: list[str] | None = None  # names in the order of their labels, where it knows them
    classes_of: str | None = "label"  # the column of these labels; None where it does not say
    left_out: Sequence[Left] = ()  # files that give no row, sorted
    remarks: Sequence[str] = ()  # what its user may not expect, such as which names stand for splits
    facts: Any = None  # by which a later state of it differs: names, sizes and times of files, versions

    @abc.abstractmethod
    def pieces(self, rows: int) -> list[Piece]:
        """Cuts it, in its order, into pieces of so many rows, as far as it knows how many there are."""

    @abc.abstractmethod
    def read(self, piece: Piece, left_out: list[Left]) -> Iterator[pa.Table]:
        """Reads a piece, some mebibytes at a time; adds what gives no row."""

    def where(self, piece: Piece, row: int) -> str:
        """Names one of the rows that were read of a piece, counted from 0: for messages."""
        for what, low, high in piece.parts:
            if high is None or row < high - low:
                file, part = what
                return f"row {low + row} (from 0 on) of {f'part {part} of ' if isinstance(part, int) else ''}{file}"
            row -= high - low
        return piece.name

    def first(self) -> pa.Table:
        """The first rows, at least one.

        Raises:
            RefusedError: If there is none.
        """
        for piece in self.pieces(1 << 13):
            for table in self.read(piece, []):
                if table.num_rows:
                    return table
        raise RefusedError("the source has no rows. The dataset would be empty. Give one that has some.")


class Span(NamedTuple):
    """Rows [low, high) of something that is read as a whole, such as a row group; all of it where `high` is None."""

    what: Any
    low: int
    high: int | None


def cut(counted: Sequence[tuple[Any, int | None]], rows: int, name: str) -> list[Piece]:
    """Cuts what is read in a row into pieces of so many rows; what was not counted is a piece by itself."""
    pieces: list[list[Span]] = []
    room = 0  # for rows in the last piece
    for what, count in counted:
        if count is None:
            pieces.append([Span(what, 0, None)])
            room = 0
            continue
        at = 0
        while at < count:
            if not room:
                pieces.append([])
                room = rows
            take = min(count - at, room)
            pieces[-1].append(Span(what, at, at + take))
            at, room = at + take, room - take
    return [
        Piece(
            name=f"{name} {number}",
            parts=tuple(spans),
            rows=None if spans[0].high is None else sum(high - low for _, low, high in spans),
        )
        for number, spans in enumerate(pieces, 1)
    ]


class Listing(NamedTuple):
    """What lies in --input: sorted paths below the root, and those left out, each with the reason."""

    filesystem: pafs.FileSystem
    root: str
    files: list[str]
    left_out: list[Left]
    facts: list[tuple[str, int, float]]

    def open(self, file: str) -> pa.NativeFile:
        """Opens a file to read from any place of it."""
        return self.filesystem.open_input_file(self.path(file))

    def path(self, file: str) -> str:
        """Where it lies in its file system."""
        return f"{self.root}/{file}" if file else self.root


def list_files(location: str, endings: tuple[str, ...], options: dict[str, str]) -> Listing:
    """Lists the files with one of the endings, or the one file that is given; leaves out others and hidden ones."""
    try:
        filesystem, root = open_filesystem(location, options)
        root = root.rstrip("/")
        if filesystem.get_file_info(root).is_file:
            root, _, name = root.rpartition("/")
            found = [filesystem.get_file_info(f"{root}/{name}")]
        else:
            found = filesystem.get_file_info(pafs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowInvalid) as error:
        is_pattern = "*" in location or "?" in location
        fix = "the directory itself, no pattern," if is_pattern else "a directory or a file that exists,"
        raise RefusedError(
            f"--input {location} can't be listed ({reason(error)}). There is nothing to read. Give {fix} by a path or "
            "URI that every node can read."
        ) from error
    listing = Listing(filesystem, root, [], [], [])
    sizes = {info.path[len(root) + 1 :]: (info.size, info.mtime_ns or 0) for info in found if info.is_file}
    for file in sorted(sizes):
        if "/." in f"/{file}":
            listing.left_out.append(Left(file, "hidden"))
        elif not file.lower().endswith(endings):
            listing.left_out.append(Left(file, f"ends with none of {' '.join(endings)}"))
        else:
            listing.files.append(file)
            listing.facts.append((file, *sizes[file]))
    if not listing.files:
        raise RefusedError(
            f"no {' '.join(endings)} files found under --input {location}{name_some(listing.left_out)}. The dataset "
            "would be empty. Give the directory that holds them."
        )
    return listing


def name_some(left_out: Sequence[Left]) -> str:
    """Names up to three files that were left out, to follow a sentence about --input."""
    if not left_out:
        return ""
    named = ", ".join(f"{file} ({why})" if why == "hidden" else file for file, why, _ in left_out[:3])
    return f" ({len(left_out):,} left out, such as {named})"


def split_of(name: str) -> str | None:
    """The split that a name stands for, or None."""
    return SPLITS.get(name.lower())


def explain_splits(location: str, names: Iterable[str]) -> list[str]:
    """Remarks on names that stand for splits and are not written as these.

    Raises:
        RefusedError: If two names stand for one split that may well be two.
    """
    called: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        called.setdefault(SPLITS[name.lower()], []).append(name)
    for split, found in called.items():
        if len(found) > 1 and not {name.lower() for name in found} <= set(PLAIN_SPLITS):
            raise RefusedError(
                f"--input {location} has {' and '.join(found)}, and each may be the split {split}. Their rows could "
                "not be distinguished. Give all of them one name, or move the others away."
            )
    return [
        f"split {split} is what is called {', '.join(found)}" for split, found in called.items() if found != [split]
    ]


def name_splits(location: str, files: list[str]) -> tuple[dict[str, str], list[str]]:
    """Returns the split of each file, none where names say nothing or only train; and remarks on these names.

    A directory is called as the split is, the name of a file begins so.
    """
    splits: list[str | None] = []
    names: set[str] = set()
    for file in files:
        *folders, name = file.split("/")
        match = re.match(rf"({'|'.join(SPLITS)})(?![a-z0-9])", name, re.IGNORECASE)
        named = [part for part in (*folders, match and match[1]) if part and split_of(part)]
        if len({split_of(part) for part in named}) > 1:
            raise RefusedError(
                f"{file} in --input {location} names the splits {' and '.join(dict.fromkeys(named))}. Its rows can't "
                "be of both. Name one."
            )
        splits.append(split_of(named[0]) if named else None)
        names.update(named[:1])
    if any(splits) and not all(splits):
        raise RefusedError(
            f"{files[splits.index(None)]} in --input {location} names no split, other files do. Its rows "
            "would belong to none. Call it train-*, validation-* or test-*, or its directory, or move it away."
        )
    named = {file: split for file, split in zip(files, splits, strict=True) if split}
    return ({} if is_unsplit(splits) else named), explain_splits(location, names)


def is_unsplit(splits: Iterable[str | None]) -> bool:
    """Whether a source was never split: nothing names a split but train."""
    return set(splits) <= {None, "train"}


class Files(Source):
    """Files below --input; the name of one, or of its directory, may say which split its rows are of."""

    def __init__(self, location: str, endings: tuple[str, ...], options: dict[str, str]) -> None:
        self.listing = list_files(location, endings, options)
        self.left_out, self.facts = self.listing.left_out, self.listing.facts
        self.splits, self.remarks = name_splits(location, self.listing.files)


def with_split(table: pa.Table, split: str | None) -> pa.Table:
    """Adds the split, where there is one.

    Raises:
        RefusedError: If the table says of its rows what splits they are of.
    """
    if split is not None and SPLIT in table.column_names:
        raise RefusedError(
            f"{where_from(table, 'the source')} has a column {SPLIT}, and names of files or directories say splits, "
            "too. One of the two would be lost. Leave the column out (of tables by --columns), or rename the files."
        )
    return table if split is None else table.append_column(SPLIT, pa.array([split] * table.num_rows, pa.string()))


def to_splits(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """Returns the splits that values of a column `split` stand for; what is no other name of a split is one itself.

    Raises:
        ValueError: If a row has none.
    """
    if not is_text(column.type):
        raise ValueError(
            f"column {SPLIT} is {column.type} in {where}, and names of splits are strings. No row would be in one. "
            "Call it otherwise, or leave it out (of tables and Lance datasets by --columns): the split is drawn then."
        )
    values = pc.unique(column).to_pylist()
    if none := [value for value in values if not value]:
        count = pc.sum(pc.fill_null(pc.equal(column, ""), True)).as_py()
        raise ValueError(
            f"column {SPLIT} is {none[0]!r} in {count:,} rows of {where}. They would be in no split. Name one, or "
            "leave the column out (of tables and Lance datasets by --columns): the split is drawn then."
        )
    places = pc.index_in(column, value_set=pa.array(values, column.type))
    known = [SPLITS[value.lower()] if value.lower() in PLAIN_SPLITS else value for value in values]
    return pa.chunked_array([pa.array(known, pa.string())]).take(places)


def replaced(table: pa.Table, name: str, column: pa.ChunkedArray) -> pa.Table:
    """The table with other values in a column."""
    return table.set_column(table.schema.get_field_index(name), name, column)


def from_file(table: pa.Table, file: str) -> pa.Table:
    """The table, noting the file that its rows are from: for messages."""
    return table.replace_schema_metadata({_FILE: file})


def where_from(table: pa.Table, otherwise: str) -> str:
    """The file that its rows are from, where that was noted."""
    noted: bytes = (table.schema.metadata or {}).get(_FILE, otherwise.encode())
    return noted.decode()


def read_stream(opened: pa.NativeFile, file: str) -> Iterator[pa.Table]:
    """Reads an Arrow stream, a batch at a time.

    Raises:
        ValueError: If the mark that ends a stream is missing. pyarrow takes a cut between two batches for the end.
    """
    opened.seek(max(0, opened.size() - len(_END_OF_STREAM)))
    if opened.read() != _END_OF_STREAM:
        raise ValueError(
            f"{file} is damaged: it ends without the mark that ends a stream. Rows may be missing. Copy it again, or "
            "write it again and close the writer, which adds the mark."
        )
    opened.seek(0)
    with pa.ipc.open_stream(opened, options=ALIGNED) as stream:
        yield from (pa.Table.from_batches([batch]) for batch in stream)


def in_blocks(table: pa.Table) -> Iterator[pa.Table]:
    """A table some mebibytes at a time."""
    rows = max(1, int(BLOCK_BYTES * table.num_rows / max(1, table.nbytes)))
    return (table.slice(at, rows) for at in range(0, table.num_rows, rows))


def chunked(values: Sequence[Any], size: int) -> Iterator[tuple[Any, ...]]:
    """Values in tuples of so many; the last may have fewer."""
    iterator = iter(values)
    return iter(lambda: tuple(itertools.islice(iterator, size)), ())
