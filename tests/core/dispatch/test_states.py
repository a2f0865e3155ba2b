"""The table of legal states: each is reached from a first one, and ends; what it does not name cannot happen."""

import pytest

from raylance.dispatch.states import CHANGES, ChunkState, HelperState, ItemState, PassState, change
from raylance.errors import RaylanceError

FIRST_AND_LAST = [
    (ItemState.WAITING, {ItemState.GONE, ItemState.FAILED}),
    (ChunkState.PLANNED, {ChunkState.DROPPED}),
    (HelperState.WANTED, {HelperState.GONE}),
    (PassState.RUNNING, {PassState.CLOSED}),
]


@pytest.mark.parametrize(("first", "last"), FIRST_AND_LAST)
def test_each_state_is_reached_and_ends(first: object, last: set) -> None:
    kind = type(first)
    reached, ends = {first}, set(last)
    for _ in kind:
        reached |= {after for before in reached for after in CHANGES[before]}
        ends |= {before for before in kind if CHANGES[before] & ends}
    assert reached == ends == {*kind}
    assert {before for before in kind if not CHANGES[before]} == last


def test_only_what_the_table_names_can_happen() -> None:
    assert change(ItemState.WAITING, ItemState.GATHERING) is ItemState.GATHERING
    with pytest.raises(RaylanceError, match="DONE"):
        change(ItemState.WAITING, ItemState.DONE)
