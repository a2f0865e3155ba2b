"""Owns the counters and timings of loaders, their records, metrics and verdicts; never the rows that are delivered."""

from raylance.observe import clock as clock
from raylance.observe.observations import Receipt as Receipt
from raylance.observe.stats import Stats as Stats
