"""A Lance namespace that vends credentials which expire, as a catalogue of a company does."""

import os
import time
from pathlib import Path
from typing import Any

from lance_namespace import DescribeTableRequest, DescribeTableResponse, LanceNamespace
from lance_namespace.errors import PermissionDeniedError

from tests.helpers.faulty_store import store_options


class Vending(LanceNamespace):  # type: ignore[misc] # it has no types
    """One table in the store at `port`. Each answer has a key of its own, which is valid for `life_s` and leaves a file
    in `folder`: process, and until when it is valid.
    """

    def __init__(
        self, *, uri: str, port: str, folder: str, token: str, life_s: str = "3", keeps_versions: str = ""
    ) -> None:
        if (failing := Path(folder, "failing")).exists():
            failing.unlink()
            raise ConnectionError(f"the catalog starts again; {token} was not seen")
        self._keeps_versions = keeps_versions == "true"
        self._uri, self._port, self._folder, self._life_s = uri, int(port), Path(folder), float(life_s)
        self._token = token

    def namespace_id(self) -> str:
        return f"vending {self._uri}"

    def describe_table(self, request: DescribeTableRequest) -> DescribeTableResponse:
        if self._token != "right":
            raise PermissionDeniedError(f"the token {self._token.split()[-1]!r} is wrong")
        until_s = time.time() + self._life_s
        key = f"{os.getpid()}-{until_s:.6f}"
        (self._folder / key).touch()
        moved = self._folder / "moved"
        options: Any = store_options(self._port, key)
        options |= {"expires_at_millis": str(int(until_s * 1000)), "refresh_offset_millis": "1000"}
        place = moved.read_text() if moved.exists() else self._uri
        return DescribeTableResponse(location=place, storage_options=options, managed_versioning=self._keeps_versions)
