"""Loaders over real Ray actors: their batches, lost helpers, places, memory, and errors."""

import dataclasses
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

import raylance
from raylance.errors import CoverageError, PlacementError
from tests.helpers.cluster import CPUS, actors_of, in_object_store, wait_for_free_cpus
from tests.helpers.damaged_rows import check_bad_row, damaged
from tests.helpers.epochs import assert_same, batches_of, join, open_images

on_ray = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def undisturbed(images_uri: str) -> list[dict[str, torch.Tensor]]:
    """The first epoch, on one rank, by threads."""
    with open_images(images_uri).loader(runtime="threads", num_decoders=0, decode_threads=2) as loader:
        return join([batches_of(loader, 36)])


@pytest.mark.promise("P4")
@on_ray
def test_actors_give_the_batches_of_threads(images_uri: str, undisturbed: list[dict[str, torch.Tensor]]) -> None:
    """Also those of a second loader of the process, which shares the decoders of the first."""
    dataset = open_images(images_uri)
    options: dict[str, Any] = {"runtime": "ray", "num_decoders": 2}
    with dataset.loader(**options) as train, dataset.loader(**options) as val:
        batches = [each.iter_torch_batches(global_batch_size=36, with_row_offset=True) for each in (train, val)]
        for expected, ours, theirs in zip(undisturbed, *batches, strict=True):
            assert_same([ours, theirs], [expected] * 2)
        shard, decode_actors = actors_of(train)
        assert len(decode_actors) == 2
        assert decode_actors == actors_of(val)[1]
        # What loads torch takes a second more to start, and 150 MB.
        assert not ray.get(shard.__ray_call__.remote(lambda _: "torch" in sys.modules))
        for actor in decode_actors:
            assert not ray.get(actor.__ray_call__.remote(lambda _: "lance" in sys.modules))


def kill_process(helper: Any) -> None:
    os.kill(ray.get(helper.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)


@pytest.mark.promise("P6")
@on_ray
def test_a_killed_helper_costs_no_row(images_uri: str, undisturbed: list[dict[str, torch.Tensor]]) -> None:
    """A decoder and a reader whose processes die, and a reader that Ray ends."""
    dataset = open_images(images_uri, order=raylance.WindowShuffle(shard_rows=20, window_shards=2, lanes=18))
    # Little in flight, so that there is always work left for the helper that is killed.
    with dataset.loader(num_decoders=2, inflight_bytes=200_000) as loader:
        batches = []
        for step, batch in enumerate(loader.iter_torch_batches(global_batch_size=36, with_row_offset=True)):
            batches.append({name: value.clone() for name, value in batch.items()})
            reader, decoders = actors_of(loader)
            if step == 3:
                kill_process(decoders[0])
            elif step == 7:
                kill_process(reader)
            elif step == 11:  # early enough that it would have to gather more
                ray.kill(reader)
        assert_same(batches, undisturbed)
        assert loader.stats()["helpers_replaced"] == 3


@on_ray
def test_a_bad_row_is_named_by_a_decode_actor(write_dataset: Callable[..., str]) -> None:
    check_bad_row(damaged(write_dataset), 1)


@pytest.mark.promise("P9")
@on_ray
def test_placement_fails_in_time_with_the_numbers(images_uri: str) -> None:
    dataset = open_images(images_uri)
    with dataset.loader(num_decoders=3, decoder_cpus=CPUS + 1, placement_timeout_s=0.2) as loader:
        begin = time.monotonic()
        with pytest.raises(PlacementError, match=rf"of 3 decode actors.*counts {CPUS} CPUs.*free now"):
            next(loader.iter_torch_batches(global_batch_size=36))
        assert time.monotonic() - begin < 60
    wait_for_free_cpus(CPUS)  # nothing that was asked for is left pending or held


@pytest.mark.promise("P7")
@on_ray
def test_what_is_in_flight_is_bounded_by_bytes(images_uri: str) -> None:
    """A consumer that never comes back leaves at most inflight_bytes in the object store."""
    limit = 16 << 20
    image = raylance.Image("image", size=(256, 256))  # 180 MiB all together
    dataset = raylance.dataset(images_uri, columns=["image"], decode=image, order="sequential")
    before = in_object_store()
    with dataset.loader(num_decoders=0, inflight_bytes=limit) as loader:
        batches = iter(loader.iter_torch_batches(global_batch_size=16, prefetch_batches=2000))
        next(batches)
        seen = [0]
        while not seen[-1] or len(set(seen[-6:])) > 1:  # until no more comes
            time.sleep(0.2)
            seen.append(in_object_store() - before)
    assert max(seen) <= 2 * limit


@on_ray
def test_a_started_loader_is_not_sent_elsewhere(images_uri: str) -> None:
    dataset = raylance.dataset(images_uri, columns=["id"])
    loader = dataset.loader()
    assert len(pickle.dumps(loader)) < 20_000
    with loader:
        next(loader.iter_batches(global_batch_size=10))
        with pytest.raises(raylance.RaylanceError, match="cannot be sent to another"):
            pickle.dumps(loader)


@pytest.mark.promise("P1")
@on_ray
def test_rows_that_were_not_planned_end_the_epoch(images_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker recomputes what it should get: here its own plan has another seed than the shard actor's."""
    dataset = raylance.dataset(images_uri, columns=["id"], order="row")
    with dataset.loader() as loader:
        put = ray.put

        def put_other(plan: Any) -> Any:
            return put(dataclasses.replace(plan, order=dataclasses.replace(plan.order, seed=99)))

        monkeypatch.setattr(ray, "put", put_other)
        with pytest.raises(CoverageError, match="position 0 of epoch 0, data-parallel rank 0"):
            next(loader.iter_batches(global_batch_size=100))
