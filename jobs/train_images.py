"""Owns the training of an image classifier from a Lance dataset; never reads, orders or decodes a row itself.

    python jobs/train_images.py --data digits.lance
    python jobs/train_images.py --data s3://bucket/food101.lance --model resnet18 --image-size 224 --augment crop
                                --use-gpu --num-workers 4 --global-batch-size 256 --storage-path s3://bucket/runs
    ray job submit --address http://localhost:8265 -- python jobs/train_images.py --data /shared/digits.lance

A run is its --storage-path and --run-name. The same command goes on at the very row where the newest checkpoint of
the run was made, also with other --num-workers, --global-batch-size, --num-decoders or --epochs. A finished run says
so and does nothing. A run that goes on says where; one that is stopped by SIGINT or SIGTERM says how to go on.

Exit status: 0 when the run is finished, 1 when training failed or missed --target-accuracy, 2 for input that cannot
be used, after one message on stderr; 130 and 143 when SIGINT and SIGTERM stopped it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import lance
import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.exceptions
import ray.train
import ray.train.torch
import torch
from ray.experimental import tqdm_ray
from torch import nn
from torch.nn.functional import cross_entropy

import raylance

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from jobs import common
from jobs.common import locate

WARM_UP = 0.05  # of the run, as a fraction
PATIENCE = 30  # attempts, a minute each, to find a place for the workers


def small_cnn(classes: int) -> nn.Module:
    """A network of 140,000 weights for images from 8x8 up."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    fine = [*block(3, 32), *block(32, 64), nn.MaxPool2d(2)]
    coarse = [*block(64, 64), *block(64, 128), nn.AdaptiveMaxPool2d(2)]  # (N, 128, 2, 2)
    return nn.Sequential(*fine, *coarse, nn.Flatten(), nn.Linear(4 * 128, classes))


def build_model(name: str, classes: int) -> nn.Module:
    """Builds a network with random weights, from float images (N, 3, H, W) to scores (N, classes)."""
    if name == "small_cnn":
        return small_cnn(classes)
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # the latter when it was built for another torch
        raise raylance.ConfigError(
            f"--model {name} would come from torchvision, which cannot be imported ({error}); pip install torchvision "
            "on every node, or use --model small_cnn"
        ) from error
    known = models.list_models(module=models)
    if name not in known:
        raise raylance.ConfigError(
            f"--model {name} is unknown; use small_cnn or one of torchvision's {len(known)} classifiers, e.g. resnet18"
        )
    return models.get_model(name, weights=None, num_classes=classes)


def scores_of(model: nn.Module, batch: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Returns the scores of a batch, (N, classes). Pixels become floats only here: the device gets them as bytes."""
    images = batch[config["image"]]  # uint8 (N, 3, H, W), channels last
    bf16 = config["precision"] == "bf16" or (config["precision"] == "auto" and images.is_cuda)
    with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
        scores: torch.Tensor = model(images.float().div_(127.5).sub_(1))
    return scores.float()


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up, then half a cosine down to zero; `progress` is the fraction of the run that is done."""
    return peak * min(1.0, progress / WARM_UP) * 0.5 * (1 + math.cos(math.pi * progress))


def check_network(saved: dict[str, Any], network: list[Any]) -> None:
    """Refuses the state of a checkpoint that is not of this network, (name, classes)."""
    if (held := saved.get("network")) != network:
        raise raylance.StateError(
            f"the checkpoint is of model and classes {held}, not of {network}; ask for the same, or give another "
            "--run-name"
        )


class Training:
    """One rank's network, optimizer and loader, and the steps that they make."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Makes a fresh one; `take_up` goes on from a checkpoint."""
        context = ray.train.get_context()
        self.config, self.rank, self.ranks = config, context.get_world_rank(), context.get_world_size()
        # Ray allows one thread for each CPU that it counts for a rank; a GPU rank counts none, and others may lie idle.
        here = ray.get_runtime_context().get_node_id()
        cpus = next(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == here)
        torch.set_num_threads(max(1, int(min(cpus, os.cpu_count() or 1) / context.get_local_world_size())))
        torch.manual_seed(config["seed"])
        self.loader = ray.train.get_dataset_shard("train")
        self.loader.prepare(global_batch_size=config["batch"])  # its helpers start while the model is built
        self.network = build_model(*config["network"]).to(memory_format=torch.channels_last)
        self.model = ray.train.torch.prepare_model(self.network)
        weights = self.network.parameters()
        self.optimizer = torch.optim.AdamW(weights, config["learning_rate"], weight_decay=config["weight_decay"])
        self.steps = self.loader.steps_per_epoch(global_batch_size=config["batch"])
        self.bar: Any = None

    @property
    def step(self) -> int:
        """Steps of the epoch that are done."""
        return self.loader.state_dict()["position"] // self.config["batch"]

    def take_up(self) -> str:
        """Goes on from the run's checkpoint, where there is one; returns why it cannot.

        A misfit is returned and not raised: after an error Ray would only try again.
        """
        try:
            saved = raylance.restore(self.loader)
            if saved is None:
                return ""
            check_network(saved, self.config["network"])
        except raylance.StateError as error:
            return str(error)
        self.network.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        epoch, epochs = self.loader.epoch, self.config["epochs"]
        if epoch < epochs and self.rank == 0:
            row = f"row {self.loader.state_dict()['position']:,} of its order"
            at = f"epoch {epoch + 1}/{epochs}, behind step {self.step}/{self.steps} ({row})"
            print(f"goes on from checkpoint {ray.train.get_checkpoint().path}: {at}", flush=True)
        return ""

    def report(self, metrics: dict[str, float]) -> None:
        """Reports to Ray Train, with a checkpoint. Learning rate and random numbers follow from the position in it."""
        state = {"model": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        raylance.report(metrics, self.loader, state=state | {"network": self.config["network"]})

    def train_step(self, epoch: int, step: int, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Makes one step; returns the loss of the global batch, as far as it is this rank's."""
        config = self.config
        torch.manual_seed(random.Random(f"{config['seed']} {epoch} {step} {self.rank}").getrandbits(63))  # for dropout
        progress = (epoch + (step - 0.5) / self.steps) / config["epochs"]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config["learning_rate"], progress)
        losses = cross_entropy(scores_of(self.model, batch, config), batch[config["label"]].long(), reduction="none")
        # DDP averages over ranks, whose shares may differ by a row: this makes it the mean of the global batch.
        loss = (losses * batch.get("_valid", 1)).sum() * (self.ranks / config["batch"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train_epoch(self, epoch: int) -> tuple[torch.Tensor, int]:
        """Makes the rest of an epoch; returns the sum of the losses, and how many steps there were."""
        first = step = self.step
        loss_sum = torch.zeros((), device=ray.train.torch.get_device())
        self.network.train()
        for step, batch in enumerate(self.loader.iter_torch_batches(global_batch_size=self.config["batch"]), first + 1):
            loss = self.train_step(epoch, step, batch)
            loss_sum += loss
            if self.bar:
                self.bar.update(epoch * self.steps + step - self.bar.n)
                if step % 10 == 1:  # not often: a GPU has to be waited for
                    self.bar.set_description(f"epoch {epoch + 1}/{self.config['epochs']}, loss {loss.item():.3f}")
            if step % self.config["every"] == 0 and step < self.steps:
                self.report({"epoch": epoch, "step": step, "train_loss": loss_sum.item() / (step - first)})
        return loss_sum, step - first


def train_fn(config: dict[str, Any]) -> dict[str, Any]:
    """Trains on one rank; returns figures for the summary, or under `refused` why the run cannot go on."""
    training, val = Training(config), ray.train.get_dataset_shard("val")
    if refused := training.take_up():
        return {"refused": refused}
    epochs, done, train_s = config["epochs"], 0, 0.0
    to_run = range(training.loader.epoch, epochs)
    if config["bar"] and training.rank == 0 and to_run:
        training.bar = tqdm_ray.tqdm(total=training.steps * epochs, unit="step")
    for epoch in to_run:
        begin, first = time.perf_counter(), training.step
        loss_sum, steps = training.train_epoch(epoch)
        done, train_s = done + steps, train_s + time.perf_counter() - begin
        sums = torch.stack([loss_sum / training.ranks, *count_right(training.network, val, config)])
        torch.distributed.all_reduce(sums)
        loss_of_ranks, right, rows = sums.tolist()
        # After a checkpoint behind the last step there are no steps left; where all rows are masked, no rows.
        metrics = {
            "epoch": epoch + 1,
            "step": first + steps,
            "train_loss": loss_of_ranks / steps if steps else math.nan,
            "val_accuracy": right / rows if rows else math.nan,
            "images_per_s": done * config["batch"] / train_s,
        }
        training.report(metrics)
        if training.rank == 0:
            line = "train loss {train_loss:.4f}, validation accuracy {val_accuracy:.2%}, {images_per_s:,.0f} images/s"
            print(f"epoch {epoch + 1}/{epochs}: {line.format(**metrics)}", flush=True)
    if training.bar:
        training.bar.close()
    return {"epochs": len(to_run), **training.loader.stats()}


@torch.inference_mode()
def count_right(network: nn.Module, val: raylance.RankLoader, config: dict[str, Any]) -> torch.Tensor:
    """Counts right answers and rows in this rank's share of the validation rows; shape (2,)."""
    # Each rank has running statistics of its own; those of rank 0 are what checkpoints hold.
    for buffer in network.buffers():
        torch.distributed.broadcast(buffer, 0)
    network.eval()
    counts = torch.zeros(2, device=next(network.parameters()).device)
    for batch in val.iter_torch_batches(global_batch_size=config["batch"]):
        labels = batch[config["label"]]
        if len(labels):  # the last step is smaller, and may have no row for this rank
            valid = batch.get("_valid", torch.ones_like(labels, dtype=torch.bool))
            right = (scores_of(network, batch, config).argmax(1) == labels) & valid
            counts += torch.stack([right.sum(), valid.sum()])
    return counts


def open_data(args: argparse.Namespace) -> tuple[raylance.Dataset, raylance.Dataset]:
    """Opens the rows to train and to validate on; checks all arguments about them."""
    if args.augment == "crop" and args.image_size is None:
        raise raylance.ConfigError("--augment crop makes crops of all sizes; give the --image-size they all get")
    if args.image_column == args.label_column:
        raise raylance.ConfigError(
            f"--image-column and --label-column are both {args.image_column}: a model would learn what "
            "it is shown; name two columns"
        )
    store = common.store_options(args.storage_options)
    crops = (raylance.RandomResizedCrop(), raylance.CenterCrop()) if args.augment == "crop" else (None, None)

    def rows(uri: str, where: str, version: Any, crop: Any, hflip: float, **options: Any) -> raylance.Dataset:
        try:
            opened = raylance.dataset(
                locate(uri),
                version=version,
                columns=[args.image_column, args.label_column],
                filter=where or None,
                decode=raylance.Image(args.image_column, size=args.image_size, augment=crop, hflip=hflip),
                seed=args.seed,
                on_bad_row=args.on_bad_row,
                storage_options=store or None,
                **options,
            )
            if args.image_size is None:
                opened.head(64)
        except (raylance.BadRowError, raylance.ConfigError) as error:
            if args.image_size is not None:
                raise
            raise raylance.DatasetError(f"{error} If images differ in size, give --image-size.") from error
        return opened

    version = int(args.version) if args.version and args.version.isdigit() else args.version
    flips = 0.0 if args.augment == "none" else 0.5
    train = rows(args.data, args.train_filter, version, crops[0], flips, order=args.order)
    # Of the version that is pinned now, should another be committed between the two.
    pinned = None if args.val_data else train.version
    try:
        val = rows(
            args.val_data or args.data, args.val_filter, pinned, crops[1], 0.0, order="sequential", remainder="ragged"
        )
    except raylance.DatasetError as error:
        raise raylance.DatasetError(f"{error} These are the rows to validate on: --val-filter, --val-data.") from error
    check_labels(args, train, val)
    return train, val


def check_labels(args: argparse.Namespace, train: raylance.Dataset, val: raylance.Dataset) -> None:
    """Refuses labels that are no integers, or that mean other classes where the rows to validate on lie elsewhere."""
    for uri, data in ((args.data, train), (args.val_data or args.data, val)):
        kind = data.schema.field(args.label_column).type
        if pa.types.is_integer(kind):
            continue
        fix = "name a column of integers"
        if kind in (pa.string(), pa.large_string()) or pa.types.is_dictionary(kind):
            command = ["--data", uri, "--string-column", args.label_column, "--label-column", "class_id"]
            command += common.store_words(args.storage_options)
            fix = (
                "add a column of integers by `python jobs/create_dataset.py classes "
                f"{common.show_command(command)}`, and train with --label-column class_id"
            )
        raise raylance.DatasetError(
            f"--label-column {args.label_column} of {uri} is {kind}, but a classifier learns integers from 0 up; {fix}"
        )
    named = [(data.schema.metadata or {}).get(b"classes") for data in (train, val)]
    if None not in named and named[0] != named[1]:
        raise raylance.DatasetError(
            f"--val-data {args.val_data} names other classes than --data {args.data}: the same label would mean two "
            "things; make both with the same names (`--classes` of jobs/create_dataset.py)"
        )


def count_classes(args: argparse.Namespace, train: raylance.Dataset) -> int:
    """Returns the number of classes: what the command line says, else the schema, else the labels."""
    if args.num_classes:
        return int(args.num_classes)
    names = (train.schema.metadata or {}).get(b"classes")
    if names:
        return len(json.loads(names))
    options = common.store_options(args.storage_options)
    opened = lance.dataset(locate(args.data), version=train.version, storage_options=options or None)
    batches = opened.scanner(columns=[args.label_column], batch_size=1 << 16).to_batches()
    return 1 + max(pc.max(batch[0]).as_py() or 0 for batch in batches)


def check_model(name: str, classes: int, train: raylance.Dataset, image: str) -> None:
    """Runs the model without memory or arithmetic, so that a misfit shows now and not in the workers."""
    height, width, _ = train.schema.field(image).type.shape
    with torch.device("meta"):
        model = build_model(name, classes)
        try:
            made = tuple(model(torch.empty(2, 3, height, width)).shape)
        except (RuntimeError, ValueError, AssertionError, AttributeError) as error:
            made = str(error)
    if made != (2, classes):
        raise raylance.ConfigError(
            f"--model {name} cannot tell {classes} classes in images of {height}x{width} ({made}); give another "
            "--image-size or --model"
        )


def check_batch(args: argparse.Namespace, rows: int) -> None:
    """Refuses a global batch that does not fit the ranks or the rows to train on."""
    if args.global_batch_size < args.num_workers:
        raise raylance.ConfigError(
            f"--global-batch-size {args.global_batch_size} leaves some of --num-workers {args.num_workers} without a "
            "row; give a larger batch, or fewer workers"
        )
    if args.global_batch_size > rows:
        raise raylance.ConfigError(
            f"--global-batch-size {args.global_batch_size} is more than the {rows:,} rows to train on, so that an "
            "epoch would have no step; give a smaller one"
        )


def run(args: argparse.Namespace) -> int:
    """Runs the job; returns its exit status."""
    train, val = open_data(args)
    classes = count_classes(args, train)
    check_model(args.model, classes, train, args.image_column)
    check_batch(args, len(train))
    filesystem, storage, name = place(args)
    try:
        where, path = (filesystem, storage) if filesystem else common.open_filesystem(storage, {})
        where.create_dir(f"{path.rstrip('/')}/{name}")
    except OSError as error:
        raise raylance.ConfigError(
            f"--storage-path {args.storage_path} cannot be written to ({error}), so nothing would be kept; give another"
        ) from error
    if (finished := look_up(args, train, [args.model, classes])) is not None:
        return summarise(args, name, finished)
    plan = train.plan(args.global_batch_size, args.num_workers)
    print(f"{train!r}; {len(val):,} rows to validate, {classes:,} classes\n{plan}", flush=True)
    started_here = not ray.is_initialized() and start_ray()

    def stop(number: int, frame: FrameType | None) -> None:
        args.stopped_by = number
        signal.raise_signal(signal.SIGINT)  # for which Ray Train has a way that stops the workers too

    signal.signal(signal.SIGTERM, stop)  # after ray.init, which sets one of its own
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
        say(
            f"the run needs {needs[what]} {what}s, the cluster has {there:g}: waiting for nodes to join; if none will, "
            f"stop this and give {fewer}"
        )
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")  # it shows twice what workers print, bars too
    config = {
        "network": [args.model, classes],
        "image": args.image_column,
        "label": args.label_column,
        "batch": args.global_batch_size,
        "every": args.checkpoint_every_steps,
        "bar": sys.stderr.isatty() and not args.no_progress,  # a worker's own stderr is a file
        **{name: getattr(args, name) for name in ("epochs", "learning_rate", "weight_decay", "precision", "seed")},
    }
    result = ray.train.torch.TorchTrainer(
        train_fn,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage,
            storage_filesystem=filesystem,
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(args.max_failures, controller_failure_limit=PATIENCE),
        ),
        datasets={"train": train, "val": val},
        dataset_config=raylance.DataConfig(
            ["train", "val"], num_decoders=args.num_decoders, num_readers=args.num_readers
        ),
    ).fit()
    if "refused" in result.return_value:
        raise raylance.StateError(cannot_go_on(args, result.return_value["refused"]))
    return summarise(args, name, result)


def cannot_go_on(args: argparse.Namespace, why: str) -> str:
    """Says which run it is that cannot go on."""
    _, storage, name = place(args)
    return f"run {name} in {storage} cannot go on: {why}"


def newest(args: argparse.Namespace) -> ray.train.Result | None:
    """Returns the run as its newest checkpoint left it, None where there is none.

    Raises:
        OSError: If that cannot be told now.
        StateError: If it cannot be told any more.
    """
    filesystem, storage, name = place(args)
    try:
        found = ray.train.Result.from_path(f"{storage.rstrip('/')}/{name}", storage_filesystem=filesystem)
    except RuntimeError:  # no such run, or none with a checkpoint
        return None
    except OSError:
        raise
    except Exception as error:  # Ray Train's own has no public name, and pydantic's come through
        raise raylance.StateError(
            f"Ray Train's list of its checkpoints is damaged, or the newest of them is gone ({type(error).__name__}); "
            "bring them back from a copy, or give another --run-name"
        ) from error
    return found if found.checkpoint else None


def look_up(args: argparse.Namespace, train: raylance.Dataset, network: list[Any]) -> ray.train.Result | None:
    """Returns the run if it is finished; refuses one that cannot go on. Ranks would find both out, a minute later."""
    try:
        if (found := newest(args)) is None:
            return None
        with train.loader() as loader:
            saved = raylance.restore(loader, found.checkpoint)
            if saved is not None:
                check_network(saved, network)
            return found if loader.epoch >= args.epochs else None
    except raylance.StateError as error:
        raise raylance.StateError(cannot_go_on(args, str(error))) from error
    except OSError as error:
        raise raylance.ConfigError(
            f"the checkpoints in --storage-path {args.storage_path} cannot be read ({error}), so the run could neither "
            "go on nor be kept; try again, or give another"
        ) from error


def start_ray() -> bool:
    """Joins the Ray of RAY_ADDRESS, which `ray job submit` sets, or of this machine; returns whether it started one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="lance is not fork-safe")  # Ray forks only to start its daemons
        if os.environ.get("RAY_ADDRESS", "local") in ("local", ""):
            try:
                ray.init(labels={})  # a Ray that is there already takes no labels, not even none
                return True
            except ValueError:
                pass
        try:
            ray.init()
        except ConnectionError as error:
            raise raylance.ConfigError(
                f"no Ray answers ({error}), so nothing can run: start it, give its RAY_ADDRESS, or set "
                "RAY_ADDRESS=local for one of this machine alone"
            ) from error
        return False


def close(args: argparse.Namespace) -> int:
    """Says how a run that was stopped goes on; returns the exit status that shells give to the signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends at once
    goes_on = "no checkpoint was made, and the same command starts it anew"
    try:
        if (last := newest(args)) is not None:
            at = "epoch {epoch}, step {step}".format(**last.metrics)
            goes_on = f"its last checkpoint is {last.checkpoint.path} ({at}), and the same command goes on from it"
    except (OSError, raylance.StateError) as error:
        goes_on = f"its checkpoints cannot be read now ({error}), and the same command goes on from the last one"
    by = signal.Signals(args.stopped_by)
    say(f"run {place(args)[2]} was stopped by {by.name}; {goes_on}:\n{common.show_command(['python', *args.command])}")
    return 128 + by


def summarise(args: argparse.Namespace, name: str, result: ray.train.Result) -> int:
    """Prints what a user needs to know of a finished run; returns the exit status."""
    metrics = {"val_accuracy": math.nan, "images_per_s": math.nan} | result.metrics
    figures = result.return_value or {"epochs": 0}  # none where nothing ran
    if not figures["epochs"]:
        print(f"run {name} was finished already; nothing was done")
    print("validation accuracy {val_accuracy:.2%} after {epoch} epochs, {images_per_s:,.0f} images/s".format(**metrics))
    if figures["epochs"]:
        print(
            "rank 0: {user_s:.1f} s training and saving, {wait_s:.1f} s waiting for data ({first_batch_s:.1f} s of it "
            "for first batches); its helpers: {decode_s:.1f} s decoding, {read_s:.1f} s reading".format(**figures)
        )
    print(f"checkpoint {result.checkpoint.path}")
    print("the same command goes on from it: more --epochs train on, another --run-name starts anew", flush=True)
    if args.target_accuracy is not None and not metrics["val_accuracy"] >= args.target_accuracy:
        say(f"{metrics['val_accuracy']:.2%} misses --target-accuracy {args.target_accuracy:.2%}")
        return 1
    return 0


def reason(error: Exception) -> str:
    """Returns the message of what failed, without the traceback, which Ray has logged."""
    failures = [*getattr(error, "worker_failures", {}).values(), getattr(error, "controller_failure", error)]
    # When one rank fails, the others lose their connection to it, and say that.
    cause = next((failure for failure in failures if isinstance(failure, raylance.RaylanceError)), failures[0])
    text = f"{type(cause).__name__}: {cause}"
    named = list(re.finditer(r"^[\w.]+(?:Error|Exception|Exit): ", text, re.MULTILINE))  # the last ends a traceback
    return text[named[-1].start() :].strip() if named else text


def place(args: argparse.Namespace) -> tuple[Any, str, str]:
    """Returns where runs are kept, with the file system where it needs options, and the name of this one."""
    name = args.run_name or f"{os.path.basename(args.data.rstrip('/')).removesuffix('.lance')}-{args.model}"
    if args.storage_options and args.storage_path.startswith("s3://"):
        return *common.open_filesystem(args.storage_path, common.store_options(args.storage_options)), name
    return None, locate(args.storage_path), name


def say(message: str) -> None:
    """Tells the user what is wrong."""
    print(f"train_images.py: {message}", file=sys.stderr, flush=True)


def within(kind: Callable[[str], Any], least: float, most: float = math.inf) -> Callable[[str], Any]:
    """Returns a parser of numbers that refuses those outside of [least, most]."""

    def number(text: str) -> Any:
        if not least <= (value := kind(text)) <= most:
            raise argparse.ArgumentTypeError(f"{text} lies outside of [{least}, {most}]")
        return value

    return number


def decoders(text: str) -> Any:
    """Parses a number of decoders, or the least and the most of them."""
    least, dash, most = text.partition("-")
    if least and dash:
        return within(int, 1)(least), within(int, int(least) + 1)(most)
    return text if text == "auto" else within(int, 0)(text)


def readers(text: str) -> Any:
    """Parses a number of shard actors, or the least and the most of them."""
    return within(int, 1)(text) if text.isdigit() else decoders(text)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    # fmt: off
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[2], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    count = within(int, 1)

    def group(title: str) -> Callable[..., None]:
        adder = parser.add_argument_group(title)

        def add(name: str, text: str, **options: Any) -> None:
            shown = " (default: %(default)s)" if options.get("default") is not None else ""
            adder.add_argument(name, help=text + shown, **options)

        return add

    add = group("data")
    add("--data", "the Lance dataset, where every node can read it", required=True, metavar="URI")
    add("--version", "version number or tag (default: the newest)", metavar="V")
    add("--val-data", "another dataset to validate on, its newest version (default: --data)", metavar="URI")
    add("--storage-options", "for the object store of --data, as Lance names it, and of --storage-path where that is "
        "s3://; may be repeated. Secrets are better set in the environment of all nodes (AWS_ACCESS_KEY_ID, …)",
        type=common.key_value, action="append", default=[], metavar="KEY=VALUE")
    add("--train-filter", "rows to train on, '' for all", default="split = 'train'", metavar="SQL")
    add("--val-filter", "rows to validate on, '' for all", default="split = 'val'", metavar="SQL")
    add("--image-column", "encoded images", default="image", metavar="NAME")
    add("--label-column", "integers from 0 up", default="label", metavar="NAME")
    add("--num-classes", "(default: as `classes` in the schema metadata has, else the greatest label + 1)",
        type=within(int, 2), metavar="N")
    add("--image-size", "side of the square that images become (default: as stored, for images of one size)",
        type=count, metavar="PIXELS")
    add("--augment", "flip: every other training image left to right, which digits and text do not stand; crop: "
        "that, and random resized crops, for photographs, which are validated on their centre",
        choices=("none", "flip", "crop"), default="none")
    add("--order", "of training rows", choices=("window", "shard", "row", "sequential"), default="window")
    add("--on-bad-row", "stop at an image that cannot be decoded, or leave it out",
        choices=("raise", "mask"), default="raise")
    add = group("training")
    add("--model", "small_cnn, or a classifier of torchvision such as resnet18", default="small_cnn", metavar="NAME")
    add("--epochs", "passes over the training rows", type=count, default=10, metavar="N")
    add("--global-batch-size", "rows of a step, over all workers", type=count, default=64, metavar="N")
    add("--learning-rate", "the peak; of AdamW with warm-up and cosine",
        type=within(float, 0), default=2e-3, metavar="X")
    add("--weight-decay", "of AdamW", type=within(float, 0), default=0.01, metavar="X")
    add("--precision", "auto: bf16 autocast on GPUs, fp32 on CPUs", choices=("auto", "fp32", "bf16"), default="auto")
    add("--seed", "of weights, order and augmentation", type=int, default=0, metavar="N")
    add("--target-accuracy", "exit with 1 when validation ends below this, e.g. 0.97",
        type=within(float, 0, 1), metavar="F")
    add = group("machines")
    add("--num-workers", "ranks, of one CPU or GPU each", type=count, default=2, metavar="N")
    add("--use-gpu", "train on GPUs", action="store_true")
    add("--num-decoders", "decode actors of each rank; auto: on the CPUs that ranks leave free, else in threads; 0: in "
        "threads; 2-8: two, and up to eight while training waits for them", type=decoders, default="auto", metavar="N")
    add("--num-readers", "shard actors of each rank and dataset, where reading is slow; each holds windows of its own; "
        "auto: 1-4", type=readers, default=1, metavar="N")
    add("--max-failures", "times to go on from the last checkpoint after a worker failed, -1: without end",
        type=within(int, -1), default=3, metavar="N")
    add = group("run")
    add("--storage-path", "where runs are kept; several nodes must share it", default="~/raylance-runs", metavar="URI")
    add("--run-name", "a name that exists goes on (default: <dataset>-<model>)", metavar="NAME")
    add("--checkpoint-every-steps", "besides one after each epoch; they take about two seconds",
        type=count, default=1000, metavar="N")
    add("--no-progress", "no progress bar; there is one on terminals only", action="store_true")
    # fmt: on
    args = parser.parse_args(argv)
    args.stopped_by = signal.SIGINT  # if anything stops the run
    args.command = [sys.argv[0], *(sys.argv[1:] if argv is None else argv)]
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the job from its arguments; returns the exit status."""
    args = parse_args(argv)
    logging.getLogger("ray.train").setLevel(logging.WARNING)  # it tells of runs that it finds; so does the job
    try:
        return run(args)
    except raylance.RaylanceError as error:
        say(str(error))
        return 2
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        say(f"training failed: {reason(error)}")
        return 1
    except (KeyboardInterrupt, SystemExit):  # the latter from Ray Train, once it has stopped the workers
        return close(args)


if __name__ == "__main__":
    sys.exit(main())
