"""Owns the state that a loader writes, and how a loader continues from one; never touches files or tensors."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from raylance.errors import ConfigError
from raylance.orders.order import WINDOW_BYTES, Facts, Order, Tables
from raylance.planning.plan import Remainder
from raylance.planning.shards import NO_SHARDS, list_shards
from raylance.planning.state import UNKNOWN, State, check_state, damaged, parse_state

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySpec:
    """What is delivered, in which order. A checkpoint must agree with it.

    Attributes:
        filter: The filter that made the selection, or None; in a mixture, by component.
        split: The split that made the selection, as its repr, or None; in a mixture, by component.
        rows: Rows of the selection.
        fingerprint: Hash of the selection's row offsets.
        order: The order, "auto" fields allowed.
        tables: What the order looked up in the selection.
        masks_bad_rows: Whether rows that cannot be decoded come as zeros with `_valid` False.
        window_bytes: The bytes that automatic sizes of the order follow from; None for the run's, or the default.
    """

    filter: Any
    split: Any
    rows: int
    fingerprint: str
    order: Order
    tables: Tables = dataclasses.field(default_factory=dict, compare=False, repr=False)
    seed: int
    remainder: Remainder
    masks_bad_rows: bool
    window_bytes: int | None = None

    @property
    def facts(self) -> Facts:
        """The facts that resolve an order without "auto" fields."""
        return Facts(rows=self.rows, seed=self.seed, tables=self.tables)


def make_state(
    origin: Mapping[str, Any],
    delivery: DeliverySpec,
    *,
    epoch: int,
    position: int,
    step: int = 0,
    global_step: int = 0,
    global_batch_size: int | None,
    world_size: int,
) -> State:
    """Makes the state of a loader at a position; `origin` holds the fields of the state that `ReadSpec` knows.

    It costs the same for any number of rows.
    """
    shards = {}
    if delivery.order.repeats:
        shards = NO_SHARDS
    elif delivery.order.is_resolved:
        shards = list_shards(delivery.order.resolve(delivery.facts).epoch(epoch), position)
    return State(
        **origin,
        filter=delivery.filter,
        split=delivery.split,
        rows=delivery.rows,
        fingerprint=delivery.fingerprint,
        seed=delivery.seed,
        order=delivery.order.params(),
        window_bytes=delivery.window_bytes or WINDOW_BYTES,
        epoch=epoch,
        position=position,
        step=step,
        global_step=global_step,
        completed_shards=shards,
        components=delivery.order.standings(position),
        global_batch_size=global_batch_size,
        world_size=world_size,
    )


def load_state(state: Mapping[str, Any], current: State, delivery: DeliverySpec) -> tuple[DeliverySpec, State]:
    """Checks what `state_dict` returned against the current state of the loader that is to continue from it.

    Returns:
        What to deliver from now on, and the state to continue at. Sizes that are "auto" come from the saved state,
        since another batch size must not change the order. The end of an epoch is the start of the next one.

    Raises:
        StateError: If the state is damaged, newer, or belongs to other rows or another order.
    """
    saved = parse_state(state)
    check_state(saved, current)
    try:
        delivery = dataclasses.replace(delivery, order=delivery.order.adopt(saved.order))
    except ConfigError as error:
        raise damaged(str(error).removesuffix(".")) from error
    if saved.window_bytes is not UNKNOWN:
        if delivery.window_bytes not in (None, saved.window_bytes):
            logger.warning(
                "the checkpoint has window_bytes=%d, the dataset %d. The order keeps the sizes of the checkpoint. For "
                "other sizes, start under a new run name.",
                saved.window_bytes,
                delivery.window_bytes,
            )
        delivery = dataclasses.replace(delivery, window_bytes=saved.window_bytes)
    rows = delivery.order.resolve(delivery.facts).epoch_rows
    if saved.position > rows:
        raise damaged(f"position {saved.position} of an epoch of {rows}")
    if saved.step is UNKNOWN:
        saved = _count_steps(saved, rows, delivery.remainder)
    left, size = rows - saved.position, saved.global_batch_size or 0
    # Format 1 moved to the next epoch only when a batch after the last one was asked for.
    had_last = state["format"] == 1 and delivery.remainder == "drop" and saved.position > 0 and left < size
    if had_last and left:
        logger.warning(
            "the checkpoint of an earlier raylance is %d rows before the end of epoch %d, fewer than its global batch "
            'of %d. remainder="drop" leaves them out, and the run continues with epoch %d. If that raylance read them, '
            'by drop_last=False, build the dataset with remainder="ragged".',
            left,
            saved.epoch,
            size,
            saved.epoch + 1,
        )
    if had_last or not left:
        saved = dataclasses.replace(saved, epoch=saved.epoch + 1, position=0, step=0)
    return delivery, saved


def _count_steps(saved: State, rows: int, remainder: Remainder) -> State:
    """Counts the steps of a state that an older raylance wrote, as if all of them had its global batch size."""
    size = saved.global_batch_size
    if size is None:
        return dataclasses.replace(saved, step=0, global_step=0)
    step = -(-saved.position // size)
    before = saved.epoch * (rows // size if remainder == "drop" else -(-rows // size))
    return dataclasses.replace(saved, step=step, global_step=before + step)
