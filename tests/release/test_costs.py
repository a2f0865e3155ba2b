"""Processes that keep the costs of one dataset at once."""

import subprocess
import sys
from pathlib import Path

import lance
import numpy as np
import pytest

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


_KILLED = """
import sys, os, raylance
from raylance.source import costs
read, count = costs._read_piece, [0]
def few(*arguments):
    count[0] += 1
    if count[0] > 2:
        os._exit(9)
    return read(*arguments)
costs._read_piece, costs._AT_ONCE, costs._NOTED = few, 1, 1
raylance.dataset(sys.argv[1], columns=["id"], cost="length", cost_folder=sys.argv[2])
"""


def test_a_killed_process_is_continued(tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, tokens, str(tmp_path)], check=False)
    assert killed.returncode == 9
    assert {path.suffix for path in tmp_path.iterdir()} == {".partial", ".done"}
    from raylance.source import costs

    read, pieces = costs._read_piece, []
    monkeypatch.setattr(costs, "_read_piece", lambda *given: pieces.append(given[-1].start) or read(*given))
    found = raylance.dataset(tokens, columns=["id"], cost="length", cost_folder=tmp_path).costs
    assert pieces
    assert 0 not in pieces, "the first piece was noted as done"
    stored = lance.dataset(tokens).to_table(columns=["length"])["length"].to_numpy()
    np.testing.assert_array_equal(found, stored)
    assert {path.suffix for path in tmp_path.iterdir()} == {".int32"}
