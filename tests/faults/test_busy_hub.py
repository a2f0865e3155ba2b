"""A hub that answers that there are too many requests, and says how long to wait."""

import email.utils
import time
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import raylance
from raylance.source.lance_errors import asked_pause_s
from tests.helpers.hub import hub

ANSWER = 'RateLimited (temporary) at read, context: { response: Parts { status: 429, headers: {"retry-after": "%s"} } }'


def test_it_is_asked_again_when_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lance.write_dataset(pa.table({"id": range(100)}), str(tmp_path / "rows.lance"))
    with hub(tmp_path, wait_s=10) as (address, _):
        monkeypatch.setenv("HF_ENDPOINT", address)
        dataset = raylance.dataset("hf://datasets/me/mine/rows.lance")
    assert len(dataset) == 100
    said = [record.getMessage() for record in caplog.records if "429" in record.getMessage()]
    assert len(said) == 1, "it is asked once more, and not again and again"
    assert "10 s" in said[0]


def test_what_an_answer_asks_for() -> None:
    assert asked_pause_s(OSError(ANSWER % "17")) == 17
    in_a_minute = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert 50 < asked_pause_s(OSError(ANSWER % in_a_minute)) < 61
    assert asked_pause_s(OSError(ANSWER % "soon")) == asked_pause_s(OSError("status: 429")) == 0
