"""Parts of a split do not overlap, leave nothing out, and stay where they are."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance import FractionSplit, RangeSplit, ValueSplit
from raylance.audit import reopen
from raylance.errors import ConfigError, DatasetError

PARTS = {"train": 0.8, "val": 0.15, "test": 0.05}


def table(rows: range) -> pa.Table:
    return pa.table({"id": list(rows), "user": [f"user {row % 97}" for row in rows], "part": [row % 4 for row in rows]})


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    return write_dataset(table(range(4000)))


def ids(uri: str, split: FractionSplit | RangeSplit | ValueSplit, **more: object) -> list[int]:
    dataset = raylance.dataset(uri, columns=["id"], split=split, **more)
    return dataset.head(len(dataset))["id"].tolist()


@pytest.mark.parametrize("by", [None, "id", "user"])
def test_parts_cover_all_rows_once_in_the_right_sizes(uri: str, by: str | None) -> None:
    found = {part: ids(uri, FractionSplit(fractions=PARTS, part=part, by=by)) for part in PARTS}
    assert sorted(row for rows in found.values() for row in rows) == list(range(4000))
    if by != "user":  # 97 users are too few for tight bounds
        for part, fraction in PARTS.items():
            assert abs(len(found[part]) / 4000 - fraction) < 0.025
    else:
        users = {part: {row % 97 for row in rows} for part, rows in found.items()}
        assert not users["train"] & users["val"], "rows of one key stay together"


def test_seeds_differ_and_nothing_else_changes_the_split(uri: str) -> None:
    split = FractionSplit(fractions=PARTS, part="val", by="id")
    assert ids(uri, split) == ids(uri, split)
    assert ids(uri, split) != ids(uri, FractionSplit(fractions=PARTS, part="val", by="id", seed=1))
    odd = ids(uri, split, filter="id % 2 = 1")
    assert odd == [row for row in ids(uri, split) if row % 2 == 1]


def test_rows_keep_their_part_when_the_dataset_grows(write_dataset: Callable[..., str]) -> None:
    uri = write_dataset(table(range(1000)))
    by_key = FractionSplit(fractions=PARTS, part="train", by="id")
    by_offset = FractionSplit(fractions=PARTS, part="train")
    before = ids(uri, by_key), ids(uri, by_offset)
    lance.write_dataset(table(range(1000, 1500)), uri, mode="append")
    for old, split in zip(before, (by_key, by_offset), strict=True):
        assert [row for row in ids(uri, split) if row < 1000] == old
    lance.dataset(uri).delete("id < 300")
    assert [row for row in ids(uri, by_key) if row < 1000] == [row for row in before[0] if row >= 300]


def test_ranges_and_values(uri: str) -> None:
    assert ids(uri, RangeSplit([(10, 13), (3990, 9999)])) == [10, 11, 12, *range(3990, 4000)]
    assert ids(uri, ValueSplit("part", 3)) == list(range(3, 4000, 4))
    assert ids(uri, ValueSplit("user", "user 5")) == list(range(5, 4000, 97))


def test_the_split_is_part_of_the_checkpoint(uri: str) -> None:
    state = raylance.dataset(uri, split=ValueSplit("part", 3)).loader().state_dict()
    with pytest.raises(raylance.StateError, match=r"split\.value: saved 3, now 2"):
        raylance.dataset(uri, split=ValueSplit("part", 2)).loader().load_state_dict(state)


@pytest.mark.parametrize(
    ("fractions", "part", "message"),
    [
        ({"train": 0.8, "val": 0.1}, "val", "add up to 0.9"),
        ({"train": 1.5, "val": -0.5}, "val", "must not be negative"),
        ({}, "val", "add up to"),
        (PARTS, "vall", "the parts are 'train', 'val', 'test'"),
    ],
)
def test_bad_fractions(fractions: dict[str, float], part: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FractionSplit(fractions=fractions, part=part)


def test_rows_without_a_key_are_refused(write_dataset: Callable[..., str]) -> None:
    users = [None if row in (7, 30) else f"user {row}" for row in range(60)]
    uri = write_dataset(pa.table({"id": range(60), "user": users}))
    for part in PARTS:
        split = FractionSplit(fractions=PARTS, part=part, by="user")
        with pytest.raises(DatasetError, match=r"by='user'\): 2 of .* 0 and 59 "):
            ids(uri, split)
    kept = [ids(uri, FractionSplit(fractions=PARTS, part=p, by="user"), filter="`user` IS NOT NULL") for p in PARTS]
    assert sorted(row for rows in kept for row in rows) == [row for row in range(60) if row not in (7, 30)]
    assert ids(uri, ValueSplit("user", "user 5")) == [5]


@pytest.mark.parametrize("ranges", [[], [(5, 5)], [(-1, 4)], [(0, 2), (9, 3)]])
def test_bad_ranges(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match="half-open"):
        RangeSplit(ranges)


def test_splits_that_select_nothing_and_missing_columns(uri: str) -> None:
    with pytest.raises(DatasetError, match=r"has no row with ValueSplit\(column='part', value=9\)"):
        raylance.dataset(uri, split=ValueSplit("part", 9))
    with pytest.raises(DatasetError, match="no row with RangeSplit"):
        raylance.dataset(uri, split=RangeSplit([(5000, 6000)]))
    with pytest.raises(DatasetError, match="needs the column owner"):
        raylance.dataset(uri, split=FractionSplit(fractions=PARTS, part="val", by="owner"))


def test_shards_that_follow_fragments(write_dataset: Callable[..., str]) -> None:
    """Uneven fragments, some rows filtered out, equal steps all the same."""
    sizes = [30, 200, 2, 77, 120]
    starts = np.cumsum([0, *sizes])
    uri = write_dataset(*[table(range(int(a), int(a) + n)) for a, n in zip(starts, sizes, strict=False)])
    order = raylance.ShardShuffle(shard_rows="fragment", lanes=1)
    dataset = raylance.dataset(uri, columns=["id"], filter="part != 2", order=order, remainder="ragged")
    ranks = []
    for rank in range(2):
        with dataset.loader(rank=rank, world_size=2) as loader:
            ranks.append([batch["id"] for batch in loader.iter_batches(global_batch_size=50)])
    assert len(ranks[0]) == len(ranks[1]) == 7
    delivered = np.concatenate([np.concatenate(pair) for pair in zip(*ranks, strict=True)])
    live = [row for row in range(429) if row % 4 != 2]
    assert sorted(delivered.tolist()) == live
    fragment = np.searchsorted(starts[1:], delivered, side="right")
    assert (np.diff(fragment) != 0).sum() == len(sizes) - 1, "each fragment is read in one go"


@pytest.mark.promise("P8")
def test_parts_of_few_groups_that_are_uneven_are_named(
    write_dataset: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    episodes = np.repeat(np.arange(20), 3)
    uri = write_dataset(pa.table({"episode": episodes, "row": np.arange(60)}))
    with caplog.at_level(logging.WARNING, "raylance"):
        for seed in range(8):
            caplog.clear()
            split = raylance.FractionSplit({"train": 0.9, "val": 0.1}, "val", by="episode", seed=seed)
            kept = split.keep(np.arange(60), episodes.tolist())
            if not kept.any():
                continue
            groups = len({*episodes[kept]})
            assert len(raylance.dataset(uri, split=split)) == 3 * groups
            assert (f"got {groups} of 20" in caplog.text) == (groups != 2)


@pytest.mark.parametrize("named", [range(20), [f"robot {each}" for each in range(20)]])
def test_values_that_are_all_named_make_exact_parts(
    named: Sequence[int | str], write_dataset: Callable[..., str]
) -> None:
    values = [value for value in named for _ in range(3)]
    uri = write_dataset(pa.table({"id": range(60), "robot": values}))
    for seed in range(5):
        found = {part: ids(uri, FractionSplit(PARTS, part, by="robot", seed=seed, values=named)) for part in PARTS}
        assert {part: len(rows) for part, rows in found.items()} == {"train": 48, "val": 9, "test": 3}
        assert sorted(row for rows in found.values() for row in rows) == list(range(60))
    split = FractionSplit(PARTS, "val", by="robot", values=named)
    assert split.keep(np.arange(60), values).tolist() == np.isin(np.arange(60), ids(uri, split)).tolist()
    with raylance.dataset(uri, split=FractionSplit(PARTS, "val", by="robot", values=named[::-1])).loader() as loader:
        again = reopen(loader.state_dict())
        assert again.loader().state_dict() == raylance.dataset(uri, split=split).loader().state_dict()
    with pytest.raises(DatasetError, match=str(named[19])):
        ids(uri, FractionSplit(PARTS, "val", by="robot", values=named[:19]))


@pytest.mark.parametrize(
    "more", [{"values": [1]}, *({"by": "id", "values": values} for values in ("ab", [1, 1], [None]))]
)
def test_lists_of_values_that_are_none(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="values="):
        FractionSplit(PARTS, "val", **more)
