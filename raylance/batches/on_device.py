"""Owns the step of which a part is decoded on the device of the batches: which rows go there, and what comes of bad
ones; never decodes itself.
"""

import dataclasses

import numpy as np
import pyarrow as pa

from raylance.batches.assembly import Assembly, Step
from raylance.columns import DRAW, ROW_OFFSET, VALID
from raylance.decode.on_device import DeviceDecoding, OnDevice


def decode_step(
    decoding: DeviceDecoding, assembly: Assembly, table: pa.Table, step: Step
) -> tuple[pa.Table, Step, OnDevice]:
    """Decodes the columns of a step that its device decodes.

    Returns:
        The table without these columns, and with `_valid` False for the rows that could not be decoded; the step, with
        those rows among its masked ones, and with the bytes of its decoded columns; and what was decoded.

    Raises:
        RaylanceError: As `DeviceDecoding.decode` raises.
    """
    offsets = assembly.offsets(table)
    rows = table.select(decoding.encoded).append_column(ROW_OFFSET, pa.array(offsets))
    if assembly.repeats:
        rows = rows.append_column(DRAW, pa.array(assembly.positions(step)))
    made, masked = decoding.decode(rows, assembly.epoch), step.masked
    if len(made.masked):
        valid = table[VALID].to_numpy() & ~np.isin(offsets, made.masked)
        table = table.set_column(table.column_names.index(VALID), VALID, pa.array(valid))
        new = made.masked[~np.isin(made.masked, masked)]  # other columns may have masked the same rows
        masked = np.concatenate([masked, new])
    table = table.drop_columns(decoding.encoded)
    return table, dataclasses.replace(step, masked=masked, nbytes=table.nbytes + made.receipt.nbytes), made
