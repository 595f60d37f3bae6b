"""Is a converted dataset as it was written, and does another one hold the same samples?

And is every stored picture what the converter makes of its source today: pixels, label, fields, mask?
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from PIL import Image

from precache import engines
from precache.conversion.update import compare
from precache.dataset import columns
from precache.dataset.converted import ConvertedDataset, open_dataset
from precache.dataset.files import check_file, check_objects
from precache.dataset.index import VALUE, Checksums, IndexFileError, SampleIndex
from precache.dataset.manifest import ManifestError
from precache.dataset.shard_table import ShardEntry
from precache.errors import DatasetError, ImageError, SampleError
from precache.formats import FORMATS, Sample, StoredSample
from precache.pictures import images, jpeg, masks
from precache.pictures.images import Decoded
from precache.pictures.jpeg import Pixels
from precache.pictures.sizes import written
from precache.recipe import Recipe, flag_name
from precache.reporting import Progress, no_progress, quantity
from precache.sources import Source, SourceOptions, open_source
from precache.sources.base import SampleRef, Scan, picture_checksum, prepared
from precache.sources.masks import render_mask
from precache.sources.options import OptionNotTakenError
from precache.storage.objects import ObjectStore
from precache.storage.urls import Url

# A stored JPEG may lie this much further from its picture than the same encoder puts it today.
JPEG_TOLERANCE_DB = 1.0


def verify(path: str | os.PathLike[str] | Url) -> list[str]:
    """Compare every file of the dataset in `path` with the manifest's sizes and checksums.

    The manifest itself carries one, too. Of a URL the storage's bytes are read, not those that are kept here.

    Returns:
        One line per damaged or missing file; empty if all are as they were written.

    Raises:
        DatasetError: `path` is not a converted dataset.
        StorageError: it is a URL, and the storage refuses or does not answer.
    """
    try:
        dataset = open_dataset(path)
    except (ManifestError, IndexFileError) as error:  # nothing else is known of the files then
        return [str(error).rpartition("; ")[0]]
    files, place = dataset.manifest.files, dataset.place
    if isinstance(place, Url):
        problems = check_objects(ObjectStore(place), files)
    else:
        problems = (check_file(place, file) for file in files)
    return [problem for problem in problems if problem is not None]


def verify_across(paths: Sequence[str | os.PathLike[str] | Url]) -> list[str]:
    """Compare ids, labels, targets, fields, splits and class names of several datasets with the first's.

    Returns:
        One line per difference; empty if all hold the same samples in the same splits.

    Raises:
        DatasetError: one of `paths` is not a converted dataset.
    """
    first, *others = (open_dataset(path) for path in paths)
    problems = []
    for other in others:
        names = f"{other.place} and {first.place}"
        if other.manifest.classes != first.manifest.classes:
            problems.append(f"{names}: their classes differ")
        kinds = [f"{one.manifest.target}: {_listed(one.manifest.fields)}" for one in (other, first)]
        if kinds[0] != kinds[1]:
            problems.append(f"{names}: their targets and fields differ ({kinds[0]}; {kinds[1]})")
            continue
        ours, theirs = first.manifest.samples_per_class, other.manifest.samples_per_class
        if ours.keys() != theirs.keys():
            problems.append(f"{names}: their splits differ ({', '.join(theirs)}; {', '.join(ours)})")
        for split in ours.keys() & theirs.keys():
            if different := _different(first.read_index(split), other.read_index(split)):
                problems.append(f"{names}: split {split} differs in {quantity(different, 'sample')}")
    return problems


def _listed(fields: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in sorted(fields.items())) or "no fields"


def _different(one: SampleIndex, other: SampleIndex) -> int:
    """How many samples are in one of the two alone, or differ in label, target, fields or mask."""
    ids, mine, its = np.intersect1d(one.ids, other.ids, assume_unique=True, return_indices=True)
    alike = np.ones(len(ids), np.bool_)
    for name in {"labels", "targets", "mask_checksums"} | {f"{VALUE}{name}" for name in one.fields}:
        ours, theirs = one.get(name), other.get(name)
        if ours is None or theirs is None or ours.differs_in_kind(theirs):
            alike &= ours is theirs
        else:
            alike &= ours.select(mine).same(theirs.select(its))
    return len(one) + len(other) - 2 * len(ids) + int((~alike).sum())


@dataclass(frozen=True, slots=True)
class DeepReport:
    """What `verify_deep` found.

    Attributes:
        samples: compared.
        problems: one line per sample that is not what the converter makes of its source.
        equal: samples that equal the reference: Pillow's decode, the whole picture resized, then
            cropped.
        mean_psnr, worst_psnr: in dB, of the others against the reference; infinite if there are none.
        worst: path of the worst sample in the source tree.
        holds_pixels: whether the format stores pixels, which must be exactly those; else JPEGs.
    """

    samples: int
    problems: tuple[str, ...]
    equal: int
    mean_psnr: float
    worst_psnr: float
    worst: str
    holds_pixels: bool

    def sentence(self, source: object) -> str:
        """The result in one statement."""
        if self.problems:
            of, differ = quantity(self.samples, "picture"), "differs" if len(self.problems) == 1 else "differ"
            return f"{len(self.problems):,} of {of} {differ} from what converting {source} gives"
        every = "its picture is" if self.samples == 1 else f"all {self.samples:,} pictures are"
        others = self.samples - self.equal
        near = f"mean {self.mean_psnr:.1f} dB, worst {self.worst_psnr:.1f} dB ({self.worst})"
        exactly = " exactly" if self.holds_pixels or not others else ""
        same = f"{every}{exactly} what converting {source} gives"
        if not others:
            return same
        if self.holds_pixels:
            of = f"{others:,} of them" if self.samples > 1 else "it"
            return f"{same}. Pillow alone would resize {of} a little differently: {near}"
        return f"{same}, within what JPEG compression of this quality changes: {near}"


def verify_deep(
    path: str | os.PathLike[str] | Url,
    source: Any,
    *,
    root: str | None = None,
    mask: str | None = None,
    workers: int | None = None,
    on_progress: Progress = no_progress,
) -> DeepReport:
    """Decode every source picture again and compare it with what is stored.

    Pixels of `shards` must be equal; a JPEG must be as near as encoding the picture again gets,
    less `JPEG_TOLERANCE_DB`.

    Args:
        root, mask: where the pictures of a table, and the masks, lie now; default where they were converted
            from. A path that is not absolute begins in the working folder, now as then.

    Raises:
        DatasetError: not a converted dataset, a damaged shard, or one of another source tree.
        SourceError: `source` is not an image tree.
    """
    workers = engines.worker_count(workers)
    dataset = open_dataset(path)
    manifest = dataset.manifest
    moved = {name: path for name, path in (("root", root), ("mask", mask)) if path is not None}
    options = SourceOptions.from_json({**manifest.source_options, **moved})
    try:
        opened = open_source(source, options)
    except OptionNotTakenError as error:
        if error.option in moved:
            raise
        raise DatasetError(
            f"{path}: was not made from {source}, but with {flag_name(error.option)}, which is not for "
            f"{error.kind}; name the source that it was made from"
        ) from error
    scan, _ = prepared(opened.scan(), manifest.recipe, options)
    scan, checksums = _same_pictures(dataset, scan)
    report = engines.progress_counter(on_progress, manifest.samples)
    tasks = _deep_tasks(dataset, scan, checksums)
    workers = min(workers, len(manifest.shards))
    with closing(engines.run(_Comparison(dataset, scan.source), tasks, workers, report)) as shards:
        compared = [picture for shard in shards for picture in shard]
    problems = sorted(c.problem for c in compared if c.problem)
    finite = [c.psnr for c in compared if math.isfinite(c.psnr)]
    worst = min(compared, key=lambda c: (c.psnr, c.path))
    return DeepReport(
        samples=len(compared),
        problems=tuple(problems),
        equal=len(compared) - len(finite),
        mean_psnr=sum(finite) / len(finite) if finite else math.inf,
        worst_psnr=worst.psnr,
        worst=worst.path,
        holds_pixels=FORMATS[manifest.recipe.format].holds_pixels,
    )


def _same_pictures(dataset: ConvertedDataset, scan: Scan) -> tuple[Scan, Checksums]:
    """`scan` with the labels and ids of the dataset, sorted by id: a source may list in another order.

    And the checksums that the pictures had when they were converted; 0 of those that could not be read.

    Raises:
        DatasetError: a picture of the source is not in the dataset with its labels and fields, or the other
            way round.
    """
    if dataset.manifest.recipe.has_split_list:  # its splits are those of the list, whatever the source has
        every, none = np.arange(len(scan.samples)), np.zeros(len(scan.samples), np.int64)
        scan = replace(scan, samples=scan.samples.select(every, none, ("",)))
    difference = compare(dataset, scan, contents=False)  # these are compared next
    samples = difference.scan.samples
    left_out = {path for path, _ in dataset.manifest.ignored}  # by a list of splits
    missing = sum(samples[row].path not in left_out for row in difference.new.tolist())
    if missing or len(difference.gone):
        raise DatasetError(
            f"{dataset.place}: was not made from {scan.root}, or that changed since: "
            f"{quantity(missing, 'picture')} of {scan.root} missing here or labelled differently, "
            f"{len(difference.gone):,} no longer in {scan.root}; name the right source, or run "
            f"'precache convert' with --update"
        )
    by_id = np.argsort(samples.ids)
    checksums = np.zeros(len(samples), np.uint64)
    checksums[difference.stays] = difference.state.checksums[difference.stay_as]
    return replace(difference.scan, samples=samples.select(by_id)), checksums[by_id]


@dataclass(frozen=True, slots=True)
class _DeepTask:
    """One shard, of the path `name`; of each of its samples, by id, the picture and its checksum before."""

    name: str
    shard: ShardEntry
    index: SampleIndex
    pictures: dict[int, tuple[SampleRef, int]]


def _deep_tasks(dataset: ConvertedDataset, scan: Scan, checksums: Checksums) -> Iterator[_DeepTask]:
    """One task per shard, made when a worker asks for it."""
    for shard, members in dataset.by_shard():
        rows = np.searchsorted(scan.samples.ids, members.ids[members.served]).tolist()
        refs = ((scan.samples[row], int(checksums[row])) for row in rows)
        pictures = {ref.id: (ref, checksum) for ref, checksum in refs}
        yield _DeepTask(str(dataset.path / shard.file_name), shard, members, pictures)


@dataclass(frozen=True, slots=True)
class _Compared:
    path: str
    psnr: float
    problem: str


@dataclass(frozen=True, slots=True)
class _Comparison:
    """What a worker does: compare the pictures of a shard with those of their source."""

    dataset: ConvertedDataset
    source: Source

    def __call__(self, task: _DeepTask, tick: Callable[[], None]) -> list[_Compared]:
        compared = []
        for row, sample in self.dataset.read_shard(task.shard, task.index):
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
            return _Compared(ref.path, 0.0, f"{where}: its source {error.reason}")
        expected = images.fit(decoded, recipe.rendering)
        problem = ""
        if sample.label != ref.label:
            problem = f"{where} has label {sample.label}, expected {ref.label}"
        elif difference := self._labelled_differently(task, row, ref, sample):
            problem = f"{where} {difference}"
        elif stored.shape != expected.shape:
            sizes = (written((picture.shape[0], picture.shape[1])) for picture in (stored, expected))
            return _Compared(ref.path, 0.0, f"{where} is {' pixels, expected '.join(sizes)}")
        elif FORMATS[recipe.format].holds_pixels:
            if not np.array_equal(stored, expected):
                problem = f"{where} differs from its source ({jpeg.psnr(stored, expected):.1f} dB)"
        elif sample.data != data:
            again = jpeg.decode_jpeg(jpeg.encode_jpeg(expected, recipe.quality), path, expected.shape[2])
            bound = jpeg.psnr(again, expected) - JPEG_TOLERANCE_DB
            if jpeg.psnr(stored, expected) < bound:
                far = f"{jpeg.psnr(stored, expected):.1f} dB from its source, expected {bound:.1f} dB or more"
                problem = f"{where} is {far}"
        recorded = task.pictures[ref.id][1]
        if problem and sample.label == ref.label and recorded not in (0, picture_checksum(data)):
            problem = f"{where} differs from its source: the source file changed since it was converted"
        has_reference = recipe.fit != "pad" and not recipe.rendering.is_deep
        reference = _reference(data, path, recipe, decoded) if has_reference else expected
        return _Compared(ref.path, jpeg.psnr(stored, reference), problem)

    def _labelled_differently(self, task: _DeepTask, row: int, ref: SampleRef, sample: StoredSample) -> str:
        """How path, target, fields or mask of a sample in its shard differ from the source's; else empty.

        Those of the index are the source's, see `_same_pictures`.
        """
        width, height = task.index.source_sizes[row].tolist()
        target = None if task.index.targets is None else task.index.targets.value(row)
        fields = columns.values_of(task.index.fields, row)
        expected = Sample(ref.id, ref.label, b"", ref.path, (width, height), target, fields)
        if sample.annotations != FORMATS[self.dataset.manifest.recipe.format].annotations(expected):
            return "has a path, target or fields that differ from its source's"
        how = self.dataset.manifest.recipe.rendering
        try:
            its_mask = render_mask(self.source, ref, (width, height), how)
            mask = sample.mask
            if isinstance(mask, bytes):
                mask = masks.decode(mask, images.fitted_size(width, height, how)[::-1])
            if mask is not None:
                task.index.check_mask(row, mask, task.name)
        except ImageError as error:
            return f"has a mask that differs from its source's ({error.reason})"
        except ValueError as error:
            return f"has a mask that cannot be decoded ({error})"
        if mask is None or its_mask is None:
            if mask is its_mask:
                return ""
            return "has no mask, its source has one" if mask is None else "has a mask, its source has none"
        return "" if np.array_equal(mask, its_mask) else "has a mask that differs from its source's"


def _reference(data: bytes | Image.Image, path: str, recipe: Recipe, decoded: Decoded) -> Pixels:
    """The reference's pixels: of the whole decode, whatever the recipe takes."""
    if decoded.reduction > 1:
        decoded = images.decode_for(data, path, replace(recipe.rendering, scaled_decode=False))
    image = decoded.image.convert(images.MODES[recipe.channels])
    return images.reference(image, recipe.size, recipe.fit, recipe.resample, enlarge=recipe.enlarge)
