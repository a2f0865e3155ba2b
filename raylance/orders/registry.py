"""Owns the names of the orders, as arguments and checkpoints spell them; never computes one."""

from raylance.errors import ConfigError
from raylance.orders.order import Order, RowShuffle
from raylance.orders.shuffles import Sequential, ShardShuffle, WindowShuffle

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
