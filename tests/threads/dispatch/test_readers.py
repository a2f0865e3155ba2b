"""Several readers for a rank: chunks in turn, each loaded by one; the same batches as with one; more of them only if
reading is what the trainer waits for.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

import raylance
from raylance.dispatch.messages import Alive, Gather, GiveUpPlacing, Load, Lost, Place
from raylance.dispatch.scaling import Scaler
from raylance.errors import ConfigError
from tests.helpers.dispatch import FAULT, Driver, of_kind, open_pool
from tests.helpers.slow_reading import SLOW_ROWS, SMALL, ids_of, slow_loader, texts


def driver_of(readers: int, decoders: int = 1, **options: Any) -> Driver:
    return Driver(open_pool(readers + decoders, decoders=decoders, readers=readers), chunk_positions=2, **options)


def test_items_of_a_chunk_go_to_its_reader_and_the_next_chunk_to_the_next() -> None:
    driver = driver_of(2, rows=8)
    items = sorted((each.item.position, each.helper) for each in driver.given(Gather)[:4])
    assert items == [(0, 0), (1, 0), (2, 2), (3, 2)]
    loads = [(load.helper, load.chunk.position) for load in driver.given(Load)]
    assert {(0, 0), (2, 2), (0, 4), (2, 6)} <= set(loads), "each has one to use, and one ahead"


def test_a_reader_that_comes_later_begins_at_once() -> None:
    driver = driver_of(1, rows=8)
    assert {load.helper for load in driver.given(Load)} == {0}
    driver.kept.pool.resize("reader", 2, 0.0)
    (place,) = of_kind(driver.handle(None), Place)
    loads = of_kind(driver.handle(Alive(place.helper)), Load)
    assert [(load.helper, load.chunk.position) for load in loads][:2] == [(place.helper, 4), (place.helper, 6)]


def test_the_first_reader_is_enough_to_begin_and_one_without_a_place_is_done_without() -> None:
    pool = open_pool(decoders=0, readers=2)
    assert [command.kind for command in pool.due(0.0)] == ["reader"]
    pool.alive(0, 0.0)
    assert [command.kind for command in pool.due(0.0)] == ["reader"]
    pool.late(20.0)
    assert pool.failure is None
    assert pool.wanted["reader"] == 1
    pool.resize("reader", 3, 30.0)
    pool.resize("reader", 1, 31.0)
    pool.late(60.0)
    assert pool.wanted["reader"] == 1, "that those do not come which are not wanted any more changes nothing"
    none = open_pool(decoders=0, readers=2)
    none.late(20.0)
    assert none.failure == GiveUpPlacing("reader", 2, 2)


def test_what_a_lost_reader_had_is_read_by_the_other_and_it_is_replaced() -> None:
    driver = driver_of(2, rows=8)
    driver.handle(Lost(0, FAULT))
    assert [command.kind for command in driver.given(Place)] == ["reader"]
    driver.handle(Alive(2))
    again = driver.given(Gather)[-2:]
    assert sorted((each.item.position, each.helper) for each in again) == [(0, 2), (1, 2)]


def test_a_second_reader_that_finds_no_place_again_is_done_without() -> None:
    driver = driver_of(2)
    driver.handle(Lost(0, FAULT))
    commands = driver.handle(None, 20.0)
    assert driver.dispatcher.deadline() is not None
    assert not driver.is_over, commands


def grows(scaler: Scaler, *, is_read: bool) -> int:
    """Readers that are wanted after a while in which the trainer waits half of the time."""
    pool = open_pool(2)
    pool.answered(pool.send(0, 0.0), 0.0)
    for step in range(64):
        now = step * 0.2
        scaler.look(pool, now, is_awaited=False, is_read=is_read)
        scaler.look(pool, now + 0.1, is_awaited=True, is_read=is_read)
        scaler.stepped(now + 0.2)
    return scaler.wanted


def test_readers_come_only_where_it_is_reading_that_is_waited_for() -> None:
    assert grows(Scaler(1, 4, 1, "reader"), is_read=True) == 2, "and no third, as none has come yet"
    assert grows(Scaler(1, 4, 1, "reader"), is_read=False) == 1


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(texts())


def test_readers_come_while_the_trainer_waits_for_reading(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row comes once an epoch meanwhile, in the order that one reader has."""
    monkeypatch.setattr("raylance.dispatch.scaling._LEAST_S", 0.1)
    with slow_loader(uri, 0.0, runtime="threads", **SMALL) as loader:
        wanted = [[ids_of(batch) for batch in loader.iter_batches(global_batch_size=20)] for _ in range(2)]
    counts, deadline = [0], time.monotonic() + 120
    with slow_loader(uri, 0.0005, num_readers=(1, 3), runtime="threads", **SMALL) as loader:
        while counts[-1] < 3 and time.monotonic() < deadline:
            seen = []
            epoch = loader.epoch
            for batch in loader.iter_batches(global_batch_size=20):
                counts.append(loader.stats()["readers"])
                seen.append(ids_of(batch))
            if epoch < 2:
                assert seen == wanted[epoch]
            assert sorted(itertools.chain(*seen)) == list(range(SLOW_ROWS))
    assert counts[1] == 1
    assert counts == sorted(counts), "none goes while the trainer waits"
    assert counts[-1] == 3


def double(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "twice": batch["id"] * 2}


def deliver(dataset: Any, world_size: int = 1, **options: Any) -> list[Any]:
    """An epoch that is broken off and continued, and the next one, of the last rank."""
    found = []
    rank = world_size - 1
    with dataset.loader(rank=rank, world_size=world_size, runtime="threads", **SMALL, **options) as loader:
        for stop in (15, 1000, 1000):
            for batch in itertools.islice(loader.iter_batches(global_batch_size=24, with_row_offset=True), stop):
                assert (batch["twice"] == 2 * batch["id"]).all()
                found.append([loader.epoch, *batch["_rowoffset"].tolist(), *batch["id"].tolist()])
    return found


@pytest.mark.parametrize("order", ["window", raylance.Weighted(weights="weight")], ids=["window", "weighted"])
def test_the_same_batches_whatever_the_readers(uri: str, order: Any) -> None:
    dataset = raylance.dataset(uri, columns=["id", "text"], order=order, transform=double, remainder="pad")
    alone = deliver(dataset, num_decoders=1)
    assert len(alone) == 2 * (SLOW_ROWS // 24)
    for readers, decoders in ((2, 2), (3, 0), ("auto", "auto")):
        assert deliver(dataset, num_readers=readers, num_decoders=decoders) == alone
    assert deliver(dataset, 3, num_readers=2) == deliver(dataset, 3)


def test_the_same_batches_of_a_mixture_and_of_less_than_a_chunk(uri: str) -> None:
    parts = [raylance.dataset(uri, columns=["id"], filter=f"class {sign} 2") for sign in ("<", ">=")]
    mixed: Any = raylance.mix({str(place): (part, 0.5) for place, part in enumerate(parts)})
    few: Any = raylance.dataset(uri, columns=["id"], filter="id < 30")
    for dataset in (mixed, few):
        passes = []
        for readers in (1, 2):
            with dataset.loader(num_readers=readers, runtime="threads", reader_bytes=20_000) as loader:
                passes.append([ids_of(batch) for _ in range(2) for batch in loader.iter_batches(global_batch_size=8)])
                assert loader.stats()["readers"] == readers
        assert passes[0] == passes[1]


@pytest.mark.parametrize("wanted", [0, -1, 1.5, (4, 2), (0, 2), (1, 2, 3), "two", True])
def test_numbers_that_are_none_are_refused(wanted: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_readers=.*1 <= min < max"):
        raylance.Options(num_readers=wanted)
    with pytest.raises(ConfigError, match="num_readers="):
        raylance.DataConfig(num_readers=wanted)
