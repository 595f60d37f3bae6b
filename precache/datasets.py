"""The known public datasets, downloaded from their own home, checked and unpacked."""

import hashlib
import os
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from precache.errors import DownloadError, SettingError
from precache.source import scan_tree
from precache.storage import TEMPORARY_SUFFIX, atomic_folder

_TIMEOUT_S = 30
_PART_BYTES = 1 << 20
Progress = Callable[[int, int], None]


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
    on_progress: Progress = lambda done, total: None,
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
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise SettingError(f"{destination}: exists and is not empty; choose another DST or remove it")
    archive = destination.parent / dataset.file_name
    archive.parent.mkdir(parents=True, exist_ok=True)
    if not archive.exists():
        _download(url or dataset.url, archive, on_progress)
    _check_md5(dataset, archive)
    try:
        with atomic_folder(destination) as folder:
            with _open_tar(dataset, archive) as tar:
                _unpack(tar, dataset.folder, folder, archive)
            images = len(scan_tree(folder).samples)
            if images != dataset.images:
                raise DownloadError(
                    f"{archive}: expected {dataset.images:,} pictures in it, got {images:,}; "
                    f"remove it and fetch again"
                )
    except (OSError, tarfile.TarError, zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise DownloadError(f"{archive}: cannot be unpacked ({error}); remove it and fetch again") from error
    return images


def _download(url: str, archive: Path, on_progress: Progress) -> None:
    """Download to `archive`, by way of a `.partial` file that a later call continues."""
    partial = archive.with_name(archive.name + TEMPORARY_SUFFIX)
    while True:
        start = partial.stat().st_size if partial.exists() else 0
        try:
            total = _download_rest(url, partial, start, on_progress)
            break
        except (OSError, HTTPException, ValueError) as error:
            done = partial.stat().st_size if partial.exists() else 0
            if done > start:
                continue  # the connection broke, but it made headway: go on from there
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise DownloadError(
                f"{url}: cannot be downloaded ({reason}); check the network and run the same "
                f"command again, or download it elsewhere and put it at {archive}"
            ) from error
    if partial.stat().st_size != total:
        got = partial.stat().st_size
        partial.unlink()
        raise DownloadError(f"{url}: expected {total:,} bytes, got {got:,}; fetch again")
    os.replace(partial, archive)


def _download_rest(url: str, partial: Path, start: int, on_progress: Progress) -> int:
    """Append what is missing to `partial`; the size of the whole archive in bytes."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # nothing is left to send: the part is the whole
            return start
        raise
    with response:
        if response.status != 206:
            start = 0  # the server sends everything again
        total = start + int(response.headers.get("Content-Length") or 0)
        done = start
        with open(partial, "ab" if start else "wb") as file:
            while data := response.read(_PART_BYTES):
                file.write(data)
                done += len(data)
                on_progress(done, total)
        if done < total:
            raise ConnectionError(f"the connection broke at {done:,} of {total:,} bytes")
    return max(total, done)


def _check_md5(dataset: PublicDataset, archive: Path) -> None:
    hasher = hashlib.md5(usedforsecurity=False)
    with open(archive, "rb") as file:
        while data := file.read(_PART_BYTES):
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
        (name,) = (n for n in outer.namelist() if n.endswith(f"/{dataset.inner}") and "__MACOSX" not in n)
        with outer.open(name) as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
            yield tar


def _unpack(tar: tarfile.TarFile, folder: str, destination: Path, archive: Path) -> None:
    """Write the regular files under `folder` to `destination`; refuse any that points outside."""
    for member in tar:
        parts = PurePosixPath(member.name).parts
        if member.name.startswith("/") or ".." in parts or member.issym() or member.islnk():
            raise DownloadError(
                f"{archive}: refused, its member {member.name!r} points outside; do not use this archive"
            )
        file = tar.extractfile(member) if member.isfile() else None
        if file is None or parts[0] != folder or len(parts) < 2:
            continue
        target = destination.joinpath(*parts[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(target, "wb") as out:
            shutil.copyfileobj(file, out)
