"""Owns whether the ranks of a process group agree on who gets which rows; never says who should.

Each rank leaves what it was given in the store of the group. The first one that called `reshard` reads them all and
leaves the outcome for the others: some requests of each rank, and no collective operation, in which all would hang if
one of them left it out.
"""

import json
import logging
import time
from typing import Any

import torch.distributed

from raylance.errors import ConfigError
from raylance.planning.shard_context import ShardContext, check_pairs, name_ranks

logger = logging.getLogger(__name__)

_PATIENCE_S = 600.0  # that a rank may begin its first pass after another; torch waits as long for collectives of NCCL
_SILENT_S = 10.0  # of waiting, before it is logged
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # between two looks into the store


def store_of(world_size: int) -> Any:
    """The store of torch.distributed's default group, where it runs over the ranks of a run; else None."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != world_size:
        return None
    group: Any = dist.group.WORLD
    return group.get_group_store()


def check_agreement(
    store: Any, context: ShardContext, name: str, *, has_called: bool, patience_s: float = _PATIENCE_S
) -> None:
    """Compares what the ranks were given; called by each of them before a loader's first pass. Ranks that did not call
    `reshard` leave what they have and do not wait.

    Loaders that Ray Train assigned are compared by name. Of those that were made by hand, which may be used on some
    ranks alone, the ranks' first passes after `reshard` are compared in their order.

    Args:
        store: Of torch.distributed, shared by the ranks.
        context: What this rank was given.
        name: The dataset's name in the run.
        has_called: Whether `reshard` was called on this rank.
        patience_s: Seconds to wait for the others.

    Raises:
        ConfigError: If the ranks disagree, or some of them do not come; it names them.
    """
    try:
        outcome = _exchange(store, context, name, has_called, patience_s)
    except RuntimeError as error:  # of a store that cannot do it, such as that of torch's backend "fake"
        level = logging.WARNING if has_called else logging.DEBUG
        logger.log(level, "what the ranks were given for %r is not compared: %s", name, str(error).split("\n")[0])
        return
    if outcome:
        raise ConfigError(outcome)


def _exchange(store: Any, context: ShardContext, name: str, has_called: bool, patience_s: float) -> str:
    """Leaves what this rank was given; returns what does not fit together, or "" where it did not call or all fits."""
    where = f"raylance/reshard/{name}/assigned"
    if context.assignment is None:
        number = store.add(f"raylance/reshard/{name}/by hand/count/{context.rank}", 1)
        where = f"raylance/reshard/{name}/by hand/{number}"
    store.set(f"{where}/{context.rank}", json.dumps([context.dp_rank, context.dp_size, has_called]))
    if not has_called:
        return ""
    outcome = f"{where}/outcome"
    keys = [f"{where}/{rank}" for rank in range(context.world_size)]
    if store.add(f"{where}/comparing", 1) == 1:
        have_come = _wait(store, keys, name, patience_s)
        absent = [] if have_come else [rank for rank, key in enumerate(keys) if not store.check([key])]
        found = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if rank not in absent}
        store.set(outcome, json.dumps(_compare(found, absent, name, patience_s)))
    elif not _wait(store, [outcome], name, patience_s + _SILENT_S):
        return (
            f"the rank that compares what all ranks were given for {name!r} left no outcome in {patience_s:g} s: rows "
            "might come twice or never. Look at the log of the rank that ended first."
        )
    return str(json.loads(store.get(outcome)))


def _compare(found: dict[int, list[Any]], absent: list[int], name: str, patience_s: float) -> str:
    """What does not fit together in what the ranks left; "" if all does."""
    world_size = len(found) + len(absent)
    if absent:
        return (
            f"{name_ranks(absent)} of {world_size} did not begin a pass over {name!r} after reshard() in "
            f"{patience_s:g} s, and the others did: rows might come twice or never. Call reshard() on every rank, "
            "equally often, before the first batch."
        )
    without = [rank for rank, (*_, has_called) in found.items() if not has_called]
    if without:
        return (
            f"{name_ranks(without)} of {world_size} did not call reshard() for {name!r}, and the others did: some rows "
            "would come twice, and others never. Call it on every rank, before the first batch."
        )
    try:
        check_pairs([(found[rank][0], found[rank][1]) for rank in range(world_size)], f"reshard() of {name!r}")
    except ConfigError as error:
        return str(error)
    return ""


def _wait(store: Any, keys: list[str], name: str, patience_s: float) -> bool:
    """Waits until the store has all keys; returns whether it has."""
    begin, pause_s, is_logged = time.monotonic(), _FIRST_PAUSE_S, False
    while not store.check(keys):
        waited_s = time.monotonic() - begin
        if waited_s > patience_s:
            return False
        if waited_s > _SILENT_S and not is_logged:
            is_logged = True
            logger.warning("reshard() of %r: waits for all ranks to begin their first pass", name)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True
