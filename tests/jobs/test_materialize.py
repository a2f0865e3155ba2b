"""Checks jobs/materialize on real Ray and Lance."""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import lance
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from lance.file import LanceFileSession

import raylance
from jobs.materialize import command, making
from jobs.materialize.layout import Run, fragment_bounds, plan_buckets, slot_bounds
from jobs.materialize.planning import make_plan
from jobs.materialize.shuffle import Work, scatter
from jobs.materialize.survey import Chunk, Places
from raylance.errors import ConfigError, DatasetError
from raylance.source import provenance
from tests.helpers import created
from tests.helpers.cluster import CPUS, wait_for_free_cpus
from tests.helpers.faulty_store import store_options
from tests.helpers.images import by_pillow, encode, make_images

SCRIPT = Path(__file__).parents[2] / "jobs" / "materialize.py"
SMALL = ("--bucket-bytes", 1 << 16)  # many chunks and buckets of few rows


def rows_table(rows: int, seed: int = 0) -> pa.Table:
    """Rows of about 300 bytes: id, a label in long runs, the split, and bytes that are null now and then."""
    rng = np.random.default_rng(seed)
    data = [None if i % 13 == 0 else rng.bytes(int(rng.integers(0, 600))) for i in range(rows)]
    return pa.table(
        {
            "id": pa.array(np.arange(rows)),
            "label": pa.array([None if i % 97 == 0 else "cba"[i * 3 // rows] for i in range(rows)]),
            "split": pa.array(["val" if i % 5 == 0 else "train" for i in range(rows)]),
            "data": pa.array(data, pa.binary()),
        },
        metadata={"classes": '["a", "b", "c"]'},
    )


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between looks for what stopped tasks still write; tests wait for the tasks themselves."""
    monkeypatch.setattr(making, "_LOOK_S", 0.02)


@pytest.fixture
def source(write_dataset: Callable[..., str]) -> str:
    """2,950 rows in fragments of 170, some deleted."""
    uri = write_dataset(rows_table(3000), max_rows_per_file=170)
    lance.dataset(uri).delete("id >= 400 and id < 450")
    return uri


refusal = functools.partial(created.refusal, main=command.main)


def make(source: str, out: Path, *options: object) -> lance.LanceDataset:
    assert command.main(["--data", source, "--out", str(out), *map(str, options)]) == 0
    assert [name for name in os.listdir(out.parent) if "scratch" in name] == []
    return lance.dataset(str(out))


@pytest.mark.usefixtures("ray_session")
def test_every_selected_row_comes_once_and_the_copy_says_what_it_was_made_from(
    source: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows, columns = "split = 'train'", ["id", "label", "data"]
    options = ["--filter", rows, "--columns", ",".join(columns), "--seed", 5, "--rows-per-fragment", 110, *SMALL]
    made = make(source, tmp_path / "out.lance", *options)
    wanted = lance.dataset(source).to_table(filter=rows, columns=columns)
    found = made.to_table()
    assert found["id"].to_pylist() != wanted["id"].to_pylist()
    assert found.sort_by("id").equals(wanted)
    counts = [fragment.count_rows() for fragment in made.get_fragments()]
    assert max(counts) - 1 <= min(counts) <= 110
    assert len(counts) == -(-len(wanted) // 110)
    assert made.schema.metadata[b"classes"] == b'["a", "b", "c"]'
    said = raylance.writing.Provenance.read(raylance.dataset(str(made.uri)).schema)
    state = raylance.dataset(source, filter=rows).loader(rank=0, runtime="threads").state_dict()
    for name in ("uri", "version", "branch", "identity", "filter", "rows", "fingerprint"):
        assert getattr(said, name) == state[name], name
    assert (said.columns, said.seed, said.order, said.group_by) == (columns, 5, "shuffled", None)
    assert (said.transform, said.raylance) == (None, raylance.__version__)
    with caplog.at_level(logging.DEBUG, logger="raylance"):
        raylance.dataset(str(made.uri), stale="refuse")
    assert "made from" not in caplog.text
    assert "was not compared" not in caplog.text
    lance.dataset(source).delete("id = 3")
    with pytest.raises(DatasetError, match="made from version 2 of .* which is at version 3: .* Nothing"):
        raylance.dataset(str(made.uri), stale="refuse")


@pytest.mark.usefixtures("ray_session")
def test_the_same_seed_gives_the_same_rows_whatever_the_work_is_cut_into(source: str, tmp_path: Path) -> None:
    def order(name: str, *options: object) -> list[int]:
        made = make(source, tmp_path / name, "--columns", "id,data", "--rows-per-fragment", 400, *options)
        return made.to_table()["id"].to_pylist()

    many = order("many", *SMALL)
    assert order("one") == many
    assert order("between", "--bucket-bytes", 300_000) == many
    assert order("other", "--seed", 1) != many
    # The permutation is part of what --seed means: it stays.
    assert many[:6] == [2569, 2603, 2388, 1647, 2235, 1821]


@pytest.mark.usefixtures("ray_session")
def test_groups_lie_together_in_the_order_of_their_values(source: str, tmp_path: Path) -> None:
    """Also where the copy lacks their column."""
    without = "--columns", "id,data"
    made = make(source, tmp_path / "out", "--group-by", "label", "--rows-per-fragment", 300, *without, *SMALL)
    stored = lance.dataset(source).to_table()
    labels = dict(zip(stored["id"].to_pylist(), stored["label"].to_pylist(), strict=True))
    ids = made.to_table()["id"].to_pylist()
    assert sorted(ids) == sorted(labels)
    counts = Counter(labels.values())
    assert [labels[i] for i in ids] == [name for name in ("a", "b", "c", None) for _ in range(counts[name])]
    inside = [i for i in ids if labels[i] == "b"]
    assert abs(np.corrcoef(inside, np.arange(len(inside)))[0, 1]) < 4 / len(inside) ** 0.5
    assert made.schema.names == ["id", "data"]
    whole = make(source, tmp_path / "whole", "--group-by", "label").to_table()
    assert whole.schema.names == stored.schema.names
    assert whole["id"].to_pylist() == ids, "neither chunks, buckets nor fragments say where a row goes"
    assert ids[:6] == [2836, 2076, 2244, 2564, 2738, 2669], "what --seed means stays"


@given(
    rows=st.integers(1, 400),
    rows_per_fragment=st.integers(1, 150),
    slot_rows=st.integers(1, 200),
    chunk_rows=st.integers(1, 300),
    bucket_bytes=st.integers(1, 5000),
    seed=st.integers(0, 9),
)
def test_buckets_hold_every_place_once_and_fit(
    rows: int, rows_per_fragment: int, slot_rows: int, chunk_rows: int, bucket_bytes: int, seed: int
) -> None:
    fragments = fragment_bounds(rows, rows_per_fragment)
    assert np.ptp(np.diff(fragments)) <= 1
    assert np.diff(fragments).max() <= rows_per_fragment
    bounds = slot_bounds(fragments, slot_rows)
    runs, weights = [], np.random.default_rng(seed).integers(1, 100, rows)
    scratch = []
    for first in range(0, rows, chunk_rows):
        chunk = Chunk(fragments=[0], start=first, rows=min(chunk_rows, rows - first), first=first)
        places = np.sort(Places(chunk, rows, seed).next(chunk.rows, None))
        scratch += places.tolist()
        edges = np.searchsorted(places, bounds)
        weighed = np.r_[0, np.cumsum(weights[places])]
        runs.append(Run(first=first, part=0, fragment="", slot_rows=np.diff(edges), slot_bytes=np.diff(weighed[edges])))
    assert sorted(scratch) == list(range(rows)), "places are a permutation, whatever the chunks"
    buckets = plan_buckets(fragments, bounds, runs, bucket_bytes)
    assert [part for bucket in buckets for part in bucket.fragments] == list(itertools.pairwise(fragments.tolist()))
    slots = {int(start): int(weights[start:stop].sum()) for start, stop in itertools.pairwise(bounds)}
    for bucket in buckets:
        held = []
        for stretch in bucket.stretches:
            parts = zip(stretch.offsets.tolist(), stretch.lengths.tolist(), strict=True)
            found = [row for offset, count in parts for row in scratch[offset : offset + count]]
            assert sorted(found) == list(range(stretch.start, stretch.stop))
            held += sorted(found)
            inside = [size for start, size in slots.items() if stretch.start <= start < stretch.stop]
            assert sum(inside) <= bucket_bytes or len(inside) == 1
        assert held == list(range(bucket.fragments[0][0], bucket.fragments[-1][1]))


@pytest.mark.usefixtures("ray_session")
def test_types_nulls_and_metadata_survive(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    rows = 500
    rng = np.random.default_rng(0)

    def sometimes(values: list, step: int) -> list:
        return [None if i % step == 0 else value for i, value in enumerate(values)]

    tensors = pa.FixedSizeListArray.from_arrays(pa.array(rng.integers(0, 255, 6 * rows), pa.uint8()), 6)
    tensor, record = (
        pa.fixed_shape_tensor(pa.uint8(), (2, 3)),
        pa.struct({"x": pa.float64(), "y": pa.list_(pa.string())}),
    )
    columns = {
        "text": (pa.string(), sometimes([f"é{i}" for i in range(rows)], 5)),
        "large": (pa.large_binary(), sometimes([rng.bytes(i % 300) for i in range(rows)], 7)),
        "classes": (pa.dictionary(pa.int32(), pa.string()), sometimes([f"class {i % 3}" for i in range(rows)], 6)),
        "vector": (pa.list_(pa.float32(), 4), sometimes([[i, 1.0, 2.0, 3.0] for i in range(rows)], 11)),
        "nested": (
            pa.list_(pa.list_(pa.int32())),
            sometimes([[[j, None] for j in range(i % 4)] + [None] for i in range(rows)], 6),
        ),
        "record": (record, sometimes([{"x": i / 2, "y": ["a"] * (i % 3)} for i in range(rows)], 8)),
        "time": (pa.timestamp("us", "UTC"), sometimes([1_600_000_000_000_000 + i for i in range(rows)], 9)),
        "half": (pa.float16(), np.arange(rows).astype(np.float16)),
        "empty": (pa.string(), [None] * rows),
    }
    table = pa.table({name: pa.array(values, kind) for name, (kind, values) in columns.items()})
    table = table.append_column("tensor", pa.ExtensionArray.from_storage(tensor, tensors))
    number = pa.field("number", pa.int64(), nullable=False, metadata={"unit": "rows"})
    table = table.append_column(number, pa.array(range(rows))).replace_schema_metadata({"classes": "[1]"})
    schema, uri = table.schema, write_dataset(table, max_rows_per_file=70)
    made, stored = make(uri, tmp_path / "out", "--rows-per-fragment", 60, *SMALL), lance.dataset(uri)
    assert [made.schema.field(n) for n in schema.names] == [stored.schema.field(n) for n in schema.names]
    assert made.schema.field("number").metadata == {b"unit": b"rows"}
    assert made.schema.metadata == {
        **stored.schema.metadata,
        b"raylance:provenance": made.schema.metadata[provenance.KEY],
    }
    assert made.data_storage_version == stored.data_storage_version
    found, wanted = made.to_table(), stored.to_table()
    found = found.take(pa.array(np.argsort(found["number"].to_numpy())))
    for name in schema.names:
        assert found[name].to_pylist() == wanted[name].to_pylist(), name


@pytest.fixture
def copied(write_dataset: Callable[..., str], tmp_path: Path) -> tuple[str, str]:
    """A small source, and a copy of it that was not made by Ray: what it says of its source is all that counts."""
    uri = write_dataset(rows_table(60), max_rows_per_file=20)
    state = raylance.dataset(uri).loader(rank=0, runtime="threads").state_dict()
    said = {name: state[name] for name in ("uri", "version", "branch", "identity", "rows", "fingerprint", "columns")}
    more = {"filter": None, "seed": 0, "order": "shuffled", "group_by": None, "transform": None, "raylance": "0"}
    table = lance.dataset(uri).to_table()
    table = table.replace_schema_metadata(raylance.writing.Provenance(**said, **more).add_to(table.schema).metadata)
    lance.write_dataset(table, str(tmp_path / "copy.lance"))
    provenance.warn_once.cache_clear()
    return uri, str(tmp_path / "copy.lance")


def test_a_stale_copy_is_named_once_or_refused(copied: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    source, copy = copied
    lance.dataset(source).create_scalar_index("id", "BTREE")
    with caplog.at_level(logging.DEBUG, logger="raylance"):
        raylance.dataset(copy, stale="refuse")
    assert caplog.text == "", "another version with the same rows in the same files"
    lance.write_dataset(rows_table(10), source, mode="append")
    with caplog.at_level(logging.WARNING, logger="raylance"):
        raylance.dataset(copy)
        raylance.dataset(copy, filter="id < 9")
        raylance.dataset(copy, stale="ignore")
    assert caplog.text.count("which is at version 3: it lacks the changes since then") == 1
    with pytest.raises(DatasetError, match="was made from version 1 of"):
        raylance.dataset(copy, stale="refuse")
    with pytest.raises(ConfigError, match="stale='maybe': must be one of 'warn', 'refuse', 'ignore'"):
        raylance.dataset(copy, stale="maybe")


def test_windows_of_a_copy_are_refused(copied: tuple[str, str]) -> None:
    windows = raylance.Windows(episode="id", offsets={"id": [0]})
    raylance.dataset(copied[0], columns=["id"], samples=windows)
    with pytest.raises(DatasetError, match=r"copy\.lance.* shuffled"):
        raylance.dataset(copied[1], columns=["id"], samples=windows)
    timed = dataclasses.replace(windows, timestamp="id")  # each row is an episode
    assert len(raylance.dataset(copied[1], columns=["id"], samples=timed)) == 60


def test_a_source_rewritten_is_another_one(copied: tuple[str, str]) -> None:
    source, copy = copied
    shutil.rmtree(source)
    lance.write_dataset(rows_table(60), source, max_rows_per_file=20)
    with pytest.raises(DatasetError, match="at version 1, written again"):
        raylance.dataset(copy, stale="refuse")


def test_a_branch_is_compared_with_its_own_newest_version(
    copied: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, _ = copied
    branch = lance.dataset(source).create_branch("side")
    lance.write_dataset(rows_table(10), branch, mode="append")
    state = raylance.dataset(source, version=("side", None)).loader(rank=0, runtime="threads").state_dict()
    said = raylance.writing.Provenance.read(lance.dataset(copied[1]).schema)
    table = lance.dataset(copied[1]).to_table()
    kept = {name: state[name] for name in ("branch", "version", "identity")}
    of_branch = dataclasses.replace(said, **kept).add_to(table.schema).metadata
    lance.write_dataset(table.replace_schema_metadata(of_branch), str(tmp_path / "side.lance"))
    lance.write_dataset(rows_table(10), source, mode="append")
    raylance.dataset(str(tmp_path / "side.lance"), stale="refuse")
    lance.write_dataset(rows_table(10), lance.dataset(source).checkout_version(("side", None)), mode="append")
    with pytest.raises(DatasetError, match="made from version"):
        raylance.dataset(str(tmp_path / "side.lance"), stale="refuse")


def test_a_source_out_of_reach_stops_nobody(copied: tuple[str, str], caplog: pytest.LogCaptureFixture) -> None:
    source, copy = copied
    shutil.rmtree(source)
    for stale, level in (("warn", logging.DEBUG), ("refuse", logging.WARNING)):  # who refuses must know
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="raylance"):
            assert len(raylance.dataset(copy, stale=stale)) == 60
        assert [record.levelno for record in caplog.records] == [level]
        assert f"'{source}' cannot be opened (no Lance dataset" in caplog.text


def test_a_store_that_never_answers_is_not_waited_for(
    copied: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "_REACH_S", 0.5)
    table = lance.dataset(copied[1]).to_table()
    said = dataclasses.replace(raylance.writing.Provenance.read(table.schema), uri="s3://bucket/gone.lance")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = store_options(silent.getsockname()[1])
        lance.write_dataset(table.replace_schema_metadata(said.add_to(table.schema).metadata), str(tmp_path / "far"))
        with caplog.at_level(logging.DEBUG, logger="raylance"):
            assert len(raylance.dataset(str(tmp_path / "far"), storage_options=options)) == 60
    assert "'s3://bucket/gone.lance' cannot be opened (the storage has not answered for 0.5 s)" in caplog.text


@pytest.mark.parametrize(
    "text", ["{", "[" * 200_000, "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "uri": "x", "a": 1}']
)
def test_provenance_that_cannot_be_read_is_said(
    write_dataset: Callable[..., str], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    provenance.warn_once.cache_clear()
    uri = write_dataset(rows_table(5).replace_schema_metadata({"raylance:provenance": text}))
    with pytest.raises(DatasetError, match="'raylance:provenance' cannot be read"):
        raylance.dataset(uri, stale="refuse")
    with caplog.at_level(logging.DEBUG, logger="raylance"):
        assert len(raylance.dataset(uri, stale="ignore")) == 5
        assert caplog.text == ""
        assert len(raylance.dataset(uri)) == 5, "its rows can be read all the same"
    assert "'raylance:provenance' cannot be read" in caplog.text


def photographs() -> dict[str, bytes | None]:
    [jpeg] = make_images(1, size=(120, 200))
    pixels = by_pillow(jpeg)
    return {
        "jpeg": jpeg,
        "turned": encode(pixels, "JPEG", quality=95, orientation=6),  # by a quarter
        "grey": encode(pixels[:, :, 0]),
        "alpha": encode(np.dstack([pixels, np.full(pixels.shape[:2], 100, np.uint8)])),
        "small": encode(pixels[:30, :50]),
        "null": None,
    }


@pytest.mark.usefixtures("ray_session")
def test_images_are_made_smaller_or_encoded_again(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    images = photographs()
    uri = write_dataset(pa.table({"name": list(images), "image": pa.array(images.values(), pa.binary())}))
    made = make(uri, tmp_path / "out", "--shorter-side", 60)
    found = {row["name"]: row["image"] for row in made.to_table().to_pylist()}
    assert found["null"] is None
    assert found["small"] == images["small"], "what is small enough stays, byte for byte"
    sizes = {name: PIL.Image.open(io.BytesIO(value)).size for name, value in found.items() if value}
    assert sizes == {"jpeg": (100, 60), "turned": (60, 100), "grey": (100, 60), "alpha": (100, 60), "small": (50, 30)}
    assert PIL.Image.open(io.BytesIO(found["grey"])).mode == "L"
    for name in ("jpeg", "turned", "grey", "alpha"):
        stored = PIL.Image.fromarray(by_pillow(images[name]))
        wanted = np.asarray(stored.resize(sizes[name], PIL.Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(by_pillow(found[name]) - wanted).mean() < 3, name
    assert made.schema.field("image").type == pa.binary()
    assert raylance.writing.Provenance.read(made.schema).transform == {
        "image_column": "image", "shorter_side": 60, "jpeg_quality": None, "keep_bad": False,
        "pillow": PIL.__version__,
    }  # fmt: skip
    bytes_of = {}
    for quality, error in ((40, 6), (95, 1.5)):
        encoded = make(uri, tmp_path / str(quality), "--jpeg-quality", quality).to_table()
        found = dict(zip(encoded["name"].to_pylist(), encoded["image"].to_pylist(), strict=True))
        assert {PIL.Image.open(io.BytesIO(value)).format for value in found.values() if value} == {"JPEG"}
        assert by_pillow(found["small"]).shape == (30, 50, 3)
        assert np.abs(by_pillow(found["jpeg"]).astype(int) - by_pillow(images["jpeg"])).mean() < error
        bytes_of[quality] = sum(len(value) for value in found.values() if value)
    assert bytes_of[40] < bytes_of[95] / 2


@pytest.mark.usefixtures("ray_session")
def test_a_bad_image_is_named_and_leaves_nothing(
    write_dataset: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = make_images(150, size=(60, 80))
    images[121] = b"no image"
    uri = write_dataset(pa.table({"id": range(150), "image": pa.array(images, pa.binary())}), max_rows_per_file=50)
    out = tmp_path / "out.lance"
    options = ["--data", uri, "--out", out, "--shorter-side", 30, *SMALL]
    said = refusal(capsys, *options, status=1)
    assert "column image of row offset 121 cannot be decoded" in said
    assert "Nothing was committed" in said
    wait_for_free_cpus(CPUS)  # tasks that were writing remove what they wrote
    assert os.listdir(tmp_path) == []
    made = make(uri, out, *options[4:], "--on-bad-image", "keep")
    table = made.to_table()
    assert table["image"][table["id"].to_pylist().index(121)].as_py() == b"no image"
    before = made.version
    refusal(capsys, *options, "--overwrite", status=1)
    assert lance.dataset(str(out)).version == before, "what was there is as it was"


INTERRUPTED = """
import _thread, io, sys, threading, time
import numpy as np, PIL.Image, pyarrow as pa
from jobs.materialize.images import Reencode

def interrupt_what_is_loaded_by_half():
    while "torch.library" not in sys.modules:
        time.sleep(0.001)
    _thread.interrupt_main()

PIL.Image.new("RGB", (80, 60)).save(buffer := io.BytesIO(), "PNG")
table = pa.table({"image": [buffer.getvalue()]})
threading.Thread(target=interrupt_what_is_loaded_by_half, daemon=True).start()
try:
    Reencode(column="image", shorter_side=30).apply(table, np.arange(1))
except KeyboardInterrupt:
    print("interrupted")
import torch
print(torch.ones(3).sum().item())
"""


def test_a_process_whose_task_was_interrupted_takes_another() -> None:
    words = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(words, cwd=SCRIPT.parents[1], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["interrupted", "3.0"], done.stderr


def test_a_run_that_is_stopped_leaves_nothing(
    write_dataset: Callable[..., str], tmp_path: Path, ray_session: None
) -> None:
    image = make_images(1, size=(900, 1200))[0]  # some 20 ms each
    uri = write_dataset(pa.table({"image": pa.array([image] * 3000, pa.binary())}), max_rows_per_file=500)
    out = tmp_path / "there" / "out.lance"
    out.parent.mkdir()
    words = [sys.executable, SCRIPT, "--data", uri, "--out", out, "--jpeg-quality", 80, "--bucket-bytes", 1 << 20]
    env = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(list(map(str, words)), cwd=tmp_path, env=env, **pipes) as process:
        deadline = time.monotonic() + 60
        while not list(out.parent.glob("*scratch*/data/*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(out.parent.glob("*scratch*/data/*")), "it has begun"
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; nothing was committed" in said
    assert "Traceback" not in said
    assert os.listdir(out.parent) == []
    wait_for_free_cpus(CPUS)
    assert os.listdir(out.parent) == [], "nobody has written since"


def test_a_task_whose_run_is_given_up_as_it_writes_leaves_nothing(tmp_path: Path) -> None:
    """The run's own sweep did not see the file, which was not there yet."""
    schema = pa.schema({"id": pa.int64()})
    places = {"source": "", "scratch": str(tmp_path / "scratch.lance"), "out": str(tmp_path / "out.lance")}
    work = Work(
        **places, version=1, files="", filter=None, schema=schema, group_by=None, images=None, rows=20, seed=0,
        bounds=np.array([0, 20]), batch_rows=10, bucket_bytes=1 << 20, mode="create", storage_options={},
        data_storage_version="2.1",
    )  # fmt: skip

    def batches(give_up: Callable[[], None]) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"id": np.arange(10)})
        give_up()
        yield pa.record_batch({"id": np.arange(10)})

    def sweep() -> None:
        making.sweep(work.scratch, work.out, {})

    def unmark() -> None:  # as on an object store, where a file that is written meanwhile comes to be
        LanceFileSession(work.scratch).delete_file("_running")

    for give_up in (unmark, sweep):
        work.mark_running()
        assert work.write(batches(lambda: None), schema, work.out, "create").physical_rows == 20
        files = set(tmp_path.rglob("*.lance"))
        with pytest.raises((DatasetError, OSError)):
            work.write(batches(give_up), schema, work.out, "create")
        assert set(tmp_path.rglob("*.lance")) <= files
        with pytest.raises(DatasetError, match="given up"):
            work.write(batches(lambda: None), schema, work.out, "create")
        assert set(tmp_path.rglob("*.lance")) <= files
        sweep()
        assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("ray_session")
def test_a_target_that_is_taken_is_refused(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.lance"
    options = ["--data", source, "--out", out]
    assert make(source, out).version == 1
    assert "already is a Lance dataset" in refusal(capsys, *options)
    made = make(source, out, "--overwrite", "--filter", "id < 100")
    assert (made.version, made.count_rows(), lance.dataset(str(out), version=1).count_rows()) == (2, 100, 2950)
    (tmp_path / "half" / "data").mkdir(parents=True)
    (tmp_path / "half" / "data" / "x.lance").write_text("")
    assert "1 files lie there, such as data/x.lance" in refusal(capsys, "--data", source, "--out", tmp_path / "half")
    assert (tmp_path / "half" / "data" / "x.lance").exists()


def test_what_cannot_be_honoured_is_refused(
    write_dataset: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blob = pa.field("film", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    table = rows_table(50).append_column(blob, pa.array([b"x"] * 50, pa.large_binary()))
    nested = pa.StructArray.from_arrays([pa.array([b"x"] * 50, pa.large_binary())], fields=[blob])
    table = table.append_column("weight", pa.array(np.arange(50) / 2)).append_column("nested", nested)
    uri = write_dataset(table, data_storage_version="2.1")
    start = ["--data", uri, "--out", tmp_path / "out", "--columns", "id,label,data"]
    for said, options in {
        "column film is blob-encoded. A scan gives descriptors": ["--columns", "id,film"],
        "column 'nested' of .* holds the blobs nested.film": ["--columns", "id,nested"],
        "column nested.film lies inside a struct": ["--columns", "id,nested.film"],
        "has no column 'nothing'": ["--columns", "nothing"],
        "--group-by species: .* has no such column": ["--group-by", "species"],
        "--group-by weight is double": ["--group-by", "weight"],
        "has no row with id > 1000": ["--filter", "id > 1000"],
        "cannot be applied": ["--filter", "nonsense ="],
        "--image-column image is none of the columns id, label, data": ["--shorter-side", 10],
        "column 'label' is string, not binary": ["--jpeg-quality", 10, "--image-column", "label"],
        "is the source itself": ["--out", uri],
        "has no version 17": ["--version", 17],
    }.items():
        assert re.search(said, refusal(capsys, *start, *options)), said
    assert os.listdir(tmp_path) == []
    for options in (["--bucket-bytes", 10], ["--jpeg-quality", 0], ["--storage-options", "key"]):
        with pytest.raises(SystemExit) as ended:
            command.main([str(word) for word in (*start, *options)])
        assert ended.value.code == 2


@pytest.mark.usefixtures("ray_session")
def test_buckets_that_no_node_can_hold_are_refused(source: str, tmp_path: Path) -> None:
    args = command.parse_args(["--data", source, "--out", str(tmp_path / "out")])
    plan = make_plan(command.open_source(args), lambda phase, rows: None)
    huge = dataclasses.replace(plan, work=dataclasses.replace(plan.work, bucket_bytes=1 << 50))
    with pytest.raises(ConfigError, match="no node has more than .* Give a smaller --bucket-bytes"):
        making.make(huge, lambda phase, rows: None)
    assert os.listdir(tmp_path) == []


def test_a_source_that_is_rewritten_meanwhile_is_refused(source: str, tmp_path: Path) -> None:
    """With the same version and the same number of rows: they would pass for each other."""

    def rewrite() -> None:
        shutil.rmtree(source)
        lance.write_dataset(rows_table(3000, seed=1), source, max_rows_per_file=170)
        lance.dataset(source).delete("id >= 400 and id < 450")

    args = command.parse_args(["--data", source, "--out", str(tmp_path / "out")])
    plan = make_plan(command.open_source(args), lambda phase, rows: None)
    rewrite()
    with pytest.raises(DatasetError, match=r"rewritten in place .* were \w{32}, and are \w{32} now"):
        scatter(plan.found.chunks[0], plan.work)
    wish = command.open_source(args)
    rewrite()
    with pytest.raises(DatasetError, match="rewritten in place"):
        make_plan(wish, lambda phase, rows: None)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("spoil", ["lost", "doubled"])
def test_rows_that_are_lost_or_doubled_are_not_committed(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    each = making.each

    def spoiled(task: Callable, items: list, work: object) -> Iterator[list]:
        for done in each(task, items, work):
            yield done if task is making.scatter else done[1:] if spoil == "lost" else [*done, done[0]]

    monkeypatch.setattr(making, "each", spoiled)
    options = ["--data", source, "--out", tmp_path / "out", "--rows-per-fragment", 500]
    assert re.search(r"FAULT: .* rows with checksum .* are selected\. Nothing was", refusal(capsys, *options, status=1))
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("ray_session")
def test_a_uri_is_written_to_and_swept_through_lance(
    write_dataset: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on an object store: by Lance's own access to files, not by the file system."""
    images: list[bytes | None] = make_images(60, size=(60, 80))
    uri = write_dataset(pa.table({"id": range(60), "image": pa.array(images, pa.binary())}), max_rows_per_file=20)
    out = f"file://{tmp_path}/out.lance"
    assert command.main(["--data", f"file://{uri}", "--out", out, "--scratch", f"file://{tmp_path}/between/x"]) == 0
    assert raylance.writing.Provenance.read(lance.dataset(out).schema).uri == f"file://{uri}"
    assert lance.dataset(out).count_rows() == 60
    assert [path for path in (tmp_path / "between").rglob("*") if path.is_file()] == []
    lance.write_dataset(pa.table({"id": [60], "image": pa.array([b"no image"], pa.binary())}), uri, mode="append")
    half = f"file://{tmp_path}/half.lance"
    refusal(capsys, "--data", uri, "--out", half, "--shorter-side", 30, *SMALL, status=1)
    wait_for_free_cpus(CPUS)
    assert [path for path in tmp_path.glob("half*/**/*") if path.is_file()] == []


@pytest.mark.usefixtures("ray_session")
def test_an_older_version_is_copied_by_number_and_by_tag(source: str, tmp_path: Path) -> None:
    dataset = lance.dataset(source)
    dataset.tags.create("first", 1)
    lance.write_dataset(rows_table(10), dataset.create_branch("side", 1), mode="append")
    dataset.tags.create("aside", ("side", None))
    for version, rows, found in (
        ("1", 3000, (1, None)),
        ("first", 3000, (1, None)),
        ("aside", 3010, (2, "side")),
        (None, 2950, (2, None)),
    ):
        words = ["--data", source, "--out", str(tmp_path / "out"), *(["--version", version] if version else [])]
        plan = make_plan(command.open_source(command.parse_args(words)), lambda phase, rows: None)
        said = raylance.writing.Provenance.read(plan.work.schema)
        assert (plan.found.rows, (said.version, said.branch)) == (rows, found)
    assert make(source, tmp_path / "aside", "--version", "aside").count_rows() == 3010


@pytest.mark.usefixtures("ray_session")
def test_an_index_changes_no_place(source: str, tmp_path: Path) -> None:
    options = ["--filter", "split = 'train' and id < 2000", "--group-by", "label", "--bucket-bytes", 200_000]
    plain = make(source, tmp_path / "plain", *options).to_table()
    lance.dataset(source).create_scalar_index("split", "BITMAP")
    lance.dataset(source).create_scalar_index("id", "BTREE")
    assert make(source, tmp_path / "indexed", *options).to_table().equals(plain)
