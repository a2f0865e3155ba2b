"""The audit of one epoch: it counts and compares delivered rows."""

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from raylance.api.dataset import Dataset, opened_of
from raylance.api.loader import RankLoader
from raylance.arguments import check_integer
from raylance.audit.selected import Part, Step, Tally, parts_of
from raylance.columns import COMPONENT, ROW_OFFSET, VALID, split_offsets
from raylance.errors import ConfigError, StateError
from raylance.orders.mixture import MixOrder
from raylance.orders.permutation import BoolArray, Int64Array
from raylance.planning.cursor import Cursor
from raylance.planning.delivery_spec import make_plan
from raylance.planning.plan import Plan
from raylance.planning.shards import read_shards
from raylance.planning.state import parse_state
from raylance.planning.step_size import Budget, CostLimit, Size, budget_of, read_size
from raylance.settings import Options

_BLOCK = 1 << 20
_NAMED = 8  # offsets that a fault names, at most

Ranks = Sequence[Step | None]
"""The rows of each rank in one step; None for a rank whose steps have ended."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The result of an audit: the delivered rows, compared with the steps of the plan and with the selected rows.

    Every row that Lance selects is expected once in an epoch. In a mixture, an epoch may read a dataset several times.
    The last time may be only a part of it. After n whole times and such a part, each row is expected n or n + 1 times.
    If an order draws with replacement, a row is expected as often as it was drawn; and so it is after the rows of a
    mixture have changed in the epoch.

    Attributes:
        counts: Numbers of rows by name. "expected": rows of an epoch. "delivered": rows handed out, without padding.
            "padding": rows that fill up the last step. "masked": delivered rows that could not be decoded. "aside":
            rows that are not audited, because they come before the audit's position or are left out by
            remainder="drop". "missing": rows that were delivered less often than expected. "twice": rows that were
            delivered more often.
            "foreign": rows that were delivered but not selected.
        steps: Number of steps that each rank was handed.
        faults: A line for each kind of fault.
        verdict: The result in one line.
    """

    counts: dict[str, int]
    steps: list[int]
    faults: list[str]
    verdict: str

    @property
    def ok(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {count:,}" for name, count in self.counts.items())
        return f"{numbers}\nsteps of the ranks: {' '.join(f'{steps:,}' for steps in self.steps)}\n{self.verdict}"


class EpochAudit:
    """Audits an epoch, or its rest from a position on: counts rows, and shows the rows of a step.

    Attributes:
        plan: The plan of the epoch.
        epoch: The number of the epoch.
        position: Position at which the audit begins.
    """

    def __init__(
        self,
        data: Dataset,
        *,
        global_batch_size: int | None = None,
        budget: Budget | None = None,
        world_size: int | None = None,
        epoch: int | None = None,
        position: int = 0,
        state: Mapping[str, Any] | None = None,
        **older: Any,
    ) -> None:
        """Plans the epoch; reads no rows.

        Args:
            data: A dataset or a mixture.
            global_batch_size: Number of rows of a step over all ranks.
            budget: Cost of a step, in place of `global_batch_size`.
            world_size: Number of data-parallel ranks; 1 by default.
            epoch: The epoch; 0 by default.
            position: Position in the epoch at which to begin; 0 begins where rows have changed last in the epoch.
            state: The content of a `raylance_state.json` of the run. It gives the sizes of the order, and the values of
                size, `world_size` and `epoch` if they are left out, but not `position`. The dataset may lie elsewhere
                now, and may deliver other columns.
            **older: Arguments that `budget` has replaced.

        Raises:
            ConfigError: If a number is missing or out of range.
            StateError: If the state belongs to other rows or another order.
        """
        self._data, read_spec, delivery_spec = data, opened_of(data).read, opened_of(data).delivery
        cursor = Cursor(read_spec.origin, delivery_spec, read_spec.source)
        names = ("data", "global_batch_size", "budget", "world_size", "epoch", "position", "state")
        step = read_size(
            "EpochAudit()", 1, global_batch_size=global_batch_size, budget=budget, others=older, known=names
        )
        size: Size | None = None if step is None else step.size
        given = {"dp_size": world_size, "epoch": epoch}
        if state is not None:
            parse_state(state)
            now = cursor.state(None, 1)
            anyhow = {name: getattr(now, name) for name in ("uri", "columns", "decode", "transform", "codecs")}
            content = {**state, **anyhow}
            try:
                back = Cursor(read_spec.origin, delivery_spec, read_spec.source, looks_back=True)
                saved, delivery_spec = back.load(content), back.delivery_spec
            except StateError:  # versions of rows before the position may be gone
                saved, delivery_spec = cursor.load(content), cursor.delivery_spec
            given = {name: getattr(saved, name) if value is None else value for name, value in given.items()}
            size = saved.size if size is None else size
        if not isinstance(size, CostLimit):
            size = check_integer("global_batch_size", size, 1)
        world = check_integer("world_size", 1 if given["dp_size"] is None else given["dp_size"], 1)
        self.epoch = check_integer("epoch", given["epoch"] or 0, 0)
        self.position = check_integer("position", position, 0)
        self.plan: Plan = make_plan(delivery_spec, size=size, dp_size=world, reader_bytes=Options().reader_bytes)
        order, rows = self.plan.order, self.plan.rows_of(self.epoch)
        self._has_changed = self.epoch < order.alike_from and not order.repeats
        self._known_from = known = order.epoch(self.epoch).known_from
        self.position = self.position or known
        if self.position < known:
            raise ConfigError(
                f"position={position}: rows of the run have changed at position {known} of epoch {self.epoch}, and may "
                "be gone. Audit what lies before with a checkpoint of before, and with the version that it names."
            )
        if self.position >= rows:
            raise ConfigError(
                f"position={position}: the epoch has {rows:,} rows. There is nothing to audit. Begin "
                "at a position of it, counted from 0."
            )
        self._delivery_spec, self._parts = delivery_spec, parts_of(data)
        self._selection = read_spec.source.load_selection()
        count = self.plan.steps(self.epoch, self.position)
        each = self.plan.global_batch_size
        self._starts: Sequence[int] = range(self.position, self.position + count * each, each)
        if isinstance(size, CostLimit):
            self._starts = list(self.plan.starts(self.epoch, self.position, count))
        self._end = self.plan.after(self.epoch, self.position, count)

    def completed_shards(self, state: Mapping[str, Any]) -> Int64Array:
        """Returns the shards that are complete at the position of a state, and checks the list of shards in the state.

        Args:
            state: The content of a `raylance_state.json` of the run.

        Returns:
            IDs of all complete shards, int64, ascending, shape (k,), computed from the order, the seed, and the state's
            epoch and position. There may be more than the state lists: to stay short, the list in a state may leave out
            shards, or be missing.

        Raises:
            StateError: If the state is damaged, or lists a shard that still has rows to come.
        """
        saved = parse_state(state)
        epoch = self.plan.order.epoch(saved.epoch)
        done = epoch.completed_shards(saved.position)
        listed = read_shards(saved.completed_shards, epoch)
        if listed is not None and (listed & ~done).any():
            raise StateError(
                f"the state lists shards {np.flatnonzero(listed & ~done)[:5]} as complete, and they have rows to come "
                f"at position {saved.position} of epoch {saved.epoch}. The list cannot be used. Use an "
                "earlier checkpoint."
            )
        return np.flatnonzero(done)

    def by_plan(self) -> Iterator[Ranks]:
        """Yields, for each step, a sequence with an entry for each rank: the rank's rows of this step, as a
        `raylance.audit.selected.Step`. They are computed from the items of the plan; nothing is read. An entry is None
        if the steps of a rank ended before those of another rank, which is a fault.
        """
        return itertools.zip_longest(*(self._replay(rank) for rank in range(self.plan.dp_size)))

    def by_stream(self, **options: Any) -> Iterator[Ranks]:
        """Yields, for each step, a sequence with the rows that the loader of each rank hands out, in the form of
        `by_plan`. The loaders use Ray actors if Ray is running, else threads, unless `runtime` is given.

        Args:
            **options: Fields of `raylance.Options`, such as `num_decoders=2`.

        Raises:
            CoverageError, BadRowError, PlacementError, HelperError: See `RankLoader.iter_torch_batches`.
        """
        world = self.plan.dp_size
        with contextlib.ExitStack() as stack:
            loaders = [self._data.loader(rank=rank, world_size=world, **options) for rank in range(world)]
            yield from itertools.zip_longest(*(self._stream(stack.enter_context(loader)) for loader in loaders))

    def count(self, delivered: Iterable[Ranks] | None = None) -> AuditReport:
        """Counts the delivered rows, and compares them with the plan and with the rows that Lance selects.

        Args:
            delivered: The rows of each rank in each step, in the form that `by_plan` yields: from `by_stream` or from a
                training loop. None counts the rows of `by_plan`.
        """
        plan, tally = self.plan, Tally([self._of_epoch(part) for part in self._parts])
        counts, steps, wrong = Counter(delivered=0, padding=0, masked=0), [0] * plan.dp_size, []
        for number, ranks in enumerate(self.by_plan() if delivered is None else delivered):
            parts = [step for step in ranks if step is not None]
            rows, real = np.concatenate([part.rows for part in parts]), np.concatenate([part.real for part in parts])
            steps = [done + (step is not None) for done, step in zip(steps, ranks, strict=True)]
            tally.add(rows[real])
            masked = sum(part.masked for part in parts)
            counts.update(delivered=int(real.sum()), padding=int((~real).sum()), masked=masked)
            due = self._of_step(number) if number < len(self._starts) else None
            if due is None or not (np.array_equal(rows, due.rows) and np.array_equal(real, due.real)):
                wrong.append(number)
        end = self._end
        for rest in itertools.chain(
            self._rows(self._known_from, self.position), self._rows(end, plan.rows_of(self.epoch))
        ):
            tally.add(rest)
        found, faults = self._compare(tally)
        if tally.foreign:
            faults.append(f"{tally.foreign:,} rows that are not selected")
        if set(steps) != {len(self._starts)}:
            faults.append(f"steps of the ranks {steps}, of the plan {len(self._starts)}")
        if wrong:
            faults.append(f"{len(wrong):,} steps have other rows than the plan, the first is {wrong[0]}")
        counts.update(aside=self.position + plan.rows_of(self.epoch) - end, **found, foreign=tally.foreign)
        expected, what, each = sum(int(rows.sum()) for rows in tally.selected), "rows", "every selected row"
        if plan.order.repeats:
            expected, what, each = plan.rows_of(self.epoch), "draws", "every planned draw"
        notes = {
            "dropped by remainder='drop'": plan.rows_of(self.epoch) - end,
            "repeated, and marked, by remainder='pad'": counts["padding"],
            "masked by on_bad_row='mask'": counts["masked"],
            "consumed before": self.position,
        }
        besides = ", ".join(f"{count:,} {note}" for note, count in notes.items() if count)
        steps_of = f"{plan.dp_size} ranks × {len(self._starts):,} steps"
        verdict = f"OK: {expected:,} {what}, {steps_of}, {each} exactly once{f' ({besides})' if besides else ''}"
        verdict = f"FAULT: {'; '.join(faults)}" if faults else verdict
        return AuditReport(counts={"expected": expected, **counts}, steps=steps, faults=faults, verdict=verdict)

    def rows_of_step(self, step: int, *, rank: int | None = None, columns: Sequence[str] = ()) -> pd.DataFrame:
        """Returns a table of a step's rows in the order of the global batch, for example to examine a loss spike.

        Args:
            step: The number of the step, from 0 for the step at the audit's `position`.
            rank: The data-parallel rank whose rows are shown; None for all.
            columns: Columns to show as they are stored; batches need not have them.

        Returns:
            For each row its `position` in the epoch, its `rank`, its `component` (the name of the dataset, only in a
            mixture), its `row_offset`, whether it is `padding`, and the columns.

        Raises:
            ConfigError: If the step or rank does not exist, or `columns` are given for packed documents.
            DatasetError: If there is no such column.
        """
        plan = self.plan
        if not 0 <= step < len(self._starts):
            raise ConfigError(
                f"step={step}: there are {len(self._starts):,} steps. There are no rows to show. Count steps from 0."
            )
        if rank is not None and not 0 <= rank < plan.dp_size:
            raise ConfigError(
                f"rank={rank}: a rank lies in [0, {plan.dp_size}). There are no rows to show. Name another rank."
            )
        ranks = range(plan.dp_size) if rank is None else [rank]
        slices = [plan.rank_slice(self.epoch, self._starts[step], one) for one in ranks]
        positions = plan.positions(self.epoch, self._starts[step], slices[0][0], slices[-1][1])
        rows = self._planned(positions)
        shown: dict[str, Any] = {"position": positions, "rank": np.repeat(ranks, np.diff(slices)[:, 0])}
        if rows.components is not None:
            shown["component"] = [self._parts[number].name for number in rows.components]
        shown |= {"row_offset": rows.offsets, "padding": ~rows.real}
        return pd.DataFrame(shown | (self._values(rows.rows, columns) if columns else {}))

    def _values(self, rows: Int64Array, columns: Sequence[str]) -> dict[str, Any]:
        values: dict[str, list[Any]] = {name: [None] * len(rows) for name in columns}
        which, own = split_offsets(rows)
        for number, part in enumerate(self._parts):
            places = np.flatnonzero(which == number)
            for name, column in part.take(own[places], columns).items():
                for place, value in zip(places, column, strict=True):
                    values[name][place] = value
        # Nulls stay None. pandas would make them NaN, a value that is not in the column.
        return {name: pd.Series(given, dtype=object if None in given else None) for name, given in values.items()}

    def _of_step(self, number: int) -> Step:
        """Returns the rows of a step, of all ranks."""
        at = self._starts[number]
        return self._planned(self.plan.positions(self.epoch, at, 0, self.plan.step_size(self.epoch, at)))

    def _planned(self, positions: Int64Array) -> Step:
        """Returns the rows at positions of the plan. Positions after the end of the epoch are padding."""
        which, own = split_offsets(self._selection.offsets(self.plan.select(self.epoch, positions)))
        components = which if isinstance(self._delivery_spec.order, MixOrder) else None
        return Step(offsets=own, real=positions < self.plan.rows_of(self.epoch), components=components)

    def _of_epoch(self, part: Part) -> BoolArray:
        """Returns which rows of a dataset Lance selects; those that the epoch has, if rows change in its course."""
        selected = part.selected()
        if not self._has_changed:
            return selected
        epoch, found = self.plan.order.epoch(self.epoch), np.zeros_like(selected)
        found[np.flatnonzero(selected)[epoch.rows(np.arange(self._known_from, epoch.epoch_rows))]] = True
        return found

    def _rows(self, low: int, high: int) -> Iterator[Int64Array]:
        """Yields the rows at positions [low, high) in blocks."""
        for at in range(low, high, _BLOCK):
            yield self._planned(np.arange(at, min(at + _BLOCK, high))).rows

    def _replay(self, rank: int) -> Iterator[Step]:
        plan, parts = self.plan, list[Int64Array]()
        for item in plan.items(rank, self.epoch, self.position, item_rows=4096):
            parts += np.split(plan.item_positions(item), np.cumsum(plan.rows_by_step(item))[:-1])
            if not plan.ends_step(item):  # the rest of the step follows
                continue
            for positions in parts if item.steps > 1 else [np.concatenate(parts)]:
                yield self._planned(positions)
            parts = []

    def _stream(self, loader: RankLoader) -> Iterator[Step]:
        plan = self.plan
        planned = dataclasses.replace(self._delivery_spec, order=plan.order.settings)
        size = budget_of(plan.budget or plan.global_batch_size)
        cursor = Cursor(opened_of(self._data).read.origin, planned)
        cursor.epoch, cursor.position = self.epoch, self.position
        loader.load_state_dict(cursor.state(plan.global_batch_size, plan.dp_size).to_dict())
        tables = loader.iter_batches(**size, batch_format="pyarrow", with_row_offset=True)
        for number, table in enumerate(tables):
            names = {ROW_OFFSET, COMPONENT, VALID} & set(table.column_names)
            columns = {name: table[name].to_numpy().copy() for name in names}
            real, masked = columns.get(VALID, np.ones(len(table), dtype=np.bool_)), 0
            if self._delivery_spec.masks_bad_rows:  # bad rows are marked like padding; the plan knows the padding
                at = self._starts[number]
                own = plan.rank_slice(self.epoch, at, loader.dp_rank)
                known = plan.positions(self.epoch, at, *own) < plan.rows_of(self.epoch)
                real, masked = real | known, int((known & ~real).sum())
            yield Step(offsets=columns[ROW_OFFSET], real=real, components=columns.get(COMPONENT), masked=masked)

    def _compare(self, tally: Tally) -> tuple[dict[str, int], list[str]]:
        """Returns numbers of rows that came less or more often than expected, and a line for each kind of fault."""
        drawn, counts, faults = Tally(tally.selected), {"missing": 0, "twice": 0}, []
        end = self.plan.rows_of(self.epoch)
        by_plan = self._known_from > 0 and not self._has_changed  # a mixture whose rows have changed
        are_drawn = [by_plan or part.order.repeats for part in self._parts]
        for rows in self._rows(self._known_from, end) if any(are_drawn) else ():
            drawn.add(rows)
        standings = self._delivery_spec.order.standings(self.epoch, end)
        compared = zip(self._parts, are_drawn, tally.selected, tally.times, drawn.times, strict=True)
        for part, is_drawn, selected, times, draws in compared:
            count, of = int(selected.sum()), f" of {part.name}" * bool(part.name)
            planned = end - self._known_from if self._has_changed else part.rows
            if count != planned:
                faults.append(f"Lance selects {count:,} rows{of}, the plan has {planned:,}")
            # A mixture repeats a dataset only as a whole, so its rows come `passes` times, and some of them once more.
            passes, more = divmod(standings[part.name]["rows"] if standings else count, max(count, 1))
            least, most = (draws, draws) if is_drawn else (passes, passes + (more > 0))
            for what, wrong in (("missing", times < least), ("twice", times > most)):
                rows = np.flatnonzero(selected & wrong)
                counts[what] += len(rows)
                if len(rows):
                    named = ", ".join(map(str, rows[:_NAMED])) + " …" * (len(rows) > _NAMED)
                    faults.append(f"{len(rows):,} rows{of} {what}, with offsets {named}")
        return counts, faults
