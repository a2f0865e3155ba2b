"""Checks jobs/create_dataset.py on real files, Ray and Lance."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray.data
from PIL import Image
from sklearn.datasets import load_digits

from jobs.create_dataset import command as job
from jobs.create_dataset.sources import Left, Piece
from jobs.create_dataset.writing import _named as named_of
from tests.helpers import created
from tests.helpers.created import check_said, classes_of, png, refusal
from tests.helpers.images import make_images

pytestmark = pytest.mark.usefixtures("ray_session")


def plant(root: Path, names: list[str]) -> dict[str, bytes]:
    """Writes an image under each of the names; returns name -> bytes in the order of the names' sort."""
    tree = {name: png(number) for number, name in enumerate(sorted(names))}
    created.plant(root, tree)
    return tree


def make(source: str, out: Path | str, *options: object) -> tuple[lance.LanceDataset, pa.Table, list[str]]:
    dataset = created.make(source, out, *options)
    return dataset, dataset.to_table(), classes_of(dataset)


def hub_table(numbers: range, *, names: list[str] | None = None, struct: bool = True) -> pa.Table:
    """Returns a table as `datasets` pushes it to the hub: label = number mod 3."""
    images = [{"bytes": png(n), "path": f"{n}.png"} if struct else png(n) for n in numbers]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()}) if struct else pa.binary()
    labels = pa.array([number % 3 for number in numbers], pa.int64())
    table = pa.table({"image": pa.array(images, kind), "label": labels})
    if names is None:
        return table
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def with_names(table: pa.Table, kind: pa.DataType | None = None) -> pa.Table:
    """Returns the table with the labels 0, 1, 2 as bee, ant, cat."""
    names = pa.array([["bee", "ant", "cat"][label] for label in table["label"].to_pylist()])
    return table.set_column(1, "label", names.cast(kind or pa.string()))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A tree of 30 images in three classes, without splits."""
    plant(tmp_path / "photos", [f"{name}/{i:02}.png" for name in ("cat", "ant", "bee") for i in range(10)])
    return tmp_path / "photos"


def test_demo_is_the_digits(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset, table, classes = make("demo", "digits.lance", "--rows-per-fragment", "500")
    printed, digits = capsys.readouterr().out, load_digits()
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(png))) for png in table["image"].to_pylist()])
    assert np.array_equal(pixels, np.rint(digits.images * 255 / 16).astype(np.uint8))  # (1797, 8, 8)
    assert table["label"].to_pylist() == digits.target.tolist()
    assert classes == [str(digit) for digit in range(10)]
    assert [fragment.count_rows() for fragment in dataset.get_fragments()] == [500, 500, 500, 297]
    splits = Counter(table["split"].to_pylist())
    assert 120 <= splits["val"] <= 240  # a tenth of 1,797, within 5 standard deviations
    assert f"wrote {tmp_path / 'digits.lance'}, version 1" in printed
    assert f"train {splits['train']:,}, val {splits['val']:,} (drawn with seed 0)" in printed
    assert "4 of at most 500 rows" in printed
    assert f"jobs/train_images.py --data {tmp_path / 'digits.lance'}" in printed


def test_imagefolder_keeps_bytes_order_and_odd_names(tmp_path):
    names = ["zebra/1.JPG", "zebra/deep/er/2.jpeg", "a b/%41#?.png", "_bg_/x.png", "train/é [1].webp"]
    tree = plant(tmp_path / "in #1", names)
    plant(tmp_path / "in #1", ["zebra/notes.txt", "zebra/._1.jpg", ".cache/a/b.png"])
    dataset, table, classes = make("imagefolder", tmp_path / "out.lance", "--input", tmp_path / "in #1")
    assert table["image"].to_pylist() == list(tree.values())
    assert classes == ["_bg_", "a b", "train", "zebra"]
    assert [classes[label] for label in table["label"].to_pylist()] == [name.split("/")[0] for name in tree]
    assert table["file"].to_pylist() == list(tree), "a row is traced to its file"
    kinds = {"image": pa.binary(), "label": pa.int64(), "file": pa.string(), "split": pa.string()}
    assert dataset.schema.equals(pa.schema(kinds))


def test_the_split_depends_on_seed_and_image_alone(photos, tmp_path, monkeypatch):
    def split(name: str, *options: object) -> dict[bytes, str]:
        options = ("--input", photos, "--val-fraction", 0.5, *options)
        _, table, _ = make("imagefolder", tmp_path / name, *options)
        return dict(zip(table["image"].to_pylist(), table["split"].to_pylist(), strict=True))

    context = ray.data.DataContext.get_current()
    monkeypatch.setattr(context, "read_op_min_num_blocks", 1)
    first = split("first.lance")
    assert 5 <= list(first.values()).count("val") <= 25
    monkeypatch.setattr(context, "read_op_min_num_blocks", 13)
    assert split("again.lance", "--rows-per-fragment", 4) == first
    assert split("other.lance", "--seed", 1) != first
    (photos / "ant" / "00.png").rename(photos / "cat" / "moved.png")
    assert split("moved.lance") == first


def test_huggingface_reads_the_layout_of_the_hub(tmp_path):
    names, root = ["ant", "bee", "cat"], tmp_path / "in" / "data"
    root.mkdir(parents=True)
    files = {
        "train-00000-of-00002": range(12),
        "train-00001-of-00002": range(12, 16),
        "validation-00000-of-00001": range(16, 20),
        "test-00000-of-00001": range(20, 25),
    }
    for file, numbers in files.items():
        pq.write_table(hub_table(numbers, names=names), root / f"{file}.parquet", row_group_size=3)
    _, table, classes = make("huggingface", tmp_path / "out.lance", "--input", tmp_path / "in")
    assert classes == names
    order = [*range(20, 25), *range(20)]  # test comes first in the alphabet
    assert table["image"].to_pylist() == [png(number) for number in order]
    assert table["label"].to_pylist() == [number % 3 for number in order]
    assert table["split"].to_pylist() == ["test"] * 5 + ["train"] * 16 + ["val"] * 4


def test_huggingface_of_plain_columns_without_splits_or_class_names(tmp_path):
    table = hub_table(range(40), struct=False).rename_columns(["img", "fine_label"])
    table = table.set_column(1, "fine_label", table["fine_label"].cast(pa.uint8()))
    root = created.plant(tmp_path / "in", {"train-00000-of-00001.parquet": table})
    options = ("--input", root, "--image-column", "img", "--label-column", "fine_label")
    _, rows, classes = make("huggingface", tmp_path / "out.lance", *options)
    assert classes == ["0", "1", "2"]
    assert rows["image"].to_pylist() == table["img"].to_pylist()
    assert rows["label"].to_pylist() == table["fine_label"].to_pylist()
    assert set(rows["split"].to_pylist()) == {"train", "val"}  # nothing but train is no split


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_huggingface_numbers_labels_that_are_strings(tmp_path, kind):
    root = created.plant(tmp_path / "in", {"test-0.parquet": with_names(hub_table(range(8, 9)), kind)})  # cats alone
    pq.write_table(with_names(hub_table(range(8)), kind), root / "train-0.parquet", row_group_size=3)
    dataset, rows, classes = make("huggingface", tmp_path / "out.lance", "--input", root)
    assert classes == ["ant", "bee", "cat"]
    assert dataset.schema.field("label").type == pa.int64()
    assert [classes[label] for label in rows["label"].to_pylist()] == ["cat", *(["bee", "ant", "cat"] * 3)[:8]]


@pytest.mark.parametrize("source", ["huggingface", "imagefolder"])
def test_classes_come_in_the_order_of_a_file(photos, tmp_path, capsys, source):
    root, out, file = photos, tmp_path / "out.lance", tmp_path / "classes.txt"
    if source == "huggingface":
        root = created.plant(tmp_path / "in", {"0.parquet": with_names(hub_table(range(6)))})
    file.write_text("cat\ndog\nant\nbee\n")
    _, rows, classes = make(source, out, "--input", root, "--classes", file)
    assert classes == ["cat", "dog", "ant", "bee"]  # dogs are in another dataset
    assert set(rows["label"].to_pylist()) == {0, 2, 3}
    file.write_text("cat\ndog\nant\nbee\n\n \n", encoding="utf-8-sig")  # as editors leave it
    assert make(source, tmp_path / "marked.lance", "--input", root, "--classes", file)[2] == classes
    for text, cause in (
        ("cat\n\nant\nbee", "has nothing in line 2"),
        ("cat\nbee", "lacks 1 of the classes found, such as ant"),
        ("cat\nant\nbee\ncat", "has 4 lines with 3 names"),
        ("", "has 0 lines"),
    ):
        file.write_text(text)
        command = (source, "--out", tmp_path / "other.lance", "--input", root, "--classes", file)
        assert cause in refusal(capsys, *command)
    file.unlink()
    assert "can't be read" in refusal(capsys, *command)


def test_classes_of_labels_that_are_integers_are_not_reordered(tmp_path, capsys):
    root = created.plant(tmp_path / "in", {"classes.txt": "bee\nant\ncat\n", "0.parquet": hub_table(range(6))})
    command = ("huggingface", "--out", tmp_path / "o.lance", "--input", root)
    assert "Leave --classes out" in refusal(capsys, *command, "--classes", root / "classes.txt")


def write_birds(path: Path, names: list[str | None]) -> str:
    """Writes a dataset of images and names of species; returns its URI."""
    images = pa.array([png(number) for number in range(len(names))], pa.binary())
    lance.write_dataset(pa.table({"image": images, "species": pa.array(names, pa.string())}), path, max_rows_per_file=3)
    return str(path)


def test_strings_of_a_lance_dataset_get_integers_beside_them(tmp_path, capsys):
    names = ["owl", "auk", "owl", "tit", "auk", "it's", "owl"]
    uri = write_birds(tmp_path / "birds.lance", names)
    assert job.main(["classes", "--data", uri, "--string-column", "species"]) == 0
    dataset = lance.dataset(uri)
    classes = json.loads(dataset.schema.metadata[b"classes"])
    assert classes == ["auk", "it's", "owl", "tit"]
    assert dataset.schema.field("label").type == pa.int64()
    rows = dataset.to_table()
    assert rows["species"].to_pylist() == names
    assert [classes[label] for label in rows["label"].to_pylist()] == names
    assert dataset.checkout_version(1).schema.names == ["image", "species"]
    printed = capsys.readouterr().out
    assert f"added label to {uri}, version {dataset.version} (it was 1" in printed
    assert "classes    4: auk, it's, owl, tit" in printed


def test_strings_of_a_lance_dataset_without_clear_classes_are_refused(tmp_path, capsys):
    uri = write_birds(tmp_path / "birds.lance", ["owl", None, "auk", None])
    words = ("classes", "--data", tmp_path / "nowhere.lance", "--string-column", "species")
    assert "can be opened at --data" in refusal(capsys, *words)
    command = ("classes", "--data", uri, "--string-column")
    assert "2 rows of --data" in refusal(capsys, *command, "species")
    assert "lacks a column image of strings, it has image (binary)" in refusal(capsys, *command, "image")
    said = refusal(capsys, *command, "species", "--label-column", "species")
    check_said("has a column species (string) already … --label-column", said)
    assert lance.dataset(uri).version == 1
    dataset = lance.dataset(write_birds(tmp_path / "named.lance", ["owl", "auk"]))
    dataset.update_schema_metadata({"classes": json.dumps(["dog", "cat"])})
    said = refusal(capsys, "classes", "--data", dataset.uri, "--string-column", "species")
    assert "names its classes 2: dog, cat already, and species has 2: auk, owl" in said


def test_files_that_give_no_row_are_named(photos, tmp_path, capsys):
    plant(photos, ["ant/._0.png", ".cache/a.png"])
    for number in range(12):
        (photos / "bee" / f"{number:02}.txt").write_text("notes")
    make("imagefolder", tmp_path / "out.lance", "--input", photos, "--left-out", tmp_path / "left.tsv")
    printed = capsys.readouterr().out
    check_said("left out   14 files, 2 hidden, 12 ends with none of .jpg … bee/07.txt", printed)
    assert "             .cache/a.png\n             ant/._0.png\n             bee/00.txt\n" in printed
    assert "bee/08.txt" not in printed
    assert f"and 4 more; all of them are in {tmp_path / 'left.tsv'}" in printed
    lines = (tmp_path / "left.tsv").read_text().splitlines()
    assert lines[:2] == [".cache/a.png\thidden", "ant/._0.png\thidden"]
    assert [line.split("\t")[0] for line in lines[2:]] == [f"bee/{number:02}.txt" for number in range(12)]
    make("imagefolder", tmp_path / "again.lance", "--input", photos)
    assert "and 4 more; --left-out FILE lists all of them" in capsys.readouterr().out


def test_files_that_hold_no_image_are_named_and_kept_with_the_way_back_to_them(photos, tmp_path, capsys):
    (photos / "ant" / "03.png").write_bytes(b"")
    (photos / "bee" / "04.png").write_bytes(b"<html>not found</html>")
    arguments = ["--input", photos, "--rows-per-fragment", 7]
    _, table, _ = make("imagefolder", tmp_path / "out.lance", *arguments)
    files = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    assert table["file"].to_pylist() == files
    assert table["image"].to_pylist() == [(photos / file).read_bytes() for file in files]
    printed = capsys.readouterr().out
    assert "no images  2 rows, kept as they are; training stops at the first, or leaves them out" in printed
    assert re.findall(r"(\w+/\d\d\.png): (.*)", printed) == [
        ("ant/03.png", "empty"),
        ("bee/04.png", "UnidentifiedImageError: cannot identify image file"),
    ]
    words = ("imagefolder", "--out", tmp_path / "o.lance", "--input", photos, "--file-column", "label")
    assert "is the name of another column" in refusal(capsys, *words)


def test_images_that_were_cut_short_are_found_where_all_are_decoded(photos, tmp_path, capsys):
    whole = make_images(1, size=(480, 640))[0]
    for number, part in enumerate((0.001, 0.3, 0.5, 0.7, 0.95)):  # the first one lacks a part of its header
        (photos / "ant" / f"cut{number}.jpg").write_bytes(whole[: int(len(whole) * part)])
    make("imagefolder", tmp_path / "headers.lance", "--input", photos)
    said = capsys.readouterr().out
    assert "checked    headers of images; none was decoded: --check full also finds those that were cut short" in said
    assert re.findall(r"(cut\d).jpg: (?:\w+)", said) == ["cut0"]
    make("imagefolder", tmp_path / "full.lance", "--input", photos, "--check", "full", "--file-column", "")
    said = capsys.readouterr().out
    assert "checked    every image was decoded whole" in said
    assert re.findall(r"(cut\d).jpg: (?:\w+)", said) == [f"cut{number}" for number in range(5)]
    assert "file" not in lance.dataset(tmp_path / "full.lance").schema.names
    pq.write_table(pa.table({"x": [1]}), tmp_path / "x.parquet")
    arguments = ["tables", "--out", tmp_path / "x.lance", "--input", tmp_path / "x.parquet", "--check", "full"]
    assert "--check full finds no column image of encoded images among x, split" in refusal(capsys, *arguments)
    small = ["--input", photos, "--shorter-side", 1000]
    assert "cut0.jpg" in refusal(capsys, "imagefolder", "--out", tmp_path / "small.lance", *small)
    (photos / "ant" / "cut0.jpg").unlink()
    make("imagefolder", tmp_path / "small.lance", *small)
    assert "none that stays as it is was decoded" in capsys.readouterr().out
    make("imagefolder", tmp_path / "checked.lance", *small, "--check", "full")
    assert re.findall(r"(cut\d).jpg: (?:\w+)", capsys.readouterr().out) == [f"cut{number}" for number in range(1, 5)]


def test_names_of_splits_have_any_case_and_are_named(tmp_path, capsys):
    """They share one list of classes."""
    names = ["Train/bee/1.png", "train/ant/1.png", "Validation/bee/1.png", "val/cat/1.png", "TEST/ant/x/1.png"]
    tree = plant(tmp_path / "in", names)
    _, table, classes = make("imagefolder", tmp_path / "out.lance", "--input", tmp_path / "in")
    assert classes == ["ant", "bee", "cat"]
    assert table["image"].to_pylist() == [tree[name] for name in sorted(names)]
    assert table["label"].to_pylist() == [0, 1, 1, 0, 2]
    assert table["split"].to_pylist() == ["test", "train", "val", "train", "val"]
    called = "split train is what is called Train, train … split val is what is called Validation, val"
    check_said(called, capsys.readouterr().out)
    plant(tmp_path / "in", ["dev/ant/1.png"])
    said = refusal(capsys, "imagefolder", "--out", tmp_path / "other.lance", "--input", tmp_path / "in")
    assert "has Validation and dev and val, and each may be the split val" in said
    for name in ("Validation", "val"):
        shutil.rmtree(tmp_path / "in" / name)
    _, table, _ = make("imagefolder", tmp_path / "other.lance", "--input", tmp_path / "in")
    assert table["split"].to_pylist() == ["test", "train", "val", "train"]
    plant(tmp_path / "classes", ["valid/near/1.png", "invalid/near/1.png"])
    assert make("imagefolder", tmp_path / "classes.lance", "--input", tmp_path / "classes")[2] == ["invalid", "valid"]


def test_what_is_not_named_is_counted():
    piece = Piece(name="files from a on", parts=[], rows=0)
    found = named_of(piece, [Left(f"{number}.png", "empty") for number in range(2500)])
    assert len(found) == 1001
    assert job.show_no_images(found)[0].startswith("  no images  2,500 rows, kept")
    assert job.show_no_images(found)[-1].endswith("and 2,490 more")
    assert job.show_left_out(found, None)[0] == "  left out   2,500 files, 1,000 empty, 1,500 are not named:"


def test_nothing_is_said_where_no_file_is_left_out(photos, tmp_path, capsys):
    make("imagefolder", tmp_path / "out.lance", "--input", photos)
    printed = capsys.readouterr().out
    assert "left out" not in printed
    assert "no images" not in printed
    command = ("imagefolder", "--out", tmp_path / "o.lance", "--input", photos, "--left-out", tmp_path / "no" / "where")
    assert "can't be written" in refusal(capsys, *command)
    assert not (tmp_path / "o.lance").exists()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--val-fraction", ("1", "-0.1", "nan")),
        ("--rows-per-fragment", ("0",)),
        ("--shorter-side", ("0", "-5")),
        ("--jpeg-quality", ("0", "500", "-3")),
    ],
)
def test_values_out_of_range_are_refused(tmp_path, option, values):
    for value in values:
        with pytest.raises(SystemExit, match="2"):
            job.main(["demo", "--out", str(tmp_path / "out.lance"), option, value])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["ant/notes.txt"], "(1 left out, such as ant/notes.txt)"),
        (["1.png", "2.png"], "2 of 2 images lie in no class directory, such as 1.png … <class>/<image>"),
        (["ant/1.png", "2.png"], "1 of 2 images lie in no class directory, such as 2.png … <class>/<image>"),
        (["train/1.png", "test/2.png"], "2 of 2 images lie in no class directory … <split>/<class>/<image>"),
        (["train/ant/1.png", "more/ant/2.png"], "has train beside directories that are no splits"),
    ],
)
def test_trees_without_clear_classes_are_refused(tmp_path, capsys, names, said):
    plant(tmp_path / "in", names)
    words = "--out", tmp_path / "out.lance", "--input", tmp_path / "in"
    check_said(said, refusal(capsys, "imagefolder", *words))
    assert not (tmp_path / "out.lance").exists()


@pytest.mark.parametrize("source", ["imagefolder", "huggingface"])
def test_missing_and_empty_inputs_are_refused(tmp_path, capsys, source):
    (tmp_path / "empty").mkdir()
    for name, said in (
        ("nowhere", "can't be listed … Give a directory or a file that exists"),
        ("*.png", "can't be listed … Give the directory itself"),
        ("empty", f"files found under --input {tmp_path / 'empty'}"),
    ):
        words = "--out", tmp_path / "out.lance", "--input", tmp_path / name
        check_said(said, refusal(capsys, source, *words))


def test_bad_parquet_is_refused(tmp_path, capsys):
    def message(files: dict[str, pa.Table | bytes], *options: object) -> str:
        root = created.plant(tmp_path / str(len(list(tmp_path.iterdir()))), files)
        return refusal(capsys, "huggingface", "--out", root / "out.lance", "--input", root, *options)

    good = hub_table(range(6), names=["a", "b", "c"])
    columns = "--image-column", "photo", "--label-column", "class"
    said = message({"train-0.parquet": good}, *columns)
    check_said("lacks a column photo of encoded images or a column class of integers … it has image (struct", said)
    whole = io.BytesIO()
    pq.write_table(good, whole, use_dictionary=False)
    damaged = whole.getvalue()[:4] + b"\xff" * 100 + whole.getvalue()[104:]
    for said, other in {
        "train-1.parquet in --input … can't be read (": {"train-1.parquet": b"PAR1 cut short"},
        "lacks a column": {"train-0.parquet": good.set_column(1, "label", [[0.5] * 6])},
        "strings in test-0.parquet, integers in train-0": {"test-0.parquet": with_names(hub_table(range(3)))},
        "unsupervised-0.parquet in --input … names no split": {"unsupervised-0.parquet": good},
        "name different classes for label": {"test-0.parquet": hub_table(range(3), names=["c", "b", "a"])},
        "the source has no rows": {"train-0.parquet": good.slice(0, 0)},
        "train-0.parquet is damaged": {"train-0.parquet": damaged},
        # Found while the cluster reads: Ray's own report goes to the log, the message says what it was.
        "train-0.parquet has rows without image bytes or without a label … Nothing was committed": {
            "train-0.parquet": good.set_column(0, "image", pa.array([b"x", None] * 3))
        },
    }.items():
        check_said(said, message({"train-0.parquet": good} | other))


def test_an_output_that_cannot_be_written_is_refused(photos, capsys):
    """Where nobody can make a directory; below a file, Lance would try for seconds."""
    said = refusal(capsys, "imagefolder", "--out", "/proc/out.lance", "--input", photos)
    check_said("making /proc/out.lance failed … No such file or directory", said)
