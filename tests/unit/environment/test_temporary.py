"""What report() does on a disk that is full, and with what dead processes have left there."""

import atexit
import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import ray.train
import torch
from ray.train.torch import TorchTrainer

import raylance
from raylance.environment import temporary
from raylance.integrations import checkpoint_files

MEBIBYTE = 1 << 20


FORK = multiprocessing.get_context("fork")


class Interrupts:
    """Something in a state that acts while torch.save writes it."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __reduce__(self) -> str:
        self.act()
        return "a name that is in no module, so that the state can't be saved"


def report_in_local_mode(uri: str, directory: Path, act: Callable[[], object] | None) -> None:
    """Reports once, and ends as an interpreter does."""
    os.environ["TMPDIR"] = str(directory)
    tempfile.tempdir = None  # a library may have asked for it when it was imported
    state = {"step": 1} if act is None else {"step": torch.ones(9), "last": Interrupts(act)}
    try:
        TorchTrainer(
            lambda: raylance.report({"rows": 0}, ray.train.get_dataset_shard("train"), state=state),
            scaling_config=ray.train.ScalingConfig(num_workers=0),
            datasets={"train": raylance.dataset(uri, columns=["id"])},
        ).fit()
    finally:
        atexit._run_exitfuncs()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait(writing: Any, may_end: Any) -> None:
    writing.set()
    may_end.wait()


def start(*arguments: Any) -> Any:
    process = FORK.Process(target=report_in_local_mode, args=arguments)
    process.start()
    return process


def report_three_times(uri: str, directory: Path) -> None:
    mine, other = directory / "raylance-report-mine", directory / "raylance-mine"
    for each in (mine, other):
        each.mkdir(0o700)
        (each / "model.pt").touch()
    killed = start(uri, directory, die)
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    [left] = set(directory.glob("raylance-*")) - {mine, other}
    assert {file.name for file in left.iterdir()} == {"raylance_state.json", "state.pt"}, "it died in report()"
    writing, may_end = FORK.Event(), FORK.Event()
    alive = start(uri, directory, functools.partial(wait, writing, may_end))
    assert writing.wait(120)
    [used] = set(directory.glob("raylance-*")) - {mine, other, left}
    whole = start(uri, directory, None)
    whole.join()
    assert whole.exitcode == 0
    assert set(directory.glob("raylance-*")) == {mine, other, used}, "of a process that lives, and of the user's"
    may_end.set()
    alive.join()
    assert alive.exitcode == 1, "a state that can't be saved"
    assert set(directory.glob("raylance-*")) == {mine, other}


@pytest.mark.slow
def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(images_uri: str, tmp_path: Path) -> None:
    """In forks of a process without threads, unlike this one: imports are most of what a process takes."""
    process = multiprocessing.get_context("spawn").Process(target=report_three_times, args=(images_uri, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "disk"
    directory.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", directory], check=False)
    if made.returncode:
        pytest.skip("this user may mount nothing")
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.fixture
def save(images_uri: str) -> Callable[..., None]:
    """Writes a checkpoint as report() does, of a loader that has moved."""
    loader = raylance.dataset(images_uri, columns=["id"], order="sequential").loader(runtime="threads")

    def write(directory: Path, **state: object) -> None:
        checkpoint_files.write_files(ray.train.Checkpoint(directory), loader.state_dict(), state)

    return write


def test_a_full_disk_is_named_with_what_is_free_and_what_is_needed(small_disk: Path, save: Callable[..., None]) -> None:
    weights = torch.zeros(8 * MEBIBYTE, dtype=torch.uint8)
    with pytest.raises(raylance.RaylanceError) as caught:
        save(small_disk, weights=weights)
    assert not isinstance(caught.value, raylance.ConfigError), "nothing is wrong with the state"
    text = str(caught.value)
    assert f"can't write its checkpoint to {small_disk} (No space left on device)" in text
    assert "TMPDIR" in text
    free, needed = (int(found.replace(",", "")) for found in re.findall(r"[\d,]{3,}\d", text))
    assert 3 * MEBIBYTE < free <= 4 * MEBIBYTE
    assert 8 * MEBIBYTE < needed < 9 * MEBIBYTE
    assert not (small_disk / "state.pt").exists(), "no half of a state stays"
    with open(small_disk / "rest", "wb", buffering=0) as rest, pytest.raises(OSError, match="No space"):
        while True:
            rest.write(bytes(MEBIBYTE))
    with pytest.raises(raylance.RaylanceError, match=r"[\d,]+ bytes"):
        save(small_disk, weights=weights[:MEBIBYTE].clone())
    (small_disk / "rest").unlink()
    save(small_disk, weights=weights[:MEBIBYTE].clone())


def test_a_checkpoint_that_finds_no_room_is_not_restored(
    small_disk: Path, save: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    save(tmp_path / "there", weights=torch.zeros(8 * MEBIBYTE, dtype=torch.uint8))
    elsewhere = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())  # which has to be copied
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    with pytest.raises(raylance.RaylanceError) as caught:
        raylance.restore(None, ray.train.Checkpoint("there", elsewhere))
    assert f"the checkpoint there can't be fetched to {small_disk} (No space left on device)" in str(caught.value)


def test_threads_that_report_at_once_each_have_a_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    interval = sys.getswitchinterval()

    def make(_: int) -> int:
        made = [temporary.make({"metrics.json"}) for _ in range(20)]
        for directory in made:
            temporary.remove(directory)
        return len(set(made))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(make, range(8))) == [20] * 8
    finally:
        sys.setswitchinterval(interval)
    assert list(tmp_path.iterdir()) == []
