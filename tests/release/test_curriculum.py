"""A curriculum over three sources: weights by a schedule, by losses, and edited at restarts, where rows of the sources
have changed, too; ranks are killed.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray.train
from ray.train.torch import TorchTrainer

import raylance

BATCH, ROWS = 24, 2_000
STAGE, MOVE, EDIT, END = 20, 32, 48, 60  # the steps at which weights change, and the last one
SHARES = {0: (18, 6, 0), STAGE: (6, 18, 0), MOVE: (12, 12, 0), EDIT: (12, 0, 12)}  # rows of each source, from a step on


def train_fn(config: dict[str, Any]) -> None:
    log, rank = Path(config["log"]), ray.train.get_context().get_world_rank()
    group = ray.util.get_current_placement_group()
    assert group is not None
    loader: Any = ray.train.get_dataset_shard("train")
    raylance.restore(loader)

    def follow_losses() -> None:
        if loader.global_step == MOVE:
            loader.reweight({"web": 1, "code": 1}, reason="loss of code")

    follow_losses()
    with (log / f"{group.id.hex()}-{rank}.jsonl").open("a", buffering=1) as lines:  # the same on all ranks of a start
        for batch in loader.iter_batches(global_batch_size=BATCH):
            step = loader.global_step
            print(json.dumps([step - 1, batch["id"].tolist(), time.time()]), file=lines)
            if step in config["killed"] and rank == 1 and not (log / f"killed-{step}").exists():
                (log / f"killed-{step}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 4 == 0:
                raylance.report({"step": step}, loader)
            follow_losses()
            if step == config["stop"]:
                return


@pytest.mark.promise("P1", "P3", "P5", "P6")
@pytest.mark.usefixtures("ray_session")
def test_killed_at_each_change_and_resized(write_dataset: Callable[..., str], tmp_path: Path) -> None:
    uris = [write_dataset(pa.table({"id": np.arange(first, first + ROWS)})) for first in (0, ROWS, 2 * ROWS)]

    def newest(uri: str, **given: Any) -> raylance.Dataset:
        return raylance.dataset(uri, version=raylance.runs.Newest(when="now"), order="row", seed=1, **given)

    def planned() -> raylance.Dataset:
        web, code, _ = map(newest, uris)
        stages = raylance.runs.Schedule(weights={STAGE: {"web": 1, "code": 3}}, unit_rows=BATCH)
        return raylance.mix({"web": (web, 3), "code": (code, 1)}, schedule=stages)

    def edited() -> raylance.Dataset:
        """One source has lost rows and got others; another one has a filter."""
        ids = (2 + lance.dataset(uris[0]).version) * ROWS + np.arange(500)
        lance.write_dataset(pa.table({"id": ids}), uris[0], mode="append")
        lance.dataset(uris[0]).delete("id % 100 < 5")
        web, math = newest(uris[0]), newest(uris[2], filter="id % 2 = 0")
        return raylance.mix({"web": (web, 1), "code": (newest(uris[1]), 0), "math": (math, 1)})

    log = tmp_path / "log"
    log.mkdir()
    for workers, stop, data, killed in (
        (2, EDIT, planned, (STAGE, STAGE + 1, MOVE, MOVE + 1)),
        (3, EDIT + 8, edited, (EDIT + 1,)),  # a checkpoint: the rows have changed since, and would not come again
        (1, END, edited, ()),
    ):
        TorchTrainer(
            train_fn,
            train_loop_config={"log": str(log), "stop": stop, "killed": killed},
            datasets={"train": data()},
            dataset_config=raylance.DataConfig(num_decoders=0),
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(
                name="run", storage_path=str(tmp_path), failure_config=ray.train.FailureConfig(max_failures=len(killed))
            ),
        ).fit()
    assert {*log.glob("killed-*")} == {log / f"killed-{step}" for step in (STAGE, STAGE + 1, MOVE, MOVE + 1, EDIT + 1)}
    lines = [(path.name, *json.loads(line)) for path in log.glob("*.jsonl") for line in path.read_text().splitlines()]
    attempts: dict[int, dict[str, list[list[int]]]] = {}  # by step and start, later starts last
    for name, step, ids, _ in sorted(lines, key=lambda line: line[-1]):
        attempts.setdefault(step, {}).setdefault(name.partition("-")[0], []).append(ids)
    steps = [[row for ids in [*attempts[step].values()][-1] for row in ids] for step in range(END)]
    assert all(len(rows) == BATCH for rows in steps)
    delivered = [row for rows in steps for row in rows]
    assert len(delivered) == len({*delivered}), "no source has ended, so no row comes twice"
    for step, rows in enumerate(steps):
        due = SHARES[max(first for first in SHARES if first <= step)]
        found = np.bincount(np.minimum(np.array(rows) // ROWS, 3) % 3, minlength=3)  # new rows are of the first source
        assert np.abs(found - due).max() <= 1, step
        if step >= EDIT:
            assert not [row for row in rows if row % 100 < 5 and (row < ROWS or row >= 3 * ROWS)]
            assert not [row for row in rows if row % 2 and row // ROWS == 2]
    assert max(delivered) >= 3 * ROWS
    for again in attempts.values():  # what came again after a kill were the same rows
        whole = [sorted(row for ids in parts for row in ids) for parts in again.values()]
        assert all({*part} <= {*max(whole, key=len)} for part in whole)
    proof = raylance.prove_run(tmp_path / "run")
    assert proof.ok, proof
    (proven,) = proof.datasets
    assert [one.rows for one in proven.epochs] == [END * BATCH]
