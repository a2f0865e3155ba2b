"""What is done to a run: processes, nodes, memory, disks, data and storage."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import psutil

from tests.faults import workloads
from tests.faults.machines import Machines, wait_until
from tests.faults.schedule import Fault
from tests.helpers.faulty_store import FaultyStore

FILL_STORE = """
import sys, time, numpy as np, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
held = []
print("runs", flush=True)
try:
    while True:
        held.append(ray.put(np.ones(4 << 20, np.uint8)))
        if sys.argv[3] == "in memory" and len(held) == 24:
            break
except ray.exceptions.RayError:
    pass
print("full", flush=True)
time.sleep(float(sys.argv[2]))
"""
FILL_MEMORY = """
import sys, time, psutil
held, limit = [], float(sys.argv[1])
while psutil.virtual_memory().used < limit:
    held.append(bytearray(b"x") * (64 << 20))
time.sleep(float(sys.argv[2]))
"""


@dataclasses.dataclass
class Target:
    """What a fault is done to: one run, its machines, its data and its storage."""

    machines: Machines
    data: Path
    storage: Path
    store: FaultyStore | None
    memory_limit: float
    rank_pids: Callable[[], list[int]]
    driver: Callable[[], subprocess.Popen[bytes]]
    _later: list[tuple[float, Callable[[], Any]]] = dataclasses.field(default_factory=list)

    def later(self, delay_s: float, do: Callable[[], Any]) -> None:
        self._later.append((time.monotonic() + delay_s, do))

    def tick(self) -> None:
        for due_s, do in list(self._later):
            if due_s <= time.monotonic():
                self._later.remove((due_s, do))
                do()

    def settle(self) -> None:
        while self._later:
            self.tick()
            time.sleep(0.01)

    def inject(self, fault: Fault) -> str:
        how, _, what = fault.kind.partition(" ")
        if how in ("kill", "stop", "hang"):
            return self._signal(how, what, fault)
        if how == "storage:":
            return self._disturb(what, fault)
        return str(getattr(self, fault.kind.partition(",")[0].replace(" ", "_"))(fault))

    def _pids(self, what: str, place: int) -> list[int]:
        names = {"decoder": "decoder", "shard actor": "reader"}
        if what == "driver":
            return [self.driver().pid]
        if what == "rank":
            alive = self.rank_pids()
            return [alive[place % len(alive)]] if alive else []
        if what == "all helpers":
            return [each.pid for name in names.values() for each in self.machines.processes(name)]
        families = [self.machines.processes(names[each]) for each in what.split(" and ")]
        return [family[place % len(family)].pid for family in families if family]

    def _signal(self, how: str, what: str, fault: Fault) -> str:
        number = signal.SIGKILL if how == "kill" else signal.SIGSTOP
        wait_until(lambda: self._pids(what, fault.place), 8, 0.05)
        hit = []
        for pid in self._pids(what, fault.place):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                hit.append(pid)
        if how == "stop":
            self.later(fault.lasts_s, lambda: [_continue(pid) for pid in hit])
        return ", ".join(map(str, hit))

    def data_folder_away(self, fault: Fault) -> str:
        away = self.data.with_suffix(".away")
        if not self.data.exists():
            return ""
        self.data.rename(away)
        self.later(fault.lasts_s, lambda: away.rename(self.data))
        return str(self.data)

    def version_compacted_and_cleaned_up(self, fault: Fault) -> str:
        """Deletes rows, compacts files, sets and removes a tag, and cleans up all old versions but one with a tag."""
        uri = self.data / "data.lance"
        if not uri.exists():  # it is away
            return ""
        dataset = lance.dataset(uri)
        if "trained" not in dataset.tags.list():
            dataset.tags.create("trained", workloads.VERSION)
        dataset.delete(f"id = {fault.place}")
        dataset.optimize.compact_files()
        dataset.tags.create(f"passing-{fault.place}", workloads.VERSION)
        dataset.tags.delete(f"passing-{fault.place}")
        cleaned = lance.dataset(uri).cleanup_old_versions(timedelta(0), error_if_tagged_old_versions=False)
        return f"{cleaned.old_versions} old versions"

    def head_restarts(self, fault: Fault) -> str:
        self.driver().kill()
        self.machines.restart()
        return "all nodes"

    def node_lost(self, fault: Fault) -> str:
        hit = self.machines.lose_node(fault.place)
        self.later(fault.lasts_s, self.machines.add_node)
        return hit

    def node_preempted(self, fault: Fault) -> str:
        """A notice, another node, and the loss of the node when its time is over."""
        pids = self.rank_pids()
        if not pids:
            return ""
        try:
            place = self.machines.node_of(pids[fault.place % len(pids)])
        except (ValueError, psutil.NoSuchProcess):  # it was on a node that is lost
            return ""
        node = self.machines.nodes[place]
        self.machines.announce(place, fault.lasts_s)
        self.machines.add_node()
        self.later(fault.lasts_s, lambda: self.machines.lose_node(self.machines.nodes.index(node)))
        return str(node.node_id)

    def node_joins(self, fault: Fault) -> str:
        self.machines.add_node()
        return "one more"

    def object_store_full(self, fault: Fault, how: str = "in memory") -> str:
        arguments = [self.machines.address, str(fault.lasts_s), how]
        filler = subprocess.Popen([sys.executable, "-c", FILL_STORE, *arguments], stdout=subprocess.PIPE, text=True)
        assert filler.stdout is not None
        filler.stdout.readline()
        is_full = filler.stdout.readline().strip()
        self.later(0, filler.wait)
        return is_full

    def spill_disk_full(self, fault: Fault) -> str:
        return self.object_store_full(fault, "and the disk")

    def memory_monitor(self, fault: Fault) -> str:
        arguments = [str(self.memory_limit + (128 << 20)), str(fault.lasts_s)]
        filler = subprocess.Popen([sys.executable, "-c", FILL_MEMORY, *arguments])
        self.later(0, filler.wait)
        return str(filler.pid)

    def disk_full_at_a_checkpoint(self, fault: Fault) -> str:
        junk = self.storage / "junk"
        with contextlib.suppress(OSError), open(junk, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        self.later(fault.lasts_s, lambda: junk.unlink(missing_ok=True))  # another one may share it
        return f"{junk.stat().st_size} bytes"

    def _disturb(self, what: str, fault: Fault) -> str:
        store: Any = self.store
        store.disturb(STORAGE[what])
        if wait_until(lambda: store.hits, fault.lasts_s, 0.02):
            time.sleep(max(0.0, fault.lasts_s / 2))
        hits = store.hits
        store.disturb("")
        return f"{hits} requests" if hits else ""


STORAGE: dict[str, Any] = {
    "latency": "latency", "resets": "reset", "500": "500", "503": "503", "truncated bodies": "truncate",
    "short bodies": "short", "hangs": "hang", "object missing": "404",
}  # fmt: skip


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
