"""The spans of OpenTelemetry: one for each step, with what its wait was for, in the program's own trace."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import raylance
from raylance.errors import ConfigError

STEPS, BATCH = 4, 256


@pytest.fixture(scope="session")
def provider() -> TracerProvider:
    made = TracerProvider()
    trace.set_tracer_provider(made)  # once in a process
    return made


@pytest.fixture
def exported(provider: TracerProvider) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter
    exporter.clear()


def by_parent(spans: tuple[ReadableSpan, ...]) -> dict[int | None, list[ReadableSpan]]:
    found: dict[int | None, list[ReadableSpan]] = {}
    for span in sorted(spans, key=lambda span: span.start_time or 0):
        found.setdefault(span.parent and span.parent.span_id, []).append(span)
    return found


def test_each_step_is_a_span_with_its_wait(images_uri: str, exported: InMemorySpanExporter) -> None:
    check_spans(images_uri, exported, "threads")


@pytest.mark.usefixtures("ray_session")
def test_so_it_is_through_ray(images_uri: str, exported: InMemorySpanExporter) -> None:
    check_spans(images_uri, exported, "ray")


def check_spans(images_uri: str, exported: InMemorySpanExporter, runtime: Any) -> None:
    dataset = raylance.dataset(images_uri, decode=raylance.Image("image", size=32), remainder="ragged")
    with dataset.loader(traces=True, record=False, runtime=runtime, name="train") as loader:
        with trace.get_tracer("test").start_as_current_span("epoch") as epoch:
            for number, _ in enumerate(loader.iter_batches(global_batch_size=BATCH)):
                with trace.get_tracer("test").start_as_current_span("train"):
                    assert number < STEPS
        stats = loader.stats()
    spans = exported.get_finished_spans()
    children = by_parent(spans)
    steps = [span for span in children[epoch.get_span_context().span_id] if span.name == "raylance.step"]
    handed_out = [step for step in steps if "raylance.step" in (step.attributes or {})]
    assert [step.attributes["raylance.step"] for step in handed_out] == list(range(STEPS))
    assert [step.attributes["raylance.position"] for step in handed_out] == [BATCH * each for each in range(STEPS)]
    assert {(step.attributes["raylance.dataset"], step.attributes["raylance.rank"]) for step in steps} == {("train", 0)}
    assert len(steps) - STEPS <= 1, "at most the look for a step after the last one"
    for before, after in itertools.pairwise(steps):
        assert before.end_time <= after.start_time
    waited_ns, causes = 0, set[str]()
    for step in steps:
        [wait] = children[step.context.span_id]
        assert wait.name == "raylance.wait"
        assert step.start_time == wait.start_time <= wait.end_time <= step.end_time
        waited_ns += wait.end_time - wait.start_time
        for part in children.get(wait.context.span_id, ()):
            causes.add(part.name)
            assert wait.start_time <= part.start_time <= part.end_time
    assert waited_ns / 1e9 == pytest.approx(stats["wait_s"], abs=1e-5)  # floats of seconds since 1970
    assert causes <= {"raylance.start", "raylance.read", "raylance.decode", "raylance.finish"}
    assert causes


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
