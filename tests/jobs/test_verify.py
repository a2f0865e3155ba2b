"""Checks that jobs/verify.py passes what is sound, and finds what is not."""

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from jobs import verify as job
from raylance.api.dataset import opened_of
from raylance.audit import EpochAudit

JOB = Path(__file__).parents[2] / "jobs" / "verify.py"
ROWS, BATCH = 953, 16  # of images_uri; 9 rows after the last whole step
ORDERS = {
    "window": ["--shard-rows", 20, "--window-shards", 2, "--lanes", 4],
    "shard": ["--shard-rows", 20],
    "sequential": [],
    "row": [],
}


def run(capsys: pytest.CaptureFixture[str], uri: str, *options: object) -> tuple[int, str]:
    """Exit status, and all that was printed; argparse's own exit counts too."""
    try:
        status = job.main([uri, "--columns", "id", *map(str, options)])
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    return status, err + out  # what it printed last comes last, whatever Ray says when it starts


@pytest.mark.parametrize(
    ("remainder", "steps", "note"),
    [
        ("drop", 59, " (9 dropped by remainder='drop')"),
        ("pad", 60, " (7 repeated, and marked, by remainder='pad')"),
        ("ragged", 60, ""),
    ],
)
@pytest.mark.parametrize("order", ORDERS)
def test_every_plan_covers(
    order: str, remainder: str, steps: int, note: str, images_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--global-batch-size", BATCH, "--world-size", 3, "--remainder", remainder, "--epoch", 3]
    status, text = run(capsys, images_uri, "--order", order, *ORDERS[order], *options)
    assert status == 0, text
    verdict = f"OK: 953 rows, 3 ranks × {steps} steps, every selected row exactly once{note}"
    assert text.splitlines()[-1] == verdict


def test_filter_position_and_version(images_uri: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["--filter", "label != 3", "--position", 100, "--version", 2, "--json", report]
    status, text = run(capsys, images_uri, "--global-batch-size", 30, "--world-size", 2, *options)
    assert status == 0, text
    found = json.loads(report.read_text())
    selected = lance.dataset(images_uri, version=2).count_rows("label != 3")
    assert found["expected"] == selected
    assert found["delivered"] == (selected - 100) // 30 * 30
    assert found["aside"] == selected - found["delivered"]
    assert found["steps"] == [(selected - 100) // 30] * 2
    assert f"{selected - 100 - found['delivered']:,} dropped" in found["verdict"]
    assert "100 consumed before" in found["verdict"]


@pytest.mark.parametrize(
    "options",
    [
        ["--columns", "id,label", "--world-size", 3, "--remainder", "pad", "--position", 48],
        ["--image-column", "image", "--image-size", 8, "--decoders", 1, "--filter", "id < 300"],
    ],
    ids=["plain", "decoded"],
)
@pytest.mark.usefixtures("ray_session")
def test_the_real_stream_covers(options: list[object], images_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, images_uri, "--stream", "--global-batch-size", BATCH, "--epoch", 1, *options)
    assert status == 0, text
    assert "every selected row exactly once" in text.splitlines()[-1]


def test_a_rank_that_makes_fewer_steps_and_padding_without_a_mark_are_found(images_uri: str) -> None:
    """Other faults of each kind of dataset have tests of their own."""
    data = raylance.dataset(images_uri, columns=["id"], remainder="pad")
    epoch = EpochAudit(data, global_batch_size=50, world_size=2)
    *steps, last = (list(ranks) for ranks in epoch.by_stream(runtime="threads"))
    assert epoch.count([*steps, last]).ok
    unmarked = dataclasses.replace(last[1], real=np.ones_like(last[1].real))
    for spoilt, wanted in (
        ([last[0], unmarked], ["25 rows twice", "1 steps have other rows"]),
        ([None, last[1]], ["3 rows missing, with", "steps of the ranks [19, 20], of the plan 20", "1 steps"]),
    ):
        for line, start in zip(epoch.count([*steps, spoilt]).faults, wanted, strict=True):
            assert line.startswith(start)


def test_a_fault_is_the_exit_status(
    images_uri: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = EpochAudit.by_plan
    monkeypatch.setattr(EpochAudit, "by_plan", lambda self: itertools.islice(replayed(self), 1, None))
    status, text = run(capsys, images_uri, "--global-batch-size", BATCH)
    assert status == 1
    assert text.splitlines()[-1].startswith("FAULT: 16 rows missing, with offsets ")


def test_a_replayed_step_is_what_the_loader_delivered(
    images_uri: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The checkpoint alone gives the order, whatever was "auto"."""
    data = raylance.dataset(images_uri, columns=["label", "id"], filter="label != 3", seed=9)
    state, report = tmp_path / "raylance_state.json", tmp_path / "rows.json"
    for rank in (0, 1):
        with data.loader(rank=rank, world_size=2, num_decoders=0) as loader:
            loader.set_epoch(2)
            batches = loader.iter_batches(global_batch_size=25, with_row_offset=True)
            batch = list(itertools.islice(batches, 8))[7]
            state.write_text(json.dumps(loader.state_dict()))
        options = ["--state", state, "--step", 7, "--rank", rank, "--json", report]
        status, text = run(capsys, images_uri, *options, "--columns", "id,label")
        assert status == 0, text
        rows = json.loads(report.read_text())["rows"]
        assert [row["row_offset"] for row in rows] == batch["_rowoffset"].tolist()
        assert [row["id"] for row in rows] == batch["id"].tolist()
        assert [row["label"] for row in rows] == batch["label"].tolist()
        assert {row["rank"] for row in rows} == {rank}
        advice, *lines = text.splitlines()
        assert "loader.skip(1" in advice
        assert lines[0].split("\t") == ["position", "rank", "row_offset", "padding", "id", "label"]
        assert len(lines) == 1 + len(rows)
    status, text = run(capsys, images_uri, "--state", state, "--filter", "label = 1")
    assert status == 2
    assert "other rows" in text


def test_the_complete_shards_of_a_checkpoint(
    images_uri: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    state, report = tmp_path / "raylance_state.json", tmp_path / "shards.json"
    data = raylance.dataset(images_uri, columns=["id"], order=raylance.ShardShuffle(shard_rows=7))
    for steps in (0, 20):
        with data.loader(runtime="threads") as loader:
            assert len(list(itertools.islice(loader.iter_batches(global_batch_size=25), steps))) == steps
            state.write_text(json.dumps(loader.state_dict()))
        options = ["--state", tmp_path, "--shards", "--global-batch-size", 25, "--json", report]
        status, text = run(capsys, images_uri, *options)
        assert status == 0, text
        names = [[int(end) for end in name.split("-")] for name in json.loads(report.read_text())["shards"]]
        done = [shard for ends in names for shard in range(ends[0], ends[-1] + 1)]
        assert done == loader.completed_shards().tolist()
        assert f"{len(done)} of 137 shards are complete at position {25 * steps} of epoch 0" in text
    assert 0 < len(names) < len(done), "some lie side by side"


@pytest.fixture(scope="module")
def texts(write_dataset: Callable[..., str]) -> list[str]:
    """Two datasets of documents, each with a split, weights and labels."""
    ids = np.arange(90)
    columns = {"id": ids, "split": np.where(ids % 4, "train", "val"), "weight": ids % 3, "label": ids % 5}
    return [
        write_dataset(pa.table({**columns, "tokens": pa.array([[1] * (row % size) for row in ids])}))
        for size in (9, 13)
    ]


KINDS = {
    "split": ["--split", "FractionSplit(fractions={'train': 0.8, 'val': 0.2}, part='train', by='id')"],
    "weighted": ["--order", "Weighted(weights='weight')", "--columns", "id"],
    "balanced": ["--order", "ClassBalanced(column='label', classes_per_batch=3, rows_per_epoch=120)"],
    "packed": ["--pack", "PackTokens(column='tokens', length=8, eos_id=0)", "--filter", "id > 5"],
    "mixture": ["--mix", "web=0.7,books=0.3", "--columns", "id,label", "--split", "ValueSplit('split', 'train')"],
}


def test_a_stream_from_the_shell_starts_a_ray_and_says_nothing_of_it(texts: list[str]) -> None:
    command = [sys.executable, JOB, texts[0], "--columns", "id", "--stream", "--global-batch-size", "7"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert not done.stderr
    assert len(done.stdout.splitlines()) <= 8, done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dataset(kind: str, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--global-batch-size", "7", "--world-size", "2", "--remainder", "ragged", "--storage-option", "a=b"]
    status = job.main([*(texts if kind == "mixture" else texts[:1]), *KINDS[kind], *options])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    verdict = printed.out.splitlines()[-1]
    assert verdict.startswith("OK: ")
    assert verdict.endswith("row exactly once" if kind in ("split", "packed") else "every planned draw exactly once")


def test_a_mixture_is_looked_at_by_its_checkpoint(
    texts: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    parts = {name: (raylance.dataset(uri, columns=["id"], seed=3), 1) for name, uri in zip("ab", texts, strict=True)}
    data = raylance.mix(parts, stop=100)
    state = tmp_path / "raylance_state.json"
    with data.loader(runtime="threads") as loader:
        batch = next(iter(loader.iter_batches(global_batch_size=10, with_row_offset=True)))
        state.write_text(json.dumps(loader.state_dict()))
    report = tmp_path / "rows.json"
    for uris in ([], texts):
        options = ["--state", str(state), "--step", "0", "--columns", "id", "--json", str(report)]
        assert job.main([*uris, *options]) == 0, capsys.readouterr()
        rows = json.loads(report.read_text())["rows"]
        assert [row["id"] for row in rows] == batch["id"].tolist()
        assert [row["row_offset"] for row in rows] == batch["_rowoffset"].tolist()
    assert job.main(["--state", str(state)]) == 0
    assert "OK: 100 draws" in capsys.readouterr().out
    for text in ("{}", "[]"):
        state.write_text(text)
        assert job.main(["--state", str(state)]) == 2
        assert "this is not a raylance state" in capsys.readouterr().err


def test_bad_rows_are_counted_however_many_there_are(images_uri: str) -> None:
    options = ["--stream", "--image-column", "image", "--on-bad-row", "mask", "--global-batch-size", "8"]
    decoding = opened_of(job.open_data(job.parse([images_uri, *options]))).read.decoding
    assert decoding is not None
    assert decoding.max_bad_rows is None


def test_storage_options_reach_the_dataset(texts: list[str]) -> None:
    options = ["--storage-option", "region=mars", "--storage-option", "endpoint=http://x/?a=b"]
    data = job.open_data(job.parse([texts[0], "--global-batch-size", "8", *options]))
    assert opened_of(data).read.source.pinned.storage_options == {"region": "mars", "endpoint": "http://x/?a=b"}


def test_a_step_of_all_ranks_shows_values_briefly(
    write_dataset: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    uri = write_dataset(pa.table({"id": range(40), "raw": [b"x" * 2000] * 40, "text": ["y" * 500] * 40}))
    options = ["--order", "sequential", "--global-batch-size", 6, "--world-size", 4, "--remainder", "pad"]
    status, text = run(capsys, uri, *options, "--step", 6, "--columns", "id,raw,text")
    assert status == 0, text
    rows = [line.split("\t") for line in text.splitlines()[2:]]
    wanted = [(str(place), str(place % 40), str(place >= 40)) for place in range(36, 42)]
    assert [(row[0], row[2], row[3]) for row in rows] == wanted
    assert [row[1] for row in rows] == ["0", "1", "1", "2", "3", "3"]
    assert {row[5] for row in rows} == {"<2,000 bytes>"}
    assert {len(row[6]) for row in rows} == {80}


def test_a_step_without_columns_and_with_idle_ranks(
    write_dataset: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    uri = write_dataset(pa.table({"id": range(10)}))
    options = ["--order", "sequential", "--global-batch-size", "4", "--world-size", "3", "--remainder", "ragged"]
    assert job.main([uri, *options, "--step", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["position\trank\trow_offset\tpadding", "8\t1\t8\tFalse", "9\t2\t9\tFalse"]


def test_quality(images_uri: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report, plot = tmp_path / "quality.json", tmp_path / "quality.png"
    options = ["--global-batch-size", 32, "--quality", "--shard-rows", 10, "--json", report]
    options += ["--label-column", "label", "--filter", "id > 100"]
    status, text = run(capsys, images_uri, *options, "--plot", plot)
    assert status == 0, text
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "class divergence, 7 labels" in text
    assert "window_shards" in text.splitlines()[-6]
    assert json.loads(report.read_text())["divergences"]["7 labels"]["value"] > 0
    status, text = run(capsys, images_uri, "--global-batch-size", 32, "--quality", "--order", "sequential")
    assert status == 0, text
    assert "100 blocks" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--global-batch-size is missing"),
        (["--global-batch-size", 0], "at least 1"),
        (["--global-batch-size", 8, "--order", "row", "--lanes", 4], "takes {'lanes': 4}"),
        (["--global-batch-size", 8, "--world-size", 2, "--rank", 2, "--step", 0], "a rank lies in"),
        (["--global-batch-size", 8, "--position", 953], "the epoch has 953 rows"),
        (["--global-batch-size", 8, "--step", 119], "there are 119 steps"),
        (["--global-batch-size", 8, "--columns", "nope"], "no column 'nope'; nothing was started"),
        (["--global-batch-size", 8, "--quality", "--label-column", "nope"], "no column 'nope'"),
        (["--global-batch-size", 8, "--filter", "nope = 1"], "cannot be applied"),
        (["--global-batch-size", 8, "--version", 99], "99"),
        (["--state", "nowhere.json"], "cannot be read"),
        (["--global-batch-size", 8, "--mix", "a=1,b=1"], "1 URIs: give one, or with --mix one for each name"),
        (["--global-batch-size", 8, "--split", "Half(0.5)"], "write one of "),
        (["--global-batch-size", 8, "--order", "best"], "no order 'best'"),
        (["--global-batch-size", 8, "--storage-option", "region"], "region has no =: it would not be used"),
        (["--global-batch-size", 8, "--shard-rows", "many"], "shard_rows='many'"),
        (["--global-batch-size", 8, "--decoders", 2], "--decoders means nothing without --stream"),
        (["--global-batch-size", 8, "--plot", "x.png"], "--plot means nothing without --quality"),
        (["--global-batch-size", 8, "--json", "nowhere/x.json"], "No file can be written there"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(map(str, value)) or "nothing",
)
def test_bad_input(options: list[object], message: str, images_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, images_uri, *options)
    assert status == 2
    assert message in text
    assert "Traceback" not in text


def test_from_the_shell(images_uri: str) -> None:
    """As a user runs it, from anywhere; the plan needs no Ray to be replayed."""
    command = [sys.executable, JOB, images_uri, "--global-batch-size", "100", "--world-size", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=JOB.anchor)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == (
        "OK: 953 rows, 8 ranks × 9 steps, every selected row exactly once (53 dropped by remainder='drop')"
    )
