"""A dataset repository of Hugging Face: `hf://datasets/OWNER/NAME[@REVISION][/FOLDER]`.

By the package huggingface_hub: its login, its retries, its transfer of large files. A push is one commit of
the repository, so that nobody sees half of one; the files' bytes are there before, and are sent once.
"""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from precache.dataset.files import FileEntry
from precache.errors import MissingDependencyError, SettingError, StorageError
from precache.manifest import MANIFEST_NAME
from precache.packages import install_extra
from precache.storage import temporary_folder
from precache.storage.retries import Check, unchecked
from precache.storage.room import FULL

_PLACE = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")


class Hub:
    """A folder of a dataset repository; see `precache.sharing.remote.Remote`.

    Args:
        public: let everybody read the repository, if it is made.

    Raises:
        SettingError: `place` is no such URL.
        MissingDependencyError: huggingface_hub is not installed.
    """

    def __init__(self, place: str, *, public: bool = False) -> None:
        match = _PLACE.fullmatch(place.rstrip("/"))
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
        self._waiting: list[Any] = []
        self._gone: list[str] = []

    def read(self, name: str) -> bytes | None:
        """As of `Remote`."""
        with temporary_folder() as folder:
            path = self._download(name, folder)
            return None if path is None else path.read_bytes()

    @contextmanager
    def writing(self) -> Iterator[Check]:
        """As of `Remote`: a commit after another one than is the last now is refused."""
        with self._in_words():
            self._api.create_repo(self._repo, repo_type="dataset", private=not self._public, exist_ok=True)
            info = self._api.repo_info(self._repo, repo_type="dataset", revision=self._revision)
        self._head = info.sha
        yield unchecked

    def compare(self, files: Sequence[FileEntry], folder: Path) -> tuple[set[str], set[str]]:
        """As of `Remote`: compared by SHA-256, which the repository has of large files."""
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
        """As of `Remote`; the file is in the repository with the commit."""
        addition = self._hub.CommitOperationAdd(self._prefix + file.name, os.fspath(path))
        with self._in_words():
            self._api.preupload_lfs_files(
                self._repo, [addition], repo_type="dataset", revision=self._revision, num_threads=1
            )
        self._waiting.append(addition)

    def commit(self, content: bytes) -> None:
        """As of `Remote`."""
        added = [*self._waiting, self._hub.CommitOperationAdd(self._prefix + MANIFEST_NAME, content)]
        gone = {self._prefix + name for name in self._gone} - {one.path_in_repo for one in added}
        with self._in_words():
            self._api.create_commit(
                self._repo,
                [*added, *(self._hub.CommitOperationDelete(path) for path in sorted(gone))],
                parent_commit=self._head,
                commit_message="precache push",
                repo_type="dataset",
                revision=self._revision,
            )
        self._waiting = []

    def withdraw(self, names: Sequence[str]) -> None:
        """As of `Remote`; with the commit, which replaces all at once."""
        self._gone = [name for name in names if name in self._there]

    def fetch(self, file: FileEntry, descriptor: int, check: Check) -> None:
        """As of `Remote`."""
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
            if isinstance(error, OSError) and error.errno in FULL:
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
