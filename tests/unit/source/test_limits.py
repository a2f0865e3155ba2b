"""Calls by threads: in two parts, in order, and with their own errors."""

from concurrent.futures import Future

import pytest

from raylance.source.limits import Calls, Reading


def test_a_thread_begins_the_next_call_before_it_ends_one() -> None:
    done: list[str] = []

    def call(number: int) -> Reading[int]:
        done.append(f"begin {number}")
        yield
        done.append(f"end {number}")
        return number

    calls, gate = Calls(1, "test"), Future[None]()
    calls.start(gate.result)  # the others wait together
    futures = [calls.start(call, number) for number in range(3)]
    gate.set_result(None)
    assert [future.result(10) for future in futures] == [0, 1, 2]
    assert done == ["begin 0", "begin 1", "end 0", "begin 2", "end 1", "end 2"]
    assert calls.start(call, 3).result(10) == 3, "a last call is not left half done"


def test_each_part_has_its_own_error_and_the_others_end() -> None:
    def call(fails_in: int) -> Reading[str]:
        if fails_in == 1:
            raise ValueError("in the first part")
        yield
        if fails_in == 2:
            raise ValueError("in the second part")
        return "done"

    calls, gate = Calls(1, "test"), Future[None]()
    calls.start(gate.result)
    futures = [calls.start(call, fails_in) for fails_in in (0, 1, 0, 2, 0)]
    cancelled = calls.start(call, 0)
    assert cancelled.cancel()
    gate.set_result(None)
    assert [futures[at].result(10) for at in (0, 2, 4)] == ["done"] * 3
    with pytest.raises(ValueError, match="first part"):
        futures[1].result(10)
    with pytest.raises(ValueError, match="second part"):
        futures[3].result(10)


def test_what_was_begun_ends_although_nobody_keeps_the_threads() -> None:
    def call() -> Reading[str]:
        yield
        return "done"

    assert Calls(2, "test").start(call).result(10) == "done"
