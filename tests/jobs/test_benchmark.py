"""Checks that jobs/benchmark.py sees what readers deliver, and pairs checkouts; no speed is checked."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jobs.benchmark import command, measuring, memory, turns
from jobs.benchmark.data import cached_dataset, vector_batches
from jobs.benchmark.readers import READERS, Source
from jobs.benchmark.setting import Job

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Job:
    uri = cached_dataset(tmp_path_factory.mktemp("vectors") / "vectors.lance", 300, vector_batches(300, 0))
    return Job(uri=uri, columns=("vector", "id"), rows=300, batch_size=64, workers=1, seed=0, pass_epochs=2)


def test_the_raylance_of_another_checkout_takes_part(vectors: Job) -> None:
    """It is measured by another process; here with a reader that starts no Ray."""
    with ExitStack() as stack:
        here = READERS["vectors"]["lance-torch"].open(vectors, stack)
        there = measuring.open_before(vectors, stack, "vectors", "lance-torch", ROOT)
        passes = [measuring.measure(source, 1, epochs=2) for source in (here, there)]
    assert here.claims == there.claims == 300
    for name in ("rows", "distinct_rows", "checksum"):
        assert passes[0][name] == passes[1][name]
    assert all(one["thread_ms"] > 0 for one in passes)


def test_the_raylance_of_the_other_checkout_is_measured(
    vectors: Job, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "raylance.py").write_text("raise ImportError('of the other checkout')")
    with ExitStack() as stack, pytest.raises(SystemExit, match="raylance of .* failed"):
        measuring.open_before(vectors, stack, "vectors", "raylance", tmp_path)
    assert "ImportError: of the other checkout" in capfd.readouterr().err


def test_rows_and_values_that_differ_are_faults() -> None:
    def source(*numbers: int) -> Source:
        rows = torch.tensor(numbers)
        return Source(claims=3, open_pass=lambda _: [(rows.float()[:, None], rows)])

    good, *wrong = (
        {"claims": 3, "passes": [measuring.measure(source(*rows), 0, epochs=2, longest_rest_s=0)]}
        for rows in ((0, 1, 2), (0, 1), (0, 1, 1), (0, 1, 3))
    )
    assert measuring.fault(good, good) == ""
    described = [measuring.fault(result, good) for result in wrong]
    assert described[0].endswith("claims 6 rows, delivered 4, 2 of them distinct in an epoch")
    assert described[1].endswith("delivered 6, 2 of them distinct in an epoch")
    assert described[2] == "other values than its peers"


def test_each_raylance_has_its_earlier_self(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = command.choose("images", command.parse(["--against", str(ROOT), "--data-dir", str(tmp_path)]))
    before = {name for name in chosen if name.endswith("-before")}
    assert {f"{name}-before" for name in READERS["images"] if name.startswith("raylance")} == before
    assert all(chosen[name].ceiling == chosen[name.removesuffix("-before")].ceiling for name in before)
    with pytest.raises(SystemExit):
        command.parse(["--against", str(tmp_path)])
    assert "is not a checkout" in capsys.readouterr().err


def test_a_slope_is_found_with_its_error() -> None:
    rise, error = memory.slope([3.0 + 2 * x for x in range(50)])
    assert rise == pytest.approx(2)
    assert error == pytest.approx(0, abs=1e-9)
    assert memory.slope([7.0] * 9) == (0, 0)
    noise = np.random.default_rng(0).standard_normal(400)
    rise, error = memory.slope(list(noise + 0.05 * np.arange(400)))
    assert abs(rise - 0.05) < 3 * error < 0.01
    # Values that stay where they are for long say less than as many independent ones.
    assert memory.slope(list(np.repeat(noise[:40], 10)))[1] > 2 * memory.slope(list(noise))[1]


def test_a_stall_leaves_the_first_batch_of_the_run_out() -> None:
    def one(kind: str, *waited_s: float) -> dict[str, Any]:
        return {"kind": kind, "seconds": 10.0, "waited_s": list(waited_s), "cpu_s": [0.001] * len(waited_s)}

    passes = [one("train", 5.0, 0.1, 0.0), one("train", 0.2, 0.0, 0.1), one("val", 0.3, 0.0),
              one("train", 0.0, 0.0), one("train", 0.0, 0.0), one("val", 0.0, 0.0)]  # fmt: skip
    found = {"passes": passes, "batch_s": 0.1, "step_s": 0.15, "batch_size": 64}
    described = {figure.name: figure for figure in turns.figures(found)}
    stall = next(figure for name, figure in described.items() if name.startswith("stall"))
    assert stall.values == pytest.approx((0.7 / 25, 0.0))
    assert turns.pauses_s(found, "train-train") == pytest.approx([0.2, 0.0])
    assert turns.pauses_s(found, "train-val") == pytest.approx([0.4, 0.0])
    assert turns.pauses_s(found, "val-train") == pytest.approx([0.0])
    assert described["pause at the turn into a validation pass / one batch's time"].is_reached is False
