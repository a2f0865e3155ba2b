"""Deals positions to the datasets of a mixture by their shares, as evenly as these allow."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from raylance.orders.permutation import Int64Array

_MOST_SHARES = 2**31  # so that the product of two shares is an int64
ROW = 2**32
"""A row in debts."""

Quotas = tuple[int, ...]
"""For each component, its share of the positions, in parts of the sum of all; 0 for none."""


def exact(weight: Any) -> Fraction:
    """Returns a weight as it is written, also of 32 bits: 0.7, not the nearest float."""
    if isinstance(weight, numbers.Rational):
        return Fraction(int(weight.numerator), int(weight.denominator))
    return Fraction(str(weight if isinstance(weight, np.floating) else float(weight)))


def shares_of(weights: Sequence[Fraction]) -> Quotas:
    """Returns weights as whole numbers whose sum is at most 2**31: at least 1, or 0 for 0. If no such numbers are
    exact, each is off by one part of the sum at most.
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    divisor, total = math.gcd(*whole), sum(whole)
    if total // divisor <= _MOST_SHARES:
        return tuple(number // divisor for number in whole)
    return tuple(max(1, number * (_MOST_SHARES - len(whole)) // total) if number else 0 for number in whole)


class Dealer(Protocol):
    """Deals positions to components by their quotas, from position 0 on."""

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Returns the component of each position, and how many earlier positions belong to the same component."""

    def counts(self, position: int) -> list[int]:
        """Returns how many of the first positions belong to each component."""

    def position(self, component: int, index: int) -> int:
        """Returns the position of a component's row with this index."""


class _Tree:
    """Deals positions to components by a binary tree: of the first p positions of a node, its left half gets
    floor(p * left / total + 1/2), and its right half the others.

    Such a split is a Sturmian word, the most even sequence of two letters. So at any position each component has its
    share, give or take a few rows, and neither size nor cost depends on the weights. Where earlier positions were dealt
    otherwise, what the left half is owed of them is added to the 1/2.
    """

    def __init__(self, quotas: Quotas, debts: tuple[int, ...] | None = None, unit: int = 1) -> None:
        """Takes the quotas, and what each component is owed of earlier positions, in parts of a position's `unit`."""
        # By node, the root first: quota of the left half, quota of both, what is added to the left one, and the nodes
        # of the halves. The node of a component has itself in place of halves.
        nodes: list[tuple[int, int, int, int, int]] = []
        owners: list[int] = []
        self._paths: list[list[tuple[int, int, int, bool]]] = [[] for _ in quotas]  # (…, is left), the root last

        def add(low: int, high: int) -> int:
            number, total, middle = len(nodes), sum(quotas[low:high]), (low + high) // 2
            nodes.append((total, total, 0, number, number))
            owners.append(low)
            if high - low > 1:
                left = sum(quotas[low:middle])
                phase = total // 2
                if debts is not None:
                    of_left, of_both = sum(debts[low:middle]), sum(debts[low:high])
                    owed = Fraction(of_left * total - of_both * left, total * unit)
                    finer = _MOST_SHARES // total
                    left, total = left * finer, total * finer
                    phase = min(max(0, math.floor(total * (Fraction(1, 2) + owed))), total - 1)
                nodes[number] = left, total, phase, add(low, middle), add(middle, high)
                for index in range(low, high):
                    self._paths[index].append((left, total, phase, index < middle))
            return number

        add(0, len(quotas))
        self._nodes, self._owners = np.array(nodes, dtype=np.int64).T, np.array(owners, dtype=np.int64)
        self._depth = max(map(len, self._paths))

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Dealer.place`."""
        node, place = np.zeros(len(positions), dtype=np.int64), positions
        for _ in range(self._depth):
            left, total, phase, left_node, right_node = self._nodes[:, node]
            turn, rest = np.divmod(place, total)
            before, over = np.divmod(rest * left + phase, total)
            before += turn * left
            is_left = over + left >= total
            node, place = np.where(is_left, left_node, right_node), np.where(is_left, before, place - before)
        return self._owners[node], place

    def counts(self, position: int) -> list[int]:
        """See `Dealer.counts`."""
        found = []
        for path in self._paths:
            count = position
            for left, total, phase, is_left in reversed(path):
                first = (count * left + phase) // total
                count = first if is_left else count - first
            found.append(count)
        return found

    def position(self, component: int, index: int) -> int:
        """See `Dealer.position`."""
        for left, total, phase, is_left in self._paths[component]:
            if is_left:
                index = -((phase - (index + 1) * total) // left) - 1  # before its next one, the left half has index + 1
            else:
                index = (index * total + phase) // (total - left)
        return index


class _Pattern:
    """Deals positions by a repeated pattern, which has the quotas. Checkpoints of raylance 0.10 continue by it."""

    def __init__(self, quotas: Quotas) -> None:
        due = np.concatenate([(np.arange(quota) + 0.5) / quota for quota in quotas])
        owner = np.repeat(np.arange(len(quotas), dtype=np.int64), quotas)
        self._pattern = owner[np.lexsort((owner, due))]
        self._places = np.argsort(self._pattern, kind="stable")  # the places in a repetition, sorted by component
        self._rank = np.empty_like(self._pattern)
        self._rank[self._places] = np.concatenate([np.arange(quota) for quota in quotas])
        self._quotas, self._size = np.array(quotas, dtype=np.int64), len(owner)

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Dealer.place`."""
        turn, place = np.divmod(positions, self._size)
        which = self._pattern[place]
        return which, turn * self._quotas[which] + self._rank[place]

    def counts(self, position: int) -> list[int]:
        """See `Dealer.counts`."""
        turn, rest = divmod(position, self._size)
        part = np.bincount(self._pattern[:rest], minlength=len(self._quotas))
        return [turn * quota + count for quota, count in zip(self._quotas.tolist(), part.tolist(), strict=True)]

    def position(self, component: int, index: int) -> int:
        """See `Dealer.position`."""
        turn, place = divmod(index, int(self._quotas[component]))
        first = int(self._quotas[:component].sum())
        return turn * self._size + int(self._places[first + place])


class _Some:
    """Deals positions to those components that have a quota."""

    def __init__(self, quotas: Quotas, debts: tuple[int, ...] | None, unit: int) -> None:
        self._which = np.flatnonzero(np.array(quotas)).astype(np.int64)
        self._all, own = len(quotas), tuple(quota for quota in quotas if quota)
        owed = None if debts is None else tuple(debts[index] for index in self._which.tolist())
        self._dealer = _Tree(own, owed, unit)

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Dealer.place`."""
        which, index = self._dealer.place(positions)
        return self._which[which], index

    def counts(self, position: int) -> list[int]:
        """See `Dealer.counts`."""
        found = [0] * self._all
        for which, count in zip(self._which.tolist(), self._dealer.counts(position), strict=True):
            found[which] = count
        return found

    def position(self, component: int, index: int) -> int:
        """See `Dealer.position`."""
        return self._dealer.position(int(np.searchsorted(self._which, component)), index)


@dataclasses.dataclass(frozen=True, slots=True)
class _Turns:
    """Deals positions in turns of some rows of one component, as another dealer deals single ones."""

    dealer: Dealer
    rows: int  # number of positions in a turn

    def place(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """See `Dealer.place`."""
        turn, within = np.divmod(positions, self.rows)
        which, earlier = self.dealer.place(turn)
        return which, earlier * self.rows + within

    def counts(self, position: int) -> list[int]:
        """See `Dealer.counts`."""
        turn, within = divmod(position, self.rows)
        found = [count * self.rows for count in self.dealer.counts(turn)]
        found[int(self.dealer.place(np.array([turn]))[0][0])] += within
        return found

    def position(self, component: int, index: int) -> int:
        """See `Dealer.position`."""
        turn, within = divmod(index, self.rows)
        return self.dealer.position(component, turn) * self.rows + within


@functools.lru_cache(maxsize=64)
def dealer_of(spread: str, quotas: Quotas, turn_rows: int = 1, debts: tuple[int, ...] | None = None) -> Dealer:
    """Returns a dealer for components that are owed `debts` of earlier positions, in parts of 2**32 of a row."""
    unit = ROW * turn_rows
    if not all(quotas):
        found: Dealer = _Some(quotas, debts, unit)
    else:
        found = _Tree(quotas, debts, unit) if spread == "tree" else _Pattern(quotas)
    return found if turn_rows == 1 else _Turns(found, turn_rows)
