"""The command `python jobs/benchmark.py`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.common import bringing  # noqa: E402

with bringing("raylance[bench]", __name__):
    from jobs.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
