"""`precache push` and `precache pull`: a converted dataset to a storage and back, and nothing in between.

The manifest goes last in both directions: where it is, all that it names is there. Each file is compared with
the CRC-32C that the manifest has of it, on the side where it can be read; beside every object lies the CRC of
what was sent as it, so that one of the same size is not taken for it. What is there already stays.

    push   files that the storage lacks, then dataset.json; if it stops, the same command sends the rest
    pull   files that the folder lacks, each under a temporary name until its bytes are compared, then
           dataset.json; until then `pull.json` says which dataset the folder is to become
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock as ThreadLock

from precache.console.notices import some
from precache.console.progress import Progress, tells, unseen
from precache.conversion.lock import hold_lock, is_mount_point, lock_path
from precache.dataset.converted import open_dataset
from precache.dataset.files import FileEntry, Held, check_file, in_folder
from precache.dataset.left_out import REJECTED_NAME
from precache.errors import DatasetError, shell_command
from precache.executors import of_caller
from precache.manifest import MANIFEST_NAME, Manifest, parse_manifest
from precache.sharing.remote import Remote, open_remote
from precache.storage import (
    atomic_write,
    crc32c,
    crc32c_file,
    fsync_folder,
    is_leftover,
    open_new,
    read_regular,
    remove_leftovers,
    temporary_path,
)
from precache.storage.urls import Url, local_path

PULL_NAME = "pull.json"
_AT_A_TIME = 4  # files
_TRIES = 3  # of a file whose bytes came wrong


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


@tells(lambda: "what has arrived is kept, and the same command sends the rest")
def push(
    folder: str | os.PathLike[str],
    destination: str | Url,
    *,
    overwrite: bool = False,
    on_progress: Progress = unseen,
) -> Transfer:
    """Copy the converted dataset in `folder` to the URL `destination`.

    Args:
        overwrite: although there is another dataset. Its manifest is removed first, so that nobody begins to
            read what is half of either; who reads it already may be told that a file is not as written.
        on_progress: called with (bytes that are there, bytes in all).

    Raises:
        DatasetError: `folder` holds no dataset, or a file that is not what its manifest says; or another
            dataset is there.
        StorageError: the storage refuses or does not answer.
    """
    dataset = open_dataset(folder)
    remote = open_remote(destination)
    raw = read_regular(dataset.path / MANIFEST_NAME)
    files = _with_rejected(dataset.manifest, dataset.path)
    there = remote.read(MANIFEST_NAME)
    held = _from(remote, dataset.path)
    if there is not None and there != raw and not _goes_on(there, dataset.manifest, held):
        if not overwrite:
            raise DatasetError(
                f"{destination}: holds another dataset; choose another URL, or pass --overwrite to replace it"
            )
        remote.withdraw()
    holding = remote.holding(files, dataset.path)
    report = _Count(files, holding, on_progress)

    def send(file: FileEntry) -> None:
        if problem := check_file(dataset.path, file):
            raise DatasetError(f"{problem}; run: {shell_command('precache verify', dataset.path)}")
        remote.send(dataset.path / file.name, file)
        report(file)

    _each(send, [file for file in files if file.name not in holding])
    if there != raw:
        remote.commit(raw)
    return report.result()


@tells(lambda: "what has arrived is kept, and the same command fetches the rest")
def pull(
    source: str | Url,
    folder: str | os.PathLike[str],
    *,
    on_progress: Progress = unseen,
) -> Transfer:
    """Copy the converted dataset at the URL `source` into `folder`: new, empty, or what a pull left.

    A folder that has an earlier state of the dataset (see `precache.conversion.update`) gets what it lacks.

    Args:
        on_progress: called with (bytes that are there, bytes in all).

    Raises:
        DatasetError: there is no dataset, the folder holds something else, or a file came wrong thrice.
        StorageError: the storage refuses or does not answer.
    """
    remote = open_remote(source)
    raw = remote.read(MANIFEST_NAME)
    if raw is None:
        raise DatasetError(
            f"{source}: not a converted dataset (no {MANIFEST_NAME} there); 'precache push' puts one there"
        )
    path = Path(os.path.realpath(local_path(folder)))
    manifest, digest, intact = parse_manifest(raw, Path(str(source)) / MANIFEST_NAME, _from(remote, path))
    if not intact:
        raise DatasetError(f"{source}: its {MANIFEST_NAME} was edited or damaged; push the dataset again")
    with hold_lock(path):
        _prepare(path, raw, manifest, digest)
        files = _fetched(manifest, remote)
        names = {file.name for file in files}
        remove_leftovers(path, names)
        has = {file.name for file in files if check_file(path, file) is None}
        report = _Count(files, has, on_progress)

        def fetch(file: FileEntry) -> None:
            _fetch(remote, file, path, source)
            report(file)

        _each(fetch, [file for file in files if file.name not in has])
        with atomic_write(path / MANIFEST_NAME) as written:
            written.write(raw)
        (path / PULL_NAME).unlink(missing_ok=True)
        fsync_folder(path)
    return report.result()


class _Count:
    """Bytes that are there, for `on_progress`; called by several threads."""

    def __init__(self, files: Sequence[FileEntry], there: set[str], on_progress: Progress) -> None:
        self._files = files
        self._lock = ThreadLock()
        self._on_progress = of_caller(on_progress)
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
        """What was done."""
        sent_bytes = sum(file.bytes for file in self._sent)
        return Transfer(len(self._files), self._total, len(self._sent), sent_bytes)


def _each(function: Callable[[FileEntry], None], files: Sequence[FileEntry]) -> None:
    """Call `function` for each file, several at a time; the first error ends it; what is begun is ended."""
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        try:
            works = [pool.submit(function, file) for file in files]
            wait(works, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    for work in works:
        if not work.cancelled():
            work.result()


def _from(remote: Remote, folder: Path) -> Held:
    """Of files in the storage, which are fetched unless `folder` has them."""
    return partial(_fetched_beside, remote, folder)


@contextmanager
def _fetched_beside(remote: Remote, folder: Path, file: FileEntry) -> Iterator[Path]:
    if check_file(folder, file) is None:
        yield folder / file.name
        return
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / file.name
        if (content := remote.read(file.name)) is not None:
            path.write_bytes(content)
        yield path


def _with_rejected(manifest: Manifest, folder: Path) -> list[FileEntry]:
    """All files of the dataset, the largest first; and the list of rejects, which people read."""
    files = sorted(manifest.files, key=lambda file: -file.bytes)
    path = folder / REJECTED_NAME
    if manifest.rejected and path.exists():
        files.append(FileEntry(REJECTED_NAME, path.stat().st_size, crc32c_file(path)))
    return files


def _fetched(manifest: Manifest, remote: Remote) -> list[FileEntry]:
    files = sorted(manifest.files, key=lambda file: -file.bytes)
    if manifest.rejected and (content := remote.read(REJECTED_NAME)) is not None:
        files.append(FileEntry(REJECTED_NAME, len(content), crc32c(content)))
    return files


def _goes_on(there: bytes, manifest: Manifest, held: Held) -> bool:
    """Whether the dataset there is an earlier state of ours: what it names is the same in both."""
    try:
        old, _, intact = parse_manifest(there, Path(MANIFEST_NAME), held)
    except DatasetError:
        return False
    ours = {file.name: file for file in manifest.files}
    return intact and _is_earlier(old, manifest) and all(ours.get(f.name, f) == f for f in old.files)


def _is_earlier(old: Manifest, new: Manifest) -> bool:
    return old.updates == new.updates[: len(old.updates)] and old.shards == new.shards[: len(old.shards)]


def _prepare(path: Path, raw: bytes, manifest: Manifest, digest: str) -> None:
    """Make the folder one that the dataset may be written to; DatasetError if it is not."""
    record = json.dumps({"digest": digest}).encode()
    manifest_path, record_path = path / MANIFEST_NAME, path / PULL_NAME
    if os.path.lexists(manifest_path):
        there = read_regular(manifest_path)
        if there != raw and not _goes_on(there, manifest, in_folder(path)):
            raise DatasetError(f"{path}: holds another dataset; choose another folder, or remove it")
    elif os.path.lexists(record_path):
        if read_regular(record_path) != record:
            raise DatasetError(
                f"{path}: holds what a pull of another dataset left; choose another folder, or remove it"
            )
    else:
        _check_empty(path)
        path.mkdir(parents=True, exist_ok=True)
        with atomic_write(record_path) as file:
            file.write(record)


def _check_empty(path: Path) -> None:
    if not path.exists():
        return
    allowed = {lock_path(path).name, "lost+found"} if is_mount_point(path) else set()
    names = {PULL_NAME}
    others = sorted(p.name for p in path.iterdir() if p.name not in allowed and not is_leftover(p, names))
    if others:
        raise DatasetError(
            f"{path}: is not empty, and nothing that a pull left ({some(others)}); choose another folder"
        )


def _fetch(remote: Remote, file: FileEntry, folder: Path, source: str | Url) -> None:
    """Bring one file, compared with its checksum before it has its name."""
    got = ""
    for _ in range(_TRIES):
        temporary = temporary_path(folder / file.name)
        try:
            with open(open_new(temporary), "wb") as written:
                remote.fetch(file, written.fileno())
                os.fsync(written.fileno())
            if (got := crc32c_file(temporary)) == file.crc32c:
                os.replace(temporary, folder / file.name)
                return
        finally:
            temporary.unlink(missing_ok=True)
    raise DatasetError(
        f"{source}/{file.name}: came {_TRIES} times with CRC-32C {got}, its manifest says {file.crc32c}; "
        f"push the dataset again"
    )
