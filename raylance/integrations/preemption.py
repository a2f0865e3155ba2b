"""The checkpoint that a run makes before it loses a node."""

from collections.abc import Callable, Mapping
from typing import Any

import ray.train

from raylance.integrations.checkpoints import Reported, report, require_train

_reported: set[str] = set()  # IDs of the nodes for whose loss this process has reported a checkpoint


def report_if_preempted(
    metrics: Mapping[str, Any],
    loader: Reported | Mapping[str, Reported],
    state: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    **options: Any,
) -> bool:
    """Reports a checkpoint if Ray has announced that a node of this run will be taken away, once for each such node.

    Every rank must call it at the same steps: the ranks agree on the answer, which takes some milliseconds. Call it
    every few steps, at intervals much shorter than the time between the cloud's notice and the loss:

        if step % 10 == 0:
            raylance.runs.report_if_preempted({"loss": loss}, loader, state=lambda: {"model": model.state_dict()})

    Training continues afterwards. When the node is lost, Ray Train restarts the ranks at this checkpoint. The restart
    counts towards `FailureConfig.max_preemption_failures`, not towards `max_failures`.

    Ray must get the notice: from an autoscaler that drains nodes, or from `ray drain-node` in a hook of the node. Then,
    before the loss, Ray Train must see it, which takes up to `RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S`, 5 s unless set;
    the training function must call this function again; and the checkpoint must be stored. Without such a notice, the
    steps since the last checkpoint are lost.

    Args:
        metrics: As in `report`.
        loader: As in `report`.
        state: As in `report`; or a function that returns it, called only if there is something to report.
        **options: Other arguments of `report`.

    Returns:
        Whether a checkpoint was reported now; the same on all ranks.

    Raises:
        ConfigError, RaylanceError: As `report`.
    """
    require_train("report_if_preempted()", "report()")
    info = ray.train.get_preemption_info()
    if info is None or _reported.issuperset(info.preempted_node_ids):
        return False
    report(metrics, loader, state() if callable(state) else state, **options)
    _reported.update(info.preempted_node_ids)
    return True
