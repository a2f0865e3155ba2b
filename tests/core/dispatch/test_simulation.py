"""The schedules that run by default, and runtimes that lie: each lie is caught."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raylance.dispatch.messages import Done, Event
from tests.simulation.play import play
from tests.simulation.schedule import FETCH_FAULTS, PLACE_FAULTS, TIMED_FAULTS, WORK_FAULTS, Draws
from tests.simulation.shrink import fails, shrink
from tests.simulation.watch import Broken
from tests.simulation.world import World


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.promise("P1", "P6", "P9")
@pytest.mark.parametrize("seeds", [range(150)], ids=str)
def test_nothing_is_lost(seeds: range) -> None:
    counts = sum(map(play, map(Draws, seeds)), play(Draws()))
    assert counts["rows"] > 1_000
    for kind in (*WORK_FAULTS, *PLACE_FAULTS, *FETCH_FAULTS, *TIMED_FAULTS):
        assert counts[kind], kind  # or the block shows less than it says


@pytest.mark.parametrize(
    ("seed", "what"),
    [
        # A row waits for others to be decoded, and the chunk of a row that has failed has the room that they need.
        (78_286, "ended by a fatal row"),
        (87_441, "ended by a fatal row"),
        # A pass is begun again before the chunks that it holds, over steps without a row of the rank.
        (536_307, "passes with helpers of before"),
        (703_644, "passes with helpers of before"),
        # An item gets a chunk of its own when the consumer takes a step, and all readers hold later chunks.
        (2_107_125, "ended by a fatal row"),
    ],
)
def test_schedules_that_once_ended_in_a_deadlock(seed: int, what: str) -> None:
    assert play(Draws(seed))[what]


def test_a_harmless_schedule_is_harmless() -> None:
    counts = play(Draws())
    assert counts["rows"] == 4
    assert not counts["gather again after a fault"]


def test_a_schedule_is_repeatable() -> None:
    draws = Draws(7)
    assert play(draws) == play(Draws(given=draws.taken))


def changing(change: Callable[[list[Any]], Any]) -> type[World]:
    """A world that changes the rows of an item."""

    class Changing(World):
        def _outcome(self, *about: Any) -> Event:
            event = super()._outcome(*about)
            result = self.table.get(getattr(event, "call", -1))
            if isinstance(event, Done) and result is not None:
                change(result.rows)
            return event

    return Changing


REORDERING = changing(lambda rows: rows.reverse())
LOSING = changing(lambda rows: rows.pop(0))
DUPLICATING = changing(lambda rows: rows.insert(1, rows[0]))


class Mute(World):
    """Never answers, and has nothing that would end the wait."""

    def _finish(self, *about: Any) -> None:
        pass

    def next_event(self, timeout_s: float | None) -> Any:
        return super().next_event(None if timeout_s is None else self._drop_time())

    def _drop_time(self) -> None:
        raise Broken("deadlock", "only a deadline ends the wait")


class Keeping(World):
    """Keeps the results that it was to drop."""

    def _forget(self, calls: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("world", "what"),
    [(REORDERING, "order"), (LOSING, "order"), (DUPLICATING, "order"), (Mute, "deadlock"), (Keeping, "left")],
)
def test_wrong_runtimes_are_caught(world: type[World], what: str) -> None:
    assert any(fails(Draws(seed), world)[0] == what for seed in range(20))


def test_a_failure_is_made_simpler() -> None:
    what, taken = next(found for seed in range(20) if (found := fails(Draws(seed), REORDERING))[0])
    simple = shrink(taken, REORDERING, most_s=5.0)
    assert fails(Draws(given=simple), REORDERING)[0] == what == "order"
    assert sum(map(bool, simple)) < sum(map(bool, taken)) / 2
