"""Rows with tokens and patches: no step exceeds either limit, ranks are equal in both, and both are shown."""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.audit.reopening import reopen
from raylance.errors import ConfigError, StateError

ROWS = 2_000
COSTS: dict[str, Any] = {"tokens": raylance.TokensOf("ids"), "patches": "patches"}
BUDGET: dict[str, int] = {"tokens": 2_000, "patches": 9_000}


@pytest.fixture(scope="module")
def pages(write_dataset: Callable[..., str]) -> str:
    """40 % of the rows have no image."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3, 1, ROWS), 2, 200).astype(np.int64)
    patches = (rng.lognormal(5, 1, ROWS) * (rng.random(ROWS) > 0.4)).astype(np.int64)
    ids = [np.full(length, row, dtype=np.int32) for row, length in enumerate(lengths)]
    return write_dataset(pa.table({"ids": ids, "length": lengths, "patches": patches, "id": np.arange(ROWS)}))


def opened(uri: str, **arguments: Any) -> raylance.Dataset:
    return raylance.dataset(uri, **{"cost": COSTS, "seed": 3, "remainder": "ragged_or_empty"} | arguments)


def fits(batch: dict[str, Any], padded: bool) -> bool:
    tokens = len(batch["length"]) * batch["length"].max() if padded else batch["length"].sum()
    return len(batch["id"]) == 1 or bool(tokens <= BUDGET["tokens"] and batch["patches"].sum() <= BUDGET["patches"])


@pytest.mark.promise("P1", "P2", "P3", "P5")
@pytest.mark.parametrize(
    ("arguments", "padded"),
    [
        ({}, []),
        ({"order": "row", "balance": raylance.Balance()}, ["tokens"]),
        ({"balance": raylance.Balance(equal_rows=False, most_moved=0.5)}, []),
        ({"order": raylance.Buckets(by="tokens")}, []),
        ({"order": "bucket", "balance": raylance.Balance()}, ["tokens"]),
    ],
    ids=str,
)
def test_no_step_exceeds_a_limit_on_any_world(pages: str, arguments: dict[str, Any], padded: list[str]) -> None:
    data, budget = opened(pages, **arguments), raylance.Budget(BUDGET, padded=padded)
    is_padded = bool(padded) or "bucket" in data.plan(8).plan.order.name
    whole = list(data.iter_batches(budget=budget))
    assert sorted(np.concatenate([batch["id"] for batch in whole]).tolist()) == list(range(ROWS))
    assert all(fits(batch, is_padded) for batch in whole)
    found: list[list[int]] = [[] for _ in whole]
    state, begin = None, 0
    for world, end in ((2, len(whole) // 2), (3, len(whole))):
        for rank in range(world):
            with data.loader(rank=rank, world_size=world, record=False) as loader:
                if state is not None:
                    loader.load_state_dict(json.loads(json.dumps(state)))
                for number, batch in zip(range(begin, end), loader.iter_batches(budget=budget), strict=False):
                    found[number] += batch["id"].tolist()
                    assert batch["_step_cost"] == {
                        "tokens": whole[number]["length"].sum(),
                        "patches": whole[number]["patches"].sum(),
                    }
                saved = loader.state_dict()
        state, begin = saved, end
    assert [sorted(step) for step in found] == [sorted(batch["id"].tolist()) for batch in whole]


def test_micro_batches_hold_both_limits_and_are_as_many_on_each_rank(pages: str) -> None:
    micro = {"tokens": 300, "patches": 1_500}
    budget = raylance.Budget(BUDGET, micro=micro)
    ranks = [
        list(opened(pages).loader(rank=rank, world_size=3, record=False).iter_batches(budget=budget))
        for rank in range(3)
    ]
    assert len({len(steps) for steps in ranks}) == 1
    for step in zip(*ranks, strict=True):
        assert len({len(each) for each in step}) == 1
        for each in itertools.chain(*step):
            is_fit = each["length"].sum() <= micro["tokens"] and each["patches"].sum() <= micro["patches"]
            assert is_fit or len(each["id"]) == 1


def test_costs_are_dicts_by_name_and_shown(pages: str, tmp_path: Path) -> None:
    data, world, paid = opened(pages), 2, []
    for rank in range(world):
        with data.loader(rank=rank, world_size=world, record=str(tmp_path / "run"), name="train") as loader:
            own = []
            for batch in loader.iter_batches(global_batch_size=20):
                own.append((int(batch["length"].sum()), int(batch["patches"].sum())))
                time.sleep(0.03)  # a step, beside which the loop waits little
            paid.append(own)
            stats = loader.stats()
    assert stats["cost.tokens"] == sum(tokens for tokens, _ in paid[1])
    assert stats["cost.patches"] == sum(patches for _, patches in paid[1])
    most = np.max(paid, axis=0).sum(axis=0)
    assert [stats["dearest_cost.tokens"], stats["dearest_cost.patches"]] == most.tolist()
    tokens, patches = world * most / np.sum(paid, axis=(0, 1))
    assert patches > tokens
    found = str(raylance.explain_run(str(tmp_path / "run")))
    assert f"{patches:.2f} times the mean of the ranks in patches, and {tokens:.2f} times in tokens" in found
    assert f"{1 - 1 / patches:.0%} of a step" in found
    page = Path(raylance.report_run(str(tmp_path / "run"))).read_text()
    assert "padding and imbalance over time" in page
    proof = raylance.prove_run(str(tmp_path / "run"))
    assert proof.ok, str(proof)
    costs = data.costs
    assert isinstance(costs, dict)
    assert f"{costs['patches'].sum():,} patches and {costs['tokens'].sum():,} tokens" in proof.verdict
    plan = data.plan(20, world_size=world)
    assert isinstance(plan.costs, dict)
    assert plan.costs["patches"].summed[1] > plan.costs["tokens"].summed[1]
    assert " patches a step" in repr(plan)
    balanced = opened(pages, balance=raylance.Balance(most_moved=0.5)).plan(20, world_size=world).costs
    assert isinstance(balanced, dict)
    assert all(balanced[name].summed[1] < plan.costs[name].summed[1] for name in balanced)


def test_a_run_is_reopened_with_its_costs(pages: str) -> None:
    data = opened(pages, order=raylance.Buckets(by="patches"))
    with data.loader() as loader:
        next(iter(loader.iter_batches(budget=raylance.Budget(BUDGET))))
        state = json.loads(json.dumps(loader.state_dict()))
    again = reopen(state)
    assert {name: each.tolist() for name, each in again.costs.items()} == {  # type: ignore[union-attr]
        name: each.tolist()
        for name, each in data.costs.items()  # type: ignore[union-attr]
    }
    with again.loader() as loader:
        loader.load_state_dict(state)
        assert loader.state_dict()["budget"]["cost"] == BUDGET
    with opened(pages, order=raylance.Buckets(by="tokens")).loader() as loader, pytest.raises(StateError, match="by"):
        loader.load_state_dict(state)


def test_a_mixture_weighs_by_one_of_the_costs(pages: str) -> None:
    parts = {
        "text": opened(pages, filter="patches = 0"),
        "images": opened(pages, filter="patches > 0", cost=dict(reversed(COSTS.items()))),
    }
    mixed = raylance.mix(
        {name: (part, 0.5) for name, part in parts.items()}, weigh="tokens", balance=raylance.Balance()
    )
    paid = dict.fromkeys((True, False), 0)
    for batch in mixed.iter_batches(budget=raylance.Budget(BUDGET)):
        assert fits(batch, False)
        for length, patches in zip(batch["length"].tolist(), batch["patches"].tolist(), strict=True):
            paid[patches > 0] += length
    assert paid[True] / sum(paid.values()) == pytest.approx(0.5, abs=0.03)
    shares = mixed.plan(64).sources["images"].cost_share
    assert isinstance(shares, dict)
    assert shares["patches"] == pytest.approx(1)
    parts["images"] = opened(pages, filter="patches > 0 AND id % 2 = 0", cost=dict(reversed(COSTS.items())))
    both = raylance.mix({"a": (opened(pages, filter="id % 2 = 1"), 0.5), "b": (parts["images"], 0.5)}).plan(64).sources
    shares = {name: source.cost_share for name, source in both.items()}
    assert shares["b"]["patches"] > 0.5 > shares["b"]["tokens"] - 0.1  # type: ignore[index]
    nothing = {"tokens": "length", "patches": "patches * 0"}
    free = raylance.mix({"a": (opened(pages, cost=nothing), 1), "b": (opened(pages, cost=nothing), 1)})
    assert "nan" not in repr(free.plan(64))
    with pytest.raises(ConfigError, match="patches"):
        raylance.mix({"a": (opened(pages, cost=nothing), 1)}, weigh="patches")
    with pytest.raises(ConfigError, match="weights"):
        raylance.mix({"a": (parts["text"], 1)}, weigh="weights")
    with pytest.raises(ConfigError, match="patches"):
        raylance.mix({"a": (parts["text"], 1), "b": (opened(pages, cost={"tokens": "length"}), 1)})


@pytest.mark.promise("P8")
def test_what_is_refused(pages: str) -> None:
    data = opened(pages)
    for wrong, named in (
        (raylance.Budget(100), "patches, tokens"),
        (raylance.Budget({"pixels": 9}), "pixels"),
        (raylance.Budget({"tokens": 9}, micro={"words": 3}), "words"),
    ):
        with pytest.raises(ConfigError, match=named):
            data.iter_batches(budget=wrong)
    with pytest.raises(ConfigError, match="one cost"):
        opened(pages, cost="length").iter_batches(budget=raylance.Budget({"tokens": 9}))
    for given in ({}, {"tokens": 0}, {"tokens": "a"}, {1: 5}, {"tokens": True}):
        with pytest.raises(ConfigError, match=r"Budget\("):
            raylance.Budget(given)
    for padded in (["words"], "tokens", 3):
        with pytest.raises(ConfigError, match="padded"):
            raylance.Budget({"tokens": 5}, padded=padded)
    for cost in ({}, {"cost": "length"}, {"a b": "length"}, {1: "length"}, {"tokens": 5}, {"tokens": {"a": "length"}}):
        with pytest.raises(ConfigError, match="cost"):
            opened(pages, cost=cost)
    with pytest.raises(ConfigError, match="words"):
        opened(pages, order=raylance.Buckets(by="words"))
    with pytest.raises(ConfigError, match="similar patches"):
        opened(pages, order=raylance.Buckets(by="patches")).plan(budget=raylance.Budget({"tokens": 500}))
    with pytest.raises(ConfigError, match="micro=3"):
        raylance.Budget({"tokens": 500}, micro=3)
    assert raylance.Budget({"tokens": 5}, padded=False) == raylance.Budget({"tokens": 5})
    assert raylance.Budget({"tokens": 5}, padded=True).padded == ["tokens"]
    assert len({raylance.Budget({"tokens": 5, "a": 1}), raylance.Budget({"a": 1, "tokens": 5})}) == 1
    limited = raylance.Budget(BUDGET, padded=["tokens"])
    with pytest.raises(ConfigError, match="multiple"):
        data.iter_torch_batches(budget=limited, pad_lists={"ids": raylance.Pad(0, multiple=64)})
    not_padded = dataclasses.replace(limited, padded=None)
    assert not_padded.padded == []
    data.iter_torch_batches(budget=not_padded, pad_lists={"ids": raylance.Pad(0, multiple=64)})
