"""Owns what is simulated, and by which figures; never measures, prints or draws."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import multiprocessing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import raylance
from tests.simulation.fleet import Found, simulate
from tests.simulation.timed import Run, Shared, Times

# `--measure` on two cores of a shared machine (docs/scale.md); what is not measured there stands below.
MEASURED = Times(
    read_call_s=0.9e-3,
    read_row_s=0.021e-3,
    decode_call_s=0.9e-3,
    decode_row_s=0.79e-3,
    decode_row_varies=0.05,
    decode_item_varies=0.03,
    put_byte_s=0.53e-9,
    submit_s=0.125e-3,
    event_s=0.06e-3,
    fetch_call_s=0.12e-3,
    fetch_byte_s=0.02e-9,
    batch_row_s=0.07e-3,
    start_s=1.9,
    notice_s=0.023,
)
# Assumed: a model that takes 2,500 images a second on each rank; how much steps and machines differ.
ASSUMED = {"step_s": 256 / 2500, "step_varies": 0.02, "rank_varies": 0.05}
CLUSTER = Shared(
    ranks_per_node=8,
    network_bytes_s=12.5e9,  # 100 Gbit/s
    storage_bytes_s=50e9,
    storage_requests_s=5500,  # what S3 promises of reads, for one prefix
    storage_wait_s=0.03,
    reader_bytes_s=0.3e9,  # measured, of rows in the page cache
    actors_s=550,  # Ray's own release test with 10,000 actors
    node_actors_s=50,  # 96 cores, and two seconds of one for each
)
# By hand: shards of 5.4 MB, and windows that hold a whole number of the rows that a rank takes of a lane in a step.
EVEN = raylance.WindowShuffle(shard_rows=128, window_shards=2, lanes=16)
UNEVEN = raylance.WindowShuffle(shard_rows=96, window_shards=2, lanes=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """Arguments of `simulate`."""

    run: Run
    times: Times
    shared: Shared

    def change(self, **changes: Any) -> Study:
        """The same with other values, each a field of a run, of times or of what is shared."""
        parts = {}
        for name in ("run", "times", "shared"):
            value = getattr(self, name)
            mine = {key: change for key, change in changes.items() if key in vars_of(value)}
            parts[name] = dataclasses.replace(value, **mine)
        return Study(**parts)


def defaults(changes: Mapping[str, float]) -> Study:
    """What is measured and assumed, with what is set in its place."""
    times = dataclasses.replace(MEASURED, **ASSUMED)
    found = Study(run=Run(steps=40, decoders=3), times=times, shared=CLUSTER)
    now = {**vars_of(found.run), **vars_of(found.times), **vars_of(found.shared)}
    return found.change(**{name: type(now[name])(value) for name, value in changes.items()})


def vars_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, as they are."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _alone(base: Study, ranks: int) -> Study:
    """Nothing is shared but the barrier, and the storage has no limit."""
    endless = {name: float("inf") for name in ("storage_bytes_s", "storage_requests_s", "network_bytes_s")}
    return base.change(ranks=ranks, order=EVEN, **endless)


def _elsewhere(base: Study, ranks: int) -> Study:
    return _alone(base, ranks).change(decoders_elsewhere=base.run.decoders, network_bytes_s=3.125e9)


class Named(NamedTuple):
    """A study's description, and how it is made for a world size."""

    description: str
    make: Callable[[Study, int], Study]


STUDIES = {
    "barrier": Named("nothing shared but the barrier", _alone),
    "storage": Named(
        "a storage with limits, windows that hold whole slices", lambda b, r: b.change(ranks=r, order=EVEN)
    ),
    "uneven": Named("the same storage, windows that do not", lambda b, r: b.change(ranks=r, order=UNEVEN)),
    "auto": Named("the same storage, order='window' as it resolves", lambda b, r: b.change(ranks=r)),
    "elsewhere": Named("all decoders on other nodes, 25 Gbit/s a node", _elsewhere),
    "fewer": Named("one decoder fewer", lambda b, r: _alone(b, r).change(decoders=max(1, b.run.decoders - 1))),
    "more": Named("one decoder more", lambda b, r: _alone(b, r).change(decoders=b.run.decoders + 1)),
    "decoder-dies": Named("a decoder dies half-way", lambda b, r: _alone(b, r).change(dies="decoder")),
    "reader-dies": Named("a shard actor dies half-way", lambda b, r: _alone(b, r).change(dies="reader")),
}


def run_one(study: Study) -> Found:
    """One simulation, quiet about the deaths that were asked for."""
    logger = logging.getLogger("raylance")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return simulate(study.run, study.times, study.shared)
    finally:
        logger.setLevel(level)


def run_studies(names: list[str], ranks: list[int], base: Study, processes: int) -> dict[str, dict[int, Found]]:
    """Simulates all of them, the largest first; each gives the same in any process."""
    work = sorted(((name, count) for name in names for count in ranks), key=lambda one: -one[1])
    all_of_them = [STUDIES[name].make(base, count) for name, count in work]
    if processes == 1:
        found = dict(zip(work, map(run_one, all_of_them), strict=True))
    else:
        with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            found = dict(zip(work, pool.map(run_one, all_of_them), strict=True))
    return {name: {count: found[name, count] for count in ranks} for name in names}
