"""The datasets of a mixture at a restart: each continues in its own epoch, as if it were alone."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from raylance.orders.changed import Changed
from raylance.orders.compact import refusing
from raylance.orders.course import write_segments
from raylance.orders.mixture import Component, MixOrder
from raylance.planning.delivery_spec import DeliverySpec
from raylance.planning.state import VERSION, State, Versions, damaged

_ROWS = (*VERSION, "filter", "split")  # with the code, they determine the selected rows
_BY_NAME = ("uri", "branch", *_ROWS, "windows", "cost")  # fields of a state that a mixture holds by dataset
_OF_BATCHES = ("columns", "decode", "transform", "codecs", "cost")  # compared for all datasets together


def recorded_in(saved: State, order: MixOrder) -> MixOrder | None:
    """Returns the mixture of a state, with the rows that its datasets had; None if these are not the first ones of
    `order`, or none of them may differ. Raises ConfigError if the state is damaged.
    """
    recorded, found = order.recorded(saved.order), []
    if recorded is None or not any(may_differ(part, saved) for part in recorded.components):
        return None
    optional = ("branch", "windows", "cost")
    fields = {name: value for name in _BY_NAME if (value := getattr(saved, name)) is not None or name not in optional}
    for part, of in zip(recorded.components, saved.order["components"].values(), strict=True):
        with refusing(f"settings of dataset {part.name!r}", [of, fields, saved.rows_of]):
            _ = of["order"]["name"], of["seed"] + 1, [value[part.name] for value in fields.values()]
            _ = saved.rows_of is None or [{**saved.rows_of[name]} for name in VERSION]
            rows = of["rows"] if of.get("epoch_rows", "auto") == "auto" else of["epoch_rows"]
            if min(of["rows"], rows) < 1:
                raise ValueError(f"an epoch of {rows} of {of['rows']} rows")
            found.append(dataclasses.replace(part, rows=of["rows"], epoch_rows=rows))
    return dataclasses.replace(recorded, components=tuple(found))


def may_differ(part: Component, saved: State) -> bool:
    """Whether the rows of a dataset may be other ones than those of a state, or have changed before it."""
    return part.on_new_version != "refuse" or saved.order["components"][part.name]["order"].get("name") == Changed.name


def at_begin(saved: State, end: int) -> State:
    """Returns the state from which to continue: the end of an epoch becomes the start of the next one."""
    if saved.position > end:
        raise damaged(f"position {saved.position} of an epoch of {end}")
    if saved.position == end:
        return dataclasses.replace(saved, epoch=saved.epoch + 1, position=0, step=0)
    return saved


def origin_of(origin: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the fields of a state that describe the rows of one dataset."""
    return {key: value[name] if key in _BY_NAME and value is not None else value for key, value in origin.items()}


def spec_of(spec: DeliverySpec, part: Component, versions: Versions) -> DeliverySpec:
    """Returns the rows of one dataset, as if they were delivered alone."""
    names = ("rows", "order", "tables", "costs", "seed", "on_new_version")
    fields = {name: getattr(part, name) for name in names}
    return dataclasses.replace(spec, fingerprint=versions.fingerprint_of(None), window_bytes=None, **fields)


def state_of(
    saved: State, part: Component, place: tuple[int, int], versions: Versions, origin: Mapping[str, Any]
) -> State:
    """Returns the state of one dataset, which is at a place of its own epochs. `origin` describes its present rows."""
    of, (epoch, position) = saved.order["components"][part.name], place
    rows_of = {name: (saved.rows_of or {}).get(name, {}).get(part.name) for name in VERSION}
    found = dataclasses.replace(
        saved,
        **origin_of({name: getattr(saved, name) for name in _BY_NAME if name not in _OF_BATCHES}, part.name),
        rows=of["rows"],
        seed=of["seed"],
        order=of["order"],
        epoch=epoch,
        position=position,
        components={},
        **{name: origin[name] for name in _OF_BATCHES},
        rows_of=rows_of if all(rows_of.values()) else None,
        rows_from=None,
    )
    differing = {name for name in (*_ROWS, "windows") if getattr(found, name) != origin.get(name)}
    if differing <= {*VERSION} and (not differing or versions.has_rows_of(found.version, found.identity)):
        return dataclasses.replace(found, fingerprint=versions.fingerprint_of(None))
    # Where the epoch of the mixture begins, no position means a row, and the scan would be for nothing.
    return dataclasses.replace(found, fingerprint=versions.fingerprint_of(found.before) if saved.position else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Continued:
    """A dataset of a mixture at a restart.

    Attributes:
        part: The dataset, with what has changed in its own epoch.
        rows_of: See `State`.
        has_changed: Whether its rows or their order differ from those of the state.
        forgets: Whether the rows of its earlier own epochs are not known any more.
    """

    part: Component
    rows_of: Mapping[str, Any] | None
    has_changed: bool
    forgets: bool


def carried(
    saved: State, recorded: MixOrder, parts: Mapping[int, Continued], spec: DeliverySpec, origin: Mapping[str, Any]
) -> State:
    """Carries the state of a mixture over what has changed in the rows of some datasets, by their numbers: returns the
    state that a loader of the present rows, which `spec` and `origin` describe, would have written there.
    """
    changed = {
        number: dataclasses.replace(each.part, quota=recorded.components[number].quota)
        for number, each in parts.items()
        if each.has_changed
    }
    order, described = dict(saved.order), {**saved.order["components"]}
    for each in parts.values():
        described[each.part.name] = {**described[each.part.name], "order": each.part.order.params()}
    if changed:
        moved = recorded.with_rows(saved.epoch, saved.position, changed)
        described |= {part.name: part.params() for part in changed.values()}
        order["segments"] = write_segments(moved.segments)
        saved = dataclasses.replace(saved, rows=spec.rows)
        others = [part.name for number, part in enumerate(recorded.components) if number not in parts]
        if all((saved.windows or {}).get(name) == (origin.get("windows") or {}).get(name) for name in others):
            saved = dataclasses.replace(saved, fingerprint=spec.fingerprint)
    fields: dict[str, Any] = {name: {**getattr(saved, name)} for name in ("uri", *_ROWS)}
    for name, each in itertools.product(fields, parts.values()):
        fields[name][each.part.name] = origin[name][each.part.name]
    rows_of = {name: {**fields[name], **(saved.rows_of or fields)[name]} for name in VERSION}
    for name, each in itertools.product(VERSION, parts.values()):
        rows_of[name][each.part.name] = each.rows_of[name] if each.rows_of else origin[name][each.part.name]
    has_moved = saved.rows_of or any(each.rows_of for each in parts.values())
    return dataclasses.replace(
        saved,
        **fields,
        order={**order, "components": described},
        seed=spec.seed if 0 in parts else saved.seed,
        rows_of=rows_of if has_moved else None,
        rows_from=(saved.epoch or None) if any(each.forgets for each in parts.values()) else saved.rows_from,
    )
