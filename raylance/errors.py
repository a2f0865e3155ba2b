"""RaylanceError and its subclasses.

    RaylanceError
    ├── ConfigError      an argument cannot be honoured (also a ValueError)
    ├── DatasetError     a dataset, version, tag, column or filter is missing, is unreadable, or selects no row
    ├── StateError       a checkpoint is damaged, or belongs to other data, another order or another raylance
    ├── PlacementError   helper actors were not placed, or did not start, before the deadline
    ├── BadRowError      a row, named by its offset, cannot be decoded or transformed; or too many rows cannot be
    ├── CoverageError    rows were not delivered as planned, an order is not a permutation, or rows lack a value
    └── HelperError      work on the same rows was lost repeatedly, user code fails on several rows together but on none
                         alone, an error of a helper cannot be pickled, or the Ray session of the helpers ended

Messages name the cause and, unless it is obvious, the consequence and the fix. All errors survive pickling, because
actors raise them and workers catch them.
"""

NULL = "ValueError: is null"
"""The reason of a `BadRowError` for a row whose column has no value."""


def filter_of_nulls(column: str) -> str:
    """Returns the argument of `raylance.dataset` that leaves out the rows without a value, for an error."""
    name = ".".join(f"`{part}`" for part in column.split("."))
    return f"filter={f'{name} IS NOT NULL'!r}"


class RaylanceError(Exception):
    """Base of all errors that raylance raises on purpose."""


class ConfigError(RaylanceError, ValueError):
    """Raised if an argument cannot be honoured."""


class DatasetError(RaylanceError):
    """Raised if a dataset, version, tag, column or row is missing or cannot be used, or if a filter is wrong or selects
    no row.

    Attributes:
        is_of_storage: Whether the storage has failed, whichever rows were to be read.
    """

    is_of_storage = False


class StateError(RaylanceError):
    """Raised if a saved state or a checkpoint is missing, is damaged, or does not fit the data or the order of the
    loader that loads it.
    """


class PlacementError(RaylanceError):
    """Raised if helper actors were not placed, or did not start, before the deadline."""


class BadRowError(RaylanceError):
    """Raised if a row cannot be decoded or transformed; with `on_bad_row="mask"`, if there are too many such rows.

    Attributes:
        column: Name of the column; None if the transform fails.
        row_offset: Offset of the row in the pinned dataset version; `dataset.take([row_offset])` reads this row. If
            there were too many bad rows, the offset of the first bad row that was handed out.
        reason: Class and text of the error that the decoder or the transform raised.
        dataset: URI of the dataset, in a mixture "name (URI)"; None if unknown.
        file: The row's value in the column `file`; None if the dataset has no such column, or the row has no value.
        message: The text of the error if there were too many bad rows; None for one row.
    """

    def __init__(
        self, column: str | None, row_offset: int, reason: str, dataset: str | None = None, message: str | None = None
    ) -> None:
        super().__init__(column, row_offset, reason)
        self.column = column
        self.row_offset = row_offset
        self.reason = reason
        self.dataset = dataset
        self.file: str | None = None
        self.message = message
        self.joined_offset: int | None = None  # for raylance's own modules: see `raylance.columns.join_offsets`

    def __str__(self) -> str:
        if self.message is not None:
            return self.message
        row = f"row offset {self.row_offset}" + ("" if self.file is None else f", file {self.file!r},")
        row += "" if self.dataset is None else f" of {self.dataset}"
        cause = f"column {self.column!r} of {row} cannot be decoded ({self.reason})"
        if self.column is None:
            cause = f"the transform fails on {row} by itself ({self.reason})"
        fix = 'Repair the row, or set on_bad_row="mask" to get zeros with _valid False in its place.'
        if self.column is not None and self.reason == NULL:
            fix = (
                f"Leave such rows out, {filter_of_nulls(self.column)}; or, if rows without a value belong to the data, "
                'set on_bad_row="mask" and max_bad_rows=None to get zeros with _valid False in their place.'
            )
        return f"{cause}; this is an error so that no row is lost in silence. {fix}"


class CoverageError(RaylanceError):
    """Raised if rows are not delivered as planned, or an order is not a permutation, so that the epoch would not cover
    the selection exactly once. It is also raised by `raylance.writing.read_values` if the number of rows with a
    computed value is wrong.
    """


class HelperError(RaylanceError):
    """Raised if helpers cannot do their work: helpers were lost repeatedly while they worked on the same rows, a helper
    cannot start or has no memory for the rows, an error of a helper cannot be pickled, or the Ray session of the
    helpers ended. It is also raised if user code fails on several rows together but on none alone, or raises
    StopIteration.
    """
