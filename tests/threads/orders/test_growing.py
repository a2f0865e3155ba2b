"""Datasets that get rows while they are trained on: at a restart, now or from the next epoch on."""

import itertools
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError, StateError
from raylance.runs import Newest

BATCH = 10


@pytest.fixture
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(100), "group": np.arange(100) % 5}))


def append(uri: str, first: int, rows: int) -> None:
    ids = np.arange(first, first + rows)
    lance.write_dataset(pa.table({"id": ids, "group": ids % 5}), uri, mode="append")


def opened(uri: str, when: str = "now", **arguments: Any) -> raylance.Dataset:
    given = {"order": "window", "seed": 2, "remainder": "ragged"} | arguments
    return raylance.dataset(uri, version=Newest(when=when), **given)  # type: ignore[arg-type]


def take(loader: raylance.RankLoader, steps: int = 1000, batch: int = BATCH) -> list[int]:
    found = itertools.islice(loader.iter_batches(global_batch_size=batch), steps)
    return [int(row) for each in found for row in each["id"]]


def begun(uri: str, steps: int, when: str = "now", **arguments: Any) -> tuple[list[int], dict[str, Any]]:
    with opened(uri, when, **arguments).loader(runtime="threads") as loader:
        ids = take(loader, steps)
        return ids, json.loads(json.dumps(loader.state_dict()))


def continued(uri: str, state: dict[str, Any], when: str = "now", **arguments: Any) -> raylance.RankLoader:
    loader = opened(uri, when, **arguments).loader(runtime="threads")
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("order", ["window", "row", "shard", "sequential"])
def test_new_rows_come_now_among_the_old_ones_that_are_left(
    uri: str, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, state = begun(uri, 4, order=order)
    append(uri, 100, 30)
    with caplog.at_level(logging.WARNING, "raylance"), continued(uri, state, order=order) as loader:
        assert "to which rows were appended" in caplog.text
        rest = take(loader)
        assert sorted(first + rest) == [*range(130)]
        assert not set(first) & set(rest)
        new = [row >= 100 for row in rest]
        assert 8 <= sum(new[:30]) <= 12, "a third of what is left is new"
        assert loader.epoch == 1
        assert sorted(take(loader)) == [*range(130)]
    if order in ("window", "shard"):
        return  # their sizes are those with which the run began
    fresh = raylance.dataset(uri, order=order, seed=2, remainder="ragged")
    with fresh.loader(runtime="threads") as other:
        other.set_epoch(2)
        with continued(uri, state, order=order) as loader:
            loader.set_epoch(2)
            assert take(loader) == take(other), "later epochs are those of the version"


def test_new_rows_come_from_the_next_epoch_on(uri: str) -> None:
    first, state = begun(uri, 4, "next_epoch")
    append(uri, 100, 30)
    with continued(uri, state, "next_epoch") as loader:
        assert sorted(first + take(loader)) == [*range(100)]
        assert sorted(take(loader)) == [*range(130)]
        state = loader.state_dict()
    assert state["order"]["name"] == "grown"
    with continued(uri, state) as loader:
        assert sorted(take(loader)) == [*range(130)]


def test_rows_that_come_again_and_again(uri: str) -> None:
    """In one epoch, in the next one, with deletions where an epoch begins, with another batch size and world."""
    ids, state = begun(uri, 3)
    append(uri, 100, 20)
    with continued(uri, state) as loader:
        ids += take(loader, 3, 7)
        state = loader.state_dict()
    append(uri, 120, 50)
    lance.dataset(uri).optimize.compact_files()
    parts = []
    for rank in range(2):
        loader = opened(uri).loader(rank=rank, world_size=2, runtime="threads")
        loader.load_state_dict(state)
        parts.append(take(loader, 5, 12))
        after = loader.state_dict()
        loader.close()
    ids += [*parts[0], *parts[1]]
    with continued(uri, after) as loader:
        ids += take(loader)
        assert sorted(ids) == [*range(170)]
        state = loader.state_dict()
    lance.dataset(uri).delete("id < 10")
    with continued(uri, state) as loader:
        assert sorted(take(loader)) == [*range(10, 170)]


def test_a_filter_selects_of_the_new_rows_too(uri: str) -> None:
    first, state = begun(uri, 1, filter="group = 1")
    append(uri, 100, 50)
    with continued(uri, state, filter="group = 1") as loader:
        assert sorted(first + take(loader)) == [*range(1, 150, 5)]
    first, state = begun(uri, 1, filter="id < 60")
    append(uri, 150, 5)
    with continued(uri, state, filter="id < 60") as loader:  # nothing new is selected
        assert sorted(first + take(loader)) == [*range(60)]


@pytest.mark.promise("P1", "P5")
def test_a_run_over_growing_data_is_proven(uri: str, tmp_path: Path) -> None:
    folder, state = str(tmp_path / "run"), None
    for number in range(4):
        with opened(uri).loader(runtime="threads", record=folder, name="train") as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = itertools.chain.from_iterable(itertools.repeat(loader.batches(global_batch_size=BATCH)))
            for _ in itertools.islice(batches, 5):
                pass
            state = loader.state_dict()
        append(uri, 100 + 20 * number, 20)
    (proof,) = raylance.prove_run(folder).datasets
    assert [(one.status, one.epoch, one.end) for one in proof.epochs] == [("proven", 0, 140), ("proven", 1, 60)]


@pytest.mark.promise("P1", "P5")
@pytest.mark.parametrize("whens", [["next_epoch"] * 4, ["next_epoch", "next_epoch", "now", "now"], ["now"] * 4])
def test_many_restarts_in_one_epoch_are_proven(uri: str, tmp_path: Path, whens: list[str]) -> None:
    """Versions between two others, of which no epoch had the rows, were forgotten."""
    folder, state, ids = str(tmp_path / "run"), None, list[int]()
    for number, when in enumerate(whens):
        with opened(uri, when).loader(runtime="threads", record=folder, name="train") as loader:
            if state is not None:
                loader.load_state_dict(state)
            ids += take(loader, 2 if number < 3 else 1000)
            state = json.loads(json.dumps(loader.state_dict()))
        append(uri, 100 + 10 * number, 10)
    assert sorted(ids) == [*range(130 if "now" in whens else 100)]
    (proof,) = raylance.prove_run(folder).datasets
    assert [one.status for one in proof.epochs] == ["proven"]
    with continued(uri, state or {}, whens[-1]) as loader:
        assert sorted(take(loader)) == [*range(140)]


def test_what_is_no_growth_is_refused_in_the_middle_of_an_epoch(uri: str) -> None:
    _, state = begun(uri, 4)
    append(uri, 100, 30)
    for when in ("refuse", None):
        version = None if when is None else Newest(when="refuse")
        loader = raylance.dataset(uri, order="window", seed=2, version=version).loader(runtime="threads")
        with pytest.raises(StateError):
            loader.load_state_dict(state)
    lance.dataset(uri).delete("id = 3")
    with pytest.raises(StateError):
        continued(uri, state)
    with pytest.raises(ConfigError):
        Newest(when="never")  # type: ignore[arg-type]


def test_updates_are_refused_although_as_many_rows_are_there(uri: str) -> None:
    _, state = begun(uri, 4)
    lance.dataset(uri).update({"group": "7"}, where="id = 3")
    with pytest.raises(StateError):
        continued(uri, state)


def test_orders_that_know_all_rows_begin_with_the_next_epoch_alone(uri: str) -> None:
    weighted = raylance.Weighted(weights="group")
    _, state = begun(uri, 4, order=weighted)
    append(uri, 100, 30)
    with pytest.raises(StateError):
        continued(uri, state, order=weighted)


def test_a_damaged_growth_is_refused(uri: str) -> None:
    _, state = begun(uri, 4)
    append(uri, 100, 30)
    with continued(uri, state) as loader:
        take(loader, 1)
        state = loader.state_dict()
    for wrong in ([], [{"epoch": 1}], 3):
        order = state["order"] | {"growths": wrong}
        with pytest.raises(StateError):
            continued(uri, state | {"order": order})
