"""The book of leases: each ticket is done once, whatever fails, ends, is repeated or restored."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raylance.errors import StateError
from raylance.planning.digest import Digest
from raylance.planning.leases import LeaseBook, read_book

Ticket = tuple[int, int]
"""Number and lease."""


def book(**settings: int | float | None) -> LeaseBook:
    given = {"most_ahead": 16, "lease_s": None, "most_attempts": None, "rows": None} | settings
    return LeaseBook(**given)  # type: ignore[arg-type]


def columns(tickets: list[Ticket]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    numbers, leases = (np.array(each, dtype=np.int64) for each in zip(*tickets, strict=True)) if tickets else [[], []]
    return np.array(numbers, dtype=np.int64), np.array(leases, dtype=np.int64), np.array(numbers, dtype=np.int64)


class Leasing(RuleBasedStateMachine):
    """Some workers lease, finish in any order, fail, die, repeat calls; the desk dies, and the run goes back."""

    @initialize(
        most_ahead=st.integers(1, 12),
        lease_s=st.none() | st.integers(1, 5),
        most_attempts=st.none() | st.integers(1, 3),
        rows=st.none() | st.integers(0, 40),
    )
    def begin(self, most_ahead: int, lease_s: int | None, most_attempts: int | None, rows: int | None) -> None:
        self.settings = {"most_ahead": most_ahead, "lease_s": lease_s, "most_attempts": most_attempts, "rows": rows}
        self.book, self.now = book(**self.settings), 0.0
        self.held: list[Ticket] = []  # by workers that live
        self.old: list[Ticket] = []  # that somebody may still report
        self.counted: dict[int, int] = {}  # the lease that counts, by ticket
        self.states: list[tuple[str, dict[int, int]]] = []

    @rule(rows=st.integers(1, 8))
    def lease(self, rows: int) -> None:
        numbers, lease = self.book.lease(rows, self.now)
        given = numbers.tolist()
        assert len(given) <= rows
        assert len(set(given)) == len(given)
        assert not set(given) & {*self.counted}, "what is done is not handed out again"
        if self.settings["lease_s"] is None:
            assert not set(given) & {number for number, _ in self.held}, "what somebody works on is not, either"
        self.held += [(number, lease) for number in given]

    @rule(data=st.data(), again=st.booleans())
    def finish(self, data: st.DataObject, again: bool) -> None:
        known = self.held + self.old
        if not known:
            return
        some = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=5))
        for _ in range(1 + again):
            counts = self.book.done(*columns(some))
            first: dict[int, int] = {}
            for number, lease in some:
                first.setdefault(number, lease)
            for (number, lease), found in zip(some, counts.tolist(), strict=True):
                if number >= self.book.next:
                    assert not found, "the run went back before it was handed out"
                elif number not in self.counted:
                    assert found == (first[number] == lease)
                elif number >= self.book.frontier - self.settings["most_ahead"]:  # type: ignore[operator]
                    assert found in (self.counted[number] == lease, False)
                if found:
                    self.counted.setdefault(number, lease)
        self.old += some
        self.held = [each for each in self.held if each not in some]

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        if self.held:
            some = data.draw(st.lists(st.sampled_from(self.held), min_size=1, max_size=5))
            self.book.fail(*columns(some)[:2])
            self.old += some
            self.held = [each for each in self.held if each not in some]

    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if self.held:
            gone = data.draw(st.sampled_from(self.held))[1]
            self.old += [each for each in self.held if each[1] == gone]
            self.held = [each for each in self.held if each[1] != gone]

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(keeps_leases=st.booleans())
    def made_again(self, keeps_leases: bool) -> None:
        written = json.loads(json.dumps(self.book.snapshot()))
        self.book = book(**self.settings).restore(written, keeps_leases=keeps_leases)
        if not keeps_leases:
            self.old, self.held = self.old + self.held, []

    @rule()
    def save(self) -> None:
        self.states.append((json.dumps(self.book.to_dict()), dict(self.counted)))

    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        if self.states:
            state, counted = data.draw(st.sampled_from(self.states))
            self.book.load(json.loads(state))
            self.counted = dict(counted)
            self.old, self.held = self.old + self.held, []

    @invariant()
    def the_book_says_what_happened(self) -> None:
        progress = self.book.progress()
        assert progress.done == len(self.counted)
        assert not self.book.digest.differs(Digest.of(np.array([*self.counted], dtype=np.int64)))
        left = [number for number in range(progress.next) if number not in self.counted]
        over = {*self.book.given_up}
        assert progress.given_up == len(over) == len([number for number in left if number in over])
        waits = [number for number in left if number not in over]
        assert progress.frontier == (waits[0] if waits else progress.next)
        assert progress.out + progress.waiting == len(waits)
        assert progress.next - progress.frontier <= self.settings["most_ahead"]  # type: ignore[operator]
        assert progress.is_over == (progress.frontier == self.settings["rows"])

    def teardown(self) -> None:
        """In the end all rows are done, or given up, each once."""
        if not hasattr(self, "book"):
            return
        target = self.settings["rows"]
        end = self.book.next + 5 if target is None else target
        for _ in range(200):
            self.now += 10
            if self.book.frontier >= end:
                break
            written = json.loads(json.dumps(self.book.snapshot()))
            self.book = book(**self.settings).restore(written, keeps_leases=False)
            numbers, lease = self.book.lease(4, self.now)
            for number in numbers.tolist():
                assert number not in self.counted
                self.counted[number] = lease
            assert self.book.done(*columns([(number, lease) for number in numbers.tolist()])).all()
        assert self.book.frontier >= end


TestLeasing = Leasing.TestCase


def test_old_rows_come_before_new_ones_and_the_newest_is_not_far_ahead() -> None:
    leases = book(most_ahead=6)
    first, one = leases.lease(4, 0.0)
    assert first.tolist() == [0, 1, 2, 3]
    leases.fail(np.array([2, 0]), np.array([one, one]))
    again, two = leases.lease(4, 0.0)
    assert again.tolist() == [0, 2, 4, 5]
    assert leases.lease(4, 0.0)[0].tolist() == []
    leases.done(*columns([(0, two), (1, one)]))
    assert leases.lease(4, 0.0)[0].tolist() == [6, 7]
    assert leases.progress().frontier == 2


def test_a_lease_that_is_over_is_handed_out_again_and_the_first_that_is_done_counts() -> None:
    leases = book(lease_s=10)
    _, slow = leases.lease(1, 0.0)
    assert leases.lease(1, 9.0)[0].tolist() == [1]
    numbers, fast = leases.lease(1, 10.0)
    assert numbers.tolist() == [0]
    assert leases.done(*columns([(0, slow)])).tolist() == [True]
    assert leases.done(*columns([(0, fast), (0, slow)])).tolist() == [False, True]
    assert leases.progress().done == 1


def test_a_state_is_small() -> None:
    leases, rng = book(most_ahead=100_000), np.random.default_rng(0)
    numbers, lease = leases.lease(100_000, 0.0)
    some = rng.permutation(numbers)[:50_000]
    leases.done(some, np.full(len(some), lease), some)
    assert len(json.dumps(leases.to_dict())) < 17_000  # a bit each, as text


@pytest.mark.parametrize("wrong", [{}, {"frontier": 3, "next": 1}, {"done": "?"}, {"digest": [1]}, {"frontier": "x"}])
def test_a_damaged_state_is_refused(wrong: dict[str, object]) -> None:
    good = book().to_dict()
    with pytest.raises(StateError):
        book().load({} if not wrong else good | wrong)
    for content in (b"", b"[]", b"{"):
        with pytest.raises(StateError):
            read_book(content)


def test_no_row_is_preferred() -> None:
    """Work of any length fails or ends: how often a row is done does not depend on how long it takes."""
    rng, leases = np.random.default_rng(1), book(most_ahead=64, rows=600)
    lengths, running, now, done = rng.pareto(1.1, 600) + 0.1, list[tuple[float, int, int]](), 0.0, Counter[int]()
    while not leases.progress().is_over:
        numbers, lease = leases.lease(16, now)
        running += [(now + lengths[number], number, lease) for number in numbers.tolist()]
        now, number, one = running.pop(running.index(min(running)))
        if rng.random() < 0.1:
            leases.fail(np.array([number]), np.array([one]))
        else:
            done[number] += int(leases.done(*columns([(number, one)]))[0])
    assert [*map(done.__getitem__, range(600))] == [1] * 600
