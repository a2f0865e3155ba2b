"""The command line of `raylance.audit`.

    python jobs/verify.py data.lance --global-batch-size 256 --world-size 8                # every row once, by the plan
    python jobs/verify.py data.lance … --stream --decoders 2 --image-column image          # … by the real stream
    python jobs/verify.py data.lance … --epoch 3 --step 1200 --columns label               # rows of a loss spike
    python jobs/verify.py data.lance … --quality --label-column label --plot quality.png   # how good the shuffle is
    python jobs/verify.py a.lance b.lance --mix web=0.7,books=0.3 …                        # of a mixture
    python jobs/verify.py --state raylance_state.json --step 1200                          # of a run, by its checkpoint
    python jobs/verify.py --state raylance_state.json --shards                             # which shards are complete
    python jobs/verify.py --run runs/food101                                               # which rows a run was handed

Give the options of the run that is looked at; --state takes them from a checkpoint's raylance_state.json, with the
values that "auto" had there. Without it, "auto" follows from the size of the rows of --columns. Orders with parameters,
splits and packing are given as Python writes them, which is also how checkpoints do: --order "Weighted(weights='w')".

--run takes the folder of a run: what its ranks were handed, over all starts, is compared with what the datasets select.
URI says where the data of --dataset lies now, if it has moved; --order, --samples and --storage-options what records
lack.

Exit status: 0 when every row (of an order that draws rows: every draw) came exactly once (with remainder "drop" but for
the rows after the last step, with "pad" but for the marked ones), 1 for any fault, and with --run for what is not
proven, 2 for arguments that make no sense.
"""

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # else Python finds this folder's files, and not the folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

import raylance
from jobs.common import connect, key_value, number_or_name
from jobs.output import separate_output_once
from raylance.errors import BadRowError, CoverageError, HelperError

SIZES = ("shard_rows", "window_shards", "lanes")
ORDERS = {
    "window": raylance.WindowShuffle,
    "shard": raylance.ShardShuffle,
    "sequential": raylance.Sequential,
    "row": raylance.RowShuffle,
}
NEEDS = {
    "rank": "step",
    "label_column": "quality",
    "plot": "quality",
    "shards": "state",
    "dataset": "run",
    "decoders": "stream",
    "image_column": "stream",
    "image_size": "image_column",
    "on_bad_row": "image_column",
}
LACKING = ("order", "samples")  # what the records of a run may lack
BESIDE_RUN = ("run", "dataset", "uri", "storage_options", "json", *LACKING)  # all that means something with --run


def open_data(args: argparse.Namespace) -> raylance.Dataset:
    """Opens what the run read: one dataset, a mixture, or what its checkpoint names."""
    names = ("version", "filter", "seed", "split", "order", "samples", "columns")
    given = {name: getattr(args, name) for name in names}
    given["storage_options"] = dict(args.storage_options) or None
    if args.image_column:
        given["decode"] = raylance.Image(args.image_column, size=args.image_size)
        given["on_bad_row"] = args.on_bad_row or "raise"
        given["max_bad_rows"] = None  # they are counted and reported, however many there are
        given["columns"] = args.columns and sorted({*args.columns, args.image_column})
    given = {name: value for name, value in given.items() if value is not None or name == "max_bad_rows"}
    if args.state is not None:
        return raylance.audit.reopen(args.state, uri=args.uri, remainder=args.remainder, **given)
    if not args.mix:
        return raylance.dataset(args.uri[0], remainder=args.remainder, **given)
    parts = {
        name: (raylance.dataset(uri, **given), weight) for uri, (name, weight) in zip(args.uri, args.mix, strict=True)
    }
    return raylance.mix(parts, stop=args.stop, remainder=args.remainder)


def audit(epoch: raylance.audit.EpochAudit, args: argparse.Namespace) -> dict[str, Any]:
    """Counts an epoch and prints what came, with the verdict in the last line."""
    report = count_stream(epoch, args.decoders or 0) if args.stream else epoch.count()
    print(report)
    return report.counts | {"steps": report.steps, "faults": report.faults, "verdict": report.verdict}


def count_stream(epoch: raylance.audit.EpochAudit, decoders: int) -> raylance.audit.AuditReport:
    """Counts what the real stream of all ranks delivers; what Ray prints of it is kept where it fails."""
    import ray  # which nothing else here needs

    with separate_output_once("verify"):
        was_there = ray.is_initialized()
        try:
            connect()
            return epoch.count(epoch.by_stream(num_decoders=decoders))
        finally:
            if not was_there:
                ray.shutdown()  # its last lines are not for the user either


def rows_of_step(epoch: raylance.audit.EpochAudit, args: argparse.Namespace) -> dict[str, Any]:
    """Prints the rows of one step, in the order of the global batch, with the values of --columns."""
    frame = epoch.rows_of_step(args.step, rank=args.rank, columns=args.columns or [])
    rows = [{name: shown(value) for name, value in row.items()} for row in frame.to_dict("records")]
    for row in [{name: name for name in frame}] * bool(rows) + rows:
        print(*row.values(), sep="\t")
    print("To pass over this step, call loader.skip(1, reason=…) on every rank before it.", file=sys.stderr)
    return {"epoch": epoch.epoch, "step": args.step, "rows": rows}


def complete_shards(epoch: raylance.audit.EpochAudit, state: dict[str, Any]) -> dict[str, Any]:
    """Prints the IDs of the shards that are complete at a checkpoint, as ranges; its own list is compared with them."""
    done = epoch.completed_shards(state)
    neighbours = np.split(done, np.flatnonzero(np.diff(done) != 1) + 1) if len(done) else []
    names = [f"{ids[0]}" if len(ids) == 1 else f"{ids[0]}-{ids[-1]}" for ids in neighbours]
    print(
        f"{len(done):,} of {epoch.plan.order.shard_count:,} shards are complete at position {state['position']:,} of "
        f"epoch {state['epoch']}, counted from 0: {', '.join(names) or 'none'}"
    )
    return {"epoch": state["epoch"], "position": state["position"], "shards": names}


def shown(value: Any) -> Any:
    """A value as a line can hold it."""
    if isinstance(value, bytes):
        return f"<{len(value):,} bytes>"
    return value if isinstance(value, int | float | bool) or value is None else str(value)[:80]


def quality(data: raylance.Dataset, epoch: raylance.audit.EpochAudit, args: argparse.Namespace) -> dict[str, Any]:
    """Prints how well the order shuffles, and for windows what other lanes and windows would give."""
    labels = raylance.audit.label_codes(data, args.label_column) if args.label_column else None
    summary = data.plan(epoch.plan.global_batch_size, epoch.plan.dp_size)
    chosen, others = summary.shuffle_quality(labels), summary.compare_windows(labels)
    print(chosen)
    if others:
        settings = epoch.plan.order.settings
        print(f"\nclass divergence (1: a row shuffle) with shard_rows={settings.shard_rows}")
        print(f"{'window_shards':>13}", *(f"{f'{lanes} lanes':>9}" for lanes in next(iter(others.values()))))
    for window, ratios in others.items():
        print(f"{window:13}", *(f"{ratio:9.2f}" for ratio in ratios.values()))
    if args.plot:
        draw(dataclasses.replace(summary, plan=epoch.plan), epoch.epoch, others, args.plot)
    measured = dataclasses.asdict(chosen)
    return {key: measured[key] for key in measured if key != "plan"} | {"class_divergence_by_window_and_lanes": others}


def draw(summary: Any, epoch: int, others: dict[int, dict[int, float]], path: Path) -> None:
    """Plots which rows the first batches take, and the class divergence over lanes."""
    from matplotlib.figure import Figure  # parse() has seen that it is there

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    summary.plot(epoch, axes=left)
    for window, ratios in others.items():
        right.plot(list(ratios), list(ratios.values()), "o-", label=f"window_shards={window}")
    right.axhline(1, color="grey", label="row shuffle")
    right.set(xscale="log", yscale="log", xlabel="lanes", ylabel="ratio to a row shuffle", title="Class divergence")
    right.legend()
    figure.savefig(path)


def weights(text: str) -> list[tuple[str, float]]:
    """An argparse type: NAME=WEIGHT,…"""
    return [(name, float(weight)) for name, weight in map(key_value, text.split(","))]


def setting(text: str) -> Any:
    """An argparse type: a setting as Python writes it, or a name."""
    try:
        return raylance.audit.read_setting(text) if "(" in text else text
    except raylance.errors.ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line, and the state where one is given."""
    as_written = argparse.RawDescriptionHelpFormatter
    about = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(description=about, formatter_class=as_written, usage="%(prog)s URI [options]")
    add = parser.add_argument
    add("uri", nargs="*", help="the dataset, or the datasets of a mixture; with --state, where they lie now")
    add("--state", type=Path, metavar="FILE", help="a checkpoint's raylance_state.json, or its folder: gives defaults")
    add("--run", metavar="FOLDER", help="prove a run by its records: <storage path>/<run name>, as a path or URI")
    add("--dataset", metavar="NAME", help="… this dataset of it; default: all")
    add("--version", type=number_or_name, help="number or tag; default: the newest")
    add("--filter", help="SQL expression, as the run had it")
    add("--split", type=setting, help="a part of it, e.g. \"ValueSplit(column='split', value='train')\"")
    add("--samples", "--pack", dest="samples", type=setting, help="e.g. \"PackTokens(column='tokens', length=4096)\"")
    add("--order", type=setting, help=f"{', '.join(ORDERS)} (default: window), or as \"Weighted(weights='column')\"")
    add("--shard-rows", type=number_or_name, help="rows, or fragment")
    add("--window-shards", type=int, help="shards")
    add("--lanes", type=int, help="number")
    add("--seed", type=int, help="default: 0")
    add("--mix", type=weights, metavar="A=W,B=W", help="mixture: names and weights of the datasets, in their order")
    add(
        "--stop",
        type=number_or_name,
        default="first_exhausted",
        help="… first_exhausted (default), all_exhausted, or a number of rows",
    )
    stored = {"type": key_value, "action": "append", "default": [], "metavar": "KEY=VALUE"}
    add("--storage-options", "--storage-option", help="of the object store; may be repeated", **stored)
    add("--remainder", choices=("drop", "pad", "ragged"), default="drop", help="default: %(default)s")
    add("--global-batch-size", type=int, help="rows of a step over all ranks")
    add("--world-size", type=int, help="ranks; default: 1")
    add("--epoch", type=int, help="default: 0")
    add("--position", type=int, default=0, help="row of the epoch's order to start from; default: 0")
    add("--columns", type=lambda text: text.split(","), metavar="A,B", help="columns to read or print; default: all")
    add("--stream", action="store_true", help="read through Ray, one loader a rank, instead of replaying the plan")
    add("--decoders", type=int, help="with --stream: decode actors; default: threads of the shard actors")
    add("--image-column", help="with --stream: decode this column")
    add("--image-size", type=int, help="… to squares of so many pixels")
    add("--on-bad-row", choices=("raise", "mask"), help="… as the run had it: default: raise")
    add("--step", type=int, help="print the rows of this step, counted from --position")
    add("--rank", type=int, help="… of this rank only")
    add("--shards", action="store_const", const=True, help="with --state: print the IDs of the complete shards")
    add("--quality", action="store_true", help="measure the shuffle")
    add("--label-column", help="… by these classes; default: blocks of storage, the worst case")
    add("--plot", type=Path, metavar="PNG", help="… and draw it (needs matplotlib)")
    add("--json", type=Path, metavar="FILE", help="write all numbers here")
    args = parser.parse_args(argv)
    try:
        for name, value in vars(args).items():
            if args.run is not None and name not in BESIDE_RUN and value != parser.get_default(name):
                raise ValueError(f"--{name} means nothing with --run".replace("_", "-"))
        check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def check(args: argparse.Namespace) -> None:
    """Reads the state and makes the order; raises a ValueError for options that contradict each other."""
    for name, other in NEEDS.items():
        if getattr(args, name) is not None and (getattr(args, other) is None or getattr(args, other) is False):
            raise ValueError(f"--{name} means nothing without --{other}".replace("_", "-"))
    check_outputs(args)
    if args.state:
        path = args.state / "raylance_state.json" if args.state.is_dir() else args.state
        try:
            args.state = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--state {args.state} cannot be read: {error}") from error
    elif args.run is None and len(args.uri) != len(args.mix or [None]):
        raise ValueError(f"{len(args.uri)} URIs: give one, or with --mix one for each name")
    elif args.run is None and args.global_batch_size is None:
        raise ValueError("--global-batch-size is missing. The rows of a step depend on it. Give it.")
    make_order(args)


def check_outputs(args: argparse.Namespace) -> None:
    """Raises a ValueError for a file that cannot be written."""
    for path in filter(None, (args.json, args.plot)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ValueError(f"{path} is a folder, or lies in none. No file can be written there. Name a file.")
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--plot draws with matplotlib, which is not installed. Nothing would be drawn. pip install matplotlib"
        )


def make_order(args: argparse.Namespace) -> None:
    """Makes the order of its name and sizes, where one of them is given."""
    sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None}
    if not isinstance(args.order, str) and not (args.order is None and sizes):
        return
    kind = ORDERS.get(args.order or "window")
    if kind is None or set(sizes) - {field.name for field in dataclasses.fields(kind)}:
        raise ValueError(f"no order {args.order!r} takes {sizes}: see --order and its sizes")
    try:
        args.order = kind(**sizes)
    except raylance.errors.ConfigError as error:
        raise ValueError(str(error)) from error


def prove(args: argparse.Namespace) -> dict[str, Any]:
    """Proves a run by its records, and prints it by epoch, the verdict last."""
    changes = {name: getattr(args, name) for name in LACKING if getattr(args, name) is not None}
    changes |= {"storage_options": dict(args.storage_options)} if args.storage_options else {}
    proof = raylance.prove_run(args.run, uri=args.uri, dataset=args.dataset, **changes)
    words = "OK: " if proof.ok else "" if proof.faults else "NOT PROVEN: "
    print(*(line for line in str(proof).splitlines() if line not in proof.verdict), f"{words}{proof.verdict}", sep="\n")
    wrong = {"faults": proof.faults, "unproven": proof.unproven}
    return wrong | {"verdict": proof.verdict, "datasets": [dataclasses.asdict(one) for one in proof.datasets]}


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Opens the dataset as the run did, and does what was asked."""
    if args.run is not None:
        return prove(args)
    data = open_data(args)
    names = ("global_batch_size", "world_size", "epoch", "position", "state")
    epoch = raylance.audit.EpochAudit(data, **{name: getattr(args, name) for name in names})
    if args.quality:
        return quality(data, epoch, args)
    if args.step is not None:
        return rows_of_step(epoch, args)
    if args.shards:
        return complete_shards(epoch, args.state)
    print(data.plan(epoch.plan.global_batch_size, epoch.plan.dp_size))
    return audit(epoch, args)


def main(argv: list[str] | None = None) -> int:
    """Does what the command line asks for; returns the exit status."""
    args = parse(argv)
    try:
        found = run(args)
    except (CoverageError, BadRowError, HelperError) as error:
        print("\n".join([f"FAULT: {error}", *getattr(error, "__notes__", ())]))
        return 1
    except raylance.RaylanceError as error:
        print("\n".join([f"verify.py: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 1 if found.get("faults") or found.get("unproven") else 0


if __name__ == "__main__":
    sys.exit(main())
