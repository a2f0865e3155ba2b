"""Processes that keep the costs of one dataset at once."""

import subprocess
import sys
from pathlib import Path

import lance
import numpy as np

import raylance


def test_processes_that_make_one_file_at_once_do_not_spoil_it(tokens: str, tmp_path: Path) -> None:
    script = (
        "import sys, raylance; raylance.dataset(sys.argv[1], columns=['id'], cost='length', cost_folder=sys.argv[2])"
    )
    made = [subprocess.Popen([sys.executable, "-c", script, tokens, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(timeout=100) for process in made] == [0] * 4
    found = raylance.dataset(tokens, columns=["id"], cost="length", cost_folder=tmp_path).costs
    np.testing.assert_array_equal(found, lance.dataset(tokens).to_table(columns=["length"])["length"].to_numpy())
    assert {path.suffix for path in tmp_path.iterdir()} == {".int32"}
