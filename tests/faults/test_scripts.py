"""Owns the check of the checker of scripts: rows that are lost, come twice, are altered or foreign are counted."""

import dataclasses
from typing import Any

import pytest

from tests.faults.scripts.play import count_rows
from tests.faults.scripts.schedule import draw

IDS = {row: 10 + row for row in range(8)}
SCRIPT = dataclasses.replace(draw(0, 0), epochs=1, processes=2, is_filtered=True)
SELECTED = [row for row, number in IDS.items() if number % 3]


def step(*rows: int, wrong: int = 0) -> dict[str, Any]:
    return {"what": "step", "number": 0, "offsets": list(rows), "ids": [IDS[row] for row in rows], "wrong": wrong}


PASSED = {"what": "passed", "number": 0}


@pytest.mark.parametrize(
    ("first", "second", "wrong", "whole"),
    [
        ([step(*SELECTED[:2]), PASSED], [step(*SELECTED[2:]), PASSED], {}, 1),
        ([step(*SELECTED[:2]), PASSED], [step(*SELECTED[3:]), PASSED], {"lost": 1}, 1),
        ([step(*SELECTED[:2])], [step(*SELECTED[3:]), PASSED], {}, 0),
        ([step(*SELECTED), PASSED], [step(SELECTED[0]), PASSED], {"twice": 1}, 1),
        ([step(*SELECTED, wrong=2), PASSED], [PASSED], {"altered": 2}, 1),
        ([step(*SELECTED) | {"ids": SELECTED}, PASSED], [PASSED], {"altered": len(SELECTED)}, 1),
        ([step(*SELECTED, 2), PASSED], [PASSED], {"of no selection": 1}, 1),
    ],
)
def test_wrong_rows_are_counted(first: Any, second: Any, wrong: dict[str, int], whole: int) -> None:
    counts = {"lost": 0, "twice": 0, "altered": 0, "of no selection": 0} | wrong
    assert count_rows(SCRIPT, IDS, [first, second]) == (counts, whole)


def test_a_script_is_drawn_again() -> None:
    assert [draw(3, index) for index in range(50)] == [draw(3, index) for index in range(50)]
    assert draw(3, 0) != draw(4, 0)
