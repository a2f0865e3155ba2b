"""Loaders whose shares change in mid-pass, and whose steps come again: by threads and Ray."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance

BATCH, ROWS, EPOCHS = 24, 500, 3


@pytest.fixture
def data(write_dataset: Callable[..., str]) -> Iterator[raylance.Dataset]:
    values = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(ROWS * 4, dtype=np.float32)), 4)
    uri = write_dataset(pa.table({"id": np.arange(ROWS), "x": values}), max_rows_per_file=130)
    with raylance.dataset(uri, order=raylance.WindowShuffle(shard_rows=10, window_shards=4, lanes=4), seed=2) as handle:
        yield handle


def undisturbed(data: raylance.Dataset, remainder: Any) -> list[list[int]]:
    drop_last = {"drop": True, "ragged": False}[remainder]
    return [
        batch["id"].tolist()
        for epoch in range(EPOCHS)
        for batch in data.iter_batches(global_batch_size=BATCH, epoch=epoch, drop_last=drop_last)
    ]


def take_part(
    loaders: list[raylance.RankLoader], made: list[Any], present: list[int], step: int, *, moves: bool
) -> list[int]:
    rows: list[int] = []
    for share, number in enumerate(present):
        loader = loaders[number]
        if moves:
            loader.reshard(share, len(present), elastic=True)
        if loader.global_step != step:
            loader.seek(step, global_batch_size=BATCH)
        try:
            batch = next(made[number])
        except StopIteration:  # at an epoch's turn
            batch = next(made[number])
        assert (batch["x"][:, 0] == 4 * batch["id"]).all()
        rows += batch["id"].tolist()
        assert loader.global_step == step + 1
    return rows


def play(data: raylance.Dataset, seed: int, remainder: Any, **options: Any) -> None:
    """Ranks come, go, and repeat steps, at random."""
    draw, wanted = random.Random(seed), undisturbed(data, remainder)
    loaders = [data.loader(rank=rank, world_size=4, num_decoders=0, **options) for rank in range(4)]
    bound = {"global_batch_size": BATCH, "drop_last": remainder == "drop", "prefetch_batches": draw.choice([0, 1, 3])}
    made: list[Any] = [loader.iter_batches(**bound) for loader in loaders]
    present, moves, step = [0, 1, 2, 3], False, 0
    while step < len(wanted):
        if draw.random() < 0.15:
            present, moves = draw.sample(range(4), draw.randint(1, 4)), True
        assert take_part(loaders, made, present, step, moves=moves) == wanted[step], step
        moves = False
        if draw.random() < 0.15:
            for number in present:
                loaders[number].repeat()
                state = loaders[number].state_dict()
                assert state["global_step"] == step, "what was taken back is not saved"
            moves = draw.random() < 0.5
            if moves:
                draw.shuffle(present)
            continue
        step += 1
    for number in present:
        state = loaders[number].state_dict()
        assert (state["epoch"], state["position"], state["global_step"]) == (EPOCHS, 0, len(wanted))
    for loader in loaders:
        loader.close()


@pytest.mark.promise("P1", "P3")
@pytest.mark.parametrize("remainder", ["drop", "ragged"])
@pytest.mark.parametrize("seed", range(4))
def test_global_batches_stay_the_same_whoever_takes_part(data: raylance.Dataset, seed: int, remainder: Any) -> None:
    play(data, seed, remainder, runtime="threads")


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_shares_change_through_ray_and_helpers_stay(data: raylance.Dataset) -> None:
    play(data, 7, "ragged")


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
        pytest.raises(raylance.ConfigError, match=message),
    ):
        what(loader)


def test_a_step_is_taken_back_once(data: raylance.Dataset) -> None:
    with data.loader(runtime="threads", num_decoders=0) as loader:
        made = loader.iter_batches(global_batch_size=BATCH)
        first = next(made)["id"].tolist()
        loader.repeat()
        with pytest.raises(raylance.ConfigError, match="without a step to repeat"):
            loader.repeat()
        assert next(made)["id"].tolist() == first
        loader.set_epoch(0)
        with pytest.raises(raylance.ConfigError, match="without a step to repeat"):
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
