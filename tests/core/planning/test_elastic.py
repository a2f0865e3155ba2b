"""Runs whose ranks come and go, step by step: rows, positions and proofs against lists."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.orders.permutation import Int64Array
from raylance.orders.shuffles import WindowShuffle
from raylance.planning.cursor import Cursor
from raylance.planning.digest import Digest, Ledger
from raylance.planning.history import LoaderHistory, line_of_history
from raylance.planning.plan import Plan
from raylance.planning.proof import Expected, prove
from tests.helpers.plans import Chosen
from tests.helpers.states import DELIVERY, ORIGIN

ROWS, BATCH, EPOCHS = 123, 12, 3
SELECTION = Chosen(np.arange(ROWS))
SPEC = dataclasses.replace(DELIVERY, rows=ROWS, order=WindowShuffle(shard_rows=5, window_shards=2, lanes=3))
WHOLE = (0, 1)


@dataclasses.dataclass
class Replica:
    """A process with a loader's position and ledger; `written` is what its record had when it was last written."""

    number: int
    rank: int
    cursor: Cursor
    ledger: Ledger = dataclasses.field(default_factory=Ledger)
    written: LoaderHistory | None = None
    rows: Int64Array = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.int64))
    real: Any = None


class Training:
    """Replicas that train step by step, as torchft has them do, and the rows of the steps that were committed."""

    def __init__(self, replicas: int, remainder: Any, *, sums: bool) -> None:
        """With `sums`, each rank records the digest of all ranks together; else that of its own share."""
        self.spec, self.sums = dataclasses.replace(SPEC, remainder=remainder), sums
        self.gone: list[LoaderHistory] = []
        self.taken, self.made = list[Int64Array](), 0
        self.alive: list[Replica] = []
        for rank in range(replicas):
            self.join(rank)

    def join(self, rank: int) -> None:
        self.alive.append(Replica(self.made, rank, Cursor(ORIGIN, self.spec)))
        self.made += 1

    def plan(self, cursor: Cursor, size: int) -> Plan:
        return cursor.plan(size=BATCH, dp_size=size, reader_bytes=1 << 20)

    def step(
        self, takes_part: list[Replica], *, is_committed: bool, spoil: bool = False, healing: Sequence[Replica] = ()
    ) -> None:
        """One step, which the replicas that take part are handed; with sums, all of those that live learn its rows."""
        number, size, handed = len(self.taken), len(takes_part), []
        for share, replica in enumerate(takes_part):
            cursor, plan = replica.cursor, self.plan(replica.cursor, size)
            cursor.follow(plan)
            if cursor.global_step != number:
                cursor.seek(plan, number)
                replica.ledger.join()
            at, epoch = cursor.position, cursor.epoch
            positions = plan.positions(0, at, *plan.rank_slice(0, at, share))
            replica.rows, replica.real = plan.select(epoch, positions), positions < plan.epoch_rows
            if spoil and len(replica.rows):  # the first share may be empty
                replica.rows, spoil = (replica.rows + 1) % ROWS, False
            after = plan.after(0, at)
            is_last = plan.steps(0, after) <= 0
            digest = Digest.of(SELECTION.offsets(replica.rows), replica.real)
            replica.ledger.add(epoch, at, after, digest, is_last=is_last, share=(share, size))
            cursor.advance(after, is_last=is_last)
            handed.append((replica.rows, replica.real, digest))
        for replica in takes_part:
            if self.sums or not is_committed:
                replica.ledger.take_back()
            if not is_committed:
                assert replica.cursor.take_back()
        if not is_committed:
            return
        if self.sums:
            total = sum((digest for _, _, digest in handed), Digest())
            for replica in healing:
                replica.ledger.join(takes_part[0].ledger.to_dict())
            for replica in (*takes_part, *healing):
                replica.ledger.add(epoch, at, after, total, is_last=is_last, share=WHOLE)
        self.taken.append(np.concatenate([rows for rows, _, _ in handed]))

    def cut(self) -> None:
        for replica in self.alive:
            replica.ledger.cut()

    def write(self, replica: Replica) -> None:
        replica.written = self.account(replica)

    def account(self, replica: Replica) -> LoaderHistory:
        return LoaderHistory(
            start="one",
            ledger=f"{replica.number}",
            rank=replica.rank,
            world_size=4,
            is_elastic=True,
            intervals=replica.ledger.intervals,
            restored=dict(replica.ledger.restored),
            forgotten=replica.ledger.forgotten,
        )

    def kill(self, replica: Replica, *, is_written: bool) -> None:
        self.alive.remove(replica)
        if is_written:
            self.write(replica)
        if replica.written is not None:
            self.gone.append(replica.written)

    def statuses(self) -> list[str]:
        accounts = [*self.gone, *[self.account(replica) for replica in self.alive]]
        accounts.sort(key=lambda account: int(account.ledger))
        order = self.plan(self.alive[0].cursor, 1).order
        found = prove(line_of_history(accounts), lambda _: Expected(selection=SELECTION, order=order))
        return [one.status for one in found for _ in range(one.epochs)]


@functools.cache
def undisturbed(remainder: Any) -> list[Int64Array]:
    alone = Training(1, remainder, sums=False)
    plan = alone.plan(alone.alive[0].cursor, 1)
    for _ in range(EPOCHS * plan.steps(0)):
        alone.step(alone.alive, is_committed=True)
    return alone.taken


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "commit", "commit", "reject", "kill", "kill two", "join", "write", "cut"]),
        st.integers(0, 7),
        st.booleans(),
    ),
    min_size=20,
    max_size=90,
)


@pytest.mark.promise("P1", "P3", "P6")
@given(events=EVENTS, replicas=st.integers(1, 8), remainder=st.sampled_from(["drop", "pad", "ragged"]))
def test_committed_steps_are_those_of_an_undisturbed_run_whoever_takes_part(
    events: list[tuple[str, int, bool]], replicas: int, remainder: Any
) -> None:
    """Also the proof, from the sums that each rank has that lives, though others died before they wrote theirs."""
    wanted = undisturbed(remainder)
    training = Training(replicas, remainder, sums=True)
    healing: list[Replica] = []
    for event, place, flag in [*events, *[("commit", 0, False)] * len(wanted)]:
        if len(training.taken) == len(wanted):
            break
        fit = [replica for replica in training.alive if replica not in healing]
        if event in ("commit", "reject"):
            training.step(fit, is_committed=event == "commit", healing=healing)
            if event == "commit":
                if healing:
                    training.cut()
                healing = []
        elif event.startswith("kill") and len(fit) > 1:
            for _ in range(min(len(fit) - 1, 2 if event == "kill two" else 1)):
                victim = fit.pop(place % len(fit))
                training.kill(victim, is_written=flag)
            training.cut()
        elif event == "join" and len(training.alive) < 8:
            training.join(place % 4)
            healing.append(training.alive[-1])
        elif event == "write":
            training.write(training.alive[place % len(training.alive)])
        elif event == "cut":
            training.cut()
    assert all(np.array_equal(got, due) for got, due in zip(training.taken, wanted, strict=True))
    places = {replica.cursor.place for replica in fit}
    assert places == {(EPOCHS, 0, 0, len(wanted))}, "who took part in the last step stands at one place"
    assert training.statuses() == ["proven"] * EPOCHS


@given(
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=12),
    remainder=st.sampled_from(["drop", "pad", "ragged"]),
    spoiled=st.none() | st.integers(0, 29),
)
def test_digests_of_changing_shares_add_up_if_no_rank_is_missing(
    sizes: list[int], remainder: Any, spoiled: int | None
) -> None:
    """Without a common sum, each share has to be there; and one wrong row is a fault."""
    wanted = undisturbed(remainder)
    training = Training(max(sizes), remainder, sums=False)
    for number in range(len(wanted)):
        if number % 3 == 0:
            training.cut()
        size = sizes[number // 3 % len(sizes)]
        training.step(training.alive[:size], is_committed=True, spoil=number == spoiled)
    statuses = training.statuses()
    is_right = all(np.array_equal(got, due) for got, due in zip(training.taken, wanted, strict=True))
    assert is_right == (spoiled is None)
    assert statuses.count("proven") == EPOCHS - (spoiled is not None)
    assert statuses.count("fault") == (spoiled is not None)
    lost = Training(2, remainder, sums=False)
    for _ in wanted:
        lost.step(lost.alive, is_committed=True)
    lost.kill(lost.alive[0], is_written=False)
    assert "proven" not in lost.statuses(), "what a rank was handed that left no record is not known"


def test_a_cursor_seeks_over_epochs_and_back() -> None:
    cursor = Cursor(ORIGIN, SPEC)
    plan = cursor.plan(size=BATCH, dp_size=2, reader_bytes=1 << 20)
    whole = plan.steps(0)
    for number in (0, 3, whole - 1, whole, 2 * whole + 1, whole, 5, 0):
        cursor.seek(plan, number)
        assert cursor.place == (number // whole, number % whole * BATCH, number % whole, number)
    cursor.seek(plan, 3)
    cursor.advance(plan.after(0, cursor.position), is_last=False)
    cursor.seek(plan, 3)
    assert cursor.place == (0, 3 * BATCH, 3, 3)
    assert not cursor.take_back(), "there is nothing more to take back"
    odd = cursor.plan(size=7, dp_size=2, reader_bytes=1 << 20)
    cursor.seek(odd, 4)
    assert cursor.position == 3 * BATCH + 7
    with pytest.raises(ConfigError, match="position 43 of epoch 0.*12"):
        cursor.seek(plan, 0)
    assert cursor.steps_until(odd, 0) == 0
    assert cursor.steps_until(odd, 2) == odd.steps(0, 43) + odd.steps(0)
