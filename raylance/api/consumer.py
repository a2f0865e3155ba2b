"""What one rank has consumed, and from where it takes more: its position, digests, record and helpers."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from raylance.api.recorder import Recorder
from raylance.batches.assembly import DeliveredStep
from raylance.batches.conversion import BatchSpec
from raylance.dispatch.states import LoaderState, change
from raylance.environment import agreement, process
from raylance.errors import ConfigError
from raylance.opened import ReadSpec
from raylance.planning.cursor import Cursor
from raylance.planning.digest import Digest, Ledger
from raylance.planning.plan import Plan, no_step_left
from raylance.planning.proof import check_permutation
from raylance.planning.shard_context import RankAndSize, ShardContext
from raylance.planning.state import FILE_NAME, State, states_in, subject_of
from raylance.planning.step_size import Remainder, Size
from raylance.runtime.feeder import Feeder
from raylance.runtime.session import Session
from raylance.secrets import public_uri
from raylance.settings import Options

if TYPE_CHECKING:
    from raylance.runtime.notes import Ending

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class Stretch:
    """Consecutive batches of a pass that come from one feeder: those of one share. It begins at `position`.

    Attributes:
        passed: Digest of the rows that were handed out.
        ending: Ends the feeder if the pass is left.
    """

    plan: Plan
    epoch: int
    position: int
    share: RankAndSize
    feeder: Feeder
    passed: Digest = dataclasses.field(default_factory=Digest)
    ending: "Ending | None" = None


class Consumer:
    """The inside of a `RankLoader`, for its passes and for raylance's own modules.

    Attributes:
        read_spec: What is read.
        options: Settings of the loader.
        context: The rank, and its share of the rows.
        cursor: The position.
        ledger: Digests of all rows that were handed out.
        recorder: The statistics and the record.
        session: The helpers.
        state: Whether the position was chosen, and whether a pass has begun.
        size: The size of a step in the last pass or in the loaded state; None if there was none.
        remainder: That of the batches bound last; None before.
        is_bound_by_rank: Whether these were given `batch_size=`, rows of one rank.
        is_resharded: Whether the training function has arranged the ranks.
    """

    def __init__(
        self,
        read_spec: ReadSpec,
        options: Options,
        context: ShardContext,
        cursor: Cursor,
        session: Session | None = None,
        *,
        is_recorded: bool = True,
    ) -> None:
        """Starts nothing. See `RankLoader`."""
        self.read_spec, self.options, self.context, self.cursor = read_spec, options, context, cursor
        self.ledger = Ledger()
        self.recorder = Recorder(read_spec, options, context, cursor, self.ledger, is_recorded=is_recorded)
        self.session = session or Session(read_spec, options, context.world_size)
        self.state = LoaderState.NEW
        self.size: Size | None = None
        self.remainder: Remainder | None = None
        self.is_bound_by_rank = self.is_resharded = False
        self._agreement: agreement.Agreement | None = None  # between the ranks, since the first pass
        self._moves: list[str] = []  # changes of weights that the ranks have not compared

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_agreement": None}  # another process makes its own

    def plan(self, size: Size, remainder: Remainder | None = None) -> Plan:
        """Returns the plan of this rank's share with steps of a size."""
        return self.cursor.plan(
            size=size,
            dp_size=self.context.dp_size,
            reader_bytes=self.options.reader_bytes,
            remainder=remainder,
        )

    def saved(self) -> State:
        """Returns the state of the present position."""
        self.cursor.settle()
        return self.cursor.state(self.size, self.context.dp_size)

    def on_load(self, saved: State) -> None:
        """Notes that the cursor has loaded a state."""
        self.size = saved.size
        self._on_place()
        self.ledger.load(saved.epoch, saved.position)
        self.recorder.on_resume(saved)

    def _on_place(self) -> None:
        if self.state is LoaderState.NEW:
            self.state = change(self.state, LoaderState.PLACED)

    def join(self, state: Mapping[str, Any]) -> None:
        """Goes to the position in another rank's state; a running pass continues there."""
        holder = self.cursor.holder
        self.cursor.load(state)
        self.cursor.holder = holder

    def seek(self, global_step: int, size: Size) -> None:
        """Goes to a step; a running pass continues there."""
        if self.cursor.seek(self.plan(size, self.remainder), global_step):  # else the last step may still be taken back
            self.ledger.join()
        self._on_place()

    def skip(self, steps: int, size: Size, reason: str) -> None:
        """Passes over steps on purpose; a running pass continues after them."""
        plan, cursor = self.plan(size, self.remainder), self.cursor
        cursor.settle()
        epoch, position = begin = cursor.epoch, cursor.position
        cursor.seek(plan, cursor.global_step + steps)
        for each in range(epoch, cursor.epoch + 1):
            is_last, low = each < cursor.epoch, position if each == epoch else 0
            high = plan.after(each, low, plan.steps(each, low)) if is_last else cursor.position
            if is_last or high > low:
                self.ledger.skip(each, low, high, is_last=is_last, share=self.context.share)
        self._on_place()
        self.recorder.on_skip({"epoch": begin[0], "position": begin[1], "steps": steps, "reason": reason})

    def set_epoch(self, epoch: int) -> None:
        """Goes to the start of an epoch, and warns if positions of it were consumed."""
        order = self.cursor.delivery_spec.order
        if given_up := self.cursor.set_epoch(epoch):
            logger.warning(
                "set_epoch(%d) gives up position %d of this epoch: rows before it come again. To continue after a "
                "restore, leave set_epoch out: epochs move on by themselves.",
                epoch,
                given_up,
            )
        if self.cursor.delivery_spec.order is not order:  # rows before it are not of the plan that the record will have
            self.recorder.end()
            self.ledger.forget()
        self.ledger.move(self.cursor.epoch)
        self._on_place()

    def take_back(self) -> bool:
        """Takes back the last step. Returns False if there is none to take back."""
        if not self.cursor.take_back():
            return False
        self.ledger.take_back()
        return True

    def reshard(self, share: RankAndSize, *, is_elastic: bool) -> None:
        """Changes this rank's share; see `RankLoader.reshard`."""
        context = self.context
        is_elastic |= self.state is LoaderState.BEGUN or context.is_elastic
        if self.is_bound_by_rank:
            raise ConfigError(
                "reshard() after batches were bound by batch_size=, rows of one rank: with other shares, the global "
                "batch would be another one. Bind them by global_batch_size=, or call reshard() on every rank before."
            )
        if self.session.is_prepared and not is_elastic:
            raise ConfigError(
                "reshard() after prepare(): batches that this rank has were made for other shares. Call it on every "
                "rank before prepare()."
            )
        if context.assignment is not None and not context.assignment.is_split and share != (0, 1):
            raise ConfigError(
                f"reshard() to data-parallel rank {share[0]} of {share[1]}, for a dataset that every rank sees whole: "
                "it has no shares. Name it in datasets_to_split of DataConfig, or leave reshard() out."
            )
        self.context = context.with_share(*share, is_elastic=is_elastic)
        if is_elastic and self.context.share != context.share:
            self.ledger.cut()
        self.recorder.on_reshard(self.context)
        self.is_resharded = True

    def reweight(self, weights: Mapping[str, Any], reason: str) -> None:
        """Changes the weights of a mixture; see `RankLoader.reweight`."""
        self.cursor.settle()
        shares = self.cursor.reweight(weights, reason)
        self.ledger.cut()  # the rows after this place are of another rule
        epoch, position, *_ = self.cursor.place
        self._moves.append(f"shares {shares} from epoch {epoch}, position {position} on")
        self.recorder.on_move(shares, reason, self.saved().to_dict())

    def close(self) -> None:
        """Ends the helpers and the record. The position stays."""
        self.cursor.holder = None
        self.session.close()
        self.recorder.end()

    @contextlib.contextmanager
    def reporting(self, metrics: Mapping[str, Any], *, uploads_async: bool = False) -> Iterator[None]:
        """Records a report with a checkpoint; the body of the context makes the report."""
        self.cursor.settle()
        self.ledger.cut()  # the run may resume from here
        with self.recorder.reporting(metrics, has_checkpoint=True, uploads_async=uploads_async):
            yield

    def prepare(self, spec: BatchSpec) -> None:
        """Begins to make the first batches of a pass before it is iterated."""
        epoch, position = self.cursor.epoch, 0 if spec.whole else self.cursor.position
        plan = self.plan(spec.size, spec.remainder)
        process.check_context(self.context)
        self.recorder.on_prepare()
        plan.check_order(epoch)
        if not plan.is_over(epoch, position):
            where = {"epoch": epoch, "position": position, "prefetch_batches": spec.prefetch_batches}
            self.session.prepare(plan, self.context.dp_rank, **where, observer=self.recorder.stats)

    def begin_pass(self, spec: BatchSpec) -> object:
        """Checks what can be checked at the begin of a pass only; returns the holder of the cursor from now on."""
        process.check_context(self.context)
        if self.state is not LoaderState.BEGUN:
            self._check_restored()
        if spec.whole and self.cursor.position:
            self.cursor.set_epoch(self.cursor.epoch)
            self.ledger.load(self.cursor.epoch, 0)  # the rows of the pass that was left do not count
        self._agree(self.plan(spec.size, spec.remainder))
        self.size = spec.size
        if self.state is not LoaderState.BEGUN:
            self.state = change(self.state, LoaderState.BEGUN)
        return self.cursor.hold()

    def begin_stretch(self, spec: BatchSpec) -> Stretch | None:
        """Begins to take batches from the present position on, in the present share; None if no step is left."""
        cursor, share = self.cursor, self.context.share
        self._compare_moves()
        plan = self.plan(spec.size, spec.remainder)
        cursor.follow(plan)
        epoch, position = cursor.epoch, cursor.position
        plan.check_order(epoch)  # first: steps of a cost are cut by the order
        self.recorder.begin_pass(plan, lambda: self.saved().to_dict())
        if plan.is_over(epoch, position):
            logger.warning("%s", no_step_left(plan, epoch, position))
            self.ledger.add(epoch, position, position, Digest(), is_last=True, share=share)
            cursor.end_epoch()
            return None
        self.ledger.cut()
        where = {"epoch": epoch, "position": position}
        feeder = self.session.start(plan, share[0], **where, batch_spec=spec, observer=self.recorder.stats)
        return Stretch(plan, epoch, position, share, feeder)

    def _compare_moves(self) -> None:
        """Raises ConfigError if other ranks have changed the weights otherwise, or not at all."""
        context = self.context
        moves, self._moves = self._moves, []
        store = agreement.store_of(context.world_size) if moves and context.dp_size > 1 else None
        if store is None or context.is_elastic:
            return
        name = f"{self.recorder.stem}/{self.cursor.delivery_spec.fingerprint}"
        agreement.compare_moves(store, context, name, "; ".join(moves))

    def look_at_others(self, *, at_once: bool) -> None:
        """Raises ConfigError if the settings of another rank are known by now, and differ."""
        if self._agreement is not None:
            self._agreement.look(at_once=at_once)

    def _agree(self, plan: Plan) -> None:
        """Makes the ranks compare the settings of their first passes, if they form one process group."""
        context = self.context
        if context.is_elastic:  # ranks may be gone, so no rank waits for others
            self._agreement = None
            return
        store = agreement.store_of(context.world_size) if self._agreement is None and context.world_size > 1 else None
        if store is None:
            return
        same: dict[str, Any] = {"global_batch_size": plan.global_batch_size, "remainder": plan.remainder}
        if plan.budget is not None:
            same |= {"budget": repr(plan.budget)}
        if context.dp_size > 1:  # else each rank gets all rows, independent of the others
            state = self.saved().to_dict()
            same |= {name: state[name] for name in ("rows", "fingerprint", "seed", "epoch", "position")}
        terms = agreement.Terms(
            dp_rank=context.dp_rank,
            dp_size=context.dp_size,
            same=same,
            has_called=self.is_resharded,
            is_arranged=context.assignment is not None or context.peers > 1,
        )
        self._agreement = agreement.Agreement(store, context, self.recorder.stem, terms)
        self._agreement.wait()

    def _check_restored(self) -> None:
        """Raises ConfigError if Ray Train continues from a checkpoint with this loader's position, and nobody restored
        it. A run that was not restored on purpose says so by `set_epoch`. If another loader of the same data was
        restored, this one is for something else, such as figures of the training data.
        """
        context = self.context
        is_split = context.world_size > 1 if context.assignment is None else context.assignment.is_split
        is_split &= not context.is_elastic  # a rank that joins others takes their position over
        found = process.train_checkpoint_file(FILE_NAME) if is_split else None
        if found is None:
            return
        path, content = found
        own, states = self.saved(), states_in(content)
        if own.fingerprint in Recorder.restored:
            return
        of_these_rows = [state for state in states if state.get("fingerprint") == own.fingerprint]
        subject = subject_of(own.to_dict())
        # A checkpoint without this loader's position, such as that of a validation set, is none to restore. A damaged
        # one may have had it.
        self.recorder.has_checkpoint = bool(of_these_rows or not states or subject in map(subject_of, states))
        if self.state is LoaderState.PLACED or Recorder.has_reported:
            return
        here = own.epoch, own.position
        if saved := [state for state in of_these_rows if (state.get("epoch"), state.get("position")) != here]:
            raise ConfigError(
                f"Ray Train continues this run from {public_uri(path)}, which holds the position of "
                f"{self.recorder.stem!r}: epoch {saved[0].get('epoch')}, position {saved[0].get('position')}. It was "
                f"not restored, so this loader would begin at epoch {own.epoch}, position {own.position}, and a model "
                "that is loaded from there would be trained on rows again. Call raylance.restore(loader) before the "
                "first batch. To begin there on purpose, call loader.set_epoch(0)."
            )

    def count(self, stretch: Stretch, step: DeliveredStep) -> None:
        """Counts a step that is about to be handed out. At the last step of the epoch, checks a custom order if this
        rank was handed the whole epoch.
        """
        epoch, plan = stretch.epoch, stretch.plan
        self.ledger.add(epoch, step.before, step.after, step.digest, is_last=step.is_last, share=stretch.share)
        stretch.passed += step.digest
        if not step.rows and not self.cursor.delivery_spec.empty_batches:
            empty = plan.empty_ranks(epoch, step.before)
            _warn_of_no_row(str(self.read_spec.source.uri), plan.dp_size, plan.dp_size - empty)
        if not step.is_last:
            return
        if plan.dp_size == 1 and plan.order.is_custom and not plan.order.repeats:
            handed = self.ledger.since(epoch, 0)
            if handed is not None:  # this rank was handed the whole epoch
                check_permutation(plan, self.read_spec.source.load_selection(), epoch, step.after, handed)

    def move(self, stretch: Stretch, step: DeliveredStep) -> None:
        """Moves the position to the end of a step; at the end of an epoch, records the pass."""
        self.cursor.advance(step.after, is_last=step.is_last)
        if step.is_last:
            self.recorder.on_epoch(stretch.epoch, stretch.position, step.after, stretch.passed)

    def return_to(self, place: tuple[int, int, int, int]) -> None:
        """Goes to a place, because the batch there was not handed out, as after an interrupt."""
        self.cursor.return_to(place)
        self.ledger.load(self.cursor.epoch, self.cursor.position)


@functools.cache
def _warn_of_no_row(uri: str, ranks: int, rows: int) -> None:
    """Warns, once per process, that a batch without a row is handed out."""
    logger.warning(
        "%s: a step has fewer rows, %d, than there are ranks, %d, so this rank gets a batch without rows. It is the "
        'last step of remainder="ragged", or a step of budget=. The mean of its losses is NaN, and so is a mean '
        "over all ranks. Add up sums and counts, divide them after the last batch, and open the dataset with "
        'remainder="ragged_or_empty"; or use remainder="pad", whose repeated rows have _valid False, or a larger cost.',
        uri,
        rows,
        ranks,
    )
