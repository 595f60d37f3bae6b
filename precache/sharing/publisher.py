"""A dataset's files on their way to a URL: the manifest goes last, and only if no other process has put one.

`precache convert` into a URL and `precache push` both send by this. Beside each object lies, as its metadata,
the CRC-32C of its bytes: by that and its size it is known to be the file that was sent. An object without one
was not put there by this project.

Of several processes that send to one URL, at most one puts the manifest; each of the others finds that
manifest, or that its own files were replaced, and says so. What cannot be held back are the bytes of an
upload that was under way while another process finished: `precache verify` finds those.
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
from precache.storage.retries import Check, ObjectNotFoundError, call_for_each, unchecked
from precache.storage.urls import Url

_AT_A_TIME = 16  # requests for what is known of an object


class Publisher:
    """The files of one dataset at a URL, and who else writes there. Several threads may use one.

    Every method raises StorageError where the storage refuses, or does not answer in time.

    Attributes:
        store: the objects below the URL.
    """

    def __init__(self, url: Url) -> None:
        self.store = ObjectStore(url)
        self._manifest: ObjectInfo | None = None  # whose place the new one takes

    def read_manifest(self) -> bytes | None:
        """Read the manifest that is there, in whose place the new one is put; None if there is none."""
        try:
            content, self._manifest = self.store.get_with_info(MANIFEST_NAME)
        except ObjectNotFoundError:
            content, self._manifest = None, None
        return content

    def find(self, names: Iterable[str]) -> dict[str, ObjectInfo]:
        """Look for the objects of these names; what is known of each that is there, with its checksum."""
        wanted = frozenset(names)
        return self.with_checksums([found for found in self.store.list() if found.name in wanted])

    def with_checksums(self, listed: Sequence[ObjectInfo]) -> dict[str, ObjectInfo]:
        """Ask for the checksums of objects that a list has; see `find`."""

        def look(info: ObjectInfo, check: Check) -> ObjectInfo | None:
            return self.store.find(info.name, check)

        return {info.name: info for info in call_for_each(look, listed, _AT_A_TIME) if info is not None}

    def send(self, path: Path, file: FileEntry, check: Check = unchecked) -> None:
        """Put the bytes of `file`, which lie at `path`, there; given up where `check` raises.

        Raises:
            DatasetError: another process has put a manifest there meanwhile.
        """
        self._check_alone(check)
        self.store.upload(path, file.name, crc32c=file.crc32c, check=check)

    def publish(self, manifest: bytes, files: Sequence[FileEntry]) -> None:
        """Put the manifest there, if all `files` are as they were sent.

        Raises:
            DatasetError: a file is not, or another process has put a manifest there meanwhile.
        """
        self._check_alone(unchecked)
        found = self.find(file.name for file in files)
        for file in files:
            if problem := difference(found.get(file.name), file):
                raise DatasetError(
                    f"{self.store.url / file.name}: {problem}; nothing else may write there meanwhile: run "
                    f"the same command again"
                )
        if self.store.put_if(MANIFEST_NAME, manifest, self._manifest) is not None:
            return
        with suppress(ObjectNotFoundError):
            if self.store.get(MANIFEST_NAME) == manifest:  # only the answer was lost
                return
        raise self._finished_by_another()

    def withdraw(self, names: Sequence[str]) -> None:
        """Remove the manifest that is there, so that no new reader starts; then the files `names`.

        Raises:
            DatasetError: another process has put a manifest there meanwhile.
        """
        self._check_alone(unchecked)
        self.store.delete([MANIFEST_NAME])
        self._manifest = None
        self.store.delete(names)

    def _check_alone(self, check: Check) -> None:
        """Raise DatasetError if the manifest that is there is another one than was read."""
        found, known = self.store.find(MANIFEST_NAME, check), self._manifest
        if found is None and known is None:
            return
        if found is None or known is None or found.etag != known.etag:
            raise self._finished_by_another()

    def _finished_by_another(self) -> DatasetError:
        url = self.store.url
        return DatasetError(
            f"{url}: another process has finished a dataset there meanwhile; check it with 'precache verify "
            f"{url}', or choose another URL"
        )


def difference(found: ObjectInfo | None, file: FileEntry) -> str | None:
    """Describe how the object found in the place of `file` differs from it; None if it does not."""
    if found is None:
        return "missing"
    if found.bytes != file.bytes:
        return f"expected {file.bytes:,} bytes, got {found.bytes:,}"
    if found.crc32c != file.crc32c:
        return "was replaced after it was sent"
    return None


def files_of(manifest: Manifest, folder: Path) -> list[FileEntry]:
    """List the files of the dataset in `folder`, but for its manifest, the largest first.

    Among them is the list of rejects, which the manifest does not name.
    """
    files = sorted(manifest.files, key=lambda file: -file.bytes)
    path = folder / REJECTED_NAME
    if manifest.rejected and path.exists():
        files.append(FileEntry(REJECTED_NAME, path.stat().st_size, crc32c_file(path)))
    return files
