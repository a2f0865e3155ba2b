"""Runs whose rows or order change at a restart, in the middle of an epoch: what is left of it comes, each row once."""

import dataclasses
import datetime
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
from tests.helpers.living import Living, append, new_data

BATCH = 10


@pytest.fixture
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(pa.table({"id": np.arange(100), "group": np.arange(100) % 5}))


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
        assert "rows: saved 100, now 130" in caplog.text
        rest = take(loader)
        assert sorted(first + rest) == [*range(130)]
        assert not set(first) & set(rest)
        if order == "sequential":
            assert rest == [*range(40, 130)]
        elif order == "row":
            assert 20 <= next(place for place, row in enumerate(reversed(rest)) if row < 100) + len(rest) // 2 <= 89
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
    assert state["order"]["name"] == "changed"
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


def delete(uri: str) -> None:
    lance.dataset(uri).delete("id % 10 = 3")


def update(uri: str) -> None:
    lance.dataset(uri).update({"id": "id + 1000"}, where="id % 10 = 3")


def several(uri: str) -> None:
    """Rows are deleted, appended, updated, and files compacted, which lie as before."""
    delete(uri)
    append(uri, 100, 30)
    lance.dataset(uri).optimize.compact_files()
    lance.dataset(uri).update({"id": "id + 1000"}, where="id % 10 = 4")
    lance.dataset(uri).add_columns({"twice": "2 * id"})


def ids_of(uri: str) -> set[int]:
    return {*lance.dataset(uri).to_table()["id"].to_pylist()}


@pytest.mark.promise("P1", "P5")
@pytest.mark.parametrize("change", [delete, update, several])
@pytest.mark.parametrize("when", ["now", "next_epoch"])
def test_rows_that_are_gone_and_new_ones(uri: str, tmp_path: Path, change: Callable[[str], None], when: str) -> None:
    """An updated row is a new one. The record of both starts proves the epoch, and shows where a row was."""
    folder, old = str(tmp_path / "run"), ids_of(uri)
    with opened(uri, when).loader(runtime="threads", record=folder, name="train") as loader:
        first, state = take(loader, 4), json.loads(json.dumps(loader.state_dict()))
    change(uri)
    due = ids_of(uri) if when == "now" else old & ids_of(uri)
    parts = []
    for rank in range(2):
        loader = opened(uri, when).loader(rank=rank, world_size=2, runtime="threads", record=folder, name="train")
        loader.load_state_dict(state)
        parts.append(take(loader, 2, 12))
        after = loader.state_dict()
        loader.close()
    had = [*first, *parts[0], *parts[1]]
    with opened(uri, when).loader(runtime="threads", record=folder, name="train") as loader:
        loader.load_state_dict(json.loads(json.dumps(after)))
        had += take(loader)
        assert len(had) == len(set(had))
        assert due <= set(had) <= due | set(first)
        assert {*take(loader)} == ids_of(uri)
    (proof,) = raylance.prove_run(folder).datasets
    assert [(one.status, one.epoch) for one in proof.epochs] == [("proven", 0), ("proven", 1)], str(proof)
    where = raylance.runs.seen(folder, np.arange(100), version=1)
    first_epoch = where[where["epoch"] == 0]
    assert {*first_epoch["row_offset"]} == {row for row in had if row < 100}, (
        "of the old version, whose offsets are ids"
    )
    assert first_epoch["row_offset"][:40].tolist() == first, "in the order of the positions"
    newest = lance.dataset(uri).to_table()["id"].to_pylist()
    where = raylance.runs.seen(folder, np.arange(len(newest)))
    assert {newest[at] for at in where[where["epoch"] == 0]["row_offset"]} == {*had} & {*newest}
    data = raylance.audit.reopen(after)
    audit = raylance.audit.EpochAudit(data, state=after)
    assert audit.position == 40
    assert audit.count().ok, audit.count()


@pytest.mark.promise("P1", "P5")
def test_rows_with_stable_ids_are_known_through_everything(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(pa.table({"id": np.arange(100), "note": np.zeros(100)}), enable_stable_row_ids=True)
    first, state = begun(uri, 4)
    lance.dataset(uri).delete("id < 20")
    lance.dataset(uri).update({"note": "1.0"}, where="id % 3 = 0")
    lance.dataset(uri).optimize.compact_files(target_rows_per_fragment=30)
    with continued(uri, state) as loader:
        rest = take(loader)
    assert sorted(rest) == sorted({*range(20, 100)} - {*first}), "an update does not bring a row again"


@pytest.mark.promise("P1", "P5")
@pytest.mark.parametrize(
    "changes",
    [
        {"order": "row"},
        {"order": "sequential", "seed": 9},
        {"filter": "id < 70"},
        {"filter": "group = 1 OR id >= 50"},
        {"split": raylance.FractionSplit(part="train", fractions={"train": 0.7, "val": 0.3})},
        {"seed": 5},
    ],
    ids=lambda changes: str([*changes]),
)
def test_another_filter_split_order_or_seed(uri: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = str(tmp_path / "run")
    with opened(uri, filter="id < 90").loader(runtime="threads", record=folder, name="train") as loader:
        first, state = take(loader, 4), loader.state_dict()
    given = {"filter": "id < 90"} | changes
    fresh = opened(uri, **given)
    due = {int(row) for batch in fresh.iter_batches(batch_size=10) for row in batch["id"]}
    with fresh.loader(runtime="threads", record=folder, name="train") as loader:
        loader.load_state_dict(state)
        rest = take(loader)
        assert sorted(rest) == sorted(due - {*first})
        assert {*take(loader, 3)} <= due
        state = loader.state_dict()
    with opened(uri, **given).loader(runtime="threads", record=folder, name="train") as loader:
        loader.load_state_dict(state)
        assert "changes" not in loader.state_dict()["order"], "what is over is forgotten"
        take(loader)
    proof = raylance.prove_run(folder)
    assert proof.ok, str(proof)
    for version in (None, Newest(when="refuse")):
        data = raylance.dataset(uri, version=version, order="window", seed=2, filter="id < 60")
        with data.loader(runtime="threads") as loader, pytest.raises(StateError, match="id < 60"):
            loader.load_state_dict(state)


def test_a_filter_that_comes_back_brings_no_row_again(uri: str) -> None:
    first, state = begun(uri, 4)
    with continued(uri, state, filter="id >= 50") as loader:
        first += take(loader, 2)
        state = loader.state_dict()
    with continued(uri, state) as loader:
        rest = take(loader)
    assert sorted(first + rest) == [*range(100)]


@pytest.mark.parametrize("is_gone", [True, False])
def test_an_epoch_of_which_no_step_is_left_is_proven(uri: str, tmp_path: Path, *, is_gone: bool) -> None:
    """All rows that were left are gone, or are fewer than a step: no record had the end of the epoch."""
    folder = str(tmp_path / "run")
    given = {"remainder": "ragged" if is_gone else "drop"}
    with opened(uri, **given).loader(runtime="threads", record=folder, name="train") as loader:
        first, state = take(loader, 8), loader.state_dict()
    if is_gone:
        lance.dataset(uri).delete(f"id NOT IN {tuple(first)}")
    with opened(uri, **given).loader(runtime="threads", record=folder, name="train") as loader:
        loader.load_state_dict(state)
        assert take(loader, batch=30) == []
        state = loader.state_dict()
    with opened(uri, **given).loader(runtime="threads", record=folder, name="train") as loader:
        loader.load_state_dict(state)
        assert take(loader)
    proof = raylance.prove_run(folder)
    assert proof.ok, proof


def test_where_an_epoch_begins_all_rows_come(uri: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with opened(uri).loader(runtime="threads", record=folder, name="train") as loader:
        take(loader)
        state = loader.state_dict()
    with opened(uri, filter="id < 50", order="row").loader(runtime="threads", record=folder, name="train") as loader:
        loader.load_state_dict(state)
        assert sorted(take(loader)) == [*range(50)]
    (proof,) = raylance.prove_run(folder).datasets
    assert [(one.status, one.end) for one in proof.epochs] == [("proven", 100), ("proven", 50)]


def test_the_way_back_ends_where_rows_have_changed(uri: str) -> None:
    _, state = begun(uri, 4)
    delete(uri)
    with continued(uri, state) as loader:
        rest = take(loader, 3)
        loader.seek(5)
        assert take(loader, 2) == rest[10:30]
        with pytest.raises(ConfigError, match="position 40"):
            loader.seek(3)
        assert take(loader, 1) == take(continued(uri, loader.state_dict()), 0) or loader.global_step == 8
        loader.set_epoch(0)
        assert {*take(loader)} == ids_of(uri), "an epoch that begins anew has the present rows"


def test_a_seek_to_an_earlier_epoch_of_other_rows_is_refused(uri: str) -> None:
    """Epochs before the present one are not known any more; they gave other rows."""
    _, state = begun(uri, 6)
    append(uri, 100, 30)
    with continued(uri, state) as loader:
        take(loader)
        take(loader, 3)
        state = loader.state_dict()
    for steps in (1, 2):
        with continued(uri, state) as loader:
            rest = take(loader, 3)
            loader.seek(loader.global_step - 3)
            assert take(loader, 3) == rest
            with pytest.raises(ConfigError, match="epoch 1"):
                loader.seek(8)
            loader.seek(loader.global_step - 3)
            take(loader, steps)
            state = loader.state_dict()


def test_the_rows_of_two_versions_must_be_comparable(uri: str) -> None:
    _, state = begun(uri, 4)
    for when in ("refuse", None):
        append(uri, 100, 10)
        version = None if when is None else Newest(when="refuse")
        loader = raylance.dataset(uri, order="window", seed=2, version=version).loader(runtime="threads")
        with pytest.raises(StateError):
            loader.load_state_dict(state)
    lance.dataset(uri, version=1).restore()
    with continued(uri, state) as loader:  # the same rows are back
        assert len(take(loader)) == 60
    lance.dataset(uri).delete("id < 10")
    append(uri, 100, 10)
    lance.dataset(uri).optimize.compact_files()
    with pytest.raises(StateError, match="version 1 "):
        continued(uri, state)
    lance.write_dataset(pa.table({"id": np.arange(100), "group": np.arange(100)}), uri, mode="overwrite")
    with pytest.raises(StateError):
        continued(uri, state)
    with pytest.raises(ConfigError):
        Newest(when="never")  # type: ignore[arg-type]


def test_orders_that_know_all_rows_begin_with_the_next_epoch_alone(uri: str) -> None:
    weighted = raylance.Weighted(weights="group")
    _, state = begun(uri, 4, order=weighted)
    append(uri, 100, 30)
    with pytest.raises(StateError):
        continued(uri, state, order=weighted)


@pytest.mark.promise("P10")
@pytest.mark.parametrize("when", ["now", "next_epoch"])
def test_the_cost_of_rows_is_that_of_those_that_came(uri: str, tmp_path: Path, when: str) -> None:
    folder, state = str(tmp_path / "run"), None
    for number in range(2):
        with opened(uri, when, cost="group").loader(runtime="threads", record=folder, name="train") as loader:
            if state is not None:
                loader.load_state_dict(state)
            take(loader, 4 + 1000 * number)
            state = loader.state_dict()
        lance.dataset(uri).delete("id % 3 = 0")
        append(uri, 100, 30)
    proof = raylance.prove_run(folder)
    assert proof.ok, proof
    assert "cost" not in str(proof), "it is not known of the rows that are gone"


@pytest.mark.promise("P1", "P10")
def test_an_epoch_that_begins_anew_after_a_change(uri: str, tmp_path: Path) -> None:
    """A proof held its rows for wrong, and `seen` named rows that had not come."""
    folder = str(tmp_path / "run")
    with opened(uri).loader(runtime="threads", record=folder, name="train") as loader:
        take(loader, 4)
        state = loader.state_dict()
    lance.dataset(uri).delete("id < 50")
    with opened(uri).loader(runtime="threads", record=folder, name="train") as loader:
        loader.load_state_dict(state)
        take(loader, 2)
        loader.set_epoch(0)
        again = take(loader)
        assert sorted(again) == [*range(50, 100)]
        take(loader)
    proof = raylance.prove_run(folder)
    assert not proof.faults
    assert proof.unproven
    newest = lance.dataset(uri).to_table()["id"].to_pylist()
    where = raylance.runs.seen(folder, np.arange(50))
    assert [newest[at] for at in where[where["epoch"] == 0]["row_offset"]] == again


def test_a_filter_that_another_dataset_of_the_run_has(uri: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    states: list[Any] = [None, None]
    for filter, steps in (("id < 80", 3), ("id >= 20", 3), ("id >= 20", 1000)):
        asked = (("train", filter), ("val", "id >= 20"))
        for number, (name, of) in enumerate(asked):
            with opened(uri, filter=of).loader(runtime="threads", record=folder, name=name) as loader:
                if states[number] is not None:
                    loader.load_state_dict(states[number])
                take(loader, steps)
                states[number] = loader.state_dict()
        append(uri, 100, 10)
    proof = raylance.prove_run(folder)
    assert proof.ok, proof
    assert len(proof.datasets) == 2


@pytest.mark.parametrize(
    ("order", "others"),
    [
        (
            raylance.Weighted(weights="group"),
            {
                "rows_per_epoch": raylance.Weighted(weights="group", rows_per_epoch=50),
                "class_balanced": raylance.ClassBalanced(column="group"),
            },
        ),
        (raylance.ClassBalanced(column="group"), {"column": raylance.ClassBalanced(column="id")}),
    ],
    ids=["weighted", "balanced"],
)
def test_orders_that_draw_rows_take_others_where_an_epoch_begins(uri: str, order: Any, others: dict[str, Any]) -> None:
    with opened(uri, order=order).loader(runtime="threads") as loader:
        take(loader)
        state = loader.state_dict()
    append(uri, 100, 300)
    with continued(uri, state, order=order) as loader:
        assert max(take(loader)) > 100
    for named, other in others.items():
        with pytest.raises(StateError, match=named):
            continued(uri, state, order=other)


def test_a_reopened_run_shows_its_present_rows(uri: str) -> None:
    _, state = begun(uri, 4)
    delete(uri)
    with continued(uri, state) as loader:
        take(loader, 2)
        state = loader.state_dict()
    data = raylance.audit.reopen(state)
    assert "90" in str(data.plan(10, 1))
    assert {int(row) for batch in data.iter_batches(batch_size=10) for row in batch["id"]} == ids_of(uri)


def test_a_clean_up_of_versions_that_no_epoch_had(uri: str) -> None:
    """The versions between were needed, and nobody could pin them."""
    data = opened(uri)
    raylance.runs.pin(data, "run")
    first, state = begun(uri, 4)
    for number in range(3):
        append(uri, 100 + number, 1)
    delete(uri)
    newest = lance.dataset(uri)
    newest.cleanup_old_versions(datetime.timedelta(0), error_if_tagged_old_versions=False)
    assert [each["version"] for each in newest.versions()] == [1, newest.version]
    with continued(uri, state) as loader:
        assert {*take(loader)} == ids_of(uri) - {*first}


def test_compactions_of_indexed_rows_with_stable_ids(write_dataset: Callable[..., str]) -> None:
    table = pa.table({"id": np.arange(100), "group": np.arange(100) % 5})
    uri = write_dataset(table, enable_stable_row_ids=True, max_rows_per_file=30)
    first, state = begun(uri, 4)
    lance.dataset(uri).create_scalar_index("id", "BTREE")
    lance.dataset(uri).optimize.compact_files()
    with continued(uri, state) as loader:
        assert sorted(first + take(loader)) == [*range(100)]


def test_rows_that_are_not_there_were_not_seen(uri: str, tmp_path: Path) -> None:
    folder, state = str(tmp_path / "run"), None
    for _ in range(2):
        with opened(uri).loader(runtime="threads", record=folder, name="train") as loader:
            if state is not None:
                loader.load_state_dict(state)
            take(loader, 4)
            state = loader.state_dict()
        delete(uri)
    for version in (1, 2, 3):
        assert raylance.runs.seen(folder, [-1, 10**6], version=version).empty
    with pytest.raises(ConfigError, match="1 to 3"):
        raylance.runs.seen(folder, [1], version=9)


@dataclasses.dataclass
class Played(Living):
    """A run whose dataset, filter, order and world change at random, and what each row should have come to."""

    folder: str = ""
    state: dict[str, Any] | None = None

    def start(self, when: str) -> None:
        """Starts the run again, with another number of ranks and another size of a step; all ranks make some steps."""
        now, ranks = self.selected(), int(self.rng.integers(1, 4))
        batch, steps = int(self.rng.integers(ranks, 30)), int(self.rng.integers(1, 6))
        is_new = self.state is None or not self.state["position"]
        self.due = now if is_new or when == "now" else self.due & now
        given = {"order": self.order, "seed": self.seed, "remainder": "ragged", "filter": self.filter}
        data = raylance.dataset(self.uri, version=Newest(when=when), columns=["id"], **given)  # type: ignore[arg-type]
        came, states = list[list[list[int]]](), list[dict[str, Any]]()
        for rank in range(ranks):
            where = {"rank": rank, "world_size": ranks, "record": self.folder, "name": "train", "runtime": "threads"}
            with data.loader(**where) as loader:  # type: ignore[arg-type]
                if self.state is not None:
                    loader.load_state_dict(self.state)
                epoch, found = loader.epoch, list[list[int]]()
                for each in itertools.islice(loader.iter_batches(global_batch_size=batch), steps):
                    found.append([int(row) for row in each["id"]])
                    if loader.epoch > epoch:
                        break
                came.append(found)
                states.append(json.loads(json.dumps(loader.state_dict())))
        assert len({len(found) for found in came}) == 1, "equal steps"
        assert all(state == states[0] | {"dp_size": state["dp_size"]} for state in states)
        self.had += [row for found in came for rows in found for row in rows]
        assert len(self.had) == len({*self.had}), "twice"
        before, self.state = self.state, states[0]
        if self.state["epoch"] > (0 if before is None else before["epoch"]):
            assert self.due <= {*self.had}, "a row was lost"
            self.had = []


@pytest.mark.promise("P1", "P2", "P5")
@pytest.mark.parametrize("number", range(6))
def test_any_changes_at_any_restarts(tmp_path: Path, number: int) -> None:
    play(tmp_path, number)


def play(folder: Path, number: int) -> None:
    """Plays a run; compares what came with what was due, and proves it from its record."""
    rng, record = np.random.default_rng(number), str(folder / "run")
    run = Played(new_data(folder, 100, stable_row_ids=bool(number % 2)), rng, 99, folder=record)
    for _ in range(8):
        run.start(str(rng.choice(["now", "next_epoch"])))
        for _ in range(rng.integers(0, 3)):
            run.grow(40)  # the largest step has 29
            run.change()
        run.grow(40)
    proof = raylance.prove_run(record)
    assert not proof.faults, proof
    assert proof.ok, proof


def test_damaged_changes_are_refused(uri: str) -> None:
    _, state = begun(uri, 4)
    append(uri, 100, 30)
    with continued(uri, state) as loader:
        take(loader, 1)
        state = loader.state_dict()
    for wrong in ([], [{"epoch": 1}], 3):
        order = state["order"] | {"changes": wrong}
        with pytest.raises(StateError):
            continued(uri, state | {"order": order})
