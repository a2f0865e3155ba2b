"""Ray Data both ways: a handle's rows as a dataset of Ray Data, and a dataset of Ray Data as one of Lance."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray.data
import torch
from ray.data.collate_fn import ArrowBatchCollateFn, NumpyBatchCollateFn, PandasBatchCollateFn

import raylance
from raylance.errors import ConfigError, DatasetError

pytestmark = pytest.mark.usefixtures("ray_session")
AUGMENTED = raylance.Image("image", size=16, augment=raylance.RandomResizedCrop(), hflip=0.5)


@pytest.fixture(autouse=True)
def _in_order() -> Iterator[None]:
    context = ray.data.DataContext.get_current()
    before = context.enable_progress_bars, context.execution_options.preserve_order
    context.enable_progress_bars, context.execution_options.preserve_order = False, True
    yield
    context.enable_progress_bars, context.execution_options.preserve_order = before


def columns_of(ds: Any) -> dict[str, np.ndarray]:
    batches = list(ds.iter_batches(batch_size=None, batch_format="numpy"))
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert set(found) >= set(wanted)
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.promise("P1", "P4")
def test_rows_come_in_storage_order_or_in_that_of_an_epoch(images_uri: str) -> None:
    dataset = raylance.dataset(images_uri, filter="label < 7", decode=AUGMENTED, seed=5)
    stored = dataset.to_ray_dataset(override_num_blocks=3)
    assert stored.count() == len(dataset)
    assert_same(columns_of(stored), dataset[:])
    shuffled = columns_of(dataset.to_ray_dataset(epoch=2, global_batch_size=len(dataset), override_num_blocks=2))
    with dataset.loader(runtime="threads") as loader:
        loader.set_epoch(2)
        [batch] = loader.iter_batches(global_batch_size=len(dataset), with_row_offset=True)
        loader.set_epoch(2)
        steps = loader.iter_batches(global_batch_size=1, with_row_offset=True)
        positions = [row for step in steps for row in step["_rowoffset"].tolist()]
    # A step is arranged by lane, and the epoch by position: the same rows, augmented alike.
    ours, theirs = np.argsort(shuffled["_rowoffset"]), np.argsort(batch["_rowoffset"])
    assert_same(
        {name: values[ours] for name, values in shuffled.items()},
        {name: values[theirs] for name, values in batch.items()},
    )
    assert shuffled["_rowoffset"].tolist() != sorted(shuffled["_rowoffset"].tolist())
    one_lane = columns_of(dataset.to_ray_dataset(epoch=2, global_batch_size=1).select_columns(["_rowoffset"]))
    assert one_lane["_rowoffset"].tolist() == positions


def test_mixtures_windows_packed_and_masked_rows(images_uri: str, tmp_path: Path) -> None:
    uri = str(tmp_path / "rows.lance")
    ids = pa.array([list(range(each % 9)) for each in range(40)], pa.list_(pa.int32()))
    raw = pa.array([None if each == 3 else bytes([each]) for each in range(40)], pa.binary())
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(120, dtype=np.float32)), 3)
    lance.write_dataset(
        pa.table({"id": range(40), "episode": [0] * 40, "ids": ids, "raw": raw, "vector": vectors}), uri
    )
    numbers = raylance.dataset(uri, columns=["id", "vector"], order="sequential")
    found = columns_of(numbers.to_ray_dataset(override_num_blocks=2))
    assert found["vector"].shape == (40, 3)
    assert_same(found, numbers[:])
    windows = raylance.dataset(
        uri, columns=["id"], samples=raylance.Windows(episode="episode", offsets={"id": [0, 1]}, at_ends="drop")
    )
    assert columns_of(windows.to_ray_dataset())["id"].tolist() == [[row, row + 1] for row in range(39)]
    mixed = raylance.mix({"a": (numbers, 0.5), "b": (numbers, 0.5)})
    assert set(columns_of(mixed.to_ray_dataset(epoch=0))["_component"].tolist()) == {0, 1}
    packed = raylance.dataset(uri, samples=raylance.Pack("ids", 16))
    assert_same(columns_of(packed.to_ray_dataset()), packed[:])
    [second] = packed.iter_batches(epoch=1, global_batch_size=len(packed), with_row_offset=True)
    by_number = {name: values[np.argsort(second["_rowoffset"])] for name, values in second.items()}
    again = columns_of(packed.to_ray_dataset(epoch=1))
    assert_same({name: values[np.argsort(again["_rowoffset"])] for name, values in again.items()}, by_number)
    masked = raylance.dataset(images_uri, filter="id < 9", decode=AUGMENTED, on_bad_row="mask")
    assert "_valid" in columns_of(masked.to_ray_dataset())


@pytest.mark.promise("P8")
def test_what_is_refused(images_uri: str) -> None:
    with pytest.raises(ConfigError, match="epoch=-1"):
        raylance.dataset(images_uri).to_ray_dataset(epoch=-1)


def test_a_dataset_of_ray_data_is_written_and_trained_on(tmp_path: Path) -> None:
    uri, rows = str(tmp_path / "made.lance"), 1000

    def make(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        ids = batch["id"]
        tokens = np.empty(len(ids), dtype=object)
        tokens[:] = [np.arange(each % 5 + 1, dtype=np.int32) for each in ids]
        return {
            "id": ids,
            "image": np.broadcast_to(ids[:, None, None], (len(ids), 2, 3)).astype(np.uint8),
            "vector": np.broadcast_to(ids[:, None], (len(ids), 4)).astype(np.float32),
            "tokens": tokens,
            "text": [f"row {each}" for each in ids],
        }

    ds = ray.data.range(rows, override_num_blocks=4).map_batches(make)
    assert raylance.writing.from_ray_dataset(ds, uri, rows_per_file=300) == rows
    made = lance.dataset(uri)
    assert {fragment.count_rows() for fragment in made.get_fragments()} <= {100, 200, 250, 300}
    assert made.schema.field("vector").type == pa.list_(pa.float32(), 4)
    dataset = raylance.dataset(uri)
    batch = {
        name: values[np.argsort(values_id)] for values_id in [dataset[:]["id"]] for name, values in dataset[:].items()
    }
    assert batch["id"].tolist() == list(range(rows))
    assert (batch["image"] == (np.arange(rows) % 256)[:, None, None]).all()
    assert (batch["vector"] == np.arange(rows)[:, None]).all()
    assert [len(each) for each in batch["tokens"]] == [each % 5 + 1 for each in range(rows)]
    assert batch["text"][17] == "row 17"
    with pytest.raises(ConfigError, match=r"made\.lance"):
        raylance.writing.from_ray_dataset(ds, uri)
    assert raylance.writing.from_ray_dataset(ds.limit(10), uri, overwrite=True) == 10
    assert lance.dataset(uri).version == 2
    again = dataset.to_ray_dataset(override_num_blocks=2)
    copy = str(tmp_path / "copy.lance")
    assert raylance.writing.from_ray_dataset(again.drop_columns(["_rowoffset"]), copy) == rows
    assert lance.dataset(copy).schema.field("vector").type == pa.list_(pa.float32(), 4)


@pytest.mark.promise("P8")
def test_types_that_lance_does_not_store(tmp_path: Path) -> None:
    def make(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        odd = np.empty(len(batch["id"]), dtype=object)
        odd[:] = [np.zeros((each + 1, 2)) for each in range(len(odd))]
        return {"odd": odd}

    with pytest.raises(ConfigError, match="odd"):
        raylance.writing.from_ray_dataset(
            ray.data.range(4, override_num_blocks=1).map_batches(make), str(tmp_path / "odd.lance")
        )
    assert not (tmp_path / "odd.lance").exists()


def test_a_write_that_fails_leaves_no_dataset(tmp_path: Path) -> None:
    uri = str(tmp_path / "failed.lance")

    def fail(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        if 90 in batch["id"]:
            raise ValueError("no row 90")
        return batch

    with pytest.raises(ray.exceptions.RayTaskError, match="no row 90"):
        raylance.writing.from_ray_dataset(ray.data.range(100, override_num_blocks=4).map_batches(fail), uri)
    with pytest.raises(ValueError, match=r"failed\.lance"):
        lance.dataset(uri)
    assert raylance.writing.from_ray_dataset(ray.data.range(100), uri) == 100, "the next one does not see what is left"


def blocks(*tables: pa.Table) -> Any:
    """A dataset of Ray Data that makes these blocks when it is executed, so that nobody knows their schemas before."""
    return ray.data.range(len(tables), override_num_blocks=len(tables)).map_batches(
        lambda table: tables[table["id"][0].as_py()], batch_format="pyarrow"
    )


def column(*values: Any, kind: pa.DataType | None = None) -> pa.Table:
    return pa.table({"a": pa.array(values, kind)})


@pytest.mark.promise("P1", "P8")
@pytest.mark.parametrize(
    ("first", "later", "kind"),
    [
        (column(1), pa.table({"a": [1], "b": [1]}), None),
        (pa.table({"a": [1], "b": [1]}), column(1), None),
        (column(0.5, kind=pa.float32()), column(1 / 3), pa.float64()),
        (column(0.5), column(2**60 + 1), None),
        (column(1), column("one"), None),
        (column(None), column("one"), pa.string()),
        (column([1], kind=pa.list_(pa.int64(), 1)), column([1, 2], kind=pa.list_(pa.int64(), 2)), pa.list_(pa.int64())),
    ],
    ids=[
        "more columns",
        "fewer columns",
        "float64 later",
        "a large integer later",
        "text later",
        "null first",
        "lengths",
    ],
)
def test_a_later_block_of_another_schema_is_refused(
    tmp_path: Path, first: pa.Table, later: pa.Table, kind: pa.DataType | None
) -> None:
    """No column may vanish, and no value change. A schema that holds all of them may be given."""
    uri = str(tmp_path / "made.lance")
    odd = "b" if "b" in first.column_names + later.column_names else "a"
    with pytest.raises(ConfigError, match=f"'{odd}'"):
        raylance.writing.from_ray_dataset(blocks(first, first, later), uri)
    with pytest.raises(ValueError, match=r"made\.lance"):
        lance.dataset(uri)
    if kind is not None:
        assert raylance.writing.from_ray_dataset(blocks(first, later), uri, schema=pa.schema([("a", kind)])) == 2
        assert lance.dataset(uri).to_table()["a"].to_pylist() == (first["a"].to_pylist() + later["a"].to_pylist())


def test_blocks_of_narrower_types_and_without_rows_are_written(tmp_path: Path) -> None:
    uri = str(tmp_path / "made.lance")
    narrow = column(3, None, kind=pa.int32())
    found = raylance.writing.from_ray_dataset(blocks(column(1), narrow, column(None), column(5)[:0], pa.table({})), uri)
    assert found == 4
    made = lance.dataset(uri).to_table()
    assert made.schema.field("a").type == pa.int64()
    assert made["a"].to_pylist() == [1, 3, None, None]
    filtered = ray.data.from_arrow([column(each, each) for each in range(4)]).filter(lambda row: row["a"] > 2)
    assert raylance.writing.from_ray_dataset(filtered, uri, overwrite=True) == 2


@pytest.mark.promise("P8")
def test_arguments_that_are_refused(tmp_path: Path, images_uri: str) -> None:
    uri, rows, dataset = str(tmp_path / "made.lance"), ray.data.range(3), raylance.dataset(images_uri)
    calls: dict[str, Any] = {
        "None": lambda: raylance.writing.from_ray_dataset(None, uri),
        "schema=3": lambda: raylance.writing.from_ray_dataset(rows, uri, schema=3),  # type: ignore[arg-type]
        "concurency": lambda: raylance.writing.from_ray_dataset(rows, uri, concurency=1),
        "epoc": lambda: dataset.to_ray_dataset(epoc=1),
        "foo": lambda: dataset.to_ray_dataset(foo=1),
    }
    for named, call in calls.items():
        with pytest.raises(ConfigError, match=named):
            call()
    assert dataset.to_ray_dataset(num_cpus=1, concurrency=2).count() == len(dataset)


def test_tensors_of_all_kinds_come_as_arrays_and_go_back(tmp_path: Path) -> None:
    """Padded windows, flags, permuted and nested tensors, in each format of Ray's batches."""
    uri, copy = str(tmp_path / "rows.lance"), str(tmp_path / "copy.lance")
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    permuted = np.empty((4, 3, 2), np.float32).transpose(0, 2, 1)
    permuted[:] = values
    lists = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), 3)
    columns = {
        "plain": pa.FixedShapeTensorArray.from_numpy_ndarray(values),
        "permuted": pa.FixedShapeTensorArray.from_numpy_ndarray(permuted),
        "nested": pa.FixedSizeListArray.from_arrays(lists, 2),
        "flags": pa.array([[True, False], [False, True]] * 2, pa.list_(pa.bool_(), 2)),
        "number": pa.array(range(4)),
    }
    lance.write_dataset(pa.table(columns), uri)
    dataset = raylance.dataset(
        uri, samples=raylance.Windows(episode="number", offsets={"number": [0, 1]}), order="sequential"
    )
    wanted = dataset[:]
    assert wanted["number_is_pad"].tolist() == [[False, True]] * 4
    assert_same(columns_of(dataset.to_ray_dataset(override_num_blocks=2)), wanted)
    rows = dataset.to_ray_dataset().take_all()
    assert_same({name: np.stack([row[name] for row in rows]) for name in wanted}, wanted)
    [batch] = dataset.to_ray_dataset().iter_torch_batches(batch_size=4)
    assert_same({name: tensor.numpy() for name, tensor in batch.items()}, wanted)
    assert raylance.writing.from_ray_dataset(dataset.to_ray_dataset().drop_columns(["_rowoffset"]), copy) == 4
    again = raylance.dataset(copy)[:]
    assert_same(
        {name: again[name] for name in wanted if name != "_rowoffset"},
        {name: values for name, values in wanted.items() if name != "_rowoffset"},
    )


@pytest.mark.promise("P8")
def test_nulls_among_tensors_are_named(tmp_path: Path) -> None:
    uri = str(tmp_path / "rows.lance")
    lance.write_dataset(pa.table({"f": pa.array([[1, 2], None], pa.list_(pa.int16(), 2)), "id": [0, 1]}), uri)
    with pytest.raises(DatasetError, match="'f' has 1 nulls"):
        raylance.dataset(uri).to_ray_dataset().take_all()
    filtered = raylance.dataset(uri, filter="f IS NOT NULL").to_ray_dataset()
    assert [row["f"].tolist() for row in filtered.take_all()] == [[1, 2]]


class FromArrow(ArrowBatchCollateFn):
    def __call__(self, batch: pa.Table) -> Any:
        assert isinstance(batch, pa.Table)
        return {"id": torch.from_numpy(batch["id"].to_numpy().copy()), "names": batch.column_names}


class FromNumpy(NumpyBatchCollateFn):
    def __call__(self, batch: dict[str, np.ndarray]) -> Any:
        assert all(isinstance(each, np.ndarray) for each in batch.values())
        return {"id": torch.from_numpy(batch["id"]), "names": list(batch)}


class FromPandas(PandasBatchCollateFn):
    def __call__(self, batch: Any) -> Any:
        return {"id": torch.from_numpy(batch.set_index("text").loc[:, "id"].to_numpy().copy()), "names": list(batch)}


@pytest.mark.parametrize("kind", [FromArrow, FromNumpy, FromPandas])
def test_ray_datas_collate_functions_get_what_their_class_says(tmp_path: Path, kind: type[Any]) -> None:
    """As in Ray Data, which is given the same objects."""
    uri = str(tmp_path / "rows.lance")
    table = pa.table({"id": np.arange(40), "text": [f"row {number}" for number in range(40)]})
    lance.write_dataset(table, uri)
    wanted = ray.data.from_arrow(table).iter_torch_batches(batch_size=8, collate_fn=kind(), device="cpu")
    with raylance.dataset(uri, order="sequential").loader(runtime="threads", record=False) as loader:
        found = list(loader.iter_torch_batches(global_batch_size=8, collate_fn=kind(), device="cpu"))
        assert loader.stats()["collate_fn_s"] > 0
        with pytest.raises(ConfigError, match="dtypes"):
            loader.iter_torch_batches(global_batch_size=8, collate_fn=kind(), dtypes=torch.int32)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours["id"], theirs["id"])
        assert ours["names"] == theirs["names"] == ["id", "text"]


def test_columns_that_the_device_decodes_are_not_arrow(images_uri: str) -> None:
    data = raylance.dataset(images_uri, decode=raylance.images.DeviceImage("image", size=8))
    with data.loader(runtime="threads", record=False) as loader, pytest.raises(ConfigError, match="device"):
        loader.iter_torch_batches(global_batch_size=8, collate_fn=FromArrow())
