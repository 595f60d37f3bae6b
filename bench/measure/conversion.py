"""What a conversion spends its time on, and how it compares with other writers: `bench convert`.

Stages are timed one by one in this process, on pictures taken evenly from the tree, so their rates are
those of one CPU. Whole conversions run as a user runs them, each in a process of its own, start-up
included; with other writers they take turns.
"""

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.machine.hardware import describe_machine
from bench.measure.fresh import ProcessRun, run_watched
from bench.peers import writing
from bench.report import stats
from precache import images, jpeg
from precache.console.progress import Progress, unseen
from precache.errors import (
    ImageError,
    MissingDependencyError,
    SettingError,
    check_choice,
    check_range,
    shell_command,
)
from precache.formats import FORMATS, Sample
from precache.recipe import Recipe
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from precache.storage.output import publish

OURS = "precache"
STAGES = ("read", "decode", "resize", "encode", "write")
_PEER_PACKAGES = {
    "ffcv": "ffcv",
    "ffcv-jpeg": "ffcv",
    "litdata": "litdata",
    "litdata-jpeg": "litdata",
    "mds": "mosaicml-streaming",
    "webdataset": "webdataset",
}
_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionSpec:
    """What to measure.

    Attributes:
        recipe: of the conversion.
        workers: processes of each writer.
        pictures: on which the stages are timed.
        repeats: of everything, taking turns.
        against: names of `bench.peers.writing.WRITERS`.
        peer_python: the Python that has them.
        scratch: the folder to convert into.
    """

    recipe: Recipe
    workers: int
    pictures: int
    repeats: int
    against: tuple[str, ...]
    peer_python: str
    scratch: Path

    def __post_init__(self) -> None:
        check_range("workers", self.workers, 1)
        check_range("pictures", self.pictures, 1)
        check_range("repeats", self.repeats, 1)
        for name in self.against:
            check_choice("writer", name, writing.WRITERS)
            if name != "copy" and self.recipe.fit != "crop":
                raise SettingError(
                    f"writer {name} stores squares, unlike fit {self.recipe.fit}; give --fit crop"
                )
        if not self.scratch.is_dir():
            raise SettingError(f"{self.scratch}: no such folder; name one with room for the conversions")


@dataclass(frozen=True, slots=True)
class Whole:
    """Whole conversions by one writer, in images/s, start-up included.

    Attributes:
        ratio: images/s of ours over those of this writer, repeat by repeat.
    """

    name: str
    images_per_s: stats.Estimate
    ratio: stats.Estimate


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """A finished measurement, with what one needs to repeat it.

    Attributes:
        stages: name -> images/s of one CPU.
        wholes: ours first.
        peak_bytes: memory of all processes of a conversion of ours together; in a run of its own.
    """

    machine: dict[str, str]
    settings: dict[str, Any]
    stages: dict[str, stats.Estimate]
    wholes: tuple[Whole, ...]
    peak_bytes: int

    @property
    def decode_limit(self) -> float:
        """Images/s that all workers would reach if they did nothing but decode."""
        workers: int = self.settings["workers"]
        return self.stages["decode"].median * workers

    @property
    def stages_limit(self) -> float:
        """Images/s that all workers would reach if the stages were all there is to do."""
        workers: int = self.settings["workers"]
        return workers / sum(1 / stage.median for stage in self.stages.values())

    @property
    def costliest(self) -> tuple[str, float]:
        """The stage that takes longest, and its share of the time of all."""
        seconds = {name: 1 / stage.median for name, stage in self.stages.items()}
        name = max(seconds, key=lambda stage: seconds[stage])
        return name, seconds[name] / sum(seconds.values())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"version": 1, **asdict(self)}


def measure(
    source: str | Path,
    spec: ConversionSpec,
    on_progress: Progress = unseen,
) -> ConversionResult:
    """Time the stages and whole conversions of the tree `source`.

    Raises:
        SourceError: no such tree.
        MissingDependencyError: `peer_python` lacks one of `against`.
        WorkerError: a conversion failed.
    """
    scan = scan_tree(source)
    versions = {
        name: _peer_version(spec.peer_python, name) for name in spec.against if name in _PEER_PACKAGES
    }
    for row in range(len(scan.samples)):  # into the page cache
        with open(f"{scan.root}/{scan.samples[row].path}", "rb") as file:
            while file.read(_READ_BYTES):
                pass
    total = 1 + spec.repeats * (2 + len(spec.against))
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    stage_runs: list[dict[str, float]] = []
    runs: dict[str, list[ProcessRun]] = {name: [] for name in (OURS, *spec.against)}
    on_progress(0, total)
    with tempfile.TemporaryDirectory(dir=spec.scratch, prefix="bench-convert-") as scratch:

        def run(name: str, memory: bool = False) -> ProcessRun:
            destination = Path(scratch) / "out"
            process_run = run_watched(_command(name, scan.folder, destination, spec), memory=memory)
            shutil.rmtree(destination)
            step()
            return process_run

        peak_bytes = run(OURS, memory=True).peak_bytes
        for _ in range(spec.repeats):
            stage_runs.append(time_stages(scan, spec.recipe, spec.pictures, Path(scratch)))
            step()
            for name, name_runs in runs.items():
                name_runs.append(run(name))
    walls = {name: [run.wall_s for run in name_runs] for name, name_runs in runs.items()}
    return ConversionResult(
        machine=describe_machine(torch.device("cpu")),
        settings={
            "source": Path(source).name,
            "images": len(scan.samples),
            "source_bytes": int(scan.samples.file_bytes.sum()),
            "recipe": spec.recipe.to_json(),
            "workers": spec.workers,
            "pictures": spec.pictures,
            "repeats": spec.repeats,
            "page_cache": "warm",
            "peers": versions,
        },
        stages={
            name: stats.estimate([run[name] for run in stage_runs])
            for name in STAGES
            if name in stage_runs[0]
        },
        wholes=tuple(
            Whole(
                name,
                stats.estimate([len(scan.samples) / wall_s for wall_s in walls[name]]),
                stats.ratio(walls[name], walls[OURS]),
            )
            for name in runs
        ),
        peak_bytes=peak_bytes,
    )


def time_stages(scan: Scan, recipe: Recipe, pictures: int, scratch: Path) -> dict[str, float]:
    """Images/s of each stage on this CPU, for `pictures` pictures taken evenly from the tree."""
    rows = np.unique(np.linspace(0, len(scan.samples) - 1, pictures).round().astype(int)).tolist()
    paths = [f"{scan.root}/{scan.samples[row].path}" for row in rows]
    how = recipe.rendering
    moments: list[list[float]] = []
    samples: list[Sample] = []
    for path in paths:  # picture by picture, as a worker does it
        times = [time.perf_counter()]
        try:
            data = images.read_bytes(path)
            times.append(time.perf_counter())
            decoded = images.decode_for(data, path, how)
        except ImageError:
            continue
        times.append(time.perf_counter())
        pixels = images.fit(decoded, how)
        times.append(time.perf_counter())
        stored = _stored(data, decoded, pixels, recipe)
        times.append(time.perf_counter())
        moments.append(times)
        samples.append(Sample(len(samples), 0, stored, path, (decoded.width, decoded.height)))
    if not samples:
        raise SettingError(f"{scan.root}: none of {len(paths):,} pictures taken from it can be decoded")
    seconds = dict(zip(STAGES, np.diff(moments).sum(axis=0).tolist(), strict=False))
    start_s = time.perf_counter()
    files = FORMATS[recipe.format].write_shard(scratch / "stage", samples, len(samples), recipe.stored_size)
    publish(files)
    seconds["write"] = time.perf_counter() - start_s
    for file in files:
        file.path.unlink()
    if recipe.format == "shards":
        del seconds["encode"]
    return {stage: len(samples) / stage_s for stage, stage_s in seconds.items()}


def _stored(data: bytes, decoded: images.Decoded, pixels: jpeg.Pixels, recipe: Recipe) -> bytes | jpeg.Pixels:
    """As `precache.conversion.shard_writer.store`."""
    if recipe.format == "shards":
        return pixels
    if decoded.plain and pixels.shape[:2] == (decoded.height, decoded.width):
        return data
    return jpeg.encode_jpeg(pixels, recipe.quality)


def _command(name: str, source: Path, destination: Path, spec: ConversionSpec) -> list[str]:
    recipe = spec.recipe
    if name == OURS:
        command = [sys.executable, "-m", "precache", "convert", str(source), str(destination)]
        return [
            *command,
            "--format",
            recipe.format,
            *shlex.split(recipe.to_flags()),
            "--workers",
            str(spec.workers),
        ]
    settings = {"size": recipe.size, "quality": recipe.quality, "workers": spec.workers}
    flags = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return [spec.peer_python, writing.__file__, name, str(source), str(destination), *flags]


def _peer_version(python: str, name: str) -> str:
    """The version of a peer's package, asked of the Python that would run it."""
    package = _PEER_PACKAGES[name]
    code = (
        "import json, PIL; from importlib.metadata import version as v; "
        f"print(json.dumps([v({package!r}), PIL.__version__]))"
    )
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise SettingError(
            f"{python}: cannot be run ({error.strerror}); name a Python with --peer-python"
        ) from error
    except subprocess.CalledProcessError as error:
        raise MissingDependencyError(
            f"{python} lacks {package} or pillow; name another Python with --peer-python, or "
            f"run: {shell_command(Path(python), '-m pip install', package, 'pillow')}"
        ) from error
    version, pillow = json.loads(answer)
    return f"{package} {version} with pillow {pillow}"
