"""`precache push` and `precache pull`: a converted dataset to a storage and back.

The manifest goes last in both directions: where it is, all that it names is there. Each file is compared with
the CRC-32C that the manifest has of it, on the side where it can be read; files that are already there stay.

    push   files that the place lacks, then dataset.json: see `precache.sharing.publisher`
    pull   files that the folder lacks, each under a temporary name until its bytes are compared, then
           dataset.json

If either stops, the same command moves the rest. Nothing is overwritten but what the dataset names that is
there, and what this project has sent.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from precache.dataset.converted import dataset_at, open_dataset, read_manifest
from precache.dataset.files import FileEntry, file_problem, first_problem, in_folder
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME, Manifest, parse_manifest
from precache.engines import is_callback_error, mark_callback_errors
from precache.errors import DatasetError, SettingError, check_open_files, os_reason, shell_command
from precache.reporting import Progress, abridge, explain_interruption, no_progress
from precache.sharing.publisher import Publisher, difference, files_of
from precache.storage import (
    atomic_write,
    crc32c,
    fsync_folder,
    open_new,
    read_regular,
    remove_leftovers,
    temporary_path,
)
from precache.storage.locks import hold_lock, foreign_names
from precache.storage.objects import ObjectStore
from precache.storage.retries import Check, ObjectNotFoundError, call_for_each
from precache.storage.urls import Url, check_writable, local_path, locate

_FILES_AT_A_TIME = 4


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one call did.

    Attributes:
        files, bytes: of the dataset, the manifest apart.
        sent_files, sent_bytes: what this call moved of them.
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
        overwrite: although there is another dataset, or what an unfinished conversion has written. The
            manifest is removed first, and then the dataset's files, so that no new reader gets half of
            either; one that is already reading may miss a file.
        on_progress: called with (bytes that are there, bytes in all).

    Raises:
        DatasetError: `folder` holds no dataset, or a file that is not what its manifest says; or another
            dataset is there, files that are not ours, or a process that writes.
        SettingError: `destination` is a path, or a URL where nothing can be written.
        StorageError: the storage refuses or does not answer.
    """
    dataset, url = open_dataset(folder), _locate_url(destination)
    check_writable(url)
    raw = read_regular(dataset.path / MANIFEST_NAME)
    files = files_of(dataset.manifest, dataset.path)
    if problem := first_problem(dataset.path, files):
        raise _not_whole(problem, dataset.path)
    publisher = Publisher(url)
    there = publisher.read_manifest()
    before = None if there is None else _manifest_at(url, there)
    goes_on = before is None or there == raw or _is_earlier(before, dataset.manifest)
    if not goes_on and not overwrite:
        raise DatasetError(
            f"{url}: holds another dataset; choose another URL, or pass --overwrite to replace it"
        )
    found = publisher.find(file.name for file in files)
    same = {file.name for file in files if difference(found.get(file.name), file) is None}
    replaceable = frozenset() if before is None else before.own_names
    if overwrite:
        replaceable |= {name for name, info in found.items() if info.crc32c is not None}
    if others := sorted(found.keys() - same - replaceable):
        raise DatasetError(
            f"{url}: holds files that are not part of a dataset, or of one that is not finished, under names "
            f"that this one needs ({abridge(others)}); finish the conversion that wrote them, replace what "
            f"precache wrote with --overwrite, move them elsewhere, or choose another URL"
        )
    if there == raw and len(same) == len(files):
        return _Count(files, same, on_progress).result()
    if not goes_on and before is not None:
        publisher.withdraw(sorted(before.own_names - same))
    report = _Count(files, same, on_progress)

    def send(file: FileEntry, check: Check) -> None:
        if problem := file_problem(dataset.path, file):
            raise _not_whole(problem, dataset.path)
        publisher.send(dataset.path / file.name, file, check)
        report(file)

    call_for_each(send, [file for file in files if file.name not in same], _FILES_AT_A_TIME)
    publisher.publish(raw, files)
    return report.result()


@explain_interruption(
    lambda: "while files were fetched; what has arrived is kept, and the same command fetches the rest"
)
def pull(
    source: str | Url,
    folder: str | os.PathLike[str],
    *,
    on_progress: Progress = no_progress,
) -> Transfer:
    """Copy the converted dataset at the URL `source` into `folder`: new, empty, or what a pull left.

    A folder that has an earlier state of the dataset (see `precache.conversion.update`) gets what it lacks.

    Args:
        on_progress: called with (bytes that are there, bytes in all).

    Raises:
        DatasetError: there is no dataset, or the folder holds something else or cannot be written.
        SettingError: `source` is a path.
        StorageError: the storage refuses or does not answer, or a file came with wrong bytes three times.
    """
    url = _locate_url(source)
    raw, store = read_manifest(url), ObjectStore(url)
    manifest = dataset_at(url, raw).manifest
    files = _files_at(store, manifest)
    path = Path(os.path.realpath(local_path(folder)))
    try:
        with hold_lock(path):
            own = _prepare(path, raw, manifest, {file.name for file in files})
            remove_leftovers(path, {file.name for file in files})
            has = {file.name for file in files if file_problem(path, file) is None}
            lacks = [file for file in files if file.name not in has]
            others = [f.name for f in lacks if f.name not in own and os.path.lexists(path / f.name)]
            if others:
                raise DatasetError(
                    f"{path}: holds files that are not part of the dataset, under names that it needs "
                    f"({abridge(sorted(others))}); move them elsewhere, or choose another folder"
                )
            report = _Count(files, has, on_progress)

            def fetch(file: FileEntry, check: Check) -> None:
                _fetch(store, file, path, check)
                report(file)

            call_for_each(fetch, lacks, _FILES_AT_A_TIME)
            with atomic_write(path / MANIFEST_NAME) as written:
                written.write(raw)
            fsync_folder(path)
    except OSError as error:
        if is_callback_error(error):
            raise
        check_open_files(error, error.filename)
        raise DatasetError(
            f"{error.filename or path}: cannot be written ({os_reason(error)}); what has arrived is "
            f"kept: make room or fix permissions, then run the same command again"
        ) from error
    return report.result()


class _Count:
    """Bytes that are there, for `on_progress`; called by several threads."""

    def __init__(self, files: Sequence[FileEntry], there: set[str], on_progress: Progress) -> None:
        self._files = files
        self._lock = Lock()
        self._on_progress = mark_callback_errors(on_progress)
        self._total = sum(file.bytes for file in files)
        self._done = sum(file.bytes for file in files if file.name in there)
        self._sent: list[FileEntry] = []
        self._on_progress(self._done, self._total)

    def __call__(self, file: FileEntry) -> None:
        with self._lock:
            self._sent.append(file)
            self._done += file.bytes
            self._on_progress(self._done, self._total)

    def result(self) -> Transfer:
        """The `Transfer` that sums up what was done."""
        sent_bytes = sum(file.bytes for file in self._sent)
        return Transfer(len(self._files), self._total, len(self._sent), sent_bytes)


def _locate_url(place: str | Url) -> Url:
    url = locate(place)
    if not isinstance(url, Url):
        raise SettingError(
            f"{place}: is a path of this machine, not a URL as s3://BUCKET/PREFIX; between its folders, copy "
            f"the dataset with 'cp -r'"
        )
    return url


def _not_whole(problem: str, folder: Path) -> DatasetError:
    return DatasetError(f"{problem}; run: {shell_command('precache verify', folder)}")


def _manifest_at(url: Url, raw: bytes) -> Manifest:
    """The manifest at a URL; DatasetError if precache did not write it."""
    try:
        return dataset_at(url, raw).manifest
    except DatasetError as error:
        raise DatasetError(
            f"{error}; so it is unknown which files are that dataset's: remove it yourself, or choose "
            f"another URL"
        ) from error


def _files_at(store: ObjectStore, manifest: Manifest) -> list[FileEntry]:
    """List the files of the dataset at a URL, as `files_of` does of one in a folder."""
    files = sorted(manifest.files, key=lambda file: -file.bytes)
    if manifest.rejected:
        with suppress(ObjectNotFoundError):
            content = store.get(REJECTED_NAME)
            files.append(FileEntry(REJECTED_NAME, len(content), crc32c(content)))
    return files


def _is_earlier(old: Manifest, new: Manifest) -> bool:
    """Whether `old` is an earlier state of the dataset: what both name is the same."""
    ours = {file.name: file for file in new.files}
    grown = old.updates == new.updates[: len(old.updates)] and old.shards == new.shards[: len(old.shards)]
    return grown and all(ours.get(file.name, file) == file for file in old.files)


def _prepare(path: Path, raw: bytes, manifest: Manifest, names: set[str]) -> frozenset[str]:
    """Make the folder one that the dataset, files of `names`, may be written to; DatasetError if it is not.

    Returns:
        Names of files that may be replaced: those of the earlier state that is there.
    """
    manifest_path = path / MANIFEST_NAME
    if os.path.lexists(manifest_path):
        there = read_regular(manifest_path)
        if there == raw:
            return manifest.own_names
        with suppress(DatasetError):
            before = parse_manifest(there, manifest_path, in_folder(path))[0]
            if _is_earlier(before, manifest):
                return before.own_names
        raise DatasetError(f"{path}: holds another dataset; choose another folder, or remove it")
    path.mkdir(parents=True, exist_ok=True)
    if others := foreign_names(path, frozenset({*names, MANIFEST_NAME})):
        raise DatasetError(
            f"{path}: is not empty, and holds what no pull of this dataset left ({abridge(others)}); choose "
            f"another folder"
        )
    return frozenset()


def _fetch(store: ObjectStore, file: FileEntry, folder: Path, check: Check) -> None:
    """Bring one file, compared with its checksum before it has its name."""
    temporary = temporary_path(folder / file.name)
    try:
        os.close(open_new(temporary))
        store.download_checked(file.name, temporary, file.bytes, file.crc32c, check)
        check()
        os.replace(temporary, folder / file.name)
    finally:
        temporary.unlink(missing_ok=True)
