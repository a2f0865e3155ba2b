"""Owns RaylanceError and its subclasses; never raises one itself.

    RaylanceError
    ├── ConfigError      an argument that cannot be honoured (also a ValueError)
    ├── DatasetError     a dataset, version, tag, column or filter that is missing, unreadable or selects no row
    ├── StateError       a checkpoint that is damaged, or of other data, another order, or another raylance
    ├── PlacementError   helper actors that found no place, or did not start, within the deadline
    ├── BadRowError      a row that cannot be decoded or transformed, with its offset, or too many of them
    ├── CoverageError    rows delivered otherwise than planned, an order that is not a permutation, or values missing
    │                    for some rows
    └── HelperError      work on the same rows that was lost repeatedly, user code that fails on several rows together
                         but on none alone, a helper's error that cannot be pickled, or helpers whose Ray session ended

Messages name the cause and, unless it is obvious, the consequence and the fix. All errors survive pickling, because
actors raise them and workers catch them.
"""


class RaylanceError(Exception):
    """Base of all errors that raylance raises on purpose."""


class ConfigError(RaylanceError, ValueError):
    """An argument that cannot be honoured."""


class DatasetError(RaylanceError):
    """A dataset, version, tag, column or filter that is missing, unreadable or selects no row."""


class StateError(RaylanceError):
    """A saved state that does not fit the data or the order into which it is loaded."""


class PlacementError(RaylanceError):
    """Helper actors that found no place, or did not start, within the deadline."""


class BadRowError(RaylanceError):
    """A row that cannot be decoded, or on which the transform fails; or too many of them for `on_bad_row="mask"`.

    Attributes:
        column: Name of the column; None if the transform fails.
        row_offset: Offset of the row in the pinned dataset version, which `dataset.take([row_offset])` reads; for many
            rows, the offset of the first.
        reason: The error of the decoder or the transform.
        dataset: URI of the dataset, in a mixture "name (URI)"; None if unknown.
        message: The text of the error for many rows; None for one row.
    """

    def __init__(
        self, column: str | None, row_offset: int, reason: str, dataset: str | None = None, message: str | None = None
    ) -> None:
        super().__init__(column, row_offset, reason)
        self.column = column
        self.row_offset = row_offset
        self.reason = reason
        self.dataset = dataset
        self.message = message

    def __str__(self) -> str:
        if self.message is not None:
            return self.message
        row = f"row offset {self.row_offset}" + ("" if self.dataset is None else f" of {self.dataset}")
        cause = f"column {self.column!r} of {row} cannot be decoded ({self.reason})"
        if self.column is None:
            cause = f"the transform fails on {row} by itself ({self.reason})"
        return (
            f"{cause}; this is an error so that no row is lost in silence. Repair the row, or set "
            'on_bad_row="mask" to get zeros with _valid False in its place.'
        )


class CoverageError(RaylanceError):
    """Rows that were not delivered as planned: the epoch would not cover the selection exactly once."""


class HelperError(RaylanceError):
    """Work on the same rows that was lost repeatedly, user code that fails on rows together, a helper's error that
    cannot be pickled, or helpers whose Ray session ended.
    """
