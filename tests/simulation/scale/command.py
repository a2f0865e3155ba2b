"""Owns the command line of the study of many ranks; it prints and draws what others measure and simulate.

    python -m tests.simulation.scale             # 1 to 1,024 ranks, simulated: minutes on one core
    python -m tests.simulation.scale --ranks 1,64,1024 --set decoders=6 --json o.json --plot o.png
    python -m tests.simulation.scale --measure   # what this machine takes, for --set and --times
    python -m tests.simulation.scale --validate  # real runs with sleeping decoders beside the simulation
    python -m tests.simulation.scale --planner   # what any step's rows of one rank cost at 10¹⁰ rows

The simulation has the real plan, dispatcher, helper pool and sizes of each rank, in simulated time
(tests/simulation/fleet.py). docs/scale.md says what it leaves out, and what it found. `--set` takes any field of its
Times, Shared and Run; their docstrings in tests/simulation/timed.py say what each is. Exit status: 1 when a real run
and the simulation differ by more than 10 %, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.simulation.fleet import simulate
from tests.simulation.scale import planner, validating
from tests.simulation.scale.studies import STUDIES, Study, defaults, run_studies
from tests.simulation.timed import Run, Shared, Times

TOLERANCE = 0.1
SETTABLE = {field.name: kind for kind in (Times, Shared, Run) for field in dataclasses.fields(kind)}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line, checked."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.scale", description=__doc__, formatter_class=as_written
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--measure", action="store_true", help="measure this machine; needs no simulation")
    what.add_argument("--validate", action="store_true", help="put real runs beside the simulation")
    what.add_argument("--planner", action="store_true", help="time the planner at 10¹⁰ rows")
    powers = ",".join(str(2**power) for power in range(11))
    parser.add_argument("--ranks", default=powers, metavar="A,B", help="world sizes (default %(default)s)")
    parser.add_argument("--studies", default=",".join(STUDIES), metavar="A,B", help="some of %(default)s")
    parser.add_argument("--items", type=int, default=16, metavar="N", help="of a decoder, in --validate (%(default)s)")
    parser.add_argument("--times", type=Path, metavar="FILE", help="what --measure --json wrote, in place of defaults")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a time, a limit or a size")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="(default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here, as PNG; needs matplotlib")
    folder = Path(tempfile.gettempdir(), "raylance-benchmark")
    parser.add_argument("--data-dir", type=Path, default=folder, metavar="DIR", help="of the photographs to measure by")
    args = parser.parse_args(argv)
    try:
        args.ranks = [int(number) for number in args.ranks.split(",")]
        args.set = {**read_times(args.times), **dict(_setting(text) for text in args.set)}
    except (OSError, ValueError) as error:
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
    if name not in SETTABLE or name in ("order", "dies", "ranks"):
        raise ValueError(f"--set {text}: there is no {name!r}; choose from {', '.join(SETTABLE)}")
    return name, float(value)


def read_times(path: Path | None) -> dict[str, float]:
    """What was measured, as far as the simulation takes it: a call with small tables stands for both helpers."""
    if path is None:
        return {}
    found = json.loads(path.read_text())
    if "call_s" not in found:
        raise ValueError(f"--times {path}: holds no call_s; it is to be what --measure --json wrote")
    found |= {"read_call_s": found["call_s"], "decode_call_s": found["call_s"], "raw_bytes": int(found["raw_bytes"])}
    return {name: value for name, value in found.items() if name in SETTABLE}


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Prints what this machine takes."""
    from tests.simulation.scale import measuring

    args.data_dir.mkdir(parents=True, exist_ok=True)
    with _ray():
        found = measuring.measure(args.data_dir)
    for name, value in found.items():
        print(f"{name:<20} {value:.4g}")
    return found


def _ray() -> Any:
    import ray

    # Sleeping decoders take no core: Ray is promised more than there are.
    return ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False)


def predict(case: validating.Case, study: Study) -> tuple[float, float]:
    """What the simulation says of a real run: seconds of the first batch and of the epoch."""
    import raylance

    times = dataclasses.replace(
        study.times, decode_row_s=case.row_s, decode_row_varies=0.0, decode_item_varies=0.0, rank_varies=0.0,
        step_s=case.step_s, step_varies=0.0,
    )  # fmt: skip
    run = Run(
        ranks=case.ranks, decoders=case.decoders, batch_size=case.batch_size, steps=case.steps, rows=case.rows,
        raw_bytes=validating.RAW_BYTES, decoded_bytes=validating.SIDE**2 * 3, order=raylance.Sequential(),
        max_inflight_bytes=case.max_inflight_bytes, is_warm=True, dies="decoder" if case.dies else "",
    )  # fmt: skip
    found = simulate(run, times, Shared())
    return found.first_batch_s, found.seconds


def validate(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints real runs beside the simulation."""
    study, table = defaults(args.set), []
    cases = list(validating.cases(args.items))
    print("ranks  decoders  step_s  rows/s real  simulated   error   of linear   first batch real  simulated")
    with _ray(), tempfile.TemporaryDirectory() as folder:
        uri = validating.write(Path(folder), max(case.rows for case in cases))
        for case in cases:
            first_s, real_s = validating.measure(case, uri)
            first_there_s, there_s = predict(case, study)
            linear = case.ranks * case.decoders / case.row_s
            row = {
                **dataclasses.asdict(case),
                "real_rows_per_s": case.rows / real_s,
                "simulated_rows_per_s": case.rows / there_s,
                "error": real_s / there_s - 1,
                "of_linear": case.rows / real_s / linear,
                "first_batch_s": first_s,
                "simulated_first_batch_s": first_there_s,
            }
            table.append(row)
            print(
                f"{case.ranks:>5} {case.decoders:>9} {case.step_s:>7.1f} {row['real_rows_per_s']:>12.1f}"
                f" {row['simulated_rows_per_s']:>10.1f} {row['error']:>+7.1%} {row['of_linear']:>11.3f}"
                f" {first_s:>18.2f} {first_there_s:>10.2f}{'  a decoder dies' if case.dies else ''}",
                flush=True,
            )
    return table


def plan(_: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints what the planner takes."""
    print(
        f"{planner.ROWS:,} rows, {planner.PER_RANK} of each rank a step: median, longest, most bytes; then of a chunk"
    )
    found = [planner.cost(order, ranks) for order in planner.ORDERS for ranks in (1, 64, 1024)]
    for cost in found:
        print(
            f"{cost.ranks:>5} ranks {1e3 * cost.seconds:>6.2f} ms {1e3 * cost.longest_s:>6.2f} ms"
            f" {cost.peak_bytes / 1e6:>6.2f} MB; {cost.chunk_rows:>8,} rows {1e3 * cost.chunk_s:>7.1f} ms  {cost.order}"
        )
    return [dataclasses.asdict(cost) for cost in found]


def study(args: argparse.Namespace) -> dict[str, Any]:
    """Simulates, prints, draws."""
    base = defaults(args.set)
    found = run_studies(args.studies, args.ranks, base, args.processes)
    heads = "rows/s  of ideal   stall  own wait  first batch  longest step  in flight      held  requests  decide"
    for name, by_ranks in found.items():
        print(f"\n{name}: {STUDIES[name].description}\nranks {heads}")
        for ranks, one in by_ranks.items():
            print(
                f"{ranks:>5} {one.rows_per_s:>6.3g} {one.rows_per_s / one.ideal_rows_per_s:>9.3f} {one.stall:>7.1%}"
                f" {one.own_wait:>9.1%} {one.first_batch_s:>10.2f} s {one.longest_step_s:>11.2f} s"
                f" {one.inflight_bytes / 1e6:>7.0f} MB {one.held_bytes / 1e6:>6.0f} MB"
                f" {one.requests_per_row:>7.3f}/row {1e6 * one.decide_s:>4.0f} µs",
            )
    if args.plot:
        from tests.simulation.scale.plotting import draw  # loads matplotlib

        draw(found, base, args.plot)
    by_name = {name: {r: dataclasses.asdict(one) for r, one in runs.items()} for name, runs in found.items()}
    return {"times": dataclasses.asdict(base.times), "shared": dataclasses.asdict(base.shared), "found": by_name}


def main(argv: list[str] | None = None) -> int:
    """Does what the command line chose; returns the exit status."""
    args = parse(argv)
    work = measure if args.measure else validate if args.validate else plan if args.planner else study
    found = work(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    if args.validate:
        return int(any(abs(row["error"]) > TOLERANCE for row in found))
    return 0
