"""Settings of the wrong type: whatever is given, the error is raylance's own, and names argument and value."""

import contextlib
import copy
import dataclasses
import inspect
import operator
import pickle
import re
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
import torch

import raylance
from raylance.errors import ConfigError, DatasetError, RaylanceError

WRONG = ["a", None, -1, 1.5, float("nan"), [], {}, (1, 2, 3), object(), True]
NEEDED: dict[str, dict[str, Any]] = {
    "Buckets": {},
    "ClassBalanced": {"column": "c"},
    "Clip": {"column": "v", "frames": 4, "size": 32},
    "DeviceImage": {"column": "i", "size": 32},
    "Budget": {"cost": 8},
    "FractionSplit": {"fractions": {"a": 0.5, "b": 0.5}, "part": "a"},
    "FrameCrop": {"column": "v", "size": 8},
    "Image": {"column": "i"},
    "ImageCrop": {"column": "i"},
    "Pack": {"columns": "t", "length": 16},
    "PackTokens": {"column": "t", "length": 16},
    "Patches": {"column": "i"},
    "RangeSplit": {"ranges": [(0, 5)]},
    "Renamed": {"column": "a", "stored": "b"},
    "TokensOf": {"column": "t"},
    "ValueSplit": {"column": "c", "value": "v"},
    "Video": {"column": "a", "videos": "b", "video": "x", "frame": "y"},
    "Weighted": {"weights": "w"},
    "Windows": {"episode": "e", "offsets": {"x": [0, 1]}},
}


SET_BY_RAYLANCE = {"auto_decoders", "cost", "fingerprint"}


def settings() -> list[Any]:
    """Each setting at the top that has only fields with a default, or is in `NEEDED`."""
    found = [getattr(raylance, name) for name in dir(raylance) if name[0].isupper()]
    kinds = [kind for kind in found if inspect.isclass(kind) and dataclasses.is_dataclass(kind)]
    return [
        kind
        for kind in kinds
        if kind.__name__ in NEEDED
        or all(
            field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
            for field in dataclasses.fields(kind)
            if field.init
        )
    ]


@pytest.mark.promise("P8")
@pytest.mark.parametrize("kind", settings(), ids=lambda kind: kind.__name__)
def test_no_value_of_a_field_is_a_bare_error(kind: Any) -> None:
    needed = NEEDED.get(kind.__name__, {})
    for field in dataclasses.fields(kind):
        for value in WRONG if field.init else ():
            try:
                kind(**needed | {field.name: value})
            except RaylanceError as error:
                assert field.name in str(error)  # noqa: PT017 - other values are taken


@pytest.mark.promise("P8")
@pytest.mark.parametrize("kind", settings(), ids=lambda kind: kind.__name__)
def test_what_no_field_takes_is_refused_where_it_is_given(kind: Any) -> None:
    for field in dataclasses.fields(kind):
        if field.init and field.name not in SET_BY_RAYLANCE:
            with pytest.raises(ConfigError, match=field.name):
                kind(**NEEDED.get(kind.__name__, {}) | {field.name: object()})


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    ("make", "named"),
    [
        *(
            (lambda kind=kind: kind(**NEEDED[kind.__name__] | {"hflip": "a"}), "hflip='a'")
            for kind in (raylance.Image, raylance.images.DeviceImage, raylance.Clip, raylance.images.FrameCrop)
        ),
        (lambda: raylance.Image("i", draft="no"), "draft='no'"),
        (lambda: raylance.Image("i", size=8, augment="crop"), "augment='crop'"),  # blamed the data
        (lambda: raylance.Image("i", size=8, augment=raylance.RandomResizedCrop), "parentheses"),
        (lambda: raylance.images.DeviceImage("i", size=8, augment=raylance.CenterCrop), "parentheses"),
        (lambda: raylance.Image("i", decode_fn=3), "decode_fn=3"),
        (lambda: raylance.Clip("v", frames=4, random_crop="no"), "random_crop='no'"),
        (lambda: raylance.images.FrameCrop("v", 8, random="no"), "random='no'"),
        (lambda: raylance.FractionSplit(fractions={"a": 1.0}, part="a", seed="1"), "seed='1'"),
        (lambda: raylance.text.cu_seqlens(np.zeros((2, 3))), "float64"),
        (lambda: raylance.text.cu_seqlens(torch.zeros((2, 3), dtype=torch.bfloat16)), "bfloat16"),
        (lambda: raylance.text.cu_seqlens(torch.zeros((2, 3), dtype=torch.bool)), "bool"),
    ],
)
def test_what_was_taken_in_silence_or_failed_barely(make: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make()


@pytest.mark.promise("P8")
def test_columns_to_pack_are_checked_at_the_opening(write_dataset: Any) -> None:
    columns = {"t": [[1, 2]], "f": [[0.5, 1.5]], "s": ["x"], "i": [3], "w": [["a", "b"]], "n": [[[1], [2]]]}
    uri = write_dataset(pa.table(columns))
    for names, wrong in (
        ("f", "f"),
        ("s", "s"),
        ("i", "i"),
        ("w", "w"),
        ("n", "n"),
        (["t", "s"], "s"),
        (["t", "w"], "w"),
    ):
        with pytest.raises(DatasetError, match=f"'{wrong}'"):
            raylance.dataset(uri, samples=raylance.Pack(names, length=4))
    assert len(raylance.dataset(uri, samples=raylance.Pack(["t", "f"], length=4))) == 1


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small dataset."""
    folder = tmp_path_factory.mktemp("bad_input")
    columns = {"n": range(4), "t": [[1, 2]] * 4, "s": ["a", "a", "b", "b"]}
    lance.write_dataset(pa.table({name: list(values) for name, values in columns.items()}), str(folder / "d.lance"))
    return folder


@pytest.mark.promise("P8")
def test_an_error_names_a_way_that_is_open(place: Path) -> None:
    """To give what an error asks for does not lead to another error that asks to take it back."""
    uri = str(place / "d.lance")
    for given in ({"cost": "n"}, {"balance": raylance.Balance()}, {"order": raylance.Buckets()}):
        with pytest.raises(ConfigError, match="global_batch_size="):
            raylance.dataset(uri, samples=raylance.Pack("t", length=4), **given)


@pytest.mark.promise("P8")
def test_wrong_arguments_of_handles_and_loaders(place: Path) -> None:
    handle = raylance.dataset(str(place / "d.lance"))
    with handle.loader() as loader, pytest.raises(ConfigError, match="device="):
        loader.iter_torch_batches(global_batch_size=2, device=None)
    with pytest.raises(ConfigError, match="'n'"):
        handle.show({"n": None})
    for given in (handle, handle.iter_batches(global_batch_size=2)):
        assert not hasattr(given, "sampler")
    with pytest.raises(ConfigError, match="loader") as caught:
        handle.load_state_dict({})
    assert not caught.type.__name__.startswith("_")  # a user reads the name


def test_a_split_takes_its_parts_by_position() -> None:
    fractions = {"train": 0.9, "val": 0.1}
    assert raylance.FractionSplit(fractions, "val") == raylance.FractionSplit(fractions=fractions, part="val")


def good_arguments(name: str, folder: Path) -> dict[str, Any]:
    """The arguments that a function or a class, which is no setting, needs."""
    uri, run = str(folder / "d.lance"), {"path": str(folder)}
    handle = raylance.dataset(uri)
    step = {"handle": handle, "global_batch_size": 2}
    crop = {"crop": np.zeros(7), "size": 8}
    column = {"uri": uri, "column": "n"}
    return {
        "add_column": column | {"type": pa.int64()},
        "audit.EpochAudit": {"data": handle, "global_batch_size": 2},
        "audit.label_codes": {"data": handle, "column": "s"},
        "audit.read_setting": {"saved": "RangeSplit(ranges=[(0, 5)])"},
        "audit.reopen": {"state": {}},
        "cu_seqlens": {"segment_ids": np.ones((1, 3), dtype=np.int64)},
        "dataset": {"uri": uri},
        "DataConfig": {},
        "FailFast": {},
        "explain_run": run,
        "lerobot.load_metadata": {"root": str(folder)},
        "lerobot.open": {"root": str(folder)},
        "map_boxes": crop | {"boxes": np.zeros((1, 4))},
        "map_points": crop | {"points": np.zeros((1, 2))},
        "mix": {"parts": {"a": (handle, 1.0)}},
        "mlflow_dataset": {"data": handle},
        "newest_checkpoint": run,
        "open_folder": run,
        "prove_run": run,
        "read_values": {"folder": str(folder / "none"), "rows": 1},
        "report": {"metrics": {}},
        "report_if_preempted": {"metrics": {}, "loader": None},
        "report_run": run,
        "restore": {"loader": handle.loader()},
        "row_rng": {"seed": 0, "epoch": 0, "row": 0},
        "torch_data.IterableDataset": step,
        "torch_data.Loader": {"dataset": raylance.torch_data.IterableDataset(**step)},
        "testing.SampleRows": {"count": 3},
        "testing.check_decoder": {"decoder": raylance.Image("i", size=8), "samples": [b"x", b"y"]},
        "testing.check_order": {"order": raylance.Sequential(), "rows": [2], "columns": {"c": [1, 1]}},
        "testing.check_samples": {"table": None, "rows": 2},
        "torch_data.find_place": {},
        "torch_data.MapDataset": {"handle": handle},
        "torch_data.RowSampler": step,
        "wandb_artifact": {"data": handle},
        "watch": run,
        "write_column": column | {"values": pa.table({"_rowoffset": [0], "value": [1]}), "version": 1},
        "write_values": {"folder": str(folder / "v"), "offsets": [0], "values": [1], "type": pa.int64()},
    }[name]


# Not called by users, or with a running cluster or manager alone.
NOT_CALLED = {
    "BatchDecoder", "Batches", "Dataset", "Decoder", "NamespaceTable", "Order", "Provenance", "RaggedDecoder",
    "RankLoader", "RunProof", "SampleTable", "audit.AuditReport", "audit.Step", "from_ray_dataset", "torchft.batches",
    "torchft.report_if_all",
}  # fmt: skip


def functions() -> list[str]:
    """The public functions and classes, by the names under which a user finds them."""
    names = [name for name in raylance.__all__ if name not in {kind.__name__ for kind in settings()}]
    for module in (raylance.audit, raylance.lerobot, raylance.testing, raylance.torch_data, raylance.torchft):
        inside = getattr(module, "__all__", ("load_metadata", "open"))
        names += [f"{module.__name__.removeprefix('raylance.')}.{name}" for name in inside]
    errors = [name for name in raylance.__all__ if name.endswith("Error")]
    return [name for name in names if name not in NOT_CALLED and name not in errors]


def names_of(function: Any) -> list[str]:
    """The names of a function, or of a class and those from which it has its signature."""
    return [each.__name__ for each in getattr(function, "__mro__", [function])]


def call(name: str, /, *positional: Any, **named: Any) -> None:
    """Calls a function, which may refuse its arguments: by an error of raylance, or of Python if their number is
    wrong.
    """
    function = operator.attrgetter(name)(raylance)
    try:
        made = function(*positional, **named)
        if isinstance(made, contextlib.AbstractContextManager):
            with made:
                pass
    except (RaylanceError, AssertionError):  # raylance.testing raises these, as tests do
        pass
    except TypeError as error:
        is_count = "positional argument" in str(error) or "required keyword-only argument" in str(error)
        if not (is_count and any(each in str(error) for each in names_of(function))):
            raise


@pytest.mark.promise("P8")
@pytest.mark.parametrize("name", functions())
def test_no_wrong_argument_is_a_bare_error(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)  # for functions that take "a" for a folder
    given = good_arguments(name, place)
    parameters = inspect.signature(operator.attrgetter(name)(raylance)).parameters.values()
    for each in parameters:
        for wrong in (None, "a", -1, 1.5, [], {}, object(), int):
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
                call(name, **given | {each.name: wrong})
        call(name, **{key: value for key, value in given.items() if key != each.name})
    for wrong in (None, object()):
        for count in range(len(parameters) + 2):
            call(name, *[wrong] * count)


@pytest.mark.promise("P8")
@pytest.mark.parametrize(
    ("make", "given", "named"),
    [
        (raylance.Pack, {"columns": ["t", "m"], "length": 8, "mask": "m"}, "label_mask="),
        (raylance.Pack, {"columns": "t", "seq_len": 8}, "length="),
        (raylance.Image, {"column": "i", "crop": 224}, "augment="),
        (raylance.Image, {"column": "i", "crops": 2}, "views="),
        (raylance.RandomResizedCrop, {"size": 224}, "Image"),
        (raylance.Windows, {"episode": "e", "horizon": 8}, "offsets="),
        (raylance.Windows, {"episode": "e", "delta_timestamps": {}}, "seconds="),
        (raylance.Budget, {"max_tokens": 4096}, "Budget"),
        (raylance.WindowShuffle, {"shards": 4}, "shard_rows="),
        (raylance.mix, {"parts": {}, "seed": 3}, "raylance.dataset"),
        (raylance.dataset, {"uri": "a", "batch_size": 3}, "iter_torch_batches"),
    ],
)
def test_a_setting_that_there_is_not_leads_to_the_right_one(make: Any, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(named)):
        make(**given)


@pytest.mark.promise("P8")
@pytest.mark.parametrize("columns", [{"id": None}, {"id"}, raylance.Image("image"), "id"], ids=repr)
def test_columns_are_a_list(columns: Any, images_uri: str) -> None:
    """A dict lost what decodes its columns; the order of a set differs between processes."""
    with pytest.raises(ConfigError, match="columns= is of type .*list"):
        raylance.dataset(images_uri, columns=columns)


@pytest.mark.promise("P8")
def test_what_a_stream_of_tokens_does_not_do_is_said() -> None:
    with pytest.warns(FutureWarning, match="too_long='raise'.*whole"):
        raylance.Pack("t", 64, too_long="raise")
    assert raylance.Pack("t", 64, too_long="raise", policy="whole").too_long == "raise"


def test_settings_are_copied_and_sent_as_before() -> None:
    for setting in (raylance.Budget(4096, micro=64), raylance.Image("i", size=8), raylance.WindowShuffle(lanes=2)):
        assert pickle.loads(pickle.dumps(setting)) == copy.copy(setting) == dataclasses.replace(setting) == setting
