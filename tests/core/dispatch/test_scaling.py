"""Checks that there are as many decoders as the trainer needs, soon and from then on."""

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raylance
from raylance.dispatch.messages import Dismiss, Log, Place
from raylance.dispatch.scaling import Scaler
from raylance.errors import ConfigError
from tests.helpers.dispatch import open_pool, reader_of


class Trainer:
    """A trainer that needs `demand` decoders to never wait, and decoders that work as much as it takes."""

    def __init__(self, scaler: Scaler, step_s: float = 0.2) -> None:
        self.scaler, self.step_s, self.now, self.numbers = scaler, step_s, 0.0, [scaler.wanted]
        self.logs: list[Any] = []
        scaler.begin()

    def run(self, demand: float, steps: int, running: int | None = None) -> None:
        """Takes steps: in each it computes for `step_s`, and waits for what the decoders have not done by then."""
        for _ in range(steps):
            there = self.scaler.wanted if running is None else running
            busy = min(there, math.ceil(demand)) if demand < there else there
            waits_s = max(0.0, demand / there - 1) * self.step_s
            working_s = min(1.0, demand / busy) * self.step_s  # of the step, all that are busy work so long
            self.scaler.observe(self.now, waits=False, busy=busy, running=there)
            self.scaler.observe(self.now + working_s, waits=False, busy=busy if waits_s else 0, running=there)
            self.scaler.observe(self.now + self.step_s, waits=waits_s > 0, busy=busy, running=there)
            self.now += self.step_s + waits_s
            self.logs += self.scaler.stepped(self.now)
            self.numbers.append(self.scaler.wanted)

    def pause(self, seconds: float) -> None:
        """Validates, say: nothing is taken, and nothing is decoded."""
        self.scaler.observe(self.now, waits=False, busy=0, running=self.scaler.wanted)
        self.now += seconds
        self.scaler.stepped(self.now)


def turns(numbers: list[int]) -> int:
    """How often it went another way than before."""
    ways = [later > earlier for earlier, later in itertools.pairwise(numbers) if later != earlier]
    return sum(one != two for one, two in itertools.pairwise(ways))


@given(
    demand=st.floats(0.2, 40),
    least=st.integers(1, 5),
    most=st.integers(6, 32),
    at_first=st.integers(1, 32),
    step_s=st.sampled_from([0.01, 0.2, 3.0]),
)
def test_as_many_as_the_trainer_needs(demand: float, least: int, most: int, at_first: int, step_s: float) -> None:
    trainer = Trainer(Scaler(least, most, min(max(at_first, least), most)), step_s)
    trainer.run(demand, 2000)
    wanted = trainer.scaler.wanted
    assert all(least <= number <= most for number in trainer.numbers)
    assert wanted >= min(most, math.floor(demand / 1.06))
    assert wanted <= max(least, math.ceil(math.ceil(demand) * 1.4) + 1)
    trainer.run(demand, 4000)
    assert trainer.scaler.wanted == wanted, "found once, it stays"
    assert turns(trainer.numbers) <= 1


def test_growth_is_logged_and_takes_few_looks() -> None:
    trainer = Trainer(Scaler(1, 16, 1))
    trainer.run(12.0, 100)
    assert trainer.scaler.wanted in (12, 13)
    assert trainer.numbers.index(trainer.scaler.wanted) < 6 * 16
    assert trainer.logs[0].line.startswith("decoders: 2 wanted instead of 1, because the trainer waited")


def test_a_pause_of_the_trainer_says_nothing() -> None:
    trainer = Trainer(Scaler(1, 16, 8))
    trainer.run(7.9, 50)
    for _ in range(30):
        trainer.pause(120.0)
        trainer.run(7.9, 10)
    assert set(trainer.numbers) == {8}


def test_waiting_for_anything_but_decoders_says_nothing() -> None:
    scaler = Scaler(1, 16, 4)
    for step in range(200):  # the reader is slow: the trainer waits, and two of four decoders do, too
        scaler.observe(step * 0.2, waits=True, busy=2, running=4)
        scaler.stepped(step * 0.2 + 0.1)
    assert scaler.wanted == 4


def test_a_number_that_was_too_small_is_not_tried_again() -> None:
    """The load changes to and fro; each way back costs waiting once."""
    trainer = Trainer(Scaler(1, 16, 8))
    for _ in range(20):
        trainer.run(2.0, 200)
        trainer.run(8.0, 200)
    assert turns(trainer.numbers) <= 4
    assert trainer.scaler.wanted >= 8


def test_what_finds_no_place_is_not_asked_for_again() -> None:
    trainer = Trainer(Scaler(1, 16, 2))
    trainer.run(10.0, 32, running=2)
    assert trainer.scaler.wanted > 2
    trainer.scaler.refused(2)
    trainer.run(10.0, 500)
    assert trainer.scaler.wanted == 2


def test_a_pool_grows_at_once_and_shrinks_by_those_that_have_no_work() -> None:
    pool = open_pool(4, decoders=3)
    busy = pool.decoder(responsive=False)
    assert busy in (1, 2, 3)
    call = pool.send(busy, 1.0)
    gone = pool.resize("decoder", 1, 1.0)
    assert gone == [Dismiss(number, is_lost=False) for number in (1, 2, 3) if number != busy]
    assert pool.resize("decoder", 1, 1.0) == []
    assert (pool.running("decoder"), pool.decoders_busy) == ([busy], 1)
    pool.answered(call, 2.0)
    assert pool.decoders_busy == 0
    assert pool.resize("decoder", 3, 2.0) == []
    assert pool.due(2.0) == [Place(4, "decoder"), Place(5, "decoder")]
    assert reader_of(pool) == [0]


def test_a_pool_shrinks_first_by_those_that_do_not_run() -> None:
    """Else those that run would go, and the others would have to start, load what they need, and find a place."""
    pool = open_pool(3, decoders=4)
    assert pool.resize("decoder", 2, 1.0) == [Dismiss(4, is_lost=False), Dismiss(3, is_lost=False)]
    assert pool.running("decoder") == [1, 2]
    pool.resize("decoder", 3, 2.0)
    assert pool.resize("decoder", 2, 2.0) == [], "its place was not requested yet"
    assert pool.due(3.0) == []


def test_items_do_not_wait_for_decoders_once_none_has_found_a_place() -> None:
    pool = open_pool(1, decoders=2, needs_decoder=False)
    assert not pool.reader_decodes(4.0)
    pool.late(20.0)
    pool.resize("decoder", 1, 30.0)
    assert pool.due(30.0) == [Place(3, "decoder")], "CPUs may be free by now"
    assert pool.reader_decodes(30.0)
    pool.alive(3, 31.0)
    assert not pool.reader_decodes(31.0)
    pool.lost(3, 32.0)
    assert not pool.reader_decodes(32.0), "its successor is waited for as usual"
    assert pool.reader_decodes(37.0)


def test_what_grows_and_finds_no_place_is_done_without() -> None:
    pool = open_pool(2)
    pool.resize("decoder", 3, 1.0)
    assert pool.due(1.0) == [Place(2, "decoder"), Place(3, "decoder")]
    pool.alive(2, 2.0)
    assert [output for output in pool.late(1000.0) if not isinstance(output, Log)] == [Dismiss(3)]
    assert pool.failure is None
    assert pool.wanted["decoder"] == 2


@pytest.mark.parametrize("given", [(0, 3), (4, 2), (1, 2, 3), (1.0, 2), "two"])
def test_ranges_that_are_none(given: object) -> None:
    with pytest.raises(ConfigError, match=r"num_decoders=.*1 <= min < max"):
        raylance.Options(num_decoders=given)  # type: ignore[arg-type]
