"""Decodes the rows of a batch on the trainer's device, to tensors."""

import dataclasses

import pyarrow as pa
import torch

from raylance.columns import ROW_OFFSET
from raylance.decode.decoding import DecodedRows, Decoding
from raylance.decode.device_column import DeviceColumn
from raylance.decode.open_decoding import open_columns
from raylance.observe import Receipt, clock
from raylance.orders.permutation import Int64Array


@dataclasses.dataclass(frozen=True, slots=True)
class OnDevice:
    """The rows of a batch, decoded on the device."""

    columns: dict[str, torch.Tensor]  # tensors (n, …) by name
    masked: Int64Array  # offsets of bad rows, joined as by `join_offsets`
    receipt: Receipt  # time of the decoding, and the bad rows with reasons


class DeviceDecoding:
    """Decodes batches on a device, and keeps the decoders open. Only one thread may use it at a time."""

    def __init__(self, decoding: Decoding, device: torch.device) -> None:
        self._decoding = decoding
        opened = open_columns(decoding.decoders, device)
        self._columns = [column for column in opened if isinstance(column, DeviceColumn)]  # all of them

    @property
    def encoded(self) -> list[str]:
        """Names of the encoded columns."""
        return self._decoding.columns

    def decode(self, table: pa.Table, epoch: int) -> OnDevice:
        """Decodes the rows of a table. The table has `_rowoffset`, joined as by `join_offsets`; if rows repeat, it also
        has `_draw`. Raises the errors of `OpenDecoding.apply`.
        """
        for column in self._columns:  # before the clock starts: loading a model is not decoding
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
                fallback_rows=int(rows.counts[0]),
                unturned_rows=int(rows.counts[1]),
                bad_rows=rows.named_bad_rows,
            ),
        )
