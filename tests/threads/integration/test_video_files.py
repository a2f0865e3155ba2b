"""What files of videos may be like: frames made of damaged ones, and what a file says of its pictures and times."""

import contextlib
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
from raylance.errors import ConfigError, DatasetError
from tests.helpers.videos import change_box, damaged, encode, flagged, scene, whole, write_videos

# A wait in a library's C code ends by no signal, and prints nothing: a thread prints all stacks and ends the process.
pytestmark = pytest.mark.timeout(240, method="thread")

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


def with_matrix(video: bytes, *values: float) -> bytes:
    """The file with a display matrix: how much it goes right and down for a stored pixel to the right, and for one
    down.
    """
    right_right, right_down, down_right, down_down = (round(each * (1 << 16)) for each in values)
    matrix = struct.pack(">9i", right_right, right_down, 0, down_right, down_down, 0, 0, 0, 1 << 30)
    return change_box(video, [b"moov", b"trak", b"tkhd"], lambda header: header[:40] + matrix + header[76:])


TURNS: dict[tuple[int, int, int, int], Callable[[np.ndarray], np.ndarray]] = {
    (1, 0, 0, 1): lambda frames: frames,
    (0, 1, -1, 0): lambda frames: np.rot90(frames, -1, (1, 2)),
    (-1, 0, 0, -1): lambda frames: np.rot90(frames, 2, (1, 2)),
    (0, -1, 1, 0): lambda frames: np.rot90(frames, 1, (1, 2)),
    (-1, 0, 0, 1): lambda frames: frames[:, :, ::-1],
    (1, 0, 0, -1): lambda frames: frames[:, ::-1],
    (0, 1, 1, 0): lambda frames: frames.swapaxes(1, 2),
}


@pytest.mark.parametrize("matrix", TURNS)
def test_frames_are_turned_as_they_are_shown(
    matrix: tuple[int, int, int, int], tmp_path: Path, write_dataset: Callable[..., str]
) -> None:
    video = with_matrix(encode(scene(1, FRAMES), gop=5), *matrix)
    with av.open(io.BytesIO(video)) as box:
        assert next(box.decode(video=0)).rotation % 360 == {0: 0, 1: 270, -1: 90}[matrix[1]] or matrix[0] < 0
    wanted = TURNS[matrix](whole(video))
    assert (clip_of(video, tmp_path) == wanted).all()
    batch = frames_of(write_videos(str(tmp_path / "videos.lance"), [video]), write_dataset).head(FRAMES)
    assert (batch["top"] == wanted).all()
    small = clip_of(video, tmp_path, size=wanted.shape[1] // 2)
    assert (small == TURNS[matrix](whole(video, small.shape[1:3]))).all()


def test_other_turns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="45 degrees"):
        clip_of(with_matrix(encode(scene(1, FRAMES)), 0.7, 0.7, -0.7, 0.7), tmp_path)


def test_videos_of_other_sizes_are_resized_on_request_only(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    """A turned one has another size, too. This is not a bad row."""
    video = encode(scene(1, FRAMES))
    uri = write_videos(str(tmp_path / "videos.lance"), [video] * 5 + [with_matrix(video, 0, 1, -1, 0)])
    numbers = np.arange(6 * FRAMES)
    rows = write_dataset(pa.table({"file": numbers // FRAMES, "frame": numbers % FRAMES}))
    options: dict[str, Any] = {"order": "sequential", "on_bad_row": "mask", "max_bad_rows": None}
    for decode in (
        raylance.Video("top", uri, video="file", frame="frame"),
        raylance.Video("top", uri, video="file", frame="frame", size=(32, 48)),
    ):
        data, seen = raylance.dataset(rows, decode=decode, **options), 0
        with contextlib.ExitStack() as stack:
            if decode.size is None:
                stack.enter_context(pytest.raises(ConfigError, match=r"video 5 .*32x48.*48x32.*size=\(32, 48\)"))
            for batch in data.iter_batches(batch_size=8):
                seen += len(batch["top"])
        assert seen == (6 if decode.size else 5) * FRAMES
    with pytest.raises(ConfigError, match=r"row offset 5 .*32x48.*48x32.*size=\(32, 48\)"):
        raylance.dataset(uri, columns=["video_bytes"], decode=raylance.Clip("video_bytes", 2), **options)
    resized = raylance.dataset(uri, columns=["video_bytes"], decode=raylance.Clip("video_bytes", 2, size=16), **options)
    assert resized.take([5, 0])["_valid"].all()


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
