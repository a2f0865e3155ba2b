"""Fuzzing: each mutated picture is an array of its shape or a bad row, and costs no process, time or kept memory."""

import json
from pathlib import Path

import pytest

from tests.helpers.scripts import run_script

MARGIN_BYTES = 48 << 20  # of resident memory that comes and goes; 0.5 KB kept of each of 100,000 pictures exceed it


def check(folder: Path, count: int, limit_s: float, seed: int = 0) -> None:
    script = f"from tests.helpers.mutated import main; main({seed}, 0, {count})"
    lines = run_script(script, folder, limit_s).splitlines()  # codecs say what they do not find, too
    assert [line for line in lines if line.isdigit()] == [str(number) for number in range(count)]
    (made,) = (json.loads(line) for line in lines if line.startswith("{"))
    found, resident = made["found"], made["resident"]
    print(json.dumps({"pictures": count, "found": found, "resident": resident}))
    for path in {name.split()[0] for name in found}:
        assert sum(times for name, times in found.items() if name.split()[0] == path) == count
        assert found[path] > count / 20, "some are good"
        assert found[f"{path} DecompressionBombError"] > count / 50, "some say absurd dimensions"
    assert max(resident[2:]) - resident[1] < MARGIN_BYTES, f"resident memory grew: {resident}"


def test_mutated_pictures_are_arrays_or_bad_rows(tmp_path: Path) -> None:
    check(tmp_path, 150, limit_s=120)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_mutated_pictures_cost_no_process_no_time_and_no_memory(tmp_path: Path) -> None:
    """Five to ten minutes."""
    check(tmp_path, 100_000, limit_s=3500)
