"""Weights of a mixture that are known ahead and change in the course of a run."""

import dataclasses
import itertools
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

from raylance.arguments import check_integer, check_word
from raylance.descriptions import Setting
from raylance.errors import ConfigError
from raylance.orders.course import stages_between
from raylance.orders.dealing import Quotas, exact, shares_of

Curve = Literal["stages", "linear"]
_PARTS = 32  # of a line: the weights of neighbours differ by a 32nd of the whole change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule(Setting):
    """Weights of a mixture from some places of the run on, for `raylance.mix(schedule=…)`.

        raylance.mix(
            {"web": (web, 0.9), "code": (code, 0.1)},
            schedule=raylance.runs.Schedule(weights={100_000: {"web": 0.5, "code": 0.5}}, unit_rows=512),
        )

    Attributes:
        weights: By place, the weights of all datasets from there on, by name; 0 for a dataset that then hands out no
            row. Before the first place, those of `mix` hold. A place is a number of rows of all ranks together since
            the run began, over all epochs; those that `remainder="drop"` leaves out at the end of an epoch count, too.
        curve: "stages": weights hold up to the next place. "linear": they change along a line from place to place, the
            first of which is the beginning of the run; the line is followed in 32 equal parts.
        unit_rows: Number of rows that a unit of the places stands for: 1 for rows; the global batch size for steps.
    """

    weights: Mapping[int, Mapping[str, float]]
    curve: Curve = "stages"
    unit_rows: int = 1

    def __post_init__(self) -> None:
        check_word("Schedule(): curve", self.curve, ("stages", "linear"))
        check_integer("Schedule(): unit_rows", self.unit_rows, 1)
        if not isinstance(self.weights, Mapping) or not self.weights:
            raise ConfigError(
                f"Schedule(weights={self.weights!r}): give the weights by place, such as "
                '{100_000: {"web": 0.5, "code": 0.5}}.'
            )
        for place, weights in self.weights.items():
            check_integer("Schedule(): a place in weights", place, 1)
            if place * int(self.unit_rows) >= 2**63:
                raise ConfigError(f"Schedule(): {place} · {self.unit_rows} rows are more than positions can count.")
            if not isinstance(weights, Mapping):
                raise ConfigError(f"Schedule(): the weights from {place:,} on are {weights!r}; give a dict by name.")

    def quotas(self, first: Mapping[str, Any], row_costs: Sequence[Fraction] | None) -> tuple[tuple[int, Quotas], ...]:
        """Returns the quotas from each place on, in rows, ascending.

        Args:
            first: The weights at the beginning of the run, by name, in the order of the datasets.
            row_costs: The mean cost of a row of each dataset, if weights are shares of a cost; else None.

        Raises:
            ConfigError: If the weights of a place are not those of all datasets.
        """
        knots = [(0, shares(first, row_costs))]
        for place in sorted(self.weights):
            named = check_weights(f"Schedule(): from {place:,} on", self.weights[place], [*first])
            knots.append((int(place) * int(self.unit_rows), shares(named, row_costs)))
        return tuple(self._changes(knots))

    def _changes(self, knots: Sequence[tuple[int, Sequence[Fraction]]]) -> Iterator[tuple[int, Quotas]]:
        if self.curve == "linear":
            for before, after in itertools.pairwise(knots):
                yield from stages_between(before, after, _PARTS)
            knots = knots[-1:]
        else:
            knots = knots[1:]
        yield from ((rows, shares_of(weights)) for rows, weights in knots)


When = Literal["refuse", "next_epoch", "now"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Newest(Setting):
    """The newest version of a dataset, for `raylance.dataset(version=…)`; and how a run continues in the middle of an
    epoch if it has other rows than at its checkpoint, or another order: rows were appended, deleted or updated, or the
    filter, the split, the order or the seed is another one.

    The rest of the epoch is ordered as an epoch of its own, of the rows that are left. Each is found in the new version
    by its ID. So an updated row is a new one, unless the dataset has stable row IDs. Later epochs have all rows of the
    new version. If rows were deleted or updated, the versions since the begin of the epoch must still be there. Packs,
    windows, buckets and orders that draw rows refuse other rows in the middle of an epoch. A dataset of a mixture does
    all this in its own epochs. A proof needs all versions since the begin of the epoch that it proves.

    Attributes:
        when: "refuse": the run is refused, with both values. "next_epoch": of the epoch, those old rows come that
            are left. "now": all rows come that were not handed out in the epoch, new ones included.
        branch: The branch of the dataset; None for the one that its URI opens.
    """

    when: When = "refuse"
    branch: str | None = None

    def __post_init__(self) -> None:
        check_word("Newest(): when", self.when, ("refuse", "next_epoch", "now"))


def check_weights(call: str, weights: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns weights in the order of the datasets' names. Raises ConfigError if they are not the weights of all of
    them, or if one is not a number of at least 0, or all are 0.
    """
    if not isinstance(weights, Mapping) or {*weights} != {*names}:
        given = [*weights] if isinstance(weights, Mapping) else weights
        raise ConfigError(
            f"{call}: weights of {given!r}, and the mixture has {[*names]}. Give a weight for each of them, 0 for one "
            "that hands out no row from there on."
        )
    for name, weight in weights.items():
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        if not (is_number and 0 <= weight < math.inf):
            raise ConfigError(f"{call}: the weight of {name!r} is {weight!r}; give a number that is not negative.")
    if not any(weights.values()):
        raise ConfigError(f"{call}: all weights are 0, so there would be no row. Give a positive one.")
    return {name: weights[name] for name in names}


def shares(weights: Mapping[Any, Any], row_costs: Sequence[Fraction] | None) -> list[Fraction]:
    """Returns the share of the rows of each dataset; their sum is 1. With `row_costs`, the mean cost of a row of each,
    weights are shares of the cost. Weights are taken as they are written: 0.7 is 7 of 10.
    """
    found = [exact(weight) for weight in weights.values()]
    if row_costs is not None:
        found = [weight / cost for weight, cost in zip(found, row_costs, strict=True)]
    return [weight / sum(found) for weight in found]
