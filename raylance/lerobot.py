"""Opens datasets of robots that are stored in LeRobot's Lance layout."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from raylance.api.dataset import Dataset
from raylance.api.opening import dataset
from raylance.arguments import check_word, is_positive, listed
from raylance.decode.decoder import Decoder
from raylance.decode.depth_images import DepthImage, Unit
from raylance.decode.frames import FrameCrop
from raylance.decode.images import Image
from raylance.errors import ConfigError
from raylance.samples.windows import Ends, Windows
from raylance.source.derived import Derived, Renamed
from raylance.source.filters import check_filter
from raylance.source.lerobot import (
    EPISODE,
    FRAMES,
    VIDEO_COLUMNS,
    VIDEOS,
    Camera,
    DepthCamera,
    Task,
    check_episodes,
    check_rows,
    checked_episodes,
    depth_settings,
    find_metadata,
    incomplete,
    is_depth,
    lost_places,
    needed_columns,
    opening,
    pin_table,
    refuse_alike,
    stored_name,
)
from raylance.source.lerobot import Metadata as Metadata
from raylance.source.lerobot import load_metadata as _load_metadata
from raylance.source.storage_options import StorageOptions
from raylance.source.version import Version, checked_uri

Size = int | tuple[int, int]
_TASK = "task"
_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_NUMBERS = ("bool", "float16", "float32", "float64", *_INTEGERS)


def load_metadata(
    root: str | os.PathLike[str],
    storage_options: StorageOptions | None = None,
    *,
    episodes: Sequence[int] | None = None,
) -> Metadata:
    """Reads the metadata of a dataset: features, tasks, statistics for normalization, episodes.

    Args:
        root: Folder or URI of the dataset, see `open`.
        storage_options: Options of the object store, see `raylance.dataset`.
        episodes: Numbers of the episodes whose statistics are wanted, such as those to train on: "mean", "std", "min",
            "max" and "count", of the features for which each of these episodes has them. None for those of all, as
            LeRobot wrote them. All else is that of the whole dataset.

    Raises:
        ConfigError: If the URI holds a secret that would be shown, or there is no such episode.
        DatasetError: If files are missing or damaged, or episodes do not have all rows, one after another; if
            `episodes` have no statistics of their own.
    """
    return _load_metadata(checked_uri(root).rstrip("/"), storage_options, episodes)


def open(
    root: str | os.PathLike[str],
    *,
    delta_timestamps: Mapping[str, Sequence[float]] | None = None,
    episodes: Sequence[int] | None = None,
    columns: Sequence[str | Mapping[str, Any]] | None = None,
    size: Size | Mapping[str, Size] | None = None,
    crops: Sequence[FrameCrop] = (),
    depth_unit: Unit = "mm",
    tolerance_s: float = 1e-4,
    at_ends: Ends = "pad",
    version: Version | None = None,
    videos_version: Version | None = None,
    filter: str | None = None,
    storage_options: StorageOptions | None = None,
    **options: Any,
) -> Dataset:
    """Opens a dataset in LeRobot's Lance layout, as `lerobot-lancedb` writes it: `frames.lance`, `videos.lance`, and
    `meta/` or `meta.lance`. Batches have the features under LeRobot's names, with the values of LeRobot's own reader;
    `task` is the description of the row's task. Frames are uint8 (n, 3, H, W), those of depth float32 (n, 1, H, W);
    outside of torch, channels come last. Features in `delta_timestamps` are (n, k, …), also for one timestamp. Numbers
    have the dtypes of their columns.

    Args:
        root: Folder or URI of the dataset: a path, s3://…, hf://datasets/….
        delta_timestamps: For each feature that has several values in a sample, their times relative to the sample's, in
            seconds. Batches then also have `<feature>_is_pad`, bool (n, k).
        episodes: Numbers of the episodes to read; None for all. For their statistics, see `load_metadata`.
        columns: Features to deliver, `task` among them; None for all but those of dtype "language". A dict in the list
            has values of further columns, as in `raylance.dataset`.
        size: Height and width to which frames and pictures are resized, or an integer for both, or a dict of these by
            feature; None if all of a feature have one size.
        crops: `raylance.images.FrameCrop` of cameras, by feature.
        depth_unit: Unit of depths: "mm" for millimetres, "m" for metres. Statistics in `Metadata.stats` are in the unit
            in which depths were recorded, `features[…]["info"]["depth_unit"]`.
        tolerance_s: By how many seconds timestamps may differ from frames, and `delta_timestamps` from whole frames.
        at_ends: "pad" repeats the first or last frame of an episode, as LeRobot does; "drop" leaves out samples that
            are not whole, see `raylance.Windows`.
        version: Version of `frames.lance`; None for the newest.
        videos_version: Version of `videos.lance`; None for the newest.
        filter: SQL expression that selects rows, by stored names: with underscores for dots.
        storage_options: Options of the object store, see `raylance.dataset`.
        **options: Other arguments of `raylance.dataset`: order, seed, split, transform, ….

    Returns:
        A handle, as `raylance.dataset` returns.

    Raises:
        ConfigError: If an argument cannot be honoured; if PyAV is needed and not installed.
        DatasetError: If a table or the metadata are missing or damaged; if they contradict one another: episodes that
            do not lie one after another, in rows or in videos, another number of rows, videos that are missing or
            empty. What cannot be known without reading rows and videos, such as a video that is too short, is a
            `BadRowError` at the first row that needs it.
    """
    root = checked_uri(root).rstrip("/")
    if given := sorted({"windows", "decode", "pack", "samples"} & options.keys()):
        raise ConfigError(f"raylance.lerobot.open({given[0]}=…): the layout decides it. Use raylance.dataset().")
    _check_arguments(delta_timestamps, crops, depth_unit, tolerance_s, at_ends, filter)
    lost: list[str] = []
    metadata = find_metadata(root, storage_options, lost)
    constants = [each for each in columns if isinstance(each, Mapping)] if isinstance(columns, list | tuple) else []
    features: Any = [each for each in columns or () if not isinstance(each, Mapping)] if constants else columns
    names = _checked_columns(metadata, features, is_whole=not lost)
    lost += lost_places(metadata, names)
    frames = pin_table(root, FRAMES, version, storage_options, needed_columns(metadata, names), lost)
    has_videos = not {*metadata.cameras}.isdisjoint(names) or not metadata.features
    if has_videos and (videos := pin_table(root, VIDEOS, videos_version, storage_options, VIDEO_COLUMNS, lost)):
        pinned = videos[0]  # one version for all cameras
        videos_version = pinned.version if pinned.branch is None else (pinned.branch, pinned.version)
    if frames is None or lost:
        raise incomplete(root, lost)
    if isinstance(size, Mapping) and (unknown := [name for name in size if name not in names]):
        raise ConfigError(f"size={size!r}: columns has no feature {unknown[0]!r}, but {listed(names)}.")
    deltas = dict(delta_timestamps or {})
    _check_deltas(metadata, deltas, names)
    chosen = None if episodes is None else checked_episodes(metadata, episodes)
    source, opened = frames
    check_rows(source, opened, metadata)

    windows = None
    if deltas:
        windows = Windows(
            episode=EPISODE, seconds=deltas, fps=metadata.fps, tolerance_s=tolerance_s, at_ends=at_ends
        )  # fmt: skip
    with opening(metadata):
        decode: list[Decoder | Derived] = [*crops]
        stored: list[str] = []
        for name in names:
            made = _column(metadata, name, size, tolerance_s, videos_version, depth_unit)
            if isinstance(made, Camera):
                selected = range(len(metadata.episodes)) if chosen is None else chosen
                made = dataclasses.replace(made, identity=check_episodes(made, selected, storage_options))
            if isinstance(made, Image | DepthImage):
                decode.append(Renamed(name, f"{stored_name(name)}.bytes"))
            if made is None:
                stored.append(name)
            else:
                decode.append(made)
        return dataset(
            source.uri,
            version=source.version if source.branch is None else (source.branch, source.version),
            columns=[*stored, *decode, *constants],
            filter=_filter_of(chosen, filter),
            samples=windows,
            storage_options=storage_options,
            **options,
        )


def _check_arguments(
    delta_timestamps: Any, crops: Any, depth_unit: Any, tolerance_s: Any, at_ends: Any, filter: Any
) -> None:
    if not isinstance(delta_timestamps, Mapping | None):
        raise ConfigError(f"delta_timestamps={delta_timestamps!r}: give a dict of feature to a list of seconds.")
    if not (isinstance(crops, Sequence) and all(isinstance(each, FrameCrop) for each in crops)):
        raise ConfigError(f"crops={crops!r}: give a list of raylance.images.FrameCrop.")
    check_word("depth_unit", depth_unit, get_args(Unit))
    check_word("at_ends", at_ends, get_args(Ends))
    if not is_positive(tolerance_s):
        raise ConfigError(f"tolerance_s={tolerance_s!r}: must be a positive number.")
    check_filter(filter)


def _column(
    metadata: Metadata,
    name: str,
    size: Size | Mapping[str, Size] | None,
    tolerance_s: float,
    videos_version: Version | None,
    depth_unit: Unit,
) -> Decoder | Derived | None:
    """Returns what makes the column of a feature; None if it is delivered as it is stored."""
    if name == _TASK:
        return Task(_TASK, metadata.root)
    feature, own_size = metadata.features[name], size.get(name) if isinstance(size, Mapping) else size
    shape, dtype = tuple(feature["shape"]), feature["dtype"]
    if dtype == "video":
        kind, more = (
            (DepthCamera, {"unit": depth_unit} | depth_settings(feature)) if is_depth(feature) else (Camera, {})
        )
        return kind(
            name, f"{metadata.root}/{VIDEOS}", version=videos_version, size=own_size, root=metadata.root,
            tolerance_s=tolerance_s, **more,
        )  # fmt: skip
    if dtype == "image" and is_depth(feature):
        if own_size is not None:
            raise ConfigError(
                f"size={size!r}: pictures of depth, {name!r}, are not resized. Nothing was started. Leave it out; or "
                "give a dict without it."
            )
        return DepthImage(name, (feature.get("info") or {}).get("depth_unit"), depth_unit)
    if dtype == "image":
        return Image(name, size=own_size)
    if len(shape) > 1 or name != stored_name(name):
        return Renamed(name, stored_name(name), shape=shape if len(shape) > 1 else None)
    return None


def _checked_columns(metadata: Metadata, columns: Sequence[str] | None, *, is_whole: bool) -> list[str]:
    """Returns the features to deliver; if the metadata are not whole, those that are known."""
    every = [*metadata.features, *([_TASK] if metadata.tasks else [])]
    if columns is None:
        names = [name for name in every if name == _TASK or metadata.features[name]["dtype"] != "language"]
    elif isinstance(columns, Iterable):
        names = [columns] if isinstance(columns, str) else list(dict.fromkeys(columns))
    else:
        raise ConfigError(f"columns={columns!r}: give a list of features.")
    if not is_whole:
        names = [name for name in names if name in every]
    if unknown := [name for name in names if name not in every]:
        raise ConfigError(f"columns={columns!r}: the dataset has no feature {unknown[0]!r}, but {listed(every)}.")
    refuse_alike(names)
    return names


def _check_deltas(metadata: Metadata, deltas: Mapping[str, Sequence[float]], names: Sequence[str]) -> None:
    for name in deltas:
        if name not in names or name == _TASK:
            raise ConfigError(
                f"delta_timestamps has {name!r}, which is not one of the delivered features: {listed(names)}. Nothing "
                "was started."
            )
        if metadata.features[name]["dtype"] not in ("video", "image", *_NUMBERS):
            raise ConfigError(
                f"delta_timestamps has {name!r} of dtype {metadata.features[name]['dtype']!r}: only numbers and "
                "pictures can have several values in a sample. Nothing was started."
            )


def _filter_of(chosen: list[int] | None, given: str | None) -> str | None:
    """Returns the SQL expression that selects episodes and, with it, what was given."""
    if chosen is None:
        return given
    runs: list[list[int]] = []
    for each in chosen:
        if runs and runs[-1][1] == each - 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    found = " OR ".join(f"{EPISODE} BETWEEN {first} AND {last}" for first, last in runs)
    return f"({found})" if given is None else f"({found}) AND ({given})"
