"""Failures and preemption: a run continues from its last checkpoint when a worker dies, and makes one before a node
goes.

`FailureConfig` starts all ranks again; `restore` puts the loader at the row after the checkpoint. If the cloud
announces that it takes a node away, `report_if_preempted` makes a checkpoint at that moment, and no step is lost.
docs/frameworks.md says how to kill a worker by hand, and how to prove that each row was trained on once.

    python -m jobs.examples.failures --data digits.lance --epochs 50
"""

import sys
from typing import Any

from jobs.examples import common


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains, with a checkpoint every some steps and one when a node is about to go."""
    return common.train(config, ask_every=5)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    return common.fit(args, train_fn, run_config=common.run_config(args, max_failures=3))


if __name__ == "__main__":
    sys.exit(main())
