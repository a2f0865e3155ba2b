"""Owns a run as the driver sees it: what is checked, the machines that it needs, Ray Train's trainer; never makes a
step.
"""

import argparse
import os
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.exceptions
import ray.train
import ray.train.torch

import raylance
from jobs import common, quiet
from jobs.train_images import telling, tracking
from jobs.train_images.data import check_batch, count_classes, open_data
from jobs.train_images.model import check_model
from jobs.train_images.places import Place, Standing, cannot_go_on, look_up, place
from jobs.train_images.telling import SELF
from jobs.train_images.training import train_fn

PATIENCE = 30  # attempts, a minute each, to find a place for the workers


def run(args: argparse.Namespace) -> int:
    """Runs the job; returns its exit status."""
    train, val = open_data(args)
    classes = count_classes(args, train)
    check_model(args.model, classes, train, args.image_column)
    check_batch(args, len(train))
    at = place(args)
    at.make()
    standing = look_up(args, at, train, [args.model, classes])
    if standing is not None and standing.epoch >= args.epochs:
        return telling.summarise(args, at, standing.result)
    args.leaving.heed()
    args.log = quiet.log_file(at.local, at.name)
    with quiet.quietly(args.log, common.show_command(["python", *args.command]), f"{SELF}: ") as apart:
        trackers = tracking.settle(args, at)
        plan = train.plan(args.global_batch_size, args.num_workers)
        apart.show(f"{train!r}; {len(val):,} rows to validate, {classes:,} classes")
        left = f" ({plan.rows_dropped} rows left out of each, others each time)" if plan.rows_dropped else ""
        apart.show(f"run {at.name}: {args.epochs} epochs of {plan.steps} steps{left}, {workers(args)}")
        apart.show(*tracking.told(trackers), f"what Ray and its workers print: {args.log}")
        if standing is not None:
            apart.show(
                f"goes on from checkpoint {standing.result.checkpoint.path}: {where(args, standing, plan.steps)}"
            )
        print(plan)
        ended = "FAILED"
        try:
            datasets = {"train": train, "val": val}
            result = fit(args, at, apart, lambda: make_trainer(args, at, [args.model, classes], datasets, trackers))
            ended = "FINISHED"
        except (KeyboardInterrupt, SystemExit):
            ended = "KILLED"
            raise
        finally:
            tracking.end(trackers, ended)
    if "refused" in result.return_value:
        raise raylance.StateError(cannot_go_on(at, result.return_value["refused"]))
    return telling.summarise(args, at, result)


def workers(args: argparse.Namespace) -> str:
    """How many there are."""
    kind = "GPU" if args.use_gpu else "CPU"
    return f"one {kind} worker" if args.num_workers == 1 else f"{args.num_workers} {kind} workers"


def where(args: argparse.Namespace, standing: Standing, steps: int) -> str:
    """Where a run goes on."""
    row = f"row {standing.position:,} of its order"
    return f"epoch {standing.epoch} of {args.epochs}, after step {standing.step}/{steps} ({row})"


def fit(
    args: argparse.Namespace, at: Place, apart: quiet.Quiet, make: Callable[[], ray.train.torch.TorchTrainer]
) -> ray.train.Result:
    """Trains, and shows how far it is."""
    was_there = ray.is_initialized()
    apart.show(f"{'joining' if was_there else 'starting'} Ray, then {workers(args)}")
    try:
        started_here = common.connect()
        args.leaving.heed()  # ray.init has set a handler of its own
        check_machines(args, started_here, apart)
        with raylance.watch(
            at.folder,
            epochs=args.epochs,
            storage_filesystem=at.filesystem,
            tell=lambda metrics: told_of(metrics, args.epochs),
            file=telling.Lines(apart.user) if args.no_progress else apart.user,
        ):
            return make().fit()
    finally:
        if not was_there:
            ray.shutdown()  # what it still has to print belongs into the log, too


def told_of(metrics: Mapping[str, Any], epochs: int) -> str:
    """The line that says what was reported to Ray Train."""
    if "val_accuracy" not in metrics:
        return "epoch {epoch} of {}, step {step:,}: train loss {train_loss:.4f}".format(epochs, **metrics)
    line = "train loss {train_loss:.4f}, validation accuracy {val_accuracy:.2%}, {images_per_s:,.0f} images/s"
    return f"epoch {metrics['epoch']} of {epochs}: {line.format(**metrics)}"


def check_machines(args: argparse.Namespace, started_here: bool, apart: quiet.Quiet) -> None:
    """Refuses a run that the Ray which was started here has no place for; says what others are waited for."""
    decoders = args.num_decoders[0] if isinstance(args.num_decoders, tuple) else args.num_decoders
    needs = {"CPU": 0 if decoders == "auto" else decoders * args.num_workers, "GPU": 0}
    needs["GPU" if args.use_gpu else "CPU"] += args.num_workers
    for what, there in ((what, ray.cluster_resources().get(what, 0)) for what in needs):
        if there >= needs[what]:
            continue
        fewer = "fewer --num-workers or --num-decoders"
        if started_here:
            raise raylance.ConfigError(
                f"the run needs {needs[what]} {what}s, and the Ray that it started on this machine has {there:g}; no "
                f"node will join that one: give {fewer}{', or no --use-gpu' if what == 'GPU' else ''}, or set "
                "RAY_ADDRESS to the address of a cluster"
            )
        apart.tell(
            f"{SELF}: the run needs {needs[what]} {what}s, the cluster has {there:g}: waiting for nodes to join; if "
            f"none will, stop this and give {fewer}"
        )


class TellFailures(ray.train.UserCallback):
    """Tells the user why workers failed; Ray Train goes on by itself, as often as --max-failures says."""

    def __init__(self, most: int) -> None:
        """None have failed yet, of so many times that it goes on; -1 is without end."""
        self.failures, self.most = 0, most

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Runs in Ray Train's controller, whose output comes to the driver."""
        rank, error = telling.cause_of(worker_exceptions)
        self.failures += 1
        of = "" if self.most < 0 else f" of {self.most}"
        goes_on = f" (it starts again, {self.failures}{of})" if self.most < 0 or self.failures <= self.most else ""
        why = textwrap.shorten(telling.short(error), 160, placeholder=" …")  # the last one is told whole at the end
        print(f"{quiet.MARK}rank {rank} failed{goes_on}: {why}", flush=True)


def make_trainer(
    args: argparse.Namespace,
    at: Place,
    network: list[Any],
    datasets: Mapping[str, raylance.Dataset],
    trackers: Mapping[str, Any],
) -> ray.train.torch.TorchTrainer:
    """The trainer, with the arguments' settings."""
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it shows twice what workers print
    config = {
        "network": network,
        "image": args.image_column,
        "label": args.label_column,
        "batch": args.global_batch_size,
        "prefetch": args.prefetch_batches,
        "every": args.checkpoint_every_steps,
        "trackers": trackers,
        "track_every": args.track_every_steps,
        "arguments": tracking.arguments(args),
        **{name: getattr(args, name) for name in ("epochs", "learning_rate", "weight_decay", "precision", "seed")},
    }
    return ray.train.torch.TorchTrainer(
        train_fn,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
        run_config=ray.train.RunConfig(
            name=at.name,
            storage_path=at.storage,
            storage_filesystem=at.filesystem,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(args.max_failures, controller_failure_limit=PATIENCE),
            callbacks=[TellFailures(args.max_failures)],
        ),
        datasets=dict(datasets),
        dataset_config=raylance.DataConfig(
            ["train", "val"], num_decoders=args.num_decoders, num_readers=args.num_readers
        ),
    )
