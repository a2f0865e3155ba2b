"""How many rows the work items of a pass have, one after the other."""

from collections.abc import Callable

_GROWTH = 1.25  # factor by which the rows of an item grow from one round to the next


class ItemSizes:
    """Sizes that begin small, so that each helper gets an item of the first step, and the first batch comes early.

    A round has as many items of one size as the first step has. Each further round has a quarter more rows in each, so
    that its rows last while helpers make the next one. Near the end, an item has half of a helper's share of the
    remaining rows (Polychronopoulos, Kuck: "Guided self-scheduling", 1987), but not less than a step's, so that no
    helper works for long when the others are done.
    """

    def __init__(self, item_rows: Callable[[], int], first_rows: int, slice_rows: int) -> None:
        """Begins a pass.

        Args:
            item_rows: Returns the most rows of an item, whenever it is called.
            first_rows: Rows of the first items; 0 for as many as any.
            slice_rows: The rank's rows of the first step.
        """
        self._item_rows = item_rows
        self._aim = float(first_rows or item_rows())
        self._round = max(1, -(-slice_rows // int(self._aim)))  # number of items
        self._made, self._most = 0, 0

    def begin_chunk(self, slice_rows: int) -> None:
        """Asks for the most rows again. A pass may have begun with a last step of few rows, which its items follow."""
        self._most = self._item_rows()
        self._aim = max(self._aim, slice_rows / self._round)

    def next(self, slice_rows: int, rows_left: int | None) -> int:
        """Returns the rows of the next item, a whole number of slices if it has room for half of one.

        Args:
            slice_rows: The rank's rows of the next step.
            rows_left: Its rows up to the end; None if items need not become smaller there.
        """
        wanted = min(self._aim, self._most)
        if rows_left is not None:
            wanted = min(wanted, max(slice_rows, rows_left / (2 * self._round)))
        nearest = round(wanted / max(1, slice_rows)) * slice_rows
        return max(1, min(nearest or int(wanted), self._most))

    def count(self, items: int) -> None:
        """Counts items that were made."""
        self._made += items
        if self._made >= self._round:
            self._aim, self._made = min(self._aim * _GROWTH, float(self._most)), 0
