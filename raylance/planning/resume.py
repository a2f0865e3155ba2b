"""Owns the state that a loader writes, and how a loader continues from one; never touches files or tensors."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from raylance.errors import ConfigError
from raylance.orders.order import WINDOW_BYTES
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.plan import Remainder
from raylance.planning.shards import NO_SHARDS, list_shards
from raylance.planning.state import UNKNOWN, State, check_state, damaged, parse_state

logger = logging.getLogger(__name__)


def make_state(
    origin: Mapping[str, Any],
    delivery_spec: DeliverySpec,
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
    if delivery_spec.order.repeats:
        shards = NO_SHARDS
    elif delivery_spec.order.is_resolved:
        shards = list_shards(delivery_spec.resolved_order.epoch(epoch), position)
    return State(
        **origin,
        filter=delivery_spec.filter,
        split=delivery_spec.split,
        rows=delivery_spec.rows,
        fingerprint=delivery_spec.fingerprint,
        seed=delivery_spec.seed,
        order=delivery_spec.order.params(),
        window_bytes=delivery_spec.window_bytes or WINDOW_BYTES,
        epoch=epoch,
        position=position,
        step=step,
        global_step=global_step,
        completed_shards=shards,
        components=delivery_spec.order.standings(position),
        global_batch_size=global_batch_size,
        world_size=world_size,
    )


def load_state(state: Mapping[str, Any], current: State, delivery_spec: DeliverySpec) -> tuple[DeliverySpec, State]:
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
        delivery_spec = dataclasses.replace(delivery_spec, order=delivery_spec.order.adopt(saved.order))
    except ConfigError as error:
        raise damaged(str(error).removesuffix(".")) from error
    if saved.window_bytes is not UNKNOWN:
        if delivery_spec.window_bytes not in (None, saved.window_bytes):
            logger.warning(
                "the checkpoint has window_bytes=%d, the dataset %d. The order keeps the sizes of the checkpoint. For "
                "other sizes, start under a new run name.",
                saved.window_bytes,
                delivery_spec.window_bytes,
            )
        delivery_spec = dataclasses.replace(delivery_spec, window_bytes=saved.window_bytes)
    rows = delivery_spec.resolved_order.epoch_rows
    if saved.position > rows:
        raise damaged(f"position {saved.position} of an epoch of {rows}")
    if saved.step is UNKNOWN:
        saved = _count_steps(saved, rows, delivery_spec.remainder)
    left, size = rows - saved.position, saved.global_batch_size or 0
    # Format 1 moved to the next epoch only when a batch after the last one was asked for.
    had_last = state["format"] == 1 and delivery_spec.remainder == "drop" and saved.position > 0 and left < size
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
    return delivery_spec, saved


def _count_steps(saved: State, rows: int, remainder: Remainder) -> State:
    """Counts the steps of a state that an older raylance wrote, as if all of them had its global batch size."""
    size = saved.global_batch_size
    if size is None:
        return dataclasses.replace(saved, step=0, global_step=0)
    step = -(-saved.position // size)
    before = saved.epoch * (rows // size if remainder == "drop" else -(-rows // size))
    return dataclasses.replace(saved, step=step, global_step=before + step)
