"""Owns what a diagnosis is, and the phrases that several diagnoses share; never a diagnosis of its own."""

import dataclasses
from collections.abc import Callable

from raylance.observe.figures import RunFigures

SPARE = 1.1  # times what would be just enough
UPLOADS = (
    "raylance.report(…, checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC) uploads while training continues"
)
NO_MODEL = (
    "this loop does next to nothing with its batches, so that any loader would be its limit: what limits a trainer "
    "shows with the model in it"
)
_NO_STEP_S = 0.002  # for a batch: a loop that does no more does not train


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One cause that a run is slower than it could be, or in danger: a row of the table.

    Attributes:
        cause: Its name in verdicts, in metrics (label `cause`) and on the dashboard.
        means: What it means, in a few words.
        changes: What to change, the most useful first, each with its option or flag; as the dashboard and the alerts
            show it, which know no numbers of the run.
        evidence: Describes it with the numbers of a run; None for what only alerts find.
        advice: What to change in this run, with numbers, the most useful first.
    """

    cause: str
    means: str
    changes: tuple[str, ...]
    evidence: Callable[[RunFigures], str] | None = None
    advice: Callable[[RunFigures], list[str]] = lambda run: []


def rate(rows_s: float) -> str:
    """Rows a second, in words."""
    return f"{rows_s:,.0f} rows/s" if rows_s < 1e7 else "any number of rows/s"


def count(number: float, what: str) -> str:
    """So many things, with a plural s."""
    return f"{number:,.0f} {what}{'s' * (round(number) != 1)}"


def waited(run: RunFigures, digits: int = 0) -> str:
    """How much the trainers waited."""
    return f"waited for {run.waiting:.{digits}%} of its time since its first batch"


def beside(run: RunFigures, stage: str) -> str:
    """What the trainer takes, compared with what a stage delivers."""
    takes = rate(run.rates["training"])
    if run.rates[stage] > run.rates["training"]:
        return f"hardly more than the {takes} that the trainer takes, which {waited(run)}"
    return f"the trainer takes {takes} and {waited(run)}"


def does_nothing(run: RunFigures) -> bool:
    """Whether the training loop does nothing with its batches."""
    return run.seconds["training"] < _NO_STEP_S * run.sum("batches")
