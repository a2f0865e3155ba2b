"""Owns what `raylance.report` adds to Ray Train's own: each way of reporting a checkpoint, by two real ranks."""

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

pytestmark = pytest.mark.usefixtures("ray_session")

BATCH = 100


def report_all(config: dict[str, Any]) -> dict[str, str]:
    """A step, then a checkpoint in each way there is; returns what was refused."""
    loader = ray.train.get_dataset_shard("train")
    rank, storage = loader.rank, Path(ray.train.get_context().get_storage().experiment_fs_path)
    batches, refused = iter(loader.batches(global_batch_size=BATCH)), {}

    def refuse(name: str, **arguments: Any) -> None:
        with pytest.raises(raylance.ConfigError) as caught:
            raylance.report({}, **arguments)
        refused[name] = str(caught.value)

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        return Checkpoint(shutil.copytree(checkpoint.path, storage / name, dirs_exist_ok=True))

    refuse("no loader", state={"step": 1})
    refuse("no directory", loader=loader, checkpoint=storage / "nowhere")
    if rank == 0:
        refuse("nothing uploaded", loader=loader, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    raylance.report({"step": 0})
    next(batches)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, f"part-{rank}.txt").write_text(f"of rank {rank}")
        raylance.report({"step": 1}, loader, checkpoint=directory, checkpoint_dir_name="sharded")
        raylance.report({"step": 1}, loader, {"step": 1}, checkpoint=directory, checkpoint_dir_name="both")
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
    return refused


def validate(checkpoint: Checkpoint) -> dict[str, float]:
    saved = raylance.restore(None, checkpoint)
    assert saved is not None
    return {"validated": saved["step"] * 10.0}


@pytest.mark.slow
def test_every_way_of_reporting(images_uri: str, tmp_path: Path) -> None:
    train = raylance.dataset(images_uri, columns=["id"], remainder="ragged")
    before = set(Path(tempfile.gettempdir()).glob("raylance-*"))
    result = TorchTrainer(
        report_all,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(name="ways", storage_path=str(tmp_path)),
        datasets={"train": train},
        dataset_config=raylance.DataConfig(num_decoders=0),
        validation_config=ValidationConfig(fn=validate),
    ).fit()
    refused = result.return_value
    assert "no loader" in refused["no loader"]
    assert "is no directory" in refused["no directory"]
    assert "NO_UPLOAD" in refused["nothing uploaded"]
    assert set(Path(tempfile.gettempdir()).glob("raylance-*")) == before, "directories of its own are gone"
    reported = {Path(checkpoint.path).name: (checkpoint, metrics) for checkpoint, metrics in result.best_checkpoints}
    steps = {"sharded": 1, "both": 1, "asynchronous": 2, "custom": 3, "there": 4}
    assert {name: metrics["step"] for name, (_, metrics) in reported.items()} == steps
    assert [name for name, (_, metrics) in reported.items() if metrics.get("validated") == 30.0] == ["custom"]
    for name, (checkpoint, _) in reported.items():
        state = json.loads(Path(checkpoint.path, "raylance_state.json").read_text())
        assert (state["epoch"], state["position"]) == (0, BATCH * steps[name]), name
        parts = sorted(path.name for path in Path(checkpoint.path).glob("part-*"))
        assert parts == (["part-0.txt", "part-1.txt"] if name in ("sharded", "both", "there") else []), name
        seen: list[Path] = []
        loader = train.loader(rank=1, world_size=3)
        saved = raylance.restore(loader, checkpoint, load=lambda directory, seen=seen: seen.extend(directory.iterdir()))
        assert loader.state_dict()["position"] == BATCH * steps[name]
        assert {path.name for path in seen} >= {"raylance_state.json", *parts}
        assert saved is not None
        assert saved.get("step") == (None if name in ("sharded", "there") else steps[name])
    with pytest.raises(raylance.StateError, match="pass as load="):
        raylance.restore(loader, reported["sharded"][0])
