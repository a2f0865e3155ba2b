"""Owns what a loader writes into a checkpoint, and how it takes one over; never touches files or tensors."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from raylance.errors import StateError
from raylance.planning.state import State, check_state, describe, pack_shards, parse_state
from raylance.settings import Feed, Spec

logger = logging.getLogger(__name__)


def make_state(
    feed: Feed, spec: Spec, *, epoch: int, position: int, global_batch_size: int | None, world_size: int
) -> State:
    """What a checkpoint says of a loader at a position.

    Args:
        feed: What is read.
        spec: What is delivered.
        epoch: Epoch.
        position: Consumed position.
        global_batch_size: Rows of a step, if there was one.
        world_size: Ranks.
    """
    order, shards = spec.order, {}
    if order.is_resolved:
        shards = pack_shards(order.completed_shards(position, spec.rows, spec.seed, epoch))
    return State(
        uri=feed.source.uri,
        branch=feed.source.branch,
        version=feed.source.version,
        identity=feed.source.identity,
        filter=spec.filter,
        split=spec.split,
        rows=spec.rows,
        fingerprint=spec.fingerprint,
        seed=spec.seed,
        columns=list(feed.delivers),
        decode=[describe(decoder) for decoder in feed.decoding.decoders] if feed.decoding else [],
        transform=describe(feed.decoding.transform) if feed.decoding else None,
        order=order.params(),
        epoch=epoch,
        position=position,
        completed_shards=shards,
        components=order.standings(position),
        global_batch_size=global_batch_size,
        world_size=world_size,
    )


def load_state(state: Mapping[str, Any], current: State, spec: Spec) -> tuple[Spec, State]:
    """Checks a saved state against a loader's own, and takes it over.

    Args:
        state: What `state_dict` returned.
        current: The state of the loader that takes it over.
        spec: What that loader delivers.

    Returns:
        What to deliver from now on (what was left to "auto" is taken from the state: another batch size must not change
        the order), and the state to go on at. The end of an epoch is the start of the next one.

    Raises:
        StateError: If the state is damaged, newer, or belongs to other rows or another order.
    """
    saved = parse_state(state)
    check_state(saved, current)
    order = spec.order.adopt(saved.order)
    rows = order.epoch_rows(saved.rows)
    if saved.position > rows:
        raise StateError(
            f"the state is damaged: position {saved.position} of an epoch of {rows}. Use an earlier checkpoint."
        )
    ended = saved.position == rows
    left = rows - saved.position
    # Format 1 moved on to the next epoch only when it was asked for a batch behind the last one.
    if state["format"] == 1 and spec.remainder == "drop" and saved.position and left < (saved.global_batch_size or 0):
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
    return dataclasses.replace(spec, order=order), saved
