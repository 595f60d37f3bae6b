"""The known public datasets, downloaded from their own home, checked and unpacked.

A download over connections that break is continued where it broke, and given up after a minute. What has
arrived is beside the file, in `NAME.partial`; a later call continues it. That name can be guessed, so it is
never written through a link.
"""

import hashlib
import os
import random
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from precache.errors import DownloadError, os_errors_as
from precache.reporting import Progress, no_progress
from precache.storage import (
    TEMPORARY_SUFFIX,
    atomic_folder,
    check_new_folder,
    open_append,
    open_new,
    open_regular,
)
from precache.storage.retries import with_retries

_TIMEOUT_S = 30
_READ_BYTES = 1 << 20
# After so many pauses in a row in which less than this came it is given up; they are 1 minute in all.
_HEADWAY_BYTES = 1 << 20
_PAUSES = 7
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_BUSY = (408, 425, 429, 500, 502, 503, 504)  # of HTTP: another try may help
_ROOM = "make room, or choose a DST on another disk, then run the same command again"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicDataset:
    """Where a dataset is published, and how to tell that it arrived whole.

    Attributes:
        url: of the archive.
        md5: of the archive, as the publisher states it.
        inner: the tar inside the archive that holds the pictures, or None if it is that tar.
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
        inner="caltech-101/101_ObjectCategories.tar.gz",
        folder="101_ObjectCategories",
        images=9_145,
    ),
}


def fetch(
    dataset: PublicDataset,
    destination: str | os.PathLike[str],
    *,
    url: str | None = None,
    on_progress: Progress = no_progress,
) -> None:
    """Download `dataset` and unpack its image tree to the new folder `destination`.

    The archive is kept beside `destination`; one that lies there already is checked and used, a
    part of one is continued. `url` names a mirror; the checksum stays the publisher's. `on_progress`
    gets (bytes downloaded, bytes in all).

    Raises:
        DownloadError: no network, a wrong checksum, a full disk, or an archive that is not safe to unpack.
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
        with (
            os_errors_as(DownloadError, f"{destination}: {archive} cannot be unpacked", _ROOM),
            atomic_folder(destination) as folder,
            _open_tar(dataset, archive) as tar,
        ):
            tar.extractall(folder, filter=lambda member, root: _file_of_tree(member, root, dataset.folder))
    except (tarfile.TarError, zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{archive}: cannot be unpacked ({error}); do not use this archive") from error


def _check_md5(dataset: PublicDataset, archive: Path) -> None:
    hasher = hashlib.md5(usedforsecurity=False)
    with open_regular(archive) as file:
        while data := file.read(_READ_BYTES):
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
    with (
        zipfile.ZipFile(archive) as outer,
        outer.open(dataset.inner) as stream,
        tarfile.open(fileobj=stream, mode="r|*") as tar,
    ):
        yield tar


def _file_of_tree(member: tarfile.TarInfo, root: str, folder: str) -> tarfile.TarInfo | None:
    """Filter of `extractall` that keeps files below `folder`, no links; FilterError if one leads outside."""
    parts = PurePosixPath(member.name).parts
    if not member.isreg() or len(parts) < 2 or parts[0] != folder:
        return None
    return tarfile.data_filter(member.replace(name=str(PurePosixPath(*parts[1:])), deep=False), root)


def download(url: str, path: Path, on_progress: Progress) -> None:
    """Download to the new file `path`; `on_progress` gets (bytes downloaded, bytes in all).

    Raises:
        DownloadError: no network, a server that does not have it, connections that break again and
            again, or a disk that is full.
    """
    partial = path.with_name(path.name + TEMPORARY_SUFFIX)
    remedy = "if it is no partial download, move it elsewhere, then run the same command again"
    with os_errors_as(DownloadError, f"{partial}: cannot be continued", remedy):
        descriptor = open_append(partial) if os.path.lexists(partial) else open_new(partial)
    with open(descriptor, "ab", buffering=0) as file:
        begun = file.tell()

        def is_temporary(error: Exception) -> bool:
            if isinstance(error, HTTPError):
                return error.code in _BUSY
            if isinstance(error, URLError):  # it was not reached; it may be again where it was before
                return file.tell() > begun
            return isinstance(error, OSError | HTTPException)

        def receive_rest() -> None:
            request = Request(url, headers={"Range": f"bytes={file.tell()}-"} if file.tell() else {})
            with urlopen(request, timeout=_TIMEOUT_S) as response:
                if response.status != 206:  # the server sends everything again
                    file.seek(0)
                    file.truncate()
                total = file.tell() + int(response.headers.get("Content-Length", 0))
                # read1 gives what there is: nothing that came is lost when the connection breaks
                while data := response.read1(_READ_BYTES):
                    rest = memoryview(data)
                    with os_errors_as(DownloadError, f"{partial}: cannot be written", _ROOM):
                        while rest:
                            rest = rest[file.write(rest) :]
                    on_progress(file.tell(), max(total, file.tell()))
                if file.tell() < total:
                    raise ConnectionError(f"the connection broke at {file.tell():,} of {total:,} bytes")

        def is_received() -> bool:
            """Whether all is there; False where the connection broke after much had come."""
            start = file.tell()
            try:
                receive_rest()
            except (OSError, HTTPException) as error:
                if start and isinstance(error, HTTPError) and error.code == 416:
                    return True  # nothing is left to send; the checksum tells
                if file.tell() - start < _HEADWAY_BYTES:
                    raise
                return False
            return True

        try:
            while not with_retries(is_received, _pauses_s(), is_temporary):
                pass
        except (OSError, HTTPException, ValueError) as error:
            received = file.tell()
            if not received:
                partial.unlink()
            reason = error.reason if type(error) is URLError else str(error) or type(error).__name__
            continues = f", which continues at byte {received:,}" if received else ""
            raise DownloadError(
                f"{url}: cannot be downloaded ({reason}); check the network and run the same command "
                f"again{continues}, or download it elsewhere and put it at {path}"
            ) from error
    os.replace(partial, path)


def _pauses_s() -> Iterator[float]:
    for number in range(_PAUSES):
        # not in step with all others that were cut off
        yield min(_FIRST_PAUSE_S * 2**number, _LONGEST_PAUSE_S) * random.uniform(0.5, 1)
