"""Converted datasets as sources, to convert them to another format, a smaller size or other splits.

Pictures are read as they are stored, as pixels or JPEGs, and compared with their checksums. Ids, labels,
paths, targets and fields are kept, and also the splits, unless the recipe has others. The options
`classes` and `ids` select some of the samples; the others count as ignored.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from precache.dataset.columns import Ints
from precache.dataset.converted import ConvertedDataset, open_dataset
from precache.dataset.files import first_problem
from precache.dataset.index import REMEDY, SampleIndex
from precache.dataset.shard_table import ShardEntry
from precache.errors import DatasetError, SampleError, SettingError, os_reason, similar_name
from precache.formats import FORMATS
from precache.pictures import images
from precache.pictures.images import sides, size_text
from precache.pictures.reading import read_with_retries
from precache.recipe import DEFAULT_SPLITS, Recipe
from precache.sources.base import IgnoredPath, SampleRef, Samples, Scan
from precache.sources.options import CONVERTED, SourceOptions
from precache.sources.text_files import decode_list, listed_path
from precache.storage import checksum_of, read_regular, read_regular_part

_ID = re.compile("[0-9]{1,18}")
_NOT_SELECTED = "not taken (--classes or --ids)"
_MAX_NAMES = 10  # classes that a message names

__all__ = ["ConvertedSource", "open_converted"]


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedSource:
    """A converted dataset as a `Source`.

    `SampleRef.offset` is the sample's row in the index, whose rows are in stored order, shard by shard.

    Attributes:
        dataset: dataset that is read.
        options: options that select samples.
        index: index of all its samples.
        starts: int64 [shards], row of each shard's first sample.
    """

    dataset: ConvertedDataset
    options: SourceOptions
    index: SampleIndex
    starts: Ints

    @property
    def root(self) -> Path:
        return self.dataset.path

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.root,)

    def scan(self) -> Scan:
        manifest, index = self.dataset.manifest, self.index
        if problem := first_problem(self.root, (shard.files[0] for shard in manifest.shards)):
            raise DatasetError(problem, remedy=REMEDY)
        split_names = manifest.shards.split_names
        splits = np.repeat(manifest.shards.splits.astype(np.int64), manifest.shards.samples)
        is_selected = _selection(index, manifest.classes, self.options)
        rows = np.flatnonzero(is_selected)
        if not len(rows):
            raise SettingError("no sample has these classes and ids", path=self.root, remedy="name others")
        rows = rows[np.argsort(index.ids[rows])]
        samples = self._samples(index, rows, splits, split_names)
        ignored = [IgnoredPath(path, reason) for path, reason in manifest.ignored]
        ignored += [IgnoredPath(rejected.path, rejected.reason) for rejected in manifest.rejected]
        ignored += [
            IgnoredPath(index.path(row), _NOT_SELECTED) for row in np.flatnonzero(~is_selected).tolist()
        ]
        return Scan(
            source=self,
            classes=manifest.classes,
            samples=samples,
            ignored=tuple(ignored),
            scanned=manifest.scanned,
            digest=hashlib.sha256(self.dataset.digest.encode() + samples.ids.tobytes()).hexdigest(),
            target=manifest.target,
            is_tree=manifest.is_tree,
        )

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        """Return the stored JPEG or pixels of a sample."""
        recipe, index, row = self.dataset.manifest.recipe, self.index, ref.offset
        shard = self._shard_of(row)
        start, size = index.byte_ranges[row].tolist()
        path = self.root / shard.file_name
        try:
            with self.dataset.local_files(shard.files[0]):
                stored = read_with_retries(lambda: read_regular_part(path, start, size), path)
            sample = FORMATS[recipe.format].read_sample(stored)
        except ValueError as error:
            raise SampleError(
                self.where(ref), f"is not where its index says ({error})", remedy=REMEDY
            ) from error
        has_changed = checksum_of(sample.data) != index["checksums"][row]
        if sample.damage:
            raise SampleError(self.where(ref), sample.damage)
        if has_changed or sample.id not in (-1, index["ids"][row]):
            reason = "its bytes changed since they were written (checksum)"
            raise SampleError(self.where(ref), reason, remedy=REMEDY)
        if isinstance(sample.data, bytes):
            return sample.data
        height, width = sides(recipe.size) if "shapes" not in index else index["shapes"][row].tolist()
        if sample.data.size != height * width * images.CHANNELS[recipe.channels]:
            expected = f"{width}x{height} pixels of {recipe.channels}"
            reason = f"holds no {expected}, as manifest and index say"
            raise SampleError(self.where(ref), reason, remedy=REMEDY)
        pixels = sample.data.reshape(height, width, -1)
        return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)

    def where(self, ref: SampleRef) -> str:
        """Return the name for messages: shard, id and path."""
        file_name = self._shard_of(ref.offset).file_name
        return f"{self.root / file_name}: sample {self.index['ids'][ref.offset]} ({ref.path})"

    def prepare(self, scan: Scan, recipe: Recipe) -> Scan:
        """Adapt the scan to `recipe`.

        Pictures that keep their size also keep the size of their originals; resized ones become originals
        themselves. The scan gets a warning if JPEGs lose quality.

        Raises:
            SettingError: the pictures would be enlarged.
        """
        manifest = self.dataset.manifest
        stored = manifest.recipe
        _check_not_enlarged(self, stored, recipe)
        samples = scan.samples
        if recipe.splits != DEFAULT_SPLITS and not recipe.has_split_list:  # leave the splits to the recipe
            all_rows, no_splits = np.arange(len(samples)), np.zeros(len(samples), np.int64)
            samples = samples.select(all_rows, no_splits, ("",))
        has_jpegs = not (FORMATS[stored.format].holds_pixels or FORMATS[recipe.format].holds_pixels)
        if (recipe.size, recipe.fit, recipe.enlarge) == (stored.size, stored.fit, stored.enlarge):
            samples.original_sizes = self.index.source_sizes[samples.offsets]
        elif has_jpegs:
            warning = (
                f"{self.root}: holds JPEGs, and what is resized is written as JPEG a second time, at quality "
                f"{recipe.quality}, which costs some of its quality"
            )
            scan = replace(scan, warnings=(*scan.warnings, warning))
        return replace(scan, samples=samples)

    def _shard_of(self, row: int) -> ShardEntry:
        """Return the shard of the sample in this row of the index."""
        return self.dataset.manifest.shards[int(np.searchsorted(self.starts, row, side="right")) - 1]

    def _samples(self, index: SampleIndex, rows: Ints, splits: Ints, split_names: Sequence[str]) -> Samples:
        """Return the samples at `rows` of the index.

        Args:
            splits: int64 [n], index into `split_names` of each sample of the index.
        """
        paths = [os.fsencode(index.path(row)) for row in rows.tolist()]
        used_splits, row_splits = np.unique(splits[rows], return_inverse=True)
        return Samples(
            ids=index.ids[rows],
            labels=index.labels[rows],
            file_bytes=index.byte_ranges[rows][:, 1],
            modified_ns=np.zeros(len(rows), np.int64),
            splits=row_splits.astype(np.int64),
            split_names=tuple(split_names[split] for split in used_splits.tolist()),
            paths=b"".join(paths),
            path_ends=np.cumsum([len(path) for path in paths], dtype=np.int64),
            offsets=rows,
            targets=None if index.targets is None else index.targets.select(rows),
            fields={name: column.select(rows) for name, column in index.fields.items()},
        )


def open_converted(path: Path, options: SourceOptions) -> ConvertedSource:
    """Open the converted dataset in a folder.

    Raises:
        SettingError: an option does not fit a converted dataset.
        DatasetError: there is no dataset, or it is damaged.
    """
    options.check_kind(CONVERTED)
    dataset = open_dataset(path)
    return ConvertedSource(dataset, options, dataset.read_index(), dataset.manifest.shards.starts)


def _selection(index: SampleIndex, classes: Sequence[str], options: SourceOptions) -> npt.NDArray[np.bool_]:
    """Return bool [n], whether `options` select each sample of `index`.

    Raises:
        SettingError: a class, an id or a path does not exist.
    """
    is_selected = np.ones(len(index), np.bool_)
    if options.classes:
        is_selected &= _has_class(index, _class_indices(options.classes, classes))
    if options.ids is not None:
        is_selected &= _is_listed(index, options.ids)
    return is_selected


def _class_indices(names: Sequence[str], classes: Sequence[str]) -> list[int]:
    """Return the index of each name in `classes`; SettingError if there is no such class."""
    if not classes:
        raise SettingError("--classes: the samples have no classes", remedy="choose them with --ids")
    for name in names:
        if name not in classes:
            more = f" and {len(classes) - _MAX_NAMES:,} more" if len(classes) > _MAX_NAMES else ""
            raise SettingError(
                f"--classes: there is no class {name!r}; choose from: "
                f"{', '.join(classes[:_MAX_NAMES])}{more}{similar_name(name, classes)}"
            )
    return [classes.index(name) for name in names]


def _has_class(index: SampleIndex, class_indices: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return bool [n], whether each sample has any of these classes."""
    if index.targets is None or index.targets.ends is None:
        return np.isin(index.labels, class_indices)
    has_class = np.zeros(len(index), np.bool_)
    row_of_target = np.repeat(np.arange(len(index)), np.diff(index.targets.ends, prepend=0))
    has_class[row_of_target[np.isin(index.targets.values, class_indices)]] = True
    return has_class


def _is_listed(index: SampleIndex, file: str) -> npt.NDArray[np.bool_]:
    """Return bool [n], whether the file lists each sample; a line is an id if it is digits, else a path."""
    try:
        text = decode_list(read_regular(file))
    except (OSError, ValueError) as error:
        raise SettingError(
            f"--ids {file!r}: cannot be read ({os_reason(error)})",
            remedy="name a file with one id or path per line",
        ) from error
    lines = [line.strip() for line in re.split("[\r\n]", text) if line.strip()]
    if not lines:
        raise SettingError(f"--ids {file}: lists nothing", remedy="write one id or path per line")
    ids = {line: int(line) for line in lines if _ID.fullmatch(line)}
    is_listed = np.isin(index.ids, list(ids.values()))
    known_ids = set(index.ids[is_listed].tolist())
    line_of = {listed_path(line): line for line in lines if line not in ids}
    known_paths: set[str] = set()
    if line_of:  # reading all paths of a large index takes seconds
        for row in range(len(index)):
            path = index.path(row)
            if path in line_of:
                known_paths.add(line_of[path])
                is_listed[row] = True
    unknown = [line for line in lines if line not in known_paths and ids.get(line) not in known_ids]
    if unknown:
        raise SettingError(
            f"--ids {file}: {len(unknown):,} of these {len(lines):,} samples are not in the dataset (first: "
            f"{unknown[0]!r:.200})",
            remedy="leave them out",
        )
    return is_listed


def _check_not_enlarged(source: ConvertedSource, stored: Recipe, recipe: Recipe) -> None:
    """Raise SettingError if `recipe` would enlarge pictures that the conversion has shrunk."""
    if recipe.fit in images.KEEPING_FITS and not recipe.enlarge:
        return
    stored_sides, shapes = sides(stored.size), source.index.shapes
    if stored.fit == "keep-longer" and recipe.fit not in ("keep-longer", "pad") and shapes is not None:
        shrunk = shapes[shapes.max(axis=1) >= stored.size]
        if len(shrunk):
            stored_sides = tuple(shrunk.min(axis=0).tolist())
    if any(new > old for new, old in zip(sides(recipe.size), stored_sides, strict=True)):
        width_and_height = "x".join(map(str, reversed(stored_sides)))
        raise SettingError(
            f"size {size_text(recipe.size)} is more than the {width_and_height} that {source.root} stores, "
            f"and enlarging adds nothing",
            remedy="choose that or less, or convert the original pictures",
        )
