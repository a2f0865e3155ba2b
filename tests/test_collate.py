"""Owns the checks of Arrow tables becoming NumPy, torch and device batches."""

import datetime
from collections import namedtuple

import numpy as np
import pyarrow as pa
import pytest
import torch

from raylance.collate import Lists, move, on_device, to_numpy, to_torch, torch_device
from raylance.errors import ConfigError, DatasetError

TENSORS = pa.ExtensionArray.from_storage(
    pa.fixed_shape_tensor(pa.uint8(), (2, 2, 3)),
    pa.FixedSizeListArray.from_arrays(pa.array(np.arange(36, dtype=np.uint8)), 12),
)
TABLE = pa.table(
    {
        "int": pa.array([1, 2, 3], pa.int32()),
        "half": pa.array(np.array([1, 2, 3], np.float16)),
        "flag": [True, False, True],
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype=np.float32)), 2),
        "matrix": pa.FixedSizeListArray.from_arrays(
            pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.int16)), 2), 2
        ),
        "image": TENSORS,
        "text": ["a", None, "c"],
        "blob": [b"x", b"yy", b""],
        "tokens": [[1, 2], [], [3]],
        "word": pa.array(["u", "v", "u"]).dictionary_encode(),
        "nested": [[[1], [2, 3]], [], None],
        "names": [["a"], None, ["b", "c"]],
        "maybe": [[1, 2], None, []],
        "pair": [{"a": 1}, {"a": 2}, None],
    }
)


def cut(table: pa.Table) -> pa.Table:
    """The same rows in uneven chunks, with offsets into their buffers."""
    return pa.concat_tables([table.slice(0, 2), table.slice(2, 1)])


@pytest.mark.parametrize("table", [TABLE, cut(TABLE), pa.concat_tables([TABLE, TABLE]).slice(3, 3)])
def test_numpy(table: pa.Table) -> None:
    batch = to_numpy(table, Lists(paddings={"tokens": -1}))
    assert batch["int"].tolist() == [1, 2, 3]
    assert batch["int"].dtype == np.int32
    assert batch["half"].dtype == np.float16
    assert batch["flag"].tolist() == [True, False, True]
    assert batch["vector"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert batch["matrix"].shape == (3, 2, 2)
    assert batch["matrix"][2].tolist() == [[8, 9], [10, 11]]
    np.testing.assert_array_equal(batch["image"], np.arange(36).reshape(3, 2, 2, 3))
    assert batch["text"].tolist() == ["a", None, "c"]
    assert batch["blob"].tolist() == [b"x", b"yy", b""]
    assert batch["tokens"].tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert batch["word"].tolist() == ["u", "v", "u"]
    assert batch["pair"].tolist() == [{"a": 1}, {"a": 2}, None]


def test_torch() -> None:
    batch = to_torch(TABLE, dtypes={"int": torch.float64}, images=frozenset({"image"}))
    assert batch["int"].dtype == torch.float64
    assert batch["half"].dtype == torch.float16
    assert batch["flag"].dtype == torch.bool
    assert batch["image"].shape == (3, 3, 2, 2)
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert batch["image"][1, 2, 0, 1] == 17
    assert batch["text"] == ["a", None, "c"]
    assert batch["nested"] == [[[1], [2, 3]], [], None]
    assert batch["names"] == [["a"], None, ["b", "c"]]
    assert batch["maybe"][0].tolist() == [1, 2]
    assert batch["maybe"][1] is None
    assert [tokens.tolist() for tokens in batch["tokens"]] == [[1, 2], [], [3]]
    assert (
        to_torch(TABLE.select(["vector"]), dtypes={"vector": torch.float16}, images=frozenset())["vector"].dtype
        == torch.float16
    )


def test_numbers_are_views() -> None:
    for name, address in (
        ("vector", TABLE["vector"].chunk(0).values.buffers()[1].address),
        ("image", TENSORS.storage.values.buffers()[1].address),
    ):
        assert to_numpy(TABLE)[name].ctypes.data == address
        batch = to_torch(TABLE.select([name]), dtypes={}, images=frozenset({"image"}))
        assert batch[name].data_ptr() == address


def test_empty_tables_keep_shapes_and_dtypes() -> None:
    for table in (TABLE.slice(0, 0), TABLE.schema.empty_table()):
        batch = to_numpy(table, Lists(paddings={"tokens": 0}))
        assert batch["vector"].shape == (0, 2)
        assert batch["image"].shape == (0, 2, 2, 3)
        assert batch["int"].dtype == np.int32
        assert batch["tokens"].shape == (0, 0)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None]), "'c' has 1 nulls.*IS NOT NULL"),
        (pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)), "nulls"),
        (pa.array([[1.0, None]], pa.list_(pa.float32(), 2)), "nulls"),
        (pa.array([[1, None], [2]]), "'c' has 1 nulls"),
        (pa.array([datetime.datetime(2020, 1, 1)]), "timestamp.*torch has no type"),
    ],
)
def test_what_has_no_place_in_a_tensor_is_refused(column: pa.Array, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        to_torch(pa.table({"c": column}), dtypes={}, images=frozenset())


def test_only_lists_of_numbers_are_padded() -> None:
    with pytest.raises(DatasetError, match="lists of numbers"):
        to_numpy(pa.table({"c": [["a"], ["b", "c"]]}), Lists(paddings={"c": 0}))


Pair = namedtuple("Pair", "left right")


def test_moving_reaches_every_tensor() -> None:
    batch = {"a": torch.ones(2), "b": [torch.ones(1), "text"], "c": Pair(torch.ones(1), 3), "d": (torch.ones(1),)}
    moved = move(batch, lambda tensor: tensor + 1)
    assert moved["a"].tolist() == [2, 2]
    assert moved["b"][0].tolist() == [2]
    assert moved["b"][1] == "text"
    assert moved["c"].left.tolist() == [2]
    assert isinstance(moved["c"], Pair)
    assert moved["d"][0].tolist() == [2]


def test_devices() -> None:
    assert torch_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="device='gpu' is unknown"):
        torch_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA here"):
            torch_device("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_batches_arrive_whole_and_in_order() -> None:
    batches = [({"x": torch.full((1000, 1000), float(step))}, step) for step in range(20)]
    for step, (batch, tag) in enumerate(on_device(iter(batches), torch.device("cuda"), pin_memory=False)):
        assert tag == step
        assert batch["x"].is_cuda
        assert batch["x"].min() == batch["x"].max() == step
