"""Owns memory in which the pieces of a batch are put together, and which serves again once nobody has the batch; never
converts, never chooses the pieces.
"""

import ctypes
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_LEAST_BYTES = 1 << 20  # the allocator has less at hand
_SPARES = 4


class Joiner:
    """Puts arrays together, one behind another. Fresh memory would cost more than the copy."""

    def __init__(self, *, pins: bool = False) -> None:
        """Holds nothing yet; with `pins`, batches lie in pinned memory, which torch uses again by itself."""
        self._pins = pins and torch.cuda.is_available()
        self._spare: dict[int, npt.NDArray[np.uint8]] = {}

    def __call__(self, pieces: list[Array]) -> Array:
        """Joins arrays (n, …) of one dtype, at least one, to an array (sum of n, …) that belongs to the caller."""
        shape, dtype = (sum(map(len, pieces)), *pieces[0].shape[1:]), pieces[0].dtype
        nbytes = sum(piece.nbytes for piece in pieces)
        if dtype.hasobject or nbytes < _LEAST_BYTES:
            return np.concatenate(pieces)
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy() if self._pins else self._lend(nbytes)
        return np.concatenate(pieces, out=memory.view(dtype).reshape(shape))

    def _lend(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory that comes back when the last array, tensor or slice of it is gone."""
        fitting = [key for key, spare in list(self._spare.items()) if nbytes <= len(spare) < 2 * nbytes]
        if fitting:
            memory = self._spare.pop(fitting[0])
        else:
            self._spare.clear()  # of batches of another size
            memory = np.empty(nbytes, dtype=np.uint8)
        # NumPy lets slices skip the arrays between them and what is no array: this is what all of them hold on to.
        owner = (ctypes.c_ubyte * nbytes).from_buffer(memory.data)
        weakref.finalize(owner, _give_back, self._spare, memory).atexit = False
        return np.frombuffer(memoryview(owner), dtype=np.uint8)


def _give_back(spare: dict[int, npt.NDArray[np.uint8]], memory: npt.NDArray[np.uint8]) -> None:
    if len(spare) < _SPARES:
        spare[id(memory)] = memory
