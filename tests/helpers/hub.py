"""A server that answers as Hugging Face's Hub does, as far as reading the files of a dataset needs it.

Lance reads `hf://datasets/owner/name/path` from the server that the environment names in HF_ENDPOINT.
"""

import contextlib
import http.server
import json
import re
import threading
import time
import urllib.parse
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any


class _Hub(http.server.BaseHTTPRequestHandler):
    """Lists folders and sends files, or ranges of them."""

    protocol_version = "HTTP/1.1"
    root: Path
    requests: list[str]
    busy: set[int]  # numbers of requests that are refused, because there were too many
    refused: list[float]  # when the first request came, if all are refused until `wait_s` later
    wait_s: int

    def do_GET(self) -> None:
        self.requests.append(path := urllib.parse.unquote(urllib.parse.urlsplit(self.path).path))
        if self.wait_s and not self.refused:
            self.refused.append(time.monotonic())
        if len(self.requests) in self.busy or (self.refused and time.monotonic() - self.refused[0] < self.wait_s):
            self._send(429, b"too many requests", {"Retry-After": str(self.wait_s or 1)})
        elif found := re.fullmatch(r"/api/datasets/[^/]+/[^/]+/tree/main/?(.*)", path):
            self._list(self.root / found[1])
        elif found := re.fullmatch(r"/datasets/[^/]+/[^/]+/resolve/main/(.+)", path):
            self._send_file(self.root / found[1])
        else:
            self._send(404, b"{}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        """Says what some paths are."""
        self.requests.append(self.path)
        given = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = json.loads(given)["paths"] if given.startswith("{") else urllib.parse.parse_qs(given)["paths"]
        entries = [self._entry(self.root / path) for path in paths if (self.root / path).exists()]
        self._send(200, json.dumps(entries).encode())

    def _entry(self, path: Path) -> dict[str, Any]:
        kind, size = ("file", path.stat().st_size) if path.is_file() else ("directory", 0)
        return {"type": kind, "oid": "0" * 40, "size": size, "path": str(path.relative_to(self.root))}

    def _list(self, folder: Path) -> None:
        is_deep = "recursive=True" in self.path
        if not folder.is_dir():
            self._send(404, b'{"error": "not found"}')
            return
        found = sorted(folder.rglob("*") if is_deep else folder.iterdir())
        self._send(200, json.dumps([self._entry(path) for path in found]).encode())

    def _send_file(self, path: Path) -> None:
        if not path.is_file():
            self._send(404, b"Entry not found")
            return
        data, given = path.read_bytes(), re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if given is None:
            self._send(200, data)
            return
        begin, end = given.groups()
        first = int(begin) if begin else len(data) - int(end)  # "bytes=-n" asks for the last n bytes
        last = min(int(end), len(data) - 1) if begin and end else len(data) - 1
        self._send(206, data[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data)), "ETag": '"0"'} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Writes nothing."""


@contextlib.contextmanager
def hub(root: Path, busy: Collection[int] = (), wait_s: int = 0) -> Iterator[tuple[str, list[str]]]:
    """Serves the files of a folder as a dataset; yields the address, and the paths that are asked for. The requests of
    these numbers, counted from 1, are answered by "too many requests", as are all in the first `wait_s` seconds, which
    the answer asks to wait.
    """
    requests: list[str] = []
    handler = type(
        "Handler", (_Hub,), {"root": root, "requests": requests, "busy": {*busy}, "refused": [], "wait_s": wait_s}
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", requests
        finally:
            server.shutdown()
            thread.join()
