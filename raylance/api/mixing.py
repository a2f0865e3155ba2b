"""`raylance.mix()`: one handle of several datasets."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

import numpy as np
import pyarrow as pa

from raylance.api.dataset import Dataset, opened_of
from raylance.arguments import check_integer, check_word, refuse_unknown
from raylance.columns import dataset_names
from raylance.errors import ConfigError
from raylance.opened import Opened, ReadSpec
from raylance.orders.buckets import Buckets
from raylance.orders.dealing import exact
from raylance.orders.mixture import Component, MixOrder, quotas
from raylance.orders.order import COST, cost_names, cost_table
from raylance.orders.schedule import Schedule, check_weights
from raylance.planning.balance import Balance, check_balance
from raylance.planning.step_size import Ending, read_ending
from raylance.source.mixed_rows import MixedRows, mix_rows


def mix(
    parts: Mapping[str, tuple[Dataset, float]],
    *,
    weigh: str = "rows",
    schedule: Schedule | None = None,
    turn_rows: int = 1,
    stop: str | int = "first_exhausted",
    window_bytes: int | None = None,
    remainder: Ending = "drop",
    balance: Balance | None = None,
    **older: Any,
) -> Dataset:
    """Mixes datasets by weight, each in its own order.

    The datasets' rows alternate as evenly as their weights allow: of the first p rows of an epoch, each dataset has its
    share of p, give or take a few rows, for any p. So every global batch is close to the weights. `plan()` shows the
    shares.

    `with_row_offset=True` adds two columns to a batch. `_rowoffset` holds each row's offset in the dataset from which
    the row comes, and `_component` holds the index of that dataset in `parts`.

    Args:
        parts: For each name, a dataset and its weight, a number that is not negative. A dataset of weight 0 hands out
            no row, until a schedule, `RankLoader.reweight` or a restart with other arguments gives it a weight. A
            mixture stands for its datasets, which divide its weight by their own and are called "web/code": the dataset
            "code" of the mixture "web".
        weigh: What the weights are shares of: the "rows", or their "cost", such as tokens, for which all datasets need
            `cost`: `mix({"a": (a, 0.7), "b": (b, 0.3)}, weigh="cost")`; of several costs, the name of one, as
            `weigh="tokens"`. Then a dataset of long rows gives fewer rows,
            and the shares of the cost hold for the mean of many steps, not for each. Packed
            sequences have one length, so their rows are shares of the tokens, too.
        schedule: Other weights from some places of the run on: a `raylance.runs.Schedule`.
        turn_rows: Number of consecutive rows that are of one dataset. With the rows of a step, each step is of one
            dataset.
        stop: When an epoch ends. "first_exhausted": before any dataset would repeat a row. "all_exhausted": when all
            rows of every dataset were handed out; rows of datasets that are used up earlier are repeated until then. A
            number: after this number of rows.
        window_bytes: As in `raylance.dataset`, for all datasets together, divided among them by weight. The datasets in
            `parts` must be opened without `window_bytes`.
        remainder: How the rows after the last whole step are handled: "drop", "pad", "ragged" or "ragged_or_empty", as
            for `dataset`.
        balance: As in `raylance.dataset`. The datasets in `parts` must be opened without it.
        **older: Arguments of 0.12 that others have replaced.

    A run that is restarted may have other weights, another schedule, `turn_rows` and `stop`, and more datasets, which
    are named after the others: they hold from the position of the checkpoint on. Each dataset goes on where it was in
    its own order, and the rows before the position stay what they were. A dataset that is to leave gets the weight 0.
    A dataset that was opened with `version=raylance.runs.Newest(when=…)` may also have other rows, and another filter,
    split, order and seed.

    Returns:
        A handle, as `raylance.dataset` returns. Checkpoints of a run on it hold the position in each dataset.

    Raises:
        ConfigError: If `parts` is empty; if a weight is negative, or all are 0; if `weigh` is "cost" and a dataset has
            no costs; if the datasets differ in columns, decoding, `on_bad_row` or `max_bad_rows`; if one of them was
            opened with `window_bytes`, or is a mixture with settings of its own, such as `stop`; if `weigh` or `stop`
            is unknown.
    """
    at_end, may_be_empty = read_ending("raylance.mix()", remainder, older)
    hints = dict.fromkeys(("seed", "cost", "filter", "columns", "order", "samples"), "give it to each raylance.dataset")
    refuse_unknown("raylance.mix()", older, mix.__kwdefaults__ or (), hints)
    _check_parts(parts)
    parts = dict(_flat(parts, weigh))
    window_bytes = None if window_bytes is None else check_integer("mix(): window_bytes", window_bytes, 1)
    first, schemas = next(iter(parts)), {name: dataset.schema for name, (dataset, _) in parts.items()}
    for name, (dataset, _) in parts.items():
        _check_alike(name, dataset, schemas[name], first, parts[first][0], schemas[first])
    specs = [opened_of(dataset) for dataset, _ in parts.values()]
    read_specs, delivery_specs = [spec.read for spec in specs], [spec.delivery for spec in specs]
    costs = _cost_names(parts)
    weights, row_costs = {name: weight for name, (_, weight) in parts.items()}, _row_costs(parts, weigh, costs)
    shares = quotas([*weights.values()], row_costs)
    if not (schedule is None or isinstance(schedule, Schedule)):
        raise ConfigError(f"mix(): schedule={schedule!r}; give a raylance.runs.Schedule, or None.")
    components = tuple(
        Component(
            name=name,
            order=spec.order,
            seed=spec.seed,
            rows=spec.rows,
            quota=quota,
            on_new_version=spec.on_new_version,
            tables=spec.tables,
            costs=spec.costs,
        )
        for name, spec, quota in zip(parts, delivery_specs, shares, strict=True)
    )
    check_balance(balance, has_costs=bool(costs))
    rows = mix_rows({name: spec.source for name, spec in zip(parts, read_specs, strict=True)})
    decoding, names = read_specs[0].decoding, dataset_names(rows.uri)
    # Samples share values only if the order of each component keeps rows together.
    has_shared = all(spec.decoding is not None and spec.decoding.shares for spec in read_specs)
    read_spec = ReadSpec(
        source=rows,
        delivers=read_specs[0].delivers,
        schema=schemas[first].remove_metadata(),
        decoding=decoding and dataclasses.replace(decoding, datasets=names, shares=has_shared),
        list_lengths={
            name: length if all(spec.list_lengths.get(name) == length for spec in read_specs) else None
            for name, length in read_specs[0].list_lengths.items()
        },
        list_dtypes=read_specs[0].list_dtypes,
        encoded=read_specs[0].encoded,
        filter={name: spec.filter for name, spec in zip(parts, read_specs, strict=True)},
        split={name: spec.split for name, spec in zip(parts, read_specs, strict=True)},
        cost={name: spec.cost for name, spec in zip(parts, read_specs, strict=True)} if costs else None,
    )
    order = MixOrder(
        components=components,
        stop=stop,
        spread="tree",
        schedule=() if schedule is None else schedule.quotas(weights, row_costs),
        turn_rows=check_integer("mix(): turn_rows", turn_rows, 1),
        row_costs=None if row_costs is None else tuple(row_costs),
    )
    if turn_rows > 1:
        _check_turns(order)
    spec = Opened.of(
        read_spec,
        order=order,
        seed=delivery_specs[0].seed,
        remainder=at_end,
        empty_batches=may_be_empty,
        masks_bad_rows=delivery_specs[0].masks_bad_rows,
        window_bytes=window_bytes,
        balance=balance,
    )
    return Dataset(spec)


def _check_turns(order: MixOrder) -> None:
    """Raises ConfigError if an epoch ends before a dataset has had a turn."""
    dealt = order.course.epoch(0)
    shares = zip(order.components, dealt.parts[-1].quotas, dealt.counts(dealt.end), strict=True)
    if left := [part.name for part, quota, count in shares if quota and not count]:
        raise ConfigError(
            f"mix(): an epoch has {dealt.end:,} rows with stop={order.stop!r}, and {', '.join(left)} would have no "
            f"turn of {order.turn_rows:,} rows in it. Give a smaller turn_rows=, or a longer epoch: stop= as a number "
            "of rows."
        )


def _flat(parts: Mapping[str, tuple[Dataset, float]], weigh: str) -> Iterator[tuple[str, tuple[Dataset, Any]]]:
    """Yields the datasets of mixtures in place of these, with their parts of the weights.

    Raises:
        ConfigError: If a mixture has settings that hold for a whole mixture only, or two datasets get one name.
    """
    known = {*parts}
    for name, (dataset, weight) in parts.items():
        spec = opened_of(dataset)
        order, read = spec.delivery.order, spec.read
        if not isinstance(order, MixOrder):
            yield name, (dataset, weight)
            continue
        given = {
            "schedule": order.schedule,
            "turn_rows": order.turn_rows > 1,
            "stop": order.stop != "first_exhausted",
            "window_bytes": spec.delivery.window_bytes,
            "balance": spec.delivery.balance,
        }
        if wrong := [argument for argument, is_given in given.items() if is_given]:
            raise ConfigError(
                f"mix(): the mixture {name!r} has {wrong[0]}= of its own, and its datasets become those of one "
                f"mixture. Pass {wrong[0]}= to the outer mix() instead."
            )
        if (order.row_costs is None) != (weigh == "rows"):
            raise ConfigError(
                f"mix(weigh={weigh!r}): the weights of the mixture {name!r} are shares of something else. Use the same "
                "weigh= for both."
            )
        means = order.row_costs or (Fraction(1),) * len(order.components)
        shares = [part.quota * mean for part, mean in zip(order.components, means, strict=True)]
        sources = cast("MixedRows", read.source).parts
        for part, source, share in zip(order.components, sources, shares, strict=True):
            own = f"{name}/{part.name}"
            if own in known:
                raise ConfigError(f"mix(): {own!r} is the name of two datasets. Give one of them another name.")
            known.add(own)
            own_read = dataclasses.replace(
                read,
                source=source,
                filter=read.filter[part.name],
                split=read.split[part.name],
                cost=read.cost and read.cost[part.name],
            )
            delivery = dataclasses.replace(
                spec.delivery,
                uri=source.uri,
                rows=part.rows,
                row_bytes=source.row_bytes,
                order=part.order,
                seed=part.seed,
                on_new_version=part.on_new_version,
                tables=part.tables,
                costs=part.costs,
            )
            opened = Opened(read=own_read, delivery=delivery)
            yield own, (Dataset(opened), exact(weight) * share / sum(shares))


def _cost_names(parts: Mapping[str, tuple[Dataset, float]]) -> Sequence[str]:
    """Returns the names of the costs that all datasets have; none if one of them has no costs.

    Raises:
        ConfigError: If their costs have other names.
    """
    names = {name: cost_names(opened_of(dataset).delivery.costs) for name, (dataset, _) in parts.items()}
    first = next(iter(names.values()))
    if not all(names.values()):
        return ()
    if len(set(names.values())) > 1:
        found = "; ".join(f"{name}: {', '.join(each)}" for name, each in names.items())
        raise ConfigError(
            f"mix(): the datasets have costs of other names ({found}), which cannot be added up; nothing was "
            "started. Give cost= with the same names to each raylance.dataset."
        )
    return first


def _row_costs(parts: Mapping[str, tuple[Dataset, float]], weigh: str, costs: Sequence[str]) -> list[Fraction] | None:
    """Returns the mean cost of a row of each dataset, if weights are shares of a cost; else None."""
    if weigh == "tokens" and weigh not in costs:
        raise ConfigError(
            'mix(weigh="tokens"): open each dataset with cost={"tokens": raylance.TokensOf("input_ids")}, or with '
            'cost=raylance.TokensOf("input_ids") and weigh="cost".'
        )
    check_word("mix(): weigh", weigh, ("rows", *(costs or (COST,))))
    if weigh == "rows":
        return None
    if not costs:
        raise ConfigError(
            'mix(weigh="cost"): not all datasets have costs; nothing was started. Give cost= to each raylance.dataset, '
            "or leave weigh= out."
        )
    specs = [opened_of(dataset).delivery for dataset, _ in parts.values()]
    sums = [int(spec.costs[cost_table(weigh)].sum(dtype=np.int64)) for spec in specs]
    if not all(sums):
        free = [name for name, total in zip(parts, sums, strict=True) if not total]
        raise ConfigError(
            f"mix(weigh={weigh!r}): all rows of {', '.join(free)} cost 0, so no number of them would be a share of the "
            'cost; nothing was started. Weigh by another cost, or by "rows".'
        )
    return [Fraction(total, spec.rows) for total, spec in zip(sums, specs, strict=True)]


def _check_parts(parts: Any) -> None:
    """Raises if `parts` is not a dict of name to (dataset, weight)."""
    if not isinstance(parts, Mapping) or not parts:
        found = f"takes a dict, and got {type(parts).__name__}" if parts else "got no dataset"
        raise ConfigError(f"mix() {found}: give a dict of name to (dataset, weight).")
    for name, part in parts.items():
        if not (isinstance(name, str) and name):
            raise ConfigError(f"mix(): a dataset is named {name!r}; give it a name that checkpoints can hold, a str.")
        if isinstance(part, Dataset) or not (isinstance(part, tuple | list) and len(part) == 2):
            raise ConfigError(f"mix(): {name!r} is {part!r}; give (dataset, weight), such as (dataset, 0.5).")
        if not isinstance(part[0], Dataset):
            raise ConfigError(f"mix(): {name!r} has the dataset {part[0]!r}; give what raylance.dataset returns.")
    check_weights("mix()", {name: weight for name, (_, weight) in parts.items()}, [*parts])


def _check_alike(
    name: str, dataset: Dataset, schema: pa.Schema, first_name: str, first: Dataset, first_schema: pa.Schema
) -> None:
    """Raises if the rows of a dataset cannot share a batch with the rows of the first dataset."""
    read_spec, spec = opened_of(dataset).read, opened_of(dataset).delivery
    first_read_spec, first_spec = opened_of(first).read, opened_of(first).delivery
    if not _sorted(schema).equals(_sorted(first_schema), check_metadata=False):
        raise ConfigError(
            f"mix(): {name!r} delivers {_fields(schema)}, {first_name!r} delivers {_fields(first_schema)}; a "
            "batch needs one schema. Choose columns=, transform= and samples= so that they agree; a dict in columns= "
            "gives a column that a dataset lacks one value in all its rows."
        )
    if (read_spec.source.windows is None) != (first_read_spec.source.windows is None):
        raise ConfigError(
            f"mix(): of {name!r} and {first_name!r}, one has samples of several rows (samples=), and the "
            "other has not; use them for all or for none."
        )
    if spec.masks_bad_rows != first_spec.masks_bad_rows:
        raise ConfigError(f"mix(): {name!r} and {first_name!r} differ in on_bad_row=; use the same for all.")
    if spec.balance is not None:
        raise ConfigError(
            f"mix(): {name!r} has balance= of its own, and a step has rows of all datasets. Pass balance= to mix() "
            "instead."
        )
    if isinstance(spec.order, Buckets):
        raise ConfigError(
            f'mix(): {name!r} has the order "bucket", and a step has rows of all datasets, whose buckets would '
            'differ. Use another order, such as "window"; budget= and balance= work with all orders.'
        )
    if spec.window_bytes is not None:
        raise ConfigError(
            f"mix(): {name!r} has window_bytes={spec.window_bytes:,} of its own, and the datasets of a mixture "
            "share the memory of one loader. Pass window_bytes= to mix() instead."
        )
    if spec.masks_bad_rows and _max_bad_rows(read_spec) != _max_bad_rows(first_read_spec):
        raise ConfigError(
            f"mix(): {name!r} has max_bad_rows={_max_bad_rows(read_spec)!r}, {first_name!r} has "
            f"{_max_bad_rows(first_read_spec)!r}; a rank counts the rows of all together, so use the same for all."
        )
    if _decoding(read_spec) != _decoding(first_read_spec):
        raise ConfigError(
            f"mix(): {name!r} and {first_name!r} differ in their decoders or in transform=; use the same for all."
        )


def _sorted(schema: pa.Schema) -> pa.Schema:
    """Returns what columns of two datasets that share batches have in common: names and types."""
    return pa.schema(sorted((field.with_nullable(True) for field in schema), key=lambda field: field.name))


def _fields(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _decoding(read_spec: ReadSpec) -> object:
    decoding = read_spec.decoding
    return None if decoding is None else (decoding.decoders, decoding.frames, decoding.transform)


def _max_bad_rows(read_spec: ReadSpec) -> object:
    return read_spec.decoding and read_spec.decoding.max_bad_rows
