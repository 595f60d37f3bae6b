"""A converted dataset as a source: another format, a smaller size, other splits, some of its samples.

Its pictures are as they are stored, pixels or JPEGs, each compared with its checksum. Ids, labels, paths,
targets, fields and masks are kept, and its splits, unless others are asked for. What is not taken counts as
ignored.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from precache import images, jpeg
from precache.dataset.boxes import moved
from precache.dataset.columns import Ints
from precache.dataset.converted import ConvertedDataset, is_converted, open_dataset
from precache.dataset.index import REMEDY, Checksums, SampleIndex, Sizes, checksum_of
from precache.errors import DatasetError, ImageError, SampleError, SettingError
from precache.formats import FORMATS
from precache.formats.base import Places
from precache.pictures.reading import steadily
from precache.pictures.sizes import sides, written
from precache.recipe import DEFAULT_SPLITS, Recipe
from precache.sources.base import IgnoredPath, SampleRef, Samples, Scan
from precache.sources.options import SourceOptions
from precache.sources.where import Where
from precache.storage import read_regular_part
from precache.storage.urls import Location

_MEASURED = 8  # pictures whose second JPEG is looked at
_KEPT_SHARDS = 4096
_NOT_TAKEN = "not taken (--where)"


__all__ = ["ConvertedSource", "is_converted", "open_converted", "prepared"]


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedSource:
    """A converted dataset as a `Source`.

    Attributes:
        where_text: which samples are taken, see `precache.sources.where`; None: all.
        dataset: that is read.
        ids: int64 [n], of the samples in stored order.
        ends: int64 [shards], how many samples its shards have up to the end of each.
        checksums: uint64 [n], likewise.
        shapes: int32 [n, 2], height and width of what is stored, where these vary.
        mask_checksums: uint64 [n], of the pixels of the masks, where there are any.
    """

    where_text: str | None
    dataset: ConvertedDataset
    ids: Ints
    ends: Ints
    checksums: Checksums
    shapes: Sizes | None
    mask_checksums: Checksums | None

    @property
    def root(self) -> Location:
        """Its folder, or its URL."""
        return self.dataset.place

    @property
    def paths(self) -> tuple[Location, ...]:
        """The same."""
        return (self.root,)

    def scan(self) -> Scan:
        """See `precache.sources.base.Source`."""
        manifest = self.dataset.manifest
        index = self.dataset.read_index(removed=True)  # a row for each that the shards hold
        shard_splits = [shard.split for shard in manifest.shards]
        splits = list(dict.fromkeys(shard_splits))
        split_of = np.repeat([splits.index(split) for split in shard_splits], np.diff(self.ends, prepend=0))
        rows = served = np.flatnonzero(index.served)
        if self.where_text is not None:
            where, live = Where.parse(self.where_text), index.select(index.served)
            rows = served[
                where.rows(live.ids, live.labels, live.targets, manifest.classes, split_of[served], splits)
            ]
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
            with self.dataset.held(*self.dataset.manifest.shards[shard].files):
                path, places = self._shard(shard)
                start, size = places[row].tolist()
                stored = steadily(lambda: read_regular_part(path, start, size), path)
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
        """Its shard, id and path."""
        shard = self.dataset.manifest.shards[self._locate(ref.place)[0]]
        return f"{self.root / shard.file_name}: sample {self.ids[ref.place]} ({ref.path})"

    def _locate(self, place: int) -> tuple[int, int]:
        """The shard of the sample at `place` of the stored order, and its row there."""
        shard = int(np.searchsorted(self.ends, place, side="right"))
        return shard, place - (int(self.ends[shard - 1]) if shard else 0)

    def _shard(self, number: int) -> tuple[Path, Places]:
        """The file of a shard, and where its samples lie."""
        entry, form = self.dataset.manifest.shards[number], self.dataset.manifest.recipe.format
        with self.dataset.held(*entry.files):
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
            split_names=[splits[split] for split in present.tolist()],
            paths=b"".join(paths),
            path_ends=np.cumsum([len(path) for path in paths], dtype=np.int64),
            places=rows,
            targets=None if index.targets is None else index.targets.select(rows),
            fields={name: column.select(rows) for name, column in index.fields.items()},
        )


class _MaskedSource(ConvertedSource):
    """One whose pictures have masks."""

    def read_mask(self, ref: SampleRef, max_pixels: int) -> tuple[bytes | Image.Image, str]:
        """The mask that is stored, and its place; compared with its picture's size, by whoever fits it."""
        number, row = self._locate(ref.place)
        entry = self.dataset.manifest.shards[number]
        with self.dataset.held(*entry.files):
            path = self.dataset.shard_path(entry)
            with closing(FORMATS[self.dataset.manifest.recipe.format].open_masks(path)) as file:
                mask = file.read_mask(row)
        if isinstance(mask, bytes):
            return mask, f"in {path}"  # a PNG has checksums of its own
        if self.mask_checksums is not None and checksum_of(mask) != self.mask_checksums[ref.place]:
            raise SampleError(self.where(ref), f"its mask changed since it was written (checksum); {REMEDY}")
        return Image.fromarray(mask), f"in {path}"


def open_converted(path: Location, where_text: str | None) -> ConvertedSource:
    """The source that reads the dataset in folder `path`, or at a URL; raises as `open_dataset`."""
    dataset = open_dataset(path)
    index = dataset.read_index(removed=True)
    ends = np.cumsum([shard.samples for shard in dataset.manifest.shards], dtype=np.int64)
    kind = ConvertedSource if index.mask_checksums is None else _MaskedSource
    return kind(where_text, dataset, index.ids, ends, index.checksums, index.shapes, index.mask_checksums)


def prepared(scan: Scan, recipe: Recipe, options: SourceOptions) -> tuple[Scan, SourceOptions]:
    """The scan of a converted dataset as `recipe` takes it, with a warning of what is lost; others as is.

    Boxes stay boxes. Pictures that stay as they are keep the sizes of their originals, too; the others are
    originals of their own, and boxes are moved to where things are on them.

    Raises:
        SettingError: the pictures would be enlarged.
    """
    source = scan.source
    if not isinstance(source, ConvertedSource):
        return scan, options
    manifest = source.dataset.manifest
    stored = manifest.recipe
    if stored.rendering.keeps_bands:
        raise SettingError(
            f"{source.root}: holds {stored.dtype} of channels {stored.channels}, which is converted from the "
            f"original pictures alone; expected uint8 in grey, rgb or rgba"
        )
    _check_not_enlarged(source, stored, recipe)
    samples, boxes = scan.samples, manifest.source_options.get("boxes")
    if recipe.splits != DEFAULT_SPLITS and not recipe.listed:
        every, none = np.arange(len(samples)), np.zeros(len(samples), np.int64)
        samples = samples.select(every, none, ("",))
    sizes = source.dataset.read_index(removed=True).source_sizes[samples.places]
    if _is_fitted(stored, recipe) and not isinstance(source, _MaskedSource):
        samples.original_sizes = sizes
    elif boxes is not None:
        samples.fields[boxes] = moved(samples.fields[boxes], sizes, stored.rendering)
    warnings = (*scan.warnings, *_second_loss(scan, stored, recipe))
    return replace(scan, samples=samples, warnings=warnings), replace(options, boxes=boxes or options.boxes)


def _is_fitted(stored: Recipe, recipe: Recipe) -> bool:
    """Whether pictures that are stored by `stored` have the sizes that `recipe` gives them."""
    return (recipe.size, recipe.fit, recipe.enlarge) == (stored.size, stored.fit, stored.enlarge)


def _check_not_enlarged(source: ConvertedSource, stored: Recipe, recipe: Recipe) -> None:
    """Raise SettingError if pictures would be enlarged that were shrunk to what is stored."""
    if recipe.fit in images.KEPT and not recipe.enlarge:
        return
    there = sides(stored.size)
    if stored.fit == "keep-longer" and recipe.fit not in ("keep-longer", "pad") and source.shapes is not None:
        shrunk = source.shapes[source.shapes.max(axis=1) >= stored.size]
        there = tuple(shrunk.min(axis=0).tolist()) if len(shrunk) else there
    if any(asked > has for asked, has in zip(sides(recipe.size), there, strict=True)):
        shown = "x".join(map(str, reversed(there)))
        raise SettingError(
            f"size {written(recipe.size)} is more than the {shown} that {source.root} stores, and enlarging "
            f"adds nothing; choose that or less, or convert the original pictures"
        )


def _second_loss(scan: Scan, stored: Recipe, recipe: Recipe) -> Iterator[str]:
    """What a JPEG of what was a JPEG before costs, measured on a few pictures; nothing where none is lost."""
    if FORMATS[stored.format].holds_pixels or FORMATS[recipe.format].holds_pixels:
        return
    found = []
    for row in sorted({round(at) for at in np.linspace(0, len(scan.samples) - 1, _MEASURED)}):
        ref = scan.samples[row]
        try:
            data = scan.source.read(ref, recipe.max_pixels)
            pixels, _, may_be_copied = images.render_or_copy(data, ref.path, recipe.rendering)
        except ImageError:
            continue  # the conversion says what is wrong with it
        if may_be_copied:
            continue
        again = jpeg.decode_jpeg(jpeg.encode_jpeg(pixels, recipe.quality), ref.path, pixels.shape[2])
        found.append(min(jpeg.psnr(again, pixels), 99.0))
    if found:
        yield (
            f"{scan.root}: holds JPEGs, and writing them as JPEG again at quality {recipe.quality} costs a "
            f"second loss: {np.mean(found):.1f} dB from what is stored, the mean of {len(found)}"
        )


@lru_cache(_KEPT_SHARDS)
def _find_samples(format_name: str, path: Path, crc32c: str, samples: int) -> Places:
    """Where the samples of a shard lie; `crc32c` tells its versions apart."""
    places = FORMATS[format_name].find_samples(path)
    if len(places) != samples:
        raise DatasetError(f"{path}: expected {samples:,} samples, got {len(places):,}; {REMEDY}")
    return places
