"""What a state says of the data it belongs to, and what a loader takes over: branches, rewritten datasets, other
decodings, damaged orders, and checkpoints of earlier versions.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.audit import EpochAudit, reopen
from raylance.errors import DatasetError
from tests.helpers.images import encode
from tests.helpers.states import signed

DATA = Path(__file__).parents[2] / "data"


def numbers(start: int, rows: int) -> pa.Table:
    return pa.table({"id": np.arange(start, start + rows), "label": np.arange(rows) % 5})


def position_of(handle: raylance.Dataset) -> dict[str, Any]:
    """A state of the handle's loader, as a checkpoint holds it."""
    return json.loads(json.dumps(handle.loader().state_dict()))


def test_a_tag_into_a_branch_reads_the_branch(write_dataset: Callable[..., str]) -> None:
    """Main and branch have the same version number and as many rows, but other ones."""
    uri = write_dataset(numbers(0, 10))
    main = lance.dataset(uri)
    branch = main.create_branch("exp")
    branch.insert(numbers(500, 5))
    main.insert(numbers(900, 5))
    assert main.version == branch.version == 2
    main.tags.create("best", ("exp", 2))
    wanted = [*range(10), *range(500, 505)]
    tagged = raylance.dataset(uri, version="best", order="sequential")
    for handle in (tagged, raylance.dataset(uri, version=("exp", None)), raylance.dataset(branch.uri)):
        assert handle[:]["id"].tolist() == wanted
    main.tags.create("trunk", 2)
    for place, version in ((uri, None), (uri, (None, 2)), (branch.uri, "trunk")):
        assert raylance.dataset(place, version=version)[:]["id"].tolist()[10:] == [*range(900, 905)]
    state = position_of(tagged)
    assert (state["branch"], state["version"]) == ("exp", 2)
    raylance.dataset(uri, version=("exp", 2), order="sequential").loader().load_state_dict(state)
    with pytest.raises(raylance.StateError, match="branch: saved 'exp', now None"):
        raylance.dataset(uri, version=2, order="sequential").loader().load_state_dict(state)
    with pytest.raises(DatasetError, match=r"\('none', None\).*'exp'"):
        raylance.dataset(uri, version=("none", None))


def test_mixtures_that_differ_are_noticed(write_dataset: Callable[..., str]) -> None:
    """The places of a mixture's components decide which rows come when, whatever their names."""
    left, right = (raylance.dataset(write_dataset(numbers(start, 60))) for start in (0, 1000))
    state = position_of(raylance.mix({"a": (left, 1), "b": (right, 1)}))
    raylance.mix({"a": (left, 1), "b": (right, 1)}).loader().load_state_dict(state)
    for parts, message in (
        ({"b": (right, 1), "a": (left, 1)}, r"saved \['a', 'b'\], now \['b', 'a'\]"),
        ({"a": (right, 1), "b": (left, 1)}, "uri.a: saved"),
    ):
        with pytest.raises(raylance.StateError, match=message):
            raylance.mix(parts).loader().load_state_dict(state)


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"label": batch["label"] * 2}


def test_another_decoding_is_named_in_one_warning(images_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    decode = raylance.Image("image", size=8, augment=raylance.RandomResizedCrop(scale=(0.5, 1)))
    saved = position_of(raylance.dataset(images_uri, decode=decode, transform=double))
    with caplog.at_level(logging.WARNING, logger="raylance"):
        raylance.dataset(images_uri, decode=decode, transform=double).loader().load_state_dict(saved)
        assert not caplog.records
        other = raylance.Image("image", size=16, augment=raylance.RandomResizedCrop())
        raylance.dataset(images_uri, decode=other, columns=["image", "label"]).loader().load_state_dict(saved)
    assert len(caplog.records) == 1
    for part in ("'scale': [0.5, 1]", "'size': [16, 16]", f"{__name__}.double', now None", "columns: saved"):
        assert part in caplog.text
    assert "0x" not in json.dumps(saved), "no address, which another process would not have"


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"shard_rows": "fragment"}, "order.shard_rows: saved 'fragment', now 'auto'"),
        ({"lanes": 0}, "order.lanes: saved 0, now 'auto'"),
        ({"lanes": 2.5}, "order.lanes: saved 2.5"),
        ({"lanes": None}, "order.lanes: saved None"),
        ({"window_shards": [1]}, r"order.window_shards: saved \[1\]"),
        ({"name": 3}, "order.name: saved 3, now 'window'"),
        (None, "damaged: its order is None"),
    ],
)
def test_orders_that_do_not_fit_or_are_damaged(images_uri: str, order: Any, message: str) -> None:
    handle = raylance.dataset(images_uri, columns=["id"])
    state = position_of(handle)
    state["order"] = order if order is None else state["order"] | order
    with pytest.raises(raylance.StateError, match="changed after it was written|damaged"):
        handle.loader().load_state_dict(state)
    state = state if order is None else signed(state)
    with pytest.raises(raylance.StateError, match=message):
        handle.loader().load_state_dict(state)


@pytest.fixture(scope="module")
def old_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The datasets that the states in tests/data were saved of, but for their path."""
    path = tmp_path_factory.mktemp("old")
    for name, rows in (("a.lance", 500), ("b.lance", 200)):
        ids = np.arange(rows)
        table = pa.table({"id": ids, "label": ids % 5, "weight": (ids % 3).astype(float)})
        lance.write_dataset(table, path / name, max_rows_per_file=100)
        lance.dataset(path / name).delete("id >= 30 and id < 40")
    images = pa.table({"id": np.arange(60), "image": [encode(np.full((4, 5, 3), i, np.uint8)) for i in range(60)]})
    lance.write_dataset(images, path / "c.lance", max_rows_per_file=100)
    lance.dataset(path / "c.lance").delete("id >= 30 and id < 40")
    return path


def open_old(path: Path, kind: str, weights: tuple[float, float] = (0.7, 0.3)) -> raylance.Dataset:
    """The handle that a state in tests/data was saved of."""
    if kind == "mix":
        order = raylance.Weighted(weights="weight", rows_per_epoch=150)
        other = raylance.dataset(path / "b.lance", seed=8, order=order)
        return raylance.mix({"a": (open_old(path, "small_windows"), weights[0]), "b": (other, weights[1])})
    image = raylance.Image("image", size=(4, 4), augment=raylance.RandomResizedCrop(), hflip=0.5)
    split = raylance.FractionSplit(fractions={"train": 0.8, "val": 0.2}, part="train", by="id")
    arguments: dict[str, Any] = {
        "images": {"decode": image},
        "window": {"filter": "label != 3", "order": raylance.WindowShuffle(shard_rows=10)},
        "balanced": {"split": split, "order": raylance.ClassBalanced(column="label", classes_per_batch=3)},
        "weighted": {"order": raylance.Weighted(weights="weight")},
        "small_windows": {},
        "row": {"order": raylance.RowShuffle(shard_rows=3), "remainder": "ragged"},
    }[kind]
    return raylance.dataset(path / ("c.lance" if kind == "images" else "a.lance"), seed=7, **arguments)


def saved_old(path: Path, kind: str) -> dict[str, Any]:
    """A state that raylance 0.8.0 saved of the datasets of `old_data`, and the rows of the steps after it."""
    text = (DATA / "states-0.8.0.json").read_text().replace("TMP", str(path))
    for name in ("a.lance", "b.lance", "c.lance"):
        text = text.replace(f"IDENTITY {name}", raylance.dataset(path / name).loader().state_dict()["identity"])
    saved: dict[str, Any] = json.loads(text)[kind]
    if kind == "images":  # its codecs are those of this environment
        saved["state"]["codecs"] = open_old(path, kind).loader().state_dict()["codecs"]
    return saved


STEPS = {"window": 4, "balanced": 4, "weighted": 4, "small_windows": 17, "row": 17 + 2 * 21, "mix": 4, "images": 1}


@pytest.mark.parametrize("kind", STEPS)
def test_old_states_continue_with_the_same_rows(old_data: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    saved, handle = saved_old(old_data, kind), open_old(old_data, kind)
    with handle.loader(runtime="threads") as loader, caplog.at_level(logging.WARNING, logger="raylance"):
        loader.load_state_dict(saved["state"])
        renamed = {"dp_size" if key == "world_size" else key: value for key, value in saved["state"].items()}
        assert loader.state_dict() == renamed | {"format": 6, "split": loader.state_dict()["split"]}
        assert loader.global_step == STEPS[kind]
        batches = iter(loader.batches(global_batch_size=24, with_row_offset=True))
        assert [next(batches)["_rowoffset"].tolist() for _ in saved["next"]] == saved["next"]
        state = loader.state_dict()
    assert not caplog.records
    assert state["global_step"] == STEPS[kind] + len(saved["next"])
    assert state["order"] == saved["state"]["order"]
    handle.loader().load_state_dict(json.loads(json.dumps(state)))


def test_an_old_mixture_has_other_weights_from_its_position_on(old_data: Path) -> None:
    saved = saved_old(old_data, "mix")["state"]
    with open_old(old_data, "mix", (1, 1)).loader(runtime="threads") as loader:
        loader.load_state_dict(saved)
        counts = {name: part["rows"] for name, part in loader.state_dict()["components"].items()}
        assert counts == {name: part["rows"] for name, part in saved["components"].items()}
        next(iter(loader.batches(global_batch_size=24)))
        after = {name: part["rows"] for name, part in loader.state_dict()["components"].items()}
    assert {name: after[name] - count for name, count in counts.items()} == dict.fromkeys(counts, 12)


@pytest.mark.parametrize("kind", ["small_windows", "row", "window", "mix"])
def test_complete_shards_are_those_of_the_position(old_data: Path, kind: str) -> None:
    """Places are listed, or nothing if an order completes shards in no sequence."""
    saved, handle = saved_old(old_data, kind)["state"], open_old(old_data, kind)
    loader = handle.loader(runtime="threads")
    loader.load_state_dict(saved)
    state = json.loads(json.dumps(loader.state_dict()))
    listed = state["completed_shards"]
    assert ("on_request" in listed) == (kind == "row")
    assert EpochAudit(handle, state=state).completed_shards(state).tolist() == loader.completed_shards().tolist()
    if shards := listed["shards"]:
        lie = {"shards": shards, "complete": shards, "places": [[0, shards]]}
        with pytest.raises(raylance.StateError, match="have rows to come"):
            EpochAudit(handle, state=state).completed_shards(state | {"completed_shards": lie})


@pytest.mark.parametrize("kind", ["window", "balanced", "weighted", "small_windows"])
def test_an_old_run_is_reopened_and_looked_at(old_data: Path, tmp_path: Path, kind: str) -> None:
    """By its state alone, wherever the data lies now."""
    saved = saved_old(old_data, kind)
    moved = shutil.copytree(old_data / "a.lance", tmp_path / "moved.lance")
    given = {"order": raylance.Weighted(weights="weight")} if kind == "weighted" else {}
    epoch = EpochAudit(reopen(saved["state"], uri=str(moved), **given), state=saved["state"])
    steps = range(STEPS[kind], STEPS[kind] + len(saved["next"]))
    assert [epoch.rows_of_step(step)["row_offset"].tolist() for step in steps] == saved["next"]
    assert epoch.count().ok
