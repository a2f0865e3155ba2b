"""Frames of videos through Ray: readers that are lost, and a frame that ends the process that decodes it."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest
import ray

import raylance
from tests.helpers.cluster import actors_of
from tests.helpers.filmed import EPISODES, FRAMES, KINDS, camera, check, rows_of, windows
from tests.helpers.scripts import run_script
from tests.helpers.videos import encode, scene


@pytest.mark.promise("P6")
@pytest.mark.parametrize("num_decoders", [0, 1])
def test_frames_sent_by_block_survive_their_reader(
    num_decoders: int, made: Callable[..., Any], write_dataset: Callable[..., str], ray_session: None
) -> None:
    """Little memory, so that there are many chunks; one camera is cropped by decoders, so that its samples are sent."""
    uri, frames = made("keyframes every 12")
    data = raylance.dataset(
        write_dataset(rows_of()), columns=["action"], windows=windows("top", "side"), remainder="ragged",
        decode=[camera(uri), camera(uri, "side"), raylance.FrameCrop("side", (32, 48))],
        order=raylance.WindowShuffle(shard_rows=10, window_shards=2, lanes=2),
    )  # fmt: skip
    seen: list[int] = []
    options: dict[str, Any] = {"max_window_bytes": 1 << 20, "max_inflight_bytes": 1 << 20}
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
            print("EPOCH", seen, sorted(bad), loader.stats()["bad_rows"])
        print("REPLACED", loader.stats()["helpers_replaced"])
"""


@pytest.mark.promise("P6")
@pytest.mark.parametrize(("on_bad_row", "num_decoders"), [("mask", 2), ("raise", 1), ("mask", 0)])
def test_a_frame_that_ends_its_decoder_costs_its_rows(
    on_bad_row: str, num_decoders: int, made: Callable[..., Any], write_dataset: Callable[..., str], tmp_path: Path
) -> None:
    """The frames after it, up to the next keyframe, are made of it, and no other is lost. A later epoch knows them."""
    kind, video, frame = "keyframes every 12", 2, 17
    with av.open(io.BytesIO(encode(scene(video, FRAMES), **KINDS[kind]))) as box:
        packets = [bytes(packet) for packet in box.demux(video=0)]
    script = FATAL.format(
        digest=hashlib.md5(packets[frame]).hexdigest(), videos=made(kind)[0], rows=write_dataset(rows_of()),
        on_bad_row=on_bad_row, num_decoders=num_decoders,
    )  # fmt: skip
    printed = run_script(script, tmp_path)
    first = (EPISODES - 1 - video) * FRAMES
    bad = [*range(first + frame, first + 24)]
    if on_bad_row == "mask":
        assert printed.count(f"EPOCH {EPISODES * FRAMES} {bad}") == 2, printed
    else:
        assert f"ERROR {first + frame} top" in printed
        assert f"frame {frame} of video {video}" in printed
