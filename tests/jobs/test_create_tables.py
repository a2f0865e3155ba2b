"""Checks jobs/create_dataset on tables, tars and datasets of others."""

import decimal
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import ray
from PIL import Image

import raylance
from jobs.common import reason
from jobs.create_dataset import command as job
from jobs.create_dataset import writing
from jobs.create_dataset.fitting import fit
from jobs.create_dataset.shaping import contents
from jobs.create_dataset.sources import Left
from jobs.create_dataset.tables import LanceTable, Tables
from jobs.create_dataset.tars import Tars
from jobs.create_dataset.writing import Notes, begun, files_of
from tests.helpers.created import check_said, classes_of, make, pack, plant, png, refusal

ROWS = 50
NAMES = ["owl", "auk", "tit"]


def table(rows: int = ROWS, start: int = 0) -> pa.Table:
    """Scalars, a vector, tokens, and labels that are strings."""
    rng = np.random.default_rng(start)
    numbers = range(start, start + rows)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int32()),
            "score": pa.array(rng.random(rows), pa.float32()),
            "vector": pa.array([rng.random(4).tolist() for _ in numbers], pa.list_(pa.float32())),
            "tokens": pa.array([list(range(number % 7)) for number in numbers], pa.list_(pa.int32())),
            "species": pa.array([NAMES[number % 3] for number in numbers]),
        }
    )


SHAPED = pa.schema(
    {
        "id": pa.int32(),
        "score": pa.float32(),
        "vector": pa.list_(pa.float32(), 4),
        "tokens": pa.list_(pa.int32()),
        "species": pa.int64(),
        "split": pa.string(),
    }
)


def write_file(made: pa.Table, path: Path, opened: Any = pa.ipc.new_file) -> None:
    with opened(path, made.schema) as file:
        file.write_table(made, max_chunksize=9)


write_stream = functools.partial(write_file, opened=pa.ipc.new_stream)
WRITERS: dict[str, Any] = {
    "a.parquet": lambda made, path: pq.write_table(made, path, row_group_size=11),
    "a.arrow": write_file,
    "b.arrow": write_stream,
    "a.feather": pyarrow.feather.write_feather,
}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", ["a.parquet", *(n for n in WRITERS if n != "a.parquet")])
def test_tables_keep_their_columns(name: str, tmp_path: Path) -> None:
    """Lists of floats of one length become vectors, tokens stay lists, strings of the label column become integers."""
    made = table()
    (tmp_path / "in").mkdir()
    WRITERS[name](made, tmp_path / "in" / name)
    options = "--input", tmp_path / "in", "--label-column", "species", "--rows-per-fragment", 20
    dataset = make("tables", tmp_path / "out.lance", *options)
    assert dataset.schema.equals(SHAPED)
    assert classes_of(dataset) == sorted(NAMES)
    assert "(auk)" in repr(raylance.dataset(dataset.uri).show(9)), "the names belong to this column"
    found = dataset.to_table()
    for column in ("id", "score", "vector", "tokens"):
        assert found[column].to_pylist() == made[column].to_pylist()
    assert [sorted(NAMES)[label] for label in found["species"].to_pylist()] == made["species"].to_pylist()
    assert set(found["split"].to_pylist()) <= {"train", "val"}
    assert [fragment.count_rows() for fragment in dataset.get_fragments()] == [20, 20, 10]
    loaded = raylance.dataset(dataset.uri, columns=["id", "vector", "tokens"], remainder="ragged")
    with loaded.loader(runtime="threads") as loader:
        batches = list(loader.iter_torch_batches(global_batch_size=16, pad_lists={"tokens": 0}))
    assert sorted(row for batch in batches for row in batch["id"].tolist()) == list(range(ROWS))
    assert batches[0]["vector"].shape == (16, 4)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("write", [write_file, write_stream])
def test_decimals_of_arrow_files(write: Any, tmp_path: Path) -> None:
    """They lie in the file where Lance cannot take them."""
    made = pa.table({"id": [0, 1], "price": pa.array([decimal.Decimal("1.10"), None])})
    write(made, tmp_path / "in.arrow")
    dataset = make("tables", tmp_path / "out.lance", "--input", tmp_path / "in.arrow")
    assert dataset.to_table()["price"].to_pylist() == made["price"].to_pylist()


def test_the_error_of_a_task_is_found_in_its_text() -> None:
    """Whatever module it is of: pyo3's panics are of one with a digit."""
    head = 'ray::MapBatches(write_piece)() (pid=1, ip=192.0.2.2)\n  File "a.py", line 1, in write_piece\n'
    for module, named in (("pyo3_runtime.", "PanicException: called it"), ("", "OSError: no space")):
        assert reason(RuntimeError(f"{head}{module}{named}\nmore: of it")) == named
    through = "LanceError(Arrow): C Data interface error: Invalid: a.png is bad. Detail: Python exception: Traceback:"
    assert reason(RuntimeError(f"{head}OSError: {through}\n  File")) == "OSError: a.png is bad"


@pytest.mark.usefixtures("ray_session")
def test_a_frame_of_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The index that pandas stores beside the columns is left out, and said."""
    vectors = np.random.default_rng(0).random((20, 8)).astype(np.float32)
    frame = pd.DataFrame({"key": [f"k{n}" for n in range(20)], "vector": list(vectors)}, index=np.arange(20)[::-1])
    frame.to_parquet(tmp_path / "frame.parquet")
    dataset = make("tables", tmp_path / "out.lance", "--input", tmp_path / "frame.parquet")
    assert "column __index_level_0__" in capsys.readouterr().out
    assert dataset.schema.names == ["key", "vector", "split"]
    assert dataset.schema.field("vector").type == pa.list_(pa.float32(), 8)
    values = dataset.to_table()["vector"].combine_chunks().flatten().to_numpy()
    assert np.array_equal(values.reshape(20, 8), vectors)
    kept = make(
        "tables", tmp_path / "kept.lance", "--input", tmp_path / "frame.parquet", "--columns", "__index_level_0__,key"
    )
    assert kept.to_table()["__index_level_0__"].to_pylist() == list(range(20))[::-1]


@pytest.mark.usefixtures("ray_session")
def test_lists_of_other_lengths_are_refused_or_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = pa.array([[1.0, 2.0]] * 20 + [[1.0]], pa.list_(pa.float32()))
    pq.write_table(pa.table({"vector": lists}), tmp_path / "in.parquet", row_group_size=10)
    command = "tables", "--input", tmp_path / "in.parquet", "--out", tmp_path / "out.lance"
    check_said("column vector has a list of 1 values … --keep-lists vector", refusal(capsys, *command))
    pq.write_table(pa.table({"vector": lists[-2:]}), tmp_path / "mixed.parquet")
    words = "tables", "--input", tmp_path / "mixed.parquet", "--out", tmp_path / "m.lance", "--dry-run"
    assert job.main([*map(str, words)]) == 0
    assert "list<element: float>, of 1 to 2 values" in capsys.readouterr().out
    dataset = make("tables", tmp_path / "out.lance", *command[1:3], "--keep-lists", "vector")
    assert dataset.schema.field("vector").type == pa.list_(pa.float32())
    assert dataset.count_rows() == 21


def write_tar(path: Path, rows: range, *, without: str = "") -> None:
    """Four files for each row, but for the one that is left out."""
    files = {}
    for row in rows:
        key, extra = f"shard/{row:04}", json.dumps({"row": row}).encode()
        files |= {f"{key}.png": png(row), f"{key}.cls": b"%d" % (row % 3), f"{key}.json": extra}
        files[f"{key}.txt"] = f"ü {row}".encode()
    pack(path, {name: content for name, content in files.items() if name != without})


@pytest.mark.usefixtures("ray_session")
def test_webdataset_tars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tar at a time, whose rows nobody has counted; a row without all columns is left out, and named."""
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in" / "train-000.tar", range(70), without="shard/0066.cls")
    write_tar(tmp_path / "in" / "train-001.tar", range(70, 75))
    write_tar(tmp_path / "in" / "val-000.tar", range(75, 80))
    left = tmp_path / "left.tsv"
    dataset = make("webdataset", tmp_path / "out.lance", "--input", tmp_path / "in", "--left-out", left)
    found = dataset.to_table()
    expected = [row for row in range(80) if row != 66]
    assert found["image"].to_pylist() == [png(row) for row in expected]
    assert found["label"].to_pylist() == [row % 3 for row in expected]
    assert found["text"].to_pylist() == [f"ü {row}" for row in expected]
    assert [json.loads(text)["row"] for text in found["json"].to_pylist()] == expected
    assert found["split"].to_pylist() == ["train"] * 74 + ["val"] * 5
    assert left.read_text() == "train-000.tar: shard/0066\thas no label\n"
    assert "left out   1 file, 1 has no label" in capsys.readouterr().out
    (tmp_path / "in" / "train-002.tar").write_bytes(b"no tar" * 200)
    said = refusal(capsys, "webdataset", "--input", tmp_path / "in", "--out", tmp_path / "other.lance")
    assert "train-002.tar is damaged" in said


def rows_of(path: Path, columns: list[str] | None = None) -> tuple[pa.Table, list[Left]]:
    left: list[Left] = []
    source = Tars(str(path), columns, {})
    return pa.concat_tables(table for piece in source.pieces(9) for table in source.read(piece, left)), left


def test_files_of_a_tar_become_columns_of_their_own(tmp_path: Path) -> None:
    files = {"a.jpg": b"J", "a.cls": b"cat", "a.id": b"007", "a.txt": b"t", "a.caption": b"c", "a.index": b"4"}
    files |= {name.replace("a.", "b.", 1): content for name, content in files.items()} | {"b.cls": b"7"}
    found, left = rows_of(pack(tmp_path / "in.tgz", files))
    row = {"image": b"J", "label": "cat", "id": "007", "text": "t", "caption": "c", "index": 4}
    assert found.to_pylist() == [row, row | {"label": "7"}]
    assert not left


@pytest.mark.parametrize(
    ("files", "cause", "fix"),
    [
        ({"a.jpg": b"J", "a.png": b"P"}, "a.jpg and a.png are both the image of a", "Give a key one of them"),
        ({"a.txt": b"t", "a.text": b"u"}, "a.txt and a.text are both the text of a", "another ending"),
        ({"a.jpg": b"J", "b.jpg": b"J", "b.json": b"{}"}, "b has b.json beside image", "keep by --columns"),
        ({"a.jpg": b"J", "b.jpg": b"J", "a.cls": b"1", "b.cls": b"2"}, "a has a.cls beside image", "by --columns"),
        ({f"{n}.cls": b"7" if n < 80 else b"auk" for n in range(99)}, "80.cls holds 'auk'", "or all of them names"),
        ({"a.txt": b"\xff"}, "a.txt is damaged", "decode"),
    ],
)
def test_rows_of_a_tar_that_would_lose_something_are_refused(
    files: dict[str, bytes], cause: str, fix: str, tmp_path: Path
) -> None:
    pack(tmp_path / "in.tar", files)
    with pytest.raises(ValueError, match=f"in.tar: {cause}.*{fix}"):
        rows_of(tmp_path / "in.tar")


def test_columns_of_a_tar_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows without them are left out; a name that no row has is refused."""
    files = {"a.jpg": b"J", "b.jpg": b"K", "b.json": b"{}", "b.cls": b"1", "c.cls": b"2"}
    path = pack(tmp_path / "in.tar", files)
    found, left = rows_of(path, ["json", "image"])
    assert found.to_pylist() == [{"json": "{}", "image": b"K"}]
    assert left == [Left("in.tar: a", "has no json"), Left("in.tar: c", "has no json, image")]
    command = "webdataset", "--input", path, "--out", tmp_path / "out.lance", "--columns", "image,class", "--dry-run"
    assert "--columns class is none of image, json, label" in refusal(capsys, *command)


def test_hidden_files_and_links_of_a_tar_are_left_out(tmp_path: Path) -> None:
    """macOS packs a `._` file beside each file."""
    path = tmp_path / "in.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("./._a.jpg", "./a.jpg", ".cache/b.jpg", "c.jpg"):
            info = tarfile.TarInfo(name)
            info.size = 1
            if name == "c.jpg":
                info.type, info.size, info.linkname = tarfile.SYMTYPE, 0, "a.jpg"
            tar.addfile(info, io.BytesIO(b"J"))
    found, left = rows_of(path)
    assert found.to_pylist() == [{"image": b"J"}]
    hidden = [Left("in.tar: ./._a.jpg", "hidden"), Left("in.tar: .cache/b.jpg", "hidden")]
    assert left == [*hidden, Left("in.tar: c.jpg", "is a link, or no file")]


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_a_tar_that_was_cut_short_is_damaged(ending: str, tmp_path: Path) -> None:
    """Wherever it was cut, be it between two rows: a tar ends with zeros."""
    rng = np.random.default_rng(0)
    files = {f"{row}.{kind}": rng.bytes(300) for row in range(6) for kind in ("jpg", "png.bin")}
    whole = pack(tmp_path / f"in.{ending}", files).read_bytes()
    short = tmp_path / f"cut.{ending}"
    steps = range(0, 12 * 1024 + 1, 256) if ending == "tar" else range(0, len(whole), 97)
    for length in steps:
        short.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is damaged"):
            rows_of(short)
    if ending == "tar":
        short.write_bytes(whole[: 12 * 1024 + 512])
        assert rows_of(short)[0].num_rows == 6, "one block of zeros is an end"
        for bad in (whole[:1024] + b"\xff" * 512 + whole[1536:], whole + whole):
            short.write_bytes(bad)
            with pytest.raises(ValueError, match="is damaged"):
                rows_of(short)


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("source", ["tables", "saved"])
def test_a_stream_that_was_cut_short_is_damaged(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cut between two batches, it gave the rows until there, and no error: pyarrow takes the cut for the end."""
    folder = tmp_path / "in"
    write_saved(folder, table())
    data = folder / "data-0.arrow"
    whole = data.read_bytes()
    with pa.BufferReader(whole) as read:
        ends = [read.tell() for _ in pa.ipc.open_stream(read)]
    assert len(ends) == 6
    for length in (ends[2], len(whole) - 8):
        data.write_bytes(whole[:length])
        assert "data-0.arrow is damaged" in refusal(capsys, source, "--input", folder, "--out", tmp_path / "out.lance")
    data.write_bytes(whole)
    assert make(source, tmp_path / "out.lance", "--input", folder).count_rows() == ROWS


@pytest.mark.usefixtures("ray_session")
def test_what_the_datasets_library_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["auk", "owl"])})

    def rows(numbers: range) -> Any:
        images = [{"bytes": png(number), "path": None} for number in numbers]
        return datasets.Dataset.from_dict({"image": images, "label": [n % 2 for n in numbers]}, features=features)

    datasets.DatasetDict({"train": rows(range(30)), "test": rows(range(30, 35))}).save_to_disk(tmp_path / "saved")
    dataset = make("saved", tmp_path / "out.lance", "--input", tmp_path / "saved")
    found = dataset.to_table()
    assert classes_of(dataset) == ["auk", "owl"]
    assert found["image"].to_pylist() == [png(number) for number in [*range(30, 35), *range(30)]]
    assert found["split"].to_pylist() == ["test"] * 5 + ["train"] * 30
    rows(range(4)).save_to_disk(tmp_path / "single")
    single = make("saved", tmp_path / "single.lance", "--input", tmp_path / "single")
    assert single.to_table()["label"].to_pylist() == [0, 1, 0, 1]


@pytest.mark.usefixtures("ray_session")
def test_a_lance_dataset_and_a_table_of_lancedb(tmp_path: Path) -> None:
    lance.write_dataset(table(), tmp_path / "in.lance", max_rows_per_file=13)
    options = "--filter", "id % 2 = 0", "--columns", "id,vector,species", "--label-column", "species"
    dataset = make(
        "lance", tmp_path / "out.lance", "--input", tmp_path / "in.lance", *options, "--rows-per-fragment", 10
    )
    assert dataset.schema.names == ["id", "vector", "species", "split"]
    assert dataset.to_table()["id"].to_pylist() == list(range(0, ROWS, 2))
    assert [fragment.count_rows() for fragment in dataset.get_fragments()] == [10, 10, 5]
    lancedb = pytest.importorskip("lancedb")
    lancedb.connect(str(tmp_path / "db")).create_table("birds", data=table())
    dataset = make("lance", tmp_path / "birds.lance", "--input", tmp_path / "db" / "birds.lance")
    assert dataset.count_rows() == ROWS
    assert make("lance", tmp_path / "again.lance", "--input", dataset.uri).schema.names == dataset.schema.names


def test_a_lance_dataset_that_was_rewritten_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same URI and version: rows of both would be mixed, in a run that continues and in one that reads."""
    uri, keys = tmp_path / "in.lance", []
    monkeypatch.setattr(job, "Notes", lambda **given: keys.append(given["key"]))
    words = ["lance", "--input", str(uri), "--out", str(tmp_path / "out.lance"), "--dry-run"]
    for number in range(3):
        if number != 1:
            lance.write_dataset(pa.table({"id": [number, 5]}), uri, mode="create")
            source = LanceTable(str(uri), None, None, {})
        assert job.main(words) == 0
        if number == 1:
            shutil.rmtree(uri)
    assert keys[0] == keys[1] != keys[2]
    shutil.rmtree(uri)
    lance.write_dataset(pa.table({"id": [7, 8]}), uri)
    with pytest.raises(ValueError, match=r"in\.lance was rewritten while it was read"):
        list(source.read(source.pieces(10)[0], []))


def test_blobs_and_filters_of_a_lance_dataset_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blob = pa.field("video", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    columns = [pa.array([b"a" * 400, b"b" * 900], pa.large_binary()), pa.array([1, 2])]
    schema = pa.schema([blob, pa.field("id", pa.int64())])
    lance.write_dataset(pa.Table.from_arrays(columns, schema=schema), tmp_path / "in.lance")
    command = "lance", "--input", tmp_path / "in.lance", "--out", tmp_path / "out.lance", "--dry-run"
    check_said("column video of --input … is blob-encoded … --columns", refusal(capsys, *command))
    assert job.main([*map(str, command), "--columns", "id"]) == 0
    said = refusal(capsys, *command, "--columns", "id", "--filter", "nonsense > 3")
    check_said("--filter can't be used … nonsense > 3 … of the columns video, id", said)
    deep = " OR ".join(f"id = {number}" for number in range(60_000))
    said = refusal(capsys, *command, "--columns", "id", "--filter", deep)
    assert "deeper than Lance" in said[:2000] == said
    wanted = ", ".join(str(number) for number in range(2, 60_000))
    assert job.main([*map(str, command), "--columns", "id", "--filter", f"id IN ({wanted})"]) == 0
    assert "1 row" in capsys.readouterr().out


@pytest.mark.usefixtures("ray_session")
def test_images_are_made_smaller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sized = {f"{name}/{n}.png": png(n, (40 + 40 * n, 100)) for name in ("ant", "bee") for n in range(3)}
    options = "--input", plant(tmp_path / "in", sized), "--shorter-side", 50, "--jpeg-quality", 80
    images = make("imagefolder", tmp_path / "out.lance", *options).to_table()["image"].to_pylist()
    opened = [Image.open(io.BytesIO(encoded)) for encoded in images]
    assert [image.format for image in opened] == ["JPEG"] * 6
    assert [image.size for image in opened[:3]] == [(100, 40), (62, 50), (50, 60)]
    assert "--image-size 50 --global-batch-size 6\n" in capsys.readouterr().out, "which training needs here"


ENCODED = pa.struct({"bytes": pa.binary(), "path": pa.string()})  # an image, as the datasets library stores it
ONE, TWO = {"x": [1]}, {"x": [1, 2]}
ZONE, NO_ZONE = pa.array([0], pa.timestamp("us", "UTC")), pa.array([0], pa.timestamp("us"))
Refusals = dict[str, tuple[dict[str, Any], str]]  # files (Parquet, if the name has no ending); parts of the message
REFUSED: Refusals = {
    "text after integers": (
        {"a": TWO | {"label": [0, 1]}, "b": ONE | {"label": ["c"]}},
        "label is string in b.parquet",
    ),
    "a further column": ({"a": ONE, "b": ONE | {"y": [5]}}, "b.parquet has the column y … --columns"),
    "a missing column": ({"a": ONE | {"y": [5]}, "b": ONE}, "b.parquet lacks the column y"),
    "a zone": ({"a": {"t": NO_ZONE}, "b": {"t": ZONE}}, "t is timestamp[us, tz=UTC] in b.parquet, and timestamp[us]"),
    "fractions": ({"a": ONE, "b": {"x": [2.5]}}, "column x is double in b.parquet, and int64"),
    "nulls, then values": ({"a": {"x": pa.nulls(1)}, "b": ONE}, "column x is int64 in b.parquet, and null"),
    "two columns of a name": ({"a": pa.table([pa.array([1])] * 2, ["x", "x"])}, "a.parquet has several columns x"),
    "semicolons": ({"a.csv": "x;label\n1;cat\n"}, "a.csv has one column, 'x;label' … separated by ';' … commas"),
    "Latin-1": ({"a.csv": "x,label\n1,caf\xe9\n2,dog\n".encode("latin1")}, "a.csv is not encoded as UTF-8 … iconv"),
    "Latin-1 far from the header": (
        {"a.csv": ("x,label\n" + "1,dog\n" * 99_999 + "2,caf\xe9\n").encode("latin1")},
        "a.csv is not encoded as UTF-8 (column label) … iconv",
    ),
    "a split of its own, and names that say another": (
        {f"{name}.parquet": ONE | {"split": ["val"]} for name in ("train", "test")},
        "test.parquet has a column split … --columns",
    ),
    "splits that are numbers": ({"a": TWO | {"split": [0, 1]}}, "column split is int64 in a.parquet"),
    "splits that are none": (
        {"a": {"x": [1, 2, 3], "split": ["train", None, "holdout"]}},
        "column split is None in 1 rows of a.parquet",
    ),
    "labels that are no classes": ({"a": ONE | {"label": [0.5]}}, "--label-column label holds double"),
    "no label": (
        {"a": {"x": [1, 2, 3], "label": [0, None, None]}},
        "2 of 3 rows of a.parquet have no label … --filter",
    ),
    "a file of two splits": ({"train/test-0": ONE}, "train/test-0.parquet … the splits train and test"),
    "a file of no split": ({"train/0": ONE, "more/0": ONE}, "more/0.parquet … names no split"),
}


def plant_parts(folder: Path, files: dict[str, Any]) -> Path:
    return plant(folder, {name if "." in name else f"{name}.parquet": content for name, content in files.items()})


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_lost_is_refused_at_once(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A message that names file and column, from the driver: the words ask for a dry run, for which no Ray starts."""
    words = ["--input", plant_parts(tmp_path / "in", REFUSED[name][0]), "--out", tmp_path / "out.lance", "--dry-run"]
    words += ["--label-column", "label"] if name == "labels that are no classes" else []
    check_said(REFUSED[name][1], refusal(capsys, "tables", *words))


VECTORS = pa.list_(pa.float32())
FOUND_LATER: Refusals = {
    "text after integers": (
        {"a.csv": "x,label\n1,0\n2,1\n", "b.csv": "x,label\n3,cat\n"},
        "column label is int64 in the first rows of all, and not in b.csv … 'cat' … Parquet",
    ),
    "codes that seemed to be numbers": (
        {"a.csv": "code\n7\n", "b.csv": "code\nA1\n"},
        "column code is int64 in the first rows of all, and not in b.csv … --text-columns code",
    ),
    "a later code": ({"a.csv": "code\n7\n", "b.csv": "code\n007\n"}, "code is int64 … b.csv ('007' would become 7)"),
    "a later integer that a float rounds": (
        {"a.csv": "x\n7.5\n", "b.csv": "x\n9007199254740993\n"},
        "'9007199254740993' would become 9007199254740992",
    ),
    "floats that lose digits": (
        {"a": {"x": pa.array([0.5], pa.float32())}, "b": {"x": [0.1]}},
        "column x is double in b.parquet, and float",
    ),
    "integers that are too large": (
        {"a": {"x": pa.array([1], pa.int32())}, "b": {"x": [1 << 40]}},
        f"column x is int64 in b.parquet, and int32 … {1 << 40}",
    ),
    "a vector that is null": (
        {"a": {"v": pa.array([[1, 2]], VECTORS)}, "b": {"v": pa.array([[1, 2], None], VECTORS)}},
        "column v is null in 1 rows of b.parquet, and has 2 values … --keep-lists v",
    ),
}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("name", FOUND_LATER)
def test_what_would_be_lost_later_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only reading shows it; nothing is committed."""
    words = "--input", plant_parts(tmp_path / "in", FOUND_LATER[name][0]), "--out", tmp_path / "out.lance"
    check_said(f"{FOUND_LATER[name][1]} … Nothing was committed", refusal(capsys, "tables", *words))


TEXTS: dict[str, tuple[list[str], pa.DataType, Any]] = {  # what a column of text becomes; why, or its values
    "leading zeros": (["007", "8"], pa.string(), "'007' would become 7"),
    "leading zeros among floats": (["00.5", "2.5"], pa.string(), "'00.5' would become 0.5"),
    "hexadecimal": (["0x1F", "6"], pa.string(), "'0x1F' would become 31"),
    "a telephone number": (["+4930901820", "5"], pa.string(), "'+4930901820' would become 4930901820.0"),
    "64 bits without a sign": (["9223372036854775809", "5"], pa.uint64(), "would become 9223372036854775808"),
    "65 bits": (["18446744073709551617", "5"], pa.string(), "would become 18446744073709551616"),
    "what a float rounds": (["9007199254740993", "1.5"], pa.string(), "would become 9007199254740992"),
    "infinite": (["1e400", "2"], pa.string(), "'1e400' would become inf"),
    "too small": (["1e-400", "2"], pa.string(), "'1e-400' would become 0.0"),
    "missing": (["NA", "NA"], pa.string(), "'NA' would be null"),
    "integers": (["-7", " 0"], pa.int64(), [-7, 0]),
    "the limits": (["-9223372036854775808", "9223372036854775807"], pa.int64(), [-(2**63), 2**63 - 1]),
    "floats": (["0.25", "-1e3", "+2.5", "inf", "9007199254740992"], pa.float64(), [0.25, -1e3, 2.5, np.inf, 2.0**53]),
    "missing ones": (["NaN", "2.5", ""], pa.float64(), [None, 2.5, None]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_becomes_numbers_only_where_nothing_changes(name: str, tmp_path: Path) -> None:
    texts, kind, found = TEXTS[name]
    folder = plant(tmp_path, {"a.csv": "code,x\n" + "".join(f"{text},1\n" for text in texts)})
    read = Tables(str(folder), None, "", {})
    column = pa.concat_tables(part for piece in read.pieces(10) for part in read.read(piece, []))["code"]
    assert column.type == kind
    if isinstance(found, str):
        check_said(f"code is {kind}: as … {found}", "".join(read.remarks))
        assert [str(value) for value in column.to_pylist()] == texts
    else:
        assert (read.remarks, column.to_pylist()) == ([], found)


@pytest.mark.usefixtures("ray_session")
def test_columns_that_stay_text_are_named_or_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plant(tmp_path / "in", {"a.csv": "code,zip,x\n7,01067,1\n", "b.csv": "code,zip,x\n007,10115,2\n"})
    made = make("tables", tmp_path / "out.lance", "--input", folder, "--text-columns", "code")
    columns = {"code": ["7", "007"], "zip": ["01067", "10115"], "x": [1, 2]}
    assert made.to_table(columns=list(columns)).to_pydict() == columns
    assert "note       zip is string: as int64, '01067' would become 1067" in capsys.readouterr().out
    arguments = ["tables", "--out", tmp_path / "o.lance", "--input", folder, "--text-columns", "code,none"]
    assert "--text-columns none is no column of text files, which have code, zip, x" in refusal(capsys, *arguments)
    made = make("tables", tmp_path / "x.lance", "--input", folder, "--columns", "x")
    assert made.to_table(columns=["x"])["x"].to_pylist() == [1, 2], "what is left out can't be changed"


def test_classes_of_tars_that_begin_with_zeros_are_names(tmp_path: Path) -> None:
    pack(tmp_path / "a.tar", {"1.cls": b"07", "1.txt": b"x", "2.cls": b"11", "2.txt": b"y"})
    table, _ = rows_of(tmp_path / "a.tar")
    assert table["label"].to_pylist() == ["07", "11"]


@pytest.mark.usefixtures("ray_session")
def test_later_text_has_the_types_of_the_first(tmp_path: Path) -> None:
    """Codes keep their zeros, and labels that look like numbers are names among names."""
    files = {"a.csv": "code,label,x\n", "b.csv": "code,label,x\nA1,cat,1\n007,dog,2\n"}
    plant(tmp_path / "in", files | {"c.csv": "label,code,x\n1,007,3\n2,008,4\n"})
    dataset = make("tables", tmp_path / "out.lance", "--input", tmp_path / "in")
    found = dataset.to_table()
    assert found["code"].to_pylist() == ["A1", "007", "007", "008"]
    assert [classes_of(dataset)[label] for label in found["label"].to_pylist()] == ["cat", "dog", "1", "2"]


def test_an_integer_that_a_small_float_rounds_is_refused() -> None:
    """pyarrow's safe casts compare with the range of 32 and 64 bits alone."""
    first = pa.schema({"x": pa.float16()})
    with pytest.raises(ValueError, match="it holds values that differ there"):
        fit(pa.table({"x": pa.array([2049], pa.int16())}), first, "b.arrow")
    assert fit(pa.table({"x": pa.array([2048], pa.int16())}), first, "b.arrow")["x"].to_pylist() == [2048.0]


@pytest.mark.usefixtures("ray_session")
def test_casts_that_lose_nothing_are_made(tmp_path: Path) -> None:
    first = {
        "n": pa.array([1], pa.int64()),
        "f": pa.array([0.5], pa.float32()),
        "s": pa.array(["a"]),
        "v": pa.array([[1.0, 2.0]], pa.list_(pa.float32())),
    }
    later = {
        "s": pa.array(["b", None], pa.large_string()).dictionary_encode(),
        "v": pa.array([[3.0, 4.5], [5.0, 6.0]], pa.list_(pa.float64(), 2)),
        "f": pa.array([float("nan"), 0.25], pa.float64()),
        "n": pa.array([2, None], pa.int8()),
        "extra": pa.nulls(2),
    }
    plant(tmp_path / "in", {"a.parquet": first, "b.parquet": later})
    found = make("tables", tmp_path / "out.lance", "--input", tmp_path / "in", "--columns", "n,f,s,v").to_table()
    assert found.schema.names == ["n", "f", "s", "v", "split"]
    assert found.schema.field("v").type == pa.list_(pa.float32(), 2)
    assert found["n"].to_pylist() == [1, 2, None]
    assert repr(found["f"].to_pylist()) == "[0.5, nan, 0.25]"
    assert found["s"].to_pylist() == ["a", "b", None]
    assert found["v"].to_pylist() == [[1.0, 2.0], [3.0, 4.5], [5.0, 6.0]]


@pytest.mark.usefixtures("ray_session")
def test_splits_of_directories_and_of_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(tmp_path / "in", {f"data/{name}/0.parquet": ONE for name in ("train", "validation", "test")})
    found = make("tables", tmp_path / "out.lance", "--input", tmp_path / "in").to_table()
    assert found["split"].to_pylist() == ["test", "train", "val"]
    names = pa.array(["training", "Validation", "val", "Train", "TEST", "holdout", "dev"]).dictionary_encode()
    pq.write_table(pa.table({"split": names, "x": range(7)}), tmp_path / "own.parquet")
    found = make("tables", tmp_path / "own.lance", "--input", tmp_path / "own.parquet").to_table()
    assert found["split"].to_pylist() == ["train", "val", "val", "train", "test", "holdout", "dev"], "in any case"
    assert "splits     train 2, val 2, test 1, dev 1, holdout 1" in capsys.readouterr().out
    assert found.schema.field("split").type == pa.string()


@pytest.mark.parametrize("kind", [pa.float32(), pa.int32(), pa.list_(pa.float32())])
def test_equal_rows_draw_alike_in_any_chunk(kind: pa.DataType) -> None:
    """A null beside a row does not change what the row is; no row is like another one."""
    rows: list[Any] = [[1, 2], [3, 4], [5, None]]
    if pa.types.is_list(kind):
        rows = [[row, row] for row in rows]
    column = pa.array(rows, pa.list_(kind, 2))
    alone = [next(iter(contents(pa.chunked_array([column[at : at + 1]])))) for at in range(3)]
    other = pa.array([None, *rows, None, *rows], pa.list_(kind, 2))
    assert list(contents(pa.chunked_array([other])))[1:4] == alone
    assert list(contents(pa.chunked_array([other])))[5:] == alone
    assert len(set(alone)) == 3


@pytest.mark.usefixtures("ray_session")
def test_images_of_tables_as_the_datasets_library_stores_them(tmp_path: Path) -> None:
    """The bytes of the column of images; other columns of that type stay what they are."""
    images = pa.array([{"bytes": png(row), "path": f"{row}.png"} for row in range(3)], ENCODED)
    pq.write_table(pa.table({"image": images, "other": images, "label": [0, 1, 0]}), tmp_path / "in.parquet")
    found = make("tables", tmp_path / "out.lance", "--input", tmp_path / "in.parquet", "--shorter-side", 50).to_table()
    assert found["image"].to_pylist() == [png(row) for row in range(3)]
    assert found["other"].to_pylist() == images.to_pylist()


@pytest.mark.usefixtures("ray_session")
def test_copies_keep_the_names_of_classes_with_their_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"label": [7, 8, 9], "species": ["owl", "auk", "owl"]}), tmp_path / "in.parquet")
    first = make("tables", tmp_path / "first.lance", "--input", tmp_path / "in.parquet", "--label-column", "species")

    def copied(name: str, uri: str, *options: object) -> lance.LanceDataset:
        return make("lance", tmp_path / f"{name}.lance", "--input", uri, *options)

    for name, options in (("all", ()), ("label", ("--label-column", "label"))):
        copy = copied(name, first.uri, *options)
        assert copy.schema.metadata == {b"classes": b'["auk", "owl"]', b"classes_of": b"species"}
        assert copy.to_table().to_pydict() == first.to_table().to_pydict()
    assert copied("without", first.uri, "--columns", "label,split").schema.metadata is None
    # Names of no column, which an earlier job may have left.
    named = pa.table({"cid": [0, 1]}).replace_schema_metadata({"classes": '["a", "b"]'})
    orphan = lance.write_dataset(named, tmp_path / "orphan.lance").uri
    ours = {b"classes": b'["a", "b"]', b"classes_of": b"cid"}
    assert copied("kept", orphan).schema.metadata == {b"classes": b'["a", "b"]'}
    assert copied("given", orphan, "--label-column", "cid").schema.metadata == ours
    # Labels that are added beside strings, and named.
    lance.write_dataset(pa.table({"x": [1, 2], "name": ["b", "a"]}), tmp_path / "birds.lance")
    words = ["classes", "--data", tmp_path / "birds.lance", "--string-column", "name", "--label-column"]
    assert job.main([*map(str, words), "cid"]) == 0
    named = copied("named", tmp_path / "birds.lance")
    assert named.schema.metadata == ours
    assert named.to_table()["cid"].to_pylist() == [1, 0]
    assert "names the classes of cid already, 2: a, b" in refusal(capsys, *words, "other")
    words = ["lance", "--input", named.uri, "--out", tmp_path / "o.lance", "--label-column", "name"]
    assert "names the classes of cid, and name holds strings that need names, too" in refusal(capsys, *words)


def write_saved(folder: Path, made: pa.Table, features: dict[str, Any] | None = None) -> None:
    folder.mkdir(parents=True)
    write_stream(made, folder / "data-0.arrow")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("features", [{"image": {"_type": "Image"}, "net": {}, "audio": {"_type": "Audio"}}, None])
def test_only_images_of_saved_datasets_become_bytes(features: dict[str, Any] | None, tmp_path: Path) -> None:
    image = pa.array([{"bytes": b"a", "path": "a.png"}], ENCODED)
    net = pa.array([{"bytes": 5, "packets": 2}])
    audio = pa.array([{"bytes": b"b", "path": "b.wav"}], ENCODED) if features else net
    write_saved(tmp_path / "in", pa.table({"image": image, "net": net, "audio": audio}), features)
    found = make("saved", tmp_path / "out.lance", "--input", tmp_path / "in").to_table()
    assert found["image"].to_pylist() == [b"a"]
    assert found["net"].to_pylist() == net.to_pylist()
    assert found["audio"].to_pylist() == audio.to_pylist()


@pytest.mark.usefixtures("ray_session")
def test_saved_datasets_of_nothing_but_train_are_split(tmp_path: Path) -> None:
    write_saved(tmp_path / "in" / "train", pa.table({"x": range(200)}))
    found = make("saved", tmp_path / "out.lance", "--input", tmp_path / "in", "--val-fraction", 0.5).to_table()
    assert 50 <= found["split"].to_pylist().count("val") <= 150


def test_saved_datasets_that_nobody_can_read_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = {"label": {"_type": "ClassLabel", "names": ["n", "p"]}}
    write_saved(tmp_path / "whole", pa.table({"x": [1]}))
    (tmp_path / "whole" / "state.json").write_text("{}")
    write_saved(tmp_path / "paths", pa.table({"image": pa.array([{"bytes": None, "path": "a.png"}], ENCODED)}))
    write_saved(tmp_path / "odd", pa.table({"label": [0, 1, -1, 2]}), labels)
    for name, said in (
        ("whole", "state.json in --input"),
        ("paths", "1 images that are paths without bytes in data-0.arrow"),
        ("odd", "label is -1 in 2 of 4 rows of data-0.arrow, and there are 2 classes"),
    ):
        words = "--input", tmp_path / name, "--out", tmp_path / "out.lance", "--dry-run"
        assert said in refusal(capsys, "saved", *words)


@pytest.mark.usefixtures("ray_session")
def test_saved_splits_of_any_name_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("train", "validation", "unsupervised"):
        write_saved(tmp_path / "in" / name, pa.table({"x": [1]}))
    made = make("saved", tmp_path / "out.lance", "--input", tmp_path / "in")
    assert sorted(made.to_table()["split"].to_pylist()) == ["train", "unsupervised", "val"]
    assert "splits     train 1, val 1, unsupervised 1" in capsys.readouterr().out


@pytest.mark.usefixtures("ray_session")
def test_a_bad_image_is_named_by_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of a directory, the key of a tar, a row of a table: each its own, and no option that is not here."""
    images = [png(number) for number in range(5)] + [b"no image"]
    named = {f"{number}.png": encoded for number, encoded in enumerate(images)}
    plant(tmp_path / "tree" / "ant", named)
    pack(tmp_path / "in.tar", named)
    made = pa.table({"image": images, "label": [0] * 6})
    pq.write_table(made, tmp_path / "in.parquet", row_group_size=4)
    lance.write_dataset(made, tmp_path / "in.lance")
    for source, name, where in (
        ("imagefolder", "tree", f"{tmp_path}/tree/ant/5.png"),
        ("webdataset", "in.tar", "in.tar: 5"),
        ("tables", "in.parquet", "row 1 (from 0 on) of part 1 of in.parquet"),
        ("huggingface", "in.parquet", "row 1 (from 0 on) of part 1 of in.parquet"),
        ("lance", "in.lance", f"row 5 (from 0 on) of {tmp_path}/in.lance"),
    ):
        words = "--input", tmp_path / name, "--out", tmp_path / "out.lance", "--shorter-side", 20
        said = refusal(capsys, source, *words)
        check_said(f"{where} has no image in image … neither --shorter-side nor --jpeg-quality", said)
        assert "--on-bad-image" not in said


@pytest.mark.parametrize("option", ["--label-column", "--split-by", "--keep-lists"])
def test_options_that_name_no_column_are_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(table(), tmp_path / "in.parquet")
    words = ["tables", "--input", tmp_path / "in.parquet", "--out", tmp_path / "out.lance", "--dry-run"]
    assert f"{option} none is none of the columns id, score, vector" in refusal(capsys, *words, option, "none")
    assert job.main([*map(str, words), "--split-by", "id,species"]) == 0
    assert "the rest train, by a hash of id, species\n" in capsys.readouterr().out


def test_a_dry_run_writes_nothing_and_needs_no_ray(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(table(), tmp_path / "in.parquet")
    words = ["tables", "--input", tmp_path / "in.parquet", "--out", tmp_path / "out.lance", "--dry-run"]
    assert not ray.is_initialized(), "tests without Ray come first"
    assert job.main(list(map(str, words))) == 0
    assert not ray.is_initialized()
    said = capsys.readouterr().out
    assert "from 50 rows, in 1 piece\n" in said
    assert "vector     fixed_size_list<item: float>[4]" in said
    assert "10% val, the rest train, by a hash of id, score, vector, tokens, species" in said
    assert not (tmp_path / "out.lance").exists()


@pytest.mark.usefixtures("ray_session")
def test_a_run_that_was_killed_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Killed when some fragments are written: these are used, and nothing of the first run is left beside the data."""
    pq.write_table(table(4000), tmp_path / "in.parquet")
    out = tmp_path / "out.lance"
    words = ["tables", "--input", tmp_path / "in.parquet", "--out", out, "--rows-per-fragment", 100]
    command = [sys.executable, Path(job.__file__).parents[1] / "create_dataset.py", *map(str, words)]
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(notes := list(out.glob("_create-*/*.json"))) < 5 and started.poll() is None:
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    if not notes:
        pytest.fail("it was over before it was killed")
    done = {json.loads(note.read_text())["fragments"][0]["files"][0]["path"] for note in notes if note.exists()}
    [folder] = {note.parent.name for note in notes}
    assert [left.folder for left in begun(str(out), {})] == [f"{out}/{folder}"], "which a run with other arguments says"
    dataset = make("tables", out, *words[1:3], "--rows-per-fragment", 100)
    assert dataset.to_table()["id"].to_pylist() == list(range(4000))
    files = [file.path for fragment in dataset.get_fragments() for file in fragment.data_files()]
    assert done <= set(files), "what was done is used"
    assert len(files) == 40
    assert not list(out.glob("_create-*"))


@pytest.mark.usefixtures("ray_session")
def test_a_dataset_that_appears_before_the_commit_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = writing.commit

    def late(*args: Any) -> lance.LanceDataset:
        lance.write_dataset(pa.table({"precious": [1, 2, 3]}), tmp_path / "out.lance")
        return commit(*args)

    monkeypatch.setattr(writing, "commit", late)
    pq.write_table(table(), tmp_path / "in.parquet")
    said = refusal(capsys, "tables", "--input", tmp_path / "in.parquet", "--out", tmp_path / "out.lance")
    check_said("out.lance became a Lance dataset while this ran … --overwrite", said)
    dataset = lance.dataset(tmp_path / "out.lance")
    assert (dataset.version, dataset.schema.names) == (1, ["precious"])


@pytest.mark.usefixtures("ray_session")
def test_notes_are_removed_after_the_commit_or_by_the_next_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it that they can't be removed, which is no failure of the run, or that the run is killed just then."""
    pq.write_table(table(), tmp_path / "in.parquet")
    for name, error in (("a.lance", OSError("the store went away")), ("b.lance", KeyboardInterrupt())):
        out = tmp_path / name
        command = ["tables", "--input", str(tmp_path / "in.parquet"), "--out", str(out)]
        with monkeypatch.context() as patch:
            patch.setattr(Notes, "forget", lambda notes, error=error: (_ for _ in ()).throw(error))
            if isinstance(error, OSError):
                assert job.main(command) == 0
                assert "can't be removed (the store went away): this run is committed" in capsys.readouterr().err
            else:
                with pytest.raises(KeyboardInterrupt):
                    job.main(command)
        assert lance.dataset(out).count_rows() == ROWS
        [notes] = begun(str(out), {})
        assert job.main([*command, "--overwrite", "--dry-run"]) == 0
        assert begun(str(out), {}), "a dry run removes nothing"
        said = refusal(capsys, *command)
        check_said(f"removed {notes.folder}: it is of a run that was killed … already is a Lance dataset", said)
        assert not Path(notes.folder).exists()


@pytest.mark.usefixtures("ray_session")
def test_what_a_killed_run_of_other_arguments_left_is_removed_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.lance"
    pq.write_table(table(), tmp_path / "in.parquet")
    command = ["tables", "--input", str(tmp_path / "in.parquet"), "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(writing, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            job.main(command)
    [notes] = begun(str(out), {})
    [left] = notes.files()
    assert job.main([*command, "--seed", "1"]) == 0
    assert f"{notes.folder} is of another run that was begun there" in capsys.readouterr().err
    assert job.main([*command, "--overwrite", "--seed", "2"]) == 0
    capsys.readouterr()
    assert job.main([*command, "--overwrite", "--seed", "3", "--remove-begun"]) == 0
    assert f"removed {notes.folder}: --remove-begun" in capsys.readouterr().err
    data = {file.name for file in (out / "data").iterdir()}
    assert left not in data
    assert data == files_of(str(out), {}, all_versions=True)
    assert len(data) == 3
    old = Notes(uri=str(out), key="old", options={})
    [fragment] = lance.dataset(out, version=1).get_fragments()
    old.write(0, {"fragments": [fragment.metadata.to_json()]})
    old.forget_all()
    assert data == {file.name for file in (out / "data").iterdir()}, "what an older version has stays"
    assert not begun(str(out), {})


def test_what_is_done_is_used_by_the_same_command_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two columns of images give one schema: what was begun from the one must not continue from the other."""
    columns = {name: [png(number)] for number, name in enumerate(("a", "b"))}
    pq.write_table(pa.table(columns | {"label": [0]}), tmp_path / "in.parquet")
    keys = []
    monkeypatch.setattr(job, "Notes", lambda **given: keys.append(given["key"]))
    words = ["huggingface", "--input", str(tmp_path), "--out", str(tmp_path / "out.lance"), "--dry-run"]
    for column in ("a", "b", "a"):
        assert job.main([*words, "--image-column", column]) == 0
    assert keys[0] == keys[2] != keys[1]
