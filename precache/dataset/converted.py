"""Opening and reading a converted dataset: everything is compared with its checksum before it is used."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from precache.dataset.duplicates import Duplicates, find_duplicates
from precache.dataset.files import (
    READ_REMEDY,
    FileEntry,
    LocalFile,
    local_file_in_cache,
    local_file_in_folder,
)
from precache.dataset.index import (
    IndexFile,
    IndexFileError,
    SampleColumns,
    SampleIndex,
    SourceState,
    read_source_state,
)
from precache.dataset.manifest import MANIFEST_NAME, Manifest, ManifestError, parse_manifest
from precache.dataset.shard_table import ShardEntry
from precache.dataset.unfinished import unfinished_error
from precache.errors import DatasetError, PrecacheError, did_you_mean, os_reason, shell_command
from precache.storage import open_descriptor, read_descriptor, regular_status
from precache.storage.objects import ObjectStore
from precache.storage.retries import ObjectNotFoundError, fetch_right_bytes
from precache.storage.urls import Location, Url, locate

if TYPE_CHECKING:
    from precache.storage.shard_cache import Cache, CachedFiles


class OpenedFolder:
    """Folder of an open dataset, which detects that another dataset has taken its place.

    `convert --overwrite` replaces the folder as a whole, and every other command writes the manifest last. So
    while the manifest is the same file, all other files are the same, too. If it is another file, its digest
    tells whether it is a copy of the same dataset.

    Several threads may use it, and it can be sent to other processes.

    Attributes:
        path: path of the folder.
    """

    def __init__(self, path: Path, manifest_status: "_FileStatus | None", digest: str) -> None:
        self.path = path
        self._manifest_status, self._digest = manifest_status, digest

    @contextmanager
    def check_unchanged(self) -> Iterator[None]:
        """Check after the block that what it has read of the folder is of the dataset that was opened.

        Raises:
            DatasetError: another dataset is there, or the dataset is gone; instead of an error of the block.
        """
        try:
            yield
        except (PrecacheError, OSError, ValueError):
            self._check()  # another dataset is why the block failed
            raise
        self._check()  # after the block, or the dataset might be replaced between check and block

    @contextmanager
    def local_file(self, file: FileEntry) -> Iterator[Path]:
        """Yield the path of a file of the dataset, see `LocalFile`; raises as `check_unchanged`."""
        with self.check_unchanged():
            yield self.path / file.name

    def _check(self) -> None:
        status = _manifest_status(self.path)
        if status == self._manifest_status:
            return
        with suppress(DatasetError):
            if open_dataset(self.path).digest == self._digest:
                self._manifest_status = status
                return
        change = "moved or removed" if status is None else "replaced by another"
        raise DatasetError(
            f"this dataset was {change} while it was read",
            path=self.path,
            remedy="open it again, and start anew",
        )


class _FileStatus(NamedTuple):
    """Inode, size and time of a file, by which every machine tells it from a file that replaces it."""

    inode: int
    bytes: int
    modified_ns: int


def _manifest_status(folder: Path) -> _FileStatus | None:
    """Status of the manifest's file; None if there is none."""
    try:
        status = os.stat(folder / MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _not_converted_error(folder, error) from error
    return _file_status(status)


def _file_status(status: os.stat_result) -> _FileStatus:
    return _FileStatus(status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class ConvertedDataset:
    """An open dataset: its manifest, and the files that the manifest names.

    Attributes:
        path: folder with the files; for a dataset at a URL, the folder of the cache that they are fetched to.
        manifest: the dataset's description, read from `dataset.json`.
        digest: SHA-256 (hex) that identifies the dataset: that of its manifest without the source's times.
        mirror: cache that fetches the files of a dataset at a URL; None for a dataset in a folder.
        folder: the open folder `path`; None for a dataset at a URL.
    """

    path: Path
    manifest: Manifest
    digest: str
    mirror: "CachedFiles | None" = None
    folder: OpenedFolder | None = None

    @property
    def location(self) -> Location:
        """Folder or URL of the dataset, for messages."""
        return self.path if self.mirror is None else self.mirror.url

    @contextmanager
    def local_files(self, *files: FileEntry) -> Iterator[None]:
        """Keep these files in the folder `path` until the end of the block; files of a URL are fetched first.

        Raises:
            StorageError: a file cannot be fetched.
            DatasetError: another dataset has taken the place of this one.
        """
        with ExitStack() as stack:
            for file in files:
                stack.enter_context(self._local_file(file))
            yield

    def shard_path(self, shard: ShardEntry) -> Path:
        """Path of the shard's file; fetches the shard's files if they are at a URL and not in the cache."""
        with self.local_files(*shard.files):
            return self.path / shard.file_name

    def read_index(self, split: str | None = None) -> SampleIndex:
        """Open the index of the samples of a split, or of all splits: ids, labels, checksums and more.

        Rows are in written order.

        Args:
            split: name of the split; None for all.

        Raises:
            DatasetError: the index is damaged; raised here, or when a column is first used.
        """
        file = IndexFile(self._local_index_file, self.manifest.index)
        index = SampleIndex(SampleColumns(file, self.manifest.limits))
        return index if split is None else index.view_rows(self.manifest.shards.rows_of_split(split))

    def find_duplicates(self) -> Duplicates:
        """Find the pictures of equal content.

        Raises:
            DatasetError: the index is damaged.
        """
        shards = self.manifest.shards
        return find_duplicates(self.read_index(), np.repeat(shards.splits, shards.samples))

    def read_source_state(self) -> SourceState:
        """Read times and checksums of all pictures of the source, in scan order."""
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


def open_dataset(path: str | PathLike[str] | Url, cache: "Cache | None" = None) -> ConvertedDataset:
    """Open a converted dataset: read its manifest, and compare it with its checksum.

    Args:
        path: folder of the dataset, or its URL: `s3://BUCKET/PREFIX`, `gs://`, `az://`, `https://`. The files
            of a URL are fetched when they are first used.
        cache: where fetched files are kept; unused for a folder.

    Raises:
        DatasetError: there is no such folder, or no manifest in it, or it is damaged, edited or too new.
        StorageError: the storage at the URL refuses, or does not answer.
    """
    location = locate(path)
    if isinstance(location, Path):
        return _open_in_folder(location)
    url = location

    def fetch() -> ConvertedDataset:
        return dataset_from_manifest(url, read_manifest_at(url), cache)

    return fetch_right_bytes(fetch, (ManifestError, IndexFileError))


def _open_in_folder(folder: Path) -> ConvertedDataset:
    """Open the dataset in a folder; if another one takes its place meanwhile, open that."""
    path = folder / MANIFEST_NAME
    try:
        with open_descriptor(path) as file:
            file_status = regular_status(file, path)
            raw = read_descriptor(file, file_status.st_size)
    except OSError as error:
        raise _not_converted_error(folder, error) from error
    status = _file_status(file_status)
    try:
        manifest, digest = parse_manifest(raw, path, local_file_in_folder(folder))
    except DatasetError:
        if _manifest_status(folder) == status:
            raise
        return _open_in_folder(folder)  # the index that was read is another dataset's
    return ConvertedDataset(folder, manifest, digest, folder=OpenedFolder(folder, status, digest))


def dataset_from_manifest(url: Url, raw: bytes, cache: "Cache | None" = None) -> ConvertedDataset:
    """Open the dataset at `url`, whose manifest has the bytes `raw`; see `open_dataset`.

    Raises:
        DatasetError: the manifest, or the index that it names, is damaged.
        StorageError: the storage refuses, or does not answer.
    """
    from precache.storage.shard_cache import Cache, CachedFiles

    mirror = CachedFiles(url, hashlib.sha256(raw).hexdigest(), cache or Cache())
    manifest, digest = parse_manifest(raw, url / MANIFEST_NAME, local_file_in_cache(mirror))
    return ConvertedDataset(mirror.folder, manifest, digest, mirror)


def read_manifest_at(url: Url) -> bytes:
    """Read the bytes of the manifest of the dataset at a URL; raises as `open_dataset`."""
    try:
        return ObjectStore(url).get(MANIFEST_NAME)
    except ObjectNotFoundError as error:
        raise DatasetError(
            f"not a converted dataset (no {MANIFEST_NAME} there)",
            path=url,
            remedy="check the URL, and that the upload was finished; pictures are copied to this machine, "
            "converted, and pushed",
        ) from error


def _not_converted_error(folder: Path, error: OSError) -> DatasetError:
    """Make the error to raise instead of `error`, which reading the manifest in `folder` has raised."""
    if isinstance(error, FileNotFoundError):
        if folder.is_dir():
            unfinished = unfinished_error(folder)
            if unfinished is not None:
                return unfinished
            return DatasetError(
                f"not a converted dataset (no {MANIFEST_NAME} in it)",
                path=folder,
                remedy=f"if these are pictures: {shell_command('precache convert', folder)} DST "
                f"--format FORMAT",
            )
        problem, suggestion = "not a converted dataset (no such folder)", did_you_mean(folder)
        if suggestion:
            return DatasetError(f"{problem}{suggestion}", path=folder)
        return DatasetError(problem, path=folder, remedy="'precache convert' makes one")
    if isinstance(error, NotADirectoryError):
        return DatasetError(
            "not a converted dataset (a file, not a folder)",
            path=folder,
            remedy="name the folder of one",
        )
    return DatasetError(
        f"cannot be read ({os_reason(error)})",
        path=folder / MANIFEST_NAME,
        remedy=READ_REMEDY,
    )
