"""Owns whether the ranks of a process group agree on who gets which rows, and in which batches; never says who should.

Each rank leaves what it has in the store of the group before its first pass. The last one that comes compares all, and
leaves the outcome for the others: some requests of each rank, and no collective operation, in which all would hang if
one of them left it out.
"""

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed

from raylance.errors import ConfigError
from raylance.planning.shard_context import ShardContext, check_pairs, name_ranks

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0  # that a rank waits for the others; they may have other work to do before
_SILENT_S = 10.0  # of waiting, before it is logged
_BY_HAND = " Loaders that are made by hand are compared by their names, in the order of their first passes: see name=."
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # between two looks into the store


def store_of(world_size: int) -> Any:
    """The store of torch.distributed's default group, where it runs over the ranks of a run; else None."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != world_size:
        return None
    group: Any = dist.group.WORLD
    return group.get_group_store()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a rank begins its first pass with.

    Attributes:
        dp_rank, dp_size: Data-parallel rank and size.
        same: What all ranks have to have alike, by its name in errors: values of JSON.
        has_called: Whether `reshard` was called on this rank.
        is_arranged: Whether all ranks have to be in this place: they are Ray Train's, or some of them are peers.
    """

    dp_rank: int
    dp_size: int
    same: Mapping[str, Any]
    has_called: bool
    is_arranged: bool


class Agreement:
    """Compares what the ranks begin one loader's first pass with.

    Loaders that Ray Train assigned are compared by name. Of those that were made by hand, which may be used on some
    ranks alone, the ranks' first passes are compared in their order, if one of the ranks called `reshard` or has peers.
    """

    def __init__(self, store: Any, context: ShardContext, name: str, terms: Terms) -> None:
        """Leaves the terms of this rank.

        Args:
            store: Of torch.distributed, shared by the ranks.
            context: Which rank this is.
            name: The dataset's name in the run.
            terms: What this rank begins with.
        """
        self._store, self._name, self._terms, self._ranks = store, name, terms, range(context.world_size)
        self._where = f"raylance/reshard/{name}/assigned"
        self._is_over, self._looked_s = False, 0.0
        with self._tolerating():
            if context.assignment is None:
                number = store.add(f"raylance/reshard/{name}/by hand/count/{context.rank}", 1)
                self._where = f"raylance/reshard/{name}/by hand/{number}"
            store.set(f"{self._where}/{context.rank}", json.dumps(dataclasses.asdict(terms)))
            if store.add(f"{self._where}/count", 1) == context.world_size:
                self._conclude()

    def wait(self, patience_s: float = _PATIENCE_S) -> None:
        """Waits for the others, if `reshard` was called here: a rank that did not call it does not wait.

        Raises:
            ConfigError: If the ranks disagree.
        """
        with self._tolerating():
            if self._terms.has_called:
                self._await(patience_s)
        self.look(at_once=True)

    def look(self, *, at_once: bool = False) -> None:
        """Looks whether the ranks disagree, at most once a second unless `at_once`.

        Raises:
            ConfigError: If they do.
        """
        if self._is_over or (time.monotonic() < self._looked_s + _LONGEST_PAUSE_S and not at_once):
            return
        self._looked_s, outcome = time.monotonic(), ""
        with self._tolerating():
            if self._store.check([f"{self._where}/outcome"]):
                self._is_over, outcome = True, str(json.loads(self._store.get(f"{self._where}/outcome")))
        if outcome:
            raise ConfigError(outcome)

    def _conclude(self) -> None:
        """Compares the ranks, and leaves the outcome."""
        found = {rank: Terms(**json.loads(self._store.get(f"{self._where}/{rank}"))) for rank in self._ranks}
        self._store.set(f"{self._where}/outcome", json.dumps(_compare(found, self._name)))

    def _await(self, patience_s: float) -> None:
        """Waits for the outcome, as long as the patience lasts."""
        begin, pause_s, is_logged = time.monotonic(), _FIRST_PAUSE_S, False
        while not self._store.check([f"{self._where}/outcome"]):
            waited_s = time.monotonic() - begin
            if waited_s > patience_s:
                return
            if waited_s > _SILENT_S and not is_logged:
                is_logged = True
                until = time.strftime("%H:%M:%S", time.localtime(time.time() + patience_s - waited_s))
                absent = [rank for rank in self._ranks if not self._store.check([f"{self._where}/{rank}"])]
                logger.warning(
                    "reshard() of %r: %s did not begin a pass yet. This rank waits until %s, and then continues: "
                    "whether all of them called reshard() is not known before",
                    self._name,
                    name_ranks(absent),
                    until,
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextlib.contextmanager
    def _tolerating(self) -> Iterator[None]:
        """Ends the comparison, and not the run, if the store cannot do it, such as that of torch's backend "fake"."""
        try:
            yield
        except RuntimeError as error:
            self._is_over = True
            level = logging.WARNING if self._terms.has_called else logging.DEBUG
            line = str(error).split("\n")[0]
            logger.log(level, "what the ranks were given for %r is not compared: %s", self._name, line)


def _compare(found: Mapping[int, Terms], name: str) -> str:
    """What does not fit together in what the ranks left; "" if all does."""
    called = {rank: terms.has_called for rank, terms in found.items()}
    if not any(called.values()) and not any(terms.is_arranged for terms in found.values()):
        return ""  # made by hand, each for itself
    if len({*called.values()}) > 1:
        return (
            f"{name_ranks([rank for rank in found if not called[rank]])} of {len(found)} did not call reshard() for "
            f"{name!r}, and the others did: some rows would come twice, and others never. Call it on every rank, "
            f"before the first batch.{_BY_HAND}"
        )
    try:
        check_pairs([(terms.dp_rank, terms.dp_size) for terms in found.values()], f"reshard() of {name!r}")
    except ConfigError as error:
        return str(error)
    for what in found[0].same:
        by_value: dict[str, list[int]] = {}
        for rank, terms in found.items():
            by_value.setdefault(str(terms.same.get(what)), []).append(rank)
        if len(by_value) > 1:
            given = "; ".join(f"{what}={value} on {name_ranks(ranks)}" for value, ranks in by_value.items())
            return (
                f"the ranks begin to iterate over {name!r} unlike: {given}. They would make unlike numbers of steps, "
                f"or get other rows than planned. Give all ranks the same rows, seed, epoch and batches.{_BY_HAND}"
            )
    return ""
