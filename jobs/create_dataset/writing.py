"""The making of a dataset: a fragment for each piece, what is done already, the commit.

Each task writes its fragment, and then a small file that notes it, below the dataset. A run that is killed is started
again with the same command, and makes what is missing; after the commit these files are removed. lance-ray writes
from many machines, too, but starts over each time, and gathers a task's rows in memory before it writes the first.
"""

import dataclasses
import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.file import LanceFileSession
from lance.fragment import FragmentMetadata, write_fragments

from jobs.common import exists, remove_files, run_tasks
from jobs.create_dataset.shaping import Shape
from jobs.create_dataset.sources import Left, Piece, Source

_NAMED = 1000  # files or rows that a task names
_FOLDER = "_create-"
_AT_ONCE = 16  # small files that are read or removed together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notes:
    """What one run has done."""

    uri: str  # of the dataset
    key: str  # names the run; another source or other arguments give another
    options: dict[str, str]  # of the object store

    @property
    def folder(self) -> str:
        """Where they are."""
        return f"{self.uri.rstrip('/')}/{_FOLDER}{self.key}"

    def write(self, number: int, note: dict[str, Any]) -> None:
        """Notes that a piece is done."""
        with tempfile.TemporaryDirectory() as directory:
            local = Path(directory, "note.json")
            local.write_text(json.dumps(note))
            self._session().upload_file(str(local), f"{number:08}.json")

    def read(self) -> dict[int, dict[str, Any]]:
        """What is done, by the number of the piece."""
        with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(_AT_ONCE) as threads:

            def read(file: str) -> tuple[int, dict[str, Any]]:
                local = Path(directory, file)
                self._session().download_file(file, str(local))
                note: dict[str, Any] = json.loads(local.read_text())
                return int(local.stem), note

            return dict(threads.map(read, sorted(file for file in self._session().list() if file.endswith(".json"))))

    def files(self) -> set[str]:
        """Names of the data files that were written."""
        fragments = [fragment for note in self.read().values() for fragment in note["fragments"]]
        return {file["path"] for fragment in fragments for file in fragment["files"]}

    def forget(self) -> None:
        """Removes them."""
        remove_files(self.folder, self.options)

    def forget_all(self) -> None:
        """Removes them, and first the data files that they name, but for those of a version of the dataset."""
        session = LanceFileSession(self.uri, storage_options=self.options)
        there = {file.rpartition("/")[2] for file in session.list("data")}
        unused = (self.files() & there) - files_of(self.uri, self.options, all_versions=True)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(session.delete_file, [f"data/{file}" for file in sorted(unused)]))
        self.forget()

    def _session(self) -> LanceFileSession:
        return LanceFileSession(self.folder, storage_options=self.options)


def begun(uri: str, options: dict[str, str]) -> list[Notes]:
    """The notes of all runs that have left some there."""
    session = LanceFileSession(uri, storage_options=options)
    folders = (folder.strip("/") for folder in session.list_with_delimiter().common_prefixes)
    keys = sorted(folder.removeprefix(_FOLDER) for folder in folders if folder.startswith(_FOLDER))
    return [Notes(uri=uri, key=key, options=options) for key in keys]


def files_of(uri: str, options: dict[str, str], *, all_versions: bool = False) -> set[str]:
    """Names of the data files of the newest version, or of all; none where there is no dataset."""
    if not exists(uri, options):
        return set()
    newest = lance.dataset(uri, storage_options=options)
    versions = [version["version"] for version in newest.versions()] if all_versions else [newest.version]
    fragments = [fragment for version in versions for fragment in newest.checkout_version(version).get_fragments()]
    return {file.path for fragment in fragments for file in fragment.data_files()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Where the dataset goes."""

    notes: Notes  # of what this run has done, below the dataset
    mode: str  # "create" or "overwrite"
    rows_per_fragment: int  # at the most


def key_of(facts: Any, *arguments: Any) -> str:
    """A name for whatever the rows depend on: what the source is, which may name millions of files, and arguments."""
    digest = hashlib.blake2b(repr(arguments).encode(), digest_size=8)
    for fact in facts if isinstance(facts, list) else [facts]:
        digest.update(repr(fact).encode())
    return digest.hexdigest()


def write(
    source: Source, shape: Shape, pieces: Sequence[Piece], target: Target, progress: Callable[[int], object]
) -> tuple[lance.LanceDataset, list[Left], list[Left]]:
    """Makes the dataset; `progress` is called with rows that are done. Returns it, what gave no row, and rows
    without an image.

    Raises:
        ValueError: If the source has no rows.
    """
    done = target.notes.read()
    for note in done.values():
        progress(note["rows"])
    if todo := [(number, piece) for number, piece in enumerate(pieces) if number not in done]:
        for number, note in run_tasks(write_piece, todo, (source, shape, target)):
            done[number] = note
            progress(note["rows"])
    notes = [done[number] for number in sorted(done)]
    fragments = [FragmentMetadata.from_json(json.dumps(text)) for note in notes for text in note["fragments"]]
    if not fragments:
        raise ValueError("the source has no rows")
    left_out, odd = ([Left(*named) for note in notes for named in note[kind]] for kind in ("left_out", "no_images"))
    return commit(shape.schema, fragments, target), left_out, odd


def commit(schema: pa.Schema, fragments: Sequence[FragmentMetadata], target: Target) -> lance.LanceDataset:
    """Makes the fragments a dataset, or the next version of the one that was there when the run began."""
    # Without retries, it fails where a dataset is by now: else Lance would make this the next version of that.
    retries = {} if target.mode == "overwrite" else {"max_retries": 0}
    operation, notes = lance.LanceOperation.Overwrite(schema, fragments), target.notes
    return lance.LanceDataset.commit(notes.uri, operation, storage_options=notes.options, **retries)


def shaped(
    source: Source, shape: Shape, piece: Piece, left_out: list[Left], no_images: list[Left]
) -> Iterator[pa.Table]:
    """Reads a piece as rows of the dataset; adds to the lists what gives no row, and what holds no image."""
    rows = 0
    for table in source.read(piece, left_out):

        def where(row: int, before: int = rows) -> str:
            return source.where(piece, before + row)

        made = shape.encode(shape.apply(table, piece.name), where)
        no_images += shape.no_images(made, where)
        yield made
        rows += table.num_rows


def _named(piece: Piece, found: list[Left]) -> list[Left]:
    more = len(found) - _NAMED
    return [*found[:_NAMED], *([Left(f"{piece.name}: {more:,} more", "are not named", more)] if more > 0 else [])]


def write_piece(numbered: tuple[int, Piece], given: tuple[Source, Shape, Target]) -> tuple[int, dict[str, Any]]:
    """Writes one piece, then notes that it is done; returns its number and the note."""
    (number, piece), (source, shape, target) = numbered, given
    left_out: list[Left] = []
    no_images: list[Left] = []
    tables = shaped(source, shape, piece, left_out, no_images)
    batches = itertools.chain.from_iterable(table.to_batches() for table in tables)
    rows, first = 0, next((batch for batch in batches if batch.num_rows), None)
    fragments: list[FragmentMetadata] = []
    if first is not None:
        stream = pa.RecordBatchReader.from_batches(shape.schema, itertools.chain([first], batches))
        fragments = write_fragments(
            stream,
            target.notes.uri,
            schema=shape.schema,
            mode=target.mode,
            max_rows_per_file=target.rows_per_fragment,
            storage_options=target.notes.options,
        )
        rows = sum(fragment.physical_rows for fragment in fragments)
    named = {"left_out": _named(piece, left_out), "no_images": _named(piece, no_images)}
    note = {"rows": rows, "fragments": [found.to_json() for found in fragments], **named}
    target.notes.write(number, note)
    return number, note
