"""Leases without Ray: rows and their tickets, the file, states, epochs, proofs, and what is refused."""

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError, StateError
from raylance.runs import Leases

ROWS = 50


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    texts = [f"prompt {number}" for number in range(ROWS)]
    return write_dataset(pa.table({"id": np.arange(ROWS), "prompt": texts}))


@pytest.fixture(scope="module")
def dataset(uri: str) -> raylance.Dataset:
    return raylance.dataset(uri, order="row", seed=3)


def test_rows_come_in_the_order_of_the_dataset_and_are_done_in_any(dataset: raylance.Dataset, tmp_path: Path) -> None:
    leases = Leases(dataset, tmp_path, epochs=2)
    loader = dataset.loader(runtime="threads")
    wanted = [list(batch["id"]) for _ in range(2) for batch in loader.iter_batches(global_batch_size=ROWS)]
    taken, found, rng = [], list[int](), np.random.default_rng(0)
    while not leases.progress().is_over:
        lease = leases.lease(7)
        assert [f"prompt {number}" for number in lease.rows["id"]] == list(lease.rows["prompt"])
        found += lease.rows["id"].tolist()
        taken.append(lease)
        while len(taken) > 2 or (taken and not len(lease)):
            one = taken.pop(rng.integers(len(taken)))
            assert leases.done(one.tickets[rng.permutation(len(one))]).all()
    assert found == [*wanted[0], *wanted[1]]
    assert leases.progress().done == 2 * ROWS
    assert "100 rows are done" in leases.prove()
    assert len(leases.lease(3, wait_s=5.0)) == 0, "nobody waits for rows that will not come"


def test_another_object_continues_from_the_file(dataset: raylance.Dataset, tmp_path: Path) -> None:
    first = Leases(dataset, tmp_path)
    one, two = first.lease(6), first.lease(6)
    first.done(one.tickets[1:])
    assert Leases(dataset, str(tmp_path)).progress().out == 7, "objects of one process share their work"
    del first  # as if its process had ended
    second = Leases(dataset, str(tmp_path))
    progress = second.progress()
    assert (progress.frontier, progress.done, progress.waiting, progress.out) == (0, 5, 7, 0)
    again = second.lease(7)
    assert again.rows["id"].tolist() == [one.rows["id"][0], *two.rows["id"]]
    assert second.done(two.tickets).all(), "who still works on them is welcome"
    assert second.done(again.tickets).tolist() == [True] + [False] * 6


def test_a_run_returns_to_a_checkpoint(dataset: raylance.Dataset, tmp_path: Path) -> None:
    leases = Leases(dataset, tmp_path)
    one = leases.lease(8)
    leases.done(one.tickets[[0, 1, 5]])
    state = json.loads(json.dumps(leases.state_dict()))
    leases.done(one.tickets)
    leases.done(leases.lease(4).tickets)
    leases.load_state_dict(state)
    assert (leases.progress().frontier, leases.progress().done) == (2, 3)
    again = leases.lease(5)
    assert again.rows["id"].tolist() == one.rows["id"][[2, 3, 4, 6, 7]].tolist()
    leases.done(again.tickets)
    leases.prove()
    elsewhere = Leases(dataset, tmp_path / "other", name="prompts")
    elsewhere.load_state_dict(state)
    assert elsewhere.progress().done == 3


def test_failures_come_first_and_are_given_up_at_last(dataset: raylance.Dataset, tmp_path: Path) -> None:
    leases = Leases(dataset, tmp_path, most_attempts=2, most_ahead=4)
    seen = Counter[int]()
    bad = int(leases.lease(1).rows["id"][0])
    del leases
    leases = Leases(dataset, tmp_path, most_attempts=2, most_ahead=4)
    for _ in range(6):
        lease = leases.lease(4)
        seen.update(lease.rows["id"].tolist())
        is_bad = lease.rows["id"] == bad
        leases.fail(lease.tickets[is_bad])
        leases.done(lease.tickets[~is_bad])
    assert seen[bad] == 2
    assert leases.progress().given_up == 1
    assert "given up" in leases.prove()


def test_a_wrong_report_is_found(dataset: raylance.Dataset, tmp_path: Path) -> None:
    leases = Leases(dataset, tmp_path)
    lease = leases.lease(3)
    lease.tickets[:, 2] += 1  # another row than that of the ticket
    leases.done(lease.tickets)
    with pytest.raises(StateError):
        leases.prove()


def test_mixtures_images_and_epochs(
    dataset: raylance.Dataset, write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    other = raylance.dataset(write_dataset(pa.table({"id": np.arange(100, 120), "prompt": ["x"] * 20})))
    mixed = raylance.mix({"a": (dataset, 3), "b": (other, 1)}, stop=60)
    leases = Leases(mixed, tmp_path)
    ids, epochs = list[int](), list[int]()
    for _ in range(13):
        lease = leases.lease(10)
        ids += lease.rows["id"].tolist()
        epochs += lease.epoch.tolist()
        assert (lease.rows["_component"] == (lease.rows["id"] >= 100)).all()
        leases.done(lease.tickets)
    assert epochs == [0] * 60 + [1] * 60 + [2] * 10
    assert sum(number >= 100 for number in ids[:60]) == 15
    leases.prove()


def test_what_cannot_be_honoured_is_refused(dataset: raylance.Dataset, uri: str, tmp_path: Path) -> None:
    wrong: list[dict[str, Any]] = [
        {"most_ahead": 0},
        {"lease_s": 0},
        {"most_attempts": 0},
        {"epochs": 0},
        {"name": "a/b"},
    ]
    for arguments in wrong:
        with pytest.raises(ConfigError):
            Leases(dataset, tmp_path, **arguments)
    with pytest.raises(ConfigError):
        Leases(uri, tmp_path)  # type: ignore[arg-type]
    leases = Leases(dataset, tmp_path)
    lease = leases.lease(2)
    for tickets in ([1, 2], lease.tickets[:, :2], lease.tickets * 0.5):
        with pytest.raises(ConfigError):
            leases.done(tickets)
        with pytest.raises(ConfigError):
            leases.fail(tickets)
    with pytest.raises(ConfigError):
        leases.lease(0)
    assert leases.done([]).tolist() == []
    with pytest.raises(ConfigError):
        pickle.dumps(leases)
    with pytest.raises(StateError):
        leases.load_state_dict({"format": 2})
    other = raylance.dataset(uri, order="row", seed=4)
    with pytest.raises(ConfigError):
        Leases(other, tmp_path)
    with pytest.raises(StateError):
        Leases(other, tmp_path / "new").load_state_dict(leases.state_dict())
    del leases
    with pytest.raises(StateError):
        Leases(other, tmp_path)


def damaged(path: Path) -> Iterator[str]:
    """The file of some leases, damaged in many ways."""
    found = json.loads(path.read_text())
    yield from ("", "[]", "{", "{}", json.dumps({"session": "", "loader": found["loader"]}))
    for name, value in (("frontier", -1), ("next", 10**15), ("done", "x"), ("given_up", [99999]), ("digest", [1])):
        yield json.dumps(found | {"book": found["book"] | {name: value}})
    for name in ("status", "holder", "since", "failures"):
        yield json.dumps(found | {"book": found["book"] | {name: found["book"]["done"]}})
    yield json.dumps(found | {"leases": [1]})


def test_a_damaged_file_or_state_is_refused_and_changes_nothing(dataset: raylance.Dataset, tmp_path: Path) -> None:
    leases = Leases(dataset, tmp_path)
    leases.done(leases.lease(20).tickets[3:9])
    state = leases.state_dict()
    for wrong in (None, {}, state | {"book": {}}, state | {"book": state["book"] | {"given_up": [999]}}):
        with pytest.raises(StateError):
            leases.load_state_dict(wrong)  # type: ignore[arg-type]
    assert leases.state_dict() == state
    del leases
    path = tmp_path / "raylance" / "leases-leases.json"
    for text in damaged(path):
        path.write_text(text)
        with pytest.raises(StateError):
            Leases(dataset, tmp_path)


def drained(leases: Leases, rows: int = 16) -> list[int]:
    """Takes and finishes what is left."""
    found = list[int]()
    while len(lease := leases.lease(rows)):
        assert leases.done(lease.tickets).all()
        found += lease.rows["id"].tolist()
    return found


def test_what_changes_at_a_restart_holds_for_rows_that_were_not_handed_out(
    dataset: raylance.Dataset, write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    other = raylance.dataset(write_dataset(pa.table({"id": np.arange(100, 150), "prompt": ["x"] * 50})), order="row")
    leases = Leases(raylance.mix({"a": (dataset, 3), "b": (other, 1)}, stop=60), tmp_path)
    one = leases.lease(20)
    leases.done(one.tickets[:12])
    del leases
    leases = Leases(raylance.mix({"a": (dataset, 1), "b": (other, 1)}, stop=60), tmp_path)
    again, new = leases.lease(8), leases.lease(20)
    assert again.rows["id"].tolist() == one.rows["id"][12:].tolist()
    assert sum(new.rows["id"] >= 100) == 10
    assert leases.done(np.concatenate([new.tickets, again.tickets])).all()
    leases.prove()


@pytest.mark.parametrize("when", ["now", "next_epoch"])
def test_rows_that_are_appended_are_handed_out(write_dataset: Callable[..., str], tmp_path: Path, when: Any) -> None:
    uri, found = write_dataset(pa.table({"id": np.arange(60)})), list[int]()
    for number in range(3):
        data = raylance.dataset(uri, version=raylance.runs.Newest(when=when), order="window", seed=1)
        leases = Leases(data, tmp_path, epochs=2)
        found += [] if number else leases.lease(5).rows["id"][:0].tolist()
        lease = leases.lease(25)
        leases.done(lease.tickets)
        found += lease.rows["id"].tolist()
        if number < 2:
            del leases
            ids = np.arange(60 + 20 * number, 80 + 20 * number)
            lance.write_dataset(pa.table({"id": ids}), uri, mode="append")
    found += drained(leases)
    first = 100 if when == "now" else 60 if len(found) == 160 else 80
    assert sorted(found[:first]) == [*range(first)]
    assert sorted(found[first:]) == [*range(100)]
    leases.prove()
    assert leases.progress().is_over


def test_fewer_epochs_than_are_done_are_over(dataset: raylance.Dataset, tmp_path: Path) -> None:
    assert len(drained(Leases(dataset, tmp_path, epochs=2))) == 2 * ROWS
    leases = Leases(dataset, tmp_path, epochs=1)
    assert leases.progress().is_over
    assert len(leases.lease(3)) == 0
