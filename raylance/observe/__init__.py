"""Owns what is counted and timed of loaders, and where it goes: records, metrics, verdicts; never what is delivered."""

from raylance.observe import clock as clock
from raylance.observe.observations import Receipt as Receipt
from raylance.observe.stats import Stats as Stats
