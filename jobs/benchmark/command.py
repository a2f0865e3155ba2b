"""The side-by-side measurement of raylance and its peers.

    python -m jobs.benchmark                              # tables, turns, resumes: some minutes on two cores
    python -m jobs.benchmark --only images --readers decode,safe-lance,raylance --epochs 5 --json o.json
    python -m jobs.benchmark --against ../before          # beside the raylance of another checkout, in the same rounds
    python -m jobs.benchmark --only spending,memory       # where CPU time and memory go

Two datasets are made once and kept: JPEG photographs with a label, and float32 vectors with an id; label and id are the
row's number. Every reader hands torch batches to this process and uses the same cores, with one thread for numbers
(OMP_NUM_THREADS) in each process. Peers with workers are tried with `--workers` of them and with more, and the best
count takes part. "decode" is the ceiling: the decode function alone, on bytes in memory. "raylance-free" decodes
nothing: its rate is that of the data path alone. "raylance-threads" reads in this process, without Ray.

The clock covers, for every reader alike, a pass of two whole epochs (`--pass-epochs`): from the call of `iter()` until
the last batch of the last one is touched. Opening, permuting, starting processes and one warm-up epoch, which also
fills the page cache, are not timed. Each pass opens its reader, and closes it and Ray afterwards, because an idle actor
of Ray takes 1 % of a core. Before the pass the machine comes to rest, so that no reader pays for another reader's work.
raylance begins the next epoch while the last batches of one are made. Passes lie some epochs apart, so it expects the
second epoch of a pass, as in training, and never the first: no row is read or decoded before the clock starts, and what
is made for the epoch after a pass is not used, which costs some percent of a short pass.
The last columns separate the first batch from the rest: how long it took, the longest wait for the first one of a later
epoch (of a trainer without work, which waits for each item so; that of one with work is in "turns"), and the rate after
the first. A long epoch approaches that rate, but it flatters a reader that has prefetched much before. The CPU time is
what the consuming thread itself spends on getting a batch, which no prefetching hides from training.
Readers take turns, one pass each a round, so that noise of the machine affects all alike; a ratio is the median of the
ratios within the rounds.

To touch a batch is to sum a strided part of it. The sum does not depend on the order, so readers that share a decode
function must agree on it; it and the row numbers are checked after the pass. After the tables come the figures that
raylance wants to reach, each beside its target.

The other parts show what a rate does not: a trainer slower than the loader through epoch turns and validation passes
(turns), the first batch of a run (starting) and after a resume (resuming), where the CPU time of a row goes (spending),
the memory of hundreds of short epochs and of heavy-tailed rows (memory), samples of several frames of videos (clips),
and documents that are packed (packing). Each is a file of its name. jobs/gpu.sh measures GPUs.

Exit status: 1 when a reader delivered other rows than it claims or other values than its peers, 2 for bad arguments.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jobs.benchmark import clips, figures, memory, packing, resuming, spending, starting, turns
from jobs.common import within

from .figures import Figure, print_figures, print_table
from .measuring import one_thread_each, open_before, run_rounds, serve
from .readers import READERS, Entry
from .setting import Setting

TABLES: dict[str, Callable[[Any], Iterator[Figure]]] = {"images": figures.images, "vectors": figures.vectors}
_MODULES = (turns, starting, resuming, spending, memory, clips, packing)
# Each measures, and makes figures of what it found.
EXPERIMENTS: dict[str, Any] = {module.__name__.rpartition(".")[2]: module for module in _MODULES}
PARTS = [*TABLES, *EXPERIMENTS]
BY_DEFAULT = PARTS[: PARTS.index("spending")]  # those from there on take minutes each


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    found = {"cores": os.cpu_count(), "processor": _processor(), "python": platform.python_version()}
    for package in ("raylance", "ray", "pylance", "lancedb", "torch", "pillow", "simplejpeg", "pyarrow", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {key: str(value) for key, value in vars(args).items()}


def _processor() -> str:
    """The processor's name, where the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    names = sorted({name for readers in READERS.values() for name in readers})
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    add = functools.partial(parser.add_argument, metavar="N", type=within(int, 1))
    add("--images", default=4000, help="photographs (default %(default)s)")
    add("--vectors", default=500_000, help="vectors (default %(default)s)")
    add("--batch-size", default=64, help="images a batch (default %(default)s)")
    add("--vector-batch-size", default=1024, help="vectors a batch (default %(default)s)")
    add("--workers", default=os.cpu_count(), help="cores that each reader may use (default %(default)s)")
    add("--epochs", default=3, help="timed rounds (default %(default)s)")
    add("--pass-epochs", default=2, type=within(int, 1, 99), help="epochs of a timed pass (default %(default)s)")
    add("--seed", type=int, default=0, help="of the data and of the orders (default %(default)s)")
    folder = Path(tempfile.gettempdir(), "raylance-benchmark")
    add("--data-dir", type=Path, default=folder, metavar="DIR", help="of the datasets (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all raw numbers here")
    add("--readers", type=str, metavar="A,B", default=",".join(names), help="some of %(default)s")
    add("--against", type=Path, metavar="DIR", help="a checkout whose raylance takes part, as …-before")
    add("--only", type=str, metavar="A,B", default=",".join(BY_DEFAULT), help=f"parts of {', '.join(PARTS)}")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(PARTS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    chosen = set(args.readers.split(","))
    if unknown := chosen - set(names):
        parser.error(f"--readers: there is no {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    tables = [kind for kind in READERS if kind in args.only]
    if tables and not any(chosen & set(READERS[kind]) for kind in tables):
        parser.error(f"--readers: {args.readers} cannot read {' or '.join(tables)}")
    if args.against and not (args.against / "raylance" / "__init__.py").exists():
        parser.error(f"--against: {args.against} is not a checkout: it has no raylance/__init__.py")
    if args.seed < 0:
        parser.error(f"--seed: {args.seed} is negative, and NumPy's seeds start at 0")
    if args.json and (args.json.is_dir() or not args.json.absolute().parent.is_dir()):
        parser.error(f"--json: {args.json} is a folder, or its folder does not exist")
    try:
        args.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--data-dir: cannot be a folder: {error}")
    return args


def setting_of(args: argparse.Namespace) -> Setting:
    """What the experiments take of the command line."""
    names = {field.name for field in dataclasses.fields(Setting)} & vars(args).keys()
    return Setting(rounds=args.epochs, **{name: getattr(args, name) for name in names})


def choose(kind: str, args: argparse.Namespace) -> dict[str, Entry]:
    """The readers of a dataset that the command line names, then those of another checkout."""
    chosen = {name: READERS[kind][name] for name in READERS[kind] if name in args.readers.split(",")}
    for name in [name for name in chosen if name.startswith("raylance")] if args.against else []:
        before = functools.partial(open_before, kind=kind, name=name, checkout=args.against.absolute())
        chosen[f"{name}-before"] = Entry(open=before, ceiling=chosen[name].ceiling)
    return chosen


def main(argv: list[str] | None = None) -> int:
    """Measures what the command line chose; returns the exit status."""
    one_thread_each()
    if (sys.argv[1:] if argv is None else argv) == ["--serve"]:
        return serve()
    args = parse(argv)
    report: dict[str, Any] = {"environment": environment(args)}
    print(*(f"{key}={value}" for key, value in report["environment"].items()))
    setting = setting_of(args)
    sound, reached = True, list[Figure]()
    for part in [part for part in PARTS if part in args.only]:
        print(f"measuring {part}", file=sys.stderr)
        if part in EXPERIMENTS:
            try:
                report[part] = EXPERIMENTS[part].measure(setting)
            except ImportError as error:
                print(f"{part}: skipped, {error}")
                continue
            reached += EXPERIMENTS[part].figures(report[part])
        elif chosen := choose(part, args):
            report[part] = run_rounds(setting.job(part), chosen, setting.rounds)
            sound = print_table(part, chosen, report[part]) and sound
            reached += TABLES[part](report[part])
    print_figures(reached)
    report["figures"] = [figure.as_dict() for figure in reached]
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0 if sound else 1
