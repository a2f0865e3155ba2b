"""Owns how TensorBoard, W&B and MLflow are called; never what is logged, or when.

Ray's integrations (`ray.air.integrations`) begin another run with each attempt of a run: these continue the same one.
"""

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
from jobs.train_images.run_folder import RunFolder

Settings = Mapping[str, Any]
Facts = Mapping[str, Mapping[str, Any]]


def plain(text: str) -> str:
    """A text without the passwords of the URIs in it."""
    return re.sub(r"(?<=://)(?:[^:/@\s]*:\S*|[^/@\s]*)@", f"{HIDDEN}@", text)


def folder_of(at: RunFolder, id: str) -> str:
    """Where a tracker writes its files on rank 0's node: the run's folder, where that is one of the file system."""
    return at.local or os.path.join(tempfile.gettempdir(), f"raylance-{id}")


def copy_to_run(folder: Path, name: str) -> None:
    """Copies a folder into the run's, which lies in an object store: those cannot be appended to."""
    storage = ray.train.get_context().get_storage()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            to = f"{storage.experiment_fs_path}/{name}/{path.relative_to(folder)}"
            storage.storage_filesystem.create_dir(os.path.dirname(to), recursive=True)
            local = pyarrow.fs.LocalFileSystem()
            pyarrow.fs.copy_files(str(path), to, local, storage.storage_filesystem)


class TensorBoard:
    """Event files in the run's folder."""

    module = "tensorboard"

    @staticmethod
    def resolve(at: RunFolder, notes: dict[str, Any]) -> dict[str, Any]:
        """Returns where it writes, and where its files are kept."""
        kept = f"{at.folder}/tensorboard"
        return {"folder": f"{folder_of(at, notes['id'])}/tensorboard", "is_local": at.local is not None, "kept": kept}

    @staticmethod
    def describe(settings: Settings) -> str:
        """Where to look."""
        copied = "" if settings["is_local"] else " (copied there with each checkpoint)"
        return f"tensorboard --logdir {settings['kept']}{copied}"

    def __init__(self, settings: Settings, step: int, facts: Facts) -> None:
        """Begins a file after a step; what a lost attempt logged after it is dropped when the files are read."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._is_local = Path(settings["folder"]), settings["is_local"]
        self._writer = SummaryWriter(self._folder, purge_step=step + 1)
        for group, values in facts.items():
            lines = "\n".join(f"    {name}: {json.dumps(value, default=str)}" for name, value in values.items())
            self._writer.add_text(group, lines, step + 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs figures of a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def keep(self) -> None:
        """Writes what was logged."""
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
    """A run of Weights & Biases, with the same id in each attempt."""

    module = "wandb"
    _VARIABLES: ClassVar = {"project": "WANDB_PROJECT", "entity": "WANDB_ENTITY", "mode": "WANDB_MODE"}

    @classmethod
    def resolve(cls, at: RunFolder, notes: dict[str, Any]) -> dict[str, Any]:
        """Returns its settings; its key is taken from the environment of rank 0's node."""
        found = {name: os.environ[variable] for name, variable in cls._VARIABLES.items() if os.environ.get(variable)}
        return {
            "project": "raylance",
            **found,
            "id": notes["id"],
            "name": at.name,
            "folder": os.environ.get("WANDB_DIR") or folder_of(at, notes["id"]),
            "is_kept": at.local is not None or "WANDB_DIR" in os.environ,
        }

    @staticmethod
    def describe(settings: Settings) -> str:
        """Where to look."""
        if settings.get("mode") == "offline":
            return f"wandb sync {settings['folder']}/wandb/offline-run-*-{settings['id']}"
        return f"run {settings['id']} of project {settings['project']}"

    def __init__(self, settings: Settings, step: int, facts: Facts) -> None:
        """Continues the run of this id, or begins it."""
        import wandb

        os.makedirs(settings["folder"], exist_ok=True)
        self._settings = settings
        self._run = wandb.init(
            **{name: settings[name] for name in ("project", "entity", "mode", "id", "name") if name in settings},
            dir=settings["folder"],
            resume="allow",
            config={group: dict(values) for group, values in facts.items()},
            allow_val_change=True,
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Online, W&B drops points of steps that it has. Offline it does not know them, and this file does.
        self._note = Path(settings["folder"], f"wandb-{settings['id']}.step")
        noted = int(self._note.read_text() or 0) if self._note.exists() else 0
        self._logged = max(noted, self._run.step - 1)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs figures of a step, unless it has them."""
        if step > self._logged:
            self._run.log(dict(figures), step=step)
            self._note.write_text(str(step))

    def keep(self) -> None:
        """Copies offline records that would be lost with the node."""
        if self._settings.get("mode") == "offline" and not self._settings["is_kept"]:
            for folder in glob.glob(f"{self._settings['folder']}/wandb/offline-run-*"):
                copy_to_run(Path(folder), f"wandb/{os.path.basename(folder)}")

    def end(self, is_done: bool) -> None:
        """Records how it ended."""
        self._run.finish(exit_code=0 if is_done else 1)
        self.keep()


class Mlflow:
    """A run of MLflow, the same in each attempt; the driver closes it, because a worker may have been killed."""

    module = "mlflow"

    @classmethod
    def resolve(cls, at: RunFolder, notes: dict[str, Any]) -> dict[str, Any]:
        """Finds the run, or makes it.

        Raises:
            ConfigError: There is no server or database, or it does not answer.
        """
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (at.local and f"sqlite:///{at.storage}/mlflow.db")
        if not uri:
            raise raylance.ConfigError(
                f"--track mlflow: MLFLOW_TRACKING_URI is not set, and --storage-path {at.storage} cannot hold a "
                "database. The run would not be tracked. Set the variable on all nodes, or leave mlflow out."
            )
        noted, shown = notes.get("mlflow", {}), plain(uri)
        try:
            client = _client_of_mlflow(uri)
            is_same = noted.get("uri") == shown and cls._is_active(client, noted["run"])
            run = noted["run"] if is_same else cls._begin(client, at.name)
        except Exception as error:  # MLflow's own, a database's, a network's
            raise raylance.ConfigError(
                f"--track mlflow: {shown} cannot be used ({type(error).__name__}: {plain(str(error))}). The run "
                "would not be tracked. Set another MLFLOW_TRACKING_URI, or leave mlflow out."
            ) from error
        notes["mlflow"] = {"uri": shown, "run": run}
        return dict(notes["mlflow"])

    @staticmethod
    def _is_active(client: Any, run: str) -> bool:
        """Whether the run is still there; if so, it is marked as running."""
        from mlflow.exceptions import MlflowException

        try:
            is_active = client.get_run(run).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return False
        if is_active:
            client.update_run(run, status="RUNNING")
        return is_active

    @staticmethod
    def _begin(client: Any, run: str) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "raylance"
        experiment = client.get_experiment_by_name(name)
        id = experiment.experiment_id if experiment else client.create_experiment(name)
        return str(client.create_run(id, run_name=run).info.run_id)

    @staticmethod
    def describe(settings: Settings) -> str:
        """Where to look."""
        if settings["uri"].startswith("http"):
            return f"run {settings['run']} at {settings['uri']}"
        return f"mlflow ui --backend-store-uri {settings['uri']}"

    @staticmethod
    def close(settings: Settings, status: str) -> None:
        """Records how the run ended, from the driver."""
        _client_of_mlflow(settings["uri"]).set_terminated(settings["run"], status)

    def __init__(self, settings: Settings, step: int, facts: Facts) -> None:
        """Continues the run that `resolve` found or made."""
        from mlflow.entities import Param, RunTag

        self._client, self._run = _client_of_mlflow(settings["uri"]), settings["run"]
        run = self._client.get_run(self._run)
        histories = [self._client.get_metric_history(self._run, name) for name in run.data.metrics]
        self._logged = max((metric.step for history in histories for metric in history), default=0)
        texts = {
            f"{group}.{name}": value if isinstance(value, str) else json.dumps(value, default=str)
            for group, values in facts.items()
            for name, value in values.items()
        }
        # A parameter cannot be changed; tags hold what the last attempt had.
        params = [Param(name, text) for name, text in texts.items() if name not in run.data.params]
        tags = [RunTag(name, text) for name, text in texts.items()]
        self._client.log_batch(self._run, params=params, tags=tags)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Logs figures of a step, unless it has them."""
        from mlflow.entities import Metric

        if step > self._logged:
            now = int(1000 * time.time())
            self._client.log_batch(self._run, metrics=[Metric(name, v, now, step) for name, v in figures.items()])

    def keep(self) -> None:
        """Does nothing: MLflow keeps each point."""

    def end(self, is_done: bool) -> None:
        """Does nothing: the driver closes the run."""


def _client_of_mlflow(uri: str) -> Any:
    """A client; a URI without its password is completed by the environment."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or uri)


TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}
