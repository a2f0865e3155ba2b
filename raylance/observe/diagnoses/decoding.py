"""The diagnosis that decoders are too slow; it advises more of them only if CPUs are free that no trainer holds, or if
the decoders hardly compute.
"""

import math

from raylance.observe.diagnoses.diagnosis import (
    NO_MODEL,
    SPARE,
    Diagnosis,
    beside,
    count,
    does_nothing,
    most_of,
    rate,
)
from raylance.observe.figures import RunFigures

_SMALL_BYTES = 16 << 10  # if rows have fewer bytes, smaller images would save little
_ASIDE = 0.1  # share of the time: if saving and validating take more, the text says that decoders work ahead meanwhile
_MOST_DECODERS = 32  # a run that needs more on a rank has a different problem
_IDLE = 0.2  # share of their time in which decoders compute: below it, they mostly wait for something


def _is_on_device(run: RunFigures) -> bool:
    """Returns whether most decoding is done on the trainers' devices."""
    return run.sum("device_decode_s") > run.sum("decode_s") / 2


def _transform_share(run: RunFigures) -> float:
    """Returns the share of the seconds of decoding that the user's `transform=` takes, in [0, 1]."""
    return run.sum("transform_s") / max(1e-9, run.sum("decode_s"))


def _computes(run: RunFigures) -> float | None:
    """Returns the share of their time in which decoders compute, in [0, 1]; None if they do not mostly wait.

    Decoders also compute less than they might if there are more of them than free CPUs, or, as threads, if only one can
    hold the interpreter. So decoders that keep half of these busy together do not count as waiting.
    """
    own_s = run.sum("decode_s") - run.sum("device_decode_s")
    share = run.sum("decode_cpu_s") / max(1e-9, own_s)
    decoders = sum(max(1.0, rank.figures["decoders"]) for rank in run.ranks) * run.world_size / len(run.ranks)
    room = run.cpus if run.has_ray else 1.0
    return share if 0 < share < _IDLE and share * decoders < room / 2 else None  # 0: an older record lacks it


def _evidence(run: RunFigures) -> str:
    actors, ranks = run.sum("decoders"), len(run.ranks)
    deliver = f"{count(actors, 'decoder')} deliver{'s' * (actors == 1)}"
    if _is_on_device(run):
        deliver = f"{count(ranks, 'device')} of batches decode{'s' * (ranks == 1)}"
    elif not run.most("decoders"):
        deliver = f"{count(ranks, 'shard actor')}, without decoders, deliver{'s' * (ranks == 1)}"
    aside_s = run.sum("save_s") + run.sum("other_s")
    also = " (with work while the trainer saves and validates)" * (aside_s > _ASIDE * run.steady_s)
    if (share := _transform_share(run)) > 1 / 2:
        also += f" with your transform=, which is {share:.0%} of that work"
    return f"decoding is the limit: {deliver} {rate(run.rates['decoding'])}{also}, {beside(run, 'decoding')}"


def _advice(run: RunFigures) -> list[str]:
    lines = []
    wanted, decoders = run.most("decoders_wanted"), run.most("decoders")
    if run.has_ray and wanted > decoders:
        lines.append(
            f"{count(wanted, 'decoder')} of each rank would have work, and CPUs were free for {decoders:.0f}: give "
            "the cluster CPUs"
        )
    if does_nothing(run):
        lines.append(NO_MODEL)
    elif _is_on_device(run):
        lines.append(
            "the device decodes in one thread of the trainer's process: decode actors share the work, with "
            "raylance.Image in place of DeviceImage, or a decoder without on_device"
        )
    else:
        lines += _more_decoders(run, decoders)
    return lines + [f"{'or ' * bool(lines)}{change}" for change in _less_work(run)]


def _less_work(run: RunFigures) -> list[str]:
    """Returns advice that makes decoding a row cheaper, by what the rows need."""
    facts, share = run.facts, _transform_share(run)
    lines = []
    if share > 1 / 2:
        row_ms = 1000 * run.sum("transform_s") / max(1.0, run.sum("decoded_rows"))
        lines.append(
            f"make your transform= cheaper, which takes {row_ms:,.2g} ms a row: work on whole arrays in it, or do "
            "once, as the rows are written, what does not change"
        )
    images = facts.get("draft", ())
    if images and facts["row_bytes"] > _SMALL_BYTES and share < 1 / 2:
        less = "decode less: materialise images at the size that is trained on (jobs/materialize.py --shorter-side …)"
        draft = ", or Image(draft=True) if photographs are more than twice as large"
        lines.append(less + draft * (not all(images)))
    elif not images and share < 1 / 2:
        lines.append("do less in the decoders, or do it once, as the rows are written")
    return lines


def _more_decoders(run: RunFigures, decoders: float) -> list[str]:
    """Returns advice: how many more decoders would feed the trainer, and for how many there are CPUs."""
    if math.isinf(run.rates["decoding"]):  # no second of decoding was counted yet
        return []
    ranks = len(run.ranks)
    each = max(1e-9, run.rates["decoding"]) / (max(1.0, decoders) * ranks)
    wanted = SPARE * run.rates["training"] / (each * ranks)
    needed = math.ceil(min(wanted, _MOST_DECODERS + 1))
    if needed <= max(decoders, most_of(run, "num_decoders")):  # a range, of which more are requested as they are needed
        return []
    if (computes := _computes(run)) is not None:
        doubled = min(needed, 2 * max(1, round(decoders)))
        cpus = ", and decoder_cpus=0.5 if they find no place" * (run.has_ray and run.decoder_cpus > 0.5)
        return [
            f"decoders compute for {computes:.0%} of their time, and wait for the rest: more of them than CPUs help, "
            f"num_decoders={doubled}{cpus}; double it as long as the rate rises"
        ]
    if not run.has_ray and _transform_share(run) > 1 / 2:
        return ["more decoders help if your transform= releases the interpreter; with Ray, decoders are processes"]
    would = (
        f"each decoder more gives about {rate(each)}"
        if needed > _MOST_DECODERS
        else f"{count(needed - decoders, 'more decoder')} of each rank would feed this trainer"
    )
    room = (run.cpus - run.trainer_cpus) / max(1e-9, run.decoder_cpus) / run.world_size
    most = int(min(room, needed))
    if most == needed:
        if needed > _MOST_DECODERS:
            return [f"{would}: num_decoders=…, as far as there are CPUs"]
        cost = needed * run.decoder_cpus * run.world_size
        return [f"{would}: num_decoders={needed} takes {cost:g} CPUs{' more than the trainer has' * run.has_ray}"]
    held = f", of which trainers hold {run.trainer_cpus:g}" if run.trainer_cpus else ""
    where = f"{'the cluster' if run.has_ray else 'this machine'} ({count(run.cpus, 'CPU')}{held})"
    lines = []
    together = each * most * ranks
    if together > run.rates["decoding"]:  # shard actors, if they decode in threads, may do as much
        lines.append(f"{where} has room for num_decoders={most} of each rank: about {rate(together)} together")
    else:
        would += f", and {where} has no room for more"
    more = "add nodes" if run.has_ray else "with Ray, the nodes of a cluster decode, too"
    return [*lines, f"{would}: {more}"]


DECODING = Diagnosis(
    cause="decoding",
    means="decoders are too slow",
    changes=(
        "`num_decoders=(2, 16)`, with CPUs for them",
        "smaller images (`jobs/materialize.py --shorter-side`)",
        "a cheaper `transform=`",
    ),
    evidence=_evidence,
    advice=_advice,
)
