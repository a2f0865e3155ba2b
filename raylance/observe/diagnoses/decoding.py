"""The diagnosis that decoders are too slow; it advises more of them only if CPUs are free that no trainer holds."""

import math

from raylance.observe.diagnoses.diagnosis import NO_MODEL, SPARE, Diagnosis, beside, count, does_nothing, rate
from raylance.observe.figures import RunFigures

_SMALL_BYTES = 16 << 10  # if rows have fewer bytes, smaller images would save little
_ASIDE = 0.1  # share of the time: if saving and validating take more, the text says that decoders work ahead meanwhile
_MOST_DECODERS = 32  # a run that needs more on a rank has a different problem


def _is_on_device(run: RunFigures) -> bool:
    """Returns whether most decoding is done on the trainers' devices."""
    return run.sum("device_decode_s") > run.sum("decode_s") / 2


def _evidence(run: RunFigures) -> str:
    actors, ranks = run.sum("decoders"), len(run.ranks)
    deliver = f"{count(actors, 'decoder')} deliver{'s' * (actors == 1)}"
    if _is_on_device(run):
        deliver = f"{count(ranks, 'device')} of batches decode{'s' * (ranks == 1)}"
    elif not run.most("decoders"):
        deliver = f"{count(ranks, 'shard actor')}, without decoders, deliver{'s' * (ranks == 1)}"
    aside_s = run.sum("save_s") + run.sum("other_s")
    also = " (with work while the trainer saves and validates)" * (aside_s > _ASIDE * run.steady_s)
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
    images = run.facts.get("draft", ())
    if images and run.facts["row_bytes"] > _SMALL_BYTES:
        less = "decode less: materialise images at the size that is trained on (jobs/materialize.py --shorter-side …)"
        draft = ", or Image(draft=True) if photographs are more than twice as large"
        lines.append(f"{'or ' * bool(lines)}{less}{draft * (not all(images))}")
    elif not images:
        lines.append(f"{'or ' * bool(lines)}do less in decode= and transform=, or do it once, as the rows are written")
    return lines


def _more_decoders(run: RunFigures, decoders: float) -> list[str]:
    """Returns advice: how many more decoders would feed the trainer, and for how many there are CPUs."""
    if math.isinf(run.rates["decoding"]):  # no second of decoding was counted yet
        return []
    ranks = len(run.ranks)
    each = max(1e-9, run.rates["decoding"]) / (max(1.0, decoders) * ranks)
    wanted = SPARE * run.rates["training"] / (each * ranks)
    needed = math.ceil(min(wanted, _MOST_DECODERS + 1))
    if needed <= decoders:
        return []
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
    changes=("`num_decoders=(2, 16)`, with CPUs for them", "smaller images (`jobs/materialize.py --shorter-side`)"),
    evidence=_evidence,
    advice=_advice,
)
