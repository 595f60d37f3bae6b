"""Functions behind `precache push` and `precache pull`: copying a converted dataset to a storage and back.

The manifest is copied last in both directions: where it is, all files that it names are. Each file is
compared with its CRC-32C in the manifest, on the side where it can be read; files that are already there are
kept.

    push   sends the files that are missing, then dataset.json: see `precache.sharing.publisher`
    pull   fetches the files that are missing, each under a temporary name until its bytes are compared, then
           dataset.json

If either stops, the same command copies the rest. Files are overwritten only if they belong to the dataset
that is there, or were sent by this project.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from precache.dataset.converted import dataset_from_manifest, open_dataset, read_manifest_at
from precache.dataset.files import FileEntry, file_problem
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME, Manifest
from precache.errors import DatasetError, SettingError, shell_command
from precache.reporting import (
    Progress,
    abridge,
    explain_failed_writing,
    explain_interruption,
    mark_callback_errors,
    no_progress,
)
from precache.sharing.publisher import Publisher, dataset_files, difference
from precache.storage import (
    atomic_write,
    crc32c,
    fsync_folder,
    open_new,
    read_regular,
    remove_leftovers,
    temporary_path,
)
from precache.storage.locks import foreign_names, hold_lock
from precache.storage.objects import ObjectStore
from precache.storage.retries import Check, ObjectNotFoundError, call_for_each
from precache.storage.urls import Url, check_writable, local_path, locate

_FILES_AT_A_TIME = 4


@dataclass(frozen=True, slots=True)
class Transfer:
    """Result of a call of `push` or `pull`.

    Attributes:
        files, bytes: number and bytes of the dataset's files, without the manifest.
        sent_files, sent_bytes: number and bytes of the files that this call has copied.
    """

    files: int
    bytes: int
    sent_files: int
    sent_bytes: int


@explain_interruption(
    lambda: "while files were sent; what has arrived is kept, and the same command sends the rest"
)
def push(
    folder: str | os.PathLike[str],
    destination: str | Url,
    *,
    overwrite: bool = False,
    on_progress: Progress = no_progress,
) -> Transfer:
    """Copy the converted dataset in `folder` to the URL `destination`.

    Args:
        folder: folder of the dataset.
        destination: URL to copy it to.
        overwrite: replace another dataset at the URL, and files of an unfinished push. The manifest of
            that dataset is removed first, and then its files, so that no new reader gets a mixture; a process
            that is reading it may miss a file.
        on_progress: called with (bytes at the URL, bytes of the dataset).

    Raises:
        DatasetError: `folder` holds no dataset, or a damaged one; or at the URL there is another dataset, a
            file of another program under a name that is needed, or another process that writes.
        SettingError: `destination` is a path, or a URL that is read-only.
        StorageError: the storage refuses or does not answer.
    """
    dataset, url = open_dataset(folder), _locate_url(destination)
    check_writable(url)
    raw = read_regular(dataset.path / MANIFEST_NAME)
    files = dataset_files(dataset.manifest, dataset.path)
    for file in files:
        if problem := file_problem(dataset.path, file, content=False):
            raise _damaged_error(problem, dataset.path, file)
    publisher = Publisher(url)
    old_raw = publisher.read_manifest()
    old = None if old_raw is None else _manifest_at(url, old_raw)
    continues = old is None or old_raw == raw
    if not continues and not overwrite:
        raise DatasetError(
            "holds another dataset", path=url, remedy="choose another URL, or pass --overwrite to replace it"
        )
    infos = publisher.find(file.name for file in files)
    present = {file.name for file in files if difference(infos.get(file.name), file) is None}
    replaceable = frozenset() if old is None else old.own_names
    if overwrite:
        replaceable |= {name for name, info in infos.items() if info.crc32c is not None}
    if others := sorted(infos.keys() - present - replaceable):
        raise DatasetError(
            f"holds files that are not part of a dataset, or of one that is not finished, under names that "
            f"this one needs ({abridge(others)})",
            path=url,
            remedy="finish the push that wrote them, replace what precache wrote with --overwrite, "
            "move them elsewhere, or choose another URL",
        )
    if old_raw == raw and len(present) == len(files):
        return _TransferCounter(files, present, on_progress).result()
    if not continues and old is not None:
        publisher.withdraw(sorted(old.own_names - present))
    counter = _TransferCounter(files, present, on_progress)

    def send(file: FileEntry, check: Check) -> None:
        if problem := file_problem(dataset.path, file):
            raise _damaged_error(problem, dataset.path, file)
        publisher.send(dataset.path / file.name, file, check)
        counter.add(file)

    call_for_each(send, [file for file in files if file.name not in present], _FILES_AT_A_TIME)
    publisher.publish(raw, files)
    return counter.result()


@explain_interruption(
    lambda: "while files were fetched; what has arrived is kept, and the same command fetches the rest"
)
def pull(
    source: str | Url,
    folder: str | os.PathLike[str],
    *,
    on_progress: Progress = no_progress,
) -> Transfer:
    """Copy the converted dataset at the URL `source` into `folder`.

    Args:
        source: URL of the dataset.
        folder: folder that is missing or empty, or that a pull of the dataset has left unfinished.
        on_progress: called with (bytes in the folder, bytes of the dataset).

    Raises:
        DatasetError: there is no dataset at the URL, or the folder holds other files or cannot be written.
        SettingError: `source` is a path.
        StorageError: the storage refuses or does not answer, or a file had wrong bytes three times.
    """
    url = _locate_url(source)
    raw, store = read_manifest_at(url), ObjectStore(url)
    manifest = dataset_from_manifest(url, raw).manifest
    files = _files_at(store, manifest)
    path = Path(os.path.realpath(local_path(folder)))
    remedy = "what has arrived is kept: make room or fix permissions, then run the same command again"
    with explain_failed_writing(path, remedy), hold_lock(path):
        names = {file.name for file in files}
        replaceable = _prepare_folder(path, raw, manifest, names)
        remove_leftovers(path, names)
        present = {file.name for file in files if file_problem(path, file) is None}
        missing = [file for file in files if file.name not in present]
        others = []
        for file in missing:
            if file.name not in replaceable and os.path.lexists(path / file.name):
                others.append(file.name)
        if others:
            raise DatasetError(
                f"holds files that are not part of the dataset, under names that it needs "
                f"({abridge(sorted(others))})",
                path=path,
                remedy="move them elsewhere, or choose another folder",
            )
        counter = _TransferCounter(files, present, on_progress)

        def fetch(file: FileEntry, check: Check) -> None:
            _fetch(store, file, path, check)
            counter.add(file)

        call_for_each(fetch, missing, _FILES_AT_A_TIME)
        with atomic_write(path / MANIFEST_NAME) as written:
            written.write(raw)
        fsync_folder(path)
    return counter.result()


class _TransferCounter:
    """Counter of the bytes that are at the destination, which calls `on_progress`; several threads use it.

    Args:
        files: files of the dataset.
        present: names of those that are at the destination already.
        on_progress: called with (bytes at the destination, bytes of the dataset).
    """

    def __init__(self, files: Sequence[FileEntry], present: set[str], on_progress: Progress) -> None:
        self._files = files
        self._lock = Lock()
        self._on_progress = mark_callback_errors(on_progress)
        self._total = sum(file.bytes for file in files)
        self._done = sum(file.bytes for file in files if file.name in present)
        self._sent: list[FileEntry] = []
        self._on_progress(self._done, self._total)

    def add(self, file: FileEntry) -> None:
        """Count a file that was copied."""
        with self._lock:
            self._sent.append(file)
            self._done += file.bytes
            self._on_progress(self._done, self._total)

    def result(self) -> Transfer:
        """Sum up the files that were counted."""
        sent_bytes = sum(file.bytes for file in self._sent)
        return Transfer(len(self._files), self._total, len(self._sent), sent_bytes)


def _locate_url(location: str | Url) -> Url:
    url = locate(location)
    if not isinstance(url, Url):
        raise SettingError(
            "is a path of this machine, not a URL as s3://BUCKET/PREFIX",
            path=location,
            remedy="between its folders, copy the dataset with 'cp -r'",
        )
    return url


def _damaged_error(problem: str, folder: Path, file: FileEntry) -> DatasetError:
    """Make an error of a problem that `file_problem` has described."""
    path = folder / file.name
    return DatasetError(
        problem.removeprefix(f"{path}: "),
        path=path,
        remedy=f"run: {shell_command('precache verify', folder)}",
    )


def _manifest_at(url: Url, raw: bytes) -> Manifest:
    """Parse the manifest at a URL; DatasetError if precache has not written it."""
    try:
        return dataset_from_manifest(url, raw).manifest
    except DatasetError as error:
        raise DatasetError(
            f"{error}; so it is unknown which files are that dataset's: remove it yourself, or choose "
            f"another URL"
        ) from error


def _files_at(store: ObjectStore, manifest: Manifest) -> list[FileEntry]:
    """List the files of the dataset at a URL, as `dataset_files` does for a folder."""
    files = sorted(manifest.files, key=lambda file: -file.bytes)
    if manifest.rejected:
        with suppress(ObjectNotFoundError):
            content = store.get(REJECTED_NAME)
            files.append(FileEntry(REJECTED_NAME, len(content), crc32c(content)))
    return files


def _prepare_folder(path: Path, raw: bytes, manifest: Manifest, names: set[str]) -> frozenset[str]:
    """Make the folder if it is missing, and check that the dataset may be written to it.

    Args:
        path: the folder.
        raw: content of the dataset's manifest file.
        manifest: manifest of the dataset.
        names: names of the dataset's files.

    Returns:
        Names of files in the folder that may be replaced: those of the dataset, if its manifest is there.

    Raises:
        DatasetError: the folder holds another dataset, or other files.
    """
    manifest_path = path / MANIFEST_NAME
    if os.path.lexists(manifest_path):
        if read_regular(manifest_path) == raw:
            return manifest.own_names
        raise DatasetError("holds another dataset", path=path, remedy="choose another folder, or remove it")
    path.mkdir(parents=True, exist_ok=True)
    if others := foreign_names(path, frozenset({*names, MANIFEST_NAME})):
        raise DatasetError(
            f"is not empty, and holds what no pull of this dataset left ({abridge(others)})",
            path=path,
            remedy="choose another folder",
        )
    return frozenset()


def _fetch(store: ObjectStore, file: FileEntry, folder: Path, check: Check) -> None:
    """Fetch a file under a temporary name, compare it with its checksum, and give it its name."""
    temporary = temporary_path(folder / file.name)
    try:
        os.close(open_new(temporary))
        store.download_checked(file.name, temporary, file.bytes, file.crc32c, check)
        check()
        os.replace(temporary, folder / file.name)
    finally:
        temporary.unlink(missing_ok=True)
