"""Blocks of rows that decoders decode: by all of them, in the order of a search, and again with more bytes."""

import pytest

from raylance.dispatch.messages import Alive, DecodeBlock, Done, Failed, Fault, Load, Lost, Place
from raylance.dispatch.suspects import MAX_DEATHS
from raylance.observe import Receipt
from tests.helpers.dispatch import DECODED, Driver, make_kept, make_pool, of_kind


def begin(rows: int, decoders: int) -> Driver:
    """A pass of one step whose chunk is loaded when all helpers run."""
    kept = make_kept(make_pool(decoders), by_block=True)
    driver = Driver(kept, rows, item_rows=rows, global_batch_size=rows, decodes=False, answers_loads=False)
    driver.start()
    answered = set[int]()
    while loads := [load for load in driver.given(Load) if load.number == 0 and load.call not in answered]:
        answered |= {load.call for load in loads}
        for load in loads:
            driver.handle(driver.loaded(load))
    return driver


def bounds(command: DecodeBlock) -> tuple[int, int]:
    return command.first + command.low, command.first + command.high


@pytest.mark.parametrize("decoders", [1, 2, 4])
def test_all_decoders_decode_the_blocks_of_a_chunk(decoders: int) -> None:
    """A small chunk, which one load has brought, is divided among them; each row is decoded once."""
    driver, answered, helpers = begin(16, decoders), list[DecodeBlock](), set[int]()
    while waiting := [each for each in driver.given(DecodeBlock) if each not in answered]:
        helpers |= {each.helper for each in waiting}
        answered.append(waiting[0])
        driver.handle(Done(waiting[0].call, DECODED))
    assert len(helpers) == decoders
    assert sorted(row for each in answered for row in range(*bounds(each))) == [*range(16)]


def test_rows_after_a_bad_one_are_tried_when_it_is_known() -> None:
    """All rows of a video from 40 on end their decoder, until the first of them is known to be bad."""
    driver, answered, deaths, given_up = begin(64, 2), set[int](), 0, list[int]()
    for _ in range(100):
        waiting = [each for each in driver.given(DecodeBlock) if each.call not in answered]
        if not waiting:
            break
        command = waiting[0]
        low, high = bounds(command)
        if command.given_up:
            given_up += range(low, high)
            receipt = Receipt(bad_rows=((40, "top", "it is bad"),))
            answered.add(command.call)
            driver.handle(Done(command.call, receipt))
        elif high > 40 and 40 not in dict(command.known_bad):
            deaths += 1
            lost = [each for each in waiting if each.helper == command.helper]
            answered |= {each.call for each in lost}
            for place in of_kind(
                driver.handle(Lost(command.helper, Fault(what="its process ended", may_be_rows=True))), Place
            ):
                driver.handle(Alive(place.helper))
        else:
            answered.add(command.call)
            driver.handle(Done(command.call, DECODED))
    assert dict(driver.last(DecodeBlock).known_bad).keys() <= {40}
    assert given_up == [40]
    assert deaths <= 2 + 2 * 6 + MAX_DEATHS


def test_what_lacks_bytes_is_loaded_again_with_more() -> None:
    class LackingError(Exception):
        needs_bytes = True

    driver, margins = begin(64, 1), [0]
    while margins[-1] < 1 << 40:
        driver.handle(Failed(driver.last(DecodeBlock).call, LackingError()))
        load = driver.last(Load)
        assert load.margin > margins[-1]
        assert (load.number, load.first) == (max(each.number for each in driver.given(Load)), 0)
        margins.append(load.margin)
        driver.handle(driver.loaded(load))
    driver.handle(Failed(driver.last(DecodeBlock).call, LackingError()))
    assert driver.last(Load).rows < 64, "it fails as other rows do: in halves"
