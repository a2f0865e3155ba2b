"""Owns the checks of jobs/benchmark.py: it sees what readers deliver, and pairs checkouts; never how fast they are."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from jobs.benchmark import command, gpu, measuring
from jobs.benchmark.data import cached_dataset, vector_batches
from jobs.benchmark.readers import READERS, Job, Source

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Job:
    uri = cached_dataset(tmp_path_factory.mktemp("vectors") / "vectors.lance", 300, vector_batches(300, 0))
    return Job(uri=uri, columns=("vector", "id"), rows=300, batch_size=64, workers=1, seed=0)


def test_the_raylance_of_another_checkout_takes_part(vectors: Job) -> None:
    """It is measured by another process; here with a reader that starts no Ray."""
    with ExitStack() as stack:
        here = READERS["vectors"]["lance-torch"].open(vectors, stack)
        there = measuring.open_before(vectors, stack, "vectors", "lance-torch", ROOT)
        passes = [measuring.measure(source, 1) for source in (here, there)]
    assert here.claims == there.claims == 300
    for name in ("rows", "distinct_rows", "checksum"):
        assert passes[0][name] == passes[1][name]
    assert all(one["thread_ms"] > 0 for one in passes)


def test_a_reader_that_fails_elsewhere_is_told_at_once(vectors: Job, tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(SystemExit, match="nothing of .* failed; what it said stands above"):
        measuring.open_before(vectors, stack, "vectors", "nothing", tmp_path)


def test_rows_and_values_that_differ_are_faults() -> None:
    def source(*numbers: int) -> Source:
        rows = torch.tensor(numbers)
        return Source(claims=3, open_pass=lambda _: [(rows.float()[:, None], rows)])

    good, *wrong = ({"claims": 3, "passes": [measuring.measure(source(*rows), 0)]} for rows in
                    ((0, 1, 2), (0, 1), (0, 1, 1), (0, 1, 3)))  # fmt: skip
    assert measuring.fault(good, good) == ""
    told = [measuring.fault(result, good) for result in wrong]
    assert told[0].endswith("delivered 2, 2 of them distinct")
    assert told[1].endswith("delivered 3, 2 of them distinct")
    assert told[2] == "other values than its peers"


def test_each_raylance_has_its_earlier_self(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = command.choose("images", command.parse(["--against", str(ROOT), "--data-dir", str(tmp_path)]))
    before = {name for name in chosen if name.endswith("-before")}
    assert {f"{name}-before" for name in READERS["images"] if name.startswith("raylance")} == before
    assert all(chosen[name].ceiling == chosen[name.removesuffix("-before")].ceiling for name in before)
    with pytest.raises(SystemExit):
        command.parse(["--against", str(tmp_path)])
    assert "is no checkout" in capsys.readouterr().err


def test_the_training_of_the_gpu_part_runs_without_a_gpu() -> None:
    """The loop itself, with a small model, on the CPU: what it tells, and that it learns."""
    pixels, labels = torch.zeros((8, 16, 16, 3), dtype=torch.uint8), torch.arange(8) % 2
    pixels[labels == 1] = 255
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(4, 1000))
    told = gpu.train([(pixels, labels)] * 30, model, torch.device("cpu"))
    assert told["rows"] == 240
    assert 0 <= told["stall"] < told["busy"] <= 1
    assert told["rows_per_s"] > 0
    normal = (pixels.permute(0, 3, 1, 2) - 114.0) / 57.5
    assert torch.equal(model(normal).argmax(1) % 1000, labels)


def test_the_gpu_part_says_that_it_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    job = Job(uri="none", columns=("image", "label"), rows=1, batch_size=1, workers=1, seed=0)
    assert gpu.figures(gpu.measure(job, 1)) == []
    assert "not measured" in capsys.readouterr().out
