"""Raylance under DataLoader: the plan's batches and an exact resume, for any ranks and workers."""

import functools
import importlib.util
import itertools
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed
from torch.utils.data import DataLoader

import raylance
from raylance.errors import ConfigError
from raylance.torch_data import IterableDataset, Loader, MapDataset, RowSampler, find_place
from tests.helpers.data_loaders import STYLES, make, numbered_texts, open_dataset, shorten_waits
from tests.helpers.scripts import log_to, run_script


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch)


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(numbered_texts(), max_rows_per_file=150)


def make_loader(*arguments: Any, **options: Any) -> Loader:
    return make(Loader, *arguments, **options)[1]


def ids(batches: Iterator[dict[str, Any]]) -> list[list[int]]:
    return [batch["id"].tolist() for batch in batches]


def planned(handle: raylance.Dataset, epoch: int, size: int, rank: int = 0, world_size: int = 1) -> list[list[int]]:
    """What the plan says; rows of `uri` are numbered by their offset."""
    plan = handle.plan(size, world_size).plan
    starts = range(0, plan.steps(0) * size, size)
    return [plan.select(epoch, plan.positions(0, at, *plan.rank_slice(0, at, rank))).tolist() for at in starts]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("order", ["window", "row"])
def test_batches_are_the_plans(uri: str, style: str, order: str) -> None:
    handle = open_dataset(uri, order=order, remainder="drop")
    for rank, world_size in ((0, 1), (0, 3), (2, 3)):
        loader = make_loader(handle, style, 50, dist_info=lambda rank=rank, world_size=world_size: (rank, world_size))
        assert len(loader) == 20
        for epoch in range(2):
            assert loader.steps.epoch == epoch
            assert ids(loader) == planned(handle, epoch, 50, rank, world_size)


@pytest.mark.parametrize("style", STYLES)
def test_workers_that_persist_keep_order_epochs_and_state(uri: str, style: str) -> None:
    """Two workers over two epochs, an iteration left half-way, and a resume with none."""
    handle = open_dataset(uri)
    loader = make_loader(handle, style, 64, workers=2, persistent_workers=True, prefetch_factor=3)
    assert ids(loader) == planned(handle, 0, 64)
    batches = iter(loader)
    before = [next(batches)["id"].tolist() for _ in range(5)]
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["epoch"], state["position"]) == (1, 320)
    rest = ids(loader)
    assert before + rest == planned(handle, 1, 64)
    with pytest.raises(raylance.RaylanceError, match="cannot share a position"):
        next(batches)
    resumed = make_loader(handle, style, 64)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert ids(resumed) == rest


def test_a_function_that_cannot_be_sent_is_named(uri: str) -> None:
    value = threading.Lock()

    def keeps(batch: Any) -> Any:
        return batch, value

    loader = Loader(IterableDataset(open_dataset(uri), global_batch_size=100, collate_fn=keeps), num_workers=1)
    with pytest.raises(ConfigError, match="collate_fn=.*keeps"):
        next(iter(loader))


def test_rays_wrapper_is_refused_with_what_to_do_instead(uri: str) -> None:
    """It takes a batch ahead, and puts a sampler of its own in place of the plan's."""
    from ray.train.torch.train_loop_utils import _WrappedDataLoader

    handle, cpu = open_dataset(uri), torch.device("cpu")
    for style in STYLES:
        loader = make_loader(handle, style, 100)
        if style == "map":
            assert isinstance(loader.sampler, torch.utils.data.DistributedSampler), "else Ray replaces it"
        with pytest.raises(ConfigError, match="dist_info='ray'"):
            next(iter(_WrappedDataLoader(loader, cpu, False)))
    sampler: Any = torch.utils.data.DistributedSampler(MapDataset(handle), num_replicas=2, rank=0)
    replaced: Any = DataLoader(MapDataset(handle), batch_size=None, sampler=sampler)
    with pytest.raises(ConfigError, match="dist_info='ray'"):
        next(iter(_WrappedDataLoader(replaced, cpu, False)))
    batches = handle.loader().batches(global_batch_size=100)
    assert not hasattr(batches, "sampler")
    with pytest.raises(ConfigError, match="prepare_data_loader"):
        batches.sampler  # noqa: B018


def test_a_framework_that_counts_epochs_does_not_give_up_a_position(uri: str) -> None:
    loader = make_loader(open_dataset(uri), "map", 100)
    next(iter(loader))
    loader.sampler.set_epoch(0)
    assert loader.state_dict()["position"] == 100


@pytest.mark.parametrize(("style", "workers"), [("iterable", 1), ("map", 0)])
def test_whole_iterations_begin_at_the_start_also_after_one_that_was_left(uri: str, style: str, workers: int) -> None:
    options = {"persistent_workers": True} if workers else {}
    loader = make_loader(open_dataset(uri, order="sequential"), style, 100, workers, whole=True, **options)
    for steps, rows in ((2, 200), (2, 200), (None, 1003), (None, 1003)):
        assert list(itertools.chain(*ids(itertools.islice(loader, steps)))) == list(range(rows))


@pytest.mark.parametrize(("style", "workers"), [("iterable", 2), ("map", 0)])
def test_ranks_that_change_between_passes_share_each_step(uri: str, style: str, workers: int) -> None:
    """The loop is left in mid-epoch, and begun again in other shares; workers persist and learn of them."""
    handle, places = open_dataset(uri), {"a": (0, 2), "b": (1, 2)}
    options = {"workers": workers} | ({"persistent_workers": True} if workers else {})
    loaders = {
        name: make_loader(handle, style, 64, dist_info=functools.partial(places.get, name), **options) for name in "ab"
    }

    def take(name: str, steps: int | None) -> list[list[int]]:
        return ids(itertools.islice(loaders[name], steps))

    assert [take(name, 4) for name in "ab"] == [planned(handle, 0, 64, rank, 2)[:4] for rank in (0, 1)]
    places["a"] = (0, 1)  # b is gone
    assert take("a", 3) == planned(handle, 0, 64)[4:7]
    places |= {"a": (2, 3), "b": (0, 3)}
    loaders["b"].load_state_dict(loaders["a"].state_dict())
    assert [take(name, None) for name in "ab"] == [planned(handle, 0, 64, rank, 3)[7:] for rank in (2, 0)]


@pytest.mark.parametrize("style", STYLES)
def test_workers_that_start_again_each_epoch_are_named_once(
    uri: str, style: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A validation of 301 images took half a minute for that, in silence."""
    handle, fix = open_dataset(uri, filter="id < 40"), "Write Loader(…, num_workers=1, persistent_workers=True)"
    for workers, options, warnings in ((0, {}, [0, 0]), (1, {"persistent_workers": True}, [0, 0]), (1, {}, [0, 1, 1])):
        caplog.clear()
        loader = make_loader(handle, style, 20, workers, **options)
        for wanted in warnings:
            assert len(list(loader)) == 2
            assert caplog.text.count(fix) == wanted


@pytest.mark.parametrize("order", ["window", raylance.ClassBalanced(column="label")], ids=["window", "balanced"])
def test_batches_are_those_of_the_rank_loader(images_uri: str, order: Any) -> None:
    """To the byte, also where a row comes again in another augmentation."""
    image = raylance.Image("image", size=16, augment=raylance.RandomResizedCrop(), hflip=0.5)
    handle = open_dataset(images_uri, columns=None, decode=image, filter="id < 200", order=order, remainder="pad")
    loaders = [make_loader(handle, style, 48, with_row_offset=True) for style in STYLES]
    with handle.loader(num_decoders=0) as ranked:
        batches = ranked.iter_torch_batches(global_batch_size=48, with_row_offset=True)
        for expected, *found in zip(batches, *loaders, strict=True):
            for batch in found:
                assert set(batch) == set(expected)
                assert all(torch.equal(batch[name], expected[name]) for name in expected)
        ranked_state = ranked.state_dict()
    for loader in loaders:
        assert loader.state_dict() == ranked_state


@pytest.mark.promise("P1", "P4")
@pytest.mark.parametrize("is_mixed", [False, True])
def test_sequences_are_those_of_their_epoch(write_dataset: Callable[..., str], is_mixed: bool) -> None:
    """In each epoch, after a move from a RankLoader in mid-epoch, and by index."""
    tokens = write_dataset(pa.table({"tokens": [list(range(5 * row, 5 * row + 5)) for row in range(40)]}))
    packed = raylance.dataset(tokens, samples=raylance.Pack("tokens", 16), order="sequential", remainder="ragged")
    handle = raylance.mix({"a": (packed, 1.0), "b": (packed, 1.0)}, remainder="ragged") if is_mixed else packed

    def of(batches: Any) -> list[list[int]]:
        return [sequence for batch in batches for sequence in batch["input_ids"].tolist()]

    with handle.loader(runtime="threads") as ranked:
        wanted = [of(ranked.iter_batches(global_batch_size=2)) for _ in range(2)]
        before = of(itertools.islice(ranked.iter_batches(global_batch_size=2), 3))
        state = ranked.state_dict()
        wanted.append(before + of(ranked.iter_batches(global_batch_size=2)))
    assert wanted[0] != wanted[1]
    loader = make_loader(handle, "map", 2)
    assert [of(loader) for _ in range(3)] == wanted
    loader.load_state_dict(state)
    assert before + of(loader) == wanted[2]
    if not is_mixed:
        rows = MapDataset(handle)
        rows.epoch = 1
        assert [rows[index]["input_ids"].tolist() for index in range(len(rows))] == wanted[1]


def test_states_are_those_of_the_rank_loader(uri: str) -> None:
    """A run under Ray continues under DataLoader, and back."""
    handle = open_dataset(uri)
    loader = make_loader(handle, "iterable", 64)
    next(iter(loader))
    state = loader.state_dict()
    ranked = handle.loader()
    ranked.load_state_dict(state)
    assert ranked.state_dict() == state
    loader.set_epoch(3)
    loader.load_state_dict(ranked.state_dict())
    assert ids(loader) == planned(handle, 0, 64)[1:]
    other = make_loader(open_dataset(uri, seed=1), "map", 64)
    with pytest.raises(raylance.StateError, match="seed: saved 0, now 1"):
        other.load_state_dict(state)


def test_a_plain_dataloader_is_counted_by_the_caller(uri: str) -> None:
    handle = open_dataset(uri)
    sampler = RowSampler(handle, global_batch_size=64)
    plain = DataLoader(MapDataset(handle), batch_sampler=sampler)
    for expected, batch in zip(planned(handle, 0, 64)[:3], plain, strict=False):
        assert batch["id"].tolist() == expected
        sampler.consumed()
    assert sampler.state_dict()["position"] == 192
    assert ids(plain) == planned(handle, 0, 64)[3:]
    sampler.set_epoch(1)
    assert ids(plain) == planned(handle, 1, 64)


@pytest.mark.parametrize(("style", "workers"), [("iterable", 0), ("map", 0), ("iterable", 2)])
def test_a_plain_dataloader_that_repeats_an_epoch_is_warned_once(
    uri: str, style: str, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    options = {"worker_init_fn": functools.partial(log_to, log)} if workers else {}

    def passes(steps: Any, loader: Any, moves: bool = False) -> str:
        """What is logged of three passes."""
        for epoch in range(3):
            if moves:
                steps.set_epoch(epoch)
            assert len(list(loader)) == 11
        return caplog.text + (log.read_text() if workers else "")

    def plain(order: str, **more: Any) -> tuple[Any, Any]:
        return make(DataLoader, open_dataset(uri, order=order), style, 100, workers, **options, **more)

    assert "second time" not in passes(*plain("window", persistent_workers=workers > 0), moves=True)
    if not workers:
        assert "second time" not in passes(*plain("sequential"))
        assert "second time" not in passes(*make(Loader, open_dataset(uri), style, 100))
    text = passes(*plain("window"))
    assert text.count("was handed out whole a second time, as epoch 0 again") == 1, text
    assert "set_epoch() before each epoch" in text


@pytest.mark.parametrize("style", STYLES)
def test_a_consumer_that_stops_by_count_gets_every_epoch(uri: str, style: str) -> None:
    handle = open_dataset(uri)
    loader = make_loader(handle, style, 100)
    for epoch in range(3):
        seen = ids(itertools.islice(loader, 11))
        assert seen == planned(handle, epoch, 100)
        assert (loader.steps.epoch, loader.state_dict()["position"]) == (epoch + 1, 0)


def stateful() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader


@pytest.mark.parametrize("kind", [lambda: DataLoader, stateful], ids=["torch", "torchdata"])
def test_set_epoch_reaches_workers_that_persist(uri: str, kind: Callable[[], Any]) -> None:
    """Of loaders that know nothing of epochs; and so does a state that is loaded in mid-epoch."""
    handle = open_dataset(uri)
    steps, loader = make(kind(), handle, "iterable", 64, workers=2, persistent_workers=True)
    for epoch in (0, 1, 3):
        steps.set_epoch(epoch)
        assert ids(loader) == planned(handle, epoch, 64)
    if kind is not stateful:
        steps.load_state_dict(steps.state_dict() | {"epoch": 2, "position": 320})
        assert ids(loader) == planned(handle, 2, 64)[5:]


@pytest.mark.parametrize(("style", "workers"), [("iterable", 2), ("map", 0)])
def test_torchdatas_stateful_dataloader_continues_where_it_was(uri: str, style: str, workers: int) -> None:
    """It asks iterators for their state, of each worker; what it has not handed out does not count."""
    kind, handle = stateful(), open_dataset(uri)
    steps, loader = make(kind, handle, style, 64, workers)
    steps.set_epoch(1)
    batches = iter(loader)
    before = [next(batches)["id"].tolist() for _ in range(5)]
    state = loader.state_dict()
    assert before + ids(batches) == planned(handle, 1, 64)
    steps, loader = make(kind, handle, style, 64, workers)
    loader.load_state_dict(state)
    assert ids(loader) == planned(handle, 1, 64)[5:]
    steps.set_epoch(2)
    assert ids(loader) == planned(handle, 2, 64)


def test_a_stateful_dataloaders_state_of_other_data_is_refused(uri: str) -> None:
    _, loader = make(stateful(), open_dataset(uri), "iterable", 64)
    next(iter(loader))
    _, other = make(stateful(), open_dataset(uri, seed=1), "iterable", 64)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(raylance.StateError, match="seed"):
        next(iter(other))


@pytest.mark.promise("P1", "P8")
@pytest.mark.parametrize(("style", "workers"), [("iterable", 0), ("iterable", 2), ("map", 0)])
@pytest.mark.parametrize("change", ["append", "replace", "update", "index"])
def test_a_stateful_dataloader_refuses_rows_that_have_changed(
    write_dataset: Callable[..., str], style: str, workers: int, change: str
) -> None:
    """The state of its dataset is that of the epoch's begin, where other rows are allowed: rows came twice."""
    uri = write_dataset(pa.table({"id": np.arange(400)}))
    _, loader = make(stateful(), open_dataset(uri), style, 40, workers)
    batches = iter(loader)
    had = [row for _ in range(3) for row in next(batches)["id"].tolist()]
    state = loader.state_dict()
    del batches, loader
    if change == "replace":
        lance.dataset(uri).delete("id < 80")
    if change in ("append", "replace"):
        lance.write_dataset(pa.table({"id": np.arange(400, 480)}), uri, mode="append")
    elif change == "update":
        lance.dataset(uri).update({"id": "id"}, where="id = 3")
    else:
        lance.dataset(uri).create_scalar_index("id", "BTREE")
    _, loader = make(stateful(), open_dataset(uri), style, 40, workers)
    loader.load_state_dict(state)
    if change == "index":  # the same rows in the same order
        assert sorted(had + [row for batch in loader for row in batch["id"].tolist()]) == [*range(400)]
        return
    with pytest.raises(raylance.StateError, match="position"):
        next(iter(loader))


def test_an_empty_pass_is_said(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    handle = open_dataset(uri)
    loader = Loader(IterableDataset(handle, global_batch_size=100, drop_last=True))
    loader.load_state_dict(handle.loader().state_dict() | {"position": 950})
    assert ids(loader) == []
    assert "no step is left of epoch 0: 950 of 1003 rows" in caplog.text
    assert ids(loader) == planned(open_dataset(uri, remainder="drop"), 1, 100)


def test_options_of_the_rank_loader(uri: str) -> None:
    handle = open_dataset(uri)
    arguments: dict[str, Any] = {"global_batch_size": 100, "drop_last": True, "reader_bytes": 4000}
    batches = list(IterableDataset(handle, dtypes=torch.float32, with_row_offset=True, **arguments))
    assert (batches[0]["id"].dtype, batches[0]["_rowoffset"].dtype) == (torch.float32, torch.int64)
    with handle.loader(reader_bytes=4000) as loader:
        assert ids(iter(batches)) == ids(loader.iter_batches(global_batch_size=100, drop_last=True))
    sums = list(IterableDataset(handle, collate_fn=lambda batch: int(batch["id"].sum()), **arguments))
    assert sums == [int(batch["id"].sum()) for batch in batches]
    assert len(RowSampler(handle, **arguments)) == 10


def test_rows_by_index(write_dataset: Callable[..., str]) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(60, dtype=np.float32)), 3)
    lists = [[i] * i for i in range(20)]
    columns = {"id": np.arange(20), "vector": vectors, "text": [f"row {i}" for i in range(20)], "list": lists}
    uri = write_dataset(pa.table(columns | {"data": [bytes([i]) for i in range(20)]}))
    handle = open_dataset(uri, columns=None, filter="id >= 5")
    dataset = MapDataset(handle, with_row_offset=True)
    lance.write_dataset(pa.table({"id": [0]}), uri, mode="overwrite")  # the version is pinned
    dataset = pickle.loads(pickle.dumps(dataset))
    assert len(dataset) == 15
    assert [row["id"] for row in dataset] == list(range(5, 20))  # ends by IndexError
    picked = dataset.__getitems__([3, 0, 3, -1])
    assert [int(row["_rowoffset"]) for row in picked] == [8, 5, 8, 19]
    assert picked[1]["vector"].tolist() == [15, 16, 17]
    assert picked[1]["list"].tolist() == [5] * 5
    assert (picked[0]["text"], picked[0]["data"]) == ("row 8", b"\x08")
    with pytest.raises(IndexError, match="15 rows"):
        dataset[15]
    del picked[0]["list"], picked[1]["list"]
    batch = torch.utils.data.default_collate(picked[:2])
    assert batch["id"].dtype == torch.int64
    assert batch["vector"].shape == (2, 3)
    assert batch["data"] == [b"\x08", b"\x05"]


def test_blobs_come_as_bytes(tmp_path: Path) -> None:
    field = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    blobs = [None if i == 7 else bytes([i]) * i for i in range(30)]
    table = pa.table([pa.array(range(30)), pa.array(blobs, pa.large_binary())], pa.schema([("id", pa.int64()), field]))
    for version in ("2.0", "2.2"):
        uri = str(tmp_path / version)
        written = lance.write_dataset(table, uri, max_rows_per_file=8, data_storage_version=version)
        written.delete("id = 3")
        handle = open_dataset(uri, columns=["id", "blob"])
        assert {row["id"]: row["blob"] for row in MapDataset(handle)} == {i: blobs[i] for i in range(30) if i != 3}
        for batch in make_loader(handle, "iterable", 10):
            assert batch["blob"] == [blobs[row] for row in batch["id"].tolist()]


def test_a_fork_is_refused_and_does_not_hang(uri: str, tmp_path: Path) -> None:
    """Also where only the handle is of the process that was forked."""
    script = f"""
import raylance, torch
from torch.utils.data import DataLoader
from raylance.torch_data import IterableDataset, Loader, MapDataset
handle = raylance.dataset({uri!r})
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2

class Late(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return next(iter(steps()))
    def __len__(self):
        return 1

def steps():
    return IterableDataset(handle, global_batch_size=10)

forked = dict(num_workers=1, multiprocessing_context="fork")
for make in (
    lambda: DataLoader(Late(), None, **forked),
    lambda: DataLoader(MapDataset(handle), **forked),
    lambda: DataLoader(steps(), None, **forked),
    lambda: Loader(steps(), **forked),
):
    try:
        next(iter(make()))
    except raylance.RaylanceError as error:
        assert 'multiprocessing_context="spawn"' in str(error)
    else:
        raise SystemExit("not refused")
"""
    run_script(script, tmp_path)


@pytest.mark.parametrize(
    ("dist_info", "message"),
    [
        ("torch", "has not been initialized.*Initialise torch.distributed"),
        ("ray", "get_context.*inside of a Ray Train worker"),
        ("mpi", "dist_info='mpi' does not give"),
        ((2, 2), "rank 2 of 2"),
        ((), "not enough values"),
        ((0, 1.0), "rank 0 of 1.0"),
        (lambda: (-1, 2), "rank -1 of 2"),
        (lambda: 3, "does not give the rank"),
    ],
)
def test_a_place_is_never_guessed(dist_info: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_place(dist_info)


@pytest.mark.parametrize("dist_info", [None, "torch", "auto"])
def test_torch_distributed_gives_the_place(dist_info: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert find_place(dist_info) == (1, 2)


@pytest.mark.skipif(importlib.util.find_spec("jax") is not None, reason="jax is installed")
def test_without_jax_it_is_not_asked() -> None:
    with pytest.raises(ConfigError, match="No module named 'jax'"):
        find_place("jax")


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_jax_gives_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_place("jax") == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")  # jax.distributed is not initialised, and says 0 of 1
    with pytest.raises(ConfigError, match="WORLD_SIZE has rank unknown of 2"):
        find_place("jax")


def test_a_launcher_of_more_processes_is_believed(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset sent to a rank must find its place there, not keep that of the sender."""
    assert find_place() == (0, 1)
    sent = pickle.dumps(IterableDataset(open_dataset(uri), global_batch_size=8))
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="rank unknown of 4"):
        next(iter(pickle.loads(sent)))
    assert find_place((0, 1)) == (0, 1)
    monkeypatch.setenv("RANK", "1")
    assert find_place("auto") == (1, 4)
    assert IterableDataset(open_dataset(uri), global_batch_size=8, dist_info="auto").state_dict()["dp_size"] == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data: RowSampler(data), "exactly one"),
        (lambda data: IterableDataset(data, batch_size=0), "at least 1"),
        (lambda data: RowSampler(data, batch_size=4, dist_info=(5, 4)), "rank 5 of 4"),
        (lambda data: RowSampler(data, batch_size=4).set_epoch(-1), "epoch=-1: must be an integer of at least 0"),
        (lambda data: MapDataset(str(data)), "a str is not a handle"),
        (lambda data: IterableDataset(data, batchsize=4), r"no argument batchsize=: did you mean batch_size=\?"),
        (lambda data: RowSampler(data, batch_size=4, shuffle=True), "shuffle=: the dataset has an order"),
        (lambda data: IterableDataset(data, batch_size=4, dtypes={"x": torch.float32}), "dtypes names 'x'"),
        (lambda data: Loader(MapDataset(data)), "MapDataset and its RowSampler"),
        (
            lambda data: Loader(IterableDataset(data, batch_size=4), RowSampler(data, batch_size=4)),
            "and its RowSampler",
        ),
        # 1003 = 16 · 62 + 11: the last step has no row for the twelfth rank.
        (
            lambda data: next(iter(RowSampler(data, global_batch_size=16, dist_info=(3, 12)))),
            "a step of 11 rows leaves some of 12 data-parallel ranks an empty batch",
        ),
    ],
)
def test_bad_arguments(uri: str, call: Callable[[raylance.Dataset], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(open_dataset(uri))


def test_what_loader_sets_is_refused(uri: str) -> None:
    for option in ({"batch_size": 8}, {"in_order": False}):
        with pytest.raises(TypeError, match=next(iter(option))):
            Loader(IterableDataset(open_dataset(uri), batch_size=4), **option)


def test_a_rank_without_rows_gets_an_empty_batch(uri: str) -> None:
    last = list(IterableDataset(open_dataset(uri), global_batch_size=16, dist_info=(0, 12)))[-1]
    assert last["id"].shape == (0,)
