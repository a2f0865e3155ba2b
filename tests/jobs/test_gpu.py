"""Checks jobs/gpu.py where there is no GPU: the same code runs on the CPU, and no rate is checked."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.gpu import checks
from raylance.batches.device import Sender

pytest.importorskip("nvidia.nvimgcodec")

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_batches_and_pictures_of_the_cpu_are_those_of_the_cpu(tmp_path: Path) -> None:
    made = [*checks.check_positions(CPU, tmp_path), *checks.check_pictures(CPU, tmp_path, 60)]
    assert [check for check in made if not check.holds] == []
    assert len(made) == 7
    assert "100.0% of values equal" in made[-1].found


def test_a_wrong_batch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value of one batch is another one."""
    receive, calls = Sender.receive, itertools.count()

    def one_value(self: Sender, sent: Any) -> Any:
        batch = receive(self, sent)
        if next(calls) == 20:
            batch["vector"][3, 2] += 1
        return batch

    monkeypatch.setattr(Sender, "receive", one_value)
    found = [check.found for check in checks.check_positions(CPU, tmp_path) if not check.holds]
    assert len(found) == 1
    assert found[0].startswith("batch 4, column vector: ")


def test_the_script_runs_without_a_gpu(tmp_path: Path) -> None:
    small = ["--images", "16", "--odd", "20", "--vectors", "400", "--passes", "5", "--seconds", "1", "--workers", "2"]
    program = [sys.executable, "jobs/gpu.py", "--device", "cpu", *small, "--json", str(tmp_path / "found.json")]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found["checks"]) == 24
    assert all(check["holds"] for check in found["checks"])
    assert {figure["unit"] for figure in found["figures"]} == {"images/s", "GB/s", "%"}
    assert all(figure["median"] >= 0 for figure in found["figures"])
