"""What MLflow and W&B get of a dataset; each is tried if it is installed (`pip install raylance[tracking]`)."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import raylance
from raylance.errors import ConfigError
from tests.helpers.tracked import INSTALLED

needs_mlflow = pytest.mark.skipif("mlflow" not in INSTALLED, reason="mlflow is not installed")
needs_wandb = pytest.mark.skipif("wandb" not in INSTALLED, reason="wandb is not installed")


@needs_mlflow
def test_mlflow_shows_the_dataset_and_opens_the_same_rows(images_uri: str, tmp_path: Path) -> None:
    import mlflow

    dataset = raylance.dataset(images_uri, filter="label < 3")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("lineage")
    with mlflow.start_run() as run, dataset.loader(record=False) as loader:
        mlflow.log_input(raylance.tracking.mlflow_dataset(loader), context="train")
        mlflow.log_input(raylance.tracking.mlflow_dataset(dataset), context="train")
    [shown] = mlflow.get_run(run.info.run_id).inputs.dataset_inputs
    source = json.loads(shown.dataset.source)
    assert (source["uri"], source["version"], source["filter"]) == (images_uri, dataset.version, "label < 3")
    assert json.loads(shown.dataset.profile) == {"num_rows": len(dataset)}
    assert shown.dataset.digest != raylance.tracking.mlflow_dataset(raylance.dataset(images_uri)).digest
    again = mlflow.data.get_source(shown).load(columns=["id"])
    assert again[:]["id"].tolist() == dataset[:]["id"].tolist()
    split = raylance.dataset(images_uri, split=raylance.FractionSplit(fractions={"train": 0.9, "val": 0.1}, part="val"))
    again = raylance.tracking.mlflow_dataset(split).source.load()
    assert again.loader().state_dict()["fingerprint"] == split.loader().state_dict()["fingerprint"]


@needs_mlflow
@pytest.mark.parametrize("kind", ["columns", "filter", "mixture"])
def test_what_is_too_long_for_mlflow_is_shortened(write_dataset: Callable[..., str], tmp_path: Path, kind: str) -> None:
    import mlflow

    wide = pa.table({f"a_feature_with_a_long_name_{number}": [0, 1] for number in range(3_000 * (kind == "columns"))})
    uri = write_dataset(wide.append_column("id", pa.array([0, 1])) if wide.num_columns else pa.table({"id": [0, 1]}))
    ids = f"id IN ({', '.join(map(str, range(20_000)))})"
    dataset = raylance.dataset(uri, filter=ids if kind == "filter" else None)
    if kind == "mixture":
        dataset = raylance.mix({f"part {number} {'x' * 700}": (dataset, 1.0) for number in range(60)})
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("lineage")
    with mlflow.start_run() as run:
        mlflow.log_input(raylance.tracking.mlflow_dataset(dataset), context="train")
    [shown] = mlflow.get_run(run.info.run_id).inputs.dataset_inputs
    assert len(shown.dataset.source) <= 65_535
    source = mlflow.data.get_source(shown)
    if kind == "columns":
        assert source.load(columns=["id"])[:]["id"].tolist() == [0, 1]
        assert source.facts["uri"] == uri
    else:
        with pytest.raises(ConfigError, match=kind):
            source.load()
    if kind == "filter":
        assert source.load(filter=ids)[:]["id"].tolist() == [0, 1]


@needs_wandb
def test_wandb_gets_a_reference_and_no_secret(images_uri: str) -> None:
    dataset = raylance.dataset(images_uri, filter="label < 3")
    artifact = raylance.tracking.wandb_artifact(dataset, "my images")
    assert (artifact.name, artifact.type) == ("my-images", "dataset")
    wanted = {"uri": images_uri, "version": dataset.version, "filter": "label < 3", "rows": len(dataset)}
    assert wanted.items() <= artifact.metadata.items()
    assert all(entry.ref.startswith(f"file://{images_uri}") for entry in artifact.manifest.entries.values())
    mixed = raylance.tracking.wandb_artifact(raylance.mix({"a": (dataset, 0.5), "b": (dataset, 0.5)}))
    assert {name.partition("/")[0] for name in mixed.manifest.entries} == {"a", "b"}


@pytest.mark.promise("P8")
@pytest.mark.parametrize("make", [raylance.tracking.mlflow_dataset, raylance.tracking.wandb_artifact])
def test_what_is_refused(make: object, images_uri: str) -> None:
    with pytest.raises(ConfigError, match="str"):
        make(images_uri)  # type: ignore[operator]
    package = "mlflow" if make is raylance.tracking.mlflow_dataset else "wandb"
    if package not in INSTALLED:
        with pytest.raises(ConfigError, match=package):
            make(raylance.dataset(images_uri))  # type: ignore[operator]
