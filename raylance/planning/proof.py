"""The proof of a run compares the rows in its line of history with the selected rows or the plan.

It shows which rows were handed out, and not in which step, or with which bytes.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from raylance.errors import ConfigError, CoverageError, DatasetError
from raylance.orders.checking import select_rows
from raylance.orders.order import Epoch, Resolved, costs_in_words
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.digest import Digest
from raylance.planning.history import EpochLine
from raylance.planning.plan import Plan

_BLOCK_ROWS = 1 << 20
_CHEAPER = 50  # a row of the selection takes 0.02 µs, one of the plan 1 µs
_NAMED = 3  # most gaps that a text names
_NOT_KNOWN = (
    " (a record was lost, or not every rank saved its place where the run continues: outside of Ray Train, each of "
    "them calls state_dict() there)"
)
_NOT_COMPARED = "were counted, not compared with the selection"

Status = Literal["proven", "fault", "unproven", "counted"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochProof:
    """The proof of one epoch, or of several consecutive ones with the same result."""

    epoch: int  # the epoch, or the first of several
    epochs: int = 1  # number of epochs
    end: int  # position after the last row that was handed out, as far as is known
    rows: int  # handed out to all ranks together in each epoch, without padding
    padding: int  # handed out only to fill the last step
    left_out: int  # rows of the plan after `end`, which it leaves out or which are still to come; 0 if not computed
    # "fault" if other rows were handed out than planned; "unproven" if the records do not cover all positions, are in
    # doubt, or show that rows came again; "counted" if there is nothing to compare with, or it would take too long.
    status: Status
    text: str  # the result in words


class HasOffsets(Protocol):
    """The selected rows, as `raylance.source` keeps them."""

    @property
    def rows(self) -> int:
        """Number of selected rows."""

    def offsets(self, selected: Int64Array) -> Int64Array:
        """Converts rows of the selection into row offsets, which batches carry."""


class _TooManyError(Exception):
    """The digest needs more rows than may be computed."""


@dataclasses.dataclass(kw_only=True)
class Expected:
    """The rows that epochs are compared with. Each digest is computed at its first use, once for all ranks."""

    selection: HasOffsets  # the selected rows
    # If it is None, an epoch is compared only if its records reach as many positions as there are selected rows
    order: Resolved | None
    # How many more rows of the plan may be computed; None for any number. 50 rows of the selection, which take as long,
    # count as one.
    most_rows: int | None = None
    tokens: int | None = None  # number of tokens of the selection, if its rows are sequences of packed documents
    source: Any = None  # the `RowSource` of the selection; only needed if rows have changed in the course of the run
    _known: dict[tuple[int, int, int], Digest] = dataclasses.field(default_factory=dict, repr=False)
    _earlier: dict[str, HasOffsets] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def whole(self) -> Digest:
        """The digest of the selection; O(rows)."""
        self._spend(self.selection.rows // _CHEAPER)
        return self._sum(self.selection.offsets, 0, self.selection.rows)

    def planned(self, order: Resolved, epoch: int, low: int, high: int) -> Digest:
        """Returns the digest of an order's rows at positions [low, high) of an epoch."""
        key, asked = (epoch, low, high), order.epoch(epoch)
        if key not in self._known:
            self._spend(max(0, high - low))
            self._known[key] = self._sum(lambda positions: self.offsets(asked, positions), low, high)
        return self._known[key]

    def offsets(self, epoch: Epoch, positions: Int64Array) -> Int64Array:
        """Returns the row offsets at positions of an epoch, as batches had them: int64, (n,)."""
        if not epoch.known_from:
            return self.selection.offsets(select_rows(epoch, positions))
        found = np.empty_like(positions)
        for _, mine, offsets in self.by_segment(epoch, positions):
            found[mine] = offsets
        return found

    def by_segment(
        self, epoch: Epoch, positions: Int64Array
    ) -> Iterator[tuple[Mapping[str, Any] | None, BoolArray, Int64Array]]:
        """Yields the row offsets at positions of an epoch for each segment of the run that has some of them: the fields
        of a state that say which rows were selected in it, None for the last one; which positions, bool, (n,); and
        their offsets in the version of the segment.
        """
        is_known = np.ones(len(positions), dtype=np.bool_)
        for before, mine, rows in epoch.earlier(positions):
            is_known &= ~mine
            key = json.dumps(before, sort_keys=True)
            if key not in self._earlier:
                self._earlier[key] = self.source.selection_of(before)
            yield before, mine, self._earlier[key].offsets(rows)
        yield None, is_known, self.selection.offsets(select_rows(epoch, positions[is_known]))

    def cost(self, epoch: int, end: int) -> str:
        """Returns the cost of the rows at the positions of an epoch before `end`, or the tokens of all sequences, in
        words; "" if it is not known, or would take long.
        """
        order = self.order
        if order is None or not (order.cost_names or self.tokens is not None):
            return ""
        if order.epoch(epoch).known_from:
            return ""
        has_all = epoch >= order.alike_from and not order.repeats
        is_whole = has_all and end >= order.epoch(epoch).epoch_rows
        if not order.cost_names:
            return f"; they have {self.tokens:,} tokens" if is_whole else ""
        try:
            self._spend(end // _CHEAPER if is_whole else end)
        except _TooManyError:
            return ""
        asked, cost = order.epoch(epoch), np.zeros(len(order.cost_names), dtype=np.int64)
        for at in range(0, end, _BLOCK_ROWS):
            rows = np.arange(at, min(at + _BLOCK_ROWS, end), dtype=np.int64)
            cost += order.costs(rows if is_whole else select_rows(asked, rows)).sum(axis=0, dtype=np.int64)
        return f"; they cost {costs_in_words(dict(zip(order.cost_names, cost.tolist(), strict=True)))}"

    def _sum(self, offsets_at: Callable[[Int64Array], Int64Array], low: int, high: int) -> Digest:
        total = Digest()
        for at in range(low, high, _BLOCK_ROWS):
            total += Digest.of(offsets_at(np.arange(at, min(at + _BLOCK_ROWS, high), dtype=np.int64)))
        return total

    def _spend(self, rows: int) -> None:
        if self.most_rows is not None:
            if rows > self.most_rows:
                raise _TooManyError
            self.most_rows -= rows


def prove(lines: Sequence[EpochLine], expected_of: Callable[[str], Expected | str]) -> list[EpochProof]:
    """Compares each epoch of a line of history with the selection or, if rows repeat, with the plan; only the last
    epochs if `Expected.most_rows` allows no more. `expected_of` returns what to compare a plan's epochs with, or why
    not to.
    """
    proofs: list[EpochProof] = []
    for line in reversed(lines):
        proof, after = _prove(line, expected_of), proofs[-1] if proofs else None
        if after and after == dataclasses.replace(proof, epoch=line.epoch + line.epochs, epochs=after.epochs):
            proof = dataclasses.replace(proof, epochs=proof.epochs + after.epochs)
            proofs.pop()
        proofs.append(proof)
    return proofs[::-1]


def _prove(line: EpochLine, expected_of: Callable[[str], Expected | str]) -> EpochProof:
    try:
        status, left_out, text = _judge(line, expected_of)
    except _TooManyError:
        status, left_out = "counted", 0
        text = f"{_rows(line)} {_NOT_COMPARED}: that takes long, and prove_run does it"
    except (ConfigError, DatasetError) as error:  # a version of earlier rows is gone
        status, left_out, text = "counted", 0, f"{_rows(line)} {_NOT_COMPARED}: {error}"
    if status == "proven" and line.only_lacks_the_end:
        status, text = "unproven", f"{text}; the epoch is not proven after position {line.end:,}"
    if status != "fault" and line.came_again:
        if status == "proven":
            text = f"{_rows(line)} are as planned, but were not all that was handed out"
        many = f"{line.besides:,} rows" if line.besides else "rows"
        text += f"; {many} more were handed out: by set_epoch or another loader, without a state that was restored"
        status = "unproven"
    return EpochProof(
        epoch=line.epoch,
        epochs=line.epochs,
        end=line.end,
        rows=line.digest.rows + line.besides,
        padding=line.digest.padding,
        left_out=left_out,
        status=status,
        text=text,
    )


def _judge(line: EpochLine, expected_of: Callable[[str], Expected | str]) -> tuple[Status, int, str]:
    """Returns the status, left-out rows and text of one epoch. Ignores a gap at the end, and rows that came again."""
    rows = _rows(line)
    if line.doubt:
        return "unproven", 0, f"{rows} are known; the epoch is not proven: {line.doubt}"
    if not line.spans:
        return "unproven", 0, "not proven at all: no records of all its ranks say which rows were handed out"
    if line.gaps and not line.only_lacks_the_end:
        gaps = f"the epoch is not proven {_words_of_gaps(line)}"
        return "unproven", 0, f"{rows} are known; {gaps}{_NOT_KNOWN * (line.gaps[0][1] is not None)}"
    expected = expected_of(line.plan)
    if isinstance(expected, str):
        return "counted", 0, f"{rows} {_NOT_COMPARED}: {expected}"
    return _compare(line, expected)


def _compare(line: EpochLine, expected: Expected) -> tuple[Status, int, str]:
    """Compares the rows that an epoch's records hold with the planned ones; returns the same as `_judge`."""
    rows, order = _rows(line), expected.order
    has_changed = order is not None and order.epoch(line.epoch).known_from > 0
    planned = expected.selection.rows if order is None else order.epoch(line.epoch).epoch_rows
    left_out, repeats = max(0, planned - line.end), order is not None and order.repeats
    # Those after the last span are a part of `left_out`.
    jumped = [(low, high) for low, high in line.passed_over if high is not None and high <= line.end]
    inside = jumped + [(span.low, span.high) for span in line.spans if span.is_skipped]
    passed = sum(high - low for low, high in inside)
    if order is None and (left_out or passed):
        unknown = "the plan leaves rows out, and no record holds the code of its order"
        return "counted", left_out, f"{rows} {_NOT_COMPARED}: {unknown}"
    handed = line.digest
    if order is not None:
        handed = sum((expected.planned(order, line.epoch, low, high) for low, high in inside), handed)
    if _differs(line, expected, handed, left_out):
        more = handed.rows + left_out - planned
        many = f", {abs(more):,} too {'many' if more > 0 else 'few'}" * (more != 0)
        text = f"{rows} were handed out{many}, and they are not each {'planned' if repeats else 'selected'} row once: "
        return "fault", left_out, text + "some were repeated or never selected, others are missing"
    if is_left := len(line.passed_over) > len(jumped):  # for a later epoch
        passed += left_out
    each = "every draw of the plan" if repeats else "every selected row"
    each = "every row of the plan, whose rows have changed in the epoch," if not repeats and has_changed else each
    text = f"{rows} were handed out: {each} exactly once"
    if line.has_ended:
        text += f", but for {left_out:,} that the plan leaves out" * (left_out > 0)
        text += f"; {line.digest.padding:,} came again as padding" * (line.digest.padding > 0 and not repeats)
    elif not is_left:
        text = f"{text if repeats else f'{rows} each came exactly once'} so far"
    text += f", but for {passed:,} that were passed over" * (passed > 0)
    # Where each epoch leaves out other rows, its cost is another one, and epochs could not share a text.
    is_alike = not passed and not (line.has_ended and left_out)
    if is_alike:
        text += expected.cost(line.epoch, min(line.end, planned))
    if expected.tokens is not None:
        text += ", counted as sequences by their numbers, not by their documents"
    return "proven", left_out, text


def _differs(line: EpochLine, expected: Expected, handed: Digest, left_out: int) -> bool:
    """Whether other rows were handed out than planned. They are compared with the plan if the order repeats rows, if it
    has changed since, or if that takes fewer rows; else with the selection, less the rows that the plan leaves out.
    """
    order = expected.order
    if order is None:
        return handed.differs(expected.whole)
    rows = order.epoch(line.epoch).epoch_rows
    end = min(line.end, rows)
    is_plain = line.epoch >= order.alike_from and rows == expected.selection.rows
    if order.repeats or not is_plain or (line.end < left_out and not order.is_custom):
        return handed.differs(expected.planned(order, line.epoch, 0, end))
    return (handed + expected.planned(order, line.epoch, end, rows)).differs(expected.whole)


def _rows(line: EpochLine) -> str:
    return f"{line.digest.rows:,} rows" + f" up to position {line.end:,}" * (not line.has_ended)


def _words_of_gaps(line: EpochLine) -> str:
    words = []
    for low, high in line.gaps[:_NAMED]:
        if high is None or (low == line.end and high == line.reach):
            words.append(f"after position {low:,}")
        else:
            words.append(f"before position {high:,}" if not low else f"between positions {low:,} and {high:,}")
    return ", ".join(words) + ", …" * (len(line.gaps) > _NAMED)


def check_permutation(plan: Plan, selection: HasOffsets, epoch: int, end: int, handed: Digest) -> None:
    """Compares an epoch of a custom order, which rank 0 of 1 was handed up to position `end`, with the selection.
    Raises CoverageError if some rows came twice and others never.
    """
    expected = Expected(selection=selection, order=plan.order)
    left = expected.planned(plan.order, epoch, end, plan.rows_of(epoch))
    if not (handed + left).differs(expected.whole):
        return
    name = type(plan.order.settings).__name__
    raise CoverageError(
        f"the order {name} is not a permutation: of its {handed.rows:,} rows in epoch {epoch} some came twice, and "
        f"others of the {plan.rows:,} selected ones never. The model was trained on other data than asked for. Make "
        f"rows_of() a permutation for every epoch, or set repeats = True in {name} to allow this; "
        f"raylance.testing.check_order({name}(…)) tries it."
    )
