"""Episodes with the videos of a camera, and the frames that their samples must have."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from tests.helpers.videos import encode, pixels_of, scene, whole, write_videos

EPISODES, FRAMES = 5, 40

OFFSETS = np.array([-3, -1, 0, 1])

KINDS: dict[str, dict[str, Any]] = {
    "keyframes every 2": {"gop": 2},
    "keyframes every 12": {"gop": 12},
    "one keyframe": {"gop": 250},
    "frames before their keyframe": {"gop": 9, "bf": 3, "x264-params": "open-gop=1:b-adapt=0:bframes=3"},
    "keyframes where scenes change": {"gop": 15, "keyint_min": 3, "sc_threshold": 60},
    "50 a second": {"gop": 25, "rate": 50},
    "times in milliseconds": {"gop": 10, "rate": 30, "ticks": 1000},
    "sound between frames": {"gop": 6, "sound": True},
}


def rows_of(videos: int = EPISODES, frames: int = FRAMES) -> pa.Table:
    """A row for each frame, episodes stored one after another; the last video comes first."""
    rows = videos * frames
    return pa.table(
        {
            "episode": np.arange(rows) // frames,
            "file": videos - 1 - np.arange(rows) // frames,
            "frame": np.arange(rows) % frames,
            "action": np.arange(rows),
        }
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[np.ndarray]]]:
    """A dataset of videos of a kind, and their frames."""
    known: dict[str, tuple[str, list[np.ndarray]]] = {}

    def make(kind: str) -> tuple[str, list[np.ndarray]]:
        if kind not in known:
            videos = [encode(scene(seed, FRAMES), **KINDS[kind]) for seed in range(EPISODES)]
            uri = str(tmp_path_factory.mktemp("videos") / "videos.lance")
            known[kind] = (
                write_videos(uri, videos, "2.2" if kind == "keyframes every 2" else "2.1"),
                [*map(whole, videos)],
            )
        return known[kind]

    return make


def camera(uri: str, name: str = "top", **settings: Any) -> raylance.Video:
    return raylance.Video(name, uri, video="file", frame="frame", **settings)


def check(batch: dict[str, Any], frames: list[np.ndarray], name: str = "top", videos: int = EPISODES) -> list[int]:
    """Compares the windows of a batch with frames; returns the rows."""
    pixels = pixels_of(batch[name])
    for place, row in enumerate(np.asarray(batch["action"]).tolist()):
        wanted = frames[videos - 1 - row // FRAMES][np.clip(row % FRAMES + OFFSETS, 0, FRAMES - 1)]
        assert (pixels[place] == wanted).all(), (name, row)
    return list(np.asarray(batch["action"]).tolist())


def windows(*names: str) -> raylance.Windows:
    return raylance.Windows(episode="episode", offsets=dict.fromkeys(names, OFFSETS))
