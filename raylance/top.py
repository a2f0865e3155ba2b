"""`python -m raylance.top`, a table with the status of a run's loaders.

    python -m raylance.top s3://bucket/runs/food101
    RAY_AUTH_MODE=token ray job submit -- python -m raylance.top /shared/runs/food101 --once

The command reads the records that the loaders write next to the run's checkpoints. It needs that storage, but not Ray.
"""

import argparse
import sys
import time

from raylance.errors import ConfigError
from raylance.reports.progress import has_ended, progress, recent_s, table
from raylance.reports.reading import Run, RunFolder

_CLEAR = "\x1b[H\x1b[2J"


def show(run: Run, now: float) -> str:
    """Returns the text of the page: the progress of the run, the table of loaders, and the verdict on the last seconds,
    or on the whole run if it has ended.

    Args:
        run: The run.
        now: Seconds since 1970.
    """
    found = progress(run)
    lines = [f"run {run.name}, {time.strftime('%H:%M:%S', time.localtime(now))}"]
    is_over = all(has_ended(record, now) for record in run.newest(run.main))
    if is_over:
        lines[0] += ", ended"
    if found is not None:
        lines[0] += f": epoch {found.epoch}, {found.rows:,}/{found.epoch_rows:,} rows, {found.describe()}"
    last_s = 4 * max(recent_s(record) for record in run.newest(run.main))
    verdict = run.verdict(run.main) if is_over else run.verdict(run.main, last_s)
    when = "all starts" if is_over else f"the last {last_s:,.0f} s of this start"
    return "\n".join([*lines, "", table(run, now), "", f"{when}: {verdict}"])


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0, or 2 if there is nothing to show."""
    parser = argparse.ArgumentParser(
        prog="python -m raylance.top",
        description=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="the run's folder, <storage path>/<run name>, as a path or URI")
    parser.add_argument("--every", help="seconds between two looks (default: %(default)s)", type=float, default=2.0)
    parser.add_argument("--once", help="look once, and end", action="store_true")
    args = parser.parse_args(argv)
    if not args.every > 0:
        parser.error(f"--every {args.every:g}: give seconds, more than 0")
    try:
        folder = RunFolder(args.run)
        while True:
            try:
                page = show(folder.read(), time.time())
            except OSError as error:  # the storage may work again at the next look
                if args.once:
                    raise
                page = f"{args.run} cannot be read now: {error}"
            print((_CLEAR if sys.stdout.isatty() and not args.once else "") + page, flush=True)
            if args.once:
                return 0
            time.sleep(args.every)
    except (ConfigError, OSError) as error:
        print(f"raylance.top: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
