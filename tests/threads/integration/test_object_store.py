"""Reading from an object store, by a real S3 API here: several requests at once, in order."""

import os
from collections.abc import Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest
import ray.train
from hypothesis import given, settings
from hypothesis import strategies as st

import raylance
from raylance import lerobot
from raylance.errors import DatasetError
from raylance.integrations.checkpoint_files import write_files
from raylance.source import reader
from raylance.source.reader import Reader, ReadMode
from raylance.source.version import Source
from tests.helpers.faulty_store import bucket_of, store_options
from tests.helpers.lerobot import make_robots
from tests.helpers.videos import encode, scene, whole, write_videos

ROWS = 3000
OPTIONS = "scheme=http&endpoint_override={}"  # Arrow's words for where the API is


@pytest.fixture(scope="module")
def uri(s3_port: int) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (store_options(s3_port) | {"default_region": "us-east-1"}).items():
            patch.setenv(f"AWS_{name.removeprefix('aws_').upper()}", value)
        bucket_of(s3_port, "read")
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 100, dtype=np.float32)), 100)
        words = pa.array([b"x" * (row % 50) for row in range(ROWS)])
        table = pa.table({"id": np.arange(ROWS), "vector": vectors, "word": words})
        lance.write_dataset(table, "s3://read/data.lance", max_rows_per_file=700)
        yield "s3://read/data.lance"


@settings(max_examples=8)
@given(
    offsets=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=60, unique=True),
    runs=st.integers(1, 20),
    mode=st.sampled_from(["range", "take", "auto"]),
    piece_bytes=st.sampled_from([500, 5000, 4 << 20]),
)
def test_pieces_come_in_order(uri: str, offsets: list[int], runs: int, mode: ReadMode, piece_bytes: int) -> None:
    """Some rows with what follows them, in pieces of a few rows, of which eight are under way."""
    wanted = np.unique(np.concatenate([np.arange(first, min(first + runs, ROWS)) for first in offsets]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "PIECE_BYTES", piece_bytes)
        opened = Reader(pinned=Source(uri=uri, version=1), columns=["id", "vector", "word"], row_bytes=450, mode=mode)
        pieces: list[pa.Table] = []
        opened.read_into(wanted, pieces.append)
    found = pa.concat_tables(pieces)
    assert found["id"].to_pylist() == found["_rowoffset"].to_pylist() == wanted.tolist()
    assert [len(word) for word in found["word"].to_pylist()] == (wanted % 50).tolist()
    assert found["vector"].combine_chunks().flatten().to_numpy()[::100].tolist() == (wanted * 100.0).tolist()
    assert max(piece.num_rows for piece in pieces) <= max(1, piece_bytes // 450)


def test_frames_of_videos_in_a_store(uri: str) -> None:
    """Rows and videos are in the store, from which each thread of a reader reads parts of files."""
    videos = [encode(scene(seed, 60), gop=20) for seed in range(3)]
    write_videos("s3://read/videos.lance", videos)
    rows = np.arange(180)
    table = pa.table({"row": rows, "file": rows // 60, "frame": rows % 60})
    lance.write_dataset(table, "s3://read/filmed.lance", max_rows_per_file=100)
    data = raylance.dataset(
        "s3://read/filmed.lance",
        decode=raylance.Video("top", "s3://read/videos.lance", video="file", frame="frame"),
        samples=raylance.Windows(episode="file", offsets={"top": [-2, 0]}),
        remainder="ragged",
    )
    frames, seen = [whole(video) for video in videos], []
    for batch in data.iter_batches(batch_size=16):
        for row, pixels in zip(batch["row"].tolist(), batch["top"], strict=True):
            wanted = frames[row // 60][np.clip(row % 60 + np.array([-2, 0]), 0, None)]
            assert (pixels == wanted).all()
            seen.append(row)
    assert sorted(seen) == rows.tolist()


@pytest.mark.parametrize("meta", ["table", "folder"])
def test_robots_in_a_store(uri: str, meta: str, tmp_path: Path) -> None:
    """LeRobot's own files are in a folder of the store, or in a table."""
    robots, root = make_robots(), f"s3://read/robots-{meta}"
    robots.write(str(tmp_path) if meta == "folder" else root, meta=meta)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            bucket_of(int(os.environ["AWS_ENDPOINT"].rpartition(":")[2]), "read").upload_file(
                str(path), f"robots-folder/{path.relative_to(tmp_path)}"
            )
    top = "observation.images.top"
    data = lerobot.open(root, columns=["index", top], delta_timestamps={top: [0.0]}, remainder="ragged")
    seen = []
    for batch in data.iter_batches(batch_size=16):
        seen += batch["index"].tolist()
        assert (batch[top][:, 0] == robots.pixels[top][batch["index"]]).all()
    assert sorted(seen) == list(range(166))


def test_a_column_is_written_where_the_dataset_and_the_parts_are_in_a_store(uri: str) -> None:
    options = {"aws_endpoint": os.environ["AWS_ENDPOINT"], "allow_http": "true"}
    parts, copy = (
        f"s3://read/parts?{OPTIONS.format(os.environ['AWS_ENDPOINT'].partition('//')[2])}",
        "s3://read/copy.lance",
    )
    version = lance.write_dataset(lance.dataset(uri).to_table(columns=["id"]), copy, max_rows_per_file=700).version
    raylance.writing.add_column(copy, "found", pa.float32(), storage_options=options)
    for rows in (range(2000), range(1500, ROWS)):
        raylance.writing.write_values(parts, rows, np.sqrt(rows), pa.float32())
    values = raylance.writing.read_values(parts, ROWS)
    assert raylance.writing.write_column(copy, "found", values, version=version, storage_options=options) == 0
    np.testing.assert_array_equal(lance.dataset(copy).to_table()["found"], np.sqrt(range(ROWS)).astype(np.float32))


def test_what_is_gone_is_named_with_pieces_under_way(uri: str) -> None:
    opened = Reader(pinned=Source(uri=uri, version=1), columns=["id"], row_bytes=1e6, mode="take")
    with pytest.raises(DatasetError, match="rows 2998 to 3037 of 's3://read/data.lance'"):
        opened.read(np.arange(2950, 3050))


def test_a_checkpoint_in_an_object_store(uri: str) -> None:
    """One that lies there already gets raylance's files, and gives them back."""
    filesystem, path = pyarrow.fs.FileSystem.from_uri(
        f"s3://read/runs?{OPTIONS}".format(os.environ["AWS_ENDPOINT"].removeprefix("http://"))
    )
    checkpoint = ray.train.Checkpoint(f"{path}/checkpoint", filesystem=filesystem)
    dataset = raylance.dataset(uri, columns=["id"])
    with dataset.loader(runtime="threads") as loader:
        next(iter(loader.batches(global_batch_size=100)))
        write_files(checkpoint, loader.state_dict(), {"step": 1})
    found = filesystem.get_file_info(pyarrow.fs.FileSelector(f"{path}/checkpoint"))
    assert sorted(info.base_name for info in found) == ["raylance_state.json", "state.pt"]
    other = dataset.loader(rank=0, world_size=2)
    assert raylance.restore(other, checkpoint) == {"step": 1}
    assert other.state_dict()["position"] == 100
