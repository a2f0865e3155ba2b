"""Hyperparameter search with Ray Tune: many runs of Ray Train at once, which share a cluster and one selection of
rows.

The handle is opened once, here: each trial is sent a reference to the rows that the filter found, not a filter to
apply again. `num_decoders=0` lets shard actors decode, so that trials do not compete for the CPUs that each leaves
free.

    python -m jobs.examples.tuning --data digits.lance --trials 4
"""

import argparse
import sys
from typing import Any

import ray.train
import ray.train.torch
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

import raylance
from jobs.common import locate
from jobs.examples import common


def drive(space: dict[str, Any], args: argparse.Namespace, data: dict[str, raylance.Dataset]) -> None:
    """One trial: a run of Ray Train with its own hyperparameters and name."""
    name = f"{args.run_name}-{tune.get_context().get_trial_id()}"
    ray.train.torch.TorchTrainer(
        common.train,
        train_loop_config=vars(args) | space,
        datasets=data,
        dataset_config=raylance.DataConfig(["train"], num_decoders=0),
        scaling_config=ray.train.ScalingConfig(num_workers=args.num_workers),
        run_config=ray.train.RunConfig(
            name=name, storage_path=locate(args.storage_path), callbacks=[TuneReportCallback()]
        ),
    ).fit()


def main(argv: list[str] | None = None) -> int:
    """Runs the example; returns its exit status."""
    parser = common.parser(__file__, __doc__)
    parser.add_argument("--trials", type=int, default=4, metavar="N")
    parser.add_argument("--at-once", type=int, default=2, metavar="N", help="trials that run at the same time")
    parser.set_defaults(num_workers=1)
    args = parser.parse_args(argv)
    common.start_ray()
    data = common.open_data(args)
    for dataset in data.values():
        dataset.share()  # what is large goes to the object store once, and trials are sent a reference
    results = tune.Tuner(
        tune.with_resources(tune.with_parameters(drive, args=args, data=data), {"CPU": 0.1}),
        param_space={"learning_rate": tune.loguniform(1e-4, 1e-1)},
        tune_config=tune.TuneConfig(
            num_samples=args.trials, max_concurrent_trials=args.at_once, metric="loss", mode="min"
        ),
        run_config=tune.RunConfig(name=f"{args.run_name}-search", storage_path=locate(args.storage_path)),
    ).fit()
    for trial in results:
        print(f"learning rate {trial.config['learning_rate']:.5f}: {trial.error or trial.metrics['loss']}")
    return int(bool(results.errors))


if __name__ == "__main__":
    sys.exit(main())
