"""The order of a run whose rows and order change: the rest of an epoch has what is left of it, each row once."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.orders.changed import Change, Changed, as_recorded, can_change, could_change, left_rows, since, table_of
from raylance.orders.order import Facts, Order, Resolved
from raylance.orders.permutation import Int64Array
from raylance.orders.sampling import Weighted
from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle

ORDERS: tuple[Order, ...] = (
    RowShuffle(shard_rows=3),
    WindowShuffle(shard_rows=3, window_shards=2, lanes=2),
    ShardShuffle(shard_rows=4, window_shards=1, lanes=2),
    Sequential(shard_rows=5),
)


@dataclasses.dataclass
class Segment:
    """Rows with names, which changes leave as they are, in an order."""

    names: list[int]
    order: Order
    seed: int

    @property
    def before(self) -> dict[str, Any]:
        fields = {"version": 1, "identity": "i", "filter": None, "split": None, "fingerprint": "f"}
        return {**fields, "rows": len(self.names), "seed": self.seed, "order": self.order.params()}


@dataclasses.dataclass
class Run:
    """A run that is played: what each epoch has had, by position, and what may come in it."""

    segments: list[Segment]
    changes: tuple[Change, ...] = ()
    tables: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: int = 0  # that rows have had

    def named(self, count: int) -> list[int]:
        """Returns names that no row has had."""
        self.names += count
        return [*range(self.names - count, self.names)]

    def carry(self, change: int, names: Int64Array, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Rows that a segment does not select are still there, and may be selected later."""
        found = [*names.tolist(), *(self.segments[change].names[row] for row in rows)]
        places = {name: row for row, name in enumerate(self.segments[change + 1].names)}
        here = [places[name] for name in found if name in places]
        return np.array(found, dtype=np.int64), np.array(here, dtype=np.int64)

    def resolved(self) -> Resolved:
        last = self.segments[-1]
        order = Changed(of=last.order, changes=self.changes) if self.changes else last.order
        return order.resolve(Facts(rows=len(last.names), seed=last.seed, tables=self.tables))

    def change(self, segment: Segment, epoch: int, position: int, *, takes_new: bool, keeps: bool) -> None:
        last = Change(
            epoch=epoch,
            position=position,
            left=len(segment.names),
            takes_new=takes_new or not position,
            keeps=keeps,
            before=self.segments[-1].before,
        )
        self.segments, self.changes = [*self.segments, segment], (*self.changes, last)
        self.tables = left_rows(self.resolved(), epoch, self.carry)
        if (left := self.tables.get(table_of(len(self.changes) - 1))) is not None:
            self.changes = (*self.changes[:-1], dataclasses.replace(last, left=len(left)))


def new_segment(draw: st.DrawFn, run: Run, *, appends: bool) -> Segment:
    old = run.segments[-1]
    if appends:
        return Segment(old.names + run.named(draw(st.integers(0, 12))), old.order, old.seed)
    gone = draw(st.sets(st.sampled_from(old.names), max_size=8))
    kept, new = [name for name in old.names if name not in gone], run.named(draw(st.integers(1, 12)))
    return Segment([*kept, *new], draw(st.sampled_from(ORDERS)), draw(st.integers(0, 3)))


@given(data=st.data())
def test_the_rest_of_an_epoch_is_what_is_left_of_it(data: st.DataObject) -> None:
    """Any changes of rows, order and seed, several in an epoch: against sets of names."""
    draw = data.draw
    run = Run([])
    run.segments = [Segment(run.named(draw(st.integers(1, 30))), draw(st.sampled_from(ORDERS)), 1)]
    epoch, position, had = 0, 0, list[int]()  # of the present epoch
    due = {*run.segments[0].names}
    for _ in range(draw(st.integers(1, 5))):
        found = run.resolved().epoch(epoch)
        end = draw(st.integers(position, found.epoch_rows))
        names = run.segments[-1].names
        had += [names[row] for row in found.rows(np.arange(position, end))]
        position = end
        if position == found.epoch_rows:
            assert {*had} >= due, "each row that was due has come"
            epoch, position, had, due = epoch + 1, 0, [], {*names}
        appends, takes_new = draw(st.booleans()), draw(st.booleans())
        segment = new_segment(draw, run, appends=appends)
        before = run.resolved().epoch(epoch).rows(np.arange(position)) if appends else None
        run.change(segment, epoch, position, takes_new=takes_new, keeps=appends)
        now = {*segment.names}
        due = now if takes_new or not position else (due & now)
        found = run.resolved().epoch(epoch)
        rest = found.rows(np.arange(position, found.epoch_rows))
        assert sorted(segment.names[row] for row in rest) == sorted(due - {*had}), "and nothing twice"
        asked = np.array(draw(st.lists(st.integers(0, len(rest) - 1), max_size=9)) if len(rest) else [], dtype=np.int64)
        assert found.rows(position + asked).tolist() == rest[asked].tolist()
        if before is not None:
            known = run.resolved().known_from[1] if run.resolved().known_from[0] == epoch else 0
            assert found.rows(np.arange(known, position)).tolist() == before[known:].tolist(), "what came before stays"
        known = run.resolved().known_from
        assert appends or known == (epoch, position)
        for later in (epoch + 1, epoch + 4):
            plain, every = segment.order.resolve(Facts(rows=len(now), seed=segment.seed)), np.arange(len(now))
            assert run.resolved().epoch(later).rows(every).tolist() == plain.epoch(later).rows(every).tolist()


@given(data=st.data())
def test_epochs_that_are_over_stay_known_if_rows_were_appended_only(data: st.DataObject) -> None:
    draw = data.draw
    run = Run([])
    run.segments = [Segment(run.named(draw(st.integers(1, 20))), draw(st.sampled_from(ORDERS)), 1)]
    epoch, came = 0, dict[int, list[int]]()
    for _ in range(draw(st.integers(1, 4))):
        epoch += draw(st.integers(0, 2))
        rows = run.resolved().epoch(epoch).epoch_rows
        low = run.changes[-1].position if run.changes and run.changes[-1].epoch == epoch else 0
        position = draw(st.integers(low, rows))
        run.change(new_segment(draw, run, appends=True), epoch, position, takes_new=draw(st.booleans()), keeps=True)
        run.tables = {}  # they follow from the numbers
        for number in range(epoch + 2):
            found = run.resolved().epoch(number)
            rows_of = found.rows(np.arange(found.epoch_rows)).tolist()
            assert sorted(rows_of) == [*range(found.epoch_rows)]
            if number < epoch and number in came:
                assert rows_of == came[number]
            came[number] = rows_of
    assert run.resolved().known_from == (0, 0)


def begun() -> Run:
    run = Run([Segment([*range(100)], RowShuffle(shard_rows=1), 7)])
    run.change(Segment([*range(130)], RowShuffle(shard_rows=1), 7), 0, 40, takes_new=True, keeps=True)
    run.change(Segment([*range(10, 150)], Sequential(shard_rows=1), 7), 0, 60, takes_new=True, keeps=False)
    return run


def test_what_a_checkpoint_holds_is_read_as_it_was_written() -> None:
    run = begun()
    order = run.resolved().settings
    assert as_recorded(run.segments[-1].order, order.params()).adopt(order.params()) == order
    assert order.is_resolved
    params = order.params()
    assert since(params, 0) == params
    assert since(params, 1) == params["of"] == since(params["of"], 1)
    assert could_change(params, order)
    assert not could_change({"name": "mine"}, order)
    assert not could_change({"name": "window", "size": 3}, order)
    assert not can_change(Weighted(weights=[1.0]), has_tables=False)


def test_new_rows_come_among_those_that_are_left() -> None:
    run = Run([Segment([*range(1000)], RowShuffle(shard_rows=1), 7)])
    run.change(Segment([*range(1300)], RowShuffle(shard_rows=1), 7), 0, 400, takes_new=True, keeps=True)
    new = run.resolved().epoch(0).rows(np.arange(400, 1300)) >= 1000
    np.testing.assert_allclose(np.cumsum(new), np.arange(1, 901) / 3, atol=40)


def test_rows_of_an_epoch_that_are_gone_are_not_made_up() -> None:
    run = begun()
    run.tables = {}
    with pytest.raises(ConfigError):
        run.resolved().epoch(0).rows(np.arange(60, 70))


def test_damaged_changes_are_refused() -> None:
    order = RowShuffle(shard_rows=1)
    params = begun().resolved().params()
    changes = params["changes"]
    for wrong in (
        {},
        {"changes": []},
        {"changes": changes[::-1]},
        {"changes": [{"epoch": 1}]},
        {"changes": 3},
        {"changes": [changes[0] | {"before": {}}]},
        {"changes": [changes[0] | {"before": changes[0]["before"] | {"order": {"name": "unknown"}}}]},
    ):
        with pytest.raises(ConfigError):
            as_recorded(order, {"name": "changed", "of": order.params()} | wrong)
