"""Places that hold no Lance dataset: the error says what lies there, and the command or the URI that serves it."""

import io
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raylance
from raylance.errors import DatasetError


def encoded(kind: str) -> bytes:
    """A picture, encoded."""
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (4, 4)).save(buffer, kind)
    return buffer.getvalue()


def write(folder: Path, name: str) -> Path:
    """Writes a file of the kind that its name says, and returns it."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"n": [1]}), path)
    elif path.suffix == ".lance":
        lance.write_dataset(pa.table({"n": [1]}), str(path))
    else:
        path.write_bytes(encoded("JPEG") if path.suffix == ".jpg" else b"n\n1\n")
    return path


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    ("files", "place", "named"),
    [
        ("a.parquet", "a.parquet", "create_dataset.py tables --input"),
        ("a.csv", "a.csv", "create_dataset.py tables --input"),
        ("a.tar", "a.tar", "create_dataset.py webdataset --input"),
        ("a.json", "a.json", "pandas.read_json"),
        ("many/part-0.parquet", "many", "create_dataset.py tables --input"),
        ("photos/train/cat/1.jpg", "photos", "create_dataset.py imagefolder --input"),
        ("shards/0.tar", "shards", "create_dataset.py webdataset --input"),
        ("saved/train/state.json", "saved/train", "create_dataset.py saved --input"),
        ("db/one.lance", "db", "db/one.lance"),
        ("pusht/meta/info.json", "pusht", "create_dataset.py lerobot --input"),
        ("robot/frames.lance", "robot", "raylance.lerobot.open"),
        ("a.csv", "cifar10", "hf://datasets/OWNER/cifar10"),
        ("a.csv", "owner/name", "hf://datasets/owner/name"),
        ("a.csv", "s3:/bucket/a.lance", "s3://bucket/a.lance"),
        ("a.csv", "missing.lance", "Check the path"),
    ],
)
def test_what_is_no_dataset_is_named_with_what_serves_it(
    files: str, place: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, files)
    (tmp_path / "pusht" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetError, match="nothing was started") as caught:
        raylance.dataset(place)
    assert named in str(caught.value)


@pytest.mark.promise("P8")
def test_a_damaged_dataset_is_taken_for_nothing_else(tmp_path: Path) -> None:
    place = write(tmp_path, "a.lance")
    [manifest] = (place / "_versions").glob("*.manifest")
    whole = manifest.read_bytes()
    manifest.write_bytes(b"\x07" * (len(whole) - 16) + whole[-16:])
    with pytest.raises(DatasetError, match=re.escape(str(place))) as caught:
        raylance.dataset(str(place))
    assert "create_dataset" not in str(caught.value)


@pytest.mark.parametrize(("kind", "in_struct"), [("JPEG", False), ("PNG", False), ("WEBP", True), ("GIF", False)])
def test_encoded_images_that_nothing_decodes_are_named_once(
    kind: str, in_struct: bool, write_dataset: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    value: Any = encoded(kind)
    column = pa.array([{"bytes": value, "path": "a"}] * 3 if in_struct else [value] * 3)
    uri = write_dataset(pa.table({"n": [1, 2, 3], "image": column, "other": pa.array([b"x"] * 3)}))
    name = "image.bytes" if in_struct else "image"

    def begin(**options: Any) -> None:
        iter(raylance.dataset(uri, **options).iter_batches(batch_size=3))

    with caplog.at_level(logging.WARNING, "raylance"):
        begin(columns=["n", "other"])
        begin(transform=lambda batch: batch)
        begin(columns=["n", name], decode=raylance.Image(name, size=4))
        raylance.dataset(uri)  # as those who prove a run do
        assert "encoded images" not in caplog.text
        begin()
        begin()
    assert caplog.text.count(f"raylance.Image({name!r}") == 1
