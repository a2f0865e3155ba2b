"""Owns tables becoming batches of tensors; never decodes, never reorders."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.utils.dlpack

from raylance.decode.arrays import AS_LISTS, Lists, to_numpy
from raylance.errors import DatasetError

Dtypes = torch.dtype | Mapping[str, torch.dtype] | None


def to_torch(
    table: pa.Table, *, lists: Lists = AS_LISTS, dtypes: Mapping[str, torch.dtype], channels_last: frozenset[str]
) -> dict[str, Any]:
    """Turns a table of n rows into tensors.

    Args:
        table: The rows.
        lists: As for `to_numpy`.
        dtypes: dtypes by column; the others keep what is stored.
        channels_last: Columns, such as images: (n, H, W, C) becomes an (n, C, H, W) view in channels-last memory.

    Returns:
        By column what `to_numpy` gives, as tensors; strings, bytes and unpadded lists as Python lists.

    Raises:
        DatasetError: If a column of numbers has nulls, or a column has no torch type.
    """
    batch: dict[str, Any] = {}
    for name, array in to_numpy(table, lists).items():
        if array.dtype == object:
            for value in array:
                _refuse_dates(name, table[name].type, value)
            batch[name] = [torch.tensor(value) if isinstance(value, np.ndarray) else value for value in array]
            continue
        _refuse_dates(name, table[name].type, array)
        tensor = torch.utils.dlpack.from_dlpack(array)
        if name in channels_last and tensor.ndim == 4:
            tensor = tensor.permute(0, 3, 1, 2)
        batch[name] = tensor.to(dtypes[name]) if name in dtypes else tensor
    return batch


def _refuse_dates(name: str, kind: pa.DataType, value: Any) -> None:
    """Refuses arrays of dates, times and decimals, for which torch has no type."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "mMO":
        raise DatasetError(
            f"column {name!r} is {kind}, for which torch has no type; the batch stops here. Leave it out of columns=, "
            'or iterate with iter_batches(batch_format="numpy").'
        )
