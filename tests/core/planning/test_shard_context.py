"""Which ranks are peers, by each way to say it, and the arrangements that are refused."""

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.errors import ConfigError
from raylance.planning.shard_context import Assignment, ShardContext, arrange_replicas, check_pairs


@given(replicas=st.integers(1, 9), peers=st.integers(1, 9))
def test_contiguous_ranks_are_peers_and_each_share_has_as_many(replicas: int, peers: int) -> None:
    pairs = arrange_replicas(peers, replicas * peers)
    contexts = [ShardContext(rank=rank, world_size=len(pairs), data_parallel=pair) for rank, pair in enumerate(pairs)]
    assert [context.dp_rank for context in contexts] == [rank // peers for rank in range(len(pairs))]
    assert {context.dp_size for context in contexts} == {replicas}
    check_pairs([(context.dp_rank, context.dp_size) for context in contexts], "here")


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 2), (1, 2), (0, 2), 1], r"gave rank 3 of 4 1, which does not say which rows it gets"),
        ([(0, 2), (1, 2), (0, 2), (1.0, 2)], r"gave rank 3 of 4 \(1.0, 2\)"),
        ([(0, 2), (1, 2), (0, 4), (1, 4)], r"disagree .*: 2 for ranks 0, 1; 4 for ranks 2, 3"),
        ([(0, 2), (1, 2), (2, 2), (1, 2)], r"gave rank 2 the data-parallel rank 2 of 2"),
        ([(0, 2), (0, 2), (0, 2), (0, 2)], r"4 of 4 ranks have data-parallel rank 0 of 2: its rows would count more"),
        ([(0, 2), (1, 2), (1, 2), (1, 2)], r"1 of 4 ranks have data-parallel rank 0 of 2: its rows would count less"),
        ([(0, 3), (1, 3), (2, 3), (2, 3)], r"1 of 4 ranks have data-parallel rank 0 of 3"),
    ],
)
def test_arrangements_in_which_rows_come_twice_or_never_are_refused(pairs: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_pairs(pairs, "here")


def test_a_context_belongs_to_the_process_that_it_is_sent_to() -> None:
    context = ShardContext(rank=1, world_size=2, assignment=Assignment(name="train", is_split=True))
    elsewhere = dataclasses.replace(context)
    object.__setattr__(elsewhere, "pid", -1)
    assert pickle.loads(pickle.dumps(elsewhere)).pid == context.pid
    assert elsewhere == context
    assert (context.name, ShardContext().name) == ("train", None)
    with pytest.raises(ConfigError, match="rank=2 lies outside a world of 2"):
        ShardContext(rank=2, world_size=2)
