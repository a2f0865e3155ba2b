"""Batches of a cost through whole loaders: the same global batches on any world, resumed anywhere, mixed, reported."""

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.audit.epoch import EpochAudit
from raylance.audit.reopening import reopen
from raylance.errors import ConfigError, StateError
from tests.helpers.costly import BUDGET, ROWS, check_steps_on_another_world, opened


@pytest.fixture(scope="module")
def texts(write_dataset: Callable[..., str]) -> str:
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, ROWS), 2, 200).astype(np.int64)
    ids = [np.full(length, row, dtype=np.int32) for row, length in enumerate(lengths)]
    return write_dataset(pa.table({"ids": ids, "length": lengths, "id": np.arange(ROWS)}), max_rows_per_file=900)


@pytest.mark.promise("P1", "P2", "P3", "P5")
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"order": "window", "balance": raylance.Balance()},
        {"order": "window", "balance": raylance.Balance(equal_rows=False, most_moved=0.5)},
    ],
    ids=str,
)
def test_a_run_that_continues_on_another_world_has_the_same_steps(texts: str, arguments: dict[str, Any]) -> None:
    check_steps_on_another_world(texts, arguments, "threads")


def test_padding_and_costs_are_what_plan_says(texts: str) -> None:
    summary = opened(texts).plan(world_size=2, budget=raylance.Budget(BUDGET))
    assert summary.costs is not None
    assert f"{BUDGET:,}" in repr(summary)
    assert "padding" in repr(summary)
    real = paid = steps = 0
    for batch in opened(texts).iter_batches(budget=raylance.Budget(BUDGET)):
        length = batch["length"]
        assert len(length) * length.max() <= BUDGET
        real, paid, steps = real + int(length.sum()), paid + len(length) * int(length.max()), steps + 1
    assert summary.steps == steps
    assert summary.rows_dropped == 0
    assert summary.costs.cost == pytest.approx(real / steps, rel=0.1)
    at_random = opened(texts, order="window").plan(64, world_size=2)
    assert at_random.costs is not None
    assert at_random.costs.padding > 3 * summary.costs.padding


def test_what_ranks_pay_is_counted_and_explained(texts: str, tmp_path: Path) -> None:
    dataset, world, wanted = opened(texts, order="window"), 2, []
    for rank in range(world):
        with dataset.loader(rank=rank, world_size=world, record=str(tmp_path / "run"), name="train") as loader:
            paid = []
            for batch in loader.iter_batches(global_batch_size=64):
                paid.append((len(batch["length"]) * int(batch["length"].max()), int(batch["length"].sum())))
                time.sleep(0.03)  # a step, beside which the loop waits little
            wanted.append(paid)
            stats = loader.stats()
            assert stats["padded_cost"] == sum(padded for padded, _ in paid)
            assert stats["cost"] == sum(own for _, own in paid)
            assert "padding" in str(loader.explain())
    dearest = sum(max(padded for padded, _ in step) for step in zip(*wanted, strict=True))
    assert stats["dearest_cost"] == dearest
    found = str(raylance.explain_run(str(tmp_path / "run")))
    share = 1 - sum(own for paid in wanted for _, own in paid) / sum(padded for paid in wanted for padded, _ in paid)
    assert f"{share:.0%} of what batches cost is padding" in found
    assert f"{world * dearest / sum(padded for paid in wanted for padded, _ in paid):.2f} times" in found


def test_a_mixture_has_steps_of_a_cost(texts: str) -> None:
    parts = {name: opened(texts, order="window", filter=f"id % 2 = {name == 'b':d}") for name in ("a", "b")}
    mixed = raylance.mix({"a": (parts["a"], 0.5), "b": (parts["b"], 0.5)}, balance=raylance.Balance())
    found = list(mixed.iter_batches(budget=raylance.Budget(BUDGET, padded=False)))
    ids = np.concatenate([batch["id"] for batch in found])
    assert len(set(ids.tolist())) == len(ids) > 0.95 * ROWS
    assert all(batch["length"].sum() <= BUDGET for batch in found)
    assert mixed.plan(world_size=2, budget=raylance.Budget(BUDGET, padded=False)).costs is not None
    with pytest.raises(ConfigError, match="bucket"):
        raylance.mix({"a": (opened(texts), 1)})
    with pytest.raises(ConfigError, match="balance"):
        raylance.mix({"a": (opened(texts, order="window", balance=raylance.Balance()), 1)})


def test_weights_may_be_shares_of_the_cost(texts: str) -> None:
    parts = {
        "short": opened(texts, order="window", filter="length < 15"),
        "long": opened(texts, order="row", filter="length >= 15"),
    }
    weights = {"short": 0.25, "long": 0.75}
    mixed = raylance.mix({name: (part, weights[name]) for name, part in parts.items()}, weigh="cost")
    paid = {"short": 0, "long": 0}
    for batch in mixed.iter_batches(budget=raylance.Budget(BUDGET, padded=False)):
        for length in batch["length"].tolist():
            paid["short" if length < 15 else "long"] += length
    assert paid["short"] / sum(paid.values()) == pytest.approx(0.25, abs=0.02)
    sources = mixed.plan(budget=raylance.Budget(BUDGET, padded=False)).sources
    for name, source in sources.items():
        assert source.cost_share == pytest.approx(paid[name] / sum(paid.values()), abs=0.02)
        assert source.share == pytest.approx(
            source.delivered / sum(each.delivered for each in sources.values()), abs=0.02
        )
    (shown,) = re.findall(r"short +[\d.]+% +([\d.]+)%", repr(mixed.plan(global_batch_size=64)))
    assert float(shown) == pytest.approx(25, abs=2)
    plain = raylance.dataset(texts)
    with pytest.raises(ConfigError, match="weigh"):
        raylance.mix({"a": (plain, 1), "b": (plain, 1)}, weigh="cost")
    with pytest.raises(ConfigError, match="weigh"):
        raylance.mix({"a": (plain, 1)}, weigh="tokens")  # type: ignore[arg-type]


def test_windows_have_costs(write_dataset: Callable[..., str]) -> None:
    rows = np.arange(400)
    uri = write_dataset(pa.table({"episode": rows // 40, "cost": rows % 9 + 1, "x": rows.astype(np.float32)}))
    windows = raylance.Windows(episode="episode", offsets={"x": (-1, 0, 1)}, at_ends="drop")
    dataset = raylance.dataset(uri, samples=windows, cost="cost", order="bucket")
    anchors = [row for row in range(400) if 0 < row % 40 < 39]
    assert dataset.costs is not None
    assert dataset.costs.tolist() == [row % 9 + 1 for row in anchors]
    found = list(dataset.iter_batches(budget=raylance.Budget(60), with_row_offset=True))
    assert sorted(np.concatenate([batch["_rowoffset"] for batch in found]).tolist()) == anchors
    assert all(len(batch["cost"]) * batch["cost"].max() <= 60 for batch in found)


def test_a_run_is_recorded_proven_and_reopened(texts: str, tmp_path: Path) -> None:
    dataset = opened(texts, cost=raylance.TokensOf("ids"), balance=raylance.Balance())
    states = []
    for rank in range(2):
        with dataset.loader(rank=rank, world_size=2, record=str(tmp_path / "run"), name="train") as loader:
            for _ in loader.iter_batches(budget=raylance.Budget(BUDGET, max_rows=200)):
                pass
            states.append(loader.state_dict())
    page = raylance.report_run(str(tmp_path / "run"))
    assert "padding and imbalance over time" in Path(page).read_text()
    proof = raylance.prove_run(str(tmp_path / "run"))
    assert proof.ok, str(proof)
    assert f"{ROWS:,} rows" in proof.verdict
    assert f"cost {dataset.costs.sum():,}" in proof.verdict  # type: ignore[union-attr]
    again = reopen(states[0])
    assert again.costs is not None
    np.testing.assert_array_equal(again.costs, dataset.costs)
    with again.loader() as loader:
        loader.load_state_dict(states[0])
        assert (loader.epoch, loader.state_dict()["budget"]["max_rows"]) == (1, 200)


def test_the_proof_of_packed_documents_counts_tokens(texts: str, tmp_path: Path) -> None:
    lengths, pack = opened(texts).costs, raylance.Pack("ids", 64, "whole", too_long="drop")
    assert lengths is not None
    dataset = raylance.dataset(texts, samples=pack, remainder="ragged")
    with dataset.loader(record=str(tmp_path / "run"), name="train") as loader:
        found = sum(int((batch["segment_ids"] >= 0).sum()) for batch in loader.iter_batches(global_batch_size=8))
    assert found == lengths[lengths <= 64].sum() < lengths.sum()
    proof = raylance.prove_run(str(tmp_path / "run"))
    assert proof.ok, str(proof)
    assert f"{found:,} tokens" in proof.verdict


@pytest.mark.parametrize("size", [{"max_rows": 50}, {"cost": BUDGET}], ids=str)
@pytest.mark.parametrize(("padded", "equal_rows"), [(True, True), (False, True), (False, False)])
def test_micro_batches_are_as_many_on_every_rank(
    texts: str, size: dict[str, Any], padded: bool, equal_rows: bool
) -> None:
    dataset, world = opened(texts, order="window", balance=raylance.Balance(equal_rows=equal_rows)), 3
    budget = raylance.Budget(**size, padded=padded, micro=400)
    whole = list(dataset.iter_batches(budget=dataclasses.replace(budget, micro=None)))
    ranks = []
    for rank in range(world):
        with dataset.loader(rank=rank, world_size=world, record=False) as loader:
            ranks.append(list(loader.batches(budget=budget, device="cpu")))
    assert {len(steps) for steps in ranks} == {len(whole)}
    assert max(len(step) for step in ranks[0]) > 1
    for number, step in enumerate(whole):
        of_ranks = [steps[number] for steps in ranks]
        assert len({len(each) for each in of_ranks}) == 1, "ranks have different numbers of micro-batches"
        ids = [row for each in of_ranks for micro in each for row in micro["id"].tolist()]
        assert sorted(ids) == sorted(step["id"].tolist())
        for micro in (micro for each in of_ranks for micro in each):
            lengths = micro["length"].numpy()
            assert micro["_step_cost"] == step["length"].sum()
            paid = len(lengths) * lengths.max(initial=0) if padded else lengths.sum()
            assert paid <= 400 or len(lengths) == 1


@pytest.mark.parametrize(
    ("size", "equal_rows"), [({"budget": raylance.Budget(BUDGET)}, True), ({"global_batch_size": 24}, False)]
)
def test_batches_say_what_their_step_costs_if_ranks_get_unequal_shares(
    texts: str, size: dict[str, Any], equal_rows: bool
) -> None:
    """Without micro-batches, too: a mean of the ranks' means weighs rows unequally."""
    dataset, costs, own = opened(texts, order="window", balance=raylance.Balance(equal_rows=equal_rows)), [], []
    for rank in range(2):
        with dataset.loader(rank=rank, world_size=2, record=False) as loader:
            found = list(loader.batches(**size, device="cpu"))
        costs.append([batch["_step_cost"] for batch in found])
        own.append([int(batch["length"].sum()) for batch in found])
    assert costs[0] == costs[1] == [sum(step) for step in zip(*own, strict=True)]
    assert "length" in dataset.show(found[0])._repr_html_()
    assert "_step_cost" not in next(iter(opened(texts).iter_batches(global_batch_size=8)))


@pytest.mark.promise("P8")
def test_what_is_refused(texts: str) -> None:
    dataset, plain = opened(texts), raylance.dataset(texts)
    with pytest.raises(ConfigError, match="cost="):
        plain.iter_batches(budget=raylance.Budget(100))
    with pytest.raises(ConfigError, match="micro=9"):
        plain.iter_batches(budget=raylance.Budget(max_rows=8, micro=9))
    with pytest.raises(ConfigError, match="global_batch_size=8"):
        dataset.iter_batches(budget=raylance.Budget(100), global_batch_size=8)
    for wrong in (
        {"cost": 0},
        {"cost": 8.5},
        {"cost": 8, "max_rows": 0},
        {"cost": 8, "padded": 1},
        {"max_rows": True},
        {},
    ):
        with pytest.raises(ConfigError, match=r"Budget\("):
            raylance.Budget(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="budget=100"):
        dataset.iter_batches(budget=100)  # type: ignore[arg-type]
    with dataset.loader(rank=0, world_size=8) as loader, pytest.raises(ConfigError, match="8 data-parallel ranks"):
        loader.iter_batches(budget=raylance.Budget(300))
    with dataset.loader() as loader:
        next(iter(loader.iter_batches(budget=raylance.Budget(BUDGET))))
        state = loader.state_dict()
    with opened(texts, cost=raylance.TokensOf("ids")).loader() as loader, pytest.raises(StateError, match="cost"):
        loader.load_state_dict(state)


def test_an_audit_of_buckets(texts: str) -> None:
    report = EpochAudit(opened(texts, balance=raylance.Balance()), global_batch_size=64, world_size=3).count()
    assert report.verdict.startswith("OK")


@pytest.mark.promise("P8")
@pytest.mark.parametrize("kind", ["bucket", "window", "mixture", "micro"])
def test_steps_cost_no_more_than_their_budget_with_their_padding(texts: str, kind: str) -> None:
    """The longest of a batch may be rounded up: the cost counts that, or the steps are refused before the first."""
    multiple, order = 64, "bucket" if kind == "bucket" else "window"

    def make(cost: raylance.TokensOf) -> raylance.Dataset:
        made = opened(texts, cost=cost, order=order, columns=["ids"], remainder="ragged")
        return raylance.mix({"a": (made, 0.5), "b": (made, 0.5)}, remainder="ragged") if kind == "mixture" else made

    budget = raylance.Budget(max_rows=128, micro=BUDGET) if kind == "micro" else raylance.Budget(BUDGET)
    size: dict[str, Any] = {"budget": budget}
    rounded: Any = {"ids": raylance.Pad(0, multiple=multiple)}
    plain = make(raylance.TokensOf("ids"))
    for pad, fix in ((rounded["ids"], f"multiple={multiple}"), (raylance.Pad(0, length=200), "global_batch_size=20")):
        for iterate in (plain.iter_batches, plain.iter_torch_batches):
            with pytest.raises(ConfigError, match=fix):
                iterate(**size, pad_lists={"ids": pad})
    for how in (0, raylance.Pad(0), "jagged", None):
        plain.iter_torch_batches(**size, pad_lists={"ids": how})
    if kind != "bucket":  # whose steps are always counted as if they were padded
        plain.iter_batches(budget=dataclasses.replace(budget, padded=False), pad_lists=rounded)
    for counted in (multiple, 2 * multiple):
        batches: Any = make(raylance.TokensOf("ids", multiple=counted)).iter_batches(**size, pad_lists=rounded)
        tokens = [each["ids"].size for step in batches for each in (step if kind == "micro" else [step])]
        assert max(tokens) <= BUDGET
        assert sum(tokens) > 0


def test_a_rounded_cost_is_read_back_from_a_state(texts: str) -> None:
    cost = raylance.TokensOf("ids", multiple=64)
    with opened(texts, cost=cost).loader() as loader:
        state = loader.state_dict()
    again = reopen(state)
    assert again.costs is not None
    np.testing.assert_array_equal(again.costs, opened(texts, cost=cost).costs)


@pytest.mark.parametrize(
    ("older", "budget"),
    [
        ({"global_batch_cost": BUDGET}, raylance.Budget(BUDGET)),
        (
            {"global_batch_cost": BUDGET, "max_rows": 40, "padded": False},
            raylance.Budget(BUDGET, max_rows=40, padded=False),
        ),
        ({"global_batch_cost": BUDGET, "micro_batch_cost": 400}, raylance.Budget(BUDGET, micro=400)),
        ({"global_batch_size": 50, "micro_batch_cost": 400}, raylance.Budget(max_rows=50, micro=400)),
    ],
)
def test_what_a_budget_has_replaced_works_with_a_warning(
    texts: str, older: dict[str, Any], budget: raylance.Budget
) -> None:
    dataset = opened(texts)
    wanted = [repr(batch) for batch in dataset.iter_batches(budget=budget)]
    with pytest.warns(FutureWarning, match=r"budget=raylance\.Budget\("):
        assert [repr(batch) for batch in dataset.iter_batches(**older)] == wanted
    with dataset.loader(record=False) as loader:
        with pytest.warns(FutureWarning, match="budget=") as caught:
            steps = loader.steps_per_epoch(**older)
        assert {each.filename for each in caught} == {__file__}
        assert steps == loader.steps_per_epoch(budget=budget) == len(wanted)
        with pytest.warns(FutureWarning, match="budget="):
            loader.seek(2, **older)
        assert loader.global_step == 2
    with pytest.warns(FutureWarning, match="budget="):
        planned = dataset.plan(**older)
    assert repr(planned) == repr(dataset.plan(budget=budget))


def test_what_a_budget_has_replaced_is_refused_beside_it(texts: str) -> None:
    dataset = opened(texts)
    with pytest.raises(ConfigError, match="global_batch_cost"):
        dataset.iter_batches(budget=raylance.Budget(9), global_batch_cost=9)
    for more in ({}, {"micro_batch_cost": 400}):
        with pytest.raises(ConfigError, match="max_rows=5"):
            dataset.iter_batches(global_batch_size=8, max_rows=5, **more)
    with pytest.raises(ConfigError, match=r"seek\(\).*global_batch_siz"):
        dataset.loader(record=False).seek(3, global_batch_siz=8)
