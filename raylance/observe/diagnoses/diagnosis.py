"""The class `Diagnosis`, and the phrases that several diagnoses share."""

import dataclasses
from collections.abc import Callable

from raylance.observe.figures import RunFigures

SPARE = 1.1  # times the rate that is just enough: advice aims at this rate
NO_MODEL = "this loop does next to nothing with its batches, so any loader would limit it: measure again with the model"
_NO_STEP_S = 0.002  # per batch: a loop that takes less does not train


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One cause that makes a run slow or endangers it: an entry of the table `DIAGNOSES`."""

    cause: str  # its name in verdicts, in metrics (label `cause`) and on the dashboard
    means: str  # its meaning in a few words
    # Changes that help, the most useful first, each with its option or flag. The dashboard and the alerts show these,
    # because they do not know a run's numbers.
    changes: tuple[str, ...]
    evidence: Callable[[RunFigures], str] | None = None  # with the numbers of a run; None if only alerts find it
    advice: Callable[[RunFigures], list[str]] = lambda run: []  # what helps in this run, most useful first


def rate(rows_s: float) -> str:
    """Returns rows a second as text."""
    return f"{rows_s:,.0f} rows/s" if rows_s < 1e7 else "any number of rows/s"


def count(number: float, what: str) -> str:
    """Returns a number of things as text, with a plural s if needed."""
    return f"{number:,.0f} {what}{'s' * (round(number) != 1)}"


def beside(run: RunFigures, stage: str) -> str:
    """Returns a phrase that compares the rate of the trainer with the rate of a stage."""
    takes = rate(run.rates["training"])
    if run.rates[stage] > run.rates["training"]:
        return f"hardly more than the {takes} that the trainer takes"
    return f"the trainer takes {takes}"


def does_nothing(run: RunFigures) -> bool:
    """Returns whether the training loop does next to nothing with its batches."""
    return run.seconds["training"] < _NO_STEP_S * run.sum("batches")


def is_fixed(run: RunFigures, option: str) -> bool:
    """Returns whether an option that may be a range of numbers, or "auto", was given as one number."""
    return isinstance(run.facts["options"].get(option, 1), int)


def most_of(run: RunFigures, option: str, auto: float = 0.0) -> float:
    """Returns the largest number that an option allows; `auto` for "auto"."""
    given = run.facts["options"].get(option, 0)
    if given == "auto":
        return auto
    return float(max(given) if isinstance(given, list | tuple) else given)
