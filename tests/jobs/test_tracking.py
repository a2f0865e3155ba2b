"""Owns the checks of how jobs/train_images tracks runs, on real trackers without a network; never trains."""

import argparse
import json
import logging
from pathlib import Path

import pytest

import raylance
from jobs.train_images import command, trackers, tracking
from jobs.train_images.run_folder import RunFolder
from tests.helpers.tracked import INSTALLED, curves_of_mlflow, curves_of_tensorboard, curves_of_wandb

FACTS = {
    "arguments": {"epochs": 2, "learning_rate": 0.002},
    "data": {"uri": "x.lance", "version": 3, "order": {"lanes": 2}},
}


def parsed(*words: object) -> argparse.Namespace:
    return command.parse_args(["--data", "x.lance", *map(str, words)])


@pytest.fixture
def at(tmp_path: Path) -> RunFolder:
    made = RunFolder(None, str(tmp_path), "run")
    made.make()
    return made


def attempt(at: RunFolder, names: list[str], first: int, last: int) -> dict[str, dict[str, object]]:
    """Logs steps as an attempt does that begins after a checkpoint."""
    resolved = tracking.resolve(parsed("--track", ",".join(names)), at)
    with tracking.Tracking(resolved, first - 1, FACTS) as tracked:
        for step in range(first, last + 1):
            tracked.log(step, {"loss": 1 / step, "val_accuracy": float("nan")})
    tracking.end(resolved, "FINISHED")
    return resolved


def check_steps(at: RunFolder, name: str, steps: list[int]) -> None:
    if name == "tensorboard":
        assert curves_of_tensorboard(Path(at.folder, "tensorboard")) == {"loss": steps}
    elif name == "wandb":
        assert curves_of_wandb(Path(at.folder, "wandb"))["loss"] == steps
    else:
        assert curves_of_mlflow(f"sqlite:///{at.storage}/mlflow.db") == ({"loss": steps}, "FINISHED")


@pytest.mark.parametrize(
    "name", ["tensorboard", *(pytest.param(name, marks=pytest.mark.slow) for name in ("wandb", "mlflow"))]
)
def test_a_run_that_continues_is_the_same_run_and_has_each_step_once(at, monkeypatch, name):
    pytest.importorskip(name, reason="what is not installed cannot be written to")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    before = attempt(at, [name], 1, 8)
    after = attempt(at, [name], 6, 12)  # the checkpoint was made at step 5
    assert before == after
    check_steps(at, name, [*range(1, 13)])


def test_the_data_and_the_arguments_are_recorded(at):
    pytest.importorskip("tensorboard", reason="it is what records here")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    attempt(at, ["tensorboard"], 1, 2)
    events = EventAccumulator(f"{at.folder}/tensorboard").Reload()
    texts = [events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]]
    assert "learning_rate: 0.002" in texts[0]
    assert 'uri: "x.lance"\n    version: 3\n    order: {"lanes": 2}' in texts[1]


def test_a_run_whose_storage_is_a_uri_may_have_a_space_in_its_name(tmp_path):
    made = RunFolder(None, f"file://{tmp_path}", "my run")
    made.make()
    tracking.write_notes(made, {"id": "x"})
    assert (tmp_path / "my run" / tracking.NOTES).exists()
    assert tracking.read_notes(made) == {"id": "x"}


def test_no_secret_is_recorded():
    secret = "--storage-options", "aws_secret_access_key=hidden"
    args = parsed(*secret, "--storage-path", "s3://me:hidden@bucket/runs", "--track", "none")
    recorded = tracking.arguments(args)
    assert "hidden" not in json.dumps(recorded, default=str)
    assert recorded["storage_path"] == "s3://…@bucket/runs"
    assert recorded["epochs"] == 10
    assert trackers.plain("postgresql://me:hidden@host/x failed") == "postgresql://…@host/x failed"
    for password in ("hid/den", "hid@den", "hid:den", "hid@d/en"):  # as SQLAlchemy takes them
        assert trackers.plain(f"postgresql://me:{password}@host/x") == "postgresql://…@host/x"
    assert trackers.plain("s3://bucket/food@3.lance http://host:80/x") == "s3://bucket/food@3.lance http://host:80/x"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--track", "none,tensorboard"], "asks for none and for others"),
        (["--track", "none", "--track", "mlflow"], "asks for none and for others"),
    ],
)
def test_what_contradicts_itself_is_refused(at, words, message):
    with pytest.raises(raylance.ConfigError, match=message):
        tracking.resolve(parsed(*words), at)


def test_unknown_trackers_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed("--track", "tensorboard,paper")
    assert "argument --track: 'paper' is none of tensorboard, wandb, mlflow, none" in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_refused_with_the_command(at, monkeypatch):
    class Absent(trackers.TensorBoard):
        module = "no_such_package_anywhere"

    monkeypatch.setitem(trackers.TRACKERS, "tensorboard", Absent)
    with pytest.raises(raylance.ConfigError, match="pip install tensorboard on every node, or leave it out"):
        tracking.resolve(parsed("--track", "tensorboard"), at)
    assert tracking.resolve(parsed(), at) == {}  # the default is what is there


def test_a_run_without_a_place_for_mlflow_is_refused(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(
        raylance.ConfigError, match="MLFLOW_TRACKING_URI is not set, and --storage-path s3://bucket/runs cannot hold"
    ):
        trackers.Mlflow.resolve(RunFolder(None, "s3://bucket/runs", "run"), {"id": "x"})


def test_a_tracker_that_fails_warns_once_and_ends_nothing(at, caplog):
    pytest.importorskip("tensorboard", reason="it is what fails here")
    Path(at.folder, "tensorboard").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        resolved = attempt(at, ["tensorboard"], 1, 50)
    assert list(resolved) == ["tensorboard"]
    [warning] = caplog.messages
    assert warning.startswith("tensorboard failed and gets no more points (")


def test_what_is_tracked_by_nothing_costs_nothing():
    with tracking.Tracking() as tracked:
        tracked.log(1, {"loss": 1.0})
        tracked.keep()
    assert not tracked


def test_the_tests_know_what_is_installed():
    assert set(INSTALLED) <= set(trackers.TRACKERS)
