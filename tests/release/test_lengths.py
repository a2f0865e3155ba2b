"""Steps of a cost through Ray, on several worlds."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest

from tests.helpers.costly import ROWS, check_steps_on_another_world


@pytest.fixture(scope="module")
def texts(write_dataset: Callable[..., str]) -> str:
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, ROWS), 2, 200).astype(np.int64)
    ids = [np.full(length, row, dtype=np.int32) for row, length in enumerate(lengths)]
    return write_dataset(pa.table({"ids": ids, "length": lengths, "id": np.arange(ROWS)}), max_rows_per_file=900)


@pytest.mark.promise("P1", "P2", "P3", "P5")
@pytest.mark.usefixtures("ray_session")
def test_actors_give_the_same_steps_on_another_world(texts: str) -> None:
    check_steps_on_another_world(texts, {}, "ray")
