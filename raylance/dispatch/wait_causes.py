"""Owns the status of a pass: how its helpers stand, and the cause of the trainer's wait; never decides anything."""

from raylance.dispatch.helper_pool import HelperPool
from raylance.dispatch.in_flight import InFlight, Stage
from raylance.observe.observations import Cause, Status


def status(pool: HelperPool, inflight: InFlight, *, is_awaited: bool) -> Status:
    """The status of a pass; `is_awaited` where the trainer waits for its next batch."""
    return Status(
        readers=pool.readers_running,
        readers_wanted=pool.wanted["reader"],
        decoders=pool.decoders_running,
        decoders_wanted=pool.wanted["decoder"],
        decoders_busy=pool.decoders_busy,
        inflight_items=len(inflight.entries),
        inflight_bytes=int(inflight.used_bytes),
        cause=_cause(pool, inflight) if is_awaited else None,
    )


def _cause(pool: HelperPool, inflight: InFlight) -> Cause:
    """The cause of the wait for the item that is delivered next."""
    head = inflight.head
    if not pool.readers_running:
        return "start"
    if inflight.has_ready or head is None or head.stage in (Stage.DONE, Stage.FETCHING, Stage.FAILED):
        return "finish"
    if head.stage in (Stage.READ, Stage.DECODING):
        return "decode" if pool.decoders_running else "start"
    return "there" if head.decodes_there else "read"
