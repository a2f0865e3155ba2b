"""What a loader is set to is known to its verdict, which advises nothing that is so already."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import raylance
from raylance.api.loader import consumer_of
from raylance.observe.figures import RankFigures
from raylance.observe.verdict import Verdict, judge
from raylance.reports.reading import read_run
from tests.helpers.figures import figures

ROWS = 4_000
READS = {"user_s": 1.0, "wait_read_s": 3.0, "storage_s": 4.0}
PADS = {"user_s": 9.0, "cost": 50.0, "padded_cost": 100.0, "dearest_cost": 150.0}
SAVES = {"user_s": 9.0, "save_s": 8.0}


@pytest.fixture(scope="module")
def uri(write_dataset: Callable[..., str]) -> str:
    rng = np.random.default_rng(0)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rng.random(ROWS * 256, dtype=np.float32)), 256)
    return write_dataset(pa.table({"vector": vectors, "length": rng.integers(1, 99, ROWS)}))


@pytest.fixture
def advised(uri: str, tmp_path: Path) -> Callable[..., str]:
    """The advice on a loader with these arguments, for other figures than its own."""

    def advise(counts: dict[str, float], upload: bool = False, **arguments: Any) -> str:
        options = {name: arguments.pop(name) for name in ("reader_bytes", "num_readers") if name in arguments}
        data, folder = raylance.dataset(uri, cost="length", **arguments), str(tmp_path / "run")
        with data.loader(runtime="threads", num_decoders=0, record=folder, **options) as loader:
            next(iter(loader.iter_batches(global_batch_size=32)))
            with consumer_of(loader).reporting({}, uploads_async=upload):
                pass
        (rank,) = read_run(folder).records[-1:]
        known = {"rows": 1e3, "batches": 10.0, "read_bytes": 1e6, "readers": 1.0, "decoders": 1.0} | counts
        facts = {**rank.rank_figures().facts, "cluster_cpus": 9.0, "worker_cpus": 0.0}
        verdict: Verdict = judge([RankFigures(figures=figures(**known), facts=facts)])
        return "\n".join(verdict.advice)

    return advise


@pytest.mark.parametrize(
    ("words", "counts", "without", "setting"),
    [
        ('order="bucket"', PADS, {}, {"order": "bucket"}),
        ("balance=", PADS, {}, {"balance": raylance.Balance()}),
        ('order="window"', READS, {"order": "row"}, {}),
        ("num_readers=", READS, {"window_bytes": 8 << 20}, {"num_readers": "auto", "window_bytes": 8 << 20}),
        ("checkpoint_upload_mode=", SAVES, {}, {"upload": True}),
        # The reads are short because windows are small, or are read in parts.
        ("window_bytes= of raylance.dataset", READS, {"window_bytes": 64 << 10}, {}),
        ("reader_bytes=", READS, {"reader_bytes": 64 << 10}, {}),
    ],
)
def test_what_is_set_is_not_advised(
    words: str, counts: dict[str, float], without: Any, setting: Any, advised: Callable[..., str]
) -> None:
    assert words in advised(counts, **without)
    assert words not in advised(counts, **setting)


def test_the_interval_of_ray_train_is_known(advised: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"
    monkeypatch.setenv(name, "0.2")
    assert name not in advised(SAVES)
    monkeypatch.delenv(name)
    assert name in advised(SAVES)
