"""Owns what users read of a run that has ended: how it ended, how to continue it, what limited it, where its report is;
never changes a run.
"""

import argparse
import io
import math
import re
import signal
import sys
from collections.abc import Mapping
from typing import TextIO

import ray.train

import raylance
from jobs import common
from jobs.train_images.run_folder import RunFolder, run_folder
from jobs.train_images.stopping import SELF


class Lines(io.TextIOBase):
    """A stream that is no terminal, so that no line moves in it."""

    def __init__(self, to: TextIO) -> None:
        self.write, self.flush = to.write, to.flush  # type: ignore[method-assign]


def say(message: str) -> None:
    """Prints what is wrong."""
    print(f"{SELF}: {message}", file=sys.stderr, flush=True)


def summarise(args: argparse.Namespace, at: RunFolder, result: ray.train.Result) -> int:
    """Prints the result of a finished run; returns the exit status."""
    metrics = {"val_accuracy": math.nan, "images_per_s": math.nan} | result.metrics
    figures = result.return_value or {"epochs": 0}  # none where nothing ran
    if not figures["epochs"]:
        print(f"run {at.name} was finished already; nothing was done")
    done = metrics.get("epochs", metrics.get("epoch"))  # runs of before 0.8 reported these as their epoch
    accuracy, rate = metrics["val_accuracy"], metrics["images_per_s"]
    print(f"validation accuracy {accuracy:.2%} after {done} epochs, {rate:,.0f} images/s")
    print(f"checkpoint {result.checkpoint.path}")
    show_report(args, at)
    print("the same command continues from it: more --epochs train on, another --run-name is a new run", flush=True)
    if args.target_accuracy is not None and not metrics["val_accuracy"] >= args.target_accuracy:
        say(f"{metrics['val_accuracy']:.2%} misses --target-accuracy {args.target_accuracy:.2%}")
        return 1
    return 0


def show_report(args: argparse.Namespace, at: RunFolder) -> None:
    """Prints what limited the run, however it ended, and writes its report; no run fails without one."""
    try:
        store = common.store_options(args.storage_options) or None
        if args.log is not None:
            print(as_options(str(raylance.explain_run(at.folder, at.filesystem, storage_options=store))))
        where = raylance.report_run(at.folder, storage_filesystem=at.filesystem, storage_options=store)
    except Exception as error:  # of records, a storage, or what draws
        if args.log is not None:  # it ran, so there should be one
            say(f"there is no report ({type(error).__name__}: {error})")
    else:
        print(f"report: {where}", flush=True)


def as_options(advice: str) -> str:
    """Advice with the job's flags in the place of the API's options."""
    arguments = r"(?<!\()\b(num_decoders|num_readers|prefetch_batches|global_batch_size)=\s?"
    changed = re.sub(arguments, lambda found: f"--{found[1].replace('_', '-')} ", advice)
    return changed.replace("Image(draft=True)", "--draft")


def close(args: argparse.Namespace) -> int:
    """Prints how to continue a run that was stopped; returns the exit status that shells give to the signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends at once
    args.stopping.say()
    return 128 + signal.Signals(args.stopped_by)


def fail(args: argparse.Namespace, error: Exception) -> int:
    """Prints why training failed; returns the exit status."""
    show_report(args, run_folder(args))
    failures = getattr(error, "worker_failures", None)
    cause = cause_of(failures)[1] if failures else getattr(error, "controller_failure", error)
    say(f"training failed: {short(cause)}\n(the traceback is in {args.log})")
    return 1


def cause_of(failures: Mapping[int, Exception]) -> tuple[int, Exception]:
    """The rank whose failure explains the others': they report that they lost their connection to it."""
    ranks = [rank for rank in failures if isinstance(failures[rank], raylance.RaylanceError)]
    rank = next(iter(ranks or failures))
    return rank, failures[rank]


def short(error: Exception) -> str:
    """The message of an error, without the traceback that may be in it."""
    text = f"{type(error).__name__}: {error}"
    named = list(re.finditer(r"^[\w.]+(?:Error|Exception|Exit): ", text, re.MULTILINE))  # the last ends a traceback
    found = text[named[-1].start() :].strip() if named else text
    found = found.replace('set on_bad_row="mask"', "give --on-bad-row mask")
    return found.replace("raise max_bad_rows (a count, or a fraction; None for", "raise --max-bad-rows (none for")
