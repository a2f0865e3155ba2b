"""Owns what a loader writes into a checkpoint, and how it takes one over; never touches files or tensors."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from raylance.errors import StateError
from raylance.orders.order import Facts, Order, Tables
from raylance.planning.plan import Remainder
from raylance.planning.state import State, check_state, pack_shards, parse_state

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What is delivered, and in which order: the part of a loader that a checkpoint must agree with.

    Attributes:
        filter: The filter that made the selection, or None; in a mixture, by component.
        split: The split that made it, as its repr, or None; likewise.
        rows: Rows of the selection.
        fingerprint: Hash of the selection's row offsets.
        order: The order, "auto" fields allowed; `tables` is what it looked up in the selection.
        masks_bad_rows: Whether rows that cannot be decoded come as zeros with `_valid` False.
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

    @property
    def facts(self) -> Facts:
        """What the order is settled from, but for what serves "auto"."""
        return Facts(rows=self.rows, seed=self.seed, tables=self.tables)


def make_state(
    origin: Mapping[str, Any],
    delivery: Delivery,
    *,
    epoch: int,
    position: int,
    global_batch_size: int | None,
    world_size: int,
) -> State:
    """What a checkpoint says of a loader at a position; `origin` are the fields of the state that its feed knows."""
    shards = {}
    if delivery.order.is_settled:
        shards = pack_shards(delivery.order.settle(delivery.facts).epoch(epoch).completed_shards(position))
    return State(
        **origin,
        filter=delivery.filter,
        split=delivery.split,
        rows=delivery.rows,
        fingerprint=delivery.fingerprint,
        seed=delivery.seed,
        order=delivery.order.params(),
        epoch=epoch,
        position=position,
        completed_shards=shards,
        components=delivery.order.standings(position),
        global_batch_size=global_batch_size,
        world_size=world_size,
    )


def load_state(state: Mapping[str, Any], current: State, delivery: Delivery) -> tuple[Delivery, State]:
    """Checks what `state_dict` returned against the current state of a loader, which takes it over.

    Returns:
        What to deliver from now on (what was left to "auto" is taken from the state: another batch size must not change
        the order), and the state to go on at. The end of an epoch is the start of the next one.

    Raises:
        StateError: If the state is damaged, newer, or belongs to other rows or another order.
    """
    saved = parse_state(state)
    check_state(saved, current)
    delivery = dataclasses.replace(delivery, order=delivery.order.adopt(saved.order))
    rows = delivery.order.settle(delivery.facts).epoch_rows
    if saved.position > rows:
        raise StateError(
            f"the state is damaged: position {saved.position} of an epoch of {rows}. Use an earlier checkpoint."
        )
    left, size = rows - saved.position, saved.global_batch_size or 0
    # Format 1 moved on to the next epoch only when it was asked for a batch behind the last one.
    had_last = state["format"] == 1 and delivery.remainder == "drop" and saved.position > 0 and left < size
    if had_last and left:
        logger.warning(
            "the checkpoint of an earlier raylance stands %d rows before the end of epoch %d, fewer than its global "
            'batch of %d, and remainder="drop" leaves them out: the run goes on with epoch %d. If it read them, as '
            'with drop_last=False, build the dataset with remainder="ragged".',
            left,
            saved.epoch,
            size,
            saved.epoch + 1,
        )
    if had_last or not left:
        saved = dataclasses.replace(saved, epoch=saved.epoch + 1, position=0)
    return delivery, saved
