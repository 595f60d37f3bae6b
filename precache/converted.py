"""A converted folder, opened: nothing in it is trusted before it was compared with its checksum."""

import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from precache import index
from precache.errors import DatasetError, shell_command
from precache.images import MAX_KEPT_SIDE
from precache.index import SampleIndex, Sizes, SourceState
from precache.index_file import open_index
from precache.index_rows import read_lazily
from precache.manifest import MANIFEST_NAME, Manifest, parse_manifest
from precache.shard_table import ShardEntry
from precache.storage import read_regular

WHOLE_SAMPLES = 1_000_000
"""An index of more is not read as a whole by who serves samples: see `precache.index_file`."""


@dataclass(frozen=True, slots=True)
class ConvertedDataset:
    """A folder that holds a manifest and the files that it names.

    Attributes:
        digest: SHA-256 (hex) that identifies the dataset: of its manifest, without the times of its source.
    """

    path: Path
    manifest: Manifest
    digest: str

    def shard_path(self, shard: ShardEntry) -> Path:
        """Path of the shard's file."""
        return self.path / shard.file_name

    def read_index(self, split: str | None = None, *, removed: bool = False) -> SampleIndex:
        """Ids, labels, checksums and more of the split's samples, or of all, in written order.

        Args:
            removed: with those that are served no more: a row for each that the shards hold.

        Raises:
            DatasetError: the index is damaged, or does not fit the manifest.
        """
        whole = index.read_index(self.path, self.manifest.index, self.manifest.version)
        _check_index(self.path / self.manifest.index.name, whole, self.manifest)
        chosen = np.ones(len(whole), np.bool_) if removed else whole.served
        if split is not None:
            shards = self.manifest.shards
            chosen &= np.repeat(shards.of_split(split), shards.samples)
        return whole if chosen.all() else whole.select(chosen)

    def open_index(self, split: str) -> SampleIndex:
        """As `read_index`, with a row for each that the shards hold; of a large set read when it is needed.

        Then no row costs memory before it is asked for, and what is asked for of a shard is compared with
        the shard's checksum; that no two samples have the same id is taken for granted.

        Raises:
            DatasetError: as `read_index`, now or when a row is asked for.
        """
        manifest = self.manifest
        if manifest.version < 5 or manifest.stored_samples <= WHOLE_SAMPLES:
            return self.read_index(split, removed=True)
        chosen = manifest.shards.of_split(split)
        limits = {"ids": (0, max(manifest.scanned, manifest.next_id) - 1), "shapes": (1, MAX_KEPT_SIDE)}
        classes = (0, len(manifest.classes) - 1)
        limits["labels"] = classes if manifest.target == "class" else (-1, -1)
        if manifest.target == "classes":
            limits["targets"] = classes
        found = read_lazily(open_index(self.path, manifest.index, manifest.shards, chosen, limits))
        path = self.path / manifest.index.name
        gone = 0 if found.removed is None else int(found.removed.sum())
        if not _kinds_fit(found, manifest) or gone != manifest.removed.get(split, 0):
            raise _unfit(path, manifest)
        return found

    def read_source_sizes(self) -> Sizes:
        """int32 [samples, 2]: width and height of all source pictures, in written order."""
        return self.read_index().source_sizes

    def read_source_state(self) -> SourceState | None:
        """Sizes, times and checksums of all pictures of the source, in scan order; None in version 2."""
        entry = self.manifest.source_state
        return None if entry is None else index.read_source_state(self.path, entry)


def is_converted(path: Path) -> bool:
    """Whether `path` is a folder with a manifest; whether that can be read is another question."""
    return os.path.lexists(path / MANIFEST_NAME)


def open_dataset(path: str | PathLike[str]) -> ConvertedDataset:
    """Read the manifest of the converted dataset in folder `path`, and compare it with its checksum.

    Raises:
        DatasetError: no such folder, no manifest in it, or one that is damaged, edited or too new.
    """
    dataset, problem = open_unchecked(path)
    if problem is not None:
        raise DatasetError(f"{problem}; convert the dataset again with --overwrite")
    return dataset


def open_unchecked(path: str | PathLike[str]) -> tuple[ConvertedDataset, str | None]:
    """As `open_dataset`, but an edited manifest is no error: what is wrong with it comes too, in one line.

    Raises:
        DatasetError: as `open_dataset`, for all else.
    """
    folder = Path(path)
    manifest_path = folder / MANIFEST_NAME
    try:
        raw = read_regular(manifest_path)
    except OSError as error:
        raise DatasetError(_why_not_converted(folder, error)) from error
    manifest, digest, intact = parse_manifest(raw, manifest_path)
    dataset = ConvertedDataset(folder, manifest, digest)
    if intact:
        return dataset, None
    return dataset, f"{manifest_path}: was edited or damaged (its checksum does not fit its content)"


def _why_not_converted(folder: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        if folder.is_dir():
            remedy = f"if these are pictures: {shell_command('precache convert', folder)} DST --format FORMAT"
            return f"{folder}: not a converted dataset (no {MANIFEST_NAME} in it); {remedy}"
        remedy = f"make one with: {shell_command('precache convert SRC', folder)} --format FORMAT"
        return f"{folder}: not a converted dataset (no such folder); {remedy}"
    if isinstance(error, NotADirectoryError):
        return f"{folder}: not a converted dataset (a file, not a folder); name the folder of one"
    return f"{folder / MANIFEST_NAME}: cannot be read ({error.strerror}); check its permissions and its disk"


def _check_index(path: Path, whole: SampleIndex, manifest: Manifest) -> None:
    """Raise DatasetError unless the index fits the manifest; then ids and labels can be trusted."""
    fits = (
        len(whole) == manifest.stored_samples
        and whole.ids.min() >= 0
        and whole.ids.max() < max(manifest.scanned, manifest.next_id)
        and _count_removed(whole, manifest) == manifest.removed
        and len(np.unique(whole.ids)) == len(whole)
        and _kinds_fit(whole, manifest)
        and _targets_fit(whole, manifest)
        and (whole.shapes is None or (whole.shapes.min() > 0 and whole.shapes.max() <= MAX_KEPT_SIDE))
    )
    if not fits:
        raise _unfit(path, manifest)


def _unfit(path: Path, manifest: Manifest) -> DatasetError:
    return DatasetError(
        f"{path}: does not fit the manifest, which has {manifest.stored_samples:,} samples in "
        f"{len(manifest.classes):,} classes; convert the dataset again with --overwrite"
    )


def _count_removed(whole: SampleIndex, manifest: Manifest) -> dict[str, int]:
    """As of the manifest."""
    split_of = np.repeat(manifest.shards.splits, manifest.shards.samples)
    splits, counts = np.unique(split_of[~whole.served], return_counts=True)
    names = [manifest.shards.split_names[split] for split in splits.tolist()]
    return dict(zip(names, counts.tolist(), strict=True))


def _kinds_fit(found: SampleIndex, manifest: Manifest) -> bool:
    """Whether targets, fields and shapes are those that the manifest says there are."""
    targets = found.targets
    kinds = {"number": ("int", "float", "vector"), "classes": ("ragged",)}.get(manifest.target, ())
    return (
        (targets is None) == (not kinds)
        and (targets is None or (targets.kind in kinds and (kinds != ("ragged",) or not targets.row_shape)))
        and {name: column.kind for name, column in found.fields.items()} == manifest.fields
        and (found.shapes is None) == (manifest.recipe.stored_size is not None)
    )


def _targets_fit(whole: SampleIndex, manifest: Manifest) -> bool:
    """Whether labels and targets name classes that there are."""
    labels, targets = whole.labels, whole.targets
    if manifest.target == "class":
        return bool(labels.min() >= 0 and labels.max() < len(manifest.classes))
    if (labels != -1).any() or targets is None or manifest.target == "number":
        return not (labels != -1).any()
    named = targets.values
    inside = not len(named) or (named.min() >= 0 and named.max() < len(manifest.classes))
    return named.dtype == np.int64 and bool(inside)
