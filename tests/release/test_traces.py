"""Spans of steps whose work Ray's actors do."""

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.helpers.spans import check_spans


@pytest.mark.usefixtures("ray_session")
def test_so_it_is_through_ray(images_uri: str, exported: InMemorySpanExporter) -> None:
    check_spans(images_uri, exported, "ray")
