"""jobs/create_dataset.py lerobot: the layout has what the Parquet and MP4 files have."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raylance.lerobot
from jobs.create_dataset import command as job
from tests.helpers.created import refusal
from tests.helpers.lerobot import FEATURES, Robots, make_robots, with_images


def record(robots: Robots, folder: Path) -> Path:
    """Writes robots as LeRobot records them, in version 3; two Parquet files, lists of any length."""
    whole = Path(robots.write(str(folder / "whole")))
    root = folder / "recorded"
    robots.info |= {"video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"}
    shutil.copytree(whole / "meta", root / "meta")
    (root / "meta" / "info.json").write_text(json.dumps(robots.info))
    dotted = {name.replace(".", "_"): name for name in robots.info["features"]}
    table = robots.frames.rename_columns([dotted[name] for name in robots.frames.column_names])
    for name, (kind, shape) in FEATURES.items():
        if len(shape) == 1 and shape[0] > 1:
            lists = table[name].cast(pa.list_(pa.type_for_alias(kind.replace("float32", "float"))))
            table = table.set_column(table.column_names.index(name), name, lists)
    for number, part in ((999, table.slice(0, 50)), (1000, table.slice(50))):  # in the order of numbers, not of names
        path = root / "data" / "chunk-000" / f"file-{number:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(part, path)
    for (name, number), content in robots.videos.items():
        path = root / robots.info["video_path"].format(video_key=name, chunk_index=0, file_index=number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def test_the_layout_has_what_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    robots = with_images(make_robots(), "observation.images.hand")
    root, out = record(robots, tmp_path), tmp_path / "made"
    assert job.main(["lerobot", "--input", str(root), "--out", str(out)]) == 0
    assert f"raylance.lerobot.open('{out}')" in capsys.readouterr().out
    deltas = {"action": [-0.1, 0.0], "observation.images.top": [0.0, 0.1]}
    made, wanted = (
        next(iter(raylance.lerobot.open(where, delta_timestamps=deltas).iter_batches(batch_size=166)))
        for where in (str(out), str(tmp_path / "whole"))
    )
    assert made.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(made[name], values, err_msg=name)
    assert "--overwrite" in refusal(capsys, "lerobot", "--input", root, "--out", out)
    assert job.main(["lerobot", "--input", str(root), "--out", str(out), "--overwrite"]) == 0
    assert len(raylance.lerobot.open(out)) == 166


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda root: shutil.rmtree(root / "meta"), "meta/info.json"),
        (lambda root: (root / "meta" / "info.json").write_text('{"codebase_version": "v2.1"}'), "v2.1"),
        (lambda root: (root / "data" / "chunk-000" / "file-999.parquet").unlink(), "index 0"),
        (lambda root: (root / "data" / "chunk-000" / "file-1000.parquet").unlink(), "166"),
        (lambda root: next(root.glob("videos/*/*/file-001.mp4")).unlink(), "file-001.mp4"),
    ],
)
def test_what_is_not_whole_is_refused(spoil, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = record(make_robots(), tmp_path)
    spoil(root)
    assert named in refusal(capsys, "lerobot", "--input", root, "--out", tmp_path / "made")
