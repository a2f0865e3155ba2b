"""Owns the script of the schedules of scripts: it writes down the rows that it is handed, and ends as SETTING says. It
is started as a file, by -c, from stdin or as a cell, so it imports nothing of the tests; it checks nothing.

    python tests/faults/scripts/program.py SETTING      # the fields of a `Script`, and of the process, as JSON
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import json
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import raylance
from raylance import torch_data


class Unsendable:
    """What a worker cannot send."""

    def __reduce__(self) -> Any:
        raise ValueError("stays here")


def plain(batch: Any) -> Any:
    return batch


def generator(batch: Any) -> Any:
    return (item for item in batch.items())


def with_lock(batch: Any) -> Any:
    return {**batch, "lock": threading.Lock()}


def with_refusal(batch: Any) -> Any:
    return {**batch, "refusal": Unsendable()}


def with_file(batch: Any) -> Any:
    return {**batch, "file": open(os.devnull)}


def make_of_a_closure() -> Any:
    factor = 2

    def of_a_closure(batch: Any) -> Any:
        return {**batch, "twice": batch["id"] * factor}

    return of_a_closure


def make_keeps_lock() -> Any:
    lock = threading.Lock()

    def keeps_lock(batch: Any) -> Any:
        with lock:
            return batch

    return keeps_lock


def collate_of(setting: types.SimpleNamespace) -> Any:
    """The collate_fn of the loader that is asked for; None for none."""
    name = setting.collate.replace(" ", "_")
    if not name:
        return None
    makes = {"of_a_closure": make_of_a_closure, "keeps_lock": make_keeps_lock}
    function = makes[name]() if name in makes else globals()[name]
    return by_rows(function) if setting.source == "map" else function


def by_rows(function: Any) -> Any:
    @functools.wraps(function)
    def of_rows(rows: Any) -> Any:
        return function({name: np.array([row[name] for row in rows]) for name in rows[0]})

    return of_rows


def transform(batch: Any) -> Any:
    return {**{name: batch[name] for name in ("id", "x")}, "twice": batch["id"] * 2}


WORKING = ("raylance-feeder", "raylance-reader", "raylance-decoder")  # names of threads that work for a loader
KEPT: list[Any] = []  # until the interpreter ends


class KeptError(Exception):
    """What the loop over batches raises."""


class Ended(KeptError):  # noqa: N818 - it is uncaught on purpose
    """What ends the script."""


class Script:
    """One process of a schedule."""

    def __init__(self, setting: types.SimpleNamespace) -> None:
        self.setting, self.batch = setting, setting.batch
        self._log = open(setting.log, "a", buffering=1)  # noqa: SIM115 - as long as the process
        self.handle = self._open()

    def log(self, what: str, **values: Any) -> None:
        self._log.write(json.dumps({"what": what, "at_s": time.time(), **values}) + "\n")

    def _open(self) -> raylance.Dataset:
        setting = self.setting
        function = transform if setting.is_transformed else None

        def opened(condition: str = "", **arguments: Any) -> raylance.Dataset:
            conditions = [each for each in ("id % 3 != 0" if setting.is_filtered else "", condition) if each]
            where = " AND ".join(conditions) or None
            return raylance.dataset(setting.uri, filter=where, transform=function, **arguments)

        rest = {"remainder": "ragged", "window_bytes": setting.window_bytes}
        if setting.source != "mixture":
            return opened(**rest)
        return raylance.mix({"even": (opened("id % 2 = 0"), 1), "odd": (opened("id % 2 = 1"), 1)}, **rest)

    def make(self) -> tuple[Any, Callable[[], Any]]:
        """What gives the batches, an iterator for each pass, and what closes it."""
        setting = self.setting
        auto = {"dist_info": {"auto": "auto", "given": (setting.rank, setting.processes), "none": None}[setting.place]}
        size = {"global_batch_size": self.batch}
        workers: dict[str, Any] = {"num_workers": setting.workers}
        if setting.workers:
            workers |= {"persistent_workers": setting.is_persistent, "prefetch_factor": setting.prefetch}
        if setting.source == "map":
            sampler = torch_data.RowSampler(self.handle, max_window_bytes=setting.max_window_bytes, **size, **auto)
            rows = torch_data.MapDataset(self.handle, with_row_offset=True)
            return torch_data.Loader(rows, sampler, collate_fn=collate_of(setting), **workers), self.handle.close
        if setting.source == "iterable":
            arguments = size | auto | {"max_window_bytes": setting.max_window_bytes, "with_row_offset": True}
            steps = torch_data.IterableDataset(self.handle, collate_fn=collate_of(setting), **arguments)
            return torch_data.Loader(steps, **workers), self.handle.close
        ahead = {"prefetch_batches": setting.prefetch, "with_row_offset": True, "collate_fn": collate_of(setting)}
        if setting.source == "handle":
            return self.handle.iter_torch_batches(**size, **ahead), self.handle.close
        rank = {"auto": "auto", "given": setting.rank, "none": None}[setting.place]
        world = setting.processes if setting.place == "given" else None
        loader = self.handle.loader(
            rank=rank,
            world_size=world,
            runtime="ray" if "helpers" in setting.ray else "threads",
            max_window_bytes=setting.max_window_bytes,
            num_decoders=1,
        )
        return loader.batches(**size, **ahead), loader.close

    # ---- what is dropped and collected

    def drop(self) -> None:
        """Drops passes in a cycle, and has them collected in the place that is asked for."""
        setting, self.handle = self.setting, self._open()
        gc.collect()
        gc.freeze()  # what was made so far: the collector is called often
        gc.disable()
        for _ in range(1 if "helpers" in setting.ray or setting.workers else 3):
            garbage: list[Any] = [self.handle, *self.make()]
            garbage.append(iter(garbage[1]))
            for _ in range(max(1, setting.workers)):  # torch's worker does not see a death before its first batch
                next(garbage[-1])
            garbage.append(garbage)
            del garbage
            self.handle = self._open()
        begun, done = time.monotonic(), threading.Event()
        collect_in(setting.collects, done)
        if not done.wait(60):
            self.log("hangs", where=setting.collects)
        if setting.collects != "the exit":
            gc.enable()
            self.log("collected", took_s=time.monotonic() - begun, threads=threads_after(20))

    # ---- the pass

    def attempt(self, part: Callable[[], None]) -> bool:
        """Does a part of the script, and writes down if it is refused; returns whether it was done."""
        try:
            part()
            return True
        except raylance.RaylanceError as error:
            self.log("refused", error=f"{type(error).__name__}: {error}")
            if self.setting.ends == "raises":
                raise
            return False

    def run(self) -> None:
        """Iterates over the epochs, and ends as the setting says."""
        setting = self.setting
        batches, close = self.make()
        for number in range(setting.epochs):
            is_last = number == setting.epochs - 1
            acts = is_last and setting.ends != "after its epochs"
            try:
                is_broken = self.go_through(batches, number, acts)
            except Ended:
                raise
            except KeptError as error:
                error.itself, error.batches = error, batches  # type: ignore[attr-defined]
                break
            if is_broken and setting.ends == "breaks and continues":
                is_broken = self.go_through(batches, number, False)
            if not is_broken:
                self.log("passed", number=number)
        if setting.is_closed:
            close()

    def go_through(self, batches: Any, number: int, acts: bool) -> bool:
        """One pass; returns whether it was broken off."""
        iterator = iter(batches)
        if self.setting.is_kept:
            KEPT.append(iterator)
        for step, batch in enumerate(iterator):
            given = dict(batch)
            ids, offsets = (np.asarray(given[name]).tolist() for name in ("id", "_rowoffset"))
            wrong = int((np.asarray(given["twice"]) != 2 * np.array(ids)).sum()) if "twice" in given else 0
            self.log("step", number=number, ids=ids, offsets=offsets, wrong=wrong)
            if acts and step == self.setting.at_step:
                self.log("ends")
                return self.end()
        return False

    def end(self) -> bool:
        """Ends the pass, or the script; returns that the pass is broken off."""
        match self.setting.ends:
            case "keeps an error in a cycle":
                raise KeptError("in mid-pass")
            case "raises":
                raise Ended("in mid-pass")
            case "exits":
                sys.exit(3)
            case "is interrupted":
                os.kill(os.getpid(), signal.SIGINT)
            case "is interrupted with its group":
                os.killpg(0, signal.SIGINT)
            case "is terminated" | "handles SIGTERM":
                os.kill(os.getpid(), signal.SIGTERM)
            case "its thread exits":
                raise SystemExit
            case "a thread ends the process":
                thread = threading.Thread(target=os._exit, args=(4,))
                thread.start()
                thread.join()
        return True


def nap() -> None:
    time.sleep(0.2)


def collect_in(where: str, done: threading.Event) -> None:
    """Runs the garbage collector somewhere; `done` is set when it has run."""

    def collect(*_: Any) -> None:
        gc.collect()
        done.set()

    match where:
        case "the main thread":
            collect()
        case "another thread":
            threading.Thread(target=collect).start()
        case "Ray's callback":
            import ray

            ray.remote(num_cpus=0)(nap).remote().future().add_done_callback(collect)
        case "the exit":
            atexit.register(gc.collect)
            done.set()
        case "a signal handler":
            signal.signal(signal.SIGALRM, collect)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            while not done.wait(0.1):
                sum(range(1000))
        case "anywhere":
            gc.set_threshold(1, 1, 1)
            gc.enable()
            done.set()


def threads_after(limit_s: float) -> list[str]:
    """Names of threads that work for loaders and are still there after a while: none should be."""
    deadline = time.monotonic() + limit_s
    while True:
        left = [each.name for each in threading.enumerate() if each.name.startswith(WORKING)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


@contextlib.contextmanager
def joined(setting: types.SimpleNamespace) -> Iterator[None]:
    """Joins Ray and the group of torch.distributed, as the setting asks."""
    if setting.ray:
        import ray

        quiet = {"log_to_driver": False, "logging_level": "error"}
        if setting.ray == "own helpers":
            ray.init(address="local", num_cpus=8, include_dashboard=False, **quiet)
        else:
            ray.init(address=setting.address, **quiet)
    if not setting.group:
        yield
        return
    import torch.distributed

    torch.distributed.init_process_group(
        "gloo", init_method=setting.group, rank=setting.rank, world_size=setting.processes
    )
    try:
        yield
    finally:  # else torch itself aborts at times as the process ends
        torch.distributed.destroy_process_group()


def main() -> None:
    setting = types.SimpleNamespace(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    faulthandler.dump_traceback_later(setting.dumps_after_s)
    with joined(setting):
        if setting.ends == "handles SIGTERM":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        script = Script(setting)
        if setting.collects and not script.attempt(script.drop):
            return
        if setting.ends == "its thread exits":
            thread = threading.Thread(target=script.attempt, args=(script.run,))
            thread.start()
            thread.join()
        else:
            script.attempt(script.run)


if __name__ == "__main__":
    main()
