"""Owns what a schedule of scripts is and how it is drawn from its seed; starts no process, and needs no Ray.

A schedule is one script, started once, or several times as a launcher does. Nothing is done to it from outside: it
ends, drops loaders, returns what cannot be sent, or finds the environment of a launcher.
"""

import dataclasses
import random
import signal
from typing import Literal

FAMILY = "scripts"
ROWS, DELETED = 30_000, (600, 660)  # 30 MB: a script ends while windows are read ahead
BATCH, MOST_STEP = 240, 60
SOURCES = {"loader": 5, "handle": 3, "mixture": 3, "map": 3, "iterable": 4}
TORCH = ("map", "iterable")
# Whether Ray runs, and what for: "beside" threads, or for the helpers, in a cluster that outlives the script or not.
RAYS = {"": 8, "beside": 3, "helpers": 3, "own helpers": 1}
STARTS = {"file": 4, "-c": 2, "stdin": 2, "cell": 2}
ENDS = {
    "after its epochs": 3, "breaks": 4, "breaks and continues": 2, "keeps an error in a cycle": 2, "raises": 2,
    "exits": 2, "is interrupted": 3, "is interrupted with its group": 2, "is terminated": 2, "handles SIGTERM": 1,
    "its thread exits": 2, "a thread ends the process": 1,
}  # fmt: skip
ABRUPT = ("is terminated", "a thread ends the process")  # nothing is cleaned up then
COLLECTORS = ("the main thread", "another thread", "Ray's callback", "the exit", "a signal handler", "anywhere")
SENDABLE = ("plain", "of a closure")
UNSENDABLE = {
    "generator": "generator", "with lock": "lock at 'lock'", "with refusal": "Unsendable at 'refusal'",
    "with file": "TextIOWrapper at 'file'", "keeps lock": "lock",
}  # fmt: skip
Launcher = Literal["", "torchrun", "torchrun and a group", "a group", "srun", "sbatch", "torchrun in srun", "mpirun",
                   "mpiexec", "jsrun"]  # fmt: skip
LAUNCHERS: dict[Launcher, tuple[str, str]] = {  # variables of rank and size
    "torchrun": ("RANK", "WORLD_SIZE"),
    "torchrun and a group": ("RANK", "WORLD_SIZE"),
    "a group": ("", ""),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "sbatch": ("", ""),
    "torchrun in srun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "jsrun": ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
}
PLACES = ("auto", "given", "none")


@dataclasses.dataclass(frozen=True)
class Script:
    """A script and all that it does.

    Attributes:
        name: scripts:SEED:INDEX, from which `draw` makes it again.
        source: What gives the batches, one of `SOURCES`.
        ray: One of `RAYS`.
        workers: `num_workers` of a torch_data.Loader.
        is_persistent: `persistent_workers` of it.
        window_bytes: Of the dataset.
        max_window_bytes: Of the loader.
        is_filtered: Whether a filter selects two of three rows.
        is_transformed: Whether a function of the script runs on all rows.
        prefetch: `prefetch_batches`, or `prefetch_factor`.
        starts: How Python gets the script, one of `STARTS`.
        collects: Where passes that were dropped in mid-pass are collected, one of `COLLECTORS`; "" for none.
        ends: One of `ENDS`.
        epochs: How many passes are begun.
        at_step: At which step of the last one it ends.
        is_closed: Whether it closes what it iterated over.
        is_kept: Whether its iterators live until the interpreter ends.
        collate: What its collate_fn returns; "" for none.
        launcher: Whose environment it has.
        place: How it says which rows a process gets.
        processes: How many there are.
    """

    name: str
    source: str
    ray: str
    workers: int
    is_persistent: bool
    window_bytes: int | None
    max_window_bytes: int
    is_filtered: bool
    is_transformed: bool
    prefetch: int
    starts: str
    collects: str
    ends: str
    epochs: int
    at_step: int
    is_closed: bool
    is_kept: bool
    collate: str
    launcher: Launcher
    place: str
    processes: int

    @property
    def label(self) -> str:
        """What it iterates over, for people."""
        helpers = self.ray.replace("beside", "threads beside Ray") or "threads"
        return f"{self.source}, {f'workers: {self.workers}' if self.workers else helpers}"

    @property
    def has_group(self) -> bool:
        """Whether the processes are in a group of torch.distributed."""
        return "group" in self.launcher

    @property
    def refused(self) -> tuple[str, ...]:
        """Words of the error that must come in place of a batch; empty if batches must come."""
        if self.processes > 1 and self.place == "none" and not (self.source in TORCH and self.has_group):
            return ("ConfigError", str(self.processes))
        if self.workers and self.collate in UNSENDABLE:
            return (self.collate.replace(" ", "_"), UNSENDABLE[self.collate])
        return ()

    @property
    def whole_epochs(self) -> int:
        """How many epochs end before the script does."""
        return self.epochs - (self.ends not in ("after its epochs", "breaks and continues"))

    @property
    def has_workers_to_the_end(self) -> bool:
        """Whether multiprocessing ends the workers when Python exits. Then their sockets stay, and torch may complain;
        torch's own error of a worker keeps all workers, too, until the garbage collector runs.
        """
        ends = self.ends in ("after its epochs", "breaks", "breaks and continues")
        return self.workers > 0 and (self.is_kept or bool(self.refused) or not ends)

    def statuses(self) -> tuple[int, ...]:
        """The exit statuses that it may have."""
        if self.refused:
            return (1,) if self.ends == "raises" else (0,)
        match self.ends:
            case "raises":
                return (1,)
            case "exits":
                return (3,)
            case "is interrupted" | "is interrupted with its group":
                # Python exits with 1 if anything calls exec() meanwhile, as what Ray and workers do at the exit may.
                return (-signal.SIGINT, 1) if self.ray or self.workers else (-signal.SIGINT,)
            case "is terminated":  # a handler of Ray's exits with the number, and another one aborts
                return (signal.SIGTERM, -signal.SIGABRT) if self.ray else (-signal.SIGTERM,)
            case "handles SIGTERM":
                return (7,)
            case "a thread ends the process":
                return (4,)
        return (0,)


def draw(seed: int, index: int) -> Script:
    """The script of a seed and an index, the same each time."""
    name = f"{FAMILY}:{seed}:{index}"
    rng = random.Random(name)
    source, ray = _one(rng, SOURCES), _one(rng, RAYS)
    collects = rng.choice(COLLECTORS) if rng.random() < 0.4 else ""
    launcher: Launcher = rng.choice(list(LAUNCHERS)) if rng.random() < 0.35 else ""
    ends, processes, place = _one(rng, ENDS), rng.choice((1, 2, 2, 3)) if launcher else 1, rng.choice(PLACES)
    workers = rng.choice((0, 1, 1, 2)) if source in TORCH else 0
    if source == "handle":  # it is rank 0 of 1, and each pass over it starts at the first row
        place, ends = "none", "breaks" if ends == "breaks and continues" else ends
        ray = "helpers" if ray == "beside" else ray
    if source in TORCH and ray:
        ray = "beside"
    if collects == "Ray's callback" and not ray:
        ray = "helpers" if source == "handle" else "beside"
    if processes > 1:
        ray = ray.removeprefix("own ")
        workers, collects = min(workers, 1), "" if workers or ray == "helpers" else collects
    if launcher == "sbatch":
        processes = 1
    at_step = 0 if rng.random() < 0.2 else rng.randrange(1, MOST_STEP // processes)
    if ends in ABRUPT:  # torch's worker does not see a death before its first batch
        at_step = max(at_step, workers)
    return Script(
        name=name,
        source=source,
        ray=ray,
        workers=workers,
        is_persistent=workers > 0 and rng.random() < 0.5,
        window_bytes=rng.choice((None, 2 << 20, 8 << 20, 8 << 20)),
        max_window_bytes=rng.choice((512 << 20, 16 << 20, 16 << 20, 1 << 20)),
        is_filtered=rng.random() < 0.6,
        is_transformed=rng.random() < 0.4,
        prefetch=rng.choice((1, 2, 2, 8)),
        starts=_one(rng, STARTS),
        collects=collects,
        ends=ends,
        epochs=rng.choice((1, 1, 2)),
        at_step=at_step,
        is_closed=rng.random() < 0.4,
        is_kept=rng.random() < 0.4,
        collate=rng.choice((*SENDABLE, *UNSENDABLE)) if rng.random() < (0.6 if workers else 0.3) else "",
        launcher=launcher,
        place=place,
        processes=processes,
    )


def _one(rng: random.Random, shares: dict[str, int]) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]
