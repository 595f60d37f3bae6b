"""Download public datasets from their publishers, check and unpack them.

A download continues where a connection breaks, and fails after a minute without progress. The bytes received
so far are beside the file, in `NAME.partial`, and a later call continues it. As that name can be guessed, the
file is never written through a link.
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
# A download fails after this many pauses in a row, a minute in all, with fewer bytes than this between them.
_PROGRESS_BYTES = 1 << 20
_PAUSES = 7
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_TEMPORARY_STATUSES = (408, 425, 429, 500, 502, 503, 504)  # of HTTP: another try may help
_DISK_REMEDY = "make room, or choose a DST on another disk, then run the same command again"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicDataset:
    """A public dataset: where it is published, and how to check and unpack its archive.

    Attributes:
        url: URL of the archive.
        md5: MD5 of the archive, as the publisher states it.
        inner: path of the tar with the pictures inside the archive; None if the archive is that tar.
        folder: folder in the tar whose class folders become the tree.
        images: number of pictures in the unpacked tree.
    """

    url: str
    md5: str
    inner: str | None
    folder: str
    images: int

    @property
    def file_name(self) -> str:
        """File name of the archive."""
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

    The archive is kept beside `destination`; one that is there already is checked and used, and a partial
    download is continued.

    Args:
        url: URL of a mirror of the archive, which must have the publisher's checksum.
        on_progress: called with (bytes downloaded, bytes in all).

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
            os_errors_as(DownloadError, f"{archive} cannot be unpacked", _DISK_REMEDY, path=destination),
            atomic_folder(destination) as folder,
            _open_tar(dataset, archive) as tar,
        ):
            tar.extractall(folder, filter=lambda member, root: _file_of_tree(member, root, dataset.folder))
    except (tarfile.TarError, zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(
            f"cannot be unpacked ({error})", path=archive, remedy="do not use this archive"
        ) from error


def _check_md5(dataset: PublicDataset, archive: Path) -> None:
    hasher = hashlib.md5(usedforsecurity=False)
    with open_regular(archive) as file:
        while data := file.read(_READ_BYTES):
            hasher.update(data)
    if hasher.hexdigest() != dataset.md5:
        raise DownloadError(
            f"expected MD5 {dataset.md5}, got {hasher.hexdigest()}",
            path=archive,
            remedy="remove it and fetch again",
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
    """Return `member` if it is a file below `folder`, else None; FilterError if its path leads outside."""
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
    with os_errors_as(DownloadError, "cannot be continued", remedy, path=partial):
        descriptor = open_append(partial) if os.path.lexists(partial) else open_new(partial)
    with open(descriptor, "ab", buffering=0) as file:
        initial_bytes = file.tell()

        def is_temporary(error: Exception) -> bool:
            if isinstance(error, HTTPError):
                return error.code in _TEMPORARY_STATUSES
            if isinstance(error, URLError):  # the server was not reached: try again only if it was before
                return file.tell() > initial_bytes
            return isinstance(error, OSError | HTTPException)

        def receive_rest() -> None:
            request = Request(url, headers={"Range": f"bytes={file.tell()}-"} if file.tell() else {})
            with urlopen(request, timeout=_TIMEOUT_S) as response:
                if response.status != 206:  # the server sends everything again
                    file.seek(0)
                    file.truncate()
                total = file.tell() + int(response.headers.get("Content-Length", 0))
                # read1 returns the bytes received so far, so that none is lost when the connection breaks
                while data := response.read1(_READ_BYTES):
                    rest = memoryview(data)
                    with os_errors_as(DownloadError, "cannot be written", _DISK_REMEDY, path=partial):
                        while rest:
                            rest = rest[file.write(rest) :]
                    on_progress(file.tell(), max(total, file.tell()))
                if file.tell() < total:
                    raise ConnectionError(f"the connection broke at {file.tell():,} of {total:,} bytes")

        def is_received() -> bool:
            """Receive the rest; False if the connection broke after enough bytes to try again at once."""
            start = file.tell()
            try:
                receive_rest()
            except (OSError, HTTPException) as error:
                if start and isinstance(error, HTTPError) and error.code == 416:
                    return True  # the server has no more bytes; the checksum shows whether they are right
                if file.tell() - start < _PROGRESS_BYTES:
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
                f"cannot be downloaded ({reason})",
                path=url,
                remedy=f"check the network and run the same command again{continues}, or download it "
                f"elsewhere and put it at {path}",
            ) from error
    os.replace(partial, path)


def _pauses_s() -> Iterator[float]:
    """Yield the pauses before the next tries, in seconds."""
    for number in range(_PAUSES):
        # random, so that clients that were cut off together do not come back together
        yield min(_FIRST_PAUSE_S * 2**number, _LONGEST_PAUSE_S) * random.uniform(0.5, 1)
