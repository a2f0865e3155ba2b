"""The orders that properties are tried on: any kind, of any sizes, resolved."""

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from raylance.orders.buckets import Buckets
from raylance.orders.changed import Change, Changed
from raylance.orders.mixture import Component, MixOrder
from raylance.orders.order import Facts, Order, Resolved, join_tables
from raylance.orders.registry import ORDERS
from raylance.orders.sampling import ClassBalanced, Weighted
from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle
from raylance.testing import SampleRows

SHUFFLES = tuple(ORDERS.values())
KINDS = (*SHUFFLES, Weighted, ClassBalanced, MixOrder)


def sample(n: int, several: bool = False) -> SampleRows:
    """A selection of n rows in uneven fragments, with a weight, a class and a cost of each row, or `several` costs."""
    rows = np.arange(n)
    classes = np.array([f"class {row * row % 5}" for row in rows])
    costs = rows * rows % 97 % 23 + 40 * (rows % 31 == 7)
    columns = {"weight": rows % 7 + (n == 1), "class": classes}
    patches = rows * 7 % 19 * (rows % 3 > 0) + 90 * (rows % 23 == 5)  # a third of the rows has none
    by_name = {"cost.tokens": costs, "cost.patches": patches} if several else {"cost": costs}
    return SampleRows(count=n, columns=columns | by_name)


def resolve(order: Order, n: int, seed: int = 3, several: bool = False, **facts: float) -> Resolved:
    """An order of n rows, looked up in the sample."""
    selected = sample(n, several)
    bound, tables = order.bind(selected)
    return bound.resolve(Facts(rows=n, seed=seed, tables=join_tables(tables, selected.tables), **facts))  # type: ignore[arg-type]


def every_row(order: Resolved, epoch: int = 0) -> list[int]:
    return order.epoch(epoch).rows(np.arange(order.epoch_rows)).tolist()


MIXED: tuple[Order, ...] = (
    RowShuffle(shard_rows=3),
    WindowShuffle(shard_rows=3, window_shards=2, lanes=2),
    WindowShuffle(shard_rows="fragment", window_shards=2, lanes=3),
    ShardShuffle(shard_rows=4, window_shards=1, lanes=2),
    Sequential(shard_rows=5),
)


def grown(order: Order, rows: int, place: tuple[int, int], before: int, seed: int) -> Changed:
    """An order that has `rows` from a place on, and had fewer before."""
    fields = {"version": 1, "identity": "i", "filter": None, "split": None, "fingerprint": "f"}
    fields |= {"rows": before, "seed": seed, "order": order.params()}
    epoch, position = place
    change = Change(epoch=epoch, position=position, left=rows - position, takes_new=True, keeps=True, before=fields)
    return Changed(of=order, changes=(change,), shard_rows=order.shard_rows)


def changed_mixture(rows: int, epoch: int) -> MixOrder:
    """A mixture of `rows` positions and as many rows, of which one dataset has grown a third into an epoch, and whose
    weights have changed in the second third.
    """
    order, (few, many) = RowShuffle(shard_rows=2), (rows // 3, 2 * rows // 3)
    mixed = mix_of(rows, (order, few, 2), (MIXED[1], rows - many, 1), spread="tree")
    part, place = mixed.components[0], mixed.course.epoch(epoch).own_place(0, few)
    part = dataclasses.replace(part, rows=many, order=grown(order, many, place, few, part.seed))
    return mixed.with_rows(epoch, few, {0: part}).moved(epoch, many, {"a": 1, "b": 3}, "loss of b")


def mix_of(stop: str | int, *parts: tuple[Order, int, int], **settings: Any) -> MixOrder:
    """A mixture of orders, each with its rows and its quota; they are called a, b, …, and have the seeds 1, 2, …"""
    components = [
        Component(name=chr(ord("a") + index), order=order, seed=index + 1, rows=rows, quota=quota)
        for index, (order, rows, quota) in enumerate(parts)
    ]
    return MixOrder(components=tuple(components), stop=stop, **settings)


@st.composite
def mixtures(draw: st.DrawFn, draws: bool = True) -> Resolved:
    """A resolved mixture of one to four small datasets; `draws` has some drawn with replacement."""
    components, several = [], draw(st.booleans())
    for index in range(draw(st.integers(1, 4))):
        rows, quota = draw(st.integers(1, 40)), draw(st.integers(1, 7))
        drawn = Weighted(weights="weight", rows_per_epoch=draw(st.integers(1, 60)), shard_rows=1)
        selected = sample(rows, several)
        order, tables = draw(st.sampled_from([*MIXED, drawn] if draws else MIXED)).bind(selected)
        facts = {"rows": rows, "quota": quota, "tables": tables, "costs": selected.tables}
        part = Component(name=f"part {index}", order=order, seed=index, **facts)
        components.append(part)
    stop = draw(st.sampled_from(["first_exhausted", "all_exhausted", 150]))
    settings = {"chunk_positions": draw(st.integers(1, 100)), "spread": draw(st.sampled_from(["tree", "pattern"]))}
    order = MixOrder(components=tuple(components), stop=stop, **settings)
    return order.resolve(Facts(rows=sum(part.rows for part in components), seed=3))


@st.composite
def cases(draw: st.DrawFn, kinds: tuple[type[Order], ...] = KINDS) -> Resolved:
    """Any order, resolved, of some selected rows."""
    kind, n, several = draw(st.sampled_from(kinds)), draw(st.integers(1, 400)), draw(st.booleans())
    if kind is MixOrder:
        return draw(mixtures())
    shard_rows = draw(st.integers(1, 40))
    if kind is Weighted:
        order: Order = Weighted(weights="weight", rows_per_epoch=draw(st.integers(1, 500)), shard_rows=1)
    elif kind is ClassBalanced:
        batch = draw(st.integers(1, 50))
        order = ClassBalanced(column="class", batch_rows=batch, rows_per_epoch=draw(st.integers(1, 500)), shard_rows=1)
        if draw(st.booleans()):
            order = dataclasses.replace(order, classes_per_batch=1)
    elif "lanes" in kind.__dataclass_fields__:
        sizes = {"window_shards": draw(st.integers(1, 5)), "lanes": draw(st.integers(1, 9))}
        if kind is Buckets:
            by_cost = {"bucket_rows": 0, "bucket_cost": draw(st.integers(1, 2000))}
            sizes |= draw(st.sampled_from([{"bucket_rows": draw(st.integers(1, 60))}, by_cost]))
            sizes["bucket_steps"] = draw(st.integers(1, 3))
            sizes["by"] = draw(st.sampled_from(["", "patches"])) if several else ""
        order = kind(shard_rows=draw(st.sampled_from([shard_rows, "fragment"])), **sizes)
    else:
        order = kind(shard_rows=shard_rows)
    return resolve(order, n, several=several)
