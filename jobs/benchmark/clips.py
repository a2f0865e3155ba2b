"""Clips: samples of eight frames of videos, or of eight pictures, against decoding each by itself, and against decoding
each frame once.
"""

import io
import itertools
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import lance
import numpy as np
import pyarrow as pa
import torch
from av.video.reformatter import VideoReformatter
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import raylance

from .figures import Figure
from .measuring import in_turns, rest
from .setting import Job, Setting, start_ray

VIDEOS, FRAMES, BATCH = 6, 600, 32
OFFSETS = np.arange(-7, 1)
KINDS = [(96, 1, 2), (96, 1, 30), (96, 1, 250), (224, 2, 30)]  # side, cameras, frames from one keyframe to the next
_ALONE = 400  # samples that each pass decodes by themselves
_EPOCHS = 3  # a pass by raylance times all but its first epoch, a part of which was loaded before the pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Clips:
    """One kind of clips: rows that name frames, and a dataset of videos for each camera."""

    rows: str
    videos: tuple[str, ...]
    seed: int
    workers: int

    def open(self) -> raylance.Dataset:
        """The dataset as raylance opens it."""
        names = [f"camera_{number}" for number in range(len(self.videos))]
        cameras = [
            raylance.Video(name, uri, video="episode", frame="frame")
            for name, uri in zip(names, self.videos, strict=True)
        ]
        return raylance.dataset(
            self.rows, columns=["episode", "frame", *cameras], remainder="ragged", seed=self.seed,
            samples=raylance.Windows(episode="episode", offsets=dict.fromkeys(names, OFFSETS)),
        )  # fmt: skip

    def alone(self) -> Dataset:
        """Decodes each sample by itself."""
        return EachAlone(self._files())

    def whole(self) -> Callable[[int], list[np.ndarray]]:
        """Returns what decodes all frames of an episode, (frames, height, width times 3) for each camera."""
        files = self._files()
        return lambda video: [_decode_whole(camera[video]) for camera in files]

    def _files(self) -> list[list[bytes]]:
        """The videos of each camera, in memory."""
        return [
            [bytes(video) for _, video in lance.dataset(uri).read_blobs("video_bytes", indices=range(VIDEOS))]
            for uri in self.videos
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures(Clips):
    """The same frames as JPEG files in the rows; `videos` are the names of their columns."""

    side: int

    def open(self) -> raylance.Dataset:
        """The dataset as raylance opens it."""
        pictures = [raylance.Image(name, size=self.side) for name in self.videos]
        return raylance.dataset(
            self.rows, columns=["frame", *pictures], remainder="ragged",
            samples=raylance.Windows(episode="episode", offsets=dict.fromkeys(self.videos, OFFSETS)), seed=self.seed,
        )  # fmt: skip

    def alone(self) -> Dataset:
        """Decodes each sample by itself."""
        return EachPictureAlone(self)

    def whole(self) -> Callable[[int], list[np.ndarray]]:
        """Returns what decodes all pictures of an episode."""
        decode, files = self.decoder(), self.encoded()
        return lambda video: [decode(camera[video * FRAMES : (video + 1) * FRAMES]) for camera in files]

    def encoded(self) -> list[list[bytes]]:
        """The files of each camera, in memory."""
        table = lance.dataset(self.rows).to_table(columns=list(self.videos))
        return [table[name].to_pylist() for name in self.videos]

    def decoder(self) -> Callable[[list[bytes]], np.ndarray]:
        """Returns what decodes files as raylance does, in this thread."""
        setting: Any = raylance.Image(self.videos[0], size=self.side)
        opened, none = setting.open(), np.zeros(setting.draws)

        def decode(files: list[bytes]) -> np.ndarray:
            out = np.empty((len(files), self.side, self.side, 3), np.uint8)
            for file, into in zip(files, out, strict=True):
                opened.decode_into(memoryview(file), none, into)
            return out.reshape(len(files), self.side, -1)

        return decode


def make_video(seed: int, side: int, keyframe_distance: int) -> bytes:
    """A noisy scene that moves, as H.264."""
    out, rng = io.BytesIO(), np.random.default_rng(seed)
    back = np.kron(rng.integers(0, 255, (side // 8, side // 8, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    options = {"g": str(keyframe_distance), "keyint_min": str(keyframe_distance), "sc_threshold": "0"}
    with av.open(out, "w", format="mp4") as box:
        stream = box.add_stream("libx264", rate=10, options=options)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for at in range(FRAMES):
            picture = np.roll(back, (at % side, 2 * at % side), (0, 1))
            left = 3 * at % (side - 24)
            picture[10:30, left : left + 20] = at % 255, 20, 200
            box.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        box.mux(stream.encode())
    return out.getvalue()


def make_clips(setting: Setting, side: int, cameras: int, distance: int) -> Clips:
    """The datasets of one kind, made where they are not there."""
    rows, videos = setting.path("clips-rows"), list[Path]()
    if not rows.exists():
        at = np.arange(VIDEOS * FRAMES)
        _write(rows, pa.table({"episode": at // FRAMES, "frame": at % FRAMES}))
    for camera in range(cameras):
        videos.append(setting.path(f"clips-{side}-{distance}-{camera}"))
        if not videos[-1].exists():
            print(f"making {videos[-1]}", file=sys.stderr)
            made = [make_video(setting.seed + 100 * camera + at, side, distance) for at in range(VIDEOS)]
            field = pa.field("video_bytes", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
            _write(videos[-1], pa.table([made], schema=pa.schema([field])))
    return Clips(rows=str(rows), videos=tuple(map(str, videos)), seed=setting.seed, workers=setting.workers)


def make_pictures(setting: Setting, side: int, cameras: int) -> Pictures:
    """The dataset of pictures, made where it is not there."""
    path, names = setting.path(f"clips-pictures-{side}-{cameras}"), tuple(f"camera_{at}" for at in range(cameras))
    if not path.exists():
        print(f"making {path}", file=sys.stderr)
        at = np.arange(VIDEOS * FRAMES)
        columns: dict[str, Any] = {"episode": at // FRAMES, "frame": at % FRAMES}
        for camera, name in enumerate(names):
            columns[name] = []
            for video in range(VIDEOS):
                file = make_video(setting.seed + 100 * camera + video, side, 30)
                columns[name] += map(_as_jpeg, _decode_whole(file))
        _write(path, pa.table(columns))
    return Pictures(rows=str(path), videos=names, seed=setting.seed, workers=setting.workers, side=side)


def _as_jpeg(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels.reshape(len(pixels), -1, 3)).save(out, "JPEG", quality=90)
    return out.getvalue()


def _write(path: Path, table: pa.Table) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        lance.write_dataset(table, str(part), schema=table.schema)
        part.rename(path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def pixels_of(frame: av.VideoFrame, reformatter: VideoReformatter) -> np.ndarray:
    """uint8 (H, W, 3). A reformatter that is kept costs a tenth of a new one for each frame."""
    plane: Any = reformatter.reformat(frame, format="rgb24", threads=1).planes[0]
    return np.frombuffer(plane, np.uint8).reshape(frame.height, plane.line_size)[:, : 3 * frame.width]


class EachAlone(Dataset):
    """Decodes each sample from the keyframe before its first frame, with the decoder of its video kept."""

    def __init__(self, files: list[list[bytes]]) -> None:
        self._files, self._open = files, dict[tuple[int, int], tuple[Any, VideoReformatter]]()

    def __len__(self) -> int:
        return VIDEOS * FRAMES

    def __getitem__(self, sample: int) -> list[torch.Tensor]:
        video, frames = sample // FRAMES, np.clip(sample % FRAMES + OFFSETS, 0, FRAMES - 1)
        return [self._decode(camera, video, frames) for camera in range(len(self._files))]

    def _decode(self, camera: int, video: int, frames: np.ndarray) -> torch.Tensor:
        if (camera, video) not in self._open:
            box = av.open(io.BytesIO(self._files[camera][video]))
            box.streams.video[0].thread_type = "NONE"
            self._open[camera, video] = box, VideoReformatter()
        box, reformatter = self._open[camera, video]
        stream = box.streams.video[0]
        step, wanted, found = int(1 / (stream.average_rate * stream.time_base)), set(frames.tolist()), {}
        box.seek(int(frames[0]) * step, stream=stream, backward=True)
        for frame in box.decode(stream):
            number = (frame.pts - (stream.start_time or 0)) // step
            if number in wanted:
                found[number] = pixels_of(frame, reformatter)
            if number >= frames[-1]:
                break
        return torch.from_numpy(np.stack([found[number] for number in frames.tolist()])).unflatten(-1, (-1, 3))


class EachPictureAlone(Dataset):
    """Decodes the pictures of each sample."""

    def __init__(self, pictures: Pictures) -> None:
        self._files, self._decode, self._side = pictures.encoded(), pictures.decoder(), pictures.side

    def __len__(self) -> int:
        return VIDEOS * FRAMES

    def __getitem__(self, sample: int) -> list[torch.Tensor]:
        rows = sample // FRAMES * FRAMES + np.clip(sample % FRAMES + OFFSETS, 0, FRAMES - 1)
        taken = (self._decode([camera[row] for row in rows.tolist()]) for camera in self._files)
        return [torch.from_numpy(frames).unflatten(-1, (-1, 3)) for frames in taken]


def pass_alone(clips: Clips) -> Callable[[int], dict[str, float]]:
    """A pass of `EachAlone` in the workers of a DataLoader, as readers of random access do it."""
    data: Any = clips.alone()

    def one(number: int) -> dict[str, float]:
        some = np.random.default_rng(number).permutation(len(data))[:_ALONE].tolist()
        loader = iter(DataLoader(data, BATCH, sampler=some, num_workers=clips.workers, multiprocessing_context="fork"))
        next(loader)  # processes have started
        begin, taken = time.perf_counter(), 0
        for batch in loader:
            taken += len(batch[0])
            _ = [each.reshape(-1)[::4096].sum() for each in batch]
        return {"samples_per_s": taken / (time.perf_counter() - begin)}

    return one


def pass_once(clips: Clips) -> Callable[[int], dict[str, float]]:
    """A pass in this thread that decodes each frame once, and copies samples from the decoded frames."""
    decode = clips.whole()

    def one(number: int) -> dict[str, float]:
        order, begin = np.random.default_rng(number).permutation(FRAMES), time.perf_counter()
        for video in range(VIDEOS):
            held = decode(video)
            taken = np.empty((len(OFFSETS), *held[0].shape[1:]), np.uint8)
            for at, frames in itertools.product(order, held):
                np.take(frames, np.clip(at + OFFSETS, 0, FRAMES - 1), axis=0, out=taken, mode="clip")
        return {"samples_per_s": VIDEOS * FRAMES / (time.perf_counter() - begin)}

    return one


def _decode_whole(video: bytes) -> np.ndarray:
    with av.open(io.BytesIO(video)) as box:
        stream = box.streams.video[0]
        stream.thread_type = "NONE"
        held, reformatter = np.empty((FRAMES, stream.height, 3 * stream.width), np.uint8), VideoReformatter()
        for at, frame in enumerate(box.decode(stream)):
            held[at] = pixels_of(frame, reformatter)
    return held


def pass_raylance(clips: Clips, runtime: str) -> Callable[[int], dict[str, float]]:
    """Epochs by raylance, rank 0 of 1, one after another as in training."""
    if runtime == "ray":
        start_ray(Job(uri="", columns=("", ""), rows=0, batch_size=BATCH, workers=clips.workers, seed=clips.seed))
    data = clips.open()
    loader: Any = data.loader(runtime=runtime, num_decoders=clips.workers)

    def one(number: int) -> dict[str, float]:
        taken, begin = 0, 0.0
        for epoch in range(_EPOCHS):
            loader.set_epoch(number * _EPOCHS + epoch)
            for batch in loader.iter_torch_batches(global_batch_size=BATCH):
                taken += len(batch["frame"])
                _ = [batch[f"camera_{camera}"][:, ::4, 0, ::32, ::32].sum() for camera in range(len(clips.videos))]
            begin = begin or time.perf_counter()
        if taken != _EPOCHS * VIDEOS * FRAMES:
            raise SystemExit(f"{taken} of {_EPOCHS * VIDEOS * FRAMES} samples came")
        return {"samples_per_s": (_EPOCHS - 1) * VIDEOS * FRAMES / (time.perf_counter() - begin)}

    return one


WAYS: dict[str, Callable[[Clips], Callable[[int], dict[str, float]]]] = {
    "alone": pass_alone,
    "once": pass_once,
    "threads": lambda clips: pass_raylance(clips, "threads"),
    "ray": lambda clips: pass_raylance(clips, "ray"),
}


def measure(setting: Setting) -> dict[str, Any]:
    """Each way makes one pass a round, over each kind."""
    found: dict[str, Any] = {}
    kinds: dict[str, Clips] = {
        f"{cameras} × {side}², keyframes every {distance}": make_clips(setting, side, cameras, distance)
        for side, cameras, distance in KINDS
    }
    kinds["pictures, 2 × 224²"] = make_pictures(setting, 224, 2)
    for name, clips in kinds.items():
        passes = {way: make(clips) for way, make in WAYS.items()}
        found[name] = {way: [] for way in WAYS}
        for number, way in in_turns(passes, setting.rounds):
            rest()
            found[name][way].append(passes[way](number))
    return found


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """Samples a second, and what they are of those of each frame decoded once, and of each sample by itself."""
    for name, ways in found.items():
        rates = {way: [one["samples_per_s"] for one in passes] for way, passes in ways.items()}
        for way, values in rates.items():
            yield Figure(f"clips of {name}: {way}", values, "samples/s")
        middle = {way: statistics.median(values) for way, values in rates.items()}
        for way, least in (("threads", 0.7), ("ray", 0.5)):
            once = [rate / middle["once"] for rate in rates[way]]
            yield Figure(f"… {way} / each frame once, one thread", once, at_least=least)
            alone = [rate / middle["alone"] for rate in rates[way]]
            yield Figure(f"… {way} / each sample alone", alone, at_least=8.0 if " 30" in name else None)
