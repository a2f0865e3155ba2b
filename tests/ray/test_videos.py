"""Frames of videos through Ray."""

from collections.abc import Callable
from typing import Any

import raylance
from tests.helpers.filmed import EPISODES, FRAMES, camera, check, rows_of, windows


def test_videos_through_ray(made: Callable[..., Any], write_dataset: Callable[..., str], ray_session: None) -> None:
    uri, frames = made("keyframes every 12")
    data = raylance.dataset(
        write_dataset(rows_of()), columns=["action"], decode=camera(uri), samples=windows("top"), remainder="ragged"
    )
    with data.loader(runtime="ray") as loader:
        seen = [row for batch in loader.iter_torch_batches(global_batch_size=32) for row in check(batch, frames)]
    assert sorted(seen) == list(range(EPISODES * FRAMES))
