"""Settings of the wrong type: whatever is given, the error is raylance's own, and names argument and value."""

import dataclasses
import inspect
from typing import Any

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
    "FractionSplit": {"fractions": {"a": 0.5, "b": 0.5}, "part": "a"},
    "FrameCrop": {"column": "v", "size": 8},
    "Image": {"column": "i"},
    "ImageCrop": {"column": "i"},
    "Pack": {"columns": "t", "length": 16},
    "PackTokens": {"column": "t", "length": 16},
    "RangeSplit": {"ranges": [(0, 5)]},
    "TokensOf": {"column": "t"},
    "ValueSplit": {"column": "c", "value": "v"},
    "Video": {"column": "a", "videos": "b", "video": "x", "frame": "y"},
    "Weighted": {"weights": "w"},
    "Windows": {"episode": "e", "offsets": {"x": [0, 1]}},
}


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
@pytest.mark.parametrize(
    ("make", "named"),
    [
        *(
            (lambda kind=kind: kind(**NEEDED[kind.__name__] | {"hflip": "a"}), "hflip='a'")
            for kind in (raylance.Image, raylance.DeviceImage, raylance.Clip, raylance.FrameCrop)
        ),
        (lambda: raylance.Image("i", draft="no"), "draft='no'"),
        (lambda: raylance.Image("i", decode_fn=3), "decode_fn=3"),
        (lambda: raylance.Clip("v", frames=4, random_crop="no"), "random_crop='no'"),
        (lambda: raylance.FrameCrop("v", 8, random="no"), "random='no'"),
        (lambda: raylance.FractionSplit(fractions={"a": 1.0}, part="a", seed="1"), "seed='1'"),
        (lambda: raylance.cu_seqlens(np.zeros((2, 3))), "float64"),
        (lambda: raylance.cu_seqlens(torch.zeros((2, 3), dtype=torch.bfloat16)), "bfloat16"),
        (lambda: raylance.cu_seqlens(torch.zeros((2, 3), dtype=torch.bool)), "bool"),
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
            raylance.dataset(uri, pack=raylance.Pack(names, length=4))
    assert len(raylance.dataset(uri, pack=raylance.Pack(["t", "f"], length=4))) == 1
