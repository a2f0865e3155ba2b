"""The folder of a run: its record, its newest checkpoint, one where a node is taken away, and what a proof says."""

from raylance.integrations.checkpoint_files import newest_checkpoint
from raylance.integrations.preemption import report_if_preempted
from raylance.observe.record import open_folder
from raylance.reports.proving import RunProof

__all__ = ["RunProof", "newest_checkpoint", "open_folder", "report_if_preempted"]
