"""What files of videos may be like: frames made of damaged ones, and what a file says of its pictures and times."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from tests.helpers.videos import damaged, encode, flagged, scene, whole, write_videos

FRAMES = 24
REORDERED: dict[str, dict[str, Any]] = {
    "H.264": {"gop": 8, "bf": 3, "x264-params": "b-adapt=0:scenecut=0"},
    "H.264, B-frames made of B-frames": {"gop": 12, "x264-params": "b-adapt=0:scenecut=0:b-pyramid=normal:bframes=7"},
    "H.264, frames before their keyframe": {"gop": 8, "x264-params": "open-gop=1:b-adapt=0:bframes=3:scenecut=0"},
    "MPEG-4": {"gop": 8, "codec": "mpeg4", "bf": 3},
}


def frames_of(uri: str, write_dataset: Callable[..., str], **settings: Any) -> raylance.Dataset:
    """A row for each frame of the first video."""
    rows = write_dataset(pa.table({"file": np.zeros(FRAMES, np.int64), "frame": np.arange(FRAMES)}))
    video = raylance.Video("top", uri, video="file", frame="frame", **settings)
    return raylance.dataset(rows, decode=video, order="sequential", on_bad_row="mask", max_bad_rows=None)


@pytest.mark.parametrize("kind", REORDERED)
def test_frames_made_of_a_damaged_one_are_bad(kind: str, tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    """They may be shown before it, and are bad one by one, too; a keyframe begins good ones."""
    video = encode(scene(1, FRAMES, 64, 96), **REORDERED[kind])
    pixels, found = whole(video), 0
    for at in (1, 2, 5, 7, 9, 14):  # as they are stored
        if not flagged(bad := damaged(video, at)):
            continue  # the decoder notices nothing
        found += 1
        uri = write_videos(str(tmp_path / f"{at}.lance"), [bad, video])
        data = frames_of(uri, write_dataset, size=(64, 96))
        batch = data.head(FRAMES)
        valid = batch["_valid"]
        assert (batch["top"][valid] == pixels[valid]).all(), at
        assert not batch["top"][~valid].any()
        assert valid[0]
        assert at > 12 or valid[20:].all()
        assert not valid.all()
        for row in np.flatnonzero(~valid)[[0, -1]].tolist():
            assert not data.take([row])["_valid"][0], (at, row)
        first = int(np.flatnonzero(~valid)[0])
        for frames, is_good in ((first, True), (first + 1, False)):
            clip = raylance.Clip("video_bytes", frames, start="first", size=(64, 96))
            shown = raylance.dataset(uri, decode=clip, on_bad_row="mask", max_bad_rows=None).take([0])
            assert shown["_valid"].tolist() == [is_good]
            assert not is_good or (shown["video_bytes"][0] == pixels[:frames]).all()
    assert found >= 2
