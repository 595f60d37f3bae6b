"""Convert a source of pictures: scan, plan, write shards, commit the manifest.

What a kill leaves behind, and what the same command then does:

    killed while                          there is                          the next run
    it scans and plans                    nothing                           begins
    shards are written, or renamed        the journal, finished shards,     writes the shards that the journal
                                          files under temporary names       does not have; removes the others'
    index and rejected.csv are written    all shards, no manifest           writes both again
    the manifest is renamed               the old state, or a dataset       goes on, or is done
    the journal is removed                a dataset and a journal           removes the journal

So the shards in work are lost and nothing else: a shard is in the journal once all its files have their
names, and the manifest is written last. `precache.conversion.destination` says the same of `--overwrite`,
and `precache.conversion.url` of a conversion into a URL.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from precache import engines
from precache.conversion.destination import (
    build_folder,
    check_files,
    check_finished,
    check_may_be_replaced,
    finish_swap,
    remove_rest,
    resolve,
    swap_in,
    too_many_rejected,
    warn_of_build,
)
from precache.conversion.journal import (
    JOURNAL_NAME,
    SOURCE_CHECKSUMS,
    FilesInFolder,
    Journal,
    Target,
    WrittenShard,
    check_empty,
)
from precache.conversion.shard_writer import (
    ShardTask,
    check_disk_space,
    finish_shard,
    read_first,
    write_shard,
)
from precache.conversion.update import UpdatePlan
from precache.conversion.update import plan as plan_update
from precache.conversion.url import (
    FilesAtUrl,
    locked_working_folder,
    refuse_change,
    remove_if_same,
)
from precache.dataset import boxes
from precache.dataset.columns import Column
from precache.dataset.converted import is_converted, open_dataset
from precache.dataset.duplicates import Duplicates, find_duplicates
from precache.dataset.index import (
    REJECTED_NAME,
    VALUE,
    Array,
    Checksums,
    Ints,
    Rejected,
    SampleIndex,
    Sizes,
    SourceState,
    left_out_arrays,
    write_index,
    write_rejected,
)
from precache.dataset.manifest import Manifest, Update, write_manifest
from precache.dataset.shard_table import ShardEntry, ShardTable
from precache.dataset.statistics import ChannelStatistics, statistics_by_split
from precache.errors import (
    DatasetError,
    SettingError,
    check_open_files,
    check_share,
    os_reason,
    shell_command,
)
from precache.formats import FORMATS
from precache.pictures import images
from precache.pictures.kinds import kind_without_decoder, made_by
from precache.plan import ConvertPlan, plan_conversion
from precache.recipe import Recipe
from precache.reporting import Progress, explain_interruption, no_progress, nothing_lost, warn
from precache.sources import Source, SourceOptions, open_source
from precache.sources.base import Samples, Scan, check_apart, prepared, warn_of_undecodable
from precache.sources.masks import reader_of
from precache.sources.splits import apply_list, gaps
from precache.storage.locks import hold_lock, lock_path
from precache.storage.urls import Location, Url, check_writable, locate


@dataclass(frozen=True, slots=True)
class Conversion:
    """What one call of `convert` did.

    Attributes:
        manifest: of the finished dataset.
        converted: pictures written by this call; fewer than the manifest's after a resume.
        published: whether this call finished the dataset; False if it was already finished.
        elapsed_s: wall time of this call.
        nodes: with the engine `ray`, pictures per second of each node that had some, by its name.
        deeper: pictures of a source tree that lie in a folder of their class folder.
        duplicates: the pictures of equal content; None if the dataset was already finished.
    """

    manifest: Manifest
    converted: int
    published: bool
    elapsed_s: float = 0.0
    nodes: dict[str, float] = field(default_factory=dict)
    deeper: int = 0
    duplicates: Duplicates | None = None


@explain_interruption(nothing_lost)
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
    on_progress: Progress = no_progress,
    **named: Any,
) -> Conversion:
    """Convert the pictures of `source`, such as a raw tree, into the folder or URL `destination` by `recipe`.

    A finished destination of the same source and recipe is left as it is; an unfinished one is
    continued. The bytes written depend on the pictures and the recipe, not on `workers` or `engine`.

    Args:
        source: a path, a dataset, or several as splits; see `precache.open_source`.
        workers: processes; default one per CPU, into a URL two per CPU, 0 for the calling process. With the
            engine `ray`, shards at a time; default twice the CPUs of the cluster.
        overwrite: convert although the destination is finished: the new dataset is built beside
            it and takes its place at the end. An unfinished one of other settings is discarded.
            A finished dataset at a URL is not overwritten.
        update: add to a finished destination the pictures that are new in `source`, and mark those gone, see
            `precache.conversion.update`.
        max_rejects: share of the pictures, 0 to 1, that may be undecodable, rounded up to whole
            pictures; with more, nothing is published.
        split_list: a file of lines `path,split` that says what is converted, into which splits
            (see `precache.sources.splits`).
        options: which column is the label, and the like, see `precache.SourceOptions`.
        engine: `local`, processes of this machine; or `ray`, the nodes of a Ray cluster, all of which see
            `source` and `destination` under the same paths.
        address: the cluster's, `HOST:PORT`; default RAY_ADDRESS, or the one that this machine is a node of.
        on_start: called with (bytes that the dataset will take, bytes free), before the work.
        on_progress: called with (pictures done, pictures in all), a few times a second.
        named: options by their names, `image="photo", label="species"`, beside or instead of `options`.

    Raises:
        SourceError: no such source, one without pictures, or one that changes during the conversion.
        DatasetError: the destination holds something else, is being written by another process,
            cannot be written or is too small; or too many pictures are rejected.
        SettingError: a value is out of range, source and destination overlap, there is no cluster at
            `address`, or the versions on its nodes differ.
        WorkerError: a worker process died.
        MissingDependencyError: an extra is not installed.
    """
    start_s = time.perf_counter()
    check_share("max_rejects", max_rejects)
    if update and overwrite:
        raise SettingError("update and overwrite cannot be combined; give one")
    options = replace(options or SourceOptions(), **named)
    destination = locate(destination)
    if engine == "local" and workers is None and isinstance(destination, Url):
        workers = 2 * engines.available_cpus()  # half of them wait for the storage
    elif engine == "local" or workers is not None:
        workers = engines.worker_count(workers)
    source = locate(source) if isinstance(source, str | bytes | os.PathLike) else source
    with engines.connected(engine, address):
        opened, scan, recipe, options = _scanned(source, recipe, options, split_list)
        job = _Job(
            scan,
            plan_conversion(scan.samples, recipe),
            Target(recipe, scan.digest, made_by()),
            engine,
            workers,
            math.ceil(max_rejects * len(scan.samples)),
            engines.mark_callback_errors(on_start),
            on_progress,
            options,
        )
        with _tells_of_faults(destination):
            if isinstance(destination, Url):
                check_writable(destination)
                check_apart(opened, destination)
                done = _convert_at(job, destination, overwrite, update)
            else:
                destination = resolve(destination)
                check_apart(opened, destination)
                if not lock_path(destination).exists():
                    # first, so that no lock file is put beside a folder that is not ours
                    check_empty(destination)
                with hold_lock(destination):
                    done = _convert(job, destination, overwrite, update)
    for gap in gaps(scan, done.manifest) if done.published else ():
        warn(f"{destination}: {gap}")
    if done.duplicates is not None and done.duplicates.in_splits:
        remedy = f"{shell_command('precache inspect', destination)} --duplicates duplicates.csv"
        unfair = "so that validation may see what training has seen"
        warn(f"{destination}: {done.duplicates}, {unfair}; list them: {remedy}")
    return replace(done, elapsed_s=time.perf_counter() - start_s, nodes=job.nodes, deeper=scan.deeper)


def _scanned(
    source: Any,
    recipe: Recipe,
    options: SourceOptions,
    split_list: str | os.PathLike[str] | None,
) -> tuple[Source, Scan, Recipe, SourceOptions]:
    """The opened source and its scan, with the recipe and options completed by them."""
    opened = open_source(source, options)
    scan, options = prepared(opened.scan(), recipe, options)
    if options.boxes or scan.samples.fields:
        boxes.check(options.boxes, scan.samples.fields, masks=reader_of(scan.source) is not None)
    for warning in scan.warnings:
        warn(warning)
    warn_of_undecodable(scan)
    if split_list is not None:
        scan, recipe = apply_list(scan, recipe, split_list)
    elif recipe.has_split_list:
        raise SettingError(f"splits {recipe.splits!r} names a list file; pass the file as split_list")
    return opened, scan, recipe, options


@contextmanager
def _tells_of_faults(place: Location, how_much_is_kept: Callable[[], str] | None = None) -> Iterator[None]:
    """Make a DatasetError of what the disk raises, and say how much is kept, once something is converted."""
    try:
        with explain_interruption(how_much_is_kept) if how_much_is_kept else nullcontext():
            yield
    except OSError as error:
        if engines.is_callback_error(error):
            raise
        check_open_files(error, error.filename)
        remedy = "make room or fix permissions"
        remedy = (
            f" {how_much_is_kept()}; {remedy} first"
            if how_much_is_kept
            else f"; {remedy}, then run the same command again"
        )
        raise DatasetError(
            f"{error.filename or place}: cannot be written ({os_reason(error)}){remedy}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Job:
    """Arguments of a conversion; `limit`: the most rejects; `nodes`: filled while it runs."""

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


def _convert(job: _Job, destination: Path, overwrite: bool, update: bool) -> Conversion:
    """Convert into the locked destination, unless the dataset is there."""
    finish_swap(destination)
    if not is_converted(destination):
        warn_of_build(destination)
        return _carry_out(job, FilesInFolder(destination), overwrite)
    remove_rest(destination)
    if overwrite:
        check_may_be_replaced(destination)
        folder = build_folder(destination)
        done = _carry_out(job, FilesInFolder(folder), overwrite)
        swap_in(destination, folder)
        return done
    warn_of_build(destination)
    if update:
        return _update(job, destination)
    manifest = check_finished(destination, job.scan, job.target, job.options, job.limit)
    return Conversion(manifest, 0, published=False)


def _update(job: _Job, destination: Path) -> Conversion:
    """Add to the dataset in `destination` what is new in the source, and mark what is gone."""
    dataset = open_dataset(destination)
    check_files(dataset)
    update = plan_update(dataset, job.scan, job.target.recipe, job.options)
    if update is None:
        return Conversion(dataset.manifest, 0, published=False)
    job = replace(
        job,
        scan=update.difference.scan,
        plan=update.plan,
        target=update.target,
        rejected=update.rejected,
    )
    return _carry_out(job, FilesInFolder(destination, dataset.manifest.own_names), update=update)


def _convert_at(job: _Job, url: Url, overwrite: bool, update: bool) -> Conversion:
    """As `_convert`, into an object storage, see `precache.conversion.url`."""
    with locked_working_folder(url) as folder:
        if is_converted(url):
            refuse_change(url, overwrite=overwrite, update=update)
            manifest = check_finished(url, job.scan, job.target, job.options, job.limit)
            remove_if_same(folder, job.target)
            return Conversion(manifest, 0, published=False)
        return _carry_out(job, FilesAtUrl(url, folder), overwrite)


def _carry_out(
    job: _Job, files: FilesInFolder | FilesAtUrl, overwrite: bool = False, update: UpdatePlan | None = None
) -> Conversion:
    """Write what is missing of a conversion, or an update, and commit it."""
    with (
        Journal(files, job.target, job.plan, job.scan, overwrite=overwrite) as journal,
        _tells_of_faults(files.folder, journal.how_much_is_kept),
    ):
        for name in update.dataset.manifest.replaced_files if update else ():  # by an earlier update
            (files.folder / name).unlink(missing_ok=True)
        converted = _write_shards(job, journal)
        contents = _gather(job, journal.finished)
        if update is not None:
            contents = _add_to_dataset(update, contents)
            if update.dataset.manifest.rejected and not contents.rejected:
                (files.folder / REJECTED_NAME).unlink(missing_ok=True)
        manifest, duplicates = _write_dataset(job, contents, files.folder)
        if isinstance(files, FilesAtUrl):
            files.publish(manifest)
        else:
            journal.remove()
    return Conversion(manifest, converted, published=True, duplicates=duplicates)


def _write_shards(job: _Job, journal: Journal) -> int:
    """Write the shards that are not on record yet; the number of pictures converted by this call.

    Raises:
        DatasetError: the disk cannot take them, too many pictures are rejected, or shards were changed
            meanwhile.
    """
    samples = job.scan.samples
    waiting = [shard for shard in job.plan.shards if shard.name not in journal.finished]
    at_a_time = engines.worker_count(job.workers) if isinstance(journal.files.place, Url) else None
    check_disk_space(job.scan, job.target.recipe, waiting, journal.files.folder, job.on_start, at_a_time)
    total = len(samples)
    report = engines.progress_counter(
        job.on_progress, total, total - sum(len(shard.rows) for shard in waiting)
    )
    report(0)
    converted = 0
    rejected = [*job.rejected, *(s for shard in journal.finished.values() for s in shard.rejected)]
    _check_rejects(journal.files.place, rejected, job.limit)
    tasks = (  # one after another: a task holds the paths of its pictures
        ShardTask(
            shard.name,
            shard.split,
            tuple(samples[row] for row in shard.rows),
            journal.files.place,
            job.target.recipe,
        )
        for shard in waiting
    )
    workers = None if job.workers is None else min(job.workers, len(waiting))
    source, run = job.scan.source, engines.ENGINES[job.engine]
    write = partial(write_shard, source)
    first = [samples[int(shard.rows[0])] for shard in waiting[:1]]
    read = partial(read_first, source, first)
    with (
        engines.nodes_of(job.engine, journal.files.place, JOURNAL_NAME, read) as nodes,
        closing(run(write, tasks, workers, report, finish=finish_shard, nodes=nodes)) as finished,
    ):
        for shard in finished:
            journal.record(shard)
            converted += shard.entry.samples
            rejected += shard.rejected
            _check_rejects(journal.files.place, rejected, job.limit)
    job.nodes.update(nodes.units_per_s)
    if isinstance(journal.files, FilesInFolder):  # at a URL they are compared when the manifest is put
        journal.files.check_whole(journal.finished.values())
    return converted


def _check_rejects(place: Location, rejected: Sequence[Rejected], limit: int) -> None:
    """Raise DatasetError if more than `limit` pictures are rejected."""
    if len(rejected) > limit:
        undecoded = [one for one in rejected if kind_without_decoder(one.reason)]
        if undecoded:
            raise DatasetError(
                f"{place}: stopped, for {undecoded[0].path} {undecoded[0].reason}; "
                f"{too_many_rejected(len(rejected), limit)}, {len(undecoded):,} of them for want of a "
                f"decoder; install it and pass --overwrite, or leave them out with a higher --max-rejects"
            )
        raise DatasetError(
            f"{place}: stopped, {too_many_rejected(len(rejected), limit)}; first: {rejected[0].path}, "
            f"{rejected[0].reason}; repair or remove them and pass --overwrite, or leave them "
            f"out with a higher --max-rejects"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Contents:
    """What a dataset holds, as its index and its manifest will say it.

    Attributes:
        index: of all samples, in the order of the shards.
        shards: those that hold samples.
        statistics: of the splits whose pixels are all known.
        rejected: pictures of the source, in any order.
        source_checksums: uint64 [n] of the samples of the scan; 0 of a picture that was not read.
        made_by: versions of the software that wrote its first shards.
        next_id: greater than every id that was ever used.
        updates: all so far.
    """

    index: SampleIndex
    shards: list[ShardEntry]
    statistics: dict[str, ChannelStatistics]
    rejected: list[Rejected]
    source_checksums: Checksums
    made_by: dict[str, str]
    next_id: int
    updates: tuple[Update, ...] = ()


def _gather(job: _Job, written: Mapping[str, WrittenShard]) -> _Contents:
    """Put together what the scan, and the written shards of the plan, by name, say of their samples."""
    samples, recipe = job.scan.samples, job.plan.recipe
    shards = [written[shard.name] for shard in job.plan.shards]
    rows = np.concatenate([np.empty(0, np.int64), *(shard.rows for shard in job.plan.shards)])
    columns = {
        name: np.concatenate([shard.columns[name] for shard in shards])
        for name in (shards[0].columns if shards else ())
    }
    rejected = list(chain.from_iterable(shard.rejected for shard in shards))
    filled = [shard for shard in shards if shard.entry.samples]
    checksums = np.zeros(len(samples), np.uint64)
    checksums[rows] = columns.get(SOURCE_CHECKSUMS, ())
    return _Contents(
        index=_indexed(samples, rows, columns, rejected, recipe),
        shards=[shard.entry for shard in filled],
        statistics=statistics_by_split(((shard.entry.split, shard.sums) for shard in filled), recipe.dtype),
        rejected=rejected,
        source_checksums=checksums,
        made_by=job.target.made_by,
        next_id=int(samples.ids.max(initial=-1)) + 1,
    )


def _add_to_dataset(update: UpdatePlan, added: _Contents) -> _Contents:
    """Put what an update added behind what the dataset holds, and mark what is gone as removed."""
    before, difference = update.dataset.manifest, update.difference
    known = difference.known
    gone = known.rows[difference.gone]
    removed = ~known.index.served
    removed[gone[gone >= 0]] = True
    index = known.index if not len(added.index) else known.index.join(added.index)
    if removed.any():
        flags = np.concatenate((removed, np.zeros(len(added.index), np.bool_)))
        index = index.with_columns({"removed": Column(flags.astype(np.uint8))})
    checksums = added.source_checksums.copy()
    checksums[difference.stays] = difference.state.checksums[difference.stay_as]
    update_done = Update(len(added.index), int((gone >= 0).sum()), update.target.made_by)
    return _Contents(
        index=index,
        shards=[*before.shards, *added.shards],
        statistics=_statistics_after(before, [shard.split for shard in added.shards], added.statistics),
        rejected=[*added.rejected, *update.rejected],
        source_checksums=checksums,
        made_by=before.made_by,
        next_id=difference.next_id,
        updates=(*before.updates, update_done),
    )


def _write_dataset(job: _Job, contents: _Contents, folder: Path) -> tuple[Manifest, Duplicates]:
    """Check that the counts add up, then write the index and, last, the manifest.

    Raises:
        DatasetError: the counts do not add up, or there is no picture.
    """
    scan, recipe, samples, index = job.scan, job.plan.recipe, job.scan.samples, contents.index
    _check_counts(scan, int(index.served.sum()), contents.rejected)
    rejected = tuple(sorted(contents.rejected, key=lambda picture: picture.id))
    by_id = np.argsort(samples.ids)
    state = SourceState(
        samples.file_bytes[by_id], samples.modified_ns[by_id], contents.source_checksums[by_id]
    )
    ignored = tuple((ignored.path, ignored.reason) for ignored in scan.ignored)
    table = ShardTable.of(contents.shards, FORMATS[recipe.format])
    table = replace(table, largest=_largest(index, table))
    others = {**table.arrays(), **state.arrays(), **left_out_arrays(rejected, ignored)}
    split_of = np.repeat(table.splits, table.samples)
    removed = np.bincount(split_of[~index.served], minlength=len(table.split_names)).tolist()
    # a converted dataset that was updated has ids of its own
    has_own_ids = contents.updates or contents.next_id > scan.scanned
    manifest = Manifest(
        recipe=recipe,
        made_by=contents.made_by,
        source_digest=scan.digest,
        source_bytes=int(samples.file_bytes.clip(0).sum()),
        classes=scan.classes,
        samples_per_class=_count_classes(scan, table, index),
        shards=table,
        index=write_index(folder, index, others, len(contents.updates)),
        scanned=scan.scanned,
        rejected=rejected,
        ignored=ignored,
        source_options=job.options.given(),
        target=scan.target,
        fields={name: column.kind for name, column in index.fields.items()},
        statistics=contents.statistics,
        next_id=contents.next_id if has_own_ids else 0,
        updates=contents.updates,
        removed={split: n for split, n in zip(table.split_names, removed, strict=True) if n},
    )
    write_rejected(folder, manifest.rejected)
    write_manifest(folder, manifest)
    return manifest, find_duplicates(index, split_of)


def _indexed(
    samples: Samples, rows: Ints, columns: Mapping[str, Array], rejected: Sequence[Rejected], recipe: Recipe
) -> SampleIndex:
    """The samples at `rows` as indexed: what the scan knows of them, and the columns of what was written."""
    kept = ~np.isin(samples.ids[rows], [picture.id for picture in rejected])
    scanned = samples.select(rows[kept])
    found = {
        "ids": Column(scanned.ids),
        "labels": Column(scanned.labels),
        "paths": Column(np.frombuffer(scanned.paths, np.uint8), scanned.path_ends),
        **{f"{VALUE}{name}": column for name, column in scanned.fields.items()},
    }
    if scanned.targets is not None:
        found["targets"] = scanned.targets
    if not columns:
        return SampleIndex(found)
    found |= {name: Column(columns[name]) for name in ("source_sizes", "checksums")}
    if recipe.stored_size is None:
        found["shapes"] = Column(_stored_shapes(columns["source_sizes"], recipe))
    if len(columns["mask_checksums"]):
        found["mask_checksums"] = Column(columns["mask_checksums"])
    return SampleIndex(found)


def _statistics_after(
    before: Manifest, added: Sequence[str], statistics: Mapping[str, ChannelStatistics]
) -> dict[str, ChannelStatistics]:
    """Of each split after an update, which `added` shards to some; none of one that has pictures without."""
    known = {**before.statistics}
    for split in dict.fromkeys(added):
        had, got = known.pop(split, None), statistics.get(split)
        if got is not None and had is not None:
            got = had.joined(got)
        elif split in before.samples_per_class:
            got = None
        if got is not None:
            known[split] = got
    return known


def _largest(index: SampleIndex, table: ShardTable) -> Sizes | None:
    """int32 [shards, 2]: the greatest height and width of what each shard stores, where they vary."""
    if index.shapes is None:
        return None
    starts = np.cumsum(table.samples) - table.samples
    return np.maximum.reduceat(index.shapes, starts, axis=0)


def _check_counts(scan: Scan, written: int, rejected: Sequence[Rejected]) -> None:
    if scan.scanned != written + len(rejected) + len(scan.ignored):
        raise DatasetError(
            f"{scan.root}: {scan.scanned:,} files scanned, but {written:,} converted, {len(rejected):,} "
            f"rejected and {len(scan.ignored):,} ignored; this is a bug; please report it"
        )
    if not written:
        raise DatasetError(
            f"{scan.root}: none of its {len(scan.samples):,} pictures can be converted; "
            f"the first one, {rejected[0].path}, {rejected[0].reason}"
        )


def _stored_shapes(source_sizes: Sizes, recipe: Recipe) -> Sizes:
    """int32 [n, 2]: height and width of what is stored of pictures of these sizes."""
    how = recipe.rendering
    fitted = (images.fitted_size(int(width), int(height), how) for width, height in source_sizes)
    sides = np.fromiter(chain.from_iterable(fitted), np.int32, 2 * len(source_sizes))
    return sides.reshape(-1, 2)[:, ::-1]


def _count_classes(scan: Scan, shards: ShardTable, index: SampleIndex) -> dict[str, tuple[int, ...]]:
    """Split -> number of samples of each class; `index` is of all samples of `shards`."""
    counts = {}
    for split in shards.split_names:
        rows = np.repeat(shards.of_split(split), shards.samples) & index.served
        labels = index.labels[rows]
        if scan.target == "classes" and index.targets is not None:
            labels = index.targets.select(rows).values
        elif scan.target != "class":
            labels = labels[:0]
        counts[split] = tuple(np.bincount(labels, minlength=len(scan.classes)).tolist())
    return counts
