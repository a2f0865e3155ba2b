"""Owns the opening of the rows to train and to validate on, and all checks of them; never starts Ray."""

import argparse
import json
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc

import raylance
from jobs import common
from jobs.common import locate


def open_data(args: argparse.Namespace) -> tuple[raylance.Dataset, raylance.Dataset]:
    """Opens the rows to train and to validate on; checks all arguments about them."""
    if args.augment == "crop" and args.image_size is None:
        raise raylance.ConfigError("--augment crop makes crops of all sizes. They need one size. Give --image-size.")
    if args.image_column == args.label_column:
        raise raylance.ConfigError(
            f"--image-column and --label-column are both {args.image_column}. A model would learn its own input. Name "
            "two columns."
        )
    store = common.store_options(args.storage_options)
    crops = (raylance.RandomResizedCrop(), raylance.CenterCrop()) if args.augment == "crop" else (None, None)

    def rows(uri: str, where: str, version: Any, crop: Any, hflip: float, **options: Any) -> raylance.Dataset:
        try:
            opened = raylance.dataset(
                locate(uri),
                version=version,
                columns=[args.image_column, args.label_column],
                filter=where or None,
                decode=raylance.Image(
                    args.image_column, size=args.image_size, augment=crop, hflip=hflip, draft=args.draft
                ),
                seed=args.seed,
                on_bad_row=args.on_bad_row,
                max_bad_rows=args.max_bad_rows,
                storage_options=store or None,
                **options,
            )
            if args.image_size is None:
                opened.head(64)
        except (raylance.BadRowError, raylance.ConfigError) as error:
            if args.image_size is not None:
                raise
            raise raylance.DatasetError(f"{error} If images differ in size, give --image-size.") from error
        return opened

    flips = 0.0 if args.augment == "none" else 0.5
    train = rows(args.data, args.train_filter, args.version, crops[0], flips, order=args.order)
    # Both of one version, also where another is committed meanwhile.
    pinned = None if args.val_data else train.version
    try:
        val = rows(
            args.val_data or args.data, args.val_filter, pinned, crops[1], 0.0, order="sequential", remainder="ragged"
        )
    except raylance.DatasetError as error:
        raise raylance.DatasetError(f"{error} These are the rows to validate on: --val-filter, --val-data.") from error
    check_labels(args, train, val)
    return train, val


def check_labels(args: argparse.Namespace, train: raylance.Dataset, val: raylance.Dataset) -> None:
    """Refuses labels that are no integers, or that mean other classes where the rows to validate on lie elsewhere."""
    for uri, data in ((args.data, train), (args.val_data or args.data, val)):
        kind = data.schema.field(args.label_column).type
        if pa.types.is_integer(kind):
            continue
        fix = "Name a column of integers."
        if kind in (pa.string(), pa.large_string()) or pa.types.is_dictionary(kind):
            command = ["--data", uri, "--string-column", args.label_column, "--label-column", "class_id"]
            command += common.store_words(args.storage_options)
            fix = (
                "Add a column of integers by `python jobs/create_dataset.py classes "
                f"{common.show_command(command)}`, and train with --label-column class_id."
            )
        raise raylance.DatasetError(
            f"--label-column {args.label_column} of {uri} is {kind}. A classifier learns integers from 0 up. {fix}"
        )
    named = [(data.schema.metadata or {}).get(b"classes") for data in (train, val)]
    if None not in named and named[0] != named[1]:
        raise raylance.DatasetError(
            f"--val-data {args.val_data} names other classes than --data {args.data}. The same label would mean two "
            "things. Make both with the same names (`--classes` of jobs/create_dataset.py)."
        )


def count_classes(args: argparse.Namespace, train: raylance.Dataset) -> int:
    """Returns the number of classes: of the command line, else of the schema, else of the labels."""
    if args.num_classes:
        return int(args.num_classes)
    names = (train.schema.metadata or {}).get(b"classes")
    if names:
        return len(json.loads(names))
    options = common.store_options(args.storage_options)
    opened = lance.dataset(locate(args.data), version=train.version, storage_options=options or None)
    batches = opened.scanner(columns=[args.label_column], batch_size=1 << 16).to_batches()
    return 1 + max(pc.max(batch[0]).as_py() or 0 for batch in batches)


def check_batch(args: argparse.Namespace, rows: int) -> None:
    """Refuses a global batch that does not fit the ranks or the rows to train on."""
    if args.global_batch_size < args.num_workers:
        raise raylance.ConfigError(
            f"--global-batch-size {args.global_batch_size} is less than --num-workers {args.num_workers}. Some workers "
            "would get no row. Give a larger batch, or fewer workers."
        )
    if args.global_batch_size > rows:
        raise raylance.ConfigError(
            f"--global-batch-size {args.global_batch_size} is more than the {rows:,} rows to train on. An epoch would "
            "have no step. Give a smaller one."
        )
