"""The list of complete shards in a checkpoint.

An epoch puts its shards in a sequence, in which all shards of a lane are next to each other. A list holds ranges of
places in this sequence: few ranges, however many rows there are. Order, seed and epoch determine the ID of the shard at
each place. If there is no such sequence, or too many ranges, the list only says that it is made on request.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from raylance.errors import StateError
from raylance.orders.order import Epoch
from raylance.orders.permutation import BoolArray

NO_SHARDS: dict[str, Any] = {"shards": 0, "complete": 0, "places": []}
"""The list for an order that repeats rows, because this order has no shards."""

_MOST_RANGES = 1024  # 46 kB of JSON
_WHY = "shards complete in no sequence, most of them at the end of an epoch, or in more places than a checkpoint holds"


def list_shards(epoch: Epoch, position: int) -> dict[str, Any]:
    """Lists the shards whose rows all lie in [0, position), some of them perhaps missing: {"shards": n, "complete": k,
    "places": [[first, end], …]}, half-open and ascending; or {"shards": n, "on_request": why} if only
    `RankLoader.completed_shards` can find them.
    """
    shards = epoch.order.shard_count
    if not shards:
        return NO_SHARDS
    places = epoch.completed_places(position)
    if places is None or len(places) > _MOST_RANGES:
        return {"shards": shards, "on_request": _WHY}
    return {"shards": shards, "complete": int((places[:, 1] - places[:, 0]).sum()), "places": places.tolist()}


def read_shards(listed: Mapping[str, Any], epoch: Epoch) -> BoolArray | None:
    """Returns for each shard ID whether a list of `list_shards` names it, bool, shape (shards,); None if the list is
    empty or "on_request". Raises StateError if the list is damaged.
    """
    if "on_request" in listed or not listed:
        return None
    try:
        shards = listed["shards"]
        if shards != epoch.order.shard_count:
            raise ValueError(f"{shards} shards, the order has {epoch.order.shard_count}")
        done = np.zeros(shards, dtype=np.bool_)
        for first, end in listed["places"]:
            done[epoch.shard_ids(np.arange(first, end, dtype=np.int64))] = True
        if done.sum() != listed["complete"]:
            raise ValueError(f"{listed['complete']} complete shards, the list names {done.sum()}")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise StateError(
            f"the list of complete shards is damaged ({error}). The rest of the state may be damaged, too. Use an "
            "earlier checkpoint."
        ) from error
    return done
