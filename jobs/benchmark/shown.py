"""Owns the comparison of what a run shows of itself with a stopwatch, by the real clock; never of how fast it is.

Runs of two ranks under Ray Train are limited by one thing each, by sleeps: a model, a decoder, a state that takes a
while to be collected, decoders that start, and nothing but reading. Each rank clocks what it does; what `explain_run`
and `loader.stats()` say of the same seconds may differ by 5 % or 20 ms, whichever is more.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import raylance

from .figures import Figure
from .readers import start_ray
from .setting import Setting, open_dataset
from .sizes import Sleeping

_RANKS, _STEPS = 2, 40
_SHARE, _LEAST_S = 0.05, 0.02  # that may differ: of what the clock says, and at the least


@dataclasses.dataclass(frozen=True, slots=True)
class SlowStart(Sleeping):
    """A decoder that takes a while to be opened."""

    open_s: float = 0.0

    def open(self) -> SlowStart:
        """Sleeps."""
        time.sleep(self.open_s)
        return self


class SlowState(Mapping[str, int]):
    """A state that takes a while to be collected, as that of a large model does."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __getitem__(self, name: str) -> int:
        time.sleep(self._seconds)
        return 0

    def __iter__(self) -> Iterator[str]:
        return iter(["step"])

    def __len__(self) -> int:
        return 1


# By what limits the run: seconds of a step, of decoding a row, of opening a decoder, and of collecting the state.
CASES: dict[str, dict[str, float]] = {
    "training": {"step_s": 0.2, "row_s": 0.0001},
    "decoding": {"step_s": 0.01, "row_s": 0.004},
    "saving": {"step_s": 0.02, "row_s": 0.0001, "state_s": 0.5},
    "starting": {"step_s": 0.05, "row_s": 0.0001, "open_s": 5.0},
    "reading": {"step_s": 0.0},
}


def measure(setting: Setting) -> dict[str, list[dict[str, float]]]:
    """Runs of each case.

    Returns:
        By case, a run a round: how far what is shown is from the clock, for each figure, as a share of what may differ.
    """
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
        train = open_dataset(job)
    else:
        job = setting.job("images", _RANKS * _STEPS * 8)
        decoder = SlowStart("image", case["row_s"], case.get("open_s", 0.0))
        train = open_dataset(job, decode=decoder)
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
    batches, step, got = iter(loader.iter_batches(global_batch_size=config["batch"])), 0, 0.0
    while True:
        asked = time.perf_counter()
        clocked["training"] += asked - got if step else 0.0  # all that is not waiting, nor saving
        batch = next(batches, None)
        got = time.perf_counter()
        clocked["waiting" if step else "starting"] += got - asked
        if batch is None:
            break
        step += 1
        time.sleep(config["step_s"])
        if "state_s" in config and step % 8 == 0:
            begin = time.perf_counter()
            is_first = ray.train.get_context().get_world_rank() == 0
            raylance.report({"step": step}, loader, SlowState(config["state_s"] if is_first else 0.0))
            saved_s = time.perf_counter() - begin
            clocked["saving"] += saved_s
            got += saved_s
    loader.close()
    Path(config["folder"], f"{loader.rank}.json").write_text(json.dumps({"clock": clocked, "stats": loader.stats()}))


def _compare(found: dict[str, Any], limit: str) -> dict[str, float]:
    """How far each figure is from the clock, as a share of what may differ; a wrong limit is infinitely far."""
    clocks, stats = [rank["clock"] for rank in found["ranks"]], [rank["stats"] for rank in found["ranks"]]
    verdict = found["verdict"]
    lates_s = [one["wait_start_s"] - one["first_batch_s"] for one in stats]  # helpers that start after the first batch
    pairs: dict[str, list[tuple[float, float]]] = {
        "wait_s": [(s["wait_s"], c["waiting"] + c["starting"]) for s, c in zip(stats, clocks, strict=True)],
        "first_batch_s": [(s["first_batch_s"], c["starting"]) for s, c in zip(stats, clocks, strict=True)],
        "user_s": [(s["user_s"], c["training"] + c["saving"]) for s, c in zip(stats, clocks, strict=True)],
        "save_s": [(s["save_s"], c["saving"]) for s, c in zip(stats, clocks, strict=True)],
        "the verdict's seconds": [
            (verdict.seconds[name], sum(clock[name] for clock in clocks)) for name in ("training", "saving")
        ],
        "the verdict's waiting": [
            (
                sum(verdict.seconds[name] for name in ("starting", "reading", "decoding", "finishing")),
                sum(clock["starting"] + clock["waiting"] for clock in clocks),
            )
        ],
        "the verdict's rate": [
            (
                found["rows"] / verdict.rates["delivered"],
                max(c["training"] + c["waiting"] - late_s for c, late_s in zip(clocks, lates_s, strict=True)),
            )
        ],
    }
    far = {name: max(_far(shown, clocked) for shown, clocked in each) for name, each in pairs.items()}
    spent = {name: sum(clock[name] for clock in clocks) for name in clocks[0]}
    limits = {limit, "finishing"} if limit == "reading" else {limit}
    if spent["starting"] > 0.5 * (spent["training"] + spent["waiting"]):  # on a machine that has much to do
        limits.add("starting")
    is_right = verdict.limit in limits and "trains slowest" not in verdict.summary  # both do the same
    if not is_right:
        print(f"limited by {limit}, described as: {verdict.summary}")
    return far | {"the verdict": 0.0 if is_right else float("inf")}


def _far(shown_s: float, clocked_s: float) -> float:
    return abs(shown_s - clocked_s) / max(_LEAST_S, _SHARE * clocked_s)


def figures(found: dict[str, Any]) -> list[Figure]:
    """The figure of each case that is farthest from the clock, and which it is."""
    made = []
    for limit, runs in found.items():
        print(limit, *(f"{name} {max(run[name] for run in runs):.2f}" for name in runs[0]), sep="; ")
        farthest = max(runs[0], key=lambda name: max(run[name] for run in runs))
        values = tuple(max(run.values()) for run in runs)
        name = f"limited by {limit}: shown and clocked differ / 5 % or 20 ms ({farthest})"
        made.append(Figure(name=name, values=values, at_most=1.0))
    return made
