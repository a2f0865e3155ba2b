"""What files of videos may be like: frames made of damaged ones, and what a file says of its pictures and times."""

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import raylance
from raylance.errors import DatasetError
from tests.helpers.videos import change_box, damaged, encode, flagged, scene, whole, write_videos

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


def clip_of(video: bytes, folder: Path, **settings: Any) -> np.ndarray:
    """All frames of a video, as a clip."""
    uri = write_videos(str(folder / f"{len(list(folder.iterdir()))}.lance"), [video])
    clip = raylance.Clip("video_bytes", **({"frames": FRAMES, "start": "first"} | settings))
    return raylance.dataset(uri, decode=clip).take([0])["video_bytes"][0]


def with_last_duration(video: bytes, ticks: int) -> bytes:
    """The file with another duration of its last frame, in all places that say one."""

    def change_times(table: bytes) -> bytes:
        assert struct.unpack(">3I", table[:12]) == (0, 1, FRAMES)
        return struct.pack(">3I", 0, 2, FRAMES - 1) + table[12:16] + struct.pack(">2I", 1, ticks)

    def change_duration(header: bytes) -> bytes:
        (tick_count,) = struct.unpack(">I", header[16:20])
        return header[:16] + struct.pack(">I", tick_count * (FRAMES - 1) // FRAMES + ticks) + header[20:]

    media = [b"moov", b"trak", b"mdia"]
    video = change_box(video, [*media, b"minf", b"stbl", b"stts"], change_times)
    return change_box(video, [*media, b"mdhd"], change_duration)


@pytest.mark.parametrize("ticks", [0, 2048, 10240])
def test_the_last_frame_may_be_shown_longer(ticks: int, tmp_path: Path) -> None:
    """A frame has 1,024 ticks."""
    video = encode(scene(1, FRAMES), gop=5)
    assert (clip_of(with_last_duration(video, ticks), tmp_path) == whole(video)).all()


def test_one_frame_has_no_rate(tmp_path: Path) -> None:
    video = encode(scene(1, 1))
    assert (clip_of(video, tmp_path, frames=1) == whole(video)).all()


def test_a_cover_is_not_the_video(tmp_path: Path) -> None:
    """The picture is the first stream of the file."""
    Image.fromarray(scene(3, 1, 64, 64)[0]).save(picture := io.BytesIO(), "JPEG")
    frames, out = scene(1, FRAMES), io.BytesIO()
    with av.open(out, "w", format="mp4") as box:
        film, cover = box.add_stream("libx264", rate=10), box.add_stream("mjpeg", rate=1)
        film.height, film.width, film.pix_fmt = 32, 48, "yuv420p"
        cover.height, cover.width, cover.pix_fmt = 64, 64, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        packet = av.Packet(picture.getvalue())
        packet.stream, packet.pts, packet.dts = cover, 0, 0
        box.start_encoding()
        box.mux(packet)
        for pixels in frames:
            box.mux(film.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        box.mux(film.encode())

    def put_last_first(content: bytes) -> bytes:
        at = content.index(b"udta") - 4
        return content[at:] + content[:at]

    video = change_box(out.getvalue(), [b"moov"], put_last_first)
    with av.open(io.BytesIO(video)) as box:
        assert [each.codec_context.name for each in box.streams.video] == ["mjpeg", "h264"]
        wanted = np.stack([frame.to_ndarray(format="rgb24") for frame in box.decode(video=1)])
    assert (clip_of(video, tmp_path) == wanted).all()


@pytest.mark.parametrize(("format", "name"), [("avi", "AVI"), ("matroska", "Matroska")])
def test_other_files_are_named(format: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=rf"{name}.* MP4"):
        clip_of(encode(scene(1, FRAMES), format=format), tmp_path)
