"""Owns the driver's part of a run: checks, the machines that it needs, Ray Train's trainer; never makes a step."""

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
from jobs import common, output
from jobs.train_images import messages, tracking
from jobs.train_images.data import check_batch, count_classes, open_data
from jobs.train_images.messages import SELF
from jobs.train_images.model import check_model
from jobs.train_images.run_folder import RunFolder, cannot_continue, look_up, other_checkpoint, run_folder
from jobs.train_images.training import train_fn

PATIENCE = 30  # attempts, a minute each, to find a place for the workers


def run(args: argparse.Namespace) -> int:
    """Runs the job; returns its exit status."""
    train, val = open_data(args)
    classes = count_classes(args, train)
    check_model(args.model, classes, train, args.image_column)
    check_batch(args, len(train))
    at = run_folder(args)
    at.make()
    standing = look_up(args, at, train, [args.model, classes])
    if standing is not None and standing.epoch >= args.epochs:
        return messages.summarise(args, at, standing.result)
    other = None if standing else other_checkpoint(args)
    args.stopping.heed()
    args.log = output.log_file(at.local, at.name)
    with output.separate_output(args.log, common.show_command(["python", *args.command]), f"{SELF}: ") as user:
        trackers = tracking.resolve(args, at)
        plan = train.plan(args.global_batch_size, args.num_workers)
        user.show(f"{train!r}; {len(val):,} rows to validate, {classes:,} classes")
        left = f" ({plan.rows_dropped} rows left out of each, different ones each time)" if plan.rows_dropped else ""
        user.show(f"run {at.name}: {args.epochs} epochs of {plan.steps} steps{left}, {workers(args)}")
        user.show(*tracking.describe(trackers), f"what Ray and its workers print: {args.log}")
        if standing is not None:
            epoch = f"epoch {standing.epoch} of {args.epochs}, after step {standing.step}/{plan.steps}"
            row = f"row {standing.position:,} of its order"
            user.show(f"continues from checkpoint {standing.result.checkpoint.path}: {epoch} ({row})")
        if other is not None:
            user.show(f"begins with checkpoint {other.path} of another run")
        print(plan)
        ended = "FAILED"
        try:
            datasets = {"train": train, "val": val}
            config = {"network": [args.model, classes], "trackers": trackers, "other": other}
            result = fit(args, at, user, lambda: make_trainer(args, at, config, datasets))
            ended = "FINISHED"
        except (KeyboardInterrupt, SystemExit):
            ended = "KILLED"
            raise
        finally:
            tracking.end(trackers, ended)
    if "refused" in result.return_value:
        raise raylance.StateError(cannot_continue(at, result.return_value["refused"]))
    return messages.summarise(args, at, result)


def workers(args: argparse.Namespace) -> str:
    """How many there are."""
    kind = "GPU" if args.use_gpu else "CPU"
    return f"one {kind} worker" if args.num_workers == 1 else f"{args.num_workers} {kind} workers"


def fit(
    args: argparse.Namespace, at: RunFolder, user: output.UserStreams, make: Callable[[], ray.train.torch.TorchTrainer]
) -> ray.train.Result:
    """Trains, and shows how far it is."""
    was_there = ray.is_initialized()
    user.show(f"{'joining' if was_there else 'starting'} Ray, then {workers(args)}")
    try:
        started_here = common.connect()
        args.stopping.heed()  # ray.init has set a handler of its own
        check_machines(args, started_here, user)
        with raylance.watch(
            at.folder,
            epochs=args.epochs,
            storage_filesystem=at.filesystem,
            tell=lambda metrics: describe(metrics, args.epochs),
            file=messages.Lines(user.err) if args.no_progress else user.err,
        ):
            return make().fit()
    finally:
        if not was_there:
            ray.shutdown()  # its last lines belong into the log, too


def describe(metrics: Mapping[str, Any], epochs: int) -> str:
    """A line with what was reported to Ray Train."""
    if "val_accuracy" not in metrics:
        return "epoch {epoch} of {}, step {step:,}: train loss {train_loss:.4f}".format(epochs, **metrics)
    line = "train loss {train_loss:.4f}, validation accuracy {val_accuracy:.2%}, {images_per_s:,.0f} images/s"
    return f"epoch {metrics['epoch']} of {epochs}: {line.format(**metrics)}"


def check_machines(args: argparse.Namespace, started_here: bool, user: output.UserStreams) -> None:
    """Refuses a run that does not fit the Ray that was started here; prints what it waits for on another."""
    decoders = args.num_decoders[0] if isinstance(args.num_decoders, tuple) else args.num_decoders
    needs = {"CPU": 0 if decoders == "auto" else decoders * args.num_workers, "GPU": 0}
    needs["GPU" if args.use_gpu else "CPU"] += args.num_workers
    for what, there in ((what, ray.cluster_resources().get(what, 0)) for what in needs):
        if there >= needs[what]:
            continue
        fewer = "fewer --num-workers or --num-decoders"
        if started_here:
            raise raylance.ConfigError(
                f"the run needs {needs[what]} {what}s, and the Ray that it started on this machine has {there:g}. It "
                f"would wait without end: no node joins that Ray. Give {fewer}"
                f"{', or no --use-gpu' if what == 'GPU' else ''}, or set RAY_ADDRESS to the address of a cluster."
            )
        user.warn(
            f"{SELF}: the run needs {needs[what]} {what}s, and the cluster has {there:g}. It waits for nodes to join. "
            f"If none will, stop it and give {fewer}."
        )


class ShowFailures(ray.train.UserCallback):
    """Prints why workers failed; Ray Train starts them again by itself, as often as --max-failures says."""

    def __init__(self, max_failures: int) -> None:
        self.failures, self.most = 0, max_failures

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Runs in Ray Train's controller, whose output comes to the driver."""
        rank, error = messages.cause_of(worker_exceptions)
        self.failures += 1
        of = "" if self.most < 0 else f" of {self.most}"
        again = f" (it starts again, {self.failures}{of})" if self.most < 0 or self.failures <= self.most else ""
        why = textwrap.shorten(messages.short(error), 160, placeholder=" …")  # the last one is printed whole at the end
        print(f"{output.MARK}rank {rank} failed{again}: {why}", flush=True)


def make_trainer(
    args: argparse.Namespace, at: RunFolder, config: dict[str, Any], datasets: Mapping[str, raylance.Dataset]
) -> ray.train.torch.TorchTrainer:
    """The trainer, with the arguments' settings."""
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it shows twice what workers print
    return ray.train.torch.TorchTrainer(
        train_fn,
        train_loop_config={**config, "arguments": tracking.arguments(args)},
        scaling_config=ray.train.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
        run_config=ray.train.RunConfig(
            name=at.name,
            storage_path=at.storage,
            storage_filesystem=at.filesystem,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(args.max_failures, controller_failure_limit=PATIENCE),
            callbacks=[ShowFailures(args.max_failures)],
        ),
        datasets=dict(datasets),
        dataset_config=raylance.DataConfig(
            ["train", "val"], num_decoders=args.num_decoders, num_readers=args.num_readers
        ),
    )
