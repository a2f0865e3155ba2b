"""Decode actors that come while the trainer waits."""

import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa

import raylance
from tests.helpers.cluster import actors_of

ROWS = 160


def slowly(batch: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.05 * len(batch["cell"]))
    return batch


def test_actors_come_while_the_trainer_waits(ray_session: None, write_dataset: Callable[..., str]) -> None:
    """All decoders are there in the end, and every row comes once an epoch meanwhile."""
    dataset = raylance.dataset(write_dataset(pa.table({"cell": range(ROWS)})), transform=slowly)
    counts, deadline = [0], time.monotonic() + 120
    with dataset.loader(num_decoders=(1, 3), decoder_cpus=0.1) as loader:
        while counts[-1] < 3 and time.monotonic() < deadline:
            seen = []
            for batch in loader.iter_torch_batches(global_batch_size=4):
                counts.append(loader.stats()["decoders"])
                seen += batch["cell"].tolist()
            assert sorted(seen) == list(range(ROWS))
        assert len(actors_of(loader)[1]) == 3
    assert (counts[1], counts[-1]) == (1, 3)
    assert counts == sorted(counts), "it never shrinks while the trainer waits"
