"""Owns the way from a directory of images to a Lance dataset that raylance can train on; never decodes one.

Ray Data reads the encoded bytes and writes them as they are. Columns: image (binary), label (int64), split
(string: train, val or test). The schema metadata key `classes` is a JSON list of class names; a label indexes
it. Rows come in the order of the source: sorted paths, and in Parquet files their rows.

Classes are the sorted names of directories, the names that `datasets` left in Parquet files, or the sorted strings
of a label column; --classes gives them an order of your own. `classes` does the same for a Lance dataset that has
its labels as strings: it adds the integers beside them, and copies no image.

    python jobs/create_dataset.py demo --out digits.lance
    python jobs/create_dataset.py imagefolder --input s3://bucket/photos --out s3://bucket/photos.lance
    python jobs/create_dataset.py huggingface --input food101/data --out food101.lance
    python jobs/create_dataset.py classes --data birds.lance --string-column species
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import lance
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import ray
import ray.data
from lance.fragment import FragmentMetadata, write_fragments
from pyarrow import fs as pafs

SPLITS = {"train": "train", "val": "val", "validation": "val", "test": "test"}  # as found -> as stored
NAMED = 10  # files or classes that the summary names
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")


class RefusedError(Exception):
    """What was asked can't be done; the text gives cause, consequence and fix."""


class Source(NamedTuple):
    """Rows to write: columns `image` and `label`, and `split` where the source itself names its splits.

    `left_out` are the files that give no row, sorted, each with the reason.
    """

    rows: ray.data.Dataset
    classes: list[str]
    has_splits: bool
    left_out: list[tuple[str, str]]


def read_digits() -> Source:
    """The 1,797 handwritten digits that scikit-learn carries, as 8x8 greyscale PNG."""
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RefusedError(f"{error}: it makes the digits; pip install scikit-learn pillow") from error
    digits, encoded = load_digits(), []
    for pixels in (digits.images * (255 / 16)).round().astype("uint8"):  # (8, 8), from 0..16
        Image.fromarray(pixels).save(buffer := io.BytesIO(), format="PNG")
        encoded.append(buffer.getvalue())
    table = pa.table({"image": pa.array(encoded, pa.binary()), "label": pa.array(digits.target, pa.int64())})
    return Source(
        ray.data.from_arrow(table), [str(name) for name in digits.target_names], has_splits=False, left_out=[]
    )


class Listing(NamedTuple):
    """What lies in --input: sorted paths below the root, and those left out, each with the reason."""

    filesystem: pafs.FileSystem
    root: str
    files: list[str]
    left_out: list[tuple[str, str]]


def list_files(location: str, endings: tuple[str, ...]) -> Listing:
    """Lists the files with one of the endings; leaves out others and hidden ones."""
    try:
        if "://" in location:
            filesystem, root = pafs.FileSystem.from_uri(location)
        else:
            filesystem, root = pafs.LocalFileSystem(), os.path.abspath(location)
        found = filesystem.get_file_info(pafs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowInvalid) as error:
        raise RefusedError(
            f"--input {location} can't be listed ({reason(error)}): there is nothing to read; give an "
            "existing directory, by a path or URI that every node can read"
        ) from error
    root = root.rstrip("/")
    listing = Listing(filesystem, root, [], [])
    for file in sorted(info.path[len(root) + 1 :] for info in found if info.is_file):
        if "/." in f"/{file}":
            listing.left_out.append((file, "hidden"))
        elif not file.lower().endswith(endings):
            listing.left_out.append((file, f"ends with none of {' '.join(endings)}"))
        else:
            listing.files.append(file)
    if not listing.files:
        raise RefusedError(
            f"no {' '.join(endings)} files found under --input {location}{name_some(listing.left_out)}: the dataset "
            "would be empty; give the directory that holds them"
        )
    return listing


def name_some(left_out: list[tuple[str, str]]) -> str:
    """Names up to three files that were left out, to follow a sentence about --input."""
    if not left_out:
        return ""
    named = ", ".join(f"{file} ({why})" if why == "hidden" else file for file, why in left_out[:3])
    return f" ({len(left_out):,} left out, such as {named})"


def read_classes(file: str | None, found: Collection[str]) -> list[str]:
    """Returns class names in the order of their labels: those of the file, one a line, else the found ones sorted."""
    if file is None:
        return sorted(found)
    try:
        with open(file, encoding="utf-8") as lines:
            classes = [line.rstrip("\r\n") for line in lines]
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"--classes {file} can't be read ({reason(error)}): labels would have no order; give a text file "
            "with one class name a line"
        ) from error
    if len(classes) != len(set(classes)) or not classes:
        raise RefusedError(
            f"--classes {file} has {len(classes)} lines with {len(set(classes))} names: a name would have no label, "
            "or two; give every class one line"
        )
    if missing := sorted(set(found) - set(classes)):
        raise RefusedError(
            f"--classes {file} lacks {len(missing):,} of the classes found, such as {', '.join(missing[:3])}: their "
            "rows would have no label; add them to the file"
        )
    return classes


def read_imagefolder(location: str, classes_file: str | None) -> Source:
    """Reads <class>/**/<image> or <split>/<class>/**/<image>; a class is a directory that holds images."""
    filesystem, root, files, left_out = list_files(location, IMAGES)
    parts = [file.split("/") for file in files]
    has_splits = all(names[0] in SPLITS for names in parts)
    depth = 1 if has_splits else 0  # of the class among the parts
    if astray := [file for file, names in zip(files, parts, strict=True) if len(names) < depth + 2]:
        raise RefusedError(
            f"{len(astray)} of {len(files)} images lie in no class directory, such as {astray[0]}: they "
            f"would have no label; arrange --input {location} as <class>/<image> or <split>/<class>/<image>"
        )
    # A class may be called train (CIFAR-100 has it); with directories in it, it is a split beside classes.
    if not has_splits and (mixed := {names[0] for names in parts if len(names) > 2} & SPLITS.keys()):
        raise RefusedError(
            f"--input {location} has {', '.join(sorted(mixed))} beside directories that are no splits: "
            "splits would be taken for classes; make all of them splits, or none"
        )
    classes = read_classes(classes_file, {names[depth] for names in parts})
    labels = {name: label for label, name in enumerate(classes)}

    def label_rows(read: pa.Table) -> pa.Table:
        names = [path[len(root) + 1 :].split("/") for path in read["path"].to_pylist()]
        columns = {"image": read["bytes"], "label": pa.array([labels[n[depth]] for n in names], pa.int64())}
        if has_splits:
            columns["split"] = pa.array([SPLITS[n[0]] for n in names], pa.string())
        return pa.table(columns)

    # Every path, not the root alone: Ray's own listing leaves out directories such as _background_.
    paths = [f"{root}/{file}" for file in files]
    rows = ray.data.read_binary_files(paths, filesystem=filesystem, include_paths=True)
    rows = rows.map_batches(label_rows, batch_format="pyarrow", batch_size=None)
    return Source(rows, classes, has_splits, left_out)


def name_splits(location: str, files: list[str]) -> list[str | None]:
    """Returns the split that the name of each file begins with; None for all, where no name says one."""
    found = [re.match(rf"({'|'.join(SPLITS)})(?![a-z0-9])", os.path.basename(file)) for file in files]
    splits = [SPLITS[match[1]] if match else None for match in found]
    if any(splits) and not all(splits):
        raise RefusedError(
            f"{files[splits.index(None)]} in --input {location} names no split, other files do: its rows "
            "would belong to none; call it train-*, validation-* or test-*.parquet, or move it away"
        )
    return splits


class Parquet(NamedTuple):
    """What a Parquet file tells: its row groups, whether labels are strings, and the classes.

    `names` are those that the file gives; where it gives none, `labels` are those of its rows.
    """

    groups: int
    as_strings: bool
    names: list[str] | None
    labels: set[int | str]


def look_into(listing: Listing, file: str, location: str, image: str, label: str) -> Parquet:
    """Reads what a Parquet file tells of itself; its labels only where nothing names their classes."""
    try:
        with listing.filesystem.open_input_file(f"{listing.root}/{file}") as opened:
            parquet = pq.ParquetFile(opened)
            as_strings = check_columns(parquet.schema_arrow, file, image, label)
            names, labels = class_names(parquet.schema_arrow, label), set()
            if names is None:
                labels.update(parquet.read([label])[label].unique().drop_null().to_pylist())
            return Parquet(parquet.num_row_groups, as_strings, names, labels)
    except (OSError, pa.ArrowInvalid) as error:
        raise RefusedError(
            f"{file} in --input {location} can't be read as Parquet ({reason(error)}): its rows would "
            "be missing; download it again, or move it away"
        ) from error


def settle_classes(found: dict[str, Parquet], location: str, label: str, classes_file: str | None) -> list[str]:
    """Returns the class names of files that agree on them, in the order of their labels."""
    names, labels = [file.names for file in found.values()], set().union(*(file.labels for file in found.values()))
    if any(listed != names[0] for listed in names):
        raise RefusedError(
            f"the files in --input {location} name different classes for {label}: one label would mean two "
            "things; give the files of one dataset at one revision"
        )
    kinds = {file.as_strings: name for name, file in reversed(found.items())}  # the first file of each
    if len(kinds) > 1:
        raise RefusedError(
            f"labels are strings in {kinds[True]}, integers in {kinds[False]} in --input {location}: they cannot "
            "be told to mean the same; give the files of one dataset at one revision"
        )
    if True in kinds:
        return read_classes(classes_file, labels)
    if classes_file is not None:
        raise RefusedError(
            f"--classes {classes_file} orders labels that are strings, and {label} holds integers: which integer "
            "is which class is settled there; leave --classes out"
        )
    return names[0] or [str(value) for value in range(max(labels, default=-1) + 1)]


def read_huggingface(location: str, image: str, label: str, classes_file: str | None) -> Source:
    """Reads a dataset directory of the Hugging Face hub: Parquet files whose names begin with their split."""
    listing = list_files(location, (".parquet",))
    filesystem, root, files, left_out = listing
    splits = name_splits(location, files)
    has_splits = not set(splits) <= {None, "train"}  # nothing but train: it was never split
    found = {file: look_into(listing, file, location, image, label) for file in files}
    classes = settle_classes(found, location, label, classes_file)
    as_strings = found[files[0]].as_strings
    groups = [
        {"file": file, "group": group, "split": split}
        for file, split in zip(files, splits, strict=True)
        for group in range(found[file].groups)
    ]

    def read_group(batch: pa.Table) -> pa.Table:
        [item] = batch.to_pylist()
        try:
            with filesystem.open_input_file(f"{root}/{item['file']}") as opened:
                read = pq.ParquetFile(opened).read_row_group(item["group"], columns=[image, label])
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(f"{item['file']} is damaged: {error}") from None
        encoded = read[image]
        if pa.types.is_struct(encoded.type):
            encoded = pc.struct_field(encoded, "bytes")
        if encoded.null_count or read[label].null_count:
            raise ValueError(f"{item['file']} has rows without image bytes or without a label")
        labels = to_labels(read[label], classes) if as_strings else read[label]
        columns = {"image": encoded.cast(pa.binary()), "label": labels.cast(pa.int64())}
        if has_splits:
            columns["split"] = pa.array([item["split"]] * read.num_rows, pa.string())
        return pa.table(columns)

    # Row groups as items, not read_parquet: Ray 2.60 packs row groups into tasks by best fit, and then not
    # even preserve_order gives the rows in the order of the files.
    rows = ray.data.from_items(groups).map_batches(read_group, batch_format="pyarrow", batch_size=1)
    return Source(rows, classes, has_splits, left_out)


def is_text(kind: pa.DataType) -> bool:
    """Tells whether values are strings, be they stored once each."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def to_labels(names: pa.ChunkedArray | pa.Array, classes: list[str]) -> pa.ChunkedArray | pa.Array:
    """Returns the place of each name among the classes, int64; null for null."""
    return pc.index_in(names.cast(pa.string()), value_set=pa.array(classes, pa.string())).cast(pa.int64())


def check_columns(schema: pa.Schema, file: str, image: str, label: str) -> bool:
    """Refuses a Parquet file without encoded images or labels; returns whether the labels are strings."""
    kinds = {field.name: field.type for field in schema}
    kind = kinds.get(image)
    if kind is not None and pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    labels = kinds.get(label, pa.null())
    if kind not in (pa.binary(), pa.large_binary()) or not (pa.types.is_integer(labels) or is_text(labels)):
        raise RefusedError(
            f"{file} lacks a column {image} of encoded images or a column {label} of integers or strings, it has "
            f"{', '.join(f'{name} ({kind})' for name, kind in kinds.items())}: there is nothing to train on; "
            "name the columns by --image-column and --label-column"
        )
    return is_text(labels)


def class_names(schema: pa.Schema, label: str) -> list[str] | None:
    """Returns the class names that the `datasets` library leaves in the schema metadata, or None."""
    try:
        return json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return None


def write(source: Source, uri: str, mode: str, options: dict[str, str], args: argparse.Namespace) -> lance.LanceDataset:
    """Writes fragments on the cluster and commits them as one version; the mode is create or overwrite."""
    metadata = {"classes": json.dumps(source.classes, ensure_ascii=False)}
    schema = pa.schema({"image": pa.binary(), "label": pa.int64(), "split": pa.string()}, metadata=metadata)
    size, fraction, key = args.rows_per_fragment, args.val_fraction, str(args.seed).encode()

    def add_split(table: pa.Table) -> pa.Table:
        # A hash of the bytes: it depends on no order, and copies of an image never end up on both sides.
        hashes = (hashlib.blake2b(image.as_buffer(), digest_size=8, key=key) for image in table["image"])
        draws = (int.from_bytes(hashed.digest(), "big") / 2**64 for hashed in hashes)
        splits = ["val" if draw < fraction else "train" for draw in draws]
        return table.append_column("split", pa.array(splits, pa.string()))

    def write_block(block: pa.Table) -> pa.Table:
        table = block.select(schema.names).cast(schema)
        done = write_fragments(table, uri, mode=mode, max_rows_per_file=size, storage_options=options)
        return pa.table({"fragment": [json.dumps(fragment.to_json()) for fragment in done]})

    rows = source.rows
    if not source.has_splits:
        rows = rows.map_batches(add_split, batch_format="pyarrow", batch_size=None)
    # Not Dataset.write_lance: that of Ray 2.60 passes an argument which pylance dropped in version 6
    # (ray-project/ray#65129). This is pylance's own public way of writing from many machines.
    rows = rows.repartition(target_num_rows_per_block=size, strict=True)
    written = rows.map_batches(write_block, batch_format="pyarrow", batch_size=None).take_all()
    fragments = [FragmentMetadata.from_json(row["fragment"]) for row in written]
    if not fragments:
        raise ValueError("the source has no rows")
    operation = lance.LanceOperation.Overwrite(schema, fragments)
    return lance.LanceDataset.commit(uri, operation, storage_options=options)


def add_classes(args: argparse.Namespace) -> str:
    """Adds integer labels beside the strings of a Lance dataset, as new versions; returns what was done."""
    options = parse_options(args.storage_options)
    uri = locate(args.data)
    try:
        dataset = lance.dataset(uri, storage_options=options)
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"no Lance dataset can be opened at --data {args.data} ({reason(error)}): there is nothing to add labels "
            "to; give one that exists"
        ) from error
    kinds = {field.name: field.type for field in dataset.schema}
    if not is_text(kinds.get(args.string_column, pa.null())):
        raise RefusedError(
            f"--data {args.data} lacks a column {args.string_column} of strings, it has "
            f"{', '.join(f'{name} ({kind})' for name, kind in kinds.items())}: there are no names to number; name the "
            "column by --string-column"
        )
    if args.label_column in kinds:
        raise RefusedError(
            f"--data {args.data} has a column {args.label_column} ({kinds[args.label_column]}) already: it would be "
            "replaced; give the new one another name by --label-column"
        )
    found: set[str] = set()
    for batch in dataset.scanner(columns=[args.string_column], batch_size=1 << 16).to_batches():
        found.update(batch[0].unique().to_pylist())
    if None in found:
        rows = dataset.count_rows(f"`{args.string_column}` IS NULL")
        raise RefusedError(
            f"{rows:,} rows of --data {args.data} have no {args.string_column}: they would have no label; fill them, "
            "or delete these rows"
        )
    classes = read_classes(args.classes, found)
    named = (dataset.schema.metadata or {}).get(b"classes")
    if named and json.loads(named) != classes:
        raise RefusedError(
            f"--data {args.data} names its classes {describe(json.loads(named))} already, and {args.string_column} has "
            f"{describe(classes)}: labels that it has would be named wrongly; give these names by --classes"
        )

    @lance.batch_udf(output_schema=pa.schema({args.label_column: pa.int64()}))
    def number(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({args.label_column: to_labels(batch[args.string_column], classes)})

    before = dataset.version
    # Names first: a version with labels that nothing names is never to be seen.
    dataset.update_schema_metadata({"classes": json.dumps(classes, ensure_ascii=False)})
    dataset.add_columns(number, read_columns=[args.string_column])
    return "\n".join([
        f"added {args.label_column} to {uri}, version {dataset.version} (it was {before}, which stays as it is)",
        f"  classes    {describe(classes)}",
        f"use it: python jobs/train_images.py --data {uri}"
        + (f" --label-column {args.label_column}" if args.label_column != "label" else ""),
    ])  # fmt: skip


def describe(classes: list[str]) -> str:
    """Returns how many classes there are, and their names or the first ones."""
    return f"{len(classes):,}: {', '.join(classes[:NAMED])}{', ...' if len(classes) > NAMED else ''}"


def tell_left_out(left_out: list[tuple[str, str]], file: str | None) -> list[str]:
    """Writes the files that give no row to --left-out; returns lines for the summary, with some of them."""
    if file is not None:
        try:
            with open(file, "w", encoding="utf-8") as lines:
                lines.writelines(f"{name}\t{why}\n" for name, why in left_out)
        except OSError as error:
            raise RefusedError(
                f"--left-out {file} can't be written ({reason(error)}): nothing would tell what is missing; give "
                "another file"
            ) from error
    if not left_out:
        return []
    counts = Counter(why for _, why in left_out)
    told = [f"  left out   {len(left_out):,} files, {', '.join(f'{count:,} {why}' for why, count in counts.items())}:"]
    told += [f"             {name}" for name, _ in left_out[:NAMED]]
    rest = f"and {len(left_out) - NAMED:,} more" if len(left_out) > NAMED else ""
    where = f"all of them are in {file}" if file is not None else "--left-out FILE lists all of them" if rest else ""
    return [*told, f"             {'; '.join(filter(None, [rest, where]))}"] if rest or where else told


def summary(dataset: lance.LanceDataset, uri: str, chosen: str, left_out: list[str]) -> str:
    """Says what the dataset holds, what was left out and how to train on it."""
    classes = json.loads(dataset.schema.metadata[b"classes"])
    counts = {name: dataset.count_rows(f"split = '{name}'") for name in ("train", "val", "test")}
    splits = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    fragments = [fragment.count_rows() for fragment in dataset.get_fragments()]
    size = sum(field.bytes_on_disk for field in dataset.stats.data_stats().fields)
    return "\n".join([
        f"wrote {uri}, version {dataset.version}",
        f"  rows       {sum(fragments):,}",
        f"  splits     {splits} ({chosen})",
        f"  classes    {describe(classes)}",
        f"  fragments  {len(fragments):,} of at most {max(fragments):,} rows",
        f"  bytes      {size:,}",
        *left_out,
        f"use it: python jobs/train_images.py --data {uri}",
    ])  # fmt: skip


def run(args: argparse.Namespace) -> str:
    """Makes the dataset that the arguments describe; returns its summary."""
    if args.source == "classes":
        return add_classes(args)
    if not 0 <= args.val_fraction < 1:
        raise RefusedError(f"--val-fraction {args.val_fraction} is not in [0, 1): train would be empty; try 0.1")
    if args.rows_per_fragment < 1:
        raise RefusedError(f"--rows-per-fragment {args.rows_per_fragment} is below 1: it holds no row; try 8192")
    options = parse_options(args.storage_options)
    uri = locate(args.out)
    present = exists(uri, options)
    if present and not args.overwrite:
        raise RefusedError(
            f"--out {args.out} already is a Lance dataset: new rows would take the place of its rows; choose "
            "another --out, or give --overwrite, which adds a version"
        )
    if not ray.is_initialized():
        with warnings.catch_warnings():
            # Ray forks only to start its daemons.
            warnings.filterwarnings("ignore", message="lance is not fork-safe")
            ray.init()  # honours RAY_ADDRESS, which `ray job submit` sets
    context = ray.data.DataContext.get_current().copy()
    context.execution_options.preserve_order = True
    with ray.data.DataContext.current(context):
        if args.source == "demo":
            source = read_digits()
        elif args.source == "imagefolder":
            source = read_imagefolder(args.input, args.classes)
        else:
            source = read_huggingface(args.input, args.image_column, args.label_column, args.classes)
        left_out = tell_left_out(source.left_out, getattr(args, "left_out", None))
        try:
            dataset = write(source, uri, "overwrite" if present else "create", options, args)
        except (ray.exceptions.RayError, OSError, ValueError) as error:
            raise RefusedError(
                f"making {args.out} failed ({reason(error)}): nothing was committed, an older version is as "
                "it was; remove the cause and run it again"
            ) from error
    chosen = "the source's own" if source.has_splits else f"drawn with seed {args.seed}"
    return summary(dataset, uri, chosen, left_out)


def parse_options(pairs: list[str]) -> dict[str, str]:
    """Returns what --storage-options says."""
    if wrong := [pair for pair in pairs if "=" not in pair]:
        raise RefusedError(f"--storage-options {wrong[0]} has no =: it would not be used; write it as KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def locate(path: str) -> str:
    """Makes a local path absolute: every node writes, and a worker's current directory is not that of the driver."""
    return path if "://" in path else os.path.abspath(path)


def exists(uri: str, options: dict[str, str]) -> bool:
    """Tells whether a Lance dataset opens there; any other trouble with the place shows on writing."""
    try:
        lance.dataset(uri, storage_options=options)
    except (OSError, ValueError):
        return False
    return True


def reason(error: BaseException) -> str:
    """Returns one line that says what went wrong: in the text of a failed Ray task, the first error named."""
    named = re.search(r"^(?:[a-z_.]+\.)?([A-Z]\w+: .+)$", str(error), re.MULTILINE)
    return (named[1] if named else str(error) or type(error).__name__).splitlines()[0]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    # fmt: off
    store = argparse.ArgumentParser(add_help=False)
    store.add_argument("--storage-options", action="append", default=[], metavar="KEY=VALUE",
        help="for the object store of the Lance dataset, as Lance names it; may be repeated")
    names = argparse.ArgumentParser(add_help=False)
    names.add_argument("--classes", metavar="FILE",
        help="names of classes that have no numbers yet, one a line, in the order of their labels (default: sorted); "
        "datasets that belong together need the same")
    directory = argparse.ArgumentParser(add_help=False)
    directory.add_argument("--input", required=True, metavar="DIR", help="where every node can read it")
    directory.add_argument("--left-out", metavar="FILE",
        help="write the names of all files that give no row, each with the reason (default: the summary names some)")
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--out", required=True, metavar="URI", help="the Lance dataset to make, where every node can write")
    add("--overwrite", action="store_true", help="add a version to an existing dataset (default: refuse)")
    add("--rows-per-fragment", type=int, default=8192, metavar="N",
        help="rows of every fragment but the last; a task holds as many (default: %(default)s)")
    add("--val-fraction", type=float, default=0.1, metavar="F",
        help="where the source names no split but train, the part to call val (default: %(default)s)")
    add("--seed", type=int, default=0, help="of that choice, a hash of each image (default: %(default)s)")
    hub = argparse.ArgumentParser(add_help=False)
    hub.add_argument("--image-column", default="image", metavar="NAME", help="(default: %(default)s)")
    hub.add_argument("--label-column", default="label", metavar="NAME", help="(default: %(default)s)")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    sources = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")
    for name, parents, text in (
        ("demo", [common], "scikit-learn's 1,797 handwritten digits; needs no network"),
        ("imagefolder", [directory, common, names],
         "<class>/<image> or <split>/<class>/<image>, splits train, val(idation), test"),
        ("huggingface", [directory, common, names, hub],
         "train-*, validation-*, test-*.parquet of encoded images, and of labels as integers or strings"),
        ("classes", [names], "adds integer labels to a Lance dataset that has them as strings; copies nothing else"),
    ):
        source = sources.add_parser(name, help=text, description=text, parents=[*parents, store])
        if name == "classes":
            source.add_argument("--data", required=True, metavar="URI", help="the Lance dataset; it gets new versions")
            source.add_argument("--string-column", required=True, metavar="NAME", help="class names")
            source.add_argument("--label-column", default="label", metavar="NAME",
                help="the column to add (default: %(default)s)")
    # fmt: on
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the job; returns its exit status, which is 2 after one message on stderr."""
    try:
        print(run(parse_args(argv)))
    except RefusedError as refusal:
        print(f"create_dataset.py: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
