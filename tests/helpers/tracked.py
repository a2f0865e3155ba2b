"""Reading back what trackers got: which steps each curve has."""

import importlib.util
import json
from pathlib import Path
from typing import Any

INSTALLED = [name for name in ("tensorboard", "wandb", "mlflow") if importlib.util.find_spec(name) is not None]


def curves_of_tensorboard(folder: Path) -> dict[str, list[int]]:
    """The steps of each curve, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [point.step for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


def curves_of_mlflow(uri: str) -> tuple[dict[str, list[int]], str]:
    """The steps of each curve of the only run of the only experiment, and the run's status."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("raylance")
    [run] = client.search_runs([experiment.experiment_id])
    histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: sorted(point.step for point in history) for name, history in histories.items()}, run.info.status


def inputs_of_mlflow(uri: str) -> dict[str, dict[str, Any]]:
    """The sources of the datasets of the only run, by what they are for."""
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    [run] = client.search_runs([client.get_experiment_by_name("raylance").experiment_id])
    return {each.tags[0].value: json.loads(each.dataset.source) for each in run.inputs.dataset_inputs}
