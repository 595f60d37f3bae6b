"""A converted folder, opened: everything is compared with its checksum before it is used."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from precache.dataset.duplicates import Duplicates, find_duplicates
from precache.dataset.files import FileEntry, LocalFile, local_file_in_cache, local_file_in_folder
from precache.dataset.index import (
    IndexFile,
    IndexFileError,
    SampleColumns,
    SampleIndex,
    SourceState,
    damaged_index_error,
    read_source_state,
)
from precache.dataset.manifest import MANIFEST_NAME, Manifest, ManifestError, parse_manifest
from precache.dataset.shard_table import ShardEntry, ShardTable
from precache.errors import DatasetError, PrecacheError, did_you_mean, os_reason, shell_command
from precache.formats import FORMATS, StoredSample
from precache.storage import read_regular
from precache.storage.objects import ObjectStore
from precache.storage.retries import FETCHES, ObjectNotFoundError, with_retries
from precache.storage.urls import Location, Url, locate

if TYPE_CHECKING:
    from precache.storage.shard_cache import Cache, CachedFiles


class OpenedFolder:
    """The folder of a dataset, which refuses what another dataset has put there since this one was opened.

    `convert --overwrite` puts a folder in the place of another, and all others write the manifest last. So as
    long as the manifest is the file that it was, all others are; if it is another one, what it says of
    the shards tells whether the dataset was updated, which leaves all shards as they are, or replaced.

    Several threads may use it, and it can be sent to other processes.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Path, manifest_file: tuple[int, ...] | None, shards: ShardTable) -> None:
        self.path = path
        self._manifest_file, self._shards = manifest_file, shards

    @contextmanager
    def check_unchanged(self) -> Iterator[None]:
        """What is read of the folder in the block is of the dataset that was opened.

        Raises:
            DatasetError: it is of another one, or the dataset is gone.
        """
        try:
            yield
        except (PrecacheError, OSError, ValueError):
            self._check()  # that it was replaced is why
            raise
        self._check()  # afterwards, or it might be replaced between

    @contextmanager
    def local_file(self, file: FileEntry) -> Iterator[Path]:
        """A `LocalFile` of its files; raises as `check_unchanged`."""
        with self.check_unchanged():
            yield self.path / file.name

    def _check(self) -> None:
        manifest_file = _manifest_file(self.path)
        if manifest_file == self._manifest_file:
            return
        with suppress(DatasetError):
            now = open_dataset(self.path)
            if now.manifest.shards.begins_with(self._shards):
                self._manifest_file = manifest_file
                return
        what = "moved or removed" if manifest_file is None else "replaced by another"
        raise DatasetError(
            f"{self.path}: this dataset was {what} while it was read; open it again, and start anew"
        )


def _manifest_file(folder: Path) -> tuple[int, ...] | None:
    """What tells the manifest's file from others at its place, on every machine; None: it is not there."""
    try:
        status = os.stat(folder / MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DatasetError(_why_not_converted(folder, error)) from error
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class ConvertedDataset:
    """A folder that holds a manifest and the files that it names.

    Attributes:
        path: where its files lie; of a dataset at a URL where they lie once they are fetched.
        digest: SHA-256 (hex) that identifies the dataset: of its manifest, without the times of its source.
        mirror: fetches the files of a dataset at a URL; None where they lie in the folder `path`.
        folder: that folder, as it was opened; None at a URL.
    """

    path: Path
    manifest: Manifest
    digest: str
    mirror: "CachedFiles | None" = None
    folder: OpenedFolder | None = None

    @property
    def place(self) -> Location:
        """The folder or the URL of the dataset, for messages."""
        return self.path if self.mirror is None else self.mirror.url

    @contextmanager
    def local_files(self, *files: FileEntry) -> Iterator[None]:
        """Have these files lie in `path` until the end of the block: those of a URL are fetched.

        Raises:
            StorageError: one cannot be fetched.
            DatasetError: another dataset lies in the folder meanwhile.
        """
        with ExitStack() as stack:
            for file in files:
                stack.enter_context(self._local_file(file))
            yield

    def shard_path(self, shard: ShardEntry) -> Path:
        """Path of the shard's file, whose files are fetched if they are not there."""
        with self.local_files(*shard.files):
            return self.path / shard.file_name

    def iter_shards(self) -> Iterator[tuple[ShardEntry, SampleIndex]]:
        """Each shard, and what the index has of its samples, removed ones too; raises as `read_index`."""
        index, start = self.read_index(removed=True), 0
        for shard in self.manifest.shards:
            yield shard, index.select(np.arange(start, start + shard.samples))
            start += shard.samples

    def read_shard(self, shard: ShardEntry, index: SampleIndex) -> Iterator[tuple[int, StoredSample]]:
        """The samples of a shard that are served, each with its row in `index`, which is of this shard alone.

        Raises:
            DatasetError: the shard is damaged, or holds other samples.
        """
        path, rows, served = self.path / shard.file_name, 0, index.served
        with self.local_files(*shard.files):
            for row, sample in enumerate(FORMATS[self.manifest.recipe.format].read_shard(path)):
                if row >= len(index) or (not sample.damage and sample.id != index.ids[row]):
                    raise DatasetError(
                        f"{path}: holds sample {sample.id}, which the dataset's index does not"
                    )
                rows += 1
                if served[row]:
                    yield row, sample
        if rows != len(index):
            raise DatasetError(f"{path}: expected {len(index):,} samples, got {rows:,}")

    def read_index(self, split: str | None = None, *, removed: bool = False) -> SampleIndex:
        """Ids, labels, checksums and more of the split's samples, or of all, in written order.

        Args:
            removed: with those that are served no more: a row for each that the shards hold.

        Raises:
            DatasetError: the index is damaged, now or when a column is first asked for.
        """
        shards, limits = self.manifest.shards, self.manifest.limits
        file = IndexFile(self._local_index_file, self.manifest.index)
        index = SampleIndex(SampleColumns(file, limits))
        if "removed" in index:
            splits = np.repeat(shards.splits, shards.samples)[~index.served]
            removed_of = np.bincount(splits, minlength=len(shards.split_names))
            if removed_of.tolist() != [self.manifest.removed.get(name, 0) for name in shards.split_names]:
                raise damaged_index_error(file.path, "other samples are removed than the manifest says")
        if split is not None:
            index = index.at(shards.rows_of_split(split))
        if removed or not self.manifest.removed:
            return index
        return index.at(np.flatnonzero(index.served))

    def find_duplicates(self) -> Duplicates:
        """The pictures of equal content.

        Raises:
            DatasetError: the index is damaged.
        """
        shards = self.manifest.shards
        return find_duplicates(self.read_index(removed=True), np.repeat(shards.splits, shards.samples))

    def read_source_state(self) -> SourceState:
        """Sizes, times and checksums of all pictures of the source, in scan order."""
        return read_source_state(IndexFile(self._local_index_file, self.manifest.index))

    @property
    def _local_file(self) -> LocalFile:
        if self.mirror is not None:
            return self.mirror.local_file
        assert self.folder is not None
        return self.folder.local_file

    @property
    def _local_index_file(self) -> LocalFile:
        return self._local_file if self.mirror is None else local_file_in_cache(self.mirror)


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
    place = locate(path)
    if isinstance(place, Path):
        manifest_file = _manifest_file(place)  # before it is read: if it is replaced meanwhile, that is seen
        raw = read_manifest(place)
        manifest, digest = parse_manifest(raw, place / MANIFEST_NAME, local_file_in_folder(place))
        folder = OpenedFolder(place, manifest_file, manifest.shards)
        return ConvertedDataset(place, manifest, digest, folder=folder)
    url = place

    def fetch() -> ConvertedDataset:
        return dataset_at(url, read_manifest(url), cache)

    came_damaged = (ManifestError, IndexFileError)
    return with_retries(fetch, [0.0] * (FETCHES - 1), lambda error: isinstance(error, came_damaged))


def dataset_at(url: Url, raw: bytes, cache: "Cache | None" = None) -> ConvertedDataset:
    """The dataset at `url` whose manifest has these bytes; see `open_dataset`.

    Raises:
        DatasetError: the manifest, or the index that it names, is damaged.
        StorageError: the storage refuses, or does not answer.
    """
    from precache.storage.shard_cache import Cache, CachedFiles

    mirror = CachedFiles(url, hashlib.sha256(raw).hexdigest(), cache or Cache())
    manifest, digest = parse_manifest(raw, url / MANIFEST_NAME, local_file_in_cache(mirror))
    return ConvertedDataset(mirror.folder, manifest, digest, mirror)


def read_manifest(place: Location) -> bytes:
    """The bytes of the manifest of the dataset in a folder or at a URL; see `open_dataset`."""
    if isinstance(place, Path):
        try:
            return read_regular(place / MANIFEST_NAME)
        except OSError as error:
            raise DatasetError(_why_not_converted(place, error)) from error
    try:
        return ObjectStore(place).get(MANIFEST_NAME)
    except ObjectNotFoundError as error:
        raise DatasetError(
            f"{place}: not a converted dataset (no {MANIFEST_NAME} there); check the URL, and that the "
            f"upload was finished; if these are pictures: {shell_command('precache convert', place)} DST "
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
    return (
        f"{folder / MANIFEST_NAME}: cannot be read ({os_reason(error)}); check its permissions and its disk"
    )
