"""What a schedule of the fault suite is and how it is drawn from its seed."""

import dataclasses
import random
from collections.abc import Sequence

from tests.faults import workloads

# What of the cluster a fault needs, and how often it is drawn.
PLAIN, NODES, STORE, MEMORY, DISK, S3 = "plain", "nodes", "small object store", "memory monitor", "small disk", "s3"
PHASES = ("start", "first batch", "mid-window", "report", "epoch's turn", "validation", "restart")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    share: int = 2  # how often it is drawn, against the others of its cluster
    clusters: Sequence[str] = (PLAIN,)
    phases: Sequence[str] = PHASES  # when it can be aimed at
    ends_driver: bool = False  # the driver, or all of the cluster, may end by it; then the job is submitted again
    most_s: float = 0.0  # 0 if it is done at once


ANY = (PLAIN, NODES, STORE, S3)
INSIDE = ("first batch", "mid-window", "report", "epoch's turn", "validation")
KINDS: dict[str, Kind] = {
    "kill decoder": Kind(4, ANY),
    "kill shard actor": Kind(4, ANY),
    "kill rank": Kind(4, ANY, INSIDE),
    "kill driver": Kind(2, (PLAIN,), PHASES, ends_driver=True),
    "kill decoder and shard actor": Kind(2, (PLAIN,)),
    "kill all helpers": Kind(3, (PLAIN,)),
    "stop decoder": Kind(2, (PLAIN,), PHASES, most_s=4),
    "stop shard actor": Kind(2, (PLAIN,), PHASES, most_s=4),
    "stop rank": Kind(2, (PLAIN,), INSIDE, most_s=12),
    "hang decoder": Kind(2, (PLAIN,), INSIDE),
    "hang shard actor": Kind(2, (PLAIN,), INSIDE),
    "data folder away": Kind(3, (PLAIN,), INSIDE, most_s=6),
    "version compacted and cleaned up": Kind(3, (PLAIN,), INSIDE),
    "head restarts": Kind(3, (PLAIN,), INSIDE, ends_driver=True),
    "node lost, another joins": Kind(20, (NODES,), INSIDE, ends_driver=True, most_s=6),
    "node preempted": Kind(12, (NODES,), ("mid-window", "epoch's turn", "validation"), ends_driver=True, most_s=8),
    "node joins": Kind(5, (NODES,), INSIDE),
    "object store full": Kind(12, (STORE,), INSIDE, most_s=4),
    "spill disk full": Kind(12, (STORE,), INSIDE, most_s=4),
    "memory monitor": Kind(3, (MEMORY,), INSIDE, ends_driver=True, most_s=2),
    "disk full at a checkpoint": Kind(3, (DISK,), ("report",), ends_driver=True, most_s=3),
    "storage: latency": Kind(3, (S3,), INSIDE, most_s=4),
    "storage: resets": Kind(3, (S3,), INSIDE, most_s=4),
    "storage: 500": Kind(3, (S3,), INSIDE, most_s=4),
    "storage: 503": Kind(3, (S3,), INSIDE, most_s=4),
    "storage: truncated bodies": Kind(3, (S3,), INSIDE, most_s=4),
    "storage: short bodies": Kind(3, (S3,), INSIDE, most_s=4),
    "storage: hangs": Kind(3, (S3,), INSIDE, most_s=6),
    "storage: object missing": Kind(3, (S3,), INSIDE, most_s=3),
}
MISBEHAVIOURS = ("raises", "exits", "breaks off", "takes no shard", "slow")
_CLUSTERS = {PLAIN: 8, NODES: 3, STORE: 3, MEMORY: 1, DISK: 1, S3: 5}


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that happens once in a run."""

    kind: str
    phase: str
    epoch: int
    step: int  # in mid-window
    delay_s: float  # after the phase begins
    place: int  # which of several processes is hit, modulo their number
    lasts_s: float  # if it does not last for good


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A run and all that happens to it."""

    name: str  # SEED:INDEX, from which `draw` makes it again
    workload: str
    cluster: str
    world: int
    decoders: int  # decoders that each rank has
    next_world: int  # ranks of a driver that is started again
    misbehaves: str  # what a rank does by itself at a step; "" for nothing
    at_step: int
    is_remote: bool  # the run's storage lies in the object store, too
    faults: tuple[Fault, ...]

    @property
    def may_end_driver(self) -> bool:
        """Whether a driver that ends with an error is expected, and started again."""
        kinds = [fault.kind for fault in self.faults]
        return any(KINDS[kind].ends_driver or (self.is_remote and kind.startswith("storage")) for kind in kinds)


def draw(seed: int, index: int) -> Schedule:
    name = f"{seed}:{index}"
    rng = random.Random(name)
    cluster = rng.choices(list(_CLUSTERS), list(_CLUSTERS.values()))[0]
    workload = rng.choice(workloads.NAMES)
    if cluster != PLAIN and workload == workloads.FATAL:  # its decoders end by themselves, which takes long enough
        workload = "images"
    is_peers = workload == "peers"
    world = 2 if is_peers else rng.choice((1, 2, 2, 2))
    decoders = rng.choice((0, 1, 1, 2)) if world < 3 else 1
    kinds = {name: kind for name, kind in KINDS.items() if cluster in kind.clusters}
    faults = []
    for _ in range(rng.choice((1, 2, 2, 3, 4)) if cluster in (PLAIN, S3) else rng.choice((1, 2))):
        kind = rng.choices(list(kinds), [each.share for each in kinds.values()])[0]
        if "decoder" in kind and not decoders:
            kind = "kill shard actor"
        phase = rng.choice(KINDS[kind].phases)
        fault = Fault(
            kind=kind,
            phase=phase,
            epoch=rng.randrange(workloads.EPOCHS - (phase == "epoch's turn")),
            step=rng.randrange(1, workloads.STEPS - 3),
            delay_s=round(rng.choice((0.0, rng.uniform(0, 0.1), rng.uniform(0, 1))), 3),
            place=rng.randrange(8),
            lasts_s=round(rng.uniform(0.5, KINDS[kind].most_s), 2) if KINDS[kind].most_s else 0.0,
        )
        if phase == "restart":  # there is one only after a rank was lost
            faults.append(dataclasses.replace(fault, kind="kill rank", phase="mid-window", delay_s=0.0))
            fault = dataclasses.replace(fault, delay_s=round(rng.uniform(0.2, 9), 2))
        faults.append(fault)
    made = Schedule(
        name=name,
        workload=workload,
        cluster=cluster,
        world=world,
        decoders=decoders,
        next_world=world if is_peers else rng.choice((1, 2, 3)),
        misbehaves=rng.choice(MISBEHAVIOURS) if cluster == PLAIN and rng.random() < 0.3 else "",
        at_step=rng.randrange(1, workloads.STEPS - 3),
        is_remote=cluster == S3 and rng.random() < 0.5,
        faults=tuple(faults),
    )
    # Drawn last, so that names of earlier schedules mean the same faults.
    later = rng.choices(("", *workloads.LATER), [len(workloads.NAMES), *[1] * len(workloads.LATER)])[0]
    return dataclasses.replace(made, workload=later) if later and not is_peers else made
