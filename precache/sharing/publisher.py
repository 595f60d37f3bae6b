"""Sending a dataset to a URL: the manifest is put last, and only if no other process has put one.

Each object has the CRC-32C of its bytes as metadata: if that and its size are right, it is the file that was
sent. An object without this metadata was not put there by this project.

Of several processes that send to one URL, at most one puts the manifest; each of the others finds that
manifest, or that its own files were replaced, and raises an error. An upload that was under way while another
process finished may still replace an object of that process: `precache verify` detects this.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from precache.dataset.files import FileEntry
from precache.dataset.index import REJECTED_NAME
from precache.dataset.manifest import MANIFEST_NAME, Manifest
from precache.errors import DatasetError
from precache.storage import crc32c_file
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.retries import Check, ObjectNotFoundError, call_for_each, no_check
from precache.storage.urls import Url

_REQUESTS_AT_A_TIME = 16  # for metadata


class Publisher:
    """Sender of one dataset to a URL, which detects other processes that write there.

    Several threads may use it. Every method raises StorageError if the storage refuses, or does not answer in
    time.

    Attributes:
        store: the objects below the URL.
    """

    def __init__(self, url: Url) -> None:
        self.store = ObjectStore(url)
        self._manifest: ObjectInfo | None = None  # the manifest that the new one is to replace

    def read_manifest(self) -> bytes | None:
        """Read the manifest at the URL, which the new one will replace; None if there is none."""
        try:
            content, self._manifest = self.store.get_with_info(MANIFEST_NAME)
        except ObjectNotFoundError:
            content, self._manifest = None, None
        return content

    def find(self, names: Iterable[str]) -> dict[str, ObjectInfo]:
        """Find the objects of these names: name -> metadata, with the checksum, of each that exists."""
        wanted = frozenset(names)
        infos = [info for info in self.store.list() if info.name in wanted]

        def find(info: ObjectInfo, check: Check) -> ObjectInfo | None:
            return self.store.find(info.name, check)

        complete_infos = call_for_each(find, infos, _REQUESTS_AT_A_TIME)  # a list has no checksums
        return {info.name: info for info in complete_infos if info is not None}

    def send(self, path: Path, file: FileEntry, check: Check) -> None:
        """Upload `file`, whose bytes are in the file at `path`; an error of `check` ends the upload.

        Raises:
            DatasetError: another process has put a manifest meanwhile.
        """
        self._check_alone(check)
        self.store.upload(path, file.name, crc32c=file.crc32c, check=check)

    def publish(self, manifest: bytes, files: Sequence[FileEntry]) -> None:
        """Put the manifest, after checking that all `files` are still as they were sent.

        Raises:
            DatasetError: a file is not, or another process has put a manifest meanwhile.
        """
        self._check_alone(no_check)
        infos = self.find(file.name for file in files)
        for file in files:
            if problem := difference(infos.get(file.name), file):
                raise DatasetError(
                    problem,
                    path=self.store.url / file.name,
                    remedy="nothing else may write there meanwhile: run the same command again",
                )
        if self.store.put_if(MANIFEST_NAME, manifest, self._manifest) is not None:
            return
        with suppress(ObjectNotFoundError):
            if self.store.get(MANIFEST_NAME) == manifest:  # this process has put it, but the answer was lost
                return
        raise self._finished_by_another()

    def withdraw(self, names: Sequence[str]) -> None:
        """Remove the manifest, so that no new reader starts, then the files `names`.

        Raises:
            DatasetError: another process has put a manifest meanwhile.
        """
        self._check_alone(no_check)
        self.store.delete([MANIFEST_NAME])
        self._manifest = None
        self.store.delete(names)

    def _check_alone(self, check: Check) -> None:
        """Raise DatasetError if the manifest at the URL is not the one that `read_manifest` has read."""
        current, expected = self.store.find(MANIFEST_NAME, check), self._manifest
        if current is None and expected is None:
            return
        if current is None or expected is None or current.etag != expected.etag:
            raise self._finished_by_another()

    def _finished_by_another(self) -> DatasetError:
        url = self.store.url
        return DatasetError(
            "another process has finished a dataset there meanwhile",
            path=url,
            remedy=f"check it with 'precache verify {url}', or choose another URL",
        )


def difference(info: ObjectInfo | None, file: FileEntry) -> str | None:
    """Describe the difference between an object, None if it is missing, and `file`; None if there is none."""
    if info is None:
        return "missing"
    if info.bytes != file.bytes:
        return f"expected {file.bytes:,} bytes, got {info.bytes:,}"
    if info.crc32c != file.crc32c:
        return "was replaced after it was sent"
    return None


def dataset_files(manifest: Manifest, folder: Path) -> list[FileEntry]:
    """List the files of the dataset in `folder` without its manifest, the largest first.

    The list of rejected pictures is included, although the manifest does not name it.
    """
    files = sorted(manifest.files, key=lambda file: -file.bytes)
    path = folder / REJECTED_NAME
    if manifest.rejected and path.exists():
        files.append(FileEntry(REJECTED_NAME, path.stat().st_size, crc32c_file(path)))
    return files
