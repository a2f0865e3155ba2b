"""Owns the names of the orders, as arguments and checkpoints spell them; never computes one."""

from raylance.errors import ConfigError
from raylance.orders.order import Order
from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle

ORDERS: dict[str, type[Order]] = {kind.name: kind for kind in (WindowShuffle, ShardShuffle, Sequential, RowShuffle)}


def make_order(order: str | Order) -> Order:
    """Returns the order itself, or the named one with its defaults; refuses one that lacks what every order has."""
    if isinstance(order, str) and order in ORDERS:
        return ORDERS[order]()
    if not isinstance(order, Order):
        known = ", ".join(repr(name) for name in ORDERS)
        raise ConfigError(f"order={order!r} is unknown: use one of {known}, or an order such as WindowShuffle(…).")
    kind = type(order)
    if not isinstance(getattr(kind, "name", None), str):
        raise ConfigError(f"order={order!r}: checkpoints need its name. Give {kind.__name__} a class attribute name.")
    if kind.rows_of is Order.rows_of and kind.resolve is Order.resolve:
        raise ConfigError(
            f"order={order!r} does not say which row is at a position. Give {kind.__name__} a method "
            "rows_of(epoch, positions); see raylance.Order."
        )
    return order
