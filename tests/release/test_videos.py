"""Frames of videos through Ray: readers that are lost, and a frame that ends the process that decodes it."""

import hashlib
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import lance
import pytest
import ray

import raylance
from tests.helpers.cluster import actors_of
from tests.helpers.filmed import EPISODES, FRAMES, camera, check, rows_of, windows
from tests.helpers.scripts import run_script


@pytest.mark.promise("P6")
@pytest.mark.parametrize("num_decoders", [0, 1])
def test_frames_sent_by_block_survive_their_reader(
    num_decoders: int, made: Callable[..., Any], write_dataset: Callable[..., str], ray_session: None
) -> None:
    """Little memory, so that there are many chunks; one camera is cropped by decoders, so that its samples are sent."""
    uri, frames = made("keyframes every 12")
    data = raylance.dataset(
        write_dataset(rows_of()), columns=["action"], samples=windows("top", "side"), remainder="ragged",
        decode=[camera(uri), camera(uri, "side"), raylance.images.FrameCrop("side", (32, 48))],
        order=raylance.WindowShuffle(shard_rows=10, window_shards=2, lanes=2),
    )  # fmt: skip
    seen: list[int] = []
    options: dict[str, Any] = {"reader_bytes": 1 << 20, "inflight_bytes": 1 << 20}
    with data.loader(runtime="ray", num_decoders=num_decoders, **options) as loader:
        for step, batch in enumerate(loader.iter_torch_batches(global_batch_size=8)):
            assert check(batch, frames, "side") == check(batch, frames)
            seen += batch["action"].tolist()
            if step in (3, 15):
                ray.kill(actors_of(loader)[0])
        assert loader.stats()["helpers_replaced"] == 2
    assert sorted(seen) == list(range(EPISODES * FRAMES))


FATAL = """
import hashlib, os, sys
import numpy as np, ray, raylance

def end_at_one_frame():
    import av
    opened = av.open

    class Container:
        def __init__(self, real):
            self._real = real

        def __getattr__(self, name):
            return getattr(self._real, name)

        def demux(self, stream):
            for packet in self._real.demux(stream):
                if hashlib.md5(bytes(packet)).hexdigest() == {digest!r}:
                    os._exit(9)
                yield packet

    av.open = lambda *given, **options: Container(opened(*given, **options))

if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={{"worker_process_setup_hook": end_at_one_frame}})
    video = raylance.Video("top", {videos!r}, video="file", frame="frame")
    data = raylance.dataset({rows!r}, columns=["action"], decode=video, on_bad_row={on_bad_row!r}, remainder="ragged")
    with data.loader(runtime="ray", num_decoders={num_decoders}) as loader:
        for _ in range(2):
            bad, seen = [], 0
            try:
                for batch in loader.iter_batches(global_batch_size=20):
                    seen += len(batch["action"])
                    bad += batch["action"][~batch["_valid"]].tolist() if "_valid" in batch else []
            except raylance.BadRowError as error:
                print("ERROR", error.row_offset, error.column, error)
                break
            print("EPOCH", seen, sorted(bad))
        print("REPLACED", loader.stats()["helpers_replaced"])
"""


@pytest.mark.promise("P6")
@pytest.mark.parametrize(("on_bad_row", "num_decoders"), [("mask", 2), ("raise", 1), ("mask", 0)])
def test_a_frame_that_ends_its_decoder_costs_its_rows(
    on_bad_row: str, num_decoders: int, made: Callable[..., Any], write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    """A packet ends the process: it costs the frames that are made of it, and those that are shown when it has come, up
    to the next keyframe. A later epoch knows them.
    """
    kind, video, number = "keyframes every 12", 2, 17
    [(_, file)] = lance.dataset(made(kind)[0]).read_blobs("video_bytes", indices=[video])
    with av.open(io.BytesIO(file)) as box:
        packets = [bytes(packet) for packet in box.demux(video=0)]
    script = FATAL.format(
        digest=hashlib.md5(packets[number]).hexdigest(), videos=made(kind)[0], rows=write_dataset(rows_of()),
        on_bad_row=on_bad_row, num_decoders=num_decoders,
    )  # fmt: skip
    printed = run_script(script, tmp_path)
    keyframe, packet, end = ((EPISODES - 1 - video) * FRAMES + at for at in (12, 17, 24))
    if on_bad_row == "raise":
        [(row, of_file)] = re.findall(r"ERROR (\d+) top .*frame (\d+) of video 2", printed)
        assert keyframe < int(row) <= packet + 1
        assert int(row) - keyframe == int(of_file) - 12
        return
    [bad, again] = [json.loads(each) for each in re.findall(rf"EPOCH {EPISODES * FRAMES} (.*)", printed)]
    assert keyframe < bad[0] <= packet
    assert bad == again == [*range(bad[0], end)]
