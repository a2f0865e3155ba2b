"""Failures and preemption: a run continues from its last checkpoint when a worker dies, and makes one before a node
goes.

`FailureConfig` starts all ranks again; `restore` puts the loader at the row after the checkpoint. Where the cloud
announces that it takes a node away, `get_preemption_info` reports it, and a checkpoint at that moment loses no step.

    python -m jobs.examples.failures --data digits.lance --rows seen --die-at-step 15
"""

import sys
from typing import Any

import ray.train

from jobs.examples import common


def train_fn(config: dict[str, Any]) -> dict[str, float]:
    """Trains, with a checkpoint every some steps and one when a node is about to go."""
    announced = False

    def goes(step: int) -> bool:
        nonlocal announced
        # All ranks ask at the same step: the answer is rank 0's.
        if step % 5 or announced:
            return False
        announced = ray.train.get_preemption_info() is not None
        return announced

    return common.train(config, is_due=goes)


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    args = common.parser(__file__, __doc__).parse_args(argv)
    return common.fit(args, train_fn, run_config=common.run_config(args, max_failures=3))


if __name__ == "__main__":
    sys.exit(main())
