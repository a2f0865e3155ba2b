"""Owns the command `python -m docs.source`; the files beside it make the pages."""

import sys

from docs.source.command import main

if __name__ == "__main__":
    sys.exit(main())
