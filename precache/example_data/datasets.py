"""The known public datasets, downloaded from their own home, checked and unpacked.

A download over connections that break is continued where it broke, and given up after a minute. What has
arrived is beside the file, in `NAME.partial`; a later call continues it. That name can be guessed, so it is
never written through a link.
"""

import errno
import hashlib
import os
import random
import re
import shutil
import stat
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, InvalidURL
from pathlib import Path, PurePosixPath

from precache.errors import DownloadError, PrecacheError
from precache.reporting import Progress, unseen
from precache.sources.tree import scan_tree
from precache.storage import (
    TEMPORARY_SUFFIX,
    atomic_folder,
    check_new_folder,
    open_append,
    open_new,
    open_regular,
)

_TIMEOUT_S = 30
_READ_BYTES = 1 << 20
# After so many tries in a row that brought less than this it is given up. The waits between them double, and
# are 1 minute in all.
_HEADWAY_BYTES = 1 << 20
_TRIES = 8
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # of HTTP: another try may help
_COUNT = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-")
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicDataset:
    """Where a dataset is published, and how to tell that it arrived whole.

    Attributes:
        url: of the archive.
        md5: of the archive, as the publisher states it.
        inner: name of the tar inside the archive that holds the pictures, or None if it is that tar.
        folder: the folder in the tar whose class folders become the tree.
        images: number of pictures that the unpacked tree has.
    """

    url: str
    md5: str
    inner: str | None
    folder: str
    images: int

    @property
    def file_name(self) -> str:
        """Name of the archive."""
        return PurePosixPath(self.url).name


DATASETS = {
    # https://data.caltech.edu/records/nyy15-4j048 (Griffin, Holub, Perona; CC BY 4.0)
    "caltech256": PublicDataset(
        url="https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",
        md5="67b4f42ca05d46448c6bb8ecd2220f6d",
        inner=None,
        folder="256_ObjectCategories",
        images=30_607,
    ),
    # https://data.caltech.edu/records/mzrjq-6wc02 (Li, Andreetto, Ranzato, Perona; CC BY 4.0);
    # 9,144 files named *.jpg, and the JPEG BACKGROUND_Google/tmp
    "caltech101": PublicDataset(
        url="https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip",
        md5="3138e1922a9193bfa496528edbbc45d0",
        inner="101_ObjectCategories.tar.gz",
        folder="101_ObjectCategories",
        images=9_145,
    ),
}


def fetch(
    dataset: PublicDataset,
    destination: str | os.PathLike[str],
    *,
    url: str | None = None,
    on_progress: Progress = unseen,
) -> int:
    """Download `dataset` and unpack its image tree to the new folder `destination`.

    The archive is kept beside `destination`; one that lies there already is checked and used, a
    part of one is continued. `url` names a mirror; the checksum stays the publisher's. `on_progress`
    gets (bytes downloaded, bytes in all).

    Returns:
        The number of pictures.

    Raises:
        DownloadError: no network, a wrong checksum or count, or an archive that is not safe to unpack.
        SettingError: `destination` exists and is not empty.
    """
    destination = Path(destination)
    check_new_folder(destination)
    archive = destination.parent / dataset.file_name
    archive.parent.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        download(url or dataset.url, archive, on_progress)
    _check_md5(dataset, archive)
    try:
        with atomic_folder(destination) as folder:
            with _open_tar(dataset, archive) as tar:
                _unpack(tar, dataset.folder, folder, archive)
            scan = scan_tree(folder)
            images = len(scan.samples) - scan.deeper  # the count that is published is of class folders alone
            if images != dataset.images:
                raise DownloadError(
                    f"{archive}: expected {dataset.images:,} pictures in it, got {images:,}; "
                    f"remove it and fetch again"
                )
    except PrecacheError:
        raise
    except Exception as error:  # archives are read by code that raises nearly anything on damaged bytes
        if reason := full_disk(error):
            raise DownloadError(
                f"{destination}: {reason}, {archive} cannot be unpacked; make room, or choose a DST on "
                f"another disk, then run the same command again: the archive is kept"
            ) from error
        raise DownloadError(f"{archive}: cannot be unpacked ({error}); remove it and fetch again") from error
    return images


def _check_md5(dataset: PublicDataset, archive: Path) -> None:
    hasher = hashlib.md5(usedforsecurity=False)
    with open_regular(archive) as file:
        while data := file.read(1 << 20):
            hasher.update(data)
    if hasher.hexdigest() != dataset.md5:
        raise DownloadError(
            f"{archive}: expected MD5 {dataset.md5}, got {hasher.hexdigest()}; remove it and fetch again"
        )


@contextmanager
def _open_tar(dataset: PublicDataset, archive: Path) -> Iterator[tarfile.TarFile]:
    if dataset.inner is None:
        with tarfile.open(archive, "r|*") as tar:
            yield tar
        return
    with zipfile.ZipFile(archive) as outer:
        names = [n for n in outer.namelist() if n.endswith(f"/{dataset.inner}") and "__MACOSX" not in n]
        if len(names) != 1:
            raise ValueError(f"{dataset.inner} is {len(names)} times in it, expected once")
        (name,) = names
        with outer.open(name) as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
            yield tar


def _unpack(tar: tarfile.TarFile, folder: str, destination: Path, archive: Path) -> None:
    """Write the regular files under `folder` to `destination`, and no links."""
    for member in tar:
        parts = PurePosixPath(member.name).parts
        file = tar.extractfile(member) if member.isreg() else None
        if file is None or len(parts) < 2 or parts[0] != folder:  # a name may be empty
            continue
        if ".." in parts:
            raise DownloadError(
                f"{archive}: refused: its member {member.name!r} points outside; do not use this archive"
            )
        target = destination.joinpath(*parts[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as out:
            shutil.copyfileobj(file, out)


def full_disk(error: BaseException) -> str:
    """That the disk is full, in words, if that is what `error` says; or ''."""
    return _FULL.get(error.errno or 0, "") if isinstance(error, OSError) else ""


def download(url: str, path: Path, on_progress: Progress) -> None:
    """Download to the new file `path`; `on_progress` gets (bytes downloaded, bytes in all).

    Raises:
        DownloadError: no network, a server that does not have it, connections that break again and
            again, or a disk that is full.
    """
    partial = path.with_name(path.name + TEMPORARY_SUFFIX)
    tries, arrived = 0, False
    while True:
        start = _size(partial)
        try:
            _download_rest(url, partial, start, on_progress)
            break
        except _BrokenError as error:
            broken = error.reason
        gained = _size(partial) - start
        arrived = arrived or gained > 0
        tries = 0 if gained >= _HEADWAY_BYTES else tries + 1
        if tries == _TRIES or _is_final(broken, arrived):
            reason = broken.reason if type(broken) is urllib.error.URLError else str(broken)
            continues = f", which continues at byte {_size(partial):,}" if _size(partial) else ""
            raise DownloadError(
                f"{url}: cannot be downloaded ({reason or type(broken).__name__}); check the network and run "
                f"the same command again{continues}, or download it elsewhere and put it at {path}"
            ) from broken
        wait_s = min(_FIRST_WAIT_S * 2 ** max(0, tries - 1), _LONGEST_WAIT_S)
        time.sleep(wait_s * random.uniform(0.5, 1))  # not in step with all others that were cut off
    os.replace(partial, path)


class _BrokenError(Exception):
    """The network or the server ended a try."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(reason)
        self.reason = reason


def _size(partial: Path) -> int:
    """Bytes that have arrived; DownloadError if something else has the name."""
    try:
        status = partial.lstat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        raise DownloadError(
            f"{partial}: is not a partial download (it is a link, or no file); move it elsewhere, "
            f"then run the same command again"
        )
    return status.st_size


def _download_rest(url: str, partial: Path, start: int, on_progress: Progress) -> None:
    for position, total, data in _received(url, start):
        with _explained(partial):
            if position == 0:  # also where the server sends everything again
                partial.unlink(missing_ok=True)
            with open(open_append(partial) if position else open_new(partial), "ab") as file:
                file.write(data)
        on_progress(position + len(data), max(total, position + len(data)))


def _received(url: str, start: int) -> Iterator[tuple[int, int, bytes]]:
    """(first byte, bytes in all, content) of each part of the file, from `start` on or from 0.

    Raises:
        _BrokenError: not all came.
    """
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            position = start if response.status == 206 else 0
            first = _RANGE.match(response.headers.get("Content-Range", ""))
            is_another_part = position > 0 and first is not None and int(first[1]) != position
            if not is_another_part:
                length = response.headers.get("Content-Length", "")  # may be wrong: the checksum tells
                total = position + (int(length) if _COUNT.fullmatch(length) else 0)
                # read1 gives what there is: nothing that came is lost when the connection breaks
                while data := bytes(response.read1(_READ_BYTES)):
                    yield position, total, data
                    position += len(data)
                if position < total:
                    raise ConnectionError(f"the connection broke at {position:,} of {total:,} bytes")
    except (OSError, HTTPException, ValueError) as error:
        if start and getattr(error, "code", 0) == 416:  # nothing is left to send; the checksum tells
            return
        raise _BrokenError(error) from error
    if is_another_part:
        yield from _received(url, 0)


@contextmanager
def _explained(partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = full_disk(error) or f"cannot be written ({error.strerror})"
        raise DownloadError(
            f"{partial}: {reason}; make room, or choose a DST on another disk, then run the same "
            f"command again: it continues where it stopped"
        ) from error


def _is_final(broken: Exception, arrived: bool) -> bool:
    """Whether another try cannot help: the server refuses, or it was never reached."""
    if isinstance(broken, urllib.error.HTTPError):
        return broken.code not in _BUSY
    return isinstance(broken, (urllib.error.URLError, ValueError, InvalidURL)) and not arrived
