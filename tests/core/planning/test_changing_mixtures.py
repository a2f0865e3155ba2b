"""Mixtures whose datasets change at restarts, against sets of names: each dataset has what is left of its own epoch."""

import dataclasses
import json
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raylance.columns import COMPONENT
from raylance.orders.mixture import Component, MixOrder
from raylance.orders.order import Order
from raylance.orders.permutation import Int64Array
from raylance.orders.shuffles import RowShuffle, Sequential, ShardShuffle, WindowShuffle
from raylance.planning.cursor import Cursor
from raylance.planning.delivery_spec import DeliverySpec

ORDERS: tuple[Order, ...] = (
    RowShuffle(),
    RowShuffle(shard_rows=3),
    WindowShuffle(shard_rows=3, window_shards=2, lanes=2),
    ShardShuffle(shard_rows=4, window_shards=1, lanes=2),
    Sequential(shard_rows=5),
)
FILTERS = (None, "even", "not 3")


@dataclasses.dataclass
class Data:
    """A dataset whose versions hold rows with names; and what is known of it, see `Versions`."""

    versions: list[list[int]]
    filter: str | None
    order: Order
    seed: int
    quota: int
    when: str
    # In its present own epoch: the rows that it had, and all that it must have
    had: set[int] = dataclasses.field(default_factory=set)
    due: set[int] = dataclasses.field(default_factory=set)

    def selected(self, fields: Mapping[str, Any] | None = None) -> list[int]:
        version, filter = (fields["version"], fields["filter"]) if fields else (len(self.versions) - 1, self.filter)
        kept = {None: lambda name: True, "even": lambda name: name % 2 == 0, "not 3": lambda name: name % 3 > 0}
        return [name for name in self.versions[version] if kept[filter](name)]

    def fingerprint_of(self, fields: Mapping[str, Any] | None) -> str:
        return str(self.selected(fields))

    def has_rows_of(self, version: Any, identity: Any) -> bool:
        return bool(self.versions[version] == self.versions[-1])

    def has_grown_from(self, before: Mapping[str, Any]) -> bool:
        old, now = self.selected(before), self.selected()
        return (
            now[: len(old)] == old
            and self.versions[-1][: len(self.versions[before["version"]])] == (self.versions[before["version"]])
        )

    def carry(
        self, before: Mapping[str, Any], after: Mapping[str, Any] | None, offsets: Int64Array, rows: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        old, there = self.versions[before["version"]], self.versions[after["version"] if after else -1]
        selected = self.selected(before)
        names = [*(old[at] for at in offsets), *(selected[row] for row in rows)]
        now = {name: row for row, name in enumerate(self.selected(after))}
        here = [there.index(name) for name in names if name in there]
        return np.array(here, dtype=np.int64), np.array([now[each] for each in names if each in now], dtype=np.int64)


class Run:
    """A run over a mixture that is played; its datasets change at restarts."""

    def __init__(self, random: Random) -> None:
        self.random, self.names, self.state = random, 0, dict[str, Any]()
        self.data = [self.new_data() for _ in range(random.randint(1, 3))]
        self.data[0].quota = max(1, self.data[0].quota)
        self.has_schedule = random.random() < 0.3
        self.stop = random.choice(["first_exhausted", "all_exhausted", 17, 61])
        self.delivered: list[tuple[int, int]] = []  # in the present epoch: datasets and names
        self.given = self.shares = [data.quota for data in self.data]  # by the arguments, and what holds now
        self.has_moved = False  # whether the training function has changed them

    def part(self, number: int) -> Data:
        return self.data[number]

    def has_rows_of(self, version: Mapping[str, int], identity: Any) -> bool:
        return all(each.has_rows_of(version[f"d{number}"], None) for number, each in enumerate(self.data))

    def named(self, count: int) -> list[int]:
        self.names += count
        return [*range(self.names - count, self.names)]

    def new_data(self) -> Data:
        random = self.random
        rows, when = self.named(random.randint(8, 25)), random.choice(["now", "next_epoch"])
        quota, seed = random.randint(0, 4), random.randint(0, 3)
        return Data([rows], random.choice(FILTERS), random.choice(ORDERS), seed, quota, when)

    def change(self, data: Data) -> None:
        random, rows = self.random, data.versions[-1]
        for what in random.choices(["append", "delete", "order", "filter", "seed", "when"], k=random.randint(0, 3)):
            if what == "append":
                rows = rows + self.named(random.randint(1, 9))
            elif what == "delete":
                gone = random.sample(rows, k=random.randint(0, min(6, len(rows))))
                rows = [name for name in rows if name not in gone]
            elif what == "order":
                data.order = random.choice(ORDERS)
            elif what == "filter":
                data.filter = random.choice(FILTERS)
            elif what == "seed":
                data.seed = random.randint(0, 3)
            else:
                data.when = random.choice(["now", "next_epoch"])
        if len(rows) < 12:
            rows = rows + self.named(20)
        data.versions = [*data.versions, rows]

    def cursor(self, *, looks_back: bool = False) -> Cursor:
        names = [f"d{number}" for number in range(len(self.data))]
        rows = [len(data.selected()) for data in self.data]
        components = tuple(
            Component(
                name=name, order=data.order, seed=data.seed, rows=count, quota=data.quota, on_new_version=data.when
            )
            for name, data, count in zip(names, self.data, rows, strict=True)
        )
        origin: dict[str, Any] = dict.fromkeys(("columns", "decode", "transform", "codecs", "cost"))
        origin |= {"uri": {name: name for name in names}, "branch": dict.fromkeys(names), "split": dict.fromkeys(names)}
        origin |= {"filter": {name: data.filter for name, data in zip(names, self.data, strict=True)}}
        numbers = {name: len(data.versions) - 1 for name, data in zip(names, self.data, strict=True)}
        origin |= {"version": numbers, "identity": {name: f"i{number}" for name, number in numbers.items()}}
        spec = DeliverySpec(
            uri=origin["uri"],
            rows=sum(rows),
            row_bytes=8.0,
            fingerprint=str([data.selected() for data in self.data]),
            order=MixOrder(components=components, stop=self.stop, spread="tree", schedule=self.schedule()),
            seed=self.data[0].seed,
            remainder="ragged",
            empty_batches=True,
            masks_bad_rows=False,
        )
        return Cursor(origin, spec, self, looks_back=looks_back)  # type: ignore[arg-type]

    def schedule(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Weights that change after some rows of the run; all datasets have a share then."""
        numbers = range(len(self.data))
        places = range(7, 300, 31) if self.has_schedule else ()
        return tuple((rows, tuple(1 + (rows + 3 * number) % 4 for number in numbers)) for rows in places)

    def begin_epoch(self) -> None:
        self.delivered = []
        for data in self.data:
            data.had, data.due = set(), {*data.selected()}

    def start(self) -> None:
        """Restarts the run, of which some steps are consumed."""
        random, cursor = self.random, self.cursor()
        if self.state:
            cursor.load(self.state)
            if cursor.position == 0:
                self.begin_epoch()
        else:
            self.begin_epoch()
        size, dp_size, came = random.randint(1, 9), random.randint(1, 3), list[tuple[tuple[int, ...], list[int]]]()
        plan = cursor.plan(size=size, dp_size=dp_size, reader_bytes=1 << 20)
        cursor.follow(plan)
        if self.state:
            back = self.cursor(looks_back=True)
            back.load(self.state)
            self.check_what_came(cursor, back.plan(size=size, dp_size=1, reader_bytes=1 << 20))
            beside = plan.order.epoch(cursor.epoch).rows(np.arange(plan.rows_of(cursor.epoch)))  # as padding does
            assert {*beside.tolist()} <= {*range(sum(len(data.selected()) for data in self.data))}
        for _ in range(random.randint(0, 12)):
            if not plan.steps(cursor.epoch, cursor.position):  # nothing is left of an epoch whose rows are gone
                assert cursor.position >= plan.rows_of(cursor.epoch)
                cursor.end_epoch()
                self.begin_epoch()
                continue
            if (came or not self.has_schedule) and random.random() < 0.1:
                self.shares, self.has_moved = [1 + random.randint(-1, 3) for _ in self.data], True
                self.shares[0] += 1
                cursor.reweight({f"d{number}": share for number, share in enumerate(self.shares)}, "losses")
                plan = cursor.plan(size=size, dp_size=dp_size, reader_bytes=1 << 20)
            after = plan.after(cursor.epoch, cursor.position, 1)
            rows = plan.order.epoch(cursor.epoch).rows(np.arange(cursor.position, after))
            came.append((cursor.place, rows.tolist()))
            self.take(cursor, rows)
            is_last = after >= plan.rows_of(cursor.epoch)
            if is_last:
                self.check_the_end()
            cursor.advance(after, is_last=is_last)
            if is_last:
                self.begin_epoch()
        if came := [each for each in came if each[0][0] == cursor.epoch]:
            self.check_the_way_back(cursor, plan, *random.choice(came))
        self.state = json.loads(json.dumps(cursor.state(size, 1).to_dict()))

    def check_the_way_back(self, cursor: Cursor, plan: Any, place: tuple[int, ...], rows: list[int]) -> None:
        """A step of this start comes again."""
        end = cursor.place
        cursor.seek(plan, place[3])
        assert cursor.place == place
        assert plan.order.epoch(place[0]).rows(np.arange(place[1], place[1] + len(rows))).tolist() == rows
        cursor.return_to(end)

    def check_what_came(self, cursor: Cursor, plan: Any) -> None:
        """The epoch knows what it has had, in the versions of that time."""
        epoch, positions = plan.order.epoch(cursor.epoch), np.arange(cursor.position)
        found, is_known = [(-1, -1)] * len(positions), np.ones(len(positions), dtype=bool)
        for before, mine, rows in epoch.earlier(positions):
            number, is_known = before[COMPONENT], is_known & ~mine
            names = self.data[number].selected(before)
            for at, row in zip(np.flatnonzero(mine), rows, strict=True):
                found[at] = number, names[row]
        now = [(number, name) for number, data in enumerate(self.data) for name in data.selected()]
        for at in np.flatnonzero(is_known):
            found[at] = now[int(epoch.rows(positions[at : at + 1])[0])]
        assert found == self.delivered

    def take(self, cursor: Cursor, rows: Int64Array) -> None:
        now = [(number, name) for number, data in enumerate(self.data) for name in data.selected()]
        for row in rows.tolist():
            number, name = now[row]
            data = self.data[number]
            assert self.has_share(number)
            if data.due <= data.had:  # its next own epoch
                assert self.stop != "first_exhausted"
                data.had, data.due = set(), {*data.selected()}
            assert name in data.due
            assert name not in data.had
            data.had.add(name)
            self.delivered.append((number, name))

    def has_share(self, number: int) -> bool:
        return self.shares[number] > 0 or (self.has_schedule and not self.has_moved)

    def check_the_end(self) -> None:
        if self.stop == "first_exhausted":
            assert any(data.due <= data.had for number, data in enumerate(self.data) if self.has_share(number))
        elif self.stop != "all_exhausted":
            assert len(self.delivered) == self.stop

    def restart(self) -> None:
        """Changes some datasets, and what is due of them."""
        random = self.random
        for data in self.data:
            if random.random() < 0.5:
                self.change(data)
            now = {*data.selected()}
            if data.had and data.due <= data.had:  # its own epoch is over
                data.had, data.due = ({*data.had}, {*data.had}) if self.stop == "first_exhausted" else (set(), now)
            elif not data.had:  # it has not begun
                data.due = now
            else:
                data.due = now if data.when == "now" else now & data.due
        if random.random() < 0.5:
            for data in self.data:
                data.quota = random.randint(0, 4)
            self.data[0].quota = max(1, self.data[0].quota)
        if len(self.data) < 4 and random.randint(0, 5) == 0:
            self.data.append(self.new_data())
            self.data[-1].due = {*self.data[-1].selected()}
        wanted, more = [data.quota for data in self.data], [0] * (len(self.data) - len(self.given))
        if wanted != self.given + more or (self.has_schedule and more):
            self.shares, self.has_moved = wanted, False
        else:
            self.shares = self.shares + more
        self.given = wanted
        self.start()


@given(seed=st.integers(0, 2**32))
def test_each_dataset_has_what_is_left_of_its_own_epoch(seed: int) -> None:
    play(Random(seed))


def play(random: Random) -> None:
    run = Run(random)
    run.start()
    for _ in range(random.randint(1, 4)):
        run.restart()
