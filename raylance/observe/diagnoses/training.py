"""The diagnosis that training is the limit: the loader keeps up."""

import math

from raylance.observe.diagnoses.diagnosis import SPARE, Diagnosis, count, is_fixed, rate
from raylance.observe.figures import RunFigures


def _evidence(run: RunFigures) -> str:
    able = min(run.rates["reading"], run.rates["decoding"])
    spare = f"; reading and decoding could give {rate(able)}" if run.rates["training"] < able < math.inf else ""
    return f"training is the limit: it takes {rate(run.rates['training'])}{spare}"


def _advice(run: RunFigures) -> list[str]:
    decoders, decoding = run.most("decoders"), run.rates["decoding"]
    needed_share = SPARE * run.rates["training"] / decoding if decoding else math.inf
    needed = max(1, math.ceil(decoders * min(1.0, needed_share)))
    can_spare = decoders >= 2 and needed <= decoders / 2 and 0 < decoding < math.inf
    if (
        run.has_ray and can_spare and is_fixed(run, "num_decoders")
    ):  # otherwise idle decoders are dismissed by themselves
        return [
            f"{count(needed, 'decoder')} of each rank would be enough, {decoders:.0f} run: num_decoders={needed} "
            "leaves CPUs to others"
        ]
    return []


TRAINING = Diagnosis(
    cause="training",
    means="the loader keeps up",
    changes=("nothing: the data costs no time",),
    evidence=_evidence,
    advice=_advice,
)
