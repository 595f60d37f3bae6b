"""From a source of pictures to a converted dataset: scan, plan, write shards, commit the manifest.

Killed at any moment, a conversion loses the shards in work and nothing else: finished ones are in
the journal, and the manifest is written last. The same command continues it.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from precache import bands, boxes, columns, executors, masks
from precache.codecs import made_by
from precache.commit import commit, commit_update
from precache.converted import ConvertedDataset, is_converted, open_dataset
from precache.destination import (
    build_folder,
    check_may_be_replaced,
    finish_swap,
    is_untouched,
    resolve,
    swap_in,
    tidy,
    warn_of_build,
)
from precache.difference import compare
from precache.errors import DatasetError, SettingError, check_share
from precache.estimate import predict_bytes
from precache.journal import Journal, check_empty
from precache.journal_header import Target
from precache.left_out import Rejected
from precache.lock import Lock, hold_lock, lock_path
from precache.manifest import Manifest
from precache.notices import counted, warn
from precache.plan import ConvertPlan, ShardPlan, plan_conversion
from precache.progress import Progress, nothing_lost, tells, unseen
from precache.recipe import Recipe
from precache.shard_writer import ShardTask, finish_shard, write_shard
from precache.source_state import changed_pictures
from precache.sources import Scanning, SourceOptions, open_source
from precache.sources.base import Scan, check_apart, lie_apart
from precache.sources.converted import prepared
from precache.sources.kept import kept_path
from precache.splits import apply_list
from precache.update import plan as plan_update


@dataclass(frozen=True, slots=True)
class Conversion:
    """What one call of `convert` did.

    Attributes:
        manifest: of the finished dataset.
        converted: pictures written by this call; fewer than the manifest's after a resume.
        published: whether this call finished the dataset; False if it was there already.
        elapsed_s: wall time of this call.
    """

    manifest: Manifest
    converted: int
    published: bool
    elapsed_s: float


@tells(nothing_lost)
def convert(
    source: Any,
    destination: str | os.PathLike[str],
    recipe: Recipe,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    update: bool = False,
    max_rejects: float = 0.01,
    split_list: str | os.PathLike[str] | None = None,
    options: SourceOptions | None = None,
    on_start: Callable[[int, int], None] = lambda predicted, free: None,
    on_progress: Progress = unseen,
    **named: Any,
) -> Conversion:
    """Convert the pictures of `source`, such as a raw tree, into the folder `destination` by `recipe`.

    A finished destination of the same source and recipe is left as it is; an unfinished one is
    continued. The bytes written depend on the pictures and the recipe, not on `workers`.

    Args:
        source: a path, a dataset, or several as splits; see `precache.open_source`.
        workers: processes; default one per CPU, 0 for the calling process.
        overwrite: convert although the destination is finished: the new dataset is built beside
            it and takes its place at the end. An unfinished one of other settings is discarded.
        update: add to a finished destination what `source` has got since, and mark what it has lost, see
            `precache.update`.
        max_rejects: share of the pictures, 0 to 1, that may be undecodable, rounded up to whole
            pictures; more, and nothing is published.
        split_list: a file of lines `path,split` that says what is converted, into which splits
            (see `precache.splits`).
        options: what is which in `source`, see `precache.SourceOptions`.
        on_start: called with (bytes that the dataset will take, bytes free), before the work.
        on_progress: called with (pictures done, pictures in all), a few times a second.
        named: options by their names, `image="photo", label="species"`, beside or instead of `options`.

    Raises:
        SourceError: no such source, one without pictures, or one that changes meanwhile.
        DatasetError: the destination holds something else, is being written by another process,
            cannot be written or is too small; or too many pictures are rejected.
        SettingError: a value is out of range, or one folder lies inside the other.
        WorkerError: a worker process died.
    """
    start_s = time.perf_counter()
    workers = executors.worker_count(workers)
    check_share("max_rejects", max_rejects)
    bands.check_reader(recipe.channels)
    if update and overwrite:
        raise SettingError("update and overwrite cannot be combined; give one")
    options = replace(options or SourceOptions(), **named)
    how = Scanning(workers) if split_list else _scanning(source, Path(destination), workers, options)
    opened = open_source(source, options, how)
    scan, options = prepared(opened.scan(), recipe, options)
    boxes.check(options.boxes, scan.samples.fields, masks=masks.reader_of(scan.source) is not None)
    for warning in scan.warnings:
        warn(warning)
    if split_list is not None:
        scan, recipe = apply_list(scan, recipe, split_list)
    elif recipe.listed:
        raise SettingError(f"splits {recipe.splits!r} means a list file; pass the file as split_list")
    plan = plan_conversion(scan.samples, recipe)
    job = _Job(
        scan,
        plan,
        Target(recipe, scan.digest, made_by()),
        workers,
        math.ceil(max_rejects * len(scan.samples)),
        executors.of_caller(on_start),
        on_progress,
        options,
    )
    try:
        destination = resolve(Path(destination))
        check_apart(opened, destination)
        if not lock_path(destination).exists():  # a folder of somebody else's gets no lock file beside it
            check_empty(destination)
        with hold_lock(destination) as lock:
            manifest, converted = _convert(job, lock, overwrite, update)
    except OSError as error:
        if executors.is_of_caller(error):
            raise
        raise DatasetError(
            f"{error.filename or destination}: cannot be written ({error.strerror or error}); finished "
            f"shards are kept: make room or fix permissions, then run the same command again"
        ) from error
    elapsed_s = time.perf_counter() - start_s
    return Conversion(manifest, converted or 0, converted is not None, elapsed_s)


def _scanning(source: Any, destination: Path, workers: int, options: SourceOptions) -> Scanning:
    """Of a tree whose pictures will all be read, such that a scan that is killed goes on."""
    folder = Path(os.path.realpath(destination))
    on_disk = isinstance(source, str | os.PathLike) and all(
        lie_apart(path, folder) for path in (source, options.mask) if path is not None
    )
    return Scanning(workers, kept_path(folder) if on_disk and is_untouched(folder) else None)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be done, whatever the destination holds; `limit` is the most rejects."""

    scan: Scan
    plan: ConvertPlan
    target: Target
    workers: int
    limit: int
    on_start: Callable[[int, int], None]
    on_progress: Progress
    options: SourceOptions
    rejected: tuple[Rejected, ...] = ()


def _convert(job: _Job, lock: Lock, overwrite: bool, update: bool) -> tuple[Manifest, int | None]:
    """The dataset in the locked destination, and how many pictures were converted; None if it was there."""
    finish_swap(lock)
    destination = folder = lock.destination
    finished = is_converted(destination)
    if job.scan.recalled and not is_untouched(destination):
        raise DatasetError(
            f"{destination}: another process has begun to convert into it; run the same command again"
        )
    if finished:
        tidy(destination)
    if finished and overwrite:
        check_may_be_replaced(destination)
        folder = build_folder(lock)
    else:
        warn_of_build(lock)
    if finished and update:
        return _update(job, destination)
    if finished and not overwrite:
        return _check_finished(job, destination), None
    with Journal(folder, job.target, job.plan, job.scan, overwrite=overwrite) as journal, tells(journal.kept):
        waiting = [shard for shard in job.plan.shards if shard.name not in journal.finished]
        _check_room(job.scan, waiting, job.target.recipe, folder, job.on_start)
        converted = _run(job, waiting, journal)
        manifest = commit(job.scan, job.plan, job.options, journal.finished, folder)
        journal.remove()
    if finished:
        swap_in(lock)
    return manifest, converted


def _update(job: _Job, destination: Path) -> tuple[Manifest, int | None]:
    """As `_convert`, of the finished dataset in `destination`."""
    dataset = open_dataset(destination)
    plan = plan_update(dataset, job.scan, job.target.recipe, job.options)
    if plan is None:
        return dataset.manifest, None
    job = replace(job, scan=plan.difference.scan, plan=plan.plan, target=plan.target, rejected=plan.rejected)
    base = frozenset((*(file.name for file in dataset.manifest.files), *dataset.manifest.replaced_files))
    with Journal(destination, job.target, job.plan, job.scan, base=base) as journal, tells(journal.kept):
        for name in dataset.manifest.replaced_files:  # nobody can be reading them any more
            (destination / name).unlink(missing_ok=True)
        waiting = [shard for shard in job.plan.shards if shard.name not in journal.finished]
        _check_room(job.scan, waiting, job.target.recipe, destination, job.on_start)
        converted = _run(job, waiting, journal)
        manifest = commit_update(plan, journal.finished)
        journal.remove()
    return manifest, converted


def _check_finished(job: _Job, destination: Path) -> Manifest:
    """The manifest of the finished dataset; DatasetError if it is not what is asked for."""
    dataset = open_dataset(destination)
    manifest = dataset.manifest
    found = {"recipe": manifest.recipe.to_json(), "source_digest": manifest.source_digest}
    job.target.check_same(destination, found, finished=True)
    if manifest.source_options.get("boxes") != job.options.boxes:
        raise DatasetError(
            f"{destination}: is finished, with boxes {manifest.source_options.get('boxes')!r}, and "
            f"{job.options.boxes!r} are asked for; pass --overwrite to convert again"
        )
    if len(manifest.rejected) > job.limit:
        raise DatasetError(
            f"{destination}: is finished, but {_are_rejected(len(manifest.rejected), job.limit)}; "
            f"repair or remove them and pass --overwrite"
        )
    changed = _changed(job.scan, dataset)
    if changed:
        raise DatasetError(
            f"{destination}: {counted(len(changed), 'source picture')} changed since the conversion, "
            f"at the same size (first: {changed[0]}); pass --update to follow the source, or --overwrite to "
            f"convert again"
        )
    return manifest


def _changed(scan: Scan, dataset: ConvertedDataset) -> list[str]:
    """The pictures of `scan`, where paths and sizes are those of `dataset`, that hold something else."""
    if dataset.manifest.updates:
        difference = compare(dataset, scan)
        return [scan.source.where(difference.scan.samples[row]) for row in difference.new.tolist()]
    state = dataset.read_source_state()
    rows = np.arange(len(scan.samples))
    if state is None or len(state) != len(rows):
        return []
    return list(changed_pictures(scan, rows, state.modified_ns, state.checksums))


def _check_room(
    scan: Scan,
    waiting: Sequence[ShardPlan],
    recipe: Recipe,
    folder: Path,
    on_start: Callable[[int, int], None],
) -> None:
    """Raise DatasetError if the disk cannot take what is still to be written."""
    predicted = predict_bytes(scan, recipe)
    share = sum(len(shard.rows) for shard in waiting) / len(scan.samples)
    free = shutil.disk_usage(folder).free
    on_start(predicted, free)
    if predicted * share > free:
        raise DatasetError(
            f"{folder}: the dataset needs about {predicted * share:,.0f} bytes, and {free:,} are free; "
            f"make room, or choose a DST on another disk or a smaller --size"
        )


def _run(job: _Job, waiting: Sequence[ShardPlan], journal: Journal) -> int:
    """Write the shards of `waiting`; the number of pictures converted by this call."""
    samples = job.scan.samples
    total = len(samples)
    report = executors.counted(job.on_progress, total, total - sum(len(shard.rows) for shard in waiting))
    report(0)
    converted = 0
    rejected = [*job.rejected, *(s for shard in journal.finished.values() for s in shard.rejected)]
    _check_rejects(journal.folder, rejected, job.limit)
    tasks = (  # one after another: a task holds the paths of its pictures
        ShardTask(
            shard.name,
            shard.split,
            tuple(samples[row] for row in shard.rows),
            tuple(columns.labelled(samples.targets, samples.fields, int(row)) for row in shard.rows),
            journal.folder,
            job.target.recipe,
        )
        for shard in waiting
    )
    workers = min(job.workers, len(waiting))
    write = partial(write_shard, job.scan.source)
    with closing(executors.run(write, tasks, workers, report, finish=finish_shard)) as finished:
        for shard in finished:
            journal.record(shard)
            converted += shard.entry.samples
            rejected += shard.rejected
            _check_rejects(journal.folder, rejected, job.limit)
    return converted


def _check_rejects(folder: Path, rejected: Sequence[Rejected], limit: int) -> None:
    if len(rejected) > limit:
        raise DatasetError(
            f"{folder}: stopped, {_are_rejected(len(rejected), limit)}; first: {rejected[0].path}, "
            f"{rejected[0].reason}; repair or remove them and pass --overwrite, or leave them "
            f"out with a higher --max-rejects"
        )


def _are_rejected(number: int, limit: int) -> str:
    are = "picture is" if number == 1 else "pictures are"
    return f"{number:,} {are} rejected and at most {limit:,} may be"
