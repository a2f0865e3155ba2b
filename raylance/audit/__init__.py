"""The audit of epochs from outside: it compares delivered rows with the rows that Lance itself selects, and shows the
rows of a step.

    audit = raylance.audit.EpochAudit(train, global_batch_size=256, world_size=8, epoch=3)
    audit.count()                                     # does the plan have every row once?
    audit.count(audit.by_stream(num_decoders=2))      # do the loaders deliver every row once?
    audit.rows_of_step(1200, columns=["label"])       # rows of a loss spike

    train = raylance.audit.reopen(state)              # state: the content of a run's raylance_state.json
    raylance.audit.EpochAudit(train, state=state).count()

An audit by the plan shows which rows a run should get. `raylance.prove_run(folder)` checks which rows its ranks got.
"""

from raylance.audit.epoch import AuditReport, EpochAudit
from raylance.audit.reopening import reopen
from raylance.audit.selected import Step, label_codes
from raylance.descriptions import read_setting

__all__ = ["AuditReport", "EpochAudit", "Step", "label_codes", "read_setting", "reopen"]
