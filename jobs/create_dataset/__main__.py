"""Owns the command `python -m jobs.create_dataset`."""

import sys

from jobs.create_dataset.command import main

if __name__ == "__main__":
    sys.exit(main())
