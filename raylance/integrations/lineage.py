"""A dataset as trackers of experiments mean one, so that a run there says which rows it was trained on."""

import hashlib
import json
import os
import re
from typing import Any

from raylance.api.dataset import Dataset
from raylance.api.loader import RankLoader
from raylance.errors import ConfigError
from raylance.secrets import public_uri

_MOST = 65_535  # characters of a source, which MLflow takes; of a name, it takes 500, and W&B 128
_SHOWN = 200  # characters that are shown of a fact that is too long
_FACTS = ("version", "branch", "filter", "split", "rows", "fingerprint", "identity", "windows", "columns")


def mlflow_dataset(data: Dataset | RankLoader, name: str | None = None) -> Any:
    """Returns a dataset of MLflow, for `mlflow.log_input(…, context="training")`. Nothing is read or copied.

    Its source is the URI with version, filter and split, its digest a hash of the selected rows and of the files of the
    version, its profile the number of rows. `mlflow.data.get_source` gives the source back, and its `load()` opens the
    same version. MLflow takes 65,535 characters: of a longer source, the longest facts, such as thousands of columns,
    are shortened to their begin, length and hash.

    Args:
        data: A handle or a loader. A handle from `raylance.mix` has several URIs, by the names of its datasets.
        name: The name in MLflow; None for the end of the URI.

    Raises:
        ConfigError: If `data` is neither, or MLflow is not installed.
    """
    facts = _facts_of(data)
    try:
        from raylance.integrations.mlflow_source import LanceData, LanceSource
    except ImportError as error:
        raise _missing("mlflow", error) from error
    return LanceData(LanceSource(_fitting(facts)), (name or _name_of(facts))[:500], _digest_of(facts), facts["rows"])


def wandb_artifact(data: Dataset | RankLoader, name: str | None = None) -> Any:
    """Returns an artifact of Weights & Biases that refers to the dataset, for `run.use_artifact(…)`, which needs a run
    that is not offline. No row is read or copied. The artifact's metadata have version, filter, split, rows and hashes;
    its reference is the URI, or, for a local folder, the files in it.

    Args:
        data: A handle or a loader. A handle from `raylance.mix` has several URIs.
        name: The name in W&B; None for the end of the URI.

    Raises:
        ConfigError: If `data` is neither, `name` is not a string or is empty, or wandb is not installed.
        wandb.Error: If W&B needs another package for the URI, as `wandb[gcp]` for `gs://`.
    """
    facts = _facts_of(data)
    if not (name is None or (isinstance(name, str) and name)):
        raise ConfigError(f"wandb_artifact(name={name!r}): give a string, or None for the end of the URI.")
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb", error) from error
    plain = re.sub(r"[^\w.-]+", "-", name or _name_of(facts))[:128].strip("-")
    artifact = wandb.Artifact(plain, type="dataset", metadata=facts | {"digest": _digest_of(facts)})
    for part, uri in _uris_of(facts).items():
        # W&B would hash each file of the dataset.
        artifact.add_reference(uri, name=part, checksum=False)
    return artifact


def _facts_of(data: Any) -> dict[str, Any]:
    if isinstance(data, Dataset):
        with data.loader(record=False) as loader:
            return _facts_of(loader)
    if not isinstance(data, RankLoader):
        raise ConfigError(
            f"{type(data).__name__} has no rows to name: give the handle of raylance.dataset or raylance.mix, or a "
            "loader."
        )
    found = data.identity()
    uri = found["uri"]
    shown = {name: public_uri(each) for name, each in uri.items()} if isinstance(uri, dict) else public_uri(uri)
    return {"uri": shown} | {name: found[name] for name in _FACTS if name in found}


def _uris_of(facts: dict[str, Any]) -> dict[str, str]:
    uris = facts["uri"] if isinstance(facts["uri"], dict) else {"dataset": facts["uri"]}
    return {name: uri if "://" in uri else f"file://{os.path.abspath(uri)}" for name, uri in uris.items()}


def _name_of(facts: dict[str, Any]) -> str:
    ends = [uri.rstrip("/").rpartition("/")[2] for uri in _uris_of(facts).values()]
    return "+".join(ends)


def _digest_of(facts: dict[str, Any]) -> str:
    """Returns a hash of the rows and of the files that hold them, of 16 digits: MLflow allows 36."""
    rows = json.dumps([facts.get("identity"), facts["fingerprint"], facts.get("windows")], sort_keys=True)
    return hashlib.blake2b(rows.encode(), digest_size=8).hexdigest()


def _fitting(facts: dict[str, Any]) -> dict[str, Any]:
    """Shortens the longest facts until MLflow takes them."""
    kept = dict(facts)
    for name in sorted(facts, key=lambda name: -len(json.dumps(facts[name]))):
        if len(json.dumps(kept)) <= _MOST:
            break
        text = json.dumps(facts[name])
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        kept[name] = {"begin": text[:_SHOWN], "characters": len(text), "digest": digest}
    return kept


def _missing(package: str, error: ImportError) -> ConfigError:
    return ConfigError(
        f"{package} is not installed ({error}), so nothing can be logged there. Install it: pip install {package}."
    )
