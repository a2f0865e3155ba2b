"""`raylance.dataset()`: checks the arguments, pins a version, and opens it step by step."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from raylance.api.asked import Asked, Samples, Stored, check_bad_rows, check_decoders, split_columns
from raylance.api.dataset import Dataset
from raylance.api.opening_columns import open_columns
from raylance.api.opening_samples import kind_of, take_samples, try_rows
from raylance.arguments import check_integer, check_word, refuse_unknown, warn_replaced
from raylance.decode.decoder import Decoder
from raylance.decode.decoding import Decoding
from raylance.decode.transforms import Transform
from raylance.environment.shared import Shared
from raylance.errors import ConfigError
from raylance.opened import Opened, ReadSpec
from raylance.orders.order import Order
from raylance.orders.registry import make_order
from raylance.orders.schedule import Newest
from raylance.planning.balance import Balance, check_balance
from raylance.planning.step_size import Ending, read_ending
from raylance.source.costs import Cost, check_costs, share_costs
from raylance.source.derived import Derived
from raylance.source.filters import check_filter
from raylance.source.namespace import NamespaceTable
from raylance.source.pickled import refuse_pickled
from raylance.source.provenance import STALE, Stale, check_fresh
from raylance.source.reader import READ_MODES, ReadMode
from raylance.source.selection import Selection, share_selection
from raylance.source.splits import Split
from raylance.source.storage_options import StorageOptions
from raylance.source.tables import SelectionRows, by_block, share_tables
from raylance.source.version import Version, pin


def dataset(
    uri: str | os.PathLike[str] | NamespaceTable,
    *,
    version: Version | Newest | None = None,
    columns: Sequence[str | Decoder | Derived | Mapping[str, Any]] | None = None,
    filter: str | None = None,
    split: Split | None = None,
    transform: Transform | None = None,
    samples: Samples | None = None,
    cost: Cost | Mapping[str, Cost] | None = None,
    cost_folder: str | os.PathLike[str] | None = None,
    balance: Balance | None = None,
    order: str | Order = "window",
    seed: int = 0,
    window_bytes: int | None = None,
    remainder: Ending = "drop",
    on_bad_row: Literal["raise", "mask"] = "raise",
    max_bad_rows: int | float | None = 0.01,
    stale: Stale = "warn",
    storage_options: StorageOptions | None = None,
    **others: Any,
) -> Dataset:
    """Opens a Lance dataset for training: pins the version, builds the selection, checks every argument.

    Args:
        uri: Path or URI of the dataset, or of a branch of it, readable from every node; or a
            `raylance.namespaces.NamespaceTable`.
        version: Version number, tag, or (branch, number). None takes the newest version, and (branch, None) the newest
            version of the branch. The version is resolved now, and recorded in checkpoints. A `raylance.runs.Newest`
            says how a run continues in the middle of an epoch if its rows have changed.
        columns: Columns to deliver; None for all. An element is a name, or what makes a column, such as
            `raylance.Image("image", size=224)` or `raylance.Video(…)`. "image.bytes" names the field `bytes` of the
            struct `image`, and the column in batches. With None, a struct that holds blobs or a field to decode comes
            as the fields inside it. A dict in the list has columns with one value in all rows, by name, such as
            `{"has_action": False, "action": np.zeros(7, np.float32)}`.
        filter: SQL expression that selects rows.
        split: A part of the filtered rows: `FractionSplit`, `RangeSplit` or `ValueSplit`.
        transform: A function that the decode actors run after decoding. It gets a dict of arrays by column, with
            `_rowoffset` (int64) and `_seed` (uint64, from row, epoch and seed, for `numpy.random.default_rng`). It may
            change the arrays in place, and returns a dict of arrays with the same number of rows. It gets pieces of
            batches, so its result for a row must not depend on other rows. Pictures have their channels last; torch
            batches have them first, unless the last axis of what it returns under that name has another length.
        samples: What a sample is; None for a row. `raylance.Windows` makes a sample of each selected row and of rows
            around it in the same episode; `raylance.Pack` packs documents of tokens into sequences; an object of a
            subclass of `raylance.SampleTable` makes a sample of any rows.
        cost: What each row costs to train on, such as its number of tokens: the name of a column of numbers; an SQL
            expression over such columns, as "tokens + 256 * images"; or `raylance.TokensOf("input_ids")`. Fractions are
            rounded up: give seconds as "1000 * seconds". Count padding, too, that comes by `raylance.Pad(multiple=…)`:
            `TokensOf` has the same `multiple`. If a row has several costs, such as those of a language model and of a
            vision encoder, give a dict by name: `{"tokens": …, "patches": …}`; `Budget` and `Balance` hold for each of
            them. The costs are read now, once for a version and a selection.
            The order `raylance.Buckets` and batches of a `raylance.Budget` need them.
        cost_folder: Folder that keeps the costs of more than 65,536 rows (those that follow from images, of any
            number), or the lengths of as many documents for `raylance.Pack`, 4 bytes a row, for later starts: a path,
            or a URI that pyarrow can open, which gets its keys from the environment. None for `raylance/costs` in the
            user's cache folder. If a process is killed while it reads the costs, the next one on the same machine
            continues. Nothing removes old files.
        balance: `raylance.Balance` divides the rows of each step among the ranks so that they cost about the same. It
            needs `cost`.
        order: "window", "shard", "sequential", "row" or "bucket", or an order with its parameters.
        seed: Seed of the order and of augmentation, on every rank. A `FractionSplit` has another seed.
        window_bytes: Bytes of memory for the windows of a shuffle, in total over all ranks: the current and the next
            window of each lane. The sizes that `order` leaves to "auto" follow from it. None takes `reader_bytes`
            of the run's `DataConfig`; without one, 512 MiB. Checkpoints record it, and a resume keeps it.
        remainder: How the rows after the last whole step are handled: "drop" leaves them out, "pad" fills the step with
            repeated rows, whose `_valid` is False, and "ragged" makes a shorter step. If that has fewer rows than there
            are data-parallel ranks, some get a batch without rows, and a warning with the first one. With
            "ragged_or_empty", there is no warning, and a global batch may have fewer rows than there are ranks.
        on_bad_row: "raise" stops at a bad row: a row that cannot be decoded, or on which the transform fails even if it
            gets this row alone. "mask" delivers zeros with `_valid` False instead.
        max_bad_rows: With "mask", how many bad rows a rank may be handed before there is an error. An integer counts
            different rows. A float is a fraction of all rows that the rank was handed since its start, checked from
            1,000 rows on. None for no limit.
        stale: For a dataset that jobs/materialize made from a source: if files of the source have changed since, "warn"
            logs a warning once, and "refuse" raises an error; "ignore" does not check. It is not an error if the source
            cannot be reached.
        storage_options: Options of the object store, as Lance names them; or a picklable function that returns them,
            called in each process that opens the dataset. If the options have "expires_at_millis", a time in
            milliseconds since 1970, the function is called again before that time: "refresh_offset_millis" earlier if
            the options have this, too, else a minute earlier.
        **others: `decode`, what makes columns, one or a list, if it does not stand in `columns`; without `columns`, all
            other columns come, too. And arguments of 0.12 that others have replaced. Any other is refused, and the
            error names the right one.

    Returns:
        A handle for `TorchTrainer(datasets=…)`, which can also be iterated directly as rank 0 of 1.

    Raises:
        DatasetError: If the dataset, version, tag or a column is missing; if the filter does not parse or selects
            nothing; if a column to decode has neither bytes nor lists of them, or none of its sampled rows can be
            decoded; with stale="refuse", if the source has changed.
        ConfigError: If an argument cannot be honoured.
    """
    call = "raylance.dataset()"
    samples = take_samples(call, samples, others)
    kind = kind_of(samples)
    at_end, may_be_empty = read_ending(call, remainder, others)
    decode, read = others.pop("decode", None), others.pop("read", None)
    refuse_unknown(call, others, [*(dataset.__kwdefaults__ or ()), "decode"])
    check_word("on_bad_row", on_bad_row, ("raise", "mask"))
    mode: ReadMode = "auto" if read is None else read
    check_word("read", mode, READ_MODES)
    if read is not None:
        warn_replaced(call, ["read"], "nothing in its place: raylance chooses for each chunk", depth=0)
    check_word("stale", stale, STALE)
    if split is not None and not isinstance(split, Split):
        raise ConfigError(f"split={split!r}: give a FractionSplit, a RangeSplit or a ValueSplit.")
    seed, made_order = check_integer("seed", seed, None), make_order(order)
    window_bytes = None if window_bytes is None else check_integer("window_bytes", window_bytes, 1)
    check_filter(filter)
    most = check_bad_rows(max_bad_rows, on_bad_row)
    names, derived, decoders = split_columns(columns, decode)
    pinned = None if isinstance(version, Newest) else version
    asked = kind.check(
        Asked(
            uri=uri,
            version=(version.branch, None) if isinstance(version, Newest) and version.branch else pinned,
            on_new_version=version.when if isinstance(version, Newest) else "refuse",
            storage_options=storage_options,
            stale=stale,
            read=mode,
            columns=names,
            derived=derived,
            decoding=Decoding(
                decoders=check_decoders(decoders, transform),
                seed=seed,
                mask_bad_rows=on_bad_row == "mask",
                max_bad_rows=most,
                transform=transform,
                shares=not made_order.scatters,
            ),
            samples=samples,
            filter=filter,
            split=split,
            cost=cost,
            cost_folder=cost_folder,
            balance=balance,
            order=made_order,
            seed=seed,
            window_bytes=window_bytes,
            remainder=at_end,
            empty_batches=may_be_empty,
        )
    )
    check_balance(balance, has_costs=cost is not None)
    stored = _pin(asked)
    found = open_columns(asked, stored)
    selection = share_selection(stored.source, filter, split, stored.opened)
    table, selection = kind.select(asked, stored, found, selection)
    read_spec = kind.deliver(asked, stored, try_rows(asked, stored, found, selection, table))
    return Dataset(_bind_order(asked, stored, selection, read_spec))


def _pin(asked: Asked) -> Stored:
    """Pins a version of a dataset, and opens it."""
    uri, storage_options = asked.uri, asked.storage_options
    if isinstance(uri, NamespaceTable):
        uri, storage_options = uri.locate(storage_options, newest=asked.version is None)
    source = pin(uri, asked.version, storage_options)
    opened = source.open()
    refuse_pickled(opened.schema, f"{source.uri!r}, version {source.version},")
    check_fresh(opened, asked.stale, storage_options)
    return Stored(source=source, opened=opened, storage_options=storage_options)


def _bind_order(asked: Asked, stored: Stored, selection: Shared[Selection], read_spec: ReadSpec) -> Opened:
    """Reads the costs, and what the order looks up in the selected rows."""
    source, opened = stored.source, stored.opened
    costs = check_costs(opened, asked.cost, asked.cost_folder)
    selected = read_spec.source.load_selection()
    order = by_block(asked.order, selected)
    bound, tables = order.bind(
        SelectionRows(source, opened, selected, {name: each.text for name, each in costs.items()})
    )
    return Opened.of(
        read_spec,
        order=bound,
        tables=share_tables(order, tables, source, selection),
        costs=share_costs(source, opened, costs, selection),
        balance=asked.balance,
        seed=asked.seed,
        remainder=asked.remainder,
        empty_batches=asked.empty_batches,
        masks_bad_rows=asked.decoding.mask_bad_rows,
        window_bytes=asked.window_bytes,
        on_new_version=asked.on_new_version,
    )
