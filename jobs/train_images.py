"""Trains an image classifier from a Lance dataset with Ray Train: an example to copy, and a job to run as it is.

    python jobs/train_images.py --data digits.lance
    python jobs/train_images.py --data s3://bucket/food101.lance --model resnet18 --image-size 224 --augment crop
                                --use-gpu --num-workers 4 --global-batch-size 256 --storage-path s3://bucket/runs
    RAY_AUTH_MODE=token ray job submit --address http://localhost:8265 -- python jobs/train_images.py --data …

A run is its --storage-path and --run-name. The same command continues at the very row where the newest checkpoint of
the run was made, also with other --num-workers, --global-batch-size, --num-decoders or --epochs. For a finished run it
prints so and does nothing.

It shows one progress line, and prints at the end what limited the run, and where its report is: report.html in the
run's folder. What Ray and its workers print goes to output.log there; if that is not a local folder, to a temporary
file. --track logs losses, rates, the share of waiting, the arguments, and which data were read; a run that continues is
the same run there.

Exit status: 0 when the run is finished, 1 when training failed or missed --target-accuracy, 2 for input that cannot
be used, after one message on stderr; 130 and 143 when SIGINT and SIGTERM stopped it.

The file has the data, the model, the training function of each worker, the driver, and the command line, in this order.
"""

import argparse
import contextlib
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import lance
import pyarrow as pa
import pyarrow.compute as pc
import ray
import ray.exceptions
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import raylance
from jobs import common, output, trackers
from jobs.common import within

SELF = "train_images.py"
HIDDEN = ("command", "stopped_by", "storage_options")  # arguments that neither workers nor trackers get
WARM_UP = 0.05  # the fraction of a run in which the learning rate rises
TRACK_EVERY = 20  # steps; a GPU is waited for then
OPTIONS = {  # the job's own option for each argument that raylance's messages name
    "filter": "train-filter or --val-filter",
    "global_batch_size": "global-batch-size",
    "num_decoders": "num-decoders",
    "num_readers": "num-readers",
    "on_bad_row": "on-bad-row",
    "order": "order",
    "prefetch_batches": "prefetch-batches",
    "size": "image-size",
    "storage_options": "storage-options",
    "version": "version",
}
ARGUMENT = re.compile(r"\b([a-z_]+)=('[^']*'|\"[^\"]*\"|\((\d+), (\d+)\)|[\w…]+)?")
ONE_IMAGES_SIZE = re.compile(r"Image\('[^']*', size=\(\d+, \d+\)\), height first,")
FOR_OTHER_LOOPS = re.compile(r" If your loop adds up sums and counts, [^.]*\.|, or remainder=\"pad\" or \"ragged\"")


# ---- data


def open_data(args: argparse.Namespace) -> tuple[raylance.Dataset, raylance.Dataset]:
    """Opens the rows to train and to validate on."""
    crop = args.augment == "crop"

    def rows(uri: str, where: str, version: Any, augment: Any, hflip: float, **options: Any) -> raylance.Dataset:
        return raylance.dataset(
            common.locate(uri),
            version=version,
            columns=[
                raylance.Image(args.image_column, size=args.image_size, augment=augment, hflip=hflip, draft=args.draft),
                args.label_column,
            ],
            filter=where or None,
            seed=args.seed,
            on_bad_row=args.on_bad_row,
            storage_options=common.store_options(args.storage_options) or None,
            **options,
        )

    augment, hflip = raylance.RandomResizedCrop() if crop else None, 0.0 if args.augment == "none" else 0.5
    train = rows(args.data, args.train_filter, args.version, augment, hflip, order=args.order)
    val = rows(
        args.val_data or args.data,
        args.val_filter,
        None if args.val_data else train.version,  # both of one version, also if another one is committed meanwhile
        raylance.CenterCrop() if crop else None,
        0.0,
        order="sequential",
        remainder="ragged",  # each row is validated once
    )
    if args.image_size is None:
        for data in (train, val):
            data.head(64)  # images that differ in size are refused here, not in the workers
    check_labels(args, train, val)
    return train, val


def check_labels(args: argparse.Namespace, train: raylance.Dataset, val: raylance.Dataset) -> None:
    """Refuses labels that are not integers, or that mean other classes in the rows to validate on."""
    for uri, data in ((args.data, train), (args.val_data or args.data, val)):
        kind = data.schema.field(args.label_column).type
        if not pa.types.is_integer(kind):
            words = ["--data", uri, "--string-column", args.label_column, "--label-column", "class_id"]
            command = common.show_command([*words, *common.store_words(args.storage_options)])
            raise raylance.errors.DatasetError(
                f"--label-column {args.label_column} of {uri} is {kind}. A classifier learns integers from 0 up. Name "
                f"such a column; strings become one by `python jobs/create_dataset.py classes {command}`, and train "
                "with --label-column class_id."
            )
    names = [(data.schema.metadata or {}).get(b"classes") for data in (train, val)]
    if None not in names and names[0] != names[1]:
        raise raylance.errors.DatasetError(
            f"--val-data {args.val_data} names other classes than --data {args.data}. The same label would mean two "
            "things. Make both with the same names (`--classes` of jobs/create_dataset.py)."
        )


def count_classes(args: argparse.Namespace, train: raylance.Dataset) -> int:
    """Returns the number of classes: as `classes` in the schema metadata has, else the greatest label + 1."""
    if names := (train.schema.metadata or {}).get(b"classes"):
        return len(json.loads(names))
    store = common.store_options(args.storage_options) or None
    opened = lance.dataset(common.locate(args.data), version=train.version, storage_options=store)
    return 1 + int(pc.max(opened.to_table(columns=[args.label_column])[args.label_column]).as_py())


# ---- model


def build_model(name: str, classes: int) -> nn.Module:
    """Builds a network with random weights, from float images (N, 3, H, W) to scores (N, classes)."""
    if name != "small_cnn":
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=classes)

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    fine = [*block(3, 32), *block(32, 64), nn.MaxPool2d(2)]
    coarse = [*block(64, 64), *block(64, 128), nn.AdaptiveMaxPool2d(2)]  # (N, 128, 2, 2)
    return nn.Sequential(*fine, *coarse, nn.Flatten(), nn.Linear(4 * 128, classes))


def check_model(args: argparse.Namespace, classes: int, train: raylance.Dataset) -> None:
    """Runs the model without memory or arithmetic, so that a misfit shows now and not in the workers."""
    height, width, _ = train.schema.field(args.image_column).type.shape
    try:
        with torch.device("meta"):
            build_model(args.model, classes)(torch.empty(2, 3, height, width))
    except Exception as error:  # torchvision is missing or has no such model, or layers do not fit
        raise raylance.errors.ConfigError(
            f"--model {args.model} cannot classify images of {height}x{width} into {classes} classes ({error}). "
            "Nothing can be trained. Give small_cnn or a classifier of torchvision, or another --image-size."
        ) from error


def scores_of(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Scores (N, classes) of uint8 images (N, 3, H, W). They become floats only here: the device gets bytes."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        scores: torch.Tensor = model(images.float().div_(127.5).sub_(1))
    return scores.float()


def learning_rate(peak: float, progress: float) -> float:
    """Linear warm-up, then half a cosine down to zero; `progress` is the fraction of the run that is done."""
    return peak * min(1.0, progress / WARM_UP) * 0.5 * (1 + math.cos(math.pi * progress))


# ---- training function: each worker runs it


def train_fn(config: dict[str, Any]) -> None:
    """Trains on one rank, with warnings shown to the user."""
    with output.warnings_to_user():
        train(argparse.Namespace(**config["arguments"]), config)


def train(args: argparse.Namespace, config: Mapping[str, Any]) -> None:
    """Trains on one rank: restores the newest checkpoint, and reports one every some steps and after each epoch."""
    torch.manual_seed(args.seed)
    loader, val = ray.train.get_dataset_shard("train"), ray.train.get_dataset_shard("val")
    batches = {"global_batch_size": args.global_batch_size, "prefetch_batches": args.prefetch_batches}
    for each in (loader, val):
        each.prepare(**batches)  # their helpers start while the model is built
    network = build_model(args.model, config["classes"]).to(memory_format=torch.channels_last)
    model = ray.train.torch.prepare_model(network)
    optimizer = torch.optim.AdamW(network.parameters(), args.learning_rate)
    saved = raylance.restore(loader, ray.train.get_checkpoint() or config["other"]) or {}
    if saved:
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    facts = {"arguments": config["arguments"], "data": loader.identity()}
    of_run = config["name"], saved.get("trackers", {}), loader.global_step
    tracked = trackers.Tracked(args.track, *of_run, facts, {"train": loader, "val": val})
    steps = loader.steps_per_epoch(global_batch_size=args.global_batch_size)

    def report(epoch: int, step: int, loss: torch.Tensor, **more: float) -> None:
        torch.distributed.all_reduce(loss)
        metrics = {"epoch": epoch, "step": step, "train_loss": loss.item() / loader.world_size, **more}
        metrics["images_per_s"] = speed_of(loader)["images_per_s"]
        tracked.log(loader.global_step, metrics, is_checkpoint=True)
        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "trackers": tracked.ids}
        raylance.report(metrics, loader, state=state | {"network": [args.model, config["classes"]]})

    with tracked:
        for epoch in range(loader.epoch, args.epochs):
            step = first = loader.state_dict()["position"] // args.global_batch_size  # steps of it that are done
            losses = torch.zeros((), device=ray.train.torch.get_device())
            for step, batch in enumerate(loader.iter_torch_batches(**batches), first + 1):
                rate = learning_rate(args.learning_rate, (epoch + (step - 0.5) / steps) / args.epochs)
                loss = train_step(args, model, optimizer, rate, loader, batch)
                losses += loss
                if tracked and loader.global_step % TRACK_EVERY == 0:
                    tracked.log(loader.global_step, {"loss": loss.item(), "learning_rate": rate, **speed_of(loader)})
                if step % args.checkpoint_every_steps == 0 and step < steps:
                    report(epoch, step, losses / (step - first))
            accuracy = validate(args, network, val)
            report(epoch, step, losses / (step - first), epochs=epoch + 1, val_accuracy=accuracy)  # epochs done
    for each in (loader, val):
        each.close()  # its record then says that it has ended


def train_step(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    rate: float,
    loader: raylance.RankLoader,
    batch: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Makes one step; returns the loss of the global batch, as far as it is this rank's."""
    torch.manual_seed(hash((args.seed, loader.global_step, loader.rank)))  # dropout does not depend on restarts
    for group in optimizer.param_groups:
        group["lr"] = rate
    scores = scores_of(model, batch[args.image_column])
    losses = cross_entropy(scores, batch[args.label_column].long(), reduction="none")
    # DDP averages over ranks, whose shares may differ by a row: this makes it the mean of the global batch.
    loss = (losses * batch.get("_valid", 1)).sum() * (loader.world_size / args.global_batch_size)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.inference_mode()
def validate(args: argparse.Namespace, network: nn.Module, val: raylance.RankLoader) -> float:
    """Returns the share of right answers in the rows of all ranks."""
    # Each rank has running statistics of its own; those of rank 0 are what checkpoints hold.
    for buffer in network.buffers():
        torch.distributed.broadcast(buffer, 0)
    network.eval()
    counts = torch.zeros(2, device=next(network.parameters()).device)  # right, all
    for batch in val.iter_torch_batches(global_batch_size=args.global_batch_size):
        labels = batch[args.label_column]
        if len(labels):  # the last step is smaller, and may have no row for this rank
            valid = batch.get("_valid", torch.ones_like(labels, dtype=torch.bool))
            right = (scores_of(network, batch[args.image_column]).argmax(1) == labels) & valid
            counts += torch.stack([right.sum(), valid.sum()])
    network.train()
    torch.distributed.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def speed_of(loader: raylance.RankLoader) -> dict[str, float]:
    """Images a second over all ranks, and the share of the time that training waits for data, as in the report."""
    verdict = loader.explain()
    return {"images_per_s": verdict.rates.get("delivered", math.nan), "waiting": verdict.waiting}


# ---- driver


def run(args: argparse.Namespace) -> int:
    """Checks all that can be checked without Ray, trains, and prints the result; returns the exit status."""
    train_data, val_data = open_data(args)
    classes = count_classes(args, train_data)
    check_model(args, classes, train_data)
    plan = train_data.plan(args.global_batch_size, args.num_workers)
    name = args.run_name or f"{os.path.basename(args.data.rstrip('/')).removesuffix('.lance')}-{args.model}"
    store = common.store_options(args.storage_options)
    filesystem, storage = common.open_filesystem(args.storage_path, store)
    folder, is_local = f"{storage.rstrip('/')}/{name}", filesystem.type_name == "local"
    args.track = trackers.choose(args.track, is_local)
    try:
        filesystem.create_dir(folder)
    except OSError as error:
        raise raylance.errors.ConfigError(
            f"--storage-path {args.storage_path} cannot be written to ({error}). Nothing would be kept. Give another."
        ) from error
    before, epoch = look_up(args, folder, filesystem, train_data, [args.model, classes])
    if before is not None and epoch >= args.epochs:
        print(f"run {name} was finished already; nothing was done")
        return summarise(args, folder, filesystem, before)
    other = None
    if args.continue_from is not None and before is None:
        other = raylance.runs.newest_checkpoint(*reversed(common.open_filesystem(args.continue_from, store)))

    log = output.log_file(folder if is_local else None, name)
    with output.separate_output(log, common.show_command(["python", *args.command]), f"{SELF}: ", as_options) as user:
        dropped = f" ({plan.rows_dropped} rows left out of each, different ones each time)" if plan.rows_dropped else ""
        workers = f"{args.num_workers} {'GPU' if args.use_gpu else 'CPU'} worker{'s' * (args.num_workers > 1)}"
        user.show(f"{train_data!r}; {len(val_data):,} rows to validate, {classes:,} classes")
        user.show(f"run {name}: {args.epochs} epochs of {plan.steps} steps{dropped}, {workers}")
        user.show(f"what Ray and its workers print: {log}")
        if "tensorboard" in args.track:
            user.show(f"curves: tensorboard --logdir {folder}/tensorboard")
        if before is not None or other is not None:
            user.show(f"continues from checkpoint {(other or before.checkpoint).path}")
        trainer = ray.train.torch.TorchTrainer(
            train_fn,
            train_loop_config={
                "arguments": {key: value for key, value in vars(args).items() if key not in HIDDEN},
                "classes": classes,
                "name": name,
                "other": other,
            },
            scaling_config=ray.train.ScalingConfig(num_workers=args.num_workers, use_gpu=args.use_gpu),
            run_config=ray.train.RunConfig(
                name=name,
                storage_path=storage,
                storage_filesystem=filesystem,
                checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
                failure_config=ray.train.FailureConfig(
                    args.max_failures, controller_failure_limit=30
                ),  # attempts to start
                callbacks=[raylance.FailFast()],
            ),
            datasets={"train": train_data, "val": val_data},
            dataset_config=raylance.DataConfig(
                ["train", "val"], num_decoders=args.num_decoders, num_readers=args.num_readers
            ),
        )
        with joined_ray(args, user):
            watching = raylance.watch(
                folder, epochs=args.epochs, storage_filesystem=filesystem, tell=lambda it: tell(it, args), file=user.err
            )
            try:
                with watching:
                    result = trainer.fit()
            except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
                say(f"training failed: {common.reason(error)}\n(the traceback is in {log})", user.err)
                print(error)  # in the log
                return 1
    return summarise(args, folder, filesystem, result)


def look_up(
    args: argparse.Namespace, folder: str, filesystem: Any, train_data: raylance.Dataset, network: list[Any]
) -> tuple[ray.train.Result | None, int]:
    """Returns the run as its newest checkpoint left it, and the epoch in which it continues; None for a new run.

    Raises:
        StateError: If the run cannot continue. The workers would find out a minute later.
    """
    try:
        found = ray.train.Result.from_path(folder, storage_filesystem=filesystem)
    except RuntimeError:  # no such run, or none with a checkpoint
        return None, 0
    except Exception as error:  # the storage's errors, and Ray Train's, which have no public class
        raise raylance.StateError(
            f"Ray Train's list of the checkpoints in {folder} is damaged, or cannot be read ({type(error).__name__}: "
            f"{error}). The run cannot continue. Try again; restore the list; or give another --run-name and "
            f"--continue-from {folder}, which needs no list."
        ) from error
    if found.checkpoint is None:
        return None, 0
    with train_data.loader() as loader:
        saved = raylance.restore(loader, found.checkpoint) or {}
        if saved.get("network") != network:
            raise raylance.StateError(
                f"the checkpoint in {folder} is of model and classes {saved.get('network')}, not of {network}. Its "
                "weights do not fit. Ask for the same, or give another --run-name."
            )
        return found, loader.epoch


@contextlib.contextmanager
def joined_ray(args: argparse.Namespace, user: output.UserStreams) -> Iterator[None]:
    """Joins Ray or starts it for the body.

    Raises:
        ConfigError: If a Ray that was started here is too small for the run: it would wait without end.
    """
    was_there = ray.is_initialized()
    try:
        started_here = common.connect()
        heed_sigterm(args)  # again: ray.init has set a handler of its own
        decoders = args.num_decoders[0] if isinstance(args.num_decoders, tuple) else args.num_decoders
        needs = {"CPU": 0 if decoders == "auto" else decoders * args.num_workers, "GPU": 0}
        needs["GPU" if args.use_gpu else "CPU"] += args.num_workers
        for kind, needed in needs.items():
            there = ray.cluster_resources().get(kind, 0)
            short = f"the run needs {needed} {kind}s, and Ray has {there:g}"
            fewer = "Give fewer --num-workers or --num-decoders"
            if there < needed and started_here:
                raise raylance.errors.ConfigError(
                    f"{short} on this machine. No node joins a Ray that a job starts. {fewer}, or set RAY_ADDRESS to "
                    "the address of a cluster."
                )
            if there < needed:
                user.warn(f"{SELF}: {short}. It waits for nodes to join. If none will, stop it. {fewer}.")
        yield
    finally:
        if not was_there:
            ray.shutdown()  # its last lines belong into the log, too


def heed_sigterm(args: argparse.Namespace) -> Any:
    """Has SIGTERM stop the run as SIGINT does, for which Ray Train stops the workers; returns the handler before."""

    def stop(*_: object) -> None:
        args.stopped_by = signal.SIGTERM
        signal.raise_signal(signal.SIGINT)

    return signal.signal(signal.SIGTERM, stop)


def tell(metrics: Mapping[str, Any], args: argparse.Namespace) -> str:
    """A line with what was reported to Ray Train."""
    if "val_accuracy" not in metrics:
        return "epoch {epoch} of {}, step {step:,}: train loss {train_loss:.4f}".format(args.epochs, **metrics)
    line = "epoch {epoch} of {}: train loss {train_loss:.4f}, validation accuracy {val_accuracy:.2%}"
    return line.format(args.epochs, **metrics)


def summarise(args: argparse.Namespace, folder: str, filesystem: Any, result: ray.train.Result) -> int:
    """Prints the result of a finished run, what limited it, and its report; returns the exit status."""
    accuracy, epochs = result.metrics["val_accuracy"], result.metrics["epochs"]
    print(f"validation accuracy {accuracy:.2%} after {epochs} epochs, {result.metrics['images_per_s']:,.0f} images/s")
    print(f"checkpoint {result.checkpoint.path}")
    store = common.store_options(args.storage_options) or None
    try:
        print(as_options(str(raylance.explain_run(folder, filesystem, storage_options=store))))
        print(f"report: {raylance.report_run(folder, storage_filesystem=filesystem, storage_options=store)}")
    except Exception as error:  # a failed report must not hide that the training succeeded
        say(f"the report failed ({type(error).__name__}: {error})")
    print("the same command continues from it: more --epochs train on, another --run-name is a new run", flush=True)
    if args.target_accuracy is not None and not accuracy >= args.target_accuracy:
        say(f"{accuracy:.2%} misses --target-accuracy {args.target_accuracy:.2%}")
        return 1
    return 0


def say(message: str, to: Any = None) -> None:
    """Prints what is wrong."""
    print(f"{SELF}: {as_options(message)}", file=to or sys.stderr, flush=True)


def as_options(message: str) -> str:
    """Spells a message of raylance with the options of this job in place of arguments, as far as it has them."""

    def spelled(found: re.Match[str]) -> str:
        name, value, *pair = found.groups()
        if name not in OPTIONS:
            return found[0]
        value = "-".join(pair) if pair[0] else shlex.quote(value.strip("'\"")) if value else ""
        return f"--{OPTIONS[name]} {value}".rstrip()

    message = message.replace("size=(height, width)", "size=PIXELS")
    message = ONE_IMAGES_SIZE.sub("--image-size PIXELS, the side of a square,", message)
    return ARGUMENT.sub(spelled, FOR_OTHER_LOOPS.sub("", message))


# ---- command line


def helpers(fewest: int) -> Callable[[str], Any]:
    """An argparse type: a number of helpers, as N, auto, or LEAST-MOST."""

    def number(text: str) -> Any:
        least, dash, most = text.partition("-")
        if least and dash:
            return within(int, 1)(least), within(int, int(least) + 1)(most)
        return text if text == "auto" else within(int, fewest)(text)

    return number


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    # fmt: off
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = within(int, 1)

    def add(name: str, text: str, **options: Any) -> None:
        shown = " (default: %(default)s)" if options.get("default") is not None else ""
        parser.add_argument(name, help=text + shown, **options)

    add("--data", "the Lance dataset, where every node can read it", required=True, metavar="URI")
    add("--version", "version number or tag (default: the newest)", type=common.number_or_name, metavar="V")
    add("--val-data", "another dataset to validate on, its newest version (default: --data)", metavar="URI")
    add("--storage-options", "for the object store of --data, as Lance names it, and of --storage-path if that is "
        "s3://; may be repeated. Secrets are better set in the environment of all nodes (AWS_ACCESS_KEY_ID, …)",
        type=common.key_value, action="append", default=[], metavar="KEY=VALUE")
    add("--train-filter", "rows to train on, '' for all", default="split = 'train'", metavar="SQL")
    add("--val-filter", "rows to validate on, '' for all", default="split = 'val'", metavar="SQL")
    add("--image-column", "encoded images", default="image", metavar="NAME")
    add("--label-column", "integers from 0 up", default="label", metavar="NAME")
    add("--image-size", "side of the square that images become (default: as stored, for images of one size)",
        type=count, metavar="PIXELS")
    add("--augment", "flip: every other training image left to right, which digits and text do not stand; crop: "
        "that, and random resized crops, for photographs, which are validated on their centre",
        choices=("none", "flip", "crop"), default="none")
    add("--draft", "decode JPEGs that are more than twice as large as needed at a fraction of their size: faster, with "
        "other pixels", action="store_true")
    add("--order", "of training rows", choices=("window", "shard", "row", "sequential"), default="window")
    add("--on-bad-row", "stop at an image that cannot be decoded, or leave it out, up to a hundredth of the rows",
        choices=("raise", "mask"), default="raise")
    add("--model", "small_cnn, or a classifier of torchvision such as resnet18", default="small_cnn", metavar="NAME")
    add("--epochs", "passes over the training rows", type=count, default=10, metavar="N")
    add("--global-batch-size", "rows of a step, over all workers", type=count, default=64, metavar="N")
    add("--learning-rate", "the peak; of AdamW with warm-up and cosine", type=within(float, 0), default=2e-3,
        metavar="X")
    add("--seed", "of weights, order and augmentation", type=int, default=0, metavar="N")
    add("--target-accuracy", "exit with 1 when validation ends below this, e.g. 0.97", type=within(float, 0, 1),
        metavar="F")
    add("--num-workers", "ranks, of one CPU or GPU each", type=count, default=2, metavar="N")
    add("--use-gpu", "train on GPUs, in bf16", action="store_true")
    add("--num-decoders", "decode actors of each rank; auto: on the CPUs that ranks leave free, else in threads; 0: in "
        "threads; 2-8: two, and up to eight while training waits for them", type=helpers(0), default="auto",
        metavar="N")
    add("--num-readers", "shard actors of each rank and dataset, if reading is slow: N, auto, or 1-4; each holds "
        "windows of its own", type=helpers(1), default=1, metavar="N")
    add("--prefetch-batches", "of a rank, made ahead, for trainers that take them in bursts", type=count, default=2,
        metavar="N")
    add("--max-failures", "times to continue from the last checkpoint after a worker failed, -1: without end",
        type=within(int, -1), default=3, metavar="N")
    add("--storage-path", "where runs are kept; several nodes must share it", default="~/raylance-runs", metavar="URI")
    add("--run-name", "a name that exists continues (default: <dataset>-<model>)", metavar="NAME")
    add("--continue-from", "the folder of another run: a new run begins with its newest whole checkpoint, even if Ray "
        "Train's list of them is damaged", metavar="URI")
    add("--checkpoint-every-steps", "as well as one after each epoch; they take about two seconds", type=count,
        default=1000, metavar="N")
    add("--track", "tensorboard, wandb, mlflow, none; several with commas (default: tensorboard, if it is installed). "
        "MLFLOW_TRACKING_URI, WANDB_PROJECT, WANDB_MODE and their like are taken from the environment of the nodes",
        type=trackers.names, metavar="NAMES")
    # fmt: on
    args = parser.parse_args(argv)
    args.command = [sys.argv[0], *(sys.argv[1:] if argv is None else argv)]
    args.stopped_by = signal.SIGINT
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the job from its arguments; returns the exit status."""
    args = parse_args(argv)
    handler = heed_sigterm(args)
    logging.getLogger("ray.train").setLevel(logging.WARNING)  # it reports runs that it finds
    try:
        return run(args)
    except raylance.RaylanceError as error:
        say(str(error))
        return 2
    except (KeyboardInterrupt, SystemExit) as ended:  # the latter from Ray Train, once it has stopped the workers
        if signal.SIGTERM in ended.args:  # from the handler that ray.init sets
            args.stopped_by = signal.SIGTERM
        again = common.show_command(["python", *args.command])
        say(f"stopped by {args.stopped_by.name}; the same command continues from the last checkpoint:\n{again}")
        return 128 + args.stopped_by
    finally:
        signal.signal(signal.SIGTERM, handler)


if __name__ == "__main__":
    sys.exit(main())
