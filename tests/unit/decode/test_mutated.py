"""Owns the fuzz of mutated pictures: each is an array of its shape or a bad row, and costs neither a process, nor time,
nor memory that stays.
"""

import json
import subprocess
import sys

import pytest

from tests.helpers.mutated import LONGEST_S

MARGIN_BYTES = 48 << 20  # of resident memory that comes and goes; 0.5 KB kept of each of 100,000 pictures exceed it


def decode_mutated(seed: int, first: int, count: int, limit_s: float) -> tuple[dict[str, int], list[int]]:
    """How many pictures ended how, and the resident bytes on the way."""
    command = [sys.executable, "-m", "tests.helpers.mutated", str(seed), str(first), str(count)]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, errors="replace")
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"hung, at picture {(expired.stdout or b'').split()[-1:]} of seed {seed}")
    *numbers, last = ran.stdout.splitlines() or [""]
    where = f"exit status {ran.returncode} at picture {last} of seed {seed}, {LONGEST_S:g} s at the most for each"
    assert ran.returncode == 0, f"{where}\n{ran.stderr[-3000:]}"
    assert len(numbers) == count
    made = json.loads(last)
    return made["found"], made["resident"]


def check(count: int, limit_s: float, seed: int = 0) -> None:
    found, resident = decode_mutated(seed, 0, count, limit_s)
    print(json.dumps({"pictures": count, "found": found, "resident": resident}))
    for path in {name.split()[0] for name in found}:
        assert sum(times for name, times in found.items() if name.split()[0] == path) == count
        assert found[path] > count / 20, "some are good"
        assert found[f"{path} DecompressionBombError"] > count / 50, "some say absurd dimensions"
    assert max(resident[2:]) - resident[1] < MARGIN_BYTES, f"resident memory grew: {resident}"


def test_mutated_pictures_are_arrays_or_bad_rows() -> None:
    check(150, limit_s=120)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_mutated_pictures_cost_no_process_no_time_and_no_memory() -> None:
    """Five to ten minutes."""
    check(100_000, limit_s=3500)
