"""LeRobot's Lance layout, made of a LeRobot dataset of version 3: Parquet files of rows, MP4s of cameras.

The rows become `frames.lance`, with underscores for the dots in names; the MP4s become rows of `videos.lance`, byte for
byte; `meta/` is copied last, so that what a killed run leaves is not opened. Statistics, tasks and episodes are
LeRobot's own.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs as pafs

from jobs.common import RefusedError, exists, locate, open_filesystem, reason, show_command, store_options

FRAMES, VIDEOS, META = "frames.lance", "videos.lance", "meta"
BATCH_ROWS = 1024
OLDER = "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30"  # in the package lerobot


class Recorded(NamedTuple):
    """What lies in --input."""

    filesystem: pafs.FileSystem
    root: str
    info: Mapping[str, Any]

    def files(self, folder: str) -> list[str]:
        """The Parquet files below a folder, in the order of their numbers."""
        found = self.filesystem.get_file_info(pafs.FileSelector(f"{self.root}/{folder}", recursive=True))
        paths = [info.path for info in found if info.is_file and info.extension == "parquet"]
        return sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path[len(self.root) :])])

    @property
    def cameras(self) -> list[str]:
        """Names of the features whose frames lie in MP4s."""
        return [name for name, feature in self.info["features"].items() if feature["dtype"] == "video"]


def convert(args: argparse.Namespace) -> str:
    """Makes the layout of the dataset in --input at --out; returns a summary.

    Raises:
        RefusedError: If --input is not such a dataset, if --out has one already, or if files cannot be read or written.
    """
    options, out = store_options(args.storage_options), locate(args.out).rstrip("/")
    there = [name for name in (FRAMES, VIDEOS) if exists(f"{out}/{name}", options)]
    if there and not args.overwrite:
        raise RefusedError(
            f"--out {args.out} has {there[0]} already. Its rows would be replaced. Choose another --out, or give "
            "--overwrite, also to begin again after a run that was killed."
        )
    try:
        recorded = open_recorded(args.input, options)
        mode = "overwrite" if there else "create"
        rows = write_frames(recorded, f"{out}/{FRAMES}", mode, options)
        videos = write_videos(recorded, f"{out}/{VIDEOS}", mode, options)
        target, place = open_filesystem(out, options)
        target.create_dir(f"{place}/{META}", recursive=True)
        pafs.copy_files(
            f"{recorded.root}/{META}", f"{place}/{META}", source_filesystem=recorded.filesystem,
            destination_filesystem=target,
        )  # fmt: skip
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # pyarrow's errors are ValueErrors, too
        raise RefusedError(
            f"making {args.out} of {args.input} failed ({reason(error)}). What was written there is not whole. Remove "
            "the cause, and run it again with --overwrite."
        ) from error
    return "\n".join([
        f"wrote {out}, in LeRobot's Lance layout",
        f"  rows       {rows:,}",
        f"  videos     {videos:,} of {len(recorded.cameras)} cameras: {', '.join(recorded.cameras) or 'there is none'}",
        f"use it: raylance.lerobot.open({out!r})",
    ])  # fmt: skip


def open_recorded(location: str, options: dict[str, str]) -> Recorded:
    """Reads what a dataset says of itself, and refuses others than those of version 3."""
    filesystem, root = open_filesystem(location, options)
    root = root.rstrip("/")
    try:
        with filesystem.open_input_stream(f"{root}/{META}/info.json") as file:
            info = json.loads(file.read())
    except FileNotFoundError as error:
        raise RefusedError(
            f"--input {location} has no {META}/info.json, so it is not a LeRobot dataset. Nothing was written. Give "
            "the folder that has meta/, data/ and videos/."
        ) from error
    version = str(info.get("codebase_version"))
    if not version.startswith("v3."):
        command = show_command([*OLDER.split(), "--repo-id", "OWNER/NAME"])
        raise RefusedError(
            f"--input {location} is of LeRobot's version {version}, and only v3 is read. Nothing was written. LeRobot "
            f"converts older ones: {command}"
        )
    return Recorded(filesystem, root, info)


def frames_schema(schema: pa.Schema, features: Mapping[str, Any]) -> pa.Schema:
    """The columns of `frames.lance`: lists of one size are stored as such.

    Raises:
        ValueError: If two features get one name.
    """
    fields = []
    for field in schema:
        shape, kind = features.get(field.name, {}).get("shape", ()), field.type
        if len(shape) == 1 and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
            kind = pa.list_(kind.value_type, int(shape[0]))
        fields.append(pa.field(field.name.replace(".", "_"), kind))
    names = [field.name for field in fields]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two features are both stored as {twice!r}")
    return pa.schema(fields)


def write_frames(recorded: Recorded, uri: str, mode: str, options: dict[str, str]) -> int:
    """Writes the rows; returns their number.

    Raises:
        ValueError: If rows are missing, or do not come in the order of their `index`.
    """
    paths = recorded.files("data")
    if not paths:
        raise ValueError(f"{recorded.root}/data has no Parquet file")
    with recorded.filesystem.open_input_file(paths[0]) as opened:
        schema = frames_schema(pq.read_schema(opened), recorded.info["features"])

    def read() -> Iterator[pa.RecordBatch]:
        rows = 0
        for path in paths:
            with recorded.filesystem.open_input_file(path) as opened:
                for batch in pq.ParquetFile(opened).iter_batches(BATCH_ROWS):
                    if not np.array_equal(batch["index"].to_numpy(), np.arange(rows, rows + len(batch))):
                        raise ValueError(f"{path} does not continue with the row of index {rows}")
                    rows += len(batch)
                    table = pa.Table.from_batches([batch]).rename_columns(schema.names)
                    yield from table.cast(schema).to_batches()

    made = lance.write_dataset(
        pa.RecordBatchReader.from_batches(schema, read()), uri, mode=mode, storage_options=options or None
    )
    if (rows := made.count_rows()) != recorded.info["total_frames"]:
        raise ValueError(f"data/ has {rows:,} rows, and info.json says {recorded.info['total_frames']:,}")
    return rows


def write_videos(recorded: Recorded, uri: str, mode: str, options: dict[str, str]) -> int:
    """Writes the MP4s in which episodes lie; returns their number. Without cameras, nothing is written."""
    episodes = []
    for path in recorded.files(f"{META}/episodes"):
        with recorded.filesystem.open_input_file(path) as opened:
            episodes.append(pq.read_table(opened))
    every, places = pa.concat_tables(episodes, promote_options="permissive"), list[tuple[str, int, int]]()
    for camera in recorded.cameras:
        numbers = [every[f"videos/{camera}/{kind}_index"].to_pylist() for kind in ("chunk", "file")]
        places += [(camera, chunk, file) for chunk, file in sorted({*zip(*numbers, strict=True)})]
    if not places:
        return 0
    schema = pa.schema([
        ("video_key", pa.string()), ("chunk_index", pa.int64()), ("file_index", pa.int64()), ("file_size", pa.int64()),
        lance.blob_field("video_bytes"),
    ])  # fmt: skip

    def read() -> Iterator[pa.RecordBatch]:
        for camera, chunk, file in places:  # one at a time: a file may have hundreds of megabytes
            name = recorded.info["video_path"].format(video_key=camera, chunk_index=chunk, file_index=file)
            with recorded.filesystem.open_input_stream(f"{recorded.root}/{name}") as opened:
                content = opened.read()
            columns = [[camera], [chunk], [file], [len(content)], lance.blob_array([content])]
            yield pa.RecordBatch.from_arrays(
                [each if isinstance(each, pa.Array) else pa.array(each) for each in columns], schema=schema
            )

    lance.write_dataset(
        pa.RecordBatchReader.from_batches(schema, read()), uri, schema=schema, mode=mode,
        storage_options=options or None, data_storage_version="2.2",
    )  # fmt: skip
    return len(places)
