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
class Origin:
    """Where the rows of a loader are from, and what they are made into, as a checkpoint says it; see `State`.

    Attributes:
        uri: Dataset; like the next three by component in a mixture.
        branch: Branch that the version is counted in, or None for what `uri` opens.
        version: Pinned version.
        identity: Hash of the version's files.
        columns: Columns of the batches.
        decode: What decodes columns, as `describe` writes it.
        transform: The transform, likewise, or None.
    """

    uri: Any
    branch: Any
    version: Any
    identity: Any
    columns: list[str]
    decode: Any
    transform: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """What is delivered, and in which order: the part of a loader that a checkpoint must agree with.

    Attributes:
        filter: The filter that made the selection, or None; in a mixture, by component.
        split: The split that made it, as its repr, or None; likewise.
        rows: Rows of the selection.
        fingerprint: Hash of the selection's row offsets.
        order: The order, "auto" fields allowed.
        tables: What the order looked up in the selection.
        seed: Seed of order and augmentation.
        remainder: What becomes of the rows behind the last whole step.
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
    origin: Origin, delivery: Delivery, *, epoch: int, position: int, global_batch_size: int | None, world_size: int
) -> State:
    """What a checkpoint says of a loader at a position.

    Args:
        origin: Where the rows are from.
        delivery: What is delivered.
        epoch: Epoch.
        position: Consumed position.
        global_batch_size: Rows of a step, if there was one.
        world_size: Ranks.
    """
    shards = {}
    if delivery.order.is_settled:
        shards = pack_shards(delivery.order.settle(delivery.facts).epoch(epoch).completed_shards(position))
    return State(
        **{field.name: getattr(origin, field.name) for field in dataclasses.fields(origin)},
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
    """Checks a saved state against a loader's own, and takes it over.

    Args:
        state: What `state_dict` returned.
        current: The state of the loader that takes it over.
        delivery: What that loader delivers.

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
    ended = saved.position == rows
    left = rows - saved.position
    # Format 1 moved on to the next epoch only when it was asked for a batch behind the last one.
    if (
        state["format"] == 1
        and delivery.remainder == "drop"
        and saved.position
        and left < (saved.global_batch_size or 0)
    ):
        ended = True
        if left:
            logger.warning(
                "the checkpoint of an earlier raylance stands %d rows before the end of epoch %d, fewer than its "
                'global batch of %d, and remainder="drop" leaves them out: the run goes on with epoch %d. If it read '
                'them, as with drop_last=False, build the dataset with remainder="ragged".',
                left,
                saved.epoch,
                saved.global_batch_size,
                saved.epoch + 1,
            )
    if ended:
        saved = dataclasses.replace(saved, epoch=saved.epoch + 1, position=0)
    return delivery, saved
