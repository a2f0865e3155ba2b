"""The command `python -m docs.source`."""

import sys

from docs.source.command import main

if __name__ == "__main__":
    sys.exit(main())
