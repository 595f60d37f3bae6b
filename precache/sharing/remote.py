"""Places that hold datasets for other machines: object storages, and repositories of Hugging Face."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from precache.dataset.files import FileEntry
from precache.errors import DatasetError, SettingError
from precache.manifest import MANIFEST_NAME
from precache.storage.objects import ObjectStore
from precache.storage.retries import Check, ObjectNotFoundError
from precache.storage.urls import Url, locate
from precache.uploads.lock import hold_lock
from precache.uploads.publish import HEADER_NAME


class Remote(Protocol):
    """Where a dataset is kept that other machines read; every method raises StorageError."""

    def read(self, name: str) -> bytes | None:
        """A small file; None if there is none."""

    def writing(self) -> AbstractContextManager[Check]:
        """Keep others from writing there during the block; its check raises DatasetError where one does."""

    def compare(self, files: Sequence[FileEntry], folder: Path) -> tuple[set[str], set[str]]:
        """Names of those of `files`, which lie in `folder`, that are there with the same bytes, and of those
        that are there with others, unless this project sent them."""

    def send(self, path: Path, file: FileEntry, check: Check) -> None:
        """Put the file at `path` there; given up where `check` raises."""

    def commit(self, content: bytes) -> None:
        """Put the manifest there: everything that it names is."""

    def withdraw(self, names: Sequence[str]) -> None:
        """Take the manifest away, so that nobody begins to read what is about to change; then `names`."""

    def fetch(self, file: FileEntry, descriptor: int, check: Check) -> None:
        """Write what is there into an open file; given up where `check` raises."""


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

    @contextmanager
    def writing(self) -> Iterator[Check]:
        """As of `Remote`: as conversions into a URL are kept apart."""
        with hold_lock(self._store.url) as lock:
            if self._store.find(HEADER_NAME) is not None and self._store.find(MANIFEST_NAME) is None:
                raise DatasetError(
                    f"{self._store.url}: holds an unfinished conversion; choose another URL, or remove it "
                    f"with 'precache clean {self._store.url}'"
                )
            yield lock.check

    def compare(self, files: Sequence[FileEntry], folder: Path) -> tuple[set[str], set[str]]:
        """As of `Remote`."""
        sizes = {found.name: found.bytes for found in self._store.list()}
        same, others = set[str](), set[str]()
        for file in files:
            if file.name in sizes:
                crc32c = self._store.crc32c_of(file.name)
                if crc32c is None:
                    others.add(file.name)
                elif (sizes[file.name], crc32c) == (file.bytes, file.crc32c):
                    same.add(file.name)
        return same, others

    def send(self, path: Path, file: FileEntry, check: Check) -> None:
        """As of `Remote`."""
        self._store.upload(path, file.name, crc32c=file.crc32c, check=check)

    def commit(self, content: bytes) -> None:
        """As of `Remote`."""
        self._store.put(MANIFEST_NAME, content)

    def withdraw(self, names: Sequence[str]) -> None:
        """As of `Remote`."""
        self._store.delete([MANIFEST_NAME])
        self._store.delete(names)

    def fetch(self, file: FileEntry, descriptor: int, check: Check) -> None:
        """As of `Remote`."""
        self._store.download(file.name, descriptor, file.bytes, check)


def open_remote(place: str | Url, *, public: bool = False) -> Remote:
    """What a URL names.

    Raises:
        SettingError: it is a path; or `public` of an object storage, where buckets say who may read.
    """
    if isinstance(place, str) and place.startswith("hf://"):
        from precache.sharing.hub import Hub

        return Hub(place, public=public)
    if public:
        raise SettingError(f"{place}: public is for hf:// alone; who may read a bucket is set at the bucket")
    url = locate(place)
    if not isinstance(url, Url):
        raise SettingError(
            f"{place}: is a path of this machine, not a URL as s3://BUCKET/PREFIX; between its folders, copy "
            f"the dataset with 'cp -r'"
        )
    return Objects(url)
