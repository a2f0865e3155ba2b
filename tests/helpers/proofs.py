"""What a proof of a run says, as values."""

import raylance


def values(proof: raylance.runs.RunProof) -> list[tuple[str, int, int, str, int]]:
    """Dataset, first epoch, number of epochs, status and rows of each line."""
    lines = [(each.dataset, one) for each in proof.datasets for one in each.epochs]
    return [(dataset, one.epoch, one.epochs, one.status, one.rows) for dataset, one in lines]
