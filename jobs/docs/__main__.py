"""Owns the command `python -m jobs.docs`; the files beside it make the pages."""

import sys

from jobs.docs.command import main

if __name__ == "__main__":
    sys.exit(main())
