"""A dataset that gets and loses rows while a run of Ray Train trains on it, whose ranks are killed and resized."""

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import ray.train
import torch.distributed
from ray.train.torch import TorchTrainer

import raylance

BATCH, EPOCHS, KILLED = 24, 4, 20


def newest(uri: str, when: Any) -> raylance.Dataset:
    """The newest version, the same one on all ranks."""
    found: list[Any] = [None]
    if ray.train.get_context().get_world_rank() == 0:
        version = raylance.runs.Newest(when=when)
        found = [raylance.dataset(uri, version=version, order="window", seed=3, remainder="ragged")]
    if ray.train.get_context().get_world_size() > 1:
        torch.distributed.broadcast_object_list(found)
    assert isinstance(found[0], raylance.Dataset)
    return found[0]


def train_fn(config: dict[str, Any]) -> None:
    log, steps = Path(config["log"]), 0
    rank = ray.train.get_context().get_world_rank()
    start = len([*log.glob(f"*-{rank}.jsonl")])
    state: dict[str, Any] | None = None
    with (log / f"{start}-{rank}.jsonl").open("a", buffering=1) as lines:
        while state is None or state["epoch"] < config["epochs"]:
            with newest(config["uri"], config["when"]).loader(rank="auto", name="train", num_decoders=0) as loader:
                if state is None:
                    raylance.restore(loader)
                else:
                    loader.load_state_dict(state)
                epoch = loader.epoch
                for batch in loader.iter_batches(global_batch_size=BATCH):
                    print(json.dumps([epoch, batch["id"].tolist()]), file=lines)
                    steps += 1
                    if steps % 4 == 0:
                        raylance.report({"steps": steps}, loader)
                    if steps == KILLED and rank == 1 and not (log / "killed").exists():
                        (log / "killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    if steps == config["stop"]:
                        return
                raylance.report({"steps": steps}, loader)
                state = loader.state_dict()


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("when", ["next_epoch", "now"])
def test_rows_come_and_go_while_it_trains(write_dataset: Callable[..., str], tmp_path: Path, when: str) -> None:
    uri, log, is_over = write_dataset(pa.table({"id": np.arange(300)})), tmp_path / "log", threading.Event()
    log.mkdir()

    def grow() -> None:
        begin = 300
        while not is_over.wait(1.0):
            lance.write_dataset(pa.table({"id": np.arange(begin, begin + 30)}), uri, mode="append")
            lance.dataset(uri).delete(f"id % 97 = {begin // 30 % 97}")
            begin += 30

    thread = threading.Thread(target=grow)
    thread.start()
    try:
        for workers, stop in ((2, 45), (1, None)):
            TorchTrainer(
                train_fn,
                train_loop_config={"uri": uri, "log": str(log), "epochs": EPOCHS, "stop": stop, "when": when},
                scaling_config=ray.train.ScalingConfig(num_workers=workers),
                run_config=ray.train.RunConfig(
                    name="run", storage_path=str(tmp_path), failure_config=ray.train.FailureConfig(max_failures=1)
                ),
            ).fit()
    finally:
        is_over.set()
        thread.join()
    seen = [json.loads(line) for path in log.glob("*.jsonl") for line in path.read_text().splitlines()]
    rows = [{row for each, ids in seen if each == epoch for row in ids} for epoch in range(EPOCHS)]
    there = {*lance.dataset(uri).to_table()["id"].to_pylist()}
    for each in rows:  # what is still there has been there all the time
        assert {row for row in there if row < 300} <= each
        assert {row for row in there if row <= max(each)} <= each
    assert max(rows[0]) < max(rows[-1])
    assert (log / "killed").exists()
    assert len([*log.glob("*-0.jsonl")]) == 3
    proof = raylance.prove_run(tmp_path / "run")
    assert proof.ok, proof
    (found,) = proof.datasets
    assert [(one.epoch, one.status) for one in found.epochs][:EPOCHS] == [(each, "proven") for each in range(EPOCHS)]
