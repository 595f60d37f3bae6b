"""What a conversion spends its time on, and how it compares with other writers: `bench convert`.

Stages are timed one by one in this process, on pictures taken evenly from the tree, so their rates are
those of one CPU. Whole conversions run as a user runs them, each in a process of its own, start-up
included; with other writers they take turns.
"""

import itertools
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.machine import page_cache
from bench.machine.hardware import describe_machine
from bench.measure.fresh import run_watched
from bench.measure.peers import check_python, script
from bench.peers import writing
from bench.report import stats
from precache.errors import (
    ImageError,
    MissingDependencyError,
    SettingError,
    check_choice,
    check_range,
    shell_command,
)
from precache.formats import FORMATS, Sample
from precache.imports import child_environment
from precache.pictures import images, jpeg
from precache.recipe import Recipe
from precache.reporting import Progress, unseen
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from precache.storage.output import publish
from precache.storage.staging import temporary_folder

OURS = "precache"
_PACKAGES = {"ffcv": "ffcv", "litdata": "litdata", "mds": "mosaicml-streaming", "webdataset": "webdataset"}
"""Of each writer, less `-jpeg`; an .npy file needs none."""


@dataclass(frozen=True, slots=True)
class WriterRates:
    """Whole conversions by one writer.

    Attributes:
        images_per_s: start-up included.
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
        wholes: whole conversions, ours first.
    """

    machine: dict[str, str]
    settings: dict[str, Any]
    stages: dict[str, stats.Estimate]
    wholes: tuple[WriterRates, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Of the time of all stages, 0 to 1, by stage."""
        seconds = {name: 1 / stage.median for name, stage in self.stages.items()}
        return {name: each / sum(seconds.values()) for name, each in seconds.items()}

    def limit(self, *stages: str) -> float:
        """Images/s that all workers would reach if these stages were all there is to do."""
        workers: int = self.settings["workers"]
        return workers / sum(1 / self.stages[name].median for name in stages)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"version": 1, **asdict(self)}


def measure(
    source: Path,
    recipe: Recipe,
    *,
    workers: int,
    pictures: int,
    repeats: int,
    against: Sequence[str],
    peer_python: str,
    scratch: Path,
    on_progress: Progress = unseen,
) -> ConversionResult:
    """Time the stages and whole conversions of the tree `source`.

    Args:
        workers: processes of each writer.
        pictures: on which the stages are timed.
        repeats: of everything, taking turns.
        against: names of `bench.peers.writing.WRITERS`.
        peer_python: the Python that has them.
        scratch: the folder to convert into.

    Raises:
        SettingError: a value is out of range, or another writer stores other pictures.
        SourceError: no such tree.
        MissingDependencyError: `peer_python` lacks one of `against`.
        WorkerError: a conversion failed.
    """
    for name, value in (("workers", workers), ("pictures", pictures), ("repeats", repeats)):
        check_range(name, value, 1)
    check_python(peer_python)
    for name in against:
        check_choice("writer", name, writing.WRITERS)
        if recipe.fit != "crop":
            raise SettingError(f"writer {name} stores squares, unlike fit {recipe.fit}; give --fit crop")
    if not scratch.is_dir():
        raise SettingError(f"{scratch}: no such folder; name one with room for the conversions")
    scan = scan_tree(source)
    versions = {name: _version(peer_python, name) for name in against}
    warm = page_cache.warm(source)
    names = (OURS, *against)
    stage_runs: list[dict[str, float]] = []
    walls: dict[str, list[float]] = {name: [] for name in names}
    total, steps = repeats * (1 + len(names)), itertools.count(1)
    on_progress(0, total)
    with temporary_folder(scratch) as folder:
        destination = folder / "out"

        def run(name: str) -> float:
            if name == OURS:
                words = [str(scan.folder), str(destination), *shlex.split(recipe.to_flags())]
                command = [sys.executable, "-m", "precache", "convert", *words, "--workers", str(workers)]
            else:
                flags = {"size": recipe.size, "quality": recipe.quality, "workers": workers}
                command = script(peer_python, writing, name, scan.folder, destination, **flags)
            wall_s, _ = run_watched(command)
            shutil.rmtree(destination)
            on_progress(next(steps), total)
            return wall_s

        for _ in range(repeats):
            stage_runs.append(time_stages(scan, recipe, pictures, folder))
            on_progress(next(steps), total)
            for name in names:
                walls[name].append(run(name))
    settings = {
        "source": source.name,
        "images": len(scan.samples),
        "source_bytes": int(scan.samples.file_bytes.sum()),
        "recipe": recipe.to_json(),
        "workers": workers,
        "pictures": pictures,
        "repeats": repeats,
        "page_cache": "warm" if warm else "not warmed: larger than memory",
        "peers": {name: version for name, version in versions.items() if version},
    }
    stages = {name: stats.estimate([run[name] for run in stage_runs]) for name in stage_runs[0]}
    wholes = []
    for name, each in walls.items():
        rates = stats.estimate([len(scan.samples) / wall_s for wall_s in each])
        wholes.append(WriterRates(name, rates, stats.ratio(each, walls[OURS])))
    return ConversionResult(describe_machine(torch.device("cpu")), settings, stages, tuple(wholes))


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
        stored: bytes | jpeg.Pixels = pixels  # as `precache.conversion.shard_writer.store`
        if recipe.format != "shards":
            as_it_is = decoded.plain and pixels.shape[:2] == (decoded.height, decoded.width)
            stored = data if as_it_is else jpeg.encode_jpeg(pixels, recipe.quality)
        times.append(time.perf_counter())
        moments.append(times)
        samples.append(Sample(len(samples), 0, stored, path, (decoded.width, decoded.height)))
    if not samples:
        raise SettingError(f"{scan.root}: none of {len(paths):,} pictures taken from it can be decoded")
    spent = dict(zip(("read", "decode", "resize", "encode"), np.diff(moments).sum(axis=0), strict=True))
    start_s = time.perf_counter()
    files = FORMATS[recipe.format].write_shard(scratch / "stage", samples, len(samples), recipe.stored_size)
    publish(files)
    spent["write"] = time.perf_counter() - start_s
    for file in files:
        file.path.unlink()
    if recipe.format == "shards":
        del spent["encode"]
    return {stage: float(len(samples) / stage_s) for stage, stage_s in spent.items()}


def _version(python: str, name: str) -> str | None:
    """Of a writer's package, asked of the Python that would run it; None of one that needs none."""
    package = _PACKAGES.get(name.removesuffix("-jpeg"))
    if package is None:
        return None
    code = (
        "import json, PIL; from importlib.metadata import version as v; "
        f"print(json.dumps([v({package!r}), PIL.__version__]))"
    )
    try:
        answer = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, check=True, env=child_environment()
        ).stdout
    except subprocess.CalledProcessError as error:
        raise MissingDependencyError(
            f"{python} lacks {package} or pillow; name another Python with --peer-python, or "
            f"run: {shell_command(Path(python), '-m pip install', package, 'pillow')}"
        ) from error
    version, pillow = json.loads(answer)
    return f"{package} {version} with pillow {pillow}"
