"""Mixtures whose weights, datasets and end change in the course of a run: by a schedule, a restart, the trainer."""

import itertools
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.audit import EpochAudit, reopen
from raylance.errors import ConfigError, StateError

BATCH = 12
Parts = Mapping[str, tuple[raylance.Dataset, float]]


@pytest.fixture(scope="module")
def datasets(write_dataset: Callable[..., str]) -> dict[str, raylance.Dataset]:
    """Datasets whose ids begin at 0, 1000 and 2000."""
    rows = {"a": 240, "b": 120, "c": 90}
    tables = {
        name: np.arange(1000 * number, 1000 * number + count) for number, (name, count) in enumerate(rows.items())
    }
    orders = {"a": "window", "b": "row", "c": "row"}
    return {
        name: raylance.dataset(write_dataset(pa.table({"id": ids})), order=orders[name], seed=number)
        for number, (name, ids) in enumerate(tables.items())
    }


def weighed(datasets: Mapping[str, raylance.Dataset], *weights: float) -> Parts:
    return {name: (datasets[name], weight) for name, weight in zip(datasets, weights, strict=False)}


def shares(batch: Any) -> dict[str, int]:
    counted = Counter(batch["id"] // 1000)
    return {"abc"[int(number)]: count for number, count in sorted(counted.items())}


def take(loader: raylance.RankLoader, steps: int, batch: int = BATCH) -> list[list[int]]:
    """The ids of some steps."""
    return [list(found["id"]) for found in itertools.islice(loader.iter_batches(global_batch_size=batch), steps)]


def test_a_schedule_changes_the_weights_at_its_places(datasets: dict[str, raylance.Dataset]) -> None:
    schedule = raylance.runs.Schedule(weights={5: {"a": 1, "b": 2}, 10: {"a": 0, "b": 1}}, unit_rows=BATCH)
    mixed = raylance.mix(weighed(datasets, 1, 1), schedule=schedule, stop=13 * BATCH)
    with mixed.loader() as loader:
        for _ in range(2):
            found = [shares(batch) for batch in loader.iter_batches(global_batch_size=BATCH)]
            assert len(found) == 13
            if loader.epoch == 1:
                assert found[:5] == [{"a": 6, "b": 6}] * 5
                assert found[5:10] == [{"a": 4, "b": 8}] * 5
                assert found[10:] == [{"b": 12}] * 3
        assert found == [{"b": 12}] * 13, "places count from the begin of the run"


def test_a_line_changes_the_weights_in_small_steps(datasets: dict[str, raylance.Dataset]) -> None:
    line = raylance.runs.Schedule(weights={192: {"a": 0, "b": 1}}, curve="linear")
    with raylance.mix(weighed(datasets, 1, 0), schedule=line, stop=216).loader() as loader:
        found = [shares(batch).get("b", 0) for batch in loader.iter_batches(global_batch_size=24)]
    assert found == sorted(found)
    np.testing.assert_allclose(found, [1.5, 4.5, 7.5, 10.5, 13.5, 16.5, 19.5, 22.5, 24], atol=1.5)


def test_a_restart_changes_what_lies_ahead_and_nothing_before(
    datasets: dict[str, raylance.Dataset], caplog: pytest.LogCaptureFixture
) -> None:
    with raylance.mix(weighed(datasets, 2, 1)).loader() as loader:
        whole = take(loader, 20)
    with raylance.mix(weighed(datasets, 2, 1)).loader() as loader:
        assert take(loader, 5) == whole[:5]
        state = json.loads(json.dumps(loader.state_dict()))
    now = raylance.mix(weighed(datasets, 1, 1, 2), stop="all_exhausted", remainder="ragged")
    with now.loader() as loader, caplog.at_level(logging.WARNING, "raylance"):
        loader.load_state_dict(state)
        rest = take(loader, 4)
        state = loader.state_dict()
    assert "another mixture from epoch 0, position 60" in caplog.text
    assert [shares({"id": np.array(ids)}) for ids in rest] == [{"a": 3, "b": 3, "c": 6}] * 4
    assert {name: part["rows"] for name, part in state["components"].items()} == {"a": 52, "b": 32, "c": 24}
    caplog.clear()
    with now.loader() as loader, caplog.at_level(logging.WARNING, "raylance"):
        loader.load_state_dict(state)
        last = [list(batch["id"]) for batch in loader.iter_batches(global_batch_size=BATCH)]
        assert loader.state_dict()["order"]["segments"] == state["order"]["segments"]
    assert not caplog.records, "the same arguments again are no change"
    every = Counter(itertools.chain(*whole[:5], *rest, *last))
    for name, count in (("a", 240), ("b", 120), ("c", 90)):
        own = [every[1000 * "abc".index(name) + row] for row in range(count)]
        assert min(own) >= 1, name
        assert max(own) - min(own) <= 1, "a dataset begins again when all its rows came"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_global_batches_are_the_same_on_any_world(datasets: dict[str, raylance.Dataset], world: int) -> None:
    """Through a restart, a schedule and a change by the trainer."""
    mixed = raylance.mix(
        weighed(datasets, 2, 1), schedule=raylance.runs.Schedule(weights={90: {"a": 1, "b": 3}}), stop="all_exhausted"
    )

    def steps(before: Mapping[str, Any] | None, now: raylance.Dataset, move: bool) -> Iterator[list[list[int]]]:
        """What the ranks get, and the state of one."""
        loaders = [now.loader(rank=rank, world_size=world, runtime="threads") for rank in range(world)]
        for loader in loaders:
            if before is not None:
                loader.load_state_dict(before)
        batches = [iter(loader.iter_batches(global_batch_size=BATCH)) for loader in loaders]
        for number in range(12):
            if move and number == 7:
                for loader in loaders:
                    loader.reweight({"a": 1, "b": 1, "c": 1}, reason="losses")
            yield [list(next(each)["id"]) for each in batches]
        states.append([loader.state_dict() for loader in loaders])
        for loader in loaders:
            loader.close()

    states: list[list[dict[str, Any]]] = []
    found = [[*itertools.chain(*ranks)] for ranks in steps(None, mixed, move=False)]
    after = raylance.mix(weighed(datasets, 1, 1, 0), stop="all_exhausted")
    found += [[*itertools.chain(*ranks)] for ranks in steps(states[0][0], after, move=True)]
    assert all(state["order"] == states[1][0]["order"] for state in states[1])
    GLOBAL.setdefault("batches", [sorted(ids) for ids in found])
    assert [sorted(ids) for ids in found] == GLOBAL["batches"]
    assert shares({"id": np.array(found[-1])}) == {"a": 4, "b": 4, "c": 4}


GLOBAL: dict[str, list[list[int]]] = {}


def test_weights_change_between_two_steps_of_a_pass(datasets: dict[str, raylance.Dataset]) -> None:
    with raylance.mix(weighed(datasets, 1, 1)).loader() as loader:
        batches = iter(loader.iter_batches(global_batch_size=BATCH))
        found = [next(batches) for _ in range(3)]
        loader.reweight({"a": 3, "b": 1}, reason="loss of a")
        found += [next(batches) for _ in range(2)]
        loader.reweight({"b": 1, "a": 1})
        loader.reweight({"b": 1, "a": 0})
        found += [next(batches)]
        state = loader.state_dict()
    assert [shares(batch) for batch in found] == [*[{"a": 6, "b": 6}] * 3, *[{"a": 9, "b": 3}] * 2, {"b": 12}]
    segments = state["order"]["segments"]
    assert [(each["position"], each["quotas"], each.get("reason")) for each in segments] == [
        (36, [3, 1], "loss of a"),
        (60, [0, 1], None),
    ]
    with raylance.mix(weighed(datasets, 1, 1)).loader() as loader:
        loader.load_state_dict(state)
        assert [shares({"id": np.array(ids)}) for ids in take(loader, 2)] == [{"b": 12}] * 2


def test_weights_that_change_before_the_first_step_of_a_restart(
    datasets: dict[str, raylance.Dataset], caplog: pytest.LogCaptureFixture
) -> None:
    """They took the place of those of the arguments, which the next start then took for new ones."""
    with raylance.mix(weighed(datasets, 1, 1)).loader() as loader:
        take(loader, 2)
        state = loader.state_dict()
    other = raylance.mix(weighed(datasets, 1, 2))
    with other.loader() as loader:
        loader.load_state_dict(state)
        loader.reweight({"a": 3, "b": 1}, reason="losses")
        take(loader, 2)
        state = json.loads(json.dumps(loader.state_dict()))
    caplog.clear()
    with other.loader() as loader, caplog.at_level(logging.WARNING, "raylance"):
        loader.load_state_dict(state)
        assert not caplog.records, "the same arguments again are no change"
        assert shares({"id": np.array(take(loader, 1)[0])}) == {"a": 9, "b": 3}


def test_a_step_that_is_taken_back_has_the_weights_that_it_had(datasets: dict[str, raylance.Dataset]) -> None:
    with raylance.mix(weighed(datasets, 1, 1)).loader() as loader:
        batches = iter(loader.iter_batches(global_batch_size=BATCH))
        one, two = (list(next(batches)["id"]) for _ in range(2))
        loader.reweight({"a": 0, "b": 1})
        loader.repeat()
        assert list(next(batches)["id"]) == two
        assert shares(next(batches)) == {"b": 12}
        loader.set_epoch(0)
        assert list(next(iter(loader.iter_batches(global_batch_size=BATCH)))["id"]) == one


def test_an_audit_and_a_reopened_run_know_the_whole_course(datasets: dict[str, raylance.Dataset]) -> None:
    with raylance.mix(weighed(datasets, 2, 1), stop=300).loader() as loader:
        first = take(loader, 4)
        loader.reweight({"a": 1, "b": 5})
        first += take(loader, 4)
        state = loader.state_dict()
    with raylance.mix(weighed(datasets, 1, 1, 1), stop=300).loader() as loader:
        loader.load_state_dict(state)
        first += take(loader, 17)
        state = loader.state_dict()
    assert (loader.epoch, loader.step) == (1, 0)
    opened = reopen(state)
    audit = EpochAudit(opened, global_batch_size=BATCH, state=state, epoch=0)
    planned = [list(ranks[0].rows) for ranks in audit.by_plan() if ranks[0] is not None]
    assert len(planned) == 25
    offsets = [[int(row) % (1 << 40) for row in rows] for rows in planned]
    assert [sorted(each) for each in offsets] == [sorted(id_ % 1000 for id_ in ids) for ids in first]
    with opened.loader() as loader:
        assert take(loader, 25) == first


@pytest.mark.promise("P1", "P5")
def test_a_run_is_proven_through_all_changes(datasets: dict[str, raylance.Dataset], tmp_path: Path) -> None:
    """On two worlds, with a third dataset from the second start on."""
    folder = str(tmp_path / "run")

    def run(parts: Parts, state: dict[str, Any] | None, world: int, steps: int, move: Mapping[str, float]) -> Any:
        mixed = raylance.mix(parts, stop=300)
        given = {"world_size": world, "runtime": "threads", "record": folder, "name": "train"}
        loaders = [mixed.loader(rank=rank, **given) for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        passes = [loader.batches(global_batch_size=BATCH) for loader in loaders]
        batches = [itertools.chain.from_iterable(itertools.repeat(each)) for each in passes]
        for step in range(steps):
            if step == steps // 2:
                for loader in loaders:
                    loader.reweight(move, reason="loss")
            for each in batches:
                next(each)
        found = [loader.state_dict() for loader in loaders]
        for loader in loaders:
            loader.close()
        return found[0]

    def proven() -> list[tuple[str, int]]:
        proof = raylance.prove_run(folder)
        (found,) = proof.datasets
        return [(one.status, one.end) for one in found.epochs]

    state = run(weighed(datasets, 2, 1), None, 2, 7, {"a": 1, "b": 4})
    assert proven() == [("proven", 84)]
    state = run(weighed(datasets, 1, 1, 1), state, 3, 30, {"a": 0, "b": 1, "c": 1})
    assert proven() == [("proven", 300), ("proven", 144)]
    assert [segment.get("reason") for segment in state["order"]["segments"]] == ["loss", None, "loss"]


def test_what_cannot_be_honoured_is_refused(datasets: dict[str, raylance.Dataset]) -> None:
    plain = datasets["a"]
    with plain.loader() as loader, pytest.raises(ConfigError, match=r"raylance\.mix"):
        loader.reweight({"a": 1})
    with raylance.mix(weighed(datasets, 1, 1)).loader() as loader:
        for wrong in ({"a": 1}, {"a": 1, "b": 1, "c": 1}, {"a": 0, "b": 0}, {"a": -1, "b": 2}, {"a": "1", "b": 2}, 3):
            with pytest.raises(ConfigError):
                loader.reweight(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            loader.reweight({"a": 1, "b": 1}, reason=3)  # type: ignore[arg-type]
        take(loader, 1)
        state = loader.state_dict()
    for schedule in ({}, {5: {"a": 1}}, {0: {"a": 1, "b": 1}}, {5: {"a": 0, "b": 0}}, {5: 3}):
        with pytest.raises(ConfigError):
            raylance.mix(weighed(datasets, 1, 1), schedule=raylance.runs.Schedule(weights=schedule))  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        raylance.mix(weighed(datasets, 1, 1), schedule={5: {"a": 1, "b": 1}})  # type: ignore[arg-type]
    others = {"b": (datasets["b"], 1), "a": (datasets["a"], 1), "c": (datasets["c"], 1)}
    for parts in (others, {"a": others["a"]}, {"a": others["a"], "c": others["c"]}):
        with raylance.mix(parts).loader() as loader, pytest.raises(StateError):  # type: ignore[arg-type]
            loader.load_state_dict(state)
