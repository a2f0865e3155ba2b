"""Plays schedules: `python -m tests.simulation --schedules 100000 --seed 0`; says what was injected, and what was lost.

A schedule that breaks something is played again, made simpler, and printed:
`python -m tests.simulation --seed 7 --shrink`.
"""

import argparse
import logging
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.simulation.play import play
from tests.simulation.schedule import FETCH_FAULTS, PLACE_FAULTS, TIMED_FAULTS, WORK_FAULTS, Draws
from tests.simulation.shrink import fails, shrink

BLOCK = 250


def play_block(seeds: range) -> tuple[Counter[str], list[tuple[int, str]]]:
    """Plays some schedules; returns what was injected, and what failed."""
    logging.disable(logging.CRITICAL)
    counts, failed = Counter[str](), []
    for seed in seeds:
        try:
            counts += play(Draws(seed))
        except Exception as error:  # also what the dispatcher raises
            failed.append((seed, f"{type(error).__name__}: {error}"))
    return counts, failed


def tell(given: list[int]) -> None:
    """Prints the events and the commands of a schedule."""

    def log(line: str) -> None:
        line = re.sub(r"chunk=Chunk\(.*?\)|, (advice|error|read_bytes|read_s|decode_s|held_bytes)=[^,)]*", "", line)
        print(line)

    try:
        play(Draws(given=given), log=log)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")


def table(counts: Counter[str]) -> Iterable[str]:
    """What was injected, and what else happened."""
    groups = {
        "helpers at work": WORK_FAULTS,
        "helpers being placed": PLACE_FAULTS,
        "fetching": FETCH_FAULTS,
        "at any time": TIMED_FAULTS,
    }
    injected = {name for names in groups.values() for name in names}
    groups["what happened"] = tuple(sorted(counts.keys() - injected - {"rows"}))
    for group, names in groups.items():
        yield group
        for name in names:
            yield f"    {name:45}{counts[name]:12,}"


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the next ones count on")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--shrink", action="store_true", help="make the schedule of the seed simpler, and tell it")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if args.shrink:
        what, taken = fails(Draws(args.seed))
        if not what:
            print("nothing is broken")
            return 0
        simple = shrink(taken)
        tell(simple)
        print(f"breaks {what!r}: {simple}")
        return 1
    begin = time.monotonic()
    counts, failed, end = Counter[str](), list[tuple[int, str]](), args.seed + args.schedules
    blocks = [range(at, min(at + BLOCK, end)) for at in range(args.seed, end, BLOCK)]
    with multiprocessing.Pool(args.processes) as pool:
        for some, bad in pool.imap_unordered(play_block, blocks):
            counts += some
            failed += bad
    took_s = time.monotonic() - begin
    for line in table(counts):
        print(line)
    print(f"{args.schedules:,} schedules in {took_s:.0f} s, {args.schedules / took_s:.0f} a second")
    if failed:
        print(f"{len(failed)} schedules broke something. Made simpler by python -m tests.simulation --shrink --seed")
        for seed, what in sorted(failed):
            print(f"    {seed}: {what}")
        return 1
    print(f"{counts['rows']:,} rows delivered, 0 lost, 0 twice, 0 out of order; every wait ended; nothing was left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
