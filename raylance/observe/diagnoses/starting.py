"""The diagnosis that the first batch takes long."""

from collections.abc import Sequence

from raylance.observe.diagnoses.diagnosis import Diagnosis
from raylance.observe.figures import RankFigures, RunFigures

_STARTS = 0.1  # share of the time: a longer start is worth hiding


def describe_start(run: RunFigures) -> str:
    """Returns a phrase that says how long the ranks waited for the first batches of their starts, as a mean."""
    starts = max(rank.starts for rank in run.ranks)
    batch = "its first batch" if starts == 1 else f"the first batches of {starts} starts"
    return f"each rank waited {run.seconds['starting'] / len(run.ranks):.1f} s for {batch}"


def hide_start(run: RunFigures) -> str:
    """Returns advice that makes the start shorter."""
    return _hide(run.ranks, "call loader.prepare(global_batch_size=…) before the model is built, which hides that")


def describe_late_start(run: RunFigures, dataset: str, total_s: float, *, is_trained_on: bool) -> str:
    """Returns advice if another dataset starts slowly, compared with the time of all ranks; else ""."""
    started_s = run.sum("wait_start_s")
    if started_s <= _STARTS * total_s:
        return ""
    when = "before the model is built" if is_trained_on else "some steps before its pass"
    hides = _hide(run.ranks, f"its loader.prepare(…) {when} hides that")
    return f"each rank waited {started_s / len(run.ranks):.1f} s for {dataset} to start: {hides}"


def _hide(ranks: Sequence[RankFigures], prepare: str) -> str:
    """Returns advice on a shorter start: `prepare` if some rank did not call `RankLoader.prepare` before it."""
    if any(rank.facts.get("num_workers") is not None for rank in ranks):
        return "DataLoader starts its workers then, each of which opens the dataset"
    if not all(rank.facts.get("prepared") for rank in ranks):
        return prepare
    waited_s = sum(rank.figures["wait_start_s"] for rank in ranks) / sum(rank.starts for rank in ranks)
    known = [after_s for rank in ranks if (after_s := rank.facts.get("prepared_after_s")) is not None]
    if max(known, default=0.0) > waited_s / 2:
        return (
            f"although it was prepared, {max(known):.1f} s after its loader was made: what lies between prepare() and "
            "the first batch is hidden, so call it earlier"
        )
    at_once = " as soon as its loader was made" * bool(known)
    return f"although it was prepared{at_once}: fewer restarts, and nodes that stay, help"


STARTING = Diagnosis(
    cause="starting",
    means="helpers are not there yet",
    changes=(
        "`loader.prepare(…)` before the model is built",
        "`ray status` shows helpers that find no place, and nodes that boot",
    ),
    evidence=lambda run: f"starting is the limit: {describe_start(run)}",
    advice=lambda run: [hide_start(run), "longer runs wait no more than this one: the start comes once"],
)
