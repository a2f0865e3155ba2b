"""Owns the making of a dataset: a fragment for each piece, what is done already, the commit; never shapes a row.

Each task writes its fragment, and then a small file that notes it, below the dataset. A run that is killed is started
again with the same command, and makes what is missing; after the commit these files are removed. lance-ray writes
from many machines, too, but starts over each time, and gathers a task's rows in memory before it writes the first.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lance
import pyarrow as pa
import ray
import ray.data
from lance.fragment import FragmentMetadata, write_fragments

from jobs.common import own_progress
from jobs.create_dataset.notes import Notes
from jobs.create_dataset.shaping import Shape
from jobs.create_dataset.sources import Left, Piece, Source

_NAMED = 1000  # files or rows that a task names


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
    def notes(self) -> Notes:
        """What this run has done."""
        return Notes(uri=self.uri, key=self.key, options=self.options)


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
    todo = [
        {"number": number, "piece": ray.cloudpickle.dumps(piece)}
        for number, piece in enumerate(pieces)
        if number not in done
    ]
    if todo:
        given = ray.put((source, shape, target))
        task = functools.partial(write_piece, given=given)
        with own_progress():
            rows = ray.data.from_items(todo, override_num_blocks=len(todo))
            for row in rows.map_batches(task, batch_format="pyarrow", batch_size=1).iter_rows():
                done[row["number"]] = json.loads(row["note"])
                progress(done[row["number"]]["rows"])
    notes = [done[number] for number in sorted(done)]
    fragments = [FragmentMetadata.from_json(json.dumps(text)) for note in notes for text in note["fragments"]]
    if not fragments:
        raise ValueError("the source has no rows")
    left_out, odd = ([Left(*named) for note in notes for named in note[kind]] for kind in ("left_out", "no_images"))
    return commit(shape.schema, fragments, target), left_out, odd


def commit(schema: pa.Schema, fragments: Sequence[FragmentMetadata], target: Target) -> lance.LanceDataset:
    """Makes the fragments a dataset, or the next version of the one that was there when the run began."""
    operation, options = lance.LanceOperation.Overwrite(schema, fragments), target.options or None
    if target.mode == "overwrite":
        return lance.LanceDataset.commit(target.uri, operation, storage_options=options)
    # Without retries, it fails where a dataset is by now: else Lance would make this the next version of that.
    return lance.LanceDataset.commit(target.uri, operation, storage_options=options, max_retries=0)


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


def write_piece(batch: pa.Table, *, given: Any) -> pa.Table:
    """Writes one piece, then notes that it is done."""
    source, shape, target = ray.get(given)
    [item] = batch.to_pylist()
    piece: Piece = ray.cloudpickle.loads(item["piece"])
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
            target.uri,
            schema=shape.schema,
            mode=target.mode,
            max_rows_per_file=target.rows_per_fragment,
            storage_options=target.options or None,
        )
        rows = sum(fragment.physical_rows for fragment in fragments)
    named = {"left_out": _named(piece, left_out), "no_images": _named(piece, no_images)}
    note = json.dumps({"rows": rows, "fragments": [found.to_json() for found in fragments], **named})
    target.notes.write(item["number"], note)
    return pa.table({"number": [item["number"]], "note": [note]})
