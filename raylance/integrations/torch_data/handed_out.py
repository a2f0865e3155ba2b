"""What `Loader(record=…)` knows of its batches: which rows were read for each, and the record of those handed out."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from raylance.api.recorder import Recorder
from raylance.errors import RaylanceError
from raylance.observe import clock
from raylance.observe.observations import BatchHandedOut, Receipt
from raylance.opened import ReadSpec
from raylance.planning.cursor import Cursor
from raylance.planning.digest import Digest, Ledger
from raylance.planning.plan import Plan
from raylance.planning.shard_context import ShardContext
from raylance.planning.state import State
from raylance.runtime import notes
from raylance.settings import Options


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowsRead:
    """The rows that a dataset read for one batch."""

    # Rows of padding count apart; masked rows count as rows
    digest: Digest = Digest()  # noqa: RUF009 - it is frozen
    nbytes: int = 0  # their bytes
    masked: int = 0  # number of masked rows
    # Row offset, column and reason of masked rows, as in `Receipt.bad_rows`
    bad_rows: tuple[tuple[int, str, str], ...] = ()

    @property
    def count(self) -> int:
        """Number of rows, padding included."""
        return self.digest.rows + self.digest.padding


class Note:
    """The rows that a dataset has read for the next batch. A worker gets dataset and `Counting` in one message, so both
    have the same note there, too.
    """

    def __init__(self) -> None:
        self.is_wanted = False  # whether a `Loader` records
        self.rows: RowsRead | None = None  # None if none were noted since `take`

    def take(self) -> RowsRead | None:
        """Returns the rows, and forgets them."""
        rows, self.rows = self.rows, None
        return rows


class Counted(NamedTuple):
    """A batch on its way from its worker, with the rows that were read for it; None if they are not known.

    It is a named tuple because torch pins the memory of a named tuple field by field.
    """

    batch: Any
    rows: RowsRead | None


class Counting:
    """A `collate_fn` that sends the noted rows with the batch of another `collate_fn`."""

    def __init__(self, note: Note, collate_fn: Callable[[Any], Any], *, takes_rows: bool) -> None:
        """If `takes_rows`, `collate_fn` takes a list of rows, as of a `MapDataset`, and not a whole batch."""
        self._note, self._collate_fn, self._takes_rows = note, collate_fn, takes_rows

    def __call__(self, made: Any) -> Counted:
        """Makes a batch."""
        rows = self._note.take()
        if self._takes_rows and rows is not None and len(made) != rows.count:
            rows = None  # a subclass dropped or added rows, and it is not known which
        return Counted(self._collate_fn(made), rows)


class StepsRecord:
    """The record of the steps that a `Loader` hands out on its rank."""

    def __init__(self, read_spec: ReadSpec, options: Options, cursor: Cursor, **workers: Any) -> None:
        """Takes the rank in `begin`, because it may not be known earlier; for `workers`, see `Recorder`."""
        self._ledger, self._has_begun = Ledger(), False
        self._recorder = Recorder(read_spec, options, ShardContext(), cursor, self._ledger, **workers)

    def begin(self, plan: Plan, context: ShardContext, state: Callable[[], dict[str, Any]], position: int) -> None:
        """Begins a pass at a position, as the rank and the share of `context`; at the first pass also the record."""
        recorder = self._recorder
        if not self._has_begun:
            recorder.on_reshard(context)
        elif context.share != recorder.context.share:  # ranks came or went, and the record keeps its rank
            recorder.on_reshard(recorder.context.with_share(*context.share, is_elastic=True))
        self._has_begun = True
        recorder.begin_pass(plan, state)
        self._ledger.cut()
        epoch, share = recorder.cursor.epoch, recorder.context.share
        if plan.is_over(epoch, position):
            self._ledger.add(epoch, position, position, Digest(), is_last=True, share=share)

    def hand_out(self, batch: Any, epoch: int, low: int, high: int, *, is_last: bool) -> Any:
        """Counts a step from position `low` to `high` of an epoch; returns the batch as `collate_fn` made it."""
        recorder, rows = self._recorder, None
        if isinstance(batch, Counted):
            batch, rows = batch
        rows = rows or RowsRead()  # rows that are not known do not count as handed out, so the proof lacks them
        self._ledger.add(epoch, low, high, rows.digest, is_last=is_last, share=recorder.context.share)
        recorder.stats.observe(BatchHandedOut(rows.count, rows.nbytes, rows.masked), clock.now())
        if rows.bad_rows:
            recorder.stats.add(Receipt(bad_rows=rows.bad_rows))
        return batch

    def timed(self, batches: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """Hands batches out; counts how long the consumer waited for each and used it."""
        recorder, handed_out, is_first = self._recorder, None, True
        try:
            # The training function may end when it leaves the pass.
            with notes.at_end(functools.partial(recorder.flush, may_wait=False)):
                while True:
                    with recorder.waiting(is_first=is_first):
                        found = [*itertools.islice(batches, 1)]
                    if not found:
                        return
                    is_first, handed_out = False, recorder.hand_out()
                    yield found.pop()
                    recorder.take_back(handed_out)
        except RaylanceError as error:
            recorder.on_error(error)
            raise
        finally:
            recorder.take_back(handed_out)
            batches.close()

    def keep(self) -> None:
        """Records that a state is taken at the present position: a run may continue from there."""
        self._ledger.cut()
        self._recorder.flush(may_wait=False)

    def load(self, saved: State) -> None:
        """Records that a state was loaded."""
        self._ledger.load(saved.epoch, saved.position)
        self._recorder.on_resume(saved)

    def begin_again(self, epoch: int) -> None:
        """Records a return to the start of an epoch whose rows, until now, do not count."""
        self._ledger.load(epoch, 0)

    def move(self, epoch: int, *, is_same: bool) -> None:
        """Records a jump to the start of an epoch; `is_same` says whether its plan is that of the rows before."""
        if not is_same:
            self._recorder.end()
            self._ledger.forget()
        self._ledger.move(epoch)

    def end(self) -> None:
        """Ends the record. Another pass begins a new one."""
        self._recorder.end()
