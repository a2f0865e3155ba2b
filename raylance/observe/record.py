"""The record of one loader: its figures over time, facts and events, of bounded size.

A record is an Arrow file, <run>/raylance/<dataset>-rank<rank>-<start>.arrow: a row for each sample, with counters since
the loader was made. Facts, events and masked rows are JSON in its schema's metadata, under `raylance`.
"""

import contextlib
import dataclasses
import json
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.fs

from raylance.arguments import check_path
from raylance.errors import ConfigError
from raylance.observe.clock import now_s
from raylance.observe.events import Thinned
from raylance.observe.stats import GAUGES, NUMBERS
from raylance.secrets import public_uri

FOLDER = "raylance"
FORMAT = 1
COLUMNS = ("time_s", *NUMBERS, "epoch", "position")
STANDING = GAUGES | {"epoch", "position"}
"""Columns that show the present state; all other columns but `time_s` are counters."""

_RECENT = 64  # newest samples, all of which are kept: the rates of a running run need them
_MOST = 1984  # older samples; if there are more, every second one is dropped, see Thinned


@dataclasses.dataclass(frozen=True, slots=True)
class RecordFolder:
    """A folder for records, on any file system."""

    filesystem: Any
    path: str

    @property
    def is_local(self) -> bool:
        """Whether the folder is on a local file system, so that writing needs no network."""
        inner = self.filesystem
        while isinstance(inner, pyarrow.fs.SubTreeFileSystem):
            inner = inner.base_fs
        return isinstance(inner, pyarrow.fs.LocalFileSystem)

    def write(self, name: str, content: bytes) -> None:
        """Writes a whole file, so that no reader gets half of it."""
        path = f"{self.path}/{name}"
        part = f"{self.path}/.{name}.part" if self.is_local else path  # an object store never shows half an object
        try:
            stream = self.filesystem.open_output_stream(part)
        except FileNotFoundError:
            self.filesystem.create_dir(self.path, recursive=True)
            stream = self.filesystem.open_output_stream(part)
        with stream:
            stream.write(content)
        if part != path:
            self.filesystem.move(part, path)

    def written_s(self, name: str) -> float | None:
        """Returns when a file was last written, in seconds since 1970 by the clock of the storage; None if the right to
        write does not include the right to list.
        """
        try:
            written_ns = self.filesystem.get_file_info(f"{self.path}/{name}").mtime_ns
        except OSError:
            return None
        return written_ns / 1e9 if written_ns else None


def open_folder(path: str | os.PathLike[str], storage_filesystem: Any = None) -> tuple[Any, str]:
    """Returns the file system of a run's folder, and the path in it, as Ray Train has them.

    In a URI, all characters of the path are taken literally, because the name of a run may have any: a `#` begins no
    fragment, and a `?` begins options only if pyarrow knows them (`?region=…`). A `%20` stands for a space only if
    there is no folder with `%20` in its name, and one with the space.

    Args:
        path: The folder, <storage path>/<run name>, as a path or URI.
        storage_filesystem: A file system of pyarrow, as for `ray.train.RunConfig`; `path` is then a path in it.

    Raises:
        ConfigError: If pyarrow cannot open the URI, or an argument has a wrong type.
    """
    check_path("path", path)
    if not isinstance(storage_filesystem, pyarrow.fs.FileSystem | None):
        raise ConfigError(f"storage_filesystem={storage_filesystem!r}: give a file system of pyarrow, or None.")
    path = os.fspath(path)
    if storage_filesystem is not None:
        return storage_filesystem, path.rstrip("/")
    if path.startswith("file:/") and not path.startswith("file://"):
        path = f"file://{path.removeprefix('file:')}"
    scheme, is_uri, rest = path.partition("://")
    if not is_uri:
        return pa.fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(path))
    try:
        filesystem, inside = _open_uri(scheme, rest)
        decoded = urllib.parse.unquote(inside)
        if decoded != inside:
            here, there = filesystem.get_file_info([inside, decoded])
            inside = decoded if here.type is _ABSENT and there.type is not _ABSENT else inside
    except (pa.ArrowException, ValueError, OSError, ImportError) as error:
        raise ConfigError(
            f"{public_uri(path)} cannot be opened ({public_uri(str(error))}). Nothing can be read or written there. "
            "Give a folder, as a path or a URI."
        ) from error
    return filesystem, inside


_ABSENT = pyarrow.fs.FileType.NotFound


def _open_uri(scheme: str, rest: str) -> tuple[Any, str]:
    """Opens what follows `scheme` and `://` in a URI; see `open_folder`. Nothing in the path is decoded."""
    authority, _, inside = rest.partition("/")
    if scheme == "file":
        if authority not in ("", "localhost"):
            raise ValueError(f"it names the host {authority!r}, and file:/// with three slashes names a local folder")
        return pa.fs.LocalFileSystem(), f"/{inside.rstrip('/')}"
    named, _, options = rest.rpartition("?")
    if named and "=" in options:
        with contextlib.suppress(pa.ArrowInvalid):  # they are a part of the name
            authority_of_named, _, inside_of_named = named.partition("/")
            filesystem, root = pa.fs.FileSystem.from_uri(f"{scheme}://{authority_of_named}?{options}")
            return filesystem, _joined(root, inside_of_named)
    filesystem, root = pa.fs.FileSystem.from_uri(f"{scheme}://{authority}")
    return filesystem, _joined(root, inside)


def _joined(root: str, inside: str) -> str:
    return "/".join([root.rstrip("/"), *filter(None, inside.split("/"))])


class Record:
    """The figures of one loader over time. `facts` are JSON-able, and hardly change; `name` is the file's stem."""

    def __init__(self, facts: Mapping[str, Any], before: Mapping[str, float] | None = None) -> None:
        self._before = before or {}  # counts that an earlier record of the loader holds
        self.facts = {"format": FORMAT, "started": now_s(), **facts}
        start = int(1000 * self.facts["started"])
        dataset = re.sub(r"[^\w.-]", "_", self.facts["dataset"]).lstrip(".")  # a dot would hide the file
        self.name = f"{dataset}-rank{self.facts['rank']:05d}-{start}"
        self._names = list(COLUMNS)  # those of costs follow, when the first batch shows them
        self._samples = Thinned[list[float]](_RECENT, _MOST)
        self._last: dict[str, float] = {}

    def add(self, figures: Mapping[str, float]) -> None:
        """Adds a sample of all figures at the present time."""
        sample = {"time_s": now_s()}
        self._names += [name for name in figures if "." in name and name not in self._names]
        for name in self._names[1:]:
            sample[name] = figures[name]
            if name not in STANDING:
                # A sample that is taken while a timing ends may lack that timing, but counters must never fall.
                sample[name] = max(figures[name] - self._before.get(name, 0.0), self._last.get(name, 0.0))
        self._samples.add(list(sample.values()))
        self._last = sample

    def content(self, **latest: Any) -> bytes:
        """Returns the content of the file: samples, facts, and `latest`, which is JSON-able and may change."""
        rows = [[*row, *[0.0] * (len(self._names) - len(row))] for row in self._samples.all()]
        samples = np.array(rows, np.float64).reshape(-1, len(self._names))
        metadata = {"raylance": json.dumps(self.facts | latest, default=str)}
        table = pa.table(list(samples.T), names=self._names, metadata=metadata)
        sink = pa.BufferOutputStream()
        pyarrow.feather.write_feather(table, sink, compression="zstd")
        return bytes(sink.getvalue())
