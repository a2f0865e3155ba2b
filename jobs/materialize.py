"""Owns the command `python jobs/materialize.py`; the folder beside it does the work."""

import sys

from materialize.command import main

if __name__ == "__main__":
    sys.exit(main())
