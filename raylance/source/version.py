"""Owns which version of a dataset is read, and that nothing else is taken for it later; never reads rows.

A version's number does not say which data it has: a dataset that is removed and written again begins with the same
numbers. So the identity of the version's files is pinned with it, and each opening compares.
"""

import dataclasses
import datetime
import functools
import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Self

import lance

from raylance.errors import ConfigError, DatasetError
from raylance.source.lance_errors import LANCE_ERRORS, Failure, describe_odd_option, failure_of, readable_text
from raylance.source.retrying import patiently

logger = logging.getLogger(__name__)

Version = int | str | tuple[str | None, int | None]

_MAIN = "main"  # what Lance calls the trunk in references
_CHECK_S = 2.0  # between two checks of a version that is read on and on,
_CHECK_SHARE = 50  # and so many times as long as a check takes, for each dataset that is read in this process


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A pinned version of a Lance dataset, cheap to pickle and to open anywhere.

    Attributes:
        uri: Path or URI, as Lance takes it; a branch's own URI where that was given.
        version: Version number, never a tag: tags move.
        branch: Branch that a tag or a reference named, and the version is counted in; None for what `uri` opens.
        identity: Hash of the data and deletion files of the version. Files get random names when they are written, so
            it tells a dataset from another one that was written in its place, with the same number of rows.
        written: When the version was written and how large it is, as its manifest says: where that is equal, so is the
            identity, which takes longer to find.
        storage_options: Options of the object store (credentials, endpoint); never shown.
    """

    uri: str
    version: int
    branch: str | None = None
    identity: str = ""
    written: str = ""
    storage_options: Mapping[str, str] | None = dataclasses.field(default=None, repr=False)

    def open(self) -> lance.LanceDataset:
        """Opens exactly the pinned version; a storage that fails is asked again.

        Raises:
            DatasetError: If the version is gone, another dataset lies in its place, or the storage fails for too long.
        """
        return patiently(self.open_once)

    def open_once(self) -> lance.LanceDataset:
        """As `open`, with one attempt: what retries by itself can tell by `failure_of` whether that is of any use."""
        found = self._find()
        if isinstance(found, DatasetError):
            raise found
        return found

    def check(self) -> None:
        """Looks whether the version is still there, for those that have it open and read on.

        Where a clean-up has taken it, this is a warning and no error: what is read is right, if it can be read at all.

        Raises:
            DatasetError: As `open_once`, if anything else is wrong.
        """
        if isinstance(self._find(), DatasetError):
            _warn_once(
                f"a clean-up has removed version {self.version} of {self.uri!r}: what has it open reads it as long as "
                "its files are there, and nothing can open it again. Tag what you train on."
            )

    def newest(self) -> Self:
        """The newest version now of what this is a version of, opened once."""
        try:
            dataset = _open(self.uri, None if self.branch is None else (self.branch, None), self.storage_options)
        except LANCE_ERRORS as error:
            raise _not_opened(self.uri, error, self.storage_options) from error
        return dataclasses.replace(
            self, version=dataset.version, identity=_identity(dataset), written=_written(dataset)
        )

    def _find(self) -> lance.LanceDataset | DatasetError:
        """The pinned version; or, where a clean-up has taken it, the error that says so."""
        version = self.version if self.branch is None else (self.branch, self.version)
        try:
            dataset = _open(self.uri, version, self.storage_options)
        except LANCE_ERRORS as error:
            gone = self._if_gone(error) if failure_of(error) is Failure.MISSING else None
            if gone is not None:
                return gone
            raise self._away(error) from error
        if self.identity and self.written != (written := _written(dataset)) and self.identity != _identity(dataset):
            raise self._rewritten(
                f"its files were {self.identity} (written {self.written}) when it was pinned, and are "
                f"{_identity(dataset)} (written {written}) now"
            )
        return dataset

    def _if_gone(self, missing: Exception) -> DatasetError | None:
        """What to say where the dataset is there without the version; None where the version is listed all the same.

        Raises:
            DatasetError: If the dataset cannot be opened either, or was rewritten.
        """
        try:
            trunk = _open(self.uri, None, self.storage_options)
            if self.branch not in (None, _MAIN) and self.branch not in trunk.branches.list():
                return DatasetError(
                    f"{self.uri!r} has no branch {self.branch!r} any more ({readable_text(missing)}): what was pinned "
                    "of it is gone. Keep the branches that you train on."
                )
            line = trunk if self.branch is None else trunk.checkout_version((self.branch, None))
            numbers = _numbers(line)
        except LANCE_ERRORS as error:
            raise self._away(error) from error
        if self.version in numbers:
            return None
        if numbers[-1] < self.version:
            raise self._rewritten(f"version {self.version} was pinned, and its newest version is {numbers[-1]} now")
        return DatasetError(
            f"{self.uri!r} has no version {self.version} any more: it has versions {numbers[0]} to {numbers[-1]}, "
            "because a clean-up removed older ones. A tagged version is spared: tag what you train on."
        )

    def _rewritten(self, evidence: str) -> DatasetError:
        return DatasetError(
            f"{self.uri!r} was rewritten in place: {evidence}. Rows of two datasets must not get into one epoch, so "
            "nothing more is read of it. Open it with raylance.dataset(…) and begin a new run, or put the files back "
            'that were pinned; data that is written with mode="overwrite" gets a new version, and the old one stays.'
        )

    def _away(self, error: Exception) -> DatasetError:
        return DatasetError(
            f"no Lance dataset can be opened at {self.uri!r} now, where version {self.version} was before "
            f"({readable_text(error)}); nothing is read of it until it "
            f"can.{_advice(self.uri, error, self.storage_options)}"
        )


def pin(uri: str | os.PathLike[str], version: Version | None, storage_options: Mapping[str, str] | None) -> Source:
    """Resolves a version number, a tag, a reference (branch, version), or None for the newest, once.

    A tag may point into a branch; in a reference, None stands for the trunk, and for the newest version.

    Raises:
        ConfigError: If the arguments are of no such type.
        DatasetError: If there is no dataset, or no such branch, version or tag, or the storage fails for too long.
    """
    if not isinstance(uri, str | os.PathLike):
        raise ConfigError(
            f"uri={uri!r} is a {type(uri).__name__}: give the path or URI of one Lance dataset. Several are opened one "
            "by one and joined by raylance.mix()."
        )
    _check_version(version)
    uri = os.fspath(uri)
    if "://" not in uri:  # workers and later runs may stand in another directory
        uri = os.path.abspath(uri)
    try:
        return patiently(functools.partial(_pin, uri, version, storage_options))
    except LANCE_ERRORS as error:
        raise _not_opened(uri, error, storage_options) from error


def _check_version(version: object) -> None:
    match version:
        case bool():  # an int to Python
            pass
        case None | int() | str() | tuple((None | str(), None | int())):
            return
    raise ConfigError(
        f"version={version!r}: give a version number, the name of a tag, a reference (branch, number or None), or None "
        "for the newest."
    )


def _pin(uri: str, version: Version | None, storage_options: Mapping[str, str] | None) -> Source:
    try:
        dataset = _open(uri, version, storage_options)
    except LANCE_ERRORS as error:
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
        return source  # what a tag or a reference means is what the URI opens by itself
    except DatasetError as error:  # the URI has no such number, or another dataset has it
        if failure_of(error) is Failure.PASSING:
            raise
    branch = version[0] if isinstance(version, tuple) else dataset.tags.list()[version]["branch"]
    return dataclasses.replace(source, branch=str(branch or _MAIN))


def _no_version(
    uri: str, version: Version, storage_options: Mapping[str, str] | None, missing: Exception
) -> DatasetError:
    """What to say where a dataset does not have what was asked for; raises what Lance says where there is none."""
    newest = _open(uri, None, storage_options)
    numbers, tags, branches = _numbers(newest), sorted(newest.tags.list()), sorted(newest.branches.list())
    listed = version in tags if isinstance(version, str) else version in numbers
    if listed:
        raise ConnectionError(f"{version!r} is listed, and was not there when it was asked for: {missing}")
    kind = "tag" if isinstance(version, str) else "reference" if isinstance(version, tuple) else "version"
    return DatasetError(
        f"{uri!r} has no {kind} {version!r} ({readable_text(missing)}); nothing was started. It has versions "
        f"{numbers[0]} to {numbers[-1]} and tags {tags}, and branches {branches} (version=(branch, None) takes a "
        "branch's newest): ask for one of them, and tag the versions that you train on, because clean-up spares only "
        "tagged ones."
    )


def _not_opened(uri: str, error: BaseException, options: Mapping[str, str] | None) -> DatasetError:
    passes = failure_of(error) is Failure.PASSING
    what = f"{uri!r} cannot be opened" if passes else f"no Lance dataset can be opened at {uri!r}"
    return DatasetError(f"{what} ({readable_text(error)}); nothing was started.{_advice(uri, error, options)}")


def _advice(uri: str, error: BaseException, options: Mapping[str, str] | None) -> str:
    """What to do about a dataset that does not open."""
    match failure_of(error):
        case Failure.PASSING:
            said = " Its storage fails: try again when it is back."
        case Failure.LASTING:
            said = " Check the path, the credentials in storage_options, and whether the files are whole."
        case _:
            said = " Check the path, the credentials in storage_options, and that the dataset was written."
    return said + describe_odd_option(uri, options)


def _open(uri: str, version: Version | None, storage_options: Mapping[str, str] | None) -> lance.LanceDataset:
    """Opens it as Lance does, from its files: a dataset that is opened shares no cache with one that was before."""
    options = dict(storage_options) if storage_options else None
    try:
        if isinstance(version, tuple):
            branch, number = version
            return lance.dataset(uri, storage_options=options).checkout_version((branch or _MAIN, number))
        return lance.dataset(uri, version=version, storage_options=options)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the manifest is damaged: {error}") from error  # a panic in Lance is no Exception


def _numbers(dataset: lance.LanceDataset) -> list[int]:
    """The versions that there are, ascending, by their names: no manifest is read."""
    return sorted(int(entry["version"]) for entry in dataset.version_refs())


def _written(dataset: lance.LanceDataset) -> str:
    about = dataset.get_version()
    counts = ", ".join(f"{about['metadata'].get(name)} {name}" for name in ("total_rows", "total_files_size"))
    return f"{about['timestamp'].astimezone(datetime.UTC).isoformat()}, {counts}"


def _identity(dataset: lance.LanceDataset) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for fragment in dataset.get_fragments():
        meta = fragment.metadata
        deleted = "" if meta.deletion_file is None else f"{meta.deletion_file.read_version}-{meta.deletion_file.id}"
        digest.update(f"{meta.id} {[file.path for file in meta.files]} {deleted}\n".encode())
    return digest.hexdigest()


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


class VersionCheck:
    """Checks now and then a version that is read on and on, from files that serve what was removed long ago.

    A check costs next to nothing: it comes every few seconds, and takes a fiftieth of the time of this process at the
    most, however many datasets it reads.
    """

    def __init__(self, check: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Takes what checks, and raises where it finds something; it was just opened, and is not due yet."""
        self._check, self._clock = check, clock
        self._due_s = clock() + _CHECK_S
        _checks.add(self)

    def passed(self) -> None:
        """Notes that the version was opened just now, which is a check."""
        self._due_s = self._clock() + _CHECK_S

    def make(self) -> None:
        """Checks if it is time; what was found once is looked for again each time."""
        begun_s = self._clock()
        if begun_s >= self._due_s:
            self._check()
            spent_s = self._clock() - begun_s
            self._due_s = begun_s + max(_CHECK_S, spent_s * _CHECK_SHARE * len(_checks))


_checks: weakref.WeakSet[VersionCheck] = weakref.WeakSet()  # of all that is read in this process
