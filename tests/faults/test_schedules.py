"""Owns the check that the fault suite's default part passes; what it plays and how it checks lies beside it."""

import pytest

from tests.faults.__main__ import main


@pytest.mark.slow
@pytest.mark.promise("P1", "P3", "P4", "P5", "P6", "P9")
def test_the_default_schedules_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0, capsys.readouterr().out
    assert "2 schedules of 1 seeds" in capsys.readouterr().out, "each of them hit something"
