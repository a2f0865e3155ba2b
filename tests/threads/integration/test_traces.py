"""The spans of OpenTelemetry: one for each step, with what its wait was for, in the program's own trace."""

from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import raylance
from raylance.errors import ConfigError
from tests.helpers.spans import BATCH, check_spans


def test_each_step_is_a_span_with_its_wait(images_uri: str, exported: InMemorySpanExporter) -> None:
    check_spans(images_uri, exported, "threads")


def with_span(batch: dict[str, Any]) -> dict[str, Any]:
    with trace.get_tracer("test").start_as_current_span("user"):
        return batch


@pytest.mark.parametrize("where", ["collate_fn", "transform"])
def test_spans_of_the_users_functions_belong_to_steps(
    images_uri: str, exported: InMemorySpanExporter, where: str
) -> None:
    dataset = raylance.dataset(images_uri, columns=["id"], transform=with_span if where == "transform" else None)
    collate_fn = with_span if where == "collate_fn" else None
    exported.clear()  # the opening tries the transform
    with (
        dataset.loader(traces=True, record=False, runtime="threads", num_decoders=1) as loader,
        trace.get_tracer("test").start_as_current_span("epoch") as epoch,
    ):
        for _ in loader.iter_torch_batches(global_batch_size=32, collate_fn=collate_fn):
            pass
    spans = exported.get_finished_spans()
    steps = {span.context.span_id: span for span in spans if span.name == "raylance.step"}
    ours = [span for span in spans if span.name == "user"]
    assert ours
    for span in ours:
        assert span.context.trace_id == epoch.get_span_context().trace_id
        assert span.parent is not None
        assert steps[span.parent.span_id].start_time <= span.start_time


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
