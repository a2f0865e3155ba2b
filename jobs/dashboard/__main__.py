"""Owns the command `python -m jobs.dashboard`; the files beside it say what it writes."""

import sys

from jobs.dashboard.command import main

if __name__ == "__main__":
    sys.exit(main())
