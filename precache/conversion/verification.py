"""Verify a converted dataset: against its manifest, and against its source.

Against its source, each stored picture must be what the converter makes of it today: pixels, label, fields.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from precache import engines
from precache.dataset import columns
from precache.dataset.columns import Column, Ints
from precache.dataset.converted import ConvertedDataset, open_dataset
from precache.dataset.files import file_problem, object_problems
from precache.dataset.index import Checksums, IndexFileError, SampleIndex
from precache.dataset.manifest import ManifestError
from precache.dataset.shard_table import ShardEntry
from precache.errors import DatasetError, ImageError, SampleError, shell_command
from precache.formats import FORMATS, Sample, StoredSample
from precache.pictures import images, jpeg
from precache.pictures.images import Decoded
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import size_text
from precache.recipe import DEFAULT_SPLITS, Recipe, flag_name
from precache.reporting import Progress, no_progress, quantity, warn
from precache.sources import Source, SourceOptions, open_source
from precache.sources.base import (
    UNREADABLE,
    Paths,
    SampleRef,
    Samples,
    Scan,
    picture_checksum,
    prepare_scan,
)
from precache.sources.options import OptionNotTakenError
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url

JPEG_TOLERANCE_DB = 1.0
"""Allowed loss of PSNR of a stored JPEG against what the same encoder makes today."""


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
        return [str(error).rpartition("; ")[0]]
    files, place = dataset.manifest.files, dataset.place
    if isinstance(place, Url):
        problems = object_problems(ObjectStore(place), files)
    else:
        problems = (file_problem(place, file) for file in files)
    return [problem for problem in problems if problem is not None]


@dataclass(frozen=True, slots=True)
class DeepReport:
    """Result of `verify_deep`.

    Attributes:
        samples: number of samples that were compared.
        problems: one line per sample that is not what the converter makes of its source.
        equal: number of samples that equal the reference: Pillow's decode, the whole picture resized, then
            cropped.
        mean_psnr, worst_psnr: PSNR in dB of the other samples against the reference; infinite without others.
        worst: path of the worst sample in the source tree.
        holds_pixels: whether the format stores pixels, which must be exact; else JPEGs.
    """

    samples: int
    problems: tuple[str, ...]
    equal: int
    mean_psnr: float
    worst_psnr: float
    worst: str
    holds_pixels: bool

    def sentence(self, source: object) -> str:
        """Return the result in a sentence."""
        if self.problems:
            pictures = quantity(self.samples, "picture")
            differ = "differs" if len(self.problems) == 1 else "differ"
            return f"{len(self.problems):,} of {pictures} {differ} from what converting {source} gives"
        subject = "its picture is" if self.samples == 1 else f"all {self.samples:,} pictures are"
        others = self.samples - self.equal
        if not others:
            return f"{subject} exactly what converting {source} gives"
        psnr = f"mean {self.mean_psnr:.1f} dB, worst {self.worst_psnr:.1f} dB ({self.worst})"
        if self.holds_pixels:
            resized = f"{others:,} of them" if self.samples > 1 else "it"
            return (
                f"{subject} exactly what converting {source} gives. Pillow alone would resize {resized} "
                f"a little differently: {psnr}"
            )
        return (
            f"{subject} what converting {source} gives, within what JPEG compression of this quality "
            f"changes: {psnr}"
        )


def verify_deep(
    path: str | os.PathLike[str] | Url,
    source: Any,
    *,
    root: str | None = None,
    workers: int | None = None,
    on_progress: Progress = no_progress,
) -> DeepReport:
    """Decode every source picture again and compare it with the stored one.

    Pixels of `shards` must be equal; the PSNR of a JPEG must be that of the picture encoded again, less
    `JPEG_TOLERANCE_DB`.

    Args:
        path: the converted dataset, a folder or a URL.
        source: the source that it was made from.
        root: folder that holds the pictures of a table now; default that of the conversion. A relative path
            begins in the working folder.
        workers: processes; default one per CPU, 0 for the calling process.
        on_progress: called with (pictures compared, pictures in all).

    Raises:
        DatasetError: not a converted dataset, a damaged shard, or one of another source tree.
        SourceError: `source` is not an image tree.
    """
    workers = engines.worker_count(workers)
    dataset = open_dataset(path)
    manifest = dataset.manifest
    options = SourceOptions.from_json(manifest.source_options)
    if root is not None:
        options = replace(options, root=root)
    try:
        opened = open_source(source, options)
    except OptionNotTakenError as error:
        if root is not None and error.option == "root":
            raise
        raise DatasetError(
            f"was not made from {source}, but with {flag_name(error.option)}, which is not for {error.kind}",
            path=path,
            remedy="name the source that it was made from",
        ) from error
    scan, checksums = _match_scan(dataset, prepare_scan(opened.scan(), manifest.recipe))
    report = engines.progress_counter(on_progress, manifest.samples)
    tasks = _deep_tasks(dataset, scan, checksums)
    workers = min(workers, len(manifest.shards))
    with closing(engines.run(_Comparison(dataset, scan.source), tasks, workers, report)) as shards:
        compared = [picture for shard in shards for picture in shard]
    problems = sorted(picture.problem for picture in compared if picture.problem)
    finite = [picture.psnr for picture in compared if math.isfinite(picture.psnr)]
    worst = min(compared, key=lambda picture: (picture.psnr, picture.path))
    return DeepReport(
        samples=len(compared),
        problems=tuple(problems),
        equal=len(compared) - len(finite),
        mean_psnr=sum(finite) / len(finite) if finite else math.inf,
        worst_psnr=worst.psnr,
        worst=worst.path,
        holds_pixels=FORMATS[manifest.recipe.format].holds_pixels,
    )


def _match_scan(dataset: ConvertedDataset, scan: Scan) -> tuple[Scan, Checksums]:
    """Select the pictures of `scan` that are in the dataset, with its labels and ids, and sort them by id.

    Pictures that are new in the source are left out, with a warning.

    Returns:
        The scan, and for each picture its checksum at the conversion, or UNREADABLE.

    Raises:
        DatasetError: a picture of the dataset is not in the source with its label and fields.
    """
    manifest, index = dataset.manifest, dataset.read_index()
    _check_kinds(dataset, index, scan)
    samples = _with_labels_of(manifest.classes, scan)
    by_id = np.argsort(index.ids)
    stored_paths = index["paths"].select(by_id)
    assert stored_paths.ends is not None
    keys = _number_repeats(Paths(stored_paths.values.tobytes(), stored_paths.ends))
    row_of = dict(zip(keys, by_id.tolist(), strict=True))
    index_rows = np.array([row_of.get(key, -1) for key in _number_repeats(samples.list_paths())])
    scan_rows = np.flatnonzero(index_rows >= 0)
    same = _have_same_labels(dataset, index, index_rows[scan_rows], samples, scan_rows)
    missing = len(index) - int(same.sum())
    if missing:
        are = "is" if missing == 1 else "are"
        raise DatasetError(
            f"was not made from {scan.root}, or that changed since: {quantity(missing, 'picture')} of the "
            f"dataset {are} not there, or labelled differently",
            path=dataset.place,
            remedy="name the right source, or run 'precache convert' with --overwrite",
        )
    left_out = {*(picture.path for picture in manifest.rejected), *(path for path, _ in manifest.ignored)}
    new = sum(samples[row].path not in left_out for row in np.flatnonzero(index_rows < 0).tolist())
    if new and "without" not in manifest.source_options:
        are = "is" if new == 1 else "are"
        warn(
            f"{dataset.place}: {quantity(new, 'picture')} of {scan.root} {are} not in the dataset; "
            f"'precache convert' with --without {shell_command(dataset.place)} converts them into another DST"
        )
    scan_rows = scan_rows[np.argsort(index.ids[index_rows[scan_rows]])]
    samples = samples.select(scan_rows)
    samples.ids = index.ids[by_id]
    rejected_ids = np.array([picture.id for picture in manifest.rejected], np.int64)
    known_ids = np.sort(np.concatenate((samples.ids, rejected_ids)))
    checksums = dataset.read_source_state().checksums[np.searchsorted(known_ids, samples.ids)]
    return replace(scan, samples=samples), checksums


def _check_kinds(dataset: ConvertedDataset, index: SampleIndex, scan: Scan) -> None:
    """Raise DatasetError if target or fields of the source are of another kind than those of the dataset."""
    manifest, samples = dataset.manifest, scan.samples
    again = "convert it again with --overwrite"
    if scan.target != manifest.target:
        raise DatasetError(
            f"has target {manifest.target}, but {scan.root} now has target {scan.target}",
            path=dataset.place,
            remedy=f"correct its labels, or {again}",
        )
    if set(index.fields) != set(samples.fields):
        differing = ", ".join(sorted(set(index.fields) ^ set(samples.fields)))
        raise DatasetError(
            f"{scan.root} now has other fields ({differing})",
            path=dataset.place,
            remedy=f"leave them as they were, or {again}",
        )
    for name, stored, scanned in _label_columns(index, samples):
        if stored.differs_in_kind(scanned):
            raise DatasetError(
                f"its {name!r} is {_column_kind(stored)}, but in {scan.root} it is now "
                f"{_column_kind(scanned)}",
                path=dataset.place,
                remedy=f"correct it, or {again}",
            )


def _label_columns(index: SampleIndex, samples: Samples) -> Iterator[tuple[str, Column, Column]]:
    """Yield name and both columns of each field, and of the target, if samples have not just one class."""
    for name, column in index.fields.items():
        yield name, column, samples.fields[name]
    if index.targets is not None and samples.targets is not None:
        yield "target", index.targets, samples.targets


def _column_kind(column: Column) -> str:
    """Return the kind of a column's values, and their shape if they are arrays."""
    return f"{column.kind} {[*column.values.shape[1:]]}" if column.values.ndim > 1 else column.kind


def _with_labels_of(classes: Sequence[str], scan: Scan) -> Samples:
    """Return the samples of `scan` with labels that are indices of `classes`; -2 for any other class."""
    label_of = {name: label for label, name in enumerate(classes)}
    numbers = [label_of.get(name, -2) for name in scan.classes]
    new_labels = np.array([*numbers, -1], np.int64)  # at [-1] that of samples without a class
    samples, targets = scan.samples, scan.samples.targets
    if scan.target == "classes" and targets is not None:
        targets = Column(new_labels[targets.values], targets.ends)
    return replace(samples, labels=new_labels[samples.labels], targets=targets)


def _number_repeats(paths: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each path with the number of times that it was there before, as in a dataset of torchvision."""
    counts: Counter[str] = Counter()
    for path in paths:
        yield path, counts[path]
        counts[path] += 1


def _have_same_labels(
    dataset: ConvertedDataset, index: SampleIndex, index_rows: Ints, samples: Samples, scan_rows: Ints
) -> npt.NDArray[np.bool_]:
    """Return bool [n]: whether pictures have the labels and fields of the dataset, and the split if kept."""
    recipe, shards = dataset.manifest.recipe, dataset.manifest.shards
    same: npt.NDArray[np.bool_] = index.labels[index_rows] == samples.labels[scan_rows]
    if samples.split_names != ("",) and recipe.splits == DEFAULT_SPLITS:
        names = shards.split_names
        stored_splits = np.repeat(shards.splits, shards.samples)
        numbers = [names.index(name) if name in names else -1 for name in samples.split_names]
        same &= stored_splits[index_rows] == np.array(numbers)[samples.splits[scan_rows]]
    for _, stored, scanned in _label_columns(index, samples):
        same &= stored.select(index_rows).equal_rows(scanned.select(scan_rows))
    return same


@dataclass(frozen=True, slots=True)
class _DeepTask:
    """A shard to compare with its source.

    Attributes:
        name: path of the shard, for errors.
        shard: entry of the shard.
        index: index of its samples.
        pictures: id -> picture of the source and its checksum at the conversion.
    """

    name: str
    shard: ShardEntry
    index: SampleIndex
    pictures: dict[int, tuple[SampleRef, int]]


def _deep_tasks(dataset: ConvertedDataset, scan: Scan, checksums: Checksums) -> Iterator[_DeepTask]:
    """Yield a task for each shard, made when a worker is free."""
    for shard, index in dataset.iter_shards():
        rows = np.searchsorted(scan.samples.ids, index.ids).tolist()
        pairs = ((scan.samples[row], int(checksums[row])) for row in rows)
        pictures = {ref.id: (ref, checksum) for ref, checksum in pairs}
        yield _DeepTask(str(dataset.path / shard.file_name), shard, index, pictures)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Result for one sample: its PSNR against the reference in dB, and a line if it has a problem."""

    path: str
    psnr: float
    problem: str


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Compare the pictures of a shard with those of their source, in a worker."""

    dataset: ConvertedDataset
    source: Source

    def __call__(self, task: _DeepTask, tick: Callable[[], None]) -> list[_Compared]:
        compared = []
        for row, sample in enumerate(self.dataset.read_shard(task.shard, task.index)):
            ref, _ = task.pictures[int(task.index.ids[row])]
            try:
                task.index.check(row, sample.data, task.name, sample.damage)
                compared.append(self._compare(task, row, ref, sample))
            except SampleError as error:
                compared.append(_Compared(ref.path, 0.0, str(error)))
            tick()
        return compared

    def _compare(self, task: _DeepTask, row: int, ref: SampleRef, sample: StoredSample) -> _Compared:
        recipe, where = self.dataset.manifest.recipe, f"{task.name}: sample {ref.id} ({ref.path})"
        stored = sample.pixels(task.name, images.CHANNELS[recipe.channels])
        path = self.source.where(ref)
        try:
            data = self.source.read(ref, recipe.max_pixels)
            decoded = images.decode_for(data, path, recipe.rendering)
        except ImageError as error:
            return _Compared(ref.path, 0.0, f"{where}: its source {error.reason_and_remedy}")
        expected = images.fit(decoded, recipe.rendering)
        problem = ""
        if sample.label != ref.label:
            problem = f"{where} has label {sample.label}, expected {ref.label}"
        elif difference := self._annotation_difference(task, row, ref, sample):
            problem = f"{where} {difference}"
        elif stored.shape != expected.shape:
            stored_size, expected_size = (
                size_text((picture.shape[0], picture.shape[1])) for picture in (stored, expected)
            )
            return _Compared(ref.path, 0.0, f"{where} is {stored_size} pixels, expected {expected_size}")
        elif FORMATS[recipe.format].holds_pixels:
            if not np.array_equal(stored, expected):
                problem = f"{where} differs from its source ({jpeg.psnr(stored, expected):.1f} dB)"
        elif sample.data != data:
            encoded_again = jpeg.encode_jpeg(expected, recipe.quality)
            decoded_again = jpeg.decode_jpeg(encoded_again, path, expected.shape[2])
            limit = jpeg.psnr(decoded_again, expected) - JPEG_TOLERANCE_DB
            psnr = jpeg.psnr(stored, expected)
            if psnr < limit:
                problem = f"{where} is {psnr:.1f} dB from its source, expected {limit:.1f} dB or more"
        recorded = task.pictures[ref.id][1]
        if problem and sample.label == ref.label and recorded not in (UNREADABLE, picture_checksum(data)):
            problem = f"{where} differs from its source: the source file changed since it was converted"
        reference = expected if recipe.fit == "pad" else _reference(data, path, recipe, decoded)
        return _Compared(ref.path, jpeg.psnr(stored, reference), problem)

    def _annotation_difference(self, task: _DeepTask, row: int, ref: SampleRef, sample: StoredSample) -> str:
        """Return how path, target or fields of a sample in its shard differ from the source; else "".

        The target and fields in the index equal those of the source, see `_match_scan`.
        """
        width, height = task.index.source_sizes[row].tolist()
        target = None if task.index.targets is None else task.index.targets.row_value(row)
        fields = columns.row_values(task.index.fields, row)
        expected = Sample(ref.id, ref.label, b"", ref.path, (width, height), target, fields)
        if sample.annotations != FORMATS[self.dataset.manifest.recipe.format].annotations(expected):
            return "has a path, target or fields that differ from its source's"
        return ""


def _reference(data: bytes | Image.Image, path: str, recipe: Recipe, decoded: Decoded) -> Pixels:
    """Return the pixels that Pillow alone makes of a picture, decoded in full, whatever the recipe says."""
    if decoded.reduction > 1:
        decoded = images.decode_for(data, path, replace(recipe.rendering, scaled_decode=False))
    image = decoded.image.convert(images.MODES[recipe.channels])
    return images.reference_pixels(image, recipe.size, recipe.fit, recipe.resample, enlarge=recipe.enlarge)
