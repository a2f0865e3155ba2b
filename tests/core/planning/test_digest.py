"""The digest of what was handed out: sums that add up, and a ledger that is cut, bounded, and never wrong."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.orders.permutation import mix64
from raylance.planning.digest import Digest, Interval, Ledger, fold


@given(offsets=st.lists(st.integers(0, 2**62), min_size=1, max_size=50), cut=st.integers(0, 50), seed=st.integers(0, 9))
def test_digests_add_up_over_ranks_and_steps_in_any_order(offsets: list[int], cut: int, seed: int) -> None:
    rows = np.array(offsets, dtype=np.int64)
    parts = [Digest.of(rows[:cut]), Digest.of(np.random.default_rng(seed).permutation(rows[cut:]))]
    total = parts[0] + parts[1]
    assert total == Digest(rows=len(offsets), hash=sum(int(word) for word in mix64(rows.astype(np.uint64))) % 2**64)


@given(steps=st.integers(1, 5), size=st.integers(0, 7), seed=st.integers(0, 2**32 - 1))
def test_steps_that_lie_together_have_digests_of_their_own_and_padding_is_counted_apart(
    steps: int, size: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows, real = random.integers(0, 2**60, steps * size), random.random(steps * size) < 0.7
    found = Digest.of_steps(rows, real, [size] * steps)
    for step, digest in enumerate(found):
        mine = slice(step * size, (step + 1) * size)
        kept = rows[mine][real[mine]]
        assert digest == Digest(rows=len(kept), hash=Digest.of(kept).hash, padding=size - len(kept))


def step(ledger: Ledger, epoch: int, low: int, high: int, *, is_last: bool = False) -> None:
    ledger.add(epoch, low, high, Digest.of(np.arange(low, high) + 1000 * epoch), is_last=is_last)


def test_a_ledger_is_cut_at_reports_epochs_and_jumps() -> None:
    ledger = Ledger()
    for low in range(0, 50, 10):
        step(ledger, 0, low, low + 10, is_last=low == 40)
        if low == 10:
            ledger.cut()
            ledger.cut()
    step(ledger, 1, 0, 10)
    step(ledger, 1, 0, 10)  # it was sent back to the start of the epoch
    step(ledger, 1, 10, 20)
    found = [(each.jump, *each.begin, *each.end) for each in ledger.intervals]
    assert found == [(0, 0, 0, 0, 20), (0, 0, 20, 1, 0), (0, 1, 0, 1, 10), (1, 1, 0, 1, 20)]
    assert ledger.intervals[1].digest == Digest.of(np.arange(20, 50))
    assert ledger.since(1, 0) == Digest.of(np.arange(1000, 1020)), "of the last jump alone"
    assert ledger.since(0, 0) is None
    assert [Interval.from_list(each.to_list()) for each in ledger.intervals] == ledger.intervals


@given(
    epochs=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    cuts=st.sets(st.integers(0, 300)),
    recent=st.integers(1, 20),
    most=st.integers(1, 20),
)
def test_a_folded_ledger_keeps_its_sums_and_its_last_cuts(
    epochs: list[int], cuts: set[int], recent: int, most: int
) -> None:
    ledger, number = Ledger(), 0
    for epoch, steps in enumerate(epochs):
        for low in range(steps):
            step(ledger, epoch, low, low + 1, is_last=low == steps - 1)
            number += 1
            if number in cuts:
                ledger.cut()
    every = ledger.intervals
    gone, folded = fold(every, recent, most)
    assert sum((each.digest for each in (*gone, *folded)), Digest()) == sum((each.digest for each in every), Digest())
    assert folded[-recent:] == every[-recent:]
    assert len(folded) <= recent + most
    for before, after in itertools.pairwise(folded):
        assert before.end == after.begin
    for interval in folded:
        of = [each for each in every if interval.begin <= each.begin < interval.end]
        assert sum((each.digest for each in of), Digest()) == interval.digest


def test_a_ledger_of_ten_thousand_reports_stays_small() -> None:
    ledger = Ledger()
    for low in range(10_000):
        step(ledger, 0, low, low + 1)
        ledger.cut()
    assert len(ledger.intervals) <= 1024
    assert sum((each.digest for each in ledger.intervals), Digest()) == Digest.of(np.arange(10_000))
    assert [each.high for each in ledger.intervals[-200:]] == list(range(9_801, 10_001))


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["take", "take", "take back", "cut", "load", "move"]), st.integers(0, 2), st.booleans()
        ),
        max_size=60,
    )
)
def test_a_step_that_is_taken_back_leaves_no_trace(steps: list[tuple[str, int, bool]]) -> None:
    """Against a ledger that was never given the step: whatever share it was of, and whatever came just before."""
    ledger, other, at = Ledger(), Ledger(), 0
    for what, share, is_last in steps:
        if what == "take back":
            ledger.add(0, at, at + 10, Digest.of(np.arange(at, at + 10)), is_last=is_last, share=(share, 3))
            ledger.take_back()
            ledger.take_back()  # only once
        for each in (ledger, other):
            if what == "take":
                each.add(0, at, at + 10, Digest.of(np.arange(at, at + 10)), is_last=False, share=(share, 3))
            elif what == "cut":
                each.cut()
            elif what == "load":
                each.load(0, 20)
            elif what == "move":
                each.move(0)
        at = {"take": at + 10, "load": 20, "move": 0}.get(what, at)
        known = {name: value for name, value in ledger.to_dict().items() if name != "ledger"}
        assert known == {name: value for name, value in other.to_dict().items() if name != "ledger"}


def test_a_ledger_that_joins_knows_what_the_other_one_knows() -> None:
    first, second = Ledger(), Ledger()
    for low in range(0, 50, 10):
        step(first, 0, low, low + 10)
    step(second, 3, 0, 10)
    second.join(first.to_dict())
    assert second.intervals == first.intervals
    assert second.name != first.name
    step(second, 0, 50, 60)
    assert second.intervals[-1].begin == (0, 50), "it is cut where it joined"
    assert second.intervals[-1].jump == first.intervals[-1].jump
    with pytest.raises(ValueError, match="not an interval of a digest"):
        second.join({"intervals": [[1, 2]], "restored": [], "forgotten": None})


def test_ledgers_that_join_have_names_of_their_own_before_their_first_step() -> None:
    """Two processes that are killed there leave two records, which are not of one process."""
    first = Ledger()
    first.add(0, 0, 8, Digest.of(np.arange(8)), is_last=False)
    joined = [Ledger(), Ledger()]
    for ledger in joined:
        ledger.join(first.to_dict())
    names = {ledger.to_dict()["ledger"] for ledger in (first, *joined)}
    assert len(names) == 3
    assert "" not in names
