"""The diagnosis that raylance.report takes too long."""

from raylance.observe.diagnoses.diagnosis import Diagnosis, rate
from raylance.observe.figures import RunFigures

_POLL_S = 2.0  # the default of Ray Train, between two questions to its workers


def _evidence(run: RunFigures) -> str:
    return f"saving is the limit, which is raylance.report; training by itself takes {rate(run.rates['training'])}"


def report_less(run: RunFigures) -> list[str]:
    """Returns advice that makes saving shorter."""
    waits = "from the second one on, a report waits until Ray Train has taken the one before, whatever it holds"
    if (poll_s := run.facts.get("poll_s", _POLL_S)) >= _POLL_S:
        waits += (
            f", and Ray Train asks every {poll_s:g} s. RAY_TRAIN_HEALTH_CHECK_INTERVAL_S=0.2, set before Ray Train is "
            "imported, makes that shorter"
        )
    lines = [f"report less often: {waits}"]
    if not run.facts.get("uploads_async"):
        lines.append(
            "if uploading itself takes long, raylance.report(…, "
            "checkpoint_upload_mode=ray.train.CheckpointUploadMode.ASYNC) uploads while training continues"
        )
    return lines


SAVING = Diagnosis(
    cause="saving",
    means="raylance.report takes too long",
    changes=(
        "report less often: each report waits up to 2 s for Ray Train (`RAY_TRAIN_HEALTH_CHECK_INTERVAL_S`)",
        "upload while training continues (`checkpoint_upload_mode=`)",
    ),
    evidence=_evidence,
    advice=report_less,
)
