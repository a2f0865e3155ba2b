"""Leases through Ray: workers that die, work that fails, and an actor that is killed again and again."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

import raylance
from raylance.errors import ConfigError, StateError
from raylance.runs import Leases

ROWS = 400


@ray.remote(num_cpus=0, max_retries=0)
def work(leases: Leases, seed: int) -> list[int]:
    """Does rows until all are done; fails at some, and ends without a word at others. Returns those that counted."""
    rng, counted = np.random.default_rng(seed), list[int]()
    while not leases.progress().is_over:
        lease = leases.lease(int(rng.integers(1, 12)))
        time.sleep(0.002 * len(lease))
        is_good = rng.random(len(lease)) > 0.1
        if rng.random() < 0.03:
            return counted  # it dies, and nobody reports its rows
        counts = leases.done(lease.tickets[is_good])
        counted += lease.rows["id"][is_good][counts].tolist()
        leases.fail(lease.tickets[~is_good])
    return counted


@pytest.mark.promise("P1", "P6")
def test_each_row_is_done_once_while_workers_and_the_actor_die(
    write_dataset: Callable[..., str], tmp_path: Path, ray_session: None
) -> None:
    dataset = raylance.dataset(write_dataset(pa.table({"id": np.arange(ROWS)})), order="row", seed=1)
    settings: dict[str, Any] = {"name": "prompts", "epochs": 1, "most_ahead": 100, "lease_s": 1.0}
    leases = Leases(dataset, tmp_path, **settings)
    running, counted, kills, seed = [work.remote(leases, seed) for seed in range(3)], list[int](), 0, 3
    while running:
        ended, running = ray.wait(running, timeout=0.05)
        counted += [row for each in ray.get(ended) for row in each]
        progress = leases.progress()
        if ended and not progress.is_over:
            running.append(work.remote(leases, seed))
            seed += 1
        if progress.done > 80 * (kills + 1) and not progress.is_over:
            with contextlib.suppress(ValueError):
                actor = ray.get_actor(f"raylance leases {tmp_path} prompts")
                ray.kill(actor, no_restart=bool(kills % 2))
                kills += 1
    assert sorted(counted) == [*range(ROWS)]
    assert leases.progress().done == ROWS
    assert kills >= 3
    assert "400 rows are done" in leases.prove()
    with pytest.raises(ConfigError):
        Leases(dataset, tmp_path, **settings | {"most_ahead": 7})
    (tmp_path / "raylance" / "leases-damaged.json").write_text("{")
    with pytest.raises(StateError):
        Leases(dataset, tmp_path, name="damaged")
