"""Calls in threads, with their own errors and within their time."""

import os
import threading
from concurrent.futures import Future

import pytest

from raylance.source.limits import Calls, within


def test_each_call_has_its_own_error_and_the_others_end() -> None:
    def call(fails: bool) -> str:
        if fails:
            raise ValueError("this one")
        return "done"

    calls, gate = Calls(1, "test"), Future[None]()
    calls.submit(gate.result)  # the others wait together
    futures = [calls.submit(call, fails) for fails in (False, True, False)]
    cancelled = calls.submit(call, False)
    assert cancelled.cancel()
    gate.set_result(None)
    assert [futures[at].result(10) for at in (0, 2)] == ["done"] * 2
    with pytest.raises(ValueError, match="this one"):
        futures[1].result(10)


def test_a_call_that_was_begun_ends_although_nobody_keeps_the_threads() -> None:
    gate = Future[str]()
    future = Calls(1, "test").submit(gate.result)
    gate.set_result("done")
    assert future.result(10) == "done"


def test_a_thread_that_cannot_start_is_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls, gate = Calls(2, "test"), Future[None]()
    with monkeypatch.context() as refused:
        refused.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            calls.submit(str)
    calls.submit(gate.result)
    with monkeypatch.context() as refused:
        refused.setattr(threading.Thread, "start", refuse)
        waits = calls.submit(str, 1)
    assert calls.submit(str, 2).result(10) == "2", "by the second thread"
    assert waits.result(10) == "1"
    gate.set_result(None)


def test_calls_with_a_limit_share_threads_unless_one_hangs() -> None:
    thread, gate = within(10, threading.get_ident), Future[None]()
    assert within(10, threading.get_ident) == thread
    with pytest.raises(TimeoutError):
        within(0.05, gate.result)
    assert within(10, threading.get_ident) != thread, "that one hangs"
    gate.set_result(None)
    with pytest.raises(ZeroDivisionError):
        within(10, divmod, 1, 0)
    assert within(10, within, 10, threading.get_ident) != within(10, threading.get_ident), "one waits for the other"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    assert within(10, abs, -1) == 1
    child, found = os.fork(), 1
    if not child:
        try:
            found = within(10, abs, -2)
        finally:
            os._exit(found)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
