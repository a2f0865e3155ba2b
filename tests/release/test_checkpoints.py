"""Every way of reporting a checkpoint to Ray Train."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
from ray.train import Checkpoint, CheckpointUploadMode, ValidationConfig
from ray.train.torch import TorchTrainer

import raylance
from raylance.errors import ConfigError
from tests.helpers.reporting import report_slowly

BATCH = 100


def report_all(config: dict[str, Any]) -> dict[str, Any]:
    """A step, then a checkpoint in each way there is; returns what was refused."""
    tempfile.tempdir = config["temporary"]
    loader = ray.train.get_dataset_shard("train")
    rank, storage = loader.rank, Path(ray.train.get_context().get_storage().experiment_fs_path)
    batches, refused = iter(loader.batches(global_batch_size=BATCH)), {}

    def refuse(name: str, **arguments: Any) -> None:
        with pytest.raises(ConfigError) as caught:
            raylance.report({}, **arguments)
        refused[name] = str(caught.value)

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        assert Path(checkpoint.path).parent == Path(config["temporary"])
        copied = shutil.copytree(checkpoint.path, storage / name, dirs_exist_ok=True)
        Path(copied, "part-uploaded.txt").write_text("made by this function")
        return Checkpoint(copied)

    refuse("no loader", state={"step": 1})
    refuse("no directory", loader=loader, checkpoint=storage / "nowhere")
    refuse("no path", loader=loader, checkpoint=5)
    refuse("no dict", loader=loader, state=[1, 2])
    if rank == 0:
        refuse("nothing uploaded", loader=loader, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    raylance.report({"step": 0})
    next(batches)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"part-{rank}.txt").write_text(f"of rank {rank}")
        raylance.report({"step": 1}, loader, checkpoint=directory, checkpoint_dir_name="sharded")
        raylance.report({"step": 1}, loader, {"step": 1}, checkpoint=directory, checkpoint_dir_name="both")
        raylance.report({"step": 1}, loader, {"step": 1}, checkpoint=directory, checkpoint_dir_name="again")
    next(batches)
    asynchronous = {"checkpoint_upload_mode": CheckpointUploadMode.ASYNC, "checkpoint_dir_name": "asynchronous"}
    raylance.report({"step": 2}, loader, {"step": 2, "weights": torch.ones(2)}, **asynchronous)
    next(batches)
    custom = {"checkpoint_upload_fn": upload, "checkpoint_dir_name": "custom", "validation": True}
    raylance.report({"step": 3}, loader, {"step": 3}, **custom)
    next(batches)
    there = storage / "there"
    there.mkdir(exist_ok=True)
    (there / f"part-{rank}.txt").write_text(f"of rank {rank}")
    modes = {"checkpoint_upload_mode": CheckpointUploadMode.NO_UPLOAD, "checkpoint_dir_name": "there"}
    raylance.report({"step": 4}, loader, checkpoint=Checkpoint(there), **modes)
    (there / "part-late.txt").write_text("written while others report")
    next(batches)
    with tempfile.TemporaryDirectory() as directory:  # only one rank has files now
        Path(directory, "part-0.txt").write_text("later")
        named = {"checkpoint": directory if rank == 0 else None, "checkpoint_dir_name": "again"}
        raylance.report({"step": 5}, loader, **named)
    saved = report_slowly(loader, "in a step")
    list(batches)
    return refused | {"saved": [*saved, *report_slowly(loader, "after the pass")]}


def validate(checkpoint: Checkpoint) -> dict[str, float]:
    saved = raylance.restore(None, checkpoint)
    assert saved is not None
    return {"validated": saved["step"] * 10.0}


@pytest.mark.usefixtures("ray_session")
def test_every_way_of_reporting(images_uri: str, tmp_path: Path) -> None:
    train = raylance.dataset(images_uri, columns=["id"], remainder="ragged")
    temporary = tmp_path / "temporary"  # other tests make such directories where they lie by default
    temporary.mkdir()
    result = TorchTrainer(
        report_all,
        train_loop_config={"temporary": str(temporary)},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="ways", storage_path=str(tmp_path)),
        datasets={"train": train},
        dataset_config=raylance.DataConfig(num_decoders=0),
        validation_config=ValidationConfig(fn=validate),
    ).fit()
    refused = result.return_value
    in_step, after_pass = refused["saved"]
    assert in_step[0] >= 0.05, "all of a report is saving: what raylance collects and writes, too"
    assert after_pass[0] >= 0.05, "a report after the last batch, too"
    assert (in_step[1], after_pass[1]) == pytest.approx((0, 0), abs=1e-6), "none of it is training"
    assert "no loader" in refused["no loader"]
    assert "is not a directory" in refused["no directory"]
    assert "NO_UPLOAD" in refused["nothing uploaded"]
    assert not list(temporary.glob("raylance-report-*")), "directories of its own are gone"
    reported = {Path(checkpoint.path).name: (checkpoint, metrics) for checkpoint, metrics in result.best_checkpoints}
    for name in ("in a step", "after the pass"):
        reported.pop(name)
    again, _ = reported.pop("again")
    assert sorted(path.name for path in Path(again.path).glob("part-*")) == ["part-0.txt", "part-1.txt"]
    shown: list[str] = []
    loader = train.loader()
    # Rank 1's file and state.pt are of the earlier report of that name: both were handed over.
    assert raylance.restore(loader, again, load=lambda at: shown.extend(path.name for path in at.iterdir())) == {}
    assert sorted(shown) == ["part-0.txt", "raylance_state.json"]
    assert loader.state_dict()["position"] == 5 * BATCH
    steps = {"sharded": 1, "both": 1, "asynchronous": 2, "custom": 3, "there": 4}
    assert {name: metrics["step"] for name, (_, metrics) in reported.items()} == steps
    assert [name for name, (_, metrics) in reported.items() if metrics.get("validated") == 30.0] == ["custom"]
    for name, (checkpoint, _) in reported.items():
        state = json.loads(Path(checkpoint.path, "raylance_state.json").read_text())
        assert (state["epoch"], state["position"]) == (0, BATCH * steps[name]), name
        parts = sorted(path.name for path in Path(checkpoint.path).glob("part-*"))
        late = {"there": ["part-late.txt"], "custom": ["part-uploaded.txt"]}.get(name, [])
        both = ["part-0.txt", "part-1.txt"] if name in ("sharded", "both", "there") else []
        assert parts == both + late, name
        seen: list[Path] = []
        loader = train.loader(rank=1, world_size=3)
        saved = raylance.restore(loader, checkpoint, load=lambda directory, seen=seen: seen.extend(directory.iterdir()))
        assert loader.state_dict()["position"] == BATCH * steps[name]
        assert {path.name for path in seen} >= {"raylance_state.json", *parts}
        assert saved is not None
        assert saved.get("step") == (None if name in ("sharded", "there") else steps[name])
    with pytest.raises(raylance.StateError, match="pass as load="):
        raylance.restore(loader, reported["sharded"][0])


@pytest.fixture
def loader(images_uri: str) -> raylance.RankLoader:
    return raylance.dataset(images_uri, columns=["id"], order="sequential").loader(runtime="threads")
