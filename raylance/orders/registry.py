"""The names of the orders in arguments and checkpoints."""

import difflib
from typing import Any

from raylance.errors import ConfigError
from raylance.orders.buckets import Buckets
from raylance.orders.order import Order
from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle

ORDERS: dict[str, type[Order]] = {
    kind.name: kind for kind in (WindowShuffle, ShardShuffle, Sequential, RowShuffle, Buckets)
}


def make_order(order: Any) -> Order:
    """Returns `order` itself, or the order of that name with its default settings. Raises ConfigError if no order has
    that name, or if `order` has no name or no `rows_of`.
    """
    if isinstance(order, str) and order in ORDERS:
        return ORDERS[order]()
    if not isinstance(order, Order):
        known = ", ".join(repr(name) for name in ORDERS)
        fix = f"Use one of {known}, or an object such as raylance.WindowShuffle()."
        if isinstance(order, str) and (close := difflib.get_close_matches(order, ORDERS, n=1)):
            fix = f"Did you mean {close[0]!r}?"
        elif isinstance(order, type) and issubclass(order, Order):
            fix = f"That is a class: give an object of it, {order.__name__}()."
        raise ConfigError(f"order={order!r} is unknown. No dataset was opened. {fix}")
    kind = type(order)
    if not isinstance(getattr(kind, "name", None), str):
        raise ConfigError(
            f"order={order!r} has no name. Checkpoints could not record it. Give {kind.__name__} a class attribute "
            "name."
        )
    if kind.rows_of is Order.rows_of and kind.resolve is Order.resolve:
        raise ConfigError(
            f"order={order!r} has no rows_of(). The row at a position is not known. Give {kind.__name__} a method "
            "rows_of(epoch, positions); see raylance.Order."
        )
    return order
