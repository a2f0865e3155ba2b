"""Owns the names of the columns that raylance adds to batches; nothing else."""

ROW_OFFSET = "_rowoffset"
"""Offset of the row in the pinned dataset version, int64: what `dataset.take([offset])` reads."""

VALID = "_valid"
"""False where the row is padding, or could not be decoded and was masked; bool."""

DRAW = "_draw"
"""Epoch position of a row that may come more than once, int64; only on the way to a decoder."""

SEED = "_seed"
"""What a transform may seed its own randomness with: of the row, the epoch and the seed, uint64."""
