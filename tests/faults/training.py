"""The run that the fault suite disturbs: a driver with a real `TorchTrainer`, whose ranks write down what they train
on.

    python -m tests.faults.training FOLDER      # reads FOLDER/setting.json
"""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.faults import workloads


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a driver is started with."""

    workload: str
    data: str  # where the datasets lie
    storage: str
    address: str  # where Ray's cluster listens
    world: int = 2
    decoders: int = 1
    work_timeout_s: float = 8.0
    step_s: float = 0.03
    report_every: int = 7
    misbehaves: str = ""  # what rank 1, or the only one, does once, at a step of epoch 0
    at_step: int = 0
    data_options: dict[str, str] | None = None
    name: str = "run"
    continues: str = ""  # the folder of a run whose newest checkpoint is continued
    asks: bool = False  # whether the ranks ask every few steps if a node will be taken away
    failures: int = 20
    endpoint: str = ""  # where the S3 API with the run's storage listens; "" if the storage is a folder

    def filesystem(self) -> Any:
        if not self.endpoint:
            return None
        import pyarrow.fs

        keys = {"access_key": "none", "secret_key": "none", "region": "us-east-1"}
        return pyarrow.fs.S3FileSystem(endpoint_override=self.endpoint, **keys)


class Log:
    """A file of what one rank did in one start, a JSON object a line; a killed process leaves all that it wrote."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = open(folder / f"{name}.jsonl", "a", buffering=1)  # noqa: SIM115 - as long as the process

    def __call__(self, what: str, **values: Any) -> None:
        self._file.write(json.dumps({"what": what, "at_s": time.time(), **values}) + "\n")


LOSING = ("raises", "exits", "takes no shard")


class OnceRaisedError(Exception):
    """What a rank raises in the middle of an epoch."""


def is_first(setting: Setting, folder: Path, log: Log) -> bool:
    """Whether the rank has not yet done what it does once a run; writes down that it does."""
    mark = folder / "misbehaved"
    if mark.exists():
        return False
    mark.touch()
    log("misbehaves", how=setting.misbehaves)
    return True


def misbehave(setting: Setting, folder: Path, log: Log, step: int) -> float:
    """Does what the setting says, once a run; returns how much slower the next steps are."""
    if setting.misbehaves == "slow":
        if step == setting.at_step:
            log("misbehaves", how="is 20 times slower")
        return 20.0 if setting.at_step <= step < setting.at_step + 5 else 1.0
    if step == setting.at_step and setting.misbehaves in LOSING and is_first(setting, folder, log):
        if setting.misbehaves == "raises":
            raise OnceRaisedError("on purpose")
        if setting.misbehaves == "exits":
            os._exit(3)
    return 1.0


def held() -> dict[str, int]:
    process = psutil.Process()
    return {"threads": process.num_threads(), "descriptors": process.num_fds(), "bytes": process.memory_info().rss}


def train_fn(config: dict[str, Any]) -> None:
    import ray
    import ray.train

    import raylance

    setting, folder = Setting(**config["setting"]), Path(config["folder"])
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    log = Log(folder, f"rank-{time.time():.3f}-{rank}")
    start = ray.get_runtime_context().get_placement_group_id()  # what all ranks of one start have in common
    log("start", start=start, rank=rank, world=world, pid=os.getpid())
    acts = rank == world - 1
    if setting.misbehaves == "takes no shard" and acts and is_first(setting, folder, log):
        time.sleep(2)
        raise OnceRaisedError("before its shard was taken")
    loader, val = (ray.train.get_dataset_shard(name) for name in ("train", "val"))
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None and setting.continues:
        checkpoint = raylance.runs.newest_checkpoint(setting.continues, setting.filesystem())
    saved = raylance.restore(loader, checkpoint)
    state = loader.state_dict()
    at = [state["epoch"], state["position"]]
    log("restored", at=at, saved=None if saved is None else saved["at"])
    formats: Any = {"batch_format": "pyarrow", "with_row_offset": True}
    group = rank // 2 if setting.workload == "peers" else rank
    for epoch in range(loader.epoch, workloads.EPOCHS):
        step = at[1] // workloads.BATCH if epoch == at[0] else 0
        while loader.epoch == epoch:  # a pass that is broken off is followed by another
            for batch in loader.iter_batches(global_batch_size=workloads.BATCH, **formats):
                slower = misbehave(setting, folder, log, step) if acts and epoch == 0 else 1.0
                time.sleep(setting.step_s * slower)
                log("step", epoch=epoch, step=step, group=group, rows=list(workloads.rows_of(batch)))
                step += 1
                due = step % setting.report_every == 0 or step == workloads.STEPS
                if due or setting.asks:
                    state = loader.state_dict()
                    saved = {"at": [state["epoch"], state["position"]]}
                if setting.asks and raylance.runs.report_if_preempted({"step": step}, loader, saved):
                    log("preempted", epoch=epoch, step=step)
                elif due:
                    log("report", epoch=epoch)
                    raylance.report({"step": step}, loader, state=saved)
                    log("reported", epoch=epoch)
                if setting.misbehaves == "breaks off" and acts and epoch == 0 and step == setting.at_step:
                    log("misbehaves", how="breaks off a pass")
                    break
        log("validate", epoch=epoch)
        rows = sum(batch.num_rows for batch in val.iter_batches(batch_size=32, batch_format="pyarrow"))
        log("validated", epoch=epoch, rows=rows)
        log("holds", **held())
    stats = loader.stats()
    log("end", replaced=stats["helpers_replaced"], masked=stats["masked_rows"])


def fit(setting: Setting, folder: Path) -> None:
    """Trains once, to the end or to the first error that Ray Train does not outlast."""
    import ray
    import ray.train
    from ray.train.torch import TorchTrainer

    import raylance

    ray.init(address=setting.address, log_to_driver=False, logging_level="error")
    options = setting.data_options
    train = workloads.opened(setting.workload, setting.data, str(folder / "armed"), storage_options=options)
    val = workloads.validation(setting.data, storage_options=options)
    if setting.workload == workloads.FATAL:
        (folder / "armed").touch()  # not before the dataset is opened, which tries some rows
    TorchTrainer(
        train_fn,
        train_loop_config={"setting": dataclasses.asdict(setting), "folder": str(folder)},
        datasets={"train": train, "val": val},
        dataset_config=raylance.DataConfig(
            datasets_to_split=["train"],
            ranks_per_replica=2 if setting.workload == "peers" else 1,
            num_decoders=setting.decoders,
            work_timeout_s=setting.work_timeout_s,
            placement_timeout_s=60,
            inflight_bytes=20_000,
            reader_bytes=1 << 20,
        ),
        scaling_config=ray.train.ScalingConfig(num_workers=setting.world, resources_per_worker={"CPU": 1}),
        run_config=ray.train.RunConfig(
            name=setting.name,
            storage_path=setting.storage,
            storage_filesystem=setting.filesystem(),
            failure_config=ray.train.FailureConfig(max_failures=setting.failures),
        ),
    ).fit()


def main(folder: Path) -> int:
    setting = Setting(**json.loads((folder / "setting.json").read_text()))
    log = Log(folder, f"driver-{time.time():.3f}")
    log("driver", pid=os.getpid())
    try:
        fit(setting, folder)
    except BaseException as error:
        log("failed", error=f"{type(error).__name__}: {error}"[:4000])
        raise
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("raylance")]
    log(
        "done",
        threads=threads,
        files=[each.path for each in psutil.Process().open_files() if setting.data in each.path],
    )
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(Path(sys.argv[1])))
