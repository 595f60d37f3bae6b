"""Places that hold datasets for other machines: object storages, and repositories of Hugging Face."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from precache.dataset.files import FileEntry
from precache.errors import SettingError
from precache.manifest import MANIFEST_NAME
from precache.storage.objects import ObjectStore
from precache.storage.retries import ObjectNotFoundError
from precache.storage.urls import Url, locate


class Remote(Protocol):
    """Where a dataset is kept that other machines read; every method raises StorageError."""

    def read(self, name: str) -> bytes | None:
        """A small file; None if there is none."""

    def holding(self, files: Sequence[FileEntry], folder: Path) -> set[str]:
        """Names of those of `files`, which lie in `folder`, that are there with the same bytes."""

    def send(self, path: Path, file: FileEntry) -> None:
        """Put the file at `path` there."""

    def commit(self, content: bytes) -> None:
        """Put the manifest there: everything that it names is."""

    def withdraw(self) -> None:
        """Take the manifest away, so that nobody begins to read what is about to change."""

    def fetch(self, file: FileEntry, descriptor: int) -> None:
        """Write what is there into an open file."""


class Objects:
    """Objects below a URL, each with its CRC-32C beside it."""

    def __init__(self, url: Url) -> None:
        self._store = ObjectStore(url)

    def read(self, name: str) -> bytes | None:
        """As of `Remote`."""
        try:
            return self._store.get(name)
        except ObjectNotFoundError:
            return None

    def holding(self, files: Sequence[FileEntry], folder: Path) -> set[str]:
        """As of `Remote`."""
        sizes = {found.name: found.bytes for found in self._store.list()}
        same_size = [file for file in files if file.bytes and sizes.get(file.name) == file.bytes]
        return {file.name for file in same_size if self._store.crc32c_of(file.name) == file.crc32c}

    def send(self, path: Path, file: FileEntry) -> None:
        """As of `Remote`."""
        self._store.upload(path, file.name, crc32c=file.crc32c)

    def commit(self, content: bytes) -> None:
        """As of `Remote`."""
        self._store.put(MANIFEST_NAME, content)

    def withdraw(self) -> None:
        """As of `Remote`."""
        self._store.delete([MANIFEST_NAME])

    def fetch(self, file: FileEntry, descriptor: int) -> None:
        """As of `Remote`."""
        self._store.download(file.name, descriptor, file.bytes)


def open_remote(place: str | Url) -> Remote:
    """What a URL names; SettingError if it is a path."""
    if isinstance(place, str) and place.startswith("hf://"):
        from precache.sharing.hub import Hub

        return Hub(place)
    url = locate(place)
    if not isinstance(url, Url):
        raise SettingError(
            f"{place}: is a path of this machine, not a URL as s3://BUCKET/PREFIX; between its folders, copy "
            f"the dataset with 'cp -r'"
        )
    return Objects(url)
