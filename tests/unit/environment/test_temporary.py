"""Owns what report() does on a disk that is full, and with what dead processes have left there; never a fake disk."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.fs
import pytest
import ray.train
import torch
from ray.train.torch import TorchTrainer

import raylance
from raylance.environment import temporary

MEBIBYTE = 1 << 20


class Interrupts:
    """Something in a state that acts while torch.save writes it, and is nothing but a string in it."""

    def __init__(self, how: str) -> None:
        """Kills this process, or waits for the end of its input."""
        self.how = how

    def __reduce__(self) -> tuple[type, tuple[str]]:
        print("writing", flush=True)
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.stdin.read()
        return str, ("waited",)


def train_fn(config: dict[str, str]) -> None:
    loader = ray.train.get_dataset_shard("train")
    how = config["how"]
    state = {"step": 1} if how == "whole" else {"step": torch.ones(9), "last": Interrupts(how)}
    raylance.report({"rows": 0}, loader, state=state)


def start(uri: str, directory: Path, how: str) -> subprocess.Popen[str]:
    """A process that reports once, in Ray Train's local mode."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.unit.environment.test_temporary", uri, how],
        env=os.environ | {"TMPDIR": str(directory)},
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_to(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), f"it never said {text}"


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(images_uri: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "raylance-report-mine", tmp_path / "raylance-mine"
    for directory in (mine, other):
        directory.mkdir(0o700)
        (directory / "model.pt").touch()
    killed = start(images_uri, tmp_path, "killed")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    [left] = set(tmp_path.glob("raylance-*")) - {mine, other}
    assert {file.name for file in left.iterdir()} == {"raylance_state.json", "state.pt"}, "it died in report()"
    alive = start(images_uri, tmp_path, "waits")
    read_to(alive, "writing")
    [used] = set(tmp_path.glob("raylance-*")) - {mine, other, left}
    whole = start(images_uri, tmp_path, "whole")
    whole.communicate()
    assert whole.returncode == 0
    assert set(tmp_path.glob("raylance-*")) == {mine, other, used}, "of a process that lives, and of the user's"
    alive.communicate()
    assert alive.returncode == 1, "a state with a class of one's own can't be loaded again"
    assert set(tmp_path.glob("raylance-*")) == {mine, other}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
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
    from raylance.integrations import checkpoint_files

    loader = raylance.dataset(images_uri, columns=["id"], order="sequential").loader(runtime="threads")

    def write(directory: Path, **state: object) -> None:
        checkpoint_files.write_files(ray.train.Checkpoint(directory), loader.state_dict(), state)

    return write


def test_a_full_disk_is_named_with_what_is_free_and_what_is_needed(small_disk: Path, save: Callable[..., None]) -> None:
    weights = torch.zeros(8 * MEBIBYTE, dtype=torch.uint8)
    with pytest.raises(raylance.RaylanceError) as caught:
        save(small_disk, weights=weights)
    assert not isinstance(caught.value, raylance.ConfigError), "nothing is wrong with the state"
    told = str(caught.value)
    assert f"can't write its checkpoint to {small_disk} (No space left on device)" in told
    assert "TMPDIR" in told
    free, needed = (int(found.replace(",", "")) for found in re.findall(r"[\d,]{3,}\d", told))
    assert 3 * MEBIBYTE < free <= 4 * MEBIBYTE
    assert 8 * MEBIBYTE < needed < 9 * MEBIBYTE
    assert not (small_disk / "state.pt").exists(), "no half of a state stays"
    with open(small_disk / "rest", "wb", buffering=0) as rest, pytest.raises(OSError, match="No space"):
        while True:
            rest.write(bytes(MEBIBYTE))
    with pytest.raises(raylance.RaylanceError, match=r"No space left on device.: [\d,]+ bytes are free there"):
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


def test_a_limit_on_the_size_of_files_is_no_fault_of_the_state(tmp_path: Path) -> None:
    """As a quota is: the system says no, with room on the disk."""
    program = (
        "import resource, signal, torch\n"
        "from pathlib import Path\n"
        "from raylance.integrations.checkpoint_files import ray, write_files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "write_files(ray.train.Checkpoint(Path.cwd()), {}, {'weights': torch.zeros(1 << 20)})\n"
    )
    made = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ
    )
    assert "RaylanceError: report() can't write its checkpoint to" in made.stderr
    assert "(File too large)" in made.stderr
    assert "torch.save and torch.load" not in made.stderr


if __name__ == "__main__":
    uri, how = sys.argv[1:]
    TorchTrainer(
        train_fn,
        train_loop_config={"how": how},
        scaling_config=ray.train.ScalingConfig(num_workers=0),
        datasets={"train": raylance.dataset(uri, columns=["id"])},
    ).fit()


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
