"""Classes: their names, their order, the integers that stand for them."""

import argparse
import json
from collections.abc import Collection

import lance
import pyarrow as pa
import pyarrow.compute as pc

from jobs.common import RefusedError, locate, reason, show_command, store_options, store_words

NAMED = 10  # classes that a summary names


def read_classes(file: str | None, found: Collection[str]) -> list[str]:
    """Returns class names in the order of their labels: those of the file, one a line, else the found ones sorted."""
    if "" in found:
        raise RefusedError(
            "some rows have an empty string for a label. It would be a class without a name. Fill them, or leave these "
            "rows out."
        )
    if file is None:
        return sorted(found)
    try:
        with open(file, encoding="utf-8-sig") as lines:  # some editors begin a file with a mark
            classes = [line.rstrip("\r\n") for line in lines]
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"--classes {file} can't be read ({reason(error)}). Labels would have no order. Give a text file "
            "with one class name a line."
        ) from error
    while classes and not classes[-1].strip():
        del classes[-1]
    if blank := [number for number, name in enumerate(classes, 1) if not name.strip()]:
        raise RefusedError(
            f"--classes {file} has nothing in line {blank[0]}. It would be the name of a class. Remove the line."
        )
    if len(classes) != len(set(classes)) or not classes:
        raise RefusedError(
            f"--classes {file} has {len(classes)} lines with {len(set(classes))} names. A name would have no label, "
            "or two. Give every class one line."
        )
    if missing := sorted(set(found) - set(classes)):
        raise RefusedError(
            f"--classes {file} lacks {len(missing):,} of the classes found, such as {', '.join(missing[:3])}. Their "
            "rows would have no label. Add them to the file."
        )
    return classes


def is_text(kind: pa.DataType) -> bool:
    """Whether values are strings, also where each is stored once."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def to_labels(names: pa.ChunkedArray | pa.Array, classes: list[str]) -> pa.ChunkedArray | pa.Array:
    """Returns the place of each name among the classes, int64; null for null."""
    return pc.index_in(names.cast(pa.string()), value_set=pa.array(classes, pa.string())).cast(pa.int64())


def describe(classes: list[str]) -> str:
    """Returns how many classes there are, and their names or the first ones."""
    return f"{len(classes):,}: {', '.join(classes[:NAMED])}{', ...' if len(classes) > NAMED else ''}"


def add_classes(args: argparse.Namespace) -> str:
    """Adds integer labels beside the strings of a Lance dataset, as new versions; returns what was done."""
    options = store_options(args.storage_options)
    uri = locate(args.data)
    try:
        dataset = lance.dataset(uri, storage_options=options)
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"no Lance dataset can be opened at --data {args.data} ({reason(error)}). There is nothing to add labels "
            "to. Give one that exists."
        ) from error
    kinds = {field.name: field.type for field in dataset.schema}
    if not is_text(kinds.get(args.string_column, pa.null())):
        raise RefusedError(
            f"--data {args.data} lacks a column {args.string_column} of strings, it has "
            f"{', '.join(f'{name} ({kind})' for name, kind in kinds.items())}. There are no names to number. Name the "
            "column by --string-column."
        )
    if args.label_column in kinds:
        raise RefusedError(
            f"--data {args.data} has a column {args.label_column} ({kinds[args.label_column]}) already. It would be "
            "replaced. Give the new one another name by --label-column."
        )
    found: set[str] = set()
    for batch in dataset.scanner(columns=[args.string_column], batch_size=1 << 16).to_batches():
        found.update(batch[0].unique().to_pylist())
    if found & {None, ""}:
        rows = dataset.count_rows(f"`{args.string_column}` IS NULL OR `{args.string_column}` = ''")
        raise RefusedError(
            f"{rows:,} rows of --data {args.data} have no {args.string_column}. They would have no label. Fill them, "
            "or delete these rows."
        )
    classes = read_classes(args.classes, found)
    metadata = dataset.schema.metadata or {}
    named, of = metadata.get(b"classes"), metadata.get(b"classes_of", b"label").decode()
    if named and of in kinds:
        raise RefusedError(
            f"--data {args.data} names the classes of {of} already, {describe(json.loads(named))}. A dataset has names "
            f"for one column, and {of} would lose them. Use {of}, or make another dataset without it."
        )
    if named and json.loads(named) != classes:
        raise RefusedError(
            f"--data {args.data} names its classes {describe(json.loads(named))} already, and {args.string_column} has "
            f"{describe(classes)}. Labels that it has would be named wrongly. Give these names by --classes."
        )

    @lance.batch_udf(output_schema=pa.schema({args.label_column: pa.int64()}))
    def number(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({args.label_column: to_labels(batch[args.string_column], classes)})

    before = dataset.version
    # Names first: a version with labels that nothing names is never to be seen.
    metadata = {"classes": json.dumps(classes, ensure_ascii=False), "classes_of": args.label_column}
    dataset.update_schema_metadata(metadata)
    dataset.add_columns(number, read_columns=[args.string_column])
    named = ["--label-column", args.label_column] if args.label_column != "label" else []
    store = store_words(args.storage_options)
    return "\n".join([
        f"added {args.label_column} to {uri}, version {dataset.version} (it was {before}, which stays as it is)",
        f"  classes    {describe(classes)}",
        f"use it: {show_command(['python', 'jobs/train_images.py', '--data', uri, *named, *store])}",
    ])  # fmt: skip
