"""A checkpoint's name that is used again: which files belong to it."""

import shutil
from pathlib import Path

import pyarrow.fs
import pytest
import ray.train
import torch

from raylance.errors import ConfigError
from raylance.integrations.checkpoint_files import _save, list_files, only_listed

STEPS = {"": 6}


def upload(
    folder: Path, to: Path, parts: dict[int, list[str]], steps: dict[str, int], world_size: int, report: str = ""
) -> None:
    """A report: each rank's directory, copied into one folder as Ray Train does."""
    report = report or f"{steps} of {world_size}"
    for rank, names in parts.items():
        own = folder / f"{to.name}-{world_size}-{steps}-{rank}"
        for name in names:
            (own / name).parent.mkdir(parents=True, exist_ok=True)
            (own / name).write_text(f"{name} of {world_size} ranks at {steps}")
        list_files(ray.train.Checkpoint(str(own)), rank, world_size, steps, report)
        shutil.copytree(own, to, dirs_exist_ok=True)


def seen(directory: Path, steps: dict[str, int]) -> set[str]:
    with only_listed(str(directory), steps) as shown:
        return {
            str(path.relative_to(shown)): path.read_text() == f"{path.relative_to(shown)} of 2 ranks at {steps}"
            for path in shown.rglob("*")
            if path.is_file() and not path.name.startswith("raylance_files")
        }


@pytest.mark.parametrize(
    ("steps", "world_size"), [({"": 3}, 4), ({"": 6}, 4), ({"": 3}, 2)], ids=["earlier", "more ranks", "same ranks"]
)
def test_files_of_an_earlier_report_are_no_part_of_a_checkpoint(
    tmp_path: Path, steps: dict[str, int], world_size: int
) -> None:
    """Four ranks wrote `latest`, then two: all four parts were handed to load=, and an old state.pt was restored."""
    latest = tmp_path / "latest"
    before = {rank: [f"part-{rank}.pt", f"deep/{rank}.bin"] for rank in range(world_size)}
    upload(tmp_path, latest, {**before, 0: [*before[0], "state.pt"]}, steps, world_size)
    upload(tmp_path, latest, {0: ["part-0.pt"], 1: ["part-1.pt", "more/1"]}, STEPS, 2)
    assert seen(latest, STEPS) == {"part-0.pt": True, "part-1.pt": True, "more/1": True}


def test_a_checkpoint_of_one_report_is_handed_over_as_it_is(tmp_path: Path) -> None:
    """Also one without lists, as raylance 0.10 wrote it, or with a damaged one: nothing is left out on suspicion."""
    latest = tmp_path / "latest"
    upload(tmp_path, latest, {0: ["a"], 1: ["b"]}, STEPS, 2)
    with only_listed(str(latest), STEPS) as shown:
        assert shown == latest
    (latest / "stray").write_text("put there by hand")
    for path in sorted(latest.glob("raylance_files-*"), reverse=True):
        path.write_text("{")
        with only_listed(str(latest), STEPS) as shown:
            assert shown == latest
    for path in latest.glob("raylance_files-*"):
        path.unlink()
    with only_listed(str(latest), STEPS) as shown:
        assert shown == latest


def test_files_of_ranks_that_take_no_steps_are_a_part(tmp_path: Path) -> None:
    """The later stages of a pipeline report, too; their weights were left out as those of an earlier report."""
    latest = tmp_path / "latest"
    upload(tmp_path, latest, {0: ["part-0.pt"], 1: ["part-1.pt", "old"]}, {"": 3}, 2, "start 1")
    upload(tmp_path, latest, {0: ["part-0.pt"]}, STEPS, 2, "start 2")
    upload(tmp_path, latest, {1: ["part-1.pt"]}, {"": 0}, 2, "start 2")
    with only_listed(str(latest), STEPS) as shown:
        assert {path.name for path in shown.iterdir()} == {"part-0.pt", "part-1.pt"}


def test_files_of_a_linked_directory_are_a_part(tmp_path: Path) -> None:
    """Ray Train copies them; they were left out as those of an earlier report."""
    own, latest = tmp_path / "own", tmp_path / "latest"
    for folder in (own, latest, tmp_path / "model" / "deep"):
        folder.mkdir(parents=True)
    (tmp_path / "model" / "deep" / "weights").write_text("1")
    (own / "model").symlink_to(tmp_path / "model")
    list_files(ray.train.Checkpoint(str(own)), 0, 1, STEPS, "one")
    pyarrow.fs.copy_files(str(own), str(latest))
    with only_listed(str(latest), STEPS) as shown:
        assert shown == latest


def test_a_state_that_could_not_be_loaded_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    _save({"model": {"w": torch.ones(3)}, "step": 3, "name": "x", "history": [1.0, None]}, path)
    assert torch.load(path, weights_only=True)["model"]["w"].tolist() == [1, 1, 1]
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    _save({"model": {"w": quantised}}, path)
    assert torch.load(path, weights_only=True)["model"]["w"].dequantize().tolist() == pytest.approx([1, 1, 1])
    for value in (Path("x"), lambda: 1, (row for row in [1]), open(path, "rb")):  # noqa: SIM115
        with pytest.raises(ConfigError, match="no run could resume"):
            _save({"value": value}, path)
