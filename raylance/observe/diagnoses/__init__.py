"""The table of diagnoses: cause, evidence, advice.

`explain()`, the report, `raylance.top`, the dashboard and the alerts all use its texts. A new diagnosis needs a file of
its own and an entry below.
"""

from raylance.observe.diagnoses.alarms import ALARMS
from raylance.observe.diagnoses.decoding import DECODING
from raylance.observe.diagnoses.diagnosis import Diagnosis
from raylance.observe.diagnoses.finishing import FINISHING
from raylance.observe.diagnoses.others import OTHERS
from raylance.observe.diagnoses.reading import READING
from raylance.observe.diagnoses.saving import SAVING
from raylance.observe.diagnoses.starting import STARTING
from raylance.observe.diagnoses.training import TRAINING

DIAGNOSES: dict[str, Diagnosis] = {
    diagnosis.cause: diagnosis
    for diagnosis in (TRAINING, READING, DECODING, FINISHING, STARTING, SAVING, OTHERS, *ALARMS)
}
"""The diagnoses by cause."""


def what_to_change(cause: str) -> str:
    """Returns the changes that help against a cause, in one line."""
    return "; ".join(DIAGNOSES[cause].changes)


__all__ = ["DIAGNOSES", "Diagnosis", "what_to_change"]
