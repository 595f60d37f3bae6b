"""An HTTP proxy before a storage that delays, slows down and breaks what passes, as it is told.

A `Fault` says what becomes of one request; `Proxy.plan` is asked for each. Names of faults:

    reset     the connection is reset before the answer
    broken    it is reset after half of the body
    500, 503  the storage answers so (503 as S3 does: SlowDown)
    stall     half of the body comes, then nothing more
    flip      a bit of the body is another
    short     half of the body comes, and the answer says that this is all
    expired   403: the credentials have expired
    skew      403: the clocks differ
    gone      404
    silent    no answer, until the client hangs up
"""

import http.client
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = ("reset", "broken", "500", "503", "stall", "flip", "short", "expired", "skew", "gone")  # and silent
_CODES = {
    "500": (500, "InternalError", "We encountered an internal error. Please try again."),
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "expired": (403, "ExpiredToken", "The provided token has expired."),
    "skew": (
        403,
        "RequestTimeTooSkewed",
        "The request's time is too far from the server's.",
    ),
    "gone": (404, "NoSuchKey", "The specified key does not exist."),
}
_CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that came: its number from 0, method, path, and range as its header says, or empty."""

    number: int
    method: str
    path: str
    range: str


class Proxy:
    """Counts what passes, and breaks what `plan` names.

    Attributes:
        latency_s: before each answer.
        bytes_per_s: of all bodies together; None: as fast as it goes.
        plan: the name of a fault for a request, or None.
        seen: all requests so far.
        body_bytes: sent to clients so far.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream.removeprefix("http://")
        self.latency_s = 0.0
        self.bytes_per_s: float | None = None
        self.plan: Callable[[Seen], str | None] = lambda seen: None
        self.seen: list[Seen] = []
        self.faults: Counter[str] = Counter()
        self.body_bytes = 0
        self.endpoint = ""
        self._lock = threading.Lock()
        self._free_s = 0.0

    def note(self, method: str, path: str, part: str) -> str | None:
        """Count a request; the fault that it gets."""
        with self._lock:
            seen = Seen(len(self.seen), method, path, part)
            self.seen.append(seen)
            fault = self.plan(seen)
            if fault:
                self.faults[fault] += 1
            return fault

    def pace(self, count: int) -> None:
        """Wait until the line is free for so many bytes."""
        with self._lock:
            self.body_bytes += count
            if self.bytes_per_s is None:
                return
            now = time.monotonic()
            self._free_s = max(self._free_s, now) + count / self.bytes_per_s
            wait_s = self._free_s - now
        time.sleep(max(0.0, wait_s))


@contextmanager
def proxying(upstream: str) -> Iterator[Proxy]:
    """A proxy before the endpoint `upstream` that runs until the end of the block."""
    proxy = Proxy(upstream)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    server.daemon_threads = True
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _do(self) -> None:
        proxy = self.proxy
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        fault = proxy.note(self.command, self.path, self.headers.get("range", ""))
        time.sleep(proxy.latency_s)
        if fault == "reset":
            self._reset()
            return
        if fault == "silent":
            with suppress(OSError):
                self.connection.recv(1)
            self.close_connection = True
            return
        if fault in _CODES:
            status, code, message = _CODES[fault]
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
            self._answer(status, {"Content-Type": "application/xml"}, text.encode(), None)
            return
        connection = http.client.HTTPConnection(proxy.upstream, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        named = {k: v for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")}
        self._answer(answer.status, named, content, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do

    def _answer(self, status: int, headers: dict[str, str], content: bytes, fault: str | None) -> None:
        if content and fault == "flip":
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        if content and fault == "short":
            content = content[: len(content) // 2]
        if self.command != "HEAD":
            headers = {**{k: v for k, v in headers.items() if k.lower() != "content-length"}}
            headers["Content-Length"] = str(len(content))
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        half = fault in ("broken", "stall")
        with suppress(BrokenPipeError, ConnectionResetError):
            self._send(content[: len(content) // 2] if half else content)
            if fault == "stall":
                with suppress(OSError):
                    self.connection.recv(1)  # until the client hangs up
        if half:
            self._reset()

    def _send(self, content: bytes) -> None:
        if self.command == "HEAD":
            return
        for start in range(0, len(content), _CHUNK_BYTES):
            chunk = content[start : start + _CHUNK_BYTES]
            self.proxy.pace(len(chunk))
            self.wfile.write(chunk)

    def _reset(self) -> None:
        """Not closed in order: the client sees ECONNRESET."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
