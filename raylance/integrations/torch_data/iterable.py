"""The iterable dataset, whose workers make whole batches in their own threads."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

from raylance.api.dataset import Dataset
from raylance.batches.assembly import DeliveredStep
from raylance.batches.conversion import BatchSpec, Dtypes, make_batch_spec, torch_converter
from raylance.batches.device import build_jagged
from raylance.decode.arrays import NumpyBatch, Paddings
from raylance.environment import process
from raylance.errors import ConfigError
from raylance.integrations.torch_data.handed_out import Note, RowsRead
from raylance.integrations.torch_data.sending import Function
from raylance.integrations.torch_data.steps import Pass, RankSteps
from raylance.observe import Stats
from raylance.planning.plan import Plan
from raylance.planning.step_size import StepSize
from raylance.runtime import notes
from raylance.runtime.session import Session


class IterableDataset(RankSteps, torch.utils.data.IterableDataset[dict[str, Any]]):
    """Yields one rank's whole batches, for `DataLoader(IterableDataset(handle, …), batch_size=None)`.

    `**steps` are the arguments of `RowSampler`. With k workers, worker w makes steps w, w + k, …. DataLoader asks its
    workers in turn, so the steps come in the order of the plan for every k, and each row of the rank comes from exactly
    one worker. Therefore `raylance.torch_data.Loader` knows the position from the number of batches it has handed out.
    """

    def __init__(
        self,
        handle: Dataset,
        *,
        with_row_offset: bool = False,
        pad_lists: Paddings | None = None,
        dtypes: Dtypes = None,
        collate_fn: Callable[[NumpyBatch], Any] | None = None,
        **steps: Any,
    ) -> None:
        """Takes arguments of `RankLoader.iter_torch_batches`, and the arguments of `RowSampler` as `**steps`."""
        super().__init__(handle, **steps)
        if callable(collate_fn):
            collate_fn = Function("collate_fn=", collate_fn)
        self._arguments, self._with_row_offset = (dtypes, collate_fn, pad_lists), with_row_offset
        self._batch_spec()  # refuses wrong arguments now
        self.note = Note()
        self._idle: Session | None = None  # session of the last pass, which the next pass uses again

    def __getstate__(self) -> dict[str, Any]:
        if process.is_called_by("accelerate.data_loader"):
            self.refuse_another_share(self._rank_and_size()[1])
        with contextlib.suppress(ConfigError):  # sends the rank to DataLoader workers; any other process finds its own
            self.begin()
        return super().__getstate__() | {"_idle": None}

    def _batch_spec(self) -> BatchSpec:
        convert = torch_converter(self._opened.spec.read, *self._arguments)
        return make_batch_spec(
            self._opened.spec.delivery,
            step=StepSize(1),  # not used: the plan has the size
            prefetch_batches=1,
            drop_last=None,
            with_row_offset=self._with_row_offset,
            convert=lambda *step: build_jagged(convert(*step)),
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterates from the consumed position to the end of the epoch, without moving the position."""
        worker = torch.utils.data.get_worker_info()
        plan, dp_rank = self.begin() if worker is None else self._plan()
        first, every = (0, 1) if worker is None else (worker.id, worker.num_workers)
        mine = dataclasses.replace(plan, every=every)
        self._opened.check_process()
        ahead = first * plan.global_batch_size
        return Pass(
            lambda epoch, position: self._batches(mine, dp_rank, epoch, position + ahead),
            int(self._start[0]),
            int(self._start[1]),
            every * plan.global_batch_size,
            self._key(plan),
        )

    def _batches(self, mine: Plan, dp_rank: int, epoch: int, position: int) -> Iterator[dict[str, Any]]:
        if mine.is_over(epoch, position):
            return
        session = self._idle or Session(self._opened.spec.read, self._options, spans_epochs=False)
        self._idle = None
        where = {"epoch": epoch, "position": position}
        observer = Stats()
        feeder = session.start(mine, dp_rank, **where, batch_spec=self._batch_spec(), observer=observer)
        try:
            with notes.at_end(feeder.close):
                while (found := feeder.take()) is not None:
                    batch, step = found
                    if position == 0 and step.is_last:  # only the first of several workers counts
                        self._has_passed(epoch)
                    if self.note.is_wanted:
                        self.note.rows = _rows_read(step, observer)
                    del found
                    yield batch
                    del batch
        finally:
            self._idle = session


def _rows_read(step: DeliveredStep, observer: Stats) -> RowsRead:
    reasons = ((offset, observer.reason_of(offset)) for offset in step.masked.tolist())
    bad_rows = tuple((offset, *reason) for offset, reason in reasons if reason is not None)
    return RowsRead(digest=step.digest, nbytes=step.nbytes, masked=len(step.masked), bad_rows=bad_rows)
