"""How fast a loader reads from an object storage: beside a plain download, and beside other libraries.

    python -m bench.measure.object_storage DATA --peer-python PEERS/bin/python

DATA holds folders of the same pictures, each as what it is named: `shards`, `webdataset` (`precache
convert`), `litdata`, `mds` (`python -m bench.peers.writing`); those that are there are measured. They lie
behind a server on this machine that answers late and over one line of a given width
(`bench.measure.object_server`).

Each turn measures, one after the other, each in a process of its own with an empty cache: a plain download
of the files of `shards`, several at a time, which is what the line gives; each loader's first epoch, with
opening the dataset, and its second; and each of ours feeding an emulated trainer that takes as many
images/s as the line gives, less a tenth, or as the preset says if that is less.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import click
import torch

import loaders
from bench.machine.hardware import describe_machine, versions_of
from bench.machine.others import OtherProcesses
from bench.measure.fresh import run_fresh
from bench.measure.object_server import ENVIRONMENT, serving
from bench.measure.trainers import PRESETS
from bench.peers import remote
from bench.report import stats
from precache import open_dataset
from precache.console import commandline
from precache.console.commandline import ProgressBar
from precache.errors import SettingError, check_range, shell_command
from precache.executors import available_cpus
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url

T = TypeVar("T")
OURS = ("shards", "webdataset")
_FILES_AT_A_TIME = 4
_SHARE_OF_LINE = 0.9


@dataclass(frozen=True, slots=True)
class Settings:
    """Of all runs: what is served, and how."""

    batch_size: int
    workers: int
    size: int
    epochs: int = 2


@dataclass(slots=True)
class Found:
    """Of one loader, in all turns.

    Attributes:
        image_bytes: stored of a picture.
        epochs: images/s of the first epoch, of the second one, and so on.
        busy: share of the time that the emulated trainer was at work in the first epoch.
        trainer: images/s that it takes.
        problem: why it is not measured any more.
    """

    image_bytes: float
    epochs: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    busy: list[float] = field(default_factory=list)
    trainer: float = 0.0
    problem: str = ""


def download(url: Url, folder: str) -> float:
    """Bytes/s of a plain download of all files at `url`, several at a time."""
    start_s = time.perf_counter()
    store = ObjectStore(url)
    files = list(store.list())

    def fetch(number: int) -> None:
        descriptor = os.open(os.path.join(folder, str(number)), os.O_WRONLY | os.O_CREAT)
        store.download(files[number].name, descriptor, files[number].bytes)
        os.close(descriptor)

    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
        list(pool.map(fetch, range(len(files))))
    return sum(file.bytes for file in files) / (time.perf_counter() - start_s)


def read(url: str, folder: str, settings: Settings) -> list[float]:
    """Images/s of each epoch of our loader, the first one with opening the dataset."""
    rates = []
    start_s = time.perf_counter()
    with _build(url, folder, settings) as loader:
        for _ in range(settings.epochs):
            images = sum(len(batch.ids) for batch in loader)
            rates.append(images / (time.perf_counter() - start_s))
            start_s = time.perf_counter()
    return rates


def feed(url: str, folder: str, settings: Settings, images_per_s: float) -> float:
    """Share of the time, from the first batch on, that an emulated trainer is at work in the first epoch."""
    with _build(url, folder, settings) as loader:
        worked_s = 0.0
        batches = iter(loader)
        batch, start_s = next(batches), time.perf_counter()
        while True:
            step_s = len(batch.ids) / images_per_s
            time.sleep(step_s)
            worked_s += step_s
            try:
                batch = next(batches)
            except StopIteration:
                return worked_s / (time.perf_counter() - start_s)


def _build(url: str, folder: str, settings: Settings) -> loaders.Loader:
    reading = loaders.Reading(workers=settings.workers, cache_dir=folder)
    return loaders.build(url, batch_size=settings.batch_size, size=settings.size, reading=reading)


def read_peer(python: str, name: str, url: str, folder: str, settings: Settings) -> list[float]:
    """As `read`, of another library's loader."""
    command = [python, remote.__file__, name, url, folder, "--batch-size", str(settings.batch_size)]
    options = [
        "--workers",
        str(settings.workers),
        "--size",
        str(settings.size),
        "--epochs",
        str(settings.epochs),
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise SettingError(f"{name}: cannot be measured with {python} ({last}); see bench/results/README.md")
    return [images / seconds for images, seconds in json.loads(done.stdout.splitlines()[-1])["epochs"]]


def measure(
    data: Path,
    names: Sequence[str],
    settings: Settings,
    mb_per_s: float,
    repeats: int,
    python: str,
    scratch: Path,
) -> tuple[list[float], dict[str, Found]]:
    """Bytes/s of the plain download in each turn, and what was found of each loader."""
    plain: list[float] = []
    found = {name: Found(_image_bytes(data, name)) for name in names}
    done, runs = 0, repeats * (1 + len(names) + sum(name in OURS for name in names))

    def run(call: Callable[[str], T]) -> T:
        """What `call` returns of a new folder."""
        nonlocal done
        with tempfile.TemporaryDirectory(dir=scratch, prefix="cache-") as folder:
            result = call(folder)
        done += 1
        bar(done, runs)
        return result

    with ProgressBar("storage", "run") as bar:
        for _ in range(repeats):
            shards = Url("s3://bucket", "shards")
            plain.append(run(partial(run_fresh, download, shards)))
            for name, of in found.items():
                if of.problem:
                    continue
                try:
                    rates = run(partial(_read, name, settings, python))
                except SettingError as error:  # of another library
                    of.problem = str(error)
                    continue
                for epoch, rate in enumerate(rates):
                    of.epochs[epoch].append(rate)
                if name in OURS:
                    line = _SHARE_OF_LINE * mb_per_s * 1e6 / of.image_bytes
                    of.trainer = min(line, PRESETS["mlperf-storage-h100"].images_per_s)
                    of.busy.append(run(partial(_feed, name, settings, of.trainer)))
    return plain, found


def _read(name: str, settings: Settings, python: str, folder: str) -> list[float]:
    if name in OURS:
        return run_fresh(read, f"s3://bucket/{name}", folder, settings)
    return read_peer(python, name, f"s3://bucket/{name}", folder, settings)


def _feed(name: str, settings: Settings, images_per_s: float, folder: str) -> float:
    return run_fresh(feed, f"s3://bucket/{name}", folder, settings, images_per_s)


def _image_bytes(data: Path, name: str) -> float:
    folder = data / name
    files = [path for path in folder.rglob("*") if path.is_file()]
    if name in OURS:
        dataset = open_dataset(folder)
        shards = dataset.manifest.split_shards("train")
        return sum(shard.files[0].bytes for shard in shards) / sum(shard.samples for shard in shards)
    images = open_dataset(data / "shards").manifest.samples
    return sum(path.stat().st_size for path in files) / images


def table(plain: list[float], found: dict[str, Found]) -> list[str]:
    """Of all loaders: medians over the turns, with the lowest and the highest."""
    line = stats.estimate([rate / 1e6 for rate in plain])
    lines = [
        f"plain download: {_shown(line, '.1f')} MB/s",
        f"{'loader':12}{'bytes/image':>12}  {'first epoch, images/s':26}{'MB/s beside plain':22}"
        f"{'second epoch, images/s':30}{'trainer busy':24}",
    ]
    lines += [f"skipped {of.problem}" for of in found.values() if of.problem]
    for name, of in found.items():
        if of.problem:
            continue
        beside = [
            rate * of.image_bytes / bytes_per_s for rate, bytes_per_s in zip(of.epochs[0], plain, strict=True)
        ]
        busy = f"{_shown(stats.estimate(of.busy), '.0%')} at {of.trainer:,.0f}/s" if of.busy else "-"
        first, second = (_shown(stats.estimate(of.epochs[epoch]), ",.0f") for epoch in (0, 1))
        lines.append(
            f"{name:12}{of.image_bytes:12,.0f}  {first:26}{_shown(stats.estimate(beside), '.2f'):22}"
            f"{second:30}{busy:24}"
        )
    return lines


def _shown(value: stats.Estimate, form: str) -> str:
    return f"{value.median:{form}} ({value.low:{form}}-{value.high:{form}})"


@click.command(cls=commandline.Command)
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--latency-ms", default=50.0, show_default=True, help="Before each answer.")
@click.option("--mb-per-s", default=100.0, show_default=True, help="Of the line, all answers together.")
@click.option("--batch-size", default=64, show_default=True)
@click.option("--size", default=224, show_default=True, help="Side of the served squares, pixels.")
@click.option("--workers", default=available_cpus(), show_default="one per CPU")
@click.option("--repeats", default=3, show_default=True, help="Turns.")
@click.option("--peer-python", default=sys.executable, help="Of the environment with litdata and streaming.")
@click.option(
    "--scratch", type=click.Path(path_type=Path), help="Folder for caches.  [default: the system's]"
)
def main(
    data: Path,
    latency_ms: float,
    mb_per_s: float,
    batch_size: int,
    size: int,
    workers: int,
    repeats: int,
    peer_python: str,
    scratch: Path | None,
) -> None:
    """Measure the loaders whose folders are in DATA."""
    check_range("repeats", repeats, 1)
    names = [name for name in (*OURS, *remote.PEERS) if (data / name).is_dir()]
    if "shards" not in names:
        made = shell_command("precache convert SRC", data / "shards", "--format shards")
        raise SettingError(f"{data}: has no folder shards; make it with: {made}")
    others = OtherProcesses()
    settings = Settings(batch_size, workers, size)
    with serving(data, latency_ms / 1e3, mb_per_s * 1e6) as endpoint:
        os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=endpoint)
        place = scratch or Path(tempfile.gettempdir())
        plain, found = measure(data, names, settings, mb_per_s, repeats, peer_python, place)
    print("\n".join(table(plain, found)))
    machine = describe_machine(torch.device("cpu"))
    versions = f"{', '.join(versions_of(machine, ('torch',)))}, obstore {metadata.version('obstore')}"
    share = others.share()
    busy = "" if share is None else f"; other processes took {share:.0%} of the CPUs"
    print(
        f"{latency_ms:g} ms, {mb_per_s:g} MB/s, batches of {batch_size} of {size}x{size}, {workers} workers, "
        f"medians (range) of {repeats} turns; {machine['cpu']}, {versions}, {machine['date']}{busy}"
    )


if __name__ == "__main__":
    main()
