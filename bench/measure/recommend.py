"""Trials of `bench recommend`: loaders of a tree and of each format, measured on a sample of the tree.

    sample      pictures of the tree, copied into a temporary folder      bench.measure.sample
    trials      the disk; converting the sample to each format; each loader alone and feeding the trainer,
                taking turns, each in a process of its own                this module
    prediction  sizes, times and rates of the whole tree                  bench.report.forecast
    words       what to do, and the lines to paste                        bench.report.recommendation

The loaders are torchvision's ImageFolder, `loaders.build` on the same tree, and one for each format.
"""

import math
import mmap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.machine import disk, page_cache
from bench.machine.hardware import describe_machine
from bench.machine.monitor import OtherProcesses
from bench.measure import imagefolder
from bench.measure.candidates import Candidate
from bench.measure.processes import measure_trial, run_in_process
from bench.measure.sample import Trees, convert_twice, make_trees, train_images
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import check_trainer, resolve_trainer
from bench.measure.trials import Trials
from bench.report.forecast import BACKENDS, CONVERT, DISK, SAMPLE
from bench.report.gain import TODAY_BACKEND
from bench.report.loaders import FED, LOADER, TRAINER
from bench.report.recommendation import make_result
from bench.report.result import RAW, Result, Trial
from loaders.dataset import open_split
from precache.errors import (
    DatasetError,
    ImageError,
    MissingDependencyError,
    SettingError,
    WorkerError,
    check_choice,
)
from precache.formats import FORMATS
from precache.pictures.kinds import decoder_remedy
from precache.recipe import Recipe
from precache.reporting import Progress, no_progress
from precache.sources.base import Scan
from precache.storage.staging import temporary_folder

_CHOOSING_SHARE = 0.1  # share of `limit_s` in which pictures of the sample are decoded to choose them
_DISK_FILE_BYTES = 256 << 20
_DISK_SECONDS = 0.5
_MEMORY_BYTES_PER_S = 1e10  # rate that is taken for files in a file system in memory
_FAILURES = (DatasetError, ImageError, MissingDependencyError, WorkerError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A tree, and the conversions and batches that a recommendation is asked for.

    Attributes:
        scan: scan of the tree.
        recipe: size and quality of stored pictures; its format is replaced by each of `formats`.
        settings: settings of batches and the trainer; there are `repeats` turns, and each run of a turn
            takes `seconds`.
        formats: names of formats to convert to.
        pictures: most pictures of the sample.
        limit_s: seconds after which no turn may end; the first turn is always run.
    """

    scan: Scan
    recipe: Recipe
    settings: Settings
    formats: Sequence[str] = tuple(FORMATS)
    pictures: int = 200
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        for name in self.formats:
            check_choice("format", name, FORMATS)
        check_fills_batch(self.settings.batch_size, train_images(self.scan))

    @property
    def loaders(self) -> list[str]:
        """Names of `bench.report.forecast.BACKENDS` to measure, today's first."""
        return [TODAY_BACKEND, RAW, *(name for name in FORMATS if name in self.formats)]


def recommend(
    question: Question,
    path: Path | None = None,
    on_progress: Progress = no_progress,
    changes: Mapping[str, Any] | None = None,
    folders: Mapping[str, str] | None = None,
) -> Result:
    """Measure a sample of a tree in every format and predict what the whole would give.

    Args:
        path: file of the result; trials that it holds are not measured again. None: nothing is kept.
        changes: fields of `bench.report.forecast.Inputs` with other values, for a second prediction.
        folders: folder that each format would be converted into, for the lines to paste.

    Raises:
        SourceError: no picture of the sample decodes.
        SettingError: unknown trainer, or the sample does not fit into the page cache, or the file at `path`
            is of other settings.
    """
    settings = prepare_settings(question.settings)
    settings = replace(settings, classes=len(question.scan.classes))
    trials = Trials(path, "recommend", describe_machine(settings.device), _describe(question, settings))
    if any(trials.find(key) is None for key in _all_keys(question, settings)):
        with temporary_folder() as folder:
            _measure(trials, question, settings, folder, on_progress)
    on_progress(1, 1)
    result = make_result(
        trials.machine, trials.settings, trials.all(), trials.skipped, changes=changes, folders=folders
    )
    trials.finish(result)
    return result


def prepare_settings(settings: Settings) -> Settings:
    """Return `settings` with random crops, without checksums, and with the full name of the trainer.

    Trainings crop at random, and centre crops are less work for some loaders than for others. A training
    compares the checksum of each picture once, but a sample is served again and again.

    Raises:
        SettingError: unknown trainer.
    """
    trainer = resolve_trainer(settings.trainer, settings.device)
    check_trainer(trainer, settings.size)  # raises now, not in the process of a trial
    return replace(settings, trainer=trainer, augment="train", check="never")


def _describe(question: Question, settings: Settings) -> dict[str, Any]:
    """Return the settings that all trials share, for the file of the result."""
    scan = question.scan
    names = ("size", "batch_size", "seconds", "augment", "trainer", "launches", "repeats")
    return {
        **{name: getattr(settings, name) for name in names},
        "device": str(settings.device),
        "cpus": settings.workers_alone,
        "stored_size": question.recipe.size,
        "quality": question.recipe.quality,
        "memory_bytes": float(psutil.virtual_memory().total),
        "pictures": scan.digest,
        "data": {
            str(scan.root): {
                "kind": RAW,
                "samples": len(scan.samples),
                "train_samples": train_images(scan),
                "image_bytes": float(scan.samples.file_bytes.mean()),
                "digest": scan.digest,
            }
        },
    }


def _loader_keys(name: str, repeat: int, settings: Settings) -> list[dict[str, Any]]:
    """Return the keys of one loader's trials in one turn: alone, and feeding the trainer."""
    key = {"backend": BACKENDS[name], "data": name, "repeat": repeat}
    return [{"kind": LOADER, **key}, {"kind": FED, **key, "trainer": settings.trainer}]


def _all_keys(question: Question, settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield the keys of all trials of a finished result but those of converting."""
    yield {"kind": DISK}
    yield {"kind": SAMPLE}
    for name in question.loaders:
        for repeat in range(settings.repeats):
            yield from _loader_keys(name, repeat, settings)


def _measure(
    trials: Trials, question: Question, settings: Settings, folder: Path, on_progress: Progress
) -> None:
    """Measure the trials that are not in the file of the result yet."""
    begin_s = time.perf_counter()
    steps = 1 + settings.repeats
    on_progress(0, steps)
    trials.measure({"kind": DISK}, lambda: _measure_disk(folder))
    trees = _take_sample(trials, question, settings, folder)
    folders: dict[str, Path] = {}
    for name in question.loaders:
        if name in (TODAY_BACKEND, RAW):
            folders[name] = trees.large
            continue
        try:
            _convert_sample(trials, name, question, trees, folder / name)
            folders[name] = folder / name
        except _FAILURES as error:
            trials.skipped[name] = str(error)
    on_progress(1, steps)
    for repeat in range(settings.repeats):
        turn_s = time.perf_counter()
        _take_turn(trials, folders, repeat, settings)
        now_s = time.perf_counter()
        on_progress(2 + repeat, steps)
        if now_s - begin_s + (now_s - turn_s) > question.limit_s:
            return


def _take_turn(trials: Trials, folders: dict[str, Path], repeat: int, settings: Settings) -> None:
    """Measure the trainer, and each loader alone and feeding it.

    Args:
        folders: folder that each loader reads; a loader that fails is removed, and added to `trials.skipped`.
    """
    half_s = settings.seconds / 2
    trainer_settings = settings.for_loader(
        "", Path(), settings.classes, warmup=0, batches=1, monitored=False, seconds=half_s
    )
    trainer_key = {"kind": TRAINER, "trainer": settings.trainer, "repeat": repeat}
    trials.measure(trainer_key, partial(_run, TRAINER, trainer_settings))
    for name in tuple(folders):
        folder = folders[name]
        if not page_cache.warm(folder):
            raise SettingError(
                "is more than half of the free memory, so it cannot be measured with a warm cache",
                path=folder,
                remedy="free memory, or take a smaller tree",
            )
        try:
            data = open_split(folder.resolve(), "train")
            loader_settings = settings.for_loader(
                BACKENDS[name],
                Candidate(BACKENDS[name], folder.resolve(), data).loader_path,
                len(data.classes),
                warmup=0,
                batches=1,
                monitored=False,
            )
            alone = replace(loader_settings.without_trainer(), first_epoch=True)
            fed = replace(loader_settings, warmup_s=half_s)
            alone_key, fed_key = _loader_keys(name, repeat, settings)
            trials.measure(alone_key, partial(_run, LOADER, alone))
            trials.measure(fed_key, partial(_run, FED, fed))
        except _FAILURES as error:
            trials.skipped[name] = str(error).replace(f"{folder.resolve()}", "the sample")
            del folders[name]


def _run(kind: str, settings: Settings) -> Trial:
    """Run a trial in a process of its own, and note what other processes took of the CPUs meanwhile."""
    others = OtherProcesses()
    trial = run_in_process(measure_trial, kind, settings)
    share = others.share()
    numbers = trial.numbers if share is None else {**trial.numbers, "other_cpu_share": share}
    return Trial(numbers=numbers)


def _measure_disk(folder: Path) -> Trial:
    """Measure bytes per second of sequential reads, and the seconds from a request to its first byte."""
    try:
        with disk.uncached_file(folder, _DISK_FILE_BYTES) as file:
            sequential = file.sequential_rate(_DISK_SECONDS) * 1e6
            random = file.random_rate(mmap.PAGESIZE, _DISK_SECONDS / 2) * 1e6
    except SettingError:  # the folder is in memory, or its file system has no direct I/O
        return Trial(numbers={"read_bytes_per_s": _MEMORY_BYTES_PER_S, "first_byte_s": 0.0})
    first_byte_s = max(0.0, mmap.PAGESIZE / random - mmap.PAGESIZE / sequential)
    return Trial(numbers={"read_bytes_per_s": sequential, "first_byte_s": first_byte_s})


def _take_sample(trials: Trials, question: Question, settings: Settings, folder: Path) -> Trees:
    """Copy pictures of the tree into `folder`: those of the trial SAMPLE if it is there, else new ones."""
    before = trials.find({"kind": SAMPLE})
    same_as = None
    if before is not None:
        same_as = (int(before.numbers["pictures"]), int(before.numbers["copies"]))
    choosing_s = _CHOOSING_SHARE * question.limit_s
    scan = question.scan
    trees = make_trees(scan, question.recipe, settings, folder, question.pictures, choosing_s, same_as)
    trials.measure({"kind": SAMPLE}, partial(_make_sample_trial, scan, trees))
    return trees


def _make_sample_trial(scan: Scan, trees: Trees) -> Trial:
    """Return the size of the sample, and the pictures that precache or ImageFolder cannot read."""
    numbers: dict[str, float] = {
        "pictures": trees.pictures,
        "copies": trees.copies,
        "image_bytes": trees.image_bytes,
        "taken": len(trees.paths),
        "damaged": len(trees.damaged),
        "undecodable": len(trees.undecodable),
    }
    facts: dict[str, str] = {}
    if trees.damaged:
        path, reason = next(iter(trees.damaged.items()))
        facts["damaged"] = f"{path}: {reason}"
    if trees.undecodable:
        path, kind = next(iter(trees.undecodable.items()))
        facts["undecodable"] = f"{path} ({kind}); {decoder_remedy(kind)}"
    faults = imagefolder.find_faults(scan, trees.paths)
    facts["refused"] = " ".join(faults.sentences())
    return Trial(numbers=numbers, facts={name: fact for name, fact in facts.items() if fact})


def _convert_sample(trials: Trials, name: str, question: Question, trees: Trees, folder: Path) -> None:
    """Convert the sample into `folder`, and add the trial of how long that takes."""
    recipe = replace(question.recipe, format=name)
    cpus = question.settings.workers_alone
    (small_s, small_images), (large_s, large_images), image_bytes = convert_twice(
        trees, len(question.scan.samples), recipe, cpus, folder
    )
    trial = Trial(
        numbers={
            "small_s": small_s,
            "small_images": small_images,
            "large_s": large_s,
            "large_images": large_images,
            "image_bytes": image_bytes,
        }
    )
    trials.measure({"kind": CONVERT, "format": name}, lambda: trial)
