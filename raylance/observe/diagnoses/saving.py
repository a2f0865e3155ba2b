"""The diagnosis that raylance.report takes too long."""

from raylance.observe.diagnoses.diagnosis import POLLS, UPLOADS, Diagnosis, rate, waited
from raylance.observe.figures import RunFigures, saving_share


def _evidence(run: RunFigures) -> str:
    return (
        f"saving is the limit: {saving_share(run.ranks):.0%} of the time since the first batch went to "
        f"raylance.report; in the remaining time, training takes {rate(run.rates['training'])} and {waited(run)}"
    )


SAVING = Diagnosis(
    cause="saving",
    means="raylance.report takes too long",
    changes=(
        "report less often: each report waits up to 2 s for Ray Train (`RAY_TRAIN_HEALTH_CHECK_INTERVAL_S`)",
        "upload while training continues (`checkpoint_upload_mode=`)",
    ),
    evidence=_evidence,
    advice=lambda run: [
        f"report less often: {POLLS}",
        f"if uploading itself takes long, {UPLOADS}",
    ],
)
