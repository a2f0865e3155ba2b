"""The Ray cluster of a schedule and what runs in it: starts it, finds its processes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

HELPERS = {"reader": "ray::ShardActor", "decoder": "ray::DecodeActor"}


class Machines:
    """A cluster on this machine, of one node or several."""

    def __init__(self, nodes: int = 1, environment: dict[str, str] | None = None, **head: Any) -> None:
        """Starts it; if there are several nodes, the head takes no ranks and no decoders."""
        self._environment, self._count, self._head = environment or {}, nodes, head
        self._start()

    def _start(self) -> None:
        from ray.cluster_utils import Cluster

        with patch.dict(os.environ, self._environment):
            arguments = {"include_dashboard": False, "num_cpus": 8 if self._count == 1 else 0, **self._head}
            self._cluster = Cluster(initialize_head=True, head_node_args=arguments)
        self.nodes = [self._cluster.head_node] if self._count == 1 else []
        for _ in range(self._count if self._count > 1 else 0):
            self.add_node()
        self.address = self._cluster.address

    def restart(self) -> None:
        self.close()
        self._start()

    def add_node(self) -> None:
        with patch.dict(os.environ, self._environment):
            self.nodes.append(self._cluster.add_node(num_cpus=4, include_dashboard=False))

    def lose_node(self, place: int) -> str:
        """Ends all processes of a node at once, and says how many; Ray is not asked."""
        node = self.nodes.pop(place % len(self.nodes))
        raylet = psutil.Process(_raylet_of(node))
        family = [*raylet.children(recursive=True), raylet]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(node, allow_graceful=False)
        return f"{len(family)} processes"

    def announce(self, place: int, remaining_s: float) -> str:
        """Announces to Ray that a node will be taken away, as a cloud does; returns the node's ID."""
        node = self.nodes[place % len(self.nodes)]
        notice = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        deadline = ["--deadline-remaining-seconds", str(round(remaining_s))]
        ray_command = str(Path(sys.executable).with_name("ray"))  # also if the environment is not activated
        command = [ray_command, "drain-node", "--address", self.address, "--node-id", node.node_id, *notice, *deadline]
        subprocess.run(command, check=True, capture_output=True)
        return str(node.node_id)

    def node_of(self, pid: int) -> int:
        """The place among the nodes of that on which a process runs; a ValueError if it runs on none of them."""
        parents = [parent.pid for parent in psutil.Process(pid).parents()]
        return [_raylet_of(node) in parents for node in self.nodes].index(True)

    def processes(self, kind: str) -> list[psutil.Process]:
        raylets = {_raylet_of(node) for node in self.nodes} | {_raylet_of(self._cluster.head_node)}
        found = []
        for process in psutil.process_iter(["cmdline", "ppid", "create_time", "status"]):
            line = process.info["cmdline"] or [""]
            if line[0].startswith(HELPERS[kind]) and process.info["ppid"] in raylets:
                found.append(process)
        return sorted(found, key=lambda process: process.info["create_time"])

    def leftovers(self) -> dict[str, int]:
        from ray._private.state import GlobalState
        from ray._raylet import GcsClientOptions

        state = GlobalState()
        state._initialize_global_state(
            GcsClientOptions.create(self.address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        )
        names = {name.removeprefix("ray::") for name in HELPERS.values()}
        alive = [actor for actor in state.actor_table(None, None, "ALIVE").values() if actor["ActorClassName"] in names]
        total, free = state.cluster_resources(), state.available_resources()
        stored = total.get("object_store_memory", 0) - free.get("object_store_memory", 0)
        state.disconnect()
        return {
            "actors": len(alive),
            "processes": sum(len(self.processes(kind)) for kind in HELPERS),
            "stored_bytes": int(stored),
        }

    def close(self) -> None:
        family = []
        for node in [*self.nodes, self._cluster.head_node]:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError, IndexError):
                family += psutil.Process(_raylet_of(node)).children(recursive=True)
        session = self._cluster.head_node.get_session_dir_path()
        with contextlib.suppress(Exception):
            self._cluster.shutdown()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        shutil.rmtree(session, ignore_errors=True)


def _raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def wait_until(is_so: Any, limit_s: float, every_s: float = 0.1) -> bool:
    deadline = time.monotonic() + limit_s
    while not (found := is_so()) and time.monotonic() < deadline:
        time.sleep(every_s)
    return bool(found)
