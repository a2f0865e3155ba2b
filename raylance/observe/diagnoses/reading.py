"""The diagnosis that storage is too slow."""

import math

from raylance.observe.diagnoses.diagnosis import NO_MODEL, SPARE, Diagnosis, beside, does_nothing, rate
from raylance.observe.figures import RunFigures

BY_ROW = {"row": 'order="row"', "weighted": "order=Weighted", "class_balanced": "order=ClassBalanced"}
"""Orders that read row by row: how a user writes each one, by its name in a record."""

_MOST_READERS = 4  # most readers to advise in one step


def _evidence(run: RunFigures) -> str:
    mib_s = run.sum("read_bytes") / max(1e-9, run.sum("storage_s")) / 2**20
    if run.facts.get("videos"):
        return (
            "reading is the limit: storage, and shard actors that decode frames of videos, give "
            f"{rate(run.rates['reading'])} ({mib_s:,.0f} MiB/s of frames and rows by each shard actor), "
            f"{beside(run, 'reading')}"
        )
    return (
        f"reading is the limit: storage gives {rate(run.rates['reading'])} ({mib_s:,.0f} MiB/s to each shard "
        f"actor), {beside(run, 'reading')}"
    )


def _advice(run: RunFigures) -> list[str]:
    lines = []
    if order := BY_ROW.get(str(run.facts.get("order"))):
        instead = (
            "; or materialise a shuffled copy (jobs/materialize.py) and read that in windows"
            if order == BY_ROW["row"]
            else ", if no row has to come more often than another"
        )
        lines.append(f'{order} reads rows one by one: order="window" reads them in runs{instead}')
    lines += [NO_MODEL] if does_nothing(run) else _more_readers(run)
    smaller = ", smaller images (jobs/materialize.py --shorter-side …)" * bool(run.facts.get("draft"))
    nearer = "; or bring the data nearer" if run.is_remote else "; or a faster disk"
    if run.facts.get("videos"):
        lines.append("or decode less: smaller frames (Video(size=…)), keyframes closer to each other, larger shards")
    return [*lines, f"{'or ' * bool(lines)}read less: fewer columns={smaller}{nearer}"]


def _more_readers(run: RunFigures) -> list[str]:
    """Returns advice on the number of readers: on a network they wait in parallel; on one machine they share CPUs."""
    if math.isinf(run.rates["reading"]):  # no second of reading was counted yet
        return []
    readers = max(1.0, run.most("readers"))
    wanted = readers * SPARE * run.rates["training"] / max(1e-9, run.rates["reading"])
    needed = math.ceil(min(wanted, _MOST_READERS))
    decoders = run.most("decoders") * run.decoder_cpus
    free = (run.cpus - run.trainer_cpus) / run.world_size - decoders - readers
    most = needed if run.is_remote else int(min(needed, readers + max(0.0, free)))
    if most > readers:
        return [
            f"more shard actors read several windows at once: num_readers={most}, which holds {most} times "
            f"max_window_bytes on each rank{', and is not enough by itself' * (wanted > most)}; keep it only if "
            "the rate rises"
        ]
    if readers > 1:
        return [f"fewer shard actors, if num_readers={readers:.0f} gives each of them less than one alone had"]
    return []


READING = Diagnosis(
    cause="reading",
    means="storage is too slow",
    changes=(
        '`num_readers="auto"`',
        "fewer `columns=`",
        "smaller rows (`jobs/materialize.py`)",
        "data nearer to the nodes",
    ),
    evidence=_evidence,
    advice=_advice,
)
