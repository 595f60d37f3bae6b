"""A converted dataset as a source: another format, a smaller size, other splits, some of its samples.

Its pictures are as they are stored, pixels or JPEGs, each compared with its checksum. Ids, labels, paths,
targets, fields and the sizes of the original pictures are kept, and its splits, unless others are asked for.
What is not taken counts as ignored.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

from precache import images, jpeg
from precache.columns import Ints
from precache.converted import ConvertedDataset, is_converted, open_dataset
from precache.errors import DatasetError, ImageError, SampleError, SettingError
from precache.formats import FORMATS
from precache.formats.base import Places
from precache.index import REMEDY, Checksums, SampleIndex, checksum_of
from precache.reading import steadily
from precache.recipe import DEFAULT_SPLITS, Recipe
from precache.sources.base import IgnoredPath, SampleRef, Samples, Scan
from precache.sources.where import Where
from precache.storage import open_regular
from precache.verification import psnr

_MEASURED = 8  # pictures whose second JPEG is looked at
_KEPT_SHARDS = 4096
_NOT_TAKEN = "not taken (--where)"


__all__ = ["ConvertedSource", "is_converted", "prepared"]


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedSource:
    """A converted dataset as a `Source`.

    Attributes:
        where_text: which samples are taken, see `precache.sources.where`; None: all.
        dataset: that is read.
        ends: int64 [shards], how many samples its shards have up to the end of each.
        checksums: uint64 [n], of the samples in stored order; None in version 2.
    """

    where_text: str | None
    dataset: ConvertedDataset
    ends: Ints
    checksums: Checksums | None

    @classmethod
    def open(cls, path: Path, where_text: str | None) -> "ConvertedSource":
        """The source that reads the dataset in folder `path`; raises DatasetError as `open_dataset`."""
        dataset = open_dataset(path)
        ends = np.cumsum([shard.samples for shard in dataset.manifest.shards], dtype=np.int64)
        return cls(where_text, dataset, ends, dataset.read_index().checksums)

    @property
    def root(self) -> Path:
        """Its folder."""
        return self.dataset.path

    @property
    def paths(self) -> tuple[Path, ...]:
        """Its folder."""
        return (self.root,)

    def scan(self) -> Scan:
        """See `precache.sources.base.Source`."""
        manifest = self.dataset.manifest
        index = self.dataset.read_index()
        shard_splits = [shard.split for shard in manifest.shards]
        splits = list(dict.fromkeys(shard_splits))
        split_of = np.repeat([splits.index(split) for split in shard_splits], np.diff(self.ends, prepend=0))
        rows = np.arange(len(index))
        if self.where_text is not None:
            where = Where.parse(self.where_text)
            rows = where.rows(index.ids, index.labels, index.targets, manifest.classes, split_of, splits)
        rows = rows[np.argsort(index.ids[rows])]
        samples = self._samples(index, rows, split_of, splits)
        left_out = np.setdiff1d(np.arange(len(index)), rows)
        ignored = (
            *(IgnoredPath(path, reason) for path, reason in manifest.ignored),
            *(IgnoredPath(rejected.path, rejected.reason) for rejected in manifest.rejected),
            *(IgnoredPath(_path(index, row), _NOT_TAKEN) for row in left_out.tolist()),
        )
        digest = hashlib.sha256(self.dataset.digest.encode() + samples.ids.tobytes()).hexdigest()
        target = manifest.target
        return Scan(self, manifest.classes, samples, ignored, manifest.scanned, digest, (), target)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        """The JPEG, or the pixels, that are stored."""
        shard, places = self._places(ref.place)
        manifest = self.dataset.manifest
        path = str(self.dataset.shard_path(manifest.shards[shard]))
        start, size = places[ref.place - (int(self.ends[shard - 1]) if shard else 0)].tolist()
        form = FORMATS[manifest.recipe.format]
        try:
            sample = form.read_sample(steadily(lambda: _read(path, start, size), path))
        except ValueError as error:
            raise SampleError(self.where(ref), f"is not where its index says ({error}); {REMEDY}") from error
        changed = self.checksums is not None and checksum_of(sample.data) != self.checksums[ref.place]
        if sample.damage or changed or sample.id not in (-1, ref.id):
            reason = sample.damage or f"its bytes changed since they were written (checksum); {REMEDY}"
            raise SampleError(self.where(ref), reason)
        if isinstance(sample.data, bytes):
            return sample.data
        side = manifest.recipe.size
        return Image.fromarray(sample.data.reshape(side, side, 3))

    def where(self, ref: SampleRef) -> str:
        """Its shard, id and path."""
        shard = int(np.searchsorted(self.ends, ref.place, side="right"))
        path = self.dataset.shard_path(self.dataset.manifest.shards[shard])
        return f"{path}: sample {ref.id} ({ref.path})"

    def _places(self, place: int) -> tuple[int, Places]:
        """The shard of the sample at `place` of the stored order, and where its samples lie."""
        shard = int(np.searchsorted(self.ends, place, side="right"))
        entry = self.dataset.manifest.shards[shard]
        path = self.dataset.shard_path(entry)
        return shard, _find_samples(
            self.dataset.manifest.recipe.format, path, entry.files[0].crc32c, entry.samples
        )

    def _samples(self, index: SampleIndex, rows: Ints, split_of: Ints, splits: Sequence[str]) -> Samples:
        sizes = np.concatenate([self._places(end - 1)[1][:, 1] for end in self.ends.tolist()])
        paths = [os.fsencode(_path(index, row)) for row in rows.tolist()]
        present, found = np.unique(split_of[rows], return_inverse=True)
        samples = Samples(
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
        samples.original_sizes = index.source_sizes[rows]
        return samples


def prepared(scan: Scan, recipe: Recipe) -> Scan:
    """The scan of a converted dataset as `recipe` takes it, and a warning of what is lost; others as is.

    Raises:
        SettingError: the pictures would be enlarged.
    """
    source = scan.source
    if not isinstance(source, ConvertedSource):
        return scan
    stored = source.dataset.manifest.recipe
    if recipe.size > stored.size:
        raise SettingError(
            f"size {recipe.size} is more than the {stored.size} that {scan.root} stores, and enlarging adds "
            f"nothing; choose {stored.size} or less, or convert the original pictures"
        )
    if recipe.splits != DEFAULT_SPLITS and not recipe.listed:
        samples = scan.samples
        every, none = np.arange(len(samples)), np.zeros(len(samples), np.int64)
        scan = replace(scan, samples=samples.select(every, none, ("",)))
    loss = _second_loss(scan, stored, recipe)
    return scan if loss is None else replace(scan, warnings=(*scan.warnings, loss))


def _second_loss(scan: Scan, stored: Recipe, recipe: Recipe) -> str | None:
    """What a JPEG of what was a JPEG before costs, measured on a few pictures; None where nothing is lost."""
    if FORMATS[stored.format].holds_pixels or FORMATS[recipe.format].holds_pixels:
        return None
    if recipe.passthrough and recipe.size == stored.size:
        return None
    found = []
    for row in sorted({round(at) for at in np.linspace(0, len(scan.samples) - 1, _MEASURED)}):
        ref = scan.samples[row]
        try:
            pixels, _ = images.render(scan.source.read(ref, recipe.max_pixels), ref.path, recipe.rendering)
        except ImageError:
            continue  # the conversion says what is wrong with it
        again = jpeg.decode_jpeg(jpeg.encode_jpeg(pixels, recipe.quality), ref.path)
        found.append(min(psnr(again, pixels), 99.0))
    if not found:
        return None
    spared = "; --passthrough keeps the JPEGs as they are" if recipe.size == stored.size else ""
    return (
        f"{scan.root}: holds JPEGs, and writing them as JPEG again at quality {recipe.quality} costs a "
        f"second loss: {sum(found) / len(found):.1f} dB from what is stored, the mean of {len(found)}{spared}"
    )


@lru_cache(_KEPT_SHARDS)
def _find_samples(format_name: str, path: Path, crc32c: str, samples: int) -> Places:
    """Where the samples of a shard lie; `crc32c` tells its versions apart."""
    places = FORMATS[format_name].find_samples(path)
    if len(places) != samples:
        raise DatasetError(f"{path}: expected {samples:,} samples, got {len(places):,}; {REMEDY}")
    return places


def _path(index: SampleIndex, row: int) -> str:
    """Of the original picture; in version 2 its id."""
    return index.path(row) or f"{index.ids[row]:08d}"


def _read(path: str, start: int, size: int) -> bytes:
    descriptor = open_regular(path)
    try:
        return os.pread(descriptor, size, start)
    finally:
        os.close(descriptor)
