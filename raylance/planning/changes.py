"""What a run delivers after its rows or its order have changed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from raylance.errors import StateError
from raylance.orders.changed import Carry, Change, Changed, carry_kept, left_rows, table_of, unchanged
from raylance.orders.order import Order
from raylance.orders.permutation import Int64Array
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.state import State, Versions, damaged


def waits(order: Order, saved: State, when: str) -> bool:
    """Whether new rows were to come in the next epoch, and are to come now."""
    last = order.changes[-1] if isinstance(order, Changed) else None
    return last is not None and last.epoch == saved.epoch and not last.takes_new and when == "now"


def change_at(spec: DeliverySpec, saved: State, versions: Versions, first: int) -> DeliverySpec:
    """Returns the rows to deliver if other ones than those of a state, or another order, come from there on. Rows may
    be asked for from the epoch `first` on.

    Raises:
        StateError: If it is not known which rows are left.
    """
    own, known = unchanged(spec.order), spec.order.changes if isinstance(spec.order, Changed) else ()
    last = Change(
        epoch=saved.epoch,
        position=saved.position,
        left=spec.rows,
        takes_new=not saved.position or spec.on_new_version == "now",
        keeps=versions.has_grown_from(saved.before),
        before=saved.before,
    )
    changed = Changed(of=own, changes=(*known, last), shard_rows=own.shard_rows)
    return with_left_rows(spec, changed, first, versions, known=len(known))


def with_left_rows(
    spec: DeliverySpec, order: Changed, first: int, versions: Versions, known: int | None = None
) -> DeliverySpec:
    """Returns the rows to deliver by an order that has changed, with the tables of what is left of epochs from `first`
    on. A state has the first `known` changes; None for all.

    Raises:
        StateError: If it is not known which rows are left, or if a state says otherwise.
    """
    resolved, carry, tables = order.resolve(spec.facts), _carrier(order.changes, versions), dict[str, Any]()
    for epoch in sorted({each.epoch for each in order.changes if each.epoch >= first}):
        tables |= left_rows(resolved, epoch, carry)
    counted = tuple(
        dataclasses.replace(each, left=len(tables.get(table_of(number), range(each.left))))
        for number, each in enumerate(order.changes)
    )
    if counted[:known] != order.changes[:known]:
        found = [f"{each.left} of {one.left}" for each, one in zip(counted, order.changes, strict=True)]
        raise damaged(f"rows that are left at its changes: {', '.join(found)}")
    order = dataclasses.replace(order, changes=counted, asked_from=first)
    return dataclasses.replace(spec, order=order, tables=tables)


def _carrier(changes: Sequence[Change], versions: Versions) -> Carry:
    """Returns a function that carries rows over changes; see `Carry`. Rows are named by their offsets."""
    if all(each.keeps for each in changes):
        return carry_kept

    def carry(change: int, names: Int64Array, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        before, after = changes[change].before, changes[change + 1].before if change + 1 < len(changes) else None
        found = versions.carry(before, after, names, rows)
        if found is None:
            later = "the version that was opened" if after is None else f"version {after['version']}"
            raise StateError(
                f"version {before['version']} of the dataset and {later} cannot be compared row by row, so it is not "
                f"known which rows are left of epoch {changes[change].epoch}. Nothing was loaded. Either a clean-up "
                "has removed versions, which raylance.runs.pin prevents, or rows were moved or written anew, such as "
                "by a compaction of a dataset without stable row IDs. Take the version of the checkpoint to the end of "
                "the epoch, or begin an epoch by set_epoch()."
            )
        return found

    return carry
