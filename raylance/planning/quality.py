"""Measures how well an order shuffles, from a plan alone, beside the ideal: `RowShuffle` over the same rows and batch.

A formula gives the ideal if there is one; otherwise it is measured in the same way. No measure depends on the shards of
an order, so any two orders over the same rows can be compared.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from raylance.errors import ConfigError
from raylance.orders.order import Facts, Resolved
from raylance.orders.permutation import Int64Array, derive_key, permute, subkeys, uniform
from raylance.orders.shuffles import RowShuffle, WindowShuffle
from raylance.planning.plan import Plan

Labels = npt.ArrayLike | None
Floats = npt.NDArray[np.float64]
Classes = tuple[str, Callable[[Int64Array], Int64Array], Floats]  # kind; selected rows to classes; share of each class

_BLOCKS = (10, 100)  # pseudo-classes: few large ones, and many small ones
_CLOSE = 1000  # rows are close if they lie within a thousandth of the selection
_PAIRED_ROWS = 1 << 14  # positions compared between two epochs
_COMPARED_STEPS = 128  # most steps that are sampled for each window
_NOTHING = 1e-12  # values up to this are zero, apart from rounding
_TITLES = {
    "distance": "neighbour distance, rows",
    "nearest": "nearest row of the batch, rows",
    "spread": "blocks touched by a batch",
    "close_pairs": "close pairs in a batch, share",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One measure of an order, averaged over the sampled steps, and the same measure of the ideal order.

    Attributes:
        value: The mean for the order; NaN if steps have too few rows.
        ideal: The mean for a row shuffle (`RowShuffle`) of the same rows, with the same global batch size.
    """

    value: float
    ideal: float

    @property
    def ratio(self) -> float:
        """`value` divided by `ideal`: about 1 if the order is as good as a row shuffle. 1 if both are zero; else
        infinite if `ideal` is zero.
        """
        if self.ideal <= _NOTHING:
            return float("inf") if self.value > _NOTHING else 1.0
        return self.value / self.ideal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShuffleQuality:
    """How far an order is from a row shuffle. Each `Measure` has a `ratio`: the order's value divided by the value of a
    row shuffle. A ratio of 1 is the best.

    Attributes:
        plan: The plan that was measured.
        steps: Number of steps that were sampled in each epoch.
        epochs: Number of epochs that were sampled; the first one is epoch 0.
        distance: Mean distance in storage, in rows, between consecutive rows of a global batch. At a ratio near 0 the
            order is storage order; at 1 the next row does not depend on the present one.
        nearest: Mean distance in storage, in rows, from a row to the nearest other row of its global batch. The ratio
            is the index of Clark and Evans ("Distance to nearest neighbor …", Ecology 35, 1954): below 1, the rows of a
            batch lie in clumps.
        spread: Number of blocks from which a global batch has rows, if storage is cut into as many equal blocks as the
            batch has rows. At a ratio of 0.25, a batch has rows from a quarter as many blocks as a random batch.
        close_pairs: Share of a batch's pairs of rows with a distance of at most a thousandth of the selection. At a
            ratio of 3, near-duplicates stored together meet in one batch three times as often as by chance.
        divergences: How much the mix of classes in a global batch differs from the mix in the selection: the mean
            Jensen-Shannon divergence (Lin, 1991), in bits from 0 to 1, by set of classes. With labels, that is one,
            such as "10 labels". Without labels, it is "10 blocks" and "100 blocks": each block of storage counts as a
            class, as in the worst case, a dataset that is sorted by class. Look at the ratio. For small divergences,
            the ratio is the design effect of cluster sampling (Kish, 1965): G rows represent the classes only as well
            as G / ratio random rows. The larger the ratio, the slower SGD converges; Xu et al. ("Stochastic gradient
            descent without full data shuffle", 2022) show this for data that is shuffled by blocks.
        epoch_correlation: Rank correlation between the rows at the same positions of two consecutive epochs; a number,
            not a `Measure`. 0 is the best; 1 means that both have the same order. With few shards, chance alone makes
            it differ from 0 by about 1 / sqrt(shards).
    """

    plan: Plan
    steps: int
    epochs: int
    distance: Measure
    nearest: Measure
    spread: Measure
    close_pairs: Measure
    divergences: dict[str, Measure]
    epoch_correlation: float

    @property
    def class_divergence(self) -> float:
        """One number for the whole shuffle: the largest `ratio` in `divergences`. A ratio is the order's divergence
        divided by the divergence of a row shuffle. About 1 is the best.
        """
        return max(measure.ratio for measure in self.divergences.values())

    def __repr__(self) -> str:
        plan = self.plan
        measures = {title: getattr(self, name) for name, title in _TITLES.items()}
        measures |= {f"class divergence, {kind}, bits": measure for kind, measure in self.divergences.items()}
        rows = [f"{name:38}{of.value:14,.5g}{of.ideal:14,.5g}{of.ratio:9.3g}" for name, of in measures.items()]
        return "\n".join(
            [
                f"order {order_in_words(plan.order)}, {plan.rows:,} rows, global batch {plan.global_batch_size:,}; "
                f"{self.steps:,} of {_steps(plan):,} steps sampled in {self.epochs} epoch{'s' * (self.epochs != 1)}",
                f"{'':38}{'this order':>14}{'row shuffle':>14}{'ratio':>9}",
                *rows,
                f"{'correlation with the next epoch':38}{self.epoch_correlation:14.3f}{0:14}",
            ]
        )


def order_in_words(order: Resolved) -> str:
    """Returns the name and the settings of an order; of a mixture, those that users choose."""
    hidden = ("name", "chunk_positions", "spread")
    settings = {name: each for name, each in order.params().items() if name not in hidden}
    return f"{order.name} ({', '.join(f'{k}={each}' for k, each in settings.items() if not isinstance(each, Mapping))})"


def shuffle_quality(plan: Plan, labels: Labels = None, epochs: int = 1, sample_steps: int = 256) -> ShuffleQuality:
    """Measures how well the order of a plan shuffles, on steps spread over the epoch.

    A sampled step costs O(global_batch_size) for any size of the dataset. Labels cost one pass over them.

    Args:
        plan: The plan. Its ranks and its remainder have no effect.
        labels: The class of each selected row in storage order, sortable, shape (n,). None takes 10 and 100 equal
            blocks of storage as classes. Orders that sample by class diverge on purpose.
        epochs: Epochs to average over, from 0.
        sample_steps: Most steps to sample in each epoch.

    Raises:
        ConfigError: If there is not one label for each selected row, or if `epochs` or `sample_steps` is less than 1.
    """
    if epochs < 1 or sample_steps < 1:
        raise ConfigError(
            f"epochs={epochs}, sample_steps={sample_steps}: there is nothing to measure. Both must be at least 1."
        )
    classings, starts = _classings(labels, plan.rows), _sample_starts(plan, sample_steps)
    value = _observe(plan, epochs, starts, classings)
    # If an epoch is short, more epochs reduce the noise.
    ideal = _ideal(plan, max(epochs, -(-sample_steps // len(starts))), starts, classings)
    measures = [Measure(value=float(a), ideal=float(b)) for a, b in zip(value, ideal, strict=True)]
    return ShuffleQuality(
        plan=plan,
        steps=len(starts),
        epochs=epochs,
        divergences=dict(zip([kind for kind, _, _ in classings], measures[len(_TITLES) :], strict=True)),
        epoch_correlation=float(np.mean([_correlation(plan, epoch) for epoch in range(epochs)])),
        **dict(zip(_TITLES, measures, strict=False)),
    )


def compare_windows(plan: Plan, labels: Labels = None) -> dict[int, dict[int, float]]:
    """Measures the class divergence, as a ratio to a row shuffle, for the plan's windows and lanes and for others.

    Args:
        plan: The plan of a `WindowShuffle`. Other orders have no windows to compare.
        labels: See `shuffle_quality`.

    Returns:
        Ratios by `window_shards`, then by `lanes`; empty for another order than `WindowShuffle`.
    """
    settings, size = plan.order.settings, plan.global_batch_size
    if not isinstance(settings, WindowShuffle):
        return {}
    facts = Facts(rows=plan.rows, seed=plan.order.seed, tables=plan.order.tables)
    lanes = sorted({plan.order.lane_count} | {2**k for k in range(7) if size % 2**k == 0 and 2**k <= plan.rows})
    classings, starts = _classings(labels, plan.rows), _sample_starts(plan, _COMPARED_STEPS)
    ideal = _ideal(plan, -(-_COMPARED_STEPS // len(starts)), starts, classings)

    def ratio(window: int, lane_count: int) -> float:
        order = dataclasses.replace(settings, window_shards=window, lanes=lane_count).resolve(facts)
        value = _observe(dataclasses.replace(plan, order=order), 1, starts, classings)
        divergences = list(zip(value, ideal, strict=True))[len(_TITLES) :]
        return max(Measure(value=float(a), ideal=float(b)).ratio for a, b in divergences)

    windows = sorted({int(settings.window_shards), 1, 4, 16, 64})
    return {window: {lane_count: ratio(window, lane_count) for lane_count in lanes} for window in windows}


def _classings(labels: Labels, n: int) -> list[Classes]:
    if labels is None:
        return [_block_classes(count, n) for count in sorted({min(count, n) for count in _BLOCKS})]
    array: npt.NDArray[Any] = np.asarray(labels)
    if array.shape != (n,):
        raise ConfigError(
            f"labels have the shape {array.shape}; the selection has {n} rows. Nothing was measured. Give one label "
            "for each selected row, in storage order."
        )
    _, codes, counts = np.unique(array, return_inverse=True, return_counts=True)
    return [(f"{len(counts)} labels", lambda rows: codes[rows], counts / n)]


def _block_classes(count: int, n: int) -> Classes:
    sizes = np.diff(-(-np.arange(count + 1) * n // count))
    return f"{count} blocks", lambda rows: rows * count // n, sizes / n


def _steps(plan: Plan) -> int:
    return max(1, plan.rows_of(0) // plan.global_batch_size)


def _sample_starts(plan: Plan, sample_steps: int) -> list[int]:
    """Returns the positions of the sampled steps, one at random in each of equal parts of the epoch: equal distances
    could always meet the same place of a pattern.
    """
    count = min(sample_steps, _steps(plan))
    edges = np.arange(count + 1) * _steps(plan) // count
    draws = uniform(subkeys(derive_key(plan.order.seed, "quality", "steps"), np.arange(count)), 1)[:, 0]
    steps = edges[:-1] + (draws * np.diff(edges)).astype(np.int64)
    return [int(step) * plan.global_batch_size for step in steps]


def _observe(plan: Plan, epochs: int, starts: list[int], classings: list[Classes]) -> Floats:
    """Returns the means of distance, nearest, spread, close pairs, and the divergence for each kind of classes."""
    steps = [_observe_step(plan, epoch, at, classings) for epoch in range(epochs) for at in starts]
    return np.asarray(np.mean(steps, axis=0))


def _ideal(plan: Plan, epochs: int, starts: list[int], classings: list[Classes]) -> Floats:
    """Returns the expected result of `_observe` for a row shuffle; measures with a formula are computed by it."""
    # With the same seed, a row shuffle would be compared with itself.
    seed, n = derive_key(plan.order.seed, "quality", "ideal"), plan.rows
    order = RowShuffle().resolve(Facts(rows=n, seed=seed))
    ideal = _observe(dataclasses.replace(plan, order=order, remainder="ragged"), epochs, starts, classings)
    reach = max(1, n // _CLOSE)
    ideal[0] = (n + 1) / 3  # mean distance of two different rows
    ideal[3] = (2 * n - reach - 1) * reach / max(n * (n - 1), 1)
    return ideal


def _observe_step(plan: Plan, epoch: int, start: int, classings: list[Classes]) -> list[float]:
    stop = min(start + plan.global_batch_size, max(plan.rows_of(0), start + 1))
    rows = plan.select(epoch, np.arange(start, stop, dtype=np.int64))
    size, places = len(rows), min(plan.global_batch_size, plan.rows)
    distance = nearest = close = float("nan")
    ordered = np.sort(rows)
    gaps = np.diff(ordered)
    if size > 1:
        distance = float(np.abs(np.diff(rows)).mean())
        nearest = float(np.minimum(np.r_[gaps[0], gaps], np.r_[gaps, gaps[-1]]).mean())
        within = np.searchsorted(ordered, ordered + max(1, plan.rows // _CLOSE), side="right") - np.arange(1, size + 1)
        close = float(within.sum() / (size * (size - 1) / 2))
    spread = float(len(np.unique(rows * places // plan.rows)))
    return [distance, nearest, spread, close, *(_divergence(classes(rows), shares) for _, classes, shares in classings)]


def _divergence(classes: Int64Array, shares: Floats) -> float:
    """Returns the Jensen-Shannon divergence in bits; O(rows), because a class not in the batch only adds its share."""
    found, counts = np.unique(classes, return_counts=True)
    here, there = counts / len(classes), shares[found]
    middle = (here + there) / 2
    bits = here @ np.log2(here / middle) + there @ np.log2(there / middle) + (1 - there.sum())
    return float(bits) / 2


def _correlation(plan: Plan, epoch: int) -> float:
    """Returns the rank correlation of the rows at the same positions of two epochs. Row numbers serve as ranks."""
    count = min(plan.rows_of(0), _PAIRED_ROWS)
    if count < 2:
        return float("nan")
    positions = permute(np.arange(count), plan.rows_of(0), derive_key(plan.order.seed, "quality", "pairs"))
    return float(np.corrcoef(plan.select(epoch, positions), plan.select(epoch + 1, positions))[0, 1])
