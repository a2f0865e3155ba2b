"""Owns what the helper pool does by time and by single answers, which schedules meet too seldom to show."""

from typing import Any

from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.messages import Dismiss, Fault, GiveUpPlacing, Place

FAULT = Fault(what="it died")


def make_pool(**changes: Any) -> HelperPool:
    """A pool whose first pass begins at 0 s."""
    settings: dict[str, Any] = {
        "readers": 1, "decoders": 2, "require_all": True, "placement_timeout_s": 60.0, "work_timeout_s": 30.0,
    }  # fmt: skip
    pool = HelperPool(**(settings | changes))
    pool.open(0.0)
    pool.due(0.0)
    return pool


def run_all(pool: HelperPool) -> None:
    for helper in range(3):
        pool.alive(helper, 0.5)


def test_an_answer_to_an_earlier_ping_says_nothing_of_a_later_fault() -> None:
    pool = make_pool()
    run_all(pool)
    pool.ping(1.0, again=True)
    pool.ping(2.0, again=True)
    pool.alive(1, 2.1)
    assert pool.decoder(responsive=True) is None
    pool.alive(1, 2.2)
    assert pool.decoder(responsive=True) == 1


def test_readers_decode_when_no_decoder_has_started_in_five_seconds() -> None:
    pool = make_pool(require_all=False)
    pool.alive(0, 0.5)
    assert pool.deadline(0.5) == 5.0, "and are looked at then, if nothing else happens"
    assert not pool.reader_decodes(4.9)
    assert pool.reader_decodes(5.0)
    pool.alive(1, 6.0)
    assert not pool.reader_decodes(6.0)


def test_a_start_that_is_tried_again_has_what_is_left_of_its_time() -> None:
    pool = make_pool()
    pool.alive(0, 0.5)
    pool.alive(1, 0.5)
    pool.not_placed(2, FAULT, False, 50.0)
    assert [type(command) for command in pool.due(50.0)] == []
    assert pool.due(51.0) == [Place(3, "decoder")]
    assert pool.deadline(51.0) == 60.0
    assert pool.late(60.0) == [Dismiss(3)]
    assert isinstance(pool.failure, GiveUpPlacing)


def test_a_helper_that_is_placed_late_has_its_time_from_then() -> None:
    pool = make_pool()
    pool.alive(0, 0.5)
    pool.alive(1, 0.5)
    pool.not_placed(2, FAULT, False, 50.0)
    pool.due(55.0)  # the caller had no time before
    assert pool.late(62.0) == []
    assert pool.deadline(62.0) == 64.0


def test_the_other_readers_are_placed_when_the_first_one_runs() -> None:
    pool = make_pool(readers=3, decoders=0)
    assert pool.due(0.1) == []
    pool.alive(0, 0.5)
    assert pool.due(0.5) == [Place(1, "reader"), Place(2, "reader")]


def test_idle_helpers_are_dismissed_where_there_are_too_many() -> None:
    pool = make_pool()
    run_all(pool)
    pool.send(1, 1.0)
    assert pool.resize("decoder", 1, 1.0) == [Dismiss(2, is_lost=False)]


def test_an_answer_starts_the_time_of_the_next_call() -> None:
    """A helper works on one call after the other: the second one has not been its work since it was sent."""
    pool = make_pool()
    run_all(pool)
    first, second = pool.send(1, 1.0), pool.send(1, 1.0)
    pool.answered(first, 30.0)
    assert pool.hung(31.0) == []
    assert pool.deadline(31.0) == 60.0
    assert [number for number, _ in pool.hung(60.0)] == [1]
    pool.answered(second, 60.0)
    assert pool.hung(200.0) == []
