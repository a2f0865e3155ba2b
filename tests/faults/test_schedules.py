"""Owns the check that schedules of the fault suite pass; what they do and how that is checked lies beside it."""

import subprocess
import sys

import pytest


@pytest.mark.ray  # beside the tests that wait for Ray's actors; it starts a cluster of its own
@pytest.mark.promise("P1", "P3", "P4", "P5", "P6", "P9")
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_schedules_pass(count: int) -> None:
    check(count)


@pytest.mark.promise("P1", "P8", "P9")
def test_schedules_of_scripts_pass() -> None:
    """Threads alone: two passes that are broken off, an interrupt of a mixture, a worker that cannot be sent a lock."""
    check(4, "--family", "scripts", "--seed", "3390")


@pytest.mark.slow
@pytest.mark.ray  # as above
@pytest.mark.promise("P1", "P8", "P9")
def test_schedules_of_scripts_pass_with_ray() -> None:
    check(40, "--family", "scripts", "--seed", "1")


def check(count: int, *options: str) -> None:
    command = [sys.executable, "-m", "tests.faults", "--schedules", str(count), *options]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"\n{count} schedules of 1 seeds" in ran.stdout, "each of them hit something"
