"""Owns how a run that is stopped ends in time: the message at once, and its end where Ray takes longer; never stops
Ray's own work.

A machine that shuts down, `ray job stop` and Kubernetes kill what has not ended some seconds after SIGTERM. So the
folder of the run and the command that continues it come first, and nothing that may take long, such as the report.
"""

import argparse
import os
import signal
import socket
import sys
import threading
from types import FrameType

from tqdm.std import tqdm

import raylance
from jobs import common
from jobs.train_images.run_folder import RunFolder, newest, run_folder

SELF = "train_images.py"
PATIENCE_S = 8.0  # for Ray, the workers and the trackers to end


class Stopping:
    """Watches for the signals that stop the job, from a thread: the main one may be deep in Ray."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Nothing is watched yet."""
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
    """Where a run that is stopped continues.

    Raises:
        OSError: The storage cannot be read now.
        StateError: The list of checkpoints is damaged.
    """
    if (last := newest(at)) is None:
        return "no checkpoint was made, and the same command starts it again"
    epoch, step = last.metrics["epoch"], last.metrics["step"]
    if "epochs" in last.metrics:  # at an epoch's end: the next step is the first one of the next epoch
        epoch, step = last.metrics["epochs"], 0
    where = f"epoch {epoch}, after step {step}"
    return f"its last checkpoint is {last.checkpoint.path} ({where}), and the same command continues from it"
