"""The arguments of `raylance.dataset`, checked as far as that needs no data."""

import dataclasses
import logging
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import lance
import numpy as np

from raylance.decode.decoder import Decoder, is_on_device
from raylance.decode.decoding import Decoding
from raylance.decode.transforms import Transform
from raylance.errors import ConfigError
from raylance.orders.order import Order
from raylance.planning.balance import Balance
from raylance.planning.step_size import Remainder
from raylance.samples.pack_tokens import PackTokens
from raylance.samples.packs import Pack
from raylance.samples.table import SampleTable
from raylance.samples.windows import Windows
from raylance.source.costs import Cost
from raylance.source.derived import Constant, Derived
from raylance.source.namespace import NamespaceTable
from raylance.source.provenance import Stale
from raylance.source.reader import ReadMode
from raylance.source.splits import Split
from raylance.source.storage_options import StorageOptions
from raylance.source.version import Source, Version

logger = logging.getLogger(__name__)

Samples = Windows | Pack | PackTokens | SampleTable
"""What `samples=` of `raylance.dataset` takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The arguments of `raylance.dataset`, checked.

    Attributes:
        columns: Names of stored columns to deliver; None for all.
        derived: What readers make columns of.
        decoding: What decoders make columns of, the transform, and how bad rows are handled.

    The others are called as the arguments.
    """

    uri: str | os.PathLike[str] | NamespaceTable
    version: Version | None
    on_new_version: str
    storage_options: StorageOptions | None
    stale: Stale
    read: ReadMode
    columns: Sequence[str] | None
    derived: Sequence[Derived]
    decoding: Decoding
    samples: Samples | None
    filter: str | None
    split: Split | None
    cost: Cost | Mapping[str, Cost] | None
    cost_folder: str | os.PathLike[str] | None
    balance: Balance | None
    order: Order
    seed: int
    window_bytes: int | None
    remainder: Remainder
    empty_batches: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The version of a dataset, pinned and open.

    Attributes:
        source: The version.
        opened: The dataset.
        storage_options: The options with which it was opened, those of a namespace included.
    """

    source: Source
    opened: lance.LanceDataset
    storage_options: StorageOptions | None


def split_columns(columns: Any, decode: Any) -> tuple[Any, list[Derived], list[Any]]:
    """Returns the names of stored columns; and what makes columns, which stands among the names or in `decode`: for
    readers, and for decoders.

    Raises:
        ConfigError: If it stands in both, or `columns` is not a list.
    """
    if isinstance(columns, str | bytes | Mapping | Set | Decoder | Derived) or not isinstance(columns, Iterable | None):
        raise ConfigError(
            f"columns= is of type {type(columns).__name__}: give a list of names and of what makes columns, such as "
            '["label", raylance.Image("image", size=224)]; name= of a decoder is the name of its column in batches.'
        )
    if columns is not None:  # a dict in it has values of columns by name
        columns = [
            made
            for each in columns
            for made in ([Constant.of(*one) for one in each.items()] if isinstance(each, Mapping) else [each])
        ]
    given = columns or []
    settings = [each for each in given if isinstance(each, Decoder | Derived)]
    if settings and decode is not None:
        raise ConfigError(
            f"columns= has {settings[0]!r}, and decode= has {decode!r}: name what makes columns in one of them. "
            "Move what decode= has into columns=."
        )
    names = columns
    if settings:
        made = {each.column for each in settings if isinstance(each, Derived)}
        known, names = [each for each in given if isinstance(each, str)], list[Any]()
        for each in given:
            if isinstance(each, Decoder):  # its stored column need not be named again
                if not (each.of_frames or each.column in (*made, *known, *names)):
                    names.append(each.column)
            elif not isinstance(each, Derived):
                names.append(each)
    else:
        settings = list(decode) if isinstance(decode, list | tuple) else [] if decode is None else [decode]
    derived = [each for each in settings if isinstance(each, Derived)]
    return names, derived, [each for each in settings if not isinstance(each, Derived)]


def check_decoders(decode: Sequence[Decoder], transform: Transform | None) -> tuple[Decoder, ...]:
    """Returns the decoders. Raises ConfigError if they do not fit one another or the transform."""
    decoders = tuple(decode)
    if not all(isinstance(decoder, Decoder) for decoder in decoders):
        raise ConfigError(
            f"decode={decode!r}: give raylance.Image(column, size=…), or an object of a subclass of "
            "raylance.Decoder, in columns=."
        )
    decoders = tuple(made for each in decoders for made in (each, *each.companions))
    names = [each.output_name for each in decoders]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"{twice[0]!r} is decoded {names.count(twice[0])} times: decode each column once, or give each decoder of "
            "it a name of its own, name=; views=2 of an Image makes two crops."
        )
    leaders = [each.output_name for each in decoders if each.like is None]
    for each in decoders:
        if each.like is not None and each.like not in leaders:
            raise ConfigError(
                f"{type(each).__name__}({each.column!r}, like={each.like!r}): must name a decoded column that does not "
                f"use like= itself: {', '.join(leaders) or 'there is none'}."
            )
    if transform is not None and (late := [each for each in decoders if is_on_device(each)]):
        raise ConfigError(
            f"transform= runs in decode actors, before {type(late[0]).__name__}({late[0].column!r}) decodes on the "
            "trainer's device: it would get encoded bytes. Change the decoded tensors in the training loop instead."
        )
    _warn_of_unlike_crops(decoders)
    return decoders


def _warn_of_unlike_crops(decoders: Sequence[Decoder]) -> None:
    names = list(dict.fromkeys(each.column for each in decoders if each.is_random))  # views of one column may differ
    if len(names) > 1:
        logger.warning(
            "%s are augmented at random, each by itself: those of a row get different crops and flips. If they belong "
            "together, as an image and its mask do, let one follow the other: "
            'Image(%r, like=%r, mode="L", interpolation="nearest"), without augment= and hflip=; or crop both in a '
            "transform=, seeded with _seed.",
            " and ".join(names),
            names[1],
            names[0],
        )


def check_bad_rows(max_bad_rows: Any, on_bad_row: str) -> int | float | None:
    """Returns how many bad rows are masked, at most. Raises ConfigError if it is neither a count nor a fraction."""
    if max_bad_rows is None:
        return None
    if on_bad_row != "mask" and max_bad_rows != 0.01:  # the default
        logger.warning(
            'max_bad_rows=%r limits masked rows, and on_bad_row="raise" masks none: the first bad row is an error. '
            'Pass on_bad_row="mask", or leave max_bad_rows= out.',
            max_bad_rows,
        )
    if isinstance(max_bad_rows, float | np.floating):
        if 0 <= max_bad_rows <= 1:
            return float(max_bad_rows)
        raise ConfigError(f"max_bad_rows={max_bad_rows!r}: a fraction lies in [0, 1]; a count is an integer.")
    if isinstance(max_bad_rows, bool) or not isinstance(max_bad_rows, int | np.integer) or max_bad_rows < 0:
        raise ConfigError(
            f"max_bad_rows={max_bad_rows!r}: must be a count, an integer of at least 0; a fraction in [0, 1]; or None."
        )
    return int(max_bad_rows)
