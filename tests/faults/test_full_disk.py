"""A run whose storage is full: a report is refused in time, by a real file system of a few MiB and real workers; and
the newest whole checkpoint is found. Schedules of tests/faults fill the disk in a report.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
import ray.train
import torch
from ray.train.torch import TorchTrainer

import raylance
from raylance.integrations import checkpoint_files

MEBIBYTE = 1 << 20
BATCH = 100
SNAPSHOT = "checkpoint_manager_snapshot.json"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", directory], check=False)
    if made.returncode:
        pytest.skip("this user may mount nothing")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


def train(config: dict[str, Any]) -> None:
    """Three steps with a checkpoint of some MiB each."""
    loader = ray.train.get_dataset_shard("train")
    saved = raylance.restore(loader) or {"step": 0}
    if loader.rank == 0:
        storage = Path(ray.train.get_context().get_storage().experiment_fs_path)
        (storage / f"began-{loader.state_dict()['position']}-{saved['step']}").touch()
    batches = iter(loader.batches(global_batch_size=BATCH))
    for step in range(saved["step"] + 1, 4):
        next(batches)
        raylance.report({"step": step}, loader, {"step": step, "weights": torch.zeros(9 * MEBIBYTE, dtype=torch.uint8)})


def fit(uri: str, storage: Path, failures: int = 0) -> ray.train.Result:
    return TorchTrainer(
        train,
        train_loop_config={},
        datasets={"train": raylance.dataset(uri, columns=["id"])},
        dataset_config=raylance.DataConfig(num_decoders=0),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(storage), failure_config=ray.train.FailureConfig(max_failures=failures)
        ),
    ).fit()


@pytest.mark.usefixtures("ray_session")
def test_a_report_without_room_is_refused_and_the_run_continues_when_there_is_some(images_uri: str, disk: Path) -> None:
    with pytest.raises(ray.train.TrainingFailedError) as caught:
        fit(images_uri, disk, failures=1)
    text = str(caught.value)
    assert f"report() has no room for its checkpoint in {disk}/run: it has 9,4" in text
    assert "bytes are free there" in text
    run = disk / "run"
    assert len(list(run.glob("checkpoint_2*"))) == 2, "no part of the third fills the disk"
    assert len(json.loads((run / SNAPSHOT).read_text())["checkpoint_results"]) == 2
    assert {found.name for found in run.glob("began-*")} == {"began-0-0", "began-200-2"}, "it was tried again once"
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
    assert fit(images_uri, disk).metrics["step"] == 3


# ---- the newest whole checkpoint


def write(folder: Path, name: str, step: int, loader: raylance.RankLoader, weights: Any = ()) -> Path:
    directory = folder / name
    directory.mkdir(parents=True)
    (directory / "raylance_state.json").write_text(json.dumps(loader.state_dict()))
    state = {"step": step} | ({"weights": torch.from_numpy(weights)} if len(weights) else {})
    torch.save(state, directory / "state.pt")
    return directory


def test_the_newest_checkpoint_that_is_whole_is_found(
    images_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = raylance.dataset(images_uri, columns=["id"]).loader(runtime="threads")
    run = tmp_path / "a run"
    for step, name in enumerate(["z", "checkpoint_1", "own files", "half a state", "half a position", "no state"]):
        write(run, name, step, loader)
    (run / "raylance").mkdir()
    (run / "own files" / "state.pt").rename(run / "own files" / "model.bin")
    whole = (run / "half a state" / "state.pt").read_bytes()
    (run / "half a state" / "state.pt").write_bytes(whole[: len(whole) // 2])
    (run / "half a position" / "raylance_state.json").write_text("")
    (run / "no state" / "state.pt").unlink()
    write(run, "deleted meanwhile", 6, loader)
    write(run, "other values", 7, loader, np.arange(50_000))
    middle = bytearray((run / "other values" / "state.pt").read_bytes())
    middle[200_000:200_064] = bytes(64)
    (run / "other values" / "state.pt").write_bytes(middle)
    read = checkpoint_files.read_state

    def read_late(directory: str) -> Any:
        if directory.endswith("deleted meanwhile"):
            shutil.rmtree(directory)
        return read(directory)

    monkeypatch.setattr(checkpoint_files, "read_state", read_late)
    assert raylance.runs.newest_checkpoint(run).path == str(run / "own files")
    assert not (run / "deleted meanwhile").exists()
    shutil.rmtree(run / "own files")
    found = raylance.runs.newest_checkpoint(run)
    assert found.path == str(run / "checkpoint_1")
    assert raylance.restore(loader, found) == {"step": 1}
    local = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    assert raylance.runs.newest_checkpoint("a run", local).path == "a run/checkpoint_1"


@pytest.mark.parametrize("kept", [1, 1_000, 40_000, 79_000])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_a_state_that_was_cut_anywhere_is_damaged(images_uri: str, tmp_path: Path, kept: int, has_zeros: bool) -> None:
    """torch raises an OSError of its own at some lengths, which ended the search for a whole one."""
    loader = raylance.dataset(images_uri, columns=["id"]).loader(runtime="threads")
    for step in (1, 2):
        write(tmp_path, f"checkpoint_{step}", step, loader, np.arange(10_000))
    path = tmp_path / "checkpoint_2" / "state.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[:kept] + bytes(len(whole) - kept if has_zeros else 0))
    assert raylance.runs.newest_checkpoint(tmp_path).path == str(tmp_path / "checkpoint_1")


@pytest.mark.parametrize("name", ["nowhere", "empty", "a file"])
def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    """A run that should continue must not begin anew in silence."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "a file").touch()
    with pytest.raises(raylance.StateError, match="whole checkpoint"):
        raylance.runs.newest_checkpoint(tmp_path / name)
