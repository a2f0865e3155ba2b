"""Plays schedules of real faults: `python -m tests.faults --schedules 300 --seed 0`; exit status 1 if a row was lost,
came twice or was altered, if a run hung, or if something was left.

`--only 7:12` plays one schedule again; `--table FILES` prints what earlier calls found.
"""

import argparse
import dataclasses
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moto.server import ThreadedMotoServer

from tests.faults import results, schedule, workloads
from tests.faults.play import Run
from tests.faults.schedule import Schedule

DEFAULT = {"schedules": 2, "seed": 54}  # deaths of ranks and helpers, and a helper that hangs, in a minute and a half


def play(plans: Iterable[Schedule], keep: Path | None) -> Iterator[dict[str, Any]]:
    """Outcomes of schedules, one after the other; files of those that failed are kept, if there is a place for them."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line a request
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    with tempfile.TemporaryDirectory(prefix="faults-") as parent:
        data = Path(parent, "data")
        data.mkdir()
        workloads.write(data)
        for plan in plans:
            folder = Path(parent, plan.name.replace(":", "-"))
            folder.mkdir()
            outcome = Run(plan, folder, data, server.get_host_and_port()[1]).play()
            if outcome.problems and keep is not None:
                shutil.copytree(folder, keep / folder.name, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            shutil.rmtree(folder, ignore_errors=True)
            yield dataclasses.asdict(outcome)
    server.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--schedules", type=int, default=DEFAULT["schedules"], help="how many (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=DEFAULT["seed"], help="from which they are drawn (default: %(default)s)"
    )
    parser.add_argument("--first", type=int, default=0, help="the index of the first (default: %(default)s)")
    parser.add_argument("--only", metavar="SEED:INDEX", help="one schedule")
    parser.add_argument("--out", type=Path, help="a file to which outcomes are appended, a JSON object a line")
    parser.add_argument("--keep", type=Path, help="a folder for the files of schedules that failed")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="prints the table of such files")
    args = parser.parse_args(argv)
    if args.table:
        lines = [json.loads(line) for path in args.table for line in path.read_text().splitlines()]
        print(results.table(lines))
        return 0
    seed, indices = args.seed, range(args.first, args.first + args.schedules)
    if args.only:
        seed, index = map(int, args.only.split(":"))
        indices = range(index, index + 1)
    outcomes = []
    for outcome in play([schedule.draw(seed, index) for index in indices], args.keep):
        outcomes.append(outcome)
        print(results.line(outcome), flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(outcome) + "\n")
    print(results.table(outcomes))
    return int(any(outcome["problems"] for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
