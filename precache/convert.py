"""From a raw tree to a converted dataset: scan, plan, write shards, commit the manifest.

Killed at any moment, a conversion loses the shards in work and nothing else: finished ones are in
the journal, and the manifest is written last. The same command continues it.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from precache import executors, images
from precache.codecs import made_by
from precache.destination import beside, check_nothing_else, finish_swap, hold_lock, swap_in
from precache.errors import (
    DatasetError,
    ImageError,
    SettingError,
    SourceError,
    check_range,
    check_share,
)
from precache.estimate import predict_bytes
from precache.formats import FORMATS, Sample
from precache.journal import JOURNAL_NAME, FinishedShard, Journal, Target
from precache.manifest import (
    Manifest,
    RejectedSample,
    ShardEntry,
    file_entry,
    is_converted,
    open_dataset,
    write_index,
    write_manifest,
    write_rejected,
)
from precache.plan import ConvertPlan, ShardPlan, plan_conversion
from precache.recipe import Recipe
from precache.source import SampleRef, Scan, scan_tree

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Conversion:
    """What one call of `convert` did.

    Attributes:
        manifest: of the finished dataset.
        converted: pictures written by this call; fewer than the manifest's after a resume.
        elapsed_s: wall time of this call.
    """

    manifest: Manifest
    converted: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class _Task:
    shard: ShardPlan
    source: str
    destination: Path
    recipe: Recipe


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    recipe: Recipe,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    max_rejects: float = 0.01,
    on_start: Callable[[int, int], None] = lambda predicted, free: None,
    on_progress: Progress = lambda done, total: None,
) -> Conversion:
    """Convert the raw tree `source` into the folder `destination` by `recipe`.

    A finished destination of the same source and recipe is left as it is; an unfinished one is
    continued. The bytes written depend on the pictures and the recipe, not on `workers`.

    Args:
        workers: processes; default one per CPU, 0 for the calling process.
        overwrite: convert although the destination is finished: the new dataset is built beside
            it and takes its place at the end. An unfinished one of other settings is discarded.
        max_rejects: share of the pictures, 0 to 1, that may be undecodable, rounded up to whole
            pictures; more, and nothing is published.
        on_start: called with (bytes that the dataset will take, bytes free), before the work.
        on_progress: called with (pictures done, pictures in all), a few times a second.

    Raises:
        SourceError: no such tree, none with class folders, or one that changes meanwhile.
        DatasetError: the destination holds something else, is being written by another process,
            cannot be written or is too small; or too many pictures are rejected.
        SettingError: a value is out of range, or one folder lies inside the other.
        WorkerError: a worker process died.
    """
    start_s = time.perf_counter()
    workers = executors.available_cpus() if workers is None else workers
    check_range("workers", workers, 0)
    check_share("max_rejects", max_rejects)
    source, destination = Path(source), Path(destination)
    scan = scan_tree(source)
    _check_apart(source, destination)
    if destination.exists() and not destination.is_dir():
        raise DatasetError(f"{destination}: is a file; choose a folder as DST")
    target = Target(recipe, scan.digest(), made_by())
    try:
        with hold_lock(destination):
            finish_swap(destination)
            finished = is_converted(destination)
            if finished:  # killed between its manifest and the end, it may still hold its journal
                (destination / JOURNAL_NAME).unlink(missing_ok=True)
            if finished and overwrite:
                check_nothing_else(destination)
            elif finished:
                manifest = open_dataset(destination).manifest
                found = {"recipe": manifest.recipe.to_json(), "source_digest": manifest.source_digest}
                target.check_same(destination, found)
                return Conversion(manifest, 0, time.perf_counter() - start_s)
            folder = beside(destination, ".new") if finished else destination
            with Journal(folder, target, replace=overwrite) as journal:
                tasks = _waiting(scan, journal, target.recipe, folder)
                _check_room(scan, tasks, target.recipe, folder, on_start)
                limit = math.ceil(max_rejects * len(scan.samples))
                converted = _run(tasks, journal, workers, limit, _Reporter(scan, tasks, on_progress))
                plan = plan_conversion(scan.samples, target.recipe)
                manifest = _commit(scan, plan, journal.finished, folder)
                journal.remove()
            if finished:
                swap_in(destination)
    except OSError as error:
        raise DatasetError(
            f"{error.filename or destination}: cannot be written ({error.strerror}); finished shards "
            f"are kept: make room or fix permissions, then run the same command again"
        ) from error
    return Conversion(manifest, converted, time.perf_counter() - start_s)


class _Reporter:
    """Turns counts of pictures into (done, total)."""

    def __init__(self, scan: Scan, tasks: Sequence[_Task], on_progress: Progress) -> None:
        self._total = len(scan.samples)
        self._done = self._total - sum(len(task.shard.samples) for task in tasks)
        self._on_progress = on_progress

    def __call__(self, count: int) -> None:
        self._done += count
        self._on_progress(self._done, self._total)


def _waiting(scan: Scan, journal: Journal, recipe: Recipe, folder: Path) -> list[_Task]:
    """The shards of the plan that are not finished."""
    shards = plan_conversion(scan.samples, recipe).shards
    return [
        _Task(shard, str(scan.root), folder, recipe) for shard in shards if shard.name not in journal.finished
    ]


def _check_room(
    scan: Scan,
    tasks: Sequence[_Task],
    recipe: Recipe,
    folder: Path,
    on_start: Callable[[int, int], None],
) -> None:
    """Raise DatasetError if the disk cannot take what is still to be written."""
    predicted = predict_bytes(scan, recipe)
    share = sum(len(task.shard.samples) for task in tasks) / len(scan.samples)
    free = shutil.disk_usage(folder).free
    on_start(predicted, free)
    if predicted * share > free:
        raise DatasetError(
            f"{folder}: the dataset needs about {predicted * share:,.0f} bytes, {free:,} are free; "
            f"make room, choose a DST on another disk, or a smaller --size"
        )


def _run(tasks: Sequence[_Task], journal: Journal, workers: int, limit: int, report: _Reporter) -> int:
    """Write the shards of `tasks`; the number of pictures converted by this call."""
    report(0)
    converted = 0
    _check_rejects(journal, limit)
    with closing(executors.run(_write_shard, tasks, workers, report)) as finished:
        for shard in finished:
            journal.record(shard)
            converted += shard.entry.samples
            _check_rejects(journal, limit)
    return converted


def _check_rejects(journal: Journal, limit: int) -> None:
    rejected = [sample for shard in journal.finished.values() for sample in shard.rejected]
    if len(rejected) > limit:
        raise DatasetError(
            f"{journal.folder}: not published, {len(rejected):,} pictures are rejected and {limit:,} may "
            f"be (first: {rejected[0].path}, {rejected[0].reason}); repair or remove them and pass "
            f"--overwrite, or run the same command again with a higher --max-rejects"
        )


def _write_shard(task: _Task, tick: Callable[[], None]) -> FinishedShard:
    """Decode, resize and write one shard; runs in a worker."""
    rejected: list[RejectedSample] = []
    base = task.destination / task.shard.name
    paths = FORMATS[task.recipe.format].write_shard(base, _samples(task, rejected, tick), task.recipe)
    count = len(task.shard.samples) - len(rejected)
    if count == 0:
        for path in paths:
            path.unlink()
        paths = []
    files = tuple(file_entry(path) for path in paths)
    entry = ShardEntry(task.shard.name, task.shard.split, count, files)
    return FinishedShard(entry, tuple(rejected))


def _samples(task: _Task, rejected: list[RejectedSample], tick: Callable[[], None]) -> Iterator[Sample]:
    for ref in task.shard.samples:
        path = os.path.join(task.source, ref.path)
        try:
            image = images.decode(_read_unchanged(path, ref), path)
        except ImageError as error:
            rejected.append(RejectedSample(ref.id, ref.path, error.reason))
        else:
            recipe = task.recipe
            pixels = images.fit(image, recipe.size, recipe.fit, recipe.resample)
            yield Sample(ref.id, ref.label, pixels, ref.path, image.size)
        tick()


def _read_unchanged(path: str, ref: SampleRef) -> bytes:
    """The picture as the scan found it: what is rejected, or converted, must not depend on when."""
    if not os.path.exists(path):
        raise SourceError(f"{path}: vanished while it was converted; run the same command again")
    data = images.read_bytes(path)
    if len(data) != ref.bytes:
        raise SourceError(
            f"{path}: changed while it was converted (expected {ref.bytes:,} bytes, got {len(data):,}); "
            f"let the source tree alone, and convert with --overwrite"
        )
    return data


def _commit(scan: Scan, plan: ConvertPlan, finished: dict[str, FinishedShard], destination: Path) -> Manifest:
    """Check that the counts add up, then write the index and, last, the manifest."""
    done = [finished[shard.name] for shard in plan.shards]
    rejected = sorted((sample for result in done for sample in result.rejected), key=lambda r: r.id)
    rejected_ids = {sample.id for sample in rejected}
    kept = [
        (shard.split, ref) for shard in plan.shards for ref in shard.samples if ref.id not in rejected_ids
    ]
    written = sum(result.entry.samples for result in done)
    if not written == len(kept) == len(scan.samples) - len(rejected):
        raise DatasetError(
            f"{scan.root}: {len(scan.samples):,} pictures scanned, but {written:,} converted "
            f"and {len(rejected):,} rejected; this is a defect, please report it"
        )
    if not kept:
        raise DatasetError(
            f"{scan.root}: none of its {len(scan.samples):,} pictures can be converted; "
            f"the first one, {rejected[0].path}, {rejected[0].reason}"
        )
    per_class = {shard.split: [0] * len(scan.classes) for shard in plan.shards}
    for split, ref in kept:
        per_class[split][ref.label] += 1
    ids = np.array([ref.id for _, ref in kept], np.int64)
    labels = np.array([ref.label for _, ref in kept], np.int64)
    manifest = Manifest(
        recipe=plan.recipe,
        made_by=made_by(),
        source_digest=scan.digest(),
        source_bytes=sum(ref.bytes for ref in scan.samples),
        classes=scan.classes,
        samples_per_class={split: tuple(counts) for split, counts in per_class.items()},
        shards=tuple(result.entry for result in done if result.entry.samples),
        index=write_index(destination, ids, labels),
        rejected=tuple(rejected),
        ignored=tuple((ignored.path, ignored.reason) for ignored in scan.ignored),
    )
    write_rejected(destination, rejected)
    write_manifest(destination, manifest)
    return manifest


def _check_apart(source: Path, destination: Path) -> None:
    inner, outer = destination.resolve(), source.resolve()
    if inner == outer or outer in inner.parents or inner in outer.parents:
        raise SettingError(
            f"{destination}: lies inside the source tree {source}, or the other way round; "
            f"choose a DST beside it"
        )
