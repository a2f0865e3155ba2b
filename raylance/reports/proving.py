"""The proof of a run from its records: compares the rows that its ranks were handed with the rows that its dataset
selects.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raylance.api.dataset import opened_of
from raylance.api.opening_samples import take_samples
from raylance.audit.epoch import EpochAudit
from raylance.audit.reopening import reopen
from raylance.columns import dataset_stem
from raylance.descriptions import in_words
from raylance.errors import ConfigError
from raylance.observe.verdict import Verdict
from raylance.orders.changed import PLACE
from raylance.planning.digest import Interval
from raylance.planning.history import LoaderHistory, line_of_history
from raylance.planning.proof import EpochProof, Expected, prove
from raylance.planning.state import changes_of, identity_of, parse_state, selection_of, subject_of
from raylance.reports.reading import LoaderRecord, Run, read_run
from raylance.source.storage_options import StorageOptions

logger = logging.getLogger(__name__)

_LINES = 3  # most lines of a verdict
FEW_ROWS = 10**7  # most rows of plans to compute, in about ten seconds, if the proof is only a part of the work
_UNKNOWN_ROWS = "its records do not hold which rows were handed out: a raylance before 0.8 wrote them"
_LACKING = (
    "Records hold no storage_options=, new place of moved data (uri=), or code of your own (order=, samples=), and "
    "those of raylance 0.11 and older no samples= of packs: give them to prove_run."
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The proof of one dataset of a run.

    Attributes:
        dataset: Its name in the run.
        who: "" if the ranks share the rows: the proof is about all ranks together. If each rank sees the whole dataset,
            the rank or ranks that the proof is about: "rank <n>" or "each of <n> ranks".
        epochs: The proofs by epoch; consecutive epochs with the same result share one.
    """

    dataset: str
    who: str
    epochs: tuple[EpochProof, ...]

    def lines(self) -> list[str]:
        """Returns the proof in words, a line for each of `epochs`."""
        return [f"{self.dataset}{self.who and f', {self.who}'}, {of_epochs(one)}: {one.text}" for one in self.epochs]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunProof:
    """Proof of the rows that a run's loops were handed: they are compared with the planned rows, over ranks and starts.
    The plan of an epoch has every selected row once or, if the order repeats rows, the rows that the order draws.

    The ranks counted and hashed the rows that their training functions took, with each report and at each epoch's end.
    If a run was started several times, only the rows that trained the present model count. The rows that
    earlier starts took after the place at which a start resumed do not count: they were rolled back, and came again. If
    new processes loaded no state, their model is new or was restored by other means; they count as a start that resumed
    at its first row. Within a process, rows are rolled back only if the process loads a state. An epoch is unproven if
    `set_epoch` or a second loader made its rows come again.

    The proof shows which rows came. It does not show in which steps they came, or with which bytes. A sequence of
    `Pack` counts by its number: no record holds the documents of which it was made, which are other ones in each epoch.
    Two different sets of rows have the same 64-bit hash in one of 2**64 cases. Rows that the plan leaves out
    (remainder="drop") are computed from the plan, because no record holds them.

    Attributes:
        datasets: The proofs. A dataset has one proof for all ranks. If each rank sees the whole dataset and the
            results differ, it has one for each rank. A dataset without recorded rows has none.
        notes: Lines that name the datasets whose records could not all be examined, and why; and the starts that did
            not restore a checkpoint that there was: if the model was loaded from it, rows came again.
        starts: A line for each start of each dataset's loaders: the position that it restored, or whether there was a
            checkpoint. Empty if there was one start.
    """

    datasets: tuple[Proof, ...]
    notes: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()

    @property
    def faults(self) -> list[str]:
        """A line for each epoch in which other rows than planned were handed out. Consecutive epochs with equal results
        share a line.
        """
        return self._lines("fault")

    @property
    def unproven(self) -> list[str]:
        """A line for each epoch without proof, and the lines of `notes`. Consecutive epochs with equal results share a
        line.
        """
        return [*self._lines("unproven", "counted"), *self.notes]

    @property
    def ok(self) -> bool:
        """Whether every epoch is proven: there is at least one proof, and `faults` and `unproven` are empty."""
        return bool(self.datasets) and not self.faults and not self.unproven

    @property
    def verdict(self) -> str:
        """The result in one line."""
        for what, lines in (("FAULT: ", self.faults), ("", self.unproven)):
            if lines:
                return f"{what}{lines[0]}{f' (and {len(lines) - 1} more)' * (len(lines) > 1)}"
        lines = [line for proof in self.datasets for line in proof.lines()]
        more = f" (and {len(lines) - _LINES} lines before)" * (len(lines) > _LINES)
        return "; ".join(lines[-_LINES:]) + more or "no row was handed out yet"

    def __str__(self) -> str:
        lines = [f"{'FAULT: ' * (status == 'fault')}{line}" for status, line in self._lines_by_status()]
        return "\n".join([*lines, *self.starts, *self.notes]) or self.verdict

    __repr__ = __str__

    def _lines(self, *statuses: str) -> list[str]:
        return [line for status, line in self._lines_by_status() if status in statuses]

    def _lines_by_status(self) -> list[tuple[str, str]]:
        return [
            (one.status, line) for proof in self.datasets for one, line in zip(proof.epochs, proof.lines(), strict=True)
        ]


def prove_run(
    path: str | os.PathLike[str],
    *,
    uri: str | Sequence[str] = (),
    dataset: str | None = None,
    storage_filesystem: Any = None,
    **changes: Any,
) -> RunProof:
    """Proves which rows a run's training functions were handed, during or after the run; see `RunProof`.

    The datasets are opened as the records describe them, and the hash of the planned rows is computed now, and
    compared with the recorded hash. Rows of a dataset that cannot be opened are counted but not compared.

    Args:
        path: The run's folder, <storage path>/<run name>, as a path or URI.
        uri: The present URI of `dataset`, if its data has moved; for a mixture, the URIs of all its datasets, in the
            order in which `raylance.mix` got them.
        dataset: The name of one dataset in the run; None for all.
        storage_filesystem: A file system of pyarrow, as for `ray.train.RunConfig`; `path` is then a path in it.
        **changes: Arguments of `raylance.dataset` that records do not hold, such as `storage_options`, `samples`
            by code of your own, or a custom `order`.

    Raises:
        ConfigError: If `path` holds no record of the run, or none of this dataset; if the run has several datasets, and
            `uri`, `order` or `samples` is given without `dataset`.
    """
    if (samples := take_samples("prove_run()", changes.pop("samples", None), changes)) is not None:
        changes["samples"] = samples
    run = read_run(path, storage_filesystem)
    groups = groups_of(run)
    names = sorted({name for label, records in groups.items() for name in (label, *_names(records))})
    if dataset is not None and dataset not in names:
        raise ConfigError(f"dataset={dataset!r}: the run has {', '.join(map(repr, names))}. Give one of them.")
    of_one = {"uri": uri, **changes} if uri else changes
    meant = [label for label, records in groups.items() if dataset in (None, label, *_names(records))]
    if dataset in groups:
        meant = [dataset]
    if len(meant) > 1 and of_one.keys() - {"storage_options"}:
        raise ConfigError(
            f"{', '.join(sorted(of_one))}: the run has {', '.join(map(repr, meant))}, and one may not be "
            "opened as another. Say which one is meant by dataset=."
        )
    return prove_records(run, meant, uri=uri, **changes)


def explain_run(
    path: str | os.PathLike[str],
    storage_filesystem: Any = None,
    *,
    storage_options: StorageOptions | None = None,
) -> Verdict:
    """Says in words which stage limits a run, over all ranks and starts, and what to change; see `Verdict`. Also says
    whether every selected row was handed out once, a line for the datasets that are trained on, and one for each other
    dataset. Epochs that take long to compare are left to `prove_run`.

    Args:
        path: The run's folder, <storage path>/<run name>, as a path or URI.
        storage_filesystem: A file system of pyarrow, as for `ray.train.RunConfig`; `path` is then a path in it.
        storage_options: Options of the dataset's storage, which is opened to compare the rows.

    Raises:
        ConfigError: If there is no record of the run.
    """
    run = read_run(path, storage_filesystem)
    others = [name for name in run.datasets if name not in run.trained_on]
    proofs = [
        prove_records(run, names, most_rows=FEW_ROWS, **storage_argument(storage_options))
        for names in (run.trained_on, *([name] for name in others))
    ]
    # A line for each, because one line for all would only say the first fault.
    lines = [proof.verdict for proof in proofs if proof is proofs[0] or proof.datasets or proof.notes]
    return dataclasses.replace(run.verdict(run.main), rows="\n".join(lines))


def storage_argument(storage_options: StorageOptions | None) -> dict[str, Any]:
    """Returns `storage_options` as a keyword argument for opening a dataset; {} if none were given."""
    return {"storage_options": storage_options} if storage_options else {}


def prove_records(run: Run, names: Sequence[str], *, most_rows: int | None = None, **changes: Any) -> RunProof:
    """Proves some datasets of a run by its records; see `prove_run`. For each dataset, at most `most_rows` rows of
    plans are computed, the last epochs first; the other epochs are only counted.
    """
    proofs: list[Proof] = []
    notes: list[str] = []
    starts: list[str] = []
    for label, records in groups_of(run).items():
        if not {label, *_names(records)} & set(names):
            continue
        known = [record for record in records if record.digest is not None]
        if len(known) < len(records):
            notes.append(f"{label}: not all is proven, {_UNKNOWN_ROWS}")
        begun = _starts(records)
        notes += [f"{label}, {text}" for text, is_forgotten in begun if is_forgotten]
        starts += [f"{label}, {text}" for text, is_forgotten in begun if not is_forgotten] * (len(begun) > 1)
        plans = Plans(known, changes, most_rows)
        by_who = {
            who: prove(line_of_history(histories), plans.expected) for who, histories in histories_of(known).items()
        }
        proofs += [Proof(dataset=label, who=who, epochs=tuple(epochs)) for who, epochs in _joined(by_who).items()]
    found = tuple(proof for proof in proofs if proof.epochs)
    return RunProof(datasets=found, notes=tuple(notes), starts=tuple(starts))


def _starts(records: Sequence[LoaderRecord]) -> list[tuple[str, bool]]:
    """Returns a line for each start of the run, by its lowest rank, and whether it left a checkpoint unrestored.
    Records of an older raylance do not say so, and are left out.
    """
    firsts: dict[str, LoaderRecord] = {}
    by_process: dict[str, str] = {}  # the start of each process
    ranks: set[int] = set()  # those of the last start; outside of Ray Train, starts have no names
    for record in sorted(records, key=lambda record: record.begun_s):
        facts = record.facts
        if not facts["split"] or "restored" not in facts:
            continue
        process = f"{facts['host']} {facts['pid']}"
        if process not in by_process:
            last = next(reversed(by_process.values()), "")
            is_new = not last or record.rank in ranks or firsts[last].facts["world_size"] != facts["world_size"]
            by_process[process] = record.start or (process if is_new else last)
            ranks = {record.rank} if is_new else ranks | {record.rank}
        start = by_process[process]
        if start not in firsts or record.rank < firsts[start].rank:
            firsts[start] = record
    found = []
    for number, record in enumerate(firsts.values(), 1):
        facts, start = record.facts, f"start {number} of {len(firsts)}"
        if facts["restored"] is not None:
            epoch, position = facts["restored"]
            found.append((f"{start}: restored epoch {epoch}, position {position:,}", False))
        elif facts["checkpoint"]:
            text = f"{start}: began at {_place(facts)}, though there was a checkpoint: it was not restored"
            found.append((text, True))
        else:
            found.append((f"{start}: began at {_place(facts)}; there was no checkpoint of it", False))
    return found


def _place(facts: Mapping[str, Any]) -> str:
    return f"epoch {facts['state']['epoch']}, position {facts['state']['position']:,}"


def of_epochs(one: EpochProof) -> str:
    """Names the epochs of a proof; the first epoch is 0."""
    last = one.epoch + one.epochs - 1
    return f"epoch {one.epoch}" if one.epochs == 1 else f"each of epochs {one.epoch} to {last}"


def histories_of(records: Sequence[LoaderRecord]) -> dict[str, list[LoaderHistory]]:
    """Returns the histories of the loaders, which say what each was handed: under "" if the ranks share the rows, under
    "rank <n>" if each rank sees the whole dataset. Records with a damaged digest are left out.
    """
    found: dict[str, list[LoaderHistory]] = {}
    for record in records:
        try:
            history = _history_of(record)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("the digest of %s is damaged, and left out (%s)", record.name, error)
            continue
        found.setdefault("" if record.facts["split"] else f"rank {record.rank}", []).append(history)
    return found


def _history_of(record: LoaderRecord) -> LoaderHistory:
    facts, digest = record.facts, record.digest or {}
    handed, forgotten = record.series["rows"], digest.get("forgotten")
    last = int(np.searchsorted(handed, handed[-1])) if len(handed) else 0  # the first sample after the last row
    return LoaderHistory(
        start=str(digest["start"]),
        ledger=str(digest["ledger"]),
        rank=int(digest["rank"]),
        world_size=int(digest["world_size"]),
        data_parallel=(int(digest["dp_rank"]), int(digest["dp_size"])) if "dp_size" in digest else None,
        is_elastic=bool(digest.get("elastic")),
        intervals=[Interval.from_list(values) for values in digest["intervals"]],
        restored={jump: (epoch, position) for jump, epoch, position in digest.get("restored", ())},
        forgotten=None if forgotten is None else (forgotten[0], forgotten[1]),
        process=str(digest.get("process") or f"{facts['host']} {facts['pid']}"),
        begun_s=record.started,
        ended_s=float(record.series["time_s"][last]) if len(handed) else record.started,
        selection=selection_of(facts["state"]),
        earlier=_earlier(facts["state"]),
        plan=_plan_of(record),
    )


def _earlier(state: Mapping[str, Any]) -> dict[int, list[tuple[str, ...]]]:
    """Returns, by epoch, for each dataset the keys of the rows that it had before they changed in its middle."""
    found: dict[int, list[tuple[str, ...]]] = {}
    datasets = changes_of(state)
    for number, changes in enumerate(datasets):
        for change in changes:
            before = change["before"]
            epoch, position = before.get(PLACE, (change["epoch"], change["position"]))
            if position:
                keys = found.setdefault(epoch, [()] * len(datasets))
                keys[number] += selection_of(before | {"fingerprint": None} if PLACE in before else before)
    return found


def _plan_of(record: LoaderRecord) -> str:
    """Names the plan that a record's rows are compared with; the same name means the same plan."""
    state = {
        name: value
        for name, value in identity_of(record.facts["state"]).items()
        if name not in ("uri", "decode", "codecs")  # the identity tells data apart, and they may be moved
    }
    return json.dumps([state, record.facts["remainder"]], sort_keys=True)


def groups_of(run: Run) -> dict[str, list[LoaderRecord]]:
    """Returns the records of each dataset by its label. Loaders made by hand get their names in the order in which they
    are iterated, so another start may exchange the names. Therefore the data of the records decides, too. Data that
    were moved between two starts count as lying in their first place.
    """
    groups: dict[tuple[Any, ...], list[LoaderRecord]] = {}
    first: dict[str, Any] = {}  # by place and by identity
    subjects: dict[tuple[Any, ...], str] = {}
    for record in run.records:
        facts, state = record.facts, record.facts["state"]
        keys = [json.dumps([name, state[name]]) for name in ("identity", "uri") if state.get(name)]
        if isinstance(state.get("uri"), Mapping):
            # One dataset of a mixture may be moved, and another one have changed.
            keys += [json.dumps([*state["uri"], each]) for each in (state.get("identity") or {}).items()]
        place = next((first[key] for key in keys if key in first), state.get("uri"))
        first |= dict.fromkeys(keys, place)
        stem = facts.get("stem", facts["dataset"])
        stem = dataset_stem(place) if stem == dataset_stem(state.get("uri")) else stem
        named, subject = (stem, facts.get("number", 1), facts["split"]), subject_of(state | {"uri": place})
        if changes := next(iter(changes_of(state)), []):  # a filter that has changed in the course of the run
            before = changes[0]["before"]
            if PLACE in before:  # the first dataset of a mixture has changed
                before = {name: {next(iter(state["uri"])): before[name]} for name in ("filter", "split")}
            of_first = subject_of(state | before | {"uri": place})
            subjects.setdefault((*named, subject), subjects.get((*named, of_first), of_first))
        groups.setdefault((*named, subjects.get((*named, subject), subject)), []).append(record)
    labels: dict[str, list[LoaderRecord]] = {}
    for number, (key, records) in enumerate(groups.items()):
        others = {name for other, found in groups.items() if other != key for name in _names(found)}
        label, state = records[-1].dataset, records[-1].facts["state"]
        if others & _names(records):
            known = {name: in_words(state.get(name)) for name in ("uri", "branch", "filter", "split")}
            label += f" ({', '.join(f'{name} {value}' for name, value in known.items() if value)})"
        labels[label if label not in labels else f"{label}, number {number + 1}"] = records
    return dict(sorted(labels.items()))


def _names(records: Sequence[LoaderRecord]) -> set[str]:
    return {record.dataset for record in records}


def _joined(by_who: Mapping[str, list[EpochProof]]) -> dict[str, list[EpochProof]]:
    """Joins the proofs of all ranks into one if they are the same."""
    if len(by_who) > 1 and all(epochs == next(iter(by_who.values())) for epochs in by_who.values()):
        return {f"each of {len(by_who)} ranks": next(iter(by_who.values()))}
    return dict(by_who)


class Plans:
    """The plans of a dataset's epochs. Starts may differ in plan and selection, so each plan is opened by itself."""

    def __init__(self, records: Sequence[LoaderRecord], changes: dict[str, Any], most_rows: int | None) -> None:
        self._records = {_plan_of(record): record for record in records}
        self._changes, self._most_rows = changes, most_rows
        self._known: dict[str, Expected | str] = {}

    def expected(self, plan: str) -> Expected | str:
        """Returns the rows that a plan's epochs are compared with, or the reason why they are unknown."""
        if plan not in self._known:
            left = [one.most_rows for one in self._known.values() if isinstance(one, Expected) and one.most_rows]
            most_rows = None if self._most_rows is None else min([self._most_rows, *left])  # one limit for all plans
            try:
                self._known[plan] = _expected(self._records[plan], self._changes, most_rows)
            except Exception as error:  # a storage fails, or a dataset was moved: its rows are still counted
                self._known[plan] = f"{' '.join(str(error).split(chr(10))[:2]) or repr(error)} {_LACKING}"
        return self._known[plan]


def _expected(record: LoaderRecord, changes: dict[str, Any], most_rows: int | None) -> Expected:
    """Returns the rows that a dataset selects, and their order: None if only the code of a custom order is missing."""
    state, remainder = record.facts["state"], record.facts["remainder"]
    has_order = True
    try:
        opened = reopen(state, remainder=remainder, **changes)
    except ConfigError:
        if "order" in changes or record.facts.get("repeats", True):
            raise
        # No record holds the code of a custom order, but the selection does not depend on it.
        opened, has_order = reopen(state, remainder=remainder, **changes, order="sequential"), False
    source = opened_of(opened).read.source
    selection = source.load_selection()
    if selection.fingerprint != state["fingerprint"]:
        raise ConfigError(f"{opened!r} selects other rows than the run did.")
    if not has_order:
        state = dataclasses.replace(parse_state(state), order=opened_of(opened).delivery.order.params()).to_dict()
    # A later state of the loader, as after a change of the weights, does not know all epochs that the record has.
    begun = {name: value for name, value in record.facts.get("begun", {}).items() if name in ("epoch", "position")}
    order = EpochAudit(opened, state=state | begun).plan.order
    return Expected(
        selection=selection,
        order=order if has_order else None,
        most_rows=most_rows,
        tokens=selection.tokens,
        source=source,
    )
