"""The search for a row that ends its decoders, played with decoders that end at given rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.dispatch.suspects import MAX_DEATHS, Advice, Suspects, Suspicion


def search(rows: int, fatal: set[int], *, has_decoded: bool) -> tuple[set[int], int]:
    """The rows that are found bad, and the deaths that it took."""
    suspects = Suspects()
    suspects.has_decoded = has_decoded
    waiting, bad, deaths = [(0, rows, Suspicion())], set[int](), 0
    while waiting:
        low, high, known = waiting.pop()
        if not fatal & {*range(low, high)}:
            suspects.has_decoded = True
            continue
        deaths += 1
        match suspects.after_death(known, steps=1, rows=high - low, waiting=0, has_others=bool(waiting)):
            case Advice.AGAIN:
                waiting.append((low, high, known))
            case Advice.HALVES:
                middle = (low + high) // 2
                waiting += [(low, middle, known.of_part()), (middle, high, known.of_part())]
            case Advice.BAD:
                bad.add(low)
            case Advice.WAIT:
                waiting.insert(0, (low, high, known))
                known.waits = False
            case Advice.END:
                return bad, deaths
    return bad, deaths


@given(rows=st.integers(1, 64), data=st.data())
def test_all_rows_that_end_their_decoders_are_found_and_no_others(rows: int, data: st.DataObject) -> None:
    fatal = data.draw(st.sets(st.integers(0, rows - 1), max_size=3))
    found, deaths = search(rows, fatal, has_decoded=True)
    assert found == fatal
    assert deaths <= len(fatal) * (rows.bit_length() + MAX_DEATHS + 2)


def test_a_row_is_not_bad_while_no_row_was_decoded() -> None:
    assert search(1, {0}, has_decoded=False) == (set(), MAX_DEATHS + 1)


@pytest.mark.parametrize("waits", [False, True])
def test_the_pass_ends_when_too_many_rows_wait(waits: bool) -> None:
    known = Suspicion(deaths=MAX_DEATHS, waits=waits)
    advice = Suspects().after_death(known, steps=1, rows=1, waiting=MAX_DEATHS + waits, has_others=True)
    assert advice is Advice.END


def test_an_item_of_several_steps_is_cut_into_these_first() -> None:
    assert Suspects().after_death(Suspicion(), steps=3, rows=9, waiting=0, has_others=True) is Advice.STEPS
