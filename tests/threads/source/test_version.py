"""The versions of Lance itself."""

from collections.abc import Callable

import lance
import pyarrow as pa
import pytest

import raylance


def test_a_lance_that_was_not_tried_is_named_once(
    write_dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uri = write_dataset(pa.table({"id": [1, 2, 3]}))
    raylance.dataset(uri)
    assert "pylance" not in caplog.text
    monkeypatch.setattr(lance, "__version__", "99.0.1")
    for _ in range(2):
        assert len(raylance.dataset(uri)) == 3
    assert caplog.text.count("pylance 99.0.1") == 1
