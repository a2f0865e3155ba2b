"""Owns the audit of an epoch, rows delivered against rows that Lance itself selects; never repairs, never writes data.

    python jobs/verify.py data.lance --global-batch-size 256 --world-size 8                # every row once, by the plan
    python jobs/verify.py data.lance … --stream --decoders 2 --image-column image          # … by the real stream
    python jobs/verify.py data.lance … --epoch 3 --step 1200 --columns label               # rows behind a loss spike
    python jobs/verify.py data.lance … --quality --label-column label --plot quality.png   # how good the shuffle is

Give the options of the run that is looked at; --state takes them from a checkpoint's raylance_state.json, with what was
settled for "auto" there. Without it, "auto" follows from the size of the rows of --columns.

Exit status: 0 when every row came exactly once (with remainder "drop" but for the rows behind the last step, with "pad"
but for the marked ones), 1 for any fault, 2 for arguments that make no sense.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import raylance
from raylance.errors import BadRowError, CoverageError, HelperError
from raylance.orders.order import Facts
from raylance.orders.registry import ORDERS
from raylance.planning.plan import REMAINDERS, Plan
from raylance.planning.quality import shuffle_quality
from raylance.planning.state import State, parse_state
from raylance.source.selection import Selection, pin, select

BLOCK = 1 << 20
FROM_STATE = {"version": None, "filter": None, "seed": 0, "epoch": 0, "global_batch_size": None, "world_size": 1}
NEEDS = {
    "rank": "step",
    "label_column": "quality",
    "plot": "quality",
    "decoders": "stream",
    "image_column": "stream",
    "image_size": "image_column",
}
SIZES = ("shard_rows", "window_shards", "lanes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Rows of one step: offsets, int64 (k,), and which are real and no padding, bool (k,)."""

    offsets: np.ndarray
    real: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What has to come: the offsets that Lance selects, but for those set aside, in the steps of the plan.

    `aside` are the rows before the start of the audit, and those dropped behind the last step.
    """

    selected: np.ndarray
    aside: Iterable[np.ndarray]
    steps: int
    batch: Callable[[int], Step]


def count_rows(delivered: Iterable[Sequence[Step | None]], wanted: Wanted, world_size: int) -> dict[str, Any]:
    """Counts rows.

    Args:
        delivered: For each step, what each rank got, None where it got no step any more.
        wanted: What has to come.
        world_size: Ranks.

    Returns:
        Numbers by name, `steps` of each rank, and under "faults" one line for each kind of fault.
    """
    seen = np.zeros(int(wanted.selected.max()) + 1, dtype=np.uint16)
    selected = np.zeros(len(seen), dtype=np.bool_)
    selected[wanted.selected] = True
    counts = {"expected": len(wanted.selected), "delivered": 0, "aside": 0, "padding": 0, "foreign": 0}
    steps, wrong = [0] * world_size, []

    def tally(offsets: np.ndarray) -> None:
        inside = (offsets >= 0) & (offsets < len(seen))
        found, times = np.unique(offsets[inside], return_counts=True)
        seen[found] += times.astype(np.uint16)
        counts["foreign"] += int((~inside).sum() + times[~selected[found]].sum())

    for number, ranks in enumerate(delivered):
        parts = [part for part in ranks if part is not None]
        steps = [done + (part is not None) for done, part in zip(steps, ranks, strict=True)]
        offsets, real = (np.concatenate([getattr(part, name) for part in parts]) for name in ("offsets", "real"))
        tally(offsets[real])
        counts["delivered"] += int(real.sum())
        counts["padding"] += int((~real).sum())
        plan = wanted.batch(number) if number < wanted.steps else None
        if plan is None or not (np.array_equal(offsets, plan.offsets) and np.array_equal(real, plan.real)):
            wrong.append(number)
    for offsets in wanted.aside:
        tally(offsets)
        counts["aside"] += len(offsets)
    missing, twice = np.flatnonzero(selected & (seen == 0)), np.flatnonzero(selected & (seen > 1))
    counts |= {"missing": len(missing), "twice": len(twice)}
    faults = [
        f"{len(rows):,} rows {what}, with offsets {', '.join(map(str, rows[:8]))}{' …' * (len(rows) > 8)}"
        for what, rows in (("missing", missing), ("twice", twice))
        if len(rows)
    ]
    if counts["foreign"]:
        faults.append(f"{counts['foreign']:,} rows that are not selected")
    if set(steps) != {wanted.steps}:
        faults.append(f"steps of the ranks {steps}, of the plan {wanted.steps}")
    if wrong:
        faults.append(f"{len(wrong):,} steps have other rows than the plan, the first is {wrong[0]}")
    return {**counts, "steps": steps, "faults": faults}


def planned(plan: Plan, selection: Selection, epoch: int, positions: np.ndarray) -> Step:
    """The rows at positions of the plan; those at the end of the epoch and beyond are padding."""
    return Step(offsets=selection.offsets(plan.select(epoch, positions)), real=positions < plan.epoch_rows)


def want(plan: Plan, selection: Selection, args: argparse.Namespace) -> Wanted:
    """What the epoch has to deliver from --position on; which rows are selected is Lance's own word."""
    selected = np.arange(args.opened.count_rows())
    if args.filter is not None:
        table = args.opened.scanner(columns=["_rowoffset"], filter=args.filter, batch_size=1 << 16).to_table()
        selected = table[0].to_numpy().astype(np.int64)
    size, steps = plan.global_batch_size, plan.steps(args.position)
    end = min(args.position + steps * size, plan.epoch_rows)

    def batch(number: int) -> Step:
        at = args.position + number * size
        return planned(plan, selection, args.epoch, plan.positions(at, 0, plan.step_size(at)))

    def aside() -> Iterator[np.ndarray]:
        for low, high in ((0, args.position), (end, plan.epoch_rows)):
            for at in range(low, high, BLOCK):
                yield planned(plan, selection, args.epoch, np.arange(at, min(at + BLOCK, high))).offsets

    return Wanted(selected=selected, aside=aside(), steps=steps, batch=batch)


def replayed(plan: Plan, selection: Selection, rank: int, args: argparse.Namespace) -> Iterator[Step]:
    """A rank's steps from the work items that its actors would get."""
    parts: list[np.ndarray] = []
    for item in plan.items(rank, args.epoch, args.position, item_rows=4096):
        parts += np.split(plan.item_positions(item), item.steps)
        low, high = plan.rank_slice(item.position, rank)
        if item.high < high - low:  # the rest of the step follows
            continue
        for positions in parts if item.steps > 1 else [np.concatenate(parts)]:
            yield planned(plan, selection, args.epoch, positions)
        parts = []


def streamed(data: raylance.Dataset, plan: Plan, rank: int, args: argparse.Namespace) -> Iterator[Step]:
    """A rank's steps as its loader hands them out, through Ray."""
    with data.loader(rank=rank, world_size=args.world_size, num_decoders=args.decoders or 0) as loader:
        place = {"epoch": args.epoch, "position": args.position, "order": plan.order.params()}
        loader.load_state_dict(loader.state_dict() | place)
        for table in loader.iter_batches(
            global_batch_size=args.global_batch_size, batch_format="pyarrow", with_row_offset=True
        ):
            offsets = table["_rowoffset"].to_numpy()
            real = table["_valid"].to_numpy() if "_valid" in table.column_names else np.ones(len(offsets), np.bool_)
            yield Step(offsets=offsets.copy(), real=real.copy())


def audit(data: raylance.Dataset, plan: Plan, selection: Selection, args: argparse.Namespace) -> dict[str, Any]:
    """Counts an epoch and prints what came, with the verdict in the last line."""
    if args.stream:
        connect()
        ranks = [streamed(data, plan, rank, args) for rank in range(args.world_size)]
    else:
        ranks = [replayed(plan, selection, rank, args) for rank in range(args.world_size)]
    wanted = want(plan, selection, args)
    found = count_rows(itertools.zip_longest(*ranks), wanted, args.world_size)
    dropped = found["aside"] - args.position
    print(*(f"{name} {found[name]:,}" for name in ("expected", "delivered", "missing", "twice", "foreign")), sep=", ")
    print("steps of the ranks:", *(f"{steps:,}" for steps in found["steps"]))
    notes = [f"{dropped:,} dropped by remainder='drop'"] * (dropped > 0)
    notes += [f"{found['padding']:,} repeated, and marked, by remainder='pad'"] * (found["padding"] > 0)
    notes += [f"{args.position:,} consumed before"] * (args.position > 0)
    remark = f" ({', '.join(notes)})" if notes else ""
    ranks_steps = f"{args.world_size} ranks × {wanted.steps:,} steps"
    found["verdict"] = f"OK: {found['expected']:,} rows, {ranks_steps}, every selected row exactly once{remark}"
    if found["faults"]:
        found["verdict"] = f"FAULT: {'; '.join(found['faults'])}"
    print(found["verdict"])
    return found


def connect() -> None:
    """Joins Ray, or starts one here."""
    import ray

    if not ray.is_initialized():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="lance is not fork-safe")  # Ray forks only to start its daemons
            ray.init()  # honours RAY_ADDRESS, which `ray job submit` sets


def rows_of_step(plan: Plan, selection: Selection, args: argparse.Namespace) -> dict[str, Any]:
    """Prints the rows of one step, in the order of the global batch, with the values of --columns."""
    if not 0 <= args.step < plan.steps(args.position):
        steps = plan.steps(args.position)
        raise raylance.ConfigError(f"--step {args.step}: there are {steps:,} steps, counted from 0.")
    at = args.position + args.step * plan.global_batch_size
    rows: list[dict[str, Any]] = []
    for rank in range(plan.world_size) if args.rank is None else [args.rank]:
        positions = plan.positions(at, *plan.rank_slice(at, rank))
        step = planned(plan, selection, args.epoch, positions)
        values: list[dict[str, Any]] = [{}] * len(positions)
        if args.columns and len(positions):
            values = args.opened.take(pa.array(step.offsets), columns=args.columns).to_pylist()
        for position, offset, real, value in zip(positions, step.offsets, step.real, values, strict=True):
            place = {"position": int(position), "rank": rank, "row_offset": int(offset), "padding": not real}
            rows.append(place | {name: shown(value[name]) for name in args.columns or []})
    for row in rows[:1]:
        print(*row, sep="\t")
    for row in rows:
        print(*row.values(), sep="\t")
    return {"epoch": args.epoch, "step": args.step, "rows": rows}


def shown(value: Any) -> Any:
    """A value as a line can hold it."""
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    return value if isinstance(value, int | float | bool) or value is None else str(value)[:80]


def quality(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Prints how well the order shuffles, and for windows what other lanes and windows would give."""
    labels = None
    if args.label_column:
        column = args.opened.scanner(columns=[args.label_column], filter=args.filter, batch_size=1 << 16).to_table()[0]
        labels = column.dictionary_encode(null_encoding="encode").combine_chunks().indices.to_numpy()
    chosen = shuffle_quality(plan, labels)
    print(chosen)
    size = plan.global_batch_size
    others: dict[int, dict[int, float]] = {}
    settings = plan.order.settings
    if isinstance(settings, raylance.WindowShuffle):
        facts = Facts(rows=plan.rows, seed=plan.seed, tables=plan.order.tables)
        lanes = sorted({plan.order.lane_count} | {2**k for k in range(7) if size % 2**k == 0 and 2**k <= plan.rows})
        for window in sorted({int(settings.window_shards), 1, 4, 16, 64}):
            orders = {of: dataclasses.replace(settings, window_shards=window, lanes=of) for of in lanes}
            plans = {of: dataclasses.replace(plan, order=order.settle(facts)) for of, order in orders.items()}
            others[window] = {of: shuffle_quality(plans[of], labels, 1, 128).class_divergence for of in lanes}
        print(f"\nclass divergence (1: a row shuffle) with shard_rows={settings.shard_rows}")
        print(f"{'window_shards':>13}", *(f"{f'{of} lanes':>9}" for of in lanes))
        for window, ratios in others.items():
            print(f"{window:13}", *(f"{ratio:9.2f}" for ratio in ratios.values()))
    if args.plot:
        draw(plan, others, args)
    measured = dataclasses.asdict(chosen)
    return {key: measured[key] for key in measured if key != "plan"} | {"class_divergence_by_window_and_lanes": others}


def draw(plan: Plan, others: dict[int, dict[int, float]], args: argparse.Namespace) -> None:
    """Plots which rows the first batches take, and the class divergence over lanes."""
    from matplotlib.figure import Figure  # parse() has seen that it is there

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    first = np.arange(min(plan.epoch_rows, 64 * plan.global_batch_size))
    left.plot(first / plan.global_batch_size, plan.select(args.epoch, first), ",")
    left.set(xlabel="step", ylabel="row in storage", title=f"Rows of the first steps, order {plan.order.name}")
    for window, ratios in others.items():
        right.plot(list(ratios), list(ratios.values()), "o-", label=f"window_shards={window}")
    right.axhline(1, color="grey", label="row shuffle")
    right.set(xscale="log", yscale="log", xlabel="lanes", ylabel="ratio to a row shuffle", title="Class divergence")
    right.legend()
    figure.savefig(args.plot)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line, and the state where one is given."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written, usage="%(prog)s URI [options]")
    add = parser.add_argument
    add("uri", help="the dataset")
    add("--state", type=Path, metavar="FILE", help="raylance_state.json of a checkpoint: defaults for what it says")
    add("--version", help="number or tag; default: the newest")
    add("--filter", help="SQL expression, as the run had it")
    add("--order", choices=[name for name, kind in ORDERS.items() if not kind.repeats], help="default: window")
    add("--shard-rows", type=lambda text: int(text) if text.isdigit() else text, help="rows, or fragment")
    add("--window-shards", type=int, help="shards")
    add("--lanes", type=int, help="number")
    add("--seed", type=int, help="default: 0")
    add("--remainder", choices=REMAINDERS, default="drop", help="default: %(default)s")
    add("--global-batch-size", type=int, help="rows of a step over all ranks")
    add("--world-size", type=int, help="ranks; default: 1")
    add("--epoch", type=int, help="default: 0")
    add("--position", type=int, default=0, help="row of the epoch's order to start from; default: 0")
    add("--columns", type=lambda text: text.split(","), metavar="A,B", help="columns to read or print; default: all")
    add("--stream", action="store_true", help="read through Ray, one loader a rank, instead of replaying the plan")
    add("--decoders", type=int, help="with --stream: decode actors; default: threads of the shard actors")
    add("--image-column", help="with --stream: decode this column")
    add("--image-size", type=int, help="… to squares of so many pixels")
    add("--step", type=int, help="print the rows of this step, counted from --position")
    add("--rank", type=int, help="… of this rank only")
    add("--quality", action="store_true", help="measure the shuffle")
    add("--label-column", help="… by these classes; default: blocks of storage, the worst case")
    add("--plot", type=Path, metavar="PNG", help="… and draw it (needs matplotlib)")
    add("--json", type=Path, metavar="FILE", help="write all numbers here")
    args = parser.parse_args(argv)
    try:
        saved = None if args.state is None else parse_state(json.loads(args.state.read_text()))
    except (OSError, ValueError, AttributeError) as error:
        parser.error(f"--state {args.state} cannot be read: {error}")
    for name, default in FROM_STATE.items():
        if getattr(args, name) is None:
            setattr(args, name, getattr(saved, name) if saved else default)
            if name == "version" and saved and isinstance(saved.branch, str):
                args.version = (saved.branch, saved.version)
    if args.global_batch_size is None:
        parser.error("--global-batch-size is needed: the rows of a step depend on it")
    if not 1 <= args.world_size <= 1 << 16 or not 0 <= (args.rank or 0) < args.world_size:
        parser.error(f"--world-size {args.world_size}, --rank {args.rank}: a rank lies in [0, world size)")
    if args.epoch < 0 or args.position < 0:
        parser.error(f"--epoch {args.epoch}, --position {args.position}: neither may be negative")
    if isinstance(args.version, str) and args.version.isdigit():
        args.version = int(args.version)
    params = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if saved and args.order is None:
        params = {name: value for name, value in saved.order.items() if name != "name"} | params
    kind = ORDERS.get(args.order or (saved.order["name"] if saved else "window"))
    if kind is None or kind.repeats or set(params) - {field.name for field in dataclasses.fields(kind)}:
        parser.error(f"no order that visits each row once takes {params}: see --order and its sizes")
    try:
        args.made_order, args.saved = kind(**params), saved
    except raylance.ConfigError as error:
        parser.error(str(error))
    for name, other in NEEDS.items():
        if getattr(args, name) is not None and getattr(args, other) in (None, False):
            parser.error(f"--{name} means nothing without --{other}".replace("_", "-"))
    for path in filter(None, (args.json, args.plot)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            parser.error(f"{path} is a folder, or lies in none: no file can be written there")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot draws with matplotlib, which raylance does not bring: pip install matplotlib")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Opens the dataset as the run did, and does what was asked."""
    saved: State | None = args.saved
    source = pin(args.uri, args.version, None)
    args.opened = source.open()
    selection = select(source, args.filter)
    if saved and (getattr(saved, "split", None) or selection.fingerprint != saved.fingerprint):
        raise raylance.StateError(
            f"--state {args.state} was saved over {saved.rows:,} other rows than the {selection.rows:,} that "
            f"{args.uri!r} at version {source.version} gives with filter={args.filter!r} and no split, so positions "
            "mean nothing here. Give the dataset of the run; runs over a split cannot be looked at."
        )
    for name in [*(args.columns or []), *filter(None, [args.label_column])]:
        if name not in args.opened.schema.names:
            names = ", ".join(args.opened.schema.names)
            raise raylance.DatasetError(f"{args.uri!r} has no column {name!r}; its columns are {names}.")
    columns = args.columns and sorted({*args.columns, *filter(None, [args.image_column])})
    data = raylance.dataset(
        args.uri,
        version=source.version if source.branch is None else (source.branch, source.version),
        columns=columns,
        filter=args.filter,
        decode=raylance.Image(args.image_column, size=args.image_size) if args.image_column else None,
        order=args.made_order,
        seed=args.seed,
        remainder=args.remainder,
    )
    summary = data.plan(global_batch_size=args.global_batch_size, world_size=args.world_size)
    plan = summary.plan
    if args.position >= plan.epoch_rows:
        raise raylance.ConfigError(f"--position {args.position}: the epoch has {plan.epoch_rows:,} rows, from 0 on.")
    if args.quality:
        return quality(plan, args)
    if args.step is not None:
        return rows_of_step(plan, selection, args)
    print(summary)
    return audit(data, plan, selection, args)


def main(argv: list[str] | None = None) -> int:
    """Does what the command line asks for; returns the exit status."""
    args = parse(argv)
    try:
        found = run(args)
    except (CoverageError, BadRowError, HelperError) as error:
        print(f"FAULT: {error}")
        return 1
    except raylance.RaylanceError as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 1 if found.get("faults") else 0


if __name__ == "__main__":
    sys.exit(main())
