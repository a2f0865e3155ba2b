"""Owns what is shown of a dataset: facts, some rows, counts of classes, how it is read; never draws, keeps nothing."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raylance.batches.display import Display, display_counts, display_rows, facts_table, stacked
from raylance.columns import ROW_OFFSET
from raylance.errors import ConfigError, RaylanceError
from raylance.orders.mixture import MixOrder
from raylance.orders.permutation import Int64Array
from raylance.planning.plan import Plan
from raylance.settings import DeliverySpec
from raylance.source.rows import TableRows

if TYPE_CHECKING:
    from raylance.api.dataset import Dataset

_LARGEST_TRIAL = 1 << 21  # rows to plan for telling how they are read
_COUNTED = 2000  # rows whose labels are read
_LABEL = "label"  # where the schema names no other column beside the classes


def describe(data: "Dataset") -> Display:
    """A dataset: what it is, with a few rows."""
    feed, delivery = data.opened
    schema, order = data.schema, delivery.order
    facts = {
        "dataset": feed.source.uri,
        "version": data.version,
        "filter": delivery.filter or "none",
        "rows": rows_in_words(delivery),
        "order": order.name,
    }
    if isinstance(order, MixOrder):
        facts = {
            part.name: f"{feed.source.uri[part.name]}, version {data.version[part.name]}, "
            f"filter {delivery.filter[part.name] or 'none'}: {part.rows:,} rows, order {part.order.name}, "
            f"{100 * part.quota / sum(order.quotas):.4g}% of an epoch"
            for part in order.components
        }
        facts |= {"rows": rows_in_words(delivery)}
    facts |= {
        **{name: told(kind) for name, kind in zip(schema.names, schema.types, strict=True)},
    }
    return stacked(Display(facts_table(facts), repr(data)), look(data, 4))


def rows_in_words(delivery: DeliverySpec) -> str:
    """How many are selected, and how many come in an epoch where that is another number."""
    order = delivery.order.resolve(delivery.facts) if delivery.order.repeats else None
    each = f" ({order.epoch_rows:,} an epoch)" if order is not None and order.epoch_rows != delivery.rows else ""
    return f"{delivery.rows:,} rows{each}"


def told(kind: pa.DataType) -> str:
    """A type as NumPy tells it, where it is a tensor."""
    return f"{kind.value_type} {tuple(kind.shape)}" if isinstance(kind, pa.FixedShapeTensorType) else str(kind)


def look(data: "Dataset", rows: int) -> Display:
    """Some rows spread over a dataset, and its classes where it has labels."""
    parts, (label, classes) = [], naming(data)
    try:
        if rows:
            places = spread(data, rows)
            title = f"{len(places)} of {len(data):,} rows"
            parts.append(display_rows(data[places], len(places), title, label, classes))
        labels = labels_of(data, label)
        if labels is not None:
            all_of = "" if len(labels) == len(data) else f" spread over all {len(data):,}"
            parts.append(display_counts(labels, classes, f"{len(labels):,} rows{all_of}"))
    except RaylanceError as error:  # a row that cannot be read hides nothing else
        parts.append(Display(facts_table({"error": error}), str(error)))
    return stacked(*parts)


def look_at(data: "Dataset", batch: Mapping[str, Any]) -> Display:
    """A batch of a dataset."""
    label, classes = naming(data)
    shown = {name: values for name, values in batch.items() if not name.startswith("_") or name == ROW_OFFSET}
    lengths = {name: len(values) for name, values in shown.items()}
    rows = max(lengths.values(), default=0)
    if any(length != rows for length in lengths.values()):
        raise ConfigError(f"show(): columns of {lengths} values make no rows; pass one batch as the loader gave it.")
    parts = [display_rows(shown, 16, f"{min(rows, 16)} of {rows:,} rows", label, classes)]
    labels = shown.get(label)
    if labels is not None and label in data.schema.names and _holds_classes(data.schema.field(label).type):
        parts.append(display_counts(labels, classes, f"{rows:,} rows"))
    return stacked(*parts)


def how_read(data: "Dataset", plan: Plan) -> str:
    """How the first chunk of rank 0 is read, and why."""
    source, chunk = data.opened[0].source, plan.chunk_at(0, 0)
    if not isinstance(source, TableRows) or chunk is None:
        return "its parts' own choice"
    if chunk.steps * plan.global_batch_size > _LARGEST_TRIAL * plan.world_size:
        return f"{source.read}, decided a chunk at a time"
    offsets = source.load_selection().offsets(np.unique(plan.chunk_rows(chunk, 0)))
    if not len(offsets):
        return "nothing"
    dense = len(offsets) / (offsets[-1] + 1 - offsets[0])
    how = source.open_reader().choose(offsets)
    return f"{how} ({dense:.0%} of the rows between, {source.row_bytes:,.0f} bytes each)"


def spread(data: "Dataset", rows: int) -> Int64Array:
    """So many rows of the selection at the most, from its first to its last."""
    return np.linspace(0, len(data) - 1, min(rows, len(data))).astype(np.int64)


def naming(data: "Dataset") -> tuple[str, list[str] | None]:
    """The column of labels, and the names of its classes, as jobs/create_dataset.py leaves them in the metadata."""
    metadata = data.schema.metadata or {}
    try:
        names = json.loads(metadata.get(b"classes", b"null"))
    except ValueError:  # another's, who means something else by it
        names = None
    classes = list(map(str, names)) if isinstance(names, list) else None
    return metadata.get(b"classes_of", _LABEL.encode()).decode(), classes


def labels_of(data: "Dataset", label: str) -> Any:
    """Labels of rows spread over the selection; None where there is no such column, or none of classes."""
    source = data.opened[0].source
    if not isinstance(source, TableRows):
        return None
    opened = source.pinned.open()
    if label not in opened.schema.names or not _holds_classes(opened.schema.field(label).type):
        return None
    offsets = source.load_selection().offsets(np.unique(spread(data, _COUNTED)))
    return opened.take(offsets, columns=[label])[label].drop_null().to_pylist()


def _holds_classes(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean)
    return any(test(kind) for test in tests)
