"""Owns the making of a dataset: a fragment for each piece, what is done already, the commit; never shapes a row.

Each task writes its fragment, and then a small file that says so, below the dataset. A run that is killed is started
again with the same command, and makes what is missing; its commit removes these files. lance-ray writes from many
machines, too, but begins anew each time, and gathers a task's rows in memory before it writes the first.
"""

import dataclasses
import functools
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
import ray
import ray.data
from lance.file import LanceFileSession
from lance.fragment import FragmentMetadata, write_fragments

from jobs.create_dataset.shaping import Shape
from jobs.create_dataset.sources import Left, Piece, Source

_FOLDER = "_create"
_LEFT_OUT = 1000  # that a task names
_AT_ONCE = 16  # small files that are read or removed together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """Where the dataset goes.

    Attributes:
        uri: Of the dataset.
        mode: "create" or "overwrite".
        rows_per_fragment: At the most.
        options: Of the object store.
        key: Names this run; another source or other arguments give another.
    """

    uri: str
    mode: str
    rows_per_fragment: int
    options: dict[str, str]
    key: str

    @property
    def folder(self) -> str:
        """Where it is noted what is done."""
        return f"{self.uri.rstrip('/')}/{_FOLDER}-{self.key}"

    def session(self) -> LanceFileSession:
        """Files of that folder."""
        return LanceFileSession(self.folder, storage_options=self.options or None)


def key_of(facts: Any, *arguments: Any) -> str:
    """A name for whatever the rows depend on: what the source is, which may name millions of files, and arguments."""
    digest = hashlib.blake2b(repr(arguments).encode(), digest_size=8)
    for fact in facts if isinstance(facts, list) else [facts]:
        digest.update(repr(fact).encode())
    return digest.hexdigest()


def write(
    source: Source, shape: Shape, pieces: Sequence[Piece], target: Target, tell: Callable[[int], None]
) -> tuple[lance.LanceDataset, list[Left]]:
    """Makes the dataset; `tell` is called with rows that are done. Returns it, and what gave no row.

    Raises:
        ValueError: If the source has no rows.
    """
    done = read_notes(target)
    for note in done.values():
        tell(note["rows"])
    todo = [
        {"number": number, "piece": ray.cloudpickle.dumps(piece)}
        for number, piece in enumerate(pieces)
        if number not in done
    ]
    if todo:
        given = ray.put((source, shape, target))
        task = functools.partial(write_piece, given=given)
        rows = ray.data.from_items(todo, override_num_blocks=len(todo))
        for row in rows.map_batches(task, batch_format="pyarrow", batch_size=1).iter_rows():
            done[row["number"]] = json.loads(row["note"])
            tell(done[row["number"]]["rows"])
    notes = [done[number] for number in sorted(done)]
    fragments = [FragmentMetadata.from_json(json.dumps(text)) for note in notes for text in note["fragments"]]
    if not fragments:
        raise ValueError("the source has no rows")
    operation = lance.LanceOperation.Overwrite(shape.schema, fragments)
    made = lance.LanceDataset.commit(target.uri, operation, storage_options=target.options or None)
    forget_notes(target)
    return made, [Left(*left) for note in notes for left in note["left_out"]]


def write_piece(batch: pa.Table, *, given: Any) -> pa.Table:
    """Writes one piece, then notes that it is done."""
    source, shape, target = ray.get(given)
    [item] = batch.to_pylist()
    piece: Piece = ray.cloudpickle.loads(item["piece"])
    left_out: list[Left] = []
    tables = (shape.apply(table, piece.name) for table in source.read(piece, left_out))
    batches = itertools.chain.from_iterable(table.to_batches() for table in tables)
    rows, first = 0, next((batch for batch in batches if batch.num_rows), None)
    fragments: list[FragmentMetadata] = []
    if first is not None:
        stream = pa.RecordBatchReader.from_batches(shape.schema, itertools.chain([first], batches))
        fragments = write_fragments(
            stream,
            target.uri,
            schema=shape.schema,
            mode=target.mode,
            max_rows_per_file=target.rows_per_fragment,
            storage_options=target.options or None,
        )
        rows = sum(fragment.physical_rows for fragment in fragments)
    named = [*left_out[:_LEFT_OUT]]
    if len(left_out) > _LEFT_OUT:
        named.append(Left(f"{piece.name}: {len(left_out) - _LEFT_OUT:,} more", "are not named"))
    note = json.dumps({"rows": rows, "fragments": [found.to_json() for found in fragments], "left_out": named})
    with tempfile.TemporaryDirectory() as directory:
        local = Path(directory, "note.json")
        local.write_text(note)
        target.session().upload_file(str(local), f"{item['number']:08}.json")
    return pa.table({"number": [item["number"]], "note": [note]})


def read_notes(target: Target) -> dict[int, dict[str, Any]]:
    """What an earlier run of the same command has done, by the number of the piece."""
    files = list_notes(target)
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(_AT_ONCE) as threads:

        def read(file: str) -> tuple[int, dict[str, Any]]:
            local = Path(directory, file)
            target.session().download_file(file, str(local))
            note: dict[str, Any] = json.loads(local.read_text())
            return int(local.stem), note

        return dict(threads.map(read, files))


def list_notes(target: Target) -> list[str]:
    """The files that say what is done."""
    return sorted(file for file in target.session().list() if file.endswith(".json"))


def forget_notes(target: Target) -> None:
    """Removes them: what they say is committed."""
    session = target.session()
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(session.delete_file, list_notes(target)))
    if "://" not in target.uri:
        Path(target.folder).rmdir()


def begun_otherwise(target: Target) -> Iterator[str]:
    """Folders that runs with other arguments have left."""
    session = LanceFileSession(target.uri, storage_options=target.options or None)
    found = {file.split("/")[0] for file in session.list() if file.startswith(f"{_FOLDER}-")}
    return (folder for folder in sorted(found) if folder != f"{_FOLDER}-{target.key}")
