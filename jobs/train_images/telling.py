"""Owns what is said of a run that has ended: how it ended, how it goes on, what limited it, where its report is; never
changes a run.
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
from jobs.train_images.leaving import SELF
from jobs.train_images.places import Place, place


class Lines(io.TextIOBase):
    """A terminal that is not one, so that no line moves in it."""

    def __init__(self, to: TextIO) -> None:
        """Writes to a stream."""
        self._to = to

    def write(self, text: str) -> int:
        """Writes."""
        return self._to.write(text)

    def flush(self) -> None:
        """Has it written."""
        self._to.flush()


def say(message: str) -> None:
    """Tells the user what is wrong."""
    print(f"{SELF}: {message}", file=sys.stderr, flush=True)


def summarise(args: argparse.Namespace, at: Place, result: ray.train.Result) -> int:
    """Prints what a user needs to know of a finished run; returns the exit status."""
    metrics = {"val_accuracy": math.nan, "images_per_s": math.nan} | result.metrics
    figures = result.return_value or {"epochs": 0}  # none where nothing ran
    if not figures["epochs"]:
        print(f"run {at.name} was finished already; nothing was done")
    done = metrics.get("epochs", metrics.get("epoch"))  # runs of before 0.8 reported these as their epoch
    accuracy, rate = metrics["val_accuracy"], metrics["images_per_s"]
    print(f"validation accuracy {accuracy:.2%} after {done} epochs, {rate:,.0f} images/s")
    print(f"checkpoint {result.checkpoint.path}")
    tell_report(args, at)
    print("the same command goes on from it: more --epochs train on, another --run-name starts anew", flush=True)
    if args.target_accuracy is not None and not metrics["val_accuracy"] >= args.target_accuracy:
        say(f"{metrics['val_accuracy']:.2%} misses --target-accuracy {args.target_accuracy:.2%}")
        return 1
    return 0


def tell_report(args: argparse.Namespace, at: Place) -> None:
    """Says what limited the run, whichever way it ended, and writes its report; no run fails for want of one."""
    try:
        store = common.store_options(args.storage_options) or None
        if args.log is not None:
            print(as_options(str(raylance.explain_run(at.folder, at.filesystem, storage_options=store))))
        where = raylance.report_run(at.folder, storage_filesystem=at.filesystem, storage_options=store)
    except Exception as error:  # of records, a storage, or what draws
        if args.log is not None:  # it ran, so that there should be one
            say(f"there is no report ({type(error).__name__}: {error})")
    else:
        print(f"report: {where}", flush=True)


def as_options(advice: str) -> str:
    """What is to be changed, by the names that it has here."""
    arguments = r"(?<!\()\b(num_decoders|num_readers|prefetch_batches|global_batch_size)=\s?"
    told = re.sub(arguments, lambda found: f"--{found[1].replace('_', '-')} ", advice)
    return told.replace("Image(draft=True)", "--draft")


def close(args: argparse.Namespace) -> int:
    """Says how a run that was stopped goes on; returns the exit status that shells give to the signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the next one ends at once
    args.leaving.say()
    return 128 + signal.Signals(args.stopped_by)


def fail(args: argparse.Namespace, error: Exception) -> int:
    """Says why training failed; returns the exit status."""
    tell_report(args, place(args))
    say(f"training failed: {reason(error)}\n(the traceback is in {args.log})")
    return 1


def reason(error: Exception) -> str:
    """Returns the message of what failed, without the traceback, which is in the log."""
    failures = getattr(error, "worker_failures", None)
    return short(cause_of(failures)[1] if failures else getattr(error, "controller_failure", error))


def cause_of(failures: Mapping[int, Exception]) -> tuple[int, Exception]:
    """The rank whose failure explains the others': these lose their connection to it, and say that."""
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
