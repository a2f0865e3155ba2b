"""Owns what the figures of a run mean, in words: what limits it, and what to change; never measures, never changes it.

How it is told: the trainer's time is either training or waiting, and what it waits for was doing one thing at each
moment (see `Stats.wait_read_s` and its neighbours). What each part could deliver by itself follows from its own
seconds: rows by the trainer's, rows decoded by the decoders', bytes read by those in which storage was being read.
"""

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from raylance.telemetry.stats import WAITS

Limit = Literal["unknown", "training", "starting", "reading", "decoding", "finishing"]

_LEAST_BATCHES = 3  # to tell anything, of each rank that was there
_MOSTLY = 0.5  # of the time
_WAITS = 0.05  # of the time: less is not worth a change
_NO_STEP_S = 0.002  # for a batch: a loop that does no more does not train
_NOTHING = (
    "this loop does next to nothing with its batches, so that any loader would be its limit: what limits a trainer "
    "shows with the model in it"
)
_SMALL_BYTES = 16 << 10  # of a row: what is smaller is decoded at once, whatever its size
_STARTS = 0.1  # of the time: more is worth hiding
_PREPARE = "call loader.prepare(global_batch_size=…) before the model is built"
_SPARE = 1.1  # times what would be just enough
_MOST_HELPERS = 32  # of a rank: who wants more has another trouble
_UNEVEN = 1.5  # times the others' share: a rank to be named


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's share of what is judged.

    Attributes:
        figures: What `Stats.sample` gives, of the time that is judged: counters as differences.
        facts: The facts of its record: rank, world_size, row_bytes, decodes, order, options, cpus.
        presence: Share of the time that is judged in which it was there, in [0, 1]: not all of it where the world
            size changed. Rates over all ranks count it by this share.
        starts: How often it was started in this time.
    """

    figures: Mapping[str, float]
    facts: Mapping[str, Any]
    presence: float = 1.0
    starts: int = 1

    @property
    def trained_s(self) -> float:
        """Seconds of training: without saving, and without passes over other datasets between two batches."""
        return max(0.0, self.figures["user_s"] - self.figures["save_s"] - self.figures["other_s"])

    @property
    def waited_s(self) -> float:
        """Seconds of waiting, but for the start."""
        return sum(self.figures[name] for limit, name in WAITS.items() if limit != "starting")

    @property
    def steady_s(self) -> float:
        """Seconds of training and waiting, but for the start: what rates are of."""
        return self.trained_s + self.waited_s

    @property
    def rate(self) -> float:
        """Rows a second that it was handed, of the time between its first batch and its last: saving, and passes over
        other datasets, left out. What is called rows/s anywhere is this.
        """
        return self.figures["rows"] / max(1e-9, self.steady_s)

    @property
    def train_rate(self) -> float:
        """Rows a second that this rank's trainer would take if it never waited."""
        return self.figures["rows"] / self.trained_s if self.trained_s else math.inf

    @property
    def decode_rate(self) -> float:
        """Rows a second that its decoders deliver when they have work."""
        figures = self.figures
        rows, seconds = figures["decoded_rows"], figures["decode_s"]
        return (figures["decoders"] or max(1.0, figures["readers"])) * rows / seconds if seconds else math.inf

    @property
    def read_rate(self) -> float:
        """Rows a second that its shard actors read when they read all the time."""
        rows, seconds = self.figures["read_bytes"] / max(1.0, self.facts["row_bytes"]), self.figures["storage_s"]
        return max(1.0, self.figures["readers"]) * rows / seconds if seconds else math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What limits a run, and what to change.

    Attributes:
        limit: "training" where the loader keeps up, "starting" where most waiting was for the first batch; "reading",
            "decoding" or "finishing" (bringing rows to the trainer's process and making batches of them) where the
            trainer waits for that; "unknown" before there are batches.
        told: It in a sentence.
        advice: What to change, the most useful first; none where nothing is to be gained.
        waiting: Share of the trainer's time that it waited, the start excluded, in [0, 1].
        rates: Rows a second over all ranks: "delivered", and what each part would do by itself: "training", "reading",
            "decoding"; infinite where it took no time.
        seconds: What the time of all ranks went to, by name: "training", "saving", and waiting by cause.
    """

    limit: Limit
    told: str
    advice: tuple[str, ...]
    waiting: float
    rates: Mapping[str, float]
    seconds: Mapping[str, float]

    def __str__(self) -> str:
        return "\n".join([self.told, *(f"- {line}" for line in self.advice)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self.advice)
        return f"<p><b>{html.escape(self.told)}</b></p><ul>{lines}</ul>"


def judge(parts: Sequence[Part]) -> Verdict:
    """Says what limited a run.

    Args:
        parts: One for each rank.
    """
    seconds = {"training": sum(part.trained_s for part in parts), "saving": _sum(parts, "save_s")}
    seconds |= {limit: _sum(parts, name) for limit, name in WAITS.items()}
    waited_s = sum(part.waited_s for part in parts)
    steady_s = seconds["training"] + waited_s
    there = [part for part in parts if part.presence]
    rates = {
        "delivered": sum(part.presence * part.rate for part in there),
        "training": sum(part.presence * part.train_rate for part in there),
        "reading": sum(part.presence * part.read_rate for part in there),
        "decoding": sum(part.presence * part.decode_rate for part in there),
    }
    waiting = waited_s / steady_s if steady_s else 0.0
    if min((part.figures["batches"] for part in parts if part.presence >= _MOSTLY), default=0) < _LEAST_BATCHES:
        limit: Limit = "unknown"
    elif waiting >= _WAITS:
        limit = max(("reading", "decoding", "finishing"), key=lambda name: seconds[name])
    else:
        limit = "starting" if seconds["starting"] > 0.5 * steady_s else "training"
    told, advice = _WORDS[limit](parts, rates, waiting, seconds)
    return Verdict(
        limit=limit,
        told=told + _uneven(parts, waiting, limit),
        advice=tuple(advice),
        waiting=waiting,
        rates=rates,
        seconds=seconds,
    )


Words = tuple[str, list[str]]
Figures = Mapping[str, float]


def _sum(parts: Sequence[Part], name: str) -> float:
    return sum(part.figures[name] for part in parts)


def _rate(rate: float) -> str:
    return f"{rate:,.0f} rows/s" if rate < 1e7 else "any number of rows/s"


def _waited(waiting: float, digits: int = 0) -> str:
    return f"waited for {waiting:.{digits}%} of its time since its first batch"


def _count(number: float, what: str) -> str:
    return f"{number:,.0f} {what}{'s' * (round(number) != 1)}"


def _unknown(parts: Sequence[Part], rates: Figures, waiting: float, seconds: Figures) -> Words:
    batches = min((part.figures["batches"] for part in parts), default=0)
    waited_s = seconds["starting"] + sum(part.waited_s for part in parts)
    return f"too early to tell: batches so far {batches:.0f}, {waited_s:.1f} s waited", []


def _training(parts: Sequence[Part], rates: Figures, waiting: float, seconds: Figures) -> Words:
    able = min(rates["reading"], rates["decoding"])
    spare = f"; the loader could deliver {_rate(able)}" if able < math.inf else ""
    told = f"training is the limit: it takes {_rate(rates['training'])} and {_waited(waiting, 1)}{spare}"
    advice = []
    decoders = max(part.figures["decoders"] for part in parts)
    wanted = _SPARE * rates["training"] / rates["decoding"] if rates["decoding"] else math.inf
    needed = math.ceil(decoders * min(1.0, wanted))
    if decoders >= 2 and needed <= decoders / 2 and 0 < rates["decoding"] < math.inf:
        advice.append(
            f"{_count(max(1, needed), 'decoder')} of each rank would be enough, {decoders:.0f} run: num_decoders="
            f"{max(1, needed)} leaves CPUs to others"
        )
    if seconds["starting"] > _STARTS * seconds["training"]:
        advice.append(f"{_started(parts, seconds)}: {_hides(parts)}")
    return told, advice


def _started(parts: Sequence[Part], seconds: Figures) -> str:
    starts = max(part.starts for part in parts)
    batch = "its first batch" if starts == 1 else f"the first batches of {starts} starts"
    return f"each rank waited {seconds['starting'] / len(parts):.1f} s for {batch}"


def _hides(parts: Sequence[Part]) -> str:
    """What makes that shorter."""
    if not all(part.facts.get("prepared") for part in parts):
        return f"{_PREPARE}, which hides that"
    return "although it was prepared: helpers need that long to start; nodes that stay, and fewer restarts, help"


def _starting(parts: Sequence[Part], rates: Figures, waiting: float, seconds: Figures) -> Words:
    told = f"starting is the limit: {_started(parts, seconds)}, and {waiting:.1%} of the time from then on"
    return told, [
        _hides(parts),
        "longer runs wait no more than this one: the start comes once",
    ]


def _at_times(limit: Limit, rates: Figures, waiting: float) -> Words:
    """Of a part that is waited for, and would deliver more than the trainer takes."""
    told = (
        f"{limit} is the limit at times: the trainer, which takes {_rate(rates['training'])}, {_waited(waiting)} "
        f"for it, although it does {_rate(rates[limit])} when it has work"
    )
    return told, [
        "a larger prefetch_batches= keeps more batches ready for such times",
        "the fewer steps a pass has, the more its beginning counts: short runs like this tell little",
    ]


def _does_nothing(parts: Sequence[Part]) -> bool:
    return sum(part.trained_s for part in parts) < _NO_STEP_S * _sum(parts, "batches")


def _decoding(parts: Sequence[Part], rates: Figures, waiting: float, seconds: Figures) -> Words:
    if rates["decoding"] > _SPARE * rates["training"]:
        return _at_times("decoding", rates, waiting)
    facts, ranks = parts[0].facts, len(parts)
    decoders = max(part.figures["decoders"] for part in parts)
    who = f"{_count(sum(part.figures['decoders'] for part in parts), 'decoder')} deliver{'s' * (ranks * decoders == 1)}"
    who = who if decoders else f"{_count(ranks, 'shard actor')}, without decoders, deliver{'s' * (ranks == 1)}"
    told = (
        f"decoding is the limit: {who} {_rate(rates['decoding'])}, the trainer takes {_rate(rates['training'])} and "
        f"{_waited(waiting)}"
    )
    advice = []
    asked = max(part.figures["decoders_wanted"] for part in parts)
    if asked > decoders:
        advice.append(
            f"{_count(asked, 'decoder')} of each rank would have work, and CPUs were free for {decoders:.0f}: give the "
            "cluster CPUs"
        )
    each = max(1e-9, rates["decoding"]) / (max(1.0, decoders) * ranks)
    wanted = _SPARE * rates["training"] / (each * ranks)
    needed = math.ceil(min(wanted, _MOST_HELPERS + 1))
    if _does_nothing(parts):
        advice.append(_NOTHING)
    elif needed > _MOST_HELPERS:
        advice.append(f"each decoder more gives about {_rate(each)}: num_decoders=…, as far as there are CPUs")
    elif needed > decoders:
        cpus, cost = facts.get("cluster_cpus") or facts.get("cpus"), needed * facts["options"]["decoder_cpus"] * ranks
        room = f", and there are {cpus:g}: add nodes" if cpus and cost > cpus else ""
        advice.append(
            f"{_count(needed - decoders, 'more decoder')} of each rank would feed this trainer: num_decoders={needed} "
            f"takes {cost:g} CPUs besides the trainer's{room}"
        )
    if facts["row_bytes"] > _SMALL_BYTES:
        advice.append(
            "or decode less: materialise images at the size that is trained on (jobs/materialize.py --shorter-side …), "
            "or Image(draft=True) where photographs are more than twice as large"
        )
    return told, advice


def _reading(parts: Sequence[Part], rates: Figures, waiting: float, seconds: Figures) -> Words:
    if rates["reading"] > _SPARE * rates["training"]:
        return _at_times("reading", rates, waiting)
    facts, readers = parts[0].facts, max(1.0, max(part.figures["readers"] for part in parts))
    bytes_s = _sum(parts, "read_bytes") / max(1e-9, _sum(parts, "storage_s"))
    told = (
        f"reading is the limit: storage gives {_rate(rates['reading'])} ({bytes_s / 2**20:,.0f} MiB/s to each shard "
        f"actor), the trainer takes {_rate(rates['training'])} and {_waited(waiting)}"
    )
    advice = []
    if facts.get("order") in ("row", "weighted", "class-balanced"):
        advice.append(
            f'order="{facts["order"]}" reads rows one by one: order="window" reads them in runs; or materialise a '
            "shuffled copy (jobs/materialize.py) and read that in windows"
        )
    wanted = readers * _SPARE * rates["training"] / max(1e-9, rates["reading"])
    needed = math.ceil(min(wanted, _MOST_HELPERS)) if rates["training"] < math.inf else 0
    if _does_nothing(parts):
        advice.append(_NOTHING)
    elif needed > readers:
        most = min(needed, 4) if readers < 4 else needed
        advice.append(
            f"more shard actors read several windows at once: num_readers={most}, which holds {most} times "
            f"max_window_bytes on each rank{', and is not enough by itself' if needed > most else ''}"
        )
    advice.append("or read less: fewer columns=, smaller rows by jobs/materialize.py; or bring the data nearer")
    return told, advice


def _finishing(parts: Sequence[Part], rates: Figures, waiting: float, seconds: Figures) -> Words:
    batches = max(1.0, _sum(parts, "batches"))
    collate_ms, transfer_ms = (1000 * _sum(parts, name) / batches for name in ("collate_s", "transfer_s"))
    told = (
        f"making batches is the limit: {collate_ms:.1f} ms of collating and {transfer_ms:.1f} ms of transfer for each, "
        f"and the trainer, which takes {_rate(rates['training'])}, {_waited(waiting)}"
    )
    advice = ["look at collate_fn: what can be done row by row is done by the decoders in transform="]
    advice.append("a larger prefetch_batches= evens out batches that differ; more CPUs for the trainer's process help")
    return told, advice


_WORDS = {
    "unknown": _unknown,
    "training": _training,
    "starting": _starting,
    "reading": _reading,
    "decoding": _decoding,
    "finishing": _finishing,
}


def _uneven(parts: Sequence[Part], waiting: float, limit: Limit) -> str:
    """Names the rank that waits most, where it is one."""
    if len(parts) < 2 or limit in ("unknown", "starting") or waiting < _WAITS:
        return ""
    shares = {part.facts["rank"]: part.waited_s / max(1e-9, part.steady_s) for part in parts}
    rank = max(shares, key=lambda which: shares[which])
    others = (sum(shares.values()) - shares[rank]) / (len(parts) - 1)
    return f"; rank {rank} waits most, {shares[rank]:.0%}" if shares[rank] > _UNEVEN * others else ""
