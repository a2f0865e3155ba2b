"""Where a run has seen rows, against what its ranks were handed."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError
from raylance.planning.state import write_state
from raylance.runs import seen

ROWS, BATCH = 90, 12
Seen = list[tuple[int, int, int, int]]
"""Row offset, epoch, step and rank."""


def start(
    data: raylance.Dataset, folder: Path, state: dict[str, Any] | None, world: int, steps: int, saved: int
) -> tuple[Seen, Seen, dict[str, Any]]:
    """What a start is handed up to the step in which it saves a checkpoint, what after it, and the state there."""
    given: dict[str, Any] = {"world_size": world, "runtime": "threads", "record": str(folder), "name": "train"}
    loaders = [data.loader(rank=rank, **given) for rank in range(world)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    passes = [loader.batches(global_batch_size=BATCH, with_row_offset=True) for loader in loaders]
    batches = [itertools.chain.from_iterable(itertools.repeat(each)) for each in passes]
    found = [Seen(), Seen()]
    for number in range(steps):
        place = loaders[0].epoch, loaders[0].step
        for rank, each in enumerate(batches):
            found[number >= saved] += [(int(row), *place, rank) for row in next(each)["_rowoffset"]]
        if number == saved - 1:
            after = json.loads(json.dumps(next(iter([loader.state_dict() for loader in loaders]))))
    for loader in loaders:
        loader.close()
    return found[0], found[1], after


@pytest.mark.parametrize("order", ["window", "row"])
def test_each_time_that_a_row_was_seen_is_found(write_dataset: Callable[..., str], tmp_path: Path, order: str) -> None:
    data = raylance.dataset(write_dataset(pa.table({"id": np.arange(ROWS)})), order=order, seed=5)
    handed, _, state = start(data, tmp_path, None, 2, 5, 3)  # two steps are rolled back
    for name, each in (("checkpoint_1", state),):
        (tmp_path / name).mkdir()
        write_state(each, tmp_path / name)
    more, rest, state = start(data, tmp_path, state, 3, 14, 10)
    (tmp_path / "checkpoint_2").mkdir()
    write_state(state, tmp_path / "checkpoint_2")
    wanted = [3, 40, 77, 40, 12]
    found = seen(tmp_path, wanted)
    assert list(found.columns) == ["row_offset", "epoch", "position", "step", "rank", "checkpoint"]
    every = handed + more + rest
    expected = sorted(one for one in every if one[0] in wanted)
    assert sorted(map(tuple, found[["row_offset", "epoch", "step", "rank"]].to_numpy().tolist())) == expected
    saved = {tuple(one): "checkpoint_1" for one in handed} | {tuple(one): "checkpoint_2" for one in more}
    for one in found.itertuples():
        assert one.checkpoint == saved.get((one.row_offset, one.epoch, one.step, one.rank), "")
    assert len(seen(tmp_path, [])) == 0


def test_rows_of_a_mixture_are_those_of_the_dataset_that_is_meant(
    write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    parts = {name: raylance.dataset(write_dataset(pa.table({"id": np.arange(40)})), order="row") for name in "ab"}
    mixed = raylance.mix({"a": (parts["a"], 1), "b": (parts["b"], 3)}, stop=60)
    start(mixed, tmp_path, None, 1, 5, 5)
    assert len(seen(tmp_path, range(40), component="a")) == 15
    assert len(seen(tmp_path, range(40), component="b")) == 45
    for wrong in ({"component": "c"}, {"component": 2}, {"dataset": "val"}):
        with pytest.raises(ConfigError):
            seen(tmp_path, [1], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        seen(tmp_path / "nothing", [1])


def test_checkpoints_are_those_of_the_dataset_and_of_the_line_that_is_left(
    write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    """With another dataset that is further ahead, and a checkpoint whose steps were rolled back."""
    uris = [write_dataset(pa.table({"id": np.arange(ROWS)})) for _ in range(2)]
    one, two = (raylance.dataset(uri, order="row", seed=1) for uri in uris)

    def save(name: str, *loaders: raylance.RankLoader) -> dict[str, Any]:
        states = {str(number): loader.state_dict() for number, loader in enumerate(loaders)}
        (tmp_path / name).mkdir()
        write_state({"loaders": states}, tmp_path / name)
        return states["1"]

    given: dict[str, Any] = {"runtime": "threads", "record": str(tmp_path)}
    with one.loader(**given, name="ahead") as ahead, two.loader(**given, name="train") as train:
        for _ in itertools.islice(ahead.iter_batches(global_batch_size=BATCH), 6):
            pass
        for number, _ in enumerate(itertools.islice(train.iter_batches(global_batch_size=BATCH), 4)):
            if number == 1:
                state = save("checkpoint_0", ahead, train)
        save("checkpoint_1", ahead, train)  # and nobody restores it
    with two.loader(**given, name="train") as train:
        train.load_state_dict(state)
        for _ in itertools.islice(train.iter_batches(global_batch_size=BATCH), 3):
            pass
        train.record()
        save("checkpoint_2", train, train)
    found = seen(tmp_path, range(ROWS), dataset="train")
    assert found["checkpoint"].tolist() == ["checkpoint_0"] * 2 * BATCH + ["checkpoint_2"] * 3 * BATCH
    for wrong in ("abc", [1.5], None):
        with pytest.raises(ConfigError):
            seen(tmp_path, wrong, dataset="train")
