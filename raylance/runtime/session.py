"""What outlives the passes of a loader, its runtime and helpers, and the pass that runs or is prepared."""

import dataclasses
import importlib
import uuid
import weakref

import torch

from raylance.batches.assembly import Assembly
from raylance.batches.bad_rows import MaskedRows
from raylance.batches.conversion import BatchSpec
from raylance.columns import dataset_names, describe_rows
from raylance.decode.on_device import DeviceDecoding
from raylance.dispatch.account import Account
from raylance.dispatch.block_work import BlockWork
from raylance.dispatch.dispatcher import Dispatcher, Kept
from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.load_ahead import ChunkTable
from raylance.dispatch.messages import Kind
from raylance.dispatch.scaling import Scaler
from raylance.dispatch.suspects import Suspects
from raylance.environment.connection import ray_session
from raylance.observe.observations import Observer
from raylance.opened import ReadSpec
from raylance.planning.plan import Plan, WorkItem
from raylance.planning.planned_rows import PlannedRows
from raylance.runtime import notes
from raylance.runtime.feeder import Feeder
from raylance.runtime.runtime import Runtime
from raylance.runtime.threads import ThreadRuntime  # not later: a notebook that imports raylance again has two
from raylance.settings import Options


class Session:
    """Keeps the helpers and the device decoding of one loader over all its passes. Picklable until started.

    Attributes:
        runtime: Runs the helpers; None before the first pass, and after `close`.
        kept: State that the dispatchers of all passes share. Each new runtime gets a new one.
    """

    def __init__(
        self,
        read_spec: ReadSpec,
        options: Options,
        world_size: int = 1,
        *,
        loads_next_epoch: bool = True,
        spans_epochs: bool = True,
    ) -> None:
        """Starts nothing.

        Args:
            read_spec: What is read.
            options: Settings of the loader.
            world_size: Number of ranks of the run.
            loads_next_epoch: Whether the next pass is likely over the next epoch, whose begin is then loaded ahead.
            spans_epochs: Whether the consumer calls `follow` after the last batch of a pass, so that the next epoch, if
                it is loaded ahead, is also gathered and decoded ahead, without a gap.
        """
        self._read_spec, self._options, self._world_size = read_spec, options, world_size
        self._loads_next_epoch, self._spans_epochs = loads_next_epoch, loads_next_epoch and spans_epochs
        self._named: tuple[PlannedRows, str] | None = None
        self._running: _Begun | None = None
        self._started: Feeder | None = None  # the last one started; an interrupt may come before it becomes `_running`
        self._prepared: _Begun | None = None
        self._stop: weakref.finalize[..., Session] | None = None  # ends a feeder that nobody takes batches from yet
        self._masked = MaskedRows(read_spec)
        self._scalers: list[Scaler] = []
        self._on_device: dict[torch.device, DeviceDecoding] = {}  # opened once for all passes
        self.runtime: Runtime | None = None
        self.kept: Kept | None = None

    def start(
        self, plan: Plan, dp_rank: int, *, epoch: int, position: int, batch_spec: BatchSpec, observer: Observer
    ) -> Feeder:
        """Begins one rank's pass from a position to the end of its epoch; first ends the previous pass."""
        wanted = _Pass(plan, dp_rank, epoch, position, batch_spec.prefetch_batches)
        feeder = self._take_prepared(wanted)
        if feeder is None:
            self.end_pass()  # the previous pass may still run, and two passes cannot share the helpers
            feeder = self._begin(wanted, observer)
        self._running = _Begun(wanted, feeder)
        feeder.bind(batch_spec, self._decodes_on(batch_spec.device or torch.device("cpu")))
        self._forget_stop()  # the feeder knows the user's functions now, which may know this object
        return feeder

    def _decodes_on(self, device: torch.device) -> DeviceDecoding | None:
        """Returns the decoding on the device of the batches; None if no column is decoded there."""
        decoding = self._read_spec.on_device
        if decoding is not None and device not in self._on_device:
            self._on_device[device] = DeviceDecoding(decoding, device)
        return self._on_device.get(device)

    @property
    def is_prepared(self) -> bool:
        """Whether a pass is prepared and not yet started."""
        return self._prepared is not None

    def prepare(
        self, plan: Plan, dp_rank: int, *, epoch: int, position: int, prefetch_batches: int, observer: Observer
    ) -> None:
        """Begins the first steps of a pass before a consumer starts the pass; does nothing during another pass."""
        if self._running is None or self._running.feeder.has_ended:
            wanted = _Pass(plan, dp_rank, epoch, position, prefetch_batches)
            self._prepared = _Begun(wanted, self._take_prepared(wanted) or self._begin(wanted, observer))

    def follow(self) -> bool:
        """Makes the pass whose last batch was taken the prepared pass over the next epoch. Returns False if no epoch
        follows; then the pass ends as others do.
        """
        running = self._running
        if running is None or not running.feeder.is_at_turn:
            return False
        after = dataclasses.replace(running.wanted, epoch=running.wanted.epoch + 1, position=0)
        self._prepared, self._running = _Begun(after, running.feeder), None
        self._stop_if_dropped(running.feeder)
        return True

    def _take_prepared(self, wanted: "_Pass | None") -> Feeder | None:
        """Takes the prepared pass if it is the wanted one; ends any other prepared pass."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return None
        if prepared.wanted == wanted and not prepared.feeder.is_closed and self._is_usable:
            return prepared.feeder
        self._close(prepared.feeder)
        return None

    @property
    def _is_usable(self) -> bool:
        """Whether runtime and pool can serve another pass; if not, new ones replace them."""
        runtime, kept = self.runtime, self.kept
        return runtime is not None and kept is not None and runtime.is_usable and kept.pool.failure is None

    def _begin(self, wanted: "_Pass", observer: Observer) -> Feeder:
        if self._started is not None and not self._started.has_ended:  # an interrupt has left it running
            self._close(self._started)  # else two feeders would take each other's events
        if self.runtime is not None and not self._is_usable:
            self.runtime.close()
            self.runtime = None
        if self.runtime is None or self.kept is None:
            self.runtime = self._make_runtime()
            self.kept = self._make_kept(self.runtime)
        plan = wanted.plan
        if self._named is None or self._named[0].plan != plan:
            self._named = (PlannedRows(plan), uuid.uuid4().hex)
        self.runtime.begin(*self._named)
        dispatcher = self._make_dispatcher(self.kept, wanted)
        self._started = feeder = self._make_feeder(self.runtime, dispatcher, self._named[0], wanted, observer)
        self._stop_if_dropped(feeder)
        feeder.start()
        return feeder

    def _stop_if_dropped(self, feeder: Feeder) -> None:
        """Ends a feeder, whose thread would never end otherwise, if nobody starts its pass."""
        self._forget_stop()
        self._stop = weakref.finalize(self, notes.leave, feeder.stop)
        self._stop.atexit = False

    def _forget_stop(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            stop.detach()

    def _make_runtime(self) -> Runtime:
        wanted = self._options.runtime
        if wanted == "threads" or (wanted == "auto" and not ray_session()):
            return ThreadRuntime(self._read_spec, self._options)
        cluster = importlib.import_module("raylance.runtime.ray.runtime")  # loads Ray
        runtime: Runtime = cluster.RayRuntime(self._read_spec, self._options, self._world_size)
        return runtime

    def _make_kept(self, runtime: Runtime) -> Kept:
        options, decoding = self._options, self._read_spec.in_helpers
        least, first, most = (0, 0, 0) if decoding is None else runtime.count_decoders()
        readers, most_readers = options.reader_range
        scaled: list[tuple[Kind, int, int, int]] = [
            ("decoder", least, most, first),
            ("reader", readers, most_readers, readers),
        ]
        self._scalers = [self._make_scaler(*each) for each in scaled if each[1] < each[2]]
        pool = HelperPool(
            readers=readers,
            decoders=first,
            needs_decoder=runtime.needs_decoder,
            placement_timeout_s=options.placement_timeout_s,
            work_timeout_s=options.work_timeout_s,
        )
        of_items, of_blocks = (decoding.of_items, decoding.of_blocks) if decoding else (None, None)
        account = Account(
            loaded_bytes=self._read_spec.source.loaded_bytes,
            rows_each=self._read_spec.source.rows_each,
            raw_bytes=self._read_spec.source.sample_bytes + (of_blocks.row_bytes if of_blocks else 0),
            decoded_bytes=of_items.row_bytes if of_items else 0,
            inflight_bytes=options.inflight_bytes,
            reader_bytes=options.reader_bytes,
        )
        chunks = ChunkTable(
            account,
            decodes=decoding is not None,
            decodes_blocks=of_blocks is not None,
            gives_away=runtime.gives_away,
            until_fetched=runtime.fetches_from_chunks,
            loads_next_epoch=self._loads_next_epoch,
        )
        suspects = Suspects()
        return Kept(pool, chunks, account, suspects, BlockWork(pool, chunks, suspects))

    def _make_scaler(self, kind: Kind, least: int, most: int, first: int) -> Scaler:
        return Scaler(least, most, first, kind)

    def _make_dispatcher(self, kept: Kept, wanted: "_Pass") -> Dispatcher:
        plan, dp_rank, epoch, position = wanted.plan, wanted.dp_rank, wanted.epoch, wanted.position
        source, decoding = self._read_spec.source, self._read_spec.in_helpers
        decoders = max(1, kept.pool.wanted["decoder"], self._options.decoder_range[1])
        low, high = plan.rank_slice(epoch, position, dp_rank)
        # The pass may begin at a last step of few rows; steps of later epochs are like the epoch's first step.
        first_low, first_high = plan.rank_slice(epoch, 0, dp_rank)
        # One item in progress and one waiting, for each decoder
        kept.account.set_items(2 * decoders + 1, max(high - low, first_high - first_low))

        def describe(item: WorkItem) -> str:
            rows = plan.item_rows(item)
            return describe_rows(source.load_selection().offsets(rows), dataset_names(source.uri))

        return Dispatcher(
            plan=plan,
            dp_rank=dp_rank,
            epoch=epoch,
            position=position,
            kept=kept,
            decodes=decoding is not None and decoding.of_items is not None,
            prefetch_batches=wanted.prefetch_batches,
            first_rows=-(-(high - low) // decoders),  # the first step is divided among all decoders
            spans_epochs=self._spans_epochs,
            work_timeout_s=self._options.work_timeout_s,
            describe=describe,
            scalers=self._scalers,
        )

    def _make_feeder(
        self, runtime: Runtime, dispatcher: Dispatcher, planned: PlannedRows, wanted: "_Pass", observer: Observer
    ) -> Feeder:
        assembly = Assembly(self._read_spec, planned, wanted.dp_rank, wanted.epoch, wanted.position)
        return Feeder(dispatcher, runtime, assembly, observer, self._masked)

    def end_pass(self) -> None:
        """Ends the current pass; the helpers stay."""
        running = None if self._running is None else self._running.feeder
        for feeder in {running, self._started}:  # both stay set until they have ended: an interrupt may come
            self._close(feeder)
        self._running = self._started = None

    def _close(self, feeder: Feeder | None) -> None:
        if feeder is not None and not feeder.close():
            self.runtime = None  # user code hangs in the feeder's thread, which still uses runtime and device
            self._on_device.clear()
        self._forget_stop()

    def close(self) -> None:
        """Ends the helpers."""
        self.end_pass()
        self._on_device.clear()
        self._take_prepared(None)
        if self.runtime is not None:
            self.runtime.close()
            self.runtime = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    """The arguments of a pass. A prepared pass is the wanted pass if all of them are equal."""

    plan: Plan
    dp_rank: int
    epoch: int
    position: int
    prefetch_batches: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Begun:
    wanted: _Pass
    feeder: Feeder
