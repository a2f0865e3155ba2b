"""Owns the command `python -m jobs.train_images`."""

import sys

from jobs.train_images.command import main

if __name__ == "__main__":
    sys.exit(main())
