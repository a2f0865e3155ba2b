"""What iterators return and take: passes, positions, handles as values, arguments that are refused."""

import datetime
import fractions
import functools
import itertools
import logging
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.utils.data

import raylance
from raylance.batches import device
from raylance.errors import ConfigError, DatasetError
from raylance.samples.pack_tokens import PackTokens
from raylance.torch_data import IterableDataset, MapDataset
from tests.helpers.scripts import FORKED


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    rows = np.arange(103)
    table = pa.table(
        {
            "id": rows,
            "x": rows.astype(np.float64),
            "pair": [[int(row), 1] for row in rows],
            "tokens": pa.array([list(range(row % 4)) for row in rows], pa.list_(pa.int64())),
            "name": [f"row {row}" for row in rows],
        }
    )
    return write_dataset(table)


def open_ids(uri: str, **changes: Any) -> raylance.Dataset:
    return raylance.dataset(uri, **({"columns": ["id"], "seed": 3} | changes))


def ids_of(batches: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def take(batches: Any, count: int) -> list[list[int]]:
    return ids_of(itertools.islice(batches, count))


def test_a_consumer_that_stops_by_count_gets_every_epoch(uri: str) -> None:
    """The last batch of an epoch moves the loader to the next one, whatever stops the pass."""
    with open_ids(uri).loader() as loader, open_ids(uri).loader() as whole:
        wanted = [ids_of(whole.iter_batches(global_batch_size=10)) for _ in range(3)]
        assert len({str(epoch) for epoch in wanted}) == 3
        assert take(loader.iter_batches(global_batch_size=10), 10) == wanted[0]
        assert (loader.epoch, loader.state_dict()["position"]) == (1, 0)
        assert take(loader.iter_batches(global_batch_size=10), 10) == wanted[1]
        assert ids_of(loader.iter_batches(global_batch_size=10)) == wanted[2]
        assert loader.epoch == 3
        assert loader.stats()["epoch_certificate"]["epoch"] == 2


def test_an_iterator_is_kept_for_every_epoch(uri: str) -> None:
    with open_ids(uri).loader() as loader, open_ids(uri).loader() as other:
        batches = loader.iter_batches(global_batch_size=10)
        assert len(batches) == 10
        assert "numpy batches" in repr(batches)
        assert "10 steps an epoch" in repr(batches)
        passes = [ids_of(batches) for _ in range(3)]
        assert passes == [ids_of(other.iter_batches(global_batch_size=10)) for _ in range(3)]
        assert ids_of([next(batches)]) == [ids_of(other.iter_batches(global_batch_size=10))[0]], "next() works, too"


def test_bound_batches_carry_the_state(uri: str) -> None:
    with open_ids(uri).loader() as loader, open_ids(uri).loader() as other:
        bound = loader.batches(global_batch_size=10)
        first = take(bound, 4)
        state = bound.state_dict()
        assert (state["position"], bound.epoch) == (40, 0)
        rest = ids_of(bound)
        again = other.batches(global_batch_size=10)
        again.load_state_dict(state)
        assert ids_of(again) == rest
        again.set_epoch(0)
        assert ids_of(again) == first + rest
        assert len(again) == 10


def test_an_empty_pass_is_logged(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    """95 of 103 rows are consumed: under "drop", 8 rows make no step of 20."""
    with open_ids(uri, remainder="ragged").loader() as loader:
        take(loader.iter_batches(global_batch_size=19), 5)
        with caplog.at_level(logging.WARNING, logger="raylance"):
            assert ids_of(loader.iter_batches(global_batch_size=20, drop_last=True)) == []
        assert "no step is left of epoch 0: 95 of 103 rows" in caplog.text
        assert loader.epoch == 1
        assert len(ids_of(loader.iter_batches(global_batch_size=20, drop_last=True))) == 5


def test_a_handle_is_a_value(uri: str) -> None:
    """Iterating on it begins at the beginning, resolves nothing, and leaves nothing behind."""
    handle, fresh = open_ids(uri), open_ids(uri)
    with handle, fresh.loader() as loader:
        batches = handle.iter_batches(batch_size=7)
        looked = take(batches, 3)
        assert take(batches, 3) == looked, "a cell that is run again shows the same"
        assert ids_of(handle.iter_batches(batch_size=7))[:3] == looked
        assert len(ids_of(batches)) == len(batches) == 14
        epoch_1 = ids_of(handle.iter_batches(batch_size=7, epoch=1))
        assert epoch_1 != ids_of(batches)
        # Training on it is as if nobody had looked: "auto" is resolved by the training's own batch size.
        with handle.loader() as trained:
            assert ids_of(trained.iter_batches(batch_size=20)) == ids_of(loader.iter_batches(batch_size=20))
            state = trained.state_dict()
        loader.load_state_dict(state)
        assert ids_of(loader.iter_batches(batch_size=7)) != epoch_1, "lanes are those of the batch of 20"
        assert not hasattr(handle, "state_dict")
        for position in (lambda: handle.state_dict(), lambda: handle.epoch, batches.state_dict):
            with pytest.raises(ConfigError, match=r"handle.*loader\(\)"):
                position()


def test_two_passes_over_a_handle_at_once(uri: str) -> None:
    with open_ids(uri) as handle:
        batches = handle.iter_batches(batch_size=10)
        left, right = iter(batches), iter(batches)
        found = ids_of(itertools.chain(*zip(left, right, strict=True)))
        assert found[::2] == found[1::2] == ids_of(batches)


def test_a_handle_gives_rows_by_offset_and_by_place(images_uri: str, write_dataset: Callable[..., str]) -> None:
    handle = raylance.dataset(images_uri, filter="label = 3", decode=raylance.Image("image", size=(8, 6)))
    with handle.loader() as loader:
        batch = next(iter(loader.iter_batches(batch_size=32, with_row_offset=True)))
    found = handle.take(batch["_rowoffset"])
    for name in ("id", "label", "_rowoffset", "image"):
        np.testing.assert_array_equal(found[name], batch[name])
    assert handle.take([9, 2, 9])["id"].tolist() == [9, 2, 9], "any row of the version, duplicates too"
    assert handle[0]["id"] == 3
    assert handle[[-1, 1]]["id"].tolist() == [997, 10]
    assert handle[2:4]["image"].shape == (2, 8, 6, 3)
    frame = handle.to_pandas(4)
    assert frame["id"].tolist() == [3, 10, 17, 24]
    assert frame["image"][0].shape == (8, 6, 3)
    with pytest.raises(IndexError, match="row 5000 lies outside"):
        handle[5000]
    with pytest.raises(DatasetError, match="cannot give these rows"):
        handle.take([10**6])
    packed = raylance.dataset(write_dataset(pa.table({"t": [[1, 2, 3]] * 4})), samples=PackTokens("t", 4))
    assert packed.take([2, 0])["input_ids"].tolist() == [[3, 1, 2, 3], [1, 2, 3, 1]]
    for sequence in (3, -1):
        with pytest.raises(DatasetError, match="numbered from 0 to 2"):
            packed.take([sequence])
    with pytest.raises(ConfigError, match="give row offsets"):
        handle.take(["a"])
    other = write_dataset(pa.table({"id": pa.array(np.arange(5) + 100), "label": np.zeros(5, np.int64)}))
    parts = {"a": (raylance.dataset(images_uri, columns=["id"]), 1), "b": (raylance.dataset(other, columns=["id"]), 1)}
    mixture = raylance.mix(parts)
    assert mixture.take([4, 0], component="b")["id"].tolist() == [104, 100]
    assert mixture.take([4], component=np.int64(0))["id"].tolist() == [4]
    with pytest.raises(ConfigError, match="'a', 'b'"):
        mixture.take([4])


def test_lists_of_one_length_are_tensors_and_others_are_named(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    handle = raylance.dataset(uri, columns=["pair", "tokens"], order="sequential")
    with handle, caplog.at_level(logging.WARNING, logger="raylance"):
        batch = next(iter(handle.iter_torch_batches(batch_size=8)))
        assert batch["pair"].tolist() == [[row, 1] for row in range(8)]
        assert [tokens.tolist() for tokens in batch["tokens"]] == [list(range(row % 4)) for row in range(8)]
        assert "tokens" in caplog.text
        assert "pad_lists={'tokens': 0}" in caplog.text
        assert "pair" not in caplog.text
        padded = next(iter(handle.iter_torch_batches(batch_size=8, pad_lists={"tokens": -1, "pair": None})))
        assert padded["tokens"].shape == (8, 3)
        assert [pair.tolist() for pair in padded["pair"]] == [[row, 1] for row in range(8)]


def test_a_list_of_another_length_than_those_looked_at_is_an_error(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"pair": [[1, 2]] * 50 + [[1, 2, 3]] + [[1, 2]] * 49}))
    with raylance.dataset(uri, order="sequential") as handle:
        with pytest.raises(DatasetError, match="3 numbers.* 2.*pad_lists"):
            list(handle.iter_torch_batches(batch_size=10))
        # Where rows are looked at, there is no pad_lists, and lists stay lists.
        assert [len(pair) for pair in handle[45:55]["pair"]] == [2] * 5 + [3] + [2] * 4
        assert handle.head(3)["pair"].tolist() == [[1, 2]] * 3
        assert [len(MapDataset(handle)[row]["pair"]) for row in (49, 50)] == [2, 3]
        shapes = [batch["pair"].shape for batch in handle.iter_torch_batches(batch_size=10, pad_lists={"pair": 0})]
        assert shapes.count((10, 3)) == 1


MATRICES = np.arange(20 * 6, dtype=np.float32).reshape(20, 2, 3)


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.list_(pa.float32())),
        pa.large_list(pa.list_(pa.float32(), 3)),
        pa.list_(pa.list_(pa.list_(pa.float32()))),
        pa.list_(pa.list_(pa.list_(pa.float32(), 1))),
    ],
    ids=str,
)
def test_lists_of_lists_of_one_shape_are_one_array(write_dataset: Callable[..., str], kind: pa.DataType) -> None:
    values = MATRICES[..., None] if "list" in str(kind.value_type.value_type) else MATRICES
    uri = write_dataset(pa.table({"m": pa.array(values.tolist(), kind), "id": range(20)}))
    with raylance.dataset(uri, columns=["m"], order="sequential", remainder="ragged") as handle:
        found = list(handle.iter_torch_batches(batch_size=8, dtypes=torch.float64))
        assert {batch["m"].dtype for batch in found} == {torch.float64}
        assert np.array_equal(np.concatenate([batch["m"].numpy() for batch in found]), values)
        assert np.array_equal(next(iter(handle.iter_batches(batch_size=20)))["m"], values)
        [given] = handle.iter_batches(batch_size=20, batch_format="pyarrow")
        assert given["m"].to_pylist() == values.tolist()
        assert np.array_equal(handle[3:9]["m"], values[3:9])
        [kept] = handle.iter_torch_batches(batch_size=20, pad_lists={"m": None})
        assert [np.asarray(row).tolist() for row in kept["m"]] == values.tolist()


def test_lists_of_lists_of_other_shapes_are_named(
    write_dataset: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """As lists of numbers are: if they are uneven from the first, by a warning; if later, by an error."""
    boxes = [[[float(row)] * 4] * (row % 3) for row in range(20)]
    late = [[[1, 2], [3, 4]]] * 50 + [[[1, 2], [3]]] + [[[1, 2], [3, 4]]] * 49
    uneven = write_dataset(pa.table({"boxes": pa.array(boxes, pa.list_(pa.list_(pa.float32())))}))
    with raylance.dataset(uneven, order="sequential") as handle, caplog.at_level(logging.WARNING, logger="raylance"):
        [batch] = handle.iter_torch_batches(batch_size=20)
        assert batch["boxes"] == boxes
        assert caplog.text.count("boxes") == 2, "the column, and how to keep its lists in silence"
        with pytest.raises(ConfigError, match="'boxes'.*lists of lists"):
            handle.iter_torch_batches(batch_size=20, pad_lists={"boxes": 0})
        caplog.clear()
        list(handle.iter_torch_batches(batch_size=20, pad_lists={"boxes": None}))
        assert "boxes" not in caplog.text
    later = write_dataset(pa.table({"m": late}))
    with raylance.dataset(later, order="sequential") as handle:
        with pytest.raises(DatasetError, match=r"'m'.* 1 .*\(2, 2\).*pad_lists"):
            list(handle.iter_torch_batches(batch_size=10))
        rows = [row for batch in handle.iter_torch_batches(batch_size=10, pad_lists={"m": None}) for row in batch["m"]]
        assert rows == late
        assert MapDataset(handle)[50]["m"] == late[50]


@pytest.fixture(scope="module")
def lists_uri(write_dataset: Callable[..., str]) -> str:
    lists = [[1], [0, 1], []]
    columns = {kind: pa.array(lists).cast(pa.list_(getattr(pa, kind)())) for kind in ("uint8", "int32", "float32")}
    columns["bool"] = pa.array([[True], [False, True], []])
    columns["half"] = pa.array([[np.float16(one) for one in some] for some in lists], pa.list_(pa.float16()))
    columns["date"] = pa.array([[datetime.date(2020, 1, one + 1) for one in some] for some in lists])
    columns["when"] = pa.array(lists).cast(pa.list_(pa.timestamp("us")))
    columns["time"] = pa.array([[datetime.time(one) for one in some] for some in lists])
    return write_dataset(pa.table(columns))


@pytest.mark.parametrize(
    ("column", "value", "padded"),
    [
        ("uint8", 255, 255),
        ("uint8", 2.0, 2),
        ("int32", np.int64(-100), -100),
        ("int32", torch.tensor(7), 7),
        ("bool", True, True),
        ("bool", 0, False),
        ("half", -65504, -65504),
        ("float32", 0.1, np.float32(0.1)),
        ("float32", float("-inf"), -np.inf),
        ("float32", float("nan"), np.nan),
        ("float32", -1e30, np.float32(-1e30)),
        ("float32", fractions.Fraction(1, 3), np.float32(1 / 3)),
        ("date", 2, datetime.date(1970, 1, 3)),
        ("when", np.datetime64("2020-01-01"), datetime.datetime(2020, 1, 1)),
        ("when", np.datetime64("NaT"), np.datetime64("NaT")),
        ("time", None, None),
    ],
)
def test_lists_are_padded_with_what_was_asked_for(lists_uri: str, column: str, value: Any, padded: Any) -> None:
    with raylance.dataset(lists_uri, columns=[column], order="sequential", remainder="ragged") as handle:
        (batch,) = handle.iter_batches(batch_size=3, pad_lists={column: value})
        if value is None:
            assert [len(some) for some in batch[column]] == [1, 2, 0]
        else:
            np.testing.assert_array_equal(batch[column][[0, 2, 2], [1, 0, 1]], np.array([padded] * 3))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("uint8", -100, "uint8.* -100"),
        ("int32", 0.5, "int32.* 0.5"),
        ("int32", 2**31, "cannot hold 2147483648"),
        ("int32", float("nan"), "cannot hold nan"),
        ("bool", 2, "bool.* 2"),
        ("float32", 1e60, r"the lists hold float32, which cannot hold 1e\+60"),
        ("float32", 2**24 + 1, "cannot hold 16777217"),
        ("half", 65520, "the lists hold float16"),
        ("date", np.datetime64("2020-01-01T12"), "the lists hold datetime64.D., which cannot hold"),
        ("time", 0, "holds no lists of numbers"),
        ("int32", 1j, "with a number"),
        ("int32", np.arange(2), "cannot hold"),
    ],
)
def test_paddings_that_the_lists_cannot_hold(lists_uri: str, column: str, value: Any, message: str) -> None:
    handle = raylance.dataset(lists_uri, columns=[column])
    loader = handle.loader()
    arguments: dict[str, Any] = {"batch_size": 2, "pad_lists": {column: value}}
    for call in (
        handle.iter_batches,
        handle.iter_torch_batches,
        loader.iter_batches,
        loader.iter_torch_batches,
        loader.prepare,
        functools.partial(loader.iter_torch_batches, collate_fn=dict),
        functools.partial(IterableDataset, handle),
    ):
        with pytest.raises(ConfigError, match=message):
            call(**arguments)


def test_paddings_that_a_cast_after_them_would_change(lists_uri: str) -> None:
    with raylance.dataset(lists_uri, columns=["int32", "float32"], order="sequential", remainder="ragged") as handle:
        for column, value, dtype in (
            ("int32", -100, torch.uint8),
            ("float32", 1e30, torch.float16),
            ("float32", 0.5, {"float32": torch.int64}),
            ("int32", -100, torch.float8_e4m3fn),
            ("int32", 2049, torch.bfloat16),
            ("int32", 70000, {"int32": torch.bfloat16}),
        ):
            with pytest.raises(ConfigError, match=f"{column}.*dtypes= converts them to torch"):
                handle.iter_torch_batches(batch_size=3, pad_lists={column: value}, dtypes=dtype)
        paddings = {"int32": -100, "float32": -1}
        (batch,) = handle.iter_torch_batches(batch_size=3, pad_lists=paddings, dtypes=torch.bfloat16)
        assert batch["int32"].tolist() == [[1, -100], [0, 1], [-100, -100]]
        fitting = ((0.1, torch.float8_e4m3fn), (449.5, torch.float8_e4m3fn), (-1e30, torch.bfloat16))
        for value, dtype in (*fitting, (448, torch.float8_e4m3fn), (float("inf"), torch.bfloat16)):
            handle.iter_torch_batches(batch_size=3, pad_lists={"float32": value}, dtypes=dtype)
        with pytest.raises(ConfigError, match=r"pad_lists=0"):
            handle.iter_torch_batches(batch_size=3, pad_lists=0)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory is pinned here")
def test_without_an_accelerator_nothing_is_pinned(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    device._warn_of_no_pinning.cache_clear()
    with open_ids(uri) as handle, caplog.at_level(logging.WARNING, logger="raylance"):
        for _ in range(2):
            (batch, *_) = handle.iter_torch_batches(batch_size=8, pin_memory=True)
            assert not batch["id"].is_pinned()
    assert caplog.text.count("pin_memory=True, but torch finds no accelerator") == 1


def test_dtypes_leave_offsets_alone(uri: str) -> None:
    with raylance.dataset(uri, columns=["x", "id"], order="sequential", remainder="pad") as handle:
        arguments = {"batch_size": 8, "with_row_offset": True}
        batch = next(iter(handle.iter_torch_batches(dtypes=torch.float16, **arguments)))
        dtypes = [torch.float16, torch.float16, torch.int64, torch.bool]
        assert [batch[name].dtype for name in ("x", "id", "_rowoffset", "_valid")] == dtypes
        assert len(batch) == 4
        batch = next(iter(handle.iter_torch_batches(dtypes={"x": torch.float32}, **arguments)))
        assert (batch["x"].dtype, batch["id"].dtype) == (torch.float32, torch.int64)


def test_dtypes_take_the_lengths_that_padding_adds(uri: str) -> None:
    with raylance.dataset(uri, columns=["id", "tokens"], order="sequential") as handle:
        for dtypes, lengths in (({"tokens_length": torch.int32}, torch.int32), (torch.float32, torch.int64)):
            arguments = {"batch_size": 8, "pad_lists": {"tokens": raylance.Pad(0)}, "dtypes": dtypes}
            batch = next(iter(handle.iter_torch_batches(**arguments)))
            assert batch["tokens_length"].dtype == lengths
            assert batch["tokens_length"].tolist() == [0, 1, 2, 3] * 2
        for how in (0, "jagged", raylance.Pad(0, lengths=False)):
            arguments = {"batch_size": 8, "pad_lists": {"tokens": how}, "dtypes": {"tokens_length": torch.int32}}
            with pytest.raises(ConfigError, match="'tokens_length'"):
                handle.iter_torch_batches(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtypes": {"y": torch.float32}}, "'y'"),
        ({"dtypes": np.float32}, "float32"),
        ({"dtypes": torch.int8, "collate_fn": dict}, "exclude each other"),
        ({"pad_lists": {"token": 0}}, "pad_lists names 'token'"),
        ({"pad_lists": {"x": 0}}, "'x', which holds no lists of numbers"),
        ({"pad_lists": {"tokens": "0"}}, "pad 'tokens' with a number"),
        ({"shuffle": True}, r"shuffle="),
        ({"local_shuffle_buffer_size": 100}, r"local_shuffle_buffer_size="),
        ({"num_workers": 2}, r"num_workers="),
        ({"prefetch_batch": 2}, r"did you mean prefetch_batches=\?"),
        ({"prefetch_batches": 1.5}, "prefetch_batches=1.5"),
        ({"drop_last": "no"}, "drop_last='no': must be True or False"),
        ({"with_row_offset": "yes"}, "with_row_offset='yes': must be True or False"),
        ({"pin_memory": 1}, "pin_memory=1: must be True or False"),
        ({"collate_fn": 5}, "collate_fn=5: give a function"),
        ({"batch_size": 2.5}, "batch_size=2.5: must be an integer"),
    ],
)
def test_what_an_iterator_cannot_honour_is_refused_at_once(uri: str, arguments: dict[str, Any], message: str) -> None:
    handle = raylance.dataset(uri)
    for owner in (handle, handle.loader()):
        with pytest.raises(ConfigError, match=message):
            owner.iter_torch_batches(**({"batch_size": 8} | arguments))


def test_misuse_names_what_to_do(uri: str) -> None:
    handle = open_ids(uri)
    loader = handle.loader()
    assert loader, "a loader is true, though it has no length"
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: handle.plan(2.5), "global_batch_size=2.5: must be an integer"),
        (lambda: handle.plan(8, world_size="2"), "world_size='2'"),
        (lambda: loader.set_epoch("1"), "epoch='1': must be an integer"),
        (lambda: raylance.dataset([uri]), r"is a list: give the path or URI of one.*raylance.mix\(\)"),
        (lambda: raylance.dataset(uri, shuffle=True), "shuffle=: the dataset has an order"),
        (lambda: raylance.dataset(uri, version=1.0), "version=1.0: .*[Gg]ive a version number"),
        (lambda: handle.loader(decoders=2), "did you mean num_decoders="),
        (lambda: list(loader), r"iterate over loader.batches\(global_batch_size=…\)"),
        (lambda: list(handle), r"iterate over handle.iter_torch_batches"),
        (lambda: list(torch.utils.data.DataLoader(loader)), "raylance.torch_data.MapDataset"),
        (lambda: list(torch.utils.data.DataLoader(handle)), "raylance.torch_data.MapDataset"),
        (lambda: handle.loader(world_size=4), r"loader\(world_size=4\) without rank=: every process would be rank 0"),
        (lambda: handle["id"], "give an integer, a slice"),
        (lambda: pickle.dumps(loader.batches(batch_size=4)), "raylance.torch_data"),
        (lambda: handle.iter_batches(batch_size=4, batch_format="polars"), "must be one of 'numpy'"),
    ]
    for call, message in cases:
        with pytest.raises(ConfigError, match=message):
            call()
    assert len(handle.iter_batches(batch_size=np.int64(4))) == 25, "NumPy's integers are integers"


@pytest.mark.parametrize("remainder", ["drop", "pad", "ragged"])
def test_ranks_without_a_row_are_refused(uri: str, remainder: str) -> None:
    handle = open_ids(uri, remainder=remainder)
    with pytest.raises(ConfigError, match="3 rows on 4 "):
        handle.loader(rank=0, world_size=4).iter_batches(global_batch_size=3)
    with pytest.raises(ConfigError, match="3 rows on 4 "):
        handle.plan(global_batch_size=3, world_size=4)


@pytest.mark.parametrize("remainder", ["ragged_or_empty", "ragged", "pad", "drop"])
def test_fewer_rows_than_ranks_come_if_asked_for(uri: str, remainder: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Each row comes once, ranks take turns or get nothing, and no warning says what was asked for. In 0.12, another
    argument asked for it.
    """
    asked: dict[str, Any] = {"remainder": remainder}
    if remainder == "ragged_or_empty":
        handle = open_ids(uri, **asked)
        mixed = raylance.mix({"a": (handle, 1), "b": (handle, 1)}, **asked)
    else:
        asked["empty_batches"] = True
        with pytest.warns(FutureWarning, match="empty_batches=.*ragged_or_empty"):
            handle = open_ids(uri, **asked)
        with pytest.warns(FutureWarning, match="empty_batches=.*ragged_or_empty"):
            mixed = raylance.mix({"a": (handle, 1), "b": (handle, 1)}, **asked)
    for data in (handle, mixed):
        assert "each step has 3 rows, none for the same 1 of 4 ranks" in str(data.plan(3, world_size=4))
        came = []
        for rank in range(4):
            with data.loader(rank=rank, world_size=4, runtime="threads") as loader:
                batches = list(loader.iter_torch_batches(global_batch_size=3))
                assert len(batches) == data.plan(3, world_size=4).plan.steps(0)
                real = [batch["id"][batch["_valid"]] if "_valid" in batch else batch["id"] for batch in batches]
                came += torch.cat(real).tolist()
        left_out = len(data) % 3 if remainder == "drop" else 0
        assert len(came) == len(data) - left_out
        assert data is mixed or len({*came}) == len(came)
    assert not [record for record in caplog.records if "no row" in record.getMessage()]


class _Wrapped(torch.utils.data.IterableDataset[Any]):
    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __iter__(self) -> Any:
        return iter(self.owner.iter_torch_batches(batch_size=10))


def test_a_worker_of_data_loader_is_refused_and_does_not_hang(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    wrapped = _Wrapped(open_ids(uri))
    batches = iter(torch.utils.data.DataLoader(wrapped, None, num_workers=1, multiprocessing_context=FORKED))
    with pytest.raises(ConfigError, match="raylance.torch_data"):
        next(batches)
    batches._shutdown_workers()  # else it waits until the error is gone
