"""Owns the command `python jobs/benchmark.py`; the folder beside it measures."""

import sys

from benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
