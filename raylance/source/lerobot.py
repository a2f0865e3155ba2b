"""Datasets of robots in LeRobot's Lance layout: their metadata, and the frames of their cameras.

The layout (lerobot-lancedb 0.3, lerobot#4363) has three tables and a folder. `frames.lance` has a row for each frame,
sorted by `index`, with underscores for the dots in names of features. `videos.lance` has an MP4 in each row, of several
episodes one after another. `meta/` has LeRobot's own files of version 3, and `meta.lance` the same files in rows.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import io
import json
import math
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from lance.file import LanceFileSession

from raylance.arguments import check_integer
from raylance.columns import ROW_OFFSET
from raylance.environment.shared import Shared
from raylance.errors import ConfigError, DatasetError
from raylance.orders.permutation import Int64Array
from raylance.source.derived import Derived, LookedUp, Made
from raylance.source.encoded_frames import Levels
from raylance.source.episodes import time_rounding
from raylance.source.lance_errors import LANCE_ERRORS, Failure, failure_of, readable_text
from raylance.source.retrying import patiently
from raylance.source.storage_options import StorageOptions, current, open_dataset
from raylance.source.version import Source, Version, pin
from raylance.source.videos import FrameFinder, NamedFrames, Video, without

FRAMES, VIDEOS = "frames.lance", "videos.lance"
EPISODE, TIMESTAMP, TASK_NUMBER = "episode_index", "timestamp", "task_index"
VIDEO_COLUMNS = ["video_key", "chunk_index", "file_index", "file_size", "video_bytes"]
_META, _META_TABLE = "meta", "meta.lance"
_INFO = ("codebase_version", "fps", "features", "total_frames")
_FEATURE = ("dtype", "shape")
_EPISODES = (EPISODE, "dataset_from_index", "dataset_to_index")
_PLACE = ("chunk_index", "file_index", "from_timestamp")
_OPENING_S = 60.0
_LEVELS, _MOST_MM = 4096, 65535
_NO_FILE = np.iinfo(np.int64).max
_NAMED = 3  # examples in an error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What LeRobot's own files in `meta/` say of a dataset.

    Attributes:
        root: Folder or URI of the dataset.
        fps: Frames a second, of rows and videos.
        features: For each feature, its "dtype", "shape" and "names", as LeRobot writes them.
        tasks: Descriptions of the tasks, by number.
        stats: For each feature, arrays such as "mean", "std", "min" and "max", float64, for normalization: of all
            episodes, or of those that `load_metadata` was asked for.
        episodes: A row for each episode: `episode_index`, `dataset_from_index`, `dataset_to_index`, `tasks`, and for
            each camera where its video begins.
        total_frames: Number of rows.
    """

    root: str
    fps: float
    features: Mapping[str, Mapping[str, Any]]
    tasks: Sequence[str]
    stats: Mapping[str, Mapping[str, npt.NDArray[Any]]]
    episodes: pa.Table
    total_frames: int

    @property
    def cameras(self) -> list[str]:
        """Names of the features that are videos."""
        return [name for name, feature in self.features.items() if feature["dtype"] == "video"]

    def numbers(self, name: str, dtype: type | None = np.int64) -> npt.NDArray[Any]:
        """Returns a column of `episodes`; with None, in its own type.

        Raises:
            DatasetError: If it is missing, or an episode has no value.
        """
        if name not in self.episodes.column_names or self.episodes[name].null_count:
            raise DatasetError(
                f"the episodes in {self.root}/{_META} have no {name!r}, or not each of them has; nothing was started. "
                "Convert the dataset again."
            )
        return np.asarray(self.episodes[name].to_numpy(), dtype=dtype)


class _Opening(NamedTuple):
    """What was read of a dataset that is being opened, which several of its columns need."""

    metadata: Metadata
    finders: "dict[Camera, FramesByTime]"


_opening: "contextvars.ContextVar[_Opening | None]" = contextvars.ContextVar("opening", default=None)


@contextlib.contextmanager
def opening(metadata: Metadata) -> Iterator[None]:
    """Lets columns that are opened in the body of the `with` statement have these metadata, and read nothing twice."""
    token = _opening.set(_Opening(metadata, {}))
    try:
        yield
    finally:
        _opening.reset(token)


def load_metadata(
    root: str, storage_options: StorageOptions | None = None, episodes: Sequence[int] | None = None
) -> Metadata:
    """Reads and checks the metadata of a dataset, with the statistics of all or some episodes.

    Raises:
        ConfigError: If there is no such episode.
        DatasetError: If files are missing or damaged, or episodes do not lie one after another.
    """
    lost: list[str] = []
    metadata = find_metadata(root, storage_options, lost, episodes)
    if lost:
        raise incomplete(root, lost)
    return metadata


def find_metadata(
    root: str, storage_options: StorageOptions | None, lost: list[str], episodes: Sequence[int] | None = None
) -> Metadata:
    """Reads and checks the metadata as `load_metadata` does. Adds the names of what is missing to `lost`; then the
    metadata are not whole.
    """
    known = _opening.get()
    if known is not None and known.metadata.root == root:
        return known.metadata
    try:
        files = patiently(functools.partial(_read_files, root, storage_options))
        metadata = _parse(root, files, lost)
        if not lost:
            _check_bounds(metadata)
        if not lost and episodes is not None:
            return dataclasses.replace(metadata, stats=_stats_of(files, metadata, checked_episodes(metadata, episodes)))
        return metadata
    except (ConfigError, DatasetError):
        raise
    except (*LANCE_ERRORS, KeyError, TypeError, pa.ArrowException) as error:
        raise DatasetError(
            f"the metadata of {root!r} cannot be read ({readable_text(error)}); nothing was started. It must be a "
            f"dataset in LeRobot's Lance layout, with {FRAMES}, and {_META}/ or {_META_TABLE}."
        ) from (error if failure_of(error) is Failure.PASSING else None)


def incomplete(root: str, lost: Sequence[str]) -> DatasetError:
    """Returns the error for a dataset without these files and columns."""
    return DatasetError(
        f"{root!r} is not a whole dataset in LeRobot's Lance layout. It does not have {', '.join(lost)}; nothing was "
        "started. Check the path, or convert the dataset again: `python jobs/create_dataset.py lerobot`, in a checkout "
        f"of raylance, makes it of Parquet and MP4 files. Instead of {_META}/, the table {_META_TABLE} may have its "
        "files. docs/guide.md lists what the layout needs."
    )


def _read_files(root: str, storage_options: StorageOptions | None) -> dict[str, bytes]:
    """Returns the files of `meta/`, by path. A remote folder is read in one table if there is one, as LeRobot does."""
    session = LanceFileSession(root, storage_options=current(storage_options))
    ways = [functools.partial(_from_folder, session), functools.partial(_from_table, root, storage_options)]
    for read in reversed(ways) if "://" in root else ways:
        if found := read():
            return found
    return {}


def _from_folder(session: LanceFileSession) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for path in session.list(_META):
            name = path.partition(f"{_META}/")[2]
            if _is_needed(name):
                local = Path(folder, str(len(found)))
                session.download_file(f"{_META}/{name}", local)
                found[name] = local.read_bytes()
    return found


def _from_table(root: str, storage_options: StorageOptions | None) -> dict[str, bytes]:
    try:
        table = open_dataset(f"{root}/{_META_TABLE}", storage_options, _OPENING_S).to_table(columns=["path", "data"])
    except (ValueError, FileNotFoundError):  # there is none
        return {}
    return {row["path"]: row["data"] for row in table.to_pylist() if _is_needed(row["path"])}


def _is_needed(path: str) -> bool:
    is_episodes = path.startswith("episodes/") and path.endswith(".parquet") and not Path(path).name.startswith(".")
    return path in ("info.json", "stats.json", "tasks.parquet") or is_episodes


def _lost_columns(name: str, needed: Iterable[str], there: Sequence[str]) -> list[str]:
    return [f"the column {each!r} of {name}" for each in dict.fromkeys(needed) if each not in there]


def lost_places(metadata: Metadata, features: Iterable[str]) -> list[str]:
    """Returns which columns are missing that say where the frames of these features lie in videos."""
    needed = [f"videos/{name}/{key}" for name in features for key in _PLACE if name in metadata.cameras]
    return _lost_columns(f"{_META}/episodes/*/*.parquet", needed, metadata.episodes.column_names)


def needed_columns(metadata: Metadata, features: Iterable[str]) -> list[str]:
    """Returns the columns of the table of frames of which features are made."""
    needed = [EPISODE]
    for name in features:
        if name not in metadata.features:  # the description of the task
            needed.append(TASK_NUMBER)
        else:
            needed.append(TIMESTAMP if name in metadata.cameras else stored_name(name))
    return needed


def pin_table(
    root: str, name: str, version: Version | None, storage_options: StorageOptions | None, needed: Iterable[str],
    lost: list[str],
) -> tuple[Source, lance.LanceDataset] | None:  # fmt: skip
    """Pins and opens a table of a dataset. Adds missing columns to `lost`; if there is no table, adds its name, and
    returns None.

    Raises:
        DatasetError: If it cannot be opened, or does not have this version.
    """
    try:
        source = pin(f"{root}/{name}", version, storage_options)
    except DatasetError as error:
        if failure_of(error) is not Failure.MISSING:
            raise
        lost.append(name)
        return None
    opened = source.open()
    lost += _lost_columns(name, needed, opened.schema.names)
    return source, opened


def _parse(root: str, files: Mapping[str, bytes], lost: list[str]) -> Metadata:
    """Returns the metadata; adds the names of what is missing to `lost`."""
    lost += [f"{_META}/{name}" for name in ("info.json", "tasks.parquet") if name not in files]
    info = json.loads(files.get("info.json", b"{}"))
    lost += [f"{key!r} in {_META}/info.json" for key in _INFO if key not in info and "info.json" in files]
    if not str(version := info.get("codebase_version", "v3.0")).startswith("v3."):
        raise ValueError(f"codebase_version is {version!r}, and only v3 has this layout")
    if not (fps := float(info.get("fps", 1))) > 0:
        raise ValueError(f"fps is {fps:g}")
    features = dict[str, Mapping[str, Any]](info.get("features", {}))
    for name, each in features.items():
        lost += [f"{key!r} of {name!r} in {_META}/info.json" for key in _FEATURE if key not in each]
    paths = sorted(path for path in files if path.startswith("episodes/"))
    tables = [_episodes(files[path]) for path in paths]
    episodes = pa.concat_tables(tables, promote_options="permissive") if tables else pa.table({})
    lost += _lost_columns(f"{_META}/episodes/*/*.parquet", _EPISODES, episodes.column_names)
    tasks = list[str]()
    if "tasks.parquet" in files:
        table = pq.read_table(io.BytesIO(files["tasks.parquet"])).sort_by("task_index")
        tasks = table[next(name for name in table.column_names if name != "task_index")].to_pylist()  # or pandas' index
    stats = json.loads(files.get("stats.json", b"{}"))
    return Metadata(
        root=root,
        fps=fps,
        features={name: each for name, each in features.items() if each.keys() >= {*_FEATURE}},
        tasks=tasks,
        stats={name: {kind: np.array(value) for kind, value in each.items()} for name, each in stats.items()},
        episodes=episodes.sort_by(EPISODE) if EPISODE in episodes.column_names else episodes,
        total_frames=int(info.get("total_frames", 0)),
    )


def _episodes(file: bytes) -> pa.Table:
    found = pq.ParquetFile(io.BytesIO(file))
    return found.read(columns=[name for name in found.schema_arrow.names if not name.startswith("stats/")])


def checked_episodes(metadata: Metadata, episodes: Sequence[int]) -> list[int]:
    """Returns numbers of episodes, ascending; raises ConfigError if there is no such episode."""
    if not isinstance(episodes, Iterable):
        raise ConfigError(f"episodes={episodes!r}: give a list of numbers.")
    chosen = sorted({check_integer("episodes", each, 0) for each in episodes})
    if not chosen or chosen[-1] >= len(metadata.episodes):
        raise ConfigError(f"episodes={episodes!r}: give numbers from 0 to {len(metadata.episodes) - 1}, at least one.")
    return chosen


def _stats_of(
    files: Mapping[str, bytes], metadata: Metadata, episodes: Sequence[int]
) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Returns the statistics of some episodes, of the features for which each of them has some."""
    tables = []
    for path in (path for path in files if path.startswith("episodes/")):
        file = pq.ParquetFile(io.BytesIO(files[path]))
        names = [name for name in file.schema_arrow.names if name.startswith("stats/") or name == EPISODE]
        table = file.read(columns=names)
        tables.append(table.filter(pc.is_in(table[EPISODE], value_set=pa.array(episodes, table[EPISODE].type))))
    table, found = pa.concat_tables(tables, promote_options="permissive"), dict[str, dict[str, npt.NDArray[Any]]]()
    for name in metadata.features:
        each = {kind: _values_of(table, f"stats/{name}/{kind}") for kind in ("min", "max", "mean", "std", "count")}
        low, high, mean, std, count = each.values()
        if low is None or high is None or mean is None or std is None or count is None:
            continue
        weights = (count / count.sum()).reshape(-1, *[1] * (mean.ndim - 1))
        middle = (weights * mean).sum(axis=0)
        spread = np.sqrt((weights * (std**2 + (mean - middle) ** 2)).sum(axis=0))
        found[name] = {
            "min": low.min(axis=0), "max": high.max(axis=0), "mean": middle, "std": spread, "count": count.sum(axis=0)
        }  # fmt: skip
    if not found:
        raise DatasetError(
            f"the episodes in {metadata.root}/{_META} have no statistics (columns stats/…/mean, std, min, max and "
            "count), so those of some episodes are not known; nothing was started. Leave episodes= out for the "
            "statistics of all, or convert the dataset again."
        )
    return found


def _values_of(table: pa.Table, name: str) -> npt.NDArray[np.float64] | None:
    """Returns a column of arrays of one shape; None if there is none, or a row has no value."""
    if name not in table.column_names or table[name].null_count:
        return None
    values: pa.Array = table[name].combine_chunks()
    shape = np.shape(values[0].as_py())
    for _ in shape:
        values = values.flatten()
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.float64).reshape(len(table), *shape)


def _check_bounds(metadata: Metadata) -> None:
    """Raises DatasetError if episodes are not numbered, or do not have all rows, one episode after another."""
    numbers, where = metadata.numbers(EPISODE), f"the episodes in {metadata.root}/{_META}"
    begins, ends = metadata.numbers("dataset_from_index"), metadata.numbers("dataset_to_index")
    if (wrong := np.flatnonzero(numbers != np.arange(len(numbers)))).size:
        raise DatasetError(f"{where} are not numbered from 0: there is no episode {wrong[0]}. Nothing was started.")
    expected = np.r_[0, ends[:-1]]
    if (wrong := np.flatnonzero((begins != expected) | (ends < begins))).size:
        at = int(wrong[0])
        raise DatasetError(
            f"{where} do not lie one after another: episode {at} has rows {begins[at]} to {ends[at]}, and the one "
            f"before ends at {expected[at]}. Nothing was started. Convert the dataset again."
        )
    if (last := int(ends[-1]) if len(ends) else 0) != metadata.total_frames:
        raise DatasetError(
            f"{where} have {last:,} rows, and info.json says {metadata.total_frames:,} (total_frames). Nothing was "
            "started. Convert the dataset again."
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Camera(Video):
    """A camera of a dataset in LeRobot's layout: which frame a row has follows from its episode and its timestamp.

    Attributes:
        root: Folder or URI of the dataset.
        tolerance_s: By how many seconds a timestamp may lie away from its frame.
        identity: Hash of where episodes lie in videos; "" for any.
    """

    video: str = EPISODE
    frame: str = TIMESTAMP
    _: dataclasses.KW_ONLY
    root: str = ""
    tolerance_s: float = 1e-4
    identity: str = ""

    def check(self, schema: pa.Schema, uri: str) -> None:
        """See `Derived.check`."""
        Derived.check(self, schema, uri)

    def find_frames(self, storage_options: StorageOptions | None) -> Shared[FrameFinder]:
        """See `Video.find_frames`."""
        finder = find_episodes(self, storage_options)
        if self.identity not in ("", finder.identity):
            raise DatasetError(
                f"{self.root}/{_META} or {self.root}/{VIDEOS} has changed: the episodes of {self.column!r} lie in "
                f"other frames than before (hash {finder.identity}, was {self.identity}). Nothing was started."
            )
        again = functools.partial(find_episodes, self, storage_options)
        return Shared(f"episodes of {self.column}", finder, finder.nbytes, again)


@dataclasses.dataclass(frozen=True, slots=True)
class DepthCamera(Camera):
    """A camera of depth, whose videos have one channel of 12 bits: float32 (n, 1, H, W), in `unit`.

    The values are those of LeRobot 0.6.1 (`dequantize_depth`, after BEHAVIOR-1K), which its videos name.

    Attributes:
        depth_min: Depth in metres of the number 0.
        depth_max: Depth in metres of the number 4095.
        shift: Metres that were added before the logarithm.
        use_log: Whether numbers are even steps of the logarithm; else they are even steps of depth.
        unit: "m" for metres, "mm" for whole millimetres.
    """

    channels: ClassVar[int] = 1
    depth_min: float = 0.01
    depth_max: float = 10.0
    shift: float = 3.5
    use_log: bool = True
    unit: Literal["m", "mm"] = "mm"

    def __post_init__(self) -> None:
        Video.__post_init__(self)
        least = self.depth_min + (self.shift if self.use_log else 0)
        if self.depth_max <= self.depth_min or (self.use_log and least <= 0):
            raise DatasetError(
                f"the numbers of {self.column!r} cannot be depths from {self.depth_min} to {self.depth_max} m, with "
                f"shift={self.shift} and use_log={self.use_log}, as {self.root}/{_META}/info.json says; nothing was "
                "started. Repair it, or leave the feature out of columns=."
            )

    @property
    def levels(self) -> Levels:
        """See `Video.levels`."""
        import torch  # its exponential, as LeRobot uses it: that of NumPy differs in the last bit

        low, high = self.depth_min, self.depth_max
        if self.use_log:
            low, high = math.log(low + self.shift), math.log(high + self.shift)
        values = torch.arange(_LEVELS, dtype=torch.float32).mul_((high - low) / (_LEVELS - 1)).add_(low)
        if self.use_log:
            values.exp_().sub_(self.shift)
        values.clamp_(self.depth_min, self.depth_max)
        if self.unit == "mm":
            values.mul_(1000.0).round_().clamp_(0, _MOST_MM)
        return np.asarray(values.numpy(), dtype=np.float32)


def is_depth(feature: Mapping[str, Any]) -> bool:
    """Returns whether a feature is a camera of depth."""
    infos = [feature.get("info") or {}, feature.get("video_info") or {}]
    return any(info.get(key) for info in infos for key in ("is_depth_map", "video.is_depth_map"))


def depth_settings(feature: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a `DepthCamera` that its feature names."""
    info = feature.get("info") or feature.get("video_info") or {}
    given = {name: info.get(f"video.{name}") for name in ("depth_min", "depth_max", "shift", "use_log")}
    return {name: value for name, value in given.items() if value is not None}


@dataclasses.dataclass(frozen=True, slots=True)
class FramesByTime(FrameFinder):
    """Finds frames by episode and timestamp.

    Attributes:
        rate: Frames a second.
        tolerance_s: See `Camera`.
        videos: Row of the video that has each episode, int64; -1 if there is none.
        begins_s: When each episode begins in its video, float64.
        rounding_s: By how many seconds these may be rounded.
        ends: The row offset after each episode, int64.
        files: Names of videos that are missing, by episode.
    """

    rate: float
    tolerance_s: float
    videos: Int64Array
    begins_s: npt.NDArray[np.float64]
    rounding_s: float
    ends: Int64Array
    files: Mapping[int, str]
    first_video: int

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.videos.nbytes + self.begins_s.nbytes + self.ends.nbytes

    @property
    def identity(self) -> str:
        """Hash of the arrays."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.videos, self.begins_s, self.ends):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def find(self, table: pa.Table) -> NamedFrames:
        """See `FrameFinder.find`."""
        given, times = table[EPISODE].to_numpy(), table[TIMESTAMP].to_numpy()
        rounding_s = time_rounding(times) + self.rounding_s
        times = np.asarray(times, dtype=np.float64)
        offsets, reasons = table[ROW_OFFSET].to_numpy(), dict[int, str]()
        last = len(self.ends) - 1
        episodes = np.asarray(np.clip(np.nan_to_num(given, nan=-1), 0, last), dtype=np.int64)
        places = np.nan_to_num(self.begins_s[episodes] + times, nan=-1.0, posinf=-1.0, neginf=-1.0) * self.rate
        frames = np.rint(places).astype(np.int64)
        begins = np.where(episodes > 0, self.ends[episodes - 1], 0)
        is_inside = (begins <= offsets) & (offsets < self.ends[episodes])
        away_s = np.abs(places - frames) / self.rate
        for row in np.flatnonzero(episodes != given).tolist():
            reasons[row] = f"its episode is {given[row]}, and {_META}/ has episodes 0 to {last}"
        for row in np.flatnonzero(~is_inside).tolist():
            rows = f"rows {begins[row]} to {self.ends[episodes[row]]}"
            reasons.setdefault(row, f"it says episode {given[row]}, which has {rows} by {_META}/")
        for row in np.flatnonzero(self.videos[episodes] < 0).tolist():
            reasons.setdefault(row, f"{VIDEOS} does not have {self.files[int(episodes[row])]} of episode {given[row]}")
        for row in np.flatnonzero(rounding_s >= 0.5 / self.rate).tolist():
            why = f"its timestamp {times[row]:g} s has a type that rounds by {rounding_s[row]:g} s"
            reasons.setdefault(row, f"{why}, and frames are {1 / self.rate:g} s apart")
        for row in np.flatnonzero(~(away_s < self.tolerance_s + rounding_s)).tolist():
            why = f"its timestamp {times[row]:g} s is {away_s[row]:g} s away from a frame at {self.rate:g} frames/s"
            reasons.setdefault(row, f"{why}, tolerance_s allows {self.tolerance_s:g} s")
        return NamedFrames(without(self.videos[episodes], reasons), frames, reasons)


def find_episodes(camera: Camera, storage_options: StorageOptions | None) -> FramesByTime:
    """Reads where the episodes of a camera lie in its videos.

    Raises:
        DatasetError: If metadata or videos cannot be read.
    """
    known, key = _opening.get(), dataclasses.replace(camera, identity="")
    if known is not None and key in known.finders:
        return known.finders[key]
    metadata, name = load_metadata(camera.root, storage_options), f"videos/{camera.column}"
    source = pin(camera.videos, camera.version, storage_options)
    keys, rows = patiently(functools.partial(_files_of, source, camera.column))
    chunks, files = metadata.numbers(f"{name}/chunk_index"), metadata.numbers(f"{name}/file_index")
    wanted = _file_keys(chunks, files)
    begins = metadata.numbers(f"{name}/from_timestamp", None)
    keys, rows = np.append(keys, _NO_FILE), np.append(rows, -1)
    at = np.searchsorted(keys[:-1], wanted)
    is_there = keys[at] == wanted
    found = FramesByTime(
        rate=metadata.fps,
        tolerance_s=camera.tolerance_s,
        videos=np.where(is_there, rows[at], -1),
        begins_s=begins.astype(np.float64),
        rounding_s=float(time_rounding(begins).max(initial=0.0)),
        ends=metadata.numbers("dataset_to_index"),
        first_video=max(0, int(rows[0])),
        files={
            episode: f"{camera.column}, chunk {chunks[episode]}, file {files[episode]}"
            for episode in np.flatnonzero(~is_there).tolist()
        },
    )
    if known is not None:
        known.finders[key] = found
    return found


def _file_keys(chunks: Int64Array, files: Int64Array) -> Int64Array:
    """Returns one number for each video file, by its numbers of chunk and file."""
    return (chunks << 32) + files


def _files_of(source: Source, key: str) -> tuple[Int64Array, Int64Array]:
    """Returns the keys of a camera's videos that are not empty, ascending, and the row of each."""
    table = source.open_once().to_table(columns=VIDEO_COLUMNS[:-1])
    rows = np.flatnonzero(pc.and_(pc.equal(table["video_key"], key), pc.greater(table["file_size"], 0)).to_numpy())
    keys = _file_keys(*(table[name].to_numpy().astype(np.int64)[rows] for name in ("chunk_index", "file_index")))
    order = np.argsort(keys, kind="stable")
    return keys[order], rows[order]


@dataclasses.dataclass(frozen=True, slots=True)
class Task(Made):
    """The description of each row's task.

    Attributes:
        column: Name of the column in batches.
        root: Folder or URI of the dataset.
    """

    column: str
    root: str

    @property
    def needs(self) -> tuple[str, ...]:
        """See `Derived.needs`."""
        return (TASK_NUMBER,)

    def open(self, storage_options: StorageOptions | None) -> LookedUp:
        """See `Made.open`."""
        values = _texts(self.root, storage_options)
        again = functools.partial(_texts, self.root, storage_options)
        return LookedUp(self.column, TASK_NUMBER, Shared(f"tasks of {self.root}", values, values.nbytes, again))


def _texts(root: str, storage_options: StorageOptions | None) -> pa.Array:
    return pa.array(load_metadata(root, storage_options).tasks, pa.string())


def check_episodes(camera: Camera, episodes: Iterable[int], storage_options: StorageOptions | None) -> str:
    """Checks that the videos of these episodes are there and not empty, and that no frame belongs to two episodes;
    returns the identity for `Camera`.

    Raises:
        DatasetError: If a video is missing, or episodes overlap.
    """
    found, chosen = find_episodes(camera, storage_options), {*episodes}
    if lost := [f"{found.files[each]} (episode {each})" for each in sorted(chosen) if each in found.files]:
        raise DatasetError(
            f"{camera.videos!r} does not have {len(lost):,} videos, or they are empty: {'; '.join(lost[:_NAMED])}. "
            "Nothing was started. Leave these episodes out, episodes=[…]; or convert the dataset again."
        )
    if shared := [pair for pair in _overlaps(found) if chosen & {*pair}]:
        named = [f"episode {two} begins at {found.begins_s[two]:g} s, before episode {one} ends" for one, two in shared]
        more = f", and {len(shared) - _NAMED:,} more" if len(shared) > _NAMED else ""
        raise DatasetError(
            f"by videos/{camera.column}/from_timestamp in {camera.root}/{_META}, and {found.rate:g} frames a second, "
            f"{'; '.join(named[:_NAMED])}, in the same video{more}: rows would have frames of another episode. Nothing "
            "was started. Leave these episodes out, episodes=[…]; or convert the dataset again."
        )
    return found.identity


def _overlaps(found: FramesByTime) -> list[tuple[int, int]]:
    """Returns pairs of episodes that have frames of their video in common, at least one pair for each such episode."""
    lengths, starts = np.diff(found.ends, prepend=0), np.rint(found.begins_s * found.rate)
    used = np.flatnonzero((lengths > 0) & np.isfinite(starts))
    episodes = used[np.lexsort((starts[used], found.videos[used]))]
    starts, ends = starts[episodes], starts[episodes] + lengths[episodes]
    reach = ends.max(initial=0) - starts.min(initial=0)
    later = found.videos[episodes] * reach  # as if videos followed one another
    furthest = np.maximum.accumulate(ends + later)
    holder = np.maximum.accumulate(np.where(ends + later == furthest, np.arange(len(episodes)), 0))
    second = np.flatnonzero(starts[1:] + later[1:] < furthest[:-1]) + 1
    return list(zip(episodes[holder[second - 1]].tolist(), episodes[second].tolist(), strict=True))


def check_rows(source: Source, opened: lance.LanceDataset, metadata: Metadata) -> None:
    """Raises DatasetError if the table of frames has other rows than the metadata say."""
    if (rows := opened.count_rows()) != metadata.total_frames:
        raise DatasetError(
            f"{source.uri!r}, version {source.version}, has {rows:,} rows, and info.json says "
            f"{metadata.total_frames:,} (total_frames). Nothing was started. Convert the dataset again."
        )


def stored_name(feature: str) -> str:
    """Returns the name of a feature's column in the table of frames."""
    return feature.replace(".", "_")


def refuse_alike(features: Iterable[str]) -> None:
    """Raises ConfigError if two features have one stored name."""
    names: dict[str, str] = {}
    for feature in features:
        if (other := names.setdefault(stored_name(feature), feature)) != feature:
            raise ConfigError(f"the features {other!r} and {feature!r} are both stored as {stored_name(feature)!r}.")
