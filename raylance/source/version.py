"""Pins the version of a dataset, and checks that no other data takes its place later.

A version number does not identify data: a dataset that is deleted and written again begins with the same numbers. So
the identity of the version's files is pinned with it, and each opening compares it.
"""

import contextlib
import dataclasses
import datetime
import enum
import functools
import hashlib
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Self

import lance
import numpy as np
import numpy.typing as npt
from lance.fragment import FragmentMetadata

from raylance._version import __version__
from raylance.errors import ConfigError, DatasetError
from raylance.orders.permutation import Int64Array
from raylance.secrets import holds_secret, public_uri
from raylance.source.lance_errors import (
    LANCE_ERRORS,
    Failure,
    describe_denied,
    describe_odd_option,
    describe_odd_value,
    describe_panic,
    failure_of,
    readable_text,
    unknown_host,
)
from raylance.source.retrying import OPENING_S, patiently
from raylance.source.storage_options import StorageOptions, check_options, current, open_dataset
from raylance.source.wrong_places import describe_place

logger = logging.getLogger(__name__)

_TRIED_MAJOR = 14  # the newest major version of pylance with which the tests ran

Version = int | str | tuple[str | None, int | None]

_MAIN = "main"  # Lance's name of the trunk in references
_KNOWN_PARTS = {
    *("id", "files", "physical_rows", "deletion_file", "row_id_meta"),
    *("created_at_version_meta", "last_updated_at_version_meta"),
    *("_path", "fields", "column_indices", "file_major_version", "file_minor_version", "file_size_bytes", "base_id"),
}  # of FragmentMetadata and DataFile
_KEEPING_ROWS = ("CreateIndex", "Merge", "Project", "UpdateConfig")  # operations of `lance.LanceOperation`
_CHECK_S = 2.0  # least time between two checks of a version that is being read
_CHECK_SHARE = 50  # checks of all datasets together take at most 1 / 50 of the time of a process


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A pinned version of a Lance dataset, cheap to pickle and to open anywhere."""

    uri: str  # for Lance; a branch's own URI if that was given
    version: int  # version number, never a tag: tags move
    branch: str | None = None  # named by a tag or a reference; None for the branch that `uri` opens
    # Hash of the names of the version's data and deletion files. Lance gives files random names, so a dataset that is
    # written again in the same place has another identity, even with equal rows.
    identity: str = ""
    # Time and size of the version, from its manifest. An opening compares this first: if it is equal, so is the
    # identity, which takes longer to compute.
    written: str = ""
    # Credentials, endpoint, …, or a function that returns them; never shown
    storage_options: StorageOptions | None = dataclasses.field(default=None, repr=False)

    @property
    def is_remote(self) -> bool:
        """Whether each request to the storage takes long, as those to an object store do."""
        return "://" in self.uri and not self.uri.startswith("file")

    def open(self) -> lance.LanceDataset:
        """Opens exactly the pinned version; tries again while the storage fails. Raises DatasetError if it is gone,
        another dataset is in its place, or the storage fails for too long.
        """
        try:
            return patiently(self.open_once)
        except TimeoutError as error:
            raise self._unavailable(error) from error

    def open_once(self, limit_s: float = OPENING_S) -> lance.LanceDataset:
        """Opens like `open`, in one attempt; `failure_of(error)` says whether another may succeed. The storage has
        `limit_s` seconds for an answer, now and in later reads. The call may take longer: see `limits.within`.
        """
        found = self._find(limit_s)
        if isinstance(found, DatasetError):
            raise found
        return found

    def check(self, limit_s: float = OPENING_S) -> None:
        """Checks that the version still exists, for a reader that has it open. If a clean-up removed it, that is a
        warning: rows that can still be read are right. Raises DatasetError if another dataset is there, or none can be
        opened.
        """
        if isinstance(self._find(limit_s), DatasetError):
            warn_once(
                f"a clean-up has removed version {self.version} of {self.uri!r}. Readers that have it open read it "
                "while its files exist; it cannot be opened again. Tag the versions that you train on."
            )

    def newest(self) -> Self:
        """Pins the newest version of the same dataset and branch, in one attempt. Raises DatasetError if it fails."""
        try:
            dataset = _open(self.uri, None if self.branch is None else (self.branch, None), self.storage_options)
        except LANCE_ERRORS as error:
            raise _not_opened(self.uri, error, self.storage_options) from error
        return dataclasses.replace(
            self, version=dataset.version, identity=_identity(dataset), written=_written(dataset)
        )

    def has_rows_of(self, version: Any, identity: Any, *, may_append: bool = False) -> bool:
        """Whether another version of this dataset, of that identity, has the same rows in the same order: between the
        two, only indices and columns changed, or files were compacted without another order. With `may_append`, rows
        may have been appended to the other version since. False if that is not known, because a clean-up removed
        versions, or rows of an index were moved. Raises DatasetError if the storage fails.
        """
        if not isinstance(version, int) or not identity:
            return False
        try:
            other = dataclasses.replace(self, version=version, identity=identity, written="").open()
            opened = self.open()
            low, high = sorted((version, self.version))
            may_append = may_append and version < self.version
            found = _compare(*((other, opened) if version < self.version else (opened, other)))
            if found is not None:
                return found is _Rows.SAME or (may_append and found is _Rows.MORE)
            return all(_keeps_rows(opened, number, may_append=may_append) for number in range(low + 1, high + 1))
        except (*LANCE_ERRORS, DatasetError) as error:
            if failure_of(error) is Failure.PASSING:
                raise
            return False

    def at(self, version: int) -> Self:
        """Pins another version of the same branch. Raises DatasetError if it is not there."""
        numbers = _numbers(self.open())
        if version not in numbers:
            raise DatasetError(f"{self.uri!r} has no version {version}: it has versions {numbers[0]} to {numbers[-1]}.")
        found = dataclasses.replace(self, version=version, identity="", written="")
        return dataclasses.replace(found, identity=_identity(found.open()))

    def offsets_of(self, before: Self, offsets: Int64Array) -> Int64Array | None:
        """Finds rows of an earlier version, by their offsets there, int64, (n,).

        Returns:
            Their offsets in this version, int64, (n,), -1 for rows that were deleted since, and, without stable row
            IDs, for those that were updated. None if they are not known, because a clean-up removed versions, the
            dataset was overwritten or restored, or a compaction moved rows without stable row IDs.

        Raises:
            DatasetError: If the storage fails.
        """
        if before.version > self.version:
            return None
        try:
            dataset, older, low = self.open(), before.open(), before.version
            if (found := _compare(older, dataset)) is not None:
                return _follow(older, dataset, offsets) if found is _Rows.SOME else offsets
            for number in range(before.version + 1, self.version + 1):
                if _keeps_rows(dataset, number, may_append=True):
                    is_moved = type(dataset.read_transaction(number).operation) is lance.LanceOperation.Rewrite
                    if is_moved and not dataset.has_stable_row_ids:  # the rows lie in the same order, in other files
                        first, last = (dataset.checkout_version(each) for each in (low, number - 1))
                        offsets, low = _follow(first, last, offsets), number
                elif not _changes_by_id(dataset, number):
                    return None
            return _follow(dataset.checkout_version(low), dataset, offsets)
        except (*LANCE_ERRORS, DatasetError) as error:
            if failure_of(error) is Failure.PASSING:
                raise
            return None

    def _find(self, limit_s: float) -> lance.LanceDataset | DatasetError:
        """Opens the pinned version; returns the error if a clean-up removed it, and raises any other error."""
        version = self.version if self.branch is None else (self.branch, self.version)
        try:
            dataset = _open(self.uri, version, self.storage_options, limit_s)
        except LANCE_ERRORS as error:
            removed = self._if_removed(error, limit_s) if failure_of(error) is Failure.MISSING else None
            if removed is not None:
                return removed
            raise self._unavailable(error) from error
        if self.identity and self.written != (written := _written(dataset)) and self.identity != _identity(dataset):
            raise self._rewritten(
                f"its files were {self.identity} (written {self.written}) when it was pinned, and are "
                f"{_identity(dataset)} (written {written}) now"
            )
        return dataset

    def _if_removed(self, missing: Exception, limit_s: float) -> DatasetError | None:
        """Returns the error for a dataset that no longer has the version; None if it is still listed. Raises
        DatasetError if the dataset itself cannot be opened, or was rewritten.
        """
        try:
            trunk = _open(self.uri, None, self.storage_options, limit_s)
            if self.branch not in (None, _MAIN) and self.branch not in trunk.branches.list():
                return DatasetError(
                    f"{self.uri!r} has no branch {self.branch!r} any more ({readable_text(missing)}), so the version "
                    "that was pinned in it is gone. Keep the branches that you train on."
                )
            line = trunk if self.branch is None else trunk.checkout_version((self.branch, None))
            numbers = _numbers(line)
        except LANCE_ERRORS as error:
            raise self._unavailable(error) from error
        if self.version in numbers:
            return None
        if numbers[-1] < self.version:
            raise self._rewritten(f"version {self.version} was pinned, and its newest version is {numbers[-1]} now")
        return DatasetError(
            f"{self.uri!r} has no version {self.version} any more: it has versions {numbers[0]} to {numbers[-1]}, "
            "because a clean-up removed older ones. A clean-up keeps tagged versions: tag what you train on."
        )

    def _rewritten(self, evidence: str) -> DatasetError:
        return DatasetError(
            f"{self.uri!r} was rewritten in place: {evidence}. Nothing more is read from it, because one epoch must "
            "not have rows of two datasets. Open it with raylance.dataset(…) and begin a new run, or restore the "
            'pinned files; mode="overwrite" writes a new version and keeps the old one.'
        )

    def _unavailable(self, error: Exception) -> DatasetError:
        return DatasetError(
            f"no Lance dataset can be opened at {self.uri!r} now, where version {self.version} was before "
            f"({readable_text(error)}). Nothing is read from it.{_advice(self.uri, error, self.storage_options)}"
        )


def pin(uri: str | os.PathLike[str], version: Version | None, storage_options: StorageOptions | None) -> Source:
    """Resolves a version once, so that later reads use the same one.

    The version may be a number, a tag, a reference (branch, version), or None for the newest. A tag may belong to a
    branch. In a reference, the branch None means the trunk, and the version None means the newest of the branch.

    Raises:
        ConfigError: If an argument has a wrong type, or if the URI or the options hold a secret that would be shown.
        DatasetError: If there is no dataset, no such branch, version or tag, or the storage fails for too long.
    """
    version, uri = check_version(version), checked_uri(uri)
    _warn_of_untried_lance()
    if os.path.isfile(uri.removeprefix("file://")):  # Lance would try for seconds
        about = describe_place(uri) or " Give the folder of a dataset."
        raise DatasetError(f"{uri!r} is a file, and a Lance dataset is a folder; nothing was started.{about}")
    if not callable(storage_options):
        check_options(storage_options)
    try:
        return patiently(functools.partial(_pin, uri, version, storage_options))
    except LANCE_ERRORS as error:
        raise _not_opened(uri, error, storage_options) from error


def _warn_of_untried_lance() -> None:
    """Warns if Lance is newer than the versions that were tried: each of its major versions may change calls."""
    if int(lance.__version__.partition(".")[0]) > _TRIED_MAJOR:
        warn_once(
            f"pylance {lance.__version__} is newer than raylance {__version__}, whose tests ran with pylance "
            f"{_TRIED_MAJOR}: calls may have changed. If something fails, install pylance<{_TRIED_MAJOR + 1}, or "
            "a newer raylance."
        )


def checked_uri(uri: str | os.PathLike[str]) -> str:
    """Returns a URI, or an absolute path. Raises ConfigError if it has a wrong type, if it holds a secret that would be
    shown, or if Lance would open another place.
    """
    if not isinstance(uri, str | os.PathLike):
        raise ConfigError(
            f"uri={uri!r} is a {type(uri).__name__}: give the path or URI of one Lance dataset. Open several one by "
            "one, and join them with raylance.mix()."
        )
    uri = os.fspath(uri)
    if holds_secret(uri):  # states, records and errors of the storage show it
        raise ConfigError(
            f"uri={public_uri(uri)!r} holds a password or a key, which checkpoints, records and errors would show. "
            "Nothing was opened. Give it in storage_options or in the environment."
        )
    check_uri(uri)
    return _locate(uri)


def check_uri(uri: str) -> None:
    """Raises ConfigError if Lance would open or write another place than a URI names: it ends URIs at # and ?."""
    used = re.split("[#?]", uri, maxsplit=1)[0]
    if used != uri and ("://" in uri or uri[:5].lower() == "file:"):
        raise ConfigError(
            f"uri={public_uri(uri)!r}: Lance ends a URI at {uri[len(used)]!r}, so it would use {public_uri(used)!r}. "
            "Nothing was opened. Keep datasets in places whose names have neither # nor ?; a local one can be named by "
            "its path."
        )


def _locate(uri: str) -> str:
    """Returns a local path as an absolute one, because workers and later runs may have another working directory."""
    if uri[:5].lower() == "file:" and "://" not in uri:
        return f"file:///{uri[5:].lstrip('/')}"
    if "://" in uri:
        return uri
    return os.path.abspath(os.path.expanduser(uri) if uri.startswith("~/") else uri)  # as Lance expands it


def check_version(version: Any) -> Version | None:
    """Returns a version with its number as an int."""
    branch, number = version if isinstance(version, tuple) and len(version) == 2 else (None, version)
    is_number = isinstance(number, int | np.integer) and not isinstance(number, bool) and 0 <= number < 2**64
    if isinstance(version, tuple):
        if isinstance(branch, str | None) and (number is None or is_number) and len(version) == 2:
            return branch, None if number is None else int(number)
    elif version is None or isinstance(version, str):
        return version
    elif is_number:
        return int(version)
    raise ConfigError(
        f"version={version!r}: give a version number from 0 to 2**64 - 1, the name of a tag, a reference (branch, "
        "number or None), or None for the newest."
    )


def _pin(uri: str, version: Version | None, storage_options: StorageOptions | None) -> Source:
    try:
        dataset = _open(uri, version, storage_options)
    except LANCE_ERRORS as error:
        if host := unknown_host(error):
            raise ValueError(f"the name service of this machine knows no host {host!r}") from error
        if version is None or failure_of(error) is not Failure.MISSING:
            raise
        raise _no_version(uri, version, storage_options, error) from None
    source = Source(
        uri=uri,
        version=dataset.version,
        identity=_identity(dataset),
        written=_written(dataset),
        storage_options=storage_options,
    )
    if version is None or isinstance(version, int):
        return source
    try:
        source.open_once()
        return source  # the URI alone opens the version of the tag or reference
    except DatasetError as error:  # the URI has no such number, or another dataset has it
        if failure_of(error) is Failure.PASSING:
            raise
    branch = version[0] if isinstance(version, tuple) else dataset.tags.list()[version]["branch"]
    return dataclasses.replace(source, branch=str(branch or _MAIN))


def _no_version(uri: str, version: Version, storage_options: StorageOptions | None, missing: Exception) -> DatasetError:
    """Returns the error for a dataset without this version; raises ConnectionError, to repeat, if it is listed after
    all.
    """
    newest = _open(uri, None, storage_options)
    numbers, tags, branches = _numbers(newest), sorted(newest.tags.list()), sorted(newest.branches.list())
    listed = version in tags if isinstance(version, str) else version in numbers
    if listed:
        raise ConnectionError(f"{version!r} is listed, but was missing a moment ago: {missing}")
    kind = "tag" if isinstance(version, str) else "reference" if isinstance(version, tuple) else "version"
    return DatasetError(
        f"{uri!r} has no {kind} {version!r} ({readable_text(missing)}); nothing was started. It has versions "
        f"{numbers[0]} to {numbers[-1]} and tags {tags}, and branches {branches} (version=(branch, None) takes a "
        "branch's newest). Name one of them, and tag the versions that you train on, because clean-up keeps only "
        "tagged ones."
    )


def _not_opened(uri: str, error: BaseException, options: StorageOptions | None) -> DatasetError:
    passes = failure_of(error) is Failure.PASSING
    what = f"{uri!r} cannot be opened" if passes else f"no Lance dataset can be opened at {uri!r}"
    return DatasetError(f"{what} ({readable_text(error)}); nothing was started.{_advice(uri, error, options)}")


def _advice(uri: str, error: BaseException, options: StorageOptions | None) -> str:
    """Returns the advice for a dataset that cannot be opened."""
    match failure_of(error):
        case Failure.PASSING:
            fix = " Its storage fails: try again when it is back. If it never answered, check the endpoint."
        case Failure.LASTING:
            fix = (
                " Check the path, the credentials and the endpoint in storage_options, and whether the files are whole."
            )
        case _:
            fix = describe_place(uri) or (
                " Check the path, the credentials or endpoint in storage_options, and that the dataset was written."
            )
    given = None
    with contextlib.suppress(OSError, ConfigError, DatasetError):  # a function of the user or a namespace may fail
        given = current(options)
    return fix + (
        describe_odd_value(given or {}, error) or describe_odd_option(uri, given) or describe_denied(uri, error)
    )


def _open(
    uri: str, version: Version | None, storage_options: StorageOptions | None, limit_s: float = OPENING_S
) -> lance.LanceDataset:
    """Opens a dataset from its files; it shares no cache and no connection with an open one."""
    try:
        if isinstance(version, tuple):
            branch, number = version
            return open_dataset(uri, storage_options, limit_s).checkout_version((branch or _MAIN, number))
        return open_dataset(uri, storage_options, limit_s, version)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(describe_panic(error)) from error  # a panic in Lance is not an Exception


def _numbers(dataset: lance.LanceDataset) -> list[int]:
    """Returns the numbers of the existing versions, ascending, from file names: no manifest is read."""
    return sorted(int(entry["version"]) for entry in dataset.version_refs())


def _written(dataset: lance.LanceDataset) -> str:
    about = dataset.get_version()
    counts = ", ".join(f"{about['metadata'].get(name)} {name}" for name in ("total_rows", "total_files_size"))
    return f"{about['timestamp'].astimezone(datetime.UTC).isoformat()}, {counts}"


def _identity(dataset: lance.LanceDataset) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for fragment in dataset.get_fragments():
        meta = fragment.metadata
        more = "".join(f" {each}" for each in unknown_parts(meta))
        digest.update(f"{meta.id} {[file.path for file in meta.files]} {_deletion(meta)}{more}\n".encode())
    return digest.hexdigest()


def _keeps_rows(dataset: lance.LanceDataset, version: int, *, may_append: bool) -> bool:
    """Whether a version has the rows of the one before it, in the same order; with `may_append`, maybe others after
    them.
    """
    try:
        transaction = dataset.read_transaction(version)
    except TypeError:  # Lance 14.0 cannot show a compaction that moved rows of an index
        return False
    kind = type(None if transaction is None else transaction.operation)
    if kind.__name__ in _KEEPING_ROWS or (may_append and kind is lance.LanceOperation.Append):
        return True
    before, after = (dataset.checkout_version(number) for number in (version - 1, version))
    if kind is lance.LanceOperation.Rewrite:
        return _keeps_order(
            transaction.operation, *([each.fragment_id for each in it.get_fragments()] for it in (before, after))
        )
    # Operations without a class of their own, such as the reservation of fragment IDs before a compaction
    return kind is lance.LanceOperation.BaseOperation and _identity(before) == _identity(after)


def _changes_by_id(dataset: lance.LanceDataset, version: int) -> bool:
    """Whether those rows have the same IDs in a version and the one before it that are in both."""
    try:
        kind = type(dataset.read_transaction(version).operation)
    except TypeError:  # a compaction that moved rows of an index; see `_keeps_rows`
        kind = lance.LanceOperation.Rewrite
    if kind is lance.LanceOperation.Rewrite:
        return bool(dataset.has_stable_row_ids)
    return kind in (lance.LanceOperation.Delete, lance.LanceOperation.Update)


class _Rows(enum.Enum):
    """The rows of a version in another one that has its fragments."""

    SAME = enum.auto()  # all, at the same offsets
    MORE = enum.auto()  # all, at the same offsets, and others after them
    SOME = enum.auto()  # not all, or at other offsets


def _compare(before: lance.LanceDataset, after: lance.LanceDataset) -> _Rows | None:
    """Compares two versions by the fragments of the earlier one, whose rows have the same IDs in the later one if it
    has the fragments, too; so no version between them must be there. None if it lacks some.
    """
    old, new = ({each.fragment_id: each.metadata for each in it.get_fragments()} for it in (before, after))
    for number, fragment in old.items():
        other = new.get(number)
        if other is None or other.physical_rows != fragment.physical_rows:
            return None
        if {file.path for file in fragment.files}.isdisjoint(file.path for file in other.files):
            return None  # another one of this number, or all its columns were written anew
    deleted = [[_deletion(of[number]) for number in old] for of in (old, new)]
    if [*new][: len(old)] != [*old] or deleted[0] != deleted[1]:
        return _Rows.SOME
    return _Rows.SAME if len(new) == len(old) else _Rows.MORE


def _deletion(fragment: FragmentMetadata) -> str:
    """Names the deletion file of a fragment; "" if it has none."""
    file = fragment.deletion_file
    return "" if file is None else f"{file.read_version}-{file.id}"


def _follow(before: lance.LanceDataset, after: lance.LanceDataset, offsets: Int64Array) -> Int64Array:
    """Returns the offsets of rows in a later version, by their IDs; -1 for those that are gone."""
    old, new = _row_ids(before), _row_ids(after)
    ascending = np.argsort(new, kind="stable")  # which is fast if they are sorted
    asked = old[np.maximum(offsets, 0)]
    at = np.minimum(np.searchsorted(new[ascending], asked), max(0, len(new) - 1))
    found = ascending[at]
    return np.where((offsets >= 0) & (new[found] == asked), found, -1)


def _row_ids(dataset: lance.LanceDataset) -> npt.NDArray[np.uint64]:
    """Returns the IDs of all live rows in storage order: uint64, (rows,)."""
    table = dataset.scanner(columns=[], with_row_id=True).to_table()
    ids: npt.NDArray[np.uint64] = table["_rowid"].to_numpy()
    return ids


def _keeps_order(compaction: Any, before: list[int], after: list[int]) -> bool:
    """Whether the rows lie in the same order in the fragments before and after a compaction. Lance puts the fragments
    that it writes after those that it leaves alone.
    """
    written = {group.new_fragments[0].id: group for group in compaction.groups if group.new_fragments}
    found: list[int] = []
    at = 0
    while at < len(after):
        group = written.get(after[at])
        if group is None:
            found.append(after[at])
            at += 1
            continue
        new = [each.id for each in group.new_fragments]
        if after[at : at + len(new)] != new:
            return False
        found += [each.id for each in group.old_fragments]
        at += len(new)
    return found == before


def unknown_parts(fragment: FragmentMetadata) -> list[str]:
    """Describes parts of a fragment and its files that raylance does not know, and that may change values: overlays."""
    found = []
    for part in (fragment, *fragment.files):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name == "overlays":  # their offsets may be millions, and their files have random names
                value = [(each.data_file.path, each.committed_version) for each in value]
            if field.name not in _KNOWN_PARTS and value:
                found.append(f"{field.name} {value}")
    return found


@functools.cache
def warn_once(text: str) -> None:
    """Logs a warning once per process and text: training and validation rows are often parts of one dataset."""
    logger.warning("%s", text)


class VersionCheck:
    """Checks a version from time to time while it is read, because an open dataset also reads files that were replaced.
    Checks are two seconds apart or more, by one thread, and take at most a fiftieth of a process's time in all.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        """Takes a function that raises an error if the check fails. The first check is due after two seconds."""
        self._check, self._checking = check, threading.Lock()
        _checks.add(self)
        self.postpone()

    def postpone(self) -> None:
        """Records that the version was just opened, which is as good as a check."""
        self._due_s = time.monotonic() + _CHECK_S

    def run_if_due(self) -> None:
        """Runs the check if it is due. If it raises an error, the next call runs it again."""
        begin_s = time.monotonic()
        if begin_s < self._due_s or not self._checking.acquire(blocking=False):
            return
        try:
            self._check()
            spent_s = time.monotonic() - begin_s
            self._due_s = begin_s + max(_CHECK_S, spent_s * _CHECK_SHARE * len(_checks))
        finally:
            self._checking.release()


_checks: weakref.WeakSet[VersionCheck] = weakref.WeakSet()  # those of all datasets that this process reads
