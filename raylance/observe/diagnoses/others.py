"""The diagnosis that other datasets, such as for validation, take the time."""

from raylance.observe.diagnoses.diagnosis import Diagnosis, rate
from raylance.observe.figures import RunFigures


def _evidence(run: RunFigures) -> str:
    training = rate(run.rates["training"])
    return f"other datasets are the limit, such as one for validation; training by itself takes {training}"


def look_at_others(run: RunFigures) -> list[str]:
    """Returns advice that makes passes over other datasets shorter."""
    return [
        "other loaders, such as for validation: their explain() says what they wait for; or iterate them less often"
    ]


OTHERS = Diagnosis(
    cause="other datasets",
    means="passes over other datasets take the time",
    changes=(
        "`explain()` of their loaders says what they wait for",
        "their `loader.prepare(…)` some steps before the pass",
        "validate less often",
    ),
    evidence=_evidence,
    advice=look_at_others,
)
