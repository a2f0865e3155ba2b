"""The comparison of what ranks were given, over a real store of torch.distributed; each rank is a thread."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed

from raylance.environment import agreement
from raylance.environment.agreement import Agreement, Terms, store_of
from raylance.errors import ConfigError
from raylance.planning.shard_context import Assignment, ShardContext

OF_TRAIN = Assignment(name="train", is_split=True)


def compare(
    given: Sequence[tuple[int, int] | None],
    *,
    called: Sequence[bool] | None = None,
    absent: Sequence[int] = (),
    late: int | None = None,
    patience_s: float = 0.5,
    assignment: Assignment | None = OF_TRAIN,
    store: Any = None,
    same: Sequence[dict[str, Any]] | None = None,
) -> list[str]:
    """What each rank that comes is answered: "" or the error. One that did not call looks when all have come."""
    store = store or torch.distributed.HashStore()
    called = called or [True] * len(given)

    def begin(rank: int) -> str:
        if rank in absent:
            return "absent"
        if rank == late:
            time.sleep(0.05)
        context = ShardContext(rank=rank, world_size=len(given), data_parallel=given[rank], assignment=assignment)
        terms = Terms(
            dp_rank=context.dp_rank,
            dp_size=context.dp_size,
            same={"global_batch_size": 64} if same is None else same[rank],
            has_called=called[rank],
            is_arranged=assignment is not None or context.peers > 1,
        )
        agreement, come = Agreement(store, context, "train", terms), store.add("come", 1)
        try:
            agreement.wait(patience_s=patience_s)
            while come and not called[rank] and store.add("come", 0) % (len(given) - len(absent)):
                time.sleep(0.01)
            agreement.look(at_once=True)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(begin, range(len(given))))


@pytest.mark.parametrize("late", [None, 3])
@pytest.mark.parametrize("assignment", [OF_TRAIN, None], ids=["assigned", "by hand"])
def test_ranks_that_agree_continue(late: int | None, assignment: Assignment | None) -> None:
    store = torch.distributed.HashStore()
    for _ in range(2 if assignment is None else 1):  # of loaders that were made by hand, each one's first pass
        given = [(0, 2), (0, 2), (1, 2), (1, 2)]
        assert compare(given, late=late, assignment=assignment, store=store) == [""] * 4
    assert compare([None] * 3, called=[False] * 3, late=late) == [""] * 3


@pytest.mark.parametrize("late", [0, 3])
def test_all_ranks_see_who_was_given_what(late: int) -> None:
    answers = compare([(0, 2), (0, 4), (1, 2), (1, 4)], late=late)
    assert len(set(answers)) == 1
    assert "2 for ranks 0, 2; 4 for ranks 1, 3" in answers[0]


@pytest.mark.parametrize("other", [0, 2])
def test_a_rank_that_did_not_call_is_named_and_does_not_wait(other: int) -> None:
    called = [rank != other for rank in range(4)]
    for assignment in (OF_TRAIN, None):  # made by hand, the others waited for 600 s, and it trained on other rows
        given = [None if rank == other else (rank // 2, 2) for rank in range(4)]
        for answer in compare(given, called=called, assignment=assignment):
            assert f"rank {other} of 4 did not call reshard() for 'train', and the others did" in answer


@pytest.mark.parametrize("called", [True, False])
@pytest.mark.parametrize("name", ["global_batch_size", "seed"])
def test_ranks_with_unlike_terms_are_named(called: bool, name: str) -> None:
    given, same = [(0, 2), (0, 2), (1, 2), (1, 2)], [{name: value} for value in (64, 32, 64, 64)]
    for assignment in (OF_TRAIN, None):
        for answer in compare(given, called=[called] * 4, assignment=assignment, same=same):
            assert f"{name}=64 on ranks 0, 2, 3; {name}=32 on rank 1" in answer
    assert compare([None] * 3, called=[False] * 3, assignment=None, same=same[:3]) == [""] * 3, "each for itself"


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_does_not_come_is_named(
    absent: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agreement, "_SILENT_S", 0.1)
    with caplog.at_level(logging.WARNING):
        answers = compare([(0, 3), (1, 3), (2, 3)], absent=[absent], patience_s=0.2)
    assert sorted(answers) == ["", "", "absent"]
    assert f"rank {absent} did not begin a pass yet. This rank waits until" in caplog.text


def test_what_ray_train_assigned_is_not_taken_for_what_was_made_by_hand() -> None:
    """The ranks had iterated the assigned loader of one name, and reshard one that is made by hand."""
    store = torch.distributed.HashStore()
    assert compare([None] * 3, called=[False] * 3, store=store) == [""] * 3
    assert compare([(0, 3), (1, 3), (2, 3)], assignment=None, store=store, late=1) == [""] * 3


def test_a_store_that_can_do_nothing_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    context = ShardContext(rank=0, world_size=2, assignment=OF_TRAIN)
    with caplog.at_level(logging.WARNING):
        for has_called in (False, True):
            assert not caplog.text
            terms = Terms(dp_rank=0, dp_size=2, same={}, has_called=has_called, is_arranged=True)
            Agreement(torch.distributed.Store(), context, "train", terms).wait()
    assert "what the ranks were given for 'train' is not compared" in caplog.text


def test_without_a_group_of_all_ranks_nothing_is_compared() -> None:
    assert store_of(4) is None
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert store_of(4) is None
        assert store_of(1) is not None
    finally:
        torch.distributed.destroy_process_group()


def moved(said: Sequence[str | None]) -> list[str]:
    """What each rank gets to hear if it has changed its weights so; None for a rank that has not changed them."""
    store = torch.distributed.HashStore()

    def one(rank: int) -> str:
        given = said[rank]
        if given is None:
            return "not asked"
        try:
            agreement.compare_moves(store, ShardContext(rank=rank, world_size=len(said)), "train", given, 0.5)
        except ConfigError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(said)) as pool:
        return list(pool.map(one, range(len(said))))


def test_ranks_that_change_their_weights_alike_continue() -> None:
    assert moved(["a 1"] * 3) == [""] * 3


def test_ranks_that_change_their_weights_otherwise_or_not_at_all_are_named() -> None:
    found = moved(["a 1", "a 2", "a 1"])
    assert len(set(found)) == 1
    assert "a 2 on rank 1" in found[0]
    first, silent, last = moved(["a 1", None, "a 1"])
    assert first == last != ""
    assert "rank 1 of 3" in first
    assert silent == "not asked"
