"""What report() does on a disk that is full, and with what dead processes have left there."""

import os
import re
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

import raylance
from raylance.environment import temporary
from raylance.errors import ConfigError
from raylance.integrations import checkpoint_files

MEBIBYTE = 1 << 20


MAKES = """
import pathlib, sys
from raylance.environment import temporary
pathlib.Path(temporary.make({"state.pt"}), "state.pt").touch()
print("made", flush=True)
sys.stdin.read()
"""


def test_the_next_start_removes_what_a_killed_process_left_and_nothing_else(tmp_path: Path) -> None:
    def start() -> tuple[subprocess.Popen[str], Path]:
        """A process that has made its directory, and that directory."""
        before, pipes = set(tmp_path.iterdir()), {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-c", MAKES], env=os.environ | {"TMPDIR": str(tmp_path)}, **pipes)
        assert process.stdout.readline() == "made\n"
        (made,) = set(tmp_path.iterdir()) - before
        return process, made

    own = [tmp_path / name for name in ("raylance-report-mine", "raylance-mine")]
    for each in own:
        each.mkdir(0o700)
        (each / "model.pt").touch()
    killed, left = start()
    killed.kill()
    killed.communicate()
    assert left.exists()
    alive, used = start()
    assert set(tmp_path.iterdir()) == {*own, used}, "that of a process that lives, and the user's"
    other, _ = start()
    for process in (other, alive):
        process.communicate()
    assert set(tmp_path.iterdir()) == set(own)


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
    assert not isinstance(caught.value, ConfigError), "nothing is wrong with the state"
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
