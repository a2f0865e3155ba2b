"""The spans of OpenTelemetry: one for each step, with what its wait was for, in the program's own trace."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import raylance
from raylance.errors import ConfigError
from tests.helpers.spans import BATCH, check_spans


def test_each_step_is_a_span_with_its_wait(images_uri: str, exported: InMemorySpanExporter) -> None:
    check_spans(images_uri, exported, "threads")


def test_there_are_none_unless_asked_for(images_uri: str, exported: InMemorySpanExporter) -> None:
    with raylance.dataset(images_uri, columns=["id"]).loader(record=False, runtime="threads") as loader:
        next(iter(loader.iter_batches(global_batch_size=BATCH)))
    assert not exported.get_finished_spans()


@pytest.mark.promise("P8")
def test_without_the_package_they_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"raylance\[otel\]"):
        raylance.Options(traces=True)
    with pytest.raises(ConfigError, match="traces"):
        raylance.Options(traces="yes")  # type: ignore[arg-type]
