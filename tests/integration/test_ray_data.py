"""Ray Data both ways: a handle's rows as a dataset of Ray Data, and a dataset of Ray Data as one of Lance."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray.data

import raylance
from raylance.errors import ConfigError

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
        uri, columns=["id"], windows=raylance.Windows(episode="episode", offsets={"id": [0, 1]}, at_ends="drop")
    )
    assert columns_of(windows.to_ray_dataset())["id"].tolist() == [[row, row + 1] for row in range(39)]
    mixed = raylance.mix({"a": (numbers, 0.5), "b": (numbers, 0.5)})
    assert set(columns_of(mixed.to_ray_dataset(epoch=0))["_component"].tolist()) == {0, 1}
    packed = raylance.dataset(uri, pack=raylance.Pack("ids", 16))
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
    assert raylance.from_ray_dataset(ds, uri, rows_per_file=300) == rows
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
        raylance.from_ray_dataset(ds, uri)
    assert raylance.from_ray_dataset(ds.limit(10), uri, overwrite=True) == 10
    assert lance.dataset(uri).version == 2
    again = dataset.to_ray_dataset(override_num_blocks=2)
    copy = str(tmp_path / "copy.lance")
    assert raylance.from_ray_dataset(again.drop_columns(["_rowoffset"]), copy) == rows
    assert lance.dataset(copy).schema.field("vector").type == pa.list_(pa.float32(), 4)


@pytest.mark.promise("P8")
def test_types_that_lance_does_not_store(tmp_path: Path) -> None:
    def make(batch: dict[str, np.ndarray]) -> dict[str, Any]:
        odd = np.empty(len(batch["id"]), dtype=object)
        odd[:] = [np.zeros((each + 1, 2)) for each in range(len(odd))]
        return {"odd": odd}

    with pytest.raises(ConfigError, match="odd"):
        raylance.from_ray_dataset(
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
        raylance.from_ray_dataset(ray.data.range(100, override_num_blocks=4).map_batches(fail), uri)
    with pytest.raises(ValueError, match=r"failed\.lance"):
        lance.dataset(uri)
    assert raylance.from_ray_dataset(ray.data.range(100), uri) == 100, "the next one does not see what is left"
