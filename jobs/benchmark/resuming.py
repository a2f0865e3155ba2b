"""The first batch after a resume, of raylance and of its peers, by the share of the epoch that was consumed.

raylance and LanceDB go to a saved position. Ray Data has none: it reads and decodes what was consumed, and skips it.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from .figures import Figure
from .measuring import in_turns, rest
from .readers import READERS, lancedb_streams
from .setting import Job, Setting, start_ray

SHARES = (0.0, 0.01, 0.5, 0.99)
_TOLERATED = 1.1  # times the first batch at the start of an epoch

Resume = Callable[[int, int], float]  # (steps, epoch) → seconds to the first batch
Found = dict[str, dict[str, dict[str, list[float]]]]  # by kind, reader and share


def measure(setting: Setting) -> Found:
    """Resumes, readers in turn; Ray Data once, because it reads whole epochs for it."""
    found: Found = {}
    for kind in ("images", "vectors"):
        job = setting.job(kind)
        start_ray(job)
        with ExitStack() as stack:
            readers = {"raylance": (_raylance(job, stack), setting.rounds)}
            try:
                readers["lancedb"] = (_lancedb(job), setting.rounds)
            except ImportError as error:
                print(f"lancedb: skipped, {error}")
            readers["ray-data"] = (_ray_data(job, kind, stack), 1)
            found[kind] = {name: {str(share): [] for share in SHARES} for name in readers}
            for number, share in in_turns(SHARES, setting.rounds):
                for name, (resume, rounds) in readers.items():
                    if number <= rounds:
                        rest()
                        found[kind][name][str(share)].append(resume(steps_at(share, job), number))
    return found


def steps_at(share: float, job: Job) -> int:
    """Steps of that share of an epoch, at least one of which is left."""
    steps = -(-job.rows // job.batch_size)
    return min(round(share * steps), steps - 1)


def _raylance(job: Job, stack: ExitStack) -> Resume:
    """A loader with warm helpers; each epoch is another one, so that nothing of it was read before."""
    loader = stack.enter_context(job.open().loader(num_decoders=job.decoders))
    batches = loader.batches(global_batch_size=job.batch_size)
    for _ in batches:
        pass
    counter = itertools.count(8, 8)

    def resume(steps: int, _: int) -> float:
        saved = loader.state_dict() | {"epoch": next(counter), "position": steps * job.batch_size}
        begin = time.perf_counter()
        loader.load_state_dict(saved)
        taken = iter(batches)
        next(taken)
        seconds = time.perf_counter() - begin
        taken.close()
        return seconds

    return resume


def _lancedb(job: Job) -> Resume:
    """A new dataset each time, as LanceDB wants it; making it is not timed, what it begins with is."""
    make = lancedb_streams(job)
    next(iter(make(0)[1]))

    def resume(steps: int, epoch: int) -> float:
        dataset, batches = make(epoch)
        counts = [steps * job.batch_size]
        saved = dataset.state_dict() | {"samples_consumed_per_split": counts, "positions_consumed_per_split": counts}
        begin = time.perf_counter()
        dataset.load_state_dict(saved)
        taken = iter(batches)
        next(taken)
        return time.perf_counter() - begin

    return resume


def _ray_data(job: Job, kind: str, stack: ExitStack) -> Resume:
    source = READERS[kind]["ray-data"].open(job, stack)
    next(iter(source.open_pass(0)))

    def resume(steps: int, epoch: int) -> float:
        begin = time.perf_counter()
        next(itertools.islice(source.open_pass(epoch), steps, None))
        return time.perf_counter() - begin

    return resume


def figures(found: Found) -> Iterator[Figure]:
    """The end of an epoch against its start, for raylance, and the seconds of all."""
    for kind, readers in found.items():
        early, late = (readers["raylance"][str(share)] for share in (SHARES[0], SHARES[-1]))
        values = [after / before for before, after in zip(early, late, strict=True)]
        yield Figure(f"first batch after a resume at 99 % / at 0 %, {kind}", values, at_most=_TOLERATED)
        for name, by_share in readers.items():
            for share, seconds in by_share.items():
                yield Figure(f"…{name} at {float(share):.0%}, {kind}", seconds, "s")
