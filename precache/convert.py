"""From a source of pictures to a converted dataset: scan, plan, write shards, commit the manifest.

Killed at any moment, a conversion loses the shards in work and nothing else: finished ones are in
the journal, and the manifest is written last. The same command continues it.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from precache import executors, uploads
from precache.console.notices import warn
from precache.console.progress import Progress, nothing_lost, tells, unseen
from precache.conversion.commit import commit, commit_update
from precache.conversion.demands import check_finished, check_rejects, check_room, check_there
from precache.conversion.journal_header import JOURNAL_NAME, Target
from precache.conversion.lock import Lock, hold_lock, lock_path
from precache.conversion.scanning import scanned
from precache.conversion.shard_writer import ShardTask, finish_shard, read_first, write_shard
from precache.conversion.update import plan as plan_update
from precache.dataset import columns
from precache.dataset.converted import is_converted, open_dataset
from precache.dataset.left_out import Rejected
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
from precache.errors import DatasetError, SettingError, check_share
from precache.journal import Journal, check_empty
from precache.manifest import Manifest
from precache.pictures import bands
from precache.pictures.codecs import made_by
from precache.plan import ConvertPlan, ShardPlan, plan_conversion
from precache.recipe import Recipe
from precache.sources import SourceOptions
from precache.sources.base import Scan, check_apart
from precache.sources.splits import gaps
from precache.storage.urls import Location, Url, check_writable, locate


@dataclass(frozen=True, slots=True)
class Conversion:
    """What one call of `convert` did.

    Attributes:
        manifest: of the finished dataset.
        converted: pictures written by this call; fewer than the manifest's after a resume.
        published: whether this call finished the dataset; False if it was there already.
        elapsed_s: wall time of this call.
        nodes: with the engine `ray`, pictures per second of each node that had some, by its name.
    """

    manifest: Manifest
    converted: int
    published: bool
    elapsed_s: float
    nodes: dict[str, float] = field(default_factory=dict)


@tells(nothing_lost)
def convert(  # noqa: PLR0913 (each one a choice of the caller, by keyword)
    source: Any,
    destination: str | os.PathLike[str] | Url,
    recipe: Recipe,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    update: bool = False,
    max_rejects: float = 0.01,
    split_list: str | os.PathLike[str] | None = None,
    options: SourceOptions | None = None,
    engine: str = "local",
    address: str | None = None,
    on_start: Callable[[int, int], None] = lambda predicted, free: None,
    on_progress: Progress = unseen,
    **named: Any,
) -> Conversion:
    """Convert the pictures of `source`, such as a raw tree, into the folder or URL `destination` by `recipe`.

    A finished destination of the same source and recipe is left as it is; an unfinished one is
    continued. The bytes written depend on the pictures and the recipe, not on `workers` or `engine`.

    Args:
        source: a path, a dataset, or several as splits; see `precache.open_source`.
        workers: processes; default one per CPU, 0 for the calling process. With the engine `ray`, shards at
            a time; default twice the CPUs of the cluster.
        overwrite: convert although the destination is finished: the new dataset is built beside
            it and takes its place at the end. An unfinished one of other settings is discarded.
        update: add to a finished destination what `source` has got since, and mark what it has lost, see
            `precache.conversion.update`.
        max_rejects: share of the pictures, 0 to 1, that may be undecodable, rounded up to whole
            pictures; more, and nothing is published.
        split_list: a file of lines `path,split` that says what is converted, into which splits
            (see `precache.sources.splits`).
        options: what is which in `source`, see `precache.SourceOptions`.
        engine: `local`, processes of this machine; or `ray`, the nodes of a Ray cluster, all of which see
            `source` and `destination` under the same paths.
        address: of that cluster, `HOST:PORT`; default RAY_ADDRESS, or the one that this machine is a node of.
        on_start: called with (bytes that the dataset will take, bytes free), before the work.
        on_progress: called with (pictures done, pictures in all), a few times a second.
        named: options by their names, `image="photo", label="species"`, beside or instead of `options`.

    Raises:
        SourceError: no such source, one without pictures, or one that changes meanwhile.
        DatasetError: the destination holds something else, is being written by another process,
            cannot be written or is too small; or too many pictures are rejected.
        SettingError: a value is out of range, one folder lies inside the other, there is no cluster at
            `address`, or the versions on its nodes differ.
        WorkerError: a worker process died.
        MissingDependencyError: an extra is not installed.
    """
    start_s = time.perf_counter()
    if engine == "local" or workers is not None:
        workers = executors.worker_count(workers)
    check_share("max_rejects", max_rejects)
    bands.check_reader(recipe.channels)
    if update and overwrite:
        raise SettingError("update and overwrite cannot be combined; give one")
    options = replace(options or SourceOptions(), **named)
    destination = locate(destination)
    source = locate(source) if isinstance(source, str | bytes | os.PathLike) else source
    with executors.connected(engine, address):
        opened, scan, recipe, options = scanned(
            source, destination, recipe, options, split_list, executors.worker_count(workers)
        )
        job = _Job(
            scan,
            plan_conversion(scan.samples, recipe),
            Target(recipe, scan.digest, made_by()),
            engine,
            workers,
            math.ceil(max_rejects * len(scan.samples)),
            executors.of_caller(on_start),
            on_progress,
            options,
        )
        with _tells_of_faults(destination):
            if isinstance(destination, Url):
                check_writable(destination)
                check_apart(opened, destination)
                manifest, converted = _convert_at(job, destination, overwrite, update)
            else:
                destination = resolve(destination)
                check_apart(opened, destination)
                if not lock_path(destination).exists():  # a folder of somebody else's gets no lock beside it
                    check_empty(destination)
                with hold_lock(destination) as lock:
                    manifest, converted = _convert(job, lock, overwrite, update)
    for gap in gaps(scan, manifest) if converted is not None else ():
        warn(f"{destination}: {gap}")
    elapsed_s = time.perf_counter() - start_s
    return Conversion(manifest, converted or 0, converted is not None, elapsed_s, job.nodes)


@contextmanager
def _tells_of_faults(destination: Location, kept: Callable[[], str] | None = None) -> Iterator[None]:
    """Make a DatasetError of what the disk raises; and tell what is `kept`, once something has begun."""
    try:
        with tells(kept) if kept else nullcontext():
            yield
    except OSError as error:
        if executors.is_of_caller(error):
            raise
        remedy = "make room or fix permissions"
        remedy = f" {kept()}; {remedy} first" if kept else f"; {remedy}, then run the same command again"
        raise DatasetError(
            f"{error.filename or destination}: cannot be written ({error.strerror or error}){remedy}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be done, whatever DST holds; `limit` is the most rejects, `nodes` is filled meanwhile."""

    scan: Scan
    plan: ConvertPlan
    target: Target
    engine: str
    workers: int | None
    limit: int
    on_start: Callable[[int, int], None]
    on_progress: Progress
    options: SourceOptions
    rejected: tuple[Rejected, ...] = ()
    nodes: dict[str, float] = field(default_factory=dict)


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
        return check_finished(destination, job.scan, job.target, job.options, job.limit), None
    with (
        Journal(folder, job.target, job.plan, job.scan, overwrite=overwrite) as journal,
        _tells_of_faults(folder, journal.kept),
    ):
        waiting = [shard for shard in job.plan.shards if shard.name not in journal.finished]
        check_room(job.scan, job.target.recipe, waiting, folder, job.on_start)
        converted = _run(job, waiting, journal)
        journal.check_whole()
        manifest = commit(job.scan, job.plan, job.options, journal.finished, folder)
        journal.remove()
    if finished:
        swap_in(lock)
    return manifest, converted


def _convert_at(job: _Job, url: Url, overwrite: bool, update: bool) -> tuple[Manifest, int | None]:
    """As `_convert`, into an object storage, see `precache.uploads`."""
    uploads.check_free(url)
    with uploads.hold_lock(url) as lock:
        if is_converted(url):
            uploads.refuse_change(url, overwrite=overwrite, update=update)
            uploads.tidy(url, job.target)
            return check_finished(url, job.scan, job.target, job.options, job.limit), None
        journal = uploads.UrlJournal(lock, url, job.target, job.plan, job.scan, overwrite=overwrite)
        with _tells_of_faults(url, journal.kept), uploads.room() as folder:
            waiting = [shard for shard in job.plan.shards if shard.name not in journal.finished]
            check_room(
                job.scan,
                job.target.recipe,
                waiting,
                folder,
                job.on_start,
                staged=2 * executors.worker_count(job.workers),
            )
            converted = _run(job, waiting, journal)
            manifest = commit(job.scan, job.plan, job.options, journal.finished, folder)
            journal.publish(folder)
            journal.remove()
    return manifest, converted


def _update(job: _Job, destination: Path) -> tuple[Manifest, int | None]:
    """As `_convert`, of the finished dataset in `destination`."""
    dataset = open_dataset(destination)
    check_there(dataset)
    plan = plan_update(dataset, job.scan, job.target.recipe, job.options)
    if plan is None:
        return dataset.manifest, None
    job = replace(job, scan=plan.difference.scan, plan=plan.plan, target=plan.target, rejected=plan.rejected)
    with (
        Journal(destination, job.target, job.plan, job.scan, base=dataset.manifest.own_names) as journal,
        _tells_of_faults(destination, journal.kept),
    ):
        for name in dataset.manifest.replaced_files:  # nobody can be reading them any more
            (destination / name).unlink(missing_ok=True)
        waiting = [shard for shard in job.plan.shards if shard.name not in journal.finished]
        check_room(job.scan, job.target.recipe, waiting, destination, job.on_start)
        converted = _run(job, waiting, journal)
        journal.check_whole()
        manifest = commit_update(plan, journal.finished)
        journal.remove()
    return manifest, converted


def _run(job: _Job, waiting: Sequence[ShardPlan], journal: "Journal | uploads.UrlJournal") -> int:
    """Write the shards of `waiting`; the number of pictures converted by this call."""
    samples = job.scan.samples
    total = len(samples)
    report = executors.counted(job.on_progress, total, total - sum(len(shard.rows) for shard in waiting))
    report(0)
    converted = 0
    rejected = [*job.rejected, *(s for shard in journal.finished.values() for s in shard.rejected)]
    check_rejects(journal.folder, rejected, job.limit)
    tasks = (  # one after another: a task holds the paths of its pictures
        ShardTask(
            shard.name,
            shard.split,
            tuple(samples[row] for row in shard.rows),
            tuple(columns.labelled(samples.targets, samples.fields, int(row)) for row in shard.rows),
            journal.folder,
            job.target.recipe,
            journal.digest,
        )
        for shard in waiting
    )
    workers = None if job.workers is None else min(job.workers, len(waiting))
    source, run = job.scan.source, executors.ENGINES[job.engine]
    write = partial(write_shard, source)
    first = [samples[int(shard.rows[0])] for shard in waiting[:1]]
    read = partial(read_first, source, first)
    with (
        executors.nodes_of(job.engine, journal.folder, JOURNAL_NAME, source.paths, read) as nodes,
        closing(run(write, tasks, workers, report, finish=finish_shard, nodes=nodes)) as finished,
    ):
        for shard in finished:
            journal.record(shard)
            converted += shard.entry.samples
            rejected += shard.rejected
            check_rejects(journal.folder, rejected, job.limit)
    job.nodes.update(nodes.units_per_s)
    return converted
