"""What the simulation has found, each by the few events that show it, and what pool, account and items in flight do by
themselves.
"""

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Sequence

import pytest

from raylance.dispatch.account import Account
from raylance.dispatch.in_flight import InFlight
from raylance.dispatch.load_ahead import MAX_FAULTS
from raylance.dispatch.messages import (
    Alive,
    Awaited,
    Close,
    Decode,
    Deliver,
    Dismiss,
    Done,
    Failed,
    Fault,
    Faulted,
    Fetch,
    Fetched,
    Forget,
    Gather,
    GiveUp,
    GiveUpPlacing,
    Log,
    Lost,
    NotPlaced,
    Ping,
    Place,
    Taken,
    Wanted,
)
from raylance.dispatch.states import ItemState
from raylance.errors import HelperError
from raylance.observe import Receipt
from raylance.observe.observations import Status
from raylance.planning.plan import WorkItem
from tests.helpers.dispatch import DECODED, FAULT, RAW, Driver, kinds, make_pool, of_kind, open_pool, reader_of
from tests.simulation.schedule import DECODED_BYTES, EPOCH, RAW_BYTES, make_plan


def test_what_is_answered_and_not_told_yet_is_not_late() -> None:
    pool = make_pool()
    first = Driver(pool)
    first.start()
    read = first.last(Gather)
    first.handle(Close())
    again = Driver(pool, now=1000.0)  # nobody took events in between
    assert Dismiss not in kinds(again.commands)
    assert again.dispatcher.deadline() is not None
    for call in range(read.call + 1):
        assert Dismiss not in kinds(again.handle(Done(call, RAW)))
    assert Dismiss not in kinds(again.handle(None))


@pytest.mark.parametrize("comes_at", [3.0, 7.0])
def test_decoders_that_start_are_waited_for_a_while(comes_at: float) -> None:
    driver = Driver(make_pool(needs_decoder=False), rows=1)
    reader, decoder = driver.given(Place)
    driver.handle(Alive(reader.helper), 1.0)
    assert not driver.last(Gather).decodes
    driver.handle(Done(driver.last(Gather).call, RAW), 2.0)
    assert (driver.given(Decode), driver.dispatcher.deadline()) == ([], 5.0)
    if comes_at > 5.0:
        driver.handle(None, 5.0)
        assert driver.last(Gather).decodes, "read once more, and decoded there"
        driver.handle(Done(driver.last(Gather).call, DECODED), 6.0)
    driver.handle(Alive(decoder.helper), comes_at)
    for decode in driver.given(Decode):
        driver.handle(Done(decode.call, DECODED))
    fetch = driver.last(Fetch)
    driver.handle(Fetched(fetch.call, None, None))
    assert len(driver.given(Deliver)) == 1
    assert len(driver.given(Gather)) == (1 if comes_at < 5.0 else 2)
    assert driver.is_over


def test_a_helper_placed_late_because_nobody_looked_has_its_time() -> None:
    driver = Driver(make_pool(decoders=2, needs_decoder=False))
    driver.handle(Alive(0))
    driver.handle(NotPlaced(1, FAULT, permanent=False))
    placed = of_kind(driver.handle(Alive(0), 60.0), Place)
    assert Dismiss(placed[0].helper) not in driver.handle(None)
    assert Dismiss(placed[0].helper) in driver.handle(None, 79.0)


def test_what_went_with_a_helper_known_to_be_gone_is_not_counted_again() -> None:
    driver = Driver(make_pool(), rows=1)
    driver.start()
    for _ in range(MAX_FAULTS):
        driver.handle(Done(driver.last(Gather).call, RAW))
        decode = driver.last(Decode)
        for command in driver.handle(Lost(decode.helper, FAULT)):
            if isinstance(command, Place):
                driver.handle(Alive(0))
                driver.handle(Alive(command.helper))
        driver.handle(Faulted(driver.last(Decode).call, FAULT))
    assert GiveUp not in kinds(driver.commands)
    driver.handle(Done(driver.last(Gather).call, RAW))
    driver.handle(Lost(driver.last(Decode).helper, FAULT))
    assert isinstance(driver.last(GiveUp).error, HelperError)


def test_work_that_is_done_again_waits_for_a_reader_that_has_answered() -> None:
    driver = Driver(make_pool(), rows=1)
    driver.start()
    read = driver.last(Gather)
    driver.handle(Done(read.call, RAW))
    driver.handle(Faulted(driver.last(Decode).call, FAULT))
    driver.handle(None, 1.0)
    assert driver.last(Gather) == read
    driver.handle(Alive(0))
    assert driver.last(Gather) != read


def test_a_rank_without_rows_is_split_as_any_other() -> None:
    driver = Driver(make_pool(), rows=6, world_size=2, item_rows=8)
    driver.start()
    assert driver.last(Gather).item.rows == 0
    assert driver.last(Gather).item.steps > 1
    driver.handle(Lost(0, FAULT))
    driver.start()
    assert driver.last(Gather).item.steps == 1


def test_a_row_that_fails_keeps_nothing() -> None:
    driver = Driver(make_pool(), rows=2)
    driver.start()
    first, second = driver.given(Gather)
    driver.handle(Done(first.call, RAW))
    driver.handle(Done(second.call, RAW))
    ahead, failing = driver.given(Decode)
    assert Forget((second.call,)) in driver.handle(Failed(failing.call, ValueError("row")))
    driver.handle(Done(ahead.call, DECODED))
    fetch = driver.last(Fetch)
    assert kinds(driver.handle(Fetched(fetch.call, None, None))) == [Deliver, Forget, GiveUp]  # type: ignore[arg-type]
    assert driver.is_over


def test_a_decoder_that_cannot_start_is_done_without_while_another_is_on_its_way() -> None:
    pool = make_pool(decoders=2)
    driver = Driver(pool)
    driver.start()
    driver.handle(Lost(1, FAULT))
    driver.handle(Lost(2, FAULT))
    driver.handle(NotPlaced(3, FAULT, permanent=True))
    assert pool.failure is None
    driver.handle(NotPlaced(4, FAULT, permanent=True))
    assert isinstance(pool.failure, GiveUp)
    assert driver.handle(Close()) == []


def account(**changes: float) -> Account:
    sizes = {"raw_bytes": RAW_BYTES, "decoded_bytes": 0, "inflight_bytes": 1 << 30, "items": 5, "reader_bytes": 1 << 30}
    return Account(**(sizes | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("raw", [100, 500_000])
def test_sizes_fade_each_by_itself(raw: int) -> None:
    sizes = account(decoded_bytes=DECODED_BYTES)
    item = next(make_plan(0, 4, 1, 1, "drop", 1000).items(0, EPOCH, 0, 1))
    for _ in range(100):
        sizes.learn(item, [Receipt(nbytes=raw, raw_bytes=raw), DECODED])
        # What a row may bring, it counts for.
        assert sizes.reserved_bytes(1) >= sizes.allowed_bytes(1) + DECODED_BYTES or sizes.allowed_bytes(1) == 64 << 10
    assert sizes.reserved_bytes(1) == pytest.approx(1.5 * raw + DECODED_BYTES, rel=0.01)


def test_the_first_decoder_that_runs_decodes() -> None:
    driver = Driver(make_pool(decoders=4), rows=1)
    reader, first, *_ = driver.given(Place)
    driver.handle(Alive(reader.helper))
    driver.handle(Done(driver.last(Gather).call, RAW))
    assert not driver.given(Decode)
    driver.handle(Alive(first.helper))
    driver.handle(Done(driver.last(Decode).call, DECODED))
    driver.handle(Fetched(driver.last(Fetch).call, None, None))
    assert len(driver.given(Deliver)) == 1
    assert driver.is_over


def test_decoders_that_find_no_place_are_done_without_as_long_as_one_runs() -> None:
    """Of a node that is gone for good, say: with an explicit number, the run could not start again."""
    pool = open_pool(1, decoders=4)
    for helper in (1, 2):
        pool.alive(helper, 1.0)
    logs = [output.line for output in pool.late(20.0) if isinstance(output, Log)]
    why = "a decoder did not start in 20 s, which placement_timeout_s allows. The loader works with"
    assert [line.split(", with the same")[0] for line in logs] == [f"{why} 2 of 4 decoders"]
    assert (pool.failure, pool.wanted["decoder"]) == (None, 2)
    pool.not_placed(3, FAULT, True, 21.0)
    assert pool.failure is None
    assert pool.lost(1, 30.0)[1][0] == Dismiss(1)
    pool.due(30.0)
    pool.late(50.0)
    assert (pool.failure, pool.wanted["decoder"]) == (None, 1)
    pool.lost(2, 60.0)
    pool.due(60.0)
    pool.late(80.0)
    assert pool.failure == GiveUpPlacing("decoder", 4, 4)


def test_a_decoder_has_one_in_work_and_one_that_waits() -> None:
    pool = open_pool(3, decoders=2)
    given = []
    while (helper := pool.decoder(responsive=False)) is not None:
        given.append(helper)
        pool.send(helper, 0.0)
    assert given == [1, 2, 1, 2]
    assert len(pool.running("decoder")) == 2
    pool.ping(0.0)
    assert len(pool.running("decoder")) == 2


def test_who_answers_something_is_not_hung() -> None:
    """A helper works on one call after the other: the second one has not been its work since it was sent."""
    pool = open_pool(1)
    calls = [pool.send(0, 0.0) for _ in range(3)]
    pool.answered(calls[0], 50.0)
    assert pool.hung(109.0) == []
    assert pool.deadline(109.0) == 20.0, "of the decoder, which does not run yet"
    ((helper, fault),) = pool.hung(110.0)
    assert helper == 0
    assert fault.what == "reader 0 has not answered for 60 s, which work_timeout_s allows"
    assert "raise work_timeout_s" in fault.advice
    pool.ping(109.0)
    pool.answered(calls[1], 109.0)  # as it was on its way already
    assert not reader_of(pool, responsive=True)
    pool.alive(0, 109.0)
    assert reader_of(pool, responsive=True) == [0]
    pool.answered(calls[2], 109.0)
    assert pool.hung(1000.0) == []


def test_a_sign_of_life_from_before_the_last_death_says_nothing() -> None:
    pool = open_pool(4, decoders=3)
    pool.lost(1, 1.0)
    pool.lost(2, 2.0)
    pool.alive(3, 3.0)
    assert pool.decoder(responsive=True) is None
    pool.alive(3, 3.0)
    assert pool.decoder(responsive=True) == 3


def test_a_refusal_shortly_before_the_end_is_the_end() -> None:
    pool = open_pool(decoders=0)
    assert of_kind(pool.not_placed(0, FAULT, False, 18.9), Dismiss) == [Dismiss(0)]
    assert pool.failure is None
    pool.due(19.9)
    pool.not_placed(1, FAULT, False, 19.95)
    assert isinstance(pool.failure, GiveUp)
    assert "a reader could not start: it died." in str(pool.failure.error)
    last = open_pool(decoders=0)
    last.not_placed(0, FAULT, False, 19.0)  # another one would have no time at all
    assert last.failure is not None


def test_who_owes_a_sign_of_life_owes_it_since_it_was_first_asked() -> None:
    pool = open_pool(1)
    assert pool.ping(10.0) == [Ping(0)]
    assert pool.ping(20.0) == []
    assert pool.ping(50.0, again=True) == [Ping(0)]
    assert pool.hung(69.9) == []
    assert [helper for helper, _ in pool.hung(70.0)] == [0]
    pool.send(0, 60.0)
    pool.alive(0, 69.0)
    pool.alive(0, 69.0)
    assert pool.hung(128.9) == []
    assert [helper for helper, _ in pool.hung(129.0)] == [0]


def test_who_is_gone_is_counted_and_logged_once() -> None:
    pool = open_pool(1, decoders=2)
    pool.lost(0, 1.0)
    assert pool.lost(0, 1.0) == (None, [])
    assert pool.replaced == 1
    log = Log(logging.WARNING, "a decoder died as it started: it died")
    assert pool.not_placed(1, FAULT, False, 2.0) == [log, Dismiss(1)]
    assert pool.not_placed(1, FAULT, False, 2.0) == []


def test_an_error_of_placement_says_how_many_of_how_many() -> None:
    for decoders, failure in ((3, GiveUpPlacing("decoder", 3, 3)), (0, GiveUpPlacing("reader", 1, 1))):
        alone = open_pool(decoders=decoders)
        alone.late(20.0)
        assert alone.failure == failure
    lost = open_pool(3, decoders=2)
    for helper, now in ((1, 1.0), (2, 1.5)):
        lost.lost(helper, now)
        lost.due(now)
    for now in (21.0, 21.5):
        lost.late(now)
    assert lost.failure == GiveUpPlacing("decoder", 2, 2), "although the first was done without for a moment"


def test_a_start_that_is_tried_again_has_what_is_left_of_its_time() -> None:
    pool = open_pool(2, decoders=2)
    pool.not_placed(2, FAULT, False, 10.0)
    assert pool.due(10.0) == []
    assert pool.due(11.0) == [Place(3, "decoder")]
    assert pool.deadline(11.0) == 20.0
    assert pool.late(20.0)[-1] == Dismiss(3)
    assert (pool.failure, pool.wanted["decoder"]) == (None, 1)


def test_a_start_that_was_not_asked_for_in_time_is_not_late() -> None:
    pool = make_pool()
    driver = Driver(pool)
    decoder = driver.given(Place)[-1].helper
    driver.handle(NotPlaced(decoder, FAULT, permanent=False), 17.0)
    driver.handle(Alive(driver.given(Place)[0].helper), 17.0)
    later = driver.handle(None, 25.0)  # a batch was being made as the pause, and what was left of its time, passed
    assert (kinds(later), pool.failure) == ([Place], None)
    assert driver.dispatcher.deadline() == 27.0, "two seconds were left after the pause"
    assert driver.handle(None, 27.0)[-1] == GiveUpPlacing("decoder", 1, 1)


def test_a_wait_ends_when_a_batch_is_taken() -> None:
    """It counts from the consumer's event on, until a batch is taken."""
    driver, causes = Driver(make_pool()), []
    for event in (Awaited(), Taken(EPOCH, 0), Awaited()):
        (status,) = [output for output in driver.dispatcher.handle(event, 1.0) if isinstance(output, Status)]
        causes.append(status.cause)
    assert causes == ["start", None, "start"]


def test_the_next_epoch_follows_without_a_gap() -> None:
    """Its items keep the helpers at work; none of the epoch after it is begun, nor more before it is asked for."""
    driver = Driver(make_pool(), spans_epochs=True)
    driver.start()

    def deliver(items: int) -> None:
        for _ in range(items):
            entries = len(driver.given(Deliver))
            gather = driver.given(Gather)[entries]
            driver.handle(Done(gather.call, RAW))
            driver.handle(Done(driver.given(Decode)[entries].call, DECODED))
            driver.handle(Fetched(driver.last(Fetch).call, None, None))

    def gathered() -> Counter[int]:
        return Counter(gather.item.epoch for gather in driver.given(Gather))

    assert gathered() == {EPOCH: 4}
    deliver(3)
    for position in range(1, 4):
        driver.handle(Taken(EPOCH, position))
    assert gathered() == {EPOCH: 4, EPOCH + 1: 2}, "two for the decoder beside the last one"
    deliver(1)
    driver.handle(Taken(EPOCH, 4))
    assert gathered() == {EPOCH: 4, EPOCH + 1: 4}, "those to prefetch; nobody has asked for more"
    driver.handle(Wanted())
    deliver(4)
    assert gathered() == {EPOCH: 4, EPOCH + 1: 4}, "no step of the epoch was taken"
    assert not driver.is_over
    driver.handle(Taken(EPOCH + 1, 1))
    driver.handle(Taken(EPOCH + 1, 2))
    assert gathered()[EPOCH + 2] > 0


def test_sizes_cut_what_is_larger_than_thought() -> None:
    sizes = account(inflight_bytes=30_000_000)  # 6 MB: ten rows an item
    assert sizes.item_rows() == 10
    assert sizes.reserved_bytes(4) == sizes.allowed_bytes(4) == 4 * 600_000
    plan = make_plan(0, 60, 1, 1, "drop", 1000)
    item = next(plan.items(0, EPOCH, 0, 24))
    single, pair = plan.cut(item, 24)[0], plan.cut(item, 12)[0]
    assert sizes.parts(item) == 3  # more than twice as much as it should have
    assert sizes.parts(next(plan.items(0, EPOCH, 0, 20))) == 1
    assert sizes.too_large(pair, 1_000_000) == sizes.too_large(item, 7_000_000) == 2
    assert sizes.too_large(item, 24_000_000) == 4
    assert sizes.reserved_bytes(1) == 1_500_000
    assert sizes.too_large(single, 30_000_000) == 1
    assert sizes.parts(single) == 1
    assert sizes.parts(pair) == 15
    assert sizes.allowed_bytes(1) == 45_000_000
    assert account(raw_bytes=0, inflight_bytes=100, items=1).item_rows() == 100
    assert account(raw_bytes=1e9, inflight_bytes=100, items=1).item_rows() == 1
    sizes.learn(item, [Receipt(nbytes=24_000_000, raw_bytes=24_000_000)])
    assert sizes.allowed_bytes(1) == pytest.approx(40_500_000)
    many = account(inflight_bytes=30_000_000)
    many.learn(item, [Receipt(nbytes=24_000_000, raw_bytes=24_000_000), Receipt(nbytes=48_000_000)])
    assert many.reserved_bytes(1) == pytest.approx(1_500_000 + 2_000_000)


def test_the_few_samples_of_a_last_chunk_say_nothing_of_others() -> None:
    sizes = account(reader_bytes=100 * 3000 * 2, raw_bytes=100)
    for _ in range(20):  # epochs
        sizes.learn_rows(3000, 3000)  # neighbours share their rows
        sizes.learn_chunk(3000, 3000 * 100)
        sizes.learn_rows(10, 80)
        assert sizes.chunk_rows(3000) == 3000
    for _ in range(10):  # all chunks are small now
        sizes.learn_rows(1000, 8000)
    assert sizes.chunk_rows(1000) < 1000


def test_a_part_of_a_chunk_says_nothing_of_the_whole() -> None:
    """Its samples share fewer rows. The chunk was cut, and cut again, because its parts shared less and less."""
    sizes = account(reader_bytes=100 * 3600 * 2, raw_bytes=100)
    for part in (32, 64, 512, 1400):  # the first chunks of a pass
        sizes.learn_rows(part, 8 * part, 3600)
        assert sizes.chunk_rows(3600) == 3600
    assert sizes.chunk_rows(1400, 3600) < 1400, "before a whole one has come"
    sizes.learn_rows(10, 80)  # the last chunk of an epoch, with steps of its own
    assert sizes.chunk_rows(3600) == 3600
    sizes.learn_rows(3000, 3600, 3600)  # as good as a whole one
    assert sizes.chunk_rows(3600) == 3600
    assert sizes.chunk_rows(1400, 3600) == 1400, "it has no more rows than the whole one"


def test_a_step_is_one_item_if_two_of_them_fit_in_flight() -> None:
    """An item of a part of it would be copied once more."""
    sizes = account(raw_bytes=1_000_000, inflight_bytes=300_000_000)
    sizes.set_items(3, 90)
    assert sizes.item_rows() == 90
    sizes.set_items(3, 110)
    assert sizes.item_rows() < 110


def make_inflight(prefetch_batches: int, inflight_bytes: int = 1 << 30, items: int = 5) -> InFlight:
    """Steps of four rows, of which each is an item."""
    plan = make_plan(0, 60, 4, 1, "drop", 1000)
    sizes = account(raw_bytes=100_000, inflight_bytes=inflight_bytes, items=items)
    return InFlight(plan, plan.items(0, EPOCH, 0, 1), (EPOCH, 0), sizes, prefetch_batches)


@pytest.mark.parametrize(("prefetch_batches", "taken"), [(0, 4), (1, 4), (2, 8), (3, 12)])
def test_steps_are_taken_on_as_far_ahead_as_asked_for(prefetch_batches: int, taken: int) -> None:
    inflight = make_inflight(prefetch_batches)
    inflight.take_on(decoders=1)
    assert len(inflight.entries) == taken


def test_what_waits_for_the_consumer_counts_as_taken_on() -> None:
    inflight = make_inflight(1)
    inflight.take_on(decoders=2)
    assert len(inflight.entries) == 5
    inflight.deliver()
    inflight.take_on(decoders=3)
    assert len(inflight.entries) == 6  # and one of a step that is not whole
    for _ in range(3):
        inflight.deliver()
    inflight.take_on(decoders=4)
    assert len(inflight.entries) == 5  # and four of a step that nobody has taken
    inflight.taken((EPOCH, 4))
    inflight.take_on(decoders=4)
    assert len(inflight.entries) == 9


def test_bytes_that_wait_for_the_consumer_count_too() -> None:
    inflight = make_inflight(9, inflight_bytes=1_200_000, items=8)  # a row counts for 150,000
    inflight.take_on(decoders=9)
    assert len(inflight.entries) == 8
    for _ in range(4):
        inflight.deliver()
    inflight.take_on(decoders=9)
    assert len(inflight.entries) == 4
    inflight.taken((EPOCH, 4))
    inflight.take_on(decoders=9)
    assert len(inflight.entries) == 8


def test_items_are_made_as_they_are_wanted() -> None:
    plan = make_plan(0, 60, 1, 1, "drop", 1000)
    items = plan.items(0, EPOCH, 0, 1)
    inflight = InFlight(plan, items, (EPOCH, 0), account(), 1)
    inflight.take_on(decoders=1)
    assert len(list(items)) == 60 - len(inflight.entries) - 1  # the next one, which is known and not wanted yet


def test_what_is_sent_fills_the_limit_and_no_more() -> None:
    inflight = make_inflight(1, inflight_bytes=300_000, items=2)  # a row counts for 150,000
    inflight.take_on(decoders=1)
    first, second = inflight.entries
    assert inflight.has_room(first)
    first.state = ItemState.GATHERING
    assert inflight.has_room(second)
    second.reserved_bytes += 1
    assert not inflight.has_room(second)


def test_smaller_pieces_may_have_their_share_of_what_is_known() -> None:
    plan = make_plan(0, 60, 1, 1, "drop", 1000)
    inflight = InFlight(plan, plan.items(0, EPOCH, 0, 4), (EPOCH, 0), account(raw_bytes=100_000), 1)
    inflight.take_on(decoders=1)
    whole, following = inflight.entries[0], inflight.entries[1]
    whole.faults, whole.not_before = 2, 7.0
    inflight.cut(whole, 2, 8_000_000)
    half = inflight.entries[1]
    inflight.cut(half, 2, half.allowed_bytes)
    inflight.cut(inflight.entries[1], 1, 9_000_000)
    pieces = list(itertools.takewhile(lambda piece: piece is not following, inflight.entries))
    assert [(piece.item.position, piece.item.rows) for piece in pieces] == [(0, 2), (2, 1), (3, 1)]
    allowed = [4_000_000, 9_000_000, 2_000_000]  # what it may have, it counts for
    assert [(piece.allowed_bytes, piece.reserved_bytes) for piece in pieces] == [(each, each) for each in allowed]
    assert all((piece.faults, piece.not_before) == (2, 7.0) for piece in pieces)


def test_items_are_read_side_by_side_and_decoded_where_they_were_read_for() -> None:
    driver = Driver(make_pool(decoders=2))
    driver.start()
    reads = driver.given(Gather)
    assert [read.item.position for read in reads] == [0, 1, 2, 3], "none waits for another to be read"
    for read in reversed(reads):
        driver.handle(Done(read.call, RAW))
    decodes = driver.given(Decode)
    assert {decode.source for decode in decodes} == {read.call for read in reads}
    assert {decode.epoch for decode in decodes} == {EPOCH}


def test_new_work_goes_also_to_helpers_that_owe_a_sign_of_life() -> None:
    driver = Driver(make_pool(decoders=2), rows=2)
    driver.start()
    first, second = driver.given(Gather)
    driver.handle(Done(first.call, RAW))
    lost = driver.last(Decode).helper
    assert Decode not in kinds(driver.handle(Lost(lost, FAULT))), "what is done again waits for one that has answered"
    (decode,) = of_kind(driver.handle(Done(second.call, RAW)), Decode)
    assert decode.source == second.call


ENDED = Fault(what="its process ended", may_be_rows=True)
DEATHS = {2: 4, 7: 6, 64: 9}  # of decoders, until one row is known: of all twice, of each half, and of two fresh ones


def _rows(item: WorkItem) -> set[int]:
    return {*range(item.low, item.high)}


def _alone(item: WorkItem) -> set[int]:
    return _rows(item) if item.rows == 1 else set()


def play_with_fatal(
    rows: int,
    fatal: set[int],
    decoders: int = 2,
    fault: Fault = ENDED,
    killed: Sequence[int] = (),
    fails: Sequence[int] = (),
    item_rows: int | None = None,
) -> tuple[Driver, dict[int, str]]:
    """Plays a pass of one step whose `fatal` rows end each decoder that tries them; the decoders of those `killed` are
    killed once, as they try the row by itself, and to decode one of `fails` is an error. Returns why rows are given
    up, by row.
    """
    to_kill = set(killed)
    driver = Driver(make_pool(decoders), rows, item_rows=item_rows or rows, global_batch_size=rows)
    driver.start()
    given_up, answered, items = dict[int, str](), set[int](), dict[int, WorkItem]()
    for _ in range(200):
        commands = (each for each in driver.commands if isinstance(each, Gather | Decode | Fetch))
        waiting = [each for each in commands if each.call not in answered]
        if driver.is_over or not waiting:
            break
        command = waiting[0]
        answered.add(command.call)
        if isinstance(command, Gather):
            items[command.call] = command.item
            driver.handle(Done(command.call, RAW))
        elif isinstance(command, Fetch):
            driver.handle(Fetched(command.call, None, None))
        elif {*fails} & _rows(items[command.source]):
            driver.handle(Failed(command.call, ValueError("the row says no")))
        elif command.given_up or not (
            fatal & _rows(items[command.source]) or {*to_kill} & _alone(items[command.source])
        ):
            if command.given_up:
                assert items[command.source].rows == 1
                given_up[items[command.source].low] = command.given_up
            driver.handle(Done(command.call, DECODED))
        else:
            to_kill -= _alone(items[command.source])
            for place in of_kind(driver.handle(Lost(command.helper, fault)), Place):
                for helper in {each.helper for each in driver.given(Place)} - {place.helper}:
                    driver.handle(Alive(helper))
                driver.handle(Alive(place.helper))
    return driver, given_up


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_a_row_that_ends_its_decoder_is_found_and_given_up(rows: int) -> None:
    fatal = rows // 2
    driver, given_up = play_with_fatal(rows, {fatal})
    if rows == 1:  # nothing shows that decoders work here
        assert "ended the process of its decoder 4 times" in str(driver.last(GiveUp).error)
        check_ended(driver)
        return
    assert given_up == {fatal: "it ended the process of its decoder 4 times (its process ended)"}
    assert len(driver.given(Dismiss)) == DEATHS[rows]
    delivered = [(each.item.low, each.item.high) for each in driver.given(Deliver)]
    assert (fatal, fatal + 1) in delivered
    assert [low for low, _ in delivered] == sorted({low for low, _ in delivered})
    assert (delivered[0][0], delivered[-1][1]) == (0, rows)


def test_two_rows_that_end_their_decoders_are_both_found() -> None:
    driver, given_up = play_with_fatal(64, {3, 40})
    assert set(given_up) == {3, 40}
    assert GiveUp not in kinds(driver.commands)


def test_a_row_whose_decoder_was_killed_once_is_kept() -> None:
    driver, given_up = play_with_fatal(64, {40}, killed=[41])
    assert set(given_up) == {40}
    assert GiveUp not in kinds(driver.commands)


@pytest.mark.parametrize("fatal", [{0}, {0, 1, 2}])
def test_the_first_rows_of_a_pass_may_end_their_decoders(fatal: set[int]) -> None:
    """With one decoder nothing else had been decoded before, so that no run could resume there."""
    driver, given_up = play_with_fatal(64, fatal, decoders=1)
    assert set(given_up) == fatal
    assert GiveUp not in kinds(driver.commands)


def check_ended(driver: Driver) -> None:
    """No row showed that decoders work; and nothing stays anywhere."""
    assert "no other row was decoded so far" in str(driver.last(GiveUp).error)
    forgotten = {call for each in driver.given(Forget) for call in each.calls}
    assert {each.call for kind in (Gather, Decode) for each in driver.given(kind)} <= forgotten


@pytest.mark.parametrize("item_rows", [64, 8, 3])
@pytest.mark.parametrize("decoders", [1, 2, 3])
def test_a_decoder_that_can_decode_nothing_ends_the_pass(decoders: int, item_rows: int) -> None:
    driver, given_up = play_with_fatal(64, {*range(64)}, decoders=decoders, item_rows=item_rows)
    assert not given_up
    check_ended(driver)
    assert len(driver.given(Place)) < (40 if decoders < 3 else 50)


def test_a_row_that_waits_for_others_does_not_wait_for_one_that_has_failed() -> None:
    driver, given_up = play_with_fatal(2, {0}, fails=[1], item_rows=1)
    assert not given_up
    assert "no other row was decoded so far" in str(driver.last(GiveUp).error)


def test_a_row_that_waits_for_others_leaves_the_limit_to_them() -> None:
    """The next item went beyond the limit, beside others in work; one that is larger than the limit goes alone."""
    driver = Driver(make_pool(1), rows=4, item_rows=1, global_batch_size=4)
    inflight = driver.dispatcher._inflight
    driver.start()
    head, second, third, fourth = inflight.entries
    head.suspicion.waits, second.reserved_bytes = True, 1e12
    head.state = second.state = fourth.state = ItemState.WAITING
    third.state = ItemState.GATHERED
    assert not inflight.has_room(second)
    third.state = ItemState.WAITING
    assert inflight.has_room(second)
    assert inflight.has_room(head)


def test_a_decoder_that_ended_at_the_work_of_another_loader_is_no_fault_of_these_rows() -> None:
    of_others = dataclasses.replace(ENDED, is_of_others=True)
    driver = Driver(make_pool(1), 1, item_rows=1, global_batch_size=1)
    driver.start()
    read = driver.last(Gather)
    driver.handle(Done(read.call, RAW))
    for _ in range(20):
        decode = driver.last(Decode)
        for place in of_kind(driver.handle(Lost(decode.helper, of_others)), Place):
            driver.handle(Alive(place.helper))
    driver.handle(Done(driver.last(Decode).call, DECODED))
    assert GiveUp not in kinds(driver.commands)
    assert not any(each.given_up for each in driver.given(Decode))


def test_a_kill_by_the_memory_monitor_is_no_rows_fault() -> None:
    driver, given_up = play_with_fatal(64, {3}, fault=FAULT)
    assert not given_up
    assert "was lost 4 times" in str(driver.last(GiveUp).error)


def test_a_suspect_is_tried_by_a_fresh_decoder() -> None:
    pool = open_pool(3, decoders=2)
    call = pool.send(1, 0.0)
    pool.answered(call, 0.0)
    assert pool.decoder(responsive=False, fresh=True) == 2, "the other one has worked"
    pool.answered(pool.send(2, 0.0), 0.0)
    assert pool.decoder(responsive=False, fresh=True) in (1, 2), "one with nothing else to do, if none is fresh"
    pool.lost(1, 1.0)
    assert pool.decoder(responsive=False, fresh=True) is None, "one starts"
    pool.due(1.0)
    pool.alive(3, 2.0)
    assert pool.decoder(responsive=False, fresh=True) == 3
    pool.send(3, 2.0)
    assert pool.decoder(responsive=False, fresh=True) is None or pool.decoder(responsive=False, fresh=True) == 2


@pytest.mark.parametrize("is_queued", [True, False])
def test_the_pass_ends_with_its_head_wherever_that_is(is_queued: bool) -> None:
    driver = Driver(make_pool(1), rows=6, item_rows=1, global_batch_size=6)
    driver.start()
    first, second, *others = driver.given(Gather)
    driver.handle(Done(second.call, RAW))
    if is_queued:
        driver.handle(Done(first.call, RAW))
    _, suspect, *held = driver.dispatcher._inflight.entries
    suspect.suspicion.deaths = MAX_FAULTS
    for entry in held:
        entry.suspicion.waits = True
    driver.handle(Lost(driver.last(Decode).helper, ENDED))
    check_ended(driver)
    assert len(others) == 4
