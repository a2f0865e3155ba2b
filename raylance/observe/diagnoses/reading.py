"""The diagnosis that storage is too slow."""

import math

from raylance.observe.diagnoses.diagnosis import (
    NO_MODEL,
    SPARE,
    Diagnosis,
    beside,
    does_nothing,
    is_fixed,
    most_of,
    rate,
)
from raylance.observe.figures import RunFigures

BY_ROW = {"row": 'order="row"', "weighted": "order=Weighted", "class_balanced": "order=ClassBalanced"}
"""Orders that read row by row: how a user writes each one, by its name in a record."""

_MOST_READERS = 4  # most readers to advise in one step
# Measured on a disk: a row of 3 kB came eight times as fast in windows as one by one, one of 20 kB and more as fast.
_LARGE_ROW_BYTES = 16 << 10
# Measured there, too: rows of 3 kB took three times as long in shards of 128 KiB as in those of 4 MiB, and 1.6 times as
# long in those of 1 MiB.
_SHORT_BYTES = 1 << 20
_LEAST_SHARDS = 8  # a lane with fewer shards cannot have much larger ones, because the dataset is small


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
    order = BY_ROW.get(str(run.facts.get("order")))
    if order and (run.is_remote or run.facts["row_bytes"] < _LARGE_ROW_BYTES):
        instead = (
            "; or materialise a shuffled copy (jobs/materialize.py) and read that in windows"
            if order == BY_ROW["row"]
            else ", if no row has to come more often than another"
        )
        lines.append(f'{order} reads rows one by one: order="window" reads them in runs{instead}')
    longer = longer_reads(run)
    lines += [*longer, NO_MODEL] if does_nothing(run) else longer or _more_readers(run)
    smaller = "smaller images (jobs/materialize.py --shorter-side …)" * bool(run.facts.get("draft"))
    nearer = "bring the data nearer" if run.is_remote else "a faster disk"
    if run.facts.get("videos"):
        lines.append("or decode less: smaller frames (Video(size=…)), keyframes closer to each other, larger shards")
    less = ", ".join(filter(None, ["fewer columns=" * (run.facts.get("columns", 2) > 1), smaller]))
    return [*lines, f"{'or ' * bool(lines)}{f'read less: {less}; or ' * bool(less)}{nearer}"]


def longer_reads(run: RunFigures) -> list[str]:
    """Returns advice if windows are the reason for short reads, for which more readers hardly help."""
    facts = run.facts
    if facts.get("in_parts"):
        return [
            f"windows do not fit reader_bytes={facts['options']['reader_bytes']:,} twice, so they are read in "
            "parts, row by row: a larger one makes reads longer, before more readers"
        ]
    shard_bytes, lane_bytes = facts.get("shard_bytes"), facts.get("lane_bytes", 0.0)
    if not shard_bytes or shard_bytes > min(_SHORT_BYTES, lane_bytes / _LEAST_SHARDS):
        return []
    change = "a larger window_bytes= of raylance.dataset, for a new run,"
    if facts.get("shard_rows", "auto") != "auto":
        change = "a larger shard_rows= of the order, for a new run,"
    elif facts.get("window_bytes"):
        change += f" which is {facts['window_bytes']:,} now,"
    return [f"a read gets {shard_bytes / 2**10:,.0f} KiB: {change} makes reads longer, before more readers"]


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
    if (
        readers < most <= most_of(run, "num_readers", auto=_MOST_READERS)
    ):  # a range, of which more are requested as they are needed
        return []
    if most > readers:
        return [
            f"more shard actors read several windows at once: num_readers={most}, which holds {most} times "
            f"reader_bytes on each rank{', and is not enough by itself' * (wanted > most)}; keep it only if "
            "the rate rises"
        ]
    if readers > 1 and is_fixed(run, "num_readers"):
        return [f"fewer shard actors, if num_readers={readers:.0f} gives each of them less than one alone had"]
    return []


READING = Diagnosis(
    cause="reading",
    means="storage is too slow",
    changes=(
        "larger windows, if their reads are short (`window_bytes=`, `reader_bytes=`)",
        '`num_readers="auto"`',
        "fewer `columns=`",
        "smaller rows (`jobs/materialize.py`)",
        "data nearer to the nodes",
    ),
    evidence=_evidence,
    advice=_advice,
)
