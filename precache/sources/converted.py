"""A converted dataset as a source: another format, a smaller size, other splits, some of its samples.

Its pictures are as they are stored, pixels or JPEGs, each compared with its checksum. Ids, labels, paths,
targets, fields and masks are kept, and its splits, unless others are asked for. Of its samples those of some
classes, or those that a file lists, may be taken; the others count as ignored.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from precache.dataset.boxes import fit_boxes
from precache.dataset.columns import Ints
from precache.dataset.converted import ConvertedDataset, is_converted, open_dataset
from precache.dataset.index import REMEDY, Checksums, SampleIndex, Sizes, checksum_of
from precache.errors import DatasetError, SampleError, SettingError, os_reason, similar_name
from precache.formats import FORMATS
from precache.formats.base import Places
from precache.pictures import images
from precache.pictures.reading import read_with_retries
from precache.pictures.sizes import sides, size_text
from precache.recipe import DEFAULT_SPLITS, Recipe
from precache.sources.base import IgnoredPath, SampleRef, Samples, Scan
from precache.sources.options import CONVERTED, SourceOptions
from precache.storage import read_regular, read_regular_part
from precache.storage.urls import Location

_ID = re.compile("[0-9]{1,18}")
_KEPT_SHARDS = 4096
_NOT_TAKEN = "not taken (--classes or --ids)"
_NAMED = 10  # classes that a message names

__all__ = ["ConvertedSource", "is_converted", "open_converted"]


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedSource:
    """A converted dataset as a `Source`.

    Attributes:
        dataset: that is read.
        options: which of its samples are taken.
        ids: int64 [n], of the samples in stored order.
        ends: int64 [shards], how many samples its shards have up to the end of each.
        checksums: uint64 [n], likewise.
        shapes: int32 [n, 2], height and width of what is stored, where these vary.
        mask_checksums: uint64 [n], of the pixels of the masks, where there are any.
    """

    dataset: ConvertedDataset
    options: SourceOptions
    ids: Ints
    ends: Ints
    checksums: Checksums
    shapes: Sizes | None
    mask_checksums: Checksums | None

    @property
    def root(self) -> Location:
        return self.dataset.place

    @property
    def paths(self) -> tuple[Location, ...]:
        return (self.root,)

    def scan(self) -> Scan:
        manifest = self.dataset.manifest
        index = self.dataset.read_index(removed=True)  # a row for each that the shards hold
        shard_splits = [shard.split for shard in manifest.shards]
        splits = list(dict.fromkeys(shard_splits))
        split_of = np.repeat([splits.index(split) for split in shard_splits], np.diff(self.ends, prepend=0))
        served = np.flatnonzero(index.served)
        rows = served[_is_taken(index.select(index.served), manifest.classes, self.options)]
        if not len(rows):
            raise SettingError(f"{self.root}: no sample has these classes and ids; name others")
        rows = rows[np.argsort(index.ids[rows])]
        samples = self._samples(index, rows, split_of, splits)
        left_out = np.setdiff1d(served, rows)
        ignored = (
            *(IgnoredPath(path, reason) for path, reason in manifest.ignored),
            *(IgnoredPath(rejected.path, rejected.reason) for rejected in manifest.rejected),
            *(IgnoredPath(index.path(row), _NOT_TAKEN) for row in left_out.tolist()),
        )
        digest = hashlib.sha256(self.dataset.digest.encode() + samples.ids.tobytes()).hexdigest()
        target = manifest.target
        return Scan(
            self, manifest.classes, samples, ignored, manifest.scanned, digest, (), target, own_ids=True
        )

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        """The JPEG, or the pixels, that are stored."""
        shard, row = self._locate(ref.place)
        recipe = self.dataset.manifest.recipe
        try:
            with self.dataset.local_files(*self.dataset.manifest.shards[shard].files):
                path, places = self._shard(shard)
                start, size = places[row].tolist()
                stored = read_with_retries(lambda: read_regular_part(path, start, size), path)
            sample = FORMATS[recipe.format].read_sample(stored)
        except ValueError as error:
            raise SampleError(self.where(ref), f"is not where its index says ({error}); {REMEDY}") from error
        changed = checksum_of(sample.data) != self.checksums[ref.place]
        if sample.damage or changed or sample.id not in (-1, self.ids[ref.place]):
            reason = sample.damage or f"its bytes changed since they were written (checksum); {REMEDY}"
            raise SampleError(self.where(ref), reason)
        if isinstance(sample.data, bytes):
            return sample.data
        height, width = sides(recipe.size) if self.shapes is None else self.shapes[ref.place].tolist()
        if sample.data.size != height * width * recipe.pixel_bytes:
            expected = f"{width}x{height} pixels of {recipe.channels}"
            raise SampleError(self.where(ref), f"holds no {expected}, as manifest and index say; {REMEDY}")
        pixels = sample.data.reshape(height, width, -1)
        return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)

    def where(self, ref: SampleRef) -> str:
        """The name for messages: shard, id and path."""
        shard = self.dataset.manifest.shards[self._locate(ref.place)[0]]
        return f"{self.root / shard.file_name}: sample {self.ids[ref.place]} ({ref.path})"

    def prepare(self, scan: Scan, recipe: Recipe, options: SourceOptions) -> tuple[Scan, SourceOptions]:
        """The scan as `recipe` takes it, with a warning of what is lost, and the options with its boxes.

        Boxes stay boxes. Pictures that stay as they are keep the sizes of their originals, too; the others
        are originals of their own, and boxes are moved to where things are on them.

        Raises:
            SettingError: the pictures would be enlarged, or are of more than 8 bits.
        """
        manifest = self.dataset.manifest
        stored = manifest.recipe
        if stored.rendering.is_deep:
            raise SettingError(
                f"{self.root}: holds {stored.dtype} of channels {stored.channels}, which can only be "
                f"converted from the original pictures; expected uint8 in grey, rgb or rgba"
            )
        _check_not_enlarged(self, stored, recipe)
        samples, boxes = scan.samples, manifest.source_options.get("boxes")
        if recipe.splits != DEFAULT_SPLITS and not recipe.has_split_list:
            every, none = np.arange(len(samples)), np.zeros(len(samples), np.int64)
            samples = samples.select(every, none, ("",))
        sizes = self.dataset.read_index(removed=True).source_sizes[samples.places]
        if _is_fitted(stored, recipe) and self.mask_checksums is None:
            samples.original_sizes = sizes
        elif boxes is not None:
            samples.fields[boxes] = fit_boxes(samples.fields[boxes], sizes, stored.rendering)
        holds_jpegs = not (FORMATS[stored.format].holds_pixels or FORMATS[recipe.format].holds_pixels)
        if holds_jpegs and not _is_fitted(stored, recipe):
            again = f"what is resized is written as JPEG a second time, at quality {recipe.quality}"
            loss = f"{self.root}: holds JPEGs, and {again}, which costs some of its quality"
            scan = replace(scan, warnings=(*scan.warnings, loss))
        scan = replace(scan, samples=samples)
        return scan, replace(options, boxes=boxes or options.boxes)

    def _locate(self, place: int) -> tuple[int, int]:
        """The shard of the sample at `place` of the stored order, and its row there."""
        shard = int(np.searchsorted(self.ends, place, side="right"))
        return shard, place - (int(self.ends[shard - 1]) if shard else 0)

    def _shard(self, number: int) -> tuple[Path, Places]:
        """The file of a shard, and where its samples lie."""
        entry, form = self.dataset.manifest.shards[number], self.dataset.manifest.recipe.format
        with self.dataset.local_files(*entry.files):
            path = self.dataset.shard_path(entry)
            return path, _find_samples(form, path, entry.files[0].crc32c, entry.samples)

    def _samples(self, index: SampleIndex, rows: Ints, split_of: Ints, splits: Sequence[str]) -> Samples:
        sizes = np.concatenate([self._shard(number)[1][:, 1] for number in range(len(self.ends))])
        paths = [os.fsencode(index.path(row)) for row in rows.tolist()]
        present, found = np.unique(split_of[rows], return_inverse=True)
        return Samples(
            ids=index.ids[rows],
            labels=index.labels[rows],
            file_bytes=sizes[rows],
            modified_ns=np.zeros(len(rows), np.int64),
            splits=found.astype(np.int64),
            split_names=tuple(splits[split] for split in present.tolist()),
            paths=b"".join(paths),
            path_ends=np.cumsum([len(path) for path in paths], dtype=np.int64),
            places=rows,
            targets=None if index.targets is None else index.targets.select(rows),
            fields={name: column.select(rows) for name, column in index.fields.items()},
        )


class _MaskedSource(ConvertedSource):
    """A converted dataset whose pictures have masks."""

    def read_mask(self, ref: SampleRef, max_pixels: int) -> tuple[bytes | Image.Image, str]:
        """The mask that is stored, and its place; its size is compared with the picture's later."""
        number, row = self._locate(ref.place)
        entry = self.dataset.manifest.shards[number]
        with self.dataset.local_files(*entry.files):
            path = self.dataset.shard_path(entry)
            with closing(FORMATS[self.dataset.manifest.recipe.format].open_masks(path)) as file:
                mask = file.read_mask(row)
        if isinstance(mask, bytes):
            return mask, f"in {path}"  # a PNG has checksums of its own
        if self.mask_checksums is not None and checksum_of(mask) != self.mask_checksums[ref.place]:
            raise SampleError(self.where(ref), f"its mask changed since it was written (checksum); {REMEDY}")
        return Image.fromarray(mask), f"in {path}"


def open_converted(path: Location, options: SourceOptions) -> ConvertedSource:
    """The source that reads the dataset in folder `path`, or at a URL.

    Raises:
        SettingError: an option is not for it.
        DatasetError: there is none, or it is damaged.
    """
    options.only(CONVERTED)
    dataset = open_dataset(path)
    index = dataset.read_index(removed=True)
    ends = np.cumsum([shard.samples for shard in dataset.manifest.shards], dtype=np.int64)
    kind = ConvertedSource if index.mask_checksums is None else _MaskedSource
    return kind(dataset, options, index.ids, ends, index.checksums, index.shapes, index.mask_checksums)


def _is_taken(index: SampleIndex, classes: Sequence[str], options: SourceOptions) -> npt.NDArray[np.bool_]:
    """bool [n]: whether `options` take the samples of `index`; SettingError for a name that there is not."""
    taken = np.ones(len(index), np.bool_)
    if options.classes:
        taken &= _is_labelled(index, _class_numbers(options.classes, classes))
    if options.ids is not None:
        taken &= _is_listed(index, options.ids)
    return taken


def _class_numbers(names: Sequence[str], classes: Sequence[str]) -> list[int]:
    if not classes:
        raise SettingError("--classes: the samples have no classes; choose them with --ids")
    for name in names:
        if name not in classes:
            more = f" and {len(classes) - _NAMED:,} more" if len(classes) > _NAMED else ""
            raise SettingError(
                f"--classes: there is no class {name!r}; choose from: "
                f"{', '.join(classes[:_NAMED])}{more}{similar_name(name, classes)}"
            )
    return [classes.index(name) for name in names]


def _is_labelled(index: SampleIndex, numbers: Sequence[int]) -> npt.NDArray[np.bool_]:
    if index.targets is None or index.targets.ends is None:
        return np.isin(index.labels, numbers)
    taken = np.zeros(len(index), np.bool_)
    sample_of = np.repeat(np.arange(len(index)), np.diff(index.targets.ends, prepend=0))
    taken[sample_of[np.isin(index.targets.values, numbers)]] = True
    return taken


def _is_listed(index: SampleIndex, file: str) -> npt.NDArray[np.bool_]:
    """Whether the file lists a sample: a line of digits alone is an id, any other one a path."""
    try:
        lines = [line.strip() for line in os.fsdecode(read_regular(file)).splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise SettingError(
            f"--ids {file!r}: cannot be read ({os_reason(error)}); name a file with one id or path per line"
        ) from error
    if not lines:
        raise SettingError(f"--ids {file}: lists nothing; write one id or path per line")
    ids = {line: int(line) for line in lines if _ID.fullmatch(line)}
    taken = np.isin(index.ids, list(ids.values()))
    there = set(index.ids[taken].tolist())
    paths = set(lines) - set(ids)
    every = [index.path(row) for row in range(len(index))] if paths else []
    taken |= np.fromiter((path in paths for path in every), np.bool_, len(every)) if paths else False
    known = paths & set(every)
    absent = [line for line in lines if line not in known and ids.get(line) not in there]
    if absent:
        raise SettingError(
            f"--ids {file}: {len(absent):,} of these {len(lines):,} samples are not in the dataset (first: "
            f"{absent[0]!r:.200}); leave them out"
        )
    return taken


def _is_fitted(stored: Recipe, recipe: Recipe) -> bool:
    """Whether pictures that are stored by `stored` have the sizes that `recipe` gives them."""
    return (recipe.size, recipe.fit, recipe.enlarge) == (stored.size, stored.fit, stored.enlarge)


def _check_not_enlarged(source: ConvertedSource, stored: Recipe, recipe: Recipe) -> None:
    """Raise SettingError if pictures would be enlarged that were shrunk to what is stored."""
    if recipe.fit in images.KEEPING_FITS and not recipe.enlarge:
        return
    there = sides(stored.size)
    if stored.fit == "keep-longer" and recipe.fit not in ("keep-longer", "pad") and source.shapes is not None:
        shrunk = source.shapes[source.shapes.max(axis=1) >= stored.size]
        there = tuple(shrunk.min(axis=0).tolist()) if len(shrunk) else there
    if any(asked > has for asked, has in zip(sides(recipe.size), there, strict=True)):
        shown = "x".join(map(str, reversed(there)))
        raise SettingError(
            f"size {size_text(recipe.size)} is more than the {shown} that {source.root} stores, and "
            f"enlarging adds nothing; choose that or less, or convert the original pictures"
        )


@lru_cache(_KEPT_SHARDS)
def _find_samples(format_name: str, path: Path, crc32c: str, samples: int) -> Places:
    """Where the samples of a shard lie; `crc32c` tells its versions apart."""
    places = FORMATS[format_name].find_samples(path)
    if len(places) != samples:
        raise DatasetError(f"{path}: expected {samples:,} samples, got {len(places):,}; {REMEDY}")
    return places
