"""The classes by which MLflow shows a dataset of Lance, and opens it again. Imports MLflow."""

import json
from typing import Any

import mlflow.data.dataset_source_registry
from mlflow.data.dataset import Dataset
from mlflow.data.dataset_source import DatasetSource

from raylance.api.opening import dataset
from raylance.descriptions import is_description, read_description
from raylance.errors import ConfigError


class LanceSource(DatasetSource):  # type: ignore[misc]
    """The URI, version and selection of a dataset."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    @staticmethod
    def _get_source_type() -> str:
        return "lance"

    def load(self, **arguments: Any) -> Any:
        """Opens the same version with the same filter; `arguments` are those of `raylance.dataset`.

        Raises:
            DatasetError: If the version is gone.
        """
        uri = self.facts["uri"]
        if isinstance(uri, dict):
            raise ConfigError(
                "the rows were those of a mixture of several datasets. Open each by raylance.dataset, and mix them."
            )
        if isinstance(self.facts.get("filter"), dict) and "filter" not in arguments:
            raise ConfigError(
                f"the rows were those of a filter of {self.facts['filter']['characters']:,} characters, and MLflow "
                "holds only its begin. Without it, other rows would come. Give it: source.load(filter=…)."
            )
        split = self.facts.get("split")
        if split is not None and not is_description(split) and "split" not in arguments:
            raise ConfigError(
                f"the rows were those of split={split}, which MLflow holds shortened, or as text. Without it, other "
                "rows would come. Give it: source.load(split=…)."
            )
        split = read_description(split) if is_description(split) else None
        given = {"version": self.facts["version"], "filter": self.facts.get("filter"), "split": split}
        return dataset(uri, **given | arguments)

    @staticmethod
    def _can_resolve(raw_source: Any) -> bool:
        return False  # a URI alone does not say that Lance wrote it

    @classmethod
    def _resolve(cls, raw_source: Any) -> "LanceSource":
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns what MLflow keeps."""
        return self.facts

    @classmethod
    def from_dict(cls, source_dict: dict[str, Any]) -> "LanceSource":
        """Returns the source that `to_dict` described."""
        return cls(source_dict)


class LanceData(Dataset):  # type: ignore[misc]
    """The selected rows of a dataset."""

    def __init__(self, source: LanceSource, name: str, digest: str, rows: int) -> None:
        self._rows = rows
        super().__init__(source=source, name=name, digest=digest)

    def _compute_digest(self) -> str:
        return str(self.digest)  # it is given

    @property
    def profile(self) -> dict[str, int]:
        """The number of rows."""
        return {"num_rows": self._rows}

    @property
    def schema(self) -> None:
        """None: MLflow's schemas describe inputs of models."""
        return

    def to_dict(self) -> dict[str, str]:
        """Returns what MLflow keeps."""
        kept: dict[str, str] = super().to_dict()
        return kept | {"profile": json.dumps(self.profile)}


mlflow.data.dataset_source_registry.register_dataset_source(LanceSource)
