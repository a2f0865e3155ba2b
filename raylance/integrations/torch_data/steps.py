"""One rank's steps under torch's DataLoader: rank, plan, consumed position, state."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.data

from raylance.api.dataset import Dataset, context_of, opened_of
from raylance.api.passes import WholePasses, warn_of_one_order
from raylance.api.positioned import Positioned
from raylance.arguments import check_batch_size, check_flag, check_integer, refuse_unknown, take_renamed
from raylance.environment import process
from raylance.environment.process import NO_GROUP, DistInfo, Mesh, data_parallel_of, find_place
from raylance.environment.shared import Shared
from raylance.errors import ConfigError, RaylanceError, StateError
from raylance.integrations.torch_data.handed_out import StepsRecord
from raylance.integrations.torch_data.sending import pack
from raylance.planning.plan import Plan, no_step_left
from raylance.planning.shard_context import RankAndSize, ShardContext, arrange_replicas
from raylance.planning.state import State, selection_of
from raylance.planning.step_size import Remainder
from raylance.settings import RENAMED, Options

logger = logging.getLogger(__name__)

_DEFAULTS = Options()
_MOVES = "Call set_epoch() before each epoch, or take raylance.torch_data.Loader in place of DataLoader."


class HandleCopy:
    """A handle's specification with copies of its shared values, because DataLoader workers cannot read Ray's store."""

    def __init__(self, handle: Dataset) -> None:
        if not isinstance(handle, Dataset):
            raise ConfigError(f"a {type(handle).__name__} is not a handle: pass what raylance.dataset(…) returned.")
        self.spec = opened_of(handle).map_shared(Shared.here)
        self._context = context_of(handle)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"spec": pack("a handle with its columns=, transform= and order=:", self.spec)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, spec=pickle.loads(state["spec"]))

    def check_process(self) -> None:
        """Raises RaylanceError in a fork of the process that opened or received the handle."""
        if self._context.pid != os.getpid():
            raise RaylanceError(
                "forked from a process that uses Lance, whose threads a fork does not copy: the first read would hang. "
                'Start workers with multiprocessing_context="spawn" or "forkserver".'
            )


class RankSteps(Positioned):
    """The steps of one rank. Makes the plan from rank and world size; keeps the epoch and the consumed position."""

    def __init__(
        self,
        handle: Dataset,
        *,
        global_batch_size: int | None = None,
        batch_size: int | None = None,
        dist_info: DistInfo | Mesh = None,
        ranks_per_replica: int = 1,
        drop_last: bool | None = None,
        reader_bytes: int = _DEFAULTS.reader_bytes,
        **unknown: Any,
    ) -> None:
        """Starts at epoch 0.

        Args:
            handle: The handle that `raylance.dataset` returned.
            global_batch_size: Rows of one step over all ranks.
            batch_size: Rows of one step on each data-parallel rank; replaces `global_batch_size`.
            dist_info: Source of rank and world size, see `find_place`. The main process asks this source at each
                iteration, so both may change between two iterations, even in the middle of an epoch. Or a `DeviceMesh`
                or process group, which gives the data-parallel rank and size once, as in `RankLoader.reshard`.
            ranks_per_replica: Number of contiguous ranks that get the same rows; see `raylance.DataConfig`.
            drop_last: Overrides the dataset's remainder: True is "drop", False is "ragged".
            reader_bytes: Most bytes of raw rows that a process holds; see `raylance.Options`. It does not change
                batches.
            **unknown: Refused with an error that suggests a known argument.
        """
        if "max_window_bytes" in unknown:
            between = int(type(self).__init__ is not RankSteps.__init__)  # calls from the subclass to this one
            if reader_bytes != _DEFAULTS.reader_bytes:
                unknown["reader_bytes"] = reader_bytes
            take_renamed(f"torch_data.{type(self).__name__}()", unknown, RENAMED, depth=between)
            reader_bytes = unknown.pop("reader_bytes")
        refuse_unknown(f"torch_data.{type(self).__name__}()", unknown, RankSteps.__init__.__kwdefaults__ or ())
        check_batch_size(global_batch_size, batch_size, 1)
        self._ranks_per_replica = check_integer("ranks_per_replica", ranks_per_replica, 1)
        if isinstance(dist_info, Mesh) or dist_info is NO_GROUP:
            if self._ranks_per_replica > 1:
                raise ConfigError(
                    f"dist_info={dist_info!r} gives the data-parallel rank already, and ranks_per_replica= would "
                    "divide it again: some rows would come twice. Give one of them."
                )
            dist_info = data_parallel_of(dist_info)  # worker processes do not have the mesh
        if isinstance(dist_info, tuple):
            find_place(dist_info)
        self._opened = HandleCopy(handle)
        self._sizes, self._dist_info = (global_batch_size, batch_size), dist_info
        spec = self._opened.spec
        if drop_last is not None:
            remainder: Remainder = "drop" if check_flag("drop_last", drop_last) else "ragged"
            spec = spec.with_delivery(remainder=remainder)
        super().__init__(spec)
        self._options = Options(
            reader_bytes=check_integer("reader_bytes", reader_bytes, 1), num_decoders=0, runtime="threads"
        )
        self._whole_passes = WholePasses()
        self._start, self._writer = torch.zeros(4, dtype=torch.int64), os.getpid()
        self._workers_passed = torch.zeros(2, dtype=torch.int64)  # last whole epoch plus 1; whether it has warned
        self.record: StepsRecord | None = None  # the record of a `Loader`; None without one, and in workers

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_dist_info": pack("dist_info=", self._dist_info), "record": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _dist_info=pickle.loads(state["_dist_info"]))

    @property
    def position(self) -> int:
        """Number of consumed positions of this epoch."""
        return self._cursor.position

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch. A plain DataLoader needs this before each epoch; `Loader` does it itself."""
        order = self._cursor.delivery_spec.order
        self._cursor.set_epoch(epoch)
        if self.record is not None:
            self.record.move(self._cursor.epoch, is_same=self._cursor.delivery_spec.order is order)
        self._send_start()

    def begin_again(self) -> None:
        """Goes back to the start of the epoch, as if the pass that was left had not been."""
        if self.record is not None:
            self.record.begin_again(self.epoch)
        self.set_epoch(self.epoch)

    def _send_start(self) -> None:
        """Writes epoch, position, data-parallel rank and size of the next pass into a tensor whose memory torch shares
        with DataLoader workers, so that persistent ones see the new values.
        """
        share = (int(self._start[2]), int(self._start[3]))
        try:
            share = self._rank_and_size()
        except ConfigError:  # the rank is not known yet; `begin` asks again
            if share[1]:
                raise
        if self._writer != os.getpid():  # the memory belongs to the process that sent the tensor
            self._start, self._writer = self._start.clone(), os.getpid()
        self._start.copy_(torch.tensor([self.epoch, self.position, *share]))

    def _has_passed(self, epoch: int) -> None:
        """Counts a whole epoch that was handed out, in workers by a shared tensor; warns if it was so before."""
        what = f"torch_data of {self._opened.spec.read.source.uri!r}"
        if torch.utils.data.get_worker_info() is None:
            self._whole_passes.add(epoch, self._cursor.delivery_spec, what, _MOVES)
            return
        last, has_warned = self._workers_passed.tolist()
        if last == epoch + 1 and not has_warned:
            self._workers_passed[1] = warn_of_one_order(epoch, self._cursor.delivery_spec, what, _MOVES)
        self._workers_passed[0] = epoch + 1

    def hold(self) -> object:
        """Returns the holder of the position for a new iteration of `Loader`. An older iteration raises an error then,
        because `is_held_by` it is False, as after `set_epoch` or a loaded state.
        """
        return self._cursor.hold()

    def is_held_by(self, holder: object) -> bool:
        """Whether nothing else has moved the position since `hold` returned this holder."""
        return self._cursor.holder is holder

    def __len__(self) -> int:
        """Number of steps of a whole epoch, the same on every rank."""
        return self._plan()[0].steps(self.epoch)

    def consumed(self) -> None:
        """Counts one batch as consumed; an epoch's last batch moves to the next epoch. `Loader` does this itself."""
        plan = self._plan()[0]
        position = plan.after(self.epoch, self.position)
        self._cursor.advance(position, is_last=plan.is_over(self.epoch, position))

    def _rank_and_size(self) -> RankAndSize:
        """Returns data-parallel rank and size of this process; for a worker, those of the process that it works for."""
        if torch.utils.data.get_worker_info() is not None and self._start[3]:
            return int(self._start[2]), int(self._start[3])
        rank, world_size = find_place(self._dist_info)
        return arrange_replicas(self._ranks_per_replica, world_size)[rank] or (rank, world_size)

    def make_record(self, record: bool | str, name: str | None, **workers: Any) -> StepsRecord | None:
        """Makes the record of a `Loader`, by `record` and `name` of `Options`; None if `record` is False."""
        options = dataclasses.replace(self._options, record=record, name=name)
        if self.record is not None:
            self.record.end()  # that of an earlier Loader over the same steps
        spec = self._opened.spec.read
        self.record = None if record is False else StepsRecord(spec, options, self._cursor, **workers)
        return self.record

    def begin_record(self, plan: Plan) -> None:
        """Begins a pass of the record, if there is one."""
        if self.record is not None:
            self.record.begin(plan, self._context(), lambda: self._state().to_dict(), self.position)

    def _context(self) -> ShardContext:
        """Returns the rank of this process in its world, and its share of the rows."""
        share = self._rank_and_size()
        place = find_place(self._dist_info)
        with contextlib.suppress(ConfigError):  # nobody knows more
            world = find_place("auto")
            # `dist_info` may give the data-parallel rank; then several ranks of the world are peers.
            place = world if world[1] > place[1] and world[1] % share[1] == 0 else place
        return ShardContext(rank=place[0], world_size=place[1], data_parallel=None if share == place else share)

    def state_dict(self) -> dict[str, Any]:
        """See `Positioned.state_dict`. A record shows the place, so that a run that continues there can be proven."""
        state = super().state_dict()
        if self.record is not None:
            self.record.keep()
        return state

    def _state(self) -> State:
        dp_size = self._rank_and_size()[1]
        return self._cursor.state(check_batch_size(*self._sizes, dp_size), dp_size)

    def _on_load(self, saved: State) -> None:
        if self.record is not None:
            self.record.load(saved)
        self._send_start()

    def _plan(self) -> tuple[Plan, int]:
        dp_rank, dp_size = self._rank_and_size()
        size = check_batch_size(*self._sizes, dp_size)
        limit = self._options.reader_bytes
        return self._cursor.plan(size=size, dp_size=dp_size, reader_bytes=limit), dp_rank

    def _key(self, plan: Plan) -> str:
        """Returns a key of the rows of a plan and their order."""
        known = [selection_of(self._state().to_dict()), plan.order.seed, plan.order.params()]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]

    def begin(self) -> tuple[Plan, int]:
        """Returns plan and data-parallel rank of an iteration. The first iteration fixes the order's "auto" values."""
        plan, dp_rank = self._plan()
        self.refuse_another_share(plan.dp_size)
        plan.check_order(self.epoch)
        self._cursor.follow(plan)
        self._send_start()
        if plan.is_over(self.epoch, self.position):
            logger.warning("%s", no_step_left(plan, self.epoch, self.position))
        return plan, dp_rank

    @staticmethod
    def refuse_another_share(dp_size: int) -> None:
        """Raises ConfigError under Accelerate's DataLoader, which would divide a rank's steps among processes again."""
        if dp_size > 1 and process.is_called_by("accelerate.data_loader"):
            raise ConfigError(
                f"Accelerate divides the batches of this rank among the {dp_size} processes again, so most rows would "
                "never come. Pass raylance.torch_data.Loader(…) to prepare() in place of torch's DataLoader: "
                "Accelerate leaves it as it is. Or leave the loader out of prepare()."
            )


class Pass(Iterator[Any]):
    """An iterator over one pass. It has a state, because torchdata's StatefulDataLoader asks iterators for one.

    The state has the epoch and a position. Worker w begins w global batches after that position, so a state is valid
    only for the same worker among the same number of workers, and for the rows and the order of its `key`: the state of
    the dataset or the sampler, which is saved and checked separately, may be that of an epoch's begin, where others are
    allowed.
    """

    def __init__(
        self, begin: Callable[[int, int], Iterator[Any]], epoch: int, position: int, rows: int, key: str
    ) -> None:
        """`begin(epoch, position)` starts a pass. Each batch starts `rows` positions after the batch before."""
        self._begin, self._epoch, self._position, self._rows, self._key = begin, epoch, position, rows, key
        self._batches: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin(self._epoch, self._position)
        batch = next(self._batches)
        self._position += self._rows
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and the position from which worker 0 would continue; see `Pass`."""
        return {"epoch": self._epoch, "position": self._position, "key": self._key}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to the epoch and position of a state.

        Raises:
            StateError: If it is in the middle of an epoch of other rows, or of another order.
        """
        if state["position"] and state.get("key", self._key) != self._key:
            raise StateError(
                f"rows or their order have changed since the state was saved, at position {state['position']} of "
                f"epoch {state['epoch']}: its position would mean other rows. Nothing was loaded. Open the dataset "
                "with the version and the arguments of before to the end of the epoch; or use "
                "raylance.torch_data.Loader, which continues with the rows that are left."
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._batches = None
