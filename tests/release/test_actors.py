"""Rare events among Ray actors: too few places, a collector in Ray's thread, all decoders lost at once."""

import gc
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
import torch

import raylance
from raylance import torch_data
from tests.helpers.cluster import CPUS, actors_of, held_mib, wait_for_free_cpus
from tests.helpers.epochs import assert_same, batches_of, join, open_images
from tests.helpers.own_orders import SlowToArrive

on_ray = pytest.mark.usefixtures("ray_session")


@pytest.fixture(scope="module")
def undisturbed(images_uri: str) -> list[dict[str, torch.Tensor]]:
    """The first epoch, on one rank, by threads."""
    with open_images(images_uri).loader(runtime="threads", num_decoders=0, decode_threads=2) as loader:
        return join([batches_of(loader, 36)])


@on_ray
def test_loads_that_begin_together_have_the_plan(
    write_dataset: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """The second one came to a reader that still unpickled the plan of the first one."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2000 * 256, np.float32)), 256)
    handle = raylance.dataset(write_dataset(pa.table({"id": np.arange(2000), "x": vectors})), order=SlowToArrive())
    with handle.loader(runtime="ray", reader_bytes=1 << 20) as loader:
        for size in (25, 50, 100, 40, 80, 125):
            rows = [row for batch in loader.iter_torch_batches(global_batch_size=size) for row in batch["id"].tolist()]
            assert rows == list(range(2000))[::-1]
    assert not [record for record in caplog.records if record.name.startswith("raylance")]


@on_ray
@pytest.mark.timeout(120)
def test_the_garbage_collector_ends_loaders_in_the_thread_of_rays_callbacks(images_uri: str) -> None:
    """There, `ray.kill` never returns. So whatever is collected is ended in a thread of raylance's own."""
    wait_for_free_cpus(CPUS)
    handle = open_images(images_uri)
    ended, suspended, prepared = (handle.loader(num_decoders=1) for _ in range(3))
    batches_of(ended, 48, limit=1)
    in_mid_pass = iter(suspended.batches(global_batch_size=48))
    over_handle = [iter(handle.iter_torch_batches(global_batch_size=48)) for _ in range(2)]
    under_torch = iter(torch_data.Loader(torch_data.IterableDataset(handle, global_batch_size=48)))
    for batches in (in_mid_pass, *over_handle, under_torch):
        next(batches)
    prepared.prepare(global_batch_size=48)
    garbage: list[Any] = [handle, ended, suspended, prepared, in_mid_pass, over_handle, under_torch]
    garbage.append(garbage)
    done = threading.Event()

    def collect(_: Any) -> None:
        gc.collect()
        done.set()

    gc.disable()
    try:
        del handle, ended, suspended, prepared, in_mid_pass, over_handle, under_torch, batches, garbage
        ray.remote(num_cpus=0)(lambda: time.sleep(0.5)).remote().future().add_done_callback(collect)
        assert done.wait(60), "the collector hangs"
    finally:
        gc.enable()
    wait_for_free_cpus(CPUS)


@on_ray
def test_decoders_without_a_place_are_done_without(images_uri: str, caplog: pytest.LogCaptureFixture) -> None:
    """An explicit number was an error as long as one of them found no place, and the first batch waited for all."""
    dataset = open_images(images_uri)
    options = {"num_decoders": 3, "decoder_cpus": CPUS - 1, "placement_timeout_s": 12}  # there is room for one
    with caplog.at_level(logging.WARNING), dataset.loader(**options) as loader:
        batches = iter(loader.iter_torch_batches(global_batch_size=36))
        next(batches)
        stats = loader.stats()
        assert (stats["decoders"], stats["decoders_wanted"]) == (1, 3), "the first that runs decodes"
        begin = time.monotonic()
        while loader.stats()["decoders_wanted"] > 1:
            assert time.monotonic() - begin < 120
            time.sleep(0.1)
        assert len(list(batches)) == len(loader.batches(global_batch_size=36)) - 1
    assert "The loader works with 1 of 3 decoders, with the same batches, maybe later" in caplog.text
    wait_for_free_cpus(CPUS)


def as_it_is(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: batch[name] for name in ("id", "image")}


@pytest.mark.promise("P7")
@on_ray
def test_a_kept_label_keeps_no_pictures(images_uri: str) -> None:
    """Of an epoch of 45 MiB, the labels kept nearly all in the object store: they were views of the same objects."""
    image = raylance.Image("image", size=(128, 128))
    dataset = raylance.dataset(images_uri, columns=["id", "image"], decode=image, transform=as_it_is)
    gc.collect()
    before = held_mib()  # objects that earlier tests left
    with dataset.loader(num_decoders=1) as loader:
        kept = [batch["id"] for batch in loader.iter_torch_batches(global_batch_size=50)]
    assert sum(map(len, kept)) > 900
    end = time.monotonic() + 30
    while held_mib() > before + 4 and time.monotonic() < end:  # Ray frees late
        time.sleep(0.2)
    assert held_mib() <= before + 4


@pytest.mark.promise("P6")
@on_ray
def test_all_idle_decoders_lost_at_once(images_uri: str, undisturbed: list[dict[str, torch.Tensor]]) -> None:
    """As many as would exhaust the deaths that one piece of work may see, and none of them busy."""
    dataset = open_images(images_uri, order=raylance.WindowShuffle(shard_rows=20, window_shards=2, lanes=18))
    with dataset.loader(num_decoders=CPUS) as loader:
        assert_same(batches_of(loader, 36), undisturbed)
        loader.set_epoch(0)
        for helper in actors_of(loader)[1]:
            ray.kill(helper)
        assert_same(batches_of(loader, 36), undisturbed)
