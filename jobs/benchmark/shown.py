"""Owns the comparison of what a run shows of itself with a stopwatch, by the real clock; never of how fast it is.

Runs of two ranks under Ray Train are limited by one thing each, by sleeps: a model, a decoder, a state that takes a
while to be collected, decoders that start, and nothing but reading. Each rank clocks what it does; what `explain_run`
and `loader.stats()` say of the same seconds may differ by 5 % or 20 ms, whichever is more.
"""

import collections
import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pandas as pd

import raylance

from .figures import Figure
from .measuring import waits
from .setting import Setting, start_ray
from .sizes import Sleeping

_RANKS, _STEPS = 2, 40
_SHARE, _LEAST_S = 0.05, 0.02  # that may differ: of what the clock says, and at the least


@dataclasses.dataclass(frozen=True, slots=True)
class SlowStart(Sleeping):
    """A decoder that takes a while to be opened."""

    open_s: float = 0.0

    def open(self) -> Self:
        """Sleeps."""
        time.sleep(self.open_s)
        return self


class SlowState(collections.UserDict[str, int]):
    """A state that takes a while to be collected, as that of a large model does."""

    def __init__(self, seconds: float) -> None:
        super().__init__(step=0)
        self._seconds = seconds

    def __getitem__(self, name: str) -> int:
        time.sleep(self._seconds)
        return super().__getitem__(name)


# By what limits the run: seconds of a step, of decoding a row, of opening a decoder, and of collecting the state.
CASES: dict[str, dict[str, float]] = {
    "training": {"step_s": 0.2, "row_s": 0.0001},
    "decoding": {"step_s": 0.01, "row_s": 0.004},
    "saving": {"step_s": 0.02, "row_s": 0.0001, "state_s": 0.5},
    "starting": {"step_s": 0.05, "row_s": 0.0001, "open_s": 5.0},
    "reading": {"step_s": 0.0},
}


def measure(setting: Setting) -> dict[str, list[dict[str, float]]]:
    """By case, a run a round: how far each figure that is shown is from the clock, as a share of what may differ."""
    start_ray(setting.job("images", _RANKS * _STEPS * 8))
    return {
        limit: [_compare(_run(setting, limit, case), limit) for _ in range(setting.rounds)]
        for limit, case in CASES.items()
    }


def _run(setting: Setting, limit: str, case: Mapping[str, float]) -> dict[str, Any]:
    """One run: what each rank clocked and counted, and the verdict of all."""
    import ray.train
    from ray.train.torch import TorchTrainer

    if limit == "reading":
        job = setting.job("vectors", _RANKS * _STEPS * 512)
        train = job.open()
    else:
        job = setting.job("images", _RANKS * _STEPS * 8)
        decoder = SlowStart("image", case["row_s"], case.get("open_s", 0.0))
        train = job.open(decode=decoder)
    with tempfile.TemporaryDirectory(prefix="raylance-benchmark-") as folder:
        TorchTrainer(
            train_fn,
            train_loop_config={**case, "folder": folder, "batch": job.rows // _STEPS},
            scaling_config=ray.train.ScalingConfig(num_workers=_RANKS),
            run_config=ray.train.RunConfig(name=limit, storage_path=folder),
            datasets={"train": train},
            dataset_config=raylance.DataConfig(num_decoders=0 if limit == "reading" else 1),
        ).fit()
        verdict = raylance.explain_run(Path(folder, limit))
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(_RANKS)]
    return {"ranks": ranks, "verdict": verdict, "rows": job.rows}


def train_fn(config: dict[str, Any]) -> None:
    """One rank: an epoch, clocked."""
    import ray.train

    loader = ray.train.get_dataset_shard("train")
    clocked = {"waiting": 0.0, "starting": 0.0, "training": 0.0, "saving": 0.0}
    batches, begin = loader.iter_batches(global_batch_size=config["batch"]), time.perf_counter()
    for step, (batch, wait_s, _) in enumerate(waits(batches), 1):
        clocked["starting" if step == 1 else "waiting"] += wait_s
        if batch is None:
            break
        time.sleep(config["step_s"])
        if "state_s" in config and step % 8 == 0:
            begin_save = time.perf_counter()
            is_first = ray.train.get_context().get_world_rank() == 0
            raylance.report({"step": step}, loader, SlowState(config["state_s"] if is_first else 0.0))
            clocked["saving"] += time.perf_counter() - begin_save
    clocked["training"] = time.perf_counter() - begin - sum(clocked.values())  # all that is not waiting, nor saving
    loader.close()
    Path(config["folder"], f"{loader.rank}.json").write_text(json.dumps({"clock": clocked, "stats": loader.stats()}))


def _compare(found: dict[str, Any], limit: str) -> dict[str, float]:
    """How far each figure is from the clock, as a share of what may differ; a wrong limit is infinitely far."""
    clocks, stats = [rank["clock"] for rank in found["ranks"]], [rank["stats"] for rank in found["ranks"]]
    verdict = found["verdict"]
    spent = {name: sum(clock[name] for clock in clocks) for name in clocks[0]}
    far = {
        figure: max(_far(s[figure], sum(c[name] for name in names)) for s, c in zip(stats, clocks, strict=True))
        for figure, names in {
            "wait_s": ("waiting", "starting"),
            "first_batch_s": ("starting",),
            "user_s": ("training", "saving"),
            "save_s": ("saving",),
        }.items()
    }
    far["the verdict's seconds"] = max(_far(verdict.seconds[name], spent[name]) for name in ("training", "saving"))
    waiting_s = sum(verdict.seconds[name] for name in ("starting", "reading", "decoding", "finishing"))
    far["the verdict's waiting"] = _far(waiting_s, spent["starting"] + spent["waiting"])
    lates_s = [one["wait_start_s"] - one["first_batch_s"] for one in stats]  # helpers that start after the first batch
    slowest_s = max(c["training"] + c["waiting"] - late_s for c, late_s in zip(clocks, lates_s, strict=True))
    far["the verdict's rate"] = _far(found["rows"] / verdict.rates["delivered"], slowest_s)
    limits = {limit, "finishing"} if limit == "reading" else {limit}
    if spent["starting"] > 0.5 * (spent["training"] + spent["waiting"]):  # on a machine that has much to do
        limits.add("starting")
    is_right = verdict.limit in limits and "trains slowest" not in verdict.summary  # both do the same
    if not is_right:
        print(f"limited by {limit}, described as: {verdict.summary}")
    return far | {"the verdict": 0.0 if is_right else float("inf")}


def _far(shown_s: float, clocked_s: float) -> float:
    return abs(shown_s - clocked_s) / max(_LEAST_S, _SHARE * clocked_s)


def figures(found: dict[str, Any]) -> Iterator[Figure]:
    """The figure of each case that is farthest from the clock, and which it is."""
    for limit, runs in found.items():
        table = pd.DataFrame(runs)
        print(limit, *(f"{name} {far:.2f}" for name, far in table.max().items()), sep="; ")
        name = f"limited by {limit}: shown and clocked differ / 5 % or 20 ms ({table.max().idxmax()})"
        yield Figure(name, table.max(axis=1).tolist(), at_most=1.0)
