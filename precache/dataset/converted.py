"""A converted folder, opened: nothing in it is trusted before it was compared with its checksum."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from precache.dataset import index
from precache.dataset.files import FileEntry, in_folder
from precache.dataset.index import SampleIndex, Sizes, SourceState
from precache.dataset.index_file import open_index
from precache.dataset.index_rows import read_lazily
from precache.dataset.shard_table import ShardEntry, TableError
from precache.errors import DatasetError, did_you_mean, shell_command
from precache.images import MAX_KEPT_SIDE
from precache.manifest import MANIFEST_NAME, Manifest, parse_manifest
from precache.storage import read_regular
from precache.storage.objects import ObjectStore
from precache.storage.retries import ObjectNotFoundError
from precache.storage.urls import Location, Url, locate

if TYPE_CHECKING:
    from precache.storage.mirror import Cache, Mirror

WHOLE_SAMPLES = 1_000_000
"""An index of more is not read as a whole by who serves samples: see `precache.dataset.index_file`."""
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
        whole = self._read(entry, lambda: index.read_index(self.path, entry))
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
            DatasetError: as `read_index`, now or when a row is asked for; or no sample of the split is left.
        """
        manifest = self.manifest
        if manifest.split_samples[split] == 0:
            raise DatasetError(
                f"{self.place}: updates have removed all of split {split!r}; choose another split"
            )
        if manifest.stored_samples <= WHOLE_SAMPLES:
            found = self.read_index(split, removed=True)
            return found if not found.served.all() else replace(found, removed=None)
        chosen = manifest.shards.of_split(split)
        limits = {"ids": (0, max(manifest.scanned, manifest.next_id) - 1), "shapes": (1, MAX_KEPT_SIDE)}
        classes = (0, len(manifest.classes) - 1)
        limits["labels"] = classes if manifest.target == "class" else (-1, -1)
        if manifest.target == "classes":
            limits["targets"] = classes
        held = in_folder(self.path) if self.mirror is None else self.mirror.held
        found = read_lazily(open_index(held, manifest.index, manifest.shards, chosen, limits))
        path = self.path / manifest.index.name
        gone = 0 if found.removed is None else int(found.removed.sum())
        found = found if gone else replace(found, removed=None)
        if not _kinds_fit(found, manifest) or gone != manifest.removed.get(split, 0):
            raise _unfit(path, manifest)
        return found

    def read_source_sizes(self) -> Sizes:
        """int32 [samples, 2]: width and height of all source pictures, in written order."""
        return self.read_index().source_sizes

    def read_source_state(self) -> SourceState:
        """Sizes, times and checksums of all pictures of the source, in scan order."""
        entry = self.manifest.source_state
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
    (manifest, digest, intact), folder, mirror = _parse(place, cache)
    dataset = ConvertedDataset(folder, manifest, digest, mirror)
    if intact:
        return dataset, None
    return dataset, f"{place / MANIFEST_NAME}: was edited or damaged (its checksum does not fit its content)"


def _parse(
    place: Location, cache: "Cache | None", tries: int = 3
) -> tuple[tuple[Manifest, str, bool], Path, "Mirror | None"]:
    """What the manifest says, where the other files are, and what fetches those of a URL.

    What comes damaged from a storage is asked for again.
    """
    raw = _read_manifest(place)
    if isinstance(place, Path):
        return parse_manifest(raw, place / MANIFEST_NAME, in_folder(place)), place, None
    from precache.storage.mirror import Cache, Mirror

    mirror = Mirror(place, hashlib.sha256(raw).hexdigest(), cache or Cache())
    try:
        parsed = parse_manifest(raw, place / MANIFEST_NAME, mirror.held)
        if parsed[2] or tries == 1:
            return parsed, mirror.folder, mirror
    except DatasetError as error:
        if tries == 1:
            raise
        if isinstance(error, TableError):
            mirror.forget(error.file_name)
    return _parse(place, cache, tries - 1)


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
        near = did_you_mean(folder) or "; 'precache convert' makes one"
        return f"{folder}: not a converted dataset (no such folder){near}"
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
