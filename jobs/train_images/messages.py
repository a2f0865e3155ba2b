"""Owns how a run ends: what users read then (how to continue it, what limited it, where its report is), and that a
run that is stopped ends in time; never what Ray stops.

A machine that shuts down, `ray job stop` and Kubernetes kill what has not ended some seconds after SIGTERM. So the
folder of the run and the command that continues it come first, and nothing that may take long, such as the report.
"""

import argparse
import io
import math
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from types import FrameType
from typing import TextIO

import ray.train
from tqdm.std import tqdm

import raylance
from jobs import common
from jobs.train_images.run_folder import RunFolder, newest, run_folder

SELF = "train_images.py"
PATIENCE_S = 8.0  # for Ray, the workers and the trackers to end


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


class Stopping:
    """Watches for the signals that stop the job, from a thread: the main one may be deep in Ray."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._user = args, sys.stderr
        self._said, self._lock, self._is_out = "", threading.Lock(), threading.Event()
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._before = -1

    def heed(self) -> None:
        """Has SIGTERM stop the job as SIGINT does, and either end it in time."""
        if self._ends is None:
            self._ends = socket.socketpair()
            self._ends[1].setblocking(False)
            self._before = signal.set_wakeup_fd(self._ends[1].fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=self._ends[:1], daemon=True).start()

        def stop(number: int, frame: FrameType | None) -> None:
            self._args.stopped_by = number
            signal.raise_signal(signal.SIGINT)  # for which Ray Train has a way that stops the workers too

        signal.signal(signal.SIGTERM, stop)

    def end(self) -> None:
        """The job has ended by itself."""
        self._is_out.set()
        if self._ends is not None:
            signal.set_wakeup_fd(self._before)
            for end in self._ends[::-1]:
                end.close()

    def say(self, *, is_last: bool = True) -> None:
        """Prints how to continue the run, unless it has printed the same."""
        with self._lock:
            at = run_folder(self._args)
            try:
                text = how_to_continue(at)
            except (OSError, raylance.StateError) as error:
                if not is_last:  # Ray Train may be writing there
                    return
                text = f"its checkpoints cannot be read now ({error}), and the same command continues from the last one"
            if text != self._said:  # Ray Train may have taken one more checkpoint
                self._print(at, text)
                self._said = text

    def _watch(self, signals: socket.socket) -> None:
        while number := signals.recv(1):
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                break
        else:
            return
        self._args.stopped_by = number[0]
        threading.Thread(target=self.say, kwargs={"is_last": False}, daemon=True).start()
        if not self._is_out.wait(PATIENCE_S):
            if not self._said:
                self._print(run_folder(self._args), "the same command continues from its last checkpoint")
            os._exit(128 + number[0])  # Ray ends what it runs for a driver that is gone

    def _print(self, at: RunFolder, how: str) -> None:
        by = signal.Signals(self._args.stopped_by).name
        again = common.show_command(["python", *self._args.command])
        tqdm.write(f"{SELF}: run {at.name} was stopped by {by}; {how}:\n{again}", file=self._user)
        if self._args.log is not None and not self._said:  # it ran
            report = common.show_command(["python", "-c", f"import raylance; raylance.report_run({at.uri!r})"])
            tqdm.write(f"its report comes at the end of that, or by:\n{report}", file=self._user)
        self._user.flush()


def how_to_continue(at: RunFolder) -> str:
    """Where a run that is stopped continues; raises what `newest` does."""
    if (last := newest(at)) is None:
        return "no checkpoint was made, and the same command starts it again"
    epoch, step = last.metrics["epoch"], last.metrics["step"]
    if "epochs" in last.metrics:  # at an epoch's end: the next step is the first one of the next epoch
        epoch, step = last.metrics["epochs"], 0
    where = f"epoch {epoch}, after step {step}"
    return f"its last checkpoint is {last.checkpoint.path} ({where}), and the same command continues from it"
