"""A source whose pictures have masks: in a tree, PHOTOS/cat/1.jpg and MASKS/cat/1.png, or in a table."""

import hashlib
import os
import stat
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from PIL import Image

from precache.dataset.columns import Column, Ints
from precache.errors import ImageError, SettingError, SourceError
from precache.pictures import masks
from precache.pictures.images import Rendering
from precache.pictures.jpeg import Pixels
from precache.pictures.reading import read_picture, steadily
from precache.sources.base import SampleRef, Scan, Source
from precache.storage.urls import Location

ReadMask: TypeAlias = Callable[[SampleRef, int], tuple[bytes | Image.Image, str]]
"""(sample, most pixels) -> its mask, and the mask's name in messages; ImageError where there is none."""
EXTENSIONS = (".png", ".tif", ".tiff", ".bmp", ".gif")


def reader_of(source: Source) -> ReadMask | None:
    """How masks are read from a source; None where it has none."""
    read: ReadMask | None = getattr(source, "read_mask", None)
    return read


def render_mask(source: Source, ref: SampleRef, size: tuple[int, int], how: Rendering) -> Pixels | None:
    """What is stored of the mask of a picture, see `masks.render`; None where the source has no masks.

    Args:
        size: width and height of the upright picture.

    Raises:
        ImageError: there is none for this picture, or none that fits it.
        SourceError: it cannot be read, or there is not enough memory.
    """
    read = reader_of(source)
    if read is None:
        return None
    data, name = read(ref, how.max_pixels)
    return masks.render(data, source.where(ref), name, size, how)


@dataclass(frozen=True, slots=True)
class MaskTree:
    """`source`, and the masks of its pictures in `folder`, under the same paths but for the extension."""

    source: Source
    folder: Path

    @property
    def root(self) -> Location:
        """The root of the pictures."""
        return self.source.root

    @property
    def paths(self) -> tuple[Location, ...]:
        """The paths of the pictures, and the folder of the masks."""
        return (*self.source.paths, self.folder)

    def scan(self) -> Scan:
        """Of the pictures; its digest is that of paths and sizes of the masks, too."""
        if not self.folder.is_dir():
            raise SourceError(
                f"{os.path.abspath(self.folder)}: no folder of masks; name it with --mask (a path that is "
                f"not absolute begins in the folder where the command runs)"
            )
        if os.path.realpath(self.folder) == os.path.realpath(str(self.source.root)):
            raise SourceError(f"{self.folder}: is the folder of the pictures; name that of their masks")
        return self._with_masks(self.source.scan())

    def _with_masks(self, scan: Scan) -> Scan:
        """The scan of the pictures, with what the masks are."""
        digest = hashlib.sha256(scan.digest.encode())
        found = 0
        for ref in scan.samples:
            path, status = self._find(ref)
            found += status is not None
            digest.update(os.fsencode(path) + b"\0%d\0" % (-1 if status is None else status.st_size))
        if not found:
            first = os.path.join(self.folder, self._find(scan.samples[0])[0])
            raise SourceError(f"{self.root}: none of its pictures has a mask; the first would be {first}")
        return replace(scan, source=replace(self, source=scan.source), digest=digest.hexdigest())

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        return self.source.read(ref, max_pixels)

    def where(self, ref: SampleRef) -> str:
        return self.source.where(ref)

    def read_mask(self, ref: SampleRef, max_pixels: int) -> tuple[bytes, str]:
        """The file of the mask, and its name in the folder.

        Raises:
            ImageError: there is none.
            SourceError: it cannot be read.
        """
        name, status = self._find(ref)
        if status is None:
            raise ImageError(self.where(ref), f"has no mask {os.path.join(self.folder, name)}")
        return read_picture(os.path.join(self.folder, name), max_pixels), name

    def _find(self, ref: SampleRef) -> tuple[str, os.stat_result | None]:
        """Name of the mask in the folder, and its status; the name that is tried first, if there is none."""
        stem = os.path.splitext(ref.path)[0]
        for extension in () if os.path.isabs(stem) else EXTENSIONS:  # that would be the picture itself
            path = os.path.join(self.folder, stem + extension)
            if (status := steadily(partial(_status, path), path)) is not None:
                return stem + extension, status
        return stem + EXTENSIONS[0], None


@dataclass(frozen=True, slots=True)
class MaskColumn(MaskTree):
    """A table with a column of paths of masks, relative to `folder` as those of its pictures are.

    Attributes:
        column: its name.
        is_field: whether the column is a field, too.
        names: its values, once it is scanned: a sample's `place` is its row here.
        places: int64 [n], of the samples in the table.
    """

    column: str = ""
    is_field: bool = False
    names: Column | None = None
    places: Ints | None = None

    @property
    def paths(self) -> tuple[Location, ...]:
        """The paths of the table, and the folder of the masks."""
        return self.source.paths

    def scan(self) -> Scan:
        """See `MaskTree.scan`."""
        scan = self.source.scan()
        names = scan.samples.fields[self.column]
        if names.kind != "text":
            raise SettingError(f"--mask {self.column}: expected paths of masks in {self.root}, got numbers")
        samples = copy(scan.samples)
        samples.fields = {
            name: column for name, column in samples.fields.items() if name != self.column or self.is_field
        }
        samples.places = np.arange(len(samples))
        masked = replace(self, names=names, places=scan.samples.places)
        return masked._with_masks(replace(scan, samples=samples))

    def read(self, ref: SampleRef, max_pixels: int) -> bytes | Image.Image:
        return self.source.read(self._in_table(ref), max_pixels)

    def where(self, ref: SampleRef) -> str:
        return self.source.where(self._in_table(ref))

    def _in_table(self, ref: SampleRef) -> SampleRef:
        assert self.places is not None
        return replace(ref, place=int(self.places[ref.place]))

    def _find(self, ref: SampleRef) -> tuple[str, os.stat_result | None]:
        assert self.names is not None
        name = str(self.names.value(ref.place))
        path = os.path.join(self.folder, name)
        status = steadily(partial(_status, path), path)
        return name, status if status is not None and stat.S_ISREG(status.st_mode) else None


def _status(path: str) -> os.stat_result | None:
    """Status of the file; None where there is none."""
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
