"""A local HTTP server, and archives built like the published ones."""

import contextlib
import hashlib
import io
import tarfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from precache.example_data.datasets import PublicDataset


class Server(ThreadingHTTPServer):
    """Serves `content`; breaks off each of the first `breaks` answers after `break_bytes`.

    `missing` is the status of all answers, where it is one.
    """

    content = b""
    breaks = 0
    break_bytes = 10_000
    ranges = True
    missing = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/files/archive.tar"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.requests.append(wanted)
        if self.server.missing:
            self.send_error(self.server.missing)
            return
        start = int(wanted[len("bytes=") : -1]) if wanted and self.server.ranges else 0
        if start and start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.breaks:
            self.server.breaks -= 1
            body = body[: self.server.break_bytes]
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def tar_of(raw_tree: Path, folder: str, *extra: tarfile.TarInfo | None) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(raw_tree, folder)
        for member in filter(None, extra):
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return buffer.getvalue()


def published(server: Server, content: bytes, **changes: object) -> PublicDataset:
    server.content = content
    dataset = PublicDataset(
        url=server.url, md5=hashlib.md5(content).hexdigest(), inner=None, folder="256_Objects", images=70
    )
    return replace(dataset, **changes)
