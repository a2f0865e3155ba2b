"""The memory in which pieces of a batch are joined, and the reuse of this memory after the batch is gone."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raylance.memory.lending import FadingLender

Array = npt.NDArray[Any]

_LEAST_BYTES = 1 << 20  # the allocator itself reuses smaller memory


class Joiner:
    """Joins arrays along their first axis, in memory of earlier batches, because new memory costs more than the copy.

    Several threads may use one joiner at once, for example in two passes over the same batches.
    """

    def __init__(self, *, pins: bool = False) -> None:
        self._pins = pins and torch.cuda.is_available()  # torch itself reuses pinned memory
        self._lender = FadingLender()

    def __call__(self, pieces: list[Array]) -> Array:
        """Joins one or more arrays (n, …) of one dtype to an array (sum of n, …), which belongs to the caller."""
        shape, dtype = (sum(map(len, pieces)), *pieces[0].shape[1:]), pieces[0].dtype
        nbytes = sum(piece.nbytes for piece in pieces)
        if dtype.hasobject or nbytes < _LEAST_BYTES:
            return np.concatenate(pieces)
        if self._pins:
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        else:
            memory = self._lender.lend(nbytes)
        return np.concatenate(pieces, out=memory.view(dtype).reshape(shape))
