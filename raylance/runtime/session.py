"""Owns the helpers of one loader, and the pass that goes on with them; never holds a position."""

import dataclasses
import importlib
import uuid
import weakref

from raylance.batches.assembly import Assembly
from raylance.batches.batches import BatchSpec
from raylance.batches.masking import MaskedRows
from raylance.columns import dataset_names, describe_rows
from raylance.dispatch.dispatcher import Dispatcher
from raylance.dispatch.sizes import Sizes
from raylance.environment.connection import ray_session
from raylance.observe import Stats
from raylance.planning.plan import Plan, WorkItem
from raylance.runtime.feeder import Feeder
from raylance.runtime.runtime import Runtime
from raylance.runtime.threads import ThreadRuntime
from raylance.settings import Options, ReadSpec


class Helpers:
    """Who works for a loader, pass after pass. Picklable until started."""

    def __init__(self, feed: ReadSpec, options: Options, world_size: int = 1) -> None:
        """Starts nothing."""
        self._feed, self._options, self._world_size = feed, options, world_size
        self._named: tuple[Plan, str] | None = None
        self._feeder: Feeder | None = None
        self._prepared: _Prepared | None = None
        self._masked = MaskedRows(feed)
        self.runtime: Runtime | None = None

    def start(self, plan: Plan, rank: int, *, epoch: int, position: int, bound: BatchSpec, stats: Stats) -> Feeder:
        """Begins one rank's pass from a position to the end of its epoch, and ends the one before."""
        wanted = _Pass(plan, rank, epoch, position, bound.prefetch_batches)
        feeder = self._take_prepared(wanted)
        if feeder is None:
            self.end_pass()  # of an iterator that was left alone: two cannot share the helpers
            feeder = self._begin(wanted, stats)
        self._feeder = feeder
        feeder.bind(bound)
        return feeder

    def prepare(self, plan: Plan, rank: int, *, epoch: int, position: int, prefetch_batches: int, stats: Stats) -> None:
        """Begins a pass that nobody has asked for yet, up to its first steps; while one goes on, does nothing."""
        if self._feeder is None or self._feeder.has_ended:
            wanted = _Pass(plan, rank, epoch, position, prefetch_batches)
            feeder = self._take_prepared(wanted) or self._begin(wanted, stats)
            stop = weakref.finalize(self, feeder.stop)  # or its thread would keep it, and the helpers, for ever
            stop.atexit = False
            self._prepared = _Prepared(wanted, feeder, stop)

    def _take_prepared(self, wanted: "_Pass | None") -> Feeder | None:
        """The pass that was prepared, if it is this one; another one is ended."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return None
        prepared.stop.detach()
        if prepared.wanted == wanted and self.runtime is not None and self.runtime.is_usable:
            return prepared.feeder
        self._close(prepared.feeder)
        return None

    def _begin(self, wanted: "_Pass", stats: Stats) -> Feeder:
        if self.runtime is not None and not self.runtime.is_usable:
            self.runtime.close()
            self.runtime = None
        self.runtime = runtime = self.runtime or self._make_runtime()
        plan = wanted.plan
        if self._named is None or self._named[0] != plan:  # what was read ahead for an equal plan is found by its name
            self._named = (plan, uuid.uuid4().hex)
        runtime.begin(*self._named)
        assembly = Assembly(self._feed, plan, wanted.rank, wanted.epoch, wanted.position)
        return Feeder(self._dispatcher(runtime, wanted, stats), runtime, assembly, stats, self._masked)

    def _make_runtime(self) -> Runtime:
        wanted = self._options.runtime
        if wanted == "threads" or (wanted == "auto" and not ray_session()):
            return ThreadRuntime(self._feed, self._options)
        cluster = importlib.import_module("raylance.runtime.ray.runtime")  # loads Ray
        runtime: Runtime = cluster.RayRuntime(self._feed, self._options, self._world_size)
        return runtime

    def _dispatcher(self, runtime: Runtime, wanted: "_Pass", stats: Stats) -> Dispatcher:
        plan, rank, position = wanted.plan, wanted.rank, wanted.position
        crew, source, decoding = runtime.crew, self._feed.source, self._feed.decoding
        decoders = max(1, crew.wanted["decoder"], self._options.decoder_range[1])
        sizes = Sizes(
            raw_bytes=source.likely_row_bytes,
            decoded_bytes=decoding.row_bytes if decoding else 0,
            limit_bytes=self._options.max_inflight_bytes,
            items=2 * decoders + 1,  # one item in work and one waiting, for each decoder
        )
        low, high = plan.rank_slice(position, rank)
        first_rows = -(-(high - low) // decoders)  # the first step goes to all decoders

        def tell(item: WorkItem) -> str:
            rows = plan.select(item.epoch, plan.item_positions(item))
            return describe_rows(source.load_selection().offsets(rows), dataset_names(source.uri))

        return Dispatcher(
            plan=plan,
            rank=rank,
            items=plan.items(rank, wanted.epoch, position, sizes.item_rows(), first_rows),
            position=position,
            crew=crew,
            sizes=sizes,
            stats=stats,
            decodes=decoding is not None,
            prefetch_batches=wanted.prefetch_batches,
            work_timeout_s=self._options.work_timeout_s,
            tell=tell,
            scalers=runtime.scalers,
        )

    def end_pass(self) -> None:
        """Ends the pass that goes on; the helpers stay."""
        feeder, self._feeder = self._feeder, None
        self._close(feeder)

    def _close(self, feeder: Feeder | None) -> None:
        if feeder is not None and not feeder.close():
            self.runtime = None  # user code hangs in the feeder's thread, which still has it

    def close(self) -> None:
        """Ends the helpers."""
        self.end_pass()
        self._take_prepared(None)
        if self.runtime is not None:
            self.runtime.close()
            self.runtime = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass:
    """What must be the same for a pass that was prepared to be the one that is asked for."""

    plan: Plan
    rank: int
    epoch: int
    position: int
    prefetch_batches: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    wanted: _Pass
    feeder: Feeder
    stop: "weakref.finalize[..., Helpers]"
