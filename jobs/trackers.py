"""Curves of a run in TensorBoard, W&B or MLflow, each by its own library; `Tracked` is what a training function uses.

Ray's integrations begin another run with each attempt of a run. Here, the id of a tracker's run goes into the
checkpoint, and the next attempt continues that run.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import ray.train
from pyarrow import fs as pafs

import raylance

Facts = Mapping[str, Mapping[str, Any]]  # by group
Data = Mapping[str, raylance.RankLoader]  # what the run reads, by what it is for
KINDS = ("tensorboard", "wandb", "mlflow")


class _TensorBoard:
    """Event files in the run's folder; if that is an object store, copied there with each checkpoint."""

    id = ""  # the folder is enough

    def __init__(self, run: str, id: str | None, step: int, facts: Facts, data: Data) -> None:
        from torch.utils.tensorboard import SummaryWriter

        storage = ray.train.get_context().get_storage()
        self._filesystem, self._kept = storage.storage_filesystem, f"{storage.experiment_fs_path}/tensorboard"
        self._folder = self._kept if self._filesystem.type_name == "local" else tempfile.mkdtemp(prefix="tensorboard-")
        # What a lost attempt logged after the checkpoint is dropped when the files are read: purge_step.
        self._writer = SummaryWriter(self._folder, purge_step=step + 1)
        for group, values in facts.items():
            text = json.dumps(values, indent=1, default=str)
            self._writer.add_text(group, "    " + text.replace("\n", "\n    "), step + 1)  # Markdown's code

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def keep(self) -> None:
        self._writer.flush()
        if self._folder != self._kept:
            self._filesystem.create_dir(self._kept)
            pafs.copy_files(self._folder, self._kept, pafs.LocalFileSystem(), self._filesystem)

    def end(self, is_done: bool) -> None:
        self._writer.close()
        self.keep()


class _Wandb:
    """A run of Weights & Biases, which drops points of steps that it has."""

    def __init__(self, run: str, id: str | None, step: int, facts: Facts, data: Data) -> None:
        import wandb

        storage = ray.train.get_context().get_storage()
        is_local = storage.storage_filesystem.type_name == "local"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "raylance"),
            id=id,
            name=run,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or (storage.experiment_fs_path if is_local else tempfile.mkdtemp()),
            config={group: dict(values) for group, values in facts.items()},
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.id = self._run.id
        for loader in () if self._run.offline else data.values():  # W&B refuses it offline
            self._run.use_artifact(raylance.tracking.wandb_artifact(loader))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def keep(self) -> None:
        pass  # W&B keeps each point

    def end(self, is_done: bool) -> None:
        self._run.finish(exit_code=0 if is_done else 1)


class _Mlflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI or in mlflow.db beside the runs."""

    def __init__(self, run: str, id: str | None, step: int, facts: Facts, data: Data) -> None:
        import mlflow

        beside = os.path.dirname(ray.train.get_context().get_storage().experiment_fs_path)
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{beside}/mlflow.db")
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or "raylance")
        self._mlflow, self.id = mlflow, mlflow.start_run(run_id=id, run_name=run).info.run_id
        histories = [mlflow.MlflowClient().get_metric_history(self.id, name) for name in ("loss", "train_loss")]
        self._logged = max((point.step for history in histories for point in history), default=0)  # by a lost attempt
        texts = {f"{group}.{key}": str(value) for group, values in facts.items() for key, value in values.items()}
        mlflow.set_tags(texts)  # a parameter could not be changed by the next attempt
        for name, loader in data.items():
            mlflow.log_input(raylance.tracking.mlflow_dataset(loader), context=name)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step > self._logged:
            self._mlflow.log_metrics(dict(figures), step=step)

    def keep(self) -> None:
        pass  # MLflow keeps each point

    def end(self, is_done: bool) -> None:
        self._mlflow.end_run("FINISHED" if is_done else "FAILED")


class Tracked(contextlib.AbstractContextManager["Tracked"]):
    """The trackers of a run: rank 0 opens them, other ranks log nothing. `ids` belongs into the checkpoint."""

    def __init__(
        self, kinds: Sequence[str], run: str, ids: Mapping[str, str], step: int, facts: Facts, data: Data
    ) -> None:
        """Continues the tracked runs of these ids after a step, or begins them."""
        open_ = dict(zip(KINDS, (_TensorBoard, _Wandb, _Mlflow), strict=True))
        mine = kinds if ray.train.get_context().get_world_rank() == 0 else ()
        self._open = {kind: open_[kind](run, ids.get(kind), step, facts, data) for kind in mine}
        self.ids = {kind: tracker.id for kind, tracker in self._open.items()}

    def __bool__(self) -> bool:
        return bool(self._open)

    def log(self, step: int, figures: Mapping[str, float], *, is_checkpoint: bool = False) -> None:
        """Logs figures of a step; with a checkpoint, all points so far are kept before it."""
        for tracker in self._open.values():
            tracker.log(step, figures)
            if is_checkpoint:
                tracker.keep()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for tracker in self._open.values():
            tracker.end(kind is None)


def names(text: str) -> list[str]:
    """An argparse type: names of trackers, with commas between them; "none" for no tracker."""
    given = [] if text == "none" else text.split(",")
    if unknown := [name for name in given if name not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(KINDS)}, none")
    return given


def choose(asked: Sequence[str] | None, is_local: bool) -> list[str]:
    """The trackers that were asked for, by default TensorBoard if it is installed.

    Raises:
        ConfigError: If one is not installed, or has no place to write.
    """
    missing = [name for name in asked or ["tensorboard"] if importlib.util.find_spec(name) is None]
    if asked is None:
        return [] if missing else ["tensorboard"]
    why = f"{missing[0]} is not installed" if missing else ""
    if "mlflow" in asked and not is_local and not os.environ.get("MLFLOW_TRACKING_URI"):
        why = why or "MLFLOW_TRACKING_URI is not set, and the runs' object store cannot hold a database"
    if why:
        raise raylance.errors.ConfigError(
            f"--track {','.join(asked)}: {why}. The run would not be tracked. Install it or set the variable on all "
            "nodes, or leave the tracker out."
        )
    return list(asked)
