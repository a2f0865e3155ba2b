"""A notebook's display of a dataset: facts, rows, counts of classes, method of reading."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from raylance.batches.shown_rows import Display, by_row, display_counts, display_rows, facts_table, stacked
from raylance.columns import ROW_OFFSET, STEP_COST
from raylance.errors import ConfigError, RaylanceError
from raylance.opened import ReadSpec
from raylance.orders.mixture import MixOrder
from raylance.orders.permutation import Int64Array
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.plan import Plan
from raylance.planning.summary import counted
from raylance.samples.table import unneeded_rows
from raylance.source.filters import short_text
from raylance.source.rows import RowSource, TableRows

_LARGEST_TRIAL = 1 << 21  # maximum number of rows that are planned to show how they are read
_COUNTED = 2000  # number of rows whose labels are read
_LABEL = "label"  # the column of labels if the metadata names no other


class _Displayed(Protocol):
    """The properties and methods of a dataset that this module uses."""

    @property
    def version(self) -> Any: ...

    @property
    def schema(self) -> pa.Schema: ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: Any, /) -> Mapping[str, Any]: ...


def describe(data: _Displayed, read_spec: ReadSpec, delivery_spec: DeliverySpec) -> Display:
    """Displays the facts of a dataset and a few of its rows."""
    source, turned = read_spec.source, read_spec.channels_last
    order = delivery_spec.order
    facts = {
        "dataset": source.uri,
        "version": data.version,
        "filter": short_text(read_spec.filter or "none"),
        "rows": describe_rows(delivery_spec),
        "order": order.name,
    }
    if isinstance(order, MixOrder):
        facts = {
            part.name: f"{source.uri[part.name]}, version {data.version[part.name]}, "
            f"filter {short_text(read_spec.filter[part.name] or 'none')}: {part.rows:,} rows, "
            f"order {part.order.name}, "
            f"{100 * part.quota / sum(order.quotas):.4g}% of an epoch"
            for part in order.components
        }
        facts["rows"] = describe_rows(delivery_spec)
    facts |= {
        field.name: _type_name(field.type) + ", in torch channels first" * (field.name in turned)
        for field in data.schema
    }
    return stacked(Display(facts_table(facts), repr(data)), display_sample(data, source, 4))


def describe_rows(delivery_spec: DeliverySpec) -> str:
    """Describes the number of selected rows, and the number of rows in an epoch if it differs."""
    rows = delivery_spec.rows
    each = delivery_spec.resolved_order.epoch_rows if delivery_spec.order.repeats else rows
    return f"{rows:,} rows{f' ({each:,} an epoch)' if each != rows else ''}"


def _type_name(kind: pa.DataType) -> str:
    """Returns the name of a type; for a tensor, its value type and its shape as a tuple."""
    return f"{kind.value_type} {tuple(kind.shape)}" if isinstance(kind, pa.FixedShapeTensorType) else str(kind)


def display_sample(data: _Displayed, source: RowSource, rows: int) -> Display:
    """Displays some rows that are spread over a dataset, and the counts of its classes if it has labels."""
    parts, (label, classes) = [], _label_and_classes(data)
    try:
        if rows:
            indices = _spread(len(data), rows)
            title = f"{len(indices)} of {len(data):,} rows"
            parts.append(display_rows(data[indices], len(indices), title, label, classes))
        labels = _read_labels(source, label)
        if labels is not None:
            all_of = "" if len(labels) == len(data) else f" spread over all {len(data):,}"
            parts.append(display_counts(labels, classes, f"{len(labels):,} rows{all_of}"))
    except RaylanceError as error:  # an unreadable row must not hide the facts
        parts.append(Display(facts_table({"error": error}), str(error)))
    return stacked(*parts)


def display_batch(data: _Displayed, batch: Mapping[str, Any]) -> Display:
    """Displays a batch of a dataset."""
    batch = {name: values for name, values in batch.items() if name != STEP_COST}
    if lone := [name for name, values in batch.items() if not hasattr(values, "__len__")]:
        raise ConfigError(f"show(): {lone[0]!r} is {batch[lone[0]]!r}, no column of rows; pass one batch of a loader.")
    label, classes = _label_and_classes(data)
    shown = {name: values for name, values in by_row(batch).items() if not name.startswith("_") or name == ROW_OFFSET}
    lengths = {name: len(values) for name, values in shown.items()}
    rows = max(lengths.values(), default=0)
    if any(length != rows for length in lengths.values()):
        raise ConfigError(f"show(): columns of {lengths} values make no rows; pass one batch as the loader gave it.")
    parts = [display_rows(shown, 16, f"{min(rows, 16)} of {rows:,} rows", label, classes)]
    labels = shown.get(label)
    if labels is not None and label in data.schema.names and _holds_classes(data.schema.field(label).type):
        parts.append(display_counts(labels, classes, f"{rows:,} rows"))
    return stacked(*parts)


def how_read(source: RowSource, plan: Plan) -> str:
    """Describes how the first window of rank 0 is read: the method, how many of the stored rows it needs, the reads."""
    chunk = plan.chunk_at(0, 0)
    if chunk is None:
        return "nothing: the epoch has no step"
    if not isinstance(source, TableRows):
        return "range or take, as the datasets that it is made of need it"
    if chunk.steps * plan.global_batch_size > _LARGEST_TRIAL * plan.dp_size:
        either = "range or take" if source.read == "auto" else source.read
        return f"{either}, window by window"
    offsets = anchors = framed = source.load_selection().offsets(np.unique(plan.chunk_rows(chunk, 0)))
    if not len(offsets):
        return "nothing: rank 0 has no rows"
    if (samples := source.load_samples()) is not None:
        offsets = framed = samples.stored(anchors)
        unneeded = unneeded_rows(
            samples,
            offsets,
            samples.locate(offsets, anchors),
            [each.setting.column for each in source.added.videos][:1],
        )
        framed = offsets[~next(iter(unneeded.values()))] if unneeded else offsets
    reader, stored = source.open_rows(), int(offsets[-1] + 1 - offsets[0])
    how, (reads, at_once) = reader.choose(offsets), reader.count_reads(offsets)
    words = {"range": "stretches of stored rows", "take": "single rows, many in one read"}[how]
    share = f"{len(offsets) / stored:.0%} of the {stored:,} rows stored from its first to its last"
    size = len(offsets) * max(1.0, source.likely_row_bytes - source.made_bytes) / reads / 2**20
    each = "" if samples is None else f", {len(offsets) / len(anchors):.2f} of them a sample"
    return (
        f"{how}: {words}; the first window needs {share}{each}, in {counted(reads, 'read')} of {size:,.1f} MiB, "
        f"{at_once} at a time{_how_decoded(source, framed, len(anchors))}"
    )


def _how_decoded(source: TableRows, offsets: Int64Array, samples: int) -> str:
    """Describes how many frames of videos are decoded for the rows at `offsets`, which are those of some samples, if
    rows that follow one another name frames that do.
    """
    if not source.added.videos:
        return ""
    distance = max(each.keyframe_distance for each in source.added.videos)
    # Frames between two wanted ones are decoded, too, or, on average, half of those after the next keyframe.
    between = np.minimum(np.diff(offsets, prepend=offsets[0] - distance) - 1, (distance - 1) / 2)
    return (
        f"; of each video column, about {(len(offsets) + between.sum()) / samples:.2f} frames are decoded a sample, "
        f"from keyframes every {distance} frames"
    )


def _spread(selected: int, rows: int) -> Int64Array:
    """Returns the numbers of at most `rows` selected rows, spread from the first row to the last."""
    return np.linspace(0, selected - 1, min(rows, selected)).astype(np.int64)


def _label_and_classes(data: _Displayed) -> tuple[str, list[str] | None]:
    """Returns the column of labels, and its class names or None, from the metadata that jobs/create_dataset writes."""
    metadata = data.schema.metadata or {}
    try:
        names = json.loads(metadata.get(b"classes", b"null"))
    except (ValueError, RecursionError):  # another program wrote metadata with this key
        names = None
    classes = list(map(str, names)) if isinstance(names, list) else None
    return metadata.get(b"classes_of", _LABEL.encode()).decode(), classes


def _read_labels(source: RowSource, label: str) -> Any:
    """Returns the labels of rows spread over the selection, without nulls; None if the column is missing or has a
    type that cannot be classes, such as floats, or if the source is a mixture or packed.
    """
    if not isinstance(source, TableRows):
        return None
    opened, selection = source.pinned.open(), source.load_selection()
    if label not in opened.schema.names or not _holds_classes(opened.schema.field(label).type):
        return None
    offsets = selection.offsets(np.unique(_spread(selection.rows, _COUNTED)))
    return opened.take(offsets, columns=[label])[label].drop_null().to_pylist()


def _holds_classes(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_boolean)
    return any(test(kind) for test in tests)
