"""Replicas that die under torchft: real processes, real reductions by gloo."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.replicas import STEPS, Replicas, Setting, check, write_data

Start = Callable[..., Replicas]

pytestmark = pytest.mark.promise("P1", "P3", "P6")


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def start(uri: str, tmp_path: Path) -> Iterator[Start]:
    runs: list[Replicas] = []

    def begin(*, in_ray: bool = False, **setting: object) -> Replicas:
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(Replicas(Setting(**{"uri": uri, "last_step_s": 1.0, **setting}), folder, in_ray=in_ray))  # type: ignore[arg-type]
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.mark.parametrize(("replicas", "is_async"), [(3, True), (4, False)])
def test_each_replica_is_killed_and_no_row_is_lost_or_comes_twice(start: Start, replicas: int, is_async: bool) -> None:
    run = start(replicas=replicas, is_async=is_async, epochs=6)
    run.heal()
    for number in range(replicas):
        run.kill(number)
        run.heal()
    run.kill(0, 1)  # two at once,
    run.heal()
    run.kill(0)  # and one of them again
    run.heal()
    run.finish()
    check(run.folder, run.setting)


def test_replicas_that_die_as_they_heal_and_at_the_turn_of_an_epoch(start: Start) -> None:
    run = start(replicas=3, epochs=4, dies_healing=True)
    run.heal()
    run.kill(2)
    run.heal()
    run.reach(STEPS - 2)
    run.kill(0)
    run.heal()
    assert len(list(run.folder.glob("died-healing-*"))) >= 2
    run.finish()
    check(run.folder, run.setting)


def test_ray_train_replaces_ranks_that_die(start: Start) -> None:
    """One and another. If two die at one moment, Ray Train 2.60 ends the run, and it continues from the last report."""
    run = start(in_ray=True, replicas=3, epochs=8)
    run.heal()
    run.kill(1)
    run.heal()
    run.kill(0)
    run.heal()
    assert len(run.events("start")) == 3 + 2, "no rank was started again but those that died"
    last = run.report()
    run.kill(1, 2)
    run.heal()
    assert {event["at"] for event in run.events("restored")[-3:]} == {last}
    run.finish()
    check(run.folder, run.setting)
