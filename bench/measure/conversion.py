"""Time of a conversion, stage by stage, and of other libraries' writers: what `bench convert` measures.

Stages are timed in a worker that writes one shard in this process, of pictures taken evenly from the tree.
Whole conversions run as a user runs them, each in a process of its own, start-up included; they take turns
with those of other writers.
"""

import cProfile
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType

import numpy as np
import torch

from bench.machine import page_cache
from bench.machine.hardware import describe_machine
from bench.machine.monitor import OtherProcesses
from bench.measure.peers import check_python, read_version, write_squares
from bench.measure.processes import run_command
from bench.measure.trials import Trials
from bench.peers.libraries import WRITERS
from bench.report.conversion import PRECACHE, STAGES, WHOLE, make_result
from bench.report.result import Result, Trial
from precache.conversion.shard_writer import ShardTask, finish_shard, write_shard
from precache.dataset.index import checksum_of
from precache.dataset.statistics import PixelSums
from precache.engines import Ticks
from precache.errors import SettingError, WorkerError, check_choice, check_range
from precache.formats import FORMATS
from precache.pictures import images, jpeg, reading
from precache.recipe import Recipe
from precache.reporting import Progress, no_progress
from precache.sources.base import Scan
from precache.sources.tree import scan_tree
from precache.storage.staging import temporary_folder

_STAGE_CODE: dict[str, tuple[CodeType, ...]] = {
    "read": (reading.read_picture.__code__,),
    "decode": (images.decode_for.__code__,),
    "resize": (images.fit.__code__,),
    "encode": (jpeg.encode_jpeg.__code__,),
    "statistics": (checksum_of.__code__, PixelSums.from_picture.__code__),
}
"""Code of the functions in which a worker spends the time of each stage; the rest of its time is writing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversionSpec:
    """Conversions to measure.

    Attributes:
        source: a tree of pictures.
        processes: workers of each writer.
        stage_images: number of pictures that the stages are timed on.
        repeats: measurements of each kind, which take turns.
        against: names of `bench.peers.libraries.WRITERS`.
        peer_python: the Python interpreter that has their packages.
        scratch: the folder to convert into.
    """

    source: Path
    recipe: Recipe
    processes: int
    stage_images: int
    repeats: int
    against: Sequence[str]
    peer_python: str
    scratch: Path

    def __post_init__(self) -> None:
        check_range("workers", self.processes, 1)
        check_range("pictures", self.stage_images, 1)
        check_range("repeats", self.repeats, 1)
        check_python(self.peer_python)
        for name in self.against:
            check_choice("writer", name, WRITERS)
            if self.recipe.format != "shards" or not isinstance(self.recipe.stored_size, int):
                raise SettingError(
                    f"{name} stores squares of decoded pixels, unlike --format {self.recipe.format} --fit "
                    f"{self.recipe.fit}",
                    remedy="give --format shards --fit crop",
                )
        if not self.scratch.is_dir():
            raise SettingError(
                "no such folder", path=self.scratch, remedy="name one with room for the conversions"
            )


def measure(spec: ConversionSpec, path: Path | None = None, on_progress: Progress = no_progress) -> Result:
    """Time the stages and whole conversions of a tree, `spec.repeats` times, taking turns.

    A writer whose library is missing is skipped, with the command that installs it.

    Args:
        path: file of the result; trials that it holds are not measured again. None: nothing is kept.

    Raises:
        SettingError: none of the pictures can be decoded, or the file at `path` is of other settings.
        SourceError: no such tree.
        WorkerError: a conversion failed.
    """
    scan = scan_tree(spec.source)
    settings = {
        "source": str(spec.source),
        "images": len(scan.samples),
        "source_bytes": int(scan.samples.file_bytes.sum()),
        "digest": scan.digest,
        "recipe_flags": spec.recipe.to_flags(),
        "processes": spec.processes,
        "stage_images": min(spec.stage_images, len(scan.samples)),
        "repeats": spec.repeats,
    }
    trials = Trials(path, "convert", describe_machine(torch.device("cpu")), settings)
    versions = {}
    for name in spec.against:
        try:
            versions[name] = read_version(name, spec.peer_python)
        except WorkerError as error:
            trials.skipped[name] = str(error)
    is_warm = page_cache.warm(spec.source)
    done, total = 0, spec.repeats * (2 + len(versions))
    on_progress(done, total)

    def run(key: dict[str, object], measure_once: Callable[[Path], Trial]) -> None:
        nonlocal done
        trials.measure(key, partial(_measure_in_folder, measure_once, spec.scratch, is_warm))
        done += 1
        on_progress(done, total)

    for repeat in range(spec.repeats):
        run({"what": STAGES, "repeat": repeat}, partial(time_stages, scan, spec.recipe, spec.stage_images))
        run({"what": WHOLE, "writer": PRECACHE, "repeat": repeat}, partial(_convert, spec, scan))
        for name, version in versions.items():
            key = {"what": WHOLE, "writer": name, "repeat": repeat}
            run(key, partial(_convert_by_peer, spec, scan, name, version))
    result = make_result(trials.machine, trials.settings, trials.all(), trials.skipped)
    trials.finish(result)
    return result


def _measure_in_folder(measure_once: Callable[[Path], Trial], scratch: Path, is_warm: bool) -> Trial:
    """Measure in an empty folder, then remove it; note what other processes took of the CPUs meanwhile."""
    with temporary_folder(scratch) as folder:
        others = OtherProcesses()
        trial = measure_once(folder)
        numbers = {**trial.numbers, "page_cache_is_warm": float(is_warm)}
        share = others.share()
        if share is not None:
            numbers["other_cpu_share"] = share
        return replace(trial, numbers=numbers)


def time_stages(scan: Scan, recipe: Recipe, count: int, folder: Path) -> Trial:
    """Measure the seconds of each stage while one shard of pictures is written.

    Args:
        count: number of pictures, which are taken evenly from the tree.
        folder: an empty folder to write into.

    Raises:
        SettingError: none of the pictures can be decoded.
    """
    rows = np.unique(np.linspace(0, len(scan.samples) - 1, count).round().astype(int)).tolist()
    task = ShardTask("stages", "train", tuple(scan.samples[row] for row in rows), folder, recipe)
    start_s = time.perf_counter()
    with cProfile.Profile() as profile:  # a picture takes about a hundred calls: profiling costs little
        written = finish_shard(write_shard(scan.source, task, Ticks()))
    total_s = time.perf_counter() - start_s
    converted = written.entry.samples
    if converted == 0:
        raise SettingError(f"none of {len(rows):,} pictures taken from it can be decoded", path=scan.root)
    seconds_by_code: dict[CodeType | str, float] = {
        entry.code: entry.totaltime for entry in profile.getstats()
    }
    numbers = {"images": float(converted)}
    for stage, codes in _STAGE_CODE.items():
        if stage == "encode" and FORMATS[recipe.format].holds_pixels:
            continue
        numbers[f"{stage}_s"] = sum(seconds_by_code.get(code, 0.0) for code in codes)
    stages_s = sum(seconds for name, seconds in numbers.items() if name.endswith("_s"))
    return Trial(numbers={**numbers, "write_s": total_s - stages_s})


def _convert(spec: ConversionSpec, scan: Scan, folder: Path) -> Trial:
    """Measure `precache convert` in a process of its own."""
    words = [str(scan.folder), str(folder / "out"), *shlex.split(spec.recipe.to_flags())]
    command = [sys.executable, "-m", "precache", "convert", *words, "--workers", str(spec.processes)]
    wall_s, _ = run_command(command)
    return _make_conversion_trial(scan, wall_s)


def _convert_by_peer(spec: ConversionSpec, scan: Scan, name: str, version: str, folder: Path) -> Trial:
    """Measure another library's writer, of that name and version, in a process of its own."""
    size = spec.recipe.stored_size
    assert isinstance(size, int), "checked by ConversionSpec"
    wall_s = write_squares(name, scan, folder / "out", size, spec.processes, spec.peer_python)
    return replace(_make_conversion_trial(scan, wall_s), facts={"version": version})


def _make_conversion_trial(scan: Scan, wall_s: float) -> Trial:
    return Trial(numbers={"images_per_s": len(scan.samples) / wall_s, "wall_s": wall_s})
