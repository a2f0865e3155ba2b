"""The counters and timings of loaders, their records, metrics and verdicts."""

from raylance.observe import clock as clock
from raylance.observe.observations import Receipt as Receipt
from raylance.observe.stats import Stats as Stats
