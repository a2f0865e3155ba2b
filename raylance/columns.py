"""Owns the names of the columns that raylance adds to batches; nothing else."""

ROW_OFFSET = "_rowoffset"
"""Offset of the row in the pinned dataset version, int64: what `dataset.take([offset])` reads."""

VALID = "_valid"
"""False where the row is padding, or could not be decoded and was masked; bool."""

DRAW = "_draw"
"""Epoch position of a row that may come more than once, int64; only on the way to a decoder."""

SEED = "_seed"
"""What a transform may seed its own randomness with: of the row, the epoch and the seed, uint64."""

COMPONENT = "_component"
"""Which dataset of a mixture a row is from, by its place among the names, int64."""

COMPONENT_SHIFT = 48
"""In a mixture, offsets on their way carry the component in the bits from this one on."""
