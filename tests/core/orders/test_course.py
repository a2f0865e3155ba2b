"""The course of a mixture: its weights, its end and its datasets change, and what lies before a change does not."""

import base64
import dataclasses
import itertools
import json
import math
import zlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.orders.course import Course, Segment, read_segments, stages_between, write_segments
from raylance.orders.mixture import MixOrder
from raylance.orders.order import Facts
from raylance.orders.shuffles import RowShuffle
from raylance.planning.cursor import Cursor
from raylance.planning.delivery_spec import DeliverySpec
from tests.helpers.orders import mix_of

ROW = 2**32  # in debts
Dealing = list[tuple[int, int]]


def rules(components: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 5), min_size=components, max_size=components).filter(any).map(tuple)


def schedules(components: int, most: int) -> st.SearchStrategy[tuple[tuple[int, tuple[int, ...]], ...]]:
    """Quotas from some numbers of rows of the run on."""
    knots = st.dictionaries(st.integers(0, most), rules(components), max_size=3)
    return knots.map(lambda found: tuple(sorted(found.items())))


@st.composite
def histories(draw: st.DrawFn, most_segments: int = 4) -> tuple[tuple[Segment, ...], tuple[int, ...]]:
    """Segments of a run, at some of which the rows of datasets change, and the rows of each dataset at the end."""
    rows = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    places = draw(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=most_segments)) - {(0, 0)}
    stops = st.sampled_from(["first_exhausted", "all_exhausted", 1, 17, 30])
    found = [
        Segment(
            epoch=epoch,
            position=position,
            quotas=draw(rules(len(rows))),
            stop=draw(stops),
            schedule=draw(schedules(len(rows), 120)),
            spread=draw(st.sampled_from(["tree", "pattern"])),
            turn_rows=draw(st.sampled_from([1, 1, 2, 5])),
            asked=draw(st.just(()) | rules(len(rows))),
            own=tuple(
                (number, draw(st.integers(1, 12)), draw(st.integers(0, 30)) * (position > 0))
                for number in sorted(draw(st.sets(st.integers(0, len(rows) - 1)))) * ((epoch, position) > (0, 0))
            ),
        )
        for epoch, position in [(0, 0), *sorted(places)]
    ]
    return tuple(found), rows


def rows_in(segments: tuple[Segment, ...], rows: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The rows of each dataset in each segment."""
    found = [rows]
    for segment in segments[:0:-1]:
        found.insert(0, segment.rows_before(found[0]))
    return found


@dataclasses.dataclass
class Part:
    """Positions of an epoch from `begin` on, which one rule deals, to datasets that are owed `debts` of a row."""

    segment: Segment
    quotas: tuple[int, ...]
    begin: int
    debts: list[int]

    def __post_init__(self) -> None:
        alone = Segment(quotas=self.quotas, stop=2**62, spread=self.segment.spread)  # its end is never reached
        self.dealer = Course((alone,), (1,) * len(self.quotas)).epoch(0).parts[0].dealer
        self.dealt = [0] * len(self.quotas)

    def deal(self, position: int) -> int:
        turn = (position - self.begin) // self.segment.turn_rows
        if self.segment.spread == "pattern" and all(self.quotas):
            return int(self.dealer.place(np.array([turn]))[0][0])
        parts = [index for index, quota in enumerate(self.quotas) if quota]
        while len(parts) > 1:
            left, right = parts[: len(parts) // 2], parts[len(parts) // 2 :]
            of_left, total = (sum(self.quotas[index] for index in some) for some in (left, parts))
            if self.begin:
                owed, of_both = (sum(self.debts[index] for index in some) for some in (left, parts))
                share = Fraction(owed * total - of_both * of_left, total * ROW * self.segment.turn_rows)
                of_left, total = of_left * (2**31 // total), total * (2**31 // total)
                phase = min(max(0, math.floor(total * (Fraction(1, 2) + share))), total - 1)
            else:
                phase = total // 2
            before, after = ((at * of_left + phase) // total for at in (turn, turn + 1))
            parts, turn = (left, before) if after > before else (right, turn - before)
        return parts[0]

    def owed(self) -> list[int]:
        rows, total = sum(self.dealt), sum(self.quotas)
        shares = zip(self.debts, self.quotas, self.dealt, strict=True)
        return [debt + rows * quota * ROW // total - count * ROW for debt, quota, count in shares]

    def ends(self, position: int, counts: list[int], rows: tuple[int, ...]) -> bool:
        stop, which = self.segment.stop, self.deal(position)
        if stop == "first_exhausted":
            return counts[which] > 0 and counts[which] % rows[which] == 0
        if stop == "all_exhausted":
            return all(counts[index] >= rows[index] for index, quota in enumerate(self.quotas) if quota)
        return position >= int(stop)


def dealt_by_hand(segments: tuple[Segment, ...], rows: tuple[int, ...], epochs: int) -> list[Dealing]:
    """For each position of the epochs, its dataset and how many rows this has before it; found one by one."""
    found, done, in_segments = [], 0, rows_in(segments, rows)
    for epoch in range(epochs):
        counts, dealing, rule, part, debts = [0] * len(rows), Dealing(), None, None, [0] * len(rows)
        own, own_rows = [*counts], rows  # what counts for the end of the epoch
        for position in itertools.count():
            if part is not None and part.ends(position, own, own_rows):
                break
            number = [at for at, each in enumerate(segments) if each.place <= (epoch, position)][-1]
            segment, own_rows = segments[number], in_segments[number]
            if segment.place == (epoch, position):
                for which, _, count in segment.own:
                    own[which] = count
            knots = [(at, quotas) for at, quotas in ((-1, segment.quotas), *segment.schedule) if at <= done + position]
            if (segment, len(knots)) != rule:
                debts = debts if part is None else part.owed()
                rule, part = (segment, len(knots)), Part(segment, knots[-1][1], position, debts)
                if part.ends(position, own, own_rows):
                    break
            assert part is not None
            which = part.deal(position)
            dealing.append((which, counts[which]))
            counts[which] += 1
            own[which] += 1
            part.dealt[which] += 1
        found.append(dealing)
        done += len(dealing)
    return found


@given(history=histories(), data=st.data())
def test_positions_are_dealt_as_by_hand(
    history: tuple[tuple[Segment, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    segments, rows = history
    course, wanted = Course(segments, rows), dealt_by_hand(segments, rows, 6)
    for epoch in data.draw(st.permutations(range(6))):
        dealt = course.epoch(epoch)
        which, index = dealt.place(np.arange(dealt.end))
        assert list(zip(which.tolist(), index.tolist(), strict=True)) == wanted[epoch]
        position = data.draw(st.integers(0, dealt.end))
        counts = [sum(each == number for each, _ in wanted[epoch][:position]) for number in range(len(rows))]
        assert dealt.counts(position) == counts
    same = [len(dealing) for dealing in wanted[course.last_change :]]
    assert len(set(same)) <= 1
    if any(segment.own for segment in segments):
        return
    # The own epochs of a dataset never come twice, in whatever epochs of the mixture.
    begun = [
        (number, course.epoch(epoch).first_own[number] + index // rows[number])
        for epoch, dealing in enumerate(wanted)
        for number, index in dealing
        if index % rows[number] == 0
    ]
    assert len(begun) == len(set(begun))


@given(history=histories(6), data=st.data())
def test_a_change_leaves_what_lies_before_it(
    history: tuple[tuple[Segment, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    segments, rows = history
    count = data.draw(st.integers(1, len(segments)))
    before, after = Course(segments[:count], rows_in(segments, rows)[count - 1]), Course(segments, rows)
    epoch, position = segments[count].place if count < len(segments) else (5, 0)
    for number in range(epoch + 1):
        old, new = before.epoch(number), after.epoch(number)
        end = min(position, old.end, new.end) if number == epoch else old.end
        positions = np.arange(end)
        np.testing.assert_array_equal(old.place(positions), new.place(positions))
        assert old.first_own == new.first_own
        assert number == epoch or old.end == new.end


@given(history=histories(8), data=st.data())
def test_a_course_that_is_extended_is_that_of_all_its_segments(
    history: tuple[tuple[Segment, ...], tuple[int, ...]], data: st.DataObject
) -> None:
    segments, rows = history
    in_segments = rows_in(segments, rows)
    course = Course(segments[:1], in_segments[0])
    for count in range(2, len(segments) + 1):
        for epoch in data.draw(st.lists(st.integers(0, 7), max_size=3)):
            course.epoch(epoch)
        course = course.extended(segments[count - 1], in_segments[count - 1])
        whole = Course(segments[:count], in_segments[count - 1])
        for epoch in data.draw(st.lists(st.integers(0, 7), max_size=4)):
            one, other = course.epoch(epoch), whole.epoch(epoch)
            assert (one.end, one.first_own, one.rows_before) == (other.end, other.first_own, other.rows_before)
            positions = np.arange(one.end)
            np.testing.assert_array_equal(one.place(positions), other.place(positions))
        assert course.last_change >= whole.last_change


@given(history=histories(40))
def test_segments_are_read_as_they_were_written(history: tuple[tuple[Segment, ...], tuple[int, ...]]) -> None:
    segments, rows = history
    written = json.loads(json.dumps(write_segments(segments)))
    assert read_segments(written, len(rows)) == segments


@pytest.mark.parametrize("wrong", [3, [{}], [{"quotas": [0, 0]}], [{"quotas": [1]}], {"packed": "x"}, [[1]]])
def test_damaged_segments_are_refused(wrong: object) -> None:
    with pytest.raises(ConfigError):
        read_segments(wrong, 2)


def test_a_thousand_segments_take_few_bytes() -> None:
    rng, segments = np.random.default_rng(0), []
    for number in range(1000):
        quotas = tuple(rng.integers(1, 1000, 3).tolist())
        place = {"epoch": number // 100, "position": 1_000_000 + number % 100 * 40_960}
        segments.append(Segment(**place, quotas=quotas, stop="first_exhausted", is_move=True, reason="losses"))
    assert len(json.dumps(write_segments(segments))) < 16_000


def test_a_state_that_was_compressed_elsewhere_is_the_same() -> None:
    """Other versions of the library compress otherwise."""
    order = resolved(mix_of("all_exhausted", (RowShuffle(), 100, 3), (RowShuffle(), 50, 1), spread="tree"))
    for position in range(1, 40):
        order = order.moved(0, position, {"a": position, "b": 1}, "")
    written = order.params()
    values = zlib.decompress(base64.b85decode(written["segments"]["packed"]))
    elsewhere = written | {"segments": {"packed": base64.b85encode(zlib.compress(values, 1)).decode()}}
    assert elsewhere != written
    assert order.adopt(elsewhere).after(elsewhere, 0, 41)[0] == order
    fields = dict.fromkeys(("branch", "filter", "split", "columns", "decode", "transform", "codecs"))
    of_each = {name: {"a": name, "b": name} for name in ("uri", "version", "identity")}
    spec = DeliverySpec(
        uri=of_each["uri"], rows=150, row_bytes=8.0, fingerprint="f", order=order, seed=0, remainder="drop",
        empty_batches=False, masks_bad_rows=False,
    )  # fmt: skip
    cursor = Cursor(fields | of_each, spec)
    state = cursor.state(8, 1)
    cursor.load(dataclasses.replace(state, order=elsewhere).to_dict())
    assert cursor.delivery_spec.order == order


def test_a_line_is_cut_into_equal_parts() -> None:
    from fractions import Fraction

    line = stages_between((0, [Fraction(1), Fraction(0)]), (100, [Fraction(0), Fraction(1)]), 4)
    assert list(line) == [(0, (7, 1)), (25, (5, 3)), (50, (3, 5)), (75, (1, 7))]


def resolved(order: MixOrder) -> MixOrder:
    found = order.resolve(Facts(rows=sum(part.rows for part in order.components), seed=0)).settings
    assert isinstance(found, MixOrder)
    return found


@given(data=st.data())
def test_no_dataset_starves_by_changes(data: st.DataObject) -> None:
    """Turns began anew at each change of the weights, so that a dataset of a quarter of the rows had none."""
    turn = data.draw(st.sampled_from([1, 8, 64]))
    segments, wanted, position = [Segment(quotas=(3, 1, 2), stop=2**40, turn_rows=turn)], np.zeros(3), 0
    for _ in range(data.draw(st.integers(1, 60))):
        more = data.draw(st.integers(1, 100))
        wanted += more * np.array(segments[-1].quotas) / sum(segments[-1].quotas)
        position += more
        quotas = data.draw(st.just(segments[-1].quotas) | rules(3))
        segments.append(Segment(position=position, quotas=quotas, stop=2**40, turn_rows=turn))
    course = Course(tuple(segments[:1]), (1000, 1000, 1000))
    for segment in segments[1:]:
        course = course.extended(segment, (1000, 1000, 1000))
    counts = course.epoch(0).counts(position)
    assert sum(counts) == position
    assert np.abs(np.array(counts) - wanted).max() <= 3 * turn


def test_a_step_is_of_one_dataset() -> None:
    segments = (
        Segment(quotas=(2, 1), stop="all_exhausted", turn_rows=8),
        Segment(epoch=0, position=48, quotas=(1, 3), stop="all_exhausted", turn_rows=8),
    )
    which, index = Course(segments, (40, 100)).epoch(0).place(np.arange(112))
    assert which.reshape(-1, 8).tolist() == [[each] * 8 for each in which[::8]]
    assert np.bincount(which[:48]).tolist() == [32, 16]
    assert np.bincount(which[48:]).tolist() == [16, 48]
    assert index[which == 1].tolist() == [*range(64)]


def test_a_restart_keeps_what_was_consumed_and_changes_the_rest() -> None:
    old = resolved(mix_of("first_exhausted", (RowShuffle(), 100, 3), (RowShuffle(), 50, 1), spread="tree"))
    new = mix_of("first_exhausted", (RowShuffle(), 100, 1), (RowShuffle(), 50, 1), (RowShuffle(), 30, 2), spread="tree")
    found, change = new.adopt(old.params()).after(old.params(), 1, 40)
    assert "0.75" in change
    assert "0.25" in change
    assert found.rule_at(1, 39).quotas == (3, 1, 0)
    assert found.rule_at(1, 40).quotas == (1, 1, 2)
    standings = [found.standings(1, position) for position in (40, 60)]
    assert {name: one["rows"] for name, one in standings[0].items()} == {"a": 30, "b": 10, "c": 0}
    assert {name: one["rows"] for name, one in standings[1].items()} == {"a": 35, "b": 15, "c": 10}
    # The same program again, later: nothing changes.
    again, change = new.adopt(found.params()).after(found.params(), 1, 60)
    assert (again.params(), change) == (found.params(), "")


def test_what_the_training_function_changed_stays_after_a_restart() -> None:
    given = mix_of("all_exhausted", (RowShuffle(), 100, 3), (RowShuffle(), 50, 1), spread="tree")
    moved = resolved(given).moved(0, 16, {"a": 0.5, "b": 0.5}, "loss of b")
    again, change = given.adopt(moved.params()).after(moved.params(), 0, 32)
    assert (again.params(), change) == (moved.params(), "")
    other = dataclasses.replace(given, stop=120)
    after, change = other.adopt(moved.params()).after(moved.params(), 0, 32)
    assert after.rule_at(0, 31).reason == "loss of b"
    assert (after.rule_at(0, 32).quotas, after.rule_at(0, 32).stop) == ((3, 1), 120)
    assert change
