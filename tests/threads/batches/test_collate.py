"""Arrow tables becoming NumPy, torch and device batches."""

import copy
import datetime
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.batches.assembly import ItemRows, StepRows
from raylance.batches.conversion import to_torch
from raylance.batches.device import Sender, move, torch_device
from raylance.batches.joining import Joiner
from raylance.decode.arrays import Pad, to_numpy
from raylance.errors import ConfigError, DatasetError
from raylance.torch_data import MapDataset
from tests.helpers.brain_floats import BRAIN
from tests.helpers.images import make_images

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


def tensors_of(table: pa.Table, **options: Any) -> dict[str, Any]:
    return to_torch(to_numpy(table), table.schema, **options)


def cut(table: pa.Table) -> pa.Table:
    """The same rows in uneven chunks, with offsets into their buffers."""
    return pa.concat_tables([table.slice(0, 2), table.slice(2, 1)])


@pytest.mark.parametrize("table", [TABLE, cut(TABLE), pa.concat_tables([TABLE, TABLE]).slice(3, 3)])
def test_numpy(table: pa.Table) -> None:
    batch = to_numpy(table, {"tokens": Pad(np.array(-1), lengths=False)})
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
    batch = tensors_of(TABLE, dtypes={"int": torch.float64}, channels_last=frozenset({"image"}))
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
    halves = tensors_of(TABLE.select(["vector"]), dtypes={"vector": torch.float16}, channels_last=frozenset())
    assert halves["vector"].dtype == torch.float16


def test_numbers_are_views() -> None:
    for name, address in (
        ("vector", TABLE["vector"].chunk(0).values.buffers()[1].address),
        ("image", TENSORS.storage.values.buffers()[1].address),
    ):
        assert to_numpy(TABLE)[name].ctypes.data == address
        batch = tensors_of(TABLE.select([name]), dtypes={}, channels_last=frozenset({"image"}))
        assert batch[name].data_ptr() == address


def test_empty_tables_keep_shapes_and_dtypes() -> None:
    for table in (TABLE.slice(0, 0), TABLE.schema.empty_table()):
        batch = to_numpy(table, {"tokens": Pad(np.array(0), lengths=False)})
        assert batch["vector"].shape == (0, 2)
        assert batch["image"].shape == (0, 2, 2, 3)
        assert batch["int"].dtype == np.int32
        assert batch["tokens"].shape == (0, 0)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, None]), "'c' has 1 nulls"),
        (pa.array([[1.0, 2.0], None], pa.list_(pa.float32(), 2)), "nulls"),
        (pa.array([[1.0, None]], pa.list_(pa.float32(), 2)), "1 nulls inside"),
        (pa.array([[1, None], [2]]), "1 nulls inside"),
        (pa.array([datetime.datetime(2020, 1, 1)]), "timestamp"),
        (pa.array([[datetime.datetime(2020, 1, 1)], []]), "list.*timestamp.*batch_format"),
        (pa.array([[datetime.time(1)]]), "list.*time64"),
        (pa.array([[datetime.date(2020, 1, 1)]] * 2, pa.list_(pa.date32(), 1)), "date32"),
    ],
)
def test_what_has_no_place_in_a_tensor_is_refused(column: pa.Array, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        tensors_of(pa.table({"c": column}), dtypes={}, channels_last=frozenset())


def test_dates_and_times_come_as_numpy() -> None:
    when = datetime.datetime(2020, 1, 1)
    table = pa.table({"one": pa.array([when, when]), "some": pa.array([[when], []]), "time": [datetime.time(1)] * 2})
    for rows in (table, table.slice(1, 1), table.schema.empty_table(), pa.Table.from_batches([], schema=table.schema)):
        batch = to_numpy(rows)
        assert batch["one"].dtype == np.dtype("M8[us]")
        assert batch["one"].tolist() == [when] * rows.num_rows
        assert [values.tolist() for values in batch["some"]] == rows["some"].to_pylist()
        assert batch["time"].tolist() == rows["time"].to_pylist()


def permuted(values: np.ndarray, permutation: list[int]) -> pa.Array:
    """Tensors (n, …) whose axes are stored in another order: logical axis i is stored axis permutation[i]."""
    stored = values.transpose(0, *(1 + np.argsort(permutation)))
    kind = pa.fixed_shape_tensor(pa.from_numpy_dtype(values.dtype), stored.shape[1:], permutation=permutation)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(stored.reshape(-1)), stored[0].size)
    return pa.ExtensionArray.from_storage(kind, flat)


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    data=st.data(),
    cuts=st.lists(st.integers(0, 5), max_size=3).map(sorted),
)
def test_permuted_tensors_have_their_logical_axes(shape: list[int], data: st.DataObject, cuts: list[int]) -> None:
    values = np.arange(5 * np.prod(shape), dtype=np.int32).reshape(5, *shape)
    permutation = data.draw(st.permutations(range(len(shape))))
    column = permuted(values, permutation)
    if all(permutation[axis] == place for place, axis in enumerate(permutation)):
        # pyarrow itself mixes up the strides where a permutation is not its own inverse.
        np.testing.assert_array_equal(column.to_numpy_ndarray(), values)
    table = pa.table({"t": column})
    parts = [table.slice(start, stop - start) for start, stop in zip([0, *cuts], [*cuts, 5], strict=True)]
    table = pa.concat_tables(parts)
    np.testing.assert_array_equal(to_numpy(table)["t"], values)
    batch = tensors_of(table, dtypes={}, channels_last=frozenset())
    np.testing.assert_array_equal(batch["t"].numpy(), values)
    empty = to_numpy(pa.Table.from_batches([], schema=table.schema))["t"]
    assert (empty.shape, empty.dtype) == ((0, *shape), np.int32)


def test_permuted_tensors_reach_every_rank_also_one_without_a_row(write_dataset: Callable[..., str]) -> None:
    values = np.arange(48, dtype=np.float32).reshape(2, 2, 3, 4)
    uri = write_dataset(pa.table({"t": permuted(values, [2, 0, 1]), "id": [0, 1]}))
    dataset = raylance.dataset(uri, order="sequential", remainder="ragged")
    np.testing.assert_array_equal(dataset.head()["t"], values)
    transformed = raylance.dataset(uri, order="sequential", transform=lambda batch: {"double": batch["t"] * 2})
    np.testing.assert_array_equal(transformed.head()["double"], values * 2)
    found = []
    for rank in range(3):
        with dataset.loader(rank=rank, world_size=3) as loader:
            for iterate in (loader.iter_batches, loader.iter_torch_batches):
                (batch,) = iterate(global_batch_size=3)
                assert batch["t"].shape[1:] == (2, 3, 4)
                found += [(int(row), tensor) for row, tensor in zip(batch["id"], batch["t"], strict=True)]
    assert sorted(row for row, _ in found) == [0, 0, 1, 1]
    for row, tensor in found:
        np.testing.assert_array_equal(tensor, values[row])


@pytest.mark.parametrize(("storage", "order"), [("2.0", "sequential"), ("2.1", "row"), ("2.2", "sequential")])
def test_dictionaries_of_appends_come_in_every_format(
    write_dataset: Callable[..., str], storage: str, order: str
) -> None:
    """Each fragment has a dictionary of its own, of which some words are in both; some hold null."""
    words: list[str | None] = []
    tables = []
    for part, some in enumerate((["a", "b", "c"], ["c", None, "d", "a"], ["x", None, "b"])):
        places = np.arange(300) * 7 % len(some)
        words += [some[place] for place in places]
        column = pa.DictionaryArray.from_arrays(pa.array(places, pa.int32()), pa.array(some))
        tables.append(pa.table({"id": np.arange(part * 300, part * 300 + 300), "word": column}))
    uri = write_dataset(*tables, data_storage_version=storage)

    def check(rows: Any, found: Any) -> None:
        assert [None if word != word else word for word in found] == [words[row] for row in rows]

    for changes in ({}, {"filter": "id % 3 > 0"}, {"transform": lambda batch: batch}):
        handle = raylance.dataset(uri, order=order, remainder="ragged", columns=["id", "word"], **changes)
        check((rows := handle.take(np.arange(899, -1, -7)))["id"], rows["word"])
        with handle.loader(num_decoders=0) as loader:
            for batch in loader.iter_torch_batches(global_batch_size=130):
                check(batch["id"], batch["word"])
            for batch in loader.iter_batches(global_batch_size=130):
                check(batch["id"], batch["word"])
            for frame in loader.iter_batches(global_batch_size=130, batch_format="pandas"):
                check(frame["id"], frame["word"])
                assert (frame["word"].dtype == "category") == ("transform" not in changes)
            for table in loader.iter_batches(global_batch_size=130, batch_format="pyarrow"):
                check(table["id"].to_pylist(), table["word"].to_pylist())
                for chunk in table["word"].chunks if "transform" not in changes else ():
                    assert len(set(chunk.dictionary.to_pylist()) - {None}) == len(chunk.dictionary)


def ruin(batch: Any) -> None:
    for column in batch.values():
        for values in column if isinstance(column, list) or column.dtype == object else [column]:
            if isinstance(values, np.ndarray | torch.Tensor):
                values[...] = np.zeros((), values.dtype) if isinstance(values, np.ndarray) else 0


@pytest.mark.parametrize("rows", [1, 3, 4])
@pytest.mark.parametrize("lists", [{}, {"tokens": Pad(np.array(-1), lengths=True)}, {"tokens": "jagged", "same": 2}])
def test_steps_that_come_together_become_what_each_becomes_alone(rows: int, lists: Any) -> None:
    def of_12() -> pa.Table:  # new memory for each, because arrays are views
        table = pa.concat_tables([TABLE] * 4).append_column("same", [[[row, -row] for row in range(12)]])
        return table.append_column("void", [[None if row == 5 else row for row in range(12)]]).combine_chunks()

    names, item, alone = of_12().column_names, ItemRows(of_12()), of_12()
    steps = [StepRows(item, begin, rows) for begin in range(0, 12, rows)]
    for step in steps:
        kept = alone.slice(step.begin, rows)
        assert step.table() == kept
        if step.begin <= 5 < step.begin + rows:
            with pytest.raises(DatasetError, match="'void' has 1 nulls in this batch"):
                step.to_numpy(names, lists, np.concatenate)
            continue
        found, expected = step.to_numpy(names, lists, np.concatenate), to_numpy(kept, lists)
        assert list(found) == list(expected)
        for name, array in expected.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert str(found[name]) == str(array)
        ruin(found)
    together = {"int", "half", "flag", "vector", "matrix", "image"} | ({"same"} & set(lists))
    assert set(item.sliceable(names, lists)) == together, "converted once"


def test_every_number_of_a_batch_may_be_changed_in_place() -> None:
    when = pa.array(np.array([5, 6, 7], "M8[us]"))
    table = TABLE.append_column("when", when).append_column("short", pa.array([1, 2, 3], pa.uint16()))
    for make in (lambda: table.take([0, 1, 2]), lambda: cut(table), lambda: table.slice(0, 0).combine_chunks()):
        batch = to_numpy(make())
        ruin(batch)
        for name in ("int", "half", "flag", "vector", "matrix", "image", "when", "short"):
            assert not batch[name].astype(bool).any()
            assert batch[name].dtype == to_numpy(table)[name].dtype
        ruin(tensors_of(make().drop_columns(["when"]), dtypes={}, channels_last=frozenset({"image"})))
    np.testing.assert_array_equal(when.to_numpy().astype(int), [5, 6, 7])


def transformed(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Changes everything it was given in place."""
    made = {"pixels": batch["image"].copy(), "id": batch["id"].copy(), "vector": batch["vector"] + 1}
    ruin(batch)
    return made


@pytest.mark.parametrize("decoders", [0, 1])
def test_what_a_consumer_changes_in_place_comes_back_in_no_other_batch(
    write_dataset: Callable[..., str], decoders: int
) -> None:
    rows = 20
    vector = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(1.0, 2 * rows + 1, dtype=np.float32)), 2)
    image, tokens = pa.array(make_images(rows), pa.binary()), [[row, row] for row in range(1, rows + 1)]
    columns = {"image": image, "id": np.arange(1, rows + 1), "vector": vector, "tokens": tokens}
    uri = write_dataset(pa.table(columns))
    # Padding repeats the epoch's first rows, weights repeat rows within a batch, and chunks serve several batches.
    orders = ["sequential", raylance.Weighted(weights=np.r_[np.ones(15), np.full(5, 50)])]
    for order, transform in [(orders[0], None), (orders[1], None), (orders[0], transformed)]:
        dataset = raylance.dataset(
            uri, decode=raylance.Image("image", size=8), order=order, remainder="pad", transform=transform
        )
        with dataset.loader(num_decoders=decoders) as loader:

            def look(change: bool, loader: raylance.RankLoader = loader) -> list[dict[str, Any]]:
                seen = []

                def collate(batch: dict[str, Any]) -> dict[str, Any]:
                    seen.append(copy.deepcopy(batch))
                    ruin(batch if change else {})
                    return batch

                loader.set_epoch(0)
                for batch in loader.iter_batches(global_batch_size=8, with_row_offset=True):
                    collate(batch)
                for batch in loader.iter_torch_batches(global_batch_size=8, with_row_offset=True, collate_fn=collate):
                    ruin(batch if change else {})
                for batch in loader.iter_torch_batches(global_batch_size=8, with_row_offset=True):
                    collate(batch)
                assert loader.epoch == 3
                assert loader.stats()["epoch_certificate"]["epoch"] == 2
                return seen

            for untouched, changed in zip(look(False), look(True), strict=True):
                assert list(untouched) == list(changed)
                for name, values in untouched.items():
                    for one, other in zip(values, changed[name], strict=True):
                        np.testing.assert_array_equal(one, other)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="no CUDA here"):
        torch_device("cuda")


def test_batches_for_a_device_other_than_cuda_are_sent_there_and_not_pinned() -> None:
    """With `pin_memory`, they stayed on the CPU. "meta" is the one such device that every machine has."""
    sender = Sender(torch.device("meta"), pin_memory=True)
    batch = sender.receive(sender.send({"x": torch.ones(3), "name": ["a", "b", "c"]}))
    assert batch["x"].device.type == "meta"
    assert batch["name"] == ["a", "b", "c"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_batches_arrive_whole_and_in_order() -> None:
    sender = Sender(torch.device("cuda"), pin_memory=False)
    sent = [sender.send({"x": torch.full((1000, 1000), float(step))}) for step in range(20)]
    for step, batch in enumerate(map(sender.receive, sent)):
        assert batch["x"].is_cuda
        assert batch["x"].min() == batch["x"].max() == step


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from([np.uint8, np.float32, np.int64, np.bool_]),
    st.sampled_from([(), (3,), (300, 400)]),
)
def test_pieces_are_joined(rows: list[int], dtype: type, shape: tuple[int, ...]) -> None:
    join = Joiner()
    for turn in range(3):
        rng = np.random.default_rng(turn)
        pieces = [rng.integers(0, 2, (count, *shape)).astype(dtype) for count in rows]
        joined = join(pieces)
        np.testing.assert_array_equal(joined, np.concatenate(pieces))
        assert joined.dtype == dtype
        assert joined.flags.writeable


@pytest.mark.parametrize("keep", ["array", "slice", "tensor", "slice of a tensor", "array of a tensor"])
def test_memory_of_a_batch_serves_again_once_nobody_has_any_of_it(keep: str) -> None:
    join = Joiner()

    def make(value: int) -> np.ndarray:
        return join([np.full((512, 1024), value, np.int32), np.full((512, 1024), value, np.int32)])

    held: Any = make(1)
    address = held.ctypes.data
    if keep != "array":
        held = held[3:5, 7] if keep == "slice" else torch.utils.dlpack.from_dlpack(held)
        held = held[1:][:, 2:9] if keep == "slice of a tensor" else held
        held = held.numpy()[5:] if keep == "array of a tensor" else held
    others = [make(2), make(3)]
    assert (held == 1).all()
    assert address not in [other.ctypes.data for other in others]
    del held
    assert make(4).ctypes.data == address
    assert [int(other.min()) for other in others] == [2, 3]


def test_threads_that_join_at_once_get_memory_of_their_own() -> None:
    """The passes of one iterator share what joins: the next one may be prepared while this one runs."""
    join, together = Joiner(), threading.Barrier(4)
    interval = sys.getswitchinterval()

    def run(value: int) -> bool:
        together.wait()
        made = (join([np.full(1 << 17, value), np.full(1 << 17, value)]) for _ in range(50))
        return all((each == value).all() for each in made)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(run, range(4)))
    finally:
        sys.setswitchinterval(interval)


def test_bfloat16_is_a_tensor_of_its_dtype(bfloat16_uri: str) -> None:
    handle, wanted = raylance.dataset(bfloat16_uri, order="sequential"), torch.tensor(BRAIN).to(torch.bfloat16)
    (batch,) = handle.iter_torch_batches(batch_size=3)
    assert {batch[name].dtype for name in ("one", "vector", "even")} == {torch.bfloat16}
    assert torch.equal(batch["one"], wanted[1:4])
    assert torch.equal(batch["vector"], wanted.reshape(3, 2))
    assert torch.equal(batch["even"], wanted.reshape(3, 2))
    assert [len(each) for each in batch["list"]] == [1, 0, 5]
    assert torch.equal(batch["list"][2], wanted[1:])
    (batch,) = handle.iter_torch_batches(batch_size=3, pad_lists={"list": -1.5}, dtypes=torch.float32)
    assert batch["list"].dtype == batch["one"].dtype == torch.float32
    assert batch["list"][0].tolist() == [0.5, *[-1.5] * 4]
    assert batch["name"] == ["a", "b", "c"]
    (batch,) = handle.iter_torch_batches(batch_size=3, pad_lists={"list": "jagged"})
    assert torch.equal(batch["list"].values(), wanted)
    with pytest.raises(ConfigError, match="257"):
        handle.iter_torch_batches(batch_size=3, pad_lists={"list": 257})
    (item, *_) = MapDataset(handle)
    assert item["one"].dtype == torch.bfloat16
    assert "-1" in repr(handle.show({"one": batch["one"], "vector": batch["vector"]}))


OF_NO_DTYPE: dict[str, pa.Array] = {
    "text": pa.array(["a", "b"]),
    "bytes": pa.array([b"a", b"b"]),
    "decimal": pa.array([1, 2]).cast(pa.decimal128(20, 1)),
    "decimals": pa.array([[1], [2, 3]], pa.list_(pa.int64())).cast(pa.list_(pa.decimal128(20, 1))),
    "time": pa.array([1, 2], pa.time64("us")),
    "date": pa.array([1, 2], pa.timestamp("us")),
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16, b"1" * 16], pa.binary(16))),
    "struct": pa.array([{"x": 1}, {"x": 2}]),
    "class": pa.array(["a", "b"]).dictionary_encode(),
}


@pytest.mark.parametrize("name", OF_NO_DTYPE)
def test_a_dtype_of_a_column_without_tensors_is_refused(write_dataset: Callable[..., str], name: str) -> None:
    table = pa.table({"id": pa.array([1, 2], pa.int16()), name: OF_NO_DTYPE[name]})
    handle = raylance.dataset(write_dataset(table))
    with pytest.raises(ConfigError, match=f"dtypes names '{name}', which is "):
        handle.iter_torch_batches(batch_size=2, dtypes={name: torch.float32})
    if name not in ("date", "time"):
        (batch,) = handle.iter_torch_batches(batch_size=2, dtypes=torch.float32)
        assert batch["id"].dtype == torch.float32
    for dtype in (torch.quint8, torch.bits8):
        with pytest.raises(ConfigError, match=f"torch cannot convert numbers to {dtype}"):
            handle.iter_torch_batches(batch_size=2, dtypes={"id": dtype})
