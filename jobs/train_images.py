"""Owns the command `python jobs/train_images.py`; the folder beside it does the work."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs.train_images.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
