"""Owns the names of the orders, as arguments and checkpoints spell them; never computes one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from raylance.errors import ConfigError
from raylance.lanes import Sequential, ShardShuffle, WindowShuffle
from raylance.order import Order, RowShuffle

ORDERS: dict[str, type[Order]] = {kind.name: kind for kind in (WindowShuffle, ShardShuffle, Sequential, RowShuffle)}


def make_order(order: str | Order) -> Order:
    """Returns the order itself, or the named one with its defaults.

    Raises:
        ConfigError: If the name is none of "window", "shard", "sequential", "row".
    """
    if isinstance(order, Order):
        return order
    if order not in ORDERS:
        known = ", ".join(repr(name) for name in ORDERS)
        raise ConfigError(f"order={order!r} is unknown: use one of {known}, or an order such as WindowShuffle(…).")
    return ORDERS[order]()


def order_from_params(params: Mapping[str, Any]) -> Order:
    """Inverts `Order.params`.

    Raises:
        ConfigError: If the name or a field is unknown.
    """
    fields = dict(params)
    kind = ORDERS.get(str(fields.pop("name", None)))
    if kind is None or set(fields) - {field.name for field in dataclasses.fields(kind)}:
        raise ConfigError(f"{dict(params)!r} describes no order that this raylance knows: {sorted(ORDERS)}.")
    return kind(**fields)
