"""A converted folder, opened: nothing in it is trusted before it was compared with its checksum."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from precache import index
from precache.errors import DatasetError, shell_command
from precache.files import FileEntry
from precache.images import MAX_KEPT_SIDE
from precache.index import SampleIndex, Sizes, SourceState
from precache.manifest import MANIFEST_NAME, Manifest, ShardEntry, parse_manifest
from precache.storage import read_regular
from precache.storage.objects import ObjectStore
from precache.storage.retries import ObjectNotFoundError
from precache.storage.urls import Location, Url, locate

if TYPE_CHECKING:
    from precache.storage.mirror import Cache, Mirror

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ConvertedDataset:
    """A folder that holds a manifest and the files that it names.

    Attributes:
        path: where its files lie; of a dataset at a URL where they lie once they are fetched.
        digest: SHA-256 (hex) that identifies the dataset: of its manifest, without the times of its source.
        mirror: fetches the files of a dataset at a URL; None where they lie in the folder `path`.
    """

    path: Path
    manifest: Manifest
    digest: str
    mirror: "Mirror | None" = None

    @property
    def place(self) -> Location:
        """The folder, or the URL: what people call the dataset."""
        return self.path if self.mirror is None else self.mirror.url

    @contextmanager
    def held(self, *files: FileEntry) -> Iterator[None]:
        """Have these files lie in `path` until the end of the block: those of a URL are fetched.

        Raises:
            StorageError: one cannot be fetched.
        """
        with ExitStack() as stack:
            if self.mirror is not None:
                for file in files:
                    stack.enter_context(self.mirror.held(file))
            yield

    def shard_path(self, shard: ShardEntry) -> Path:
        """Path of the shard's file, whose files are fetched if they are not there."""
        with self.held(*shard.files):
            return self.path / shard.file_name

    def read_index(self, split: str | None = None, *, removed: bool = False) -> SampleIndex:
        """Ids, labels, checksums and more of the split's samples, or of all, in written order.

        Args:
            removed: with those that are served no more: a row for each that the shards hold.

        Raises:
            DatasetError: the index is damaged, or does not fit the manifest.
        """
        entry = self.manifest.index
        whole = self._read(entry, lambda: index.read_index(self.path, entry, self.manifest.version))
        _check_index(self.path / self.manifest.index.name, whole, self.manifest)
        chosen = np.ones(len(whole), np.bool_) if removed else whole.served
        if split is not None:
            in_split = [shard.split == split for shard in self.manifest.shards]
            chosen &= np.repeat(in_split, [shard.samples for shard in self.manifest.shards])
        return whole if chosen.all() else whole.select(chosen)

    def read_source_sizes(self) -> Sizes:
        """int32 [samples, 2]: width and height of all source pictures, in written order."""
        return self.read_index().source_sizes

    def read_source_state(self) -> SourceState | None:
        """Sizes, times and checksums of all pictures of the source, in scan order; None in version 2."""
        entry = self.manifest.source_state
        if entry is None:
            return None
        return self._read(entry, lambda: index.read_source_state(self.path, entry))

    def _read(self, file: FileEntry, read: Callable[[], T]) -> T:
        """What `read` makes of the file; what was fetched, and damaged since, is fetched again."""
        try:
            with self.held(file):
                return read()
        except DatasetError:
            if self.mirror is None:
                raise
        self.mirror.forget(file.name)
        with self.held(file):
            return read()


def is_converted(path: Location) -> bool:
    """Whether `path` is a folder, or a URL, with a manifest; whether that can be read is another question."""
    if isinstance(path, Url):
        return ObjectStore(path).find(MANIFEST_NAME) is not None
    return os.path.lexists(path / MANIFEST_NAME)


def open_dataset(path: str | PathLike[str] | Url, cache: "Cache | None" = None) -> ConvertedDataset:
    """Read the manifest of the converted dataset in folder `path`, and compare it with its checksum.

    Args:
        path: or a URL: `s3://BUCKET/PREFIX`, `gs://`, `az://`, `https://`. Its files are fetched when they
            are first asked for.
        cache: where they are kept; only of a URL.

    Raises:
        DatasetError: no such folder, no manifest in it, or one that is damaged, edited or too new.
        StorageError: the storage at the URL refuses, or does not answer.
    """
    dataset, problem = open_unchecked(path, cache)
    if problem is not None:
        raise DatasetError(f"{problem}; convert the dataset again with --overwrite")
    return dataset


def open_unchecked(
    path: str | PathLike[str] | Url, cache: "Cache | None" = None
) -> tuple[ConvertedDataset, str | None]:
    """As `open_dataset`, but an edited manifest is no error: what is wrong with it comes too, in one line.

    Raises:
        DatasetError: as `open_dataset`, for all else.
    """
    place = locate(path)
    raw, (manifest, digest, intact) = _parse(place)
    if isinstance(place, Url):
        from precache.storage.mirror import Cache, Mirror

        mirror = Mirror(place, hashlib.sha256(raw).hexdigest(), cache or Cache())
        dataset = ConvertedDataset(mirror.folder, manifest, digest, mirror)
    else:
        dataset = ConvertedDataset(place, manifest, digest)
    if intact:
        return dataset, None
    return dataset, f"{place / MANIFEST_NAME}: was edited or damaged (its checksum does not fit its content)"


def _parse(place: Location, tries: int = 3) -> tuple[bytes, tuple[Manifest, str, bool]]:
    """The manifest's bytes, and what they say; what comes damaged from a storage is asked for again."""
    raw = _read_manifest(place)
    try:
        parsed = parse_manifest(raw, place / MANIFEST_NAME)
        if parsed[2] or isinstance(place, Path) or tries == 1:
            return raw, parsed
    except DatasetError:
        if isinstance(place, Path) or tries == 1:
            raise
    return _parse(place, tries - 1)


def _read_manifest(place: Location) -> bytes:
    if isinstance(place, Path):
        try:
            return read_regular(place / MANIFEST_NAME)
        except OSError as error:
            raise DatasetError(_why_not_converted(place, error)) from error
    try:
        return ObjectStore(place).get(MANIFEST_NAME)
    except ObjectNotFoundError as error:
        raise DatasetError(
            f"{place}: not a converted dataset (no {MANIFEST_NAME} there); is the URL right, and was the "
            f"upload finished? if these are pictures: {shell_command('precache convert', place)} DST "
            f"--format shards"
        ) from error


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
        and _targets_fit(whole, manifest)
        and {name: column.kind for name, column in whole.fields.items()} == manifest.fields
        and (whole.shapes is None) == (manifest.recipe.stored_size is not None)
        and (whole.shapes is None or (whole.shapes.min() > 0 and whole.shapes.max() <= MAX_KEPT_SIDE))
    )
    if not fits:
        raise DatasetError(
            f"{path}: does not fit the manifest, which has {manifest.stored_samples:,} samples in "
            f"{len(manifest.classes):,} classes; convert the dataset again with --overwrite"
        )


def _count_removed(whole: SampleIndex, manifest: Manifest) -> dict[str, int]:
    """As of the manifest."""
    split_of = np.repeat([shard.split for shard in manifest.shards], [s.samples for s in manifest.shards])
    splits, counts = np.unique(split_of[~whole.served], return_counts=True)
    return dict(zip(splits.tolist(), counts.tolist(), strict=True))


def _targets_fit(whole: SampleIndex, manifest: Manifest) -> bool:
    """Whether labels and targets are of the manifest's kind, and name classes that there are."""
    labels, targets = whole.labels, whole.targets
    if manifest.target == "class":
        return targets is None and labels.min() >= 0 and labels.max() < len(manifest.classes)
    if (labels != -1).any() or (targets is None) != (manifest.target == "none"):
        return False
    if targets is None:
        return True
    if manifest.target == "number":
        return targets.kind in ("int", "float", "vector")
    named = targets.values
    inside = not len(named) or (named.min() >= 0 and named.max() < len(manifest.classes))
    return targets.kind == "ragged" and named.dtype == np.int64 and named.ndim == 1 and bool(inside)
