"""The first batch of a run, in a process of its own with a Ray that runs already."""

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from .figures import Figure
from .measuring import one_thread_each, own_batch_s, rest
from .setting import Job, Setting, start_ray

_LEAST_MODEL_S = 5.0  # that a model takes to be built
_LONGER = 1.5  # than the first batch takes when nothing hides it


def measure(setting: Setting) -> dict[str, Any]:
    """Runs begin, one after another, each in a fresh process: at once, and with a model that is built meanwhile."""
    import ray

    found: dict[str, Any] = {}
    for kind in ("images", "vectors"):
        job = setting.job(kind)
        start_ray(job)
        address = ray.get_runtime_context().gcs_address
        runs: dict[str, list[dict[str, float]]] = {"at_once": [], "prepared": []}
        for _ in range(setting.rounds):
            runs["at_once"].append(_in_fresh_process(job, address, 0.0))
            model_s = max(_LEAST_MODEL_S, _LONGER * runs["at_once"][-1]["first_batch_s"])
            runs["prepared"].append(_in_fresh_process(job, address, model_s))
        found[kind] = runs
    return found


def _in_fresh_process(job: Job, address: str, model_s: float) -> dict[str, float]:
    rest()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(begin_run, job, address, model_s).result()


def begin_run(job: Job, address: str, model_s: float) -> dict[str, float]:
    """Runs to the end of an epoch; without a model to build, it is iterated at once. All is in seconds."""
    import ray

    one_thread_each()
    ray.init(address=address, log_to_driver=False, logging_level="error")
    begin = time.perf_counter()
    dataset = job.open()
    opening_s = time.perf_counter() - begin
    begin = time.perf_counter()
    with dataset.loader(num_decoders=job.decoders) as loader:
        if model_s:
            batches = loader.prepare(global_batch_size=job.batch_size)
            prepare_s = time.perf_counter() - begin
            time.sleep(model_s)
            begin = time.perf_counter()
        else:
            batches, prepare_s = loader.batches(global_batch_size=job.batch_size), 0.0
        taken = iter(batches)
        next(taken)
        first_batch_s = time.perf_counter() - begin
        batch_s = own_batch_s(taken)
    ray.shutdown()
    return {
        "opening_s": opening_s,
        "prepare_s": prepare_s,
        "first_batch_s": first_batch_s,
        "batch_s": batch_s,
        "model_s": model_s,
    }


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """The first batch when nothing hides it, and what is left of the wait after the model was built."""
    for kind, runs in found.items():
        at_once = [run["first_batch_s"] for run in runs["at_once"]]
        yield Figure(f"first batch of a run, {kind}, at once", at_once, "s")
        left = [run["first_batch_s"] / run["batch_s"] for run in runs["prepared"]]
        yield Figure(f"…after prepare() and a model / one batch's time, {kind}", left, at_most=1.0)
