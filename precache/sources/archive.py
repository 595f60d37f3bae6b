"""A tar or a zip of class folders: the samples are those of the tree that it would be unpacked into.

    photos.tar     read in place: a picture is some bytes of it
    photos.zip     the same, stored or deflated
    photos.tar.gz  (.tgz, .bz2, .xz) read from its start, see `precache.sources.spool`

Paths, ids, labels, splits and the digest are those of the tree; a folder that all lies in, such as
101_ObjectCategories/, is left out of them. No member is ever written to a file of its own. A tar that holds
samples of WebDataset instead of class folders is what `precache.sources.webdataset` says.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from precache.sources import webdataset
from precache.sources.base import SampleRef, Scan
from precache.sources.members import Contents, Home
from precache.sources.opened import Opened, open_archive
from precache.sources.options import SourceOptions
from precache.sources.tree import scan_folders


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    """An archive as a `Source`.

    Attributes:
        archive: once it is scanned; and `prefix`, the folder that all of its samples lie in, with a slash.
    """

    root: Path
    options: SourceOptions
    archive: Opened | None = None
    prefix: str = ""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The archive."""
        return (self.root,)

    @property
    def class_depth(self) -> int:
        """How many folders deep the class folders lie."""
        return 1 if self.options.class_depth is None else self.options.class_depth

    def scan(self) -> Scan:
        """See `precache.sources.base.Source`."""
        archive = open_archive(self.root)
        contents = Contents(archive.members(archive.window()), Home(archive.modified_ns, archive.start))
        if self.options.class_depth is None and webdataset.holds_samples(contents.top):
            return webdataset.scan_archives(self.root, (archive,), self.options)
        self.options.only("class folders in an archive", "class_depth")
        top, prefix = contents.strip(self.class_depth)
        scan = scan_folders(top, replace(self, archive=archive, prefix=prefix))
        places = (contents.place(prefix + ref.path) for ref in scan.samples)
        scan.samples.places = np.fromiter(places, np.int64, len(scan.samples))
        return replace(
            scan,
            ignored=(*contents.ignored, *scan.ignored),
            scanned=scan.scanned + len(contents.ignored),
            warnings=(*contents.warnings(self.root), *scan.warnings),
        )

    def read(self, ref: SampleRef, max_pixels: int) -> bytes:
        """The content of the member."""
        assert self.archive is not None, "only a source that a scan gave is read"
        return self.archive.picture(self.where(ref), ref.place, ref.bytes, max_pixels)

    def where(self, ref: SampleRef) -> str:
        """The archive's path, and the member's name."""
        return os.path.join(self.root, self.prefix, ref.path)
