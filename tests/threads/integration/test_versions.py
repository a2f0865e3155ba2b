"""Runs that continue with another version of their dataset: where that is harmless, and where it is refused."""

import datetime
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance

BATCH, ROWS = 20, 120


@pytest.fixture
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(*[pa.table({"id": np.arange(begin, begin + 30)}) for begin in range(0, ROWS, 30)])


def take(
    uri: str, folder: Path, steps: int | None, state: dict[str, Any] | None = None
) -> tuple[list[int], dict[str, Any]]:
    """Some steps of the newest version, or all of an epoch; returns their rows, and the state after them."""
    data = raylance.dataset(uri, columns=["id"], filter="id >= 0", seed=4, remainder="ragged")
    with data.loader(runtime="threads", record=str(folder), name="train") as loader:
        if state is not None:
            loader.load_state_dict(state)
        batches = loader.iter_batches(global_batch_size=BATCH)
        found = [
            ids for _, ids in zip(range(steps or 10**6), (batch["id"].tolist() for batch in batches), strict=False)
        ]
        return [row for ids in found for row in ids], loader.state_dict()


def index(dataset: lance.LanceDataset) -> None:
    dataset.create_scalar_index("id", "BTREE")


def add(dataset: lance.LanceDataset) -> None:
    dataset.add_columns({"twice": "2 * id"})


def compact(dataset: lance.LanceDataset) -> None:
    dataset.optimize.compact_files(target_rows_per_fragment=1000)


def append(dataset: lance.LanceDataset) -> None:
    lance.write_dataset(pa.table({"id": np.arange(ROWS, ROWS + 30)}), dataset.uri, mode="append")


def delete(dataset: lance.LanceDataset) -> None:
    dataset.delete("id = 7")


def update(dataset: lance.LanceDataset) -> None:
    dataset.update({"id": "id + 1000"}, where="id = 7")


def overwrite(dataset: lance.LanceDataset) -> None:
    lance.write_dataset(pa.table({"id": np.arange(ROWS)}), dataset.uri, mode="overwrite")


Change = Callable[[lance.LanceDataset], None]


@pytest.mark.promise("P5")
@pytest.mark.parametrize(
    "changes", [[index], [add], [compact], [add, compact, index]], ids=lambda changes: str(len(changes))
)
def test_a_version_with_the_same_rows_continues_in_mid_epoch(
    uri: str, tmp_path: Path, changes: list[Change], caplog: pytest.LogCaptureFixture
) -> None:
    """It was refused: "its position would mean other rows"."""
    first, state = take(uri, tmp_path, 3)
    for change in changes:
        change(lance.dataset(uri))
    last = lance.dataset(uri).version
    second, state = take(uri, tmp_path, 1, state)
    assert f"now {last}" in caplog.text
    caplog.clear()
    third, state = take(uri, tmp_path, None, state)
    assert not caplog.text, "that version is its own now"
    assert sorted(first + second + third) == list(range(ROWS))
    assert raylance.prove_run(tmp_path).ok


@pytest.mark.promise("P8")
@pytest.mark.parametrize("change", [append, delete, update, overwrite])
def test_other_rows_are_refused_in_mid_epoch(uri: str, tmp_path: Path, change: Change) -> None:
    _, state = take(uri, tmp_path, 3)
    before = lance.dataset(uri).version
    change(lance.dataset(uri))
    with pytest.raises(raylance.StateError, match=f"version: saved {before}, now {lance.dataset(uri).version}"):
        take(uri, tmp_path, None, state)


@pytest.mark.promise("P8")
def test_a_compaction_that_moves_rows_is_refused(uri: str, tmp_path: Path) -> None:
    """Lance writes what it compacts after the fragments that it leaves alone."""
    lance.dataset(uri).delete("id % 2 = 0 AND id < 30")
    before = lance.dataset(uri).to_table()["id"].to_pylist()
    _, state = take(uri, tmp_path, 3)
    lance.dataset(uri).optimize.compact_files(target_rows_per_fragment=30)
    assert sorted(before) == before != lance.dataset(uri).to_table()["id"].to_pylist()
    with pytest.raises(raylance.StateError, match="version"):
        take(uri, tmp_path, None, state)


def test_a_version_that_cannot_be_compared_is_refused(uri: str, tmp_path: Path) -> None:
    _, state = take(uri, tmp_path, 3)
    add(lance.dataset(uri))
    add_more = lance.dataset(uri)
    add_more.add_columns({"thrice": "3 * id"})
    lance.dataset(uri).cleanup_old_versions(older_than=datetime.timedelta(0), delete_unverified=True)
    with pytest.raises(raylance.StateError, match="version"):
        take(uri, tmp_path, None, state)


@pytest.mark.promise("P1", "P5")
@pytest.mark.parametrize("change", [append, delete])
def test_a_dataset_that_has_grown_begins_the_next_epoch(
    uri: str, tmp_path: Path, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    first, state = take(uri, tmp_path, None)
    assert (sorted(first), state["epoch"], state["position"]) == (list(range(ROWS)), 1, 0)
    change(lance.dataset(uri))
    with caplog.at_level(logging.WARNING):
        second, state = take(uri, tmp_path, None, state)
    assert f"rows: saved {ROWS}, now {len(second)}" in caplog.text
    assert sorted(second) == sorted(lance.dataset(uri).to_table()["id"].to_pylist())
    assert state["epoch"] == 2
    proof = raylance.prove_run(tmp_path)
    assert proof.ok
    assert [one.rows for one in proof.datasets[0].epochs] == [ROWS, len(second)]


@pytest.mark.promise("P8")
def test_weights_of_a_mixture_are_named_as_they_were_given(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    def loader(weights: dict[str, float]) -> raylance.RankLoader:
        data = raylance.dataset(uri, columns=["id"])
        return raylance.mix({name: (data, weight) for name, weight in weights.items()}).loader(runtime="threads")

    with loader({"a": 0.75, "b": 0.25}) as begun:
        next(iter(begun.iter_batches(global_batch_size=BATCH)))
        state = begun.state_dict()
    with caplog.at_level("WARNING", "raylance"):
        loader({"a": 0.5, "b": 0.5}).load_state_dict(state)
    assert "'a': 0.75, 'b': 0.25" in caplog.text
    assert "'a': 0.5, 'b': 0.5" in caplog.text
    assert "quota" not in caplog.text
    with pytest.raises(raylance.StateError, match=r"\['a', 'b'\].*\['a', 'c'\]"):
        loader({"a": 0.75, "c": 0.25}).load_state_dict(state)
