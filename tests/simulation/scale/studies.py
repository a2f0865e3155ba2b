"""Owns what is simulated, by which figures, and its picture; never measures or prints."""

import concurrent.futures
import dataclasses
import logging
import math
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import raylance
from tests.simulation.fleet import Found, simulate
from tests.simulation.timed import Setting

# Measured or assumed: docs/scale.md has a table of these.
BASE = Setting(
    steps=40,
    decoders=3,
    step_s=256 / 2500,
    step_varies=0.02,
    rank_varies=0.05,
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
    network_bytes_s=12.5e9,  # 100 Gbit/s
    storage_bytes_s=50e9,
    storage_requests_s=5500,  # what S3 promises of reads, for one prefix
    storage_wait_s=0.03,
    reader_bytes_s=0.3e9,
    actors_s=550,  # Ray's own release test with 10,000 actors
    node_actors_s=50,  # 96 cores, and two seconds of one for each
)
# Shards of 5.4 MB, and windows that hold a whole number of the rows that a rank takes of a lane in a step.
EVEN = raylance.WindowShuffle(shard_rows=128, window_shards=2, lanes=16)
UNEVEN = raylance.WindowShuffle(shard_rows=96, window_shards=2, lanes=16)

change = dataclasses.replace


def _alone(base: Setting) -> Setting:
    """Nothing is shared but the barrier, and the storage has no limit."""
    return change(base, order=EVEN, storage_bytes_s=math.inf, storage_requests_s=math.inf, network_bytes_s=math.inf)


# By name: a description, and how the setting of a study is made.
STUDIES: dict[str, tuple[str, Callable[[Setting], Setting]]] = {
    "barrier": ("nothing shared but the barrier", _alone),
    "storage": ("a storage with limits, windows that hold whole slices", partial(change, order=EVEN)),
    "uneven": ("the same storage, windows that do not", partial(change, order=UNEVEN)),
    "auto": ("the same storage, order='window' as it resolves", change),
    "elsewhere": (
        "all decoders on other nodes, 25 Gbit/s a node",
        lambda base: change(_alone(base), decoders_elsewhere=base.decoders, network_bytes_s=3.125e9),
    ),
    "fewer": ("one decoder fewer", lambda base: change(_alone(base), decoders=max(1, base.decoders - 1))),
    "more": ("one decoder more", lambda base: change(_alone(base), decoders=base.decoders + 1)),
    "decoder-dies": ("a decoder dies half-way", lambda base: change(_alone(base), dies="decoder")),
    "reader-dies": ("a shard actor dies half-way", lambda base: change(_alone(base), dies="reader")),
}

Runs = Mapping[str, Mapping[int, Found]]


def run_one(setting: Setting) -> Found:
    """One simulation, without the warnings about a death that was asked for."""
    logging.getLogger("raylance").setLevel(logging.ERROR)
    return simulate(setting)


def run_studies(names: Sequence[str], ranks: Sequence[int], base: Setting, processes: int) -> Runs:
    """Simulates all of them, the largest first; each gives the same in any process."""
    work = sorted(((name, count) for name in names for count in ranks), key=lambda one: -one[1])
    settings = [STUDIES[name][1](change(base, ranks=count)) for name, count in work]
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found = dict(zip(work, pool.map(run_one, settings), strict=True))
    return {name: {count: found[name, count] for count in ranks} for name in names}


def draw(found: Runs, base: Setting, path: Path) -> None:
    """Draws the limits that are reached first, and what they cost, as a PNG of some tens of kilobytes."""
    import pandas as pd
    from matplotlib.figure import Figure

    def lines(names: Mapping[str, str], value: Callable[[Found], float]) -> pd.DataFrame:
        by_label = {label: {r: value(one) for r, one in found.get(name, {}).items()} for name, label in names.items()}
        return pd.DataFrame({label: values for label, values in by_label.items() if values})

    def delay(name: str) -> dict[int, float]:
        usual = found.get("barrier", {})
        return {r: max(0.0, one.seconds - usual[r].seconds) for r, one in found.get(name, {}).items() if r in usual}

    limits = {
        "barrier": "barrier alone",
        "storage": "storage, whole slices in a window",
        "uneven": "storage, no whole slices",
        "auto": 'storage, order="window" as it is',
        "elsewhere": "decoders elsewhere, 25 Gbit/s",
    }
    few, usual, more = (f"{base.decoders + by} decoders a rank" for by in (-1, 0, 1))
    times = lines({"barrier": "first batch, actors started"}, lambda one: one.first_batch_s)
    deaths = pd.DataFrame({"a shard actor dies": delay("reader-dies"), "a decoder dies": delay("decoder-dies")})
    held = lines({"barrier": "raw rows held by the shard actor"}, lambda one: one.held_bytes / 2**20)
    flying = lines({"barrier": "in flight"}, lambda one: one.inflight_bytes / 2**20)
    panels = [
        ("What breaks first", "rows/s, of those without any stall", lines(limits, lambda one: 1 - one.stall)),
        (
            "The slowest rank holds the others",
            "stall, % of the time",
            lines({"fewer": few, "barrier": usual, "more": more}, lambda one: 100 * one.stall),
        ),
        ("To begin, and to continue after a death", "seconds", times.join(deaths, how="outer")),
        ("Memory", "MiB of one rank", flying.join(held)),
    ]
    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (title, ylabel, table) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        if not table.empty:
            table.plot(ax=axes, title=title, xlabel="ranks", ylabel=ylabel, grid=True, marker=".")
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.set_ylim(0, None)
    figure.savefig(path, dpi=80)
