"""Owns how TensorBoard, W&B and MLflow are spoken to; never what is logged, or when."""

import glob
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.fs
import ray.train

import raylance
from jobs.common import HIDDEN
from jobs.train_images.places import Place

Facts = Mapping[str, Mapping[str, Any]]


def plain(text: str) -> str:
    """A text without the passwords that URIs in it may have."""
    return re.sub(r"(?<=://)(?:[^:/@\s]*:\S*|[^/@\s]*)@", f"{HIDDEN}@", text)


def folder_of(at: Place, id: str) -> str:
    """Where a tracker writes its files on rank 0's node: the run's folder, where that is one of the file system."""
    return at.local or os.path.join(tempfile.gettempdir(), f"raylance-{id}")


def copy_to_run(folder: Path, name: str) -> None:
    """Copies a folder below the run's, which lies in an object store: those cannot be appended to."""
    storage = ray.train.get_context().get_storage()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            there = f"{storage.experiment_fs_path}/{name}/{path.relative_to(folder)}"
            storage.storage_filesystem.create_dir(os.path.dirname(there), recursive=True)
            pyarrow.fs.copy_files(
                str(path), there, source_filesystem=pyarrow.fs.LocalFileSystem(),
                destination_filesystem=storage.storage_filesystem,
            )  # fmt: skip


class TensorBoard:
    """Event files in the run's folder."""

    module, package = "tensorboard", "tensorboard"

    @staticmethod
    def settle(at: Place, notes: dict[str, Any]) -> dict[str, Any]:
        """Where it writes."""
        name = "tensorboard"
        return {
            "folder": f"{folder_of(at, notes['id'])}/{name}",
            "is_local": at.local is not None,
            "there": f"{at.folder}/{name}",
        }

    @staticmethod
    def told(settings: Mapping[str, Any]) -> str:
        """Where to look."""
        copied = "" if settings["is_local"] else " (copied there with each checkpoint)"
        return f"tensorboard --logdir {settings['there']}{copied}"

    def __init__(self, settings: Mapping[str, Any], behind: int, facts: Facts) -> None:
        """Begins a file; points behind the checkpoint, of an attempt that was lost, are dropped when it is read."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._is_local = Path(settings["folder"]), settings["is_local"]
        self._writer = SummaryWriter(self._folder, purge_step=behind + 1)
        for group, told in facts.items():
            lines = "\n".join(f"    {name}: {json.dumps(value, default=str)}" for name, value in told.items())
            self._writer.add_text(group, lines, behind + 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs figures of a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def keep(self) -> None:
        """Writes what there is."""
        self._writer.flush()
        if not self._is_local:
            copy_to_run(self._folder, "tensorboard")

    def end(self, is_done: bool) -> None:
        """Ends the file."""
        self._writer.close()
        self.keep()
        if not self._is_local:
            shutil.rmtree(self._folder, ignore_errors=True)


class Wandb:
    """A run of Weights & Biases, with the same id each time that it goes on."""

    module, package = "wandb", "wandb"
    _PLACES: ClassVar = {"project": "WANDB_PROJECT", "entity": "WANDB_ENTITY", "mode": "WANDB_MODE"}

    @classmethod
    def settle(cls, at: Place, notes: dict[str, Any]) -> dict[str, Any]:
        """What it needs; its key is taken from the environment of rank 0's node."""
        told = {name: os.environ[variable] for name, variable in cls._PLACES.items() if os.environ.get(variable)}
        folder = os.environ.get("WANDB_DIR") or folder_of(at, notes["id"])
        is_kept = at.local is not None or "WANDB_DIR" in os.environ
        return {"project": "raylance", **told, "id": notes["id"], "name": at.name, "folder": folder, "is_kept": is_kept}

    @staticmethod
    def told(settings: Mapping[str, Any]) -> str:
        """Where to look."""
        if settings.get("mode") == "offline":
            return f"wandb sync {settings['folder']}/wandb/offline-run-*-{settings['id']}"
        return f"run {settings['id']} of project {settings['project']}"

    def __init__(self, settings: Mapping[str, Any], behind: int, facts: Facts) -> None:
        """Goes on with the run of this id, or begins it."""
        import wandb

        os.makedirs(settings["folder"], exist_ok=True)
        self._settings, self._behind = settings, behind
        given = {name: settings[name] for name in ("project", "entity", "mode", "id", "name") if name in settings}
        self._run = wandb.init(
            **given,
            dir=settings["folder"],
            resume="allow",
            config={group: dict(told) for group, told in facts.items()},
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # W&B drops points of steps that it has; offline, where nobody tells, this file does.
        self._note = Path(settings["folder"], f"wandb-{settings['id']}.step")
        noted = int(self._note.read_text() or 0) if self._note.exists() else 0
        self._logged = max(noted, self._run.step - 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs figures of a step, unless it has them."""
        if step > self._logged:
            self._run.log(dict(figures), step=step)
            self._note.write_text(str(step))

    def keep(self) -> None:
        """Copies what would be lost with the node, where nobody sends it anywhere."""
        if self._settings.get("mode") == "offline" and not self._settings["is_kept"]:
            for folder in glob.glob(f"{self._settings['folder']}/wandb/offline-run-*"):
                copy_to_run(Path(folder), f"wandb/{os.path.basename(folder)}")

    def end(self, is_done: bool) -> None:
        """Says how it ended."""
        self._run.finish(exit_code=0 if is_done else 1)
        self.keep()


class Mlflow:
    """A run of MLflow, the same each time that it goes on."""

    module, package = "mlflow", "mlflow"

    @classmethod
    def settle(cls, at: Place, notes: dict[str, Any]) -> dict[str, Any]:
        """Finds the run, or makes it.

        Raises:
            ConfigError: If there is nowhere to, or nobody answers.
        """
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (at.local and f"sqlite:///{at.storage}/mlflow.db")
        if not uri:
            raise raylance.ConfigError(
                f"--track mlflow: MLFLOW_TRACKING_URI is not set, and --storage-path {at.storage} is no place for a "
                "database, so the run would not be tracked; set it on all nodes, or leave mlflow out"
            )
        told = {"uri": plain(uri)}
        try:
            found = cls._find(uri, notes.get("mlflow", {}), told) or cls._begin(uri, at.name)
        except Exception as error:  # MLflow's own, a database's, a network's
            raise raylance.ConfigError(
                f"--track mlflow: {plain(uri)} cannot be used ({type(error).__name__}: {plain(str(error))}), so the "
                "run would not be tracked; set another MLFLOW_TRACKING_URI, or leave mlflow out"
            ) from error
        notes["mlflow"] = told | {"run": found}
        return dict(notes["mlflow"])

    @staticmethod
    def _find(uri: str, noted: Mapping[str, str], told: Mapping[str, str]) -> str | None:
        """The run that this one was before, where it is still there."""
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        if noted.get("uri") != told["uri"]:
            return None
        client = MlflowClient(tracking_uri=uri)
        try:
            is_there = client.get_run(noted["run"]).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        if is_there:
            client.update_run(noted["run"], status="RUNNING")
        return noted["run"] if is_there else None

    @staticmethod
    def _begin(uri: str, run: str) -> str:
        from mlflow.tracking import MlflowClient

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "raylance"
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(name)
        id = experiment.experiment_id if experiment else client.create_experiment(name)
        return str(client.create_run(id, run_name=run).info.run_id)

    @staticmethod
    def told(settings: Mapping[str, Any]) -> str:
        """Where to look."""
        if settings["uri"].startswith("http"):
            return f"run {settings['run']} at {settings['uri']}"
        return f"mlflow ui --backend-store-uri {settings['uri']}"

    @classmethod
    def close(cls, settings: Mapping[str, Any], how: str) -> None:
        """Says how the run ended, from the driver: a worker may have been killed."""
        cls._client(settings).set_terminated(settings["run"], how)

    @staticmethod
    def _client(settings: Mapping[str, Any]) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or settings["uri"])

    def __init__(self, settings: Mapping[str, Any], behind: int, facts: Facts) -> None:
        """Goes on with the run that `settle` found, or made."""
        from mlflow.entities import Param, RunTag

        self._client_of, self._run = self._client(settings), settings["run"]
        run = self._client_of.get_run(self._run)
        histories = [self._client_of.get_metric_history(self._run, name) for name in run.data.metrics]
        self._logged = max((metric.step for history in histories for metric in history), default=0)
        flat = {f"{group}.{name}": _text(value) for group, told in facts.items() for name, value in told.items()}
        # A parameter cannot be changed; tags say what the last attempt had.
        params = [Param(name, value) for name, value in flat.items() if name not in run.data.params]
        tags = [RunTag(name, value) for name, value in flat.items()]
        self._client_of.log_batch(self._run, params=params, tags=tags)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs figures of a step, unless it has them."""
        from mlflow.entities import Metric

        if step > self._logged:
            now = int(1000 * time.time())
            self._client_of.log_batch(self._run, metrics=[Metric(name, v, now, step) for name, v in figures.items()])

    def keep(self) -> None:
        """Nothing: it is kept already."""

    def end(self, is_done: bool) -> None:
        """Nothing: the driver closes it."""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}
