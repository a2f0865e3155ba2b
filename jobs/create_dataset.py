"""Owns the way from a directory of images to a Lance dataset that raylance can train on; never decodes one.

Ray Data reads the encoded bytes and writes them as they are. Columns: image (binary), label (int64), split
(string: train, val or test). The schema metadata key `classes` is a JSON list of class names; a label indexes
it. Rows come in the order of the source: sorted paths, and in Parquet files their rows.

    python jobs/create_dataset.py demo --out digits.lance
    python jobs/create_dataset.py imagefolder --input s3://bucket/photos --out s3://bucket/photos.lance
    python jobs/create_dataset.py huggingface --input food101/data --out food101.lance
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
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")


class RefusedError(Exception):
    """What was asked can't be done; the text gives cause, consequence and fix."""


class Source(NamedTuple):
    """Rows to write: columns `image` and `label`, and `split` where the source itself names its splits."""

    rows: ray.data.Dataset
    classes: list[str]
    has_splits: bool


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
    return Source(ray.data.from_arrow(table), [str(name) for name in digits.target_names], has_splits=False)


def list_files(location: str, endings: tuple[str, ...]) -> tuple[pafs.FileSystem, str, list[str]]:
    """Returns the file system, the root on it, and the sorted paths below it; leaves out hidden files."""
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
    files = (info.path[len(root) + 1 :] for info in found if info.is_file)
    files = sorted(file for file in files if file.lower().endswith(endings) and "/." not in f"/{file}")
    if not files:
        raise RefusedError(
            f"no {' '.join(endings)} files found under --input {location}: the dataset would be empty; give "
            "the directory that holds them"
        )
    return filesystem, root, files


def read_imagefolder(location: str) -> Source:
    """Reads <class>/**/<image> or <split>/<class>/**/<image>; a class is a directory that holds images."""
    filesystem, root, files = list_files(location, IMAGES)
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
    classes = sorted({names[depth] for names in parts})
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
    return Source(rows, classes, has_splits)


def read_huggingface(location: str, image: str, label: str) -> Source:
    """Reads a dataset directory of the Hugging Face hub: Parquet files whose names begin with their split."""
    filesystem, root, files = list_files(location, (".parquet",))
    found = [re.match(rf"({'|'.join(SPLITS)})(?![a-z0-9])", os.path.basename(file)) for file in files]
    splits = [SPLITS[match[1]] if match else None for match in found]
    if any(splits) and not all(splits):
        raise RefusedError(
            f"{files[splits.index(None)]} in --input {location} names no split, other files do: its rows "
            "would belong to none; call it train-*, validation-* or test-*.parquet, or move it away"
        )
    has_splits = not set(splits) <= {None, "train"}  # nothing but train: it was never split
    groups, names = [], []
    top = -1  # the greatest label, which tells the classes where nothing names them
    for file, split in zip(files, splits, strict=True):
        try:
            with filesystem.open_input_file(f"{root}/{file}") as opened:
                parquet = pq.ParquetFile(opened)
                check_columns(parquet.schema_arrow, file, image, label)
                names.append(class_names(parquet.schema_arrow, label))
                if names[-1] is None:
                    top = max(top, pc.max(parquet.read([label])[label]).as_py() or 0)
                groups += [{"file": file, "group": i, "split": split} for i in range(parquet.num_row_groups)]
        except (OSError, pa.ArrowInvalid) as error:
            raise RefusedError(
                f"{file} in --input {location} can't be read as Parquet ({reason(error)}): its rows would "
                "be missing; download it again, or move it away"
            ) from error
    if any(listed != names[0] for listed in names):
        raise RefusedError(
            f"the files in --input {location} name different classes for {label}: one label would mean two "
            "things; give the files of one dataset at one revision"
        )

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
        columns = {"image": encoded.cast(pa.binary()), "label": read[label].cast(pa.int64())}
        if has_splits:
            columns["split"] = pa.array([item["split"]] * read.num_rows, pa.string())
        return pa.table(columns)

    # Row groups as items, not read_parquet: Ray 2.60 packs row groups into tasks by best fit, and then not
    # even preserve_order gives the rows in the order of the files.
    rows = ray.data.from_items(groups).map_batches(read_group, batch_format="pyarrow", batch_size=1)
    return Source(rows, names[0] or [str(value) for value in range(top + 1)], has_splits)


def check_columns(schema: pa.Schema, file: str, image: str, label: str) -> None:
    """Refuses a Parquet file without encoded images or integer labels."""
    kinds = {field.name: field.type for field in schema}
    kind = kinds.get(image)
    if kind is not None and pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        kind = kind.field("bytes").type
    if kind not in (pa.binary(), pa.large_binary()) or not pa.types.is_integer(kinds.get(label, pa.null())):
        raise RefusedError(
            f"{file} lacks a column {image} of encoded images or a column {label} of integers, it has "
            f"{', '.join(f'{name} ({kind})' for name, kind in kinds.items())}: there is nothing to train on; "
            "name the columns by --image-column and --label-column"
        )


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


def summary(dataset: lance.LanceDataset, uri: str, chosen: str) -> str:
    """Says what the dataset holds and how to train on it."""
    classes = json.loads(dataset.schema.metadata[b"classes"])
    counts = {name: dataset.count_rows(f"split = '{name}'") for name in ("train", "val", "test")}
    splits = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
    fragments = [fragment.count_rows() for fragment in dataset.get_fragments()]
    size = sum(field.bytes_on_disk for field in dataset.stats.data_stats().fields)
    return "\n".join([
        f"wrote {uri}, version {dataset.version}",
        f"  rows       {sum(fragments):,}",
        f"  splits     {splits} ({chosen})",
        f"  classes    {len(classes):,}: {', '.join(classes[:10])}{', ...' if len(classes) > 10 else ''}",
        f"  fragments  {len(fragments):,} of at most {max(fragments):,} rows",
        f"  bytes      {size:,}",
        f"use it: python jobs/train_images.py --data {uri}",
    ])  # fmt: skip


def run(args: argparse.Namespace) -> str:
    """Makes the dataset that the arguments describe; returns its summary."""
    if not 0 <= args.val_fraction < 1:
        raise RefusedError(f"--val-fraction {args.val_fraction} is not in [0, 1): train would be empty; try 0.1")
    if args.rows_per_fragment < 1:
        raise RefusedError(f"--rows-per-fragment {args.rows_per_fragment} is below 1: it holds no row; try 8192")
    if wrong := [pair for pair in args.storage_options if "=" not in pair]:
        raise RefusedError(f"--storage-options {wrong[0]} has no =: it would not be used; write it as KEY=VALUE")
    options = dict(pair.split("=", 1) for pair in args.storage_options)
    # Every node writes, and a worker's current directory is not that of the driver.
    uri = args.out if "://" in args.out else os.path.abspath(args.out)
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
            source = read_imagefolder(args.input)
        else:
            source = read_huggingface(args.input, args.image_column, args.label_column)
        try:
            dataset = write(source, uri, "overwrite" if present else "create", options, args)
        except (ray.exceptions.RayError, OSError, ValueError) as error:
            raise RefusedError(
                f"making {args.out} failed ({reason(error)}): nothing was committed, an older version is as "
                "it was; remove the cause and run it again"
            ) from error
    return summary(dataset, uri, "the source's own" if source.has_splits else f"drawn with seed {args.seed}")


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
    common = argparse.ArgumentParser(add_help=False)
    add = common.add_argument
    add("--out", required=True, metavar="URI", help="the Lance dataset to make, where every node can write")
    add("--overwrite", action="store_true", help="add a version to an existing dataset (default: refuse)")
    add("--rows-per-fragment", type=int, default=8192, metavar="N",
        help="rows of every fragment but the last; a task holds as many (default: %(default)s)")
    add("--val-fraction", type=float, default=0.1, metavar="F",
        help="where the source names no split but train, the part to call val (default: %(default)s)")
    add("--seed", type=int, default=0, help="of that choice, a hash of each image (default: %(default)s)")
    add("--storage-options", action="append", default=[], metavar="KEY=VALUE",
        help="for the object store of --out, as Lance names it; may be repeated")
    hub = argparse.ArgumentParser(add_help=False)
    hub.add_argument("--image-column", default="image", metavar="NAME", help="(default: %(default)s)")
    hub.add_argument("--label-column", default="label", metavar="NAME", help="(default: %(default)s)")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    sources = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")
    for name, parents, text in (
        ("demo", [], "scikit-learn's 1,797 handwritten digits; needs no network"),
        ("imagefolder", [], "<class>/<image> or <split>/<class>/<image>, splits train, val(idation), test"),
        ("huggingface", [hub], "train-*, validation-*, test-*.parquet of encoded images and integer labels"),
    ):
        source = sources.add_parser(name, help=text, description=text, parents=[common, *parents])
        if name != "demo":
            source.add_argument("--input", required=True, metavar="DIR", help="where every node can read it")
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
