"""Owns the schedules of scripts: how a process ends, drops, sends and is launched; disturbs no run of Ray Train."""

from tests.faults.scripts.play import play
from tests.faults.scripts.schedule import draw

__all__ = ["draw", "play"]
