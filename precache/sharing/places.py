"""Places that hold datasets for other machines: object storages, and dataset repositories of Hugging Face.

A place in a storage, as s3://BUCKET/PREFIX:

    dataset.json, ...    the dataset; each object that was sent has the CRC-32C of its bytes as metadata
    push.json            while a push is under way: of which dataset, and by whom

A repository, `hf://datasets/OWNER/NAME[@REVISION][/FOLDER]`, by the package huggingface_hub: its login, its
retries, its transfer of large files. A push is one commit, so that nobody sees half of one; the files' bytes
are there before, and are sent once.
"""

import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from precache.dataset.files import FileEntry
from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import DatasetError, MissingDependencyError, SettingError, StorageError
from precache.packages import install_extra
from precache.storage import temporary_folder
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.retries import Check, ObjectNotFoundError
from precache.storage.shard_cache import DISK_FULL
from precache.storage.urls import Url, locate

PUSH_NAME = "push.json"
_WRITTEN = "another process has written a dataset there meanwhile"
_REPOSITORY = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")


class RemotePlace(Protocol):
    """Where a dataset is kept that other machines read; every method raises StorageError."""

    def read(self, name: str) -> bytes | None:
        """A small file; None if there is none."""

    def look(self, manifest: bytes, *, overwrite: bool) -> bytes | None:
        """The manifest that is there, or None, before the dataset of `manifest` is pushed.

        Args:
            overwrite: take the place of an unfinished push of another dataset.

        Raises:
            DatasetError: there is one, and it is not to be overwritten.
        """

    def compare(self, files: Sequence[FileEntry], folder: Path) -> tuple[set[str], set[str]]:
        """Names of those of `files`, which lie in `folder`, that are there with the same bytes, and of those
        that are there with others, unless a push that may be replaced sent them."""

    def begin(self) -> None:
        """Note that the dataset is pushed, and keep pushes of others out.

        Raises:
            DatasetError: another process has started, or finished, a push since `look`.
        """

    def withdraw(self, names: Sequence[str]) -> None:
        """Take the manifest away, so that no new reader starts on what is about to change; then `names`."""

    def send(self, path: Path, file: FileEntry, check: Check) -> None:
        """Put the file at `path` there; given up where `check` raises.

        Raises:
            DatasetError: another push has taken over.
        """

    def commit(self, content: bytes, files: Sequence[FileEntry]) -> None:
        """Put the manifest there, if all `files` are as they were sent, and take the note of the push away.

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
        self._digest = ""
        self._manifest: ObjectInfo | None = None
        self._note: ObjectInfo | None = None
        self._may_replace = False
        self._etags: dict[str, str | None] = {}

    def read(self, name: str) -> bytes | None:
        return self._find(name)[0]

    def look(self, manifest: bytes, *, overwrite: bool) -> bytes | None:
        """See `RemotePlace`. A stopped push does not keep another one of the same dataset from going on."""
        self._digest = hashlib.sha256(manifest).hexdigest()
        found, self._manifest = self._find(MANIFEST_NAME)
        note, self._note = self._find(PUSH_NAME)
        other, process = _push_of(note)
        if found is not None and other == hashlib.sha256(found).hexdigest():  # killed when it was all done
            self._store.delete([PUSH_NAME])
            self._note = None
        if self._note is not None and other != self._digest and not overwrite:
            raise DatasetError(
                f"{self._url}: a push of another dataset, by {process}, is under way or was stopped; choose "
                f"another URL, or pass --overwrite to take its place"
            )
        # without a note, what has our checksum is of a conversion, which may be going on
        self._may_replace = overwrite or self._note is not None
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

    def begin(self) -> None:
        """See `RemotePlace`: by an object that is only written if it is still as it was seen."""
        me = {"digest": self._digest, "process": f"process {os.getpid()} on {socket.gethostname()}"}
        if self._store.put_if(PUSH_NAME, json.dumps(me).encode(), self._note) is None:
            self._check_alone()  # where it is one of this dataset, both go on: they send the same
        found = self._store.find(MANIFEST_NAME)
        if (found and _unquoted(found.etag)) != (self._manifest and _unquoted(self._manifest.etag)):
            self._store.delete([PUSH_NAME])
            raise self._not_alone(_WRITTEN)

    def withdraw(self, names: Sequence[str]) -> None:
        self._store.delete([MANIFEST_NAME])
        self._manifest = None
        self._store.delete(names)

    def send(self, path: Path, file: FileEntry, check: Check) -> None:
        self._check_alone()
        self._etags[file.name] = self._store.upload(path, file.name, crc32c=file.crc32c, check=check)

    def commit(self, content: bytes, files: Sequence[FileEntry]) -> None:
        self._check_alone()
        there = {one.name: one for one in self._store.list()}
        for file in files:
            found = there.get(file.name)
            if found is not None and not self._is_as_sent(found):
                found = self._store.find(file.name)  # some storages list etags in another form
            if found is None or not self._is_as_sent(found):
                raise self._not_alone(f"{file.name} was changed by another process")
        done = self._store.put_if(MANIFEST_NAME, content, self._manifest)
        if done is None and self.read(MANIFEST_NAME) != content:  # else only the answer was lost
            raise self._not_alone(_WRITTEN)
        self._store.delete([PUSH_NAME])

    def fetch(self, file: FileEntry, descriptor: int, check: Check) -> None:
        self._store.download(file.name, descriptor, file.bytes, check)

    def _find(self, name: str) -> tuple[bytes | None, ObjectInfo | None]:
        try:
            return self._store.get_as_found(name)
        except ObjectNotFoundError:
            return None, None

    def _check_alone(self) -> None:
        if _push_of(self.read(PUSH_NAME))[0] != self._digest:
            raise self._not_alone("another push has taken over, or is finished")

    def _is_as_sent(self, found: ObjectInfo) -> bool:
        sent = self._etags.get(found.name)
        return sent is None or found.etag is None or _unquoted(sent) == _unquoted(found.etag)

    def _not_alone(self, problem: str) -> DatasetError:
        return DatasetError(
            f"{self._url}: {problem}; run the same command again once nothing else writes there"
        )


def _push_of(note: bytes | None) -> tuple[str, str]:
    """What a note says: SHA-256 of the manifest that is pushed, and by whom; empty where it says none."""
    try:
        content = json.loads(note or b"")
        return str(content["digest"]), str(content["process"])
    except (ValueError, LookupError, TypeError):
        return "", "an unknown process"


def _unquoted(etag: str | None) -> str:
    return (etag or "").strip('"')


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

    def look(self, manifest: bytes, *, overwrite: bool) -> bytes | None:
        """See `RemotePlace`: the service refuses a commit whose parent is no longer the last one."""
        with self._in_words():
            self._api.create_repo(self._repo, repo_type="dataset", private=not self._public, exist_ok=True)
            info = self._api.repo_info(self._repo, repo_type="dataset", revision=self._revision)
        self._head = info.sha
        return self.read(MANIFEST_NAME)

    def begin(self) -> None:
        """See `RemotePlace`; nothing is seen before the commit."""

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
