"""The reopening of a run's dataset from its checkpoint."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from raylance.api.asked import Samples
from raylance.api.dataset import Dataset, opened_of
from raylance.api.mixing import mix
from raylance.api.opening import dataset
from raylance.api.opening_samples import kind_of, take_samples
from raylance.columns import COMPONENT
from raylance.descriptions import CLASS, is_description, kind_of_setting, read_description, read_setting
from raylance.errors import ConfigError, StateError
from raylance.orders.changed import Changed, as_recorded, unchanged
from raylance.orders.mixture import MixOrder
from raylance.orders.order import Order
from raylance.orders.registry import ORDERS
from raylance.orders.sampling import ClassBalanced
from raylance.planning.state import parse_state
from raylance.planning.step_size import Remainder
from raylance.samples.table import IS_PAD
from raylance.source.costs import cost_of_saved
from raylance.source.derived import Derived

_KEPT = ("uri", "version", "branch", "filter", "split", "windows", "cost")
_RECORDED: dict[str, type[Order]] = {**ORDERS, ClassBalanced.name: ClassBalanced}


def reopen(
    state: Mapping[str, Any],
    *,
    uri: str | Sequence[str] = (),
    remainder: Remainder = "drop",
    **changes: Any,
) -> Dataset:
    """Opens the dataset or the mixture of a run.

    Args:
        state: The content of a `raylance_state.json` of the run.
        uri: The present URI of the data, if it has moved; for a mixture, one URI for each dataset, in the order in
            which the state names them. Videos, and tables of LeRobot's layout, that lay beside it have moved along.
        remainder: The argument `remainder` with which the run opened its dataset; a checkpoint does not hold it.
        **changes: Other arguments of `raylance.dataset`, for all datasets of a mixture: arguments that are not taken
            from the state, such as `storage_options` and `decode`, and arguments that differ from the run's. States
            of raylance 0.11 and older do not hold `samples` of packs, either.

    Raises:
        StateError: If the state is damaged.
        ConfigError: If `order` must be given, because a checkpoint holds neither the weights of a `Weighted` order nor
            the code of a custom one; or if `uri` does not have one URI for each dataset.
    """
    given = take_samples("reopen()", changes.pop("samples", None), changes)
    saved = parse_state(state)
    is_mixture = saved.order.get("name") == MixOrder.name
    parts: dict[str, Any] = (
        saved.order["components"] if is_mixture else {"": {"order": saved.order, "seed": saved.seed}}
    )
    uris = [uri] if isinstance(uri, str) else list(uri)
    if uris and len(uris) != len(parts):
        raise ConfigError(
            f"uri={uris}: the run read {len(parts)} datasets. Nothing was opened. Give a URI for each, or none."
        )
    opened = {}
    for number, (name, part) in enumerate(parts.items()):
        one = {key: getattr(saved, key) for key in _KEPT}
        if is_mixture:
            one = {key: None if value is None else value[name] for key, value in one.items()}
        derived = [] if "decode" in changes else _derived(saved.decode, name)
        if uris:
            derived = [_beside(each, one["uri"], uris[number]) for each in derived]
        samples = given
        if given is None and one["windows"] is not None:
            samples = _samples(one["windows"])
        arguments = {
            "version": one["version"] if one["branch"] is None else (one["branch"], one["version"]),
            "filter": one["filter"],
            "split": None if one["split"] is None else read_setting(one["split"]),
            "seed": part["seed"],
            "order": changes["order"] if "order" in changes else _order(**part["order"]),
            "remainder": remainder,
            "window_bytes": None if is_mixture else saved.window_bytes,
            "decode": derived,
            "samples": samples,
            "cost": cost_of_saved(one["cost"]),
            **changes,
        }
        if kind_of(samples).has_columns and saved.transform is None:
            arguments.setdefault("columns", saved.columns)
        if arguments.get("columns") is not None:
            arguments["columns"] = _stored(arguments["columns"], samples, derived, saved.decode)
        # The run may have allowed batches without rows, and nothing is trained here.
        found = opened_of(dataset(uris[number] if uris else one["uri"], **arguments))
        opened[name] = Dataset(found.with_delivery(empty_batches=True))
    if not is_mixture:
        spec = opened_of(opened[""])
        return Dataset(spec.with_delivery(order=unchanged(as_recorded(spec.delivery.order, saved.order))))
    weighed = {name: (opened[name], part["quota"]) for name, part in parts.items()}
    mixed = mix(weighed, stop=saved.order["stop"], window_bytes=saved.window_bytes, remainder=remainder)
    spec = opened_of(mixed).with_delivery(empty_batches=True)
    order = cast("MixOrder", spec.delivery.order)
    # The recorded quotas are restored, because mix() divides them by a common divisor; and all weights since. What has
    # changed in the rows is known where the state is loaded.
    order = (order.recorded(saved.order) or order).adopt(saved.order).renewed(order)
    return Dataset(spec.with_delivery(order=order))


def _stored(
    columns: Sequence[str], samples: Samples | None, derived: Sequence[Derived], decode: Sequence[Any]
) -> list[str]:
    """Returns the stored columns of which those of batches were made, without those that windows and readers add."""
    added = {f"{name}{IS_PAD}" for name in kind_of(samples).of_several(samples)}
    added |= {each.column for each in derived}
    decoded = {
        f"{each.get('name') or each['column']}{suffix}": each["column"]
        for each in decode
        if isinstance(each, Mapping) and "column" in each and not is_description(each, Derived)
        for suffix in ("", *getattr(kind_of_setting(each.get(CLASS)), "adds", ()))
    }
    named = (decoded.get(name, name) for name in columns)
    return list(dict.fromkeys(name for name in named if name not in added))


def _derived(decode: Sequence[Any], component: str) -> list[Derived]:
    """Returns the columns that readers made of a component, as a checkpoint describes them."""
    found = [each for each in decode if is_description(each, Derived) and each.get(COMPONENT, "") == component]
    return [read_description({name: value for name, value in each.items() if name != COMPONENT}) for each in found]


def _beside(column: Derived, before: str, now: str) -> Derived:
    """Returns a column whose other tables lay in the folder of a dataset, for the folder in which that is now."""
    old, new = before.rpartition("/")[0], os.fspath(now).rstrip("/").rpartition("/")[0]
    paths = {name: str(value) for name in ("videos", "root") if (value := getattr(column, name, None)) is not None}
    moved = {name: new + path[len(old) :] for name, path in paths.items() if f"{path}/".startswith(f"{old}/")}
    return dataclasses.replace(column, **moved) if moved else column  # type: ignore[type-var]


def _samples(described: Any) -> Samples:
    """Returns what makes samples of several rows, or of parts of rows, as a checkpoint holds it."""
    try:
        return cast("Samples", read_setting(described))
    except ConfigError as error:
        raise ConfigError(
            f"the run's samples are made by {described}, whose code no checkpoint holds: give it as samples=. Nothing "
            "was opened without it."
        ) from error


def _order(name: Any = None, **params: Any) -> Order:
    """Returns the order that a checkpoint holds, as it was last."""
    if name == Changed.name:
        return _order(**params["of"])
    kind = _RECORDED.get(name)
    if kind is None:
        raise ConfigError(
            f"the run's order {name!r} is not all in its checkpoint: give it as order=. Nothing was opened without it."
        )
    try:
        return kind(**params)
    except (TypeError, ConfigError) as error:
        raise StateError(f"the state is damaged: its order is {params} ({error}). Use an earlier one.") from error
