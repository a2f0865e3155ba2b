"""The diagnosis that batches are made too slowly."""

from raylance.observe.diagnoses.diagnosis import NO_MODEL, Diagnosis, count, does_nothing, rate
from raylance.observe.diagnoses.reading import longer_reads
from raylance.observe.figures import RunFigures

SHORT_STEP_S = 0.005  # in shorter steps, the fixed cost of a batch matters
_FEW_ROWS = 16  # rows of a batch on one rank; a batch with fewer is small


def _batch_ms(run: RunFigures, *names: str) -> list[float]:
    """Returns the milliseconds per batch of each named figure."""
    return [1000 * run.sum(name) / max(1.0, run.sum("batches")) for name in names]


def _is_making(run: RunFigures) -> bool:
    """Returns whether the trainer waits because batches are made slowly, not because rows are still on the way."""
    collate_ms, transfer_ms, waited_ms = _batch_ms(run, "collate_s", "transfer_s", "wait_finish_s")
    return collate_ms + transfer_ms >= waited_ms / 2


def _evidence(run: RunFigures) -> str:
    if run.torch_workers is not None:
        takes = f"the trainer takes {rate(run.rates['training'])}"
        return f"torch's DataLoader is the limit, with num_workers={run.torch_workers}: {takes}"
    collate_ms, transfer_ms, waited_ms = _batch_ms(run, "collate_s", "transfer_s", "wait_finish_s")
    takes = f"{collate_ms:.1f} ms of collating and {transfer_ms:.1f} ms of transfer"
    what = f"making batches is the limit: {takes} for each"
    if not _is_making(run):
        what = f"bringing rows to the trainer is the limit: it waits {waited_ms:.1f} ms a step for that, beside {takes}"
    return f"{what}; the trainer takes {rate(run.rates['training'])}"


def _advice(run: RunFigures) -> list[str]:
    collate_ms, function_ms, transfer_ms, decode_ms = _batch_ms(
        run, "collate_s", "collate_fn_s", "transfer_s", "decode_s"
    )
    lines = [NO_MODEL] if does_nothing(run) else []
    if run.torch_workers is not None:
        return [*lines, *_of_torch(run, run.torch_workers)]
    batches = run.sum("batches")
    if run.steady_s < SHORT_STEP_S * max(1.0, batches) or run.sum("rows") < _FEW_ROWS * batches:
        size = "budget=" if run.facts.get("budget") else "global_batch_size="
        lines.append(f"a larger {size}: much of what a batch costs is the same whatever its size")
    if not run.has_ray and decode_ms > collate_ms:
        lines.append(
            "transform= and decoders run in threads of this process, which share its interpreter with the trainer: "
            "with Ray they have processes of their own"
        )
    elif _is_making(run):
        if function_ms > (collate_ms + transfer_ms) / 2:
            lines.append(_move_collate_fn(run, function_ms))
        elif run.facts.get("columns", 2) > 1:
            lines.append("fewer columns, or one of fixed-size lists in place of many: each costs its part")
        lines.append(
            "a larger prefetch_batches= evens out batches that differ; more CPUs for the trainer's process help"
        )
    else:
        lines += longer_reads(run)  # what is read together also travels together
        lines.append(
            "most of that is bringing rows to this process, and turns between epochs: longer epochs, a larger "
            "prefetch_batches=, or more CPUs for the trainer's process help"
        )
    return lines


def _of_torch(run: RunFigures, workers: int) -> list[str]:
    """Returns advice for torch's DataLoader, whose workers read, decode and make batches."""
    lines = []
    cpus = float(run.facts.get("cpus") or run.cpus)
    if workers < cpus:
        lines.append(f"a larger num_workers= makes more batches at once: this machine has {count(cpus, 'CPU')}")
    begun_s = run.sum("first_batch_s") - run.seconds["starting"]
    if workers and begun_s > run.waited_s / 4 and not run.facts.get("persistent_workers"):
        lines.append("workers of DataLoader start once, and not for each pass, with persistent_workers=True")
    if workers:
        lines.append("a larger prefetch_factor= evens out batches that differ")
    return [
        *lines,
        "whether reading or decoding takes long is not recorded for DataLoader: record a pass of handle.loader()",
    ]


def _move_collate_fn(run: RunFigures, batch_ms: float) -> str:
    own = "" if run.has_ray else " (with Ray, in processes of their own)"
    return (
        f"your collate_fn takes {batch_ms:.1f} ms a batch, in one thread of the trainer's process: move its work "
        f"on single rows into transform=, which the decoders do{own}, and do the rest on whole arrays"
    )


FINISHING = Diagnosis(
    cause="finishing",
    means="batches are made too slowly",
    changes=("a cheaper `collate_fn=`", "a larger `prefetch_batches=`"),
    evidence=_evidence,
    advice=_advice,
)
