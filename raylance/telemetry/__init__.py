"""Owns what is counted and timed of loaders, and where it goes: records, metrics, verdicts; never what is delivered."""

from raylance.telemetry import clock as clock
from raylance.telemetry.stats import Receipt as Receipt
from raylance.telemetry.stats import Stats as Stats
