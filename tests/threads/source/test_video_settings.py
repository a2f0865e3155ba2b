"""Arguments of settings for videos: what cannot be honoured is refused at once, by name and value."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import raylance
from raylance.errors import ConfigError

NAMES, SIZES, FLAGS = ("", 5, b"x"), (0, -1, 2.5, "8", (1, 2, 3), (0, 1)), (5, "no", 0)
WRONG: dict[Callable[..., Any], dict[str, tuple[Any, ...]]] = {
    raylance.Video: {
        "column": (None, *NAMES), "videos": (None, 5, "", ["a"], b"x"), "video": (None, *NAMES, "frame"),
        "frame": (None, *NAMES, "video"), "blob": (None, *NAMES), "size": SIZES,
    },
    raylance.Clip: {
        "column": (None, *NAMES), "frames": (None, 0, 2.5, "2", True), "stride": (None, 0, 2.5),
        "start": (None, "late", 3), "short": (None, "late"), "size": SIZES, "crop": SIZES, "random_crop": FLAGS,
        "hflip": (None, "a", 2, -0.1, np.nan, [0.5]), "name": NAMES,
    },
    raylance.images.FrameCrop: {
        "column": (None, *NAMES), "size": (None, *SIZES), "random": FLAGS, "hflip": (None, "a", 2, -0.1, np.nan),
        "like": NAMES, "name": NAMES,
    },
}  # fmt: skip
RIGHT: dict[Callable[..., Any], dict[str, Any]] = {
    raylance.Video: {"column": "top", "videos": "videos.lance", "video": "video", "frame": "frame"},
    raylance.Clip: {"column": "video", "frames": 2},
    raylance.images.FrameCrop: {"column": "top", "size": 8},
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, wrong in WRONG.items() for name in wrong])
def test_wrong_arguments_are_named(kind: Callable[..., Any], name: str) -> None:
    kind(**RIGHT[kind])
    for value in WRONG[kind][name]:
        shown = repr(value[0] if value == (0, 1) else value)
        with pytest.raises(ConfigError, match=f"(?s){name}.*{re.escape(shown)}"):
            kind(**RIGHT[kind] | {name: value})
