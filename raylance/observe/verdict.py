"""Judges a run by its figures: which part of its time limits it.

The trainer's time is divided into `PARTS`: training, saving, other datasets, and waiting. While the trainer waits, the
awaited rows are in one stage at each moment (see `Stats.wait_read_s` and its neighbours). All shares are shares of the
sum of the parts. The rate of each stage alone is its amount per second of its own work: rows per second of training,
decoded rows per second of decoding, bytes per second in which storage was read.
"""

import dataclasses
import html
from collections.abc import Mapping, Sequence

from raylance.observe.diagnoses import DIAGNOSES
from raylance.observe.diagnoses.diagnosis import NO_MODEL, SPARE, does_nothing, rate
from raylance.observe.diagnoses.finishing import SHORT_STEP_S
from raylance.observe.diagnoses.others import look_at_others
from raylance.observe.diagnoses.saving import report_less
from raylance.observe.diagnoses.starting import describe_start, hide_start
from raylance.observe.figures import MOSTLY, PARTS, STAGES, Limit, RankFigures, RunFigures

_LEAST_BATCHES = 3  # batches of each rank that was there most of the time; fewer prove nothing
_LEAST_WAIT = 0.05  # share of the time: less waiting is not worth a change
_MUCH: dict[Limit, float] = {"saving": 1 / 4, "starting": 1 / 3, "other datasets": 1 / 3}
"""Shares of the time: such a part is the limit if it takes more, although the trainer hardly waits."""
_TOO = 0.1  # share of the time: another part that takes more is worth a line of advice
_RESHARDED_S = 0.05  # of waiting after ranks came or went: less is not worth mentioning
_UNEVEN = 1.5  # times the mean of the others: such a rank is named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The stage that limits the speed of a run, and advice.

    Attributes:
        limit: "unknown" if there are too few batches so far. Else the largest part of `seconds` except training:
            "reading", "decoding" or "finishing" (bringing rows to the trainer's process and making batches of them),
            "starting", "saving" (`raylance.report`) or "other datasets" (such as for validation). But "training" if the
            loader keeps up: `waiting` is below 0.05, and that part is smaller than training, and not above a third of
            the time; a quarter for saving.
        summary: The limit in a sentence, with the numbers; then all parts of the time in percent, the largest first.
        advice: Changes that would help, the most useful first; may be empty.
        waiting: Share of the time, the sum of `seconds`, that the trainer waited for rows, in [0, 1]: for "reading",
            "decoding" and "finishing" together. All shares have this denominator.
        rates: Rows a second over all ranks. "delivered" is the rate of the run. "training", "reading" and "decoding"
            are the rates that the run would have if only this stage took time; infinite if the stage took no time.
            Ranks take the same number of steps, so the slowest rank decides "delivered" and "training".
        seconds: Seconds, summed over all ranks: "training", "saving", waiting for "starting", "reading", "decoding" and
            "finishing", and "other datasets". For a whole run, the last one counts all passes over other datasets; for
            a single loader, those within its steps.
        rows: For a whole run, whether its ranks were handed every selected row once, in the words of
            `raylance.prove_run`; "" for a single loader.
    """

    limit: Limit
    summary: str
    advice: tuple[str, ...]
    waiting: float
    rates: Mapping[str, float]
    seconds: Mapping[str, float]
    rows: str = ""

    def __str__(self) -> str:
        return "\n".join([self.summary, *(f"- {line}" for line in self.advice), *([self.rows] if self.rows else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.advice)
        rows = "".join(f"<p>{html.escape(line)}</p>" for line in self.rows.splitlines())
        return f"<p><b>{html.escape(self.summary)}</b></p><ul>{lines}</ul>{rows}"


def judge(ranks: Sequence[RankFigures], others_s: float = 0.0) -> Verdict:
    """Finds the limit of a run from the figures of each rank; `others_s` as for `RunFigures`."""
    run = RunFigures(ranks, others_s)
    limit = _find_limit(run)
    summary, advice = _describe(run, limit)
    return Verdict(
        limit=limit, summary=summary, advice=tuple(advice), waiting=run.waiting, rates=run.rates, seconds=run.seconds
    )


def judge_beside(dataset: str, by_dataset: Mapping[str, Sequence[RankFigures]], others_s: float = 0.0) -> Verdict:
    """Judges a run by one of the datasets that it iterates side by side; adds advice on other awaited ones. `others_s`
    is what the ranks spent with datasets other than this one.
    """
    beside = {name: RunFigures(ranks) for name, ranks in by_dataset.items() if name != dataset}
    verdict = judge(by_dataset[dataset], others_s)
    if not beside:
        return verdict
    waited_for = {name: _find_limit(run) for name, run in beside.items() if run.waiting >= _LEAST_WAIT}
    lines = [
        f"{name} is waited for, too: {_diagnose(beside[name], limit)[0]}"  # its shares are of another time
        for name, limit in waited_for.items()
        if limit != "unknown"
    ]
    summary = f"{dataset}, iterated side by side with {' and '.join(beside)}: {verdict.summary}"
    return dataclasses.replace(verdict, summary=summary, advice=(*verdict.advice, *lines))


def _find_limit(run: RunFigures) -> Limit:
    mostly = [rank for rank in run.ranks if rank.presence >= MOSTLY]
    if min((rank.figures["batches"] for rank in mostly), default=0) < _LEAST_BATCHES:
        return "unknown"
    largest = max((part for part in PARTS if part != "training"), key=lambda part: run.seconds[part])
    is_much = run.share(largest) > min(_MUCH.get(largest, 1.0), run.share("training"))
    return largest if run.waiting >= _LEAST_WAIT or is_much else "training"


def _describe(run: RunFigures, limit: Limit) -> tuple[str, list[str]]:
    """Returns a sentence about the limit, and advice."""
    if limit == "unknown":
        batches = min((rank.figures["batches"] for rank in run.ranks), default=0)
        waited_s = run.seconds["starting"] + run.waited_s
        return f"too early to tell: batches so far {batches:.0f}, {waited_s:.1f} s waited", []
    summary, advice = _diagnose(run, limit)
    summary += f"; of the time: {run.shares_in_words()}"
    if run.share("starting") > _TOO and limit != "starting":
        advice.append(f"{describe_start(run)}: {hide_start(run)}")
    if run.share("saving") > _TOO and limit != "saving":
        first, *more = report_less(run)
        advice += [f"saving takes {run.share('saving'):.0%} of the time: {first}", *more]
    if limit not in STAGES and run.waiting >= _LEAST_WAIT:
        stage = max(STAGES, key=lambda stage: run.seconds[stage])
        found, lines = _diagnose(run, stage)
        advice += [f"in addition, {found}", *lines]
    advice += _of_costs(run)
    if run.share("other datasets") > _TOO and limit != "other datasets":
        advice += look_at_others(run)
    resharded_s = run.sum("reshard_s") / len(run.ranks)
    if resharded_s >= _RESHARDED_S:
        summary += f"; as ranks came and went, each waited {resharded_s:.1f} s for its next batch"
    return summary + _uneven_ranks(run, limit), advice


def _diagnose(run: RunFigures, limit: Limit) -> tuple[str, list[str]]:
    """Returns a limit in words, without shares of the time, and advice."""
    if limit in STAGES and run.rates.get(limit, 0.0) > SPARE * run.rates["training"]:
        return _limits_at_times(run, limit)
    diagnosis = DIAGNOSES[limit]
    return diagnosis.evidence(run) if diagnosis.evidence else diagnosis.means, list(diagnosis.advice(run))


def _of_costs(run: RunFigures) -> list[str]:
    """Names padding and imbalance if they cost more than waiting does, with those changes that were not made yet. Of
    several costs, it names the one that costs most.
    """
    facts, lines, least = run.facts, [], max(run.waiting, _LEAST_WAIT)
    is_bucketed, is_balanced = facts.get("order") == "bucket", facts.get("balances")
    is_padded = (facts.get("budget") or {}).get("padded", True)
    padded, uneven = max(run.costs, key=run.padding), max(run.costs, key=run.imbalance)
    if is_padded and run.padding(padded) > least:
        without = "samples=raylance.Pack(…) needs no padding"
        changes = without if is_bucketed else f'order="bucket" brings rows of similar length together, and {without}'
        lines.append(
            f"{run.padding(padded):.0%} of what batches cost{_in(padded)} is padding, if they are padded to the longest"
            f" row: {changes}"
        )
    if run.imbalance(uneven) > least:
        changes = " or ".join(
            [
                *(['order="bucket"'] if not is_bucketed and not uneven else []),
                *([f"balance=raylance.Balance(){' without padding' * (not uneven)}"] if not is_balanced else []),
            ]
        )
        others = [cost for cost in run.costs if cost != uneven]
        than = "".join(f", and {1 + run.imbalance(cost):.2f} times{_in(cost)}" for cost in others)
        waits = 1 - 1 / (1 + run.imbalance(uneven))  # if a step takes as long as this cost says
        lines.append(
            f"in each step the costliest rank costs {1 + run.imbalance(uneven):.2f} times the mean of the ranks"
            f"{_in(uneven)}{than}{', if batches are padded' * (not uneven)}, and the others wait for it, up to "
            f"{waits:.0%} of a step: {changes or 'larger steps'} makes their costs more equal"
        )
    return lines


def _in(cost: str) -> str:
    """Returns the cost of these counters in words, such as " in tokens"; see `RunFigures.costs`."""
    return f" in {cost[1:]}" if cost else ""


def _limits_at_times(run: RunFigures, stage: Limit) -> tuple[str, list[str]]:
    """Describes a stage that the trainer waits for although the stage could deliver more than the trainer takes."""
    mostly = "training takes most of the time, and " * (run.share("training") > 1 / 2)
    summary = (
        f"{mostly}{stage} is the limit at times: the trainer, which takes {rate(run.rates['training'])}, waits for it, "
        f"although it does {rate(run.rates[stage])} when it has work"
    )
    if does_nothing(run):
        return summary, [NO_MODEL]
    return summary, [
        "a larger prefetch_batches= keeps more batches ready for such times",
        "the fewer steps a pass has, the more its beginning counts: short runs like this show little",
    ]


def _uneven_ranks(run: RunFigures, limit: Limit) -> str:
    """Names the rank that waits most and the rank that trains slowest, if their values stand out."""
    shares = {rank.facts["rank"]: rank.waited_s / max(1e-9, rank.total_s) for rank in run.ranks}
    if len(shares) < 2 or limit == "starting":
        return ""
    words = ""
    number, share, others = _foremost(shares)
    if limit in STAGES and share > _UNEVEN * others:
        words += f"; rank {number} waits most, {share:.0%}"
    number, step_s, others_s = _foremost({rank.facts["rank"]: rank.trained_step_s for rank in run.ranks})
    # While one rank waits for rows, the others wait for it in collective operations, which counts as training: only a
    # rank whose whole steps are longer is slower.
    slowest, longest_s, shorter_s = _foremost({rank.facts["rank"]: rank.step_s for rank in run.ranks})
    is_slow = number == slowest and longest_s > _UNEVEN * shorter_s
    if is_slow and step_s > _UNEVEN * others_s and step_s > SHORT_STEP_S:
        words += f"; rank {number} trains slowest, {1000 * step_s:,.0f} ms a step for {1000 * others_s:,.0f}"
    return words


def _foremost(values: Mapping[int, float]) -> tuple[int, float, float]:
    """Returns the rank with the largest value, that value, and the mean of the other values."""
    rank = max(values, key=lambda which: values[which])
    return rank, values[rank], (sum(values.values()) - values[rank]) / (len(values) - 1)
