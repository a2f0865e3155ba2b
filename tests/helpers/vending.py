"""Credentials which expire, and a Lance namespace that vends them, as a catalogue of a company does."""

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from lance_namespace import DescribeTableRequest, DescribeTableResponse, LanceNamespace
from lance_namespace.errors import PermissionDeniedError

from tests.helpers.faulty_store import store_options


@dataclasses.dataclass(frozen=True)
class Keys:
    """Returns credentials that live for some seconds, and leaves a file for each of them: process, and until when."""

    port: int
    folder: Path
    life_s: float = 3.0

    def __call__(self) -> dict[str, str]:
        until_s = time.time() + self.life_s
        key = f"{os.getpid()}-{until_s:.6f}"
        (self.folder / key).touch()
        expiry = {"expires_at_millis": str(int(until_s * 1000)), "refresh_offset_millis": "1000"}
        return {**store_options(self.port, key), **expiry}


class Vending(LanceNamespace):  # type: ignore[misc] # it has no types
    """One table in the store at `port`. Each answer has credentials of its own."""

    def __init__(self, *, uri: str, port: str, folder: str, token: str, keeps_versions: str = "") -> None:
        if (failing := Path(folder, "failing")).exists():
            failing.unlink()
            raise ConnectionError(f"the catalog starts again; {token} was not seen")
        self._keeps_versions = keeps_versions == "true"
        self._uri, self._folder, self._token = uri, Path(folder), token
        self._keys = Keys(int(port), self._folder)

    def namespace_id(self) -> str:
        return f"vending {self._uri}"

    def describe_table(self, request: DescribeTableRequest) -> DescribeTableResponse:
        if self._token != "right":
            raise PermissionDeniedError(f"the token {self._token.split()[-1]!r} is wrong")
        moved = self._folder / "moved"
        options: Any = self._keys()
        place = moved.read_text() if moved.exists() else self._uri
        return DescribeTableResponse(location=place, storage_options=options, managed_versioning=self._keeps_versions)
