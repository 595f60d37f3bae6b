"""obstore beside fsspec's s3fs: whole objects and ranges from one endpoint, four threads at a time.

    python -m bench.measure.storage_libraries --repeats 5

Both read the same objects of a server on this machine (`bench.measure.object_server`), taking turns, each turn
in a process of its own; s3fs is measured where it is installed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import click
import torch

from bench.machine.hardware import describe_machine
from bench.measure.object_server import ENVIRONMENT, serving
from bench.report.stats import estimate
from precache.console import commandline
from precache.errors import check_range

_PROGRAM = """
import json, sys, time
from concurrent.futures import ThreadPoolExecutor

library, endpoint, objects, object_bytes, range_bytes = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
started_s = time.perf_counter()
if library == "obstore":
    import obstore.store
    imported_s = time.perf_counter() - started_s
    store = obstore.store.S3Store("bucket", endpoint=endpoint, client_options={"allow_http": True})
    get = lambda i: len(store.get(f"{i}").bytes())
    part = lambda i: len(store.get_range(f"{i}", start=i * 1000, length=range_bytes))
else:
    import s3fs
    imported_s = time.perf_counter() - started_s
    store = s3fs.S3FileSystem(endpoint_url=endpoint)
    get = lambda i: len(store.cat_file(f"bucket/{i}"))
    part = lambda i: len(store.cat_file(f"bucket/{i}", start=i * 1000, end=i * 1000 + range_bytes))

def measure(call, numbers, expected):
    start_s = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(call, numbers)) == {expected}
    return time.perf_counter() - start_s

get(0)  # connects
print(json.dumps({
    "import": imported_s,
    "objects": measure(get, range(objects), object_bytes),
    "ranges": measure(part, [i % objects for i in range(64)], range_bytes),
}))
"""
LIBRARIES = ("obstore", "s3fs")


def run(library: str, endpoint: str, objects: int, object_bytes: int, range_bytes: int) -> dict[str, float]:
    """Seconds of the import, of all objects, and of 64 ranges."""
    arguments = map(str, (library, endpoint, objects, object_bytes, range_bytes))
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@click.command(cls=commandline.Command)
@click.option("--objects", default=8, show_default=True)
@click.option("--object-bytes", default=8 << 20, show_default=True)
@click.option("--range-bytes", default=200_000, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Turns.")
def main(objects: int, object_bytes: int, range_bytes: int, repeats: int) -> None:
    """Print seconds of each library, and their ratio."""
    check_range("repeats", repeats, 1)
    libraries = [name for name in LIBRARIES if find_spec(name)]
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in libraries}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(objects):
            (Path(folder) / str(number)).write_bytes(os.urandom(object_bytes))
        with serving(Path(folder), 0.0, None) as endpoint:
            for _ in range(repeats):
                for name in libraries:
                    for what, seconds in run(name, endpoint, objects, object_bytes, range_bytes).items():
                        found[name][what].append(seconds)
    for what in ("import", "objects", "ranges"):
        cells = [f"{name} {_shown(found[name][what])}" for name in libraries]
        click.echo(f"{what:8}  {'   '.join(cells)}")
    machine = describe_machine(torch.device("cpu"))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in libraries)
    click.echo(
        f"{objects} objects of {object_bytes:,} bytes, 64 ranges of {range_bytes:,}, 4 threads, medians "
        f"(range) of {repeats} turns; {machine['cpu']}, {versions}, {machine['date']}"
    )


def _shown(seconds: list[float]) -> str:
    value = estimate([1e3 * second for second in seconds])
    return f"{value.median:,.0f} ({value.low:,.0f}-{value.high:,.0f}) ms"


if __name__ == "__main__":
    main()
