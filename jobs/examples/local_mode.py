"""Local mode: the training function runs in this process, under a debugger if you like, and no Ray is started.

Threads do what actors do otherwise; batches and states are the same. Nothing is stored: `fit()` returns a checkpoint
that lies in a temporary directory.

    python -m jobs.examples.local_mode --data digits.lance
"""

import sys

from jobs.examples import common


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = common.parser(__file__, __doc__)
    parser.set_defaults(num_workers=0)
    return common.fit(parser.parse_args(argv), common.train)


if __name__ == "__main__":
    sys.exit(main())
