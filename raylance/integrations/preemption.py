"""Owns the checkpoint that a run makes before a node goes; never the notice itself, which is Ray's."""

from collections.abc import Callable, Mapping
from typing import Any

import ray.train

from raylance.integrations.checkpoints import Reported, report

_reported: set[str] = set()  # nodes whose loss this process has prepared for


def report_if_preempted(
    metrics: Mapping[str, Any],
    loader: Reported | Mapping[str, Reported],
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    **options: Any,
) -> bool:
    """Reports a checkpoint if Ray has announced that a node of this run will be taken away; once for each node.

    Every rank must call it at the same steps: the ranks agree on the answer, which takes them some milliseconds. Call
    it every few steps, at intervals that are short against the notice of the cloud:

        if step % 10 == 0:
            raylance.report_if_preempted({"loss": loss}, loader, state=lambda: {"model": model.state_dict()})

    Training continues afterwards. When the node is lost, Ray Train starts the ranks again at this checkpoint, and the
    restart counts as `FailureConfig.max_preemption_failures`, not as `max_failures`.

    It needs a notice that reaches Ray before the node goes: from an autoscaler that drains nodes, or from `ray
    drain-node` in a hook of the node. It needs the time until Ray Train sees it
    (`RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S`, 5 s unless set), until the next call, and until the checkpoint is stored. A
    node that is lost without a notice, or earlier than that, costs the steps since the last checkpoint.

    Args:
        metrics: As `report` takes them.
        loader: As `report` takes it.
        state: As `report` takes it; or a function that returns it, called only if there is something to report.
        **options: Of `report`.

    Returns:
        Whether a checkpoint was reported now; the same on all ranks.

    Raises:
        ConfigError: As `report`.
        RaylanceError: As `report`.
    """
    info = ray.train.get_preemption_info()
    if info is None or _reported.issuperset(info.preempted_node_ids):
        return False
    report(metrics, loader, state() if callable(state) else state, **options)
    _reported.update(info.preempted_node_ids)
    return True
