"""A proxy on this machine that disturbs what is asked of a real S3 API."""

import http.client
import http.server
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

import boto3

Fault = Literal["", "reset", "truncate", "short", "latency", "hang", "400", "403", "404", "500", "503"]
LATENCY_S = 0.5

_CODES = {"400": "BadRequest", "403": "AccessDenied", "404": "NoSuchKey", "500": "InternalError", "503": "SlowDown"}


def bucket_of(port: int, name: str) -> Any:
    """A bucket by the S3 API itself; made now if there is none of this name."""
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "us-east-1"}
    bucket = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys).Bucket(name)
    if bucket.creation_date is None:
        bucket.create()
    return bucket


def store_options(port: int, key: str = "none") -> dict[str, str]:
    """Options of Lance for the S3 API, or the proxy, at a port of this machine."""
    keys = {"aws_access_key_id": key, "aws_secret_access_key": "secret", "aws_region": "us-east-1"}
    return {"aws_endpoint": f"http://127.0.0.1:{port}", "allow_http": "true", **keys}


class FaultyStore:
    """A proxy, with a port of its own, before what listens at a port."""

    def __init__(self, upstream: int) -> None:
        self.hits = 0  # requests that were disturbed
        self.refuses: Callable[[str], bool] = lambda key: False  # keys of access
        self._fault: Fault = ""
        self._match = re.compile("")
        self._released = threading.Event()

        class Handler(_Handler):
            store, port = self, upstream

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def disturb(self, fault: Fault, match: str = "") -> None:
        """From now on, what matches gets this fault; "" lets all pass, and lets go of what hangs."""
        self._released.set()
        self._released = threading.Event()
        self._fault, self._match, self.hits = fault, re.compile(match), 0

    def take(self, request: str) -> Fault:
        """The fault that a request gets; a request that hangs comes back when all may pass again."""
        fault, released = self._fault, self._released
        if not fault or not self._match.search(request):
            return ""
        self.hits += 1
        if fault in ("hang", "latency"):
            released.wait(LATENCY_S if fault == "latency" else None)
        return fault

    def close(self) -> None:
        self.disturb("")
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *about: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a killed client leaves its connections
            super().handle_error(*about)


class _Handler(http.server.BaseHTTPRequestHandler):
    store: FaultyStore
    port: int
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass  # to standard error, a line a request

    def _answer(self) -> None:
        body = self._body()
        fault = self.store.take(f"{self.command} {self.path}")
        key = re.search("Credential=([^/]+)/", self.headers.get("Authorization", ""))
        if self.store.refuses(key[1] if key else ""):
            fault = "403"
        if fault in ("reset", "hang"):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()  # by RST
            self.close_connection = True
        elif fault in _CODES:
            self._send(int(fault), [], f"<Error><Code>{_CODES[fault]}</Code><Message>no</Message></Error>".encode())
        else:
            upstream = http.client.HTTPConnection("127.0.0.1", self.port)
            upstream.request(self.command, self.path, body=body, headers=dict(self.headers))
            answer = upstream.getresponse()
            dropped = ("connection", "transfer-encoding", "content-length", "date", "server")
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in dropped]
            content, length = answer.read(), answer.getheader("Content-Length")
            if fault == "short" and self.command == "GET":  # less than was asked for, and it says so
                content, length = content[: len(content) // 2], None
            self._send(answer.status, headers, content, length, cut=fault == "truncate")
            upstream.close()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            continue  # trailers of HTTP, which no S3 client sends
        del self.headers["Transfer-Encoding"]
        self.headers["Content-Length"] = str(sum(map(len, chunks)))
        return b"".join(chunks)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer  # noqa: N815 - names of the standard library

    def _send(
        self, status: int, headers: list[tuple[str, str]], body: bytes, length: str | None = None, *, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = self.close_connection or cut

    def finish(self) -> None:
        try:
            super().finish()
        except (OSError, ValueError):  # the connection was reset on purpose
            self.close_connection = True
