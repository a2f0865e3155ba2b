"""Decodes one column's rows on a device, from encoded bytes to a tensor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raylance.decode.arrays import to_arrow
from raylance.decode.column import BatchColumn, read_only
from raylance.decode.decoder import Decoder
from raylance.decode.decoding import DecodedRows
from raylance.memory.lending import LendFor

_CPU = torch.device("cpu")
_ALIGNED = 64  # bytes, as torch aligns its own memory


class DeviceColumn(BatchColumn):
    """Decodes a column with a batch decoder on a device, to tensors; on the CPU, they may become Arrow columns. It is
    opened once for all threads, because it may hold a model. Only one thread uses it at a time.
    """

    def __init__(self, decoders: Sequence[Decoder], like: str | None, device: torch.device | None = None) -> None:
        super().__init__(decoders, like)
        self._device, self._opened_once = device or _CPU, None
        self._dtype = torch.from_numpy(np.empty(0, decoders[0].dtype)).dtype

    def open(self) -> Any:
        """See `OpenColumn.open`."""
        return self._checked(self._decoders[0].open_on(self._device))  # type: ignore[attr-defined]

    @property
    def opened(self) -> Any:
        """The open batch decoder of all threads, opened at its first use."""
        if self._opened_once is None:
            self._opened_once = self._try_to_open()
        return self._opened_once

    def decode(self, rows: DecodedRows, executor: Any, lend: LendFor | None) -> dict[str, pa.Array]:
        """See `OpenColumn.decode`; only on the CPU."""
        return {name: to_arrow(tensor.numpy()) for name, tensor in self.decode_on_device(rows).items()}

    def decode_on_device(self, rows: DecodedRows) -> dict[str, torch.Tensor]:
        """Decodes rows on the device; returns a dict from the decoder's output name to a tensor (n, *shape)."""
        (decoder,), pins = self._decoders, self._device.type == "cuda"

        def make(count: int) -> torch.Tensor:
            return torch.empty((count, *decoder.shape), dtype=self._dtype, device=self._device)

        out = make(rows.table.num_rows)
        self.decode_together(rows, lambda: _tensors(rows.table[decoder.column], pins), out, make)
        return {decoder.output_name: out}


def _tensors(column: pa.ChunkedArray, pins: bool) -> list[torch.Tensor | None]:
    """Returns the bytes of each row, uint8 (length,), None for a null: aligned parts of one tensor, maybe pinned."""
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
