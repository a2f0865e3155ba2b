"""The wait clock against seconds that are added up interval by interval."""

import dataclasses
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.observe import clock
from raylance.observe.wait_clock import WaitClock, saving

DEPTH = 3  # loaders: the batches of each are used during a step of the one before
SECONDS = st.integers(0, 9).map(lambda number: 4.0 * number)  # a wait "there" is split in four
CAUSES = st.sampled_from([None, "start", "read", "decode", "finish", "there"])
WAITING = st.lists(st.tuples(CAUSES, SECONDS), max_size=4)


def steps(depth: int) -> st.SearchStrategy[list[tuple[str, Any]]]:
    """What happens during a step: work, a report, or a pass over the next loader."""
    kinds = [st.tuples(st.just("work"), SECONDS), st.tuples(st.just("save"), SECONDS)]
    if depth + 1 < DEPTH:
        kinds.append(st.tuples(st.just("pass"), passes(depth + 1)))
    return st.lists(st.one_of(kinds), max_size=3)


def passes(depth: int) -> st.SearchStrategy[list[tuple[Any, Any]]]:
    """The batches of a pass: what is waited for, and what happens during the step."""
    return st.lists(st.tuples(WAITING, steps(depth)), max_size=3)


class Consumer:
    """Runs a training loop on virtual time; notes each interval with the loaders that it belongs to, outermost first.

    Of all loaders but the innermost, a batch is in hand.
    """

    def __init__(self) -> None:
        self.now = 100.0
        self.clocks = [WaitClock() for _ in range(DEPTH)]
        self.intervals: list[tuple[float, tuple[int, ...], str]] = []  # seconds, loaders, what the innermost one does

    def passing(self, what: str, seconds: float, depth: int) -> None:
        self.intervals.append((seconds, tuple(range(depth + 1)), what))
        self.now += seconds

    def run(self, batches: list[tuple[Any, Any]], depth: int = 0) -> None:
        own = self.clocks[depth]
        for waiting, during in batches:
            begun = own.begin("wait_s")
            without = "wait_finish_s" if own.has_begun else "wait_start_s"
            self.passing(without, 4.0, depth)  # the feeder has not said yet what is waited for
            for cause, seconds in waiting:
                own.awaits(cause, self.now)
                self.passing(without if cause is None else f"wait_{cause}_s", seconds, depth)
            own.end("wait_s", begun)
            own.split_there(1.0, 3.0)  # the receipt of the helper that read and decoded
            own.has_begun = True
            with own.timed("user_s"):
                self.passing("user_s", 4.0, depth)
                for kind, what in during:
                    if kind == "pass":
                        self.run(what, depth + 1)
                    elif kind == "save":
                        with saving([]):
                            self.passing("save_s", what, depth)
                    else:
                        self.passing("user_s", what, depth)


def add_up(intervals: list[tuple[float, tuple[int, ...], str]]) -> list[dict[str, float]]:
    """The seconds of each loader by field."""
    found: list[dict[str, float]] = [defaultdict(float) for _ in range(DEPTH)]
    for seconds, loaders, what in intervals:
        *around, own = loaders
        parts = {"wait_read_s": 1, "wait_decode_s": 3} if what == "wait_there_s" else {what: 4}
        for name, quarters in parts.items() if what != "save_s" else ():
            found[own][name] += seconds * quarters / 4
        if what.startswith("wait_"):
            found[own]["wait_s"] += seconds
        if what == "save_s":  # it counts for all loaders whose batch is in hand
            for loader in loaders:
                found[loader]["save_s"] += seconds
            found[own]["user_s"] += seconds
        for loader in around:
            found[loader]["user_s"] += seconds
            found[loader]["other_s"] += 0.0 if what == "save_s" else seconds
    return found


@given(batches=passes(0))
def test_each_second_counts_once_for_each_loader_with_its_cause(batches: list[tuple[Any, Any]]) -> None:
    consumer = Consumer()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "now", lambda: consumer.now)
        consumer.run(batches)
    for own, wanted in zip(consumer.clocks, add_up(consumer.intervals), strict=True):
        fields = [field.name for field in dataclasses.fields(own) if field.type is float and field.name[0] != "_"]
        assert {name: getattr(own, name) for name in fields} == {name: wanted[name] for name in fields}
        assert own.running() == {}


@pytest.mark.parametrize(("named_at", "read_s"), [(95.0, 3.0), (101.0, 2.0), (105.0, 0.0)])
def test_a_cause_counts_within_the_wait_whenever_it_was_named(
    monkeypatch: pytest.MonkeyPatch, named_at: float, read_s: float
) -> None:
    """The event that names a cause may come before the wait, or after the consumer, which ends it, saw the clock."""
    now, parts, own = 100.0, list[tuple[Any, float, float]](), WaitClock()
    own.on_waited = lambda *part: parts.append(part)
    monkeypatch.setattr(clock, "now", lambda: now)
    own.begin("wait_s")
    own.awaits("read", named_at)
    now = 103.0
    own.end("wait_s")
    assert (own.wait_s, own.wait_read_s, own.wait_start_s) == (3.0, read_s, 3.0 - read_s)
    assert parts == [("read", 103.0 - read_s, 103.0)]
