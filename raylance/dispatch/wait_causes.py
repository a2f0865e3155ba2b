"""Owns what a pass says of itself: how its helpers stand, and what the trainer waits for; never decides anything."""

import logging

from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.in_flight import InFlight, Stage
from raylance.dispatch.messages import Fault
from raylance.observe.stats import Cause, Stats

logger = logging.getLogger(__name__)


def note(stats: Stats, crew: HelperPool, inflight: InFlight, now: float, *, is_awaited: bool) -> None:
    """Notes how things stand.

    Args:
        stats: Where.
        crew: The loader's helpers.
        inflight: What is on its way.
        now: Seconds of the runtime's clock.
        is_awaited: Whether the trainer waits for what comes next.
    """
    stats.readers, stats.readers_wanted = crew.readers_running, crew.wanted["reader"]
    stats.decoders, stats.decoders_wanted = crew.decoders_running, crew.wanted["decoder"]
    stats.decoders_busy = crew.decoders_busy
    stats.inflight_items, stats.inflight_bytes = len(inflight.pieces), int(inflight.used_bytes)
    stats.awaits(_cause(stats, crew, inflight) if is_awaited else None, now)


def _cause(stats: Stats, crew: HelperPool, inflight: InFlight) -> Cause:
    """What the rows that the trainer waits for are doing."""
    head = inflight.head
    if not stats.batches or not crew.readers_running:
        return "start"
    if inflight.has_ready or head is None or head.stage in (Stage.DONE, Stage.FETCHING, Stage.FAILED):
        return "finish"
    if head.stage in (Stage.READ, Stage.DECODING):
        return "decode" if crew.decoders_running else "start"
    return "there" if head.decodes_there else "read"


def warn(stats: Stats, what: str, fault: Fault) -> None:
    """Tells of a fault that costs time and no row: in the log, and among the events."""
    logger.warning("%s (%s)", what, fault.told)
    stats.tell("fault", f"{what} ({fault.told})")
