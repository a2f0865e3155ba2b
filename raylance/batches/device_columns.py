"""The columns of a step that are decoded on the device of its batch: the rows that are decoded, and the masking of bad
rows.
"""

import dataclasses

import numpy as np
import pyarrow as pa

from raylance.batches.assembly import Assembly, DeliveredStep
from raylance.columns import DRAW, ROW_OFFSET, VALID
from raylance.decode.on_device import DeviceDecoding, OnDevice


def decode_step(
    decoding: DeviceDecoding, assembly: Assembly, table: pa.Table, step: DeliveredStep
) -> tuple[pa.Table, DeliveredStep, OnDevice]:
    """Decodes those columns of a step whose decoders run on the device.

    Returns:
        The table without the encoded columns, and with `_valid` False for rows that could not be decoded; the step,
        with these rows among its masked rows, and with the bytes of the decoded columns; and the decoded rows.

    Raises:
        RaylanceError: As `DeviceDecoding.decode` raises.
    """
    offsets = assembly.offsets(table)
    rows = table.select(decoding.encoded).append_column(ROW_OFFSET, pa.array(offsets))
    if assembly.repeats:
        rows = rows.append_column(DRAW, pa.array(assembly.positions(step)))
    made, masked = decoding.decode(rows, step.epoch), step.masked
    if len(made.masked):
        valid = table[VALID].to_numpy() & ~np.isin(offsets, made.masked)
        table = table.set_column(table.column_names.index(VALID), VALID, pa.array(valid))
        new = made.masked[~np.isin(made.masked, masked)]  # other columns may have masked the same rows
        masked = np.concatenate([masked, new])
    table = table.drop_columns(decoding.encoded)
    return table, dataclasses.replace(step, masked=masked, nbytes=table.nbytes + made.receipt.nbytes), made
