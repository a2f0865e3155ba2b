"""The shares of time of a run's ranks, by use, over time."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from raylance.observe.figures import PARTS, RunFigures
from raylance.observe.stats import COST_COUNTERS
from raylance.observe.wait_clock import WAITS
from raylance.reports.reading import FloatArray, LoaderRecord, Run

_FIELDS = {"saving": "save_s", **WAITS}
_SMOOTH_S = 3.0
_GAP_S = 20.0  # a longer time without any record: the run did not run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A run divided into bins of time. Times of 20 s or more without any record are left out. Time that is none of
    `PARTS` has no name: for example building a model, or a collective operation after the last batch.
    """

    edges: FloatArray  # edges of the bins, in seconds since the run began, (bins + 1,)
    times: FloatArray  # the same edges in seconds since 1970
    cuts: Sequence[float]  # where times were left out, in seconds since the run began
    shares: dict[int, dict[str, FloatArray]]  # by rank, then by `PARTS`: the share of each bin, (bins,), in [0, 1]
    # By cost, "" or a dot and its name: the share of padding, and by how much the costliest rank costs more than the
    # mean; (bins,) each, NaN if not known
    costs: dict[str, tuple[FloatArray, FloatArray]]
    rate: FloatArray  # rows a second over all ranks, (bins,), a mean over `smoothed_s` around each bin
    smoothed_s: float  # batches come in bursts and are counted once a second

    def run_s(self, when: float) -> float:
        """Converts seconds since 1970 into seconds since the run began."""
        return float(np.interp(when, self.times, self.edges))


def timeline(run: Run, bins: int = 160) -> Timeline:
    """Divides a run into bins of time; returns the use of each bin by rank."""
    spans = _spans(run.records)
    known = np.array([point for span in spans for point in span])  # seconds since 1970
    lengths = np.array([[0.0, end - begin] for begin, end in spans])
    lengths[:, 0] = 1e-6  # the lengths of the gaps; not 0, because np.interp needs increasing values
    walked = np.cumsum(lengths.ravel()) - lengths[0, 0]
    edges = np.linspace(0.0, walked[-1], bins + 1)
    times = np.interp(edges, walked, known)
    width = max(1e-9, edges[1])
    main = run.of(run.main)
    shares: dict[int, dict[str, FloatArray]] = {}
    of_rank: dict[int, list[LoaderRecord]] = {}
    for record in run.records:
        of_rank.setdefault(record.rank, []).append(record)
    for rank in sorted({record.rank for record in main}):
        ours = [record for record in of_rank[rank] if record.dataset == run.main]
        others = [record for record in of_rank[rank] if record.dataset != run.main]
        spent = {part: _grown(ours, name, times) for part, name in _FIELDS.items()}
        spent["training"] = _grown(ours, "user_s", times) - _grown(ours, "other_s", times) - spent["saving"]
        # Saving during another dataset's step is counted for both datasets. A dataset iterated side by side adds only
        # its waits, because its steps are those of the main dataset.
        within = [record for record in others if record.dataset not in run.trained_on]
        spent["other datasets"] = _grown(within, "user_s", times) - _grown(within, "save_s", times)
        spent["other datasets"] = np.maximum(0.0, spent["other datasets"]) + _grown(others, "wait_s", times)
        spent["training"] = np.maximum(0.0, spent["training"])
        total = np.maximum(1.0, sum(spent.values(), np.zeros(bins)) / width)  # late samples make sums exceed a bin
        shares[rank] = {part: np.clip(spent[part] / width / total, 0.0, 1.0) for part in PARTS}
    rows = sum((_grown([record], "rows", times) / record.peers for record in main), np.zeros(bins))
    around = max(5, math.ceil(_SMOOTH_S / width) | 1)
    costs = {}
    for cost in RunFigures(run.ranks(run.main)).costs:
        own, padded, most = (_smooth(_grown(main, f"{name}{cost}", times), around) for name in COST_COUNTERS)
        with np.errstate(invalid="ignore", divide="ignore"):
            costs[cost] = 1 - own / padded, most / padded - 1
    return Timeline(
        edges=edges,
        times=times,
        cuts=[float(walked[2 * number]) for number in range(1, len(spans))],
        shares=shares,
        costs=costs,
        rate=_smooth(rows / width, around),
        smoothed_s=around * width,
    )


def _smooth(values: FloatArray, around: int) -> FloatArray:
    """Returns the means of `around` values around each value; of fewer at the ends."""
    kernel = np.ones(min(around, len(values)))
    return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def _grown(records: Sequence[LoaderRecord], name: str, times: FloatArray) -> FloatArray:
    """Returns the growth of a counter in each bin, summed over some records."""
    values = sum((record.at(name, times) for record in records), np.zeros(len(times)))
    return np.maximum(0.0, np.diff(values))


def _spans(records: Sequence[LoaderRecord]) -> list[tuple[float, float]]:
    """Returns the periods in which the run ran, in seconds since 1970."""
    spans: list[tuple[float, float]] = []
    for begin, end in sorted((record.started, max(record.last, record.started + 1e-3)) for record in records):
        if spans and begin - spans[-1][1] < _GAP_S:
            spans[-1] = (spans[-1][0], max(spans[-1][1], end))
        else:
            spans.append((begin, end))
    return spans
