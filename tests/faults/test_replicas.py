"""Owns the tests of replicas that die under torchft: real processes, real reductions by gloo; never a fake manager."""

from collections.abc import Iterator
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from tests.faults.replicas import BATCH, ROWS, STEPS, Replicas, Setting

pytestmark = [pytest.mark.slow, pytest.mark.promise("P1", "P3", "P6")]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    values = np.random.default_rng(0).random(ROWS * 16, dtype=np.float32)
    where = str(tmp_path_factory.mktemp("data") / "a.lance")
    lance.write_dataset(pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values), 16)}), where)
    return where


def undisturbed(uri: str, epochs: int) -> dict[int, list[int]]:
    data = raylance.dataset(uri, order="window", seed=3)
    found = [
        batch["_rowoffset"].tolist()
        for epoch in range(epochs)
        for batch in data.iter_batches(global_batch_size=BATCH, epoch=epoch, with_row_offset=True)
    ]
    data.close()
    return dict(enumerate(found))


def check(run: Replicas, uri: str) -> None:
    """Each committed step had the rows of an undisturbed run, once; and the records prove it."""
    run.finish()
    assert run.committed() == undisturbed(uri, run.setting.epochs)
    wrong = [e for e in run.events("step") if e["at"] != e["counted"]]
    assert not wrong, "a loader's state stands at the manager's step"
    weights = {round(event["weights"], 5) for event in run.events("end")}
    assert len(weights) == 1, weights
    proof = raylance.prove_run(str(run.folder / "run"))
    assert proof.ok, proof
    assert sum(each.rows * each.epochs for each in proof.datasets[0].epochs) == run.setting.epochs * STEPS * BATCH


@pytest.fixture
def start(uri: str, tmp_path: Path) -> Iterator[object]:
    runs: list[Replicas] = []

    def begin(*, in_ray: bool = False, **setting: object) -> Replicas:
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(Replicas(Setting(**{"uri": uri, **setting}), folder, in_ray=in_ray))  # type: ignore[arg-type]
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.mark.parametrize(("replicas", "is_async"), [(3, True), (3, False), (4, True), (4, False)])
def test_each_replica_is_killed_and_no_row_is_lost_or_comes_twice(
    start: object, uri: str, replicas: int, is_async: bool
) -> None:
    run = start(replicas=replicas, is_async=is_async, epochs=6)  # type: ignore[operator]
    run.reach(10)
    for number in range(replicas):
        run.kill(number)
        run.heal()
    run.kill(0, 1)  # two at once,
    run.heal()
    run.kill(0)  # and one of them again
    run.heal()
    check(run, uri)


def test_replicas_that_die_as_they_heal_and_at_the_turn_of_an_epoch(start: object, uri: str) -> None:
    run = start(replicas=3, epochs=4, dies_healing=True)  # type: ignore[operator]
    run.reach(10)
    run.kill(2)
    run.heal()
    run.reach(STEPS - 2)
    run.kill(0)
    run.heal()
    assert len(list(run.folder.glob("died-healing-*"))) == 2
    check(run, uri)


def test_spares_have_no_rows_until_they_take_the_place_of_one_that_died(start: object, uri: str) -> None:
    run = start(replicas=3, least=2, has_spares=True, epochs=4)  # type: ignore[operator]
    run.heal()
    run.reach(20)
    run.kill(0)
    run.heal()
    run.kill(1)
    run.heal()
    check(run, uri)
    sizes = {event["share"][1] for event in run.events("handed") if event["rows"] is not None}
    assert sizes == {2}


def test_ray_train_replaces_ranks_that_die(start: object, uri: str) -> None:
    """One, the first, two at once; then all of them, which is a restart from the last report."""
    run = start(in_ray=True, replicas=3, epochs=12)  # type: ignore[operator]
    run.reach(10)
    run.kill(1)
    run.heal()
    run.kill(0)
    run.heal()
    run.kill(1, 2)
    run.heal()
    check(run, uri)
    assert not run.events("restored"), "no rank was started again but those that died"
