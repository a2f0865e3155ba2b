"""Runs of the last two minor versions: a dataset, states and records that they wrote, kept in tests/data."""

import collections
import datetime
import fractions
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.audit import reopen
from raylance.samples.pack_tokens import PackTokens

DATA = Path(__file__).parents[2] / "data"
VERSIONS = ("0.10.0", "0.11.0")
KINDS = ("split", "packed", "mix")
STEPS, ROWS = 7, 8  # steps that the runs took, five of them before their states, and rows of each


def opened(version: str, kind: str) -> raylance.Dataset:
    """The handle of a run, with today's spelling."""
    uri = DATA / version / "data"
    split = raylance.FractionSplit({"train": 0.8, "val": 0.2}, "train", by="id")
    if kind == "split":
        return raylance.dataset(uri, columns=["id"], filter="label != 3", split=split, seed=7)
    if kind == "packed":
        return raylance.dataset(uri, samples=PackTokens("tokens", length=16, eos_id=0), seed=7)
    first = raylance.dataset(uri, columns=["id"], split=split, seed=7)
    second = raylance.dataset(uri, columns=["id"], filter="id < 90", order="row", seed=8)
    return raylance.mix({"a": (first, 0.7), "b": (second, 0.3)})


def saved(version: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / version / "states.json").read_text())[kind]
    return found


def test_there_are_runs_of_the_last_two_minor_versions() -> None:
    major, minor = (int(part) for part in raylance.__version__.split(".")[:2])
    assert {f"{major}.{minor - 2}.0", f"{major}.{minor - 1}.0"} <= {*VERSIONS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_continues(version: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the next rows; that the files lie elsewhere now is the only warning."""
    run, shown = saved(version, kind), "input_ids" if kind == "packed" else "_rowoffset"
    with opened(version, kind).loader(runtime="threads") as loader:
        with caplog.at_level(logging.WARNING, logger="raylance"):
            loader.load_state_dict(run["state"])
        batches = iter(loader.batches(global_batch_size=ROWS, with_row_offset=kind != "packed"))
        assert [next(batches)[shown].tolist() for _ in run["next"]] == run["next"]
    assert len(caplog.records) == 1
    assert str(DATA) in caplog.text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_is_reopened_and_proven(version: str, kind: str) -> None:
    uri = str(DATA / version / "data")
    given = {"samples": PackTokens("tokens", length=16, eos_id=0)} if kind == "packed" else {}
    moved = {"uri": [uri, uri] if kind == "mix" else uri, **given}
    again, now = (
        each.loader().state_dict() for each in (reopen(saved(version, kind)["state"], **moved), opened(version, kind))
    )
    assert again["rows"] == now["rows"]
    assert again["fingerprint"] == now["fingerprint"]
    proof = raylance.prove_run(str(DATA / version / f"run-{kind}"), **moved)
    assert [(epoch.status, epoch.rows) for each in proof.datasets for epoch in each.epochs] == [
        ("proven", STEPS * ROWS)
    ], str(proof)


def test_a_split_that_no_reader_of_texts_knows_is_compared_as_text(write_dataset: Any) -> None:
    """States before 0.12 hold the repr, which may have a date in it."""
    days = [datetime.date(2026, 1, 1 + row % 5) for row in range(40)]
    uri = write_dataset(pa.table({"id": range(40), "day": pa.array(days)}))
    split = raylance.ValueSplit("day", datetime.date(2026, 1, 2))
    state = raylance.dataset(uri, columns=["id"], split=split).loader().state_dict()
    older = state | {"format": 5, "split": repr(split)}
    with raylance.dataset(uri, columns=["id"], split=split).loader(runtime="threads") as loader:
        loader.load_state_dict(older)
    other = raylance.ValueSplit("day", datetime.date(2026, 1, 3))
    with pytest.raises(raylance.StateError, match=r"split: saved .*2026, 1, 2.*2026, 1, 3"):
        raylance.dataset(uri, columns=["id"], split=other).loader().load_state_dict(older)


class Halves(raylance.FractionSplit):
    """A split of a user's."""


@pytest.mark.parametrize(
    "arguments",
    [
        {"split": Halves({"a": 0.5, "b": 0.5}, "a")},
        {"split": raylance.FractionSplit(collections.OrderedDict(b=0.5, a=0.5), "a")},
        {"split": raylance.ValueSplit("id", fractions.Fraction(6, 2))},
        {"samples": raylance.Pack("tokens", length=8, eos_id=np.int64(1))},
    ],
    ids=repr,
)
def test_what_json_does_not_give_back_stays_a_text(arguments: dict[str, Any], write_dataset: Any) -> None:
    uri = write_dataset(pa.table({"id": range(40), "tokens": [[row] * (1 + row % 5) for row in range(40)]}))
    data = raylance.dataset(uri, **arguments)
    state = json.loads(json.dumps(data.loader().state_dict()))
    with data.loader(runtime="threads") as loader:
        loader.load_state_dict(state)
    if "samples" in arguments:  # reopen() cannot read the texts of the others
        assert reopen(state).loader().state_dict()["fingerprint"] == state["fingerprint"]


def test_a_mixture_may_name_a_dataset_class(write_dataset: Any) -> None:
    uri = write_dataset(pa.table({"id": range(40)}))

    def mixed() -> raylance.Dataset:
        return raylance.mix({name: (raylance.dataset(uri), 0.5) for name in ("class", "b")})

    with mixed().loader(runtime="threads") as loader:
        next(iter(loader.iter_batches(global_batch_size=8)))
        state = loader.state_dict()
    with mixed().loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        assert loader.global_step == 1


def test_each_dataset_of_a_mixture_is_reopened_with_its_own_cost(write_dataset: Any) -> None:
    uri = write_dataset(pa.table({"id": range(40), "length": range(1, 41)}))
    first, second = (raylance.dataset(uri, cost=cost) for cost in ("length", "2 * length"))
    mixed = raylance.mix({"a": (first, 0.5), "b": (second, 0.5)})
    state = mixed.loader().state_dict()
    assert reopen(state).loader().state_dict()["cost"] == state["cost"] == {"a": "length", "b": "2 * length"}


@pytest.mark.parametrize("module", ["raylance.audit", "raylance.reports.reading"])
def test_settings_of_states_are_known_without_their_modules(module: str) -> None:
    """A process that proves a run of a robot has not loaded LeRobot's part."""
    text = "FractionSplit(fractions={'a': 1.0}, part='a', by=None, seed=0)"
    camera = {"class": "Camera", "column": "top", "videos": "v", "root": "r"}
    script = f"""
import {module}
from raylance.descriptions import is_description, read_setting
from raylance.planning.state import renew
assert renew({{"format": 5, "split": {text!r}, "windows": None}})["split"]["class"] == "FractionSplit"
assert is_description({camera!r})
assert read_setting({camera!r}).column == "top"
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
