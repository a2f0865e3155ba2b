"""A curriculum over three sources: weights by a schedule, by losses, and edited at a restart; ranks are killed."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    web, code, math = (
        raylance.dataset(write_dataset(pa.table({"id": np.arange(first, first + ROWS)})), order="row", seed=1)
        for first in (0, ROWS, 2 * ROWS)
    )
    stages = raylance.runs.Schedule(weights={STAGE: {"web": 1, "code": 3}}, unit_rows=BATCH)
    planned = raylance.mix({"web": (web, 3), "code": (code, 1)}, schedule=stages)
    edited = raylance.mix({"web": (web, 1), "code": (code, 0), "math": (math, 1)})
    log = tmp_path / "log"
    log.mkdir()
    for workers, stop, data, killed in (
        (2, EDIT, planned, (STAGE, STAGE + 1, MOVE, MOVE + 1)),
        (3, EDIT + 6, edited, (EDIT + 1,)),
        (1, END, edited, ()),
    ):
        TorchTrainer(
            train_fn,
            train_loop_config={"log": str(log), "stop": stop, "killed": killed},
            datasets={"train": data},
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
        assert np.abs(np.bincount(np.array(rows) // ROWS, minlength=3) - due).max() <= 1, step
    for again in attempts.values():  # what came again after a kill were the same rows
        whole = [sorted(row for ids in parts for row in ids) for parts in again.values()]
        assert all({*part} <= {*max(whole, key=len)} for part in whole)
    proof = raylance.prove_run(tmp_path / "run")
    assert proof.ok, proof
    (found,) = proof.datasets
    assert [one.rows for one in found.epochs] == [END * BATCH]
