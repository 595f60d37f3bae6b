"""Convert a source of pictures: scan, plan, write shards, commit the manifest.

What a kill leaves behind, and what the same command then does:

    killed while                      there is                          the next run
    it scans and plans                nothing                           begins
    shards are written, or renamed    conversion.json, files of         writes each shard without a sidecar; a
                                      shards, sidecars of some          tar, or its .idx, is replaced
    index and manifest are written    all sidecars, no manifest         writes both again
    sidecars are removed              a dataset, and conversion.json    removes the rest, conversion.json last

A shard is finished once its sidecar is there, the last of its files. So a kill costs each worker the shard
that it is at: at most `Recipe.shard_bytes`, by default 64 MiB, or 83 photographs of the default size. The
manifest is written last. `precache.conversion.destination` describes the same for `--overwrite`.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from precache import engines
from precache.conversion.destination import (
    begin,
    check_empty,
    check_finished,
    check_may_be_replaced,
    describe_rejects,
    finish_overwrite,
    is_settled,
    overwrite_folders,
    remove_leftover_traces,
    remove_traces,
    resolve,
    swap_in,
    warn_of_unfinished_overwrite,
)
from precache.conversion.shard_writer import (
    ShardTask,
    check_disk_space,
    check_node,
    write_shard,
)
from precache.dataset.columns import Column
from precache.dataset.duplicates import Duplicates, find_duplicates
from precache.dataset.files import file_problem, first_problem
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
from precache.dataset.manifest import Manifest, is_converted, write_manifest
from precache.dataset.shard_table import ShardEntry, ShardTable
from precache.dataset.statistics import statistics_by_split
from precache.dataset.unfinished import (
    MODIFIED_NS,
    RUN_AGAIN,
    SOURCE_CHECKSUMS,
    Inputs,
    Sidecar,
    UnfinishedConversion,
    read_sidecar,
    sidecar_path,
)
from precache.errors import (
    DatasetError,
    SettingError,
    as_typed,
    check_share,
    shell_command,
)
from precache.formats import FORMATS
from precache.pictures.kinds import decoder_versions, is_decodable_now, kind_without_decoder
from precache.plan import ConvertPlan, ShardPlan, plan_conversion
from precache.recipe import DEFAULT_MAX_REJECTS, DEFAULT_SPLITS, Recipe, format_flags, parse_splits
from precache.reporting import (
    Progress,
    abridge,
    explain_failed_writing,
    explain_interruption,
    mark_callback_errors,
    no_progress,
    nothing_lost_message,
    progress_counter,
    quantity,
    warn,
)
from precache.sources import Source, SourceOptions, open_source
from precache.sources.base import (
    Samples,
    Scan,
    changed_pictures,
    check_no_overlap,
    paths_overlap,
    prepare_scan,
    warn_of_undecodable,
)
from precache.sources.splits import apply_list
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
        # before pictures are left out: it is a share of the source's
        max_rejected = math.ceil(as_typed(max_rejects) * len(scan.samples))
        if options.without:
            scan = leave_out(scan, options.without)
        warn_of_undecodable(scan)
        plan = plan_conversion(scan.samples, recipe)
        description = UnfinishedConversion(
            inputs=Inputs(recipe, scan.digest, decoder_versions()),
            shards=dict(Counter(shard.split for shard in plan.shards)),
            pictures=len(scan.samples),
            source=_source_word(source),
            flags=_flags(recipe, options, split_list, max_rejects),
        )
        with explain_failed_writing(folder, "make room or fix permissions, then run the same command again"):
            folder = resolve(folder)
            check_no_overlap(opened, folder)
            job = _Job(
                scan=scan,
                plan=plan,
                destination=folder,
                description=description,
                engine=engine,
                workers=workers,
                overwrite=overwrite,
                max_rejected=max_rejected,
                on_start=mark_callback_errors(on_start),
                on_progress=on_progress,
                on_wait=on_wait,
                options=options,
            )
            result = _convert_into_destination(job)
    if result.published:
        for warning in _split_warnings(scan, result.manifest):
            warn(f"{folder}: {warning}")
    if result.duplicates is not None and result.duplicates.in_splits:
        command = f"{shell_command('precache inspect', folder)} --duplicates duplicates.csv"
        warn(
            f"{folder}: {result.duplicates}, so that validation may see what training has seen; "
            f"list them: {command}"
        )
    return replace(result, elapsed_s=time.perf_counter() - start_s, deeper=scan.deeper)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Arguments of a conversion.

    Attributes:
        destination: DST; `--overwrite` writes into another folder first.
        description: content of its `conversion.json`.
        max_rejected: most pictures that may be rejected.
    """

    scan: Scan
    plan: ConvertPlan
    destination: Path
    description: UnfinishedConversion
    engine: str
    workers: int | None
    overwrite: bool
    max_rejected: int
    on_start: Callable[[int, int], None]
    on_progress: Progress
    on_wait: Callable[[], None] | None
    options: SourceOptions


def _convert_into_destination(job: _Job) -> Conversion:
    """Convert into the job's destination, unless the dataset is there."""
    destination = job.destination
    if is_settled(destination) and not job.overwrite:
        # without the lock, so that many processes look at once, also where they may not write
        return _take_finished(job)
    if not lock_path(destination).exists():
        # before the lock, so that no lock file is put beside somebody else's folder
        check_empty(destination)
    with hold_lock(destination, on_wait=job.on_wait):
        swapped = finish_overwrite(destination)
        if not is_converted(destination):
            warn_of_unfinished_overwrite(destination)
            return _carry_out(job, destination)
        remove_leftover_traces(destination)
        if not job.overwrite:
            warn_of_unfinished_overwrite(destination)
            return _take_finished(job)
        if swapped:  # an earlier run of the same command may have finished it
            with suppress(DatasetError):
                return _take_finished(job)
        check_may_be_replaced(destination)
        new, _ = overwrite_folders(destination)
        result = _carry_out(job, new)
        swap_in(destination)
        return result


def _take_finished(job: _Job) -> Conversion:
    """Return the finished dataset; DatasetError unless it is what this command would make."""
    manifest = check_finished(job.destination, job.scan, job.description.inputs, job.max_rejected)
    return Conversion(manifest, 0, published=False)


def _carry_out(job: _Job, folder: Path) -> Conversion:
    """Write into `folder` the shards that a conversion still lacks, and commit it."""
    job = replace(job, description=begin(folder, job.description, overwrite=job.overwrite))
    finished = _find_finished(job, folder)

    def describe_kept() -> str:
        return _kept_message(job, finished)

    with (
        explain_failed_writing(job.destination, "make room or fix permissions first", describe_kept),
        explain_interruption(describe_kept),
    ):
        converted, nodes = _write_shards(job, folder, finished)
        manifest, duplicates = _write_dataset(job, folder, finished)
        remove_traces(folder, job.description)
    return Conversion(manifest, converted, published=True, nodes=nodes, duplicates=duplicates)


def _find_finished(job: _Job, folder: Path) -> dict[str, Sidecar]:
    """Return the sidecars, by name, of the shards that are finished and still fit; warn of the others."""
    finished: dict[str, Sidecar] = {}
    problems: list[str] = []
    names = set(os.listdir(folder))
    for plan in job.plan.shards:
        if sidecar_path(folder, plan.name).name not in names:
            continue
        try:
            sidecar = read_sidecar(folder, plan.name, job.description.inputs.digest)
        except DatasetError as error:
            problems.append(error.without_remedy)
            continue
        if problem := _shard_problem(job.scan, folder, plan, sidecar):
            problems.append(problem)
        else:
            finished[plan.name] = sidecar
    if problems:
        warn(f"{problems[0]}; {quantity(len(problems), 'finished shard')} must be converted again")
    return finished


def _shard_problem(scan: Scan, folder: Path, plan: ShardPlan, sidecar: Sidecar) -> str | None:
    """Return why a finished shard must be converted again, in a phrase; None if it need not be."""
    times, checksums = sidecar.column(MODIFIED_NS), sidecar.column(SOURCE_CHECKSUMS)
    for path in changed_pictures(scan, plan.rows, times, checksums):
        return f"{path}: has changed since it was converted"
    for picture in _rejected_pictures(scan, plan, sidecar):
        if is_decodable_now(picture.reason):
            return f"{picture.path}: can be decoded now"
    for file in sidecar.files:
        problem = file_problem(folder, file)
        if problem is not None:
            return problem
    return None


def _rejected_pictures(scan: Scan, plan: ShardPlan, sidecar: Sidecar) -> list[Rejected]:
    """Return the pictures of the plan that the shard lacks."""
    refs = [(scan.samples[int(plan.rows[position])], reason) for position, reason in sidecar.rejected]
    return [Rejected(ref.path, reason, ref.id) for ref, reason in refs]


def _write_shards(job: _Job, folder: Path, finished: dict[str, Sidecar]) -> tuple[int, dict[str, float]]:
    """Write the shards that are not `finished`, and add their sidecars.

    Returns:
        Number of samples of these shards, and pictures per second of each node of a cluster, by its name.

    Raises:
        DatasetError: the disk cannot take them, too many pictures are rejected, or shards were changed
            meanwhile.
    """
    scan, digest = job.scan, job.description.inputs.digest
    waiting = {shard.name: shard for shard in job.plan.shards if shard.name not in finished}
    check_disk_space(scan, job.plan.recipe, list(waiting.values()), job.destination, job.on_start)
    total = len(scan.samples)
    waiting_pictures = sum(len(shard.rows) for shard in waiting.values())
    report = progress_counter(job.on_progress, total, total - waiting_pictures)
    report(0)
    converted = 0
    rejected = _all_rejected(job, finished)
    _check_rejects(job, rejected)
    tasks = (  # made one at a time, because a task holds the paths of its pictures
        ShardTask(shard.name, tuple(scan.samples[row] for row in shard.rows), folder, job.plan.recipe, digest)
        for shard in waiting.values()
    )
    workers = None if job.workers is None else min(job.workers, len(waiting))
    run = engines.ENGINES[job.engine]
    write = partial(write_shard, scan.source)
    first_samples = [scan.samples[int(shard.rows[0])] for shard in list(waiting.values())[:1]]
    check = partial(check_node, folder, digest, scan.source, first_samples)
    start_s, node_pictures = time.perf_counter(), Counter[str]()

    def count(pictures: int, node: str = "") -> None:
        node_pictures[node] += pictures
        report(pictures)

    with closing(run(write, tasks, workers, count, check=check)) as names:
        for name in names:
            sidecar = finished[name] = read_sidecar(folder, name, digest)
            converted += sidecar.samples
            rejected += _rejected_pictures(scan, waiting[name], sidecar)
            _check_rejects(job, rejected)
    elapsed_s = time.perf_counter() - start_s
    if problem := first_problem(folder, (file for sidecar in finished.values() for file in sidecar.files)):
        raise DatasetError(problem, remedy=RUN_AGAIN)
    return converted, {node: pictures / elapsed_s for node, pictures in node_pictures.items() if node}


def _all_rejected(job: _Job, finished: Mapping[str, Sidecar]) -> list[Rejected]:
    """Return the pictures that the finished shards lack, in the order of the plan."""
    shards = (shard for shard in job.plan.shards if shard.name in finished)
    return list(
        chain.from_iterable(_rejected_pictures(job.scan, shard, finished[shard.name]) for shard in shards)
    )


def _check_rejects(job: _Job, rejected: Sequence[Rejected]) -> None:
    """Raise DatasetError if more pictures are rejected than may be."""
    if len(rejected) <= job.max_rejected:
        return
    number = describe_rejects(len(rejected), job.max_rejected)
    undecoded = [picture for picture in rejected if kind_without_decoder(picture.reason)]
    if undecoded:
        raise DatasetError(
            f"stopped, for {undecoded[0].path} {undecoded[0].reason}; "
            f"{number}, {len(undecoded):,} of them for want of a decoder",
            path=job.destination,
            remedy="install it and pass --overwrite, or leave them out with a higher --max-rejects",
        )
    raise DatasetError(
        f"stopped, {number}; first: {rejected[0].path}, {rejected[0].reason}",
        path=job.destination,
        remedy="repair or remove them and pass --overwrite, or leave them out with a higher --max-rejects",
    )


def _write_dataset(job: _Job, folder: Path, finished: Mapping[str, Sidecar]) -> tuple[Manifest, Duplicates]:
    """Combine the scan with the sidecars of all shards, by name; write the index and, last, the manifest.

    Raises:
        DatasetError: there is no picture; or pictures were lost, which is a bug.
    """
    scan, recipe, samples = job.scan, job.plan.recipe, job.scan.samples
    sidecars = [finished[shard.name] for shard in job.plan.shards]
    scan_rows = np.concatenate([shard.rows for shard in job.plan.shards])
    columns = {
        name: np.concatenate([sidecar.column(name) for sidecar in sidecars]) for name in sidecars[0].columns
    }
    rejected = tuple(sorted(_all_rejected(job, finished), key=lambda picture: picture.id))
    index = _make_index(samples, scan_rows, columns, rejected, recipe)
    if not len(index):
        remove_traces(folder, job.description)  # nothing was finished, so a repaired source may begin anew
        if folder != job.destination:  # the hidden one of --overwrite, in which files of the user's may be
            with suppress(OSError):
                folder.rmdir()
                folder.parent.rmdir()
        raise DatasetError(
            f"none of its {len(samples):,} pictures can be converted; the first one, {rejected[0].path}, "
            f"{rejected[0].reason}",
            path=scan.root,
        )
    _check_none_is_lost(scan, len(index) + len(rejected))
    source_checksums = np.empty(len(samples), np.uint64)
    source_checksums[scan_rows] = columns[SOURCE_CHECKSUMS]
    source_columns = {MODIFIED_NS: samples.modified_ns, SOURCE_CHECKSUMS: source_checksums}
    ignored = tuple((ignored.path, ignored.reason) for ignored in scan.ignored)
    filled = [
        (plan.split, sidecar)
        for plan, sidecar in zip(job.plan.shards, sidecars, strict=True)
        if sidecar.samples
    ]
    entries = (ShardEntry(sidecar.shard, split, sidecar.samples, sidecar.files) for split, sidecar in filled)
    table = ShardTable.from_entries(entries, FORMATS[recipe.format])
    table = replace(table, largest=_largest_sizes(index, table))
    other_arrays = {**table.arrays(), **source_columns, **left_out_arrays(rejected, ignored)}
    manifest = Manifest(
        recipe=recipe,
        counts=Counts(len(index), len(rejected), len(ignored), len(table)),
        made_by=job.description.inputs.made_by,
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
        statistics=statistics_by_split((split, sidecar.sums) for split, sidecar in filled),
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
    index |= {name: Column(columns[name]) for name in ("source_sizes", "checksums", "byte_ranges")}
    if recipe.stored_size is None:
        index["shapes"] = Column(columns["shapes"])
    return SampleIndex(index)


def _largest_sizes(index: SampleIndex, table: ShardTable) -> Sizes | None:
    """Return int32 [shards, 2]: the greatest stored height and width in each shard; None if all are alike."""
    if index.shapes is None:
        return None
    return np.maximum.reduceat(index.shapes, table.starts, axis=0)


def _check_none_is_lost(scan: Scan, pictures: int) -> None:
    if scan.scanned != pictures + len(scan.ignored):
        raise DatasetError(
            f"{scan.scanned:,} files scanned, but {pictures:,} converted or rejected, and "
            f"{len(scan.ignored):,} ignored; this is a bug",
            path=scan.root,
            remedy="please report it",
        )


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


def _split_warnings(scan: Scan, manifest: Manifest) -> list[str]:
    """Return warnings of splits, or classes of a split, that got no picture in the conversion of `scan`."""
    samples, warnings = scan.samples, []
    labels = samples.labels if samples.targets is None else samples.targets.values
    numbers = np.unique(labels[labels >= 0]).tolist() if manifest.classes else []
    source_classes = {scan.classes[number] for number in numbers}
    source_has_splits = samples.split_names != ("",)
    user_has_splits = source_has_splits or manifest.recipe.splits != DEFAULT_SPLITS
    remedy = "precache inspect says what was rejected"
    if user_has_splits:
        remedy = f"--splits says what goes where, and {remedy}"
    for split in samples.split_names if source_has_splits else parse_splits(manifest.recipe.splits):
        if not manifest.split_samples.get(split):
            warnings.append(f"split {split} has no picture; {remedy}")
            continue
        counts = zip(manifest.classes, manifest.samples_per_class[split], strict=True)
        missing = [name for name, count in counts if not count and name in source_classes]
        if missing and user_has_splits:
            number = quantity(len(missing), "class", "classes")
            warnings.append(
                f"split {split} has no picture of {number} of {len(source_classes):,}: {abridge(missing)}; "
                f"{remedy}"
            )
        elif missing:
            noun, verb = ("class", "has") if len(missing) == 1 else ("classes", "have")
            warnings.append(f"{noun} {abridge(missing)} {verb} no picture left; {remedy}")
    return warnings


def _kept_message(job: _Job, finished: Mapping[str, Sidecar]) -> str:
    """Return the part of an interruption's message that says how many pictures are kept."""
    done = sum(len(shard.rows) for shard in job.plan.shards if shard.name in finished)
    if not done:
        return "before the first shard was finished; nothing is kept, and the same command starts again"
    return (
        f"after {done:,} of {quantity(len(job.scan.samples), 'picture')} were finished; these are kept, and "
        f"the same command continues with the rest"
    )


def _source_word(source: Any) -> str:
    """Return the source as a word of a command; empty for a dataset in memory."""
    return shell_command(Path(_absolute_path(source))) if isinstance(source, (str, os.PathLike)) else ""


def _flags(
    recipe: Recipe, options: SourceOptions, split_list: str | os.PathLike[str] | None, max_rejects: float
) -> str:
    """Return the flags of the command that goes on, in any working folder."""
    values = options.to_json()
    for name in {"root", "ids"} & values.keys():
        values[name] = _absolute_path(values[name])
    if "without" in values:
        values["without"] = [_absolute_path(path) for path in values["without"]]
    flags = [recipe.to_flags()]
    if split_list is not None:
        flags = [replace(recipe, splits=DEFAULT_SPLITS).to_flags()]
        flags.append(shell_command("--splits", Path(_absolute_path(split_list))))
    flags.append(format_flags(values))
    if max_rejects != DEFAULT_MAX_REJECTS:
        flags.append(f"--max-rejects {float(as_typed(max_rejects))}")
    return " ".join(filter(None, flags))


def _absolute_path(path: str | os.PathLike[str]) -> str:
    """Return the path, to be used in any working folder."""
    return os.path.abspath(os.path.expanduser(os.fsdecode(path)))
