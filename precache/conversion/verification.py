"""Verify a converted dataset: its files against its manifest, and its pictures against their source."""

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from precache import engines
from precache.conversion.destination import input_differences
from precache.conversion.shard_writer import make_stored_picture
from precache.dataset.converted import open_dataset
from precache.dataset.files import file_problem, object_problems
from precache.dataset.index import IndexFileError, SampleIndex
from precache.dataset.manifest import ManifestError
from precache.dataset.unfinished import Inputs
from precache.errors import DatasetError, ImageError
from precache.pictures.kinds import decoder_versions
from precache.recipe import Recipe, flag_name
from precache.reporting import Progress, no_progress, progress_counter
from precache.sources import Source, SourceOptions, open_source
from precache.sources.base import SampleRef, Samples, prepare_scan
from precache.sources.options import OptionNotTakenError
from precache.sources.without import take_converted
from precache.storage import checksum_of
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url

_TASK_PICTURES = 64


def verify(path: str | os.PathLike[str] | Url) -> list[str]:
    """Compare every file of the dataset in `path` with the manifest's sizes and checksums.

    The manifest has a checksum of its own. For a URL the bytes in the storage are read, not cached shards.

    Returns:
        One line per damaged or missing file; empty if every file is intact.

    Raises:
        DatasetError: `path` is not a converted dataset.
        StorageError: it is a URL, and the storage refuses or does not answer.
    """
    try:
        dataset = open_dataset(path)
    except (ManifestError, IndexFileError) as error:  # without them the other files are unknown
        return [error.without_remedy]
    files, location = dataset.manifest.files, dataset.location
    if isinstance(location, Url):
        problems = object_problems(ObjectStore(location), files)
    else:
        problems = (file_problem(location, file) for file in files)
    return [problem for problem in problems if problem is not None]


def verify_deep(
    path: str | os.PathLike[str] | Url,
    source: Any,
    *,
    root: str | None = None,
    workers: int | None = None,
    on_progress: Progress = no_progress,
) -> list[str]:
    """Convert every picture of `source` again, in memory, and compare its bytes with those that are stored.

    These are known by their checksums in the index; `verify` compares the files.

    Args:
        path: the converted dataset, a folder or a URL.
        source: the source that it was made from.
        root: folder that holds the pictures of a table now; default that of the conversion. A relative path
            begins in the working folder.
        workers: processes; default one per CPU, 0 for the calling process.
        on_progress: called with (pictures compared, pictures in all).

    Returns:
        One line per picture that differs; empty if there is none.

    Raises:
        DatasetError: not a converted dataset, or made from other pictures, labels or fields than `source` has
            now, or with other versions of the decoders.
        SourceError: `source` cannot be read.
    """
    workers = engines.worker_count(workers)
    dataset = open_dataset(path)
    manifest = dataset.manifest
    remedy = "name the source that it was made from, or convert again with --overwrite"
    options = SourceOptions.from_json(manifest.source_options)
    if root is not None:
        options = replace(options, root=root)
    try:
        opened = open_source(source, options)
    except OptionNotTakenError as error:
        if root is not None and error.option == "root":
            raise
        problem = f"was not made from {source}, but with {flag_name(error.option)}"
        raise DatasetError(f"{problem}, which is not for {error.kind}", path=path, remedy=remedy) from error
    scan = prepare_scan(opened.scan(), manifest.recipe)
    if options.without:
        scan = take_converted(scan, dataset)
    inputs = Inputs(manifest.recipe, scan.digest, decoder_versions())
    made_from = Inputs(manifest.recipe, manifest.source_digest, manifest.made_by)
    if differences := input_differences(inputs, made_from):
        reasons = "; ".join(differences)
        raise DatasetError(f"cannot be compared with {scan.root}: {reasons}", path=path, remedy=remedy)
    compare = partial(_compare_pictures, scan.source, manifest.recipe)
    tasks = _tasks(scan.samples, dataset.read_index())
    report = progress_counter(on_progress, manifest.samples)
    with closing(engines.run(compare, tasks, workers, report)) as results:
        return sorted(problem for problems in results for problem in problems)


@dataclass(frozen=True, slots=True)
class _Task:
    """Pictures of the source, and the checksum of what is stored of each."""

    refs: tuple[SampleRef, ...]
    checksums: tuple[int, ...]

    @property
    def name(self) -> str:
        """Name in error messages."""
        return self.refs[0].path


def _tasks(samples: Samples, index: SampleIndex) -> Iterator[_Task]:
    """Yield the samples of the index in tasks, in their stored order."""
    row_of = {sample_id: row for row, sample_id in enumerate(samples.ids.tolist())}
    for start in range(0, len(index), _TASK_PICTURES):
        stored = slice(start, start + _TASK_PICTURES)
        refs = tuple(samples[row_of[sample_id]] for sample_id in index.ids[stored].tolist())
        yield _Task(refs, tuple(index.checksums[stored].tolist()))


def _compare_pictures(source: Source, recipe: Recipe, task: _Task, tick: engines.Ticks) -> list[str]:
    """Convert the pictures of a task, in a worker, and return a line for each that differs."""
    problems, rendering = [], recipe.rendering
    for ref, checksum in zip(task.refs, task.checksums, strict=True):
        path = source.where(ref)
        try:
            data = source.read(ref, recipe.max_pixels)
            stored, *_ = make_stored_picture(data, path, recipe, rendering)
        except ImageError as error:
            problems.append(str(error))
        else:
            if checksum_of(stored) != checksum:
                problems.append(f"{path}: changed since it was converted as sample {ref.id}")
        tick()
    return problems
