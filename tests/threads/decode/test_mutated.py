"""Fuzzing: each mutated picture is an array of its shape or a bad row, and costs no process, time or kept memory."""

from pathlib import Path

from tests.helpers.mutated import check


def test_mutated_pictures_are_arrays_or_bad_rows(tmp_path: Path) -> None:
    check(tmp_path, 150, limit_s=120)
