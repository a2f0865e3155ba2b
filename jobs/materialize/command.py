"""The making of a filtered, shuffled or grouped copy of a Lance dataset.

    python jobs/materialize.py --data photos.lance --filter "split = 'train'" --out train.lance
    python jobs/materialize.py --data photos.lance --out small.lance --shorter-side 256 --jpeg-quality 90
    python jobs/materialize.py --data photos.lance --out by_class.lance --group-by label

The copy holds every selected row once, in the order of one keyed permutation of them all (with --group-by: class after
class, shuffled inside of each), in fragments that differ by one row at the most. The same source, filter and seed give
the same rows in the same order, whatever the number of machines. Read in storage order, or in windows, it is as well
shuffled as --seed made it, by sequential reads alone.

How: Ray Data's tasks read the source in chunks, from start to end, and write each beside --out, sorted by where its
rows go; then they merge stretches of all chunks, and write the fragments. A CPU that works takes the memory of four
buckets (--bucket-bytes) and 600 MB, whatever the size of the data; the scratch space is as large as the copy. It is
committed as one version at the end: before, nothing opens under --out, and a run that fails or is stopped removes what
it wrote.

The schema metadata key `raylance:provenance` says what the copy was made from; raylance.dataset() checks whether
that has changed since, and warns, or refuses (stale="refuse").

Exit status: 0 when it is made, 1 when making it failed, 2 for what cannot be honoured; 130 and 143 when SIGINT and
SIGTERM stopped it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import lance
import ray
import tqdm

import raylance
from jobs.common import connect, exists, key_value, locate, locate_dataset, number_or_name, store_options, within
from jobs.output import notes_of, separate_output_once

from .images import QUALITY, Reencode
from .making import check_target, make
from .planning import Plan, Wish, make_plan


class Progress:
    """A bar for each phase, which counts up to `rows`; on terminals only."""

    def __init__(self, rows: int, shown: bool) -> None:
        self.bars: dict[str, tqdm.tqdm] = {}
        # The file as it is before Ray's output is separated.
        self.new = functools.partial(
            tqdm.tqdm, total=rows, unit="row", unit_scale=True, disable=not shown, file=sys.stderr
        )

    def __call__(self, phase: str, rows: int) -> None:
        """Adds finished rows; a new phase ends the previous one."""
        if phase not in self.bars:
            self.close()
            self.bars[phase] = self.new(desc=phase)
        self.bars[phase].update(rows)

    def close(self) -> None:
        """Ends all bars."""
        for bar in self.bars.values():
            bar.close()


def run(args: argparse.Namespace) -> str:
    """Does what the arguments ask for; returns the summary."""
    wish = open_source(args)
    check_target(wish, exists(wish.out, wish.storage_options))
    progress = Progress(len(wish.data), sys.stderr.isatty() and not args.no_progress)
    try:
        plan = make_plan(wish, progress)
        print(plan, flush=True)
        with separate_output_once("materialize"):
            connect()
            with stoppable():
                made = make(plan, progress)
    finally:
        progress.close()
    return summarise(plan, made)


def open_source(args: argparse.Namespace) -> Wish:
    """Opens and checks the source, and what is to be made of it."""
    options = store_options(args.storage_options)
    given = {"version": args.version, "filter": args.filter, "storage_options": options or None}
    data = raylance.dataset(locate(args.data), columns=args.columns, **given)
    columns = data.schema.names
    images = None
    if args.shorter_side is not None or args.jpeg_quality is not None:
        images = Reencode(
            column=args.image_column,
            shorter_side=args.shorter_side,
            quality=args.jpeg_quality,
            keep_bad=args.on_bad_image == "keep",
        )
        if args.image_column not in columns:
            raise raylance.errors.ConfigError(
                f"--image-column {args.image_column} is none of the columns {', '.join(columns)}. No image would be "
                "made smaller. Name the column of encoded images."
            )
        # Refuses a column that holds no images.
        raylance.dataset(locate(args.data), columns=[raylance.Image(images.column, size=8)], stale="ignore", **given)
    out = locate_dataset(args.out)
    if out.rstrip("/") == locate(args.data).rstrip("/"):
        raise raylance.errors.ConfigError(
            f"--out {args.out} is the source itself. It would be overwritten. Give another name."
        )
    as_given = ("filter", "group_by", "seed", "image_column", "rows_per_fragment", "bucket_bytes", "overwrite")
    return Wish(
        data=data,
        out=out.rstrip("/"),
        columns=columns,
        images=images,
        scratch=locate(args.scratch).rstrip("/") if args.scratch else None,
        storage_options=options,
        **{name: getattr(args, name) for name in as_given},
    )


def summarise(plan: Plan, made: lance.LanceDataset) -> str:
    """Describes what was made, and how to use it."""
    size = sum(field.bytes_on_disk for field in made.stats.data_stats().fields)
    counts = [fragment.count_rows() for fragment in made.get_fragments()]
    return "\n".join([
        f"wrote {plan.work.out}, version {made.version}",
        f"  rows       {sum(counts):,}, each once, compared with the source by checksum",
        f"  fragments  {len(counts):,} of {min(counts):,} to {max(counts):,} rows",
        f"  bytes      {size:,}",
        f"  made from  {plan.work.source}, version {plan.wish.data.version}",
        f"use it: raylance.dataset({plan.work.out!r}, …), without the filter; it warns when the source has changed",
    ])  # fmt: skip


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM ends the run as SIGINT does: by an exception, so that what it wrote is removed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, stop)  # after ray.init, which sets one of its own
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def reason(error: BaseException) -> str:
    """Returns what failed in a task: the last error that its text names, but for the one that Ray Data wraps it in."""
    named = re.findall(r"^(?:[\w.]+\.)?(?!UserCode)[A-Z]\w+(?:Error|Exception): (.+)$", str(error), re.MULTILINE)
    return (named[-1] if named else (str(error) or type(error).__name__).splitlines()[0]).removesuffix(".")


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    # fmt: off
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument_group("what is copied").add_argument
    add("--data", required=True, metavar="URI", help="the Lance dataset, where every node can read it")
    add("--version", type=number_or_name, metavar="V", help="version number or tag (default: the newest)")
    add("--filter", metavar="SQL", help="rows to copy (default: all)")
    add("--columns", type=lambda text: text.split(","), metavar="A,B", help="columns to copy (default: all)")
    add = parser.add_argument_group("how").add_argument
    add("--seed", type=int, default=0, help="of the order (default: %(default)s)")
    add("--group-by", metavar="COLUMN", help="rows of one value lie together, shuffled inside (default: none do)")
    add("--image-column", default="image", metavar="NAME", help="(default: %(default)s)")
    add("--shorter-side", type=within(int, 1), metavar="PIXELS",
        help="larger images get this size, smaller ones stay as they are (default: all stay)")
    add("--jpeg-quality", type=within(int, 1, 100), metavar="Q",
        help=f"encode every image as JPEG (default: only those of another size, with {QUALITY})")
    add("--on-bad-image", choices=("raise", "keep"), default="raise",
        help="where one cannot be decoded: stop, or keep its bytes (default: %(default)s)")
    add("--rows-per-fragment", type=within(int, 1), metavar="N",
        help="rows of a fragment at the most (default: of 256 MB)")
    add = parser.add_argument_group("where").add_argument
    add("--out", required=True, metavar="URI", help="the Lance dataset to make, where every node can write")
    add("--overwrite", action="store_true", help="add a version to an existing dataset (default: refuse)")
    add("--scratch", metavar="URI",
        help="of what lies between the passes, where every node can write (default: beside --out)")
    add("--bucket-bytes", type=within(int, 1 << 16, 1 << 30), metavar="N",
        help="bytes that are sorted at a time (default: 128 MiB to 1 GiB, with the size of the data)")
    add("--storage-options", action="append", type=key_value, default=[], metavar="KEY=VALUE",
        help="for the object store, as Lance names it; may be repeated")
    add("--no-progress", action="store_true", help="no progress bar; there is one on terminals only")
    # fmt: on
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the job; returns its exit status."""
    args = parse_args(argv)
    try:
        print(run(args))
    except raylance.errors.CoverageError as error:
        print(f"FAULT: {error}", file=sys.stderr)
        return 1
    except raylance.RaylanceError as error:
        print(f"materialize.py: {error}", file=sys.stderr)
        return 2
    except (ray.exceptions.RayError, OSError, ValueError) as error:
        print(
            f"materialize.py: making {args.out} failed ({reason(error)}). Nothing was committed, and an older version "
            f"is as it was. Remove the cause and run it again{notes_of(error)}.",
            file=sys.stderr,
        )
        return 1
    except (KeyboardInterrupt, SystemExit) as stopped:  # the latter from the handler of SIGTERM that ray.init sets
        by = signal.SIGTERM if signal.SIGTERM in stopped.args else signal.SIGINT
        print(f"materialize.py: stopped by {by.name}; nothing was committed", file=sys.stderr)
        return 128 + by
    return 0
