"""Owns the name `raylance.top`, by which `python -m raylance.top` is called; does nothing itself: see `reports.top`."""

import sys

from raylance.reports.top import main, show

__all__ = ["main", "show"]

if __name__ == "__main__":
    sys.exit(main())
