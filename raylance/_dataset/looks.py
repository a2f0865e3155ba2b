"""Owns what a notebook shows of a dataset: facts, some rows, counts of classes; never draws, and keeps nothing."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raylance._dataset.showing import Shown, joined, show_counts, show_facts, show_rows
from raylance.columns import ROW_OFFSET
from raylance.errors import RaylanceError
from raylance.source.rows import TableRows

if TYPE_CHECKING:
    from raylance._dataset.dataset import Dataset

_COUNTED = 2000  # rows whose labels are read
_LABEL = "label"  # where the schema names no other column beside the classes


def describe(data: "Dataset") -> Shown:
    """A dataset: what it is, with a few rows."""
    feed, delivery = data.opened
    facts = {
        "dataset": feed.source.uri,
        "version": data.version,
        "filter": delivery.filter or "none",
        "rows": f"{len(data):,}",
        "order": delivery.order.name,
        **{name: told(kind) for name, kind in zip(data.schema.names, data.schema.types, strict=True)},
    }
    return joined(Shown(show_facts(facts), repr(data)), look(data, 4))


def told(kind: pa.DataType) -> str:
    """A type as NumPy tells it, where it is a tensor."""
    return f"{kind.value_type} {tuple(kind.shape)}" if isinstance(kind, pa.FixedShapeTensorType) else str(kind)


def look(data: "Dataset", rows: int) -> Shown:
    """Some rows spread over a dataset, and its classes where it has labels."""
    parts = []
    try:
        if rows:
            places = np.linspace(0, len(data) - 1, min(rows, len(data))).astype(np.int64)
            title = f"{len(places)} of {len(data):,} rows"
            parts.append(show_rows(data[places], len(places), title, label_of(data), classes_of(data)))
        labels = labels_of(data)
        if labels is not None:
            parts.append(show_counts(labels, classes_of(data), f"{len(labels):,} rows"))
    except RaylanceError as error:  # a row that cannot be read hides nothing else
        parts.append(Shown(show_facts({"error": error}), str(error)))
    return joined(*parts)


def look_at(data: "Dataset", batch: Mapping[str, Any]) -> Shown:
    """A batch of a dataset."""
    shown = {name: values for name, values in batch.items() if not name.startswith("_") or name == ROW_OFFSET}
    rows = len(next(iter(shown.values()), ()))
    parts = [show_rows(shown, 16, f"{min(rows, 16)} of {rows:,} rows", label_of(data), classes_of(data))]
    labels = shown.get(label_of(data))
    if labels is not None and getattr(labels, "ndim", 0) == 1:
        parts.append(show_counts(labels, classes_of(data), f"{rows:,} rows"))
    return joined(*parts)


def label_of(data: "Dataset") -> str:
    """The column that the names of classes belong to."""
    named: bytes = (data.schema.metadata or {}).get(b"classes_of", _LABEL.encode())
    return named.decode()


def classes_of(data: "Dataset") -> list[str] | None:
    """Names of classes, as jobs/create_dataset.py leaves them in the schema's metadata."""
    names = (data.schema.metadata or {}).get(b"classes")
    return None if names is None else list(json.loads(names))


def labels_of(data: "Dataset") -> Any:
    """Labels of rows spread over the selection; None where there is no column of that name."""
    source = data.opened[0].source
    if not isinstance(source, TableRows):
        return None
    opened, label = source.pinned.open(), label_of(data)
    if label not in opened.schema.names:
        return None
    rows = np.unique(np.linspace(0, len(data) - 1, min(_COUNTED, len(data))).astype(np.int64))
    found = opened.take(source.load_selection().offsets(rows), columns=[label])[label].drop_null()
    return found.to_numpy()
