"""`bench recommend`: which loaders of a tree are measured, on a sample of it, and in which order.

    sample      pictures of the tree, copied into a temporary folder      bench.measure.sample
    trials      the disk; converting the sample to each format; each loader alone and fed to the trainer,
                by turns, each in a process of its own                    here
    prediction  sizes, times and rates of the whole tree                  bench.report.forecast
    words       what to do, and the lines to paste                        bench.report.recommendation

Loaders are today's (torchvision's ImageFolder), `loaders.build` on the same tree, and one for each format.
"""

import math
import mmap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from bench.machine import disk, page_cache
from bench.machine.hardware import describe_machine
from bench.machine.monitor import OtherProcesses
from bench.measure import imagefolder
from bench.measure.candidates import Candidate
from bench.measure.fresh import run_fresh
from bench.measure.sample import Trees, convert_twice, make_trees, train_images
from bench.measure.settings import Settings, check_fills_batch
from bench.measure.trainers import NullTrainer, check_trainer, resolve
from bench.measure.trial import measure, measure_trainer
from bench.measure.trials import Trials
from bench.report.forecast import BACKENDS, CONVERT, DISK, SAMPLE
from bench.report.gain import TODAY_BACKEND
from bench.report.loaders import FED, LOADER, TRAINER
from bench.report.recommendation import make_result
from bench.report.result import Result, Trial
from bench.report.verdict import RAW_TREE
from loaders.dataset import open_split
from precache.errors import (
    DatasetError,
    ImageError,
    MissingDependencyError,
    SettingError,
    WorkerError,
    check_choice,
)
from precache.recipe import FORMAT_NAMES, Recipe
from precache.reporting import Progress, no_progress
from precache.sources.base import Scan
from precache.storage.staging import temporary_folder
from precache.storage.urls import Url

_CHOOSING_SHARE = 0.1  # of `limit_s`, that goes to decoding pictures of the sample once
_DISK_FILE_BYTES = 256 << 20
_DISK_SECONDS = 0.5
_MEMORY_BYTES_PER_S = 1e10  # of files in a file system that is in memory
_FAILURES = (DatasetError, ImageError, MissingDependencyError, WorkerError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a recommendation is for.

    Attributes:
        scan: of the tree.
        recipe: how pictures are stored, in whichever format.
        settings: of batches and the trainer; `repeats` turns of `seconds` for each run.
        formats: names of those to convert to.
        pictures: most pictures of the sample.
        limit_s: no further turn is begun that would end later than this; the first always is.
    """

    scan: Scan
    recipe: Recipe
    settings: Settings
    formats: Sequence[str] = FORMAT_NAMES
    pictures: int = 200
    limit_s: float = math.inf

    def __post_init__(self) -> None:
        for name in self.formats:
            check_choice("format", name, FORMAT_NAMES)
        check_fills_batch(self.settings.batch_size, train_images(self.scan))

    @property
    def loaders(self) -> list[str]:
        """Names of `bench.report.forecast.BACKENDS` to measure, today's first."""
        as_it_is = [TODAY_BACKEND]
        if not isinstance(self.scan.root, Url):  # `loaders.build` reads no raw tree there
            as_it_is.append(RAW_TREE)
        return [*as_it_is, *(name for name in FORMAT_NAMES if name in self.formats)]


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
        changes: fields of `bench.report.forecast.Inputs` to predict for, too.
        folders: where each format would be converted to, for the lines to paste.

    Raises:
        SourceError: no picture of the sample decodes.
        SettingError: unknown trainer, or what is measured does not fit into the page cache; or the file at
            `path` is of other settings.
    """
    settings = replace(ready(question.settings), classes=len(question.scan.classes))
    trials = Trials(path, "recommend", describe_machine(settings.device), _describe(question, settings))
    if any(trials.find(of) is None for of in _all_trials(question, settings)):
        with temporary_folder() as folder:
            _measure(trials, question, settings, folder, on_progress)
    on_progress(1, 1)
    result = make_result(
        trials.machine, trials.settings, trials.all(), trials.skipped, changes=changes, folders=folders
    )
    trials.finish(result)
    return result


def look_at_sample(question: Question) -> Trial:
    """What cannot be read of the sample, as its trial says it; nothing is measured."""
    with temporary_folder() as folder:
        trees = make_trees(question.scan, question.recipe, question.settings, folder, question.pictures)
        return _describe_sample(question.scan, trees)


def ready(settings: Settings) -> Settings:
    """Settings as a recommendation measures: random crops, no checksums; SettingError for an unknown trainer.

    Training crops at random, and centre crops are less work for some loaders than for others. It compares
    checksums of each picture once, and a sample is served again and again.
    """
    trainer = resolve(settings.trainer, settings.device)
    check_trainer(trainer, settings.size)  # an error now, not later
    return replace(settings, trainer=trainer, augment="train", check="never")


def _describe(question: Question, settings: Settings) -> dict[str, Any]:
    """What all trials have in common, for the file of the result."""
    scan = question.scan
    names = ("size", "batch_size", "seconds", "augment", "trainer", "repeats")
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
                "name": RAW_TREE,
                "samples": len(scan.samples),
                "train_samples": train_images(scan),
                "image_bytes": float(scan.samples.file_bytes.mean()),
                "digest": scan.digest,
            }
        },
    }


def _turn(name: str, repeat: int, settings: Settings) -> list[dict[str, Any]]:
    """What the trials of one loader in one turn are of."""
    of = {"backend": BACKENDS[name], "data": name, "repeat": repeat}
    return [{"what": LOADER, **of}, {"what": FED, **of, "trainer": settings.trainer}]


def _all_trials(question: Question, settings: Settings) -> Iterator[dict[str, Any]]:
    yield {"what": DISK}
    yield {"what": SAMPLE}
    for name in question.loaders:
        for repeat in range(settings.repeats):
            yield from _turn(name, repeat, settings)


def _measure(
    trials: Trials, question: Question, settings: Settings, folder: Path, on_progress: Progress
) -> None:
    """Measure what the file of the result lacks."""
    begin_s = time.perf_counter()
    steps = 1 + settings.repeats
    on_progress(0, steps)
    trials.measure({"what": DISK}, lambda: _measure_disk(folder))
    trees = _take_sample(trials, question, settings, folder)
    places: dict[str, Path] = {}
    for name in question.loaders:
        if name in (TODAY_BACKEND, RAW_TREE):
            places[name] = trees.large
            continue
        try:
            _convert_sample(trials, name, question, trees, folder / name)
            places[name] = folder / name
        except _FAILURES as error:
            trials.skipped[name] = str(error)
    on_progress(1, steps)
    for repeat in range(settings.repeats):
        turn_s = time.perf_counter()
        _take_turn(trials, places, repeat, settings)
        now_s = time.perf_counter()
        on_progress(2 + repeat, steps)
        if now_s - begin_s + (now_s - turn_s) > question.limit_s:
            return


def _take_turn(trials: Trials, places: dict[str, Path], repeat: int, settings: Settings) -> None:
    """Measure the trainer, and each loader alone and fed to it; what fails goes to `trials.skipped`."""
    half_s = settings.seconds / 2
    alone = settings.of("", Path(), settings.classes, warmup=0, batches=1, monitored=False, seconds=half_s)
    of = {"what": TRAINER, "trainer": settings.trainer, "repeat": repeat}
    trials.measure(of, lambda: _run(measure_trainer, alone))
    for name in tuple(places):
        place = places[name]
        if not page_cache.warm(place):
            raise SettingError(
                f"{place}: is more than half of the free memory, so it cannot be measured with a warm "
                f"cache; free memory, or take a smaller tree"
            )
        try:
            data = open_split(place.resolve(), "train")
            reads = Candidate(BACKENDS[name], place.resolve(), data).reads
            spec = settings.of(BACKENDS[name], reads, len(data.classes), warmup=0, batches=1, monitored=False)
            by_itself = replace(spec, trainer=NullTrainer.name, first_epoch=True)
            fed = replace(spec, warmup_s=half_s)
            loader_of, fed_of = _turn(name, repeat, settings)
            trials.measure(loader_of, lambda: _run(measure, by_itself))  # noqa: B023 (called at once)
            trials.measure(fed_of, lambda: _run(measure, fed))  # noqa: B023
        except _FAILURES as error:
            trials.skipped[name] = str(error).replace(f"{place.resolve()}", "the sample")
            del places[name]


def _run(function: Any, settings: Settings) -> Trial:
    """Run a trial in a process of its own, and note what else the machine did meanwhile."""
    others = OtherProcesses()
    trial: Trial = run_fresh(function, settings)
    share = others.share()
    numbers = trial.numbers if share is None else {**trial.numbers, "other_cpu_share": share}
    return Trial(numbers=numbers)


def _measure_disk(folder: Path) -> Trial:
    """Bytes per second of sequential reads, and seconds until a read begins to give data."""
    try:
        with disk.readable_file(folder, _DISK_FILE_BYTES) as file:
            sequential = file.sequential_rate(_DISK_SECONDS) * 1e6
            random = file.random_rate(mmap.PAGESIZE, _DISK_SECONDS / 2) * 1e6
    except SettingError:  # on no disk
        return Trial(numbers={"read_bytes_per_s": _MEMORY_BYTES_PER_S, "first_byte_s": 0.0})
    first_byte_s = max(0.0, mmap.PAGESIZE / random - mmap.PAGESIZE / sequential)
    return Trial(numbers={"read_bytes_per_s": sequential, "first_byte_s": first_byte_s})


def _take_sample(trials: Trials, question: Question, settings: Settings, folder: Path) -> Trees:
    """Copy pictures of the tree into `folder`, the same ones as before where there was a before."""
    before = trials.find({"what": SAMPLE})
    same_as = None
    if before is not None:
        same_as = (int(before.numbers["pictures"]), int(before.numbers["copies"]))
    choosing_s = _CHOOSING_SHARE * question.limit_s
    scan = question.scan
    trees = make_trees(scan, question.recipe, settings, folder, question.pictures, choosing_s, same_as)
    trials.measure({"what": SAMPLE}, lambda: _describe_sample(scan, trees))
    return trees


def _describe_sample(scan: Scan, trees: Trees) -> Trial:
    """What the sample is, and what cannot be read of it: by precache, and by ImageFolder."""
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
        facts["undecodable"] = f"{path} ({kind})"
    if not isinstance(scan.root, Url):
        refused = imagefolder.find_refused(scan, trees.paths)
        facts["refused"] = " ".join(refused.sentences())
    return Trial(numbers=numbers, facts={name: fact for name, fact in facts.items() if fact})


def _convert_sample(trials: Trials, name: str, question: Question, trees: Trees, place: Path) -> None:
    """Convert the sample into `place`, and note how long that takes."""
    recipe = replace(question.recipe, format=name)
    cpus = question.settings.workers_alone
    small, large, image_bytes = convert_twice(trees, len(question.scan.samples), recipe, cpus, place)
    trials.measure(
        {"what": CONVERT, "format": name},
        lambda: Trial(
            numbers={
                "small_s": small[0],
                "small_images": small[1],
                "large_s": large[0],
                "large_images": large[1],
                "image_bytes": image_bytes,
            }
        ),
    )
