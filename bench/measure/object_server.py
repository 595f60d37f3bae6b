"""A storage on loopback that answers as S3 does to who reads, late and no faster than it is told.

    python -m bench.measure.object_server FOLDER --latency-ms 50 --bytes-per-s 100000000

prints its address. Any bucket is FOLDER. It waits before each answer, and all answers together share one line
of the given width, so that more requests at a time bring no more bytes, as on a network. It knows GET, with a
range or without, HEAD and ListObjectsV2; it signs nothing and checks no signature.

"""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import click

_CHUNK_BYTES = 256 << 10  # 2.6 ms of a line of 100 MB/s
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Line:
    """What all answers go over: so many bytes a second, together."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, count: int) -> None:
        """Until `count` bytes have gone over it."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + count / self._bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


class Handler(BaseHTTPRequestHandler):
    """Answers one connection; `root`, `line` and `latency_s` are those of its server."""

    protocol_version = "HTTP/1.1"
    root: Path
    line: Line
    latency_s: float

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing is logged."""

    def setup(self) -> None:
        """Without Nagle's wait for the next packet."""
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        """An object, a part of one, or a list of them."""
        time.sleep(self.latency_s)
        asked = urlsplit(self.path)
        _, _, key = unquote(asked.path).lstrip("/").partition("/")
        query = parse_qs(asked.query)
        if "list-type" in query:
            self._list(query.get("prefix", [""])[0], query.get("delimiter", [""])[0])
            return
        path = self.root / key
        if not key or not path.is_file() or ".." in key.split("/"):
            self._send(404, {}, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>")
            return
        self._file(path)

    do_HEAD = do_GET

    def _file(self, path: Path) -> None:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            start, stop, code = 0, status.st_size, 200
            headers = {
                "ETag": f'"{status.st_mtime_ns:x}-{status.st_size:x}"',
                "Last-Modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(status.st_mtime)),
                "Accept-Ranges": "bytes",
                "Content-Type": "application/octet-stream",
            }
            if match := _RANGE.fullmatch(self.headers.get("Range", "")):
                start, code = int(match[1]), 206
                stop = min(stop, int(match[2]) + 1) if match[2] else stop
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{status.st_size}"
            self._head(code, headers, max(0, stop - start))
            if self.command == "HEAD":
                return
            with suppress(BrokenPipeError, ConnectionResetError):
                while start < stop:
                    count = min(_CHUNK_BYTES, stop - start)
                    self.line.wait(count)
                    start += self._send_part(file.fileno(), start, count)

    def _send_part(self, descriptor: int, start: int, count: int) -> int:
        sent = 0
        while sent < count:
            sent += os.sendfile(self.connection.fileno(), descriptor, start + sent, count - sent)
        return sent

    def _list(self, prefix: str, delimiter: str) -> None:
        """All of it at once: folders of more than 1,000 objects are not what this is for."""
        names = sorted(p.relative_to(self.root).as_posix() for p in self.root.rglob("*") if p.is_file())
        found = [name for name in names if name.startswith(prefix)]
        folders = sorted(
            {name[: name.index("/", len(prefix)) + 1] for name in found if "/" in name[len(prefix) :]}
        )
        if delimiter:
            found = [name for name in found if "/" not in name[len(prefix) :]]
        entries = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{(self.root / name).stat().st_size}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;0&quot;</ETag></Contents>"
            for name in found
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in (folders if delimiter else ())
        )
        text = (
            f"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult><Name>bucket</Name>"
            f"<Prefix>{escape(prefix)}</Prefix><KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>"
            f"{entries}{common}</ListBucketResult>"
        )
        self._send(200, {"Content-Type": "application/xml"}, text.encode())

    def _send(self, code: int, headers: dict[str, str], content: bytes) -> None:
        self._head(code, headers, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)

    def _head(self, code: int, headers: dict[str, str], count: int) -> None:
        self.send_response_only(code)
        for name, value in {**headers, "Content-Length": str(count)}.items():
            self.send_header(name, value)
        self.end_headers()


@contextmanager
def serving(folder: Path, latency_s: float, bytes_per_s: float | None) -> Iterator[str]:
    """Its address, as long as the block runs; in a process of its own."""
    options = [] if bytes_per_s is None else ["--bytes-per-s", str(bytes_per_s)]
    command = [sys.executable, "-m", "bench.measure.object_server", str(folder)]
    process = subprocess.Popen(
        [*command, "--latency-ms", str(1e3 * latency_s), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
    finally:
        process.kill()
        process.communicate()


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--latency-ms", default=0.0, help="Before each answer.")
@click.option("--bytes-per-s", type=float, help="Of all answers together.  [default: no limit]")
def main(folder: Path, latency_ms: float, bytes_per_s: float | None) -> None:
    """Serve FOLDER until standard input ends."""
    settings = {"root": folder, "line": Line(bytes_per_s), "latency_s": latency_ms / 1e3}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), settings))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
