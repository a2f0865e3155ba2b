"""LeRobot's Lance layout: items as by plain loops over whole files, and every contradiction in it by name."""

import itertools
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance import lerobot
from raylance.audit import EpochAudit, reopen
from raylance.errors import BadRowError, ConfigError, DatasetError
from tests.helpers.hub import hub
from tests.helpers.lerobot import (
    CAMERAS,
    TASKS,
    Robots,
    changed,
    make_robots,
    with_depth,
    with_depth_images,
    with_images,
)
from tests.helpers.videos import pixels_of

# A wait in a library's C code ends by no signal, and prints nothing: a thread prints all stacks and ends the process.
pytestmark = pytest.mark.timeout(240, method="thread")

TOP, WRIST = CAMERAS
DELTAS = {
    TOP: [-0.2, -0.1, 0.0], WRIST: [0.0, 0.3], "observation.state": [-0.1, 0.0], "observation.grid": [0.0, 0.1],
    "action": [at / 10 for at in range(8)],
}  # fmt: skip


def values_of(robots: Robots) -> dict[str, np.ndarray]:
    """All values by feature, rows first; frames as (n, H, W, channels)."""
    found = dict(robots.pixels)
    for name in robots.info["features"].keys() - robots.pixels.keys():
        column = robots.frames[name.replace(".", "_")]
        is_list = pa.types.is_fixed_size_list(column.type) or pa.types.is_list(column.type)
        found[name] = np.array(column.to_pylist(), np.float32) if is_list else column.to_numpy()
    return found


def check(batch: dict[str, Any], robots: Robots, deltas: dict[str, list[float]]) -> list[int]:
    """Compares a batch with the loops; returns its rows."""
    rows = np.asarray(batch["index"]).tolist()
    batch = batch | {name: pixels_of(batch[name]) for name in robots.pixels if name in batch}
    for name, values in values_of(robots).items():
        if name not in deltas:
            np.testing.assert_array_equal(batch[name], values[rows], err_msg=name)
            continue
        for place, row in enumerate(rows):
            wanted, pads = robots.window(name, values, row, deltas[name])
            np.testing.assert_array_equal(batch[name][place], wanted, err_msg=f"{name} of row {row}")
            assert np.asarray(batch[f"{name}_is_pad"][place]).tolist() == pads
    assert list(batch["task"]) == [TASKS[number] for number in np.asarray(batch["task_index"]).tolist()]
    return rows


@pytest.fixture(scope="module")
def robots() -> Robots:
    return make_robots()


@pytest.fixture(scope="module")
def root(robots: Robots, tmp_path_factory: pytest.TempPathFactory) -> str:
    return robots.write(str(tmp_path_factory.mktemp("lerobot")))


def test_items_are_those_of_loops_over_whole_files(robots: Robots, root: str) -> None:
    data = lerobot.open(root, delta_timestamps=DELTAS, remainder="ragged")
    seen = [row for batch in data.iter_torch_batches(batch_size=16) for row in check(batch, robots, DELTAS)]
    assert sorted(seen) == list(range(sum(robots.lengths)))
    batch = next(iter(data.iter_torch_batches(batch_size=4)))
    assert batch[TOP].shape == (4, 3, 3, 32, 48)
    assert batch["observation.grid"].shape == (4, 2, 2, 3)
    assert batch["next.done"].shape == (4,)


def test_metadata_from_a_table_and_episodes_that_are_chosen(robots: Robots, tmp_path: Path) -> None:
    uri = robots.write(str(tmp_path), meta="table")
    metadata = lerobot.load_metadata(uri)
    assert (metadata.fps, metadata.tasks, metadata.cameras) == (10.0, TASKS, [TOP, WRIST])
    assert metadata.stats["action"]["std"].tolist() == [0.1, 0.2]
    data = lerobot.open(f"{uri}/", episodes=[3, 0, 1], filter="frame_index > 2", order="sequential", remainder="ragged")
    seen = [row for batch in data.iter_batches(batch_size=16) for row in check(batch, robots, {})]
    episode, frame = (robots.frames[name].to_numpy() for name in ("episode_index", "frame_index"))
    assert seen == np.flatnonzero(np.isin(episode, [0, 1, 3]) & (frame > 2)).tolist()
    few = lerobot.open(uri, columns=["task", TOP], size={TOP: (8, 12)}, delta_timestamps={TOP: [0.0]}, at_ends="drop")
    batch = few.take([5])
    assert batch[TOP].shape == (1, 1, 8, 12, 3)
    assert {"task", TOP} <= batch.keys() <= {"task", TOP, "episode_index", "_rowoffset"}


def test_statistics_of_episodes_that_are_chosen(tmp_path: Path) -> None:
    """Those of the rows themselves; of pictures, as LeRobot stores them, by channel and of a sample of the frames."""
    robots = make_robots()
    ends = np.cumsum([0, *robots.lengths])
    chosen, action = [4, 0, 2], np.array(robots.frames["action"].to_pylist(), np.float64)
    parts = [(action[a:b], robots.pixels[TOP][a:b:3] / 255) for a, b in itertools.pairwise(ends)]
    for episode, (numbers, pictures) in zip(robots.episodes, parts, strict=True):
        for name, values, axes in (("action", numbers, (0,)), (TOP, pictures, (0, 1, 2))):
            for kind in ("min", "max", "mean", "std"):
                found = getattr(np, kind)(values, axis=axes)
                episode[f"stats/{name}/{kind}"] = found.reshape(-1, *[1] * (len(axes) - 1)).tolist()
            episode[f"stats/{name}/count"] = [len(values)]
        episode["stats/next.done/max"] = [1.0]
    uri = robots.write(str(tmp_path), meta="table")
    stats = lerobot.load_metadata(uri, episodes=chosen).stats
    assert stats.keys() == {"action", TOP}
    for name, at, axes in (("action", 0, (0,)), (TOP, 1, (0, 1, 2))):
        values = np.concatenate([parts[each][at] for each in chosen])
        for kind in ("min", "max", "mean", "std"):
            wanted = getattr(np, kind)(values, axis=axes).reshape(-1, *[1] * (len(axes) - 1))
            np.testing.assert_allclose(stats[name][kind], wanted, rtol=1e-12, err_msg=f"{name} {kind}")
        assert stats[name]["count"].tolist() == [len(values)]
    assert lerobot.load_metadata(uri).stats["action"]["std"].tolist() == [0.1, 0.2], "as LeRobot wrote it"
    with pytest.raises(ConfigError, match=r"episodes=\[9\]"):
        lerobot.load_metadata(uri, episodes=[9])


def test_a_run_resumes_and_its_state_opens_it_again(robots: Robots, root: str) -> None:
    data = lerobot.open(root, delta_timestamps=DELTAS)
    with data.loader() as loader:
        batches = iter(loader.iter_batches(global_batch_size=20))
        seen = [row for _ in range(3) for row in check(next(batches), robots, DELTAS)]
        state = loader.state_dict()
    for rank in range(2):
        with data.loader(rank=rank, world_size=2) as loader:
            loader.load_state_dict(state)
            for batch in loader.iter_batches(global_batch_size=20):
                seen += check(batch, robots, DELTAS)
    assert len(seen) == len(set(seen)) == len(data) // 20 * 20
    again = reopen(state)
    assert again.schema.equals(data.schema)
    assert EpochAudit(again, state=state).count().ok


def test_columns_with_one_value_come_beside_features(robots: Robots, root: str) -> None:
    lacking = {"tokens": np.arange(4), "has_action": True}
    data = lerobot.open(root, columns=["action", lacking])
    raylance.runs.pin(data, "run")
    with data.loader() as loader:
        batch = next(iter(loader.iter_batches(global_batch_size=20)))
        state = loader.state_dict()
    assert {*batch} == {"action", "tokens", "has_action"}
    assert batch["tokens"].tolist() == [[0, 1, 2, 3]] * 20
    assert batch["has_action"].all()
    assert reopen(state).schema.equals(data.schema)
    raylance.runs.unpin(data, "run")


def test_a_dataset_on_the_hub(robots: Robots, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some requests are refused, because there were too many."""
    with hub(Path(root), busy=range(5, 500, 30)) as (address, requests):
        monkeypatch.setenv("HF_ENDPOINT", address)
        data = lerobot.open("hf://datasets/me/robots", delta_timestamps=DELTAS, remainder="ragged")
        with data.loader() as loader:
            seen = [row for batch in loader.iter_batches(global_batch_size=16) for row in check(batch, robots, DELTAS)]
        assert len(requests) > 5
        assert sorted(seen) == list(range(sum(robots.lengths)))
        assert reopen(loader.state_dict()).schema.equals(data.schema)


def test_a_dataset_that_has_moved(robots: Robots, tmp_path: Path) -> None:
    with lerobot.open(robots.write(str(tmp_path / "before")), delta_timestamps=DELTAS).loader() as loader:
        next(iter(loader.iter_batches(global_batch_size=8)))
        state = loader.state_dict()
    shutil.move(tmp_path / "before", tmp_path / "now")
    again = reopen(state, uri=f"{tmp_path}/now/frames.lance", remainder="ragged")
    seen = [row for batch in again.iter_batches(batch_size=16) for row in check(batch, robots, DELTAS)]
    assert sorted(seen) == list(range(sum(robots.lengths)))


def test_other_metadata_than_the_run_had(robots: Robots, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    uri = robots.write(str(tmp_path))
    with lerobot.open(uri).loader() as loader:
        next(iter(loader.iter_batches(global_batch_size=8)))
        state = loader.state_dict()
    shutil.rmtree(tmp_path / "meta")
    moved = make_robots()
    for episode, begin in ((0, 4.0), (1, 0.0)):  # the other one first
        moved.episodes[episode][f"videos/{TOP}/from_timestamp"] = begin
    moved.write(str(tmp_path / "other"))
    shutil.copytree(tmp_path / "other" / "meta", tmp_path / "meta")
    with pytest.raises(DatasetError, match=f"'{TOP}' lie in other frames"):
        reopen(state)
    with lerobot.open(uri).loader() as loader:  # as with other settings that make other batches of the same rows
        loader.load_state_dict(state)
    assert TOP in caplog.text


@pytest.mark.parametrize("settings", [{}, {"use_log": False, "depth_max": 4.0}, {"shift": 0.5, "depth_min": 0.2}])
def test_cameras_of_depth(settings: dict[str, Any], tmp_path: Path) -> None:
    """The millimetres of LeRobot's quantizer, also in metres, resized, and cut as the pictures beside them."""
    name = "observation.images.depth"
    robots = with_depth(make_robots(), name, **settings)
    uri, deltas = robots.write(str(tmp_path)), {name: [-0.1, 0.0], WRIST: [-0.1, 0.0]}
    data = lerobot.open(uri, delta_timestamps=deltas, remainder="ragged")
    seen = [row for batch in data.iter_torch_batches(batch_size=16) for row in check(batch, robots, deltas)]
    assert sorted(seen) == list(range(sum(robots.lengths)))
    batch = data.take([3, 99])
    assert (batch[name].shape, batch[name].dtype) == ((2, 2, 16, 24, 1), np.float32)
    metres = lerobot.open(uri, columns=["index", name], depth_unit="m").take(range(0, 160, 7))[name]
    np.testing.assert_allclose(1000 * metres, robots.pixels[name][:160:7], rtol=0, atol=0.51)
    small = lerobot.open(uri, columns=["index", name], size={name: (8, 12)}).take([50])[name][0]
    assert np.isin(small, robots.pixels[name][50]).all()
    crops = [
        raylance.images.FrameCrop(WRIST, (8, 10), random=True, hflip=0.5),
        raylance.images.FrameCrop(name, (8, 10), like=WRIST),
    ]
    cut = lerobot.open(uri, delta_timestamps=deltas, crops=crops, columns=["index", name, WRIST])
    for batch in cut.iter_torch_batches(batch_size=16):
        for place, row in enumerate(batch["index"].tolist()):
            places = []
            for camera in (name, WRIST):
                whole = np.moveaxis(robots.window(camera, robots.pixels[camera], row, [-0.1, 0.0])[0], -1, -3)
                parts = np.lib.stride_tricks.sliding_window_view(whole, (8, 10), (-2, -1))
                found = batch[camera][place].numpy()
                places.append({
                    (top, left, flip) for flip in (False, True) for top, left in np.ndindex(9, 15)
                    if (parts[:, :, top, left] == (found[..., ::-1] if flip else found)).all()
                })  # fmt: skip
            assert places[0] & places[1], row
    with data.loader() as loader:
        next(iter(loader.iter_batches(global_batch_size=8)))
        state = loader.state_dict()
    assert EpochAudit(reopen(state), state=state).count().ok
    np.testing.assert_array_equal(reopen(state).take([9])[name], data.take([9])[name])


@pytest.mark.parametrize("unit", ["mm", "m"])
def test_pictures_of_depth(unit: str, tmp_path: Path) -> None:
    name = "observation.depth"
    robots = with_depth_images(make_robots(), name, unit)
    uri, deltas = robots.write(str(tmp_path)), {name: [0.0, 0.2]}
    data = lerobot.open(uri, columns=["index", "task_index", "task", name], remainder="ragged", delta_timestamps=deltas)
    values = np.moveaxis(robots.pixels[name], -1, 1)
    for batch in data.iter_torch_batches(batch_size=16):
        assert batch[name].shape[1:] == (2, 1, 6, 8)
        for place, row in enumerate(batch["index"].tolist()):
            wanted = robots.window(name, values, row, deltas[name])[0]
            np.testing.assert_allclose(batch[name][place], wanted, rtol=1e-6)
    metres = lerobot.open(uri, columns=[name], depth_unit="m").take([5, 17])[name]
    np.testing.assert_allclose(np.moveaxis(metres, -1, 1), values[[5, 17]] / 1000, rtol=1e-6)


@pytest.mark.parametrize("deltas", [{}, {"observation.image": [-0.1, 0.0, 0.1]}])
def test_pictures_that_are_stored_one_by_one(deltas: dict[str, list[float]], tmp_path: Path) -> None:
    robots = with_images(make_robots(), "observation.image")
    uri = robots.write(str(tmp_path))
    data = lerobot.open(
        uri, columns=["index", "observation.image"], remainder="ragged", delta_timestamps=deltas, on_bad_row="mask"
    )
    values, seen = np.arange(sum(robots.lengths)), list[int]()
    for batch in data.iter_torch_batches(batch_size=16):
        assert batch["observation.image"].shape[-3:] == (3, 8, 8)
        for place, row in enumerate(batch["index"].tolist()):
            wanted, pads = robots.window("", values, row, deltas.get("observation.image", [0.0]))
            assert batch["observation.image"][place].reshape(-1, 3 * 8 * 8)[:, 0].tolist() == wanted.tolist()
            assert not deltas or batch["observation.image_is_pad"][place].tolist() == pads
            seen.append(row)
    assert sorted(seen) == values.tolist()
    with data.loader() as loader:
        next(iter(loader.iter_batches(global_batch_size=8)))
        assert EpochAudit(reopen(loader.state_dict()), state=loader.state_dict()).count().ok


def test_shapes_and_sizes_as_others_write_them(tmp_path: Path) -> None:
    """Channels first; several axes under a name without a dot; no column but those asked for; files of a system."""
    robots = make_robots()
    robots.info["features"][TOP] |= {"shape": [3, 32, 48], "names": ["channels", "height", "width"]}
    robots.info["features"]["grid"] = robots.info["features"].pop("observation.grid")
    robots.frames = robots.frames.rename_columns({"observation_grid": "grid"})
    uri = robots.write(str(tmp_path))
    for name in (".DS_Store", "._file-000.parquet"):
        (tmp_path / "meta" / "episodes" / name).write_bytes(b"x")
    deltas = {"grid": [0.0, 0.1], TOP: [0.0]}
    data = lerobot.open(uri, delta_timestamps=deltas, remainder="ragged")
    seen = [row for batch in data.iter_torch_batches(batch_size=16) for row in check(batch, robots, deltas)]
    assert sorted(seen) == list(range(sum(robots.lengths)))
    for columns in (["task"], [TOP], ["action", "task"]):
        assert lerobot.open(uri, columns=columns).schema.names == sorted(columns, key=lambda name: name != "action")
    held = lerobot.load_metadata(uri)
    shutil.rmtree(tmp_path)
    make_robots((10, 12, 14, 16, 18)).write(uri)
    assert (held.total_frames, lerobot.load_metadata(uri).total_frames, len(lerobot.open(uri))) == (166, 70, 70)


def test_a_mixture_of_robots_opens_again_from_its_state(robots: Robots, root: str, tmp_path: Path) -> None:
    other = make_robots((9, 12, 30, 8, 21))
    deltas = {TOP: [-0.1, 0.0], "action": [0.0, 0.1]}
    opened = {
        name: lerobot.open(uri, delta_timestamps=deltas, size=16)
        for name, uri in (("one", root), ("two", other.write(str(tmp_path))))
    }
    data = raylance.mix({name: (each, 1) for name, each in opened.items()}, stop="all_exhausted", remainder="ragged")
    with data.loader() as loader:
        batches = iter(loader.iter_torch_batches(global_batch_size=16, with_row_offset=True))
        batch = next(batches)
        state = loader.state_dict()
    for place, (of, row) in enumerate(zip(batch["_component"].tolist(), batch["index"].tolist(), strict=True)):
        made = (robots, other)[of]
        wanted, _ = made.window("action", values_of(made)["action"], row, deltas["action"])
        np.testing.assert_array_equal(batch["action"][place], wanted)
    again = reopen(state)
    assert again.schema.names == data.schema.names
    assert EpochAudit(again, state=state).count().ok
    with_pictures = lerobot.open(with_images(make_robots(), "observation.image").write(str(tmp_path / "more")))
    with with_pictures.loader() as loader:
        next(iter(loader.iter_batches(global_batch_size=8)))
        assert EpochAudit(reopen(loader.state_dict()), state=loader.state_dict()).count().ok


def set_clock(robots: Robots, kind: type) -> None:
    """The robot's clock starts at 50 minutes, and the seconds of rows are of a type."""
    at = robots.frames.column_names.index("timestamp")
    seconds = (robots.frames["frame_index"].to_numpy() / 10 + 3000).astype(kind)
    robots.frames = robots.frames.set_column(at, "timestamp", pa.array(seconds))


def test_seconds_that_their_type_rounds(tmp_path: Path) -> None:
    """A float32 of 50 minutes has steps of 0.24 ms, a float16 of seconds."""
    robots = make_robots()
    for episode in robots.episodes:
        for camera in CAMERAS:
            name = f"videos/{camera}/from_timestamp"
            episode[name] = np.float32(episode[name] - 3000)
    set_clock(robots, np.float32)
    data = lerobot.open(robots.write(str(tmp_path / "32")), remainder="ragged")
    seen = [row for batch in data.iter_batches(batch_size=16) for row in check(batch, robots, {})]
    assert sorted(seen) == list(range(sum(robots.lengths)))
    set_clock(robots, np.float16)
    with pytest.raises(BadRowError, match=r"3000 s.* rounds .* 0\.1 s"):
        lerobot.open(robots.write(str(tmp_path / "16"))).take([5])


def gap(robots: Robots) -> None:
    robots.episodes[2]["dataset_from_index"] += 1


def unnumbered(robots: Robots) -> None:
    robots.episodes[2]["episode_index"] = 7


def fewer(robots: Robots) -> None:
    robots.info["total_frames"] -= 1


def lost_rows(robots: Robots) -> None:
    robots.frames = robots.frames.slice(0, 150)


def lost_video(robots: Robots) -> None:
    del robots.videos[WRIST, 2]


def empty_video(robots: Robots) -> None:
    robots.videos[WRIST, 2] = b""


def too_early(robots: Robots) -> None:
    """By one frame, as some converters write it."""
    robots.episodes[3][f"videos/{TOP}/from_timestamp"] -= 0.1


def at_one_place(robots: Robots) -> None:
    robots.episodes[4][f"videos/{TOP}/from_timestamp"] = robots.episodes[2][f"videos/{TOP}/from_timestamp"]


def old(robots: Robots) -> None:
    robots.info["codebase_version"] = "v2.1"


def still(robots: Robots) -> None:
    robots.info["fps"] = 0


def no_video(robots: Robots) -> None:
    robots.videos[TOP, 0] = b"no video"


def unplaced(robots: Robots) -> None:
    for episode in robots.episodes:
        del episode[f"videos/{TOP}/from_timestamp"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (gap, "episode 2 has rows 64 to 80.* ends at 63"), (unnumbered, "no episode 2"), (fewer, "166 rows.* 165"),
        (lost_rows, "150 rows.* 166"), (lost_video, f"{WRIST}, chunk 0, file 2 .episode 3"),
        (empty_video, f"{WRIST}, chunk 0, file 2 .episode 3"), (old, "v2.1"), (still, "fps is 0"),
        (no_video, f"{TOP}.*video 0 of"),
        (too_early, rf"videos/{TOP}/.*episode 3 begins at 1\.6 s, before episode 2"),
        (at_one_place, rf"videos/{TOP}/.*episode 4 begins at 0 s, before episode 2"),
        (unplaced, f"videos/{TOP}/from_timestamp"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused_when_opened(
    change: Callable[[Robots], None], names: str, tmp_path: Path
) -> None:
    robots = make_robots()
    change(robots)
    uri = robots.write(str(tmp_path))
    with pytest.raises(DatasetError, match=names) as raised:
        lerobot.open(uri)
    assert raised.value.__suppress_context__ or not raised.value.__context__, "other libraries add nothing"
    if change is lost_video:
        assert len(lerobot.open(uri, episodes=[0, 1, 2, 4])) == 111
        assert len(lerobot.open(uri, columns=["action", TOP])) == 166
    if change is too_early:
        assert len(lerobot.open(uri, episodes=[0, 1, 4])) == 94
        assert len(lerobot.open(uri, columns=["action", WRIST])) == 166
        with pytest.raises(DatasetError, match=names):
            lerobot.open(uri, episodes=[2])


def test_all_that_is_missing_is_listed_in_one_error(tmp_path: Path) -> None:
    """Without the errors of the libraries that did not find it."""
    robots = make_robots()
    del robots.info["fps"], robots.info["features"]["observation.grid"]["shape"]
    robots.frames = robots.frames.drop_columns(["action", "timestamp"])
    for episode in robots.episodes:
        del episode["dataset_to_index"], episode[f"videos/{TOP}/from_timestamp"]
    uri = robots.write(str(tmp_path / "robots"))
    shutil.rmtree(f"{uri}/videos.lance")
    Path(uri, "meta", "tasks.parquet").unlink()
    in_meta = ["meta/tasks.parquet", "'fps' in meta/info.json", "'shape' of 'observation.grid'"]
    in_meta.append("'dataset_to_index' of meta/episodes")
    others = [f"'videos/{TOP}/from_timestamp'", "'action' of frames.lance", "'timestamp' of frames.lance"]
    nothing = ["meta/info.json", "meta/tasks.parquet", "meta/episodes", "frames.lance", "videos.lance"]
    for read, root, lost in (
        (lerobot.load_metadata, uri, in_meta),
        (lerobot.open, uri, [*in_meta, *others, "videos.lance"]),
        (lerobot.open, str(tmp_path / "nothing"), nothing),
    ):
        with pytest.raises(DatasetError) as raised:
            read(root)
        assert not [name for name in lost if name not in str(raised.value)]
        assert len(traceback.format_exception(raised.value)) < 10


def test_episodes_without_statistics(root: str) -> None:
    with pytest.raises(DatasetError, match="stats/.*episodes="):
        lerobot.load_metadata(root, episodes=[1])


def test_a_handle_shows_what_batches_have(root: str) -> None:
    shown = repr(lerobot.open(root, delta_timestamps={"action": [0.0]}))
    assert not [name for name in (TOP, "observation.state", "task", "action_is_pad") if name not in shown]


def short_video(robots: Robots) -> int:
    robots.videos[TOP, 1] = robots.videos[TOP, 0]  # 63 frames of 103
    return 63 + 63


def late(robots: Robots) -> int:
    robots.frames = changed(robots.frames, "timestamp", 70, 0.73)  # of frame 7 of its episode
    return 70


def in_another_episode(robots: Robots) -> int:
    robots.frames = changed(robots.frames, "episode_index", 50, 4)
    return 50


def in_no_episode(robots: Robots) -> int:
    robots.frames = changed(robots.frames, "episode_index", 50, 9)
    return 50


def in_no_task(robots: Robots) -> int:
    robots.frames = changed(robots.frames, "task_index", 50, 3)
    return 50


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (short_video, "frame 63 is asked for, and the video has 63"), (late, "0.03 s away.* 10 frames/s"),
        (in_another_episode, "episode 4, which has rows 135 to 166"), (in_no_episode, "episode is 9.* 0 to 4"),
        (in_no_task, "'task_index' is 3"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_in_rows_and_videos_is_named_at_the_first_row(
    change: Callable[[Robots], int], names: str, tmp_path: Path
) -> None:
    robots = make_robots()
    row = change(robots)
    with pytest.raises(BadRowError, match=names) as raised:
        for _ in lerobot.open(robots.write(str(tmp_path)), order="sequential").iter_batches(batch_size=1):
            pass
    assert raised.value.row_offset == row


def test_what_cannot_be_honoured(root: str, tmp_path: Path) -> None:
    for arguments, names in (
        ({"columns": ["nothing"]}, "'nothing'"),
        ({"episodes": [5]}, r"\[5\].* 0 to 4"),
        ({"episodes": []}, r"\[\]"),
        ({"episodes": 3}, "3"),
        ({"size": {"nothing": 8}}, "'nothing'"),
        ({"delta_timestamps": {"task": [0.0]}}, "'task'"),
        ({"delta_timestamps": {TOP: [0.05]}}, "0.05"),
        ({"delta_timestamps": [0.1]}, r"delta_timestamps=\[0.1\]"),
        ({"columns": 5}, "columns=5"),
        ({"crops": raylance.images.FrameCrop(TOP, 8)}, "crops=FrameCrop"),
        ({"crops": [raylance.Image("action")]}, "crops=.*Image"),
        ({"tolerance_s": -1}, "tolerance_s=-1"),
        ({"tolerance_s": float("nan")}, "tolerance_s=nan"),
        ({"tolerance_s": "1"}, "tolerance_s='1'"),
        ({"at_ends": "cut"}, "at_ends='cut'"),
        ({"filter": 5, "episodes": [0]}, "filter is a int"),
        ({"storage_options": 5}, "storage_options is a int"),
        ({"depth_unit": "cm"}, "'cm'"),
        ({"windows": None}, "windows"),
        ({"shuffle": True}, "shuffle"),
    ):
        with pytest.raises(ConfigError, match=names):
            lerobot.open(root, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as raised:
        lerobot.load_metadata("s3://me:geheim@host/robots")
    assert "geheim" not in str(raised.value)
    for number, settings in enumerate(({"depth_min": 0.0, "shift": 0.0}, {"depth_max": 0.001}, {"depth_min": -4.0})):
        robots = with_depth(make_robots(), "observation.depth")
        robots.info["features"]["observation.depth"]["info"] |= {
            f"video.{name}": value for name, value in settings.items()
        }
        with pytest.raises(DatasetError, match=r"'observation\.depth'.*depth"):
            lerobot.open(robots.write(str(tmp_path / f"depth-{number}")))
    uri = with_depth_images(make_robots(), "observation.depth", "mm").write(str(tmp_path / "depth"))
    with pytest.raises(ConfigError, match=r"'observation\.depth'"):
        lerobot.open(uri, size=8)
