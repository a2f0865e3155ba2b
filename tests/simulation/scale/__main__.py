"""Owns the command `python -m tests.simulation.scale`; the files beside it measure, compare and draw."""

import sys

from tests.simulation.scale.command import main

if __name__ == "__main__":
    sys.exit(main())
