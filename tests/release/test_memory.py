"""Memory of the processes of a run."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

import raylance
from jobs.benchmark.memory import Peak, processes
from tests.helpers.cluster import in_object_store
from tests.helpers.videos import encode, scene, write_videos

MIB = 1 << 20


def table(sizes: list[int]) -> pa.Table:
    """One row of so many bytes each, none like another."""
    rng = np.random.default_rng(len(sizes))
    values = pa.array([rng.bytes(size) for size in sizes], pa.binary())
    return pa.table({"id": np.arange(len(sizes)), "data": values})


def watch_shard_actor() -> Peak:
    """Watches how much memory of its own, the object store left out, the one shard actor has, once it has begun."""
    found: list[psutil.Process] = []

    def look() -> int:
        with contextlib.suppress(psutil.NoSuchProcess):
            found[:] = found or [process for name, process in processes() if name == "shard actor"]
            return sum(memory.rss - memory.shared for memory in (process.memory_info() for process in found))
        return 0

    return Peak(look, pause_s=0.005)


def run(loader: raylance.RankLoader, **batches: Any) -> tuple[list[int], int, dict[str, Any]]:
    """An epoch: its row offsets, the peak of the shard actor, and the counters."""
    with watch_shard_actor() as watch, loader:
        found = [batch["_rowoffset"].tolist() for batch in loader.iter_batches(with_row_offset=True, **batches)]
        return [row for rows in found for row in rows], watch.most, loader.stats()


@pytest.fixture(scope="module")
def floor(ray_session: None, write_dataset: Callable[..., str]) -> int:
    """What a shard actor has resident that holds next to nothing."""
    uri = write_dataset(table([64] * 64))
    return run(raylance.dataset(uri).loader(), global_batch_size=8)[1]


@pytest.mark.promise("P7")
def test_a_step_larger_than_the_limit_is_read_in_parts(write_dataset: Callable[..., str], floor: int) -> None:
    uri = write_dataset(table([MIB // 2] * 600))
    limit = 16 * MIB
    dataset = raylance.dataset(uri, seed=1, remainder="ragged")
    loader = dataset.loader(reader_bytes=limit, inflight_bytes=8 * MIB)
    rows, peak, stats = run(loader, global_batch_size=256)
    assert sorted(rows) == list(range(600))
    assert peak - floor < 4 * limit, "a step has 128 MiB"
    assert stats["held_bytes"] <= limit * 9 / 8


@pytest.mark.promise("P7")
def test_large_rows_all_in_one_place(write_dataset: Callable[..., str], floor: int) -> None:
    """Neither what is held nor what is in flight goes by what rows before them had."""
    sizes = [8 * MIB if 800 <= row < 840 else 4096 for row in range(1600)]
    uri = write_dataset(*[table(sizes[low : low + 400]) for low in range(0, 1600, 400)])
    dataset = raylance.dataset(uri, order="sequential", remainder="ragged")
    limit, inflight = 32 * MIB, 8 * MIB
    with watch_shard_actor() as watch, dataset.loader(reader_bytes=limit, inflight_bytes=inflight) as loader:
        rows: list[int] = []
        # What is in flight, or one row that is larger, and the step being made.
        most = inflight + (4 + 1) * 8 * MIB
        for batch in loader.iter_batches(global_batch_size=4, with_row_offset=True, prefetch_batches=99):
            rows += batch["_rowoffset"].tolist()
            assert [len(data) for data in batch["data"]] == [sizes[row] for row in batch["_rowoffset"]]
            del batch
            if 780 <= rows[-1] < 840:
                time.sleep(0.3)  # for what is on its way to arrive
                deadline = time.monotonic() + 10  # Ray frees what was let go about once a second
                while (used := in_object_store()) > most and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert used <= most
        stats = loader.stats()
    assert rows == list(range(1600))
    # The block that finds them was thought to have 2 MiB, and may hold all 40 of them, once: 320 MiB, and while Lance
    # reads them as much again. A second such block would have 1,280 MiB.
    assert watch.most - floor < 2 * 40 * 8 * MIB + 10 * limit
    assert stats["held_bytes"] <= 3 * limit, "and the block that finds them"


@pytest.mark.promise("P7")
@pytest.mark.parametrize("distance", [8, 240])
def test_frames_of_videos_are_held_within_both_limits(
    distance: int, tmp_path: Path, write_dataset: Callable[..., str], floor: int
) -> None:
    """An epoch decodes 480 MiB of frames; samples have eight times as much. A keyframe distance may be larger than what
    is held.
    """
    videos = [encode(scene(seed, 240, 384, 448), gop=distance) for seed in range(4)]
    rows = np.arange(4 * 240)
    uri = write_dataset(pa.table({"row": rows, "file": rows // 240, "frame": rows % 240}))
    top = raylance.Video("top", write_videos(str(tmp_path / "videos.lance"), videos), video="file", frame="frame")
    windows = raylance.Windows(episode="file", offsets={"top": range(-7, 1)})
    dataset = raylance.dataset(uri, columns=["row"], decode=top, samples=windows, seed=1, remainder="ragged")
    limit, inflight = 48 * MIB, 24 * MIB
    seen: list[int] = []
    with watch_shard_actor() as watch, dataset.loader(reader_bytes=limit, inflight_bytes=inflight) as loader:
        for number, batch in enumerate(loader.iter_batches(global_batch_size=4, prefetch_batches=99)):
            seen += batch["row"].tolist()
            del batch
            if number % 60 == 30:
                time.sleep(0.3)  # for what is on its way to arrive
                deadline = time.monotonic() + 10
                while (used := in_object_store()) > limit and time.monotonic() < deadline:
                    time.sleep(0.1)
                assert used <= limit * 9 / 8, "frames, each once; the samples are made in this process"
        stats = loader.stats()
    assert sorted(seen) == rows.tolist()
    assert stats["held_bytes"] <= limit * 9 / 8
    assert watch.most - floor < 4 * limit + 100 * MIB, "PyAV and what it holds for open videos"


def test_documents_are_counted_and_packed_by_their_bytes(write_dataset: Callable[..., str]) -> None:
    """300 documents of a million tokens: opening held them all."""
    script = """
import sys, tracemalloc, resource, numpy as np, raylance
def own(): return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) << 10
uri = sys.argv[1]
raylance.dataset(uri, filter="id < 2", samples=raylance.samples.pack_tokens.PackTokens("tokens", 4096)).head(1)
before = own()
handle = raylance.dataset(uri, samples=raylance.samples.pack_tokens.PackTokens("tokens", 4096), order="sequential")
opened = own()
batch = handle.head(128)
print(len(handle), opened - before, own() - before)
"""
    tokens = pa.array(np.arange(MIB, dtype=np.int32))
    column = pa.ListArray.from_arrays(np.arange(0, 101) * MIB, pa.concat_arrays([tokens] * 100))
    uri = write_dataset(*[pa.table({"tokens": column, "id": np.arange(100) + part}) for part in (0, 100)])
    done = subprocess.run([sys.executable, "-c", script, uri], capture_output=True, text=True, check=True)
    sequences, opened, packed = map(int, done.stdout.split())
    assert sequences == 200 * MIB // 4096
    assert opened < 200 * MIB, "the documents have 800 MiB"
    assert packed < 250 * MIB


@pytest.mark.promise("P7")
@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("runtime", ["threads", "ray"])
def test_300_epochs_leave_no_memory(write_dataset: Callable[..., str], runtime: Any) -> None:
    """An epoch reads 6 MiB; after the first ones, this process and the shard actor grow by less than 100 KiB each.

    How many windows are alive at once, and with them the size, may rise once more at any time, above all under load;
    a leak grows in each part of the run.
    """
    values = pa.array(np.random.default_rng(0).standard_normal(2000 * 768, np.float32))
    uri = write_dataset(pa.table({"id": np.arange(2000), "vector": pa.FixedSizeListArray.from_arrays(values, 768)}))
    found = []
    with raylance.dataset(uri).loader(runtime=runtime, num_decoders=0) as loader:
        for epoch in range(300):
            assert sum(len(batch["id"]) for batch in loader.iter_torch_batches(batch_size=250)) == 2000
            if epoch in (59, 139, 219, 299):
                sizes = [
                    process.memory_info() for name, process in processes() if name in ("this process", "shard actor")
                ]
                found.append(sum(size.rss - size.shared for size in sizes))
    assert min(np.diff(found)) < 80 * 100 * 1024, found
