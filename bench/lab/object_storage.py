"""How fast a loader reads from an object storage, beside a plain download.

    python -m bench.lab.object_storage DATA

DATA holds folders that `precache convert` made, named by their format: `shards`, and `webdataset` where it is
to be measured, too. They lie behind a server on this machine that answers late, and over one line of a given
width, so that more requests at a time bring no more bytes.

Each run has a process of its own and an empty cache: a plain download of the files of `shards`, several at a
time, which is what the line gives; and two epochs of each loader, the first one with opening the dataset.
"""

import multiprocessing
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import click

import loaders
from bench.lab import harness
from bench.lab.harness import Column
from bench.measure.fresh import run_fresh
from bench.report.words import Table
from precache import open_dataset
from precache.console import commandline
from precache.errors import SettingError
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url

ENVIRONMENT = {
    **{
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_EC2_METADATA_DISABLED": "true",
    },
    **{"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1"},
}
"""What clients of S3 look for, beside AWS_ENDPOINT_URL."""
FORMATS = ("shards", "webdataset")
_PLAIN = "plain download"
_FILES_AT_A_TIME = 4
_PART_BYTES = 256 << 10  # 2.6 ms of a line of 100 MB/s
_MISSING = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Server(ThreadingHTTPServer):
    """Answers as S3 does to who reads: GET, with a range or without, HEAD and ListObjectsV2, any bucket."""

    daemon_threads = True

    def __init__(self, root: Path, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.latency_s = root, latency_s
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, count: int) -> None:
        """Until `count` bytes have gone over the line, which all answers share."""
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + count / self._bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None: ...

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        time.sleep(self.server.latency_s)
        asked = urlsplit(self.path)
        key = unquote(asked.path).lstrip("/").partition("/")[2]
        path = self.server.root / key
        if "list-type" in asked.query:
            listed = _listed(self.server.root, parse_qs(asked.query).get("prefix", [""])[0])
            self._answer(200, {}, BytesIO(listed), len(listed))
        elif not key or not path.is_file():
            self._answer(404, {}, BytesIO(_MISSING), len(_MISSING))
        else:
            size = path.stat().st_size
            headers = {"ETag": f'"{size:x}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
            start, stop, code = 0, size, 200
            if match := _RANGE.fullmatch(self.headers.get("Range", "")):
                start, stop, code = int(match[1]), min(size, int(match[2] or size) + 1), 206
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
            with open(path, "rb") as file:
                file.seek(start)
                self._answer(code, headers, file, stop - start)

    do_HEAD = do_GET

    def _answer(self, code: int, headers: dict[str, str], content: BinaryIO, count: int) -> None:
        self.send_response_only(code)
        for name, value in {**headers, "Content-Length": str(count)}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            while self.command != "HEAD" and count > 0:
                part = content.read(min(count, _PART_BYTES))
                self.server.wait(len(part))
                self.wfile.write(part)
                count -= len(part)


def _listed(root: Path, prefix: str) -> bytes:
    """All of it at once: folders of more than 1,000 objects are not what this is for."""
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    entries = "".join(
        f"<Contents><Key>{escape(name)}</Key><Size>{files[name].stat().st_size}</Size>"
        f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;0&quot;</ETag></Contents>"
        for name in sorted(files)
        if name.startswith(prefix)
    )
    head = f"<Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
    text = f"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult>{head}{entries}</ListBucketResult>"
    return text.encode()


def _serve(told: Connection, root: Path, latency_s: float, bytes_per_s: float) -> None:
    server = Server(root, latency_s, bytes_per_s)
    told.send(f"http://127.0.0.1:{server.server_address[1]}")
    server.serve_forever()


@contextmanager
def serving(root: Path, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """The address of such a storage of the files in `root`; in a process of its own, while the block runs."""
    context = multiprocessing.get_context("spawn")
    told, telling = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(telling, root, latency_s, bytes_per_s), daemon=True)
    process.start()
    try:
        yield told.recv()
    finally:
        process.kill()
        process.join()


def download(folder: str) -> float:
    """Bytes/s of a plain download of `shards` into `folder`, several files at a time."""
    start_s = time.perf_counter()
    store = ObjectStore(Url("s3://bucket", "shards"))
    files = list(store.list())

    def fetch(number: int) -> None:
        descriptor = os.open(os.path.join(folder, str(number)), os.O_WRONLY | os.O_CREAT)
        store.download(files[number].name, descriptor, files[number].bytes)
        os.close(descriptor)

    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
        list(pool.map(fetch, range(len(files))))
    return sum(file.bytes for file in files) / (time.perf_counter() - start_s)


def read(name: str, folder: str, batch_size: int, workers: int, size: int) -> list[float]:
    """Images/s of both epochs of our loader, which caches in `folder`."""
    rates = []
    start_s = time.perf_counter()
    reading = loaders.Reading(workers=workers, cache_dir=folder)
    with loaders.build(f"s3://bucket/{name}", batch_size=batch_size, size=size, reading=reading) as loader:
        for _ in range(2):
            images = sum(len(batch.ids) for batch in loader)
            rates.append(images / (time.perf_counter() - start_s))
            start_s = time.perf_counter()
    return rates


def run(name: str, image_bytes: float, settings: tuple[int, int, int]) -> dict[str, float]:
    """Figures of one run of `name`, with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as folder:
        if name == _PLAIN:
            return {"mb_per_s": run_fresh(download, folder) / 1e6}
        first, second = run_fresh(read, name, folder, *settings)
        return {"first": first, "second": second, "mb_per_s": first * image_bytes / 1e6}


@click.command(cls=commandline.Command)
@click.argument("data", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--latency-ms", default=50.0, show_default=True, help="Before each answer.")
@click.option("--mb-per-s", default=100.0, show_default=True, help="Of all answers together.")
@click.option("--batch-size", default=64, show_default=True, help="Samples per batch.")
@click.option("--workers", default=2, show_default=True, help="Of each loader.")
@click.option("--size", default=224, show_default=True, help="Side of the served square, pixels.")
@click.option("--repeats", default=3, show_default=True, help="Turns.")
def command(
    data: Path, latency_ms: float, mb_per_s: float, batch_size: int, workers: int, size: int, repeats: int
) -> None:
    """Print images/s of two epochs of what DATA holds, and MB/s of the first beside a plain download."""
    names = [name for name in FORMATS if (data / name).is_dir()]
    if "shards" not in names:
        raise SettingError(f"{data}: has no folder 'shards'; run 'precache convert TREE {data / 'shards'}'")
    images = open_dataset(data / "shards").manifest.samples
    runs = {}
    for name in (_PLAIN, *names):
        stored = sum(path.stat().st_size for path in (data / name).rglob("*") if path.is_file())
        runs[name] = partial(run, name, stored / images, (batch_size, workers, size))
    with serving(data, latency_ms / 1e3, mb_per_s * 1e6) as endpoint:
        os.environ.update({**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint})
        turns = harness.Turns(runs, repeats)
    columns = (
        Column("first epoch, images/s", "first"),
        Column("MB/s", "mb_per_s", ",.1f"),
        Column(f"beside a {_PLAIN}", "mb_per_s", ".2f", _PLAIN),
        Column("second epoch, images/s", "second"),
    )
    table = Table(["loader", *(column.title for column in columns)], turns.rows(columns))
    line = f"{latency_ms:g} ms an answer, a line of {mb_per_s:g} MB/s"
    turns.show(table, f"{line}, batches of {batch_size} of {size}x{size}, {workers} workers")


if __name__ == "__main__":
    harness.main(command, "object_storage")
