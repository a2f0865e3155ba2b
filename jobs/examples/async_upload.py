"""Asynchronous checkpoint upload: training continues while a checkpoint is uploaded.

What `report` was given is written to local disk before it returns, so that the position and the weights belong
together whatever happens meanwhile; a run that fails before an upload has ended continues from the previous checkpoint.

    python -m jobs.examples.async_upload --data digits.lance
"""

import sys
from typing import Any

from ray.train import CheckpointUploadMode

from jobs.examples import common


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains, and does not wait for uploads."""
    return common.train(config, checkpoint_upload_mode=CheckpointUploadMode.ASYNC)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    return common.fit(common.parser(__file__, __doc__).parse_args(argv), train_fn)


if __name__ == "__main__":
    sys.exit(main())
