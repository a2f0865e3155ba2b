"""Long runs: weights that change, the record, the newest checkpoint, one where a node is taken away, the proof."""

from raylance.integrations.checkpoint_files import newest_checkpoint
from raylance.integrations.preemption import report_if_preempted
from raylance.observe.record import open_folder
from raylance.orders.schedule import Schedule
from raylance.reports.proving import RunProof

__all__ = ["RunProof", "Schedule", "newest_checkpoint", "open_folder", "report_if_preempted"]
