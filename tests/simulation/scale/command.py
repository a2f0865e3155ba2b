"""Owns the command line of the study of many ranks; it prints and draws what others simulate.

    python -m tests.simulation.scale             # 1 to 1,024 ranks, simulated: minutes on one core
    python -m tests.simulation.scale --ranks 1,64,1024 --set decoders=6 --json o.json --plot o.png
    python -m tests.simulation.scale --validate  # real runs with sleeping decoders beside the simulation

The simulation has the real plan, dispatcher, helper pool and sizes of each rank, in simulated time
(tests/simulation/fleet.py). docs/scale.md says what it leaves out, and what it found. `--set` takes any number of
`Setting` in tests/simulation/timed.py, whose docstring says what each is. Exit status: 1 if a real run and the
simulation differ by more than 10 %, 2 for bad arguments.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from tests.simulation.scale import validating
from tests.simulation.scale.studies import BASE, STUDIES, draw, run_studies

TOLERANCE = 0.1
SETTABLE = [name for name, value in vars(BASE).items() if isinstance(value, int | float) and name != "ranks"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked; `base` is the setting with what is set in its place."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, powers = parser.add_argument, ",".join(str(2**power) for power in range(11))
    add("--validate", action="store_true", help="put real runs beside the simulation")
    add("--ranks", default=powers, metavar="A,B", help="world sizes (default %(default)s)")
    add("--studies", default=",".join(STUDIES), metavar="A,B", help="some of %(default)s")
    add("--items", type=int, default=16, metavar="N", help="of a decoder, in --validate (%(default)s)")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="a time, a limit or a size")
    add("--processes", type=int, default=os.cpu_count(), metavar="N", help="(default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all numbers here")
    add("--plot", type=Path, metavar="FILE", help="draw them here, as PNG; needs matplotlib")
    args = parser.parse_args(argv)
    try:
        args.ranks = [int(number) for number in args.ranks.split(",")]
        args.base = dataclasses.replace(BASE, **dict(map(_setting, args.set)))
    except ValueError as error:
        parser.error(str(error))
    if min(args.ranks) < 1 or args.items < 1 or args.processes < 1:
        parser.error("--ranks, --items and --processes: must be at least 1")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot draws with matplotlib, which is not installed: pip install 'raylance[bench]'")
    args.studies = args.studies.split(",")
    if unknown := set(args.studies) - set(STUDIES):
        parser.error(f"--studies: there is no {', '.join(sorted(unknown))}; choose from {', '.join(STUDIES)}")
    return args


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in SETTABLE:
        raise ValueError(f"--set {text}: there is no {name!r}; choose from {', '.join(SETTABLE)}")
    return name, type(getattr(BASE, name))(float(value))


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Simulates, prints, draws."""
    found = run_studies(args.studies, args.ranks, args.base, args.processes)
    heads = "rows/s  of ideal   stall  own wait  first batch  longest step  in flight      held  requests  decide"
    for name, by_ranks in found.items():
        print(f"\n{name}: {STUDIES[name][0]}\nranks {heads}")
        for ranks, one in by_ranks.items():
            print(
                f"{ranks:>5} {one.rows_per_s:>6.3g} {one.rows_per_s / one.ideal_rows_per_s:>9.3f} {one.stall:>7.1%}"
                f" {one.own_wait:>9.1%} {one.first_batch_s:>10.2f} s {one.longest_step_s:>11.2f} s"
                f" {one.inflight_bytes / 1e6:>7.0f} MB {one.held_bytes / 1e6:>6.0f} MB"
                f" {one.requests_per_row:>7.3f}/row {1e6 * one.decide_s:>4.0f} µs",
            )
    if args.plot:
        draw(found, args.base, args.plot)
    by_name = {name: {r: dataclasses.asdict(one) for r, one in runs.items()} for name, runs in found.items()}
    return {"setting": dataclasses.asdict(args.base) | {"order": str(args.base.order)}, "found": by_name}


def main(argv: list[str] | None = None) -> int:
    """Does what the command line chose; returns the exit status."""
    args = parse(argv)
    found: Any = validating.validate(args.base, args.items) if args.validate else study(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return int(args.validate and any(abs(row["error"]) > TOLERANCE for row in found))
