"""The two passes that bring rows to their places, as Ray Data's tasks do them.

The first pass reads the source in storage order, a chunk at a time, and writes each chunk as a run: a fragment of a
scratch dataset whose rows are sorted by their place. So the rows of any stretch of places are one range in each run.
The second pass reads such a stretch from all runs, sorts it in memory, and writes the fragments of the new dataset.
Nothing is read row by row, and only the places of rows go through Ray's object store, never a row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
from lance.file import LanceFileSession
from lance.fragment import FragmentMetadata, write_fragments

import raylance
from jobs.common import identity

from .images import Reencode
from .layout import Bucket, Run, Stretch
from .survey import WORD, Chunk, Places, checksum, group_values

PLACE, OFFSET = "_raylance_place", "_raylance_offset"  # of scratch rows, beside their own columns
RUNNING = "_running"  # a file in the scratch dataset while its run is active
TAKEN_BATCHES = 8  # read by one call: Lance holds them twice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What every task has to know."""

    source: str  # URI of the source
    version: Any  # of it, or (branch, version)
    files: str  # hash of that version's files, as all tasks must find it
    filter: str | None  # in SQL
    schema: pa.Schema  # of the new dataset
    group_by: str | None  # column of the groups; need not be in the schema
    images: Reencode | None
    rows: int  # selected ones
    seed: int  # of all places
    bounds: np.ndarray  # places where slots begin, and the end of the last one; int64 (slots + 1,)
    batch_rows: int  # to read and to write at a time
    bucket_bytes: int  # of rows that a task holds at a time, about
    scratch: str  # URI of the scratch dataset
    out: str  # URI of the new dataset
    mode: str  # "create", or "overwrite" where `out` is a dataset already
    storage_options: dict[str, str]
    data_storage_version: str  # of Lance's files, as in the source

    def mark_running(self) -> None:
        """Lets tasks write, until what lies at `scratch` is removed."""
        with tempfile.NamedTemporaryFile() as empty:
            LanceFileSession(self.scratch, storage_options=self.storage_options).upload_file(empty.name, RUNNING)

    def write(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema, uri: str, mode: str) -> FragmentMetadata:
        """Writes one fragment, which belongs to a dataset only once it is committed.

        Raises:
            DatasetError: If the run was given up meanwhile: its cleaning does not see this file, so it is removed here.
        """
        self._check_running()
        [written] = write_fragments(
            pa.RecordBatchReader.from_batches(schema, batches),
            uri,
            schema=schema,
            mode=mode,
            max_rows_per_file=self.rows,
            max_bytes_per_file=1 << 62,
            data_storage_version=self.data_storage_version,
            storage_options=self.storage_options,
        )
        try:
            self._check_running()
        except raylance.errors.DatasetError:
            session = LanceFileSession(uri, storage_options=self.storage_options)
            for file in written.files:
                if session.contains(path := f"data/{file.path}"):
                    session.delete_file(path)
            if "://" not in uri:  # folders are left
                for folder in (Path(uri, "data"), Path(uri)):
                    with contextlib.suppress(OSError):  # others write there
                        folder.rmdir()
            raise
        return written

    def _check_running(self) -> None:
        if not LanceFileSession(self.scratch, storage_options=self.storage_options).contains(RUNNING):
            raise raylance.errors.DatasetError("the run was given up; this task writes nothing more")

    @property
    def scratch_schema(self) -> pa.Schema:
        """Of the scratch dataset."""
        return self.schema.append(pa.field(PLACE, pa.int64())).append(pa.field(OFFSET, pa.int64()))


def open_version(uri: str, version: Any, storage_options: dict[str, str]) -> lance.LanceDataset:
    """Opens a version, a number or (branch, number)."""
    if isinstance(version, tuple):
        return lance.dataset(uri, storage_options=storage_options).checkout_version(version)
    return lance.dataset(uri, version=version, storage_options=storage_options)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A fragment of the new dataset."""

    start: int  # its first place
    fragment: FragmentMetadata
    rows: int
    checksum: int  # of the source's row offsets in it


def scatter(chunk: Chunk, work: Work) -> list[Run]:
    """A task of the first pass: sorts a chunk into runs."""
    pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own keeps what Lance's threads free: twice the memory
    source = open_version(work.source, work.version, work.storage_options)
    if (files := identity(source)) != work.files:
        raise raylance.errors.DatasetError(
            f"{work.source!r} was rewritten in place while it was copied. The files of version {work.version} were "
            f"{work.files}, and are {files} now. Nothing was committed. Run it again for a copy of the new rows."
        )
    wanted = set(chunk.fragments)
    columns = [*work.schema.names, "_rowoffset"]
    extra = [] if work.group_by in (None, *columns) else [work.group_by]
    scanner = source.scanner(
        columns=[*columns, *extra],
        filter=work.filter,
        fragments=[fragment for fragment in source.get_fragments() if fragment.fragment_id in wanted],
        offset=chunk.start,
        limit=chunk.rows,
        batch_size=work.batch_rows,
        scan_in_order=True,
    )  # no io_buffer_size: what Lance reads ahead is a part of the chunk, and with 64 MiB a scan was seen to hang
    places, held, held_bytes, seen, runs = Places(chunk, work.rows, work.seed), [], 0, 0, []

    def flush() -> None:
        if held:
            runs.append(write_run(work, chunk, len(runs), held))

    for read in scanner.to_batches():
        table = pa.Table.from_batches([read])
        offsets = table["_rowoffset"].to_numpy().astype(np.int64)
        group = None if work.group_by is None else group_values(table[work.group_by])
        table = table.select(work.schema.names)
        if work.images is not None:
            table = work.images.apply(table, functools.partial(bad_image, work.images.column, offsets))
        added = [pa.array(places.next(len(read), group)), pa.array(offsets)]
        # By hand, not by cast: what Lance gives has the types already, and casts know not all of them.
        held.append(pa.Table.from_arrays([*table.columns, *added], schema=work.scratch_schema))
        held_bytes, seen = held_bytes + held[-1].nbytes, seen + len(read)
        if held_bytes >= work.bucket_bytes:
            flush()
            held_bytes = 0
    flush()
    if seen != chunk.rows:
        raise raylance.errors.CoverageError(
            f"{work.source!r} gave {seen:,} rows of {chunk.rows:,} from selected row {chunk.first:,} on. Nothing was "
            "committed. Files of this version have changed: tag what is read, and make it again."
        )
    return runs


def bad_image(column: str, offsets: np.ndarray, row: int, error: Exception) -> raylance.errors.DatasetError:
    """The error of an image that cannot be decoded; `offsets` are those of the rows that are read with it."""
    return raylance.errors.DatasetError(
        f"column {column} of row offset {offsets[row]} cannot be decoded ({error}). Nothing was committed. Repair the "
        "row, leave it out by --filter, or keep such bytes as they are by --on-bad-image keep."
    )


def write_run(work: Work, chunk: Chunk, part: int, held: list[pa.Table]) -> Run:
    """Writes tables, which it empties, as one sorted run."""
    table = one_chunk(held)
    table = table.take(pa.array(np.argsort(table[PLACE].to_numpy())))
    edges = np.searchsorted(table[PLACE].to_numpy(), work.bounds)
    slot_bytes = [table.slice(a, b - a).nbytes if b > a else 0 for a, b in itertools.pairwise(edges)]
    batches = iter(table.to_batches(max_chunksize=work.batch_rows))
    written = work.write(batches, work.scratch_schema, work.scratch, "create")
    return Run(
        first=chunk.first,
        part=part,
        fragment=written,
        slot_rows=np.diff(edges),
        slot_bytes=np.asarray(slot_bytes, np.int64),
    )


def gather(bucket: Bucket, work: Work) -> list[Made]:
    """A task of the second pass: merges the rows of a bucket into its fragments."""
    pa.set_memory_pool(pa.system_memory_pool())
    scratch, loaded, made = lance.dataset(work.scratch, storage_options=work.storage_options), Loaded(), []
    for start, stop in bucket.fragments:
        loaded.checksum = 0
        batches = loaded.between(scratch, bucket, start, stop, work)
        written = work.write(batches, work.schema, work.out, work.mode)
        made.append(Made(start=start, fragment=written, rows=stop - start, checksum=loaded.checksum))
        if written.physical_rows != stop - start:
            raise raylance.errors.CoverageError(
                f"{written.physical_rows:,} rows were written for the places {start:,} to {stop:,} of {work.out!r}. "
                "Nothing was committed. Run it again, and report this if it comes again."
            )
    return made


class Loaded:
    """The stretch that a task holds, one at a time."""

    def __init__(self) -> None:
        self.stretch: Stretch | None = None
        self.table: pa.Table | None = None
        self.checksum = 0  # of the source's row offsets that were handed out since it was set to 0

    def between(
        self, scratch: lance.LanceDataset, bucket: Bucket, start: int, stop: int, work: Work
    ) -> Iterator[pa.RecordBatch]:
        """The rows of the places from `start` to `stop`, in their order."""
        for stretch in bucket.stretches:
            first, last = max(start, stretch.start), min(stop, stretch.stop)
            if first >= last:
                continue
            if stretch is not self.stretch:
                self.table = None  # before the next one comes
                self.table, self.stretch = load(scratch, stretch, work), stretch
            yield from self._batches(first - stretch.start, last - first, work)

    def _batches(self, start: int, count: int, work: Work) -> Iterator[pa.RecordBatch]:
        # A call of its own: what it has cut out of the table is gone before the next one comes.
        rows = self.table.slice(start, count)
        self.checksum = (self.checksum + checksum(rows[OFFSET].to_numpy(), work.seed)) & WORD
        plain = pa.Table.from_arrays(rows.select(work.schema.names).columns, schema=work.schema)
        yield from plain.to_batches(max_chunksize=work.batch_rows)


def load(scratch: lance.LanceDataset, stretch: Stretch, work: Work) -> pa.Table:
    """Reads the rows of a stretch, one range of each run, and sorts them."""
    total = int(stretch.lengths.sum())
    within = np.arange(total) - np.repeat(np.cumsum(stretch.lengths) - stretch.lengths, stretch.lengths)
    offsets, step = np.repeat(stretch.offsets, stretch.lengths) + within, TAKEN_BATCHES * work.batch_rows
    parts = [
        scratch.take(pa.array(offsets[start : start + step]), columns=work.scratch_schema.names)
        for start in range(0, total, step)
    ]
    table = one_chunk(parts)
    places = table[PLACE].to_numpy()
    order = np.argsort(places)
    if not np.array_equal(places[order], np.arange(stretch.start, stretch.stop)):
        raise raylance.errors.CoverageError(
            f"the places {stretch.start:,} to {stretch.stop:,} were not each filled once. Rows would be lost or "
            "doubled, so nothing was committed. Run it again, and report this if it comes again."
        )
    return table.take(pa.array(order))


def one_chunk(tables: list[pa.Table]) -> pa.Table:
    """The tables, taken out of the list, with each column in one chunk: gathering from many is ten times as slow."""
    table = pa.concat_tables(tables).unify_dictionaries()
    tables.clear()
    return table.combine_chunks()
