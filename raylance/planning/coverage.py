"""Owns the proof that an epoch's rows came once each, as numbers that add up over ranks; never compares rows itself."""

import dataclasses

import numpy as np

from raylance.orders.permutation import Int64Array, mix64


@dataclasses.dataclass(slots=True, kw_only=True)
class Coverage:
    """What one iteration delivered, as a count and a multiset hash of row offsets, padding left out.

    Every item is compared with the plan when it arrives; this sums the comparisons up, in a form that can be added over
    ranks: the sum of all ranks' hashes, modulo 2**64, is that of the selection when an epoch covered it exactly once.
    """

    rows: int = 0
    hash: int = 0

    def add(self, offsets: Int64Array) -> None:
        """Counts rows in."""
        self.rows += len(offsets)
        self.hash = (self.hash + int(mix64(offsets.astype(np.uint64)).sum(dtype=np.uint64))) % 2**64
