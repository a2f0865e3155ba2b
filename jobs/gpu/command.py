"""The one command that checks and measures raylance on a GPU.

    bash jobs/gpu.sh                                  # installs what is missing, then all of it: ten minutes at most
    python jobs/gpu.py --only checks                  # one part
    python jobs/gpu.py --device cpu --images 64 --odd 50 --vectors 4000 --seconds 1   # the same code without a GPU

checks: batches on the device are those of the CPU (dtypes, masks, pinned memory, breaks, resumes, two loaders, side
stream under load), `DeviceImage` decodes odd pictures as `Image` does, and passes leave no memory on the device.
decoding: images/s of the cores alone, of the device's codec alone, and of raylance with each.
training: ResNet-50 (bf16, channels last, compiled) on random tensors that lie on the device, which is its ceiling; from
JPEGs of 42 kB and of 110 kB by `Image` in actors; and by `DeviceImage`. Stall is the share of the time that the
training thread waited for a batch; busy is the share that the device worked, by the events of its stream.
transfers: 768-float rows to the device, in GB/s, beside copies of pinned memory of the same size.

All data is made on the spot. A part that fails is reported, and the next one runs. The figures come last, as the table
that docs/speed.md holds. Exit status: 1 if a check failed or a part did, 2 for bad arguments.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from jobs.benchmark.figures import Figure
from jobs.benchmark.measuring import one_thread_each
from jobs.common import within
from jobs.gpu import decoding, training, transfers

from .checks import Check, check_batches, check_memory, check_pictures, check_positions, check_streams
from .setting import GpuSetting


def run_checks(setting: GpuSetting) -> Iterator[Check]:
    """All checks, one after the other; one that raises is a failed one."""
    device, folder = setting.device, setting.folder
    for check in (
        functools.partial(check_batches, device, folder),
        functools.partial(check_positions, device, folder),
        functools.partial(check_streams, device, folder),
        functools.partial(check_pictures, device, folder, setting.odd),
        functools.partial(check_memory, device, folder, setting.passes),
    ):
        try:
            yield from check()
        except Exception as error:
            traceback.print_exc()
            yield Check(check.func.__name__, False, f"{type(error).__name__}: {error}")


MEASURED: dict[str, Callable[[GpuSetting], Iterable[Figure]]] = {
    "decoding": decoding.measure,
    "transfers": transfers.measure,
    "training": training.measure,
}
PARTS = ("checks", *MEASURED)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    add = functools.partial(parser.add_argument, metavar="N", type=within(int, 1))
    add("--images", default=8192, help="photographs of each size (default %(default)s)")
    add("--odd", default=1000, help="odd pictures (default %(default)s)")
    add("--vectors", default=400_000, help="768-float rows (default %(default)s)")
    add("--passes", default=50, help="passes of the check of memory (default %(default)s)")
    add("--workers", default=os.cpu_count(), help="cores to use (default %(default)s)")
    add("--seconds", default=10, help="of each figure, about (default %(default)s)")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", type=str, metavar="NAME", default=found, help="cuda or cpu (default here: %(default)s)")
    add("--data-dir", type=Path, metavar="DIR", help="where datasets are made (default: a temporary folder)")
    add("--json", type=Path, metavar="FILE", help="write all numbers here")
    add("--only", type=str, metavar="A,B", default=",".join(PARTS), help=f"parts of {', '.join(PARTS)}")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    if unknown := set(args.only) - set(PARTS):
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    if args.device not in ("cuda", "cpu") or (args.device == "cuda" and found == "cpu"):
        parser.error(f"--device: {args.device} is not here; torch {torch.__version__} finds {found}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the parts that the command line chose; returns the exit status."""
    one_thread_each()
    args = parse(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.data_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        setting = GpuSetting(
            device=torch.device(args.device),
            folder=folder,
            **{name: getattr(args, name) for name in ("images", "odd", "vectors", "passes", "workers", "seconds")},
        )
        return _run(setting, args.only, args.json)


def _run(setting: GpuSetting, parts: list[str], to: Path | None) -> int:
    begin, sound, figures, checks = time.monotonic(), True, list[Figure](), list[Check]()
    print(setting.described, flush=True)
    if "checks" in parts:
        for check in run_checks(setting):
            checks.append(check)
            print(f"{'ok    ' if check.holds else 'FAILED'} {check.name}: {check.found}", flush=True)
        sound = all(check.holds for check in checks)
    for part in [part for part in MEASURED if part in parts]:
        print(f"measuring {part}, after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        try:
            for figure in MEASURED[part](setting):
                figures.append(figure)
                print(_line(figure), flush=True)
        except Exception:
            traceback.print_exc()
            print(f"FAILED {part}", flush=True)
            sound = False
    took = f"{sum(check.holds for check in checks)} of {len(checks)} checks hold; {time.monotonic() - begin:.0f} s"
    print(f"\n{setting.described}: {took}\n\n| | |\n|---|---|", *map(_line, figures), sep="\n")
    if to:
        found: dict[str, Any] = {"machine": setting.described, "checks": [asdict(check) for check in checks]}
        to.write_text(json.dumps(found | {"figures": [figure.as_dict() for figure in figures]}, indent=1))
    return 0 if sound else 1


def _line(figure: Figure) -> str:
    """A line of the table."""
    number = figure.median
    shown = f"{number:.0%}" if figure.unit == "%" else f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"| {figure.name} | {shown}{f' {figure.unit}' if figure.unit not in ('', '%') else ''} |"
