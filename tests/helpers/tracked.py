"""Reading back what trackers got: which steps each curve has."""

import importlib.util
import json
import struct
from collections import defaultdict
from pathlib import Path

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


def curves_of_wandb(folder: Path) -> dict[str, list[int]]:
    """The steps of each curve in the offline records of the only run, attempts one after the other."""
    from wandb.proto import wandb_internal_pb2

    files = sorted(folder.glob("offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1, "an attempt has another id"
    steps: dict[str, list[int]] = defaultdict(list)
    for file in files:
        for content in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(content)
            if record.WhichOneof("record_type") != "history":
                continue
            values = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
            }
            for name in values:
                steps[name].append(values["_step"])
    return dict(steps)


def _records(content: bytes) -> list[bytes]:
    """What a file of LevelDB's log format holds, after a header of seven bytes: blocks of 32 KiB, records in parts."""
    found, parts, at = [], b"", 7
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(parts)
            parts = b""
    return found
