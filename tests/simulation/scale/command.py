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
import json
import os
from pathlib import Path
from typing import Any

from tests.simulation.scale import validating
from tests.simulation.scale.studies import BASE, STUDIES, draw, run_studies

TOLERANCE = 0.1
KINDS: dict[str, type] = {
    name: type(value) for name, value in vars(BASE).items() if isinstance(value, int | float) and name != "ranks"
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, powers = parser.add_argument, ",".join(str(2**power) for power in range(11))
    add("--validate", action="store_true", help="put real runs beside the simulation")
    add("--ranks", type=_counts, default=powers, metavar="A,B", help="world sizes (default %(default)s)")
    add("--studies", type=_studies, default=",".join(STUDIES), metavar="A,B", help="some of %(default)s")
    add("--items", type=int, default=16, metavar="N", help="of a decoder, in --validate (%(default)s)")
    add("--set", action="append", type=_setting, default=[], metavar="NAME=VALUE", help="a time, a limit or a size")
    add("--processes", type=int, default=os.cpu_count(), metavar="N", help="(default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all numbers here")
    add("--plot", type=Path, metavar="FILE", help="draw them here, as PNG; needs matplotlib")
    return parser.parse_args(argv)


def _counts(text: str) -> list[int]:
    counts = [int(number) for number in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return counts


def _studies(text: str) -> list[str]:
    if unknown := set(text.split(",")) - set(STUDIES):
        raise argparse.ArgumentTypeError(f"there is no {', '.join(sorted(unknown))}; choose from {', '.join(STUDIES)}")
    return text.split(",")


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in KINDS:
        raise argparse.ArgumentTypeError(f"there is no {name!r}; choose from {', '.join(KINDS)}")
    return name, KINDS[name](value)


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Simulates, prints, draws."""
    base = dataclasses.replace(BASE, **dict(args.set))
    found = run_studies(args.studies, args.ranks, base, args.processes)
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
        draw(found, base, args.plot)
    by_name = {name: {r: dataclasses.asdict(one) for r, one in runs.items()} for name, runs in found.items()}
    return {"setting": dataclasses.asdict(base) | {"order": str(base.order)}, "found": by_name}


def main(argv: list[str] | None = None) -> int:
    """Does what the command line chose; returns the exit status."""
    args = parse(argv)
    base = dataclasses.replace(BASE, **dict(args.set))
    found: Any = validating.validate(base, args.items) if args.validate else study(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return int(args.validate and any(abs(row["error"]) > TOLERANCE for row in found))
