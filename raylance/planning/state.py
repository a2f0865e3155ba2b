"""The state of a loader in a checkpoint, and its comparison with the state of another loader.

A state is JSON, the same on every rank. Its position is two integers, (epoch, position). The other fields say what they
refer to: which rows, in which order and, for information, how batches were made of the rows.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from raylance.descriptions import CLASS, description_of, in_words, is_description
from raylance.errors import ConfigError, StateError
from raylance.orders.compact import is_packed, unpacked
from raylance.orders.permutation import Int64Array
from raylance.orders.sampling import ClassBalanced, Weighted
from raylance.planning.step_size import CostLimit, Size

logger = logging.getLogger(__name__)

FORMAT = 6
FILE_NAME = "raylance_state.json"
LOADERS = "loaders"
"""Key of the states by name in the file of a checkpoint, if there are several loaders."""
# Each of these must be equal, or the saved position would mean other rows.
_MUST_MATCH = ("branch", "version", "identity", "filter", "split", "rows", "fingerprint", "seed")
# These may change between runs, but rarely on purpose.
VERSION = ("version", "identity")
"""The fields that say which version of a dataset a state is of."""
# These may differ where an epoch begins, because no position refers to the rows there: the dataset has changed.
_MAY_GROW = (*VERSION, "rows", "fingerprint")
_DRAWN = (Weighted.name, ClassBalanced.name)  # orders that draw rows
# These may differ in the middle of an epoch, if that is asked for: it continues with the rows that are left.
_MAY_CHANGE = (*_MAY_GROW, "filter", "split", "seed", "order")
_SHOULD_MATCH = ("columns", "decode", "transform", "codecs", "cost")
_OLDEST_FORMAT = 4  # of raylance 0.8 and 0.9
_OLD_NAMES = {"world_size": "dp_size"}  # fields of the oldest format, and their present names
_WERE_TEXTS = ("split", "windows")  # held by older formats as the `repr` of a setting
_MOST_BYTES = 64 << 20  # the state of a mixture of thousands of datasets needs a tenth of it
_MOST = 2**63 - 1  # the largest count: keys, positions and tensors have 64 bits

_MAY_BE_0 = ("order.bucket_rows", "order.bucket_cost")  # sizes that are 0 if they are not used
_OMITTED_IF_ALL = ".epoch_rows"  # a component's field, left out if the component's epoch has all its selected rows

_OPTIONAL = ("windows", "cost", "budget", "rows_of", "rows_from")  # fields that are left out if they are None

_IDENTITY = (
    "uri", "version", "branch", "filter", "split", "windows", "rows", "fingerprint", "identity", "order", "seed",
    "columns", "decode", "transform", "codecs",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The consumed position of a loader, and the data and the order that it refers to."""

    uri: Any  # path or URI. In a mixture, this and the next fields up to `split` are dicts by component
    branch: Any  # in which `version` is counted; None for the branch that `uri` opens
    version: Any
    identity: Any  # hash of the version's files: another dataset in the same place has another one
    filter: Any
    split: Any  # its description, or None
    rows: int  # number of selected rows
    fingerprint: str  # hash of the selected row offsets
    seed: int
    columns: Any
    decode: Any  # the decoders, as `describe` returns them
    transform: Any  # as `describe` returns it
    codecs: Any  # by decoded column, the codec of its values, with versions
    order: Mapping[str, Any]  # its parameters; a size may be "auto" until the first iteration
    window_bytes: int  # from which the order computes its "auto" sizes
    epoch: int  # the epoch of the next batch
    position: int  # rows of the epoch's order that all ranks together consumed
    step: int  # steps of this epoch that were handed out
    global_step: int  # steps that were handed out since the run began
    completed_shards: Mapping[str, Any]  # those that lie wholly in the consumed prefix; see `list_shards`
    components: Mapping[str, Any]  # in a mixture, the position of each dataset by name; for information
    global_batch_size: int | None  # for information; the next run may use another one
    dp_size: int  # for information; the next run may use another one
    # Checksum of `order` and `window_bytes`. A loader with "auto" sizes takes both from the state, so it could not
    # notice otherwise that somebody changed them.
    checksum: str = dataclasses.field(default="", compare=False)
    # These are not in the state if they are None.
    windows: Any = None  # the description of what makes samples of several rows
    cost: Any = None  # what a row costs, in words
    budget: Any = None  # the fields of `CostLimit`, in place of `global_batch_size`; for information
    # `version` and `identity` with which the run began, if it has moved to another version with the same rows since
    rows_of: Any = None
    rows_from: int | None = None  # the first epoch whose rows are known, if those of earlier ones were others

    @property
    def size(self) -> Size | None:
        """The size of a step over all ranks; None if no step was made.

        Raises:
            ConfigError: If it cannot be honoured.
            TypeError: If the budget has other fields.
        """
        return self.global_batch_size if self.budget is None else CostLimit(**self.budget)

    @property
    def before(self) -> dict[str, Any]:
        """The fields that say what was delivered up to the state; see `raylance.orders.changed.Change`."""
        found = {name: getattr(self, name) for name in _MAY_CHANGE} | {"order": self.order.get("of", self.order)}
        return found if self.rows_of is None else found | {"rows_of": self.rows_of}

    def to_dict(self) -> dict[str, Any]:
        """Returns the state as JSON-able values, which are copies."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        copied: dict[str, Any] = json.loads(json.dumps(fields))  # takes a tenth of the time of `dataclasses.asdict`
        for name in _OPTIONAL:
            if copied[name] is None:
                del copied[name]
        return {"format": FORMAT, **copied, "checksum": self.order_checksum()}

    def order_checksum(self) -> str:
        """Returns the checksum of the present `order` and `window_bytes`."""
        encoded = json.dumps([self.order, self.window_bytes], sort_keys=True).encode()
        return hashlib.sha256(encoded).hexdigest()[:16]


def identity_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a state that identify the rows, their order and their decoding, without empty ones."""
    return {name: state[name] for name in _IDENTITY if state.get(name) not in (None, "", [], {})}


def subject_of(state: Mapping[str, Any]) -> str:
    """Returns a key of the data that a state refers to: the dataset, branch, filter and split, not the version. That of
    a mixture is the key of its first dataset, because others may join it.
    """
    values = [state.get(name) for name in ("uri", "branch", "filter", "split")]
    first = next(iter(values[0]), None) if isinstance(values[0], Mapping) else None
    if first is not None:
        values = [value.get(first) if isinstance(value, Mapping) else value for value in values]
    return json.dumps(values, sort_keys=True)


def changes_of(state: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Returns, for each dataset of a state, what has changed in its rows, earlier changes first: fields of
    `raylance.orders.changed.Change`.
    """
    order = state.get("order", {})
    is_mixture = isinstance(state.get("uri"), Mapping)
    orders = [part["order"] for part in order["components"].values()] if is_mixture else [order]
    return [unpacked(each["changes"]) if "changes" in each else [] for each in orders]


def selection_of(state: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns a key of the rows that a state selects from its data, one for each dataset of a mixture. Equal keys mean
    the same version and number of rows; of one dataset, the same rows.
    """
    version = {name: state.get(name) for name in VERSION} if state.get("rows_of") is None else state["rows_of"]
    order = state.get("order", {})
    parts = order.get("components") if isinstance(state.get("uri"), Mapping) else None
    if not parts:
        return (json.dumps([*version.values(), state.get("rows"), state.get("fingerprint")], sort_keys=True),)
    of_parts = {  # a dataset that has joined since has no entry
        name: [{**(state.get(field) or {}), **(value or {})}.get(name) for field, value in version.items()]
        for name in parts
    }
    return tuple(json.dumps([*of_parts[name], part.get("rows"), None]) for name, part in parts.items())


def states_in(content: bytes) -> list[Mapping[str, Any]]:
    """Returns the loaders' states in the content of a checkpoint's file; none if it is damaged: see `read_state`."""
    try:
        loaded = json.loads(content)
    except (ValueError, RecursionError):
        return []
    several = loaded.get(LOADERS, {}) if isinstance(loaded, dict) else {}
    found = several.values() if isinstance(several, dict) and several else [loaded]
    return [renew(state) for state in found if isinstance(state, dict)]


def renew(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state with the names and the descriptions of the present format, if it has an older one."""
    if not (_is_count(state.get("format"), 1) and state["format"] < FORMAT):
        return dict(state)
    found = {_OLD_NAMES.get(name, name): value for name, value in state.items()}
    for name in _WERE_TEXTS:
        value = found.get(name)
        if isinstance(value, Mapping):  # by component
            found[name] = {part: description_of(text) for part, text in value.items()}
        elif value is not None:
            found[name] = description_of(value)
    return found | {"format": FORMAT}


def parse_state(saved: Mapping[str, Any]) -> State:
    """Reads a state of the present format or of an older one that is supported. Raises StateError if it is not a state,
    too new, too old, or damaged.
    """
    found = saved.get("format") if isinstance(saved, Mapping) else None
    if not _is_count(found, 1):
        raise StateError(
            f"this is not a raylance state: its format number is {found!r}. Pass the result of state_dict()."
        )
    if found > FORMAT:
        raise StateError(
            f"the state has format {found}, this raylance reads up to {FORMAT}: a newer raylance wrote it. Nothing was "
            "loaded. Upgrade raylance, or start a new run."
        )
    if found < _OLDEST_FORMAT:
        raise StateError(
            f"the state has format {found}, this raylance reads {_OLDEST_FORMAT} to {FORMAT}: a raylance before 0.8 "
            "wrote it. Nothing was loaded. Load it by raylance 0.9 and save it again, or start a new run."
        )
    fields = {field.name for field in dataclasses.fields(State)}
    given: dict[str, Any] = dict.fromkeys(_OPTIONAL) | renew(saved)
    del given["format"]
    if set(given) != fields:
        raise damaged(f"missing {sorted(fields - set(given))}, unknown {sorted(set(given) - fields)}")
    state = State(**given)
    _check_fields(state)
    try:
        _ = state.size
    except (TypeError, ConfigError) as error:
        raise damaged(f"budget {state.budget!r}") from error
    return state


def damaged(what: str) -> StateError:
    """Returns the error for a state that no loader wrote."""
    return StateError(f"the state is damaged: {what}. Its position may mean other rows. Use an earlier checkpoint.")


def _check_fields(state: State) -> None:
    """Refuses numbers that no loader writes, and an order that was changed after it was written."""
    for name in ("epoch", "position", "rows", "step", "global_step", "window_bytes", "dp_size"):
        number = getattr(state, name)
        if not _is_count(number, int(name in ("window_bytes", "dp_size"))):
            place = f"in epoch {state.epoch} at position {state.position} of {state.rows} rows"
            raise damaged(f"{name} {number!r}, {place}")
    versions = state.version.values() if isinstance(state.version, Mapping) else [state.version]
    if wrong := [each for each in versions if isinstance(each, int) and not _is_count(each, 0)]:
        raise damaged(f"version {wrong[0]!r}")
    if not isinstance(state.seed, int) or isinstance(state.seed, bool):
        raise damaged(f"seed {state.seed!r}")
    if not (state.rows_from is None or _is_count(state.rows_from, 1)):
        raise damaged(f"rows from epoch {state.rows_from!r}")
    if not (state.global_batch_size is None or _is_count(state.global_batch_size, 1)):
        raise damaged(f"global batch {state.global_batch_size!r}")
    for name in ("order", "completed_shards", "components"):
        if not isinstance(getattr(state, name), Mapping):
            raise damaged(f"its {name} is {getattr(state, name)!r}")
    if state.checksum != state.order_checksum():
        raise StateError(
            f"the state was changed after it was written: order {json.dumps(state.order)} with window_bytes "
            f"{state.window_bytes} has the checksum {state.order_checksum()}, and the state names {state.checksum!r}. "
            "Its position would mean other rows. Use the checkpoint as it was written, or an earlier one."
        )


class Versions(Protocol):
    """What is known of other versions of a loader's data; see `RowSource`."""

    def has_rows_of(self, version: Any, identity: Any) -> bool:
        """Whether the data have the rows of a version and identity, in the same order."""

    def has_grown_from(self, before: Mapping[str, Any]) -> bool:
        """Whether the data have the rows that fields of a state select, with the same numbers, and maybe others after
        them.
        """

    def part(self, number: int) -> "Versions":
        """Returns what is known of a dataset of a mixture."""

    def fingerprint_of(self, fields: Mapping[str, Any] | None) -> str:
        """Returns the fingerprint of the selected rows, or of those that fields of a state select; "" if these are not
        known.
        """

    def carry(
        self, before: Mapping[str, Any], after: Mapping[str, Any] | None, offsets: Int64Array, rows: Int64Array
    ) -> tuple[Int64Array, Int64Array] | None:
        """Carries rows from the version that fields of a state name to that of later ones, None for the data
        themselves: takes offsets, and numbers of selected rows, int64 (n,) each. Returns the offsets there of all that
        are not gone, and the numbers of those that are selected; None if that is not known.
        """


class NoVersions:
    """Nothing is known of other versions."""

    def has_rows_of(self, version: Any, identity: Any) -> bool:
        """See `Versions`."""
        return False

    def has_grown_from(self, before: Mapping[str, Any]) -> bool:
        """See `Versions`."""
        return False

    def part(self, number: int) -> "NoVersions":
        """See `Versions`."""
        return self

    def fingerprint_of(self, fields: Mapping[str, Any] | None) -> str:
        """See `Versions`."""
        return ""

    def carry(
        self, before: Mapping[str, Any], after: Mapping[str, Any] | None, offsets: Int64Array, rows: Int64Array
    ) -> tuple[Int64Array, Int64Array] | None:
        """See `Versions`."""
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """How the data of a loader differ from those of a state.

    Attributes:
        rows_of: The field `rows_of` of the loader's next states.
        has_changed: Whether other rows, or another order, come from the place of the state on.
        fields: Fields that may differ.
    """

    rows_of: Mapping[str, Any] | None = None
    has_changed: bool = False
    fields: tuple[str, ...] = ()


def check_state(
    saved: State,
    current: State,
    versions: Versions | None = None,
    of: str = "",
    *,
    may_change: bool | None = None,
    may_begin: bool = True,
) -> Moved:
    """Refuses a saved state that means other rows than the loader's own. A field of the current order that is "auto"
    accepts every saved number, and the loader reuses it. Allowed, with a warning, are other columns, another decoding,
    equal files in another place, another version with the same rows in the same order and, if `may_begin`, other rows
    of the same dataset where an epoch begins; with `may_change`, anywhere, and another order, too. `may_change` is None
    if that is not asked for, and False if it is, and the order cannot change. In texts, `of` names the dataset.

    Raises:
        StateError: If fields differ, with both values of each, side by side.
    """
    current = _of_datasets(current, saved)
    samples = () if saved.fingerprint == current.fingerprint else ("windows",)  # different words may mean the same
    elsewhere = _compare(saved, current, ("uri",))
    moved = _moved_on(saved, current, versions or NoVersions(), may_change=may_change, may_begin=may_begin)
    left_out = moved.fields
    differing = _compare(saved, current, [name for name in (*_MUST_MATCH, *samples, "order") if name not in left_out])
    is_known = bool(saved.identity and current.identity)  # else only the place tells data apart
    if differing or (elsewhere and not is_known):
        differing = "\n".join(filter(None, [elsewhere, differing]))
        pins = " (version=… pins the version)" * ("  version: " in differing)
        place = f"{saved.position:,} of {'its own ' if of else ''}epoch {saved.epoch}"
        raise StateError(
            f"the checkpoint belongs to other data or another order{of}:\n{differing}\n"
            f"Its position, {place}, would mean other rows. Give the saved values{pins}, or start under a new run name"
            f"{_way_on(saved, current, may_change)}."
        )
    if left_out:
        logger.warning(
            "the run continues with %s:\n%s",
            f"other data or another order{of}: of this epoch, the rows come that are left"
            if moved.has_changed
            else f"another version of the dataset{of}, which has the same rows in the same order"
            if moved.rows_of
            else f"another version of the dataset{of}: its present rows begin the epoch",
            _compare(saved, current, left_out),
        )
    if elsewhere:
        logger.warning("the run continues with the same files%s, which lie in another place now:\n%s", of, elsewhere)
    differing = _compare(saved, current, _SHOULD_MATCH)
    if differing:
        logger.warning(
            "the run continues with the same rows, but makes other batches of them than before the checkpoint:\n%s\n"
            "Build the dataset with the saved values if you did not intend this.",
            differing,
        )
    return moved


def _way_on(saved: State, current: State, may_change: bool | None) -> str:
    """Returns the advice for a run that can continue with the rest of the epoch, or ""."""
    others = [name for name in (*_MUST_MATCH, "order", "windows", "uri") if name not in _MAY_CHANGE]
    if _compare(saved, current, others):
        return ""
    if isinstance(saved.uri, Mapping):
        fix = '; or open the datasets that differ with version=raylance.runs.Newest(when="now"): what is left follows'
        return fix * ([*saved.uri] == [*current.uri])
    if may_change is False:
        return (
            '. when="now" and "next_epoch" cannot be honoured: samples of several rows, shards of whole fragments, '
            "buckets and orders that draw rows, or of another class of your own, take other rows only where an epoch "
            "begins"
        )
    return '; or continue with the rows that are left of the epoch: version=raylance.runs.Newest(when="now")'


def _of_datasets(current: State, saved: State) -> State:
    """Returns the state of a mixture without the datasets that have joined it since another state: they are the last
    ones. The rows of the others are compared one by one.
    """
    before, now = ([*state.uri] if isinstance(state.uri, Mapping) else [] for state in (saved, current))
    if not before or now[: len(before)] != before or len(now) == len(before):
        return current
    fields = {field.name: getattr(current, field.name) for field in dataclasses.fields(State)}
    found: dict[str, Any] = {
        name: {part: value[part] for part in before}
        for name, value in fields.items()
        if isinstance(value, Mapping) and [*value] == now
    }
    return dataclasses.replace(current, **found, rows=saved.rows, fingerprint=saved.fingerprint)


def _moved_on(saved: State, current: State, versions: Versions, *, may_change: bool | None, may_begin: bool) -> Moved:
    """Returns which fields may differ because the data have changed; none if they have not, or a position in them would
    mean other rows.
    """
    differing = {name for name in _MAY_CHANGE if _compare(saved, current, [name])}
    if not differing:
        return Moved(saved.rows_of)
    version = saved.version, saved.identity
    if differing <= {*VERSION} and versions.has_rows_of(*version):
        return Moved(saved.rows_of or {name: getattr(saved, name) for name in VERSION}, fields=VERSION)
    is_moved, is_rewritten = saved.version != current.version, saved.identity != current.identity
    if (saved.uri, saved.branch) != (current.uri, current.branch) or not isinstance(saved.uri, str):
        return Moved(saved.rows_of)
    of_rows = (*_MAY_GROW, "order") if _are_drawn_alike(saved, current) else _MAY_GROW
    if is_moved and differing <= {*of_rows} and may_begin and not saved.position:
        return Moved(fields=of_rows)
    if may_change and (is_moved or not is_rewritten):
        return Moved(has_changed=True, fields=_MAY_CHANGE)
    return Moved(saved.rows_of)


def _are_drawn_alike(saved: State, current: State) -> bool:
    """Whether two orders draw rows by the same settings, but for what follows from the rows that there are."""
    kept = []
    for state in (saved, current):
        of_rows = {"fingerprint"}
        if state.order.get("rows_per_epoch") in (state.rows, "auto"):
            of_rows.add("rows_per_epoch")
        kept.append({name: value for name, value in state.order.items() if name not in of_rows})
    return saved.order.get("name") in _DRAWN and not _differences("order", *kept)


def _compare(saved: State, current: State, names: Sequence[str]) -> str:
    """Returns a line for each field that differs, with both values side by side; "" if none differs."""
    found = [other for name in names for other in _differences(name, getattr(saved, name), getattr(current, name))]
    return "\n".join(f"  {name}: saved {_shown(old)}, now {_shown(new)}" for name, old, new in found)


def _shown(value: Any) -> str:
    return str(in_words(value)) if is_description(value) else repr(value)


def _differences(name: str, saved: Any, current: Any) -> list[tuple[str, Any, Any]]:
    """Returns differing values by dotted name. Dicts are compared key by key; "auto" agrees with every number."""
    if isinstance(saved, str) and is_description(current) and saved == in_words(current):
        return []  # the text of an earlier version, with a value that its reader does not know
    if (
        isinstance(saved, Mapping)
        and isinstance(current, Mapping)
        and _are_alike(saved, current)
        and not is_packed(saved)
    ):
        # The components are numbered, so the order of their names counts.
        if name == "order.components" and list(saved) != list(current):
            return [("datasets of raylance.mix", list(saved), list(current))]
        keys = sorted(set(saved) | set(current))
        return [found for key in keys for found in _differences(f"{name}.{key}", saved.get(key), current.get(key))]
    if saved == current or (is_packed(saved) and is_packed(current) and unpacked(saved) == unpacked(current)):
        return []
    may_lack = name.startswith("order.components.") and name.endswith(_OMITTED_IF_ALL)
    if "auto" in (saved, current) and name.startswith("order"):
        other = current if saved == "auto" else saved
        least = 0 if name in _MAY_BE_0 else 1
        if _is_count(other, least) or (other is None and may_lack):
            return []
    return [(name, saved, current)]


def _are_alike(saved: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Returns whether values are compared key by key: not those of settings of different classes."""
    of_settings = is_description(saved) or is_description(current)
    return not of_settings or saved.get(CLASS) == current.get(CLASS)


def _is_count(value: Any, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def write_state(state: Mapping[str, Any], directory: str | Path) -> None:
    """Writes `raylance_state.json` into a checkpoint directory."""
    Path(directory, FILE_NAME).write_text(json.dumps(state, indent=1) + "\n")


def read_state(directory: str | Path) -> dict[str, Any]:
    """Reads `raylance_state.json` from a checkpoint directory; refuses a missing, truncated or too large file."""
    path = Path(directory, FILE_NAME)
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        loaded = json.loads(content)
    except FileNotFoundError as error:
        raise StateError(
            f"the checkpoint has no {FILE_NAME}: it was not written by raylance.report(), or without the loader on "
            "rank 0. Which rows were delivered before it is not known. Report on every rank by "
            "raylance.report(metrics, loader, state=…), or start under a new run name."
        ) from error
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"{path} is truncated or damaged ({error}). Nothing was loaded. Use an earlier checkpoint."
        ) from error
    if not isinstance(loaded, dict):
        raise StateError(
            f"{path} holds a {type(loaded).__name__}, not a state. Nothing was loaded. Use an earlier checkpoint."
        )
    return loaded
