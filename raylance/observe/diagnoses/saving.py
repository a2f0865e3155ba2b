"""Owns the text of the diagnosis that saving is the limit, as raylance.report takes too long; never the decision."""

from raylance.observe.diagnoses.diagnosis import UPLOADS, Diagnosis, rate, waited
from raylance.observe.figures import RunFigures, saving_share


def _evidence(run: RunFigures) -> str:
    return (
        f"saving is the limit: {saving_share(run.ranks):.0%} of the time since the first batch went to "
        f"raylance.report; the rest of it, training takes {rate(run.rates['training'])} and {waited(run)}"
    )


SAVING = Diagnosis(
    cause="saving",
    means="raylance.report takes too long",
    changes=("save less often", "upload while training continues (`checkpoint_upload_mode=`)"),
    evidence=_evidence,
    advice=lambda run: [
        "save less often, or less",
        f"{UPLOADS}, if training need not wait for it",
    ],
)
