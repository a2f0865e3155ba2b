"""Owns the making of a dataset: a fragment for each piece, what is done already, the commit; never shapes a row.

Each task writes its fragment, and then a small file that notes it, below the dataset. A run that is killed is started
again with the same command, and makes what is missing; after the commit these files are removed. lance-ray writes
from many machines, too, but starts over each time, and gathers a task's rows in memory before it writes the first.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lance
import pyarrow as pa
from lance.fragment import FragmentMetadata, write_fragments

from jobs.common import run_tasks
from jobs.create_dataset.notes import Notes
from jobs.create_dataset.shaping import Shape
from jobs.create_dataset.sources import Left, Piece, Source

_NAMED = 1000  # files or rows that a task names


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
