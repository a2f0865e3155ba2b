"""One of two readers that dies."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray

import raylance
from tests.helpers.cluster import helpers_of
from tests.helpers.slow_reading import SMALL, ids_of, slow_loader, texts


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(texts())


def test_one_of_two_readers_that_dies_costs_no_row(ray_session: None, uri: str) -> None:
    def epoch_of(loader: raylance.RankLoader, kills: tuple[int, ...] = ()) -> list[list[int]]:
        """An epoch, in which the readers of its start are killed, one at each of some steps."""
        found: list[list[int]] = []
        readers = helpers_of(loader, "ShardActor") if kills else []
        for batch in loader.iter_batches(global_batch_size=24):
            found.append(ids_of(batch))
            if len(found) in kills:
                pid = ray.get(readers.pop().__ray_call__.remote(lambda _: os.getpid()))
                os.kill(pid, signal.SIGKILL)
        return found

    options: dict[str, Any] = {"num_decoders": 0, **SMALL}
    with slow_loader(uri, 0.0002, num_readers=2, **options) as loader:
        epochs, deadline = [epoch_of(loader)], time.monotonic() + 60
        while loader.stats()["readers"] < 2 and time.monotonic() < deadline:
            epochs.append(epoch_of(loader))
        epochs += [epoch_of(loader, (5, 20)), epoch_of(loader)]
        assert loader.stats()["helpers_replaced"] == 2
    with slow_loader(uri, 0.0, **options) as loader:
        assert [epoch_of(loader) for _ in epochs] == epochs
        assert loader.stats()["readers"] == 1
