"""Owns the proof that the faults of Lance 14's own samplers are not inherited; most have a fuller test elsewhere."""

import random
from collections.abc import Callable
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance


def table(rows: int) -> pa.Table:
    return pa.table({"id": np.arange(rows), "group": np.arange(rows) // 100})


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(*[table(100).set_column(1, "group", pa.array([part] * 100)) for part in range(4)])


def read(dataset: raylance.Dataset, world: int, batch: int, epoch: int = 0) -> list[list[list[int]]]:
    """Row offsets by rank and step."""
    ranks = []
    for rank in range(world):
        with dataset.loader(rank=rank, world_size=world) as loader:
            loader.set_epoch(epoch)
            ranks.append(
                [
                    found["_rowoffset"].tolist()
                    for found in loader.iter_batches(global_batch_size=batch, with_row_offset=True)
                ]
            )
    return ranks


def flat(steps: list[list[int]]) -> list[int]:
    return [row for rows in steps for row in rows]


@pytest.mark.parametrize("order", ["window", "shard", "row"])
def test_set_epoch_does_something(uri: str, order: str) -> None:
    dataset = raylance.dataset(uri, order=order)
    first, second = read(dataset, 1, 50, epoch=0), read(dataset, 1, 50, epoch=1)
    assert first != second
    assert sorted(flat(first[0])) == sorted(flat(second[0]))


def test_a_filter_that_leaves_a_rank_no_row_of_a_fragment_keeps_steps_equal(uri: str) -> None:
    """Batches are dealt after the filter: contiguous ranges of what it leaves, one after the other over the ranks."""
    dataset = raylance.dataset(uri, filter="group = 1 and id < 30", order="sequential", remainder="ragged")
    ranks = read(dataset, 3, 12)
    assert [len(steps) for steps in ranks] == [3, 3, 3]
    assert [[len(rows) for rows in steps] for steps in ranks] == [[4, 4, 2], [4, 4, 2], [4, 4, 2]]
    steps = [rows for step in zip(*ranks, strict=True) for rows in step]
    assert flat(steps) == list(range(100, 130)), "rank r of step t has the r-th part of the t-th batch"


def test_ranks_read_what_is_theirs_and_no_more(uri: str) -> None:
    plan = raylance.dataset(uri, order="window").plan(global_batch_size=40, world_size=4).plan
    read_by: list[set[int]] = []
    for rank in range(4):
        rows: set[int] = set()
        chunk = plan.chunk_at(0, 0)
        while chunk is not None:
            rows |= set(plan.chunk_rows(chunk, rank).tolist())
            chunk = plan.next_chunk(chunk)
        read_by.append(rows)
    assert sum(map(len, read_by)) == len(set.union(*read_by)) == 400


def test_the_global_generator_is_left_alone(uri: str) -> None:
    random.seed(5)
    state = random.getstate()
    read(raylance.dataset(uri, order="shard"), 1, 50)
    assert random.getstate() == state


def test_a_loader_stays_at_its_version(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(table(50))
    dataset = raylance.dataset(uri, order="sequential", remainder="ragged")
    lance.write_dataset(table(500), uri, mode="append")
    lance.dataset(uri).delete("id < 20")
    (steps,) = read(dataset, 1, 20)
    assert flat(steps) == list(range(50))


def test_a_dataset_that_is_not_split_is_seen_whole_in_storage_order(uri: str) -> None:
    """What Lance's FullScanSampler does: here a loader of rank 0 of 1 on every rank."""
    dataset = raylance.dataset(uri, order="sequential", remainder="ragged")
    options: dict[str, Any] = {"rank": 0, "world_size": 1}
    for _ in range(2):
        with dataset.loader(**options) as loader:
            ids = np.concatenate([batch["group"] for batch in loader.iter_batches(batch_size=64)])
        assert ids.tolist() == [row // 100 for row in range(400)]
