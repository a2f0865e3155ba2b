"""Long runs: changing weights, leases, pinned versions, the record, checkpoints, the proof."""

from raylance.api.leases import Lease, Leases
from raylance.api.pinning import pin, unpin
from raylance.integrations.checkpoint_files import newest_checkpoint
from raylance.integrations.preemption import report_if_preempted
from raylance.observe.record import open_folder
from raylance.orders.schedule import Newest, Schedule
from raylance.planning.leases import LeaseProgress
from raylance.reports.proving import RunProof
from raylance.reports.seen import seen

__all__ = [
    "Lease",
    "LeaseProgress",
    "Leases",
    "Newest",
    "RunProof",
    "Schedule",
    "newest_checkpoint",
    "open_folder",
    "pin",
    "report_if_preempted",
    "seen",
    "unpin",
]
