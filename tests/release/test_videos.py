"""Frames of videos through Ray: readers that are lost."""

from collections.abc import Callable
from typing import Any

import pytest
import ray

import raylance
from tests.helpers.cluster import actors_of
from tests.helpers.filmed import EPISODES, FRAMES, camera, check, rows_of, windows


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
