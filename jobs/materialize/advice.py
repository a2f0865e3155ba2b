"""Owns what a copy would cost and save, measured on the source as it is; never writes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator

import lance
import numpy as np
import pyarrow as pa
import torch

import raylance

from .images import Reencode, why_no_image
from .planning import Wish, open_source, stored_row_bytes
from .survey import read_offsets

SIDE = 224  # of the squares that images are decoded to where --shorter-side says nothing
SAMPLE_BYTES, FEWEST, MOST = 32 << 20, 64, 4096  # rows that are read together for one measurement
ROUNDS = 3  # each on other rows, so that what the first has read helps none
IMAGES = 48
SPARSE = 8  # rows between, for each that is wanted: from here on reading them all does not pay
NOISE = 0.05  # of an epoch: less cannot be distinguished from noise


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was seen, for one row. Reading is by one reader, decoding by one CPU."""

    rows: int  # selected ones
    of_rows: int  # of the source
    row_bytes: float  # of a selected row
    copy_bytes: float  # of the row that it becomes
    scan_s: float  # to read a row, from start to end, whatever is selected
    window_s: float  # to read a selected row as order="window" does, neighbours together
    random_s: float  # to read a selected row as order="row" does, from anywhere
    decode_s: float = 0.0  # a stored image; 0 where there is none
    copy_decode_s: float = 0.0  # an image of the copy
    encode_s: float = 0.0  # to make that, decoding included
    cpus: int = 1  # that decode

    @property
    def copy_read_s(self) -> float:
        """Seconds to read a row of the copy, where all lie together: by its bytes, at the source's own pace."""
        return min(self.scan_s, self.window_s) * self.copy_bytes / self.row_bytes

    def epoch_s(self, read_s: float, decode_s: float) -> float:
        """Seconds of an epoch: what is slower hides the other."""
        return self.rows * max(read_s, decode_s / self.cpus)

    @property
    def make_s(self) -> float:
        """Seconds to make the copy: read and encoded once, written twice, and read once more between."""
        return self.rows * (max(self.window_s, self.encode_s / self.cpus) + 3 * self.copy_read_s)


def epochs_to_pay(make_s: float, before_s: float, after_s: float) -> int | None:
    """After how many epochs, of `before_s` without a copy and `after_s` with it, it has saved `make_s`; None: never."""
    saved_s = before_s - after_s
    return None if saved_s <= NOISE * before_s else max(1, math.ceil(make_s / saved_s))


def report(seen: Measured) -> str:
    """The measurements, the arithmetic and the verdicts."""
    copy_s = seen.epoch_s(seen.copy_read_s, seen.copy_decode_s)
    ways = {"window": seen.window_s, "row": seen.random_s}
    lines = [
        f"  selected   {seen.rows:,} of {seen.of_rows:,} rows, {seen.rows / seen.of_rows:.1%}",
        f"  a row      {seen.row_bytes:,.0f} bytes, {seen.copy_bytes:,.0f} in the copy",
        f'  reading    {ms(seen.scan_s)} a row from start to end, {ms(seen.window_s)} a selected row as order="window" '
        f'reads, {ms(seen.random_s)} as order="row" does',
    ]
    if seen.decode_s:
        lines.append(
            f"  decoding   {ms(seen.decode_s)} of a CPU an image as stored, {ms(seen.copy_decode_s)} in the copy, "
            f"{ms(seen.encode_s)} to make that; {seen.cpus} CPUs"
        )
    lines.append("an epoch takes as long as the slower of reading and decoding:")
    for name, read_s in ways.items():
        lines.append(f"  {f'source, order={name!r}':24}{product(seen, read_s, seen.decode_s)}")
    lines.append(f"  {'copy, in any order':24}{product(seen, seen.copy_read_s, seen.copy_decode_s)}")
    lines.append(
        f"  {'making the copy':24}{seen.rows:,} × (max({ms(seen.window_s)}, {ms(seen.encode_s)} / {seen.cpus}) + 3 × "
        f"{ms(seen.copy_read_s)}) = {seconds(seen.make_s)}: read and encoded once, then written, read and written, all "
        "taken to cost what reading does"
    )
    for name, read_s in ways.items():
        before_s = seen.epoch_s(read_s, seen.decode_s)
        lines.append(f"against order={name!r}: {verdict(seen.make_s, before_s, copy_s)}")
    return "\n".join(lines)


def verdict(make_s: float, before_s: float, after_s: float) -> str:
    """Whether the copy pays, and why."""
    epochs, saved_s = epochs_to_pay(make_s, before_s, after_s), before_s - after_s
    if epochs is not None:
        many = f"{epochs:,} epoch{'s' if epochs > 1 else ''}"
        return f"it pays after {many} ({seconds(make_s)} to make / {seconds(saved_s)} saved an epoch)"
    within = " or within the noise" if saved_s > 0 else ""
    return f"it never pays: an epoch would take {seconds(after_s)}, and takes {seconds(before_s)} now, no more{within}"


def product(seen: Measured, read_s: float, decode_s: float) -> str:
    """The arithmetic of an epoch."""
    slower = f"max({ms(read_s)}, {ms(decode_s)} / {seen.cpus})" if decode_s else ms(read_s)
    return f"{seen.rows:,} × {slower} = {seconds(seen.epoch_s(read_s, decode_s))}"


def seconds(value: float) -> str:
    """Seconds, with a digit or two after the point where they are few."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def ms(value: float) -> str:
    """Seconds as milliseconds, in three digits."""
    return f"{value * 1000:.3g} ms"


def advise(wish: Wish, cpus: int) -> str:
    """Measures the source; returns what it saw, and whether a copy pays."""
    facts, source = open_source(wish)
    seen = measure(source, wish, facts["rows"], cpus)
    cached = "as it is, with what caches hold of it now"
    return f"measured on {facts['uri']}, version {facts['version']}, {cached}:\n{report(seen)}"


def measure(source: lance.LanceDataset, wish: Wish, rows: int, cpus: int) -> Measured:
    """Reads samples in every way, and decodes some images."""
    of_rows, offsets = source.count_rows(), selected_offsets(source, wish.filter)
    rng = np.random.default_rng(wish.seed)
    few = rng.integers(0, rows, min(rows, FEWEST))
    table = source.take(pa.array(pick(offsets, np.unique(few))), columns=wish.columns)
    row_bytes = max(1.0, table.nbytes / len(table))
    count = min(rows, FEWEST + min(MOST, int(SAMPLE_BYTES / max(row_bytes, stored_row_bytes(source, wish.columns)))))

    def scan(first: int, stop: int) -> float:
        batch_rows = max(1, min(stop - first, int((4 << 20) / row_bytes)))
        scanner = source.scanner(columns=wish.columns, offset=first, limit=stop - first, batch_size=batch_rows)
        return timed(lambda: sum(len(batch) for batch in scanner.to_batches()))

    def take(wanted: np.ndarray) -> float:
        return timed(lambda: source.take(pa.array(wanted), columns=wish.columns).num_rows)

    scans, windows, randoms = [], [], []
    for number in range(ROUNDS):
        # Stretches that lie apart: each kind of reading has rows of its own in each round.
        at = (np.arange(2) / 2 + number / (2 * ROUNDS)) * np.asarray([of_rows, rows])
        first = min(int(at[0]), max(0, of_rows - count))
        scans.append(scan(first, min(first + count, of_rows)) / min(count, of_rows))
        start = min(int(at[1]), rows - count)
        near = pick(offsets, np.arange(start, start + count))
        ways = [take(near)]
        if near[-1] - near[0] < SPARSE * count:
            ways.append(scan(int(near[0]), int(near[-1]) + 1))
        windows.append(min(ways) / count)
        far = np.unique(rng.integers(0, rows, min(count, FEWEST * 4)))
        randoms.append(take(pick(offsets, far)) / len(far))
    decode = measure_images(table, wish, source)
    return Measured(
        rows=rows,
        of_rows=of_rows,
        row_bytes=row_bytes,
        copy_bytes=max(1.0, row_bytes + decode.pop("grows_bytes")),
        scan_s=statistics.median(scans),
        window_s=statistics.median(windows),
        random_s=statistics.median(randoms),
        cpus=cpus,
        **decode,
    )


def measure_images(table: pa.Table, wish: Wish, source: lance.LanceDataset) -> dict[str, float]:
    """Seconds for an image, as fields of `Measured`, and by how many bytes its row grows in the copy."""
    nothing = {"grows_bytes": 0.0, "decode_s": 0.0, "copy_decode_s": 0.0, "encode_s": 0.0}
    column = wish.image_column
    kind = source.schema.field(column).type if column in table.column_names else None
    if kind not in (pa.binary(), pa.large_binary()):
        return nothing
    files = [file for file in table[column].to_pylist() if not why_no_image(file or b"", whole=True)][:IMAGES]
    if not files:
        return nothing
    change = wish.images or Reencode(column=column)
    decoder = raylance.Image(column, size=change.shorter_side or SIDE)
    draws, pixels = np.zeros(decoder.draws), np.empty(decoder.shape, np.uint8)

    def decode(some: list[bytes]) -> float:
        decoder.decode_into(some[0], draws, pixels)  # the first one loads what it needs
        return timed(lambda: [decoder.decode_into(file, draws, pixels) for file in some]) / len(some)

    with one_thread():
        made: list[bytes] = []
        encode_s = timed(lambda: made.extend(map(change.encode, files))) / len(files)
        decode_s = decode(files)
        return {
            "grows_bytes": (sum(map(len, made)) - sum(map(len, files))) / len(files),
            "decode_s": decode_s,
            "copy_decode_s": decode_s if wish.images is None else decode(made),
            "encode_s": 0.0 if wish.images is None else encode_s,
        }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Resizes by one thread, as a decoder does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def selected_offsets(source: lance.LanceDataset, filter: str | None) -> np.ndarray | None:
    """Row offsets of the selection, 8 bytes each, int64; None for all rows."""
    return None if filter is None else np.concatenate([found for found, _ in read_offsets(source, 0, filter, None)])


def pick(offsets: np.ndarray | None, selected: np.ndarray) -> np.ndarray:
    """Row offsets of selected rows."""
    return selected if offsets is None else offsets[selected]


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
