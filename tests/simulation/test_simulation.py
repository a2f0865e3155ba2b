"""Owns the schedules that run by default, the small world as a whole, and that wrong dispatchers are caught."""

import logging
from collections.abc import Iterator

import pytest

from tests.simulation.play import Wrong, play
from tests.simulation.schedule import FETCH_FAULTS, PLACE_FAULTS, TIMED_FAULTS, WORK_FAULTS, Draws
from tests.simulation.shrink import fails, shrink
from tests.simulation.small import explore
from tests.simulation.watch import Broken
from tests.simulation.wrong import BROKEN
from tests.simulation.wrong_feeder import BROKEN as BROKEN_FEEDER

FEW = 800
# The schedule that first catches a mutant, where most do not show it: it is tried before the others.
RARE = {
    "never reads again what no decoder is left for": 36,
    "continues after a helper that is late": 36,
    "continues with a pool that has failed": 36,
    "keeps the pool of another runtime": 36,
    "places again what can never start": 38,
    "leaves the helpers of a pool that has failed": 38,
    "is impatient": 41,
    "cannot do with fewer readers": 41,
    "places again at once": 41,
    "reads again what only waited for a decoder": 61,
    "carries outputs out from last to first": 62,
    "adds a batch after it was closed": 113,
    "forgets faults at a split": 122,
    "does not wake its thread when it is closed": 122,
    "drops the last event when it is closed": 135,
    "gives up a whole item for one bad step": 140,
    "holds a row for one that has failed": 266,
    "sends work that is done again to a decoder that may be dead": 481,
    "holds a row for ever": 5946,
    "holds a row for one without room": 7722,
    "does not ping those that owe an answer": 33612,
    "waits for what nobody needs any more": 51823,
}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.promise("P1", "P6", "P9")
@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(150, 2_000), marks=pytest.mark.slow)], ids=str)
def test_nothing_is_lost(seeds: range) -> None:
    counts = sum(map(play, map(Draws, seeds)), play(Draws()))
    assert counts["rows"] > 1_000
    for kind in (*WORK_FAULTS, *PLACE_FAULTS, *FETCH_FAULTS, *TIMED_FAULTS):
        assert counts[kind], kind  # or the block shows less than it says


def test_a_harmless_schedule_is_harmless() -> None:
    counts = play(Draws())
    assert counts["rows"] == 4
    assert not counts["read again after a fault"]


def test_a_schedule_is_repeatable() -> None:
    draws = Draws(7)
    assert play(draws) == play(Draws(given=draws.taken))


@pytest.mark.parametrize("name", [*BROKEN, *BROKEN_FEEDER])
def test_wrong_ones_are_caught(name: str) -> None:
    wrong, what = (BROKEN | BROKEN_FEEDER)[name]
    assert any(fails(Draws(seed), wrong)[0] == what for seed in (RARE.get(name, 0), *range(FEW))), what


def test_a_failure_is_made_simpler() -> None:
    wrong, what = BROKEN["waits for the dead"]
    draws = Draws(5)
    with pytest.raises(Broken):
        play(draws, wrong)
    simple = shrink(draws.taken, wrong, most_s=5.0)
    assert fails(Draws(given=simple), wrong)[0] == what
    assert sum(map(bool, simple)) < sum(map(bool, draws.taken)) / 2


@pytest.mark.promise("P6", "P9")
@pytest.mark.parametrize(("needs_decoder", "loses_results"), [(True, True), (False, False)])
def test_a_small_world_as_a_whole(needs_decoder: bool, loses_results: bool) -> None:
    found = explore(items=2, deaths=1, late=1, needs_decoder=needs_decoder, loses_results=loses_results)
    assert found.ends["everything delivered"]
    assert found.ends["PlacementError"]
    assert found.left == 0
    assert found.orders > 50_000


def test_a_small_world_with_two_readers_as_a_whole() -> None:
    found = explore(items=2, decoders=1, readers=2, deaths=1, late=1)
    assert found.ends["everything delivered"]
    assert found.ends["PlacementError"]
    assert found.left == 0


def test_the_small_world_finds_a_lost_one() -> None:
    with pytest.raises(Broken, match="deadlock"):
        explore(items=2, deaths=1, late=0, made_of=BROKEN["forgets to send again"][0])
    explore(items=2, deaths=0, late=0, made_of=Wrong())
