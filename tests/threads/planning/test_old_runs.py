"""Runs of the last two minor versions: a dataset, states and records that they wrote, kept in tests/data."""

import json
import logging
from pathlib import Path
from typing import Any

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
