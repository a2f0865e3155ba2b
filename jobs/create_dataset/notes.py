"""Owns the small files below a dataset that note what a run has done; never writes a row, and commits nothing."""

import dataclasses
import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lance
from lance.file import LanceFileSession

from jobs.common import exists

_FOLDER = "_create-"
_AT_ONCE = 16  # small files that are read or removed together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notes:
    """What one run has done."""

    uri: str  # of the dataset
    key: str  # names the run; another source or other arguments give another
    options: dict[str, str]  # of the object store

    @property
    def folder(self) -> str:
        """Where they are."""
        return f"{self.uri.rstrip('/')}/{_FOLDER}{self.key}"

    def write(self, number: int, note: dict[str, Any]) -> None:
        """Notes that a piece is done."""
        with tempfile.TemporaryDirectory() as directory:
            local = Path(directory, "note.json")
            local.write_text(json.dumps(note))
            self._session().upload_file(str(local), f"{number:08}.json")

    def read(self) -> dict[int, dict[str, Any]]:
        """What is done, by the number of the piece."""
        with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(_AT_ONCE) as threads:

            def read(file: str) -> tuple[int, dict[str, Any]]:
                local = Path(directory, file)
                self._session().download_file(file, str(local))
                note: dict[str, Any] = json.loads(local.read_text())
                return int(local.stem), note

            return dict(threads.map(read, sorted(file for file in self._session().list() if file.endswith(".json"))))

    def files(self) -> set[str]:
        """Names of the data files that were written."""
        fragments = [fragment for note in self.read().values() for fragment in note["fragments"]]
        return {file["path"] for fragment in fragments for file in fragment["files"]}

    def forget(self) -> None:
        """Removes them."""
        if "://" not in self.uri:
            shutil.rmtree(self.folder)
            return
        session = self._session()
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(session.delete_file, session.list()))

    def forget_all(self) -> None:
        """Removes them, and first the data files that they name, but for those of a version of the dataset."""
        session = LanceFileSession(self.uri, storage_options=self.options)
        there = {file.rpartition("/")[2] for file in session.list("data")}
        unused = (self.files() & there) - files_of(self.uri, self.options, all_versions=True)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(session.delete_file, [f"data/{file}" for file in sorted(unused)]))
        self.forget()

    def _session(self) -> LanceFileSession:
        return LanceFileSession(self.folder, storage_options=self.options)


def begun(uri: str, options: dict[str, str]) -> list[Notes]:
    """The notes of all runs that have left some there."""
    session = LanceFileSession(uri, storage_options=options)
    folders = (folder.strip("/") for folder in session.list_with_delimiter().common_prefixes)
    keys = sorted(folder.removeprefix(_FOLDER) for folder in folders if folder.startswith(_FOLDER))
    return [Notes(uri=uri, key=key, options=options) for key in keys]


def files_of(uri: str, options: dict[str, str], *, all_versions: bool = False) -> set[str]:
    """Names of the data files of the newest version, or of all; none where there is no dataset."""
    if not exists(uri, options):
        return set()
    newest = lance.dataset(uri, storage_options=options)
    versions = [version["version"] for version in newest.versions()] if all_versions else [newest.version]
    fragments = [fragment for version in versions for fragment in newest.checkout_version(version).get_fragments()]
    return {file.path for fragment in fragments for file in fragment.data_files()}
