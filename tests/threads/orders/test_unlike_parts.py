"""Mixtures of datasets that have other columns: constants in place of what one lacks, and steps of one dataset each."""

import io
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest

import raylance
from raylance.audit import reopen
from raylance.errors import ConfigError

STEP = 8


def encoded(shade: int) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (20, 12), (shade, shade, shade)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def parts(write_dataset: Callable[..., str]) -> dict[str, tuple[raylance.Dataset, float]]:
    """Images with actions, and tokens without images."""
    actions = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(7 * 96), pa.float32()), 7)
    robots = pa.table({"image": [encoded(shade) for shade in range(96)], "action": actions})
    texts = pa.table({"tokens": pa.array([[number] * (number % 5) for number in range(64)], pa.list_(pa.int64()))})
    image, none = raylance.Image("image", size=8), pa.scalar([], pa.list_(pa.int64()))
    of_robots: list[Any] = [image, "action", {"tokens": none, "has_action": True}]
    lacking = {"image": encoded(200), "action": np.full(7, -1, np.float32), "has_action": False}
    of_texts: list[Any] = ["tokens", lacking, image]
    return {
        "robots": (raylance.dataset(write_dataset(robots), columns=of_robots), 3),
        "texts": (raylance.dataset(write_dataset(texts), columns=of_texts), 1),
    }


def test_each_step_is_of_one_dataset_with_constants_for_what_it_lacks(parts: Any) -> None:
    mixed = raylance.mix(parts, turn_rows=STEP)
    with mixed.loader() as loader:
        found = list(loader.iter_torch_batches(global_batch_size=STEP))
        state = loader.state_dict()
    assert len(found) == 16
    for batch in found:
        has_action = batch["has_action"].tolist()
        assert has_action in ([True] * STEP, [False] * STEP)
        if has_action[0]:
            shades = batch["image"][:, 0, 0, 0].long()
            assert batch["action"].tolist() == [[float(7 * shade + each) for each in range(7)] for shade in shades]
            assert [len(tokens) for tokens in batch["tokens"]] == [0] * STEP
        else:
            assert (batch["image"] == 200).all()
            assert (batch["action"] == -1).all()
    assert sum(batch["has_action"].sum().item() for batch in found) == 96
    with reopen(state).loader() as loader:
        again = list(loader.iter_torch_batches(global_batch_size=STEP))
    assert [batch["has_action"].tolist() for batch in again] == [batch["has_action"].tolist() for batch in found]
    assert all((one["action"] == other["action"]).all() for one, other in zip(again, found, strict=True))


def test_a_restart_may_change_the_turns(parts: Any) -> None:
    with raylance.mix(parts, turn_rows=STEP).loader() as loader:
        before = list(itertools.islice(loader.iter_batches(global_batch_size=STEP), 3))
        state = loader.state_dict()
    with raylance.mix(parts).loader() as loader:
        loader.load_state_dict(state)
        after = list(itertools.islice(loader.iter_batches(global_batch_size=STEP), 10))
    assert {int(batch["has_action"].sum()) for batch in before} <= {0, STEP}
    assert {int(batch["has_action"].sum()) for batch in after} == {6}


@pytest.mark.parametrize(
    "value",
    [object(), np.array([object(), 1]), np.zeros((3, 224, 224)), None, 2**63, np.array([["a", "b"]]), [None, 1, "a"]],
)
def test_a_value_that_no_column_holds_is_refused(write_dataset: Callable[..., str], value: Any) -> None:
    with pytest.raises(ConfigError, match="extra"):
        raylance.dataset(write_dataset(pa.table({"id": [1, 2]})), columns=["id", {"extra": value}])


@pytest.mark.parametrize("name", ["id", "_rowoffset", "_valid", "_component", "", 3])
def test_a_constant_has_a_name_of_its_own(write_dataset: Callable[..., str], name: Any) -> None:
    with pytest.raises(ConfigError, match=repr(name)):
        raylance.dataset(write_dataset(pa.table({"id": [1, 2]})), columns=["id", {name: 3}])


def test_a_dataset_of_constants_alone_is_refused(write_dataset: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="id"):
        raylance.dataset(write_dataset(pa.table({"id": [1, 2]})), columns=[{"x": 3}])


def test_a_stored_column_without_nulls_is_mixed_with_a_constant(write_dataset: Callable[..., str]) -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("x", pa.int64(), nullable=False)])
    whole = raylance.dataset(write_dataset(pa.table({"id": [1, 2], "x": [5, 6]}, schema=schema)))
    other = raylance.dataset(write_dataset(pa.table({"id": [3, 4]})), columns=[{"x": 7}, "id"])
    with raylance.mix({"a": (whole, 1), "b": (other, 1)}).loader() as loader:
        (batch,) = loader.iter_batches(global_batch_size=4)
    assert sorted(zip(batch["id"].tolist(), batch["x"].tolist(), strict=True)) == [(1, 5), (2, 6), (3, 7), (4, 7)]


def test_a_dataset_that_would_have_no_turn_is_refused(parts: Any) -> None:
    for arguments in ({"turn_rows": 200}, {"turn_rows": 8, "stop": 16}):
        with pytest.raises(ConfigError, match="texts"):
            raylance.mix(parts, **arguments)


@pytest.mark.parametrize(
    "value", [3, 2.5, True, "text", b"\x00\xff", np.float32(1.5), np.array(7), np.arange(6).reshape(2, 3)]
)
def test_constants_come_as_they_are(write_dataset: Callable[..., str], value: Any) -> None:
    data = raylance.dataset(write_dataset(pa.table({"id": [1, 2, 3]})), columns=["id", {"extra": value}])
    found = data.take([2, 0])
    assert found["id"].tolist() == [3, 1]
    assert np.array_equal(np.array(found["extra"]), np.array([value, value]))
    kind = np.asarray(value).dtype
    assert kind.kind in "SU" or found["extra"].dtype == kind
