"""The diagnosis that training is the limit: the loader keeps up."""

import math

from raylance.observe.diagnoses.diagnosis import SPARE, Diagnosis, count, rate, waited
from raylance.observe.diagnoses.starting import STARTS, describe_start, hide_start
from raylance.observe.figures import RunFigures


def _evidence(run: RunFigures) -> str:
    able = min(run.rates["reading"], run.rates["decoding"])
    spare = f"; reading and decoding could give {rate(able)}" if run.rates["training"] < able < math.inf else ""
    return f"training is the limit: it takes {rate(run.rates['training'])} and {waited(run, 1)}{spare}"


def _advice(run: RunFigures) -> list[str]:
    lines = []
    decoders, decoding = run.most("decoders"), run.rates["decoding"]
    needed_share = SPARE * run.rates["training"] / decoding if decoding else math.inf
    needed = max(1, math.ceil(decoders * min(1.0, needed_share)))
    if run.has_ray and decoders >= 2 and needed <= decoders / 2 and 0 < decoding < math.inf:
        lines.append(
            f"{count(needed, 'decoder')} of each rank would be enough, {decoders:.0f} run: num_decoders={needed} "
            "leaves CPUs to others"
        )
    if run.seconds["starting"] > STARTS * run.seconds["training"]:
        lines.append(f"{describe_start(run)}: {hide_start(run)}")
    return lines


TRAINING = Diagnosis(
    cause="training",
    means="the loader keeps up",
    changes=("nothing: the data costs no time",),
    evidence=_evidence,
    advice=_advice,
)
