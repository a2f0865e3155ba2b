"""The command line of the job: its arguments, what it prints.

Makes a Lance dataset that raylance can train on: from images and labels, from tables, from WebDataset tars, from what
the `datasets` library saved, or from another Lance dataset; of a robot's episodes, LeRobot's Lance layout. A table
keeps its columns; images come as columns image (binary), label (int64) and split (string: train, val or test), from
folders also file (string: the path in there). Where the source names no split, a hash of the row draws one. Labels that
are strings become integers, and the schema metadata key `classes` is a JSON list of their names; a label indexes it.
Rows come in the order of the source: sorted paths, and in files their rows. Files have the columns of the first one,
and types whose values its types can hold as they are: what would be lost or changed otherwise is refused. In text
files, columns of numbers that would be changed, such as 007, stay text; --text-columns asks for it. Images are stored
as they are, by default after a look at their headers alone.

Classes are the sorted names of directories, the names that `datasets` left in its files, or the sorted strings of a
label column; --classes gives them an order of your own. `classes` does the same for a Lance dataset that has its
labels as strings: it adds the integers beside them, and copies no image.

The same command continues a run that was killed; --remove-begun removes what one with other arguments has left.

    python jobs/create_dataset.py demo --out digits.lance
    python jobs/create_dataset.py imagefolder --input s3://bucket/photos --out s3://bucket/photos.lance
    python jobs/create_dataset.py huggingface --input food101/data --out food101.lance
    python jobs/create_dataset.py tables --input vectors.parquet --label-column species --out vectors.lance
    python jobs/create_dataset.py webdataset --input shards/ --out shards.lance --dry-run
    python jobs/create_dataset.py saved --input saved_to_disk/ --label-column label --out saved.lance
    python jobs/create_dataset.py lance --input db/table.lance --filter "score > 0.5" --out good.lance
    python jobs/create_dataset.py lerobot --input pusht/ --out pusht-lance/
    python jobs/create_dataset.py classes --data birds.lance --string-column species
"""

import argparse
import contextlib
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import lance
import PIL.Image
import pyarrow as pa
import pyarrow.compute as pc
import ray
import tqdm

from jobs.common import (
    RefusedError,
    connect,
    exists,
    key_value,
    locate,
    locate_dataset,
    reason,
    show_command,
    store_options,
    store_words,
    taken,
    within,
)
from jobs.create_dataset.fitting import check_schema, is_binary
from jobs.create_dataset.hub import Hub, Saved
from jobs.create_dataset.images import Digits, ImageFolder
from jobs.create_dataset.labels import add_classes, describe, is_text, read_classes
from jobs.create_dataset.lerobot import convert
from jobs.create_dataset.shaping import Shape, absent, check_columns, lengths_of, plain, schema_of
from jobs.create_dataset.sources import SPLIT, SPLITS, Left, Piece, Source, where_from
from jobs.create_dataset.tables import LanceTable, Tables
from jobs.create_dataset.tars import Tars
from jobs.create_dataset.writing import Notes, Target, begun, files_of, key_of, write
from jobs.materialize.images import QUALITY, Reencode
from jobs.output import notes_of, separate_output_once

NAMED = 10  # of what was left out, in the summary
IMAGE = "image"
BATCH = 64  # the default of jobs/train_images.py


def open_source(args: argparse.Namespace, options: dict[str, str]) -> Source:
    """Looks at what there is to read."""
    if args.source == "demo":
        return Digits()
    if args.source == "imagefolder":
        return ImageFolder(args.input, args.classes, options, args.file_column)
    if args.source == "huggingface":
        return Hub(args.input, args.image_column, args.label_column, args.classes, options)
    if args.source == "saved":
        return Saved(args.input, options)
    if args.source == "webdataset":
        return Tars(args.input, args.columns, options)
    if args.source == "lance":
        return LanceTable(args.input, args.columns, args.filter, options)
    return Tables(args.input, args.columns, args.image_column, options, args.text_columns)


def make_shape(source: Source, pieces: Sequence[Piece], args: argparse.Namespace) -> Shape:
    """Decides how rows are changed, by the first of them."""
    first = source.first()
    images, column = None, IMAGE if args.source == "huggingface" else args.image_column or IMAGE
    if args.shorter_side is not None or args.jpeg_quality is not None:
        images = Reencode(column=column, shorter_side=args.shorter_side, quality=args.jpeg_quality)
    label, classes = label_of(source, first.schema, pieces, args)
    asked = [("--label-column", label), ("--image-column", images and images.column)]
    asked += [("--keep-lists", name) for name in args.keep_lists] + [("--split-by", name) for name in args.split_by]
    check_columns(first.schema, asked)
    schema = schema_of(first, args.keep_lists)
    if label is not None:
        schema = schema.set(schema.get_field_index(label), pa.field(label, pa.int64()))
    split_by: tuple[str, ...] = ()
    if SPLIT in schema.names:
        schema = schema.set(schema.get_field_index(SPLIT), pa.field(SPLIT, pa.string()))
    else:
        schema = schema.append(pa.field(SPLIT, pa.string()))
        by_default = [IMAGE] if IMAGE in first.column_names else first.column_names
        split_by = tuple(args.split_by or by_default)
    named, names = label, classes
    if names is None and (source.classes_of is None or source.classes_of in schema.names):
        named, names = source.classes_of, source.classes  # of another column than the one that is asked for
    metadata = {} if names is None else {"classes": json.dumps(names, ensure_ascii=False)}
    metadata |= {"classes_of": named} if metadata and named is not None else {}
    shape = Shape(
        schema=schema.with_metadata(metadata),
        source=plain(first.schema),
        label=label,
        classes=classes,
        images=images,
        looks_at=column
        if (images is None or args.check == "full") and column in schema.names and is_binary(schema.field(column).type)
        else None,
        decodes=args.check == "full",
        split_by=split_by,
        val_fraction=args.val_fraction,
        seed=args.seed,
        ragged=lengths_of(first, schema),
    )
    if shape.decodes and shape.looks_at is None:
        raise RefusedError(
            f"--check full finds no column {column} of encoded images among {', '.join(schema.names)}. None would be "
            "decoded. Name it by --image-column, where the source has one, or leave the option out."
        )
    shape.apply(first, "the first rows")  # what these show is refused at once
    return shape


def label_of(
    source: Source, schema: pa.Schema, pieces: Sequence[Piece], args: argparse.Namespace
) -> tuple[str | None, list[str] | None]:
    """The column of labels, and the names of their classes; strings are read once to find these."""
    if source.classes is not None and not isinstance(source, LanceTable):
        return "label", source.classes
    named = names_known(source, schema, args)
    label = args.label_column or (next(iter(named), None) if source.classes is not None else None)
    label = label or ("label" if "label" in schema.names else None)
    if label not in schema.names:
        return label, None
    kind = schema.field(label).type
    if not is_text(kind):
        if args.classes is not None:
            raise RefusedError(
                f"--classes {args.classes} orders labels that are strings, and {label} holds "
                f"{kind}. The integers name their classes already. Leave --classes out."
            )
        if not pa.types.is_integer(kind) and args.label_column is not None:
            raise RefusedError(
                f"--label-column {label} holds {kind}, and classes are integers or strings. Nothing would be done to "
                "it. Leave the option out, the column is kept as it is."
            )
        return (label if pa.types.is_integer(kind) else None), named.get(label)
    if source.classes is not None and named:
        raise RefusedError(
            f"--input {args.input} names the classes of {next(iter(named))}, and {label} holds strings that need "
            "names, too. A dataset has names for one column. Leave one of them out by --columns."
        )
    return label, read_classes(args.classes, find_names(source, pieces, schema, label))


def names_known(source: Source, schema: pa.Schema, args: argparse.Namespace) -> dict[str, list[str]]:
    """The names of classes that the source has for columns of integers."""
    if isinstance(source, Saved):
        return source.names_of
    if source.classes is None:
        return {}
    of = source.classes_of or args.label_column
    is_named = of in schema.names and (source.classes_of is not None or not is_text(schema.field(of).type))
    return {of: source.classes} if is_named else {}


def find_names(source: Source, pieces: Sequence[Piece], schema: pa.Schema, label: str) -> set[str]:
    """Reads the strings of a label column."""
    found: set[str] = set()
    for piece in pieces:
        for table in source.read(piece, []):
            where = where_from(table, piece.name)
            check_schema(table.schema, plain(schema), where)
            names = table[label].cast(pa.string())
            if lost := pc.sum(pc.fill_null(pc.equal(names, ""), True)).as_py():
                raise RefusedError(absent(label, lost, len(names), where))
            found.update(pc.unique(names).to_pylist())
    return found


def run(args: argparse.Namespace) -> str:
    """Makes the dataset that the arguments describe; returns its summary."""
    if args.source == "classes":
        return add_classes(args)
    if args.source == "lerobot":
        return convert(args)
    options = store_options(args.storage_options)
    uri = locate_dataset(args.out)
    present = exists(uri, options)
    if present and not args.overwrite:
        tidy(uri, options, None, args)
        raise taken(args.out)
    try:
        source = open_source(args, options)
        pieces = source.pieces(args.rows_per_fragment)
        left_file = None if args.dry_run else args.left_out
        show_left_out(source.left_out, left_file)
        shape = make_shape(source, pieces, args)
        asked = [args.source, args.input, args.image_column, args.label_column]
        key = key_of(source.facts, asked, args.rows_per_fragment, shape, present)
        notes, mode = Notes(uri=uri, key=key, options=options), "overwrite" if present else "create"
        target = Target(notes=notes, mode=mode, rows_per_fragment=args.rows_per_fragment)
        making = describe_plan(source, shape, pieces, args)
        is_brief = args.source == "demo" and not args.dry_run  # the summary is there in seconds, and says the same
        print(making.partition("\n")[0] if is_brief else making, flush=True)
        if args.dry_run:
            listed = f", {args.left_out} the names of what is left out" if args.left_out else ""
            return f"nothing was written: --dry-run. {uri} would get these rows{listed}"
        tidy(uri, options, key, args)
        counted = None if any(piece.rows is None for piece in pieces) else sum(piece.rows or 0 for piece in pieces)
        shown = sys.stderr.isatty() and not args.no_progress
        with separate_output_once("create_dataset") as user:
            connect()
            bar = tqdm.tqdm(total=counted, unit="row", unit_scale=True, disable=not shown, file=user.err)
            with bar:
                dataset, unread, no_images = write(source, shape, pieces, target, bar.update)
    except RefusedError:
        raise
    except (ray.exceptions.RayError, OSError, ValueError, RuntimeError) as error:  # the last is of Lance's storage
        if not present and exists(uri, options):
            raise RefusedError(
                f"--out {args.out} became a Lance dataset while this ran ({reason(error)}). New rows would take the "
                "place of its rows, so nothing was committed. Choose another --out, or give --overwrite, which adds a "
                "version."
            ) from error
        raise RefusedError(
            f"making {args.out} failed ({reason(error)}). Nothing was committed, and an older version is as it was. "
            f"Remove the cause and run it again: finished pieces are kept{notes_of(error)}."
        ) from error
    remove(notes, notes.forget, "this run is committed and needs nothing of it")
    left_out = show_left_out([*source.left_out, *unread], left_file)
    left_out += [*show_check(shape), *show_no_images(no_images)]
    chosen = f"drawn with seed {args.seed}" if shape.split_by else "the source's own"
    return summary(dataset, uri, chosen, left_out, store_words(args.storage_options))


def tidy(uri: str, options: dict[str, str], key: str | None, args: argparse.Namespace) -> None:
    """Removes what killed runs have left, but for that of this key, or says that it is there."""
    if args.dry_run:
        return
    for notes in begun(uri, options):
        if notes.key == key:
            continue
        if notes.files() <= files_of(uri, options):
            remove(notes, notes.forget, "it is of a run that was killed after its commit", show=True)
        elif args.remove_begun:
            remove(notes, notes.forget_all, "--remove-begun: nothing of it is used", show=True)
        else:  # that run may not be over, and would commit fragments without files
            print(
                f"{notes.folder} is of another run that was begun there. Nothing of it is used. If that run is over, "
                "--remove-begun removes it, and the data files that it names.",
                file=sys.stderr,
            )


def remove(notes: Notes, by: Callable[[], None], why: str, *, show: bool = False) -> None:
    """Removes notes; if they cannot be removed, that is no error: the dataset does not need it."""
    try:
        by()
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{notes.folder} can't be removed ({reason(error)}): {why}; delete it", file=sys.stderr)
    else:
        if show:
            print(f"removed {notes.folder}: {why}", file=sys.stderr)


def describe_plan(source: Source, shape: Shape, pieces: Sequence[Piece], args: argparse.Namespace) -> str:
    """What the job is about to make."""
    ragged = {name: f", of {low} to {high} values" for name, (low, high) in shape.ragged.items()}
    rows = [f"{counted:,} rows"] if (counted := sum(piece.rows or 0 for piece in pieces)) else []
    if unknown := sum(piece.rows is None for piece in pieces):
        rows.append(f"{unknown:,} files with an unknown number of rows")
    cut = f"{len(pieces):,} piece{'s' * (len(pieces) != 1)}"
    lines = [f"making {locate(args.out)} from {' and '.join(rows) or 'no row'}, in {cut}"]
    lines += [f"  {field.name:<10} {field.type}{ragged.get(field.name, '')}" for field in shape.schema]
    if shape.classes is not None:
        lines.append(f"  classes    {describe(shape.classes)}")
    if shape.split_by:
        lines.append(
            f"  splits     {shape.val_fraction:.0%} val, the rest train, by a hash of {', '.join(shape.split_by)}"
        )
    lines += [f"  note       {remark}" for remark in source.remarks]
    if shape.images is not None:
        size = "as they are" if shape.images.shorter_side is None else f"{shape.images.shorter_side} pixels at the most"
        lines.append(f"  images     shorter side {size}, JPEG quality {shape.images.quality or QUALITY}")
    return "\n".join(lines + (show_left_out(source.left_out, None) if args.dry_run else []))


def show_left_out(left_out: Sequence[Left], file: str | None) -> list[str]:
    """Writes what gives no row to --left-out; returns lines for the summary, with some of it."""
    if file is not None:
        try:
            with open(file, "w", encoding="utf-8") as lines:
                lines.writelines(f"{name}\t{why}\n" for name, why, _ in left_out)
        except OSError as error:
            raise RefusedError(
                f"--left-out {file} can't be written ({reason(error)}). No list would show what is missing. Give "
                "another file."
            ) from error
    if not left_out:
        return []
    counts = Counter[str]()
    for _, why, count in left_out:
        counts[why] += count
    whys = ", ".join(f"{count:,} {why}" for why, count in counts.items())
    lines_of = [f"  left out   {counts.total():,} file{'s' * (counts.total() != 1)}, {whys}:"]
    lines_of += [f"             {name}" for name, _, _ in left_out[:NAMED]]
    rest = f"and {counts.total() - NAMED:,} more" if len(left_out) > NAMED else ""
    where = f"all of them are in {file}" if file is not None else "--left-out FILE lists all of them" if rest else ""
    return [*lines_of, f"             {'; '.join(filter(None, [rest, where]))}"] if rest or where else lines_of


def show_check(shape: Shape) -> list[str]:
    """A line for the summary on how images were checked."""
    if shape.images is None and shape.looks_at is None:
        return []
    if shape.decodes:
        return ["  checked    every image was decoded whole"]
    which = "was" if shape.images is None else "that stays as it is was"
    return [f"  checked    headers of images; none {which} decoded: --check full also finds those that were cut short"]


def show_no_images(found: Sequence[Left]) -> list[str]:
    """Lines for the summary on rows that hold no image."""
    if not found:
        return []
    rows = sum(count for _, _, count in found)
    rest = [f"and {rows - NAMED:,} more"] if rows > NAMED else []
    kept = f"{rows:,} row{'s' * (rows != 1)}, kept as they are"
    return [
        f"  no images  {kept}; training stops at the first, or leaves them out with --on-bad-row mask:",
        *(f"             {line}" for line in [*(f"{name}: {why}" for name, why, _ in found[:NAMED]), *rest]),
    ]


def summary(dataset: lance.LanceDataset, uri: str, chosen: str, left_out: list[str], store: list[str]) -> str:
    """Describes the dataset, what was left out and how to train on it."""
    classes = (dataset.schema.metadata or {}).get(b"classes")
    counts = Counter[str]()
    for batch in dataset.scanner(columns=[SPLIT], batch_size=1 << 16).to_batches():
        counts.update({found["values"]: found["counts"] for found in pc.value_counts(batch[0]).to_pylist()})
    names = sorted(counts, key=lambda name: ([*SPLITS.values(), name].index(name), name))
    splits = ", ".join(f"{name} {counts[name]:,}" for name in names)
    fragments = [fragment.count_rows() for fragment in dataset.get_fragments()]
    size = sum(field.bytes_on_disk for field in dataset.stats.data_stats().fields)
    kinds = {field.name: field.type for field in dataset.schema}
    if "label" in kinds and kinds.get(IMAGE) in (pa.binary(), pa.large_binary()):
        batch = ["--global-batch-size", str(counts["train"])] if 2 <= counts["train"] < BATCH else []
        options = [*size_of_images(dataset), *batch, *store]
        use = show_command(["python", "jobs/train_images.py", "--data", uri, *options])
    else:
        use = f"raylance.dataset({uri!r}, filter=\"split = 'train'\")"
    return "\n".join([
        f"wrote {uri}, version {dataset.version}",
        f"  rows       {sum(fragments):,}",
        f"  splits     {splits} ({chosen})",
        *([f"  classes    {describe(json.loads(classes))}"] if classes else []),
        f"  fragments  {len(fragments):,} of at most {max(fragments):,} rows",
        f"  bytes      {size:,}",
        *left_out,
        f"use it: {use}",
    ])  # fmt: skip


def size_of_images(dataset: lance.LanceDataset) -> list[str]:
    """The words that training needs where the first images differ in size."""
    encoded = dataset.take(list(range(min(64, dataset.count_rows()))), columns=[IMAGE])[IMAGE].to_pylist()
    sizes = set()
    for image in encoded:
        with contextlib.suppress(OSError), PIL.Image.open(io.BytesIO(image)) as opened:
            sizes.add(opened.size)
    sides = sorted(min(size) for size in sizes)
    return ["--image-size", str(min(224, sides[len(sides) // 2]))] if len(sizes) > 1 else []


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""

    # fmt: off
    def group() -> argparse.ArgumentParser:
        return argparse.ArgumentParser(add_help=False)

    def names(text: str) -> list[str]:
        return text.split(",")

    store, classes, directory, common, columns, table, hub = (group() for _ in range(7))
    store.add_argument("--storage-options", action="append", type=key_value, default=[], metavar="KEY=VALUE",
        help="for the object store, as Lance names it; also of --input, where that is s3://; may be repeated")
    classes.add_argument("--classes", metavar="FILE",
        help="names of classes that have no numbers yet, one a line, in the order of their labels (default: sorted); "
        "datasets that belong together need the same")
    directory.add_argument("--input", required=True, metavar="PATH",
        help="a directory, or one file of it, where every node can read it")
    directory.add_argument("--left-out", metavar="FILE",
        help="write the names of all that gives no row, each with the reason (default: the summary names some)")
    add = common.add_argument
    add("--out", required=True, metavar="URI", help="the Lance dataset to make, where every node can write")
    add("--overwrite", action="store_true", help="where a dataset exists, make this its next version (default: refuse)")
    add("--remove-begun", action="store_true",
        help="remove what killed runs with other arguments have left at --out; none of them may be writing there still")
    add("--dry-run", action="store_true", help="say what would be written, and write nothing")
    add("--rows-per-fragment", type=within(int, 1), default=8192, metavar="N",
        help="rows of every fragment but the last (default: %(default)s)")
    add("--val-fraction", type=within(float, 0, 0.99), default=0.1, metavar="F",
        help="where the source names no split but train, the part to call val (default: %(default)s)")
    add("--seed", type=int, default=0, help="of that choice, a hash of each image or row (default: %(default)s)")
    add("--shorter-side", type=within(int, 1), metavar="PIXELS",
        help="larger images get this size, smaller ones stay as they are (default: all stay)")
    add("--jpeg-quality", type=within(int, 1, 100), metavar="Q",
        help=f"encode every image as JPEG (default: only those of another size, with {QUALITY})")
    add("--check", choices=("headers", "full"), default="headers",
        help="of images that stay as they are, read the header, or decode them whole, which takes as long as an epoch "
        "and also finds those that were cut short (default: %(default)s)")
    add("--no-progress", action="store_true", help="no progress bar; there is one on terminals only")
    hub.add_argument("--image-column", default="image", metavar="NAME", help="(default: %(default)s)")
    hub.add_argument("--label-column", default="label", metavar="NAME", help="(default: %(default)s)")
    columns.add_argument("--columns", type=names, metavar="A,B", help="columns to keep (default: all)")
    add = table.add_argument
    add("--label-column", metavar="NAME", help="labels; strings become integers (default: label, where there is one)")
    add("--image-column", default="image", metavar="NAME", help="encoded images (default: %(default)s)")
    add("--keep-lists", type=names, default=[], metavar="A,B",
        help="columns of floats that stay lists of any length (default: those whose first lists have one length are "
        "vectors, and another length is an error)")
    add("--split-by", type=names, default=[], metavar="A,B",
        help="columns whose values draw the split together (default: all)")
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[2], formatter_class=argparse.RawTextHelpFormatter
    )
    sources = parser.add_subparsers(dest="source", required=True, metavar="SOURCE")
    for name, parents, text in (
        ("demo", [common], "scikit-learn's 1,797 handwritten digits; needs no network"),
        ("imagefolder", [directory, common, classes],
         "<class>/<image> or <split>/<class>/<image>, splits train, val(idation), test"),
        ("huggingface", [directory, common, classes, hub],
         "train-*, validation-*, test-*.parquet of encoded images, and of labels as integers or strings"),
        ("tables", [directory, common, classes, columns, table],
         "Parquet, CSV, Arrow and Feather files of one schema; a frame of pandas by to_parquet or to_feather"),
        ("webdataset", [directory, common, classes, columns, table],
         "tars in which files of one name are a row: 0001.jpg, 0001.cls, 0001.json"),
        ("saved", [directory, common, classes, table], "what save_to_disk of the datasets library wrote"),
        ("lance", [directory, common, classes, columns, table], "another Lance dataset, or a table of LanceDB"),
        ("lerobot", [], "a LeRobot dataset of version 3, to the Lance layout that raylance.lerobot.open reads"),
        ("classes", [classes], "adds integer labels to a Lance dataset that has them as strings; copies nothing else"),
    ):
        source = sources.add_parser(name, help=text, description=text, parents=[*parents, store])
        if name == "imagefolder":
            source.add_argument("--file-column", default="file", metavar="NAME",
                help="the column for the path of each image below --input, by which a row's file is found; '' for none "
                "(default: %(default)s)")
        if name == "tables":
            source.add_argument("--text-columns", type=names, default=[], metavar="A,B",
                help="columns of CSV and TSV files that stay text as it is written (default: those that numbers would "
                "change, such as 007)")
        if name == "lance":
            source.add_argument("--filter", metavar="SQL", help="rows to keep (default: all)")
        if name == "lerobot":
            source.add_argument("--input", required=True, metavar="PATH", help="the folder with meta/, data/, videos/")
            source.add_argument("--out", required=True, metavar="URI", help="the folder to make")
            source.add_argument("--overwrite", action="store_true",
                help="replace what is there, as what a killed run has left (default: refuse)")
        if name == "classes":
            source.add_argument("--data", required=True, metavar="URI", help="the Lance dataset; it gets new versions")
            source.add_argument("--string-column", required=True, metavar="NAME", help="class names")
            source.add_argument("--label-column", default="label", metavar="NAME",
                help="the column to add (default: %(default)s)")
    # fmt: on
    lacking = dict.fromkeys(("input", "classes", "image_column", "label_column", "left_out"))  # by some sources
    return parser.parse_args(argv, argparse.Namespace(**lacking, keep_lists=[], split_by=[]))


def main(argv: list[str] | None = None) -> int:
    """Runs the job; returns its exit status, which is 2 after one message on stderr."""
    try:
        print(run(parse_args(argv)))
    except RefusedError as refusal:
        print(f"create_dataset.py: {refusal}", file=sys.stderr)
        return 2
    return 0
