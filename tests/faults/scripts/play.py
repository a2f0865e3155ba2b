"""Owns one schedule of scripts from its start to its verdict: starts the processes, waits for them, and checks what
they were handed, how they ended and what they left; draws nothing, and prints nothing.
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
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import psutil
import pyarrow as pa

from tests.faults import history
from tests.faults.machines import Machines, wait_until
from tests.faults.play import ENVIRONMENT, Injected, Outcome
from tests.faults.scripts.schedule import BATCH, DELETED, LAUNCHERS, ROWS, Script
from tests.helpers.cluster import free_ports

LIMIT_S = 150  # a script takes ten seconds
SETTLES_S = 30  # torch's workers look every five seconds if their parent lives
MARK = "RAYLANCE_SCRIPT"
CRASHES, NOISE = ("Fatal Python error", "terminate called", "core dumped"), ("Exception ignored", "Traceback")
CELL = "import sys; exec(compile(open(sys.argv.pop(1)).read(), '<cell>', 'exec'))"


def write(folder: Path) -> str:
    """Writes the dataset of all scripts: several files, some rows deleted; returns its URI."""
    width, uri = 256, str(folder / "scripts.lance")
    values = pa.array(np.random.default_rng(0).random(ROWS * width, dtype=np.float32))
    table = pa.table({"id": np.arange(ROWS), "x": pa.FixedSizeListArray.from_arrays(values, width)})
    lance.write_dataset(table, uri, max_rows_per_file=ROWS // 5)
    lance.dataset(uri).delete(f"id >= {DELETED[0]} and id < {DELETED[1]}")
    return uri


def count_rows(
    script: Script, ids: Mapping[int, int], processes: Sequence[Sequence[history.Event]]
) -> tuple[dict[str, int], int]:
    """Compares the rows of all processes together with the selection.

    Args:
        script: The schedule.
        ids: The stored number of each row offset.
        processes: What each process wrote down.

    Returns:
        How many rows are wrong, by what is wrong; and how many epochs were whole.
    """
    wanted = {row for row, number in ids.items() if not script.is_filtered or number % 3}
    counts, whole = Counter({"lost": 0, "twice": 0, "altered": 0, "of no selection": 0}), 0
    for number in range(script.epochs):
        events = [event for found in processes for event in found if event.get("number") == number]
        steps = [event for event in events if event["what"] == "step"]
        given = Counter(row for step in steps for row in step["offsets"])
        if sum(event["what"] == "passed" for event in events) == script.processes:
            counts["lost"] += len(wanted - set(given))
            whole += 1
        counts["twice"] += given.total() - len(given)
        counts["of no selection"] += len(set(given) - wanted)
        for step in steps:
            pairs = zip(step["offsets"], step["ids"], strict=True)
            counts["altered"] += step["wrong"] + sum(ids.get(row) != stored for row, stored in pairs)
    return dict(counts), whole


class Stage:
    """What all schedules of one call share: the dataset, and a Ray that outlives the scripts."""

    def __init__(self, folder: Path) -> None:
        """Writes the dataset; Ray starts when a script needs it."""
        self.uri = write(folder)
        ids = np.array([n for n in range(ROWS) if not DELETED[0] <= n < DELETED[1]])
        self.ids = dict(enumerate(ids.tolist()))  # by row offset
        self.temporary = Path(tempfile.mkdtemp(prefix="rf-"))  # Ray's sockets lie there, whose paths are short
        self._machines: Machines | None = None

    @property
    def machines(self) -> Machines:
        """The cluster that scripts join."""
        if self._machines is None:
            self._machines = Machines(1, {**ENVIRONMENT, "TMPDIR": str(self.temporary)})
        return self._machines

    def close(self) -> None:
        """Ends Ray."""
        if self._machines is not None:
            self._machines.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


def environment_of(script: Script, rank: int, port: int) -> dict[str, str]:
    """The variables that a launcher sets for a process."""
    name_of_rank, name_of_size = LAUNCHERS[script.launcher] if script.launcher else ("", "")
    found = {name_of_rank: str(rank), name_of_size: str(script.processes)} if name_of_rank else {}
    if "torchrun" in script.launcher:
        found |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if script.launcher == "torchrun in srun":  # once on each node
        found |= {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
    if script.launcher == "srun":
        found |= {"SLURM_NTASKS": str(script.processes), "SLURM_LOCALID": str(rank)}
    if script.launcher == "sbatch":  # the script of a job of three tasks, before any srun
        found |= {"SLURM_PROCID": "0", "SLURM_NTASKS": "3"}
    return found


class Played:
    """One schedule that is played."""

    def __init__(self, script: Script, folder: Path, stage: Stage) -> None:
        """Takes an empty folder of its own; starts nothing."""
        self.script, self.folder, self.stage = script, folder, stage
        self.outcome = Outcome(script.name, "script")
        self.logs, self.mark = folder / "logs", uuid.uuid4().hex
        self.logs.mkdir()
        self.temporary = Path(tempfile.mkdtemp(prefix="rs-"))
        self.runs: list[subprocess.Popen[bytes]] = []
        self.pids: set[int] = set()
        self.ended_s: dict[int, float] = {}

    def play(self) -> Outcome:
        """Runs it to its end, and says what became of it."""
        begun = time.monotonic()
        try:
            self._start()
            self._wait()
            self._check()
        except Exception:  # an error of the suite itself; the next schedules are still played
            self.outcome.problems.append(traceback.format_exc()[-3000:])
        finally:
            for process in self._marked():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            for run in self.runs:
                run.wait()
            shutil.rmtree(self.temporary, ignore_errors=True)
        self.outcome.took_s = round(time.monotonic() - begun, 1)
        return self.outcome

    def _start(self) -> None:
        script, port = self.script, free_ports(1)[0]
        group = "" if not script.has_group else "env://" if "torchrun" in script.launcher else f"file://{self.folder}/g"
        common = {
            **dataclasses.asdict(script),
            "uri": self.stage.uri,
            "address": self.stage.machines.address if script.ray in ("beside", "helpers") else "",
            "group": group,
            "batch": BATCH,
            "dumps_after_s": LIMIT_S - 20,
        }
        path = str(self.folder / "program.py")
        text = Path(__file__).with_name("program.py").read_text()
        Path(path).write_text(text)
        given = {"file": [path], "-c": ["-c", text], "stdin": ["-"], "cell": ["-c", CELL, path]}[script.starts]
        for rank in range(script.processes):
            setting = {**common, "rank": rank, "log": str(self.logs / f"process-{rank}.jsonl")}
            own = {"TMPDIR": str(self.temporary), MARK: self.mark, **environment_of(script, rank, port)}
            with contextlib.ExitStack() as opened:
                output = opened.enter_context(open(self.folder / f"output-{rank}.txt", "wb"))
                source = opened.enter_context(open(path, "rb")) if script.starts == "stdin" else subprocess.DEVNULL
                run = subprocess.Popen(
                    [sys.executable, *given, json.dumps(setting)],
                    stdin=source,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **ENVIRONMENT, **own},
                    start_new_session=True,
                )
            self.runs.append(run)

    def _wait(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(self.ended_s) < len(self.runs):
            for rank, run in enumerate(self.runs):
                if rank not in self.ended_s and run.poll() is not None:
                    self.ended_s[rank] = time.time()
            self.pids |= {process.pid for process in self._marked()}
            if time.monotonic() > deadline:
                still = [rank for rank in range(len(self.runs)) if rank not in self.ended_s]
                self.outcome.problems.append(
                    f"hangs: process {still} did not end in {LIMIT_S} s: {self._said(still[0])}"
                )
                return
            time.sleep(0.1)

    def _said(self, rank: int) -> str:
        return (self.folder / f"output-{rank}.txt").read_text(errors="replace")[-3000:]

    def _marked(self) -> list[psutil.Process]:
        """Processes of the schedule that live, and their children."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    # ---- the verdict

    def _noise(self, status: int) -> tuple[str, ...]:
        """What a process that ends well does not say."""
        return CRASHES if status or self.script.has_workers_to_the_end else CRASHES + NOISE

    def _check(self) -> None:
        problems = self.outcome.problems
        events = history.read(self.logs)
        for rank, run in enumerate(self.runs):
            if run.returncode is None:
                continue
            said, wanted = self._said(rank), self.script.statuses()
            if run.returncode not in wanted:
                problems.append(f"process {rank} ended with {run.returncode}, not with {wanted[0]}: {said}")
            elif any(word in said for word in self._noise(run.returncode)):
                problems.append(f"process {rank} ended with {run.returncode}, and said: {said}")
        wait_until(lambda: not self._left(), SETTLES_S, 0.3)
        self.outcome.left = self._left()
        problems += [f"{count} {name} are left" for name, count in self.outcome.left.items()]
        problems += [f"left: {path.name}" for path in self.temporary.rglob("*") if self.outcome.left]
        for rank, name in enumerate(sorted(events)):
            problems += [f"process {rank}: {problem}" for problem in self._check_process(events[name])]
        self.outcome.counts, whole = count_rows(self.script, self.stage.ids, list(events.values()))
        problems += [f"{count} {name}" for name, count in self.outcome.counts.items() if count]
        if not self.script.refused and whole < self.script.whole_epochs:
            problems.append(f"{whole} epochs were whole, of {self.script.whole_epochs}")
        if not self.script.refused and not any(e["what"] == "step" for found in events.values() for e in found):
            problems.append("no batch came")
        self._name(list(events.values()))
        self.outcome.starts, self.outcome.drivers = 1, len(self.runs)

    def _left(self) -> dict[str, int]:
        found = {"processes": len(self._marked())}
        names = [path.name for path in self.temporary.iterdir() if path.name != "ray"]
        if self.script.has_workers_to_the_end:
            names = [name for name in names if not name.startswith("pymp-")]
        found["temporary files"] = len(names)
        shared = [path.name.split("_") for path in Path("/dev/shm").glob("torch_*")]
        found["pieces of shared memory"] = sum(len(name) > 1 and int(name[1]) in self.pids for name in shared)
        if self.script.ray in ("beside", "helpers"):
            left = self.stage.machines.leftovers()
            found |= {name: count for name, count in left.items() if name != "processes"}
            found["helpers"] = left["processes"]
        return {name: count for name, count in found.items() if count}

    def _check_process(self, events: Sequence[history.Event]) -> Iterator[str]:
        """What one process wrote down, but for the rows."""
        refused = next((event["error"] for event in events if event["what"] == "refused"), "")
        words = self.script.refused
        if words and not refused:
            yield f"was not refused, with {words}"
        elif refused and not (words and all(word in refused for word in words)):
            yield f"was refused, and should {f'say {words}' if words else 'not be'}: {refused}"
        for event in events:
            if event["what"] == "hangs":
                yield f"hangs: the garbage collector, in {event['where']}"
            if event["what"] == "collected" and event["threads"]:
                yield f"threads of what was collected are left: {event['threads']}"
        if any(event["what"] == "step" for event in events) and refused and self.script.collate != "":
            yield "batches came before the error"

    def _name(self, processes: list[list[history.Event]]) -> None:
        """Says what was tried, as a table shows it."""
        script, label = self.script, self.script.label
        lasted: list[float] = []
        for rank, events in enumerate(processes):
            if events and rank in self.ended_s:
                at_s = next((e["at_s"] for e in events if e["what"] == "ends"), events[-1]["at_s"])
                lasted.append(round(self.ended_s[rank] - at_s, 2))
        whole_s = max(lasted, default=0.0)
        took_s = [event["took_s"] for events in processes for event in events if event["what"] == "collected"]
        names: dict[str, float] = {}
        if script.collects:
            names[f"collected in {script.collects}"] = round(max(took_s, default=0.0), 2)
        if script.collate:
            names[f"collate_fn: {script.collate}"] = 0.0
        if script.launcher:
            names[f"launcher: {script.launcher}, {script.processes} with {script.place}"] = 0.0
        if not script.refused:
            names[f"ends: {script.ends}"] = whole_s
        self.outcome.injected = [Injected(kind, label, cost_s, 0.0) for kind, cost_s in names.items()]


def play(scripts: Sequence[Script], keep: Path | None) -> Iterator[dict[str, Any]]:
    """Outcomes of schedules, one after the other.

    Args:
        scripts: The schedules.
        keep: Where the files of those that failed stay.
    """
    with tempfile.TemporaryDirectory(prefix="scripts-") as parent:
        stage = Stage(Path(parent))
        try:
            for script in scripts:
                folder = Path(parent, script.name.replace(":", "-"))
                folder.mkdir()
                outcome = Played(script, folder, stage).play()
                if outcome.problems and keep is not None:
                    shutil.copytree(folder, keep / folder.name, dirs_exist_ok=True)
                shutil.rmtree(folder, ignore_errors=True)
                yield dataclasses.asdict(outcome)
        finally:
            stage.close()
