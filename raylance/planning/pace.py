"""How many rows to read next, and how many bytes around them, if only reading or decoding shows it."""

import dataclasses

MARGINS = 0, 16, 1024, 1 << 40
"""Keyframes and frames to read beside those that a video's index names: the next number each time a decoder lacks
bytes. With the last one, the file is read whole.
"""


@dataclasses.dataclass(slots=True)
class Pace:
    """Computes how many rows to read next from the bytes of earlier rows: only reading shows whether some are large."""

    target_bytes: float  # bytes to read at once
    row_bytes: float  # an estimate: large rows raise it at once, and small ones lower it slowly
    limit_rows: int = 0  # doubles with each read, so that a bad first guess shows early
    # Lower limit of `row_bytes`. If the mean is known, small rows only mean that large ones are still to come.
    least_bytes: float = 1.0

    def __post_init__(self) -> None:
        self.limit_rows = self.limit_rows or int(self.target_bytes / max(self.row_bytes, 1) / 4) + 1

    def next_rows(self) -> int:
        """Returns the number of rows to read next, at least one."""
        return max(1, min(self.limit_rows, int(self.target_bytes / max(self.row_bytes, 1))))

    def record(self, rows: int, nbytes: int) -> None:
        """Adjusts the estimate to the rows that were read."""
        self.row_bytes = max(self.least_bytes, self.row_bytes * 0.75, nbytes / max(rows, 1))
        self.limit_rows = min(self.limit_rows * 2, 1 << 40)
