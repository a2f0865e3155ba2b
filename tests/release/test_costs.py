"""Processes that keep the costs of one dataset at once."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance

ROWS = 200_000


@pytest.fixture(scope="module")
def tokens(write_dataset: Callable[..., str]) -> str:
    """Documents of 0 to 40 tokens, in three fragments, with deleted rows."""
    random = np.random.default_rng(0)
    lengths = random.integers(0, 40, ROWS)
    ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
    table = pa.table(
        {
            "ids": pa.ListArray.from_arrays(pa.array(ends), pa.array(np.zeros(ends[-1], dtype=np.int8))),
            "length": lengths,
            "id": np.arange(ROWS),
            "images": pa.array(random.integers(0, 3, ROWS), pa.int8()),
            "a b": lengths / 8,
        }
    )
    uri = write_dataset(table, max_rows_per_file=70_000)
    lance.dataset(uri).delete("id % 100 = 17")
    return uri


def test_processes_that_make_one_file_at_once_do_not_spoil_it(tokens: str, tmp_path: Path) -> None:
    script = (
        "import sys, raylance; raylance.dataset(sys.argv[1], columns=['id'], cost='length', cost_folder=sys.argv[2])"
    )
    made = [subprocess.Popen([sys.executable, "-c", script, tokens, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(timeout=100) for process in made] == [0] * 4
    found = raylance.dataset(tokens, columns=["id"], cost="length", cost_folder=tmp_path).costs
    np.testing.assert_array_equal(found, lance.dataset(tokens).to_table(columns=["length"])["length"].to_numpy())
    assert {path.suffix for path in tmp_path.iterdir()} == {".int32"}
