"""The known public datasets, downloaded from their own home, checked and unpacked."""

import hashlib
import os
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from precache.errors import DownloadError, PrecacheError
from precache.example_data.download import download, full_disk
from precache.reporting import Progress, unseen
from precache.sources.tree import scan_tree
from precache.storage import atomic_folder, check_new_folder, open_regular


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
            images = len(scan_tree(folder).samples)
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
    with open(open_regular(archive), "rb") as file:
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
