"""The proof of a run against an oracle: random histories of starts, kills and resumes, whole and broken ones."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.orders.order import Resolved
from raylance.orders.permutation import Int64Array
from raylance.orders.sampling import Weighted
from raylance.orders.shuffles import RowShuffle, WindowShuffle
from raylance.planning import digest
from raylance.planning.digest import Digest, Ledger
from raylance.planning.history import LoaderHistory, line_of_history
from raylance.planning.proof import EpochProof, Expected, prove
from tests.helpers.orders import resolve as resolve_order
from tests.helpers.own_orders import Halved
from tests.helpers.plans import Chosen, make_plan

Place = tuple[int, int]
SELECTION = Chosen(np.r_[3:40, 50:51, 60:145])  # 123 rows
N = SELECTION.rows


resolve = functools.partial(resolve_order, n=N, seed=5, global_batch_size=12)
ORDER = resolve(WindowShuffle(shard_rows=5, window_shards=2, lanes=3))
EXPECTED = Expected(selection=SELECTION, order=ORDER)


@dataclasses.dataclass
class Step:
    begin: Place
    end: Place
    rows: Int64Array  # real ones, over all ranks


def account(handed: Ledger, rank: int, world: int, **more: Any) -> LoaderHistory:
    of_ledger = {"intervals": handed.intervals, "restored": dict(handed.restored), "forgotten": handed.forgotten}
    return LoaderHistory(rank=rank, world_size=world, **of_ledger, **more)


class Run:
    """A run as Ray Train drives one: starts resume at the newest checkpoint that was registered."""

    def __init__(self, order: Resolved = ORDER, remainder: Any = "drop") -> None:
        self.order, self.remainder = order, remainder
        self.accounts: list[LoaderHistory] = []
        self.line: list[Step] = []
        self.checkpoints: list[Place] = [(0, 0)]
        self.spoils: dict[int, Callable[[Int64Array], Int64Array]] = {}  # by step since the beginning
        self.taken = 0

    def start(
        self,
        world: int,
        batch: int,
        steps: int,
        *,
        peers: int = 1,
        begin: Place | None = None,
        report: int = 3,
        lost: Sequence[int] = (),
        ahead: Sequence[int] = (),
        orders: Sequence[Resolved] = (),
    ) -> None:
        """One start: so many steps of all ranks, and some more of each that is ahead; reports in `lost` never count.
        Each of `world` data-parallel ranks has so many peers.
        """
        at = self.checkpoints[-1] if begin is None else begin
        self.line = [step for step in self.line if step.end <= at]
        ranks = world * peers
        ledgers = [Ledger() for _ in range(ranks)]
        plan = make_plan(self.order, batch, world, self.remainder)
        plans = [dataclasses.replace(plan, order=order) for order in orders] or [plan] * ranks
        ahead = [*ahead, *[0] * ranks][:ranks]
        ahead = [more - min(ahead) for more in ahead]  # what all ranks were handed is no step ahead
        for number in range(steps + max(ahead)):
            epoch, position = at
            if plan.steps(0, position) <= 0:
                for ledger in ledgers:
                    ledger.add(epoch, position, position, Digest(), is_last=True)
                at = epoch + 1, 0
                continue
            after = plan.after(0, position)
            is_last = plan.steps(0, after) <= 0
            end = (epoch + 1, 0) if is_last else (epoch, after)
            handed = []
            for rank, ledger in enumerate(ledgers):
                if number >= steps + ahead[rank]:
                    continue
                dp_rank = rank // peers
                positions = plan.positions(0, position, *plan.rank_slice(0, position, dp_rank))
                rows, real = SELECTION.offsets(plans[rank].select(epoch, positions)), positions < plan.epoch_rows
                spoil = self.spoils.get(self.taken) if dp_rank == world - 1 else None
                rows = rows if spoil is None else spoil(rows)
                handed += [rows[real]] if rank % peers == 0 else []
                ledger.add(epoch, position, after, Digest.of(rows, real), is_last=is_last)
                if number < steps and (number + 1) % report == 0:
                    ledger.cut()
            self.taken += 1
            if number < steps:
                self.line.append(Step(begin=at, end=end, rows=np.concatenate(handed)))
                if (number + 1) % report == 0 and number not in lost:
                    self.checkpoints.append(end)
            at = end
        start = f"start {len(self.accounts)}"
        for rank, ledger in enumerate(ledgers):
            name, pair = f"{start} {rank}", None if peers == 1 else (rank // peers, world)
            self.accounts.append(account(ledger, rank, ranks, start=start, ledger=name, data_parallel=pair))

    def prove(self, expected: Expected | None = None) -> list[EpochProof]:
        """By epoch, one line each."""
        compared = expected or Expected(selection=SELECTION, order=self.order)
        found = prove(line_of_history(self.accounts), lambda _: compared)
        return [
            dataclasses.replace(one, epoch=one.epoch + more, epochs=1) for one in found for more in range(one.epochs)
        ]

    def is_whole(self, epoch: int) -> bool:
        """The oracle: whether the rows of an epoch are those that they have to be, one by one."""
        steps = [step for step in self.line if step.begin[0] == epoch]
        got = np.concatenate([step.rows for step in steps])
        end = steps[-1].end[1] if steps[-1].end[0] == epoch else len(got)
        wanted = SELECTION.offsets(self.order.epoch(epoch).rows(np.arange(end)))
        return bool(np.array_equal(np.sort(got), np.sort(wanted)))


STARTS = st.lists(
    st.fixed_dictionaries(
        {
            "world": st.integers(1, 4),
            "peers": st.integers(1, 3),
            "batch": st.integers(4, 40),
            "steps": st.integers(1, 40),
            "report": st.integers(1, 9),
            "lost": st.sets(st.integers(0, 40), max_size=6),
            "ahead": st.lists(st.integers(0, 3), max_size=4),
        }
    ),
    min_size=1,
    max_size=6,
)


SPOILS: list[Callable[[Int64Array], Int64Array]] = [
    lambda rows: np.r_[rows[1:], rows[1:2] + 1 if len(rows) > 1 else rows],
    lambda rows: np.r_[rows[:-1], 3],
]


@pytest.mark.promise("P1", "P10")
@given(
    starts=STARTS,
    remainder=st.sampled_from(["drop", "pad", "ragged"]),
    spoils=st.dictionaries(st.integers(0, 150), st.sampled_from(SPOILS)),
)
def test_a_run_is_proven_exactly_where_an_oracle_finds_it_whole(
    starts: list[dict[str, Any]], remainder: str, spoils: dict[int, Callable[[Int64Array], Int64Array]]
) -> None:
    """A row twice or missing in the line is a fault, and one that was rolled back is none."""
    run = Run(remainder=remainder)
    run.spoils = spoils
    for start in starts:
        run.start(**start)
    found = {proof.epoch: proof for proof in run.prove()}
    epochs = {step.begin[0] for step in run.line}
    for epoch in epochs:
        proof, wanted = found[epoch], "proven" if run.is_whole(epoch) else "fault"
        if proof.status == "unproven" and any(starts[-1]["ahead"]):  # of the last start, which nobody resumed
            assert epoch >= run.line[-1].begin[0]
            continue
        assert proof.status == wanted, proof
        if wanted == "proven":
            assert proof.rows == sum(len(step.rows) for step in run.line if step.begin[0] == epoch)
    assert {epoch for epoch, proof in found.items() if proof.status != "unproven"} <= epochs


@pytest.mark.parametrize("peer", [0, 1])
def test_peers_that_were_handed_unlike_rows_prove_nothing(peer: int) -> None:
    """Their sum may be right where one of them stands for both, and their model was trained on neither."""
    other = dataclasses.replace(ORDER, seed=6)
    unlike = [ORDER, ORDER, *([other, ORDER] if peer == 0 else [ORDER, other])]
    for orders, found in (([], ("proven", 120)), (unlike, ("unproven", 0))):
        run = Run()
        run.start(2, 12, 10, peers=2, orders=orders)
        (proof,) = run.prove()
        assert (proof.status, proof.rows) == found


def test_shares_with_unlike_numbers_of_peers_prove_nothing() -> None:
    """Each row came, but those of one share were trained on by three ranks, and those of the other by one."""
    run = Run()
    run.start(2, 12, 10, peers=2)
    run.accounts[1:3] = [dataclasses.replace(run.accounts[0], rank=rank, ledger=f"{rank}") for rank in (1, 2)]
    (proof,) = run.prove()
    assert proof.status == "unproven"


def test_a_custom_order_that_is_no_permutation_is_caught_by_the_selection() -> None:
    run = Run(resolve(Halved()), "ragged")
    run.start(3, 10, 5)
    assert [proof.status for proof in run.prove()] == ["fault"], "before the epoch is over, too"
    run.start(3, 10, 20)
    assert next(proof.status for proof in run.prove()) == "fault"


def test_draws_are_proven_against_the_plan_and_padding_is_named() -> None:
    order = resolve(Weighted(weights="weight", rows_per_epoch=100))
    run = Run(order, "pad")
    run.start(2, 30, 6)
    first, second = run.prove()
    assert (first.status, first.rows, first.padding) == ("proven", 100, 20)
    assert (second.status, second.end) == ("proven", 60)
    run.spoils = {6: lambda rows: rows[::-1], 7: lambda rows: rows + 1}
    run.start(2, 30, 1, report=1, begin=(1, 60))
    assert [proof.status for proof in run.prove()] == ["proven", "proven"], "in another order within a step"
    run.start(2, 30, 1, begin=(1, 60))
    assert [proof.status for proof in run.prove()] == ["proven", "fault"]
    padded = Run(remainder="pad")
    padded.start(2, 50, 3)
    (proof, *_) = padded.prove()
    assert (proof.status, proof.rows, proof.padding) == ("proven", 123, 27)


def test_what_is_not_known_is_not_proven() -> None:
    run = Run()
    run.start(2, 12, 13)
    del run.accounts[1]  # of rank 1, nothing was written
    run.start(3, 12, 10)
    first, second, third = run.prove()
    assert (first.status, second.status, third.status) == ("unproven", "unproven", "proven")
    assert "position 24" in second.text
    run = Run()
    run.start(1, 12, 4, begin=(0, 36), report=4)
    assert "position 36" in run.prove()[0].text
    run = Run()
    run.start(1, 12, 8, report=5)
    run.start(1, 12, 5, begin=(0, 36))  # from somebody else's checkpoint, between two cuts
    (proof,) = run.prove()
    assert "position 36" in proof.text
    run = Run()
    run.start(2, 12, 7, ahead=[0, 2], report=7)
    (proof,) = run.prove()
    assert proof.status == "unproven"
    assert "position 84" in proof.text


def test_epochs_of_which_the_same_is_known_are_one_line() -> None:
    run = Run(remainder="ragged")
    run.start(1, 41, 30)
    found = prove(line_of_history(run.accounts), lambda _: EXPECTED)
    assert [(proof.epoch, proof.epochs) for proof in found] == [(0, 10)]
    counted = prove(line_of_history(run.accounts), lambda _: "it is gone")
    assert [(proof.epochs, proof.status) for proof in counted] == [(10, "counted")]
    assert prove(line_of_history([]), lambda _: EXPECTED) == []


def test_epochs_that_leave_rows_out_need_the_order() -> None:
    run = Run(resolve(RowShuffle(shard_rows=4)))
    run.start(1, 40, 6)
    assert {proof.status for proof in run.prove(Expected(selection=SELECTION, order=None))} == {"counted"}
    whole = Run(resolve(RowShuffle(shard_rows=4)), "ragged")
    whole.start(1, 40, 4)
    assert {proof.status for proof in whole.prove(Expected(selection=SELECTION, order=None))} == {"proven"}


SCRATCH: Place = (0, 0)
ORACLE = make_plan(ORDER, 12, 2, "drop")


class Training:
    """Processes that train one model after the other, on two ranks; a model knows what it was trained on."""

    def __init__(self) -> None:
        self.accounts: list[LoaderHistory] = []
        self.learnt: list[tuple[int, int, list[int], int]] = []  # epoch, position after, rows, skipped positions
        self.saved: list[tuple[Place, list[tuple[int, int, list[int], int]]]] = []
        self.process = self.loader = 0
        self.renew(SCRATCH)

    def renew(self, place: Place) -> None:
        self.place, self.loader = place, self.loader + 1
        self.ledgers = [Ledger(), Ledger()]

    def step(self, count: int) -> None:
        for _ in range(count):
            epoch, position = self.place
            after = ORACLE.after(0, position)
            is_last = ORACLE.steps(0, after) <= 0
            rows: list[int] = []
            for rank, ledger in enumerate(self.ledgers):
                mine = ORACLE.positions(0, position, *ORACLE.rank_slice(0, position, rank))
                offsets = SELECTION.offsets(ORACLE.select(epoch, mine))
                ledger.add(epoch, position, after, Digest.of(offsets), is_last=is_last)
                rows += offsets.tolist()
            self.learnt.append((epoch, after, rows, 0))
            self.place = (epoch + 1, 0) if is_last else (epoch, after)
        self.write()

    def skip(self, count: int) -> None:
        while count:
            epoch, position = self.place
            steps = min(count, ORACLE.steps(0, position))
            after, count = ORACLE.after(0, position, steps), count - steps
            is_last = ORACLE.steps(0, after) <= 0
            for rank, ledger in enumerate(self.ledgers):
                ledger.skip(epoch, position, after, is_last=is_last, share=(rank, 2))
            self.learnt.append((epoch, after, [], after - position))
            self.place = (epoch + 1, 0) if is_last else (epoch, after)
        self.write()

    def move(self, epoch: int) -> None:
        self.place = epoch, 0
        for ledger in self.ledgers:
            ledger.move(epoch)
        self.write()

    def write(self) -> None:
        for rank, ledger in enumerate(self.ledgers):
            name = f"{self.loader} {rank}"
            self.accounts = [one for one in self.accounts if one.ledger != name]
            who = {"start": f"start {self.process}", "ledger": name, "process": f"{self.process} {rank}"}
            self.accounts.append(account(ledger, rank, 2, **who))

    def save(self) -> None:
        for ledger in self.ledgers:
            ledger.cut()
        self.saved.append((self.place, list(self.learnt)))

    def load(self, number: int) -> None:
        """Model and loader; of a process that has saved nothing yet, both from scratch."""
        place, learnt = self.saved[number % len(self.saved)] if self.saved else (SCRATCH, [])
        self.place, self.learnt = place, list(learnt)
        for ledger in self.ledgers:
            ledger.load(*place)

    def restart(self, number: int | None) -> None:
        """Another process, with or without what was saved."""
        self.process += 1
        self.renew(SCRATCH)
        self.learnt = []
        if number is not None:
            self.load(number)

    def is_once(self, epoch: int) -> bool:
        mine = [each for each in self.learnt if each[0] == epoch]
        rows = [row for _, _, handed, _ in mine for row in handed]
        reached = max((after for _, after, _, _ in mine), default=0)
        return len(set(rows)) == len(rows) == reached - sum(passed for *_, passed in mine)

    def prove(self) -> dict[int, EpochProof]:
        found = prove(line_of_history(self.accounts), lambda _: EXPECTED)
        return {one.epoch + more: one for one in found for more in range(one.epochs)}


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.tuples(st.integers(1, 14))),
        st.tuples(st.just("skip"), st.tuples(st.integers(1, 25))),
        st.tuples(st.just("save"), st.just(())),
        st.tuples(st.just("move"), st.tuples(st.integers(0, 3))),
        st.tuples(st.just("load"), st.tuples(st.integers(0, 5))),
        st.tuples(st.just("restart"), st.tuples(st.none() | st.integers(0, 5))),
        st.tuples(st.just("renew"), st.just((SCRATCH,))),
    ),
    max_size=14,
)


@pytest.mark.promise("P1", "P10")
@given(operations=OPERATIONS, most=st.sampled_from([1024, 3]))
def test_nothing_is_proven_that_a_model_was_not_trained_on_once(operations: list[tuple[str, Any]], most: int) -> None:
    """Whatever moves loaders, and restores them: where a model was trained on a row twice, that is found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "_MOST", most)
        patch.setattr(digest, "_RECENT", min(digest._RECENT, most - 1))
        training = Training()
        for name, value in operations:
            if training.learnt and not training.ledgers[0].intervals and name in ("save", "renew"):
                continue  # a loader that no record knows of, whose model was trained by another one
            getattr(training, name)(*value)
        training.step(1)
    found = training.prove()
    for epoch, proof in found.items():
        assert proof.status in ("proven", "unproven")
        assert proof.status == "unproven" or training.is_once(epoch), proof
    if most == 1024 and not {"move", "renew"} & {name for name, _ in operations}:
        assert {proof.status for proof in found.values()} == {"proven"}, "what is restored is proven"
        for epoch, proof in found.items():
            assert proof.rows == sum(len(rows) for of, _, rows, _ in training.learnt if of == epoch)
    assert {epoch for epoch, *_ in training.learnt} <= found.keys()


def test_an_epoch_that_was_begun_again_by_hand_is_not_once() -> None:
    training = Training()
    training.step(5)
    training.move(0)  # the model keeps what it has learnt
    training.step(10)
    (proof,) = training.prove().values()
    assert (proof.status, proof.rows) == ("unproven", 180)
    training.save()
    training.restart(0)
    training.step(10)
    (proof, _) = training.prove().values()
    assert (proof.status, proof.rows) == ("unproven", 180), "nor does a resume roll back what the state was saved after"
    training.restart(None)
    training.step(10)
    assert [one.status for one in training.prove().values()] == ["proven"]


def test_what_all_ranks_passed_over_is_not_a_lost_record() -> None:
    """After `seek`, the proof said that a record was lost. Steps 2 to 4 of epoch 0 are passed over, and its end, from
    step 7 on, with the begin of epoch 1.
    """
    plan = make_plan(ORDER, 12, 2, "drop")

    def run(rank: int, places: Sequence[Place], spoil: int = 0) -> LoaderHistory:
        ledger = Ledger()
        for epoch, step in places:
            low = 12 * step
            rows = SELECTION.offsets(plan.select(epoch, plan.positions(0, low, *plan.rank_slice(0, low, rank))))
            ledger.add(epoch, low, low + 12, Digest.of(rows + spoil * (step == 5)), is_last=step == 9)
        return account(ledger, rank, 2, start="one", ledger=f"{rank}", process=f"{rank}")

    places = [(0, 0), (0, 1), (0, 5), (0, 6), *((1, step) for step in range(3, 10)), (2, 0)]
    found = prove(line_of_history([run(rank, places) for rank in range(2)]), lambda _: EXPECTED)
    assert [(one.epoch, one.status, one.rows) for one in found] == [
        (0, "proven", 48),
        (1, "proven", 84),
        (2, "proven", 12),
    ]
    for rows, one in zip((36 + N - 84, 36), found, strict=False):
        assert f" {rows} " in one.text
    for spoiled, odd in ((1, places), (0, [place for place in places if place != (0, 5)])):
        accounts = [run(0, places), run(1, odd, spoiled)]
        first = prove(line_of_history(accounts), lambda _: EXPECTED)[0]
        assert first.status == ("fault" if spoiled else "unproven"), "other rows, or only one rank's"


NUMBERS = itertools.count()


def lone(ledger: Ledger, rank: int, world: int, lived: tuple[float, float], **changes: Any) -> LoaderHistory:
    """The account of a process of its own, outside of Ray Train."""
    name = f"{next(NUMBERS)}"
    process = {"start": "", "ledger": name, "process": f"process {name}", "begun_s": lived[0], "ended_s": lived[1]}
    return account(ledger, rank, world, **process | changes)


def handed(rank: int, world: int, steps: int, epoch: int = 0) -> Ledger:
    ledger, plan = Ledger(), dataclasses.replace(ORACLE, dp_size=world)
    for step in range(steps):
        rows = SELECTION.offsets(plan.select(epoch, plan.positions(0, 12 * step, *plan.rank_slice(0, 12 * step, rank))))
        ledger.add(epoch, 12 * step, 12 * step + 12, Digest.of(rows), is_last=step == 9)
    return ledger


def test_two_processes_of_one_rank_at_one_time_are_no_resume() -> None:
    """The case that was reported: rank 0 of 1 twice, since nothing said that there were two."""
    twice = [lone(handed(0, 1, 10), 0, 1, lived) for lived in ((0.0, 9.0), (0.5, 9.5))]
    (proof,) = prove(line_of_history(twice), lambda _: EXPECTED)
    assert (proof.status, proof.rows) == ("unproven", 240)
    after = [lone(handed(0, 1, 10), 0, 1, lived) for lived in ((0.0, 9.0), (10.0, 19.0))]
    (proof,) = prove(line_of_history(after), lambda _: EXPECTED)
    assert (proof.status, proof.rows) == ("proven", 120), "one after the other it is a start from scratch"


def test_processes_that_take_turns_are_no_starts_of_one_run() -> None:
    first, second = handed(0, 1, 10), handed(0, 1, 10)
    accounts = [
        lone(first, 0, 1, (0.0, 9.0), process="one"),
        lone(second, 0, 1, (10.0, 19.0)),
        lone(handed(0, 1, 5, epoch=1), 0, 1, (20.0, 29.0), process="one"),
    ]
    (proof,) = prove(line_of_history(accounts), lambda _: EXPECTED)
    assert proof.status == "unproven"


def test_a_rank_that_died_before_its_first_batch_takes_no_part_in_later_starts() -> None:
    accounts = [lone(handed(0, 2, 5), 0, 2, (0.0, 5.0))]
    accounts += [lone(handed(rank, 2, 10), rank, 2, (10.0 + rank, 20.0)) for rank in (1, 0)]
    (proof,) = prove(line_of_history(accounts), lambda _: EXPECTED)
    assert (proof.status, proof.rows) == ("proven", 120)
    accounts += [lone(handed(0, 2, 5, epoch=1), 0, 2, (30.0, 35.0))]
    accounts += [lone(handed(rank, 2, 10, epoch=1), rank, 2, (40.0, 50.0)) for rank in (0, 1)]
    (proof,) = prove(line_of_history(accounts), lambda _: EXPECTED)
    assert (proof.status, proof.epochs) == ("proven", 2), "what the next ones began after"


def test_epochs_before_the_first_known_one_are_not_proven() -> None:
    run = Run()
    run.start(1, 12, 10, begin=(2, 0))
    found = prove(line_of_history(run.accounts), lambda _: EXPECTED)
    assert [(one.epoch, one.epochs, one.status) for one in found] == [(0, 2, "unproven"), (2, 1, "proven")]
    far = Run()
    far.start(1, 12, 10, begin=(2**60, 0))
    assert [one.epochs for one in prove(line_of_history(far.accounts), lambda _: EXPECTED)] == [2**60, 1]


def test_what_a_ledger_has_forgotten_is_not_proven() -> None:
    ledger = Ledger()
    handed_out = [handed(0, 1, 10, epoch=epoch).intervals for epoch in range(3)]
    for epoch in range(1500):
        for interval in handed_out[epoch % 3]:
            ledger.add(epoch, interval.low, interval.high, interval.digest, is_last=True)
    first = ledger.intervals[0].epoch
    assert ledger.forgotten == (first, 0)
    lines = line_of_history([lone(ledger, 0, 1, (0.0, 1.0))])
    assert (lines[0].epoch, lines[0].epochs, lines[0].spans) == (0, first, ())
    assert [line.epoch for line in lines[1:]] == list(range(first, 1500))
