"""Mixtures whose datasets get other rows, filters and orders at a restart: each continues in its own epoch."""

import datetime
import itertools
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pytest

import raylance
from raylance.audit import EpochAudit, reopen
from raylance.errors import ConfigError, StateError
from raylance.runs import Leases, Newest
from tests.helpers.living import Living, append, new_data

BATCH = 10
NAMES = "abc"


class Played:
    """A run over a mixture whose datasets, weights and world change at random."""

    def __init__(self, folder: Path, number: int) -> None:
        self.rng, self.record = np.random.default_rng(number), str(folder / "run")
        is_stable = bool(number % 2)
        uris = [new_data(folder, 60 + 40 * each, stable_row_ids=is_stable) for each in range(2 + number // 2 % 2)]
        self.parts = [Living(uri, self.rng, 59 + 40 * each) for each, uri in enumerate(uris)]
        self.stop = (["first_exhausted", "all_exhausted", 150, 400])[number % 4]
        self.state: dict[str, Any] | None = None

    def mixed(self, whens: list[str]) -> raylance.Dataset:
        parts = {}
        for name, part, when in zip(NAMES, self.parts, whens, strict=False):
            given = {"order": part.order, "seed": part.seed, "filter": part.filter, "columns": ["id"]}
            data = raylance.dataset(part.uri, version=Newest(when=when), **given)  # type: ignore[arg-type]
            parts[name] = data, float(self.rng.integers(1, 4))
        return raylance.mix(parts, stop=self.stop, remainder="ragged")

    def begin(self, part: Living) -> None:
        part.had, part.due = [], part.selected()

    def start(self) -> None:
        """Starts the run again, with another number of ranks and another size of a step; all ranks make some steps."""
        ranks, whens = int(self.rng.integers(1, 4)), self.rng.choice(["now", "next_epoch"], 3).tolist()
        batch, steps = int(self.rng.integers(ranks, 30)), int(self.rng.integers(1, 8))
        for part, when in zip(self.parts, whens, strict=False):
            now = part.selected()
            if not part.had or part.due <= {*part.had}:
                exhausted = bool(part.had) and self.stop == "first_exhausted"
                part.had, part.due = ([*part.had], {*part.had}) if exhausted else ([], now)
            else:
                part.due = now if when == "now" else part.due & now
        data, came, states = self.mixed(whens), list[list[list[tuple[int, int]]]](), list[dict[str, Any]]()
        for rank in range(ranks):
            where = {"rank": rank, "world_size": ranks, "record": self.record, "name": "train", "runtime": "threads"}
            with data.loader(**where) as loader:  # type: ignore[arg-type]
                if self.state is not None:
                    loader.load_state_dict(self.state)
                    if not loader.state_dict()["position"]:
                        [self.begin(part) for part in self.parts]
                epoch, found = loader.epoch, list[list[tuple[int, int]]]()
                batches = loader.iter_batches(global_batch_size=batch, with_row_offset=True)
                for each in itertools.islice(batches, steps):
                    found.append([*zip(each["_component"].tolist(), each["id"].tolist(), strict=True)])
                    if loader.epoch > epoch:
                        break
                is_over = loader.epoch > epoch
                came.append(found)
                states.append(json.loads(json.dumps(loader.state_dict())))
        assert len({len(found) for found in came}) == 1, "equal steps"
        assert all(state == states[0] | {"dp_size": state["dp_size"]} for state in states)
        for rows in ([*itertools.chain(*each)] for each in zip(*came, strict=True)):
            self.take(rows)
        self.state = states[0]
        if is_over:
            for part in self.parts:
                self.begin(part)

    def take(self, rows: list[tuple[int, int]]) -> None:
        """Counts the rows of a step. If it has the end of a dataset's own epoch, what is more begins the next one."""
        for number, part in enumerate(self.parts):
            ids = [row for which, row in rows if which == number]
            if not ids:
                continue
            left = part.due - {*part.had}
            if len(ids) > len(left):
                assert self.stop != "first_exhausted"
                counted = Counter(ids)
                counted.subtract(left)
                assert min(counted.values()) >= 0, "a row was lost"
                self.begin(part)
                ids, left = [*counted.elements()], part.due
            assert len(ids) == len({*ids}), "twice"
            assert {*ids} <= left
            part.had += ids


@pytest.mark.promise("P1", "P2", "P5")
@pytest.mark.parametrize("number", range(4))
def test_any_changes_at_any_restarts(tmp_path: Path, number: int) -> None:
    play(tmp_path, number)


def play(folder: Path, number: int) -> None:
    """Plays a run; compares what came with what was due, and proves it from its record."""
    run = Played(folder, number)
    for _ in range(7):
        run.start()
        for part in run.parts:
            for _ in range(run.rng.integers(0, 3)):
                part.grow(40)
                part.change()
            part.grow(40)
    proof = raylance.prove_run(run.record)
    assert not proof.faults, proof
    assert proof.ok, proof


@pytest.fixture
def uris(tmp_path: Path) -> list[str]:
    return [new_data(tmp_path, rows, stable_row_ids=False) for rows in (100, 50)]


def mixed(uris: list[str], *arguments: dict[str, Any], stop: str | int = "all_exhausted", **given: Any) -> Any:
    """The mixture of the datasets, two rows of the first one for each of the others."""
    parts = {}
    for name, uri, own in itertools.zip_longest(NAMES[: len(uris)], uris, arguments, fillvalue={}):
        own = {"version": Newest(when="now"), "order": "window", "seed": 3, "columns": ["id"]} | own
        parts[name] = raylance.dataset(uri, **own), 1 + (name == "a")
    return raylance.mix(parts, stop=stop, **{"remainder": "ragged"} | given)


def take(loader: raylance.RankLoader, steps: int = 1000, batch: int = BATCH) -> list[tuple[str, int]]:
    """The rows of some steps of an epoch, each with the name of its dataset."""
    found = itertools.islice(loader.iter_batches(global_batch_size=batch, with_row_offset=True), steps)
    return [(NAMES[part], int(row)) for each in found for part, row in zip(each["_component"], each["id"], strict=True)]


def ids(rows: list[tuple[str, int]], name: str) -> list[int]:
    return [row for part, row in rows if part == name]


def begun(data: raylance.Dataset, steps: int, **given: Any) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    with data.loader(runtime="threads", **given) as loader:
        rows = take(loader, steps)
        return rows, json.loads(json.dumps(loader.state_dict()))


def test_each_dataset_ends_its_own_epoch_with_what_is_left_of_it(
    uris: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows come and go in one dataset, the other gets a filter and an order, and a third one joins."""
    record = {"record": str(tmp_path / "run"), "name": "train"}
    first, state = begun(mixed(uris), 4, **record)
    lance.dataset(uris[0]).delete("id % 10 = 3")
    append(uris[0], 100, 30)
    uris.append(new_data(tmp_path, 40, stable_row_ids=False))
    now = mixed(uris, {}, {"filter": "group != 1", "order": "row"})
    with now.loader(runtime="threads", **record) as loader, caplog.at_level(logging.WARNING, "raylance"):
        loader.load_state_dict(state)
        assert "of 'a'" in caplog.text
        assert "of 'b'" in caplog.text
        caplog.clear()
        rest = take(loader, 9)
        middle = loader.state_dict()
    with now.loader(runtime="threads", **record) as loader, caplog.at_level(logging.WARNING, "raylance"):
        loader.load_state_dict(middle)
        assert not caplog.records, "the same program again changes nothing"
        rest += take(loader)
        whole = take(loader)
    had = first + rest
    due = {"a": {*range(130)} - {*range(3, 100, 10)}, "b": {*range(50)} - {*range(1, 50, 5)}, "c": {*range(40)}}
    for name, rows in due.items():
        assert rows <= {*ids(had, name)}, "nothing was lost"
        assert rows == {*ids(whole, name)}, "the next epoch has the present rows"
    assert max(Counter(ids(had, "a")).values()) == 1, "nothing came twice"
    assert {*ids(rest, "c")[:40]} == due["c"]
    assert raylance.prove_run(record["record"]).ok
    seen = raylance.runs.seen(record["record"], np.arange(100), component="a", version=1)
    offsets = seen[seen["epoch"] == 0]["row_offset"].tolist()
    assert sorted(offsets) == sorted(row for row in ids(had, "a") if row < 100), "in version 1, offsets are ids"
    assert offsets[: len(ids(first, "a"))] == ids(first, "a"), "in the order of the positions"


def test_an_audit_and_a_reopened_run_know_what_has_changed(uris: list[str]) -> None:
    _, state = begun(mixed(uris), 4)
    lance.dataset(uris[0]).delete("id % 10 = 3")
    now = mixed(uris, {}, {"filter": "group != 1"})
    with now.loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        take(loader, 2)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = take(loader)
    data = reopen(state, remainder="ragged")
    audit = EpochAudit(data, state=state)
    assert audit.position == 40
    assert audit.count().ok, audit.count()
    assert audit.count(audit.by_stream(runtime="threads")).ok
    with pytest.raises(ConfigError, match="position 40"):
        EpochAudit(data, state=state, position=20)
    with data.loader(runtime="threads") as loader:
        assert {*ids(take(loader), "b")} == {*range(50)} - {*range(1, 50, 5)}, "without a state, the run begins"
        loader.load_state_dict(state)
        assert take(loader) == rest
        assert {*ids(take(loader), "a")} == {*range(100)} - {*range(3, 100, 10)}


def test_a_seek_before_a_change_is_refused(uris: list[str]) -> None:
    _, state = begun(mixed(uris), 4)
    append(uris[1], 50, 20)
    with mixed(uris).loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        rest = take(loader, 4)
        loader.seek(6)
        assert take(loader, 2) == rest[20:]
        with pytest.raises(ConfigError, match="position 40"):
            loader.seek(3)
        loader.reweight({"a": 1, "b": 0}, reason="enough of b")
        more = take(loader, 2)
        assert not ids(more, "b")
        assert not {*ids(more, "a")} & {*ids(rest, "a")}
        loader.set_epoch(0)
        again = take(loader)
        assert max(ids(again, "b")) >= 50, "after set_epoch, the epoch has the present rows"
        assert {*ids(again, "a")} == {*range(100)}
        state = loader.state_dict()
    with mixed(uris).loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        assert {*ids(take(loader), "a")} == {*range(100)}


def test_new_rows_wait_for_the_next_epoch_of_their_dataset(uris: list[str]) -> None:
    """That of the dataset, which the mixture may begin several times; until another restart calls for them."""
    later = {"version": Newest(when="next_epoch")}
    first, state = begun(mixed(uris, later, later, stop=600), 4)
    append(uris[1], 50, 20)
    with mixed(uris, later, later, stop=600).loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        middle = take(loader, 2)
        state = loader.state_dict()
        rows = ids(first + middle + take(loader), "b")
    assert {*rows[:50]} == {*range(50)}
    assert {*rows[50:120]} == {*range(70)}
    with mixed(uris, stop=600).loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        rows = ids(first + middle + take(loader), "b")
    assert {*rows[:70]} == {*range(70)}


def test_what_cannot_be_honoured_is_refused(uris: list[str], tmp_path: Path) -> None:
    _, state = begun(mixed(uris), 4)
    append(uris[1], 50, 20)
    pinned = {"version": Newest(when="refuse")}
    for parts in ((pinned, pinned), ({"version": 1, "seed": 4}, {"version": 1})):
        with mixed(uris, *parts).loader(runtime="threads") as loader, pytest.raises(StateError, match="Newest"):
            loader.load_state_dict(state)
    drawn = {"order": raylance.Weighted(weights=[1.0] * 100)}
    _, of_draws = begun(mixed(uris, drawn, pinned), 4)
    append(uris[0], 100, 20)
    drawn = {"order": raylance.Weighted(weights=[1.0] * 120)}
    with mixed(uris, drawn, pinned).loader(runtime="threads") as loader, pytest.raises(StateError, match="'a'"):
        loader.load_state_dict(of_draws)
    lance.dataset(uris[0]).cleanup_old_versions(datetime.timedelta(0))
    with mixed(uris).loader(runtime="threads") as loader, pytest.raises(StateError, match="version 1"):
        loader.load_state_dict(state)
    leases = Leases(mixed(uris), tmp_path / "book")
    leases.done(leases.lease(10).tickets)
    del leases
    append(uris[1], 70, 20)
    with pytest.raises(StateError, match="mixture"):
        Leases(mixed(uris), tmp_path / "book").lease(10)


@pytest.mark.parametrize("at_once", [True, False])
def test_an_epoch_of_which_nothing_is_left_is_proven(uris: list[str], tmp_path: Path, *, at_once: bool) -> None:
    """All rows that were left of a dataset are gone, so that the epoch of the mixture ends at the restart."""
    record, state, rows = {"record": str(tmp_path / "run"), "name": "train"}, None, list[tuple[str, int]]()
    for start in range(4):
        with mixed(uris, stop="first_exhausted").loader(runtime="threads", **record) as loader:
            if state is not None:
                loader.load_state_dict(state)
            rows += take(loader, 3)
            state = loader.state_dict()
        if start == 0 and not at_once:
            append(uris[1], 50, 10)
        if start == (0 if at_once else 1):
            lance.dataset(uris[0]).delete(f"id NOT IN {tuple(ids(rows, 'a'))}")
    proof = raylance.prove_run(record["record"])
    assert proof.ok, proof


def test_a_dataset_that_joins_after_an_index_is_proven(uris: list[str], tmp_path: Path) -> None:
    """A version with the same rows continues as the one before; the state names that one, and not of new datasets."""
    record, state = {"record": str(tmp_path / "run"), "name": "train"}, None
    for start in range(4):
        with mixed(uris, stop=500).loader(runtime="threads", **record) as loader:
            if state is not None:
                loader.load_state_dict(state)
            take(loader, 3)
            state = loader.state_dict()
        if start == 0:
            lance.dataset(uris[0]).create_scalar_index("group", "BTREE")
        elif start == 1:
            uris.append(new_data(tmp_path, 40, stable_row_ids=False))
    proof = raylance.prove_run(record["record"])
    assert proof.ok, proof


def test_a_seek_to_an_earlier_epoch_of_other_rows_is_refused(uris: list[str]) -> None:
    """Epochs before the present one are not known any more; they gave other rows."""
    _, state = begun(mixed(uris, stop=120), 4)
    append(uris[0], 100, 30)
    for _ in range(2):
        with mixed(uris, stop=120).loader(runtime="threads") as loader:
            loader.load_state_dict(state)
            take(loader)
            take(loader, 2)
            state = json.loads(json.dumps(loader.state_dict()))
    with mixed(uris, stop=120).loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        loader.seek(loader.global_step - 1)
        with pytest.raises(ConfigError, match="position 0"):
            loader.seek(6)
        loader.set_epoch(0)
        first = take(loader, 4)
        loader.set_epoch(0)
        assert take(loader, 4) == first, "after set_epoch, the epoch is known"
        loader.seek(loader.global_step - 3)
        assert take(loader, 3) == first[10:]


@pytest.mark.promise("P8")
def test_a_damaged_state_is_refused(uris: list[str]) -> None:
    _, state = begun(mixed(uris), 4)
    append(uris[0], 100, 30)
    wrong = (None, 0, "x", [], {}, {"a": 0}, {"a": [1], "b": [1]}, {"version": {"a": 1, "b": 1}, "identity": 0})
    with mixed(uris).loader(runtime="threads") as loader:
        for name, value in itertools.product(("uri", "version", "identity", "filter", "split", "rows_of"), wrong):
            if (name, value) != ("rows_of", None):
                with pytest.raises(StateError):
                    loader.load_state_dict(state | {name: value})
        loader.load_state_dict(state)
        assert take(loader, 2)


def test_samples_of_several_rows_go_on_with_an_index(uris: list[str]) -> None:
    """Their rows may change only where an epoch of the mixture begins. A version with the same rows is not a change."""
    windows = {"samples": raylance.Windows(episode="group", offsets={"id": [0, 1]})}
    with mixed(uris, windows, windows).loader(runtime="threads") as loader:
        assert len([*itertools.islice(loader.batches(global_batch_size=BATCH), 2)]) == 2
        state = loader.state_dict()
    lance.dataset(uris[0]).create_scalar_index("group", "BTREE")
    with mixed(uris, windows, windows).loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        assert len([*loader.batches(global_batch_size=BATCH)]) > 2
    append(uris[1], 50, 20)
    with mixed(uris, windows, windows).loader(runtime="threads") as loader, pytest.raises(StateError, match="'b'"):
        loader.load_state_dict(state)


def test_weights_that_change_after_rows_have(uris: list[str], tmp_path: Path) -> None:
    """The record's state is a later one then, of an epoch that does not know what has changed in the one before."""
    record = {"record": str(tmp_path / "run"), "name": "train"}
    _, state = begun(mixed(uris, stop=150), 4, **record)
    append(uris[0], 100, 30)
    with mixed(uris, stop=150).loader(runtime="threads", **record) as loader:
        loader.load_state_dict(state)
        take(loader)
        take(loader, 2)
        loader.reweight({"a": 1, "b": 1}, reason="losses")
        take(loader, 2)
        state = loader.state_dict()
    assert EpochAudit(reopen(state), state=state).count().ok
    proof = raylance.prove_run(record["record"])
    assert [(one.status, one.end) for one in proof.datasets[0].epochs] == [("proven", 150), ("proven", 40)], proof


def test_rows_that_change_where_the_weights_have(uris: list[str]) -> None:
    with mixed(uris).loader(runtime="threads") as loader:
        take(loader, 4)
        loader.reweight({"a": 1, "b": 1}, reason="losses")
        state = loader.state_dict()
    append(uris[0], 100, 30)
    with mixed(uris).loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        assert [part for part, _ in take(loader, 2)].count("a") == BATCH
        (segment,) = loader.state_dict()["order"]["segments"]
    assert segment["reason"] == "losses"


def test_rows_of_a_dataset_that_has_joined_were_not_seen_before(uris: list[str], tmp_path: Path) -> None:
    record = {"record": str(tmp_path / "run"), "name": "train"}
    _, state = begun(mixed(uris, stop=60), 100, **record)
    uris.append(new_data(tmp_path, 40, stable_row_ids=False))
    with mixed(uris, stop=60).loader(runtime="threads", **record) as loader:
        loader.load_state_dict(state)
        rows = take(loader)
    seen = raylance.runs.seen(record["record"], np.arange(40), component="c")
    assert sorted(seen["row_offset"]) == sorted(ids(rows, "c"))
    assert {*seen["epoch"]} == {1}


def test_without_earlier_versions_the_rest_is_audited_and_the_epoch_counted(uris: list[str], tmp_path: Path) -> None:
    """A dataset has begun another own epoch since, so that the run needs no version of before."""
    record, state = {"record": str(tmp_path / "run"), "name": "train"}, None
    for start in range(3):
        with mixed(uris, stop=600).loader(runtime="threads", **record) as loader:
            if state is not None:
                loader.load_state_dict(state)
            assert len(take(loader, 15)) == 150
            state = json.loads(json.dumps(loader.state_dict()))
        if start == 0:
            lance.dataset(uris[1]).delete("id % 7 = 3")
        elif start == 1:
            lance.dataset(uris[1]).cleanup_old_versions(datetime.timedelta(0))
    assert EpochAudit(reopen(state), state=state).count().ok
    proof = raylance.prove_run(record["record"])
    assert [one.status for one in proof.datasets[0].epochs] == ["counted"], proof
