"""Sources at a URL.

    s3://BUCKET/photos              a tree of objects, see `precache.sources.objects`
    s3://BUCKET/sets/caltech        a converted dataset
    s3://BUCKET/photos.tar, .zip    an archive, fetched first: pictures are read in shuffled order
    s3://BUCKET/labels.csv          a table, fetched; its pictures are objects, or files below --root
    s3://BUCKET/tars                WebDataset tars, fetched
    https://HOST/photos.tar         the same, but for trees and tars: a web server lists nothing

What is fetched lies in the staging folder (TMPDIR) until the process ends.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from precache.dataset.manifest import MANIFEST_NAME
from precache.errors import PrecacheError, SourceError
from precache.reporting import counted, warn
from precache.sources import converted, webdataset
from precache.sources.archive import ArchiveSource, is_archive
from precache.sources.base import SampleRef, Scan, Source
from precache.sources.objects import ObjectTree
from precache.sources.options import ARCHIVE, TABLE, TARS, TREE, SourceOptions, is_table
from precache.sources.table import TableSource
from precache.storage import staging
from precache.storage.objects import ObjectInfo, ObjectStore
from precache.storage.urls import Location, Url

_PROBED = 1000  # objects that say whether a prefix holds tars alone
_AT_A_TIME = 4  # tars that are fetched


def open_at(url: Url, options: SourceOptions) -> Source:
    """The source at `url`, of the kind that its name and the storage say; raises as `open_source`."""
    path = Path(url.name) if url.key else Path()
    if is_table(path):
        return _open_table(url, options)
    if is_archive(path):
        options.only(ARCHIVE)
        folder = _fetched(url.parent, [_info(url)])
        return FetchedSource(ArchiveSource(folder / url.name, options), url, str(folder / url.name))
    store = ObjectStore(url)
    if store.find(MANIFEST_NAME) is not None:
        return converted.open_converted(url, options)
    if url.scheme in ("http", "https"):
        raise SourceError(
            f"{url}: is neither an archive, a table nor a converted dataset, and a web server cannot list a "
            f"tree; name one of these"
        )
    first = store.first(_PROBED)
    if first and all(_is_tar(info) for info in first):
        options.only(TARS)
        folder = _fetched(url, [info for info in store.list() if _is_tar(info)])
        return FetchedSource(webdataset.WebDatasetSource(folder, options), url, str(folder))
    if not first:
        raise SourceError(f"{url}: holds no objects; expected {url}/CLASS/picture.jpg; is the URL right?")
    options.only(TREE)
    return ObjectTree(url, 1 if options.class_depth is None else options.class_depth)


@dataclass(frozen=True, slots=True)
class FetchedSource:
    """A source at `url`, read from fetched files by `inner`, whose messages name these as `shown`."""

    inner: Source
    url: Url
    shown: str

    @property
    def root(self) -> Url:
        """The URL it is fetched from."""
        return self.url

    @property
    def paths(self) -> tuple[Location, ...]:
        """The same, and where a table's pictures are, unless they lie beside it: so may a dataset."""
        inner = self.inner.paths if isinstance(self.inner, TableSource) else ()
        return (self.url, *(place for place in inner[1:] if place != self.url.parent))

    @property
    def reads_at_a_time(self) -> int:
        """How many pictures are asked for at a time."""
        return getattr(self.inner, "reads_at_a_time", 0)

    def scan(self) -> Scan:
        """See `precache.sources.base.Source`."""
        with self._as_url():
            scan = self.inner.scan()
        warnings = tuple(self._said(warning) for warning in scan.warnings)
        return replace(scan, source=replace(self, inner=scan.source), warnings=warnings)

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        """The picture."""
        with self._as_url():
            return self.inner.read(ref, max_pixels)

    def where(self, ref: SampleRef) -> str:
        """See `inner`, at the URL."""
        return self._said(self.inner.where(ref))

    def _said(self, text: str) -> str:
        return text.replace(self.shown, str(self.url))

    @contextmanager
    def _as_url(self) -> Iterator[None]:
        """Make errors name the URL in the place of the fetched file."""
        try:
            yield
        except PrecacheError as error:
            said = type(error)(*(self._said(part) if isinstance(part, str) else part for part in error.args))
            raise said from error.__cause__


def _open_table(url: Url, options: SourceOptions) -> Source:
    options.only(TABLE)
    if options.root is None:
        options = replace(options, root=str(url.parent))
    folder = _fetched(url.parent, [_info(url)])
    return FetchedSource(TableSource(folder / url.name, options), url, str(folder / url.name))


def _info(url: Url) -> ObjectInfo:
    info = ObjectStore(url.parent).find(url.name)
    if info is None:
        raise SourceError(f"{url}: does not exist; is the URL right, and was the upload finished?")
    return info


def _is_tar(info: ObjectInfo) -> bool:
    return "/" not in info.name and info.name.lower().endswith(".tar") and not info.name.startswith(".")


def _fetched(url: Url, infos: Sequence[ObjectInfo]) -> Path:
    """A folder with the objects of `infos`, which lie below `url`, as files.

    Raises:
        SourceError: there is no room for them.
        StorageError: one cannot be fetched.
    """
    folder = Path(tempfile.mkdtemp(dir=staging.folder()))
    needed, free = sum(info.bytes for info in infos), shutil.disk_usage(folder).free
    if needed > free:
        raise SourceError(
            f"{url}: {counted(len(infos), 'file')}, {needed:,} bytes, must be fetched into "
            f"{tempfile.gettempdir()}, where {free:,} bytes are free; set TMPDIR to a folder on a larger disk"
        )
    warn(f"{url}: fetching {counted(len(infos), 'file')}, {needed:,} bytes, into {folder} first")
    store = ObjectStore(url)

    def fetch(info: ObjectInfo) -> None:
        with open(folder / info.name, "xb") as file:
            store.download(info.name, file.fileno(), info.bytes)
        os.utime(folder / info.name, ns=(info.modified_ns, info.modified_ns))

    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        for _ in pool.map(fetch, infos):
            pass
    return folder
