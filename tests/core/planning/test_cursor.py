"""The cursor: what moves it, and when a plan is made again."""

import dataclasses
import pickle

import pytest

from raylance.orders.shuffles import WindowShuffle
from raylance.planning import cursor as module
from raylance.planning.cursor import Cursor
from tests.helpers.states import DELIVERY, ORIGIN

SPEC = dataclasses.replace(DELIVERY, order=WindowShuffle(), remainder="ragged")
SIZES = {"size": 30, "dp_size": 2, "reader_bytes": 1 << 20}


def test_a_plan_is_made_once_until_something_of_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = module.make_plan
    monkeypatch.setattr(module, "make_plan", lambda *spec, **sizes: made.append(sizes) or real(*spec, **sizes))
    cursor = Cursor(ORIGIN, SPEC)
    plan = cursor.plan(**SIZES)
    cursor.follow(plan)
    for position in (30, 60, 90):
        assert cursor.plan(**SIZES) is plan
        cursor.advance(position, is_last=False)
    cursor.advance(100, is_last=True)
    assert cursor.plan(**SIZES) is plan
    assert len(made) == 1
    smaller = cursor.plan(**SIZES | {"size": 20})
    assert smaller.order == plan.order, "the first pass resolves the order for good"
    assert len(made) == 2
    assert len(pickle.dumps(cursor)) < len(pickle.dumps((cursor, plan))), "a plan stays in its process"


def test_what_moves_a_cursor_but_no_batch_is_counted() -> None:
    cursor = Cursor(ORIGIN, SPEC)
    assert not cursor.has_moved
    cursor.advance(30, is_last=False)
    assert (cursor.epoch, cursor.position, cursor.step, cursor.global_step) == (0, 30, 1, 1)
    state = cursor.state(30, 2)
    cursor.advance(100, is_last=True)
    assert (cursor.epoch, cursor.position, cursor.step, cursor.global_step) == (1, 0, 0, 2)
    assert cursor.has_moved
    holder = cursor.hold()
    cursor.advance(30, is_last=False)
    assert cursor.holder is holder, "a batch leaves the position to its pass"
    cursor.load(state.to_dict())
    assert cursor.holder is None
    assert (cursor.epoch, cursor.position, cursor.step, cursor.global_step) == (0, 30, 1, 1)
    cursor.hold()
    assert cursor.set_epoch(0) == 30, "is given up"
    assert cursor.holder is None
    assert (cursor.set_epoch(4), cursor.set_epoch(4)) == (0, 0)
    assert (cursor.epoch, cursor.position, cursor.step, cursor.global_step) == (4, 0, 0, 1)
