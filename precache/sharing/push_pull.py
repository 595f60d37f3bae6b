"""`precache push` and `precache pull`: a converted dataset to a storage and back.

The manifest goes last in both directions: where it is, all that it names is there. Each file is compared with
the CRC-32C that the manifest has of it, on the side where it can be read; files that are already there stay.

    push   files that the place lacks, then dataset.json
    pull   files that the folder lacks, each under a temporary name until its bytes are compared, then
           dataset.json

If either stops, the same command moves the rest. Nothing is overwritten but what the dataset names that is
there, and what this project has sent.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Lock, Thread

from precache.conversion.journal import others_in
from precache.dataset.converted import open_dataset
from precache.dataset.files import FileEntry, Held, check_file, first_problem, in_folder
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME, Manifest, ManifestError, parse_manifest
from precache.engines import is_of_caller, of_caller
from precache.errors import DatasetError, check_open_files, shell_command
from precache.reporting import Progress, some, tells, unseen
from precache.sharing.places import RemotePlace, open_place
from precache.storage import (
    atomic_write,
    crc32c,
    crc32c_file,
    fsync_folder,
    open_new,
    read_regular,
    remove_leftovers,
    temporary_path,
)
from precache.storage.locks import hold_lock
from precache.storage.retries import Check
from precache.storage.staging import temporary_folder
from precache.storage.urls import Url, local_path

_TRIES = 3  # of a file whose bytes came wrong
_FILES_AT_A_TIME = 4
_END_S = 2.0  # for threads whose work is no longer needed, and has no effect


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


@tells(lambda: "while files were sent; what has arrived is kept, and the same command sends the rest")
def push(
    folder: str | os.PathLike[str],
    destination: str | Url,
    *,
    overwrite: bool = False,
    public: bool = False,
    on_progress: Progress = unseen,
) -> Transfer:
    """Copy the converted dataset in `folder` to the URL `destination`.

    Args:
        overwrite: although there is another dataset, or what an unfinished conversion has written. The
            manifest is removed first, and then the dataset's files, so that no new reader gets half of
            either; one that is already reading may miss a file.
        public: make a new repository of `hf://` public; else it is private.
        on_progress: called with (bytes that are there, bytes in all).

    Raises:
        DatasetError: `folder` holds no dataset, or a file that is not what its manifest says; or another
            dataset is there, files that are not ours, or a process that writes.
        StorageError: the storage refuses or does not answer.
    """
    dataset = open_dataset(folder)
    place = open_place(destination, public=public)
    raw = read_regular(dataset.path / MANIFEST_NAME)
    files = _with_rejected(dataset.manifest, dataset.path)
    if problem := first_problem(dataset.path, files):  # before anything is made there
        raise _not_whole(problem, dataset.path)
    there = place.look(overwrite=overwrite)
    before = _manifest_there(there, destination, _from(place, dataset.path))
    goes_on = there in (None, raw) or _is_earlier(before, dataset.manifest)
    if not goes_on and not overwrite:
        raise DatasetError(
            f"{destination}: holds another dataset; choose another URL, or pass --overwrite to replace it"
        )
    own = _own_names(before)
    holding, others = place.compare(files, dataset.path)
    if others - own:
        raise DatasetError(
            f"{destination}: holds files that are not part of a dataset, or of one that is not finished, "
            f"under names that this one needs ({some(sorted(others - own))}); finish the conversion that "
            f"wrote them, replace what precache wrote with --overwrite, move them elsewhere, or choose "
            f"another URL"
        )
    if there == raw and len(holding) == len(files):
        return _Count(files, holding, on_progress).result()
    if not goes_on:
        place.withdraw(sorted(own - holding))
    report = _Count(files, holding, on_progress)

    def send(file: FileEntry, check: Check) -> None:
        if problem := check_file(dataset.path, file):
            raise _not_whole(problem, dataset.path)
        place.send(dataset.path / file.name, file, check)
        report(file)

    _each_file(send, [file for file in files if file.name not in holding])
    place.commit(raw, files)
    return report.result()


@tells(lambda: "while files were fetched; what has arrived is kept, and the same command fetches the rest")
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
        DatasetError: there is no dataset, the folder holds something else or cannot be written, or a file
            came wrong three times.
        StorageError: the storage refuses or does not answer.
    """
    place = open_place(source)
    raw = place.read(MANIFEST_NAME)
    if raw is None:
        raise DatasetError(
            f"{source}: not a converted dataset (no {MANIFEST_NAME} there); 'precache push' puts one there"
        )
    path = Path(os.path.realpath(local_path(folder)))
    try:
        manifest, _ = parse_manifest(raw, Path(MANIFEST_NAME), _from(place, path))
    except ManifestError as error:
        raise DatasetError(f"{source}/{str(error).rpartition('; ')[0]}; push the dataset again") from error
    files = _fetched(manifest, place)
    try:
        with hold_lock(path):
            own = _prepare(path, raw, manifest, {file.name for file in files})
            remove_leftovers(path, {file.name for file in files})
            has = {file.name for file in files if check_file(path, file) is None}
            lacks = [file for file in files if file.name not in has]
            others = [f.name for f in lacks if f.name not in own and os.path.lexists(path / f.name)]
            if others:
                raise DatasetError(
                    f"{path}: holds files that are not part of the dataset, under names that it needs "
                    f"({some(sorted(others))}); move them elsewhere, or choose another folder"
                )
            report = _Count(files, has, on_progress)

            def fetch(file: FileEntry, check: Check) -> None:
                _fetch(place, file, path, source, check)
                report(file)

            _each_file(fetch, lacks)
            with atomic_write(path / MANIFEST_NAME) as written:
                written.write(raw)
            fsync_folder(path)
    except OSError as error:
        if is_of_caller(error):
            raise
        check_open_files(error, error.filename)
        raise DatasetError(
            f"{error.filename or path}: cannot be written ({error.strerror or error}); what has arrived is "
            f"kept: make room or fix permissions, then run the same command again"
        ) from error
    return report.result()


class _UnwantedError(Exception):
    """Ctrl-C came."""


def _each_file(function: Callable[[FileEntry, Check], None], files: Sequence[FileEntry]) -> None:
    """Call `function` for each file, several at a time; after the first error no more are started.

    Args:
        function: gets a `Check`, which raises after Ctrl-C, when its work is not needed.
    """
    waiting, end = iter(files), Event()
    errors: list[BaseException] = []

    def check() -> None:
        if end.is_set():
            raise _UnwantedError

    def work() -> None:
        try:
            while not errors and not end.is_set() and (file := next(waiting, None)) is not None:
                function(file, check)
        except BaseException as error:
            errors.append(error)

    # daemons: one that waits, inside a library, for a silent host does not keep the program
    threads = [Thread(target=work, daemon=True) for _ in range(_FILES_AT_A_TIME)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        end.set()
        until_s = time.monotonic() + _END_S
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
    if errors:
        raise errors[0]


class _Count:
    """Bytes that are there, for `on_progress`; called by several threads."""

    def __init__(self, files: Sequence[FileEntry], there: set[str], on_progress: Progress) -> None:
        self._files = files
        self._lock = Lock()
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
        """The `Transfer` that sums up what was done."""
        sent_bytes = sum(file.bytes for file in self._sent)
        return Transfer(len(self._files), self._total, len(self._sent), sent_bytes)


def _from(place: RemotePlace, folder: Path) -> Held:
    """A `Held` for files in the storage, which are fetched unless `folder` has them."""
    return partial(_fetched_beside, place, folder)


@contextmanager
def _fetched_beside(place: RemotePlace, folder: Path, file: FileEntry) -> Iterator[Path]:
    if check_file(folder, file) is None:
        yield folder / file.name
        return
    with temporary_folder() as temporary:
        path = temporary / file.name
        if (content := place.read(file.name)) is not None:
            try:
                path.write_bytes(content)
            except OSError as error:
                raise DatasetError(
                    f"{path}: cannot be written ({error.strerror}); make room there, or set TMPDIR to a "
                    f"folder on another disk"
                ) from error
        yield path


def _not_whole(problem: str, folder: Path) -> DatasetError:
    return DatasetError(f"{problem}; run: {shell_command('precache verify', folder)}")


def _with_rejected(manifest: Manifest, folder: Path) -> list[FileEntry]:
    """All files of the dataset, the largest first; and the list of rejects, which people read."""
    files = sorted(manifest.files, key=lambda file: -file.bytes)
    path = folder / REJECTED_NAME
    if manifest.rejected and path.exists():
        files.append(FileEntry(REJECTED_NAME, path.stat().st_size, crc32c_file(path)))
    return files


def _fetched(manifest: Manifest, place: RemotePlace) -> list[FileEntry]:
    files = sorted(manifest.files, key=lambda file: -file.bytes)
    if manifest.rejected and (content := place.read(REJECTED_NAME)) is not None:
        files.append(FileEntry(REJECTED_NAME, len(content), crc32c(content)))
    return files


def _manifest_there(there: bytes | None, destination: str | Url, held: Held) -> Manifest | None:
    """The manifest of the dataset at a URL, or None; DatasetError if precache did not write it."""
    if there is None:
        return None
    try:
        return parse_manifest(there, Path(MANIFEST_NAME), held)[0]
    except DatasetError as error:
        raise DatasetError(
            f"{destination}/{error}; so it is unknown which files are that dataset's: remove it yourself, or "
            f"choose another URL"
        ) from error


def _own_names(manifest: Manifest | None) -> frozenset[str]:
    """Of the files of a dataset, beside its manifest; of none without one."""
    return frozenset() if manifest is None else manifest.own_names


def _is_earlier(old: Manifest | None, new: Manifest) -> bool:
    """Whether `old` is an earlier state of the dataset: what both name is the same."""
    if old is None:
        return False
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
    if others := others_in(path, frozenset({*names, MANIFEST_NAME})):
        raise DatasetError(
            f"{path}: is not empty, and holds what no pull of this dataset left ({some(others)}); choose "
            f"another folder"
        )
    return frozenset()


def _fetch(place: RemotePlace, file: FileEntry, folder: Path, source: str | Url, check: Check) -> None:
    """Bring one file, compared with its checksum before it has its name."""
    got = ""
    for _ in range(_TRIES):
        temporary = temporary_path(folder / file.name)
        try:
            with open(open_new(temporary), "wb") as written:
                place.fetch(file, written.fileno(), check)
                os.fsync(written.fileno())
            if (got := crc32c_file(temporary)) == file.crc32c:
                check()
                os.replace(temporary, folder / file.name)
                return
        finally:
            temporary.unlink(missing_ok=True)
    raise DatasetError(
        f"{source}/{file.name}: came {_TRIES} times with CRC-32C {got}, its manifest says {file.crc32c}; "
        f"push the dataset again"
    )
