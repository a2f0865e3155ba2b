"""Owns the memory that pieces of a batch are joined in, and its reuse after the batch is gone; never converts, never
chooses the pieces.
"""

import ctypes
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_LEAST_BYTES = 1 << 20  # the allocator reuses less by itself
_SPARES = 4


class Joiner:
    """Joins arrays along their first axis, in memory of earlier batches: fresh memory would cost more than the copy.

    Several threads may use one joiner at once, as two passes of one iterator do.
    """

    def __init__(self, *, pins: bool = False) -> None:
        self._pins = pins and torch.cuda.is_available()  # torch reuses pinned memory by itself
        self._spare: dict[int, npt.NDArray[np.uint8]] = {}

    def __call__(self, pieces: list[Array]) -> Array:
        """Joins at least one array (n, …), all of one dtype, to an array (sum of n, …) that belongs to the caller."""
        shape, dtype = (sum(map(len, pieces)), *pieces[0].shape[1:]), pieces[0].dtype
        nbytes = sum(piece.nbytes for piece in pieces)
        if dtype.hasobject or nbytes < _LEAST_BYTES:
            return np.concatenate(pieces)
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy() if self._pins else self._lend(nbytes)
        return np.concatenate(pieces, out=memory.view(dtype).reshape(shape))

    def _lend(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory that comes back when the last array, tensor or slice of it is gone."""
        memory = self._take_spare(nbytes)
        # NumPy lets a slice refer past the arrays in between to the object that owns the memory: this one.
        owner = (ctypes.c_ubyte * nbytes).from_buffer(memory.data)
        weakref.finalize(owner, _give_back, self._spare, memory).atexit = False
        return np.frombuffer(memoryview(owner), dtype=np.uint8)

    def _take_spare(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of at least so many bytes, and less than twice as many."""
        for key, spare in self._spare.copy().items():  # another thread may take it first
            if nbytes <= len(spare) < 2 * nbytes and self._spare.pop(key, None) is not None:
                return spare
        self._spare.clear()  # of batches of another size
        return np.empty(nbytes, dtype=np.uint8)


def _give_back(spare: dict[int, npt.NDArray[np.uint8]], memory: npt.NDArray[np.uint8]) -> None:
    if len(spare) < _SPARES:
        spare[id(memory)] = memory
