"""The plan of a copy, made before a row is copied: sizes, fragments, provenance."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable
from typing import Any

import lance
import numpy as np
import pyarrow as pa

import raylance
from jobs.common import identity, is_blob

from .images import Reencode
from .layout import fragment_bounds, slot_bounds
from .shuffle import OFFSET, PLACE, Work, open_version
from .survey import Survey, survey

LEAST_BUCKET, LARGEST_BUCKET = 128 << 20, 1 << 30  # above, Arrow's 32-bit offsets could overflow
PIECE_BYTES = 1 << 20  # what the second pass reads of a run at a time, at the least
FRAGMENT_BYTES, FRAGMENT_ROWS = 256 << 20, 1 << 20  # where nothing is asked for; the latter is Lance's own limit
SLOTS = 4  # of a bucket: what is counted and weighed by itself
BATCH_BYTES = 4 << 20  # to read and to write at a time
# Memory of a task at its peak, as measured: two buckets are tables, the rest is what Lance reads and writes.
HELD, PROCESS_BYTES = 4, 600 << 20

Bar = Callable[[str, int], Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for, checked."""

    data: raylance.Dataset
    out: str
    columns: list[str]
    filter: str | None
    group_by: str | None
    seed: int
    images: Reencode | None
    image_column: str
    rows_per_fragment: int | None
    bucket_bytes: int | None
    overwrite: bool
    scratch: str | None
    storage_options: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will be done."""

    wish: Wish
    found: Survey
    row_bytes: float  # of the copy, about
    fragments: np.ndarray  # places where its fragments begin, and the end; int64 (fragments + 1,)
    work: Work

    def __repr__(self) -> str:
        rows, chunks, bucket = self.found.rows, len(self.found.chunks), self.work.bucket_bytes / 1e6
        sizes = np.diff(self.fragments)
        order = f"grouped by {self.wish.group_by}, {self.found.groups:,} groups" if self.wish.group_by else "shuffled"
        each = f"{sizes.min():,}" + (f" or {sizes.max():,}" if sizes.min() < sizes.max() else "")
        return "\n".join([
            f"copying {rows:,} of {self.found.of_rows:,} rows, {rows / self.found.of_rows:.1%}, {order}, seed "
            f"{self.wish.seed}",
            f"  rows       {self.row_bytes:,.0f} bytes each, about {rows * self.row_bytes / 1e6:,.0f} MB",
            f"  fragments  {len(sizes):,} of {each} rows",
            f"  passes     {chunks:,} chunks of up to {bucket:,.1f} MB are sorted, and merged in pieces of about "
            f"{bucket * 1000 / chunks:,.0f} kB",
            f"  memory     about {task_bytes(self.work.bucket_bytes) / 1e6:,.0f} MB for each CPU that works",
        ])  # fmt: skip


def version_of(facts: dict[str, Any]) -> Any:
    """The version of the source, a number or (branch, number)."""
    return facts["version"] if facts["branch"] is None else (facts["branch"], facts["version"])


def open_source(wish: Wish) -> tuple[dict[str, Any], lance.LanceDataset]:
    """A loader's own state of the selection, as checkpoints have it; and the source, whose columns fit."""
    facts = wish.data.loader(rank=0, runtime="threads").state_dict()
    source = open_version(facts["uri"], version_of(facts), wish.storage_options)
    wish.data.head(0)  # opens what the handle has pinned, and refuses another dataset that lies there now
    check_columns(source, wish)
    return facts, source


def make_plan(wish: Wish, progress: Bar) -> Plan:
    """Counts what is selected, and decides sizes."""
    facts, source = open_source(wish)
    stored = stored_row_bytes(source, wish.columns)
    # Enough to hold at a time for the second pass to read whole pieces, and no more than Arrow can take.
    usual_bytes = min(max(LEAST_BUCKET, math.isqrt(int(facts["rows"] * stored * PIECE_BYTES))), LARGEST_BUCKET)
    bucket_bytes = wish.bucket_bytes or usual_bytes
    found = survey(
        source,
        rows=facts["rows"],
        filter=wish.filter,
        group_by=wish.group_by,
        chunk_rows=max(1, int(bucket_bytes / stored)),
        seed=wish.seed,
        progress=lambda count: progress("counting", count),
    )
    sample = source.take(pa.array(found.sample), columns=wish.columns)
    read_bytes = row_bytes = max(stored, sample.nbytes / len(sample))
    if wish.images is not None:
        trial = dataclasses.replace(wish.images, keep_bad=True)
        row_bytes = max(1.0, trial.apply(sample, lambda row, error: error).nbytes / len(sample))
    # Where nothing is asked for, fragments are of a size that reads well everywhere.
    usual = min(FRAGMENT_ROWS, int(FRAGMENT_BYTES / row_bytes) + 1)
    fragments = fragment_bounds(found.rows, wish.rows_per_fragment or usual)
    work = Work(
        source=facts["uri"],
        version=version_of(facts),
        files=identity(source),
        filter=wish.filter,
        schema=describe(wish, facts).add_to(pa.schema(map(source.schema.field, wish.columns), source.schema.metadata)),
        group_by=wish.group_by,
        images=wish.images,
        rows=found.rows,
        seed=wish.seed,
        bounds=slot_bounds(fragments, max(1, int(bucket_bytes / SLOTS / row_bytes))),
        batch_rows=max(1, int(BATCH_BYTES / read_bytes)),
        bucket_bytes=bucket_bytes,
        scratch=f"{wish.scratch or wish.out}.scratch-{secrets.token_hex(4)}",
        out=wish.out,
        mode="create",
        storage_options=wish.storage_options,
        data_storage_version=source.data_storage_version,
    )
    return Plan(wish=wish, found=found, row_bytes=row_bytes, fragments=fragments, work=work)


def describe(wish: Wish, facts: dict[str, Any]) -> raylance.writing.Provenance:
    """What the copy records of its source."""
    names = ("uri", "version", "branch", "identity", "filter", "rows", "fingerprint")
    return raylance.writing.Provenance(
        **{name: facts[name] for name in names},
        columns=wish.columns,
        seed=wish.seed,
        order="shuffled" if wish.group_by is None else "grouped",
        group_by=wish.group_by,
        transform=None if wish.images is None else wish.images.describe(),
        raylance=raylance.__version__,
    )


def task_bytes(bucket_bytes: int) -> int:
    """Memory that a task takes at its peak, the process itself included."""
    return HELD * bucket_bytes + PROCESS_BYTES


def stored_row_bytes(dataset: lance.LanceDataset, columns: list[str]) -> float:
    """Bytes of a row of these columns as stored, the mean of all rows: it knows of a tail that no sample hits."""
    fields, ids = [field for field in dataset.lance_schema.fields() if field.name() in columns], set()
    while fields:
        field = fields.pop()
        ids.add(field.id())
        fields += field.children()
    stored = sum(field.bytes_on_disk for field in dataset.stats.data_stats().fields if field.id in ids)
    return max(1.0, stored / max(1, sum(fragment.physical_rows for fragment in dataset.get_fragments())))


def check_columns(source: lance.LanceDataset, wish: Wish) -> None:
    """Refuses columns that a copy cannot hold, or cannot be grouped by."""
    fields = {field.name: field for field in source.schema}
    for name in wish.columns:
        if name not in fields:
            raise raylance.errors.ConfigError(
                f"column {name} lies inside a struct. A copy holds whole columns, so nothing was copied. Name "
                f"{name.partition('.')[0]} by --columns, unless it holds blobs, or leave it out."
            )
        if is_blob(fields[name]):
            raise raylance.errors.ConfigError(
                f"column {name} is blob-encoded. A scan gives descriptors and not its bytes, so a copy would hold no "
                "data. Leave it out by --columns, or write it as a plain binary column first."
            )
        if name in (PLACE, OFFSET):
            raise raylance.errors.ConfigError(
                f"column {name} has a name that this job uses itself. One of the two would be lost. Leave it out "
                "by --columns."
            )
    if wish.group_by is None:
        return
    if wish.group_by not in fields:
        raise raylance.errors.DatasetError(
            f"--group-by {wish.group_by}: {source.uri!r} has no such column. It has {', '.join(fields)}."
        )
    kind = fields[wish.group_by].type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_nested(kind) or pa.types.is_floating(kind):
        raise raylance.errors.ConfigError(
            f"--group-by {wish.group_by} is {kind}, by which rows make no classes. Name a column of integers or "
            "strings."
        )
