"""Owns real runs and what the simulation says of them: their decoders sleep, so that two cores are enough for many of
them. Never simulates by itself.
"""

import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import lance
import numpy as np
import pyarrow as pa
import ray
import torch.distributed

import raylance
from tests.simulation.fleet import simulate
from tests.simulation.timed import Setting

SIDE = 64  # of what a row becomes: 12 KiB, so that bytes do not matter
RAW_BYTES = 64
NOTHING_SHARED = {name: value for name, value in vars(Setting()).items() if value == math.inf}


@dataclasses.dataclass(frozen=True, slots=True)
class Sleeping(raylance.Decoder):
    """Decodes a row in a given time, without a core, so that two cores are enough for many decoders."""

    row_s: float
    armed: str = ""  # a file; the decoder that gets the row `dies_at` while it exists removes it, and dies
    dies_at: int = -1
    shape = (SIDE, SIDE, 3)
    dtype = "uint8"

    def open(self) -> Self:
        """Needs no memory of its own."""
        return self

    def decode_into(self, encoded: memoryview, draws: Any, out: np.ndarray) -> None:
        """Sleeps."""
        if int.from_bytes(encoded[:8], "little") == self.dies_at and os.path.exists(self.armed):
            os.remove(self.armed)
            os._exit(1)
        time.sleep(self.row_s)
        out[...] = bytes(encoded[:1])[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A run: logical ranks, decoders of each, rows of a rank's step, seconds a row, steps.

    An item is one step, whatever the number of decoders.
    """

    ranks: int
    decoders: int
    row_s: float = 0.05
    batch_size: int = 8
    steps: int = 0
    step_s: float = 0.0
    dies: bool = False  # whether a decoder dies in the middle

    @property
    def rows(self) -> int:
        """Of all ranks."""
        return self.ranks * self.batch_size * self.steps

    @property
    def max_inflight_bytes(self) -> int:
        """So much that an item has the rows of a step, and every decoder two."""
        row_bytes = 1.5 * RAW_BYTES + SIDE * SIDE * 3
        return int(1.25 * (2 * self.decoders + 1) * self.batch_size * row_bytes)


def cases(items: int = 16) -> Iterator[Case]:
    """1, 2 and 4 ranks and 1 to 16 decoders; as many items for each decoder everywhere."""
    for ranks, decoders in ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (2, 1), (2, 4), (2, 8), (4, 1), (4, 4)):
        yield Case(ranks=ranks, decoders=decoders, steps=items * decoders)
    yield Case(ranks=4, decoders=2, steps=2 * items, step_s=0.3)  # the model is slower than the decoders
    yield Case(ranks=1, decoders=4, steps=4 * items, dies=True)
    yield Case(ranks=2, decoders=4, steps=4 * items, dies=True)


class LogicalRank:
    """A process that trains as one rank of several: a step ends when it has ended everywhere."""

    def __init__(self, rank: int, ranks: int, meeting: str) -> None:
        self._rank, self._ranks = rank, ranks
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)

    def go(self, dataset: Any, case: Case, armed: str) -> tuple[float, float, list[int]]:
        """Two epochs, of which the second is timed; in it, a decoder may die.

        Returns:
            Seconds from its begin to the first batch, and to the end of the last step; and the rows.
        """
        loader = dataset.loader(
            rank=self._rank, world_size=self._ranks, num_decoders=case.decoders,
            max_inflight_bytes=case.max_inflight_bytes,
        )  # fmt: skip
        for epoch in range(2):
            if epoch and case.dies and not self._rank:
                Path(armed).touch()
            torch.distributed.barrier()
            begin, first_s, rows = time.perf_counter(), 0.0, []
            for batch in loader.iter_torch_batches(batch_size=case.batch_size, prefetch_batches=2):
                first_s = first_s or time.perf_counter() - begin
                rows += batch["id"].tolist()
                time.sleep(case.step_s)
                torch.distributed.barrier()
        seconds = time.perf_counter() - begin
        loader.close()
        return first_s, seconds, rows


def write(folder: Path, rows: int) -> str:
    """A dataset of small rows."""
    uri = str(folder / "sleeping.lance")
    images = [row.to_bytes(RAW_BYTES, "little") for row in range(rows)]
    table = pa.table({"image": pa.array(images, pa.binary()), "id": np.arange(rows)})
    lance.write_dataset(table, uri)
    return uri


def measure(case: Case, uri: str) -> tuple[float, float]:
    """Runs a case; returns seconds of its first batch, and of the whole epoch, of the slowest rank.

    Raises:
        SystemExit: If a row came twice, or not at all.
    """
    remote: Any = ray.remote(LogicalRank).options(num_cpus=0)
    with tempfile.TemporaryDirectory() as folder:
        armed = str(Path(folder, "armed"))
        decoder: Any = Sleeping("image", case.row_s, armed, case.rows // 2)
        dataset = raylance.dataset(
            uri, columns=["image", "id"], filter=f"id < {case.rows}", decode=decoder, order="sequential"
        )
        ranks = [remote.remote(rank, case.ranks, str(Path(folder, "meeting"))) for rank in range(case.ranks)]
        try:
            found = ray.get([rank.go.remote(dataset, case, armed) for rank in ranks])
        finally:
            for rank in ranks:
                ray.kill(rank)
    rows = sorted(row for _, _, part in found for row in part)
    if rows != list(range(case.rows)):
        raise SystemExit(f"{case}: {len(rows)} rows came, {len(set(rows))} of them distinct, and not {case.rows}")
    return max(first for first, _, _ in found), max(seconds for _, seconds, _ in found)


def predict(case: Case, base: Setting) -> tuple[float, float]:
    """What the simulation says of a real run: seconds of the first batch and of the epoch."""
    found = simulate(
        dataclasses.replace(
            base,
            ranks=case.ranks,
            decoders=case.decoders,
            batch_size=case.batch_size,
            steps=case.steps,
            rows=case.rows,
            raw_bytes=RAW_BYTES,
            decoded_bytes=SIDE**2 * 3,
            order=raylance.Sequential(),
            max_inflight_bytes=case.max_inflight_bytes,
            is_warm=True,
            dies="decoder" if case.dies else "",
            step_s=case.step_s,
            decode_row_s=case.row_s,
            **dict.fromkeys(("step_varies", "rank_varies", "decode_row_varies", "decode_item_varies"), 0.0),
            **NOTHING_SHARED,
            storage_wait_s=0.0,
        )
    )
    return found.first_batch_s, found.seconds


def validate(base: Setting, items: int) -> list[dict[str, Any]]:
    """Prints real runs beside the simulation."""
    table, all_cases = [], list(cases(items))
    print("ranks  decoders  step_s  rows/s real  simulated   error   of linear   first batch real  simulated")
    # Sleeping decoders take no core: Ray is promised more than there are.
    ray_options = {"num_cpus": 64, "include_dashboard": False, "log_to_driver": False}
    with ray.init(address="local", **ray_options), tempfile.TemporaryDirectory() as folder:
        uri = write(Path(folder), max(case.rows for case in all_cases))
        for case in all_cases:
            (first_s, real_s), (simulated_first_s, simulated_s) = measure(case, uri), predict(case, base)
            row = {
                **dataclasses.asdict(case),
                "real_rows_per_s": case.rows / real_s,
                "simulated_rows_per_s": case.rows / simulated_s,
                "error": real_s / simulated_s - 1,
                "of_linear": case.rows * case.row_s / real_s / case.ranks / case.decoders,
                "first_batch_s": first_s,
                "simulated_first_batch_s": simulated_first_s,
            }
            table.append(row)
            print(
                f"{case.ranks:>5} {case.decoders:>9} {case.step_s:>7.1f} {row['real_rows_per_s']:>12.1f}"
                f" {row['simulated_rows_per_s']:>10.1f} {row['error']:>+7.1%} {row['of_linear']:>11.3f}"
                f" {first_s:>18.2f} {simulated_first_s:>10.2f}{'  a decoder dies' if case.dies else ''}",
                flush=True,
            )
    return table
