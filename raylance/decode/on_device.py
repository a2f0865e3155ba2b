"""Owns decoding on the device of a trainer, from the encoded bytes of a batch to tensors there; never reads, and never
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
from raylance.observe import Receipt
from raylance.orders.permutation import Int64Array

_CPU = torch.device("cpu")


class DeviceColumn(BatchColumn):
    """A batch decoder on a device, where what it makes stays a tensor; on the CPU, it may become a column of Arrow."""

    def __init__(self, decoders: Sequence[Decoder], like: str | None, device: torch.device = _CPU) -> None:
        super().__init__(decoders, like, device)
        self._device = device
        self._dtype = torch.from_numpy(np.empty(0, decoders[0].dtype)).dtype

    @staticmethod
    def open(decoders: Sequence[Decoder], *where: Any) -> Any:
        """See `OpenColumn.open`."""
        opened: Any = decoders[0].open_on(*where)  # type: ignore[attr-defined]
        _ = opened.decode_batch
        return opened

    def decode(self, rows: Rows, executor: Any, *, own_memory: bool) -> dict[str, pa.Array]:
        """See `OpenColumn.decode`; on the CPU."""
        return {name: to_arrow(tensor.numpy()) for name, tensor in self.decode_on_device(rows).items()}

    def decode_on_device(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Decodes rows on the device; returns tensors (n, *shape) by the decoder's name."""
        (decoder,) = self._decoders

        def make(count: int) -> torch.Tensor:
            return torch.empty((count, *decoder.shape), dtype=self._dtype, device=self._device)

        out = make(rows.table.num_rows)
        self.decode_together(rows, _tensors(rows.table[decoder.column], self._device.type == "cuda"), out, make)
        return {decoder.output_name: out}


@dataclasses.dataclass(frozen=True, slots=True)
class OnDevice:
    """The rows of a batch as they were decoded on the device.

    Attributes:
        columns: Tensors (n, …) by name.
        masked: Offsets of the rows that could not be decoded, with component bits, int64.
        receipt: The reasons, and what was left to a slow way.
    """

    columns: dict[str, torch.Tensor]
    masked: Int64Array
    receipt: Receipt


class DeviceDecoding:
    """Decodes batches on a device; keeps what decoders opened for each thread."""

    def __init__(self, decoding: Decoding, device: torch.device) -> None:
        self._decoding = decoding
        self._columns = [
            DeviceColumn([decoder], None, device)
            for decoder in sorted(decoding.decoders, key=lambda decoder: decoder.like is not None)
        ]

    @property
    def encoded(self) -> list[str]:
        """Names of the columns that it decodes."""
        return self._decoding.columns

    def decode(self, table: pa.Table, epoch: int) -> OnDevice:
        """Decodes the rows of a table with `_rowoffset`, in a mixture with its bits, and where rows repeat `_draw`.

        Raises:
            BadRowError: For a bad row, unless bad rows are masked.
            ConfigError: For a row that the settings cannot decode.
            HelperError: If a decoder fails on rows together only.
        """
        rows = DecodedRows(self._decoding, table, epoch)
        made: dict[str, torch.Tensor] = {}
        before = sum(column.fallbacks for column in self._columns)
        for column in self._columns:
            made |= column.decode_on_device(rows)
        return OnDevice(
            columns=made,
            masked=table[ROW_OFFSET].to_numpy()[~rows.valid],
            receipt=Receipt(
                fallback_rows=sum(column.fallbacks for column in self._columns) - before, bad_rows=rows.named_bad_rows
            ),
        )


def _tensors(column: pa.ChunkedArray, pins: bool) -> list[torch.Tensor | None]:
    """The bytes of each row, uint8 (length,): parts of one tensor, in pinned memory if asked for."""
    values = read_only(column)
    memory = torch.empty(sum(len(value) for value in values if value is not None), dtype=torch.uint8, pin_memory=pins)
    array, end, parts = memory.numpy(), 0, []
    for value in values:
        start, end = end, end + (0 if value is None else len(value))
        if value is not None:
            array[start:end] = np.frombuffer(value, np.uint8)
        parts.append(None if value is None else memory[start:end])
    return parts
