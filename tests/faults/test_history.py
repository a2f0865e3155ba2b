"""The fault suite finds what it looks for: rows lost, twice, altered, steps of another batch; a schedule is
the same each time. Needs no Ray.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults import history, workloads
from tests.faults.schedule import KINDS, PHASES, draw

BATCH = workloads.BATCH
WANTED = [[[(16 * step + row, 7 * row) for row in range(BATCH)] for step in range(4)] for _ in range(2)]
Steps = list[tuple[int, int]]
ALL: Steps = [(epoch, step) for epoch in range(2) for step in range(4)]
Change = Callable[[list[dict[str, Any]]], None]


def write(folder: Path, start: int, begins: tuple[int, int], steps: Steps, change: Change = lambda _: None) -> None:
    """Rank 1 of a start writes before rank 0."""
    for rank in range(2):
        at = [begins[0], begins[1] * BATCH]
        events: list[dict[str, Any]] = [
            {"what": "start", "start": f"group {start}", "rank": rank, "world": 2, "pid": 0},
            {"what": "restored", "at": at, "saved": at},
            *[
                {"what": "step", "epoch": epoch, "step": step, "group": rank, "rows": list(part(epoch, step, rank))}
                for epoch, step in steps
            ],
        ]
        if rank:
            change(events)
        lines = [json.dumps({"at_s": 100.0 * start + 0.1 * place - rank / 100, **e}) for place, e in enumerate(events)]
        (folder / f"rank-{start}-{rank}.jsonl").write_text("\n".join(lines))


def part(epoch: int, step: int, rank: int) -> list[tuple[int, int]]:
    return WANTED[epoch][step][8 * rank : 8 * rank + 8]


def found(folder: Path) -> tuple[dict[str, int], list[str]]:
    problems: list[str] = []
    starts = history.starts_of(history.read(folder), problems)
    line = history.committed(starts, BATCH, problems)
    return {name: count for name, count in history.compare(line, WANTED).items() if count}, problems


def test_a_run_without_a_fault_has_no_fault(tmp_path: Path) -> None:
    write(tmp_path, 1, (0, 0), ALL)
    assert found(tmp_path) == ({}, [])


def test_steps_that_were_rolled_back_do_not_count(tmp_path: Path) -> None:
    """The first start came to step 2 of epoch 1, and rank 1 one step less; the second continues at step 1."""
    write(tmp_path, 1, (0, 0), ALL[:7], lambda events: events.pop())
    write(tmp_path, 2, (1, 1), ALL[5:])
    assert found(tmp_path) == ({}, [])


def test_a_start_that_was_killed_as_one_rank_had_written_is_a_start_of_its_own(tmp_path: Path) -> None:
    """Starts were told apart by their ranks: rank 1 of the second start counted as one of the first."""
    write(tmp_path, 1, (0, 0), [])
    (tmp_path / "rank-1-1.jsonl").unlink()
    write(tmp_path, 2, (0, 0), ALL)
    assert found(tmp_path) == ({}, [])


def change_row(events: list[dict[str, Any]]) -> None:
    events[4]["rows"][3] = (events[4]["rows"][3][0], 1)


def swap_rows(events: list[dict[str, Any]]) -> None:
    rows = events[4]["rows"]
    rows[0], rows[1] = rows[1], rows[0]


@pytest.mark.parametrize(
    ("begins", "steps", "change", "counts", "says"),
    [
        ((1, 2), ALL[6:], None, {"lost": 16, "other batches": 1}, ""),
        ((1, 0), ALL[5:], None, {"lost": 16, "other batches": 1}, ""),
        ((1, 1), ALL[5:], change_row, {"altered": 1}, ""),
        ((1, 1), ALL[5:], swap_rows, {"other batches": 1}, ""),
        ((1, 1), [*ALL[5:], ALL[6]], None, {}, "4 of 2 ranks took"),
        ((1, 1), ALL[5:], lambda events: events.pop(), {"lost": 8, "other batches": 1}, "1 of 2 ranks took"),
        ((1, 1), ALL[5:], lambda events: events[1].update(at=[1, 32]), {}, "ranks of one start begin at"),
        ((1, 1), ALL[5:], lambda events: events[1].update(saved=[1, 0]), {}, "the model was saved at"),
    ],
)
def test_what_went_wrong_is_found(
    tmp_path: Path, begins: tuple[int, int], steps: Steps, change: Any, counts: dict[str, int], says: str
) -> None:
    write(tmp_path, 1, (0, 0), ALL[:5])
    write(tmp_path, 2, begins, steps, change or (lambda _: None))
    got, problems = found(tmp_path)
    assert {**counts, **got} == got
    assert any(problem.startswith(says) for problem in problems) == bool(says)


def test_a_schedule_is_drawn_again_the_same_and_all_that_there_is_is_drawn() -> None:
    drawn = [draw(seed, index) for seed in range(20) for index in range(20)]
    assert drawn == [draw(seed, index) for seed in range(20) for index in range(20)]
    faults = [fault for schedule in drawn for fault in schedule.faults]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.phase for fault in faults} == set(PHASES)
    assert {schedule.workload for schedule in drawn} == {*workloads.NAMES, *workloads.LATER}
