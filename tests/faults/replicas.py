"""Replicas that train under torchft and can be killed: each is a process of its own, which writes down its steps.

python -m tests.faults.replicas FOLDER NUMBER      # reads FOLDER/replicas.json
python -m tests.faults.replicas FOLDER lighthouse
python -m tests.faults.replicas FOLDER ray         # all of them, as workers of Ray Train
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch

from tests.faults import history
from tests.faults.machines import wait_until
from tests.faults.training import Log

BATCH, ROWS = 48, 3600
STEPS = ROWS // BATCH
_PATIENCE_S = 300.0  # beside other tests, Ray and three ranks took more than 120 s to start again
_LAST = 120  # steps at the end that may be slow: on a busy machine, a replica takes 40 s to start
TIMEOUTS = {"join_timeout_ms": 1000, "heartbeat_timeout_ms": 2000}  # of the lighthouse
Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the replicas of a run have in common."""

    uri: str
    replicas: int = 3
    least: int = 1  # that have to be there
    is_async: bool = True  # a replica is healed while others train
    epochs: int = 3
    step_s: float = 0.05
    reduce_s: float = 5.0  # after so long, a reduction has failed
    dies_healing: bool = False  # each replica that is healed dies of it once, in the step in which it is
    report_every: int = 40  # under Ray Train
    ranks: int = 1  # ranks in a replica, each with rows of its own
    windows: bool = False  # samples are made of two rows of an episode
    by_cost: bool = False  # steps have a cost, and so different numbers of rows
    # Time of each of the last steps until `finish` is called: a replica that starts late finds others to copy from.
    last_step_s: float = 0.0

    @property
    def size(self) -> dict[str, Any]:
        """The size of a step over all replicas."""
        import raylance

        return {"budget": raylance.Budget(50 * BATCH, padded=False)} if self.by_cost else {"global_batch_size": BATCH}


def open_data(setting: Setting) -> Any:
    import raylance

    windows = raylance.Windows(episode="episode", offsets={"x": [-1, 0]}) if setting.windows else None
    costs = {"cost": "cost", "balance": raylance.Balance()} if setting.by_cost else {}
    return raylance.dataset(setting.uri, order="window", seed=3, samples=windows, **costs)


def average(model: torch.nn.Module, manager: Any) -> None:
    """Averages the gradients over the replicas. torchft's DistributedDataParallel raises where a reduction failed."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    manager.allreduce(flat).wait()
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class DiedError(Exception):
    """What a replica raises that dies in a thread."""


def train(
    setting: Setting, number: int, folder: Path, *, rank: int = 0, dies_at: int | None = None, **place: Any
) -> None:
    """Trains as a rank of a replica, to the end; `place` names store and lighthouse, if the environment does not."""
    import torchft

    import raylance
    import raylance.torchft
    from raylance.environment import process

    is_late = (folder / "begun").exists()
    torch.manual_seed(number)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    write = Log(folder, f"rank-{number * setting.ranks + rank}-{time.time():.3f}")

    def load(state: dict[str, Any]) -> None:
        write("healed")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        mark = folder / f"died-healing-{number}"
        if setting.dies_healing and is_late and not mark.exists():
            mark.touch()
            os._exit(9)

    group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=setting.reduce_s))
    manager = torchft.Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=setting.least,
        use_async_quorum=setting.is_async,
        timeout=timedelta(seconds=2 * setting.reduce_s),
        quorum_timeout=timedelta(seconds=30),
        rank=rank,
        world_size=setting.ranks,
        replica_id=f"replica-{number}",
        **place,
    )
    stepper = torchft.Optimizer(manager, optimizer)
    data = open_data(setting)
    record = {"record": str(folder / "run"), "runtime": "threads"} if place else {}
    ranks = {"rank": number * setting.ranks + rank, "world_size": setting.replicas * setting.ranks}
    loader = data.loader(**ranks, num_decoders=0, **record)
    write("start", pid=os.getpid())
    is_in_ray = process.train_rank() is not None
    saved = raylance.restore(loader) if is_in_ray else None
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        write("restored", at=loader.global_step)
    with contextlib.closing(_Ends(manager, group)), loader:
        made = raylance.torchft.batches(
            loader,
            manager,
            **setting.size,
            epochs=setting.epochs,
            rank_in_replica=rank,
            ranks_in_replica=setting.ranks,
            with_row_offset=True,
        )
        for batch in made:
            step, share = manager.current_step(), [loader.dp_rank, loader.dp_size]
            takes_part = manager.is_participating()
            write("handed", step=step, share=share, rows=batch["_rowoffset"].tolist() if takes_part else None)
            if step == 3:
                (folder / "begun").touch()
            if step == dies_at:
                raise DiedError
            stepper.zero_grad()
            model(batch["x"]).square().mean().backward()
            average(model, manager)
            is_last = step >= setting.epochs * STEPS - _LAST and not (folder / "finish").exists()
            time.sleep(max(setting.step_s, is_last * setting.last_step_s))
            stepper.step()
            is_committed = manager.current_step() > step
            state = loader.state_dict()
            at = state["epoch"] * STEPS + state["position"] // BATCH
            at = state["global_step"] if setting.by_cost else at
            write("step", step=step, share=share, is_committed=is_committed, at=at, counted=manager.current_step())
            if is_in_ray and is_committed and manager.current_step() % setting.report_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                raylance.torchft.report_if_all({"step": step}, loader, manager, state=state)
        write("end", weights=model.weight.sum().item())


@dataclasses.dataclass(frozen=True)
class _Ends:
    """Ends what torchft has started for a replica, as the end of its process would."""

    manager: Any
    group: Any

    def close(self) -> None:
        self.manager.shutdown(wait=False)
        self.group.shutdown()


def train_in_ray(config: dict[str, Any]) -> None:
    import ray.train

    setting = Setting(**config["setting"])
    train(setting, ray.train.get_context().get_world_rank(), Path(config["folder"]))


def fit(setting: Setting, folder: Path) -> None:
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer
    from ray.train.v2.torch.torchft_config import TorchftConfig

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # others may run on this machine
    TorchTrainer(
        train_in_ray,
        train_loop_config={"setting": dataclasses.asdict(setting), "folder": str(folder)},
        torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": setting.least, **TIMEOUTS}, backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=setting.replicas),
        run_config=ray.train.RunConfig(
            name="run", storage_path=str(folder), failure_config=ray.train.FailureConfig(max_failures=20)
        ),
    ).fit()


def events_of(folder: Path, what: str = "") -> list[Event]:
    """Events of all ranks of a run, the first one first; `number` is the rank's, `file` its process."""
    found: list[Event] = []
    for name, events in history.read(folder).items():
        of_file = {"number": int(name.split("-")[1]), "file": name}
        found += [event | of_file for event in events if what in ("", event["what"])]
    return sorted(found, key=lambda event: event["at_s"])


def committed(folder: Path) -> dict[int, list[int]]:
    """The rows of each step that was committed, by those who took part in it.

    A process that was killed wrote its rows before the step; that the step was committed, any other may say.
    """
    sizes: dict[int, set[int]] = defaultdict(set)
    handed: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(dict)
    for event in events_of(folder):
        if event["what"] == "handed" and event["rows"] is not None:
            handed[event["step"], event["share"][1]][event["share"][0]] = event["rows"]
        elif event["what"] == "step" and event["is_committed"] and event["share"][0] < event["share"][1]:
            sizes[event["step"]].add(event["share"][1])
    found = {}
    for step in sizes:
        whole = [handed[step, size] for size in sizes[step] if len(handed[step, size]) == size]
        if whole:
            found[step] = [row for rank in sorted(whole[0]) for row in whole[0][rank]]
    return found


def write_data(folder: Path) -> str:
    values = np.random.default_rng(0).random(ROWS * 16, dtype=np.float32)
    uri = str(folder / "a.lance")
    x = pa.FixedSizeListArray.from_arrays(pa.array(values), 16)
    lance.write_dataset(pa.table({"x": x, "episode": np.arange(ROWS) // 7, "cost": np.arange(ROWS) * 7 % 50 + 25}), uri)
    return uri


def check(folder: Path, setting: Setting) -> None:
    """Each committed step had the rows of an undisturbed run, once; states agree with the count; records prove it."""
    import raylance

    with open_data(setting) as data:
        wanted = [
            batch["_rowoffset"].tolist()
            for epoch in range(setting.epochs)
            for batch in data.iter_batches(**setting.size, epoch=epoch, with_row_offset=True)
        ]
    came = committed(folder)
    if setting.by_cost:  # a balance arranges the rows of a step in another way for each number of ranks
        came, wanted = {step: sorted(rows) for step, rows in came.items()}, [sorted(rows) for rows in wanted]
    others = {step: (came.get(step), rows) for step, rows in enumerate(wanted) if came.get(step) != rows}
    about = [event for event in events_of(folder) if event.get("step") in others]
    assert not others, f"rows that came and that were wanted, by step: {others}; and what happened there: {about}"
    assert len(came) == len(wanted)
    wrong = [event for event in events_of(folder, "step") if event["at"] != event["counted"]]
    assert not wrong, "a loader's state stands at the manager's step"
    weights = {round(event["weights"], 5) for event in events_of(folder, "end")}
    assert len(weights) == setting.ranks, weights
    proof = raylance.prove_run(str(folder / "run"))
    assert proof.ok, proof
    assert sum(each.rows * each.epochs for each in proof.datasets[0].epochs) == sum(map(len, wanted))


class Replicas:
    """The processes of a run, and its lighthouse; under Ray Train, that starts and replaces them."""

    def __init__(self, setting: Setting, folder: Path, *, in_ray: bool = False) -> None:
        self.setting, self.folder, self._in_ray = setting, folder, in_ray
        (folder / "replicas.json").write_text(json.dumps(dataclasses.asdict(setting)))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._first = self._run("ray" if in_ray else "lighthouse")
        if not in_ray:
            self._wait(lambda: (folder / "lighthouse").exists(), 60)
            self.processes |= {number: self._run(str(number)) for number in range(setting.replicas)}

    def _run(self, what: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{what}-{time.time():.3f}.txt", "wb") as output:
            command = [sys.executable, "-m", "tests.faults.replicas", str(self.folder), what]
            return subprocess.Popen(command, stdout=output, stderr=output)

    def _wait(self, is_so: Callable[[], bool], limit_s: float) -> None:
        def tended() -> bool:
            self._tend()
            return is_so()

        if not wait_until(tended, limit_s, 0.02):
            raise TimeoutError(f"nothing came of it in {limit_s} s; see {self.folder}")

    def _tend(self) -> None:
        """Starts a replica that has died again, as Ray Train does; and a job of Ray that has failed."""
        if self._in_ray and self._first.poll() not in (None, 0):
            self._first = self._run("ray")
        for number, process in self.processes.items():
            if process.poll() not in (None, 0):
                self.processes[number] = self._run(str(number))

    def reach(self, step: int, limit_s: float = _PATIENCE_S) -> None:
        self._wait(lambda: any(e["is_committed"] and e["step"] >= step for e in self.events("step")), limit_s)

    def heal(self, limit_s: float = _PATIENCE_S) -> None:
        begun_s = time.time()

        def is_healed() -> bool:
            steps = [event["number"] for event in self.events("step") if event["at_s"] > begun_s]
            return len(set(steps)) == self.setting.replicas

        self._wait(is_healed, limit_s)

    def report(self, limit_s: float = _PATIENCE_S) -> int:
        """Waits until a step was reported, and Ray Train will continue from it; returns its number."""
        registered = self.folder / "run" / "checkpoint_manager_snapshot.json"

        def at() -> int:
            known = registered.read_text() if registered.exists() else ""
            states = (self.folder / "run").glob("checkpoint_*/raylance_state.json")
            return max(
                (json.loads(each.read_text())["global_step"] for each in states if each.parent.name in known), default=0
            )

        before = at()
        self._wait(lambda: at() > before, limit_s)
        return at()

    def kill(self, *numbers: int) -> None:
        pids = {event["number"]: event["pid"] for event in self.events("start")}
        for number in numbers:
            with contextlib.suppress(ProcessLookupError):  # it is dying already
                os.kill(pids[number], signal.SIGKILL)

    def finish(self, limit_s: float = _PATIENCE_S) -> None:
        (self.folder / "finish").touch()

        def last() -> list[subprocess.Popen[bytes]]:
            return [self._first] if self._in_ray else list(self.processes.values())

        self._wait(lambda: all(process.poll() == 0 for process in last()), limit_s)

    def events(self, what: str = "") -> list[Event]:
        return events_of(self.folder, what)

    def close(self) -> None:
        for process in (*self.processes.values(), self._first):
            process.terminate()
            process.wait()


def main(folder: Path, what: str) -> None:
    setting = Setting(**json.loads((folder / "replicas.json").read_text()))
    if what == "ray":
        fit(setting, folder)
        return
    if what == "lighthouse":
        from torchft.coordination import LighthouseServer

        server = LighthouseServer(bind="[::]:0", min_replicas=setting.least, **TIMEOUTS)
        (folder / "lighthouse.new").write_text(server.address())
        (folder / "lighthouse.new").rename(folder / "lighthouse")
        while True:
            time.sleep(60)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    address = (folder / "lighthouse").read_text()
    train(setting, int(what), folder, store_addr="localhost", store_port=store.port, lighthouse_addr=address)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
