"""The setting of the C library that keeps freed memory for the next read."""

import ctypes
import platform

KEPT_BYTES = 64 << 20  # most freed memory that each arena keeps
# The largest freed piece that is kept: twice the size of one read. A larger piece, such as one large row, goes back to
# the system. If it were kept, it would pin the freed memory around it: a reader of 32 MiB of rows held 170 MiB.
_KEPT_PIECE_BYTES = 8 << 20
ARENAS = 4  # more arenas would help only threads that allocate many small pieces
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_freed_memory() -> bool:
    """Makes this process keep some freed memory for later; returns False if the C library is not glibc or refuses.

    Lance frees the pieces that it read, and glibc returns them to the system. Then each page of the next piece costs a
    page fault, and all faults up to half of the CPU time of reading. Both thresholds are set: if only one is set, glibc
    no longer adjusts the other, which costs more than it saves.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {_M_ARENA_MAX: ARENAS, _M_MMAP_THRESHOLD: _KEPT_PIECE_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES}
    return all(mallopt(key, value) for key, value in settings.items())
