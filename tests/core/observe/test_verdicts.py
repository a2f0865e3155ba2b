"""What a verdict says: each limit and each advice in a run that needs it, and not in one that does not."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylance.observe.diagnoses import DIAGNOSES
from raylance.observe.figures import PARTS, RankFigures, RunFigures, percents_of
from raylance.observe.stats import NUMBERS
from raylance.observe.verdict import Verdict, judge
from tests.helpers.figures import OPTIONS, figures, part

# ---- limits: figures of a run with each, and of one that is just without


def judged(run: dict[str, Any]) -> Verdict:
    """The verdict on one rank: `run` has its figures, `facts`, and `options`."""
    options = OPTIONS | run.get("options", {})
    facts = run.get("facts", {}) | {"options": options}
    return judge([part(facts=facts, **{name: run[name] for name in run.keys() - {"facts", "options"}})])


READS: dict[str, Any] = {"user_s": 1.0, "wait_read_s": 3.0, "storage_s": 4.0}
DECODES: dict[str, Any] = {"user_s": 1.0, "wait_decode_s": 1.0, "decode_s": 2.0}
FINISHES: dict[str, Any] = {"user_s": 1.0, "wait_finish_s": 1.0, "collate_s": 0.5}
SAVES: dict[str, Any] = {"user_s": 11.0, "save_s": 10.0}
TRAINS: dict[str, Any] = {"user_s": 10.0}
PADS: dict[str, Any] = {**TRAINS, "cost": 50.0, "padded_cost": 100.0, "dearest_cost": 150.0}
NO_RAY: dict[str, Any] = {"cluster_cpus": None, "cpus": 2}
TORCH: dict[str, Any] = {"facts": {**NO_RAY, "num_workers": 1}}

LIMITS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("unknown", {**TRAINS, "batches": 2.0}, {**TRAINS, "batches": 3.0}),
    ("training", {**TRAINS, "wait_read_s": 0.4}, {**TRAINS, "wait_read_s": 1.0}),
    ("training", {**TRAINS, "wait_start_s": 4.0}, {**TRAINS, "wait_start_s": 6.0}),
    ("starting", {"user_s": 1.0, "wait_start_s": 5.0}, {"user_s": 1.0, "wait_start_s": 5.0, "wait_read_s": 6.0}),
    ("starting", {**READS, "wait_start_s": 3.5}, {**READS, "wait_start_s": 2.5}),
    ("reading", READS, {**READS, "wait_decode_s": 4.0}),
    ("reading", {**TRAINS, "wait_read_s": 0.6}, {**TRAINS, "wait_read_s": 0.6, "wait_start_s": 2.0}),
    ("decoding", DECODES, {**DECODES, "save_s": 0.9, "user_s": 2.9, "other_s": 1.5}),
    ("finishing", FINISHES, {**FINISHES, "wait_decode_s": 2.0}),
    ("saving", SAVES, {**SAVES, "save_s": 2.0}),
    (
        "saving",
        {"user_s": 4.0, "save_s": 3.0, "wait_decode_s": 2.0},
        {"user_s": 4.0, "save_s": 1.0, "wait_decode_s": 2.0},
    ),
    ("other datasets", {**TRAINS, "other_s": 7.0}, {**TRAINS, "other_s": 3.0}),
    ("other datasets", {"user_s": 9.0, "other_s": 5.2, "save_s": 3.3}, {"user_s": 9.0, "other_s": 3.2, "save_s": 5.3}),
]


@pytest.mark.parametrize(("limit", "run", "other"), LIMITS)
def test_each_limit_is_named_in_its_run_alone(limit: str, run: dict[str, Any], other: dict[str, Any]) -> None:
    assert judged(run).limit == limit
    assert judged(other).limit != limit
    assert str(judged(run)).splitlines()[0] == judged(run).summary


def test_each_limit_has_a_row() -> None:
    assert {limit for limit, *_ in LIMITS} == {*PARTS, "unknown"}


# ---- advice: a run in which it is said, and one in which it is not, most often because the option is set so already

ADVICE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # of starting
    ("loader.prepare(", {**TRAINS, "wait_start_s": 4.0}, {**TRAINS, "wait_start_s": 0.9}),
    ("loader.prepare(", {**READS, "wait_start_s": 9.0}, {**READS, "wait_start_s": 9.0, "facts": {"prepared": True}}),
    ("loader.prepare(", {**TRAINS, "wait_start_s": 9.0}, {**TRAINS, "wait_start_s": 9.0, **TORCH}),
    ("call it earlier", {**TRAINS, "wait_start_s": 9.0, "facts": {"prepared": True, "prepared_after_s": 8.0}},
     {**TRAINS, "wait_start_s": 9.0, "facts": {"prepared": True, "prepared_after_s": 0.1}}),
    # of reading
    ('order="window"', {**READS, "facts": {"order": "row"}}, READS),
    ('order="window"', {**READS, "facts": {"order": "row"}}, {**READS, "facts": {"order": "row", "row_bytes": 5e4}}),
    ('order="window"', {**READS, "facts": {"order": "row", "row_bytes": 5e4, "sources": ["s3://bucket/a.lance"]}},
     {**READS, "facts": {"sources": ["s3://bucket/a.lance"]}}),
    ("num_readers=3", READS, {**READS, "options": {"num_readers": "auto"}}),
    ("num_readers=3", READS, {**READS, "options": {"num_readers": (1, 3)}}),
    ("num_readers=", READS, {**READS, "facts": {"in_parts": True}, "options": {"reader_bytes": 1 << 20}}),
    ("num_readers=", READS, {**READS, "facts": {"shard_bytes": 1e5, "lane_bytes": 1e8}}),
    ("reader_bytes=1,048,576", {**READS, "facts": {"in_parts": True}, "options": {"reader_bytes": 1 << 20}},
     {**READS, "options": {"reader_bytes": 1 << 20}}),
    ("window_bytes= of raylance.dataset", {**READS, "facts": {"shard_bytes": 1e5, "lane_bytes": 1e8}},
     {**READS, "facts": {"shard_bytes": 4e6, "lane_bytes": 1e8}}),
    ("window_bytes= of raylance.dataset", {**READS, "facts": {"shard_bytes": 1e5, "lane_bytes": 1e8}},
     {**READS, "facts": {"shard_bytes": 1e5, "lane_bytes": 2e5}}),
    ("shard_rows= of the order", {**READS, "facts": {"shard_bytes": 1e5, "lane_bytes": 1e8, "shard_rows": 100}},
     {**READS, "facts": {"shard_bytes": 4e6, "lane_bytes": 1e8, "shard_rows": 4000}}),
    ("fewer shard actors", {**READS, "readers": 2.0, "facts": {"cluster_cpus": 2.0}},
     {**READS, "facts": {"cluster_cpus": 2.0}}),
    ("fewer shard actors", {**READS, "readers": 2.0, "facts": {"cluster_cpus": 2.0}},
     {**READS, "readers": 2.0, "facts": {"cluster_cpus": 2.0}, "options": {"num_readers": (1, 2)}}),
    ("columns=", READS, {**READS, "facts": {"columns": 1}}),
    ("--shorter-side", {**READS, "facts": {"draft": [True]}}, READS),
    ("Video(size=", {**READS, "facts": {"videos": ["top"]}}, READS),
    ("nearer", {**READS, "facts": {"sources": ["s3://bucket/a.lance"]}}, READS),
    ("faster disk", READS, {**READS, "facts": {"sources": ["s3://bucket/a.lance"]}}),
    # of decoding
    ("num_decoders=3 takes 3 CPUs", DECODES, {**DECODES, "options": {"num_decoders": (1, 8)}}),
    ("num_decoders=3 takes 3 CPUs", DECODES, {**DECODES, "decoders": 3.0, "decode_s": 2.0, "wait_decode_s": 0.02}),
    ("room for num_decoders=4", {"user_s": 1.0, "wait_decode_s": 7.0, "decode_s": 8.0},
     {"user_s": 1.0, "wait_decode_s": 7.0, "decode_s": 32.0, "decoders": 4.0}),
    ("no room for more", {"user_s": 1.0, "wait_decode_s": 7.0, "decode_s": 32.0, "decoders": 4.0},
     {"user_s": 1.0, "wait_decode_s": 7.0, "decode_s": 32.0, "decoders": 4.0, "decode_cpu_s": 1.0}),
    ("num_decoders=8", {"user_s": 1.0, "wait_decode_s": 7.0, "decode_s": 32.0, "decoders": 4.0, "decode_cpu_s": 1.0},
     {"user_s": 1.0, "wait_decode_s": 7.0, "decode_s": 32.0, "decoders": 4.0, "decode_cpu_s": 30.0}),
    ("decoder_cpus=", {"user_s": 1.0, "wait_decode_s": 7.0, "decode_s": 8.0, "decode_cpu_s": 0.1},
     {"user_s": 1.0, "wait_decode_s": 7.0, "decode_s": 8.0, "decode_cpu_s": 0.1, "options": {"decoder_cpus": 0.1}}),
    ("num_decoders=", {**DECODES, "facts": NO_RAY, "decode_cpu_s": 0.1},
     {**DECODES, "facts": NO_RAY, "decode_s": 8.0, "decoders": 8.0, "decode_cpu_s": 1.0}),
    ("give the cluster CPUs", {**DECODES, "decoders_wanted": 3.0}, {**DECODES, "decoders_wanted": 1.0}),
    ("your transform=", {**DECODES, "transform_s": 1.9}, {**DECODES, "transform_s": 0.5}),
    ("releases the interpreter", {**DECODES, "transform_s": 1.9, "facts": NO_RAY}, {**DECODES, "transform_s": 1.9}),
    ("DeviceImage", {**DECODES, "device_decode_s": 2.0}, DECODES),
    ("--shorter-side", {**DECODES, "facts": {"draft": [True], "row_bytes": 1e5}},
     {**DECODES, "facts": {"draft": [True], "row_bytes": 1e3}}),
    ("--shorter-side", {**DECODES, "facts": {"draft": [True], "row_bytes": 1e5}},
     {**DECODES, "facts": {"draft": [True], "row_bytes": 1e5}, "transform_s": 1.9}),
    ("Image(draft=True)", {**DECODES, "facts": {"draft": [False], "row_bytes": 1e5}},
     {**DECODES, "facts": {"draft": [True], "row_bytes": 1e5}}),
    ("measure again with the model", {**DECODES, "user_s": 0.001}, DECODES),
    ("prefetch_batches=", {**TRAINS, "wait_decode_s": 1.0}, DECODES),
    # of finishing
    ("global_batch_size=", {"user_s": 0.03, "wait_finish_s": 0.01, "collate_s": 0.1}, FINISHES),
    ("global_batch_size=", {"user_s": 0.03, "wait_finish_s": 0.01, "collate_s": 0.1},
     {"user_s": 0.03, "wait_finish_s": 0.01, "collate_s": 0.1, "facts": {"budget": {"cost": 9}}}),
    ("budget=", {"user_s": 0.03, "wait_finish_s": 0.01, "collate_s": 0.1, "facts": {"budget": {"cost": 9}}},
     {"user_s": 0.03, "wait_finish_s": 0.01, "collate_s": 0.1}),
    ("fewer columns", FINISHES, {**FINISHES, "facts": {"columns": 1}}),
    ("your collate_fn", {**FINISHES, "collate_fn_s": 0.4}, {**FINISHES, "collate_fn_s": 0.1}),
    ("with Ray they have processes", {**FINISHES, "facts": NO_RAY}, FINISHES),
    ("longer epochs", {**FINISHES, "collate_s": 0.1}, FINISHES),
    ("window_bytes=", {**FINISHES, "collate_s": 0.1, "facts": {"shard_bytes": 1e5, "lane_bytes": 1e8}},
     {**FINISHES, "facts": {"shard_bytes": 1e5, "lane_bytes": 1e8}}),
    ("num_workers= makes", {**FINISHES, **TORCH}, {**FINISHES, "facts": {**NO_RAY, "num_workers": 2}}),
    ("prefetch_factor=", {**FINISHES, **TORCH}, {**FINISHES, "facts": {**NO_RAY, "num_workers": 0}}),
    ("persistent_workers=True", {**FINISHES, "first_batch_s": 0.9, **TORCH}, {**FINISHES, **TORCH}),
    ("persistent_workers=True", {**FINISHES, "first_batch_s": 0.9, **TORCH},
     {**FINISHES, "first_batch_s": 0.9, "facts": {**TORCH["facts"], "persistent_workers": True}}),
    # of saving
    ("report less often", {**TRAINS, "save_s": 1.5}, {**TRAINS, "save_s": 0.5}),
    ("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", SAVES, {**SAVES, "facts": {"poll_s": 0.2}}),
    ("checkpoint_upload_mode=", SAVES, {**SAVES, "facts": {"uploads_async": True}}),
    # of other datasets
    ("explain()", {**TRAINS, "other_s": 7.0}, TRAINS),
    ("explain()", {**TRAINS, "other_s": 1.5}, {**TRAINS, "other_s": 0.5}),
    # of costs
    ('order="bucket" brings', PADS, {**PADS, "facts": {"order": "bucket"}}),
    ('order="bucket"', {**PADS, "cost": 100.0}, {**PADS, "cost": 100.0, "facts": {"order": "bucket"}}),
    ('order="bucket"', PADS, {**PADS, "cost": 100.0, "dearest_cost": 100.0}),
    ("samples=raylance.Pack", PADS, {**PADS, "cost": 99.0}),
    ("samples=raylance.Pack", PADS, {**PADS, "facts": {"budget": {"padded": False}}}),
    ("balance=", PADS, {**PADS, "facts": {"balances": True}}),
    ("balance=", PADS, {**PADS, "dearest_cost": 101.0}),
    # of training
    ("num_decoders=1 leaves", {**TRAINS, "decoders": 4.0}, {**TRAINS, "decoders": 1.0}),
    ("num_decoders=1 leaves", {**TRAINS, "decoders": 4.0},
     {**TRAINS, "decoders": 4.0, "options": {"num_decoders": "auto"}}),
    ("num_decoders=1 leaves", {**TRAINS, "decoders": 4.0}, {**TRAINS, "decoders": 4.0, "facts": NO_RAY}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "run", "other"), ADVICE)
def test_advice_is_given_where_it_helps_alone(words: str, run: dict[str, Any], other: dict[str, Any]) -> None:
    assert words in "\n".join(judged(run).advice)
    assert words not in "\n".join(judged(other).advice)


def test_a_slow_transform_is_named() -> None:
    """It counts as decoding, which its user would not look for in it."""
    summary = judged({**DECODES, "transform_s": 1.9}).summary
    assert "your transform=" in summary
    assert "95%" in summary
    assert "transform=" not in judged({**DECODES, "transform_s": 0.9}).summary


# ---- shares


def shares_of(verdict: Verdict) -> list[int]:
    """The percents in which a summary says what the time went to, in its order."""
    told = verdict.summary.rpartition("; of the time: ")[2].partition(";")[0]
    return [int(share.partition("%")[0]) for share in told.split(", ")]


seconds = st.floats(0, 1e6)


@given(spent=st.tuples(*[seconds] * 6), save=st.floats(0, 1), other=st.floats(0, 1), others_s=seconds)
def test_all_parts_are_said_and_add_up_and_the_largest_is_the_limit(
    spent: tuple[float, ...], save: float, other: float, others_s: float
) -> None:
    """Saving took 82 % by the text and 33 % by the picture, where another dataset's start took 52 %."""
    user_s, *waits_s = spent
    within_s = {"save_s": user_s * save / 2, "other_s": user_s * other / 2}
    names = ("wait_start_s", "wait_read_s", "wait_decode_s", "wait_finish_s")
    rank = part(user_s=user_s, **within_s, **dict(zip(names, waits_s, strict=False)))
    run, verdict = RunFigures([rank], others_s), judge([rank], others_s)
    total_s = sum(verdict.seconds.values())
    percents = percents_of(verdict.seconds)
    assert tuple(verdict.seconds) == PARTS
    if total_s < 1e-6:
        return
    assert sum(percents.values()) == 100
    assert all(abs(percents[each] - 100 * verdict.seconds[each] / total_s) < 1 for each in PARTS)
    assert shares_of(verdict) == sorted((percents[each] for each in PARTS if percents[each]), reverse=True)
    waited_s = sum(verdict.seconds[each] for each in ("reading", "decoding", "finishing"))
    assert verdict.waiting == pytest.approx(waited_s / total_s)
    if verdict.limit != "training":
        assert verdict.seconds[verdict.limit] == max(verdict.seconds[each] for each in PARTS[1:])
    else:
        assert verdict.seconds["training"] == max(verdict.seconds.values())
    assert run.shares_in_words() in verdict.summary


def test_no_sentence_of_a_diagnosis_has_shares_of_its_own() -> None:
    """All shares of the time stand together in the summary."""
    run = RunFigures([part(user_s=3.0, save_s=1.0, wait_decode_s=1.0, wait_read_s=1.0, wait_finish_s=1.0)])
    for diagnosis in DIAGNOSES.values():
        assert diagnosis.evidence is None or "%" not in diagnosis.evidence(run)


# ---- ranks


def test_shard_actors_that_decode_do_so_all_at_once() -> None:
    assert [part(decoders=0.0, readers=count).decode_rate for count in (4.0, 1.0)] == [4000, 1000]


def test_the_rank_that_trains_slowest_is_named_and_counts_for_all() -> None:
    verdict = judge([part(rank, user_s=9.0 if rank == 1 else 1.0, facts={"world_size": 3}) for rank in range(3)])
    assert verdict.summary.endswith("; rank 1 trains slowest, 900 ms a step for 100")
    assert verdict.rates["training"] == pytest.approx(3 * 1000 / 9)


def test_a_rank_that_waits_for_another_one_in_its_steps_is_no_slow_one() -> None:
    """Rank 1 waits for rows, and rank 0 for rank 1, in each step's collective operation."""
    ranks = [part(0, user_s=2.05), part(1, user_s=0.64, wait_read_s=1.41, storage_s=4.0)]
    verdict = judge(ranks)
    assert "trains slowest" not in verdict.summary
    assert "rank 1 waits most, 69%" in verdict.summary
    assert verdict.rates["training"] == pytest.approx(2 * 1000 / 0.64)
    assert verdict.rates["delivered"] == pytest.approx(2 * 1000 / 2.05)


def test_no_more_is_delivered_than_training_alone_would_take() -> None:
    """Rank 1 waits for rank 0 where both report, which is saving."""
    verdict = judge([part(0, user_s=10.0), part(1, user_s=10.0, save_s=6.0)])
    assert verdict.rates["delivered"] == verdict.rates["training"] == pytest.approx(2 * 1000 / 10)


def test_a_part_gave_what_was_delivered() -> None:
    """Shard actors decode in several threads, whose seconds add up."""
    verdict = judge([part(user_s=1.0, wait_decode_s=1.0, decode_s=20.0)])
    assert verdict.rates["decoding"] == verdict.rates["delivered"] == 500


def test_of_several_ranks_the_one_that_waits_most_is_named() -> None:
    even = judge([part(rank, user_s=1.0, wait_decode_s=1.0) for rank in range(4)])
    assert "rank" not in even.summary.replace("of each rank", "")
    uneven = judge([part(rank, user_s=1.0, wait_decode_s=9.0 if rank == 2 else 0.3) for rank in range(4)])
    assert uneven.summary.endswith("; rank 2 waits most, 90%")
    assert uneven.rates["training"] == 4000, "all of them together"


@given(numbers=st.lists(st.floats(0, 1e9), min_size=len(NUMBERS), max_size=len(NUMBERS)), ranks=st.integers(1, 3))
def test_any_figures_have_a_verdict(numbers: list[float], ranks: int) -> None:
    found = figures(**dict(zip(NUMBERS, numbers, strict=True)))
    known = part().facts
    verdict = judge([RankFigures(figures=found, facts={**known, "rank": rank}) for rank in range(ranks)])
    assert isinstance(verdict, Verdict)
    assert 0 <= verdict.waiting <= 1
    assert verdict.rates["delivered"] <= verdict.rates["training"] * (1 + 1e-9)
    assert not math.isnan(sum(verdict.rates.values()))
    assert verdict.summary
