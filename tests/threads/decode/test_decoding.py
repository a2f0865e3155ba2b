"""Transforms, blob columns and per-row randomness, through the real loader."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.api.dataset import opened_of
from raylance.api.loader import consumer_of
from raylance.errors import ConfigError, DatasetError, HelperError
from raylance.torch_data import IterableDataset
from tests.helpers.images import encode


def noisy(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Float images with noise of their own, a column more and one less."""
    noise = np.stack([np.random.default_rng(int(seed)).normal(size=(4, 4, 3)) for seed in batch["_seed"]])
    return {
        "pixels": (batch["image"] + noise).astype(np.float32),
        "double": batch["label"] * 2,
        "name": [f"row {offset}" for offset in batch["_rowoffset"]],
    }


def open_noisy(uri: str, **changes: Any) -> raylance.Dataset:
    arguments = {"columns": ["image", "label"], "filter": "id < 120", "remainder": "ragged", "transform": noisy}
    return raylance.dataset(uri, **(arguments | {"decode": raylance.Image("image", size=4)} | changes))


def test_transforms_run_in_helpers_and_depend_on_the_row_alone(images_uri: str) -> None:
    dataset = open_noisy(images_uri)
    assert dataset.schema.names == ["pixels", "double", "name"]
    runs = []
    for decoders, batch_size in ((0, 16), (1, 50)):
        with dataset.loader(num_decoders=decoders) as loader:
            batches = list(loader.iter_batches(global_batch_size=batch_size, with_row_offset=True))
        rows = {
            int(offset): (pixels.tobytes(), int(double), name)
            for batch in batches
            for offset, pixels, double, name in zip(
                batch["_rowoffset"], batch["pixels"], batch["double"], batch["name"], strict=True
            )
        }
        assert len(rows) == 120
        assert all(name == f"row {offset}" for offset, (_, _, name) in rows.items())
        runs.append(rows)
    assert runs[0] == runs[1]
    torch_batch = next(dataset.loader(num_decoders=0).iter_torch_batches(batch_size=8))
    assert torch_batch["pixels"].shape == (8, 4, 4, 3)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda batch: None, "NoneType"),
        (lambda batch: {1: batch["label"]}, "column named 1 "),
        (lambda batch: {"label": batch["label"][1:]}, "15 rows in 'label' for 16 rows"),
        (lambda batch: {"_seed": batch["_seed"]}, "no column of its own"),
        (lambda batch: batch | {"_valid": batch["label"]}, "_valid"),
        (lambda batch: batch | {"_component": batch["label"]}, "_component"),
        (lambda batch: batch | {"_draw": batch["label"]}, "_draw"),
        (lambda batch: {"note": [None] * len(batch["label"])}, "'note'"),
        (lambda batch: {"note": [[]] * len(batch["label"])}, "'note'"),
        (lambda batch: {"note": [1, "a"] * (len(batch["label"]) // 2)}, "'note'"),
        (lambda batch: {"note": 5}, "transform returned int in 'note' for 16 rows"),
        (lambda batch: {"note": np.float32(5)}, "transform returned float32 in 'note' for 16 rows"),
        (lambda batch: {"label": batch["label"], "n": "x" * 16}, "transform returned str in 'n' for 16 rows"),
    ],
)
def test_what_is_no_batch_is_refused_at_the_opening(images_uri: str, transform: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_noisy(images_uri, transform=transform)


def rare(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Columns whose Arrow types differ from piece to piece: numbers, lists, tensors, and what was handed on."""
    odd = batch["id"] % 2 == 1
    some = odd & (batch["id"] > 100)
    return {
        "id": batch["id"],
        "note": batch["note"],  # of which the opening sees nothing but None
        "half": [0.5 if one else 1 for one in some],
        "count": batch["id"].astype(np.int16 if odd.all() else np.int32),
        "pixels": np.zeros((len(odd), 2, 2), np.float32 if odd.all() else np.float64),
        "text": pa.array(["x" if one else None for one in odd], pa.string()),
        "tokens": pa.array([[1] if one else [] for one in odd], pa.list_(pa.int64())),
    }


def test_pieces_of_a_transform_have_the_types_of_the_opening(write_dataset: Any) -> None:
    rows = 400
    sampled = set(np.linspace(0, rows - 1, 16).astype(int).tolist())
    notes = [None if row in sampled else f"note {row}" for row in range(rows)]
    uri = write_dataset(pa.table({"id": range(rows), "note": notes, "big": [b"x" * 4096] * rows}))
    dataset = raylance.dataset(uri, transform=rare, order="sequential", remainder="ragged")
    assert dataset.schema.field("note").type == pa.string()
    # So few bytes in flight that a step is cut into pieces of a few rows.
    with dataset.loader(num_decoders=0, inflight_bytes=64 << 10) as loader:
        tables = list(loader.iter_batches(global_batch_size=100, batch_format="pyarrow"))
    assert max(table["id"].num_chunks for table in tables) > 5
    for table in tables:
        assert table.schema.remove_metadata() == dataset.schema.remove_metadata()
    table = pa.concat_tables(tables)
    assert table["note"].to_pylist() == notes
    assert table["text"].to_pylist() == ["x" if row % 2 else None for row in range(rows)]
    assert table["half"].to_pylist() == [0.5 if row % 2 and row > 100 else 1 for row in range(rows)]


def changeling(batch: dict[str, np.ndarray], later: Any) -> dict[str, Any]:
    """One thing at the opening, which sees the first row, another where the rows are later ones."""
    first = batch["_rowoffset"].min() == 0
    return {"label": batch["label"], "made": batch["label"] * 1.0 if first else later(batch["label"])}


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (lambda label: [f"class {one}" for one in label], "string in column 'made' .*become double"),
        (lambda label: [[1.0]] * len(label), "list<.*in column 'made' .*become double"),
        (lambda label: np.zeros((len(label), 2)), r"extension.*fixed_shape_tensor.* in column 'made' .*become double"),
        (lambda label: [1, "a"] * (len(label) // 2), "list in column 'made' .*become double"),
    ],
)
def test_what_cannot_be_cast_is_named(images_uri: str, later: Any, message: str) -> None:
    dataset = open_noisy(images_uri, transform=functools.partial(changeling, later=later), order="sequential")
    batches = iter(IterableDataset(dataset, global_batch_size=10, dist_info=(0, 1)))
    assert next(batches)["made"].dtype == torch.float64
    with pytest.raises(ConfigError, match=f"transform returned {message}") as caught:
        next(batches)
    assert f"row offsets between 10 and 19 of {images_uri}, which" in str(caught.value)


def test_a_transform_that_changes_its_columns_is_refused(images_uri: str) -> None:
    def transform(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"label": batch["label"]} | ({} if batch["_rowoffset"].min() == 0 else {"more": batch["label"]})

    dataset = open_noisy(images_uri, transform=transform, order="sequential")
    with pytest.raises(ConfigError, match="label, more"):
        list(IterableDataset(dataset, global_batch_size=10, dist_info=(0, 1)))


ROWS, BAD = 120, 33


@pytest.fixture(scope="module")
def plain_uri(write_dataset: Callable[..., str]) -> str:
    """Columns of every kind that a transform may hand on."""
    rows = np.arange(ROWS)
    matrix = pa.FixedSizeListArray.from_arrays(
        pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(rows, 4).astype(np.float32)), 2), 2
    )
    table = {
        "id": rows,
        "matrix": matrix,
        "pair": [[row, row] for row in rows.tolist()],
        "tokens": pa.array([[row] * (row % 3) for row in rows.tolist()], pa.list_(pa.int64())),
        "name": [f"row {row}" for row in rows],
        "raw": pa.array([b"x" * row for row in rows.tolist()]),
        "flag": rows % 2 == 0,
    }
    return write_dataset(pa.table(table))


def fails(batch: dict[str, Any], errors: dict[int, Exception], alone: bool = True) -> dict[str, Any]:
    """Changes what it was given in place, and raises then the error of the first bad row."""
    batch["matrix"] += 1
    batch["id"] += 1000
    bad = [row for row in batch["_rowoffset"].tolist() if row in errors]
    if bad and (alone or len(batch["_rowoffset"]) > 1):
        raise errors[bad[0]]
    return batch | {"half": batch["id"] / 2}


def open_failing(uri: str, errors: dict[int, Exception], alone: bool = True, **changes: Any) -> raylance.Dataset:
    transform = functools.partial(fails, errors=errors, alone=alone)
    return raylance.dataset(uri, **({"transform": transform, "order": "sequential", "remainder": "ragged"} | changes))


class SilentError(Exception):
    """An error whose text is another one."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = [EOFError(""), StopIteration(), ValueError("no such thing"), KeyError(5), SilentError()]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
@pytest.mark.parametrize("decoders", [0, 2])
def test_a_row_that_the_transform_fails_on_is_a_bad_row(plain_uri: str, error: Exception, decoders: int) -> None:
    with open_failing(plain_uri, {BAD: error}).loader(num_decoders=decoders) as loader:
        seen = []
        with pytest.raises(raylance.BadRowError) as caught:
            for batch in loader.iter_batches(global_batch_size=10):
                seen += batch["id"].tolist()
        assert seen == list(range(1000, 1030))
        assert loader.state_dict()["position"] == 30
    assert (caught.value.column, caught.value.row_offset, caught.value.dataset) == (None, BAD, plain_uri)
    assert f"transform fails on row offset {BAD} of {plain_uri} by itself ({type(error).__name__}" in str(caught.value)
    assert isinstance(caught.value.__cause__, type(error))
    with pytest.raises(raylance.BadRowError, match=f"row offset {BAD} "):
        open_failing(plain_uri, {BAD: error}).head(BAD + 1)


@pytest.mark.parametrize("decoders", [0, 2])
def test_rows_that_the_transform_fails_on_are_masked(plain_uri: str, decoders: int) -> None:
    errors = dict(zip([0, BAD, 34, 80, 119], ERRORS, strict=True))  # 0 and 119 are among those of the opening
    bad = list(errors)
    handle = open_failing(plain_uri, errors, on_bad_row="mask")
    with handle.loader(num_decoders=decoders) as loader:
        for epoch in range(2):
            rows = 0
            for batch in loader.iter_batches(global_batch_size=25, pad_lists={"tokens": -1}, with_row_offset=True):
                offsets = batch["_rowoffset"]
                valid = ~np.isin(offsets, bad)
                assert batch["_valid"].tolist() == valid.tolist()
                np.testing.assert_array_equal(batch["id"], (offsets + 1000) * valid)
                np.testing.assert_array_equal(batch["half"], (offsets + 1000) / 2 * valid)
                np.testing.assert_array_equal(batch["matrix"], np.tile((offsets + 1) * valid, (2, 2, 1)).T)
                np.testing.assert_array_equal(batch["pair"], np.tile(offsets * valid, (2, 1)).T)
                np.testing.assert_array_equal((batch["tokens"] >= 0).sum(1)[valid], (offsets % 3)[valid])
                names = [f"row {offset}" if one else "" for offset, one in zip(offsets, valid, strict=True)]
                assert batch["name"].tolist() == names
                assert [len(raw) for raw in batch["raw"]] == (offsets * valid).tolist()
                assert batch["flag"].tolist() == ((offsets % 2 == 0) & valid).tolist()
                rows += len(offsets)
            assert rows == ROWS
            assert loader.stats()["masked_rows"] == len(bad) * (epoch + 1)
            found = {row: why for row, _, why in consumer_of(loader).recorder.stats.bad_rows}
            assert sorted(found) == bad
            assert all(type(errors[row]).__name__ in why for row, why in found.items())
        (batch,) = loader.iter_torch_batches(global_batch_size=ROWS)
        assert (~batch["_valid"]).nonzero().flatten().tolist() == bad
    assert handle.head(40)["_valid"].tolist() == [row not in bad for row in range(40)]


@pytest.mark.parametrize("on_bad_row", ["raise", "mask"])
@pytest.mark.parametrize("decoders", [0, 2])
def test_rows_that_the_transform_fails_on_together_alone_are_named(
    plain_uri: str, on_bad_row: str, decoders: int
) -> None:
    handle = open_failing(plain_uri, dict.fromkeys((41, 48), StopIteration("x")), alone=False, on_bad_row=on_bad_row)
    with handle.loader(num_decoders=decoders) as loader:
        batches = iter(loader.iter_batches(global_batch_size=10))
        assert [next(batches)["id"][0] for _ in range(4)] == [1000, 1010, 1020, 1030]
        rows = f"row offsets between 40 and 49 of {plain_uri} together .StopIteration: x."
        with pytest.raises(HelperError, match=f"transform fails on {rows}, and on none of these") as caught:
            next(batches)
    assert isinstance(caught.value.__cause__, StopIteration)


def test_a_transform_that_fails_at_the_opening(plain_uri: str) -> None:
    with pytest.raises(ConfigError, match="16 rows.*EOFError") as caught:
        open_failing(plain_uri, dict.fromkeys(range(ROWS), EOFError()))
    assert isinstance(caught.value.__cause__, EOFError)
    with pytest.raises(HelperError, match=f"row offsets between 0 and 119 of {plain_uri} together"):
        open_failing(plain_uri, {0: EOFError()}, alone=False)


@pytest.mark.parametrize("on_bad_row", ["raise", "mask"])
def test_what_says_nothing_of_a_row_masks_none(plain_uri: str, on_bad_row: str) -> None:
    for error, kind, message in (
        (
            ImportError("no codec"),
            ConfigError,
            "transform cannot run on .*no codec.*Install the module",
        ),
        (MemoryError(), HelperError, "transform cannot run on .*MemoryError.*no row is bad"),
        (
            ConfigError("is too long"),
            ConfigError,
            "transform refuses row offset.*30.*is too long",
        ),
    ):
        with pytest.raises(kind, match=message):
            list(open_failing(plain_uri, {BAD: error}, on_bad_row=on_bad_row).iter_batches(batch_size=10))


def test_a_bad_row_of_a_transform_in_a_mixture_is_named(plain_uri: str) -> None:
    transform = functools.partial(fails, errors={BAD: EOFError()})
    parts = {name: (raylance.dataset(plain_uri, transform=transform, seed=seed), 1) for seed, name in enumerate("ab")}
    error = f"row offset {BAD} of [ab] .{plain_uri}. by itself"
    with raylance.mix(parts).loader() as loader, pytest.raises(raylance.BadRowError, match=error):
        list(loader.iter_batches(global_batch_size=10))


def test_copies_of_a_sampled_row_are_augmented_differently(images_uri: str) -> None:
    weights = np.zeros(953)
    weights[5] = 1
    dataset = raylance.dataset(
        images_uri,
        columns=["image"],
        decode=raylance.Image("image", size=16, augment=raylance.RandomResizedCrop(scale=(0.2, 0.6))),
        order=raylance.Weighted(weights=weights, rows_per_epoch=24),
    )
    images = []
    for world in (1, 2):
        ranks = []
        for rank in range(world):
            with dataset.loader(rank=rank, world_size=world, num_decoders=0) as loader:
                ranks.append([batch["image"] for batch in loader.iter_batches(global_batch_size=8)])
        images.append(np.concatenate([np.concatenate(parts) for parts in zip(*ranks, strict=True)]))
    assert len({image.tobytes() for image in images[0]}) > 20
    np.testing.assert_array_equal(images[0], images[1])


@pytest.mark.parametrize("storage", ["2.0", "2.2"], ids=["blob v1", "blob v2"])
def test_blob_columns_come_as_bytes_of_the_planned_rows(tmp_path: Any, storage: str) -> None:
    values = [bytes([row]) * (row * 50 + 1) for row in range(60)]
    field = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    column: Any = pa.array(values, pa.large_binary())
    if storage == "2.2":
        field, column = lance.blob_field("blob"), lance.blob_array(values)
    table = pa.table({"id": pa.array(range(60)), "blob": column}, schema=pa.schema([pa.field("id", pa.int64()), field]))
    uri = str(tmp_path / "blobs.lance")
    lance.write_dataset(table, uri, data_storage_version=storage, max_rows_per_file=25)
    lance.dataset(uri).delete("id = 7")
    dataset = raylance.dataset(uri, filter="id > 3", order="row", remainder="ragged")
    assert dataset.schema.field("blob").type == pa.large_binary()
    with dataset.loader() as loader:
        batches = list(loader.iter_batches(global_batch_size=10))
    found = {int(row): blob for batch in batches for row, blob in zip(batch["id"], batch["blob"], strict=True)}
    assert found == {row: values[row] for row in range(4, 60) if row != 7}


def test_global_generators_are_never_touched(images_uri: str) -> None:
    import random

    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    before = states()
    with open_noisy(images_uri).loader(num_decoders=0) as loader:
        for _ in loader.iter_torch_batches(global_batch_size=40):
            pass
        loader.state_dict()
    assert states() == before


def structs(values: list[bytes | None], storage: str, *, is_blob: bool) -> pa.Table:
    metadata = {"lance-encoding:blob": "true"} if is_blob else None
    image = pa.struct([pa.field("bytes", pa.large_binary(), metadata=metadata), ("path", pa.string())])
    sample = pa.struct([pa.field("image", image), ("number", pa.int64())])
    rows = [{"image": {"bytes": value, "path": f"{row}.png"}, "number": row} for row, value in enumerate(values)]
    if storage != "2.0":  # which has no null structs
        rows[3] = {"image": None, "number": 3}
    plain = [row["image"] for row in rows]
    return pa.table({"id": range(len(rows)), "image": pa.array(plain, image), "sample": pa.array(rows, sample)})


def read_by(handle: raylance.Dataset, mode: Any) -> raylance.Dataset:
    """The handle, which reads all chunks by one method."""
    opened = opened_of(handle)
    source: Any = opened.read.source
    read = dataclasses.replace(opened.read, source=dataclasses.replace(source, read=mode))
    return raylance.Dataset(dataclasses.replace(opened, read=read))


@pytest.mark.parametrize("storage", ["2.0", "2.2"])
@pytest.mark.parametrize("is_blob", [False, True])
@pytest.mark.parametrize("read", ["take", "range"])
def test_fields_inside_structs_are_columns(tmp_path: Any, storage: str, is_blob: bool, read: Any) -> None:
    values: list[bytes | None] = [bytes([row]) * row for row in range(40)]
    values[5] = None
    uri = str(tmp_path / "structs.lance")
    lance.write_dataset(structs(values, storage, is_blob=is_blob), uri, data_storage_version=storage)
    values[3] = None if storage != "2.0" else values[3]
    names = ["sample.image.bytes", "image.path", "image.bytes", "id", "sample.number"]
    handle = read_by(raylance.dataset(uri, columns=names, order="row", seed=3, remainder="ragged"), read)
    assert handle.schema.names == names
    assert handle.schema.field("image.bytes").type == pa.large_binary()
    seen = []
    for batch in handle.iter_batches(batch_size=8):
        for row, first, second, path in zip(*(batch[name] for name in [names[3], *names[:3:2], names[1]]), strict=True):
            assert first == second == values[row]
            assert path == (None if row == 3 and storage != "2.0" else f"{row}.png")
            seen.append(row)
        assert batch["sample.number"].tolist() == batch["id"].tolist()
    assert sorted(seen) == list(range(40))
    assert handle.take([7, 2])["image.bytes"].tolist() == [values[7], values[2]]
    if is_blob:
        leaves = "id image.bytes image.path sample.image.bytes sample.image.path sample.number"
        assert raylance.dataset(uri).schema.names == leaves.split()
        with pytest.raises(DatasetError, match=r"'image' .*image.bytes.*\['image.bytes', 'image.path'\]"):
            raylance.dataset(uri, columns=["id", "image"])
        with pytest.raises(DatasetError, match=r"'sample.image' .*sample.image.bytes"):
            raylance.dataset(uri, columns=["sample.image"])
    else:
        data = read_by(raylance.dataset(uri, columns=["image", "image.path"]), read)
        whole = next(iter(data.iter_batches(batch_size=9)))
        assert [image and image["path"] for image in whole["image"]] == whole["image.path"].tolist()
    with pytest.raises(DatasetError, match=r"no column 'image.size'"):
        raylance.dataset(uri, columns=["image.size"])


@pytest.mark.parametrize("is_blob", [False, True])
def test_images_may_lie_in_a_struct(tmp_path: Any, is_blob: bool) -> None:
    images = [encode(np.full((4, 6, 3), row, np.uint8)) for row in range(20)]
    uri = str(tmp_path / "structs.lance")
    table = structs([*images], "2.0", is_blob=is_blob)
    lance.write_dataset(table, uri, data_storage_version="2.0")
    handle = raylance.dataset(uri, decode=raylance.Image("image.bytes"), filter="id < 20", remainder="ragged")
    assert handle.schema.names[:3] == ["id", "image.bytes", "image.path"]
    named = raylance.dataset(uri, columns=["id", "image.bytes"], decode=raylance.Image("image.bytes", name="image"))
    for name, loader in (("image.bytes", handle), ("image", named)):
        for batch in loader.iter_torch_batches(batch_size=5):
            assert batch[name][:, 0, 0, 0].tolist() == batch["id"].tolist()


@pytest.mark.parametrize("storage", ["2.0", "2.2"])
def test_blobs_inside_lists_are_refused(tmp_path: Any, storage: str) -> None:
    item = pa.field("item", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    uri = str(tmp_path / "lists.lance")
    table = pa.table({"id": [0, 1], "pages": pa.array([[b"a"], [b"b", b"c"]], pa.list_(item))})
    lance.write_dataset(table, uri, data_storage_version=storage)
    for columns in (None, ["pages"]):
        with pytest.raises(DatasetError, match=r"'pages' .*pages.item"):
            raylance.dataset(uri, columns=columns)
    assert raylance.dataset(uri, columns=["id"]).head(2)["id"].tolist() == [0, 1]
