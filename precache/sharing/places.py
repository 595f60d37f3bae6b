"""Places that hold datasets for other machines: object storages, and dataset repositories of Hugging Face.

In a storage, as s3://BUCKET/PREFIX, each object that was sent has the CRC-32C of its bytes as metadata. The
manifest comes last, if no other process has put one meanwhile, and if all objects are as they were sent: of
two pushes at most one ends well, and the other is told. What cannot be held back are the bytes of an upload
that was under way while the other one finished: `precache verify` finds those.

A repository, `hf://datasets/OWNER/NAME[@REVISION][/FOLDER]`, by the package huggingface_hub: its login, its
retries, its transfer of large files. A push is one commit, so that nobody sees half of one; the files' bytes
are there before, and are sent once.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from precache.dataset.files import FileEntry
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, MissingDependencyError, SettingError, StorageError
from precache.packages import install_extra
from precache.storage.objects import ObjectInfo, ObjectStore, unquoted
from precache.storage.retries import Check, ObjectNotFoundError
from precache.storage.shard_cache import DISK_FULL
from precache.storage.staging import temporary_folder
from precache.storage.urls import Url, locate

_WRITTEN = "another process has written a dataset there meanwhile"
_REPOSITORY = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")


class RemotePlace(Protocol):
    """Where a dataset is kept that other machines read; every method raises StorageError."""

    def read(self, name: str) -> bytes | None:
        """A small file; None if there is none."""

    def look(self, *, overwrite: bool) -> bytes | None:
        """The manifest that is there, or None, before a dataset is pushed.

        Args:
            overwrite: what pushes and conversions have left may be replaced.
        """

    def compare(self, files: Sequence[FileEntry], folder: Path) -> tuple[set[str], set[str]]:
        """Names of those of `files`, which lie in `folder`, that are there with the same bytes, and of those
        that are there with others, unless this project wrote them and they may be replaced."""

    def withdraw(self, names: Sequence[str]) -> None:
        """Take the manifest away, so that no new reader starts on what is about to change; then `names`."""

    def send(self, path: Path, file: FileEntry, check: Check) -> None:
        """Put the file at `path` there; given up where `check` raises.

        Raises:
            DatasetError: another process has put a manifest there since `look`.
        """

    def commit(self, content: bytes, files: Sequence[FileEntry]) -> None:
        """Put the manifest there, if all `files` are as they were sent.

        Raises:
            DatasetError: a file is not as it was sent, or another process has put a manifest there since.
        """

    def fetch(self, file: FileEntry, descriptor: int, check: Check) -> None:
        """Write what is there into an open file; given up where `check` raises."""


def open_place(place: str | Url, *, public: bool = False) -> RemotePlace:
    """The place that a URL names.

    Raises:
        SettingError: it is a path; or `public` of an object storage, where buckets say who may read.
    """
    if isinstance(place, str) and place.startswith("hf://"):
        return Repository(place, public=public)
    if public:
        raise SettingError(f"{place}: public is for hf:// alone; who may read a bucket is set at the bucket")
    url = locate(place)
    if not isinstance(url, Url):
        raise SettingError(
            f"{place}: is a path of this machine, not a URL as s3://BUCKET/PREFIX; between its folders, copy "
            f"the dataset with 'cp -r'"
        )
    return Prefix(url)


class Prefix:
    """The objects below a URL; see `RemotePlace`."""

    def __init__(self, url: Url) -> None:
        self._url = url
        self._store = ObjectStore(url)
        self._manifest: ObjectInfo | None = None
        self._may_replace = False
        self._etags: dict[str, str | None] = {}

    def read(self, name: str) -> bytes | None:
        return self._find(name)[0]

    def look(self, *, overwrite: bool) -> bytes | None:
        self._may_replace = overwrite
        found, self._manifest = self._find(MANIFEST_NAME)
        return found

    def compare(self, files: Sequence[FileEntry], folder: Path) -> tuple[set[str], set[str]]:
        found = {one.name: one for one in self._store.list()}
        same, others = set[str](), set[str]()
        for file in files:
            if file.name in found:
                crc32c = self._store.crc32c_of(file.name)
                if (found[file.name].bytes, crc32c) == (file.bytes, file.crc32c):
                    same.add(file.name)
                    self._etags[file.name] = found[file.name].etag
                elif crc32c is None or not self._may_replace:
                    others.add(file.name)
        return same, others

    def withdraw(self, names: Sequence[str]) -> None:
        self._store.delete([MANIFEST_NAME])
        self._manifest = None
        self._store.delete(names)

    def send(self, path: Path, file: FileEntry, check: Check) -> None:
        found = self._store.find(MANIFEST_NAME)
        if (found and unquoted(found.etag)) != (self._manifest and unquoted(self._manifest.etag)):
            raise self._not_alone(_WRITTEN)
        self._etags[file.name] = self._store.upload(path, file.name, crc32c=file.crc32c, check=check)

    def commit(self, content: bytes, files: Sequence[FileEntry]) -> None:
        there = {one.name: one for one in self._store.list()}
        for file in files:
            found = there.get(file.name)
            if found is None or self._store.is_replaced(found, self._etags.get(file.name)):
                raise self._not_alone(f"{file.name} was changed by another process")
        done = self._store.put_if(MANIFEST_NAME, content, self._manifest)
        if done is None and self.read(MANIFEST_NAME) != content:  # else only the answer was lost
            raise self._not_alone(_WRITTEN)

    def fetch(self, file: FileEntry, descriptor: int, check: Check) -> None:
        self._store.download(file.name, descriptor, file.bytes, check)

    def _find(self, name: str) -> tuple[bytes | None, ObjectInfo | None]:
        try:
            return self._store.get_as_found(name)
        except ObjectNotFoundError:
            return None, None

    def _not_alone(self, problem: str) -> DatasetError:
        return DatasetError(
            f"{self._url}: {problem}; run the same command again once nothing else writes there"
        )


class Repository:
    """A folder of a dataset repository; see `RemotePlace`.

    Args:
        public: let everybody read the repository, if it is made.

    Raises:
        SettingError: `place` is no such URL.
        MissingDependencyError: huggingface_hub is not installed.
    """

    def __init__(self, place: str, *, public: bool = False) -> None:
        match = _REPOSITORY.fullmatch(place.rstrip("/"))
        if match is None:
            raise SettingError(
                f"{place}: is not complete; write hf://datasets/OWNER/NAME, @REVISION and /FOLDER may follow"
            )
        self._place = place
        self._repo, self._revision, folder = match[1], match[2], match[3] or ""
        self._prefix = f"{folder}/" if folder else ""
        self._hub = _library()
        self._api = self._hub.HfApi()
        self._public = public
        self._head: str | None = None
        self._there: set[str] = set()
        self._added: list[Any] = []
        self._removed: list[str] = []

    def read(self, name: str) -> bytes | None:
        with temporary_folder() as folder:
            path = self._download(name, folder)
            return None if path is None else path.read_bytes()

    def look(self, *, overwrite: bool) -> bytes | None:
        """See `RemotePlace`: the service refuses a commit whose parent is no longer the last one."""
        with self._in_words():
            self._api.create_repo(self._repo, repo_type="dataset", private=not self._public, exist_ok=True)
            info = self._api.repo_info(self._repo, repo_type="dataset", revision=self._revision)
        self._head = info.sha
        return self.read(MANIFEST_NAME)

    def compare(self, files: Sequence[FileEntry], folder: Path) -> tuple[set[str], set[str]]:
        """See `RemotePlace`: compared by SHA-256, which the repository has of large files."""
        with self._in_words():
            try:
                found = list(
                    self._api.list_repo_tree(
                        self._repo,
                        self._prefix.rstrip("/") or None,
                        repo_type="dataset",
                        revision=self._revision,
                    )
                )
            except (self._errors.EntryNotFoundError, self._errors.RepositoryNotFoundError):
                found = []
        sums = {entry.path.removeprefix(self._prefix): _sha256_of(entry) for entry in found}
        self._there = set(sums)
        there = {file.name for file in files if file.name in sums}
        same = {name for name in there if sums[name] == _sha256(folder / name)}
        return same, there - same

    def send(self, path: Path, file: FileEntry, check: Check) -> None:
        """See `RemotePlace`; the file is in the repository with the commit."""
        addition = self._hub.CommitOperationAdd(self._prefix + file.name, os.fspath(path))
        with self._in_words():
            self._api.preupload_lfs_files(
                self._repo, [addition], repo_type="dataset", revision=self._revision, num_threads=1
            )
        self._added.append(addition)

    def commit(self, content: bytes, files: Sequence[FileEntry]) -> None:
        added = [*self._added, self._hub.CommitOperationAdd(self._prefix + MANIFEST_NAME, content)]
        gone = {self._prefix + name for name in self._removed} - {one.path_in_repo for one in added}
        with self._in_words():
            self._api.create_commit(
                self._repo,
                [*added, *(self._hub.CommitOperationDelete(path) for path in sorted(gone))],
                parent_commit=self._head,
                commit_message="precache push",
                repo_type="dataset",
                revision=self._revision,
            )
        self._added = []

    def withdraw(self, names: Sequence[str]) -> None:
        """See `RemotePlace`; with the commit, which replaces all at once."""
        self._removed = [name for name in names if name in self._there]

    def fetch(self, file: FileEntry, descriptor: int, check: Check) -> None:
        with temporary_folder() as folder:
            path = self._download(file.name, folder)
            if path is None:
                raise StorageError(f"{self._place}/{file.name}: is not there; push the dataset again")
            with open(path, "rb") as read, open(descriptor, "wb", closefd=False) as written:
                shutil.copyfileobj(read, written, 1 << 20)

    @property
    def _errors(self) -> Any:
        return self._hub.errors

    def _download(self, name: str, folder: Path) -> Path | None:
        with self._in_words():
            try:
                return Path(
                    self._api.hf_hub_download(
                        self._repo,
                        self._prefix + name,
                        repo_type="dataset",
                        revision=self._revision,
                        local_dir=folder,
                    )
                )
            except (self._errors.RemoteEntryNotFoundError, self._errors.RepositoryNotFoundError):
                return None

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """StorageError for what the library raises."""
        known = (self._errors.EntryNotFoundError, self._errors.RepositoryNotFoundError)
        try:
            yield
        except known as error:
            raise StorageError(
                f"{self._place}: no such repository, or it is private; check the name, then: hf auth login"
            ) from error
        except (self._errors.HfHubHTTPError, OSError, RuntimeError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise StorageError(
                    f"{tempfile.gettempdir()}: {error.strerror}; make room there, or set TMPDIR to a folder "
                    f"on another disk"
                ) from error
            if getattr(getattr(error, "response", None), "status_code", None) == 412:
                raise StorageError(
                    f"{self._place}: another commit was made meanwhile; run the same command again"
                ) from error
            said = " ".join(str(error.__cause__ or error).split())[:200]
            raise StorageError(
                f"{self._place}: {said}; check the network, and the login: hf auth login"
            ) from error


def _sha256_of(entry: Any) -> str | None:
    lfs = getattr(entry, "lfs", None)
    return None if lfs is None else str(lfs.sha256)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _library() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        from huggingface_hub import utils
    except ImportError as error:
        raise MissingDependencyError(
            f"hf:// needs the package huggingface_hub; install it with: {install_extra('hub')}"
        ) from error
    utils.disable_progress_bars()  # type: ignore[attr-defined]  # ours counts all files
    return huggingface_hub
