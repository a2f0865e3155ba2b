"""Elastic training: a run that takes as many ranks as there are, and continues with fewer or more when nodes leave or
join.

The position in a checkpoint does not depend on the number of ranks, and global batches are the same for any of it:
nothing in the training function knows that ranks come and go. A change of the ranks restarts all of them, from the
last checkpoint.

    python -m jobs.examples.elastic --data digits.lance --num-workers 4
"""

import sys

import ray.train

from jobs.examples import common


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = common.parser(__file__, __doc__)
    parser.add_argument("--min-workers", type=int, default=1, metavar="N", help="ranks to begin with, at the least")
    parser.add_argument(
        "--resize-interval-s", type=float, default=60, metavar="S", help="between looks for nodes that have joined"
    )
    args = parser.parse_args(argv)
    scaling = ray.train.ScalingConfig(
        num_workers=(args.min_workers, args.num_workers), elastic_resize_monitor_interval_s=args.resize_interval_s
    )
    return common.fit(args, common.train, scaling_config=scaling, run_config=common.run_config(args, max_failures=-1))


if __name__ == "__main__":
    sys.exit(main())
