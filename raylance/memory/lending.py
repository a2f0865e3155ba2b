"""Memory that is lent, and comes back when the last array in it is gone."""

import ctypes
import functools
import weakref
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Lend = Callable[[int], Bytes]  # takes a number of bytes; returns memory of at least that size
LendFor = Callable[[str, int], Bytes]  # the same for the values of a column, of just that size

_LEAST_BYTES = 1 << 20  # the allocator itself reuses smaller memory
# Spare memory may be larger than needed by this factor, because the last window of an epoch is often short: with 1, an
# epoch of vectors takes 1.7 times as long. With a higher factor, small columns would get the memory of large ones.
_LARGER = 8
_FADE = 0.9  # factor for each piece that it lends, so that the memory of larger ones is released when none comes


def fresh_memory(nbytes: int) -> Bytes:
    """Returns memory that was not used before."""
    return np.empty(nbytes, dtype=np.uint8)


def fresh_for(_: str, nbytes: int) -> Bytes:
    """Returns memory that was not used before, for the values of a column."""
    return fresh_memory(nbytes)


class Lender:
    """Lends memory that was used before, because a page fault of fresh memory costs more than copying a page.

    Several threads may borrow at once. There is no lock, because memory comes back in any thread in which the garbage
    collector runs.

    Attributes:
        most_bytes: Most bytes of lent and spare memory together. If there are more, the spare memory that came back
            first is dropped.
    """

    def __init__(self, most_bytes: float) -> None:
        self.most_bytes = most_bytes
        self._spare: dict[int, Bytes] = {}
        # By the identity of the memory: its bytes, and the reference whose callback takes it back. Not
        # `weakref.finalize`, whose registry must not change at the end of the process, when threads may still borrow.
        self._lent: dict[int, tuple[int, weakref.ref[object]]] = {}

    def lend(self, nbytes: int) -> Bytes:
        """Returns memory of `nbytes` or more, uint8, shape (n,). It comes back when its last view is gone."""
        if nbytes < _LEAST_BYTES:
            return np.empty(nbytes, dtype=np.uint8)
        memory = self._take_spare(nbytes)
        # Slices of a NumPy array refer directly to the object that owns the memory, here `owner`.
        owner = (ctypes.c_ubyte * len(memory)).from_buffer(memory.data)
        back = functools.partial(_give_back, weakref.ref(self), memory)
        self._lent[id(memory)] = len(memory), weakref.ref(owner, back)
        return np.frombuffer(memoryview(owner), dtype=np.uint8)

    @property
    def lent_bytes(self) -> int:
        """Bytes that are lent at present."""
        return sum(nbytes for nbytes, _ in self._lent.copy().values())

    def _take_spare(self, nbytes: int) -> Bytes:
        """Returns the smallest spare memory of `nbytes` to `_LARGER * nbytes` bytes; fresh memory if there is none."""
        fitting = [each for each in self._spare.copy().items() if nbytes <= len(each[1]) <= _LARGER * nbytes]
        for key, spare in sorted(fitting, key=lambda each: len(each[1])):
            if self._spare.pop(key, None) is not None:  # another thread may have taken it first
                return spare
        step = max(_LEAST_BYTES, 1 << max(0, nbytes.bit_length() - 5))  # the next request may need a little more
        return np.empty(-(-nbytes // step) * step, dtype=np.uint8)

    def take_back(self, memory: Bytes) -> None:
        """Keeps memory whose views are all gone as spare memory, as far as `most_bytes` allows."""
        self._lent.pop(id(memory), None)
        self._spare[id(memory)] = memory
        spares = self._spare.copy()
        kept = self.lent_bytes + sum(map(len, spares.values()))
        for key, spare in spares.items():
            if kept > self.most_bytes:
                self._spare.pop(key, None)
                kept -= len(spare)


class FadingLender(Lender):
    """Lends memory of batches, and keeps about as much as was in use lately: what is in use now will be so again."""

    def __init__(self) -> None:
        super().__init__(0)

    def lend(self, nbytes: int) -> Bytes:
        """Returns memory of `nbytes`; see `Lender.lend`."""
        self.most_bytes = max(_FADE * self.most_bytes, self.lent_bytes + nbytes)
        return super().lend(nbytes)[:nbytes]


def _give_back(lender: "weakref.ref[Lender]", memory: Bytes, _: object) -> None:
    if (alive := lender()) is not None:
        alive.take_back(memory)
