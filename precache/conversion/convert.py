"""Convert a source of pictures: scan, plan, write shards, commit the manifest.

What a kill leaves behind, and what the same command then does:

    killed while                          there is                          the next run
    it scans and plans                    nothing                           begins
    shards are written, or renamed        the journal, finished shards,     writes the shards that the journal
                                          files under temporary names       does not have; removes the others'
    index and rejected.csv are written    all shards, no manifest           writes both again
    the manifest is renamed               the old state, or a dataset       goes on, or is done
    the journal is removed                a dataset and a journal           removes the journal

So only unfinished shards are lost: a shard is in the journal once all its files have their names, and the
manifest is written last. `precache.conversion.destination` describes the same for `--overwrite`.
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
    check_finished,
    check_may_be_replaced,
    describe_rejects,
    finish_swap,
    is_settled,
    remove_conversion_leftovers,
    resolve,
    swap_in,
    warn_of_unfinished_overwrite,
)
from precache.conversion.journal import (
    MODIFIED_NS,
    SOURCE_CHECKSUMS,
    Journal,
    Target,
    WrittenShard,
    check_empty,
)
from precache.conversion.shard_writer import (
    ShardTask,
    check_disk_space,
    check_source,
    finish_shard,
    write_shard,
)
from precache.dataset.columns import Column
from precache.dataset.converted import is_converted
from precache.dataset.duplicates import Duplicates, find_duplicates
from precache.dataset.index import (
    VALUE,
    Array,
    Counts,
    Ints,
    Rejected,
    SampleIndex,
    Sizes,
    left_out_arrays,
    write_index,
    write_rejected,
)
from precache.dataset.manifest import Manifest, write_manifest
from precache.dataset.shard_table import ShardTable
from precache.dataset.statistics import statistics_by_split
from precache.dataset.unfinished import JOURNAL_NAME
from precache.errors import (
    DatasetError,
    SettingError,
    as_typed,
    check_open_files,
    check_share,
    os_reason,
    shell_command,
)
from precache.formats import FORMATS
from precache.pictures import images
from precache.pictures.kinds import decoder_versions, kind_without_decoder
from precache.plan import ConvertPlan, plan_conversion
from precache.recipe import DEFAULT_MAX_REJECTS, Recipe
from precache.reporting import Progress, explain_interruption, no_progress, nothing_lost_message, warn
from precache.sources import Source, SourceOptions, open_source
from precache.sources.base import (
    Samples,
    Scan,
    check_no_overlap,
    paths_overlap,
    prepare_scan,
    warn_of_undecodable,
)
from precache.sources.splits import apply_list, split_warnings
from precache.sources.without import leave_out
from precache.storage.locks import hold_lock, lock_path
from precache.storage.urls import destination_path


@dataclass(frozen=True, slots=True)
class Conversion:
    """Result of one call of `convert`.

    Attributes:
        manifest: manifest of the finished dataset.
        converted: pictures written by this call; fewer than the manifest's after a resume.
        published: whether this call finished the dataset; False if it was already finished.
        elapsed_s: wall time of this call.
        nodes: with the engine `ray`, name -> pictures per second of each node that converted some.
        deeper: pictures of a source tree that lie in a folder of their class folder.
        duplicates: pictures of equal content; None if the dataset was already finished.
    """

    manifest: Manifest
    converted: int
    published: bool
    elapsed_s: float = 0.0
    nodes: dict[str, float] = field(default_factory=dict)
    deeper: int = 0
    duplicates: Duplicates | None = None


@explain_interruption(nothing_lost_message)
def convert(  # noqa: PLR0913 (choices of the caller, each given by keyword)
    source: Any,
    destination: str | os.PathLike[str],
    recipe: Recipe,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    max_rejects: float = DEFAULT_MAX_REJECTS,
    split_list: str | os.PathLike[str] | None = None,
    options: SourceOptions | None = None,
    engine: str = "local",
    address: str | None = None,
    on_start: Callable[[int, int], None] = lambda predicted, free: None,
    on_progress: Progress = no_progress,
    on_wait: Callable[[], None] | None = None,
    **named: Any,
) -> Conversion:
    """Convert the pictures of `source`, such as a raw tree, into the folder `destination` by `recipe`.

    A finished destination of the same source and recipe is left as it is; an unfinished one is
    continued. The bytes written depend on the pictures and the recipe, not on `workers` or `engine`.

    Args:
        source: a path, a dataset, or several as splits; see `precache.open_source`.
        destination: a folder.
        recipe: settings that change the bytes of the dataset.
        workers: processes; default one per CPU, 0 for the calling process. With the
            engine `ray`, shards at a time; default twice the CPUs of the cluster.
        overwrite: convert although the destination is finished: the new dataset is built beside
            it and takes its place at the end. An unfinished one of other settings is discarded.
        max_rejects: share of the source's pictures, 0 to 1, that may be undecodable, rounded up to whole
            pictures; with more, nothing is published.
        split_list: file of lines `path,split` that names the pictures to convert, and their splits
            (see `precache.sources.splits`).
        options: how to read the source, such as which column is the label, or which converted datasets hold
            pictures that are left out; see `precache.SourceOptions`.
        engine: `local`, processes of this machine; or `ray`, the nodes of a Ray cluster, all of which see
            `source` and `destination` under the same paths.
        address: `HOST:PORT` of the cluster; default RAY_ADDRESS, or the cluster that this machine belongs to.
        on_start: called with (bytes that are still to be written, bytes free), before the work.
        on_progress: called with (pictures done, pictures in all), a few times a second.
        on_wait: called every second while another process converts into the folder; None: this is an
            error.
        named: options by name, `image="photo", label="species"`, beside or instead of `options`.

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
    options = replace(options or SourceOptions(), **named)
    folder = destination_path(destination)
    for path in map(Path, options.without):
        if paths_overlap(path, folder):
            raise SettingError(f"--without {path} and {folder} overlap", remedy="choose another DST")
    if engine == "local" or workers is not None:
        workers = engines.worker_count(workers)
    with engines.engine_connection(engine, address):
        opened, scan, recipe = _open_and_scan(source, recipe, options, split_list)
        max_rejected = math.ceil(as_typed(max_rejects) * len(scan.samples))
        if options.without:
            scan = leave_out(scan, options.without)
        warn_of_undecodable(scan)
        job = _Job(
            scan=scan,
            plan=plan_conversion(scan.samples, recipe),
            target=Target(recipe, scan.digest, decoder_versions()),
            engine=engine,
            workers=workers,
            max_rejected=max_rejected,
            on_start=engines.mark_callback_errors(on_start),
            on_progress=on_progress,
            options=options,
            request={
                "source": _absolute_path(source),
                "split_list": None if split_list is None else _absolute_path(split_list),
                "options": _absolute_options(options),
                "max_rejects": float(as_typed(max_rejects)),
                "pictures": len(scan.samples),
            },
        )
        with _explain_faults(folder):
            folder = resolve(folder)
            check_no_overlap(opened, folder)
            conversion = _convert_into_folder(job, folder, overwrite, on_wait)
    if conversion.published:
        for warning in split_warnings(scan, conversion.manifest):
            warn(f"{folder}: {warning}")
    if conversion.duplicates is not None and conversion.duplicates.in_splits:
        command = f"{shell_command('precache inspect', folder)} --duplicates duplicates.csv"
        warn(
            f"{folder}: {conversion.duplicates}, so that validation may see what training has seen; "
            f"list them: {command}"
        )
    return replace(conversion, elapsed_s=time.perf_counter() - start_s, nodes=job.nodes, deeper=scan.deeper)


def _absolute_path(source: Any) -> str | None:
    """Return the path of a source, to be used in any working folder; None for a dataset in memory."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    return os.path.abspath(os.path.expanduser(os.fsdecode(source)))


def _absolute_options(options: SourceOptions) -> dict[str, Any]:
    """Return options as JSON values, with paths that may be used in any working folder."""
    values = options.to_json()
    for name in {"root", "ids"} & values.keys():
        values[name] = _absolute_path(values[name])
    if "without" in values:
        values["without"] = [_absolute_path(path) for path in values["without"]]
    return values


def _open_and_scan(
    source: Any,
    recipe: Recipe,
    options: SourceOptions,
    split_list: str | os.PathLike[str] | None,
) -> tuple[Source, Scan, Recipe]:
    """Open and scan the source, and complete the recipe by what it holds."""
    opened = open_source(source, options)
    scan = prepare_scan(opened.scan(), recipe)
    for warning in scan.warnings:
        warn(warning)
    if split_list is not None:
        scan, recipe = apply_list(scan, recipe, split_list)
    elif recipe.has_split_list:
        raise SettingError(
            f"splits {recipe.splits!r} names a list file", remedy="pass the file as split_list"
        )
    return opened, scan, recipe


@contextmanager
def _explain_faults(place: Path, describe_kept: Callable[[], str] | None = None) -> Iterator[None]:
    """Raise a DatasetError for an OSError of the block, and say what is kept in it or in an interruption.

    Args:
        place: the destination, which the error names unless the OSError names a file.
        describe_kept: returns what is kept, once a conversion has begun.
    """
    try:
        with explain_interruption(describe_kept) if describe_kept else nullcontext():
            yield
    except OSError as error:
        if engines.is_callback_error(error):
            raise
        check_open_files(error, error.filename)
        message = f"cannot be written ({os_reason(error)})"
        remedy = "make room or fix permissions, then run the same command again"
        if describe_kept is not None:
            message += f" {describe_kept()}"
            remedy = "make room or fix permissions first"
        raise DatasetError(message, path=error.filename or place, remedy=remedy) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Arguments of a conversion.

    Attributes:
        max_rejected: most pictures that may be rejected.
        request: what was asked for, see `precache.dataset.unfinished`.
        nodes: node -> pictures per second, filled while the conversion runs.
    """

    scan: Scan
    plan: ConvertPlan
    target: Target
    engine: str
    workers: int | None
    max_rejected: int
    on_start: Callable[[int, int], None]
    on_progress: Progress
    options: SourceOptions
    request: Mapping[str, Any]
    nodes: dict[str, float] = field(default_factory=dict)


def _convert_into_folder(
    job: _Job, destination: Path, overwrite: bool, on_wait: Callable[[], None] | None
) -> Conversion:
    """Convert into the folder, unless the dataset is there."""
    if is_settled(destination) and not overwrite:
        # without the lock, so that many processes look at once, also where they may not write
        manifest = check_finished(destination, job.scan, job.target, job.options, job.max_rejected)
        return Conversion(manifest, 0, published=False)
    if not lock_path(destination).exists():
        # before the lock, so that no lock file is put beside somebody else's folder
        check_empty(destination)
    with hold_lock(destination, on_wait=on_wait):
        return _convert_into_locked_folder(job, destination, overwrite)


def _convert_into_locked_folder(job: _Job, destination: Path, overwrite: bool) -> Conversion:
    finish_swap(destination)
    if not is_converted(destination):
        warn_of_unfinished_overwrite(destination)
        return _carry_out(job, destination, overwrite)
    remove_conversion_leftovers(destination)
    if overwrite:
        check_may_be_replaced(destination)
        folder = build_folder(destination)
        conversion = _carry_out(job, folder, overwrite)
        swap_in(destination, folder)
        return conversion
    warn_of_unfinished_overwrite(destination)
    manifest = check_finished(destination, job.scan, job.target, job.options, job.max_rejected)
    return Conversion(manifest, 0, published=False)


def _carry_out(job: _Job, folder: Path, overwrite: bool) -> Conversion:
    """Write the shards that a conversion still lacks, and commit it."""
    with (
        Journal(folder, job.target, job.plan, job.scan, request=job.request, overwrite=overwrite) as journal,
        _explain_faults(folder, journal.kept_message),
    ):
        converted = _write_shards(job, journal)
        manifest, duplicates = _write_dataset(job, journal.finished, folder)
        journal.remove()
    return Conversion(manifest, converted, published=True, duplicates=duplicates)


def _write_shards(job: _Job, journal: Journal) -> int:
    """Write the shards that the journal lacks, and return the number of pictures that this converted.

    Raises:
        DatasetError: the disk cannot take them, too many pictures are rejected, or shards were changed
            meanwhile.
    """
    samples = job.scan.samples
    waiting = [shard for shard in job.plan.shards if shard.name not in journal.finished]
    check_disk_space(job.scan, job.target.recipe, waiting, journal.folder, job.on_start)
    total = len(samples)
    report = engines.progress_counter(
        job.on_progress, total, total - sum(len(shard.rows) for shard in waiting)
    )
    report(0)
    converted = 0
    rejected = list(chain.from_iterable(shard.rejected for shard in journal.finished.values()))
    _check_rejects(journal.folder, rejected, job.max_rejected)
    tasks = (  # made one at a time, because a task holds the paths of its pictures
        ShardTask(
            shard.name,
            shard.split,
            tuple(samples[row] for row in shard.rows),
            journal.folder,
            job.target.recipe,
        )
        for shard in waiting
    )
    workers = None if job.workers is None else min(job.workers, len(waiting))
    source, run = job.scan.source, engines.ENGINES[job.engine]
    write = partial(write_shard, source)
    first_samples = [samples[int(shard.rows[0])] for shard in waiting[:1]]
    read = partial(check_source, source, first_samples)
    with (
        engines.prepare_nodes(job.engine, journal.folder, JOURNAL_NAME, read) as nodes,
        closing(run(write, tasks, workers, report, finish=finish_shard, nodes=nodes)) as written_shards,
    ):
        for shard in written_shards:
            journal.record(shard)
            converted += shard.entry.samples
            rejected += shard.rejected
            _check_rejects(journal.folder, rejected, job.max_rejected)
    job.nodes.update(nodes.units_per_s)
    journal.check_whole()
    return converted


def _check_rejects(place: Path, rejected: Sequence[Rejected], limit: int) -> None:
    """Raise DatasetError if more than `limit` pictures are rejected."""
    if len(rejected) <= limit:
        return
    undecoded = [picture for picture in rejected if kind_without_decoder(picture.reason)]
    if undecoded:
        raise DatasetError(
            f"stopped, for {undecoded[0].path} {undecoded[0].reason}; "
            f"{describe_rejects(len(rejected), limit)}, {len(undecoded):,} of them for want of a decoder",
            path=place,
            remedy="install it and pass --overwrite, or leave them out with a higher --max-rejects",
        )
    raise DatasetError(
        f"stopped, {describe_rejects(len(rejected), limit)}; first: {rejected[0].path}, {rejected[0].reason}",
        path=place,
        remedy="repair or remove them and pass --overwrite, or leave them out with a higher --max-rejects",
    )


def _write_dataset(
    job: _Job, written: Mapping[str, WrittenShard], folder: Path
) -> tuple[Manifest, Duplicates]:
    """Combine the scan with the written shards, by name; write the index and, last, the manifest.

    Raises:
        DatasetError: the counts do not add up, or there is no picture.
    """
    scan, recipe, samples = job.scan, job.plan.recipe, job.scan.samples
    shards = [written[shard.name] for shard in job.plan.shards]
    scan_rows = np.concatenate([shard.rows for shard in job.plan.shards])
    columns = {name: np.concatenate([shard.columns[name] for shard in shards]) for name in shards[0].columns}
    all_rejected = chain.from_iterable(shard.rejected for shard in shards)
    rejected = tuple(sorted(all_rejected, key=lambda picture: picture.id))
    index = _make_index(samples, scan_rows, columns, rejected, recipe)
    _check_counts(scan, len(index), rejected)
    source_checksums = np.empty(len(samples), np.uint64)
    source_checksums[scan_rows] = columns[SOURCE_CHECKSUMS]
    source_columns = {MODIFIED_NS: samples.modified_ns, SOURCE_CHECKSUMS: source_checksums}
    ignored = tuple((ignored.path, ignored.reason) for ignored in scan.ignored)
    filled = [shard for shard in shards if shard.entry.samples]
    table = ShardTable.from_entries((shard.entry for shard in filled), FORMATS[recipe.format])
    table = replace(table, largest=_largest_sizes(index, table))
    other_arrays = {**table.arrays(), **source_columns, **left_out_arrays(rejected, ignored)}
    manifest = Manifest(
        recipe=recipe,
        counts=Counts(len(index), len(rejected), len(ignored), len(table)),
        made_by=job.target.made_by,
        source_digest=scan.digest,
        source_bytes=int(samples.file_bytes.clip(0).sum()),
        classes=scan.classes,
        samples_per_class=_count_classes(scan, table, index),
        shards=table,
        index=write_index(folder, index, other_arrays),
        rejected=rejected,
        ignored=ignored,
        source_options=job.options.to_json(),
        target=scan.target,
        is_tree=scan.is_tree,
        fields={name: column.kind for name, column in index.fields.items()},
        statistics=statistics_by_split((shard.entry.split, shard.sums) for shard in filled),
    )
    write_rejected(folder, manifest.rejected)
    write_manifest(folder, manifest)
    return manifest, find_duplicates(index, np.repeat(table.splits, table.samples))


def _make_index(
    samples: Samples,
    scan_rows: Ints,
    columns: Mapping[str, Array],
    rejected: Sequence[Rejected],
    recipe: Recipe,
) -> SampleIndex:
    """Return the index of the samples at `scan_rows` that are not rejected.

    Args:
        scan_rows: int64 [n], rows of `samples`, in stored order.
        columns: values that writing the shards gave, by their names in the index.
    """
    is_stored = ~np.isin(samples.ids[scan_rows], [picture.id for picture in rejected])
    scanned = samples.select(scan_rows[is_stored])
    index = {
        "ids": Column(scanned.ids),
        "labels": Column(scanned.labels),
        "paths": Column(np.frombuffer(scanned.paths, np.uint8), scanned.path_ends),
        **{f"{VALUE}{name}": column for name, column in scanned.fields.items()},
    }
    if scanned.targets is not None:
        index["targets"] = scanned.targets
    index |= {name: Column(columns[name]) for name in ("source_sizes", "checksums")}
    if recipe.stored_size is None:
        index["shapes"] = Column(_stored_shapes(columns["source_sizes"], recipe))
    return SampleIndex(index)


def _largest_sizes(index: SampleIndex, table: ShardTable) -> Sizes | None:
    """Return int32 [shards, 2]: the greatest stored height and width in each shard; None if all are alike."""
    if index.shapes is None:
        return None
    return np.maximum.reduceat(index.shapes, table.starts, axis=0)


def _check_counts(scan: Scan, written: int, rejected: Sequence[Rejected]) -> None:
    if scan.scanned != written + len(rejected) + len(scan.ignored):
        raise DatasetError(
            f"{scan.scanned:,} files scanned, but {written:,} converted, {len(rejected):,} rejected and "
            f"{len(scan.ignored):,} ignored; this is a bug",
            path=scan.root,
            remedy="please report it",
        )
    if not written:
        raise DatasetError(
            f"none of its {len(scan.samples):,} pictures can be converted; the first one, "
            f"{rejected[0].path}, {rejected[0].reason}",
            path=scan.root,
        )


def _stored_shapes(source_sizes: Sizes, recipe: Recipe) -> Sizes:
    """Return the stored height and width, int32 [n, 2], of pictures of these widths and heights [n, 2]."""
    rendering = recipe.rendering
    fitted = (images.fitted_size(int(width), int(height), rendering) for width, height in source_sizes)
    sides = np.fromiter(chain.from_iterable(fitted), np.int32, 2 * len(source_sizes))
    return sides.reshape(-1, 2)[:, ::-1]


def _count_classes(scan: Scan, shards: ShardTable, index: SampleIndex) -> dict[str, tuple[int, ...]]:
    """Return split -> number of samples of each class; `index` holds all samples of `shards`."""
    counts = {}
    for split in shards.split_names:
        rows = np.repeat(shards.split_mask(split), shards.samples)
        labels = index.labels[rows]
        if scan.target == "classes" and index.targets is not None:
            labels = index.targets.select(rows).values
        elif scan.target != "class":
            labels = labels[:0]
        counts[split] = tuple(np.bincount(labels, minlength=len(scan.classes)).tolist())
    return counts
