"""Sequences of a packed dataset, by plain loops."""

import numpy as np

from raylance.samples.packs import PackTable


def sequences_of(table: PackTable, epoch: int) -> list[list[list[tuple[int, int]]]]:
    """The pieces of each sequence, each as a list of tokens."""
    found: list[list[list[tuple[int, int]]]] = [[] for _ in range(table.rows)]
    pieces = table.pieces(np.arange(table.rows), epoch)
    for sequence, document, start, size in zip(*(each.tolist() for each in pieces), strict=True):
        assert size > 0
        found[sequence].append([(document, token) for token in range(start, start + size)])
    return found
