"""The runtime whose helpers are Ray actors: a rank's shard actors, usually one, and decode actors.

This process owns all references; raw tables go from the shard actor to a decoder without passing through this process.
Helpers live outside the trainer's placement group and die with the worker that made them.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import queue
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylance.decode.block_rows import BlockRows, LoadedRows
from raylance.dispatch.messages import (
    Alive,
    ChunkLost,
    Command,
    Decode,
    DecodeBlock,
    Done,
    Drop,
    Event,
    Failed,
    Faulted,
    Fetch,
    Fetched,
    Gather,
    Kind,
    Load,
    Loaded,
    Lost,
    NotPlaced,
    Ping,
    Place,
    Wake,
)
from raylance.environment.connection import in_session, long_call, ray_session
from raylance.errors import BadRowError, ConfigError, DatasetError
from raylance.memory.arrow import own_memory
from raylance.memory.lending import Lend, Lender
from raylance.observe import Receipt
from raylance.opened import ReadSpec
from raylance.planning.planned_rows import PlannedRows
from raylance.runtime.ray import decoders
from raylance.runtime.ray.faults import as_raised, fault_of, is_helper_gone, is_machine_fault
from raylance.runtime.ray.num_decoders import auto_decoders, supply
from raylance.runtime.ray.shard_actor import ShardActor
from raylance.runtime.runtime import Arrived, Runtime
from raylance.settings import Options
from raylance.work.blocks import BlockColumns

_SMALL = 16  # a column with 16 times fewer bytes than another one is small beside it
LENT = 2  # times `inflight_bytes`: the trainer holds some batches, too
_LOOK_S = 1.0  # seconds between checks that the Ray session exists, because Ray does not report its end


class _Blocks:
    """What has come and will come of a chunk by block: as it is stored, and decoded. By the number of the first row: a
    block that is decoded again takes the place of the one that was lost.
    """

    def __init__(self, helper: "_Helper", number: int, columns: BlockColumns) -> None:
        self._helper, self._number, self._columns = helper, number, columns
        self.sent: dict[int, Future[pa.Table]] = {}
        self.refs: dict[int, Any] = {}  # of decoded blocks, if helpers need them
        self.decoded: dict[int, Future[pa.Table]] = {}  # if the trainer needs them
        self._rows: list[BlockRows] | None = None

    @property
    def for_helpers(self) -> tuple[Any, ...]:
        """The arguments by which helpers get the decoded blocks if they need them."""
        return ([*self.refs], *self.refs.values()) if self.refs else ()

    def add_decoded(self, first: int, ref: Any) -> None:
        """Adds a block that will be decoded; `first` is the number of its first row."""
        if self._columns.for_helpers:
            self.refs[first] = ref
        if self._columns.for_trainer:
            self.decoded[first] = ref.future()

    def lost(self, error: BaseException) -> "ChunkLost | Lost":
        """Returns the event that reports that an answer did not come."""
        is_readers = is_helper_gone(error) and any(each.exception() is error for each in self.sent.values())
        return self._helper.lost(error) if is_readers else ChunkLost(self._number, fault_of(error))

    @property
    def futures(self) -> "list[Future[pa.Table]]":
        """The answers that the trainer needs."""
        return [*self.sent.values(), *self.decoded.values()]

    def fill_in(self, items: pa.Table, lend: Lend) -> pa.Table:
        """See `BlockRows.fill_in`; only after all calls have been answered."""
        if self._rows is None:
            parts = [(self.sent, dict[str, Sequence[str]]()), (self.decoded, self._columns.decoded)]
            self._rows = [
                BlockRows([LoadedRows(first, future.result()) for first, future in part.items()], made)
                for part, made in parts
                if part
            ]
        for rows in self._rows:
            items = rows.fill_in(items, lend)
        return items


class _Gathered(NamedTuple):
    """The results of a gathering call; `blocks` has the rows that they name, if any."""

    refs: list[Any]
    blocks: _Blocks | None = None


class _Arriving(NamedTuple):
    """The results of a fetch, on their way to this process; `blocks` as in `_Gathered`."""

    futures: "list[Future[pa.Table]]"
    blocks: _Blocks | None


class _Helper:
    """A helper actor that a loader holds, the keys of the plans and decodings that the actor has, and the blocks of its
    chunks by their number.
    """

    def __init__(self, number: int, actor: decoders.HeldActor, holder: str) -> None:
        self.number, self.actor, self._holder, self.handle = number, actor, holder, actor.handle
        self._known: dict[str, str] = {}  # by method, the key of its last call that was done
        self.blocks: dict[int, _Blocks] = {}

    def with_value(self, method: str, key: str, value: Any) -> tuple[str, Any]:
        """Returns the arguments by which a method gets the value of a key: the key; and the value, or None if a call of
        the method with this key was done, so that the actor has it. Calls may overtake each other.
        """
        return key, None if self._known.get(method) == key else value

    def done(self, method: str, key: str) -> None:
        """Records that a call of a method was done with the value of a key."""
        self._known[method] = key

    def forget(self, method: str) -> None:
        """Has the next call of a method bring its value again, because a call has failed."""
        self._known.pop(method, None)

    def lost(self, error: BaseException) -> Lost:
        """Returns the event that reports the end of the actor."""
        is_of_others = not self.actor.is_at_work_for(self._holder)
        return Lost(self.number, dataclasses.replace(fault_of(error), is_of_others=is_of_others))

    def end(self, *, is_dead: bool) -> None:
        self.blocks.clear()  # they refer to this object
        decoders.let_go(self._holder, self.actor, is_dead=is_dead)


class RayRuntime(Runtime):
    """Does the work of one loader with Ray actors."""

    def __init__(self, read_spec: ReadSpec, options: Options, world_size: int) -> None:
        """Starts no helper. With runtime="ray", starts Ray if it is not running, as any call of Ray would."""
        if options.runtime == "ray":
            ray.get_runtime_context()
        self._world_size, self._session, self._key = world_size, ray_session(), uuid.uuid4().hex
        self._decoding, self._by_block = read_spec.in_helpers, BlockColumns.of(read_spec, sends=True)
        self._decodes_items = self._decoding is not None and self._decoding.of_items is not None
        self._lender = Lender(LENT * options.inflight_bytes)
        super().__init__(read_spec, options)

    @property
    def is_usable(self) -> bool:
        """See `Runtime.is_usable`; False once the Ray session of the helpers has ended."""
        return super().is_usable and self._session == ray_session()

    gives_away = False  # sending rows through Ray copies them

    @property
    def fetches_from_chunks(self) -> bool:
        """See `Runtime.fetches_from_chunks`."""
        return self._by_block.tables > 0

    @property
    def needs_decoder(self) -> bool:
        """See `Runtime.needs_decoder`."""
        return self._options.num_decoders != "auto"

    def begin(self, planned: PlannedRows, plan_key: str) -> None:
        """See `Runtime.begin`."""
        with in_session(self._session):
            super().begin(planned, plan_key)

    def do(self, command: Command) -> None:
        """See `Runtime.do`.

        Raises:
            HelperError: If the session of the helpers has ended, because their calls would never be answered.
        """
        # Commands that only end helpers or results check the session themselves.
        is_call = isinstance(command, Place | Ping | Load | Drop | Gather | Decode | DecodeBlock | Fetch)
        with in_session(self._session) if is_call else contextlib.nullcontext():
            super().do(command)

    def next_event(self, timeout_s: float | None) -> Event | Wake | None:
        """See `Runtime.next_event`; also checks regularly that the Ray session exists.

        Raises:
            HelperError: As `do`.
        """
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            event = super().next_event(max(0.0, min(left_s, _LOOK_S)))
            if isinstance(event, Failed):
                for ref in self._refs_of(event.call):
                    ref.future()  # else Ray prints the error once more when the reference ends
            if event is not None or left_s <= _LOOK_S:
                return event
            with in_session(self._session):
                pass

    def count_decoders(self) -> tuple[int, int, int]:
        """See `Runtime.count_decoders`."""
        options = self._options
        least, most = options.decoder_range
        if options.num_decoders != "auto":
            return least, least, most
        ours, fitting = decoders.count_here(options.decoder_cpus), options.auto_decoders
        if fitting is None:
            ask = functools.partial(auto_decoders, self._world_size, options.decoder_cpus, ours)
            fitting = long_call(self._session, ask)
        most = max(ours, fitting)
        return min(1, most), most, most

    def _keep(self, planned: PlannedRows) -> Any:
        plan = planned.plan
        kind = type(plan)
        if getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:  # pickle refuses its objects
            raise ConfigError(
                "raylance was imported again in this process after this handle or loader was made, so its plan and "
                "settings cannot be sent to Ray's processes; no batch can follow. Open the dataset again, and give the "
                "new loader the position: loader.load_state_dict(old_loader.state_dict())."
            )
        return ray.put(plan)

    def _watch(self, answer: "Future[Any]", to_event: Any, *about: Any) -> None:
        """Has Ray's own thread post an event when a call is answered."""
        answer.add_done_callback(functools.partial(_report, self._inbox, to_event, about))

    def _place(self, number: int, kind: Kind) -> None:
        if kind == "decoder":
            actor = decoders.hold(self._key, self._options.decoder_cpus)
        else:
            # On this worker's node if possible; without a CPU from Ray's count.
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
            of_class: Any = ray.remote  # Ray's types do not know concurrency groups
            remote = of_class(concurrency_groups={"load": 2, "drop": 1})(ShardActor).options(
                num_cpus=0, scheduling_strategy=here, **decoders.NO_RESTARTS
            )
            handle: Any = remote.remote(self._read_spec, self._options, self._by_block)
            actor = decoders.HeldActor(handle, (self._session, 0.0), self._key)
        self._helpers[number] = _Helper(number, actor, self._key)
        self._watch(actor.pulse.future(), _on_placed, number)

    def _ping(self, number: int) -> None:
        helper = self._helpers[number]
        self._watch(helper.handle.actor_id.remote().future(), _on_alive, helper)

    def _load(self, command: Load) -> None:
        helper = self._helpers[command.helper]
        arguments, load = (*helper.with_value("load", *self._plan), command), helper.handle.load
        for number in command.drops:
            helper.blocks.pop(number, None)
        columns = self._by_block
        if columns.tables:
            loaded, *tables = load.options(num_returns=1 + columns.tables).remote(*arguments)
            blocks = helper.blocks.setdefault(command.number, _Blocks(helper, command.number, columns))
            if columns.sent:
                blocks.sent[command.first] = tables[0].future()
            if columns.decoded:
                self._results[command.call] = _Gathered(tables[-1:])
        else:
            loaded = load.remote(*arguments)
        self._watch(loaded.future(), _on_answered, helper, command.call, "load", self._plan[0])

    def _drop(self, command: Drop) -> None:
        helper = self._helpers[command.helper]
        helper.blocks.pop(command.number, None)
        helper.handle.drop.remote(command.number)

    def _gather(self, command: Gather) -> None:
        helper = self._helpers[command.helper]
        gather = helper.handle.gather.options(num_returns=3 if self._decodes_items else 2)  # each object costs time
        blocks = None if command.number is None else helper.blocks.get(command.number)
        needed = blocks.for_helpers if blocks is not None and command.decodes else ()
        receipt, *tables = gather.remote(*helper.with_value("gather", *self._plan), command, *needed)
        self._results[command.call] = _Gathered(tables, blocks)
        answer = receipt.future()
        if blocks is not None and needed:
            answer.add_done_callback(functools.partial(_report_lost, self._inbox, blocks))
        self._watch(answer, _on_answered, helper, command.call, "gather", self._plan[0])

    def _decode(self, command: Decode | DecodeBlock) -> None:
        if isinstance(command, DecodeBlock):
            self._decode_block(command)
            return
        helper, gathered = self._helpers[command.helper], self._results[command.source]
        arguments = *helper.with_value("decode", self._key, self._decoding), command.epoch
        needed = gathered.blocks.for_helpers if gathered.blocks is not None else ()
        decode = helper.handle.decode.remote
        send = functools.partial(decode, *arguments, gathered.refs[1], command.given_up, *needed)
        decoded, receipt = helper.actor.call(self._key, send)
        if needed:
            receipt.add_done_callback(functools.partial(_report_lost, self._inbox, gathered.blocks))
        self._results[command.call] = _Gathered([decoded])
        self._watch(receipt, _on_answered, helper, command.call, "decode", self._key)

    def _decode_block(self, command: DecodeBlock) -> None:
        helper, blocks = self._helpers[command.helper], self._helpers[command.reader].blocks[command.number]
        [block], _ = self._results[command.source]
        if command.helper == command.reader:
            decoded, answer = helper.handle.decode_block.remote(block, **command.how)
            receipt, about = answer.future(), ("", "")
        else:
            arguments = helper.with_value("decode", self._key, self._decoding)
            send = functools.partial(helper.handle.decode_block.remote, *arguments, block, **command.how)
            decoded, receipt = helper.actor.call(self._key, send)
            about = "decode", self._key
        blocks.add_decoded(command.first + command.low, decoded)
        receipt.add_done_callback(functools.partial(_take_error, decoded))
        self._watch(receipt, _on_answered, helper, command.call, *about)

    def _fetch(self, command: Fetch) -> None:
        refs, blocks = self._results[command.gathered]
        if command.decode is not None:
            refs = [refs[0], *self._refs_of(command.decode)]
        futures = [ref.future() for ref in refs]
        self._results[command.call] = _Arriving(futures, blocks)
        awaited = [*futures, *(blocks.futures if blocks is not None else ())]
        arrived = functools.partial(_on_arrived, self._inbox, command.call, itertools.count(1), len(awaited))
        for future in awaited:
            future.add_done_callback(arrived)

    def _refs_of(self, call: int) -> list[Any]:
        found = self._results.get(call)
        return found.refs if isinstance(found, _Gathered) else []

    def _fetched(self, call: int, results: Any) -> Event:
        futures, blocks = results
        for future in futures:
            if (error := future.exception()) is not None:
                return _failure(call, error)
        plain, *others = (_apart(future.result()) for future in futures)
        if blocks is not None:
            for future in blocks.futures:
                if (error := future.exception()) is not None:
                    self.post(blocks.lost(error))
                    return _failure(call, error)
            plain = blocks.fill_in(plain, self._lender.lend)
        return Fetched(call, plain, *(others or [None]))

    def explain_placing(self, kind: Kind, pending: int, asked: int) -> str:
        """See `Runtime.explain_placing`."""
        options = self._options
        what, cpus = ("decode actors", options.decoder_cpus) if kind == "decoder" else ("shard actors", 0.0)
        total, free, known = long_call(ray_session(), functools.partial(supply, cpus))
        pending = max(1, pending)
        waiting = min(pending, known if known is not None else pending if free < cpus else 0)
        fewer = "num_decoders=…; 0 decodes in threads of the shard actors" if kind == "decoder" else "num_readers=…"
        causes, cures = [], [f"ask for fewer ({fewer})"] if asked > 1 or cpus else []
        if waiting:
            has_enough = ", on no node as many as one of them takes" if free >= cpus else ""
            causes.append(
                f"{waiting} of {asked} {what} ({cpus:g} CPU each, {cpus * asked:g} together) found no place in "
                f"{options.placement_timeout_s:g} s: the cluster counts {total:g} CPUs, of which {free:g} are free now"
                f"{has_enough}"
            )
            cures += ["add nodes", "raise placement_timeout_s if the cluster still grows (see `ray status`)"]
        if pending > waiting:
            has = "have their CPUs" if cpus else "take no CPU from Ray's count"
            causes.append(
                f"{pending - waiting} of {asked} {what} {has}, and their processes have not started "
                f"{options.placement_timeout_s:g} s after they were asked for, as on a machine that is loaded or short "
                "of memory"
            )
            cures += ["look at the load of the nodes", "raise placement_timeout_s if the processes only take long"]
        return f"{'; '.join(causes)}. Training stops here rather than hang. To continue, {', or '.join(cures)}."


def _report(
    inbox: queue.SimpleQueue[Event | Wake], to_event: Any, about: tuple[Any, ...], answer: "Future[Any]"
) -> None:
    error = answer.exception()
    inbox.put(to_event(error, None if error is not None else answer.result(), *about))


def _take_error(result: Any, answer: "Future[Any]") -> None:
    """Has Ray know that the error of a call is handled, else it prints it once more when the reference ends."""
    if answer.exception() is not None:
        result.future()


def _report_lost(inbox: queue.SimpleQueue[Any], blocks: _Blocks, answer: "Future[Any]") -> None:
    """Reports the blocks as lost if a call that had them has failed by a fault of the machines: they may be why."""
    error = answer.exception()
    if error is not None and not is_helper_gone(error) and is_machine_fault(error):
        inbox.put(blocks.lost(error))


def _on_arrived(inbox: queue.SimpleQueue[Any], call: int, count: Iterator[int], wanted: int, _: "Future[Any]") -> None:
    if next(count) == wanted:
        inbox.put(Arrived(call))


def _apart(table: pa.Table) -> pa.Table:
    """Copies the columns that are small beside the largest one. A column is a view of Ray's object: else a label that
    the training loop keeps would keep the pictures that came with it in the object store.
    """
    largest = max((column.nbytes for column in table.columns), default=0)
    small = [name for name in table.column_names if _SMALL * table[name].nbytes <= largest]
    if not small:
        return table
    copies = own_memory(table.select(small))
    columns = [copies[name] if name in small else table[name] for name in table.column_names]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _on_placed(error: BaseException | None, _: Any, helper: int) -> Event:
    if error is None:
        return Alive(helper)
    return NotPlaced(helper, fault_of(error), isinstance(error, RayActorError) and bool(error.actor_init_failed))


def _on_alive(error: BaseException | None, _: Any, helper: _Helper) -> Event:
    return Alive(helper.number) if error is None else helper.lost(error)


def _on_answered(
    error: BaseException | None, answer: Loaded | Receipt, helper: _Helper, call: int, method: str, key: str
) -> Event:
    if error is not None:
        helper.forget(method)
        return helper.lost(error) if is_helper_gone(error) else _failure(call, error)
    helper.done(method, key)
    return answer if isinstance(answer, Loaded) else Done(call, answer)


def _failure(call: int, error: BaseException) -> Event:
    if is_machine_fault(error):
        return Faulted(call, fault_of(error))
    raised = as_raised(error)
    if raised is not error:
        # Errors of rows and data say all there is: Ray's tracebacks of each process would hide them from the user.
        raised.__cause__ = None if isinstance(raised, BadRowError | DatasetError) else error
    return Failed(call, raised)
