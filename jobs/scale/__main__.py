"""Owns the command `python -m jobs.scale`; the files beside it measure, compare and draw."""

import sys

from jobs.scale.command import main

if __name__ == "__main__":
    sys.exit(main())
