"""The figures by which a run is judged, for each rank and for all ranks, and their rates."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from raylance.observe.wait_clock import WAITS

Limit = Literal["unknown", "training", "starting", "saving", "reading", "decoding", "finishing", "other datasets"]
STAGES: tuple[Limit, ...] = ("reading", "decoding", "finishing")
"""The stages of a batch before it is handed out. A trainer waits for one of them, or for the start."""

PARTS: tuple[Limit, ...] = ("training", "saving", "starting", "reading", "decoding", "finishing", "other datasets")
"""The parts of a trainer's time: training; `raylance.report`; waiting, by cause; other datasets, such as validation.
All shares that are shown are shares of the sum of these parts, over all ranks.
"""

MOSTLY = 0.5  # share of the period: a rank that was there for less does not represent the run
IN_STEP = 0.9  # a rank whose steps take at least this share of the slowest rank's counts as equally slow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """The figures of one rank in the period that is judged."""

    figures: Mapping[str, float]  # gauges, and the growth of counters, by the names of `Stats.sample`
    facts: Mapping[str, Any]  # facts in its record: rank, world_size, row_bytes, order, options, …
    presence: float = 1.0  # share of the period in which it was there, in [0, 1]
    starts: int = 1  # how often it was started in this period
    # Number of ranks that got the same rows, by which each one's rows are divided in the run's figures. If it changed
    # between starts, the mean that gives the same rows.
    peers: float = 1.0

    @property
    def share(self) -> float:
        """The weight of this rank's rates in the rates of the run: its presence, divided among its peers."""
        return self.presence / self.peers

    @property
    def trained_s(self) -> float:
        """Seconds of training, without saving and without passes over other datasets between two batches."""
        return max(0.0, self.figures["user_s"] - self.figures["save_s"] - self.figures["other_s"])

    @property
    def waited_s(self) -> float:
        """Seconds of waiting, except for the start."""
        return sum(self.figures[name] for limit, name in WAITS.items() if limit != "starting")

    @property
    def steady_s(self) -> float:
        """Seconds of training and waiting, except for the start. Rates refer to these seconds, and no share does."""
        return self.trained_s + self.waited_s

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by `PARTS`."""
        names: dict[str, str] = {"saving": "save_s", **WAITS, "other datasets": "other_s"}
        return {part: self.figures[names[part]] if part in names else self.trained_s for part in PARTS}

    @property
    def total_s(self) -> float:
        """Seconds of all parts together: what shares of the rank's time are shares of."""
        return sum(self.seconds.values())

    @property
    def rate(self) -> float:
        """Rows a second that the rank got in `steady_s`; 0 if no time is left. It is shown as the rank's rows/s."""
        return self.figures["rows"] / self.steady_s if self.steady_s else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of training and waiting per batch."""
        return self.steady_s / max(1.0, self.figures["batches"])

    @property
    def trained_step_s(self) -> float:
        """Seconds of training per batch; includes waiting for other ranks."""
        return self.trained_s / max(1.0, self.figures["batches"])

    @property
    def decode_rate(self) -> float:
        """Rows a second that decoding can sustain: the rate of the rank's decoders while they have work or, if lower,
        of the device that decodes its batches. At least `rate`, because rows that were decoded during a start or a save
        count, too. Infinite if nothing was decoded.
        """
        figures = self.figures
        helpers, on_device_s = figures["decoders"] or max(1.0, figures["readers"]), figures["device_decode_s"]
        rates = [
            count * rows / seconds
            for count, rows, seconds in (
                (helpers, figures["decoded_rows"], figures["decode_s"] - on_device_s),
                (1.0, figures["rows"], on_device_s),
            )
            if seconds > 0
        ]
        return max(self.rate, min(rates)) if rates else math.inf

    @property
    def read_rate(self) -> float:
        """Rows a second if the rank's shard actors read all the time; at least `rate`, like `decode_rate`."""
        rows, seconds = self.figures["read_bytes"] / max(1.0, self.facts["row_bytes"]), self.figures["storage_s"]
        return max(self.rate, max(1.0, self.figures["readers"]) * rows / seconds) if seconds else math.inf


def delivered_rate(ranks: Sequence[RankFigures]) -> float:
    """Returns the rows a second over all ranks. All take the same number of steps, so the slowest rank decides."""
    return _over_all(ranks, max((rank.step_s for rank in _counted(ranks)), default=0.0), 0.0)


def training_rate(ranks: Sequence[RankFigures]) -> float:
    """Returns the rows a second over all ranks if no trainer ever waited for its loader.

    While one rank waits for its loader, the others wait for it in collective operations, which counts as training. So
    of the ranks whose whole steps are as long as the slowest rank's, the one that trains shortest shows a step's time.
    """
    counted = _counted(ranks)
    slowest_s = max((rank.step_s for rank in counted), default=0.0)
    kept_step = [rank.trained_step_s for rank in counted if rank.step_s >= IN_STEP * slowest_s]
    return _over_all(ranks, min(kept_step, default=0.0), math.inf if counted else 0.0)


def _counted(ranks: Sequence[RankFigures]) -> list[RankFigures]:
    """Returns the ranks that got batches and were there most of the time; if there are none, all that got batches."""
    there = [rank for rank in ranks if rank.presence and rank.figures["batches"]]
    return [rank for rank in there if rank.presence >= MOSTLY] or there


def _over_all(ranks: Sequence[RankFigures], step_s: float, at_once: float) -> float:
    """Returns the rows a second over all ranks if each step takes `step_s`; if `step_s` is 0, returns `at_once`."""
    rows = sum(rank.share * rank.figures["rows"] / max(1.0, rank.figures["batches"]) for rank in ranks)
    return rows / step_s if step_s else at_once


def percents_of(seconds: Mapping[str, float]) -> dict[str, int]:
    """Returns the share of each part in whole percents that add up to 100; 0 for all if there are no seconds.

    Every percent of a run's time that is shown comes from here, so that text and picture agree.
    """
    total_s = sum(seconds.values())
    if not total_s:
        return dict.fromkeys(seconds, 0)
    exact = {part: 100 * (spent_s / total_s) for part, spent_s in seconds.items()}
    whole = {part: int(percent) for part, percent in exact.items()}
    for part in sorted(exact, key=lambda part: whole[part] - exact[part])[: 100 - sum(whole.values())]:
        whole[part] += 1
    return whole


class RunFigures:
    """The figures of all ranks together. For `rates`, `waiting` and `seconds`, see `Verdict`."""

    def __init__(self, ranks: Sequence[RankFigures], others_s: float = 0.0) -> None:
        """`others_s` is what the ranks spent with other datasets, if more is known than their steps show."""
        self.ranks = ranks
        self.seconds: dict[str, float] = {part: sum(rank.seconds[part] for rank in ranks) for part in PARTS}
        self.seconds["other datasets"] = max(self.seconds["other datasets"], others_s)
        self.total_s = sum(self.seconds.values())
        self.waited_s = sum(rank.waited_s for rank in ranks)
        self.steady_s = self.seconds["training"] + self.waited_s  # training and waiting, the start excluded
        self.waiting = self.waited_s / max(1e-9, self.total_s)
        there = [rank for rank in ranks if rank.presence]
        self.rates = {
            "delivered": delivered_rate(there),
            "training": training_rate(there),
            "reading": sum(rank.share * rank.read_rate for rank in there),
            "decoding": sum(rank.share * rank.decode_rate for rank in there),
        }
        for stage in ("reading", "decoding"):  # a rank that was there only for a while may have been slower
            self.rates[stage] = max(self.rates[stage], self.rates["delivered"])

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts of the first rank, for facts that are the same on all ranks."""
        return self.ranks[0].facts

    @property
    def world_size(self) -> int:
        """Number of ranks of the run; `ranks` may hold only one of them."""
        return max(len(self.ranks), int(self.facts.get("world_size", 1)))

    @property
    def torch_workers(self) -> int | None:
        """Number of workers of each rank if torch's DataLoader makes the batches, else None. What these wait for is not
        recorded: all waiting after the first batch counts as finishing.
        """
        found = self.facts.get("num_workers")
        return None if found is None else int(found)

    @property
    def has_ray(self) -> bool:
        """Whether helpers are Ray actors; otherwise they are threads."""
        return self.facts.get("cluster_cpus") is not None

    @property
    def cpus(self) -> float:
        """CPUs of the cluster, else those of the first rank's node; infinite if unknown."""
        return float(self.facts.get("cluster_cpus") or self.facts.get("cpus") or math.inf)

    @property
    def trainer_cpus(self) -> float:
        """CPUs that all trainers hold together."""
        return self.world_size * float(self.facts.get("worker_cpus") or 0.0)

    @property
    def decoder_cpus(self) -> float:
        """CPUs that one decoder holds."""
        return float(self.facts["options"]["decoder_cpus"]) if self.has_ray else 1.0

    @property
    def is_remote(self) -> bool:
        """Whether the URI of a source looks like one of an object store."""
        return any("://" in name and "file://" not in name for name in self.facts.get("sources", ()))

    @property
    def costs(self) -> list[str]:
        """What follows "cost" in the names of the counters of each cost: "", or a dot and its name."""
        names = dict.fromkeys(name for rank in self.ranks for name in rank.figures if name.startswith("cost."))
        return [name.removeprefix("cost") for name in names] or [""]

    def padding(self, cost: str = "") -> float:
        """Returns the share of padding in what the rows handed out cost if each batch is padded, in [0, 1]; 0 without
        costs. `cost` is one of `costs`.
        """
        padded = self.sum(f"padded_cost{cost}")
        return 1 - self.sum(f"cost{cost}") / padded if padded else 0.0

    def imbalance(self, cost: str = "") -> float:
        """Returns by how much the costliest rank of each step costs more than the mean of the ranks, in [0, …); 0 if
        not all ranks are known, or without costs. `cost` is one of `costs`.
        """
        padded = self.sum(f"padded_cost{cost}")
        is_whole = (
            len(self.ranks) == self.world_size and min((rank.presence for rank in self.ranks), default=0) >= MOSTLY
        )
        return max(0.0, self.sum(f"dearest_cost{cost}") / padded - 1) if padded and is_whole else 0.0

    def share(self, part: str) -> float:
        """Returns the share of the time of all ranks that a part took, in [0, 1]."""
        return self.seconds[part] / max(1e-9, self.total_s)

    def shares_in_words(self) -> str:
        """Returns the parts of the time of all ranks in percent, the largest first."""
        percents = percents_of(self.seconds)
        shown = sorted((part for part in PARTS if percents[part]), key=lambda part: -self.seconds[part])
        return ", ".join(f"{percents[part]}% {'waiting for ' * (part in STAGES)}{part}" for part in shown)

    def most(self, name: str) -> float:
        """Returns the largest value of a figure over all ranks."""
        return max(rank.figures[name] for rank in self.ranks)

    def sum(self, name: str) -> float:
        """Returns a figure, summed over all ranks."""
        return sum(rank.figures.get(name, 0.0) for rank in self.ranks)
