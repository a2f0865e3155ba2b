"""Owns the public name `raylance.telemetry.metrics`; all of it lies in `raylance.observe.metrics`."""

from raylance.observe.metrics import METRICS

__all__ = ["METRICS"]
