"""The rule of the windows, by measured shuffles."""

import pytest

from raylance.orders.order import Facts, Order
from raylance.orders.shuffles import WindowShuffle
from raylance.planning.plan import Plan
from raylance.planning.quality import shuffle_quality
from raylance.planning.step_size import Remainder
from tests.helpers import plans

ROWS, BATCH = 60_000, 64


def make_plan(order: Order, rows: int = ROWS, batch: int = BATCH, seed: int = 1, remainder: Remainder = "drop") -> Plan:
    return plans.make_plan(order.resolve(Facts(rows=rows, seed=seed)), batch, 1, remainder)


def window(lanes: int, window_shards: int, shard_rows: int = 200) -> WindowShuffle:
    return WindowShuffle(shard_rows=shard_rows, window_shards=window_shards, lanes=lanes)


@pytest.mark.parametrize(
    ("lanes", "window_shards"),
    [(8, 16), (32, 4), (256, 1), (16, 16), (64, 16)],
)
@pytest.mark.parametrize("shard_rows", [100, 1000])
def test_windows_follow_the_rule_of_the_readme(lanes: int, window_shards: int, shard_rows: int) -> None:
    plan = make_plan(window(lanes, window_shards, shard_rows), rows=10**8, batch=256)
    found = shuffle_quality(plan, sample_steps=256).divergences["10 blocks"]
    assert found.ratio == pytest.approx(1 + (256 / lanes - 1) / window_shards, rel=0.15)
