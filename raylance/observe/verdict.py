"""Owns the judgement of a run by its figures: what limits it; never measures, never puts it into words.

How it is told: the trainer's time is either training, saving or waiting, and what it waits for was doing one thing at
each moment (see `Stats.wait_read_s` and its neighbours). What each part could deliver by itself follows from its own
seconds: rows by the trainer's, rows decoded by the decoders', bytes read by those in which storage was being read.
"""

import dataclasses
import html
from collections.abc import Mapping, Sequence

from raylance.observe import advice
from raylance.observe.advice import Limit
from raylance.observe.parts import MOSTLY, Part, delivered_rate, saving_share, training_rate
from raylance.observe.stats import WAITS

_LEAST_BATCHES = 3  # to tell anything, of each rank that was there
_WAITS = 0.05  # of the time: less is not worth a change
_SAVES = 0.25  # of the time: more is what limits, where waiting is less


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What limits a run, and what to change.

    Attributes:
        limit: "training" where the loader keeps up, "starting" where most waiting was for the first batch, "saving"
            where `raylance.report` takes more time than waiting does; "reading", "decoding" or "finishing" (bringing
            rows to the trainer's process and making batches of them) where the trainer waits for that; "unknown" before
            there are batches.
        told: It in a sentence.
        advice: What to change, the most useful first; none where nothing is to be gained.
        waiting: Share of the trainer's time that it waited, the start and saving excluded, in [0, 1].
        rates: Rows a second over all ranks: "delivered", and what each part would do by itself: "training", "reading",
            "decoding"; infinite where it took no time. Ranks take the same number of steps, so that "delivered" and
            "training" follow the slowest one.
        seconds: What the time of all ranks went to, by name: "training", "saving", and waiting by cause.
        rows: Of a whole run: whether its ranks were handed every selected row once, as `raylance.prove_run` says it.
    """

    limit: Limit
    told: str
    advice: tuple[str, ...]
    waiting: float
    rates: Mapping[str, float]
    seconds: Mapping[str, float]
    rows: str = ""

    def __str__(self) -> str:
        return "\n".join([self.told, *(f"- {line}" for line in self.advice), *([self.rows] if self.rows else [])])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.advice)
        rows = f"<p>{html.escape(self.rows)}</p>" * bool(self.rows)
        return f"<p><b>{html.escape(self.told)}</b></p><ul>{lines}</ul>{rows}"


def judge_beside(dataset: str, parts: Mapping[str, Sequence[Part]]) -> Verdict:
    """Says what limited a run by one of the datasets that it was trained on side by side, and whether others were
    waited for, too.

    Args:
        dataset: The one that is judged.
        parts: By dataset, this one included, one for each rank.
    """
    found, others = judge(parts[dataset]), [name for name in parts if name != dataset]
    if not others:
        return found
    judged = {name: judge(parts[name]) for name in others}
    lines = [f"{name} is waited for, too: {one.told}" for name, one in judged.items() if one.waiting >= _WAITS]
    told = f"{dataset}, iterated side by side with {' and '.join(others)}: {found.told}"
    return dataclasses.replace(found, told=told, advice=(*found.advice, *lines))


def judge(parts: Sequence[Part]) -> Verdict:
    """Says what limited a run.

    Args:
        parts: One for each rank.
    """
    seconds = {
        "training": sum(part.trained_s for part in parts),
        "saving": sum(part.figures["save_s"] for part in parts),
    }
    seconds |= {limit: sum(part.figures[name] for part in parts) for limit, name in WAITS.items()}
    waited_s = sum(part.waited_s for part in parts)
    steady_s = seconds["training"] + waited_s
    there = [part for part in parts if part.presence]
    mostly = [part for part in there if part.presence >= MOSTLY]
    rates = {
        "delivered": delivered_rate(there),
        "training": training_rate(there),
        "reading": sum(part.presence * part.read_rate for part in there),
        "decoding": sum(part.presence * part.decode_rate for part in there),
    }
    waiting = waited_s / steady_s if steady_s else 0.0
    if min((part.figures["batches"] for part in mostly), default=0) < _LEAST_BATCHES:
        limit: Limit = "unknown"
    elif seconds["saving"] > waited_s and saving_share(parts) > _SAVES:
        limit = "saving"
    elif waiting >= _WAITS:
        limit = max(advice.MADE, key=lambda made: seconds[made])
    else:
        limit = "starting" if seconds["starting"] > 0.5 * steady_s else "training"
    found = advice.Found(parts=parts, rates=rates, waiting=waiting, seconds=seconds)
    told, lines = found.words(limit)
    return Verdict(limit=limit, told=told, advice=tuple(lines), waiting=waiting, rates=rates, seconds=seconds)
