"""The check that the ranks of a process group agree on their rows and batches.

Before its first pass, each rank writes its terms to the store of the group. The last rank to do so compares all terms,
and writes the outcome for the others. A collective operation would hang if one rank did not take part.
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

_PATIENCE_S = 30.0  # longest wait of a rank for the others, which may still have other work to do
_SILENT_S = 10.0  # a longer wait logs a warning
_BY_HAND = " Loaders that are made by hand are compared by their names, in the order of their first passes: see name=."
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0  # between two requests to the store


def store_of(world_size: int) -> Any:
    """Returns the store of torch.distributed's default group if the group has all ranks of the run; else None."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != world_size:
        return None
    group: Any = dist.group.WORLD
    return group.get_group_store()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The settings with which a rank begins its first pass."""

    dp_rank: int
    dp_size: int
    same: Mapping[str, Any]  # values that must be equal on all ranks, JSON-able, by their names in errors
    has_called: bool  # whether `reshard` was called on this rank
    # Whether the ranks are compared in any case, because Ray Train assigned the dataset, or some ranks are peers
    is_arranged: bool


class Agreement:
    """Compares the terms with which the ranks begin one loader's first pass.

    Loaders that Ray Train assigned are compared by name; those made by hand, which may exist on only some ranks, by
    name and number of first passes, and only if one of the ranks called `reshard` or has peers.
    """

    def __init__(self, store: Any, context: ShardContext, name: str, terms: Terms) -> None:
        """Writes the terms of this rank to the store, which the ranks share; the last rank also writes the outcome. The
        ranks find each other's terms by the loader's name.
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
        """Waits for the outcome if this rank called `reshard`; then does as `look`."""
        with self._tolerating():
            if self._terms.has_called:
                self._await(patience_s)
        self.look(at_once=True)

    def look(self, *, at_once: bool = False) -> None:
        """Raises ConfigError if the ranks disagree. Asks for the outcome once a second at most, unless `at_once`."""
        if self._is_over or (time.monotonic() < self._looked_s + _LONGEST_PAUSE_S and not at_once):
            return
        self._looked_s, outcome = time.monotonic(), ""
        with self._tolerating():
            if self._store.check([f"{self._where}/outcome"]):
                self._is_over, outcome = True, str(json.loads(self._store.get(f"{self._where}/outcome")))
        if outcome:
            raise ConfigError(outcome)

    def _conclude(self) -> None:
        """Compares the terms of all ranks, and writes the outcome to the store."""
        found = {rank: Terms(**json.loads(self._store.get(f"{self._where}/{rank}"))) for rank in self._ranks}
        self._store.set(f"{self._where}/outcome", json.dumps(_compare(found, self._name)))

    def _await(self, patience_s: float) -> None:
        """Waits for the outcome, for `patience_s` at most."""
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
        """Ends the comparison, not the run, if the store fails; the store of torch's backend "fake" always fails."""
        try:
            yield
        except RuntimeError as error:
            self._is_over = True
            level = logging.WARNING if self._terms.has_called else logging.DEBUG
            line = str(error).split("\n")[0]
            logger.log(level, "what the ranks were given for %r is not compared: %s", self._name, line)


def compare_moves(store: Any, context: ShardContext, name: str, said: str, patience_s: float = _PATIENCE_S) -> None:
    """Compares what the ranks have changed between two steps. The changes of a loader, by its `name`, are numbered.

    Raises:
        ConfigError: If a rank has changed something else, or nothing within `patience_s`.
    """
    number = store.add(f"raylance/moves/{name}/count/{context.rank}", 1)
    where, begin, pause_s = f"raylance/moves/{name}/{number}", time.monotonic(), _FIRST_PAUSE_S
    ranks = range(context.world_size)
    store.set(f"{where}/{context.rank}", said)
    missing = [*ranks]
    while missing := [rank for rank in missing if not store.check([f"{where}/{rank}"])]:
        if time.monotonic() > begin + patience_s:
            raise ConfigError(
                f"reweight(): {name_ranks(missing)} of {len(ranks)} did not call it within {patience_s:.0f} s, so the "
                f"ranks would take rows of different weights: {said}. Call it on every rank before the same step."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    by_value: dict[str, list[int]] = {}
    for rank in ranks:
        by_value.setdefault(store.get(f"{where}/{rank}").decode(), []).append(rank)
    if len(by_value) > 1:
        given = "; ".join(f"{value} on {name_ranks(of)}" for value, of in by_value.items())
        raise ConfigError(
            f"reweight(): the ranks have different weights from here on: {given}. Their global batches would not be "
            "those of one mixture. Give all ranks the same weights, such as a mean over all ranks."
        )


def _compare(found: Mapping[int, Terms], name: str) -> str:
    """Returns a text about the first disagreement between the terms of the ranks; "" if they agree."""
    called = {rank: terms.has_called for rank, terms in found.items()}
    if not any(called.values()) and not any(terms.is_arranged for terms in found.values()):
        return ""  # hand-made loaders that do not belong together
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
                f"the ranks iterate over {name!r} with different settings: {given}. Their numbers of steps "
                "would differ, or rows would not be as planned. Give all ranks the same rows, seed, epoch and batches."
                f"{_BY_HAND}"
            )
    return ""
