"""Schedules of real faults pass; what they do, and how that is checked, lies beside this file."""

import subprocess
import sys

import pytest


@pytest.mark.promise("P1", "P3", "P4", "P5", "P6", "P9")
@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (("--only", "20261128:0"), 1),  # ranks and a shard actor are killed, the latter as a rank starts again
        (("--schedules", "2"), 2),
    ],
)
@pytest.mark.timeout(600)
def test_schedules_pass(arguments: tuple[str, str], count: int) -> None:
    command = [sys.executable, "-m", "tests.faults", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"\n{count} schedules of 1 seeds" in ran.stdout, "each of them hit something"
