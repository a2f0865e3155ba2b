"""A run whose node is taken away with a notice continues from there; real nodes, whose processes end."""

import dataclasses
from pathlib import Path

import pytest

from tests.faults import history, workloads
from tests.faults.play import Run
from tests.faults.schedule import NODES, Fault, Schedule


@pytest.mark.promise("P6")
def test_a_node_that_is_taken_away_with_a_notice_costs_no_step_before_it(tmp_path: Path, s3_port: int) -> None:
    """The epoch has only the checkpoint at the notice. Without it, all steps of the epoch would be done again."""
    data, folder = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    folder.mkdir()
    workloads.write(data)
    fault = Fault("node preempted", "mid-window", epoch=0, step=9, delay_s=0.0, place=1, lasts_s=8.0)
    plan = Schedule("preempted", "vectors", NODES, 2, 1, 2, "", 0, is_remote=False, faults=(fault,))
    run = Run(plan, folder, data, s3_port)
    run.setting = dataclasses.replace(run.setting, failures=0)  # what Ray Train counts as a failure ends the run
    run.setting = dataclasses.replace(run.setting, report_every=1000, step_s=0.5)  # the node goes in the same epoch
    outcome = run.play()
    assert outcome.problems == []
    assert [injected.kind for injected in outcome.injected] == ["node preempted"]
    assert (outcome.starts, outcome.drivers) == (2, 1), "Ray Train starts the ranks again, once"
    files = history.read(folder / "logs")
    asked = [event for events in files.values() for event in events if event["what"] == "preempted"]
    assert len(asked) == 2, "each of two ranks reports once, however often it asks"
    starts = history.starts_of(files, [])
    assert {min(starts[1].steps)} == {(event["epoch"], event["step"]) for event in asked}
    assert max(starts[0].steps) >= min(starts[1].steps)
