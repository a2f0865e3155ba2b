"""The command `python -m jobs.benchmark`."""

import sys

from jobs.common import bringing

with bringing("raylance[bench]", __name__):
    from .command import main

if __name__ == "__main__":
    sys.exit(main())
