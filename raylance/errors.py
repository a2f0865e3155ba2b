"""Owns every exception that raylance raises on purpose; never raises one itself.

    RaylanceError
    ├── ConfigError      an argument that cannot be honoured (also a ValueError)
    ├── DatasetError     a dataset, version, tag, column or filter that is not there or selects nothing
    ├── StateError       a checkpoint that belongs to other data, another order, or another raylance
    ├── PlacementError   helper actors that the cluster cannot place within the deadline
    ├── BadRowError      one row that cannot be decoded, with its offset
    ├── CoverageError    rows delivered otherwise than planned
    └── HelperError      work on the same rows that is lost again and again, or a helper's error that cannot travel

Every message names the cause, the consequence and the fix. All of them survive pickling, because they are raised
in actors and caught in workers.
"""


class RaylanceError(Exception):
    """Base of all errors that raylance raises on purpose."""


class ConfigError(RaylanceError, ValueError):
    """An argument that cannot be honoured."""


class DatasetError(RaylanceError):
    """A dataset, version, tag, column or filter that is missing, unreadable or selects no row."""


class StateError(RaylanceError):
    """A saved state that does not fit the data or the order it is loaded into."""


class PlacementError(RaylanceError):
    """Helper actors that could not be placed within the deadline."""


class BadRowError(RaylanceError):
    """A row that cannot be decoded.

    Attributes:
        column: Name of the column.
        row_offset: Offset of the row in the pinned dataset version, as `dataset.take([row_offset])` reads it.
        reason: What the decoder said.
        dataset: URI of the dataset, in a mixture "name (URI)"; None where it is not known.
    """

    def __init__(self, column: str, row_offset: int, reason: str, dataset: str | None = None) -> None:
        super().__init__(column, row_offset, reason)
        self.column = column
        self.row_offset = row_offset
        self.reason = reason
        self.dataset = dataset

    def __str__(self) -> str:
        where = "" if self.dataset is None else f" of {self.dataset}"
        return (
            f"column {self.column!r} of row offset {self.row_offset}{where} cannot be decoded ({self.reason}); this "
            "is an error so that no row is lost in silence. Repair the row, or set "
            'on_bad_row="mask" to get zeros with _valid False in its place.'
        )


class CoverageError(RaylanceError):
    """Rows that were delivered otherwise than planned: an epoch that would not cover the selection exactly once."""


class HelperError(RaylanceError):
    """Work on the same rows that was lost again and again, or an error of a helper that cannot be sent as it is."""
