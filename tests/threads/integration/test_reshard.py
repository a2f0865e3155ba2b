"""Loaders whose shares change in mid-pass, and whose steps come again: by threads and Ray."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError
from tests.helpers.shares import BATCH, ROWS, play


@pytest.fixture
def data(write_dataset: Callable[..., str]) -> Iterator[raylance.Dataset]:
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 4, dtype=np.float32)), 4)
    uri = write_dataset(pa.table({"id": np.arange(ROWS), "x": values}), max_rows_per_file=130)
    with raylance.dataset(uri, order=raylance.WindowShuffle(shard_rows=10, window_shards=4, lanes=4), seed=2) as handle:
        yield handle


@pytest.mark.promise("P1", "P3")
@pytest.mark.parametrize(("seed", "remainder"), [(0, "drop"), (1, "ragged"), (2, "ragged")])
def test_global_batches_stay_the_same_whoever_takes_part(data: raylance.Dataset, seed: int, remainder: Any) -> None:
    play(data, seed, remainder, runtime="threads")


def test_helpers_stay_and_records_name_the_change(data: raylance.Dataset, tmp_path: Path) -> None:
    record = str(tmp_path / "run")
    with data.loader(rank=0, world_size=2, runtime="threads", num_decoders=0, record=record) as loader:
        made = iter(loader.iter_batches(global_batch_size=BATCH))
        next(made)
        loader.reshard(0, 1)
        next(made)
        assert loader.stats()["helpers_replaced"] == 0
        assert "as ranks came and went" in str(loader.explain()) or loader.stats()["reshard_s"] > 0
    assert "share each step in place of 2" in Path(raylance.report_run(record)).read_text()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda loader: loader.repeat(), "repeat\\(\\) without a step to repeat"),
        (lambda loader: loader.seek(3), "how many rows a step has is not known"),
        (lambda loader: loader.skip(3), "how many rows a step has is not known"),
        (lambda loader: loader.skip(0, global_batch_size=BATCH), "skip\\(\\): steps"),
        (lambda loader: loader.skip(1, global_batch_size=BATCH, reason=5), "reason=5"),
        (lambda loader: loader.seek(-1, global_batch_size=BATCH), "seek\\(\\): global_step"),
        (lambda loader: loader.seek(1, global_batch_size=0), "global_batch_size=0"),
        (lambda loader: (loader.prepare(global_batch_size=BATCH), loader.seek(3, max_rows=3)), "max_rows=3"),
        (lambda loader: (loader.prepare(global_batch_size=BATCH), loader.seek(3, padded=False)), "padded=False"),
        (lambda loader: loader.reshard(3, 3, elastic=True), "less than the size"),
        (lambda loader: loader.reshard(0, 1, elastic="no"), "elastic"),
        (lambda loader: (loader.prepare(global_batch_size=BATCH), loader.reshard(0, 1)), "after prepare\\(\\)"),
    ],
)
def test_what_cannot_be_done_is_refused(data: raylance.Dataset, what: Callable[[Any], Any], message: str) -> None:
    with (
        data.loader(rank=0, world_size=2, runtime="threads", num_decoders=0) as loader,
        pytest.raises(ConfigError, match=message),
    ):
        what(loader)


def test_a_step_is_taken_back_once(data: raylance.Dataset) -> None:
    with data.loader(runtime="threads", num_decoders=0) as loader:
        made = loader.iter_batches(global_batch_size=BATCH)
        first = next(made)["id"].tolist()
        loader.repeat()
        with pytest.raises(ConfigError, match="without a step to repeat"):
            loader.repeat()
        assert next(made)["id"].tolist() == first
        loader.set_epoch(0)
        with pytest.raises(ConfigError, match="without a step to repeat"):
            loader.repeat()


def test_a_step_that_is_taken_back_after_a_seek_to_the_same_place_counts_once(
    data: raylance.Dataset, tmp_path: Path
) -> None:
    """The state did not count it, and the proof did: `seek` forgot the step for the proof alone."""
    with data.loader(runtime="threads", num_decoders=0, record=str(tmp_path)) as loader:
        made = loader.iter_batches(global_batch_size=BATCH)
        next(made)
        loader.seek(loader.global_step)
        loader.repeat()
        assert (loader.state_dict()["position"], loader.global_step) == (0, 0)
        list(made)
    proof = raylance.prove_run(str(tmp_path))
    assert proof.ok, str(proof)
