"""Random histories of a run over a mixture: moves, restarts with other arguments, worlds, steps and positions."""

import dataclasses
import json
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raylance.orders.mixture import MixOrder
from raylance.orders.shuffles import RowShuffle, WindowShuffle
from raylance.planning.cursor import Cursor
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.plan import Plan
from tests.helpers.orders import mix_of

ROWS = 23, 14, 9
NAMES = "abc"
Rule = tuple[str | int, int]
"""When an epoch ends, and the rows of a turn."""
Handed = dict[tuple[int, int], int]
"""The row at each epoch and position that counts in the end."""


def order_of(weights: list[int], rule: Rule) -> MixOrder:
    orders = WindowShuffle(shard_rows=3, window_shards=2, lanes=2), RowShuffle(shard_rows=2), RowShuffle(shard_rows=1)
    parts = zip(orders, ROWS, weights, strict=False)
    return mix_of(rule[0], *parts, chunk_positions=12, spread="tree", turn_rows=rule[1])


def cursor_of(weights: list[int], rule: Rule) -> Cursor:
    order, names = order_of(weights, rule), NAMES[: len(weights)]
    fields = {name: dict.fromkeys(names) for name in ("branch", "filter", "split")}
    of_each = {name: {each: f"{name} of {each}" for each in names} for name in ("uri", "identity", "version")}
    same: dict[str, Any] = dict.fromkeys(("columns", "decode", "transform", "codecs"))
    spec = DeliverySpec(
        uri=of_each["uri"],
        rows=sum(ROWS[: len(weights)]),
        row_bytes=8.0,
        fingerprint=str(names),
        order=order,
        seed=5,
        remainder="ragged",
        empty_batches=True,
        masks_bad_rows=False,
    )
    return Cursor(fields | of_each | same, spec)


@st.composite
def arguments(draw: st.DrawFn, datasets: int) -> tuple[list[int], Rule]:
    weights = draw(st.lists(st.integers(0, 4), min_size=datasets, max_size=datasets).filter(any))
    stop: str | int = draw(st.sampled_from(["first_exhausted", "all_exhausted", 31]))
    return weights, (stop, draw(st.sampled_from([1, 1, 4, 7])))


def step_rows(plan: Plan, epoch: int, position: int) -> list[int]:
    """The rows of a step, taken by all ranks; each is in the slice of one rank."""
    positions = [
        plan.positions(epoch, position, *plan.rank_slice(epoch, position, rank)) for rank in range(plan.dp_size)
    ]
    taken = np.concatenate(positions)
    assert sorted(taken.tolist()) == list(range(position, plan.after(epoch, position)))
    return plan.select(epoch, np.sort(taken)).tolist()


@given(data=st.data())
def test_a_history_is_what_was_handed_out_at_each_position(data: st.DataObject) -> None:
    """What was handed out stays in its place, whatever changes later; and the last state alone tells all of it."""
    count = data.draw(st.integers(1, 3))
    weights, rule = data.draw(arguments(count))
    cursor, handed, states = cursor_of(weights, rule), Handed(), list[tuple[dict[str, Any], Handed]]()
    for _ in range(data.draw(st.integers(1, 8))):
        size, world = data.draw(st.integers(1, 13)), data.draw(st.integers(1, 3))
        for _ in range(data.draw(st.integers(0, 6))):
            plan = cursor.plan(size=size, dp_size=world, reader_bytes=1 << 20)
            cursor.follow(plan)
            epoch, position = cursor.epoch, cursor.position
            if plan.is_over(epoch, position):
                cursor.end_epoch()
                continue
            after = plan.after(epoch, position)
            for at, row in zip(range(position, after), step_rows(plan, epoch, position), strict=True):
                handed[epoch, at] = row
            cursor.advance(after, is_last=plan.is_over(epoch, after))
        what = data.draw(st.sampled_from(["move", "restart", "roll back", "go on"]))
        if what == "move":
            wanted = data.draw(arguments(count))[0]
            cursor.reweight(dict(zip(NAMES, wanted, strict=False)), data.draw(st.sampled_from(["", "loss"])))
        if what in ("restart", "roll back"):
            states.append((json.loads(json.dumps(cursor.state(size, world).to_dict())), dict(handed)))
            state, handed = states[-1] if what == "restart" else data.draw(st.sampled_from(states))
            handed = dict(handed)
            if data.draw(st.booleans()):
                count = max(count, len(state["uri"]))
                count = data.draw(st.integers(count, 3))
                weights, rule = data.draw(arguments(count))
            cursor = cursor_of(weights + [0] * (count - len(weights)), rule)
            cursor.load(state)
    last = cursor_of(weights + [0] * (count - len(weights)), rule)
    last.load(json.loads(json.dumps(cursor.state(1, 1).to_dict())))
    order = last.delivery_spec.resolved_order
    ends = [order.epoch(epoch).epoch_rows for epoch in range(cursor.epoch)]
    places = [(epoch, at) for epoch, end in enumerate(ends) for at in range(end)]
    places += [(cursor.epoch, at) for at in range(cursor.position)]
    assert sorted(handed) == places
    for epoch in range(cursor.epoch + 1):
        mine = [(at, row) for (number, at), row in handed.items() if number == epoch]
        positions = np.array([at for at, _ in mine], dtype=np.int64)
        assert order.epoch(epoch).rows(positions).tolist() == [row for _, row in mine]
        # A dataset begins again only when all its rows came, so no row is ahead of another one.
        every = Counter(row for _, row in mine)
        base = 0
        for rows in ROWS[:count]:
            own = [every[base + row] for row in range(rows)]
            assert max(own) - min(own) <= 1
            base += rows


def test_a_state_of_no_change_is_that_of_before() -> None:
    """So that a run that never changes has the states, and the checksums, of earlier versions."""
    cursor = cursor_of([2, 1], ("first_exhausted", 1))
    state = cursor.state(8, 1)
    assert {*state.order} == {"name", "stop", "chunk_positions", "components", "spread"}
    assert dataclasses.asdict(state)["order"] == state.order
