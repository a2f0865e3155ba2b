"""Judges a run by its figures: which stage limits it.

The trainer's time is training, saving or waiting. While the trainer waits, the awaited rows are in one stage at each
moment (see `Stats.wait_read_s` and its neighbours). The rate of each stage alone is its amount per second of its own
work: rows per second of training, decoded rows per second of decoding, bytes per second in which storage was read.
"""

import dataclasses
import html
from collections.abc import Mapping, Sequence

from raylance.observe.diagnoses import DIAGNOSES
from raylance.observe.diagnoses.diagnosis import NO_MODEL, POLLS, SPARE, UPLOADS, does_nothing, rate, waited
from raylance.observe.diagnoses.finishing import SHORT_STEP_S
from raylance.observe.figures import MOSTLY, STAGES, Limit, RankFigures, RunFigures, saving_share

_LEAST_BATCHES = 3  # batches of each rank that was there most of the time; fewer prove nothing
_LEAST_WAIT = 0.05  # share of the time: less waiting is not worth a change
_SAVES = 0.25  # share of the time: more saving is the limit, if waiting takes less
_SAVES_TOO = 0.1  # share of the time: more saving is worth a line of advice
_OTHERS = 0.1  # share of the time: more for passes over other datasets is worth a line of advice
_RESHARDED_S = 0.05  # of waiting after ranks came or went: less is not worth mentioning
_UNEVEN = 1.5  # times the mean of the others: such a rank is named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The stage that limits the speed of a run, and advice.

    Attributes:
        limit: The first of these that holds. "unknown": there are too few batches so far. "saving": `raylance.report`
            takes more than a quarter of the time, and more than waiting. "reading", "decoding" or "finishing" (bringing
            rows to the trainer's process and making batches of them): `waiting` is at least 0.05, mostly for this
            stage. "starting": the start took more than half as long as all training and waiting after it. "training":
            the loader keeps up.
        summary: The limit in a sentence, with the numbers.
        advice: Changes that would help, the most useful first; may be empty.
        waiting: Share of the trainer's time that it waited, in [0, 1]; the start and saving are excluded.
        rates: Rows a second over all ranks. "delivered" is the rate of the run. "training", "reading" and "decoding"
            are the rates that the run would have if only this stage took time; infinite if the stage took no time.
            Ranks take the same number of steps, so the slowest rank decides "delivered" and "training".
        seconds: Seconds, summed over all ranks: "training", "saving", and waiting for "starting", "reading", "decoding"
            and "finishing".
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


def judge(ranks: Sequence[RankFigures]) -> Verdict:
    """Finds the limit of a run from the figures of each rank."""
    run = RunFigures(ranks)
    limit = _find_limit(run)
    summary, advice = _describe(run, limit)
    return Verdict(
        limit=limit, summary=summary, advice=tuple(advice), waiting=run.waiting, rates=run.rates, seconds=run.seconds
    )


def judge_beside(dataset: str, by_dataset: Mapping[str, Sequence[RankFigures]]) -> Verdict:
    """Judges a run by one of the datasets that it iterates side by side; adds advice on other awaited ones."""
    judged = {name: judge(ranks) for name, ranks in by_dataset.items()}
    verdict = judged.pop(dataset)
    if not judged:
        return verdict
    lines = [f"{name} is waited for, too: {one.summary}" for name, one in judged.items() if one.waiting >= _LEAST_WAIT]
    summary = f"{dataset}, iterated side by side with {' and '.join(judged)}: {verdict.summary}"
    return dataclasses.replace(verdict, summary=summary, advice=(*verdict.advice, *lines))


def _find_limit(run: RunFigures) -> Limit:
    mostly = [rank for rank in run.ranks if rank.presence >= MOSTLY]
    if min((rank.figures["batches"] for rank in mostly), default=0) < _LEAST_BATCHES:
        return "unknown"
    if run.seconds["saving"] > run.waited_s and saving_share(run.ranks) > _SAVES:
        return "saving"
    if run.waiting >= _LEAST_WAIT:
        return max(STAGES, key=lambda stage: run.seconds[stage])
    return "starting" if run.seconds["starting"] > 0.5 * run.steady_s else "training"


def _describe(run: RunFigures, limit: Limit) -> tuple[str, list[str]]:
    """Returns a sentence about the limit, and advice."""
    if limit == "unknown":
        batches = min((rank.figures["batches"] for rank in run.ranks), default=0)
        waited_s = run.seconds["starting"] + run.waited_s
        return f"too early to tell: batches so far {batches:.0f}, {waited_s:.1f} s waited", []
    diagnosis = DIAGNOSES[limit]
    if limit in STAGES and run.rates.get(limit, 0.0) > SPARE * run.rates["training"]:
        summary, advice = _limits_at_times(run, limit)
    else:
        summary, advice = diagnosis.evidence(run) if diagnosis.evidence else diagnosis.means, diagnosis.advice(run)
    saves = saving_share(run.ranks)
    if limit != "saving" and saves > _SAVES_TOO:
        advice.append(f"saving takes {saves:.0%} of the time. Report less often: {POLLS}; or {UPLOADS}")
    advice += _of_costs(run)
    others_s = run.sum("other_s")
    others = others_s / max(1e-9, others_s + run.sum("save_s") + run.steady_s)
    if others > _OTHERS:
        advice.append(
            f"{others:.0%} of the time since its first batch went to other loaders, iterated during its steps, such as "
            "for validation: call their explain()"
        )
    resharded_s = run.sum("reshard_s") / len(run.ranks)
    if resharded_s >= _RESHARDED_S:
        summary += f"; as ranks came and went, each waited {resharded_s:.1f} s for its next batch"
    return summary + _uneven_ranks(run, limit), advice


def _of_costs(run: RunFigures) -> list[str]:
    """Names padding and imbalance if they cost more than waiting does."""
    lines = []
    if run.padding > max(run.waiting, _LEAST_WAIT):
        lines.append(
            f"{run.padding:.0%} of what batches cost is padding, if they are padded to the longest row: "
            'order="bucket" brings rows of like length together, and pack=raylance.Pack(…) needs no padding'
        )
    if run.imbalance > max(run.waiting, _LEAST_WAIT):
        lines.append(
            f"in each step the dearest rank costs {1 + run.imbalance:.2f} times the mean of the ranks, if batches are "
            'padded, and the others wait for it: order="bucket", or balance=raylance.Balance() without padding, makes '
            "them alike"
        )
    return lines


def _limits_at_times(run: RunFigures, stage: Limit) -> tuple[str, list[str]]:
    """Describes a stage that the trainer waits for although the stage could deliver more than the trainer takes."""
    summary = (
        f"training takes {1 - run.waiting:.0%} of the time, and {stage} is the limit at times: the trainer, which "
        f"takes {rate(run.rates['training'])}, {waited(run)} for it, although it does {rate(run.rates[stage])} when it "
        "has work"
    )
    if does_nothing(run):
        return summary, [NO_MODEL]
    return summary, [
        "a larger prefetch_batches= keeps more batches ready for such times",
        "the fewer steps a pass has, the more its beginning counts: short runs like this show little",
    ]


def _uneven_ranks(run: RunFigures, limit: Limit) -> str:
    """Names the rank that waits most and the rank that trains slowest, if their values stand out."""
    shares = {rank.facts["rank"]: rank.waited_s / max(1e-9, rank.steady_s) for rank in run.ranks}
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
