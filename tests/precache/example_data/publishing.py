"""A local HTTP server, and archives built like the published ones."""

import contextlib
import hashlib
import io
import tarfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from precache.example_data.datasets import PublicDataset


class ArchiveServer(ThreadingHTTPServer):
    """A server of one archive, which can break connections or refuse.

    Attributes:
        content: the archive.
        breaks: number of answers, from the first on, that end after `break_bytes`.
        ranges: whether it answers requests for a range with that range.
        error_status: HTTP status of all answers; 0: they succeed.
        requests: header `Range` of each request.
    """

    content = b""
    breaks = 0
    break_bytes = 10_000
    ranges = True
    error_status = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _ArchiveHandler)
        self.requests: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/files/archive.tar"


class _ArchiveHandler(BaseHTTPRequestHandler):
    server: ArchiveServer

    def do_GET(self) -> None:
        byte_range = self.headers.get("Range")
        self.server.requests.append(byte_range)
        if self.server.error_status:
            self.send_error(self.server.error_status)
            return
        start = int(byte_range[len("bytes=") : -1]) if byte_range and self.server.ranges else 0
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


def make_tar_archive(raw_tree: Path, folder: str, *members: tarfile.TarInfo) -> bytes:
    """Return a tar of the tree in `folder`, followed by `members`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(raw_tree, folder)
        for member in members:
            tar.addfile(member, io.BytesIO(bytes(member.size)))
    return buffer.getvalue()


def publish(server: ArchiveServer, content: bytes, **changes: object) -> PublicDataset:
    """Serve an archive, and return the dataset that it is."""
    server.content = content
    dataset = PublicDataset(
        url=server.url, md5=hashlib.md5(content).hexdigest(), inner=None, folder="256_Objects", images=70
    )
    return replace(dataset, **changes)
