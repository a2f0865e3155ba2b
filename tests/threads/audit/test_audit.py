"""`raylance.audit`: it passes what is sound of every kind of dataset, and finds what is not."""

import dataclasses
import datetime
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.api.dataset import opened_of
from raylance.audit import EpochAudit, Step, label_codes, read_setting, reopen
from raylance.errors import ConfigError, DatasetError, StateError
from raylance.planning.step_size import REMAINDERS, Remainder
from raylance.samples.pack_tokens import PackTokens
from tests.helpers.states import signed

ROWS, OTHER = 203, 61
WINDOW = raylance.WindowShuffle(shard_rows=10, window_shards=2, lanes=4)


@pytest.fixture(scope="module")
def uris(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two datasets of several fragments with deleted rows: 193 and 61 live ones; and one of documents."""
    folder = tmp_path_factory.mktemp("audit")
    made = []
    for name, rows in (("a", ROWS), ("b", OTHER)):
        ids = np.arange(rows)
        table = {
            "id": ids,
            "label": pa.array([f"class {row % 5}" if row % 7 else None for row in ids]),
            "episode": ids // 9,
            "weight": (ids % 4).astype(np.float64),
            "split": pa.array(["val" if row % 3 == 0 else "train" for row in ids]),
            "tokens": pa.array([list(range(row % 11)) for row in ids], pa.list_(pa.int32())),
        }
        uri = str(folder / f"{name}.lance")
        lance.write_dataset(pa.table(table), uri, max_rows_per_file=40)
        made.append(uri)
    lance.dataset(made[0]).delete("id >= 30 and id < 40")
    return tuple(made)


SHIFTS = {"first": -1, "second": -2}
WHOLE = raylance.Windows(episode="episode", offsets={"id": [0, 1]}, at_ends="drop", neighbours="selected")
SINGLE: dict[str, dict[str, Any]] = {
    "window": {"order": WINDOW},
    "filter": {"order": "shard", "filter": "id % 4 != 1"},
    "fraction": {"split": raylance.FractionSplit(fractions={"train": 0.7, "val": 0.3}, part="train", by="id")},
    "fraction by NumPy": {
        "split": raylance.FractionSplit(fractions={"a": np.float64(0.7), "b": np.float64(0.3)}, part=np.str_("a"))
    },
    "fraction of offsets": {"split": raylance.FractionSplit(fractions={"a": 0.5, "b": 0.5}, part="b", seed=3)},
    "range": {"split": raylance.RangeSplit([(3, 50), (90, 180)]), "filter": "id > 10"},
    "value": {"split": raylance.ValueSplit("split", "train"), "order": "row"},
    "weighted": {"order": raylance.Weighted(weights="weight", rows_per_epoch=300)},
    "balanced": {"order": raylance.ClassBalanced(column="label", classes_per_batch=4), "filter": "label IS NOT NULL"},
    "windows": {"samples": raylance.Windows(episode="episode", offsets={"id": [-1, 0, 2]}, stride=2)},
    "whole windows": {"samples": WHOLE, "filter": "id % 5 != 0"},
    "packed": {"samples": PackTokens("tokens", length=16, eos_id=9), "filter": "id > 20"},
    "packed split": {"samples": PackTokens("tokens", length=7), "split": raylance.ValueSplit("split", "val")},
}


@functools.cache
def opened(uris: tuple[str, ...], kind: str, remainder: Remainder = "drop") -> raylance.Dataset:
    """A dataset of a kind, or a mixture."""
    if kind not in SINGLE:
        columns = {"columns": ["id", "label"], "seed": 4}
        parts = {
            "first": (raylance.dataset(uris[0], filter="id != 7", order=WINDOW, **columns), 0.6),
            "second": (raylance.dataset(uris[1], split=raylance.ValueSplit("split", "train"), **columns), 0.4),
        }
        if kind == "mixture of windows":
            windows = {
                name: raylance.Windows(episode="episode", offsets={"id": [at, 0]}) for name, at in SHIFTS.items()
            }
            parts = {
                name: (raylance.dataset(uri, samples=windows[name], order=WINDOW, **columns), 0.5)
                for name, uri in zip(SHIFTS, uris, strict=True)
            }
        if kind == "mixture with draws":
            drawn = raylance.ClassBalanced(column="split")
            parts["second"] = (raylance.dataset(uris[1], order=drawn, **columns), 0.4)
        stop = "first_exhausted" if kind == "short mixture" else "all_exhausted"
        return raylance.mix(parts, stop=stop, remainder=remainder)
    columns = {} if kind.startswith("packed") else {"columns": ["id"]}
    return raylance.dataset(uris[0], **columns, **SINGLE[kind], remainder=remainder)


KINDS = [*SINGLE, "mixture", "mixture of windows", "short mixture", "mixture with draws"]


@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_dataset_passes_by_plan(kind: str, remainder: Remainder, uris: tuple[str, ...]) -> None:
    data = opened(uris, kind, remainder=remainder)
    for world, size, position in ((1, 8, 0), (3, 10, 7)):
        epoch = EpochAudit(data, global_batch_size=size, world_size=world, epoch=2, position=position)
        report = epoch.count()
        assert report.ok, report
        repeats = epoch.plan.order.repeats
        assert report.verdict.split("exactly once")[0].endswith("every planned draw " if repeats else "selected row ")
        assert report.counts["delivered"] + report.counts["aside"] == report.counts["expected"]
        assert report.steps == [epoch.plan.steps(0, position)] * world
        assert repr(report).endswith(report.verdict)


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_delivers_what_was_planned(kind: str, uris: tuple[str, ...]) -> None:
    data = opened(uris, kind, remainder="pad")
    epoch = EpochAudit(data, global_batch_size=12, world_size=2, epoch=1, position=5)
    report = epoch.count(epoch.by_stream(runtime="threads"))
    assert report.ok, report
    assert report.counts == epoch.count().counts


def spoil(kind: str, steps: list[list[Step]]) -> None:
    step = steps[1][0]
    if kind == "swapped":
        steps[0], steps[1] = steps[1], steps[0]
    if kind == "removed":
        names = ("offsets", "real") if step.components is None else ("offsets", "real", "components")
        steps[1][0] = dataclasses.replace(step, **{name: getattr(step, name)[1:] for name in names})
    if kind == "replaced":
        steps[1][0] = dataclasses.replace(step, offsets=np.r_[step.offsets[1], step.offsets[1:]])
    if kind == "foreign":
        steps[1][0] = dataclasses.replace(step, offsets=np.r_[7_000, step.offsets[1:]])


FAULTS = {
    "swapped": ["steps have other rows"],
    "removed": ["missing", "steps have other rows"],
    "replaced": ["missing", "twice", "steps have other rows"],
    "foreign": ["missing", "not selected", "steps have other rows"],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["window", "value", "weighted", "packed", "mixture with draws"])
def test_faults_are_found_in_every_kind(kind: str, fault: str, uris: tuple[str, ...]) -> None:
    epoch = EpochAudit(opened(uris, kind, remainder="ragged"), global_batch_size=4, world_size=2)
    steps = [list(ranks) for ranks in epoch.by_plan()]
    spoil(fault, steps)
    report = epoch.count(steps)
    text = "\n".join(report.faults)
    assert not report.ok
    assert report.verdict.startswith("FAULT: ")
    for part in FAULTS[fault]:
        assert part in text, text


def test_a_mixture_must_not_repeat_a_row_before_the_others(uris: tuple[str, ...]) -> None:
    """The rows of one dataset in place of another's are found, and named with it."""
    epoch = EpochAudit(opened(uris, "mixture"), global_batch_size=10)
    steps = [list(ranks) for ranks in epoch.by_plan()]
    steps[1][0] = dataclasses.replace(steps[1][0], components=1 - steps[1][0].components)
    text = "\n".join(epoch.count(steps).faults)
    assert " of first missing, with offsets " in text
    assert " of second missing, with offsets " in text


def test_which_rows_are_selected_is_lances_word(uris: tuple[str, ...]) -> None:
    """A selection that had lost a row would plan and deliver without a fault of its own."""
    other = raylance.dataset(uris[0], columns=["id"], filter="id < 100 and id != 50")
    opened = opened_of(other)
    broken = raylance.Dataset(dataclasses.replace(opened, read=dataclasses.replace(opened.read, filter="id < 100")))
    report = EpochAudit(broken, global_batch_size=10, world_size=2).count()
    assert lance.dataset(uris[0]).take([40])["id"].to_pylist() == [50]
    assert report.counts["missing"] == 1
    assert report.faults == ["Lance selects 90 rows, the plan has 89", "1 rows missing, with offsets 40"]


def test_masked_rows_are_no_padding(write_dataset: Callable[..., str], images_uri: str) -> None:
    table = lance.dataset(images_uri).to_table(columns=["image", "id"], limit=50)
    spoiled = [b"no image" if row % 10 == 3 else image for row, image in enumerate(table["image"].to_pylist())]
    uri = write_dataset(pa.table({"image": pa.array(spoiled, pa.binary()), "id": table["id"]}))
    data = raylance.dataset(
        uri, decode=raylance.Image("image", size=8), on_bad_row="mask", remainder="pad", order="sequential"
    )
    epoch = EpochAudit(data, global_batch_size=16, world_size=3)
    report = epoch.count(epoch.by_stream(runtime="threads", num_decoders=1))
    assert report.ok, report
    assert report.verdict.endswith("(14 repeated, and marked, by remainder='pad', 5 masked by on_bad_row='mask')")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "weighted"])
def test_a_run_is_reopened_from_its_checkpoint(kind: str, uris: tuple[str, ...]) -> None:
    """Rows of a step as the loader delivered them, though sizes were "auto" and nothing but the state is known."""
    data = opened(uris, kind)
    with data.loader(rank=1, world_size=2, runtime="threads") as loader:
        loader.set_epoch(3)
        batches = itertools.islice(loader.iter_batches(global_batch_size=9, with_row_offset=True), 4)
        batch = list(batches)[3]
        state = json.loads(json.dumps(loader.state_dict()))
    pack = {"samples": SINGLE[kind]["samples"]} if kind.startswith("packed") else {}
    again = reopen(state, uri=uris if "mixture" in kind else uris[0], **pack)
    assert opened_of(again).delivery.fingerprint == opened_of(data).delivery.fingerprint
    assert again.schema.names == data.schema.names
    epoch = EpochAudit(again, state=state)
    assert (epoch.epoch, epoch.plan.global_batch_size, epoch.plan.dp_size) == (3, 9, 2)
    rows = epoch.rows_of_step(3, rank=1)
    assert rows["row_offset"].tolist() == batch["_rowoffset"].tolist()
    if "mixture" in kind:
        names = ["first", "second"]
        assert [names.index(name) for name in rows["component"]] == batch["_component"].tolist()
    assert epoch.count().ok
    with pytest.raises(StateError, match="belongs to other data or another order"):
        EpochAudit(opened(uris, "value"), state=state | {"seed": 77})


def test_weights_that_were_rounded_stay_what_they_were(uris: tuple[str, ...]) -> None:
    parts = {name: raylance.dataset(uri, columns=["id"]) for name, uri in zip("ab", uris, strict=False)}
    data = raylance.mix({"a": (parts["a"], 0.2501), "b": (parts["b"], 0.7499)}, stop=700)
    state = data.loader().state_dict()
    assert [part["quota"] for part in state["order"]["components"].values()] == [2501, 7499]
    again = EpochAudit(reopen(state, columns=["id"]), global_batch_size=7, state=state)
    first = EpochAudit(data, global_batch_size=7).rows_of_step(50)
    assert again.rows_of_step(50).equals(first)


def test_a_state_is_looked_at_without_what_made_batches_of_the_rows(
    images_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Decoder and codecs are those of the run, and an audit by the plan has none: nothing to warn of."""
    state = raylance.dataset(images_uri, decode=raylance.Image("image", size=8)).loader().state_dict()
    assert state["codecs"]
    assert EpochAudit(reopen(state, columns=["id"]), global_batch_size=50, state=state).count().ok
    assert not caplog.records


def test_what_a_checkpoint_does_not_hold_has_to_be_given(uris: tuple[str, ...]) -> None:
    state = opened(uris, "weighted").loader(rank=0).state_dict()
    with pytest.raises(ConfigError, match="'weighted' is not all in its checkpoint: give it as order="):
        reopen(state)
    again = reopen(state, order=SINGLE["weighted"]["order"], columns=["id"])
    assert EpochAudit(again, global_batch_size=8, state=state).count().ok
    with pytest.raises(ConfigError, match="the run read 1 datasets"):
        reopen(state, uri=uris)
    damaged = signed(state | {"order": {"name": "window", "shards": 3}})
    with pytest.raises(StateError, match="damaged: its order"):
        reopen(damaged)


def test_rows_of_a_step_show_stored_values_of_every_dataset(uris: tuple[str, ...]) -> None:
    epoch = EpochAudit(opened(uris, "mixture", remainder="pad"), global_batch_size=13, world_size=3)
    last = epoch.plan.steps(0) - 1
    frame = epoch.rows_of_step(last, columns=["id", "label", "tokens"])
    assert list(frame) == ["position", "rank", "component", "row_offset", "padding", "id", "label", "tokens"]
    assert frame["rank"].tolist() == [0] * 4 + [1] * 4 + [2] * 5
    assert sorted(set(frame["component"])) == ["first", "second"]
    for row in frame.to_dict("records"):
        at = 0 if row["component"] == "first" else 1
        stored = lance.dataset(uris[at]).take([row["row_offset"]]).to_pylist()[0]
        assert (row["id"], row["label"], list(row["tokens"])) == (stored["id"], stored["label"], stored["tokens"])
    assert frame["padding"].sum() == -epoch.plan.epoch_rows % 13 > 0
    assert len(epoch.rows_of_step(last, rank=2)) == 5


def test_labels_are_those_of_the_selected_rows(uris: tuple[str, ...]) -> None:
    data = opened(uris, "mixture")
    codes = label_codes(data, "label")
    parts = [raylance.dataset(uris[0], columns=["id"], filter="id != 7"), opened(uris[1:], "value")]
    stored = [f"class {row % 5}" if row % 7 else None for part in parts for row in part[:]["id"]]
    assert len(codes) == len(data)
    assert len(set(zip(codes.tolist(), stored, strict=True))) == len(set(codes.tolist())) == len(set(stored))
    assert data.plan(16).shuffle_quality(codes).divergences


def test_bad_arguments_steps_and_columns(uris: tuple[str, ...]) -> None:
    for options, error, message in (
        ({}, ConfigError, "global_batch_size=None"),
        ({"global_batch_size": 8, "position": 193}, ConfigError, "the epoch has 193 rows"),
        ({"global_batch_size": 8, "epoch": -1}, ConfigError, "epoch=-1"),
        ({"global_batch_size": 8, "state": {"format": 9}}, StateError, "newer raylance"),
    ):
        with pytest.raises(error, match=message):
            EpochAudit(opened(uris, "window"), **options)
    for kind, step, options, error, message in (
        ("window", 24, {}, ConfigError, "there are 24 steps"),
        ("window", 0, {"rank": 1}, ConfigError, r"a rank lies in \[0, 1\)"),
        ("window", 0, {"columns": ["nope"]}, DatasetError, "'nope'"),
        ("packed", 0, {"columns": ["tokens"]}, ConfigError, "sequences are stored nowhere"),
    ):
        with pytest.raises(error, match=message):
            EpochAudit(opened(uris, kind), global_batch_size=8).rows_of_step(step, **options)


@pytest.mark.parametrize(
    "setting",
    [
        *(value for kind in SINGLE.values() for value in kind.values() if type(value) is not str),
        raylance.RangeSplit([(np.int64(3), np.uint8(50))]),
        raylance.ValueSplit("flag", np.True_),
        raylance.ValueSplit("size", np.float32(-0.1)),
    ],
)
def test_settings_are_read_from_their_repr(setting: Any) -> None:
    assert read_setting(repr(setting)) == setting
    assert repr(read_setting(repr(setting))) == repr(setting)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("split", {"split": raylance.FractionSplit(fractions={"b": 0.3, "a": np.float64(0.7)}, part="a", by="id")}),
        ("split", {"split": raylance.FractionSplit({"a": 0.5, "b": 0.5}, "a", by="key", values=[b"0", b"1", b"2"])}),
        ("split", {"split": raylance.RangeSplit([(np.int64(3), np.uint8(50))])}),
        ("split", {"split": raylance.ValueSplit("flag", np.True_)}),
        ("split", {"split": raylance.ValueSplit("day", datetime.date(2026, 11, 2))}),
        ("windows", {"samples": raylance.Windows(episode="episode", offsets={"class": [-1, 0]}, at_ends="drop")}),
        ("windows", {"samples": raylance.Pack("tokens", length=8, eos_id=7)}),
        ("cost", {"cost": raylance.TokensOf("tokens", multiple=4)}),
    ],
)
def test_a_state_holds_what_its_rows_were_selected_and_made_by(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    ids = np.arange(60)
    columns = {"id": ids, "class": ids, "episode": ids // 9, "flag": ids % 2 == 0}
    columns["day"] = pa.array([datetime.date(2026, 11, 1 + row % 9) for row in ids])
    columns["key"] = pa.array([str(row % 3).encode() for row in ids], pa.binary())
    columns["tokens"] = pa.array([[1] * (row % 5) for row in ids], pa.list_(pa.int32()))
    lance.write_dataset(pa.table(columns), tmp_path / "a.lance")
    state = raylance.dataset(tmp_path / "a.lance", **arguments).loader().state_dict()
    (setting,) = arguments.values()
    assert read_setting(json.loads(json.dumps(state[name], sort_keys=True))) == setting
    assert reopen(state).loader().state_dict()[name] == state[name]


VALUES = ["column=x, value=1", "'x', np.load('y')", "'x', np.int64(y)", "'x', np.pi"]


@pytest.mark.parametrize(
    "text", ["__import__('os').remove('x')", "7", "ValueSplit(", *(f"ValueSplit({value})" for value in VALUES)]
)
def test_nothing_else_is_read(text: str) -> None:
    with pytest.raises(ConfigError, match="write one of .*WindowShuffle"):
        read_setting(text)
