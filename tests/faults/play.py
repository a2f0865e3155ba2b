"""One schedule from its start to its verdict: runs the driver, injects when a phase is reached, and checks what the
ranks wrote down.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

import raylance
from tests.faults import history, schedule, training, workloads
from tests.faults.inject import Target
from tests.faults.machines import Machines, wait_until
from tests.faults.schedule import Fault, Schedule
from tests.faults.training import Setting
from tests.helpers.faulty_store import FaultyStore, bucket_of, store_options

SILENCE_S = 180  # a run in which nothing happens for so long hangs: twice what Ray takes to miss a node
STARTS = 6  # a driver that ends by then is not started again
MOST_GROWTH = {"threads": 16, "descriptors": 32, "bytes": 256 << 20}  # an epoch's data is 2 MB
MEMORY_ROOM = 1 << 30  # for Ray, and for each rank: it, its shard actor and its decoders load torch
SMALL_STORE = 80 << 20
LOSING = ("kill rank", "kill driver", "head restarts", "node lost, another joins", "node preempted")
ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_API_SERVER_ADDRESS": "http://127.0.0.1:9",  # where no other Ray of this machine answers
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclasses.dataclass(frozen=True)
class Injected:
    """A fault that hit something, or what a rank did by itself."""

    kind: str
    phase: str
    whole_s: float  # the longest pause after it
    ray_s: float  # the part of `whole_s` until Ray Train called the training function again


@dataclasses.dataclass
class Outcome:
    """What became of a schedule."""

    name: str
    workload: str
    injected: list[Injected] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)  # rows lost, twice, altered, and other batches
    problems: list[str] = dataclasses.field(default_factory=list)  # in words; none for a schedule that passed
    left: dict[str, int] = dataclasses.field(default_factory=dict)
    grown: dict[str, int] = dataclasses.field(default_factory=dict)  # by how much a rank's threads, memory … did
    starts: int = 0  # how often Ray Train started the ranks
    drivers: int = 0
    took_s: float = 0.0


class Tails:
    """Reads what ranks append to their files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def new(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            yield from map(json.loads, whole.splitlines())


def reaches(fault: Fault, event: dict[str, Any]) -> bool:
    """Whether an event begins the phase at which a fault is aimed."""
    begun_by = {"start": "start", "first batch": "restored", "report": "report", "validation": "validate"}
    at = (event.get("epoch"), event.get("step"))
    if fault.phase in ("mid-window", "epoch's turn"):
        is_step = event["what"] == "step"
        if fault.phase == "mid-window":
            return is_step and at >= (fault.epoch, fault.step)
        return is_step and at == (fault.epoch, workloads.STEPS - 1)
    # What is aimed at a restart follows the fault before it.
    return begun_by.get(fault.phase) == event["what"] and at[0] in (None, fault.epoch)


class Run:
    """A run that is disturbed."""

    def __init__(self, plan: Schedule, folder: Path, data: Path, s3_port: int) -> None:
        """Starts its machines; in an empty folder, to which the datasets are copied."""
        self.plan, self.folder = plan, folder
        self.outcome = Outcome(plan.name, plan.workload)
        self.logs = folder / "logs"
        self.storage = folder / "storage"
        for each in (self.logs, self.storage):
            each.mkdir()
        self.data = folder / "data"
        shutil.copytree(data, self.data)
        self.temporary = Path(tempfile.mkdtemp(prefix="rf-"))  # Ray's sockets lie there, whose paths are short
        self.tails = Tails(self.logs)
        self.drivers: list[subprocess.Popen[bytes]] = []
        self.waiting = list(plan.faults)
        self.due: list[tuple[float, Fault]] = []
        self.fired: list[tuple[float, Fault, str]] = []
        ranks = max(plan.world, plan.next_world)
        self.memory_limit = psutil.virtual_memory().used + (1 + ranks) * MEMORY_ROOM
        self.store, uri, options = None, str(self.data), None
        if plan.cluster == schedule.S3:
            self.store = FaultyStore(s3_port)
            uri, options = self._upload(s3_port)
        if plan.cluster == schedule.DISK:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", self.storage], check=True)
        self.machines = self._start_machines()
        self.setting = Setting(
            workload=plan.workload,
            data=uri,
            storage=f"{uri.removeprefix('s3://')}/runs" if plan.is_remote else str(self.storage),
            endpoint=f"http://127.0.0.1:{self.store.port}" if plan.is_remote and self.store else "",
            address=self.machines.address,
            world=plan.world,
            decoders=plan.decoders,
            misbehaves=plan.misbehaves,
            at_step=plan.at_step,
            asks=plan.cluster == schedule.NODES,
            step_s=0.2 if plan.cluster == schedule.NODES else 0.03,  # a notice takes seconds
            data_options=options,
        )
        self.target = Target(
            machines=self.machines,
            data=self.data,
            storage=self.storage,
            store=self.store,
            memory_limit=self.memory_limit,
            rank_pids=self.rank_pids,
            driver=lambda: self.drivers[-1],
        )

    def _upload(self, port: int) -> tuple[str, dict[str, str]]:
        """Copies the datasets into a bucket; returns where they are, through a proxy that disturbs on command."""
        name = f"faults-{os.getpid()}-{time.time_ns()}"
        bucket = bucket_of(port, name)
        for path in self.data.rglob("*"):
            if path.is_file():
                bucket.upload_file(str(path), str(path.relative_to(self.data)))
        assert self.store is not None
        return f"s3://{name}", store_options(self.store.port)

    def _start_machines(self) -> Machines:
        environment = {**ENVIRONMENT, "TMPDIR": str(self.temporary)}
        match self.plan.cluster:
            case schedule.NODES:
                return Machines(2, environment)
            case schedule.STORE:
                if any("disk" in fault.kind for fault in self.plan.faults):
                    environment["RAY_local_fs_capacity_threshold"] = "0.01"
                return Machines(1, environment, object_store_memory=SMALL_STORE)
            case schedule.MEMORY:
                share = self.memory_limit / psutil.virtual_memory().total
                environment |= {"RAY_memory_usage_threshold": str(share), "RAY_memory_monitor_refresh_ms": "100"}
        return Machines(1, environment)

    def rank_pids(self) -> list[int]:
        files = history.read(self.logs)
        starts = [events[0] for name, events in files.items() if name.startswith("rank") and events]
        return [event["pid"] for event in starts if psutil.pid_exists(event["pid"])]

    def play(self) -> Outcome:
        begun = time.monotonic()
        try:
            self._run()
            self.target.settle()
            if not self.outcome.problems:
                wait_until(lambda: not self._check_left(), 20, 0.5)
                self.outcome.problems += [f"{count} {name} are left" for name, count in self._check_left().items()]
            self._check()
        except Exception:  # an error of the suite itself; the next schedules are still played
            self.outcome.problems.append(traceback.format_exc()[-3000:])
        finally:
            self.close()
        self.outcome.took_s = round(time.monotonic() - begun, 1)
        return self.outcome

    def _start_driver(self) -> None:
        self.setting = dataclasses.replace(self.setting, address=self.machines.address)
        if self.drivers:
            self.setting = dataclasses.replace(self.setting, world=self.plan.next_world)
        (self.logs / "setting.json").write_text(json.dumps(dataclasses.asdict(self.setting)))
        watches = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": str(int(self.setting.asks))}
        environment = {**os.environ, **ENVIRONMENT, **watches, "TMPDIR": str(self.temporary)}
        command = [sys.executable, "-m", "tests.faults.training", str(self.logs)]
        with open(self.folder / f"driver-{len(self.drivers)}.txt", "wb") as output:
            self.drivers.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))

    def _run(self) -> None:
        self._start_driver()
        lively = time.monotonic()
        while True:
            for event in self.tails.new():
                lively = time.monotonic()
                self._see(event)
            self._fire()
            self.target.tick()
            if self.drivers[-1].poll() is not None and self._ended():
                return
            if time.monotonic() - lively > SILENCE_S:
                self.outcome.problems.append(f"hangs: nothing happened for {SILENCE_S} s")
                self._dump()
                return
            time.sleep(0.01)

    def _see(self, event: dict[str, Any]) -> None:
        for fault in list(self.waiting):
            if reaches(fault, event):
                self.waiting.remove(fault)
                self.due.append((event["at_s"] + fault.delay_s, fault))

    def _fire(self) -> None:
        for at_s, fault in sorted(self.due, key=lambda each: each[0]):
            if at_s <= time.time():
                self.due.remove((at_s, fault))
                now = time.time()
                hit = self.target.inject(fault)
                self.fired.append((now, fault, hit))
                self._follow(fault, now)

    def _follow(self, fault: Fault, at_s: float) -> None:
        """What is aimed at a restart comes after its own fault, which was drawn just before it."""
        place = self.plan.faults.index(fault) + 1
        then = self.plan.faults[place] if place < len(self.plan.faults) else None
        if then is not None and then.phase == "restart" and then in self.waiting:
            self.waiting.remove(then)
            self.due.append((at_s + then.delay_s, then))

    def _ended(self) -> bool:
        """Whether the driver is done; starts it again if it may end."""
        status = self.drivers[-1].returncode
        if status == 0:
            return True
        output = (self.folder / f"driver-{len(self.drivers) - 1}.txt").read_text(errors="replace")
        if not self.plan.may_end_driver or len(self.drivers) == STARTS:
            self.outcome.problems.append(f"the driver ended with {status}: {output[-3000:]}")
            return True
        self.target.settle()
        if "CheckpointManager" in output or "JSONDecode" in output:  # the list of checkpoints is damaged
            run = f"{self.setting.storage}/{self.setting.name}"
            with contextlib.suppress(raylance.StateError):  # without any checkpoint the run begins
                raylance.runs.newest_checkpoint(run, self.setting.filesystem())
                self.setting = dataclasses.replace(self.setting, continues=run)
            self.setting = dataclasses.replace(self.setting, name=f"run-{len(self.drivers)}")
        self._start_driver()
        return False

    def _check_left(self) -> dict[str, int]:
        left = self.machines.leftovers()
        left["temporary files"] = len(list(self.temporary.glob("raylance*")))
        self.outcome.left = left
        return {name: count for name, count in left.items() if count}

    def _check(self) -> None:
        files, problems = history.read(self.logs), self.outcome.problems
        starts = history.starts_of(files, problems)
        line = history.committed(starts, workloads.BATCH, problems)
        wanted = workloads.undisturbed(self.plan.workload, self.folder / "data")
        self.outcome.counts = history.compare(line, wanted)
        problems += [f"{count} {name}" for name, count in self.outcome.counts.items() if count]
        self.outcome.starts, self.outcome.drivers = len(starts), len(self.drivers)
        problems += [f"left in the driver: {name}" for name in history.left_in_driver(files)]
        self.outcome.grown = history.growth(files)
        grown = {name: count for name, count in self.outcome.grown.items() if count > MOST_GROWTH[name]}
        problems += [f"a rank has {count} {name} more than after its first epoch" for name, count in grown.items()]
        own = [event for events in files.values() for event in events if event["what"] == "misbehaves"]
        lost = [at_s for at_s, fault, hit in self.fired if hit and fault.kind in LOSING]
        lost += [event["at_s"] for event in own if event["how"] in training.LOSING]
        times = [*[at_s for at_s, _, hit in self.fired if hit], float("inf")]
        hits = [(at_s, fault.kind) for at_s, fault, hit in self.fired if hit]
        for at_s, kind in hits + [(event["at_s"], f"rank {event['how']}") for event in own]:
            phase = history.phase_at(files, at_s, lost)
            if phase != "end":
                pause = history.pause_after(files, at_s, min(t for t in times if t > at_s))
                injected = Injected(kind, phase, round(pause.whole_s, 2), round(pause.ray_s, 2))
                self.outcome.injected.append(injected)
        if not problems and self.plan.cluster != schedule.DISK:
            self._prove()

    def _prove(self) -> None:
        """What the run's own records prove must agree."""
        run = f"{self.setting.storage}/{self.setting.name}"
        filesystem = self.setting.filesystem()
        proof = raylance.prove_run(run, storage_filesystem=filesystem, storage_options=self.setting.data_options)
        if not proof.ok:
            self.outcome.problems.append(f"prove_run: {proof}")

    def _dump(self) -> None:
        children = psutil.Process().children(recursive=True)
        lines = [f"{p.pid} {p.status()} {' '.join(p.cmdline())[:100]}" for p in children if p.is_running()]
        (self.folder / "processes.txt").write_text("\n".join(lines))

    def close(self) -> None:
        for driver in self.drivers:
            if driver.poll() is None:
                driver.kill()
                driver.wait()
        self.machines.close()
        if self.store is not None:
            self.store.close()
        if self.plan.cluster == schedule.DISK:
            subprocess.run(["umount", "--lazy", self.storage], check=False)
        shutil.rmtree(self.temporary, ignore_errors=True)
