"""Which errors end a run of Ray Train."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray.train

import raylance


@pytest.mark.parametrize(
    ("workers", "starts"),
    [
        pytest.param(
            2, ["DatasetError: a", "DatasetError: b", "ConfigError: c"], id="a wrong argument ends it at once"
        ),
        pytest.param(2, ["StateError: a", "OSError: a", "StateError: a", "StateError: a"], id="twice the same"),
        pytest.param((1, 2), ["ConfigError: 3 ranks", "ConfigError: 2 ranks", "ConfigError: 2 ranks"], id="elastic"),
    ],
)
def test_which_errors_end_a_run(workers: Any, starts: list[str]) -> None:
    """Only the last start of each row does."""
    context = SimpleNamespace(scaling_config=ray.train.ScalingConfig(num_workers=workers))
    callback = raylance.FailFast()
    *others, last = (
        [getattr(raylance.errors, kind, OSError)(text)] for kind, text in (it.split(": ") for it in starts)
    )
    for errors in others:
        callback.after_exception(context, dict(enumerate(errors)))
    with pytest.raises(type(last[0]), match=str(last[0])):
        callback.after_exception(context, dict(enumerate([ray.exceptions.RayActorError(), *last])))
