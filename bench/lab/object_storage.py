"""Compare loaders that read from an object storage with a plain download.

    python -m bench.lab.object_storage DATA

DATA holds folders that `precache convert` made, named by their format: `shards`, and `webdataset` if it is
to be measured, too. A server on this machine serves them: it delays each answer, and limits the bytes per
second of all answers together, so that more requests at a time bring no more bytes.

Each run has a process of its own and an empty cache. A plain download fetches the files of `shards`, several
at a time: no loader can be faster. Each loader serves two epochs; the first includes opening the dataset.
"""

import multiprocessing
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import click

import loaders
from bench.lab import harness
from bench.lab.harness import FigureColumn
from bench.measure.processes import run_in_process
from bench.report.table import Table
from precache import open_dataset
from precache.errors import SettingError
from precache.storage.objects import ObjectStore
from precache.storage.staging import temporary_folder
from precache.storage.urls import Url

FORMATS = ("shards", "webdataset")
_PLAIN = "plain download"
_FILES_AT_A_TIME = 4
_PART_BYTES = 256 << 10  # sent at a time; a line of 100 MB/s takes 2.6 ms for it
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Server(ThreadingHTTPServer):
    """Server of the files below a folder that answers HEAD and GET, with a range or without, late.

    Args:
        root: the folder.
        latency_s: seconds before each answer.
        bytes_per_s: most bytes per second of all answers together.
    """

    daemon_threads = True

    def __init__(self, root: Path, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(root)))
        self.latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, count: int) -> None:
        """Wait until the line, which all answers share, would have carried `count` bytes."""
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + count / self._bytes_per_s
            wait_s = self._free_s - now_s
        time.sleep(wait_s)


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None: ...

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_GET(self) -> None:
        time.sleep(self.server.latency_s)
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        size = path.stat().st_size
        start, stop, code = 0, size, 200
        if match := _RANGE.fullmatch(self.headers.get("Range", "")):
            start, stop, code = int(match[1]), min(size, int(match[2] or size) + 1), 206
        self.send_response_only(code)
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("ETag", f'"{size:x}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        with open(path, "rb") as file, suppress(BrokenPipeError, ConnectionResetError):
            file.seek(start)
            while self.command != "HEAD" and (part := file.read(min(stop - file.tell(), _PART_BYTES))):
                self.server.wait(len(part))
                self.wfile.write(part)

    do_HEAD = do_GET


def _serve(sender: Connection, root: Path, latency_s: float, bytes_per_s: float) -> None:
    """Send the server's address to the parent process, and serve until this process is killed."""
    server = Server(root, latency_s, bytes_per_s)
    sender.send(f"http://127.0.0.1:{server.server_address[1]}")
    server.serve_forever()


@contextmanager
def run_server(root: Path, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """Serve the files in `root` by a `Server` in a new process during the block; yield its address."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sender, root, latency_s, bytes_per_s), daemon=True)
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.kill()
        process.join()


def download(url: Url, sizes: dict[str, int], folder: Path) -> float:
    """Download the files of these names and sizes into `folder`, several at a time; return bytes/s."""
    store = ObjectStore(url)

    def fetch(name: str) -> None:
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
        store.download(name, descriptor, sizes[name])
        os.close(descriptor)

    start_s = time.perf_counter()
    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
        list(pool.map(fetch, sizes))
    return sum(sizes.values()) / (time.perf_counter() - start_s)


def read(url: Url, folder: Path, batch_size: int, workers: int, size: int) -> list[float]:
    """Serve two epochs with `loaders.build`, which caches in `folder`; return images/s of each."""
    rates = []
    start_s = time.perf_counter()
    reading = loaders.Reading(workers=workers, cache_dir=folder)
    with loaders.build(str(url), batch_size=batch_size, size=size, dtype="uint8", reading=reading) as loader:
        for _ in range(2):
            images = sum(len(batch.ids) for batch in loader)
            rates.append(images / (time.perf_counter() - start_s))
            start_s = time.perf_counter()
    return rates


def run(
    url: Url, sizes: dict[str, int], images: int, settings: tuple[int, int, int] | None
) -> dict[str, float]:
    """Return the figures of one run with an empty cache.

    Args:
        sizes: bytes of each file, by its name.
        images: number of pictures of an epoch.
        settings: arguments batch_size, workers and size of `read`; None: a plain download is measured.
    """
    with temporary_folder() as folder:
        if settings is None:
            return {"mb_per_s": run_in_process(download, url, sizes, folder) / 1e6}
        first, second = run_in_process(read, url, folder, *settings)
        return {"first": first, "second": second, "mb_per_s": first * sum(sizes.values()) / images / 1e6}


@click.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--latency-ms", default=50.0, show_default=True, help="Milliseconds before each answer.")
@click.option(
    "--mb-per-s",
    default=100.0,
    show_default=True,
    help="Rate of the line that all answers share, in 10^6 bytes/s.",
)
@click.option("--batch-size", default=64, show_default=True, help="Samples per batch.")
@click.option("--workers", default=2, show_default=True, help="Threads of each loader.")
@click.option("--size", default=224, show_default=True, help="Side of the served square, pixels.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each, taking turns.")
def command(
    data: Path, latency_ms: float, mb_per_s: float, batch_size: int, workers: int, size: int, repeats: int
) -> None:
    """Print images/s of two epochs of what DATA holds, and MB/s of the first beside a plain download."""
    names = [name for name in FORMATS if (data / name).is_dir()]
    if "shards" not in names:
        raise SettingError(
            "has no folder 'shards'", path=data, remedy=f"run 'precache convert TREE {data / 'shards'}'"
        )
    images = open_dataset(data / "shards").manifest.samples
    sizes = {
        name: {file.name: file.stat().st_size for file in (data / name).iterdir() if file.is_file()}
        for name in names
    }
    with run_server(data, latency_ms / 1e3, mb_per_s * 1e6) as server:
        runs = {_PLAIN: partial(run, Url(server, "shards"), sizes["shards"], images, None)}
        for name in names:
            settings = (batch_size, workers, size)
            runs[name] = partial(run, Url(server, name), sizes[name], images, settings)
        turns = harness.take_turns(runs, repeats)
    columns = (
        FigureColumn("first epoch, images/s", "first"),
        FigureColumn("MB/s", "mb_per_s", ",.1f"),
        FigureColumn(f"beside a {_PLAIN}", "mb_per_s", ".2f", _PLAIN),
        FigureColumn("second epoch, images/s", "second"),
    )
    table = Table(["loader", *(column.title for column in columns)], turns.rows(columns))
    line = f"{latency_ms:g} ms an answer, a line of {mb_per_s:g} MB/s"
    harness.show(table, turns, f"{line}, batches of {batch_size} of {size}x{size}, uint8, {workers} workers")


if __name__ == "__main__":
    harness.main(command, "object_storage")
