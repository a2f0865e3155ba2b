"""Frames of videos as columns: the pixels of the whole file, each frame in its row, however they are read."""

import builtins
import io
import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.audit import EpochAudit, reopen
from raylance.errors import BadRowError, ConfigError, DatasetError
from tests.helpers.filmed import EPISODES, FRAMES, KINDS, OFFSETS, camera, check, rows_of, windows
from tests.helpers.videos import encode, scene, whole, write_videos

# A wait in a library's C code ends by no signal, and prints nothing: a thread prints all stacks and ends the process.
pytestmark = pytest.mark.timeout(240, method="thread")


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_those_of_the_whole_file(
    kind: str, made: Callable[..., Any], write_dataset: Callable[..., str]
) -> None:
    uri, frames = made(kind)
    data = raylance.dataset(
        write_dataset(rows_of()), columns=["action"], decode=camera(uri), samples=windows("top"), remainder="ragged",
        order=raylance.WindowShuffle(shard_rows=7, lanes=4, window_shards=2),
    )  # fmt: skip
    assert data.schema.names == ["action", "top", "top_is_pad"]
    seen = [row for batch in data.iter_torch_batches(batch_size=16) for row in check(batch, frames)]
    assert sorted(seen) == list(range(EPISODES * FRAMES))
    if kind == "keyframes every 12":
        assert "keyframes every 10 frames" in repr(data.plan(global_batch_size=16)), "4 of 40 frames"


def test_cameras_of_unlike_sizes_in_any_order(
    made: Callable[..., Any], write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row in a random order, of a filter; a resume in another world."""
    top, frames = made("keyframes every 12")
    monkeypatch.chdir(Path(top).parent)
    top = Path(top).name
    side, others = made("frames before their keyframe")
    data = raylance.dataset(
        write_dataset(rows_of()), columns=["action", "frame"], filter="action % 3 != 1", order="row",
        decode=[camera(top), camera(side, "side")], samples=windows("top", "side"),
    )  # fmt: skip
    with data.loader() as loader:
        batches = iter(loader.iter_batches(global_batch_size=20))
        seen = [row for _ in range(3) for row in check(next(batches), frames)]
        state = loader.state_dict()
    for rank in range(2):
        with data.loader(rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            for batch in loader.iter_batches(global_batch_size=20):
                assert check(batch, others, "side") == check(batch, frames)
                seen += check(batch, frames)
                assert (batch["frame"] == batch["action"] % FRAMES).all()
    assert len(seen) == len(set(seen)) == len(data) // 20 * 20
    monkeypatch.chdir("/")  # where the run began, paths were relative
    again = reopen(state)
    assert again.schema.names == data.schema.names
    assert EpochAudit(again, state=state).count().ok
    assert set(seen) <= {row for row in range(EPISODES * FRAMES) if row % 3 != 1}


def test_single_frames_resized_and_on_request(made: Callable[..., Any], write_dataset: Callable[..., str]) -> None:
    import lance

    uri, _ = made("keyframes every 12")
    stored = lance.dataset(uri).read_blobs("video_bytes", indices=list(range(EPISODES)), preserve_order=True)
    frames = [whole(bytes(video), (16, 24)) for _, video in stored]
    data = raylance.dataset(write_dataset(rows_of()), decode=camera(uri, size=(16, 24)), order="sequential")
    assert data.schema.names == ["episode", "file", "frame", "action", "top"]
    assert data[:0]["top"].shape == (0, 16, 24, 3)
    batch = data.take([77, 3, 3])
    assert batch["top"].shape == (3, 16, 24, 3)
    for place, row in enumerate((77, 3, 3)):
        assert (batch["top"][place] == frames[EPISODES - 1 - row // FRAMES][row % FRAMES]).all()
    assert "stretches" in repr(data.plan(16)) or "single rows" in repr(data.plan(16))


def test_only_frames_that_samples_have_are_decoded(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    """A row that samples need for other columns only needs no frame, so a missing frame there is not an error."""
    videos = [encode(scene(at, FRAMES), gop=1) for at in range(3)]
    videos[1] = encode(scene(1, FRAMES)[:30], gop=1)
    frames, uri = [*map(whole, videos)], write_videos(str(tmp_path / "videos.lance"), videos)
    data = raylance.dataset(
        write_dataset(rows_of(3)), columns=["action"], filter="frame % 10 = 3 AND (file != 1 OR frame < 30)",
        decode=[camera(uri, size=(32, 48)), camera(uri, "side", size=(32, 48))], remainder="ragged",
        samples=raylance.Windows(episode="episode", offsets={"action": range(30), "side": [-1, 0]}),
    )  # fmt: skip
    assert "about 1.00 frames are decoded a sample" in repr(data.plan(4))

    def check_both(batch: dict[str, Any]) -> list[int]:
        rows = batch["action"][:, 0].tolist()
        for place, row in enumerate(rows):
            pixels, frame = frames[2 - row // FRAMES], row % FRAMES
            assert (batch["top"][place] == pixels[frame]).all()
            assert (batch["side"][place] == pixels[[frame - 1, frame]]).all()
        return list(rows)

    seen = [row for batch in data.iter_batches(batch_size=4) for row in check_both(batch)]
    assert len(seen) == len(set(seen)) == len(data) == 11
    assert check_both(data.take(data.head(5)["_rowoffset"])) == sorted(seen)[:5]
    mixture = raylance.mix({"a": (data, 0.5), "b": (data, 0.5)})
    assert {row for batch in mixture.iter_batches(batch_size=8) for row in check_both(batch)} <= set(seen)


def test_little_memory(made: Callable[..., Any], write_dataset: Callable[..., str]) -> None:
    """Chunks of a few frames, and items that are larger than thought."""
    uri, frames = made("keyframes every 12")
    data = raylance.dataset(
        write_dataset(rows_of()), columns=["action"], decode=camera(uri), samples=windows("top"), remainder="ragged"
    )
    with data.loader(runtime="threads", reader_bytes=200_000, inflight_bytes=200_000) as loader:
        seen = [row for batch in loader.iter_batches(global_batch_size=16) for row in check(batch, frames)]
    assert sorted(seen) == list(range(EPISODES * FRAMES))


def broken(kind: str) -> bytes:
    frames = scene(9, FRAMES)
    if kind == "short":
        return encode(frames[:25])
    if kind == "matroska":
        return encode(frames, format="matroska")
    if kind == "rate":
        return encode(frames, times=[at + (at > 20) * 3 for at in range(FRAMES)])
    if kind == "rate of the same mean":  # a frame more, and then one less
        times = [2 * at - (at == 20) - 2 * (20 < at < 30) for at in range(FRAMES)]
        return encode(frames, rate=20, times=times)
    if kind == "cut":
        with tempfile.NamedTemporaryFile(suffix=".mp4") as file:
            options = {"movflags": "faststart"}
            with av.open(io.BytesIO(encode(frames))) as source, av.open(file.name, "w", options=options) as box:
                stream = box.add_stream_from_template(source.streams.video[0])
                for packet in source.demux(video=0):
                    if packet.dts is not None:
                        packet.stream = stream
                        box.mux(packet)
            whole_file = Path(file.name).read_bytes()
            return whole_file[: len(whole_file) // 2]
    video = bytearray(encode(frames, gop=40))
    if kind == "damaged":
        at = len(video) // 2
        video[at : at + 200] = bytes(200)
    return bytes(video) if kind == "damaged" else b"no video at all"


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("short", 65), ("rate", 40), ("rate of the same mean", 40), ("no video", 40), ("matroska", 40),
        ("damaged", None), ("cut", None),
    ],
)  # fmt: skip
def test_a_bad_video_is_named_after_the_rows_before_it(
    kind: str, row: int | None, tmp_path: Path, write_dataset: Callable[..., str]
) -> None:
    uri = write_videos(str(tmp_path / "videos.lance"), [encode(scene(at, FRAMES)) for at in range(2)])
    good = raylance.dataset(write_dataset(rows_of(2)), decode=camera(uri), order="sequential")
    assert len(list(good.iter_batches(batch_size=8))) == 10
    bad = write_videos(str(tmp_path / "bad.lance"), [broken(kind), encode(scene(1, FRAMES))])
    data = raylance.dataset(write_dataset(rows_of(2)), decode=camera(bad, size=(32, 48)), order="sequential")
    rows = 0
    with pytest.raises(BadRowError, match=r"frame \d+ of video 0 in .*bad.lance") as raised:
        for batch in data.iter_batches(batch_size=1):
            rows += len(batch["action"])
    assert raised.value.column == "top"
    assert raised.value.row_offset == rows >= FRAMES
    assert row is None or rows == row


def test_a_sample_is_shown_as_a_strip(made: Callable[..., Any], write_dataset: Callable[..., str]) -> None:
    top = camera(made("keyframes every 12")[0])
    data = raylance.dataset(write_dataset(rows_of()), decode=top, samples=windows("top"))
    batch = next(iter(data.iter_torch_batches(batch_size=4)))
    for shown, rows in ((data.show(3), 3), (data.show(batch), 4), (data.show(data.head(2)), 2)):
        assert shown._repr_html_().count("48 × 32") == 4 * rows


def test_a_number_that_no_frame_has_is_blamed_alone(
    made: Callable[..., Any], write_dataset: Callable[..., str]
) -> None:
    uri, frames = made("keyframes every 12")
    for wrong in (-1, FRAMES):
        numbers = np.where(np.arange(20) == 6, wrong, np.arange(20))
        rows = write_dataset(pa.table({"file": np.zeros(20, np.int64), "frame": numbers, "action": np.arange(20)}))
        seen = 0
        with pytest.raises(BadRowError, match=f"frame {wrong} is asked for, and the video has {FRAMES}") as raised:
            for batch in raylance.dataset(rows, decode=camera(uri), order="sequential").iter_batches(batch_size=1):
                assert (batch["top"][0] == frames[0][seen]).all()
                seen += 1
        assert raised.value.row_offset == seen == 6
        masked = raylance.dataset(rows, decode=camera(uri), on_bad_row="mask", max_bad_rows=1)
        assert masked.take(range(20))["_valid"].tolist() == [row != 6 for row in range(20)]


def test_sound_is_not_read(tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    """Where there is sound between the frames, nothing but what was planned is read."""
    import lance

    videos = [encode(scene(seed, 400, 64, 96), gop=8, sound=True) for seed in range(2)]
    uri = write_videos(str(tmp_path / "videos.lance"), videos, "2.2")
    numbers = np.arange(0, 800, 7)
    rows = write_dataset(pa.table({"file": numbers // 400, "frame": numbers % 400, "action": numbers}))
    data = raylance.dataset(rows, decode=camera(uri), order="row", remainder="ragged")
    frames, before, read = [*map(whole, videos)], lance.LanceDataset.read_blob_ranges, []

    def count(dataset: Any, column: str, requests: Any, **options: Any) -> Any:
        read.append(sum(length for *_, length in requests))
        return before(dataset, column, requests, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lance.LanceDataset, "read_blob_ranges", count)
        for batch in data.iter_batches(batch_size=16):
            for number, pixels in zip(batch["action"].tolist(), batch["top"], strict=True):
                assert (pixels == frames[number // 400][number % 400]).all()
    assert len(read) <= 4, "the begin and end of files, when opened and in the run; and frames, twice"


@pytest.mark.parametrize("kind", ["short", "rate", "no video", "damaged"])
def test_bad_frames_are_masked(kind: str, tmp_path: Path, write_dataset: Callable[..., str]) -> None:
    """A sample is masked if one of its frames is bad; its other columns, and other samples, are as ever."""
    videos = [encode(scene(at, FRAMES)) for at in range(3)]
    frames, rows = [whole(video) for video in videos], write_dataset(rows_of(3))
    second = broken(kind)  # once: x264 does not give the same bytes each time
    bad = write_videos(str(tmp_path / "bad.lance"), [videos[0], second, videos[2]])
    good = frames if kind == "no video" else [frames[0], np.resize(whole(second), frames[1].shape), frames[2]]
    data = raylance.dataset(
        rows, columns=["action"], on_bad_row="mask", max_bad_rows=None, remainder="ragged",
        decode=[camera(bad, size=(32, 48)), camera(write_videos(str(tmp_path / "good.lance"), videos), "side")],
        samples=windows("top"),
    )  # fmt: skip
    assert {*data.schema.names} == {"action", "top", "side", "top_is_pad"}
    seen, masked = [], []
    with data.loader(runtime="threads") as loader:
        for batch in loader.iter_torch_batches(global_batch_size=16):
            assert not any(name.startswith("_failure") for name in batch)
            valid = batch["_valid"].numpy()
            seen += check({name: column[valid] for name, column in batch.items()}, good, videos=3)
            masked += batch["action"][~valid].tolist()
            for row, side in zip(batch["action"].tolist(), batch["side"].numpy(), strict=True):
                assert (side.transpose(1, 2, 0) == frames[2 - row // FRAMES][row % FRAMES]).all()
    assert sorted(seen + masked) == list(range(3 * FRAMES))
    assert {row // FRAMES for row in masked} == {1}
    first = {"short": 24, "no video": 0}.get(kind)  # the window of a row has the one after it
    assert min(masked) == FRAMES + first if first is not None else masked
    few = raylance.dataset(rows, columns=["action"], on_bad_row="mask", max_bad_rows=2, decode=camera(bad, size=32))
    with pytest.raises(BadRowError, match=r"frame \d+ of video 1"), few.loader(runtime="threads") as loader:
        list(loader.iter_batches(global_batch_size=8))


def test_a_frame_that_is_bad_in_two_cameras_masks_the_samples_of_both(
    tmp_path: Path, write_dataset: Callable[..., str]
) -> None:
    bad = write_videos(str(tmp_path / "bad.lance"), [broken("short")])
    data = raylance.dataset(
        write_dataset(rows_of(1)), decode=[camera(bad), camera(bad, "side")], on_bad_row="mask", max_bad_rows=None,
        samples=raylance.Windows(episode="episode", offsets={"side": [0, 3]}),
    )  # fmt: skip
    assert data.take(range(FRAMES))["_valid"].tolist() == [row < 22 for row in range(FRAMES)], "25 frames are there"


def test_a_transform_may_put_the_channels_first(made: Callable[..., Any], write_dataset: Callable[..., str]) -> None:
    uri, frames = made("keyframes every 12")
    rows = write_dataset(rows_of())
    for move in (False, True):

        def change(batch: dict[str, Any], move: bool = move) -> dict[str, Any]:
            top = batch["top"].astype(np.float32)
            return {"action": batch["action"], "top": np.moveaxis(top, -1, -3) if move else top}

        data = raylance.dataset(rows, columns=["action"], decode=camera(uri), samples=windows("top"), transform=change)
        batch = next(iter(data.iter_torch_batches(batch_size=8)))
        assert batch["top"].shape == (8, 4, 3, 32, 48)
        check(batch, frames)
        assert data.take([0])["top"].shape == ((1, 4, 3, 32, 48) if move else (1, 4, 32, 48, 3))


@pytest.mark.parametrize("temporal", [2, 3])
def test_frames_become_patches_with_time_first(
    made: Callable[..., Any], write_dataset: Callable[..., str], temporal: int
) -> None:
    """In the order of the Qwen-VL processors: time, then what the model merges, then the patches of a token."""
    uri, frames = made("keyframes every 12")
    cut = raylance.images.FramePatches("top", patch=8, merge=2, min_pixels=16, max_pixels=32 * 48, temporal=temporal)
    data = raylance.dataset(
        write_dataset(rows_of()), columns=["action", camera(uri), cut], samples=windows("top"), remainder="ragged"
    )
    times = -(-len(OFFSETS) // temporal)
    for batch in data.iter_torch_batches(batch_size=16):
        assert batch["top"].shape[1:] == (times * 4 * 6, 3 * temporal * 64)
        assert batch["top_grid"].tolist() == [[times, 4, 6]] * len(batch["action"])
        for place, row in enumerate(batch["action"].tolist()):
            found = batch["top"][place].numpy().reshape(times, 2, 3, 2, 2, 3, temporal, 8, 8)
            wanted = frames[EPISODES - 1 - row // FRAMES][np.clip(row % FRAMES + OFFSETS, 0, FRAMES - 1)]
            for time, y, x, down, across, within in itertools.product(
                range(times), range(2), range(3), range(2), range(2), range(temporal)
            ):
                frame = wanted[min(time * temporal + within, len(OFFSETS) - 1)]
                top, left = 8 * (2 * y + down), 8 * (2 * x + across)
                part = frame[top : top + 8, left : left + 8].transpose(2, 0, 1)
                assert np.array_equal(found[time, y, x, down, across, :, within], part)
    resized = raylance.images.FramePatches("top", max_pixels=28 * 28, min_pixels=1, name="small")
    small = raylance.dataset(write_dataset(rows_of()), columns=[camera(uri), resized], samples=windows("top"))
    assert next(iter(small.iter_batches(batch_size=2)))["small_grid"].tolist() == [[2, 2, 2]] * 2
    assert cut.grid(len(OFFSETS), 32, 48) == (times, 4, 6)
    for name in ("action", "side"):
        taken = [camera(uri), camera(uri, "side"), raylance.images.FramePatches("top", name=name)]
        with pytest.raises(ConfigError, match=name):
            raylance.dataset(write_dataset(rows_of()), columns=["action", *taken], samples=windows("top", "side"))
    for wrong in ({"patch": 0}, {"max_pixels": 3}, {"temporal": "a"}, {"size": 3}):
        with pytest.raises(ConfigError, match="patch|pixels|temporal"):
            raylance.images.FramePatches("top", **wrong)


@pytest.mark.parametrize("start", ["first", "random"])
def test_clips_become_patches(tmp_path: Path, start: Any) -> None:
    """Those of the frames that the clip itself gives; bad videos are masked."""
    videos = [encode(scene(seed, 20 + seed), gop=6) for seed in range(9)]
    videos[5] = b"no video"
    uri = write_videos(str(tmp_path / "clips.lance"), videos, "2.2")
    clip = raylance.Clip("video_bytes", 5, stride=2, start=start, short="repeat", hflip=0.5, crop=(32, 32))
    cut = raylance.images.FramePatches("video_bytes", clip=clip, patch=8, merge=2, min_pixels=16, max_pixels=1024)
    settings: dict[str, Any] = {"on_bad_row": "mask", "remainder": "ragged", "seed": 3, "max_bad_rows": None}
    data = raylance.dataset(uri, columns=[cut], **settings)
    with data.loader(runtime="threads", num_decoders=2) as loader:
        batches = list(itertools.islice(loader.iter_batches(global_batch_size=4), 1))
        state = json.loads(json.dumps(loader.state_dict()))
    with data.loader(runtime="threads") as loader:
        loader.load_state_dict(state)
        batches += loader.iter_batches(global_batch_size=4)
    frames = list(raylance.dataset(uri, columns=[clip], **settings).iter_batches(batch_size=4))
    for batch, of_clip in zip(batches, frames, strict=True):
        assert batch["_valid"].tolist() == of_clip["_valid"].tolist()
        assert batch["video_bytes"].shape[1:] == (3 * 4 * 4, 3 * 2 * 64)
        for patches, grid, valid, taken in zip(
            batch["video_bytes"], batch["video_bytes_grid"], batch["_valid"], of_clip["video_bytes"], strict=True
        ):
            if valid:
                assert grid.tolist() == [3, 4, 4]
                made = patches.reshape(3, 2, 2, 2, 2, 3, 2, 8, 8).transpose(0, 6, 1, 3, 7, 2, 4, 8, 5)
                assert np.array_equal(made.reshape(6, 32, 32, 3), taken[[0, 1, 2, 3, 4, 4]])
    assert sum(int((~batch["_valid"]).sum()) for batch in batches) == 1
    for wrong in ({"column": "other", "clip": clip}, {"column": clip}, {"column": "a", "clip": 3}):
        with pytest.raises(ConfigError, match="FramePatches"):
            raylance.images.FramePatches(**wrong)
    with pytest.raises(BadRowError):
        list(raylance.dataset(uri, columns=[cut]).iter_batches(batch_size=4))


def test_all_frames_of_a_sample_get_one_part(made: Callable[..., Any], write_dataset: Callable[..., str]) -> None:
    uri, frames = made("keyframes every 12")
    crops = [
        raylance.images.FrameCrop("top", (20, 30), random=True, hflip=0.5),
        raylance.images.FrameCrop("side", 16, like="top"),
        raylance.images.FrameCrop("top", 8, name="middle"),
    ]
    data = raylance.dataset(
        write_dataset(rows_of()), columns=["action"], decode=[camera(uri), camera(uri, "side"), *crops], seed=5,
        samples=windows("top", "side"), remainder="ragged",
    )  # fmt: skip
    parts: dict[int, tuple[int, int, bool]] = {}
    for batch in data.iter_torch_batches(batch_size=16):
        assert batch["top"].shape[1:] == (4, 3, 20, 30)
        for place, row in enumerate(batch["action"].tolist()):
            wanted = frames[EPISODES - 1 - row // FRAMES][np.clip(row % FRAMES + OFFSETS, 0, FRAMES - 1)]
            top, side, middle = (batch[name][place].permute(0, 2, 3, 1).numpy() for name in ("top", "side", "middle"))
            found = [
                (y, x, flip) for y in range(13) for x in range(19) for flip in (False, True)
                if (wanted[:, y : y + 20, x : x + 30][:, :, :: -1 if flip else 1] == top).all()
            ]  # fmt: skip
            assert len(found) == 1, row
            parts[row] = found[0]
            assert (middle == wanted[:, 12:20, 20:28]).all()
            assert any(
                (wanted[:, y : y + 16, x : x + 16][:, :, :: -1 if found[0][2] else 1] == side).all()
                for y in range(17) for x in range(33)
                if abs(y / 16 - found[0][0] / 12) < 0.15 and abs(x / 32 - found[0][1] / 18) < 0.12
            )  # fmt: skip
    assert len(parts) == EPISODES * FRAMES
    assert len({part[:2] for part in parts.values()}) > 100
    assert 60 < sum(flip for *_, flip in parts.values()) < 140
    again = data.take([7])  # of epoch 0, as the batches
    y, x, flip = parts[7]
    wanted = frames[EPISODES - 1][np.clip(7 + OFFSETS, 0, FRAMES - 1)][:, y : y + 20, x : x + 30]
    assert (again["top"][0] == wanted[:, :, :: -1 if flip else 1]).all()
    for wrong, message in (
        (raylance.images.FrameCrop("top", 99), r"top.*99"),
        (raylance.images.FrameCrop("other", 8), "'other'"),
        (raylance.images.FrameCrop("top", 8, like="nothing"), "'nothing'"),
    ):
        with pytest.raises(ConfigError, match=message):
            raylance.dataset(write_dataset(rows_of()), decode=[camera(uri), wrong])


def test_clips_of_the_videos_of_rows(tmp_path: Path) -> None:
    """Each row has a video of its own, of another length; one is damaged, one is too short."""
    import lance

    videos = [encode(scene(seed, 20 + seed), gop=6) for seed in range(12)]
    frames = [whole(video) for video in videos]
    videos[5], videos[7] = b"no video", encode(scene(7, 9))
    uri = write_videos(str(tmp_path / "clips.lance"), videos, "2.2")
    assert lance.dataset(uri).count_rows() == 12
    seen: dict[int, list[int]] = {}
    lance.dataset(uri).add_columns({"number": "cast(replace(name, '.mp4', '') as bigint)"})
    settings: dict[str, Any] = {"on_bad_row": "mask", "max_bad_rows": None, "remainder": "ragged"}
    settings["columns"] = ["video_bytes", "number"]
    clip = raylance.Clip("video_bytes", 4, stride=3, start="random", crop=(24, 40), random_crop=True, hflip=0.5)
    data = raylance.dataset(uri, decode=clip, **settings)
    for _ in range(6):
        for batch in data.iter_torch_batches(batch_size=5):
            assert batch["video_bytes"].shape[1:] == (4, 3, 24, 40)
            for row, valid, pixels in zip(
                batch["number"].tolist(), batch["_valid"].tolist(), batch["video_bytes"], strict=True
            ):
                assert valid == (row not in (5, 7))
                if not valid:
                    assert not pixels.any()
                    continue
                made = pixels.permute(0, 2, 3, 1).numpy()
                seen.setdefault(row, []).append(
                    next(
                        first for first in range(len(frames[row]) - 9) for y in range(9) for x in range(9)
                        for step in (1, -1)
                        if (frames[row][first : first + 10 : 3, y : y + 24, x : x + 40][:, :, ::step] == made).all()
                    )
                )  # fmt: skip
    assert sorted(seen) == [row for row in range(12) if row not in (5, 7)]
    assert len({tuple(firsts) for firsts in seen.values()}) > 5
    plain = raylance.dataset(uri, decode=raylance.Clip("video_bytes", 10, size=(16, 24), short="repeat"), **settings)
    batch = plain.take([7, 3])
    wanted = whole(videos[7], (16, 24))
    assert (batch["video_bytes"][0] == wanted[[*range(9), 8]]).all()
    assert (batch["video_bytes"][1] == whole(videos[3], (16, 24))[6:16]).all()
    with pytest.raises(BadRowError, match="9 frames, 10 are asked for"):
        raylance.dataset(uri, decode=raylance.Clip("video_bytes", 10), columns=["video_bytes"]).take([7])
    with pytest.raises(ConfigError, match="Clip"):
        raylance.Clip("video_bytes", 2, size=8, crop=9)


def test_what_cannot_be_honoured(
    made: Callable[..., Any], write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, _ = made("keyframes every 12")
    rows = write_dataset(rows_of().append_column("text", pa.array(["a"] * EPISODES * FRAMES)))
    for settings, error, message in (
        ({"decode": camera(uri, "action")}, ConfigError, "'action'"),
        ({"decode": [camera(uri), camera(uri)]}, ConfigError, "'top'"),
        ({"decode": camera(uri, blob="name")}, DatasetError, "'name'"),
        ({"decode": raylance.Video("top", uri, video="text", frame="frame")}, DatasetError, "'text'.*string"),
        ({"decode": raylance.Video("top", uri, video="nothing", frame="frame")}, DatasetError, "'nothing'"),
    ):
        with pytest.raises(error, match=message):
            raylance.dataset(rows, **settings)
    wrong = write_dataset(rows_of().set_column(1, "file", pa.array(np.full(EPISODES * FRAMES, 7))))
    with pytest.raises(BadRowError, match=r"video 7.* 5 videos"):
        next(iter(raylance.dataset(wrong, decode=camera(uri, size=8)).iter_batches(batch_size=8)))
    imported = builtins.__import__

    def without_av(name: str, *arguments: Any) -> Any:
        if name == "av":
            raise ImportError("No module named 'av'")
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_av)
    with pytest.raises(ConfigError, match=r"raylance\[video\]"):
        raylance.dataset(rows, decode=camera(uri))
