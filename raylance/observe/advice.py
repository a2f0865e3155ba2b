"""Owns the words of a verdict: what limits a run, in a sentence with the numbers, and what to change; never judges what
it is.

Nothing is advised that there is no room for: decoders need CPUs that no trainer has, and shard actors that read from
the disk of one machine share it.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from raylance.observe.parts import Part, saving_share

Limit = Literal["unknown", "training", "starting", "saving", "reading", "decoding", "finishing"]
MADE: tuple[Limit, ...] = ("reading", "decoding", "finishing")
"""What a batch goes through, and what a trainer waits for."""

Words = tuple[str, list[str]]

_NO_STEP_S = 0.002  # for a batch: a loop that does no more does not train
_NOTHING = (
    "this loop does next to nothing with its batches, so that any loader would be its limit: what limits a trainer "
    "shows with the model in it"
)
_SHORT_STEP_S = 0.005  # in which what each batch costs, whatever its size, is seen
_FEW_ROWS = 16  # of a batch on one rank
_SMALL_BYTES = 16 << 10  # of a row: what is smaller is decoded at once, whatever its size
_STARTS = 0.1  # of the time: more is worth hiding
_SAVES = 0.1  # of the time: more is worth a word
_OTHERS = 0.1  # of the time: more of it in passes over other datasets is worth a word
_UPLOADS = (
    "raylance.report(…, checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC) uploads while training goes on"
)
_SPARE = 1.1  # times what would be just enough
_MOST_HELPERS = 32  # of a rank: who wants more has another trouble
_MOST_READERS = 4  # that are advised at once
_UNEVEN = 1.5  # times the others' share: a rank to be named
_BY_ROW = {"row": 'order="row"', "weighted": "order=Weighted", "class_balanced": "order=ClassBalanced"}
"""Orders that read row by row, by the name in a record, as their user wrote them."""


def _rate(rate: float) -> str:
    return f"{rate:,.0f} rows/s" if rate < 1e7 else "any number of rows/s"


def _count(number: float, what: str) -> str:
    return f"{number:,.0f} {what}{'s' * (round(number) != 1)}"


def _foremost(values: Mapping[int, float]) -> tuple[int, float, float]:
    """The rank of the largest value, that value, and the mean of the others."""
    rank = max(values, key=lambda which: values[which])
    return rank, values[rank], (sum(values.values()) - values[rank]) / (len(values) - 1)


def starts_late(
    dataset: str, parts: Sequence[Part], seconds: Mapping[str, float], *, is_trained_on: bool = False
) -> str:
    """What to do where a dataset beside the one that is trained on, to validate, say, is waited for as it starts.

    Args:
        dataset: Its name.
        parts: Its ranks.
        seconds: What the time of the dataset that is trained on went to, as of `Verdict`.
        is_trained_on: Whether this one is trained on, too.
    """
    started_s = sum(part.figures["wait_start_s"] for part in parts)
    if started_s <= _STARTS * (seconds["training"] + sum(seconds[name] for name in MADE)):
        return ""
    when = "before the model is built" if is_trained_on else "some steps before its pass"
    hides = _hides(parts, f"its loader.prepare(…) {when} hides that")
    return f"each rank waited {started_s / len(parts):.1f} s for {dataset} to start: {hides}"


def _hides(parts: Sequence[Part], prepare: str) -> str:
    """What makes a start shorter that was waited for.

    Args:
        parts: The ranks.
        prepare: What to say to who has prepared nothing.
    """
    if not all(part.facts.get("prepared") for part in parts):
        return prepare
    waited_s = sum(part.figures["wait_start_s"] for part in parts) / sum(part.starts for part in parts)
    known = [after_s for part in parts if (after_s := part.facts.get("prepared_after_s")) is not None]
    if max(known, default=0.0) > waited_s / 2:
        return (
            f"although it was prepared, {max(known):.1f} s after its loader was made: what lies between prepare() and "
            "the first batch is hidden, so call it earlier"
        )
    at_once = " as soon as its loader was made" * bool(known)
    return f"although it was prepared{at_once}: fewer restarts, and nodes that stay, help"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What is known of a run: see `Verdict` for the fields."""

    parts: Sequence[Part]
    rates: Mapping[str, float]
    waiting: float
    seconds: Mapping[str, float]

    def words(self, limit: Limit) -> Words:
        """A sentence, and what to change."""
        if limit == "unknown":
            batches = min((part.figures["batches"] for part in self.parts), default=0)
            waited_s = self.seconds["starting"] + sum(part.waited_s for part in self.parts)
            return f"too early to tell: batches so far {batches:.0f}, {waited_s:.1f} s waited", []
        if limit in MADE and self.rates.get(limit, 0.0) > _SPARE * self.rates["training"]:
            told, lines = self._at_times(limit)
        else:
            says: dict[Limit, Callable[[], Words]] = {
                "training": self._training, "starting": self._starting, "saving": self._saving,
                "reading": self._reading, "decoding": self._decoding, "finishing": self._finishing,
            }  # fmt: skip
            told, lines = says[limit]()
        saves = saving_share(self.parts)
        if limit != "saving" and saves > _SAVES:
            lines.append(f"saving takes {saves:.0%} of the time: save less often; or {_UPLOADS}")
        others_s = self._sum("other_s")
        others = others_s / max(1e-9, others_s + self._sum("save_s") + sum(part.steady_s for part in self.parts))
        if others > _OTHERS:
            lines.append(
                f"besides, {others:.0%} of the time since its first batch went to other loaders, iterated during its "
                "steps, as to validate: what limits these, their own explain() says"
            )
        return told + self._uneven(limit), lines

    # What the words need.

    @property
    def _facts(self) -> Mapping[str, Any]:
        return self.parts[0].facts

    @property
    def _ranks(self) -> int:
        """Ranks of the run, of which this may be one."""
        return max(len(self.parts), int(self._facts.get("world_size", 1)))

    @property
    def _has_ray(self) -> bool:
        return self._facts.get("cluster_cpus") is not None

    @property
    def _cpus(self) -> float:
        """CPUs of the cluster, or of this machine where no Ray runs; infinite where they are not known."""
        return float(self._facts.get("cluster_cpus") or self._facts.get("cpus") or math.inf)

    @property
    def _trainer_cpus(self) -> float:
        """CPUs that the trainers hold."""
        return self._ranks * float(self._facts.get("worker_cpus") or 0.0)

    @property
    def _decoder_cpus(self) -> float:
        return float(self._facts["options"]["decoder_cpus"]) if self._has_ray else 1.0

    @property
    def _is_remote(self) -> bool:
        return any("://" in name and "file://" not in name for name in self._facts.get("sources", ()))

    def _most(self, name: str) -> float:
        return max(part.figures[name] for part in self.parts)

    def _sum(self, name: str) -> float:
        return sum(part.figures[name] for part in self.parts)

    def _waited(self, digits: int = 0) -> str:
        return f"waited for {self.waiting:.{digits}%} of its time since its first batch"

    def _beside(self, limit: Limit) -> str:
        """What the trainer takes beside what a part delivers."""
        takes = _rate(self.rates["training"])
        if self.rates[limit] > self.rates["training"]:
            return f"hardly more than the {takes} that the trainer takes, which {self._waited()}"
        return f"the trainer takes {takes} and {self._waited()}"

    @property
    def _does_nothing(self) -> bool:
        return sum(part.trained_s for part in self.parts) < _NO_STEP_S * self._sum("batches")

    def _uneven(self, limit: Limit) -> str:
        """Names the rank that waits most, and the one that trains slowest, where it is one."""
        shares = {part.facts["rank"]: part.waited_s / max(1e-9, part.steady_s) for part in self.parts}
        if len(shares) < 2 or limit in ("unknown", "starting"):
            return ""
        told = ""
        rank, share, others = _foremost(shares)
        if limit in MADE and share > _UNEVEN * others:
            told += f"; rank {rank} waits most, {share:.0%}"
        rank, step_s, others_s = _foremost({part.facts["rank"]: part.trained_step_s for part in self.parts})
        # Who waits for rows is waited for by the others in collective operations, which counts as their training: only
        # a rank whose whole steps are longer is slower.
        slowest, longest_s, shorter_s = _foremost({part.facts["rank"]: part.step_s for part in self.parts})
        is_slow = rank == slowest and longest_s > _UNEVEN * shorter_s
        if is_slow and step_s > _UNEVEN * others_s and step_s > _SHORT_STEP_S:
            told += f"; rank {rank} trains slowest, {1000 * step_s:,.0f} ms a step for {1000 * others_s:,.0f}"
        return told

    # What each limit is called, and what to do about it.

    def _training(self) -> Words:
        able = min(self.rates["reading"], self.rates["decoding"])
        spare = f"; reading and decoding could give {_rate(able)}" if self.rates["training"] < able < math.inf else ""
        told = f"training is the limit: it takes {_rate(self.rates['training'])} and {self._waited(1)}{spare}"
        lines = []
        decoders = self._most("decoders")
        wanted = _SPARE * self.rates["training"] / self.rates["decoding"] if self.rates["decoding"] else math.inf
        needed = max(1, math.ceil(decoders * min(1.0, wanted)))
        if self._has_ray and decoders >= 2 and needed <= decoders / 2 and 0 < self.rates["decoding"] < math.inf:
            lines.append(
                f"{_count(needed, 'decoder')} of each rank would be enough, {decoders:.0f} run: num_decoders={needed} "
                "leaves CPUs to others"
            )
        if self.seconds["starting"] > _STARTS * self.seconds["training"]:
            lines.append(f"{self._started()}: {self._hides()}")
        return told, lines

    def _starting(self) -> Words:
        told = f"starting is the limit: {self._started()}, and {self.waiting:.1%} of the time from then on"
        return told, [self._hides(), "longer runs wait no more than this one: the start comes once"]

    def _started(self) -> str:
        starts = max(part.starts for part in self.parts)
        batch = "its first batch" if starts == 1 else f"the first batches of {starts} starts"
        return f"each rank waited {self.seconds['starting'] / len(self.parts):.1f} s for {batch}"

    def _hides(self) -> str:
        """What makes that shorter."""
        told = "call loader.prepare(global_batch_size=…) before the model is built, which hides that"
        return _hides(self.parts, told)

    def _saving(self) -> Words:
        told = (
            f"saving is the limit: {saving_share(self.parts):.0%} of the time since the first batch went to "
            f"raylance.report; the rest of it, training takes {_rate(self.rates['training'])} and {self._waited()}"
        )
        return told, ["save less often, or less", f"{_UPLOADS}, where what is saved need not be waited for"]

    def _at_times(self, limit: Limit) -> Words:
        """Of a part that is waited for, and would deliver more than the trainer takes."""
        told = (
            f"{limit} is the limit at times: the trainer, which takes {_rate(self.rates['training'])}, "
            f"{self._waited()} for it, although it does {_rate(self.rates[limit])} when it has work"
        )
        if self._does_nothing:
            return told, [_NOTHING]
        return told, [
            "a larger prefetch_batches= keeps more batches ready for such times",
            "the fewer steps a pass has, the more its beginning counts: short runs like this tell little",
        ]

    def _decoding(self) -> Words:
        decoders, actors = self._most("decoders"), self._sum("decoders")
        who = f"{_count(actors, 'decoder')} deliver{'s' * (actors == 1)}"
        if not decoders:
            who = f"{_count(len(self.parts), 'shard actor')}, without decoders, deliver{'s' * (len(self.parts) == 1)}"
        told = f"decoding is the limit: {who} {_rate(self.rates['decoding'])}, {self._beside('decoding')}"
        lines = []
        asked = self._most("decoders_wanted")
        if self._has_ray and asked > decoders:
            lines.append(
                f"{_count(asked, 'decoder')} of each rank would have work, and CPUs were free for {decoders:.0f}: give "
                "the cluster CPUs"
            )
        lines += [_NOTHING] if self._does_nothing else self._more_decoders(decoders)
        images = self._facts.get("draft", ())
        if images and self._facts["row_bytes"] > _SMALL_BYTES:
            less = (
                "decode less: materialise images at the size that is trained on (jobs/materialize.py --shorter-side …)"
            )
            draft = ", or Image(draft=True) where photographs are more than twice as large"
            lines.append(f"{'or ' * bool(lines)}{less}{draft * (not all(images))}")
        elif not images:
            lines.append(
                f"{'or ' * bool(lines)}do less in decode= and transform=, or do it once, as the rows are written"
            )
        return told, lines

    def _more_decoders(self, decoders: float) -> list[str]:
        """How many would feed the trainer, and how many there is room for."""
        each = max(1e-9, self.rates["decoding"]) / (max(1.0, decoders) * len(self.parts))
        wanted = _SPARE * self.rates["training"] / (each * len(self.parts))
        needed = math.ceil(min(wanted, _MOST_HELPERS + 1))
        if needed <= decoders:
            return []
        would = (
            f"each decoder more gives about {_rate(each)}"
            if needed > _MOST_HELPERS
            else f"{_count(needed - decoders, 'more decoder')} of each rank would feed this trainer"
        )
        cost = needed * self._decoder_cpus * self._ranks
        room = (self._cpus - self._trainer_cpus) / max(1e-9, self._decoder_cpus) / self._ranks
        most = int(min(room, needed))
        if most == needed:
            if needed > _MOST_HELPERS:
                return [f"{would}: num_decoders=…, as far as there are CPUs"]
            return [f"{would}: num_decoders={needed} takes {cost:g} CPUs{' besides the trainer' * self._has_ray}"]
        held = f", of which trainers hold {self._trainer_cpus:g}" if self._trainer_cpus else ""
        where = f"{'the cluster' if self._has_ray else 'this machine'} ({_count(self._cpus, 'CPU')}{held})"
        lines = []
        together = each * most * len(self.parts)
        if together > self.rates["decoding"]:  # where shard actors decode, in threads, they may do as much
            lines.append(f"{where} has room for num_decoders={most} of each rank: about {_rate(together)} together")
        else:
            would += f", and {where} has no room for more"
        more = "add nodes" if self._has_ray else "with Ray, those of a cluster's nodes decode, too"
        return [*lines, f"{would}: {more}"]

    def _reading(self) -> Words:
        readers = max(1.0, self._most("readers"))
        bytes_s = self._sum("read_bytes") / max(1e-9, self._sum("storage_s")) / 2**20
        told = (
            f"reading is the limit: storage gives {_rate(self.rates['reading'])} ({bytes_s:,.0f} MiB/s to each shard "
            f"actor), {self._beside('reading')}"
        )
        lines = []
        if order := _BY_ROW.get(str(self._facts.get("order"))):
            instead = (
                "; or materialise a shuffled copy (jobs/materialize.py) and read that in windows"
                if order == _BY_ROW["row"]
                else ", where no row has to come more often than another"
            )
            lines.append(f'{order} reads rows one by one: order="window" reads them in runs{instead}')
        lines += [_NOTHING] if self._does_nothing else self._more_readers(readers)
        smaller = ", smaller images (jobs/materialize.py --shorter-side …)" * bool(self._facts.get("draft"))
        nearer = "; or bring the data nearer" if self._is_remote else "; or a faster disk"
        return told, [*lines, f"{'or ' * bool(lines)}read less: fewer columns={smaller}{nearer}"]

    def _more_readers(self, readers: float) -> list[str]:
        """Whether several would help: on a network they wait side by side; on one machine they share cores and disk."""
        wanted = readers * _SPARE * self.rates["training"] / max(1e-9, self.rates["reading"])
        needed = math.ceil(min(wanted, _MOST_READERS))
        decoders = self._most("decoders") * self._decoder_cpus
        free = (self._cpus - self._trainer_cpus) / self._ranks - decoders - readers
        most = needed if self._is_remote else int(min(needed, readers + max(0.0, free)))
        if most > readers:
            return [
                f"more shard actors read several windows at once: num_readers={most}, which holds {most} times "
                f"max_window_bytes on each rank{', and is not enough by itself' * (wanted > most)}; keep it only where "
                "the rate rises"
            ]
        if readers > 1:
            return [f"fewer shard actors, where num_readers={readers:.0f} gives each of them less than one alone had"]
        return []

    def _collate_fn(self, batch_ms: float) -> str:
        """What to do where the function of the loader's user takes most of the time."""
        own = "" if self._has_ray else " (with Ray, in processes of their own)"
        return (
            f"your collate_fn takes {batch_ms:.1f} ms a batch, in one thread of the trainer's process: move its work "
            f"on single rows into transform=, which the decoders do{own}, and do the rest on whole arrays"
        )

    def _finishing(self) -> Words:
        batches = max(1.0, self._sum("batches"))
        collate_ms, function_ms, transfer_ms, waited_ms, decode_ms = (
            1000 * self._sum(name) / batches
            for name in ("collate_s", "collate_fn_s", "transfer_s", "wait_finish_s", "decode_s")
        )
        step_ms = 1000 * sum(part.steady_s for part in self.parts) / batches
        told = (
            f"making batches is the limit: {collate_ms:.1f} ms of collating and {transfer_ms:.1f} ms of transfer for "
            f"each, of {step_ms:.1f} ms a step; the trainer, which takes {_rate(self.rates['training'])}, "
            f"{self._waited()}"
        )
        lines = [_NOTHING] if self._does_nothing else []
        if step_ms < 1000 * _SHORT_STEP_S or self._sum("rows") < _FEW_ROWS * batches:
            lines.append("a larger global_batch_size=: much of what a batch costs is the same whatever its size")
        if not self._has_ray and decode_ms > collate_ms:
            lines.append(
                "transform= and decoders run in threads of this process, which share its interpreter with the trainer: "
                "with Ray they have processes of their own"
            )
        elif collate_ms + transfer_ms >= waited_ms / 2:
            lines.append(
                self._collate_fn(function_ms)
                if function_ms > (collate_ms + transfer_ms) / 2
                else "fewer columns, or one of fixed-size lists in place of many: each costs its part"
            )
            lines.append(
                "a larger prefetch_batches= evens out batches that differ; more CPUs for the trainer's process help"
            )
        else:
            lines.append(
                "most of that is bringing rows to this process, and turns between epochs: longer epochs, a larger "
                "prefetch_batches=, or more CPUs for the trainer's process help"
            )
        return told, lines
