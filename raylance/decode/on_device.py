"""Owns decoding on the trainer's device, from the encoded bytes of a batch to tensors; never reads storage, and never
chooses the device.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raylance.columns import ROW_OFFSET
from raylance.decode.arrays import to_arrow
from raylance.decode.decoder import Decoder
from raylance.decode.opened import BatchColumn, Rows, read_only
from raylance.decode.rows import DecodedRows, Decoding
from raylance.observe import Receipt, clock
from raylance.orders.permutation import Int64Array

_CPU = torch.device("cpu")
_ALIGNED = 64  # bytes, as torch aligns its own memory


class DeviceColumn(BatchColumn):
    """A batch decoder on a device. Its results stay tensors; on the CPU, they may become Arrow columns.

    It is opened once, for all threads, because it may hold a model; one thread at a time uses it.
    """

    def __init__(self, decoders: Sequence[Decoder], like: str | None, device: torch.device = _CPU) -> None:
        super().__init__(decoders, like)
        self._device, self._opened_once = device, None
        self._dtype = torch.from_numpy(np.empty(0, decoders[0].dtype)).dtype

    def open(self) -> Any:
        """See `OpenColumn.open`."""
        opened: Any = self._decoders[0].open_on(self._device)  # type: ignore[attr-defined]
        _ = opened.decode_batch
        return opened

    @property
    def opened(self) -> Any:
        """The open batch decoder of all threads, opened at its first use."""
        if self._opened_once is None:
            self._opened_once = self._try_to_open()
        return self._opened_once

    def decode(self, rows: Rows, executor: Any, *, own_memory: bool) -> dict[str, pa.Array]:
        """See `OpenColumn.decode`; only on the CPU."""
        return {name: to_arrow(tensor.numpy()) for name, tensor in self.decode_on_device(rows).items()}

    def decode_on_device(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Decodes rows on the device; returns tensors (n, *shape) by the decoder's name."""
        (decoder,), pins = self._decoders, self._device.type == "cuda"

        def make(count: int) -> torch.Tensor:
            return torch.empty((count, *decoder.shape), dtype=self._dtype, device=self._device)

        out = make(rows.table.num_rows)
        self.decode_together(rows, lambda: _tensors(rows.table[decoder.column], pins), out, make)
        return {decoder.output_name: out}


@dataclasses.dataclass(frozen=True, slots=True)
class OnDevice:
    """The rows of a batch, decoded on the device.

    Attributes:
        columns: Tensors (n, …) by name.
        masked: Offsets of the rows that could not be decoded, with component bits, int64.
        receipt: Figures of the decoding, such as bad rows with reasons.
    """

    columns: dict[str, torch.Tensor]
    masked: Int64Array
    receipt: Receipt


class DeviceDecoding:
    """Decodes batches on a device, in one thread at a time; keeps decoders open."""

    def __init__(self, decoding: Decoding, device: torch.device) -> None:
        self._decoding = decoding
        self._columns = [
            DeviceColumn([decoder], None, device)
            for decoder in sorted(decoding.decoders, key=lambda decoder: decoder.like is not None)
        ]

    @property
    def encoded(self) -> list[str]:
        """Names of the encoded columns."""
        return self._decoding.columns

    def decode(self, table: pa.Table, epoch: int) -> OnDevice:
        """Decodes the rows of a table with `_rowoffset`, which in a mixture has component bits; and with `_draw`, if
        rows repeat.

        Raises:
            BadRowError: If a row is bad, unless bad rows are masked.
            ConfigError: If a good row does not fit the settings.
            HelperError: If a decoder fails on rows together, but on none alone.
        """
        for column in self._columns:  # not timed as decoding: a model is loaded once
            _ = column.opened
        begin, rows = clock.now(), DecodedRows(self._decoding, table, epoch)
        made: dict[str, torch.Tensor] = {}
        for column in self._columns:
            made |= column.decode_on_device(rows)
        seconds = clock.now() - begin
        return OnDevice(
            columns=made,
            masked=table[ROW_OFFSET].to_numpy()[~rows.valid],
            receipt=Receipt(
                nbytes=sum(tensor.nbytes for tensor in made.values()),
                decode_s=seconds,
                device_decode_s=seconds,
                fallback_rows=rows.fallbacks,
                bad_rows=rows.named_bad_rows,
            ),
        )


def _tensors(column: pa.ChunkedArray, pins: bool) -> list[torch.Tensor | None]:
    """The bytes of each row, uint8 (length,), as parts of one tensor, pinned if `pins`. Each part is aligned, so that
    it can be viewed as any dtype.
    """
    values = read_only(column)
    sizes = np.array([0 if value is None else len(value) for value in values], dtype=np.int64)
    ends = (-(-sizes // _ALIGNED) * _ALIGNED).cumsum()
    memory = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8, pin_memory=pins)
    array, parts = memory.numpy(), list[torch.Tensor | None]()
    for value, size, begin in zip(values, sizes.tolist(), [0, *ends.tolist()], strict=False):
        if value is not None:
            array[begin : begin + size] = np.frombuffer(value, np.uint8)
        parts.append(None if value is None else memory[begin : begin + size])
    return parts
