"""Owns the training of an image classifier from a Lance dataset; never reads, orders or decodes a row itself.

    python jobs/train_images.py --data digits.lance
    python jobs/train_images.py --data s3://bucket/food101.lance --model resnet18 --image-size 224 --augment crop
                                --use-gpu --num-workers 4 --global-batch-size 256 --storage-path s3://bucket/runs
    RAY_AUTH_MODE=token ray job submit --address http://localhost:8265 -- python jobs/train_images.py --data …

A run is its --storage-path and --run-name. The same command continues at the very row where the newest checkpoint of
the run was made, also with other --num-workers, --global-batch-size, --num-decoders or --epochs, and prints where. For
a finished run it prints so and does nothing. A run that SIGINT or SIGTERM stops prints how to continue it.

It shows one progress line, and prints at the end what limited the run, and where its report is: report.html in the
run's folder. What Ray and its workers print goes to output.log there; where that is no local folder, to a temporary
file.

--track tensorboard,wandb,mlflow logs losses, rates, the share of waiting, the arguments, and which data were read. A
run that continues is the same run there. TensorBoard's files are in the run's folder, copied there with each checkpoint
where that is an object store; MLflow's default is mlflow.db in --storage-path. raylance[tracking] installs all three.

Exit status: 0 when the run is finished, 1 when training failed or missed --target-accuracy, 2 for input that cannot
be used, after one message on stderr; 130 and 143 when SIGINT and SIGTERM stopped it.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any

import ray.exceptions
import ray.train

import raylance
from jobs import common
from jobs.common import within
from jobs.train_images import messages
from jobs.train_images.driver import run
from jobs.train_images.messages import Stopping, say
from jobs.train_images.tracking import trackers


def decoders(text: str) -> Any:
    """Parses a number of decoders, or the least and the most of them."""
    least, dash, most = text.partition("-")
    if least and dash:
        return within(int, 1)(least), within(int, int(least) + 1)(most)
    return text if text == "auto" else within(int, 0)(text)


def readers(text: str) -> Any:
    """Parses a number of shard actors, or the least and the most of them."""
    return within(int, 1)(text) if text.isdigit() else decoders(text)


def bad_rows(text: str) -> float | None:
    """Parses how many bad rows there may be: a count, a fraction, or "none" for any number."""
    if text == "none":
        return None
    return within(int, 0)(text) if text.isdigit() else within(float, 0, 1)(text)


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
    add("--version", "version number or tag (default: the newest)", type=common.number_or_name, metavar="V")
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
    add("--draft", "decode JPEGs that are more than twice as large as needed at a fraction of their size: faster, with "
        "other pixels", action="store_true")
    add("--order", "of training rows", choices=("window", "shard", "row", "sequential"), default="window")
    add("--on-bad-row", "stop at an image that cannot be decoded, or leave it out",
        choices=("raise", "mask"), default="raise")
    add("--max-bad-rows", "that are left out, of a worker, before training stops all the same: a number of different "
        "ones, a fraction such as 0.02, or none for no limit", type=bad_rows, default=0.01, metavar="N")
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
    add("--prefetch-batches", "of a rank, made ahead, for trainers that take them in bursts", type=count, default=2,
        metavar="N")
    add("--max-failures", "times to continue from the last checkpoint after a worker failed, -1: without end",
        type=within(int, -1), default=3, metavar="N")
    add = group("run")
    add("--storage-path", "where runs are kept; several nodes must share it", default="~/raylance-runs", metavar="URI")
    add("--run-name", "a name that exists continues (default: <dataset>-<model>)", metavar="NAME")
    add("--continue-from", "the folder of another run: a new run begins with its newest whole checkpoint, even if Ray "
        "Train's list of them is damaged", type=common.locate, metavar="URI")
    add("--checkpoint-every-steps", "besides one after each epoch; they take about two seconds",
        type=count, default=1000, metavar="N")
    add("--no-progress", "no moving line on terminals, but lines, as in logs", action="store_true")
    add("--track", "tensorboard, wandb, mlflow, none; several with commas, or repeated (default: tensorboard, where it "
        "is installed). MLFLOW_TRACKING_URI, WANDB_PROJECT, WANDB_MODE and their like are taken from the environment; "
        "keys belong into that of all nodes", type=trackers, action="extend", metavar="NAMES")
    add("--track-every-steps", "besides each report; a GPU is waited for then", type=count, default=20, metavar="N")
    # fmt: on
    args = parser.parse_args(argv)
    args.stopped_by = signal.SIGINT  # if anything stops the run
    args.log = None  # until there is one
    args.stopping = Stopping(args)
    args.command = [sys.argv[0], *(sys.argv[1:] if argv is None else argv)]
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the job from its arguments; returns the exit status."""
    args = parse_args(argv)
    logging.getLogger("ray.train").setLevel(logging.WARNING)  # it reports runs that it finds; so does the job
    try:
        return attempt(args)
    except (KeyboardInterrupt, SystemExit) as stopped:  # the latter from Ray Train, once it has stopped the workers,
        if getattr(stopped, "code", None) == signal.SIGTERM:  # or from Ray, while it starts
            args.stopped_by = signal.SIGTERM
        return messages.close(args)
    finally:
        args.stopping.end()


def attempt(args: argparse.Namespace) -> int:
    """Runs the job, and prints why it failed; returns the exit status."""
    try:
        return run(args)
    except raylance.RaylanceError as error:
        say(str(error))
        return 2
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        return messages.fail(args, error)
